"""A sweep runs what is missing and nothing twice, however it was stopped; with fake processes."""

import errno
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner
from filelock import FileLock
from grid_cases import MAGNITUDE

from axolotl_supertune.commands.cli import supertune
from axolotl_supertune.grid.config import GridError
from axolotl_supertune.grid.records import read_runs, read_scores
from axolotl_supertune.grid.sweep.devices import Devices, visible_gpus
from axolotl_supertune.grid.sweep.jobs import OutOfTime, Signalled
from axolotl_supertune.grid.sweep.sweep import Sweep

RUNS = Path("runs")
FIRST = ["lora 0.0001 0", "lora 0.001 0", "magnitude 0.0001 0", "magnitude 0.001 0"]


def folder(method, rate, seed=0, epochs=1):
    return RUNS / method / f"lr{rate:g}-ep{epochs:g}-seed{seed}"


def weights():
    """The runs whose weights exist."""
    return {path.read_text() for path in RUNS.glob("*/*/adapter/adapter_model.safetensors")}


def test_a_grid_is_trained_chosen_and_scored_and_nothing_is_done_twice(stage, write_grid):
    methods = {"lora": {"adapter": "lora"}, "magnitude": MAGNITUDE, "top": {**MAGNITUDE, "sparse_direction": "top"}}
    grid = write_grid(methods=methods, chosen={"seeds": [1, 2], "methods": ["lora"], "leading": 1})
    stage.plan["nll"] = {"lora 0.0001 0": 0.9, "magnitude 0.0001 0": 0.5, "top 0.001 0": 0.4}
    assert stage.sweep(grid)
    first = [*FIRST, "top 0.0001 0", "top 0.001 0"]
    calls = stage.calls()
    seeds = ["lora 0.0001 1", "top 0.001 1", "lora 0.0001 2", "top 0.001 2"]
    assert [call["run"] for call in calls if "run" in call] == [*first, *seeds]
    scored = [call["score"] for call in calls if "score" in call]
    best = {("lora", 1e-4, 0), ("lora", 1e-4, 1), ("lora", 1e-4, 2), ("magnitude", 1e-4, 0)}
    best |= {("top", 1e-3, 0), ("top", 1e-3, 1), ("top", 1e-3, 2)}
    assert scored[0] == "base"
    assert set(scored[1:]) == {str(folder(*key) / "adapter") for key in best}
    assert calls.index({"contamination": ["train.jsonl"]}) < calls.index({"score": "base"})
    assert weights() == {f"{method} {rate:g} {seed}" for method, rate, seed in best}
    assert not list(RUNS.rglob("checkpoint-*"))
    assert read_scores(RUNS / "base/scores.json").key is None
    assert read_scores(folder("top", 1e-3, 2) / "scores.json").key.seed == 2
    resolved = json.loads((RUNS / "grid.json").read_text())
    assert [run["folder"] for run in resolved["runs"]] == [
        f"{m}/lr{float(r):g}-ep1-seed0" for m, r, _ in map(str.split, first)
    ]
    assert yaml.safe_load((folder("top", 1e-3) / "config.yml").read_text()) == resolved["runs"][-1]["yaml"]

    assert stage.sweep(grid)
    assert stage.calls() == []


@pytest.mark.parametrize(("until", "count", "scores"), [("train", 4, 0), ("choose", 5, 0), ("score", 5, 4)])
def test_it_stops_after_a_stage_and_goes_on_from_there(stage, write_grid, until, count, scores):
    grid = write_grid(chosen={"seeds": [5], "leading": 1})
    assert stage.sweep(grid, until=until)
    assert len(stage.calls("run")) == count
    assert len(list(RUNS.rglob("scores.json"))) == scores
    assert len(weights()) == (4 if until == "train" else 3)
    assert stage.sweep(grid)
    assert len(stage.calls("run")) == 5 - count
    assert len(list(RUNS.rglob("scores.json"))) == 4


