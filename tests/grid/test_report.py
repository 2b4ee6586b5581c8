"""`axolotl supertune report`, from the records of a grid to its files."""

import csv
import errno
import functools
import json
import os
import random
import re
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest
import scipy.stats
import yaml
from click.testing import CliRunner
from grid_cases import MAGNITUDE
from grid_records import SETUP, grid, make_run, make_scores, save_records

from axolotl_supertune.commands.report import report
from axolotl_supertune.grid.records import (
    SCORES_FILE,
    BenchmarkScores,
    Run,
    Scores,
    Setup,
    last_words,
    read_runs,
    read_scores,
)
from axolotl_supertune.grid.report.analysis import analyze
from axolotl_supertune.grid.report.figures.figures import make_figures
from axolotl_supertune.grid.report.metrics import METRICS, accuracies
from axolotl_supertune.grid.report.report import FIGURES, TABLES
from axolotl_supertune.grid.report.statistics import Interval, holm
from axolotl_supertune.grid.report.table_formats import latex
from axolotl_supertune.grid.report.tables import make_tables
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


def run_report(*arguments):
    return CliRunner().invoke(report, [str(argument) for argument in arguments])


def notes(*arguments):
    found = analyze(*arguments, resamples=200)
    return "\n".join(found.notes)


def rows(path):
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture
def save(tmp_path):
    """Write runs, each with its scores or None, into a RUNS_DIR; returns that folder."""
    return functools.partial(save_records, tmp_path / "runs")


@pytest.fixture
def small(save):
    records, base = grid()
    return save(*records, base=base)


@pytest.fixture(scope="module")
def reported(tmp_path_factory):
    """The folder of a whole report on `grid`."""
    records, base = grid()
    runs_dir = save_records(tmp_path_factory.mktemp("grid") / "runs", *records, base=base)
    result = run_report(runs_dir)
    assert result.exit_code == 0, result.output
    return runs_dir / "report"


@pytest.fixture
def undrawn(monkeypatch):
    """Pictures are not drawn, which takes seconds."""
    monkeypatch.setattr("axolotl_supertune.grid.report.figures.figures.render", lambda figure, name, kind: b"a picture")


def tables_of(runs_dir, **settings):
    return {table.name: table for table in make_tables(analyze(runs_dir, **{"resamples": 200, **settings}))}


def test_the_whole_report(reported):
    """Against tests/grid/golden; make_golden.py writes it anew."""
    expected = {f"{name}.{kind}" for name in TABLES for kind in ("csv", "tex")}
    expected |= {f"{name}.{kind}" for name in FIGURES for kind in ("png", "svg")}
    assert {path.name for path in reported.iterdir()} == expected | {"report.md", "report.json"}
    for name in GOLDEN_FILES:
        assert (reported / name).read_text(encoding="utf-8") == (GOLDEN / name).read_text(encoding="utf-8")


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
    """Every scores.json is replaced by its opposite, and scores appear at the other rates: the choice stays."""
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


LATER = {"seeds": [1, 2], "methods": ["lora"], "leading": 1}


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
    assert "no run that finished is of the grid in grid.json" in run_report("runs").output


@pytest.mark.usefixtures("undrawn")
def test_a_method_whose_first_stage_is_gone_is_named(stage, write_grid):
    """Its other seeds alone are there: no rate can be chosen among them."""
    assert stage.sweep(write_grid(learning_rates=[1e-3], chosen=LATER))
    shutil.rmtree(Path("runs") / "magnitude" / "lr0.001-ep1-seed0")
    result = run_report("runs", "--resamples", 100)
    assert result.exit_code == 0, result.output
    assert "No rate could be chosen for magnitude" in result.output


def hand(key, correct, strict, nll):
    """AddSub with four items, of which the first is not clean, AQuA with two."""
    return Scores(
        key=key,
        seconds=1,
        benchmarks={
            "AQuA": BenchmarkScores(
                correct=correct[4:], correct_strict=strict[4:], clean="11", gold_nll=[nll], gold_tokens=[2]
            ),
            "AddSub": BenchmarkScores(
                correct=correct[:4], correct_strict=strict[:4], clean="0111", gold_nll=[2 * nll, 3], gold_tokens=[3, 5]
            ),
        },
    )


