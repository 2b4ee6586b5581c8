"""`axolotl supertune contamination`: count the test questions that occur in training data."""

import click

from ..tasks.contamination import LEVELS, THRESHOLD, compare, read_training, write_report
from ..tasks.contamination.tables import match_lines, summary_table
from .errors import user_errors


@click.command("contamination")
@click.argument("train_files", metavar="TRAIN_FILE...", nargs=-1, required=True)
@click.option("--output", type=click.Path(dir_okay=False), help="Write the report here, as JSON that the tasks accept.")
@click.option("--field", help="The column that holds the questions.  [default: found by its name]")
@click.option("--data-dir", type=click.Path(), help="A folder with the six test files.  [default: SUPERTUNE_DATA_DIR]")
@click.option(
    "--list",
    "listed",
    type=click.Choice(LEVELS),
    multiple=True,
    help="List the matches of this level; may be repeated.",
)
@click.option(
    "--threshold",
    type=float,
    default=THRESHOLD,
    show_default=True,
    help="Smallest overlap of a near-duplicate.",
)
def contamination(
    train_files: tuple[str, ...],
    output: str | None,
    field: str | None,
    data_dir: str | None,
    listed: tuple[str, ...],
    threshold: float,
) -> None:
    """Count the test questions that occur in training data.

    TRAIN_FILE is a .json, .jsonl (either may end in .gz) or .parquet file, or a hub dataset OWNER/NAME[:CONFIG].
    """
    from rich.console import Console

    with user_errors(output):
        training = [read_training(path, field) for path in train_files]
        report = compare(training, threshold=threshold, data_dir=data_dir)
        for source in training:
            click.echo(f"{source.path}: {len(source.records):,} records, questions in {source.field}")
        Console(highlight=False).print(summary_table(report))
        for level in LEVELS:
            if level in listed:
                for line in match_lines(report, level, training, data_dir):
                    click.echo(line)
        if output is not None:
            write_report(report, output)
            click.echo(f"wrote {output}")
