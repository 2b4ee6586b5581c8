"""How numbers and runs are written in notes, tables and figures."""

from collections.abc import Sequence
from pathlib import Path

from ..run_files import Run


def short_rate(rate: float) -> str:
    """A learning rate in scientific notation, as 5e-4."""
    factor, _, power = f"{rate:.5e}".partition("e")
    return f"{float(factor):g}e{int(power)}"


def join_numbers(values: Sequence[float]) -> str:
    """Numbers separated by commas, without trailing zeros."""
    return ", ".join(f"{value:g}" for value in values)


def name_runs(runs: Sequence[Run]) -> str:
    """Folders of runs, with the seeds of those that differ in nothing else in brackets."""
    seeds: dict[Path, list[int]] = {}
    for run in runs:
        folder = run.key.folder
        seeds.setdefault(folder.with_name(folder.name.rpartition("-seed")[0]), []).append(run.key.seed)
    return ", ".join(f"{folder.as_posix()} (seed {join_numbers(of)})" for folder, of in seeds.items())