def test_the_numbers_by_hand(save):
    lora, ours, second = (make_run(*each) for each in (("lora", 1e-4), ("supra", 1e-4), ("supra", 1e-4, 1)))
    runs_dir = save(
        (lora, hand(lora.key, "110010", "100000", 1.0)),
        (ours, hand(ours.key, "111110", "111000", 0.5)),
        (second, hand(second.key, "111011", "111011", 1.5)),
    )
    made = tables_of(runs_dir)
    summary = {row["method"]: row for row in made["summary"].records}
    assert set(summary) == {"base", "lora", "supra"}
    assert summary["lora"]["accuracy_published_all"] == (2 / 4 + 1 / 2) / 2
    assert summary["lora"]["accuracy_published_clean"] == pytest.approx((1 / 3 + 1 / 2) / 2)
    assert summary["lora"]["accuracy_published_all_sd"] is None
    assert summary["lora"]["accuracy_strict_all"] == (1 / 4 + 0) / 2
    means = [(4 / 4 + 1 / 2) / 2, (3 / 4 + 2 / 2) / 2]
    assert summary["supra"]["accuracy_published_all"] == np.mean(means)
    assert summary["supra"]["accuracy_published_all_sd"] == pytest.approx(np.std(means, ddof=1))
    pooled = [(1 + 3 + 0.5) / 10, (3 + 3 + 1.5) / 10]
    assert summary["supra"]["gold_nll"] == pytest.approx(np.mean(pooled))
    assert summary["supra"]["perplexity"] == pytest.approx(np.mean(np.exp(pooled)))
    compared = {row["metric"]: row for row in made["differences"].records}
    assert compared["accuracy"]["difference"] == pytest.approx(100 * (np.mean(means) - 0.5))
    assert compared["accuracy"]["by_seed"] == "0:25.0"
    assert compared["gold_nll"]["difference"] == pytest.approx(np.mean(pooled) - 0.6)
    records = made["accuracy_published"].records
    found = {(row["method"], row["benchmark"], row["items"]): (row["n"], row["accuracy"]) for row in records}
    assert found["lora", "AddSub", "all"] == (4, 0.5)
    assert found["lora", "AddSub", "clean"] == (3, pytest.approx(1 / 3))
    assert list(dict.fromkeys(row["benchmark"] for row in records)) == ["AddSub", "AQuA", "mean"]
    assert "AddSub (4 / 3)" in made["accuracy_published"].cells


def test_the_seeds_behind_scores_are_counted(save):
    """Three seeds of lora were trained and two scored, one of super, none of rosa."""
    runs = [make_run("lora", 1e-4, seed) for seed in range(3)] + [make_run("super", 1e-4), make_run("rosa", 1e-4)]
    scored = [make_scores(run.key, 0.5) if run.key.seed < 2 and run.key.method != "rosa" else None for run in runs]
    runs_dir = save(*zip(runs, scored, strict=True), base=make_scores(None, 0.1))
    counts = {"base": None, "lora": 2, "super": 1, "rosa": 0}
    made = tables_of(runs_dir)
    assert {row["method"]: row["seeds"] for row in made["summary"].records}["lora"] == 3
    for name in ("summary", "accuracy_published", "accuracy_strict", "perplexity"):
        table = made[name]
        found = {row["method"]: row["scored_seeds"] for row in table.records}
        assert found == {method: counts[method] for method in found}, name
        assert set(found) >= {"base", "lora", "super"}
        at = list(table.cells).index("seeds scored")
        assert {row[0].split()[0]: row[at] for row in table.cells.values} == {
            method: "–" if count is None else str(count) for method, count in counts.items()
        }
    for path in runs_dir.rglob(SCORES_FILE):
        path.unlink()
    assert "seeds scored" not in tables_of(runs_dir)["summary"].cells