@pytest.mark.parametrize(
    ("keep", "runs", "left", "scored"), [("all", "chosen", 4, 3), ("chosen", "all", 2, 5), ("chosen", "none", 2, 0)]
)
def test_what_is_kept_and_scored_is_the_grids_to_say(stage, write_grid, keep, runs, left, scored):
    assert stage.sweep(write_grid(keep=keep, score={"runs": runs}))
    assert len(weights()) == left
    assert len(stage.calls("score")) == scored
    assert len(list(RUNS.rglob("checkpoint-9"))) == (4 if keep == "all" else 0)


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


def test_a_rate_that_diverged_or_failed_is_not_chosen(stage, write_grid):
    stage.plan["nll"] = {"lora 0.0001 0": float("nan"), "lora 0.001 0": 9.0}
    stage.plan["behaviour"] = {"magnitude 0.0001 0": "fail", "magnitude 0.001 0": "fail"}
    assert not stage.sweep(write_grid(chosen={"seeds": [1], "methods": ["magnitude"], "leading": 2}))
    assert stage.calls("run") == [*FIRST, "lora 0.001 1"]


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
        Sweep(grid, Devices(()), None).plan()
    assert stage.calls() == []


def test_a_grid_that_grows_trains_what_is_new(stage, write_grid):
    assert stage.sweep(write_grid(learning_rates=[1e-3]))
    assert stage.calls("run") == ["lora 0.001 0", "magnitude 0.001 0"]
    assert stage.sweep(write_grid())
    assert stage.calls("run") == ["lora 0.0001 0", "magnitude 0.0001 0"]


def test_a_run_that_is_chosen_after_its_weights_were_dropped_is_trained_again(stage, write_grid):
    stage.plan["nll"] = {"lora 0.001 0": 0.9, "lora 0.0001 0": 0.5}
    assert stage.sweep(write_grid())
    assert "lora 0.001 0" not in weights()
    stage.calls()
    stage.plan["nll"] = {}
    assert stage.sweep(write_grid(score={"runs": "all"}))
    assert stage.calls("run") == ["lora 0.001 0", "magnitude 0.001 0"]
    assert "2 runs that are to be scored have no weights any more" in stage.printed
    assert len(list(RUNS.rglob("scores.json"))) == 5


@pytest.mark.parametrize("keep", ["chosen", "all"])
def test_a_choice_that_training_again_moves_is_followed(stage, write_grid, keep):
    """Devices are not deterministic: after a second training another rate may be the best."""
    grid = write_grid(keep=keep, chosen={"seeds": [1], "methods": ["lora"]})
    stage.plan["nll"] = {"lora 0.001 0": 0.5, "lora 0.0001 0": 0.6}
    assert stage.sweep(grid, until="choose")
    for seed in (0, 1):
        (folder("lora", 1e-3, seed) / "adapter/adapter_model.safetensors").unlink()
    stage.calls()
    stage.plan["nll"] = {"lora 0.001 0": 0.9, "lora 0.0001 0": 0.6}
    assert stage.sweep(grid)
    calls = stage.calls()
    again = ["lora 0.0001 0"] if keep == "chosen" else []
    assert [call["run"] for call in calls if "run" in call] == ["lora 0.001 0", "lora 0.001 1", "lora 0.0001 1", *again]
    scored = {call["score"] for call in calls if "score" in call}
    assert {str(folder("lora", 1e-4, seed) / "adapter") for seed in (0, 1)} <= scored
    assert not {str(folder("lora", 1e-3, seed) / "adapter") for seed in (0, 1)} & scored
    assert "not chosen before" not in stage.printed
    assert {"lora 0.0001 0", "lora 0.0001 1"} <= weights()
    assert stage.sweep(grid)
    assert stage.calls() == []


