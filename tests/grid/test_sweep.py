"""A sweep runs the stages of a grid, what is missing and nothing twice; with fake processes."""

import json
from pathlib import Path

import pytest
import yaml
from filelock import FileLock
from grid_cases import FIRST, MAGNITUDE, RUNS, folder, weights

from axolotl_supertune.grid.config import GridError
from axolotl_supertune.grid.run_files import read_scores


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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("keep", "runs", "left", "scored"), [("all", "chosen", 4, 3), ("chosen", "all", 2, 5), ("chosen", "none", 2, 0)]
)
def test_what_is_kept_and_scored_is_the_grids_to_say(stage, write_grid, keep, runs, left, scored):
    assert stage.sweep(write_grid(keep=keep, score={"runs": runs}))
    assert len(weights()) == left
    assert len(stage.calls("score")) == scored
    assert len(list(RUNS.rglob("checkpoint-9"))) == (4 if keep == "all" else 0)


def test_a_grid_that_grows_trains_what_is_new(stage, write_grid):
    assert stage.sweep(write_grid(learning_rates=[1e-3]))
    assert stage.calls("run") == ["lora 0.001 0", "magnitude 0.001 0"]
    assert stage.sweep(write_grid())
    assert stage.calls("run") == ["lora 0.0001 0", "magnitude 0.0001 0"]


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


def test_two_sweeps_do_not_share_a_folder(stage, write_grid):
    grid = write_grid()
    RUNS.mkdir()
    with FileLock(RUNS / ".sweep.lock"), pytest.raises(GridError, match="another sweep is running in runs"):
        stage.sweep(grid)
    assert stage.calls() == []
    assert stage.sweep(grid)


@pytest.mark.slow
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
