"""What the figures of a report share: panels and their methods, each method's look, legends."""

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING, Any

from ..comparisons import Result
from ..findings import GridFindings

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Okabe and Ito's colours, which differ for any colour vision, without black (the reference's) and yellow (too faint).
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
MARKERS = "osD^vPX<>pdh8"
LINES: tuple[Any, ...] = ("-", "--", ":", "-.")
# Methods in one panel beside the reference: one per colour.
MAX_METHODS = len(COLORS)


@dataclass(frozen=True)
class Style:
    """A method's look: the colour is unique in its panel, the marker tells the panel, the line the number of epochs."""

    color: str
    marker: str
    line: Any


@dataclass(frozen=True)
class Group:
    """The methods of one panel, without the reference, sorted.

    title: the family's name; "" if the group has all methods.
    """

    title: str
    methods: tuple[str, ...]


def families(methods: Collection[str]) -> dict[str, str]:
    """The family of each method, by its name; "" without a family.

    Names that differ only in a number at their end are a family (supra-mag-0.3, supra-mag-0.8); of the others, those
    with the same first word are (super-top, super-random).
    """
    stems = {method: re.sub(r"[-_]?[\d.]+$", "", method) for method in methods}
    stem_counts = Counter(stems.values())
    names = {method: stem if stem_counts[stem] > 1 else re.split("[-_]", method)[0] for method, stem in stems.items()}
    sizes = Counter(names.values())
    return {method: name if sizes[name] > 1 else "" for method, name in names.items()}


def groups(findings: GridFindings) -> list[Group]:
    """All methods but the reference by panel: one group of at most MAX_METHODS, or parts of families of that size."""
    methods = sorted({result.method for result in findings.results} - {findings.reference})
    if len(methods) <= MAX_METHODS:
        return [Group("", tuple(methods))]
    family_of = families(methods)
    made = []
    for family in sorted(set(family_of.values())):
        members = [method for method in methods if family_of[method] == family]
        size = ceil(len(members) / ceil(len(members) / MAX_METHODS))
        parts = [members[start : start + size] for start in range(0, len(members), size)]
        made += [Group(family or "others", tuple(part)) for part in parts]
    return made


def styles(findings: GridFindings) -> dict[tuple[str, float], Style]:
    """Styles by (method, epochs), unique for up to 13 panels and 4 numbers of epochs. The reference is black."""
    epochs = sorted({result.epochs for result in findings.results})
    looks = {findings.reference: ("black", "*")}
    for at, group in enumerate(groups(findings)):
        looks |= {method: (COLORS[color], MARKERS[at % len(MARKERS)]) for color, method in enumerate(group.methods)}
    return {
        (result.method, result.epochs): Style(*looks[result.method], LINES[epochs.index(result.epochs) % len(LINES)])
        for result in findings.results
    }


def lines_of_panel(findings: GridFindings, group: Group) -> Iterator[tuple[Result, dict[str, Any]]]:
    """The results that a panel of lines shows, with matplotlib's arguments for their lines.

    First the methods of other panels, grey and without a label; then the reference and the group's own methods, in
    the order of the findings.
    """
    own = {*group.methods, findings.reference}
    looks = styles(findings)
    for result in findings.results:
        if result.method not in own:
            yield result, {"color": "0.82", "linewidth": 0.6, "zorder": 1}
    for result in findings.results:
        if result.method in own:
            style = looks[result.method, result.epochs]
            arguments = {
                "label": findings.label(result.method, result.epochs),
                "color": style.color,
                "linestyle": style.line,
                "marker": style.marker,
                "markersize": 7 if style.marker == "*" else 4,
                "linewidth": 1.2,
                "zorder": 3,
            }
            yield result, arguments


def draw_panels(rows: int, columns: int, height: float, **shared: Any) -> "tuple[Figure, Any]":
    """A figure 11 inches wide and `height` inches high, and its Axes, (rows, columns)."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, height), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(rows, columns, squeeze=False, **shared)
    for panel in panels.flat:
        panel.tick_params(labelsize=8)
    return figure, panels


def draw_legend(panels: Iterable[Any], title: str = "") -> None:
    """Draw one legend of all labels to the right of a row of panels."""
    handles_by_label: dict[str, Any] = {}
    for panel in panels:
        handles, labels = panel.get_legend_handles_labels()
        handles_by_label |= dict(zip(labels, handles, strict=True))
    panel.legend(
        handles_by_label.values(),
        handles_by_label.keys(),
        title=title or None,
        alignment="left",
        loc="center left",
        bbox_to_anchor=(1.0, 0.5),
        fontsize=7,
        title_fontsize=8,
        frameon=False,
        handlelength=3,
    )


def explain_grey(shown: Sequence[Group]) -> str:
    """The caption's sentence on grey lines; "" if there are none."""
    return " Grey: the methods of the other panels." if len(shown) > 1 else ""


def with_margin(low: float, high: float) -> tuple[float, float]:
    """Limits of an axis that shows low to high with 5 % of space at either end."""
    margin = 0.05 * (high - low) or 0.05
    return low - margin, high + margin
