"""A sweep with several runs on each GPU, and what a run records of the device."""

import os
import runpy
from pathlib import Path

import pytest
import torch
import yaml
from rich.console import Console

from axolotl_supertune.grid.run_files import read_runs, read_scores
from axolotl_supertune.grid.sweep.devices import Devices, visible_gpus
from axolotl_supertune.grid.sweep.sweep import Sweep

PACKAGE = Path(__file__).parents[2]
# The tiny model and its YAML.
_fixtures = runpy.run_path(str(PACKAGE / "tests/plugin/conftest.py"))
base, problems, settings = (_fixtures[name] for name in ("base", "problems", "settings"))
DATA = PACKAGE.parent / "shared" / "data" / "benchmarks"


@pytest.mark.parametrize("gpus", [1, 2])
def test_runs_share_a_gpu_and_say_so(settings, problems, tmp_path, monkeypatch, gpus):
    if torch.cuda.device_count() < gpus:
        pytest.skip(f"{gpus} GPUs are needed, this machine has {torch.cuda.device_count()}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"{PACKAGE}:{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.delenv("ACCELERATE_USE_CPU", raising=False)
    lines = problems[0].read_text().splitlines(keepends=True)
    (tmp_path / "train.jsonl").write_text("".join(lines[8:]))
    (tmp_path / "valid.jsonl").write_text("".join(lines[:8]))
    dropped = (
        "adapter",
        "val_set_size",
        "max_steps",
        "learning_rate",
        "seed",
        "save_steps",
        "dataset_prepared_path",
        "fp16",
    )
    shared = settings(
        datasets=[{"path": "train.jsonl", "type": "alpaca"}],
        test_datasets=[{"path": "valid.jsonl", "type": "alpaca", "split": "train"}],
        eval_steps=10,
        bf16=True,
        save_strategy="no",
        output_dir=None,
        dataloader_pin_memory=None,
        **dict.fromkeys(dropped),
    )
    (tmp_path / "base.yml").write_text(yaml.safe_dump(shared))
    grid = {
        "base": "base.yml",
        "output_dir": "runs",
        "methods_from": str(PACKAGE / "examples/paper/methods.yml"),
        "methods": ["full", "lora", "sift-top", "super-bottom", "supra-0.5", "supra-mag-0.5"],
        "learning_rates": [1e-3],
        "score": {"limit": 4, "max_gen_toks": 8, "runs": "chosen" if DATA.is_dir() else "none", "data_dir": str(DATA)},
    }
    (tmp_path / "grid.yml").write_text(yaml.safe_dump(grid))
    places = Devices(visible_gpus(",".join(map(str, range(gpus)))), 3)
    good = Sweep(tmp_path / "grid.yml", places, Console(width=200)).sweep()
    runs = read_runs(tmp_path / "runs")
    assert good, "\n\n".join(f"{run.key}: {run.error}" for run in runs if run.error)
    assert len(runs) == 6
    for run in runs:
        assert run.device == torch.cuda.get_device_name()
        assert 0 < run.peak_memory_gib < 4
        assert run.jobs_per_gpu == 3
        assert run.validation_nll < run.eval_losses[0][1]
    if DATA.is_dir():
        scores = [read_scores(path) for path in (tmp_path / "runs").rglob("scores.json")]
        assert len(scores) == 7
        assert {len(each.correct) for score in scores for each in score.benchmarks.values()} == {4}
