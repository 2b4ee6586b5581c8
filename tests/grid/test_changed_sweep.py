"""Records and shared files made from other data, YAMLs or models are refused or made anew."""

import json
import shutil
from pathlib import Path

import pytest
import yaml
from grid_cases import MAGNITUDE

from axolotl_supertune.grid.config import GridError
from axolotl_supertune.grid.run_files import Run, read_run, read_runs, read_scores
from axolotl_supertune.grid.sweep.devices import Devices
from axolotl_supertune.grid.sweep.file_digests import FileDigests, data_paths, digest
from axolotl_supertune.grid.sweep.jobs import Signalled
from axolotl_supertune.grid.sweep.sweep import Sweep

RUNS = Path("runs")
COMMITTED = Path(__file__).parents[2] / "examples/paper/results/smollm2-135m/runs"
WANDA = {"lora": {"adapter": "lora"}, "wanda": {"adapter": "super"}}


def change(name):
    Path(name).write_text("other " + Path(name).read_text())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "runs"), [("train.jsonl", "lora"), ("valid.jsonl", "lora"), ("text.txt", "wanda"), ("norms", "wanda")]
)
def test_finished_runs_of_another_file_are_refused(stage, write_grid, name, runs):
    Path("norms").write_text("norms")
    base = {"calibration_path": "norms", "calibration_dataset": None} if name == "norms" else {}
    assert stage.sweep(write_grid(base, methods=WANDA, learning_rates=[1e-3]), until="choose")
    stage.calls()
    change(name)
    grid = write_grid(base, methods=WANDA, learning_rates=[1e-3, 1e-2])
    count = 2 if runs == "lora" else 1
    message = (
        rf"finished runs .* \({count}\):\n  runs/{runs}/lr0.001-ep1-seed0: {name}: sha256 \w{{12}} recorded, .*\n.*Put"
    )
    for act in (lambda: stage.sweep(grid), lambda: Sweep(grid, Devices(()), None).listing()):
        with pytest.raises(GridError, match=f"(?s){message}"):
            act()
    assert stage.calls() == []
    Path(name).write_text(Path(name).read_text().removeprefix("other "))
    assert stage.sweep(grid)
    assert stage.calls("run") == ["lora 0.01 0", "wanda 0.01 0"]


def test_files_are_read_once_and_recorded(stage, write_grid):
    assert stage.sweep(write_grid(methods=WANDA, learning_rates=[1e-3]))
    files = {run.key.method: sorted(run.setup.files) for run in read_runs(RUNS)}
    assert files == {"lora": ["train.jsonl", "valid.jsonl"], "wanda": ["text.txt", "train.jsonl", "valid.jsonl"]}
    assert sorted(read_scores(RUNS / "base/scores.json").files) == ["train.jsonl"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["train.jsonl", "valid.jsonl"])
def test_of_other_data_everything_is_prepared_anew(stage, write_grid, name):
    """Also after runs that failed because of their data: they need tokenizing again."""
    grid = write_grid(score={"runs": "none"})
    stage.plan["behaviour"] = {"lora 0.0001 0": "fail", "magnitude 0.0001 0": "fail"}
    assert not stage.sweep(write_grid(score={"runs": "none"}, learning_rates=[1e-4]))
    first = [call["yaml"] for call in stage.calls() if call.get("prepare") == "data"]
    change(name)
    stage.plan["behaviour"] = {}
    assert stage.sweep(grid, retry_failed=True)
    second = [call["yaml"] for call in stage.calls() if call.get("prepare") == "data"]
    assert len(first) == len(second) == 1
    folders = {yaml.safe_load(path.read_text())["dataset_prepared_path"] for path in RUNS.glob("*/*/config.yml")}
    assert folders == {yaml.safe_load(second[0])["dataset_prepared_path"]}
    assert folders != {yaml.safe_load(first[0])["dataset_prepared_path"]}
    assert len(list((RUNS / "prepared").iterdir())) == 2


