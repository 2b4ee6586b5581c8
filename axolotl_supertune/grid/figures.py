"""Findings as figures, PNG and SVG; the same findings give the same files."""

import io
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .findings import METRICS, Findings, Result, accuracies
from .runs import Run
from .statistics import CONFIDENCE, Spread, spread

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORMATS = ("png", "svg")
_STYLES = ("-", "--", ":", "-.")


def figures(found: Findings) -> "dict[str, Figure]":
    """All figures that the findings allow, by name."""
    made = {"curves": curves(found), "learning_rates": learning_rates(found)}
    if any(_accuracy(result) for result in found.results):
        made["cost"] = cost(found)
    if found.comparisons:
        made["differences"] = differences(found)
    return made


def render(figure: "Figure", name: str, kind: str) -> bytes:
    """The bytes of a PNG or SVG file, without dates, versions and random names."""
    import matplotlib

    metadata: dict[str, Any] = {"Software": None} if kind == "png" else {"Date": None, "Creator": None}
    file = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": name, "svg.fonttype": "none"}):
        figure.savefig(file, format=kind, dpi=150, metadata=metadata)
    return file.getvalue()


def curves(found: Findings) -> "Figure":
    """Training and validation loss of each method at its chosen rate, every seed a line.

    Validation before the first step is left out where there are two later ones: what follows would be a flat line.
    """
    figure, panels = _figure(1, 2, height=4.5)
    panels[0].set(title="training loss", xlabel="step", ylabel="nats a token")
    panels[1].set(title="validation NLL", xlabel="step")
    for result, style in _styled(found):
        for at, run in enumerate(result.runs.values()):
            label = found.name(result.method, result.epochs) if at == 0 else None
            later = run.eval_losses[1 if len(run.eval_losses) > 2 and run.eval_losses[0][0] == 0 else 0 :]
            for panel, points in zip(panels, (run.losses, later), strict=True):
                panel.plot(
                    *_columns(points), label=label, linewidth=1, marker="." if len(points) < 3 else None, **style
                )
    return _with_legend(figure, panels[1])


def learning_rates(found: Findings) -> "Figure":
    """Validation NLL against learning rate, chosen rates ringed; what is worse than no training lies above the top."""
    figure, (panel,) = _figure(1, 1, height=4.5)
    panel.set(xscale="log", xlabel="learning rate", ylabel="validation NLL, nats a token")
    base = found.base_validation_nll
    for result, style in _styled(found):
        choice = result.choice
        means: dict[float, Spread | None] = {}
        for rate in choice.tried:
            means[rate] = spread([v for run in found.runs if _tried(run, result, rate) and (v := run.validation_nll)])
        points = [(rate, mean.mean) for rate, mean in means.items() if mean is not None]
        panel.plot(*_columns(points), label=found.name(result.method, result.epochs), marker=".", linewidth=1, **style)
        ring = {"marker": "o", "markersize": 9, "fillstyle": "none", "color": style["color"]}
        panel.plot([choice.learning_rate], [means[choice.learning_rate].mean], **ring)  # type: ignore[union-attr]
    lowest = min(result.choice.validation_nll for result in found.results)
    if base is not None and panel.get_ylim()[1] > base > lowest:
        margin = 0.05 * (base - lowest)
        panel.set_ylim(lowest - margin, base + margin)
        panel.axhline(base, color="black", linewidth=0.8, linestyle=":")
        panel.annotate(" before training", (0, base), xycoords=("axes fraction", "data"), va="bottom", fontsize=7)
    return _with_legend(figure, panel)