def test_validation_nlls_are_compared_on_the_seeds_that_both_have(save):
    """No test score is needed; a seed of one method alone, and a run that diverged, are left out."""
    nlls = {
        "lora": {0: 1.0, 1: 1.1, 2: 1.2, 3: 5.0},
        "super": {0: 0.9, 1: 1.01, 2: 1.09, 7: 0.1},
        "rosa": {0: 1.3, 3: float("nan")},
    }
    runs = [make_run(method, 1e-4, seed, nll=nll) for method, seeds in nlls.items() for seed, nll in seeds.items()]
    runs_dir = save(*((run, None) for run in runs))
    row, alone = tables_of(runs_dir)["validation"].records
    differences = [-0.1, -0.09, -0.11]
    low, high = scipy.stats.ttest_1samp(differences, 0).confidence_interval(0.95)
    assert (row["method"], row["verdict"]) == ("super", "better")
    assert [row["difference"], row["low"], row["high"]] == pytest.approx([np.mean(differences), low, high])
    assert row["p_holm"] == row["p"]  # the only one with an interval
    assert (alone["method"], alone["verdict"], alone["low"]) == ("rosa", "one seed", None)
    assert alone["difference"] == pytest.approx(0.3)
    page = (run_report(runs_dir), runs_dir / "report" / "report.md")[1].read_text(encoding="utf-8")
    assert "- validation NLL (nats a token), over seeds: **better**: super." in page


def test_better_is_said_only_where_the_interval_says_so(small):
    found = analyze(small)
    for each in found.comparisons:
        excludes = each.interval.low > 0 or each.interval.high < 0
        assert (each.verdict in ("better", "worse")) == excludes
    said = {(each.metric.name, each.result.method): each.verdict_text for each in found.comparisons}
    assert said["accuracy", "supra-0.8"] == "better"
    assert said["accuracy", "full"] == "worse (one seed)"
    assert said["gold_nll", "supra-0.8"] == "no difference seen"
    assert said["accuracy", "super-bottom"] == "no difference seen"


@pytest.mark.usefixtures("undrawn")
def test_all_are_compared_with_no_training(save):
    """By a family of their own: what is said of differences to the reference is as it was."""
    shares = {"lora": (0.1, 0.1), "super": (0.9, 0.9), "supra": (0.9,), "rosa": (0.15,)}
    runs = [make_run(method, 1e-4, seed) for method, each in shares.items() for seed in range(len(each))]
    scored = [make_scores(run.key, shares[run.key.method][run.key.seed], level=1.2) for run in runs]
    runs_dir = save(*zip(runs, scored, strict=True))
    alone = analyze(runs_dir)
    assert alone.against_base == []
    assert "differences_to_base" not in tables_of(runs_dir)
    base = make_scores(None, 0.12, level=1.0)
    base.write(runs_dir / "base" / SCORES_FILE)
    found = analyze(runs_dir)
    assert found.comparisons == alone.comparisons
    compared = {(each.metric.name, each.result.method): each for each in found.against_base}
    assert set(compared) == {(metric.name, method) for metric in METRICS for method in shares}
    for metric in METRICS:
        of = [each for each in found.against_base if each.metric is metric]
        assert [each.holm for each in of] == holm([each.interval.p for each in of])
    assert compared["accuracy", "super"].verdict_text == "better"
    assert compared["accuracy", "supra"].verdict_text == "better (one seed)"
    theirs = accuracies([base])["mean"][0]
    ours = accuracies([each for each in scored if each.key.method == "super"])["mean"]
    by_seed = compared["accuracy", "super"].by_seed
    assert list(by_seed.values()) == pytest.approx(list(ours - theirs))
    assert compared["accuracy", "super"].interval.difference == pytest.approx(ours.mean() - theirs)
    page = (run_report(runs_dir), runs_dir / "report" / "report.md")[1].read_text(encoding="utf-8")
    assert (
        "- mean accuracy, all items (points), against no training: **better**: 2 of 4 (one seed: 1): super, supra; "
        "**no difference seen**: 2 of 4: lora, rosa." in page
    )
    assert "- gold targets' NLL (nats a token), against no training: **worse**: all 4 (one seed: 2)." in page
    assert "; against no training: 4, 4, 4)" in page
    records = rows(runs_dir / "report" / "differences_to_base.csv")
    assert len(records) == 3 * 4
    assert {(row["reference"], row["reference_seeds"], row["comparisons"]) for row in records} == {("base", "", "4")}


@pytest.mark.usefixtures("undrawn")
def test_no_training_is_compared_with_also_without_a_reference(save):
    run = make_run("super", 1e-4)
    runs_dir = save((run, make_scores(run.key, 0.9)), base=make_scores(None, 0.1))
    assert run_report(runs_dir).exit_code == 0
    page = (runs_dir / "report" / "report.md").read_text(encoding="utf-8")
    said = page.split("## What may be said\n\n")[1].split("## ")[0]
    assert "- mean accuracy, all items (points), against no training: **better**: all 1 (one seed: 1)." in said
    assert "paired bootstrap" in said


