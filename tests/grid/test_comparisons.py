"""Differences to the reference and to the model before training, and their verdicts."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import scipy.stats
from grid_records import make_run, make_scores
from reporting import notes, rows, run_report, tables_of

from axolotl_supertune.grid.report.analysis import analyze
from axolotl_supertune.grid.report.metrics import METRICS, accuracies
from axolotl_supertune.grid.report.statistics import Interval, holm
from axolotl_supertune.grid.run_files import SCORES_FILE, BenchmarkScores, Scores

pytestmark = pytest.mark.usefixtures("undrawn")


def hand(key, correct, strict, nll):
    """Scores of AddSub with four items, the first not clean, and of AQuA with two."""
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
    """No test score is needed; seeds that only one method has, and diverged runs, are left out."""
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


def test_all_are_compared_with_no_training(save):
    """They are a family of comparisons of their own: those with the reference do not change."""
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
    """LoRA's mean over its seeds differs from its value at the seed that both ran with."""
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


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("whose", ["super", "lora", "base"])
def test_a_gold_nll_that_is_not_finite_is_named_and_compared_with_none(save, bad, whose):
    """One of two seeds has it; accuracies and the other benchmark's NLL are still compared."""
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


def test_without_contamination_report_or_gold_targets(save):
    run, other = make_run("lora", 1e-4), make_run("super", 1e-4)
    runs_dir = save(*((each, make_scores(each.key, 0.5, clean=False, targets=0)) for each in (run, other)))
    text = notes(runs_dir)
    assert "No contamination report" in text
    assert "The gold targets were not scored" in text
    found = analyze(runs_dir, resamples=100)
    assert [each.metric.name for each in found.comparisons] == ["accuracy"]
    assert run_report(runs_dir).exit_code == 0


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
