"""The figure `learning_rates`: validation NLL against learning rate."""

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from ...run_files import Run
from ..comparisons import Result
from ..findings import GridFindings
from ..formatting import short_rate
from ..statistics import spread
from .style import Group, draw_legend, draw_panels, explain_grey, groups, lines_of_panel, with_margin

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# More means above the axis than this are counted in the caption instead of named.
_MAX_NAMED = 8


def learning_rates(findings: GridFindings) -> "Figure":
    """Mean validation NLL by rate, chosen rates ringed; a panel per group of methods, all others in grey.

    Means far above the rest, or no better than the model before training, are triangles at the upper edge and named in
    the caption.
    """
    shown = groups(findings)
    columns = 1 if len(shown) == 1 else 2
    rows = math.ceil(len(shown) / columns)
    figure, grid = draw_panels(rows, columns, 4.5 if len(shown) == 1 else 0.8 + 2.2 * rows, sharex=True, sharey=True)
    panels = list(grid.flat)
    data = _RateMeans(findings)
    _set_axes(panels[0], data)
    for group, panel in zip(shown, panels, strict=False):
        _draw_group(panel, group, data)
    for panel in panels[len(shown) :]:
        panel.set_visible(False)
    for panel in panels[max(0, len(shown) - columns) : len(shown)]:
        panel.tick_params(axis="x", labelbottom=True, rotation=0 if len(data.rates) <= 5 else 60)
        panel.set_xlabel("learning rate")
    figure.supxlabel(textwrap.fill(_caption(shown, data), 170, break_on_hyphens=False), fontsize=8)
    return figure


@dataclass(frozen=True)
class _RateMeans:
    """Mean validation NLLs by rate, and the part of them that the axis shows."""

    findings: GridFindings

    @cached_property
    def means(self) -> dict[tuple[str, float], dict[float, float]]:
        """Mean NLL by (method, epochs) and rate; not finite where a seed diverged."""
        return {(result.method, result.epochs): _by_rate(self.findings, result) for result in self.findings.results}

    @property
    def base(self) -> float | None:
        """Validation NLL before training."""
        return self.findings.base_validation_nll

    @cached_property
    def rates(self) -> list[float]:
        """All rates, ascending."""
        return sorted({rate for line in self.means.values() for rate in line})

    @cached_property
    def top(self) -> float:
        """The largest mean that the axis shows.

        It lies at most four times as far above the median as the lowest mean lies below, so that the better half gets
        at least a fifth of the axis, and below the NLL before training; but every chosen mean is shown.
        """
        finite = [nll for line in self.means.values() for nll in line.values() if math.isfinite(nll)]
        median = float(np.median(finite))
        limit = median + 4 * (median - min(finite))
        base = math.inf if self.base is None else self.base
        return max([*self._chosen, *(nll for nll in finite if nll <= limit and nll < base)])

    @property
    def _chosen(self) -> list[float]:
        return [result.choice.validation_nll for result in self.findings.results]

    @cached_property
    def axis(self) -> tuple[float, float]:
        """Limits of the axis of NLLs."""
        lowest = min(self._chosen if self.base is None else [*self._chosen, self.base])
        return with_margin(lowest, self.top)


def _by_rate(findings: GridFindings, result: Result) -> dict[float, float]:
    """A method's mean validation NLL by rate, on the seeds on which its rate was chosen."""
    means = {
        rate: spread(
            [nll for run in findings.runs if _was_tried(run, result, rate) and (nll := run.validation_nll) is not None]
        )
        for rate in result.choice.tried
    }
    return {rate: mean.mean for rate, mean in means.items() if mean is not None}


def _was_tried(run: Run, result: Result, rate: float) -> bool:
    key, choice = run.key, result.choice
    is_same = (key.method, key.epochs, key.learning_rate) == (choice.method, choice.epochs, rate)
    return is_same and run.status == "done" and key.seed in choice.seeds