def test_a_verdict_that_one_seed_contradicts_says_so(save):
    runs = [make_run(method, 1e-4, seed) for method in ("lora", "supra") for seed in (0, 1)]
    shares = {("supra", 0): 0.99, ("supra", 1): 0.02}
    runs_dir = save(*((run, make_scores(run.key, shares.get((run.key.method, run.key.seed), 0.15))) for run in runs))
    said = [each.verdict_text for each in analyze(runs_dir).comparisons if each.metric.name == "accuracy"]
    assert said == ["better (not in every seed)"]


def test_a_verdict_on_several_seeds_of_lora_that_the_common_one_contradicts_says_so(save):
    """LoRA's mean over its seeds is another number than that of the seed that both ran with."""
    keys = [("lora", 0), ("lora", 1), ("lora", 2), ("supra", 0)]
    shares = {("lora", 0): 0.9, ("lora", 1): 0.02, ("lora", 2): 0.02, ("supra", 0): 0.8}
    runs = [make_run(method, 1e-4, seed) for method, seed in keys]
    runs_dir = save(*((run, make_scores(run.key, shares[run.key.method, run.key.seed])) for run in runs))
    [said] = [each.verdict_text for each in analyze(runs_dir).comparisons if each.metric.name == "accuracy"]
    assert said == "better (one seed, not in every seed)"


def test_a_verdict_that_does_not_survive_the_number_of_comparisons_says_so(small):
    each = analyze(small, resamples=1000).comparisons[0]
    assert each.doubts == ["one seed"]
    assert replace(each, holm=0.051).doubts == ["not after Holm", "one seed"]
    assert replace(each, holm=0.051, interval=Interval(-0.1, -0.2, 0.1, 0.02)).doubts == []


def test_a_verdict_on_few_items_says_so(save):
    """Two questions that one method knows and the other does not: an interval of no width."""
    runs = [make_run(method, 1e-4) for method in ("lora", "super")]
    few = {"items": (("AddSub", 60), ("AQuA", 2))}
    runs_dir = save(*((run, make_scores(run.key, share, **few)) for run, share in zip(runs, (0.0, 1.0), strict=True)))
    said = {each.metric.name: each.verdict_text for each in analyze(runs_dir).comparisons}
    assert said["accuracy"] == "better (few items, one seed)"
    assert "few items" not in said["gold_nll"]


def test_a_reference_of_one_seed_is_one_seed(save):
    runs = [make_run("lora", 1e-4), make_run("super", 1e-4), make_run("super", 1e-4, seed=1)]
    shares = (0.1, 0.9, 0.9)
    runs_dir = save(*((run, make_scores(run.key, share)) for run, share in zip(runs, shares, strict=True)))
    assert [each.verdict_text for each in analyze(runs_dir).comparisons][:1] == ["better (one seed)"]


def test_what_is_missing_is_named(save):
    records, base = grid()
    records += [
        (make_run("sift", 1e-4, nll=None), None),
        (make_run("rosa", 1e-4), None),
        (make_run("rosa", 5e-4, nll=float("nan")), None),
        (make_run("rosa", 1e-4, seed=1, nll=None), None),
        (make_run("heavy", 1e-4, trainable_parameters=1006), make_scores(make_run("heavy", 1e-4).key, 0.4)),
        (make_run("blind", 1e-4, eval_losses=[]), None),
        (make_run("super-bottom", 1e-3, seed=5, nll=None), None),
    ]
    runs_dir = save(*records, base=base)
    unfinished = runs_dir / "supra-0.8" / "lr0.05-ep1-seed0"
    unfinished.mkdir()
    (unfinished / "config.yml").touch()
    text = notes(runs_dir)
    for expected in (
        "Failed: sift/lr0.0001-ep1-seed0: RuntimeError: boom",
        "No rate could be chosen for sift",
        "Diverged: rosa/lr0.0005-ep1-seed0: validation NLL nan",
        "Missing seeds: rosa: 1 at 0.0001",
        "Not scored: rosa: seed 0",
        "At the lowest rate that was tried, so that a better one may lie below: full (0.0001), rosa (0.0001).",
        "At the highest rate that was tried, so that a better one may lie above: super-bottom (0.001).",
        "Missing seeds: super-bottom: 5 at 0.001",
        "Only one rate was tried, so that none was chosen: heavy (0.0001).",
        "Off its budget by more than 0.5%: heavy, seed 0: 1,006 parameters trained, 1,000 allowed (100.60%)",
        "Without a validation NLL, and so never chosen: blind/lr0.0001-ep1-seed0",
        "No rate could be chosen for blind",
        "Not finished: supra-0.8/lr0.05-ep1-seed0",
        "Compared with lora's seeds 0, 1, 2, though scored with 0: full, heavy, super-bottom",
    ):
        assert expected in text
    assert "Off its budget by more than 0.5%: full" not in text


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


