"""What the figures of a report share: panels and who is in them, how each method is drawn, where names are written."""

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING, Any

import numpy as np

from ..comparisons import Result
from ..findings import Findings

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Okabe and Ito's, which people with any colour vision tell apart; black is the reference's, yellow too faint on white.
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
MARKERS = "osD^vPX<>pdh8"
LINES: tuple[Any, ...] = ("-", "--", ":", "-.")
# Methods in a panel, beside the reference: as many as there are colours.
CROWD = len(COLORS)


@dataclass(frozen=True)
class Style:
    """The colour tells a method from the others of its panel, the marker its panel, the line its number of epochs."""

    color: str
    marker: str
    line: Any


@dataclass(frozen=True)
class Group:
    """The methods of one panel, without the reference, sorted.

    title: what their names have in common; "" where they are all that there are.
    """

    title: str
    methods: tuple[str, ...]


def families(methods: Collection[str]) -> dict[str, str]:
    """By method what its name has in common with others; "" where nothing.

    Names that differ in a number at their end alone are a family (supra-mag-0.3, supra-mag-0.8), and so are, of the
    others, those of the same first word (super-top, super-random).
    """
    stems = {method: re.sub(r"[-_]?[\d.]+$", "", method) for method in methods}
    alike = Counter(stems.values())
    found = {method: stem if alike[stem] > 1 else re.split("[-_]", method)[0] for method, stem in stems.items()}
    sizes = Counter(found.values())
    return {method: family if sizes[family] > 1 else "" for method, family in found.items()}


def groups(found: Findings) -> list[Group]:
    """Every method but the reference in one group: few in a single one, many by family, none larger than CROWD."""
    methods = sorted({result.method for result in found.results} - {found.reference})
    if len(methods) <= CROWD:
        return [Group("", tuple(methods))]
    of = families(methods)
    made = []
    for family in sorted(set(of.values())):
        members = [method for method in methods if of[method] == family]
        size = ceil(len(members) / ceil(len(members) / CROWD))
        parts = [members[at : at + size] for at in range(0, len(members), size)]
        made += [Group(family or "others", tuple(part)) for part in parts]
    return made


def styles(found: Findings) -> dict[tuple[str, float], Style]:
    """By method and epochs; no two are the same in up to 13 panels and 4 numbers of epochs. The reference is black."""
    epochs = sorted({result.epochs for result in found.results})
    looks = {found.reference: ("black", "*")}
    for at, group in enumerate(groups(found)):
        looks |= {method: (COLORS[place], MARKERS[at % len(MARKERS)]) for place, method in enumerate(group.methods)}
    return {
        (result.method, result.epochs): Style(*looks[result.method], LINES[epochs.index(result.epochs) % len(LINES)])
        for result in found.results
    }


def styled(found: Findings, group: Group) -> Iterator[tuple[Result, dict[str, Any]]]:
    """What a panel of lines shows and how: first all other methods, grey and without a label, then the reference's and
    the group's own, in the order of the findings."""
    own = {*group.methods, found.reference}
    looks = styles(found)
    for result in found.results:
        if result.method not in own:
            yield result, {"color": "0.82", "linewidth": 0.6, "zorder": 1}
    for result in found.results:
        if result.method in own:
            style = looks[result.method, result.epochs]
            yield (
                result,
                {
                    "label": found.name(result.method, result.epochs),
                    "color": style.color,
                    "linestyle": style.line,
                    "marker": style.marker,
                    "markersize": 7 if style.marker == "*" else 4,
                    "linewidth": 1.2,
                    "zorder": 3,
                },
            )


def draw_panels(rows: int, columns: int, height: float, **shared: Any) -> "tuple[Figure, Any]":
    """A figure, `height` inches high, and its Axes, (rows, columns)."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, height), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(rows, columns, squeeze=False, **shared)
    for panel in panels.flat:
        panel.tick_params(labelsize=8)
    return figure, panels


def draw_legend(panels: Iterable[Any], title: str = "") -> None:
    """To the right of a row of panels: every name in them once."""
    named: dict[str, Any] = {}
    for panel in panels:
        handles, labels = panel.get_legend_handles_labels()
        named |= dict(zip(labels, handles, strict=True))
    panel.legend(
        named.values(),
        named.keys(),
        title=title or None,
        alignment="left",
        loc="center left",
        bbox_to_anchor=(1.0, 0.5),
        fontsize=7,
        title_fontsize=8,
        frameon=False,
        handlelength=3,
    )


def write_names(panel: Any, points: Sequence[tuple[float, float, str, str]]) -> None:
    """Write names beside their points, or further away with a line between, so that no name covers another or a point.

    Of the places for a name the nearest is taken whose line meets no other line and no other point, or, where there is
    none, the one whose line meets fewest. A name for which there is no room is left out: the legend has it.

    Args:
        panel: Axes of a figure that has everything else in its place.
        points: (x, y, name, colour).
    """
    from matplotlib.path import Path
    from matplotlib.transforms import Bbox

    figure = panel.figure
    figure.draw_without_rendering()
    point = figure.dpi / 72
    places = [panel.transData.transform((x, y)) for x, y, _, _ in points]
    markers = [Bbox.from_bounds(x - 4 * point, y - 4 * point, 8 * point, 8 * point) for x, y in places]
    names: list[Any] = []
    lines: list[Any] = []
    for at in sorted(range(len(points)), key=lambda at: (-places[at][1], places[at][0])):
        x, y, name, color = points[at]
        look = {"fontsize": 6.5, "color": color, "va": "center", "in_layout": False}
        sample = panel.text(x, y, name, **look)
        width, height = sample.get_window_extent().size
        sample.remove()
        # A line cannot keep clear of the markers that lie over its own point.
        apart = [marker for marker in markers if not marker.contains(*places[at])]
        best: tuple[int, tuple[int, int], Any, Any] | None = None
        for side, beside, above in _OFFSETS:
            near = places[at] + np.array([side * beside, above]) * point
            box = Bbox.from_bounds(near[0] - (width if side < 0 else 0), near[1] - height / 2, width, height)
            inside = all(panel.bbox.contains(*corner) for corner in (box.min, box.max))
            covers = any(box.overlaps(other) for other in markers + names)
            if not inside or covers or any(one.intersects_bbox(box, filled=False) for one in lines):
                continue
            line = None if beside == _NEAR else Path([places[at], near])
            met = 0
            if line is not None:
                if any(line.intersects_bbox(other, filled=False) for other in names):
                    continue
                met = sum(line.intersects_bbox(other, filled=False) for other in apart)
                met += sum(line.intersects_path(other, filled=False) for other in lines)
            if best is None or met < best[0]:
                best = met, (side * beside, above), line, box
            if not met:
                break
        if best is None:
            continue
        _, offset, line, box = best
        names.append(box)
        arrow = None
        if line is not None:
            lines.append(line)
            arrow = {"arrowstyle": "-", "lw": 0.4, "color": color, "shrinkA": 0, "shrinkB": 3}
            arrow["relpos"] = (0 if offset[0] > 0 else 1, 0.5)
        align = "left" if offset[0] > 0 else "right"
        panel.annotate(name, (x, y), offset, textcoords="offset points", ha=align, arrowprops=arrow, **look)


# In points: right or left, beside, above; of those beyond _NEAR the lowest first, for short lines.
_NEAR = 6
_OFFSETS = [(side, _NEAR, above) for above in (5, -5, 0) for side in (1, -1)] + [
    (side, beside, sign * above)
    for above in range(8, 100, 4)
    for beside in (10, 20, 30, 45, 60, 80, 100)
    for side in (1, -1)
    for sign in (1, -1)
]
