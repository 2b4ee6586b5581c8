"""`axolotl supertune init`: a commented YAML for a base model and a file of training records."""

from pathlib import Path

import click

from .errors import user_errors
from .plan import Memory


@click.command("init")
@click.option("--base", required=True, help="Base model: a folder, or a name on the hub.")
@click.option(
    "--data", required=True, type=click.Path(path_type=Path), help="Training records: .jsonl, .json, .parquet or .csv."
)
@click.option(
    "--output", type=click.Path(dir_okay=False, path_type=Path), default="run.yml", show_default=True, help="The YAML."
)
@click.option("--method", type=click.Choice(["supra", "super"]), default="supra", show_default=True)
@click.option(
    "--gpu-memory", type=Memory(), help="Of the GPU that will train, as 24GiB. Default: the GPU that is here."
)
@click.option("--overwrite", is_flag=True, help="Replace the YAML that is there.")
def init(base: str, data: Path, output: Path, method: str, gpu_memory: float | None, overwrite: bool) -> None:
    """Write a commented YAML that trains a base model on your records, and name the commands that follow.

    Tells alpaca, chat, completion and question-and-answer records apart and checks each; takes the first learning rate
    from the paper's runs and ours, and the batch from a plan of the memory. It asks nothing: what it cannot tell is a
    comment in the YAML.
    """
    from ..method.atomic_files import whole_file

    if (output.exists() or output.is_symlink()) and not overwrite:
        raise click.ClickException(f"--output {output}: the file is there. Name another one, or add --overwrite.")
    with user_errors(output):
        click.echo(f"reading {data} and the config of {base} …", err=True)  # the imports alone take seconds
        from ..plugin.init.init import init as make

        written = make(base, data, output, adapter=method, gpu_memory=gpu_memory)
        with whole_file(output) as temporary:
            temporary.write_text(written.text, encoding="utf-8")
    click.echo(f"wrote {output}: {written.summary}")
    for warning in written.warnings:
        click.echo(f"Look at this: {warning}", err=True)
    width = max(len(command) for command, _ in written.commands)
    click.echo("Next:")
    for command, what in written.commands:
        click.echo(f"  {command.ljust(width)}   # {what}")