def test_without_the_reference(small):
    assert "No differences: the reference dora was not trained." in notes(small, "dora")
    for path in small.glob(f"lora/*/{SCORES_FILE}"):
        path.unlink()
    found = analyze(small)
    assert "No differences: the reference lora was not scored." in found.notes
    assert "differences" not in tables_of(small)
    assert set(make_figures(found)) == {"curves", "learning_rates", "cost"}


@pytest.mark.parametrize("changes", [{"nll": None}, {"nll": float("nan")}, {"eval_losses": []}])
def test_a_reference_that_was_trained_in_vain_was_trained(save, changes):
    run = make_run("super", 1e-4)
    text = notes(save((run, make_scores(run.key, 0.5)), (make_run("lora", 1e-4, **changes), None)))
    assert "No differences: the reference lora has no run that can be used: they failed, diverged" in text
    assert "not trained" not in text


def test_a_reference_that_the_grid_dropped_is_said_to_be(stage, write_grid):
    for methods in ({"lora": {"adapter": "lora"}, "magnitude": MAGNITUDE}, {"magnitude": MAGNITUDE}):
        assert stage.sweep(write_grid(methods=methods, learning_rates=[1e-3]))
    assert "No differences: the reference lora is no longer in grid.json." in notes(Path("runs"))


def contents(folder):
    return {path.name: path.read_bytes() if path.is_file() else None for path in folder.iterdir()}


FULL = OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("at", [0, 5, len(TABLES), -1])
def test_a_report_that_does_not_fit_leaves_the_earlier_one_whole(small, monkeypatch, at):
    """The disk is full at some file."""
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


def test_without_contamination_report_or_gold_targets(save):
    run, other = make_run("lora", 1e-4), make_run("super", 1e-4)
    runs_dir = save(*((each, make_scores(each.key, 0.5, clean=False, targets=0)) for each in (run, other)))
    text = notes(runs_dir)
    assert "No contamination report" in text
    assert "The gold targets were not scored" in text
    found = analyze(runs_dir, resamples=100)
    assert [each.metric.name for each in found.comparisons] == ["accuracy"]
    assert run_report(runs_dir).exit_code == 0


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("whose", ["super", "lora", "base"])
def test_a_gold_nll_that_is_not_finite_is_named_and_compared_with_none(save, bad, whose):
    """It is in one of two seeds; the accuracies are as good as ever, and so is the other benchmark's NLL."""
    runs = [make_run(method, 1e-4, seed) for method in ("lora", "super", "supra") for seed in (0, 1)]
    scored = {run.key: make_scores(run.key, 0.5) for run in runs}
    scored[None] = make_scores(None, 0.1)
    damaged = next(key for key in reversed(scored) if (key.method if key else "base") == whose)
    scored[damaged].benchmarks["AddSub"].gold_nll[3] = bad
    runs_dir = save(*((run, scored[run.key]) for run in runs), base=scored[None])
    path = (damaged.folder if damaged else Path("base")) / SCORES_FILE
    assert f"Not finite: gold NLL of AddSub in {path.as_posix()}: the gold NLL of" in notes(runs_dir)
    assert "The gold targets were not scored" not in notes(runs_dir)
    found = analyze(runs_dir, resamples=100)
    compared = {"super": {"supra"}, "lora": set(), "base": {"super", "supra"}}[whose]
    assert {each.result.method for each in found.comparisons if each.metric.name == "gold_nll"} == compared
    assert {each.result.method for each in found.comparisons if each.metric.name == "accuracy"} == {"super", "supra"}
    made = tables_of(runs_dir)
    shown = {record["method"]: record for record in made["summary"].records}
    assert [name for name, record in shown.items() if record["gold_nll"] is None] == [whose]
    assert [row["benchmark"] for row in made["perplexity"].records if row["method"] == whose] == ["AQuA"]
    assert run_report(runs_dir, "--resamples", 100).exit_code == 0
    for file in (runs_dir / "report").glob("*.[cjm][ssd]*"):
        assert not re.search(r"\b(nan|inf)\b", file.read_text(encoding="utf-8"), re.IGNORECASE), file.name