@pytest.mark.slow
def test_data_that_was_tokenized_in_another_order_is_left_alone(stage, write_grid):
    """An earlier version shuffled by the seed of whichever run came first, and named the folder by the files alone."""
    grid = write_grid(score={"runs": "none"})
    before = RUNS / "prepared" / digest(FileDigests().of(["train.jsonl", "valid.jsonl"]))
    before.mkdir(parents=True)
    assert stage.sweep(grid)
    assert [call["prepare"] for call in stage.calls() if "prepare" in call] == ["data"]
    folders = {yaml.safe_load(path.read_text())["dataset_prepared_path"] for path in RUNS.glob("*/*/config.yml")}
    assert len(folders) == 1
    assert before.as_posix() not in folders


@pytest.mark.slow
@pytest.mark.parametrize(
    "change", [{"shuffle_merged_datasets": False}, {"sequence_len": 300}, {"train_on_inputs": True}], ids=str
)
def test_runs_that_tokenize_otherwise_share_no_data(stage, write_grid, change):
    """Axolotl's own name for tokenized data ignores the first of these keys, and shuffles by seed for the others."""
    same = {**MAGNITUDE, "lora_r": 4, "sparse_direction": "top", "lora_target_linear": True}
    methods = {"a": MAGNITUDE, "other": {**MAGNITUDE, **change}, "same": same}
    assert stage.sweep(write_grid(methods=methods, learning_rates=[1e-3], score={"runs": "none"}))
    made = [yaml.safe_load(call["yaml"]) for call in stage.calls() if call.get("prepare") == "data"]
    [(key, value)] = change.items()
    assert sorted(str(each.get(key)) for each in made) == sorted(["None", str(value)])
    used = {
        path.parts[1]: yaml.safe_load(path.read_text())["dataset_prepared_path"] for path in RUNS.glob("*/*/config.yml")
    }
    assert used["a"] == used["same"] != used["other"]


@pytest.mark.slow
def test_a_prepared_folder_of_ones_own_is_not_filled_with_two_files_of_one_name(stage, write_grid):
    grid = write_grid({"dataset_prepared_path": "own"}, learning_rates=[1e-3], score={"runs": "none"})
    for _ in range(2):
        assert stage.sweep(grid)
        for method in ("lora", "magnitude"):
            shutil.rmtree(RUNS / method)
        change("train.jsonl")
    assert len(list(Path("own").iterdir())) == 2


@pytest.mark.slow
def test_of_another_calibration_text_norms_are_measured_anew(stage, write_grid):
    grid = write_grid(methods=WANDA, learning_rates=[1e-3], score={"runs": "none"})
    assert stage.sweep(grid)
    shutil.rmtree(RUNS / "wanda")
    stage.calls()
    change("text.txt")
    assert stage.sweep(grid)
    assert [call.get("prepare", call.get("run")) for call in stage.calls()] == ["norms", "wanda 0.001 0"]
    assert len(list((RUNS / "calibration").glob("*.safetensors"))) == 2


@pytest.mark.slow
@pytest.mark.parametrize("name", ["train.jsonl", "valid.jsonl", "text.txt"])
def test_a_stopped_run_does_not_go_on_with_another_file(stage, write_grid, name):
    grid = write_grid(methods={"wanda": {"adapter": "super"}}, learning_rates=[1e-3], score={"runs": "none"})
    stage.plan["behaviour"] = {"wanda 0.001 0": "stop the sweep"}
    with pytest.raises(Signalled):
        stage.sweep(grid)
    stage.calls()
    change(name)
    stage.plan["behaviour"] = {}
    assert "go on" not in Sweep(grid, Devices(()), None).listing()
    assert stage.sweep(grid)
    assert [call["checkpoints"] for call in stage.calls() if "run" in call] == [[]]


@pytest.mark.slow
def test_nothing_is_scored_beside_a_report_on_other_data(stage, write_grid):
    """Otherwise a model that was trained on test questions would be reported as clean."""
    grid = write_grid()
    assert stage.sweep(grid, until="choose")
    change("train.jsonl")
    with pytest.raises(GridError, match=r"train.jsonl: sha256"):
        stage.sweep(grid)
    shutil.rmtree(RUNS)
    stage.calls()
    stage.plan["edits"] = ["train.jsonl"]
    with pytest.raises(GridError, match=r"train.jsonl: was changed while this sweep ran .*: put it back"):
        stage.sweep(grid)
    assert stage.calls("score") == []
    assert not (RUNS / "contamination.json").exists()


