"""Writes a report: the page, tables and figures of a grid's records."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from ...method.atomic_files import put, staged
from .statistics import CONFIDENCE, RESAMPLES

if TYPE_CHECKING:
    from .findings import GridFindings

# Stems of all files that a report may write; those without content are removed, so that none is left of an earlier one.
TABLES = (
    "summary",
    "validation",
    "differences",
    "differences_to_base",
    "accuracy_published",
    "accuracy_strict",
    "perplexity",
    "cost",
    "learning_rates",
)
FIGURES = ("differences", "cost", "learning_rates", "curves")


def write_report(
    runs_dir: Path, output: Path, *, reference: str | None = None, resamples: int = RESAMPLES, seed: int = 0
) -> list[str]:
    """Compare the runs of a grid and write their report.

    Args:
        runs_dir: the grid's output_dir.
        output: the folder to write.
        reference: the method that others are compared with; None: lora, if it was trained.
        resamples, seed: of the bootstrap.

    Returns:
        Notes on what failed, is missing, or limits the numbers.

    Raises:
        ValueError: there are no records or no such reference, a record is damaged, or a file cannot be written.
        OSError: a record cannot be read.
    """
    from .analysis import analyze

    findings = analyze(runs_dir, reference or "lora", resamples, seed)
    names = sorted({run.key.method for run in findings.runs})
    if reference is not None and reference not in names:
        raise ValueError(f"--reference: {reference} is not one of the methods in {runs_dir}: {', '.join(names)}.")
    write(findings, output)
    return findings.notes


def write(findings: "GridFindings", output: Path) -> None:
    """Write all files of a report, or none.

    Args:
        output: the folder. An earlier report there is replaced; files that this report lacks are removed.

    Raises:
        ValueError: the files cannot be written; names the file or folder and the remedy. An earlier report stays.
    """
    from .figures.figures import FORMATS, make_figures, render
    from .page import render_page
    from .table_formats import csv_text, json_records, latex
    from .tables import make_tables

    tables = {table.name: table for table in make_tables(findings)}
    figures = make_figures(findings)
    files: dict[str, bytes | None] = {}
    for name in TABLES:
        table = tables.get(name)
        files[f"{name}.csv"] = csv_text(table).encode() if table else None
        files[f"{name}.tex"] = latex(table).encode() if table else None
    for name in FIGURES:
        for kind in FORMATS:
            files[f"{name}.{kind}"] = render(figures[name], name, kind) if name in figures else None
    contents = {
        "format": 1,
        "reference": findings.reference,
        "confidence": CONFIDENCE,
        "resamples": findings.resamples,
        "bootstrap_seed": findings.seed,
        "where": findings.setup,
        "notes": findings.notes,
        "tables": {name: json_records(table) for name, table in tables.items()},
    }
    files["report.json"] = (json.dumps(contents, indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode()
    drawn = [name for name in FIGURES if name in figures]
    files["report.md"] = render_page(findings, list(tables.values()), drawn).encode()
    _replace(files, output)


def _replace(files: Mapping[str, bytes | None], output: Path) -> None:
    """Write all files into a temporary folder, then rename them into `output`; a file whose content is None is removed.

    Raises:
        ValueError: a file cannot be written; names it and the remedy.
    """
    at = output
    try:
        with staged(output) as folder:
            for name, content in files.items():
                at = output / name
                if at.is_dir():
                    raise ValueError(
                        f"{at} is a folder, and a file of the report belongs there; move it away, or name another "
                        "output with --output."
                    )
                if content is not None:
                    with (folder / name).open("wb") as file:
                        file.write(content)
                        file.flush()
                        os.fsync(file.fileno())  # some file systems report a full disk only here
            for name, content in files.items():
                at = output / name
                if content is None:
                    at.unlink(missing_ok=True)
                else:
                    put(folder / name, at)
    except OSError as error:
        raise ValueError(
            f"{at} cannot be written: {error.strerror or error}. Make room, make its folder writable, or name another "
            "one with --output."
        ) from error
