"""Reading and writing run.json and scores.json."""

import json
import re
import shutil

import numpy as np
import pytest
from grid_records import make_run, make_scores
from reporting import run_report

from axolotl_supertune.grid.run_files import SCORES_FILE, Run, Setup, last_words, read_runs, read_scores


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("ValueError: no\n\r  0%|   | 0/12 [00:01<?, ?it/s]\r  8%|#  | 1/12 [00:02<?, ?it/s]\n\n", "ValueError: no"),
        ("a bar\r and its last words", "and its last words"),
        ("", ""),
    ],
)
def test_last_words_are_no_progress_bar(text, expected):
    assert last_words(text) == expected


def test_a_setup_is_what_the_yaml_names():
    settings = {
        "base_model": "b",
        "revision_of_model": "v2",
        "datasets": [{"path": "p", "name": "main"}, {"path": "q"}],
    }
    assert Setup.of({**settings, "adapter": "lora", "lora_r": 4}) == Setup(
        base_model="b (revision v2)", datasets=("p (main)", "q"), budget="lora_r 4"
    )
    assert Setup.of({**settings, "adapter": "super", "sparse_density": 0.1}).budget == "sparse_density 0.1"
    assert Setup.of({**settings, "lora_r": 4}).budget is None, "full fine-tuning"


def test_records_that_diverged_survive_the_disk(tmp_path):
    """JSON has no NaN, and a loss of null could not be read back."""
    run = make_run("lora", 1e-4, nll=float("nan"))
    run.write(tmp_path / run.key.folder / "run.json")
    (again,) = read_runs(tmp_path)
    assert np.isnan(again.validation_nll)
    assert again.losses == run.losses
    json.loads(
        (tmp_path / run.key.folder / "run.json").read_text(encoding="utf-8"),
        parse_constant=lambda name: pytest.fail(f"{name} is no JSON"),
    )


def test_a_run_in_the_folder_of_another_is_refused(tmp_path):
    run = make_run("lora", 1e-4)
    run.write(tmp_path / "lora" / "copy" / "run.json")
    with pytest.raises(ValueError, match=r"copy/run\.json is of the run lora/lr0\.0001-ep1-seed0"):
        read_runs(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"correct": "10x"}, "correct"),
        ({"correct_strict": "1"}, "must hold as many"),
        ({"clean": "1"}, "must hold as many"),
        ({"correct": "", "correct_strict": ""}, "at least one"),
        ({"gold_tokens": [3]}, "gold_nll holds 0 targets, gold_tokens 1"),
    ],
)
def test_scores_that_contradict_themselves_are_refused(tmp_path, changes, message):
    benchmark = {"correct": "101", "correct_strict": "100", **changes}
    path = tmp_path / SCORES_FILE
    path.write_text(json.dumps({"benchmarks": {"AddSub": benchmark}, "seconds": 1}), encoding="utf-8")
    with pytest.raises(ValueError, match=rf"(?s){re.escape(str(path))}.*{message}"):
        read_scores(path)


def test_a_run_is_read_as_it_was_written(tmp_path):
    run = make_run("lora", 1e-4)
    run.write(tmp_path / run.key.folder / "run.json")
    assert read_runs(tmp_path) == [run]
    assert isinstance(read_runs(tmp_path)[0], Run)


def test_damaged_records_are_named(small):
    path = small / "lora" / "lr0.0005-ep1-seed1" / SCORES_FILE
    path.write_text("{", encoding="utf-8")
    assert str(path) in run_report(small).output
    other = make_run("lora", 1e-4)
    make_scores(other.key, 0.5).write(path)
    assert "is not of the run beside it" in run_report(small).output


def test_scores_of_a_run_are_not_those_of_the_base(small):
    scored = small / "lora" / "lr0.0005-ep1-seed1" / SCORES_FILE
    shutil.copy(scored, small / "base" / SCORES_FILE)
    result = run_report(small)
    assert result.exit_code == 1
    assert f"{small / 'base' / SCORES_FILE} is of the run lora/lr0.0005-ep1-seed1, not of the model" in result.output
    assert not (small / "report").exists()
