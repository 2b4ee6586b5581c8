"""`axolotl supertune inspect`: what an adapter holds."""

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
@click.option("--layers", is_flag=True, help="Also print a row for each layer.")
@click.option("--png", type=click.Path(dir_okay=False, path_type=Path), help="Also draw where the support lies.")
def inspect(adapter: Path, target: Path | None, layers: bool, png: Path | None) -> None:
    """Say what is in the Super or Supra adapter in folder ADAPTER, by kind of layer; no base model is read.

    Printed are its settings, and for each kind of layer what is trained, how much of it the support touches and how far
    the weights moved. --json and --png hold all layers.
    """
    from ..method.atomic_files import whole_file
    from ..tuner.inspection import draw, read_report
    from ..tuner.inspection_tables import LEGEND, heading, kind_table, layer_table

    with user_errors():
        report = read_report(adapter)
        screen = console(width=140)
        screen.print(heading(report, adapter), markup=False, soft_wrap=True)
        if report.awaits_gradient:
            screen.print(
                f"The support is not chosen yet: training chooses it by {report.config.mask_score}, after the "
                "steps of the low-rank part alone. The entries counted below are placeholders.",
                soft_wrap=True,
            )
        screen.print("", kind_table(report.layers), "")
        screen.print(LEGEND, markup=False, soft_wrap=True)
        if layers:
            screen.print("", layer_table(report.layers))
    if target is not None:
        with user_errors(target):
            write_json(target, report.as_json())
        click.echo(f"wrote {target}", err=True)
    if png is not None:
        with user_errors(png), whole_file(png) as temporary:
            draw(report.tensors, report.layers, temporary)
        click.echo(f"wrote {png}", err=True)
