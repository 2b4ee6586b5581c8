"""The notes of a report: what failed, is missing, or limits the numbers."""

from pathlib import Path

import pytest
import yaml
from grid_cases import MAGNITUDE
from grid_records import SETUP, grid, make_run, make_scores
from reporting import heading, notes, run_report, tables_of

from axolotl_supertune.grid.report.analysis import analyze
from axolotl_supertune.grid.report.figures.figures import make_figures
from axolotl_supertune.grid.run_files import SCORES_FILE

pytestmark = pytest.mark.usefixtures("undrawn")


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