def test_benchmark_without_a_clean_item(save):
    runs = [make_run(method, 1e-4) for method in ("lora", "super")]
    scored = [make_scores(run.key, 0.5, items=(("AddSub", 40), ("AQuA", 1))) for run in runs]
    runs_dir = save(*zip(runs, scored, strict=True))
    assert "No clean item in AQuA: there is no mean over clean items." in notes(runs_dir)
    found = analyze(runs_dir, resamples=100)
    assert [each.metric.name for each in found.comparisons] == ["accuracy", "gold_nll"]
    assert tables_of(runs_dir)["accuracy_published"].cells["mean"][0].endswith(" / –")


def test_epochs_are_compared_within_themselves(save):
    runs = [make_run(method, 1e-4, epochs=epochs) for method in ("lora", "super") for epochs in (1, 3)]
    runs_dir = save(*((run, make_scores(run.key, 0.5)) for run in runs))
    found = analyze(runs_dir, resamples=100)
    assert {(each.result.epochs, each.reference.epochs) for each in found.comparisons} == {(1, 1), (3, 3)}
    assert found.label("super", 3) == "super (3 epochs)"
    # One family of tests a metric, over all epochs.
    by_metric = [each for each in found.comparisons if each.metric.name == "accuracy"]
    assert all(each.holm >= each.interval.p for each in by_metric)
    assert {row["comparisons"] for row in tables_of(runs_dir)["differences"].records} == {2}
    assert {row["reference"] for row in tables_of(runs_dir)["validation"].records} == {"lora"}
    assert [row["epochs"] for row in tables_of(runs_dir)["validation"].records] == [1, 3]


def test_a_limit_is_marked(save):
    runs = [make_run(method, 1e-4) for method in ("lora", "super")]
    runs_dir = save(*((run, make_scores(run.key, 0.5, limit=40)) for run in runs))
    assert "NOT THE WHOLE TEST SETS: scored with a limit of 40 items" in notes(runs_dir)


def test_shared_devices_are_marked(save):
    run = make_run("lora", 1e-4, jobs_per_gpu=8)
    other = make_run("super", 1e-4, device="Another GPU")
    runs_dir = save((run, make_scores(run.key, 0.5)), (other, make_scores(other.key, 0.5)))
    text = notes(runs_dir)
    assert "shared their device" in text
    assert "different devices (Another GPU, One GPU)" in text
    cost = tables_of(runs_dir)["cost"]
    assert cost.cells.iloc[:, -3:].values.tolist() == [["40‡", "1.50", "8"], ["40", "1.50", "1"]]
    assert [row["times_comparable"] for row in cost.records] == [False, True]


def heading(runs_dir):
    assert run_report(runs_dir, "--resamples", 100).exit_code == 0
    page = (runs_dir / "report" / "report.md").read_text(encoding="utf-8")
    return dict(line[2:].split(": ", 1) for line in page.split("\n\n")[2].splitlines())


def test_the_heading_names_model_data_budget_and_where_it_ran(save):
    """From run.json, or for one that was recorded without them from config.yml; a failed run has no device to name."""
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
    assert "config.yml is no YAML of a run" in run_report(runs_dir).output


def test_of_old_records_alone_nothing_is_made_up(save):
    said = heading(save((make_run("lora", 1e-4, setup=None, budget_parameters=None, versions={}, device=None), None)))
    assert said.pop("Budget") == "no number of parameters"
    assert set(said.values()) == {"not recorded"}


