"""A sweep that fails, is stopped or runs out of time, and how the next one continues; with fake processes."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from grid_cases import FIRST, RUNS, folder

from axolotl_supertune.grid.config import GridError
from axolotl_supertune.grid.run_files import read_runs
from axolotl_supertune.grid.sweep.devices import Devices
from axolotl_supertune.grid.sweep.jobs import OutOfTime, Signalled
from axolotl_supertune.grid.sweep.sweep import Sweep


def test_a_failure_is_recorded_with_the_end_of_its_log_and_the_others_go_on(stage, write_grid):
    grid = write_grid()
    stage.plan["behaviour"] = {"lora 0.0001 0": "fail", "magnitude 0.001 0": "exit"}
    assert not stage.sweep(grid)
    assert stage.calls("run") == FIRST
    failed = {run.key.method: run for run in read_runs(RUNS) if run.status == "failed"}
    lines = failed["lora"].error.splitlines()
    assert lines[0] == "ended with exit code 7"
    assert lines[-2:] == ["line 99", "ValueError: lora_r: 0 is no rank"]
    assert len(lines) == 31
    assert failed["magnitude"].error.splitlines()[0] == "ended with exit code 0"
    assert "lora/lr0.0001-ep1-seed0: failed after" in stage.printed
    assert "ValueError: lora_r: 0 is no rank (runs/lora/lr0.0001-ep1-seed0/log.txt)" in stage.printed
    assert {path.parent.parent.name for path in RUNS.rglob("scores.json")} == {"runs", "lora", "magnitude"}

    assert not stage.sweep(grid), "what failed has not gone away"
    assert stage.calls() == []
    stage.plan["behaviour"] = {}
    stage.plan["nll"] = {"lora 0.0001 0": 0.1}
    assert stage.sweep(grid, retry_failed=True)
    assert stage.calls("run") == ["lora 0.0001 0", "magnitude 0.001 0"]
    assert {run.status for run in read_runs(RUNS)} == {"done"}
    assert "training lora" in (folder("lora", 1e-4) / "log.txt").read_text()
    assert "line 99" not in (folder("lora", 1e-4) / "log.txt").read_text()


@pytest.mark.slow
def test_a_sweep_that_is_killed_loses_nothing_and_repeats_nothing(stage, write_grid, tmp_path):
    grid = write_grid(score={"runs": "none"})
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    stage.plan |= {"behaviour": {"magnitude 0.0001 0": "block"}, "fifo": str(fifo)}
    stage.write_plan()
    fakes = Path(__file__).parent / "fakes"
    killed = subprocess.Popen(
        [sys.executable, str(fakes / "sweep.py"), str(grid)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    with fifo.open() as blocked:
        assert blocked.readline() == "blocked\n"
        killed.send_signal(signal.SIGKILL)
        killed.wait()
        assert blocked.read() == "", "the run ends with the sweep, or it would go on in the folder of the next one"
    assert stage.calls("run") == FIRST[:3]
    stage.plan["behaviour"] = {}
    assert stage.sweep(grid)
    calls = stage.calls()
    assert [call["run"] for call in calls] == FIRST[2:]
    assert calls[0]["checkpoints"] == [2], "the one that is whole"
    assert {run.status for run in read_runs(RUNS)} == {"done"}


@pytest.mark.slow
@pytest.mark.parametrize("states", [[], ["optimizer.pt"], ["scheduler.pt"]])
def test_a_stopped_run_without_its_optimizers_state_starts_anew(stage, write_grid, states):
    """As with save_only_model; the Trainer would resume with a restarted learning rate schedule."""
    stage.plan |= {"behaviour": {"lora 0.0001 0": "stop the sweep"}, "states": states}
    grid = write_grid(score={"runs": "none"})
    with pytest.raises(Signalled, match="SIGTERM"):
        stage.sweep(grid)
    stage.calls()
    stage.plan["behaviour"] = {}
    assert stage.sweep(grid)
    first = stage.calls()[0]
    assert (first["run"], first["checkpoints"]) == ("lora 0.0001 0", [])


def test_a_stopped_run_with_another_yaml_starts_anew(stage, write_grid):
    stage.plan["behaviour"] = {"lora 0.0001 0": "stop the sweep"}
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(Signalled, match="SIGTERM"):
        stage.sweep(write_grid())
    assert signal.getsignal(signal.SIGTERM) is before
    assert stage.calls("run") == ["lora 0.0001 0"]
    assert not (folder("lora", 1e-4) / "run.json").exists()
    stage.plan["behaviour"] = {}
    assert stage.sweep(write_grid(base={"micro_batch_size": 2}))
    runs = [call for call in stage.calls() if "run" in call]
    assert [(call["run"], call["checkpoints"]) for call in runs] == [(name, []) for name in FIRST]


def test_a_finished_run_with_another_yaml_is_an_error_that_names_the_difference(stage, write_grid):
    assert stage.sweep(write_grid())
    stage.calls()
    grid = write_grid(base={"micro_batch_size": 2})
    expected = (
        rf"runs: finished runs were trained otherwise than {grid} says now \(4\):\n"
        r"  runs/lora/lr0.0001-ep1-seed0: micro_batch_size: 4 recorded, 2 now\n(  runs/.*\n){3}Put"
    )
    with pytest.raises(GridError, match=expected):
        stage.sweep(grid)
    with pytest.raises(GridError, match=expected):
        Sweep(grid, Devices(()), None).listing()
    assert stage.calls() == []


def test_no_run_is_started_that_would_end_too_late(stage, write_grid):
    grid = write_grid()
    stage.plan["seconds"] = 1000
    with pytest.raises(OutOfTime):
        stage.sweep(grid, time_limit=500)
    assert stage.calls("run") == FIRST[:1], "the first one's time is not known"
    with pytest.raises(OutOfTime):
        stage.sweep(grid, time_limit=500)
    assert stage.calls("run") == []
    assert stage.sweep(grid, time_limit=5000)
    assert stage.calls("run") == FIRST[1:]


@pytest.mark.slow
def test_a_log_says_how_far_it_is_and_how_long_it_will_take(stage, write_grid):
    """As a terminal's progress bar does; the first runs have no estimate."""
    grid = write_grid(score={"runs": "none"})
    stage.plan |= {"seconds": 7200, "behaviour": {"magnitude 0.0001 0": "fail"}}
    assert not stage.sweep(grid)
    lines = [line for line in stage.printed.splitlines() if " of 4" in line]
    assert [line.partition(" (")[2].partition(")")[0] for line in lines] == [
        "1 of 4, 6 h 0 min left",
        "2 of 4, 4 h 0 min left",
        "3 of 4, 2 h 0 min left",
        "4 of 4",
    ]
    assert "(3 of 4, 2 h 0 min left): ended with exit code 7" in lines[2]


@pytest.mark.slow
def test_a_run_that_is_over_the_limit_is_stopped_and_goes_on(stage, write_grid, tmp_path):
    grid = write_grid(score={"runs": "none"})
    stage.plan["behaviour"] = {"lora 0.0001 0": "block"}
    started = time.monotonic()
    with pytest.raises(OutOfTime):
        stage.sweep(grid, time_limit=2)
    assert time.monotonic() - started < 12
    assert stage.calls("run") == FIRST[:1]
    stage.plan["behaviour"] = {}
    assert stage.sweep(grid)
    assert stage.calls()[0] == {
        "run": FIRST[0],
        "checkpoints": [2],
        "gpu": "",
        "omp": str(len(os.sched_getaffinity(0))),
    }