def _set_axes(panel: Any, data: _RateMeans) -> None:
    """Set both axes of all panels, which share them."""
    rates = data.rates
    margin = (rates[-1] / rates[0]) ** 0.06 if len(rates) > 1 else 2
    panel.set(xscale="log", xlim=(rates[0] / margin, rates[-1] * margin), ylim=data.axis)
    panel.set_xticks(rates, [short_rate(rate) for rate in rates])
    panel.set_xticks([], minor=True)


def _draw_group(panel: Any, group: Group, data: _RateMeans) -> None:
    """Draw one panel: its own methods over those of the others, and the NLL before training."""
    panel.set_ylabel("validation NLL, nats a token", fontsize=8)
    panel.grid(axis="x", color="0.92", zorder=0)
    names = [data.findings.reference, *group.methods]
    for result, style in lines_of_panel(data.findings, group):
        means = data.means[result.method, result.epochs]
        if "label" in style:
            # Beside each other: at equal rates the markers would hide one another.
            style["transform"] = _shifted(panel, 2 * (names.index(result.method) - (len(names) - 1) / 2))
            _draw_method(panel, result, means, style, data)
        else:
            panel.plot(list(means), _clipped(means, data), **style)
    if data.base is not None and data.base <= data.top:
        panel.axhline(data.base, color="black", linewidth=0.8, linestyle=":")
        panel.annotate(" before training", (0, data.base), xycoords=("axes fraction", "data"), va="bottom", fontsize=7)
    draw_legend([panel], group.title)


def _draw_method(
    panel: Any, result: Result, means: dict[float, float], style: dict[str, Any], data: _RateMeans
) -> None:
    """Draw a method's line, triangles for its means above the axis, and a ring around the chosen rate."""
    choice, edge = result.choice, data.axis[1]
    style["label"] += f"  {short_rate(choice.learning_rate)}"
    panel.plot(list(means), _clipped(means, data), **style)
    marks = {**style, "label": None, "linestyle": "none", "clip_on": False}
    if above := [rate for rate, nll in means.items() if not nll <= data.top]:
        panel.plot(above, [edge] * len(above), **{**marks, "marker": "^", "markersize": 7})
    ring = {"marker": "o", "markersize": 10, "fillstyle": "none"}
    panel.plot([choice.learning_rate], [choice.validation_nll], **{**marks, **ring})


def _clipped(means: dict[float, float], data: _RateMeans) -> list[float]:
    """Means, with the upper edge of the axis for those above it and for NaN."""
    return [nll if nll <= data.top else data.axis[1] for nll in means.values()]


def _shifted(panel: Any, points: float) -> Any:
    """The panel's data coordinates, shifted to the right by typographic points."""
    from matplotlib.transforms import ScaledTranslation

    return panel.transData + ScaledTranslation(points / 72, 0, panel.figure.dpi_scale_trans)


def _caption(shown: Sequence[Group], data: _RateMeans) -> str:
    text = "Ring, and beside the names: the chosen rate. Methods stand side by side at each rate." + explain_grey(shown)
    text += _explain_triangles(data)
    if data.base is not None and data.base > data.top:
        text += f" Before training: {data.base:.2f}, above the axis."
    return text


def _explain_triangles(data: _RateMeans) -> str:
    """The caption's sentence on means above the axis; "" if there are none."""
    above = [
        (key, rate, nll) for key, means in data.means.items() for rate, nll in means.items() if not nll <= data.top
    ]
    if not above:
        return ""
    if len(above) > _MAX_NAMED:
        return f" Triangles: {len(above)} means above the axis or diverged, see the table of learning rates."
    names = [
        f"{data.findings.label(*key)} at {short_rate(rate)} ({f'{nll:.2f}' if math.isfinite(nll) else 'diverged'})"
        for key, rate, nll in above
    ]
    return f" Triangle, above the axis: {', '.join(names)}."