def without_files():
    """Turn the records into those of an older version."""
    for path in RUNS.glob("*/*/run.json"):
        record = json.loads(path.read_text())
        del record["setup"]["files"]
        path.write_text(json.dumps(record))
    for path in RUNS.rglob("scores.json"):
        scores = json.loads(path.read_text())
        del scores["files"], scores["base_model"]
        path.write_text(json.dumps(scores))


@pytest.mark.slow
def test_records_that_name_no_files_are_taken_as_done(stage, write_grid):
    grid = write_grid()
    assert stage.sweep(grid)
    without_files()
    stage.calls()
    assert stage.sweep(grid)
    assert stage.calls() == []
    change("train.jsonl")  # which their contamination report knows
    with pytest.raises(GridError, match=r"runs/lora/lr0.0001-ep1-seed0: train.jsonl: sha256"):
        stage.sweep(grid)
    (RUNS / "contamination.json").unlink()
    assert stage.sweep(grid)


def test_committed_records_stay_as_they_are(tmp_path):
    """Records with digests of their files, and older ones without."""
    with_files = set()
    for path in sorted(COMMITTED.glob("lora/*/run.json")):
        run = read_run(path)
        with_files.add(run.setup.files is not None)
        run.write(tmp_path / "run.json")
        assert Run.model_validate_json((tmp_path / "run.json").read_text()) == run
        assert (tmp_path / "run.json").read_text() == path.read_text()
    assert with_files == {True, False}
    assert read_scores(COMMITTED / "base/scores.json").base_model is None


