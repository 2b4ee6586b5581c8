"""`axolotl supertune calibrate`: measure activation norms ahead of a training."""

from pathlib import Path

import click

from .errors import user_errors
from .files import read_yaml


@click.command("calibrate")
@click.argument("config", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option(
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Default: the config's calibration_path, else OUTPUT_DIR/activation_norms.safetensors.",
)
@click.option(
    "--stream", is_flag=True, help="Keep the model in CPU memory, with one decoder layer at a time on the device."
)
@click.option("--overwrite", is_flag=True, help="Replace an existing norms file.")
def calibrate(config: Path, output: Path | None, stream: bool, overwrite: bool) -> None:
    """Measure the activation norms of CONFIG's base model on one device, and write them for calibration_path.

    For models that a training holds only in shards, and to calibrate once for many runs.
    """
    from ..engines.world_size import launched_processes

    if launched_processes() > 1:
        raise click.ClickException(f"WORLD_SIZE={launched_processes()}: this command runs in one process.")
    with user_errors(output or "the activation norms"):
        read_yaml(config)  # names a file that is no YAML of keys before Axolotl is imported
        from ..plugin.calibrate_base import calibrate_base

        path = calibrate_base(config, output, stream=stream, overwrite=overwrite)
    click.echo(f"wrote {path}; calibration_path: {path} in the YAML uses it")
