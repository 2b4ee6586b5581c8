"""Findings as figures, PNG and SVG; the same findings give the same files."""

import io
import math
import textwrap
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ...records import Run
from ..comparisons import METRICS, Result, accuracies
from ..findings import Findings, short_rate
from ..statistics import CONFIDENCE, Array, Spread, spread
from .styles import COLORS, Group, draw_legend, draw_panels, groups, styled, styles, write_names

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORMATS = ("png", "svg")


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
    """Training and validation loss of each method at its chosen rate: means over seeds, and their range as a band.

    A row a family of methods, all others in grey behind it. The training loss is a running mean. Validation before the
    first step is left out where there are two later ones: what follows would be a flat line.
    """
    rows = groups(found)
    figure, panels = draw_panels(
        len(rows), 2, 4.0 if len(rows) == 1 else 0.6 + 1.6 * len(rows), sharex=True, sharey="col"
    )
    panels[0, 0].set_title("training loss, nats a token (running mean over a tenth of the steps)", fontsize=9)
    panels[0, 1].set_title("validation NLL, nats a token (beside the names: at the end)", fontsize=9)
    lines = {
        (result.method, result.epochs): [_over_seeds(result, points) for points in (_smooth_losses, _later_evaluations)]
        for result in found.results
    }
    for group, row in zip(rows, panels, strict=True):
        for result, style in styled(found, group):
            for panel, line in zip(row, lines[result.method, result.epochs], strict=True):
                if line is None:
                    continue
                steps, values = line
                look = dict(style)
                if "label" in style:
                    look["label"] += f"  {values[-1].mean():.3f}"
                if len(steps) > 10:
                    look["marker"] = None
                panel.plot(steps, values.mean(1), **look)
                if "label" in style and values.shape[1] > 1:
                    band = {"color": style["color"], "alpha": 0.15, "linewidth": 0}
                    panel.fill_between(steps, values.min(1), values.max(1), **band)
        draw_legend(row[1:], group.title)
    for panel in panels[-1]:
        panel.set_xlabel("step")
    figure.supxlabel("Means over seeds; band: from the lowest seed to the highest." + _told_grey(rows), fontsize=8)
    training = [line[1].mean(1) for line, _ in lines.values() if line is not None]
    if training:
        # The first steps fall from far above what tells methods apart.
        low, high = (pick(pick(line[len(line) // 10 :]) for line in training) for pick in (min, max))
        panels[0, 0].set_ylim(*_with_margin(low, high))
    else:
        panels[0, 0].text(0.5, 0.5, "not logged", transform=panels[0, 0].transAxes, ha="center")
    return figure


def learning_rates(found: Findings) -> "Figure":
    """Validation NLL against learning rate, chosen rates ringed; a panel a family, all others in grey behind.

    What lies far above the rest, or is no better than no training, is a triangle at the upper edge and named below.
    """
    shown = groups(found)
    columns = 1 if len(shown) == 1 else 2
    rows = math.ceil(len(shown) / columns)
    figure, grid = draw_panels(rows, columns, 4.5 if len(shown) == 1 else 0.8 + 2.2 * rows, sharex=True, sharey=True)
    panels = list(grid.flat)
    means = {(result.method, result.epochs): _by_rate(found, result) for result in found.results}
    base = found.base_validation_nll
    chosen = [result.choice.validation_nll for result in found.results]
    top = _top([value for line in means.values() for value in line.values()], chosen, base)
    low, edge = _with_margin(min(chosen if base is None else [*chosen, base]), top)
    rates = sorted({rate for line in means.values() for rate in line})
    aside = (rates[-1] / rates[0]) ** 0.06 if len(rates) > 1 else 2
    panels[0].set(xscale="log", xlim=(rates[0] / aside, rates[-1] * aside), ylim=(low, edge))
    panels[0].set_xticks(rates, [short_rate(rate) for rate in rates])
    panels[0].set_xticks([], minor=True)
    for group, panel in zip(shown, panels, strict=False):
        panel.set_ylabel("validation NLL, nats a token", fontsize=8)
        panel.grid(axis="x", color="0.92", zorder=0)
        for result, style in styled(found, group):
            line = means[result.method, result.epochs]
            ys = [value if value <= top else edge for value in line.values()]
            if "label" not in style:
                panel.plot(list(line), ys, **style)
                continue
            # Methods side by side: at the same rates their markers would hide one another.
            names = [found.reference, *group.methods]
            style["transform"] = _shifted(panel, 2 * (names.index(result.method) - (len(names) - 1) / 2))
            style["label"] += f"  {short_rate(result.choice.learning_rate)}"
            panel.plot(list(line), ys, **style)
            bare = {**style, "label": None, "linestyle": "none", "clip_on": False}
            if above := [rate for rate, value in line.items() if not value <= top]:
                panel.plot(above, [edge] * len(above), **{**bare, "marker": "^", "markersize": 7})
            ring = {"marker": "o", "markersize": 10, "fillstyle": "none"}
            panel.plot([result.choice.learning_rate], [result.choice.validation_nll], **{**bare, **ring})
        if base is not None and base <= top:
            panel.axhline(base, color="black", linewidth=0.8, linestyle=":")
            panel.annotate(" before training", (0, base), xycoords=("axes fraction", "data"), va="bottom", fontsize=7)
        draw_legend([panel], group.title)
    for panel in panels[len(shown) :]:
        panel.set_visible(False)
    for panel in panels[max(0, len(shown) - columns) : len(shown)]:
        panel.tick_params(axis="x", labelbottom=True, rotation=0 if len(rates) <= 5 else 60)
        panel.set_xlabel("learning rate")
    note = "Ring, and beside the names: the chosen rate. Methods stand side by side at each rate." + _told_grey(shown)
    note += _told_above(found, means, top)
    if base is not None and base > top:
        note += f" Before training: {base:.2f}, above the axis."
    figure.supxlabel(textwrap.fill(note, 170, break_on_hyphens=False), fontsize=8)
    return figure


def cost(found: Findings) -> "Figure":
    """Mean accuracy against training time and against peak memory, means over seeds; a row a number of epochs."""
    drawn = [(result, accuracy) for result in found.results if (accuracy := _accuracy(result))]
    epochs = sorted({result.epochs for result, _ in drawn})
    figure, rows = draw_panels(len(epochs), 2, 4.8 * len(epochs), sharex="col", sharey=True)
    shared = any(run.jobs_per_gpu > 1 for result, _ in drawn for run in result.runs.values())
    rows[-1, 0].set_xlabel("training, s" + (" (devices were shared: not comparable)" if shared else ""))
    rows[-1, 1].set_xlabel("peak memory of the process, GiB")
    costs: tuple[Callable[[Run], float | None], ...] = (lambda run: run.train_seconds, lambda run: run.peak_memory_gib)
    looks, points = styles(found), []
    for row, panels in zip(epochs, rows, strict=True):
        panels[0].set_ylabel("mean accuracy, %")
        for panel, value in zip(panels, costs, strict=True):
            named = []
            for result, accuracy in drawn:
                x, style = result.over_seeds(value), looks[result.method, result.epochs]
                if x is None or result.epochs != row:
                    continue
                name, y = found.name(result.method, result.epochs), 100 * accuracy.mean
                bars = {"xerr": x.deviation, "yerr": accuracy.deviation and 100 * accuracy.deviation}
                panel.errorbar([x.mean], [y], **bars, fmt="none", ecolor=style.color, elinewidth=0.8, alpha=0.4)
                marks = {"marker": style.marker, "markersize": 9 if style.marker == "*" else 6, "linestyle": "none"}
                filled = "full" if accuracy.count > 1 else "none"
                panel.plot([x.mean], [y], label=name, color=style.color, fillstyle=filled, **marks)
                named.append((x.mean, y, name, style.color))
            if not named:
                panel.text(0.5, 0.5, "not measured", transform=panel.transAxes, ha="center")
            points.append((panel, named))
        draw_legend(panels)
    figure.supxlabel(
        "Filled: accuracy of several seeds, hollow: of one. Bars: standard deviation over seeds.", fontsize=8
    )
    for panel, named in points:
        write_names(panel, named)
    return figure


def differences(found: Findings) -> "Figure":
    """A forest plot: each method's difference to the reference, with its interval."""
    shown = [metric for metric in METRICS if any(each.metric is metric for each in found.comparisons)]
    results = [r for r in found.results if any(each.result is r for each in found.comparisons)]
    figure, (panels,) = draw_panels(1, len(shown), 1.2 + 0.22 * len(results), sharey=True)
    for panel, metric in zip(panels, shown, strict=True):
        panel.axvline(0, color="black", linewidth=0.8)
        arrow = "more is better" if metric.higher_is_better else "less is better"
        panel.set_title(f"{metric.title}: {arrow}", fontsize=8)
        for each in found.comparisons:
            if each.metric is metric:
                middle, low, high = (
                    metric.unit * x for x in (each.interval.difference, each.interval.low, each.interval.high)
                )
                color = {"better": COLORS[0], "worse": COLORS[1]}.get(each.verdict, "#777777")
                row = results.index(each.result)
                panel.plot([low, high], [row, row], color=color, linewidth=1.5, solid_capstyle="butt")
                filled = "none" if each.doubts else "full"
                panel.plot([middle], [row], color=color, marker="o", markersize=5, fillstyle=filled)
        panel.spines[["top", "right"]].set_visible(False)
        panel.locator_params(axis="x", nbins=5)
    panels[0].set_yticks(range(len(results)), [found.name(result.method, result.epochs) for result in results])
    panels[0].set_ylim(len(results) - 0.4, -0.6)
    figure.suptitle(
        f"Differences to {found.reference}, {CONFIDENCE:.0%} intervals over items; "
        "blue: better, orange: worse, grey: no difference seen; hollow: doubtful, see the table",
        fontsize=10,
    )
    return figure


def _over_seeds(result: Result, points: Callable[[Run], list[tuple[int, float]]]) -> tuple[Array, Array] | None:
    """Steps and values (steps, seeds), of seeds whose steps differ at those of the longest; None without any."""
    lines = [np.array(line, dtype=np.float64).T for run in result.runs.values() if (line := points(run))]
    if not lines:
        return None
    steps = max((line[0] for line in lines), key=len)
    return steps, np.stack([np.interp(steps, *line) for line in lines], axis=1)


def _smooth_losses(run: Run) -> list[tuple[int, float]]:
    """Each the mean of a tenth of all, as many before it as behind it; single ones where there are few."""
    finite = [point for point in run.losses if math.isfinite(point[1])]
    half = len(finite) // 20
    return [
        (finite[at][0], float(np.mean([loss for _, loss in finite[at - half : at + half + 1]])))
        for at in range(half, len(finite) - half)
    ]


def _later_evaluations(run: Run) -> list[tuple[int, float]]:
    before = len(run.eval_losses) > 2 and run.eval_losses[0][0] == 0
    return [point for point in run.eval_losses[before:] if math.isfinite(point[1])]


def _by_rate(found: Findings, result: Result) -> dict[float, float]:
    """Mean validation NLL by rate, on the seeds that the choice was made on; not finite where one of them diverged."""
    means = {
        rate: spread([v for run in found.runs if _tried(run, result, rate) and (v := run.validation_nll) is not None])
        for rate in result.choice.tried
    }
    return {rate: mean.mean for rate, mean in means.items() if mean is not None}


def _top(values: Iterable[float], chosen: Iterable[float], base: float | None) -> float:
    """The largest value that an axis shows.

    It is at most four times as far above the median as the lowest lies below, so that the better half has a fifth of
    the axis at least, and better than no training; but every chosen one is shown.
    """
    finite = [value for value in values if math.isfinite(value)]
    median = float(np.median(finite))
    limit = median + 4 * (median - min(finite))
    return max([*chosen, *(value for value in finite if value <= limit and (base is None or value < base))])


def _told_grey(shown: Sequence[Group]) -> str:
    return " Grey: the methods of the other panels." if len(shown) > 1 else ""


def _told_above(found: Findings, means: dict[tuple[str, float], dict[float, float]], top: float) -> str:
    above = [(key, rate, value) for key, line in means.items() for rate, value in line.items() if not value <= top]
    if not above:
        return ""
    if len(above) > 8:
        return f" Triangles: {len(above)} means above the axis or diverged, see the table of learning rates."
    said = [
        f"{found.name(*key)} at {short_rate(rate)} ({f'{value:.2f}' if math.isfinite(value) else 'diverged'})"
        for key, rate, value in above
    ]
    return f" Triangle, above the axis: {', '.join(said)}."


def _with_margin(low: float, high: float) -> tuple[float, float]:
    margin = 0.05 * (high - low) or 0.05
    return low - margin, high + margin


def _shifted(panel: Any, points: float) -> Any:
    """The panel's data, drawn so many points further to the right."""
    from matplotlib.transforms import ScaledTranslation

    return panel.transData + ScaledTranslation(points / 72, 0, panel.figure.dpi_scale_trans)


def _tried(run: Run, result: Result, rate: float) -> bool:
    key, choice = run.key, result.choice
    same = (key.method, key.epochs, key.learning_rate) == (choice.method, choice.epochs, rate)
    return same and run.status == "done" and key.seed in choice.seeds


def _accuracy(result: Result) -> Spread | None:
    return spread(accuracies(list(result.scores.values())).get("mean", ()))
