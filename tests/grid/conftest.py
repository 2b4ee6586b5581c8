"""Fixtures: GRID files in a temporary folder, sweeps with fake processes that take milliseconds, recorded runs."""

import functools
import io
import json
import os
import sys
from pathlib import Path

os.environ.setdefault("AXOLOTL_DO_NOT_TRACK", "1")

import pytest
import yaml
from axolotl_runs import *  # noqa: F403 (fixtures)
from benchmark_models import tiny_adapter, tiny_base  # noqa: F401 (fixtures)
from grid_cases import BASE, MAGNITUDE
from grid_records import grid, save_records
from rich.console import Console

FAKES = Path(__file__).parent / "fakes"
COMMANDS = {
    name: [sys.executable, "-S", str(FAKES / f"{name}.py")] for name in ("train", "score", "prepare", "contamination")
}


@pytest.fixture
def write_grid(tmp_path, monkeypatch):
    """Write a GRID file with its base YAML: (base={}, **keys) → its path; the value None removes a key."""
    monkeypatch.chdir(tmp_path)
    for name in ("text.txt", "train.jsonl", "valid.jsonl"):
        (tmp_path / name).write_text("text")

    def write(base=None, **keys):
        grid = {
            "base": "base.yml",
            "output_dir": "runs",
            "methods": {"lora": {"adapter": "lora"}, "magnitude": MAGNITUDE},
            "learning_rates": [1e-4, 1e-3],
            **keys,
        }
        settings = {**BASE, **(base or {})}
        for name, mapping in {"base.yml": settings, "grid.yml": grid}.items():
            kept = {key: value for key, value in mapping.items() if value is not None}
            (tmp_path / name).write_text(yaml.safe_dump(kept, sort_keys=False))
        return tmp_path / "grid.yml"

    return write


class Stage:
    """Runs sweeps with fake processes: `plan` tells them what to do, `calls` returns what they did."""

    def __init__(self, folder, write):
        self.folder, self._write = folder, write
        self.plan = {"calls": str(folder / "calls.jsonl")}
        self.printed = ""

    def sweep(self, grid, devices=None, until="score", **options):
        from axolotl_supertune.grid.sweep.devices import Devices
        from axolotl_supertune.grid.sweep.run_jobs import Commands
        from axolotl_supertune.grid.sweep.sweep import Sweep

        self.write_plan()
        out = io.StringIO()
        try:
            sweep = Sweep(
                grid, devices or Devices(()), Console(file=out, width=200), commands=Commands(**COMMANDS), **options
            )
            return sweep.sweep(until)
        finally:
            self.printed = out.getvalue()

    def write_plan(self):
        (self.folder / "plan.json").write_text(json.dumps(self.plan))

    def calls(self, kind=None):
        """The calls since the last call of this method, in order."""
        path = Path(self.plan["calls"])
        lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        path.unlink(missing_ok=True)
        return [line[kind] for line in lines if kind in line] if kind else lines


@pytest.fixture
def stage(tmp_path, write_grid, monkeypatch):
    monkeypatch.setenv("FAKE_PLAN", str(tmp_path / "plan.json"))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    return Stage(tmp_path, write_grid)


@pytest.fixture
def save(tmp_path):
    """Write runs, each with its scores or None, into a RUNS_DIR; returns that folder."""
    return functools.partial(save_records, tmp_path / "runs")


@pytest.fixture
def small(save):
    records, base = grid()
    return save(*records, base=base)


@pytest.fixture
def undrawn(monkeypatch):
    """Skip drawing the figures, which takes seconds."""
    monkeypatch.setattr("axolotl_supertune.grid.report.figures.figures.render", lambda figure, name, kind: b"a picture")
