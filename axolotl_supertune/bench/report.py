"""Shows the rows of a benchmark as a table on the terminal, as Markdown and as a bar chart."""

from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from .measurement import OWN_METHODS

Row = dict[str, Any]


def _number(key: str, pattern: str, absent: str = "–") -> Callable[[Row], str]:
    """A function from a row to its value of `key` in this format, or `absent`."""
    return lambda row: absent if row.get(key) is None else pattern.format(row[key])


def _size(key: str) -> Callable[[Row], str]:
    """A function from a row to its bytes of `key` in MiB or GiB."""

    def show(row: Row) -> str:
        size = row.get(key)
        if not size:
            return "–"
        return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"

    return show


# Heading → cell of a row, for both the terminal and Markdown.
COLUMNS: dict[str, Callable[[Row], str]] = {
    "method": lambda row: row["method"] + (" (again)" if row.get("again") else ""),
    "trainable": _number("trainable", "{:,}"),
    "checkpoint": _size("checkpoint_bytes"),
    "calibration s": _number("calibration_seconds", "{:.2f}"),
    "selection s": _number("selection_seconds", "{:.2f}"),
    "peak GiB": _number("peak_gib", "{:.2f}"),
    "peak × floor": _number("peak_times_floor", "{:.2f}"),
    "Adam MiB": _number("adam_mib", "{:.1f}"),
    "index MiB": _number("index_mib", "{:.1f}"),
    "step ms (min)": lambda row: f"{row['step_ms']:.1f} ({row['step_ms_min']:.1f})" if row.get("step_ms") else "–",
    "step × floor": _number("step_times_floor", "{:.2f}"),
    "steps/s": _number("steps_per_s", "{:.3f}"),
    "tokens/s": _number("tokens_per_s", "{:,.0f}"),
}


def add_ratios(rows: Sequence[Row]) -> None:
    """Add step time and peak memory as multiples of the floor to every row; None where either is not known.

    The floor is the mean of its rows: it is measured first and last, because a GPU changes its speed as it warms up.
    """
    for key, ratio in (("step_ms", "step_times_floor"), ("peak_gib", "peak_times_floor")):
        floors = [row[key] for row in rows if row["method"] == "floor" and row.get(key)]
        for row in rows:
            row[ratio] = row[key] / mean(floors) if floors and row.get(key) else None


def remarks(result: dict[str, Any]) -> list[str]:
    """Lines below the table: what was measured, the floor's drift, calibration, rows without numbers, warnings."""
    job, versions = result["job"], result["versions"]
    lines = [
        f"{result['model']}, random weights in {job['dtype']}, {job['batch_size']} × {job['sequence_len']} tokens, "
        f"r0 {job['r0']}, λ {job['supra_lambda']}, dropout {job['lora_dropout']}, {job['attn_implementation']}"
        + (", bf16 autocast" if job["autocast"] else "")
        + (", gradient checkpointing" if job.get("gradient_checkpointing") else "")
        + (f", at most {job['memory_limit']:g} GiB" if job.get("memory_limit") else "")
        + f"; median of {job['steps']} steps after {job['warmup']}; {result['device']}, "
        + ", ".join(f"{name} {version}" for name, version in versions.items() if version)
        + f", {result['date'][:10]}.",
        f"Command: {result['command']}",
    ]
    floors = [row["step_ms"] for row in result["rows"] if row["method"] == "floor" and row.get("step_ms")]
    if len(floors) == 2:
        drift = floors[1] / floors[0] - 1
        lines.append(
            f"Floor {floors[0]:.1f} ms before and {floors[1]:.1f} ms after the others ({drift:+.1%}); × floor is "
            "against their mean."
        )
    for row in result["rows"]:
        if row.get("calibration_seconds") is not None:
            memory = _number("calibration_peak_gib", ", peak {:.2f} GiB", "")(row)
            bare = _number("calibration_forward_peak_gib", ", peak {:.2f} GiB", "")(row)
            lines.append(
                f"Calibration, {job['calibration_samples']} × {job['calibration_sequence_len']} tokens: "
                f"{row['calibration_seconds']:.2f} s{memory}; the bare forward pass "
                f"{row['calibration_forward_seconds']:.2f} s{bare}."
            )
    absent = [name for name in result.get("methods", ()) if name not in {row["method"] for row in result["rows"]}]
    if absent or len(floors) == 1:
        missing = ", ".join([*absent, *(["the second floor"] if len(floors) == 1 else [])])
        lines.append(f"The run was stopped before it ended; not measured: {missing}.")
    lines += [f"{row['method']}: {row['status']}: {row['note']}" for row in result["rows"] if row["status"] != "ok"]
    for row in result["rows"]:
        if row["method"] in OWN_METHODS:
            lines += [f"{row['method']}: warning: {warning}" for warning in row.get("warnings", ())]
    if result["cpu"]:
        lines.append("CPU numbers of a small shape: they show that the command works, and are not the claim.")
    return lines


def markdown(result: dict[str, Any]) -> str:
    """A Markdown table and the remarks."""
    lines = [
        "| " + " | ".join(COLUMNS) + " |",
        "|---|" + "---:|" * (len(COLUMNS) - 1),
        *("| " + " | ".join(_cells(row)) + " |" for row in result["rows"]),
        "",
        *(f"{line}  " for line in remarks(result)),
    ]
    return "\n".join(lines).rstrip()


def print_table(result: dict[str, Any]) -> None:
    """Print the table and the remarks; 200 columns wide if stdout is not a terminal."""
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=200)
    table = Table()
    for heading in COLUMNS:
        table.add_column(heading, justify="left" if heading == "method" else "right")
    for row in result["rows"]:
        table.add_row(*_cells(row))
    console.print(table)
    for line in remarks(result):
        console.print(line, markup=False, soft_wrap=True)


def draw(result: dict[str, Any], path: Path) -> None:
    """Write a PNG with horizontal bars of step time and peak memory, labelled with × floor."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = [row for row in result["rows"] if row["status"] != "not installed" and not row.get("again")]
    figure = Figure(figsize=(11, 1.5 + 0.42 * len(rows)), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(f"One training step, {result['model']}, {result['device']}")
    names = [row["method"] for row in rows]
    panels = figure.subplots(1, 2, sharey=True)
    for axes, key, ratio, label in (
        (panels[0], "step_ms", "step_times_floor", "step time, ms"),
        (panels[1], "peak_gib", "peak_times_floor", "peak memory, GiB"),
    ):
        colors = ["#888888" if name == "floor" else "#d1622b" if name in OWN_METHODS else "#4a7fb5" for name in names]
        bars = axes.barh(names, [row.get(key) or 0 for row in rows], color=colors)
        texts = [f"{row[ratio]:.2f} × floor" if row.get(ratio) else "not measured" for row in rows]
        axes.bar_label(
            bars, [text if row["status"] == "ok" else "failed" for text, row in zip(texts, rows, strict=True)]
        )
        axes.set_xlabel(label)
        axes.margins(x=0.25)
        axes.set_xlim(left=0)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].invert_yaxis()
    figure.savefig(path, format="png", dpi=150)


def _cells(row: Row) -> list[str]:
    cells = [show(row) for show in COLUMNS.values()]
    return cells if row["status"] == "ok" else [cells[0], row["status"], *cells[2:]]
