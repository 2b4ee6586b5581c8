"""`axolotl supertune plan`: what a YAML would train, how much memory it takes, and what would be refused."""

import re
from pathlib import Path
from typing import Any

import click

from .errors import user_errors
from .files import read_yaml, write_json

_UNITS = {"": 1, "MIB": 2**20, "GIB": 2**30, "MB": 10**6, "GB": 10**9}


class Memory(click.ParamType):
    """`80GiB`, `24 GB` or a number of bytes → bytes."""

    name = "memory"

    def convert(self, value: Any, parameter: click.Parameter | None, context: click.Context | None) -> float:
        if isinstance(value, (int, float)):
            return float(value)
        match = re.fullmatch(r"\s*([\d.]+)\s*([A-Za-z]*)\s*", value)
        try:
            if match is None:
                raise ValueError
            size = float(match[1]) * _UNITS[match[2].upper()]
            if size == 0:
                raise ValueError
        except (KeyError, ValueError):
            self.fail(f"{value!r} is no size: write 80GiB or 24GB.", parameter, context)
        return size


@click.command("plan")
@click.argument("config", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--gpus", type=click.IntRange(min=1), help="One process each. Default: the YAML's, WORLD_SIZE, or 1.")
@click.option("--gpu-memory", type=Memory(), help="Of one GPU, as 80GiB: says whether it fits.")
@click.option("--tokens", type=click.IntRange(min=1), help="Longest record, if shorter than sequence_len.")
@click.option(
    "--json", "--output", "target", type=click.Path(dir_okay=False, path_type=Path), help="Also write all as JSON."
)
@click.pass_context
def plan(
    context: click.Context,
    config: Path,
    gpus: int | None,
    gpu_memory: float | None,
    tokens: int | None,
    target: Path | None,
) -> None:
    """Say what CONFIG would train and how much memory of a GPU that takes, without loading weights.

    Ranks, sparse entries and totals are the ones that training uses. Memory is what PyTorch allocates at the peak, for
    a full micro batch. Exit code 1 if training would be refused, or does not fit into --gpu-memory.
    """
    from ..plugin.plan.plan import make
    from ..plugin.plan.report import as_json, show

    with user_errors():
        result = make(read_yaml(config), gpus=gpus, tokens=tokens)
        if result.estimate is not None:
            result.gpu_memory = gpu_memory
    show(result)
    if target is not None:
        with user_errors(target):
            write_json(target, as_json(result))
        click.echo(f"wrote {target}")
    if result.refusals or result.fits is False:
        context.exit(1)