def test_runs_of_different_models_data_and_budgets_are_pointed_out(save):
    other = SETUP.model_copy(update={"base_model": "b", "test_datasets": ("w.jsonl", "v.jsonl"), "budget": "lora_r 4"})
    runs = [make_run("lora", 1e-4), make_run("super", 1e-4, setup=other, budget_parameters=500)]
    runs_dir = save(*((run, None) for run in runs))
    text = notes(runs_dir)
    assert "Runs differ in their base models (a/base; b): what differs between methods may be due to it." in text
    assert "Runs differ in their validation data (valid.jsonl; w.jsonl, v.jsonl)" in text
    assert "Runs differ in their data" not in text
    assert "Budgets differ between methods: from 500 to 1,000 parameters." in text
    assert heading(runs_dir)["Budget"] == r"500 to 1,000 parameters (lora\_r 4; lora\_r 8)"


def write_settings(runs_dir, run, **settings):
    folder = run.key.folder.as_posix()
    own = {"seed": run.key.seed, "output_dir": f"runs/{folder}/adapter", "dataset_prepared_path": f"p{run.key.seed}"}
    (runs_dir / folder / "config.yml").write_text(yaml.safe_dump({**own, **settings}))


def test_settings_that_differ_between_the_seeds_of_a_method_are_named(save):
    runs = [make_run(method, 1e-4, seed) for method in ("lora", "super") for seed in range(3)]
    runs_dir = save(*((run, None) for run in runs))
    for run in runs:
        write_settings(runs_dir, run, micro_batch_size=4, calibration_path=f"c{run.key.seed}", adapter=run.key.method)
    assert "differ in their settings" not in notes(runs_dir)
    other = {"micro_batch_size": 8, "datasets": [{"path": "a.jsonl"}], "adapter": "super"}
    write_settings(runs_dir, runs[3], **other)
    assert (
        "Runs of super at 0.0001 differ in their settings "
        '(datasets: [{"path": "a.jsonl"}] (seed 0), absent (seed 1, 2); micro_batch_size: 8 (seed 0), 4 (seed 1, 2)), '
        "so that its means mix them."
    ) in notes(runs_dir)
    assert "Runs of lora" not in notes(runs_dir)
    for content in ("- no mapping", "a: [", "\0"):
        (path := runs_dir / runs[3].key.folder / "config.yml").write_text(content)
        result = run_report(runs_dir)
        assert result.exit_code == 1
        assert str(path) in result.output


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


def test_a_whole_grid_of_records_is_small_and_enough(tmp_path):
    """As examples/paper/smollm2-135m.yml leaves them, every run scored: 68 of them, and nothing beside the records."""
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


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"items": (("AddSub", 10), ("AQuA", 40))}, "AddSub: 10 items, not 60 (another limit?)"),
        ({"items": (("AddSub", 60),)}, "no AQuA"),
        ({"clean": False}, "AddSub: other clean items (another contamination report, or none)"),
        ({"targets": 0}, "AQuA: 0 gold targets, not 20"),
        ({"asked": {"max_gen_toks": 64}}, "asked with [('max_gen_toks', 64)], not []"),
    ],
)
def test_scores_of_other_questions_are_refused(save, changes, message):
    runs = [make_run(method, 1e-4) for method in ("lora", "super", "supra")]
    scored = [make_scores(run.key, 0.5, **(changes if run.key.method == "supra" else {})) for run in runs]
    runs_dir = save(*zip(runs, scored, strict=True))
    result = run_report(runs_dir)
    assert result.exit_code == 1
    assert message in result.output
    assert str(Path("supra") / "lr0.0001-ep1-seed0" / SCORES_FILE) in result.output
    assert str(Path("lora") / "lr0.0001-ep1-seed0") not in result.output
    assert not (runs_dir / "report").exists()


def test_nothing_to_report(tmp_path, save):
    result = run_report(tmp_path)
    assert result.exit_code == 1
    assert "holds no run that finished" in result.output
    runs_dir = save((make_run("lora", 1e-4, nll=None), None))
    assert "holds no run that finished" in run_report(runs_dir).output


def test_no_rate_for_anyone(save):
    """Every run diverged: the report says so, and has no method."""
    runs_dir = save((make_run("lora", 1e-4, nll=float("inf")), None))
    result = run_report(runs_dir)
    assert result.exit_code == 1
    assert "no method has a run with a finite validation NLL" in result.output


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


def test_records_that_diverged_survive_the_disk(tmp_path):
    """JSON has no NaN, and a loss of null would not be read."""
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
