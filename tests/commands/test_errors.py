"""What every command makes of an error that its user can mend."""

import errno

import click
import pytest
from click.testing import CliRunner

from axolotl_supertune.commands.cli import supertune
from axolotl_supertune.commands.errors import disk_errors, user_errors


@pytest.mark.parametrize("error", [ValueError("no"), FileNotFoundError("no"), ConnectionError("no")])
def test_a_message_without_a_traceback(error):
    with pytest.raises(click.ClickException, match=r"^no$"), user_errors():
        raise error


def test_a_full_disk_names_the_file_that_was_asked_for(tmp_path):
    full = OSError(errno.ENOSPC, "No space left on device", str(tmp_path / ".saving.x" / "files" / "a.json"))
    with (
        pytest.raises(click.ClickException, match=r"a\.json: No space left on device\. Make room"),
        user_errors("a.json"),
    ):
        raise full


def test_a_closed_pipe_and_a_bug_are_left_alone():
    with pytest.raises(BrokenPipeError), user_errors():
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")
    with pytest.raises(KeyError), user_errors():
        raise KeyError("bug")


def test_a_pipe_that_a_sweep_finds_closed_is_no_full_disk():
    """As with `axolotl supertune sweep GRID --dry-run | head`: click ends quietly on a BrokenPipeError."""
    with pytest.raises(BrokenPipeError), user_errors(), disk_errors("a file of the grid's output_dir"):
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")


def test_an_error_of_the_harness_keeps_its_traceback(tmp_path, monkeypatch):
    bug = ValueError("a bug of a library")

    def evaluate(*args, **kwargs):
        raise bug

    monkeypatch.setattr("axolotl_supertune.tasks.evaluation.evaluate", evaluate)
    (tmp_path / "run.yml").write_text("base_model: base\n")
    result = CliRunner().invoke(supertune, ["eval", str(tmp_path / "run.yml"), "--base"])
    assert result.exception is bug


def test_calibrate_names_a_yaml_that_is_no_mapping(tmp_path):
    (tmp_path / "run.yml").write_text("- a\n")
    result = CliRunner().invoke(supertune, ["calibrate", str(tmp_path / "run.yml")])
    assert result.exit_code == 1
    assert "run.yml: not a YAML of keys" in " ".join(result.output.split())
