"""`axolotl supertune bench`: time and memory of one training step, method by method."""

import os
import shlex
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from ..bench.measurement import METHODS, SHAPES
from ..method.sizes import KERNELS_VARIABLE
from .errors import user_errors

DEFAULT_OUTPUT = Path("outputs/bench")


def _method_names(methods: str | None) -> list[str]:
    """`--methods` as names: the floor first, no name twice."""
    names = list(METHODS) if methods is None else [name.strip() for name in methods.split(",") if name.strip()]
    unknown = [name for name in names if name not in METHODS]
    if unknown:
        raise click.BadParameter(f"{unknown[0]!r} is not one of {', '.join(METHODS)}.", param_hint="--methods")
    return ["floor", *(name for name in dict.fromkeys(names) if name != "floor")]


@click.command("bench")
@click.option("--model", help=f"{', '.join(SHAPES)}, or an Axolotl YAML. Default: llama3-8b, on a CPU tiny.")
@click.option("--methods", help=f"Comma-separated, of {', '.join(METHODS)}. Default: all; floor always runs.")
@click.option("--batch-size", type=click.IntRange(min=1), help="Sequences a step. Default 16.")
@click.option("--sequence-len", type=click.IntRange(min=2), help="Tokens a sequence. Default 196.")
@click.option("--steps", type=click.IntRange(min=1), help="Timed steps. Default 20.")
@click.option("--warmup", type=click.IntRange(min=1), help="Steps before them. Default 5.")
@click.option("--r0", type=click.IntRange(min=1), help="Rank whose size all adapters have. Default 8.")
@click.option("--gradient-checkpointing", is_flag=True, help="Compute activations again in backward.")
@click.option("--memory-limit", type=click.FloatRange(min=0, min_open=True), help="GiB, as if the GPU had no more.")
@click.option("--autocast", is_flag=True, help="Forward under bf16 autocast, as training with bf16: true.")
@click.option("--device", type=click.Choice(["cuda", "cpu"]), help="Default: cuda where there is one.")
@click.option("--output", type=click.Path(file_okay=False, path_type=Path), default=DEFAULT_OUTPUT, show_default=True)
@click.option("--markdown", "as_markdown", is_flag=True, help="Print Markdown instead of a table.")
@click.option(
    "--from", "earlier", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="Print this file."
)
@click.option("--profile", type=click.Choice(list(METHODS)), help="Profile three steps of this method, nothing else.")
@click.pass_context
def bench(
    context: click.Context,
    model: str | None,
    methods: str | None,
    device: str | None,
    output: Path,
    as_markdown: bool,
    earlier: Path | None,
    profile: str | None,
    **settings: Any,
) -> None:
    """Measure one training step of Super, Supra and their peers: time, memory, and × a model that trains nothing.

    Weights and tokens are random: a step's cost depends on shapes alone. Of a YAML the base model's config is read
    (a local folder), and lora_r, supra_lambda, lora_dropout, micro_batch_size, sequence_len and attn_implementation.
    Each method runs in a process of its own; one that fails is a row that says so, and exit code 1.

    Leaves OUTPUT/bench.json and OUTPUT/bench.png. While it runs, the rows so far are in OUTPUT/bench.partial.json,
    which --from reads as well.
    """
    from ..bench import run

    if earlier is not None:
        with user_errors():
            _show(run.read_result(earlier), as_markdown)
        return
    names = _method_names(methods)
    with user_errors(output):
        run.check_environment(output)
        measurement = run.measurement_for(model, device, {key: value for key, value in settings.items() if value})
        for note in run.notes_on(measurement, model):
            click.echo(note, err=True)
        if profile:
            click.echo(f"wrote {run.write_profile(measurement, profile, output)}")
            return
        result = run.measure_methods(
            measurement, names, output, model=model or measurement.model, command=_command_line(context)
        )
        _show(result, as_markdown)
        run.write_result(result, output)
        click.echo(f"wrote {output / 'bench.json'} and {output / 'bench.png'}", err=True)
    if any(row["status"] == "failed" for row in result["rows"]):
        context.exit(1)


def _show(result: dict[str, Any], as_markdown: bool) -> None:
    from ..bench.report import markdown, print_table

    if as_markdown:
        click.echo(markdown(result))
    else:
        print_table(result)


def _command_line(context: click.Context) -> str:
    """What was typed, with the variable that chooses the kernels and without the paths of program and output."""
    chosen = os.environ.get(KERNELS_VARIABLE)
    words = [*([f"{KERNELS_VARIABLE}={chosen}"] if chosen else []), "axolotl", "supertune", "bench"]
    for parameter in context.command.params:
        name = str(parameter.name)
        if name == "output" or context.get_parameter_source(name) is not ParameterSource.COMMANDLINE:
            continue
        value = context.params[name]
        words += [parameter.opts[0]] if value is True else [parameter.opts[0], str(value)]
    return shlex.join(words)
