"""`axolotl supertune report`: the records of a grid as tables and figures."""

from pathlib import Path

import click

from ..grid.report.statistics import RESAMPLES
from .errors import user_errors


@click.command("report")
@click.argument("runs_dir", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--output", type=click.Path(file_okay=False, path_type=Path), help="Default: RUNS_DIR/report.")
@click.option("--reference", help="The method that others are compared with. Default: lora.")
@click.option(
    "--resamples", type=click.IntRange(min=100), default=RESAMPLES, show_default=True, help="Of the bootstrap."
)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of the bootstrap.")
def report(runs_dir: Path, output: Path | None, reference: str | None, resamples: int, seed: int) -> None:
    """Report what the runs in RUNS_DIR show: report.md, report.json, tables (CSV, LaTeX), figures (PNG, SVG).

    Each method's learning rate is the one of its lowest validation NLL; scores have no say in it. The same records
    give the same files.
    """
    from ..grid.report.report import write_report

    target = output or runs_dir / "report"
    with user_errors(target):
        notes = write_report(runs_dir, target, reference=reference, resamples=resamples, seed=seed)
    for note in notes:
        click.echo(note, err=True)
    click.echo(f"wrote {target / 'report.md'}")
