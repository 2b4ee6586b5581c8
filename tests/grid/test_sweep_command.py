"""`axolotl supertune sweep`: the dry run, what is refused, messages and exit codes; with fake processes."""

import errno
import signal
from pathlib import Path

import pytest
from click.testing import CliRunner
from grid_cases import MAGNITUDE, RUNS

from axolotl_supertune.commands.cli import supertune
from axolotl_supertune.grid.sweep import dry_run
from axolotl_supertune.grid.sweep.jobs import OutOfTime, Signalled
from axolotl_supertune.grid.sweep.sweep import Sweep
from axolotl_supertune.method.config_error import MissingFileError


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
    assert last == "Not checked: magnitude: base_model: the config of base, which lists the layers, is not here."
    assert [line.split() for line in lines[-8:]] == [
        ["training", "lora/lr0.0001-ep1-seed0", "done"],
        ["training", "lora/lr0.001-ep1-seed0", "failed", "train"],
        ["training", "magnitude/lr0.0001-ep1-seed0", "stopped", "go", "on", "from", "step", "2"],
        ["training", "magnitude/lr0.001-ep1-seed0", "new", "train"],
        ["further", "seeds", "seeds", "1", "of", "lora,", "the", "1", "leading", "when", "training", "has", "ended"],
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
    assert (done.exit_code, "Refused" in done.output, "Not checked" in done.output) == (0, False, False)
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


def test_a_dry_run_lists_a_missing_file_that_cannot_be_left_out(tmp_path, monkeypatch):
    def make(*args, **kwargs):
        raise MissingFileError("base_model", "there is no folder base.")

    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr(dry_run.planning, "make", make)
    findings = dry_run._check_run({"adapter": "supra", "base_model": str(tmp_path)}, {})
    assert findings.refusals == ["base_model: there is no folder base."]
