"""The committed report and the results page beside it are what `report` makes from the committed records."""

import csv
import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from axolotl_supertune.commands.report import report

RESULTS = Path(__file__).parents[2] / "examples/paper/results/smollm2-135m"
NAMES = {"base": "before training", "lora": "LoRA", "full": "full fine-tuning"}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    output = tmp_path_factory.mktemp("report")
    result = CliRunner().invoke(report, [str(RESULTS / "runs"), "--output", str(output)])
    assert result.exit_code == 0, result.output
    return output


@pytest.mark.slow
def test_the_report_is_of_the_records(made):
    """Texts and tables are equal; figures only have to exist, because they differ with matplotlib's version."""
    kept = {path.name for path in (RESULTS / "report").iterdir()}
    assert kept == {path.name for path in made.iterdir() if path.suffix in (".md", ".csv", ".png")}
    for name in kept:
        if not name.endswith(".png"):
            assert (RESULTS / "report" / name).read_text(encoding="utf-8") == (made / name).read_text(encoding="utf-8")


def test_the_results_page_shows_the_summary():
    with (RESULTS / "report" / "summary.csv").open(encoding="utf-8", newline="") as file:
        expected = {NAMES.get(row["method"], row["method"]): row for row in csv.DictReader(file)}
    section = (RESULTS / "README.md").read_text(encoding="utf-8").split("\n## Results\n")[1].split("\n## ")[0]
    shown = [re.split(r" *\| *", line)[1:-1] for line in section.splitlines() if line.startswith("| ")][1:]
    assert [row[0] for row in shown] == list(expected)
    for name, rate, nll, seeds, accuracy, strict, gold, *_ in shown:
        row = expected[name]
        assert [rate == "–" or float(rate), seeds] == [
            not row["learning_rate"] or float(row["learning_rate"]),
            row["seeds"] or "–",
        ]
        for cell, column, scale, digits in (
            (nll, "validation_nll", 1, 4),
            (accuracy, "accuracy_published_all", 100, 1),
            (strict, "accuracy_strict_all", 100, 1),
            (gold, "gold_nll", 1, 3),
        ):
            numbers = [float(row[key]) for key in (column, f"{column}_sd") if row[key]]
            assert cell == " ± ".join(f"{scale * number:.{digits}f}" for number in numbers), (name, column)


def test_the_results_page_shows_the_rates_in_between():
    losses = {}
    for path in [*RESULTS.glob("runs/*/*-ep1-seed0/run.json"), *RESULTS.glob("more-rates/*/*/run.json")]:
        run = json.loads(path.read_text(encoding="utf-8"))
        losses[run["key"]["method"], run["key"]["learning_rate"]] = run["eval_losses"][-1][1]
    page = (RESULTS / "README.md").read_text(encoding="utf-8")
    section = page.split("\n## Rates in between\n")[1].split("\n## ")[0]
    head, *rows = [re.split(r" *\| *", line)[1:-1] for line in section.splitlines() if line.startswith("| ")]
    shown = {
        (row[0], float(rate)): cell for row in rows for rate, cell in zip(head[1:], row[1:], strict=True) if cell != "–"
    }
    methods = {row[0] for row in rows}
    expected = {key: loss for key, loss in losses.items() if key[0] in methods}
    lowest = {min((key for key in expected if key[0] == method), key=expected.__getitem__) for method in methods}
    assert shown == {key: f"**{loss:.4f}**" if key in lowest else f"{loss:.4f}" for key, loss in expected.items()}
