"""The figure `differences`: a forest plot of the differences to the reference."""

from typing import TYPE_CHECKING

from ..findings import GridFindings
from ..metrics import METRICS
from ..statistics import CONFIDENCE
from .style import COLORS, draw_panels

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_VERDICT_COLORS = {"better": COLORS[0], "worse": COLORS[1]}


def differences(findings: GridFindings) -> "Figure":
    """A panel per metric, a row per method: its difference to the reference with the interval."""
    metrics = [metric for metric in METRICS if any(each.metric is metric for each in findings.comparisons)]
    results = [r for r in findings.results if any(each.result is r for each in findings.comparisons)]
    figure, (panels,) = draw_panels(1, len(metrics), 1.2 + 0.22 * len(results), sharey=True)
    for panel, metric in zip(panels, metrics, strict=True):
        panel.axvline(0, color="black", linewidth=0.8)
        direction = "more is better" if metric.higher_is_better else "less is better"
        panel.set_title(f"{metric.title}: {direction}", fontsize=8)
        for comparison in findings.comparisons:
            if comparison.metric is not metric:
                continue
            interval, row = comparison.interval, results.index(comparison.result)
            difference, low, high = (metric.unit * x for x in (interval.difference, interval.low, interval.high))
            color = _VERDICT_COLORS.get(comparison.verdict, "#777777")
            panel.plot([low, high], [row, row], color=color, linewidth=1.5, solid_capstyle="butt")
            fill = "none" if comparison.doubts else "full"
            panel.plot([difference], [row], color=color, marker="o", markersize=5, fillstyle=fill)
        panel.spines[["top", "right"]].set_visible(False)
        panel.locator_params(axis="x", nbins=5)
    panels[0].set_yticks(range(len(results)), [findings.label(result.method, result.epochs) for result in results])
    panels[0].set_ylim(len(results) - 0.4, -0.6)
    figure.suptitle(
        f"Differences to {findings.reference}, {CONFIDENCE:.0%} intervals over items; "
        "blue: better, orange: worse, grey: no difference seen; hollow: doubtful, see the table",
        fontsize=10,
    )
    return figure