def test_a_seed_that_diverged_decides_against_its_rate_and_is_not_scored(stage, write_grid):
    nan = float("nan")
    stage.plan["nll"] = {"lora 0.001 0": 0.1, "lora 0.001 1": nan, "magnitude 0.001 7": nan, "magnitude 0.001 0": 0.5}
    assert stage.sweep(write_grid(seeds=[0, 1], chosen={"seeds": [7], "leading": 2}))
    assert {name for name in stage.calls("score") if "lora" in name} == {
        str(folder("lora", 1e-4, seed) / "adapter") for seed in (0, 1, 7)
    }
    assert not (folder("magnitude", 1e-3, 7) / "scores.json").exists()


def test_scores_that_were_asked_otherwise_are_an_error(stage, write_grid):
    assert stage.sweep(write_grid(score={"limit": 2}))
    with pytest.raises(GridError, match=r"base/scores.json: score.limit: 2.0 recorded, None now\n"):
        stage.sweep(write_grid())
    with pytest.raises(GridError, match=r"base/scores.json: score.limit"):
        Sweep(write_grid(), Devices(()), None).plan()


def test_a_model_that_could_not_be_scored_is_told_and_tried_again(stage, write_grid):
    grid = write_grid()
    stage.plan["score_fails"] = "runs/lora"
    assert not stage.sweep(grid)
    assert "exit code 1: CUDA out of memory (runs/lora/lr0.0001-ep1-seed0/score.log)" in stage.printed
    assert "lora 0.0001 0" in weights()
    stage.calls()
    stage.plan.pop("score_fails")
    assert stage.sweep(grid)
    assert stage.calls("score") == ["runs/lora/lr0.0001-ep1-seed0/adapter"]


def test_without_a_contamination_report_nothing_is_scored(stage, write_grid):
    stage.plan["contamination_fails"] = True
    assert not stage.sweep(write_grid())
    assert stage.calls("score") == []


def test_norms_are_measured_once_for_all_runs_that_calibrate_alike(stage, write_grid):
    wanda = {"adapter": "super"}
    methods = {
        "lora": {"adapter": "lora"},
        "bottom": wanda,
        "supra": {"adapter": "supra", "supra_lambda": 0.5, "lora_r": 2, "sparse_direction": "top"},
        "other": {**wanda, "calibration_samples": 5},
        "random": {**wanda, "sparse_direction": "random"},
        "gradient": {**wanda, "mask_score": "gradient"},
    }
    base = {"calibration_batch_size": 2}
    grid = write_grid(base, methods=methods, learning_rates=[1e-3, 1e-2], seeds=[0, 1], score={"runs": "none"})
    assert stage.sweep(grid)
    calls = stage.calls()
    made = [yaml.safe_load(call["yaml"]) for call in calls if call.get("prepare") == "norms"]
    assert [(cfg["seed"], cfg.get("calibration_samples")) for cfg in made] == [(0, None), (0, 5), (1, None), (1, 5)]
    assert all(
        "calibration_path" not in cfg and cfg["plugins"] == ["axolotl_supertune.SupertunePlugin"] for cfg in made
    )
    assert [call["prepare"] for call in calls[:5]] == ["data", "norms", "norms", "norms", "norms"]
    used = {
        (path.parts[1], path.parts[2][-5:]): yaml.safe_load(path.read_text()).get("calibration_path")
        for path in RUNS.glob("*/*/config.yml")
    }
    assert used["bottom", "seed0"] == used["supra", "seed0"]
    assert len({used[name, seed] for name in ("bottom", "other") for seed in ("seed0", "seed1")}) == 4
    assert all(Path(path).is_file() for path in used.values() if path)
    assert {name for (name, _), path in used.items() if path is None} == {"lora", "random", "gradient"}
    assert all("calibration_batch_size" not in path.read_text() for path in RUNS.glob("bottom/*/config.yml"))


def test_without_its_norms_a_run_is_not_started(stage, write_grid):
    grid = write_grid(methods={"lora": {"adapter": "lora"}, "wanda": {"adapter": "super"}}, learning_rates=[1])
    stage.plan["prepare_fails"] = ["norms"]
    assert not stage.sweep(grid)
    assert stage.calls("run") == ["lora 1 0"]
    assert "no text for norms" in stage.printed
    assert "failed: wanda/lr1-ep1-seed0" in stage.printed
    stage.plan["prepare_fails"] = []
    assert stage.sweep(grid)
    assert stage.calls("run") == ["wanda 1 0"]


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


