"""`axolotl supertune report`, from the records of a grid to its files."""

import errno
import json
import os
import random
import re
import shutil
import tempfile
from pathlib import Path

import matplotlib.image
import pytest
from grid_records import SETUP, grid, make_run, make_scores, save_records
from reporting import LATER, heading, rows, run_report

from axolotl_supertune.grid.report.analysis import analyze
from axolotl_supertune.grid.report.report import FIGURES, TABLES
from axolotl_supertune.grid.report.table_formats import latex
from axolotl_supertune.grid.report.tables import make_tables
from axolotl_supertune.grid.run_files import SCORES_FILE, read_runs
from axolotl_supertune.grid.sweep.state import SweepState

GOLDEN = Path(__file__).parent / "golden"
GOLDEN_FILES = (
    "report.md",
    "summary.csv",
    "validation.csv",
    "differences.csv",
    "learning_rates.csv",
    "accuracy_published.tex",
)


@pytest.fixture(scope="module")
def reported(tmp_path_factory):
    """The folder of a whole report on `grid`."""
    records, base = grid()
    runs_dir = save_records(tmp_path_factory.mktemp("grid") / "runs", *records, base=base)
    result = run_report(runs_dir)
    assert result.exit_code == 0, result.output
    return runs_dir / "report"


def test_the_whole_report(reported):
    """Compared with tests/grid/golden, which make_golden.py writes."""
    expected = {f"{name}.{kind}" for name in TABLES for kind in ("csv", "tex")}
    expected |= {f"{name}.{kind}" for name in FIGURES for kind in ("png", "svg")}
    assert {path.name for path in reported.iterdir()} == expected | {"report.md", "report.json"}
    for name in GOLDEN_FILES:
        assert (reported / name).read_text(encoding="utf-8") == (GOLDEN / name).read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_same_records_give_the_same_files(reported, small, tmp_path):
    assert run_report(small, "--output", tmp_path / "second").exit_code == 0
    for path in reported.iterdir():
        content = (tmp_path / "second" / path.name).read_bytes()
        assert content == path.read_bytes(), path.name
        assert str(tmp_path).encode() not in content
        if path.suffix == ".svg":
            assert b"<svg" in content
            assert not re.search(rb"<dc:date>|Matplotlib v", content)


def test_pictures_show_something(reported):
    for name in FIGURES:
        image = matplotlib.image.imread(reported / f"{name}.png")[..., :3]
        coloured = (image.max(-1) - image.min(-1)) > 0.2
        assert coloured.sum() > 300, name


def test_json_holds_what_the_tables_do(reported):
    contents = json.loads((reported / "report.json").read_text(encoding="utf-8"))
    assert (contents["resamples"], contents["bootstrap_seed"], contents["reference"]) == (10_000, 0, "lora")
    assert set(contents["tables"]) == set(TABLES)
    for name, records in contents["tables"].items():
        for record, row in zip(records, rows(reported / f"{name}.csv"), strict=True):
            assert {key: "" if value is None else str(value) for key, value in record.items()} == row
    assert any(note.startswith("Failed: supra-0.8") for note in contents["notes"])