def test_contents_are_those_of_files_and_of_folders(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("set").mkdir()
    Path("set/data.arrow").write_text("a")
    Path("more.json").write_text("b")
    settings = {"datasets": [{"path": "set", "data_files": ["more.json"]}, {"path": "org/name"}], "test_datasets": None}
    before = FileDigests().of(data_paths(settings))
    assert sorted(before) == ["more.json", "set"]
    for made in ("cache-1.arrow", "x.lock", ".hidden"):
        Path("set", made).write_text("what reading it leaves")
    assert FileDigests().of(data_paths(settings)) == before
    Path("set/data.arrow").rename("set/other.arrow")
    assert FileDigests().of(["set"]) != {"set": before["set"]}


@pytest.mark.slow
def test_every_run_that_could_be_used_is_compared_with_the_grid(stage, write_grid):
    """Otherwise second-stage runs of a method that no longer leads would be averaged with new ones."""
    methods = {
        "lora": {"adapter": "lora"},
        "magnitude": MAGNITUDE,
        "random": {"adapter": "super", "sparse_direction": "random"},
    }
    grid = {
        "methods": methods,
        "learning_rates": [1e-3],
        "chosen": {"seeds": [1, 2], "methods": ["lora"], "leading": 1},
    }
    stage.plan["nll"] = {"magnitude 0.001 0": 0.5}
    assert stage.sweep(write_grid(**grid))
    for path in {*RUNS.glob("*/*seed0"), *RUNS.glob("lora/*")}:
        shutil.rmtree(path)
    stage.plan["nll"] = {"random 0.001 0": 0.5}
    stage.calls()
    changed = write_grid({"micro_batch_size": 8}, **grid)
    message = r"\(2\):\n  runs/magnitude/lr0.001-ep1-seed1: micro_batch_size: 4 .*\n  .*/lr0.001-ep1-seed2: "
    with pytest.raises(GridError, match=message):
        stage.sweep(changed)
    with pytest.raises(GridError, match=message):
        Sweep(changed, Devices(()), None).listing()
    assert stage.calls() == [], "it is told before anything is trained"


def test_all_runs_are_named_or_counted_that_differ(stage, write_grid):
    assert stage.sweep(write_grid(learning_rates=[1, 2, 3, 4]))
    with pytest.raises(GridError) as error:
        stage.sweep(write_grid({"micro_batch_size": 8}, learning_rates=[1, 2, 3, 4]))
    lines = str(error.value).splitlines()
    assert "(8)" in lines[0]
    assert len([line for line in lines if "micro_batch_size: 4 recorded, 8 now" in line]) == 5
    assert lines[-2:-1] == ["  and 3 more"]


def test_a_run_without_its_yaml_is_told_as_that(stage, write_grid):
    grid = write_grid()
    assert stage.sweep(grid)
    path = RUNS / "lora/lr0.001-ep1-seed0/config.yml"
    path.unlink()
    with pytest.raises(GridError, match=r"runs/lora/lr0.001-ep1-seed0: there is no config.yml"):
        stage.sweep(grid)
    path.write_text("a: [")
    with pytest.raises(GridError, match=r"runs/lora/lr0.001-ep1-seed0/config.yml is not valid YAML"):
        stage.sweep(grid)


@pytest.mark.slow
@pytest.mark.parametrize("fails", [False, True])
def test_scores_of_another_base_model_are_refused(stage, write_grid, fails):
    if fails:
        stage.plan["behaviour"] = dict.fromkeys(("lora 0.001 0", "magnitude 0.001 0"), "fail")
    assert stage.sweep(write_grid(learning_rates=[1e-3])) is not fails
    stage.plan["behaviour"] = {}
    for method in () if fails else ("lora", "magnitude"):
        shutil.rmtree(RUNS / method)
    stage.calls()
    grid = write_grid({"base_model": "another"}, learning_rates=[1e-3])
    message = r"runs/base/scores.json: base_model: base recorded, another now\n.* remove those scores.json"
    with pytest.raises(GridError, match=message):
        stage.sweep(grid, retry_failed=True)
    assert stage.calls() == []
    (RUNS / "base/scores.json").unlink()
    assert stage.sweep(grid, retry_failed=True)
    assert read_scores(RUNS / "base/scores.json").base_model == "another"


@pytest.mark.slow
def test_scores_of_another_model_are_refused(stage, write_grid):
    grid = write_grid(learning_rates=[1e-3])
    assert stage.sweep(grid)
    folders = ("base", "lora/lr0.001-ep1-seed0", "magnitude/lr0.001-ep1-seed0")
    base, lora, magnitude = (RUNS / folder / "scores.json" for folder in folders)
    kept = base.read_text()
    base.write_text(lora.read_text())
    with pytest.raises(GridError, match=r"runs/base/scores.json: it is of lora/lr0.001-ep1-seed0"):
        stage.sweep(grid)
    base.write_text(kept)
    magnitude.write_text(kept)
    with pytest.raises(GridError, match=r"magnitude/lr0.001-ep1-seed0/scores.json: it is of the base model"):
        stage.sweep(grid)
    magnitude.unlink()
    change("train.jsonl")
    for method in ("lora", "magnitude"):
        shutil.rmtree(RUNS / method)
    with pytest.raises(GridError, match=r"runs/base/scores.json: train.jsonl: sha256"):
        stage.sweep(grid)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["data", "norms"])
def test_what_needs_what_could_not_be_prepared_is_not_started(stage, write_grid, kind):
    stage.plan["prepare_fails"] = [kind]
    grid = write_grid(methods=WANDA, learning_rates=[1e-3])
    assert not stage.sweep(grid)
    assert stage.calls("run") == ([] if kind == "data" else ["lora 0.001 0"])
    assert f"no text for {kind}" in stage.printed
    assert "failed: wanda/lr0.001-ep1-seed0" in stage.printed
    stage.plan["prepare_fails"] = []
    assert stage.sweep(grid)


@pytest.mark.slow
def test_norms_of_a_training_set_that_could_not_be_tokenized_are_not_measured(stage, write_grid):
    """Measuring them would tokenize the data in another order, and all runs would train on that."""
    stage.plan["prepare_fails"] = ["data"]
    methods = {**WANDA, "on-training-set": {"adapter": "super", "calibration_dataset": "training_set"}}
    grid = write_grid(methods=methods, learning_rates=[1e-3], score={"runs": "none"})
    assert not stage.sweep(grid)
    calls = stage.calls()
    assert "data" in [call.get("prepare") for call in calls]
    assert not [call for call in calls if "run" in call or call.get("prepare") == "norms"]
    stage.plan["prepare_fails"] = []
    assert stage.sweep(grid)