def test_each_gpu_has_as_many_runs_at_once_as_is_said(stage, write_grid):
    grid = write_grid(learning_rates=[1, 2, 3], score={"runs": "none"})
    stage.plan["behaviour"] = {f"{method} {rate} 0": "meet" for method in ("lora", "magnitude") for rate in (1, 2, 3)}
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(60)
        stage.plan["port"] = server.getsockname()[1]

        def meet():
            # Four must be there before the first one may go; then one place is free at a time.
            there = [server.accept()[0] for _ in range(4)]
            for _ in range(2):
                there.pop(0).send(b"!")
                there.append(server.accept()[0])
            for each in there:
                each.send(b"!")

        thread = threading.Thread(target=meet)
        thread.start()
        assert stage.sweep(grid, Devices(("3", "GPU-7"), 2))
        thread.join()
    gpus = [call["gpu"] for call in stage.calls() if "run" in call]
    assert sorted(gpus[:4]) == ["3", "3", "GPU-7", "GPU-7"]
    assert len(gpus) == 6
    assert {run.jobs_per_gpu for run in read_runs(RUNS)} == {2}


def test_places_share_the_cores(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(16))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert Devices(("0", "1"), 3).environment("1")["OMP_NUM_THREADS"] == "2"
    assert Devices(("0",), 32).environment("0")["OMP_NUM_THREADS"] == "1"
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert Devices(("0", "1"), 3).environment("1")["OMP_NUM_THREADS"] == "5"


def test_two_sweeps_do_not_share_a_folder(stage, write_grid):
    grid = write_grid()
    RUNS.mkdir()
    with FileLock(RUNS / ".sweep.lock"), pytest.raises(GridError, match="another sweep is running in runs"):
        stage.sweep(grid)
    assert stage.calls() == []
    assert stage.sweep(grid)


def test_what_the_plugin_refuses_is_refused_before_anything_runs(stage, write_grid):
    for method, message in (
        ({"adapter": "super", "supra_lambda": 0.5}, r"methods.bad: supra_lambda: 0.5 contradicts adapter: super"),
        (
            {"adapter": "lora", "mask_score": "wanda"},
            r"methods.bad: mask_score: wanda has no effect with adapter: lora",
        ),
        ({"adapter": "lora", "lora_rr": 3}, r"methods.bad: lora_rr: 3 is not a key of .*; did you mean lora_r\?"),
        ({"adapter": "lora", "plugins": ["gone.Plugin"]}, "plugins: gone.Plugin cannot be loaded"),
    ):
        with pytest.raises(GridError, match=message):
            stage.sweep(write_grid(methods={"good": {"adapter": "lora"}, "bad": method}))
    assert not RUNS.exists()


@pytest.fixture
def command(stage):
    stage.write_plan()
    return lambda *arguments: CliRunner().invoke(supertune, ["sweep", *map(str, arguments)])


def test_a_dry_run_lists_what_would_run(stage, write_grid, command):
    grid = write_grid(chosen={"seeds": [1], "methods": ["lora"], "leading": 1})
    stage.plan["behaviour"] = {"lora 0.001 0": "fail", "magnitude 0.0001 0": "stop the sweep"}
    with pytest.raises(Signalled):
        stage.sweep(grid)
    stage.calls()
    before = sorted(RUNS.rglob("*"))
    result = command(grid, "--dry-run", "--retry-failed")
    assert result.exit_code == 0, result.output
    *lines, last = result.output.strip().splitlines()
    assert last == "Unchecked: magnitude: base_model: base, whose config is not here, and what depends on its layers."
    assert [line.split() for line in lines[-8:]] == [
        ["training", "lora/lr0.0001-ep1-seed0", "done"],
        ["training", "lora/lr0.001-ep1-seed0", "failed", "train"],
        ["training", "magnitude/lr0.0001-ep1-seed0", "stopped", "go", "on", "from", "step", "2"],
        ["training", "magnitude/lr0.001-ep1-seed0", "new", "train"],
        ["other", "seeds", "seeds", "1", "of", "lora,", "the", "1", "leading", "when", "training", "has", "ended"],
        ["scoring", "base", "score"],
        ["scoring", "chosen", "runs", "when", "training", "has", "ended"],
        ["3", "runs", "to", "train,", "1", "done,", "in", "runs"],
    ]
    assert sorted(RUNS.rglob("*")) == before
    assert stage.calls() == []


