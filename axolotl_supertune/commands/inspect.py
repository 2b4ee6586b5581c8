"""`axolotl supertune inspect`: what an adapter holds, layer by layer."""

from pathlib import Path

import click

from .errors import user_errors
from .files import write_json
from .terminal import console


@click.command("inspect")
@click.argument("adapter", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option(
    "--json", "--output", "target", type=click.Path(dir_okay=False, path_type=Path), help="Also write all as JSON."
)
@click.option("--png", type=click.Path(dir_okay=False, path_type=Path), help="Also draw where the support lies.")
def inspect(adapter: Path, target: Path | None, png: Path | None) -> None:
    """Say what is in the Super or Supra adapter in folder ADAPTER, layer by layer; no base model is read."""
    from ..method.atomic_files import whole_file
    from ..tuner.inspection import draw, read_report, report_table

    with user_errors():
        report = read_report(adapter)
        screen = console(width=160)
        screen.print(report_table(report.layers, f"{adapter}: {report.config.base_model_name_or_path}"))
        if report.awaits_gradient:
            screen.print(
                f"The support is still to be chosen, by {report.config.mask_score}: the low-rank part alone was "
                "trained, and the indices hold the place of others.",
                soft_wrap=True,
            )
    if target is not None:
        with user_errors(target):
            write_json(target, report.as_json())
        click.echo(f"wrote {target}", err=True)
    if png is not None:
        with user_errors(png), whole_file(png) as temporary:
            draw(report.tensors, report.layers, temporary)
        click.echo(f"wrote {png}", err=True)