def test_test_scores_have_no_say_in_the_rate(save):
    """Every scores.json is replaced by opposite scores, and other rates get scores: the choice stays."""
    records, base = grid()
    runs_dir = save(*records, base=base)
    before = analyze(runs_dir, resamples=100)
    for run, _ in records:
        if run.status == "done":
            make_scores(run.key, 0.99 if run.key.learning_rate != 5e-4 else 0.01).write(
                runs_dir / run.key.folder / SCORES_FILE
            )
    after = analyze(runs_dir, resamples=100)
    assert after.choices == before.choices
    assert [result.choice for result in after.results] == [result.choice for result in before.results]
    assert after.comparisons != before.comparisons


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after", "left_out"),
    [
        # The choice moves to a rate that is better with seed 0 alone, so that all seeds have both rates.
        ({"learning_rates": [1e-2]}, {"learning_rates": [1e-3, 1e-2]}, ""),
        ({"learning_rates": [1e-4, 1e-2]}, {"learning_rates": [1e-2]}, "lora/lr0.0001-ep1 (seed 0, 1, 2)"),
        ({"epochs": [1, 3]}, {}, "lora/lr0.001-ep3 (seed 0, 1, 2)"),
        ({}, {"methods": {"lora": {"adapter": "lora"}}}, "magnitude/lr0.001-ep1 (seed 0, 1, 2)"),
        ({}, {"chosen": {}}, "lora/lr0.001-ep1 (seed 1, 2), magnitude/lr0.001-ep1 (seed 1, 2)"),
        ({"seeds": [0, 1], "chosen": {}}, {"chosen": {}}, "lora/lr0.001-ep1 (seed 1)"),
    ],
)
def test_the_report_is_of_the_grid_and_chooses_as_the_sweep_does(stage, write_grid, before, after, left_out):
    stage.plan["nll"] = {"lora 0.0001 0": 0.5, "lora 0.001 0": 0.9, "lora 0.001 1": 2.0, "lora 0.001 2": 2.0}
    usual = {"learning_rates": [1e-3], "chosen": LATER}
    for keys in (before, after):
        assert stage.sweep(write_grid(**{**usual, **keys}))
    present = SweepState(stage.folder / "grid.yml")
    present.read()
    found = analyze(Path("runs"), resamples=100)
    assert found.choices == present.choices()
    reported = {run.key for result in found.results for run in result.runs.values()}
    assert reported == set(present.best())
    assert {key for key in reported if key.seed} or "chosen" in after
    said = [note for note in found.notes if note.startswith("Left out")]
    assert bool(said) == bool(left_out)
    assert left_out in "".join(said)
    assert {run.key for run in [*found.runs, *found.left_out]} == {run.key for run in read_runs(Path("runs"))}


def test_without_a_grid_every_run_counts(stage, write_grid):
    for rates in ([1e-4], [1e-3]):
        assert stage.sweep(write_grid(learning_rates=rates))
    (grid_file := Path("runs") / "grid.json").unlink()
    assert analyze(Path("runs"), resamples=100).choices["lora", 1].tried == (1e-4, 1e-3)
    grid_file.write_text('{"format": 1}')
    assert "grid.json is no grid of a sweep" in run_report("runs").output


def test_a_grid_without_finished_runs_has_no_report(stage, write_grid):
    assert stage.sweep(write_grid())
    stage.plan["behaviour"] = {"other 0.001 0": "fail"}
    assert not stage.sweep(write_grid(methods={"other": {"adapter": "lora"}}, learning_rates=[1e-3]))
    assert "grid.json no longer lists them" in run_report("runs").output


@pytest.mark.usefixtures("undrawn")
def test_a_method_whose_first_stage_is_gone_is_named(stage, write_grid):
    """Only its further seeds are left: no rate can be chosen among them."""
    assert stage.sweep(write_grid(learning_rates=[1e-3], chosen=LATER))
    shutil.rmtree(Path("runs") / "magnitude" / "lr0.001-ep1-seed0")
    result = run_report("runs", "--resamples", 100)
    assert result.exit_code == 0, result.output
    assert "No rate could be chosen for magnitude" in result.output


def test_training_alone(save):
    """No scores yet: rates and curves, no accuracies, no comparisons, and none left of an earlier report."""
    records, _ = grid()
    runs_dir = save(*((run, None) for run, _ in records))
    output = runs_dir / "report"
    output.mkdir()
    for name in ("differences.svg", "accuracy_published.csv", "mine.txt"):
        (output / name).touch()
    result = run_report(runs_dir)
    assert result.exit_code == 0, result.output
    assert "No scores yet" in result.output
    tabled = {
        f"{name}.{kind}" for name in ("summary", "validation", "cost", "learning_rates") for kind in ("csv", "tex")
    }
    drawn = {f"{name}.{kind}" for name in ("curves", "learning_rates") for kind in ("png", "svg")}
    assert {path.name for path in output.iterdir()} == tabled | drawn | {"report.md", "report.json", "mine.txt"}
    page = (output / "report.md").read_text(encoding="utf-8")
    assert "better" not in page.replace("so that a better one may lie", "")
    assert "| base (before training) | – | – | – | 1.4000 |" in page