def test_data_that_is_missing_is_told_before_anything_runs(stage, write_grid, command):
    grid = write_grid()
    Path("train.jsonl").rename("elsewhere.jsonl")
    result = command(grid, "--dry-run")
    assert result.exit_code == 1
    assert "4 runs to train" in result.output
    missing = "datasets[0].path: there is no file or folder train.jsonl. Name one, or a dataset on the hub."
    assert f"Refused: {missing}\n" in result.output, "of all methods, so that none is named"
    result = command(grid)
    assert f"methods.lora: {missing}" in result.output
    assert stage.calls() == []
    Path("elsewhere.jsonl").rename("train.jsonl")
    other = write_grid(methods={"lora": {"adapter": "lora"}, "own": {**MAGNITUDE, "datasets": [{"path": "gone.json"}]}})
    assert "Refused: own: datasets[0].path: there is no file or folder gone.json" in command(other, "--dry-run").output
    grid = write_grid()
    assert stage.sweep(grid)
    Path("train.jsonl").unlink()
    done = command(grid, "--dry-run")
    assert (done.exit_code, "Refused" in done.output, "Unchecked" in done.output) == (0, False, False)
    assert stage.sweep(grid), "nothing is left to read it"


def test_the_command_says_what_is_wrong_and_how_it_ended(stage, write_grid, command, monkeypatch):
    grid = write_grid(base={"max_steps": 3})
    result = command(grid)
    assert result.exit_code == 1
    assert "Error: base.yml: max_steps: 3" in result.output.replace(str(grid.parent) + "/", "")
    for raised, code in ((OutOfTime(), 3), (Signalled(signal.SIGINT), 130), (Signalled(signal.SIGTERM), 143)):

        def stop(self, until, raised=raised):
            raise raised

        monkeypatch.setattr(Sweep, "sweep", stop)
        result = command(write_grid())
        assert result.exit_code == code
        assert "the same command goes on" in result.output
    for good, code in ((True, 0), (False, 1)):
        monkeypatch.setattr(Sweep, "sweep", lambda self, until, good=good: good)
        assert command(write_grid()).exit_code == code


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "runs: No space left on device. What is done stays"),
        (
            OSError(errno.EROFS, "Read-only file system", "runs/grid.json"),
            "Error: runs/grid.json: Read-only file",
        ),
    ],
)
def test_a_folder_that_cannot_be_written_is_told_without_a_traceback(write_grid, command, monkeypatch, error, said):
    def full(*arguments):
        raise error

    grid = write_grid()
    monkeypatch.setattr("axolotl_supertune.grid.sweep.sweep.Sweep._write_grid", full)
    result = command(grid)
    assert result.exit_code == 1
    assert said in result.output
    assert isinstance(result.exception, SystemExit)


def test_gpus_are_numbered_among_the_visible_ones(monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 3)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert visible_gpus(None) == ("0", "1", "2")
    assert visible_gpus("0,2") == ("0", "2")
    assert visible_gpus("none") == visible_gpus("") == ()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,GPU-9, 7")
    assert visible_gpus(None) == ("4", "GPU-9", "7")
    assert visible_gpus("1,2") == ("GPU-9", "7")
    for asked in ("3", "0,0", "x", "0,"):
        with pytest.raises(ValueError, match=rf"--gpus {asked}: .* is not one of the 3 GPUs"):
            visible_gpus(asked)