def cost(found: Findings) -> "Figure":
    """Mean accuracy against training time and against peak memory, means over seeds."""
    figure, panels = _figure(1, 2, height=4.5)
    shared = any(run.jobs_per_gpu > 1 for result in found.results for run in result.runs.values())
    panels[0].set(xlabel="training, s" + (" (devices were shared: not comparable)" if shared else ""))
    panels[1].set(xlabel="peak memory of the process, GiB")
    panels[0].set_ylabel("mean accuracy, %")
    costs: tuple[Callable[[Run], float | None], ...] = (lambda run: run.train_seconds, lambda run: run.peak_memory_gib)
    for result, style in _styled(found):
        accuracy = _accuracy(result)
        if accuracy is None:
            continue
        for panel, value in zip(panels, costs, strict=True):
            x = result.over_seeds(value)
            if x is not None:
                panel.errorbar(
                    [x.mean],
                    [100 * accuracy.mean],
                    xerr=x.deviation,
                    yerr=100 * accuracy.deviation if accuracy.deviation is not None else None,
                    label=found.name(result.method, result.epochs),
                    marker="o",
                    linestyle="none",
                    elinewidth=0.8,
                    fillstyle="full" if style["linestyle"] == "-" else "none",
                    color=style["color"],
                )
    for panel in panels:
        if not panel.has_data():
            panel.text(0.5, 0.5, "not measured", transform=panel.transAxes, ha="center")
    return _with_legend(figure, next((panel for panel in panels if panel.has_data()), panels[0]))


def differences(found: Findings) -> "Figure":
    """A forest plot: each method's difference to the reference, with its interval."""
    shown = [metric for metric in METRICS if any(each.metric is metric for each in found.comparisons)]
    results = [r for r in found.results if any(each.result is r for each in found.comparisons)]
    figure, panels = _figure(1, len(shown), height=1.6 + 0.3 * len(results), sharey=True)
    for panel, metric in zip(panels, shown, strict=True):
        panel.axvline(0, color="black", linewidth=0.8)
        arrow = "more is better" if metric.higher_is_better else "less is better"
        panel.set_title(f"{metric.title}: {arrow}", fontsize=8)
        for each in found.comparisons:
            if each.metric is metric:
                middle, low, high = (
                    metric.unit * x for x in (each.interval.difference, each.interval.low, each.interval.high)
                )
                color = {"better": "#2a7f3f", "worse": "#b5332c"}.get(each.verdict, "#777777")
                row = results.index(each.result)
                panel.plot([low, high], [row, row], color=color, linewidth=1.5, solid_capstyle="butt")
                filled = "none" if each.doubts else "full"
                panel.plot([middle], [row], color=color, marker="o", markersize=5, fillstyle=filled)
        panel.spines[["top", "right"]].set_visible(False)
    panels[0].set_yticks(range(len(results)), [found.name(result.method, result.epochs) for result in results])
    panels[0].invert_yaxis()
    title = f"Differences to {found.reference}, {CONFIDENCE:.0%} intervals over items; hollow: doubtful, see the table"
    figure.suptitle(title, fontsize=10)
    return figure


def _figure(rows: int, columns: int, height: float, **shared: Any) -> "tuple[Figure, list[Any]]":
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, list(figure.subplots(rows, columns, squeeze=False, **shared)[0])


def _with_legend(figure: "Figure", panel: Any) -> "Figure":
    handles, labels = panel.get_legend_handles_labels()
    if handles:
        figure.legend(handles, labels, loc="outside right center", fontsize=7, frameon=False)
    return figure


def _styled(found: Findings) -> list[tuple[Result, dict[str, Any]]]:
    """Each method in a colour and line style of its own; the reference is black."""
    from matplotlib import colormaps

    colors = colormaps["tab10"].colors  # type: ignore[attr-defined]
    styled, at = [], 0
    for result in sorted(found.results, key=lambda each: (each.method, each.epochs)):
        if result.method == found.reference:
            styled.append((result, {"color": "black", "linestyle": "-"}))
        else:
            styled.append((result, {"color": colors[at % 10], "linestyle": _STYLES[at // 10 % len(_STYLES)]}))
            at += 1
    return styled


def _tried(run: Run, result: Result, rate: float) -> bool:
    key, choice = run.key, result.choice
    same = (key.method, key.epochs, key.learning_rate) == (choice.method, choice.epochs, rate)
    return same and run.status == "done" and key.seed in choice.seeds


def _accuracy(result: Result) -> Spread | None:
    return spread(accuracies(list(result.scores.values())).get("mean", ()))


def _columns(points: list[tuple[Any, float]]) -> tuple[list[Any], list[float]]:
    return [x for x, _ in points], [y for _, y in points]