def contents(folder):
    return {path.name: path.read_bytes() if path.is_file() else None for path in folder.iterdir()}


FULL = OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("at", [0, 5, len(TABLES), -1])
def test_a_report_that_does_not_fit_leaves_the_earlier_one_whole(small, monkeypatch, at):
    """The disk becomes full at some file."""
    assert run_report(small, "--resamples", 100).exit_code == 0
    before = contents(small / "report")
    shutil.rmtree(small / "lora" / "lr0.0005-ep1-seed1")
    written, fsync = [], os.fsync

    def write_until_full(descriptor):
        written.append(descriptor)
        if len(written) == (len(before) if at == -1 else at + 1):
            raise FULL
        fsync(descriptor)

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", write_until_full)
        result = run_report(small, "--resamples", 100)
    assert result.exit_code == 1
    assert re.search(r"report/\w+\.\w+ cannot be written: No space left on device\. Make room", result.output)
    assert "--output" in result.output
    assert contents(small / "report") == before
    assert run_report(small, "--resamples", 100).exit_code == 0
    after = contents(small / "report")
    assert after.keys() == before.keys()
    assert after["report.md"] != before["report.md"]


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("name", ["summary.csv", "report.md"])
def test_a_folder_in_a_files_place_is_named_and_nothing_replaced(small, name):
    assert run_report(small, "--resamples", 100).exit_code == 0
    (path := small / "report" / name).unlink()
    path.mkdir()
    before = contents(small / "report")
    result = run_report(small, "--seed", 1, "--resamples", 100)
    assert result.exit_code == 1
    assert f"{path} is a folder" in result.output
    assert contents(small / "report") == before


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("what", ["a file above", "a read-only file system"])
def test_an_output_that_cannot_be_made_is_named(small, tmp_path, monkeypatch, what):
    output = tmp_path / "there" / "out"
    if what == "a file above":
        (tmp_path / "there").touch()
    else:
        refused = OSError(errno.EROFS, "Read-only file system")
        monkeypatch.setattr(tempfile, "mkdtemp", lambda **_: (_ for _ in ()).throw(refused))
    result = run_report(small, "--output", output, "--resamples", 100)
    assert result.exit_code == 1
    assert isinstance(result.exception, SystemExit)
    assert f"{output} cannot be written: " in result.output
    assert "--output" in result.output.split("cannot be written")[1]


def test_a_reference_that_was_never_run_is_refused_and_nothing_is_written(small):
    result = run_report(small, "--reference", "dora")
    assert result.exit_code == 1
    assert "--reference: dora is not one of the methods in" in result.output
    assert "lora" in result.output
    assert not (small / "report").exists()


