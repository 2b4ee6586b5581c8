"""`axolotl supertune overlap`: how much of their supports adapters of one base share."""

from pathlib import Path

import click

from .errors import user_errors
from .files import write_json
from .terminal import console


@click.command("overlap")
@click.argument(
    "adapters", nargs=-1, required=True, type=click.Path(exists=True, file_okay=False, path_type=Path), metavar="A B …"
)
@click.option("--json", "target", type=click.Path(dir_okay=False, path_type=Path), help="Also write all as JSON.")
@click.option(
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Also write all: JSON in a file named .json, CSV in any other.",
)
def overlap(adapters: tuple[Path, ...], target: Path | None, output: Path | None) -> None:
    """Compare the supports of Super or Supra adapters of the same layers, by their folders.

    Other layers or shapes are an error. Of bases with other names, a note says whether they hold the same weights, if
    their files are here; no model is loaded.

    Two adapters: the Jaccard index of each layer, beside that of random supports of the same sizes. More: a matrix of
    all pairs; --json and --output hold each pair's layers.
    """
    if len(adapters) < 2:
        raise click.UsageError("name two adapters or more.")
    from ..method.atomic_files import whole_file
    from ..tuner.overlap import csv_text, layer_table, matrix, notes_on_bases, overlaps, read_supports, short_names

    with user_errors():
        names = short_names(adapters)
        pairs = overlaps(dict(zip(names, read_supports(adapters), strict=True)))
        for note in notes_on_bases(adapters):
            click.echo(note, err=True)
    for path in (target, output):
        if path is None:
            continue
        with user_errors(path):
            if path == target or path.suffix == ".json":
                write_json(path, [pair.record() for pair in pairs])
            else:
                with whole_file(path) as temporary:
                    temporary.write_text(csv_text(pairs), encoding="utf-8")
        click.echo(f"wrote {path}", err=True)
    console(width=max(160, 24 * len(names))).print(layer_table(pairs) if len(names) == 2 else matrix(pairs, names))
