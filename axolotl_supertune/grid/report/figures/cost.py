"""The figure `cost`: mean accuracy against training time and against peak memory."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ...run_files import Run
from ..comparisons import Result
from ..findings import GridFindings
from ..metrics import accuracies
from ..statistics import Spread, spread
from .style import Style, draw_legend, draw_panels, styles

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Scored = tuple[Result, Spread]


def cost(findings: GridFindings) -> "Figure":
    """Means over seeds; a row per number of epochs. The legend tells the markers."""
    scored = [(result, accuracy) for result in findings.results if (accuracy := mean_accuracy(result))]
    epochs = sorted({result.epochs for result, _ in scored})
    figure, rows = draw_panels(len(epochs), 2, 4.8 * len(epochs), sharex="col", sharey=True)
    is_shared = any(run.jobs_per_gpu > 1 for result, _ in scored for run in result.runs.values())
    rows[-1, 0].set_xlabel("training, s" + (" (devices were shared: not comparable)" if is_shared else ""))
    rows[-1, 1].set_xlabel("peak memory of the process, GiB")
    looks = styles(findings)
    for number, panels in zip(epochs, rows, strict=True):
        of_epochs = [(result, accuracy) for result, accuracy in scored if result.epochs == number]
        panels[0].set_ylabel("mean accuracy, %")
        _draw_points(panels[0], of_epochs, lambda run: run.train_seconds, findings, looks)
        _draw_points(panels[1], of_epochs, lambda run: run.peak_memory_gib, findings, looks)
        draw_legend(panels)
    figure.supxlabel(
        "Filled: accuracy of several seeds, hollow: of one. Bars: standard deviation over seeds.", fontsize=8
    )
    return figure


def mean_accuracy(result: Result) -> Spread | None:
    """Mean accuracy over the benchmarks by the published rule, as a share; None without scores."""
    return spread(accuracies(list(result.scores.values())).get("mean", ()))


def _draw_points(
    panel: Any,
    scored: Sequence[Scored],
    value: Callable[[Run], float | None],
    findings: GridFindings,
    looks: dict[tuple[str, float], Style],
) -> None:
    """Draw one point per method whose runs have the value."""
    measured = [(result, x, y) for result, y in scored if (x := result.over_seeds(value)) is not None]
    for result, x, accuracy in measured:
        style, y = looks[result.method, result.epochs], 100 * accuracy.mean
        bars = {"xerr": x.deviation, "yerr": accuracy.deviation and 100 * accuracy.deviation}
        panel.errorbar([x.mean], [y], **bars, fmt="none", ecolor=style.color, elinewidth=0.8, alpha=0.4)
        panel.plot(
            [x.mean],
            [y],
            label=findings.label(result.method, result.epochs),
            color=style.color,
            fillstyle="full" if accuracy.count > 1 else "none",
            marker=style.marker,
            markersize=9 if style.marker == "*" else 6,
            linestyle="none",
        )
    if not measured:
        panel.text(0.5, 0.5, "not measured", transform=panel.transAxes, ha="center")