@pytest.mark.usefixtures("undrawn")
def test_the_heading_names_model_data_budget_and_where_it_ran(save):
    """From run.json, or for old records from config.yml; a failed run has no device."""
    runs = [make_run("lora", 1e-4), make_run("super", 1e-4, setup=None), make_run("full", 1e-4, nll=None, device=None)]
    runs_dir = save(*((run, None) for run in runs))
    (runs_dir / runs[1].key.folder / "config.yml").write_text(
        "base_model: a/base\nadapter: super\nlora_r: 8\n"
        "datasets: [{path: train.jsonl, type: alpaca}]\ntest_datasets: [{path: valid.jsonl}]\n"
    )
    assert read_runs(runs_dir)[2].setup == SETUP
    expected = {
        "Base model": "a/base",
        "Trained on": "train.jsonl",
        "Validated on": "valid.jsonl",
        "Budget": r"1,000 parameters (lora\_r 8)",
        "Devices": "One GPU",
        "Versions": "peft 1.0, torch 2.0",
    }
    assert heading(runs_dir) == expected
    where = json.loads((runs_dir / "report" / "report.json").read_text(encoding="utf-8"))["where"]
    assert where == {
        "base_models": ["a/base"],
        "datasets": ["train.jsonl"],
        "test_datasets": ["valid.jsonl"],
        "budgets": ["lora_r 8"],
        "budget_parameters": [1000],
        "devices": ["One GPU"],
        "versions": ["peft 1.0", "torch 2.0"],
    }
    (runs_dir / runs[1].key.folder / "config.yml").write_text("- no mapping")
    assert "config.yml is not the YAML of a run" in run_report(runs_dir).output


@pytest.mark.usefixtures("undrawn")
def test_of_old_records_alone_nothing_is_made_up(save):
    said = heading(save((make_run("lora", 1e-4, setup=None, budget_parameters=None, versions={}, device=None), None)))
    assert said.pop("Budget") == "no number of parameters"
    assert set(said.values()) == {"not recorded"}


@pytest.mark.slow
def test_a_whole_grid_of_records_is_small_and_enough(tmp_path):
    """As many runs as examples/paper/smollm2-135m.yml has, all scored, and no files but the records."""
    items = (("AddSub", 395), ("MultiArith", 600), ("SingleEq", 508), ("gsm8k", 1319), ("AQuA", 254), ("SVAMP", 1000))
    draw = random.Random(0)
    records = []
    for at, (rate, seed) in enumerate([(1e-4, 0), (5e-4, 0), (1e-3, 0), (5e-4, 1)]):
        for method in ("lora", *(f"method-{number}" for number in range(16))):
            losses = [(step, draw.random()) for step in range(10, 470, 10)]
            evaluated = [(step, draw.random()) for step in (0, 150, 300, 450, 467)]
            run = make_run(method, rate, seed, losses=losses, eval_losses=[*evaluated[:-1], (467, 1 + at % 2)])
            records.append((run, make_scores(run.key, 0.4, items=items, targets=120)))
    runs_dir = save_records(tmp_path / "runs", *records, base=make_scores(None, 0.1, items=items, targets=120))
    files = list(runs_dir.rglob("*.json"))
    assert len(files) == 2 * 68 + 1
    assert sum(file.stat().st_size for file in files) < 3e6
    assert run_report(runs_dir, "--resamples", 100).exit_code == 0


def test_nothing_to_report(tmp_path, save):
    result = run_report(tmp_path)
    assert result.exit_code == 1
    assert "holds no run that finished" in result.output
    runs_dir = save((make_run("lora", 1e-4, nll=None), None))
    assert "holds no run that finished" in run_report(runs_dir).output


def test_no_rate_for_anyone(save):
    """Every run diverged: an error says that no rate can be chosen."""
    runs_dir = save((make_run("lora", 1e-4, nll=float("inf")), None))
    result = run_report(runs_dir)
    assert result.exit_code == 1
    assert "no method has a run with a finite validation NLL" in result.output


def test_latex_is_escaped_and_whole(save):
    run = make_run("lo_ra&50%", 5e-4)
    found = analyze(save((run, make_scores(run.key, 0.5))))
    for table in make_tables(found):
        text = latex(table)
        body = text.split(r"\midrule")[1].split(r"\bottomrule")[0]
        assert r"lo\_ra\&50\%" in body
        assert r"$5\cdot10^{-4}$" in text
        for line in body.strip().splitlines():
            assert line.endswith(r" \\")
            assert len(re.findall(r"(?<!\\)&", line)) == len(table.cells.columns) - 1
        assert text.isascii()
