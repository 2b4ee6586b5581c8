"""The figure `curves`: training and validation loss of each method at its chosen rate."""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from ...run_files import Run
from ..comparisons import Result
from ..findings import GridFindings
from ..statistics import Array
from .style import draw_legend, draw_panels, explain_grey, groups, lines_of_panel, with_margin

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Points = list[tuple[int, float]]
Curve = tuple[Array, Array]


def curves(findings: GridFindings) -> "Figure":
    """Means over seeds, with the range over seeds as a band; a row per group of methods, all others in grey.

    The training loss is a running mean. The validation loss before the first step is left out if there are at least
    two later ones: beside it the rest would be a flat line.
    """
    rows = groups(findings)
    figure, panels = draw_panels(
        len(rows), 2, 4.0 if len(rows) == 1 else 0.6 + 1.6 * len(rows), sharex=True, sharey="col"
    )
    panels[0, 0].set_title("training loss, nats a token (running mean over a tenth of the steps)", fontsize=9)
    panels[0, 1].set_title("validation NLL, nats a token (beside the names: at the end)", fontsize=9)
    curves_of = {
        (result.method, result.epochs): [_over_seeds(result, points) for points in (_smooth_losses, _later_evaluations)]
        for result in findings.results
    }
    for group, row in zip(rows, panels, strict=True):
        for result, style in lines_of_panel(findings, group):
            for panel, curve in zip(row, curves_of[result.method, result.epochs], strict=True):
                if curve is not None:
                    _draw_curve(panel, curve, style)
        draw_legend(row[1:], group.title)
    for panel in panels[-1]:
        panel.set_xlabel("step")
    figure.supxlabel("Means over seeds; band: from the lowest seed to the highest." + explain_grey(rows), fontsize=8)
    _limit_training_axis(panels[0, 0], [training for training, _ in curves_of.values() if training is not None])
    return figure


def _draw_curve(panel: Any, curve: Curve, style: dict[str, Any]) -> None:
    """Draw a method's mean, and if it has a label also its range over seeds and its last value in the label."""
    steps, values = curve
    arguments = dict(style)
    if "label" in style:
        arguments["label"] += f"  {values[-1].mean():.3f}"
    if len(steps) > 10:
        arguments["marker"] = None
    panel.plot(steps, values.mean(1), **arguments)
    if "label" in style and values.shape[1] > 1:
        panel.fill_between(steps, values.min(1), values.max(1), color=style["color"], alpha=0.15, linewidth=0)


def _limit_training_axis(panel: Any, training: list[Curve]) -> None:
    """Limit the axis to the last nine tenths of the steps: the first ones fall from far above the differences."""
    if not training:
        panel.text(0.5, 0.5, "not logged", transform=panel.transAxes, ha="center")
        return
    means = [values.mean(1) for _, values in training]
    late = [mean[len(mean) // 10 :] for mean in means]
    panel.set_ylim(*with_margin(min(min(mean) for mean in late), max(max(mean) for mean in late)))


def _over_seeds(result: Result, points: Callable[[Run], Points]) -> Curve | None:
    """Steps, (steps,), and values, (steps, seeds), of all runs with points; None without any.

    Runs with other steps are interpolated at those of the longest.
    """
    lines = [np.array(line, dtype=np.float64).T for run in result.runs.values() if (line := points(run))]
    if not lines:
        return None
    steps = max((line[0] for line in lines), key=len)
    return steps, np.stack([np.interp(steps, *line) for line in lines], axis=1)


def _smooth_losses(run: Run) -> Points:
    """Centred running mean of the finite losses over a tenth of them; the losses themselves if there are few."""
    finite = [point for point in run.losses if math.isfinite(point[1])]
    half = len(finite) // 20
    return [
        (finite[at][0], float(np.mean([loss for _, loss in finite[at - half : at + half + 1]])))
        for at in range(half, len(finite) - half)
    ]


def _later_evaluations(run: Run) -> Points:
    """Finite validation NLLs, without that of step 0 if there are at least two later ones."""
    skips_first = len(run.eval_losses) > 2 and run.eval_losses[0][0] == 0
    return [point for point in run.eval_losses[skips_first:] if math.isfinite(point[1])]
