"""Which runs a sweep chooses, trains again and scores; with fake processes."""

import pytest
from grid_cases import FIRST, RUNS, folder, weights

from axolotl_supertune.grid.config import GridError
from axolotl_supertune.grid.sweep.devices import Devices
from axolotl_supertune.grid.sweep.sweep import Sweep


def test_a_rate_that_diverged_or_failed_is_not_chosen(stage, write_grid):
    stage.plan["nll"] = {"lora 0.0001 0": float("nan"), "lora 0.001 0": 9.0}
    stage.plan["behaviour"] = {"magnitude 0.0001 0": "fail", "magnitude 0.001 0": "fail"}
    assert not stage.sweep(write_grid(chosen={"seeds": [1], "methods": ["magnitude"], "leading": 2}))
    assert stage.calls("run") == [*FIRST, "lora 0.001 1"]


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


@pytest.mark.slow
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
    expected = "1 run that is to be scored has no weights any more: it trains again."
    assert (expected in stage.printed) == (keep == "chosen")
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


@pytest.mark.slow
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
        Sweep(write_grid(), Devices(()), None).listing()


@pytest.mark.slow
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
