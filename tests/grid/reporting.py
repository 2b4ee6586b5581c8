"""Makes reports in tests and reads their tables and notes."""

import csv

from click.testing import CliRunner

from axolotl_supertune.commands.report import report
from axolotl_supertune.grid.report.analysis import analyze
from axolotl_supertune.grid.report.tables import make_tables


def run_report(*arguments):
    return CliRunner().invoke(report, [str(argument) for argument in arguments])


def notes(*arguments):
    found = analyze(*arguments, resamples=200)
    return "\n".join(found.notes)


def rows(path):
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def tables_of(runs_dir, **settings):
    return {table.name: table for table in make_tables(analyze(runs_dir, **{"resamples": 200, **settings}))}


LATER = {"seeds": [1, 2], "methods": ["lora"], "leading": 1}


def heading(runs_dir):
    assert run_report(runs_dir, "--resamples", 100).exit_code == 0
    page = (runs_dir / "report" / "report.md").read_text(encoding="utf-8")
    return dict(line[2:].split(": ", 1) for line in page.split("\n\n")[2].splitlines())
