"""A contamination report for the terminal: a table of counts, and the matches one by one."""

import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from ..benchmarks import load_benchmark
from .report import Report
from .training_files import TrainingSet

if TYPE_CHECKING:
    from rich.table import Table


def summary_table(report: Report) -> "Table":
    """The counts of every benchmark and their totals."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("benchmark")
    for column in ("n", "exact", "near", "clean", "clean %", "of these, same template"):
        table.add_column(column, justify="right")
    total = [0] * 5
    for name, entry in report["benchmarks"].items():
        row = [entry["n"], len(entry["exact"]), len(entry["near"]), entry["clean"], len(entry["template"])]
        total = [before + more for before, more in zip(total, row, strict=True)]
        table.add_row(name, *_cells(row))
    table.add_section()
    table.add_row("all", *_cells(total))
    return table


def _cells(row: list[int]) -> list[str]:
    n, exact, near, clean, template = row
    return [str(n), str(exact), str(near), str(clean), f"{100 * clean / n:.1f}", str(template)]


def match_lines(
    report: Report, level: str, training: Sequence[TrainingSet], data_dir: str | os.PathLike[str] | None = None
) -> Iterator[str]:
    """Every match of one level in three lines of text: where it is, the test question, the training question.

    Args:
        level: one of LEVELS.
        training: the training sets that the report is about.
        data_dir: as in `load_benchmark`.
    """
    for name, entry in report["benchmarks"].items():
        records = load_benchmark(name, data_dir)
        if level == "exact":
            matches = [(index, place, 1.0) for index, place in zip(entry["exact"], entry["exact_train"], strict=True)]
        else:
            matches = [(match["index"], match["train"], match["overlap"]) for match in entry[level]]
        for index, (number, at), overlap in matches:
            source = training[number]
            yield f"{level} {name} {index} = {source.path} {at}, overlap {overlap:.2f}"
            yield f"  test:  {' '.join(records[index]['instruction'].split())}"
            yield f"  train: {' '.join(source.records[at].question.split())}"
