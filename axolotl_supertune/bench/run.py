"""The command: which methods, in which processes, and the files it leaves."""

import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, replace
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from ..method.atomic_files import whole_file
from .job import METHODS, PEFT_CLASSES, SHAPES, Job, parameter_count
from .report import add_ratios, draw, markdown, print_table

DEFAULT_OUTPUT = Path("outputs/bench")
VARIABLE = "SUPERTUNE_KERNELS"  # of ops.choice, which loads torch
PACKAGES = ("axolotl-supertune", "torch", "peft", "transformers", "triton", "bitsandbytes")
# Keys of a YAML and the fields of a Job that they set; and those that cost, and set none.
_READ = {
    "lora_r": "r0",
    "supra_lambda": "supra_lambda",
    "lora_dropout": "lora_dropout",
    "micro_batch_size": "batch_size",
    "sequence_len": "sequence_len",
    "attn_implementation": "attn_implementation",
    "gradient_checkpointing": "gradient_checkpointing",
}
_COSTLY = {
    "sample_packing",
    "torch_compile",
    "load_in_4bit",
    "load_in_8bit",
    "lora_target_modules",
    "lora_modules_to_save",
    "sparse_direction",
    "sparse_density",
    "optimizer",
    "gradient_accumulation_steps",
    "fsdp_config",
    "deepspeed",
    "cut_cross_entropy",
    "chunked_cross_entropy",
    "lora_mlp_kernel",
    "lora_qkv_kernel",
    "lora_o_kernel",
    "activation_offloading",
    "unfrozen_parameters",
}
# A step of more would take minutes on a CPU and say nothing about a GPU.
_CPU_PARAMETERS = 200_000_000
_CPU_CALIBRATION: dict[str, Any] = {"calibration_samples": 8, "calibration_sequence_len": 64}


@click.command()
@click.option("--model", help=f"{', '.join(SHAPES)}, or an Axolotl YAML. Default: llama3-8b, on a CPU tiny.")
@click.option("--methods", help=f"Comma-separated, of {', '.join(METHODS)}. Default: all; floor always runs.")
@click.option("--batch-size", type=click.IntRange(min=1), help="Sequences a step. Default 16.")
@click.option("--sequence-len", type=click.IntRange(min=2), help="Tokens a sequence. Default 196.")
@click.option("--steps", type=click.IntRange(min=1), help="Timed steps. Default 20.")
@click.option("--warmup", type=click.IntRange(min=1), help="Steps before them. Default 5.")
@click.option("--r0", type=click.IntRange(min=1), help="Rank whose size all adapters have. Default 8.")
@click.option("--gradient-checkpointing", is_flag=True, help="Make activations again in backward.")
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
    if earlier is not None:
        try:
            _show(json.loads(earlier.read_text(encoding="utf-8")), as_markdown)
        except (ValueError, KeyError, TypeError) as error:
            raise click.ClickException(f"--from {earlier}: not a bench.json ({error!r}).") from error
        return
    names = _method_names(methods)
    _check_environment(output)
    job = _job(model, device, {key: value for key, value in settings.items() if value})
    if job.device == "cpu":
        click.echo("No GPU is used: these are CPU numbers of a small shape, and not the claim.", err=True)
    if model is not None and model not in SHAPES:
        click.echo(f"{model}: shape and settings are read, the weights are random.", err=True)
        unread = _unread(model)
        if unread:
            click.echo(f"{model}: not read, though a training's step depends on them: {', '.join(unread)}.", err=True)
    if profile:
        import peft

        if profile in PEFT_CLASSES and not hasattr(peft, PEFT_CLASSES[profile]):
            raise click.ClickException(f"--profile {profile}: PEFT {peft.__version__} has no {PEFT_CLASSES[profile]}.")
        row = _measure(replace(job, method=profile, profile=True))
        if row["status"] != "ok":
            raise click.ClickException(f"{profile}: {row['note']}")
        with whole_file(output / f"profile_{profile}.txt") as temporary:
            temporary.write_text(row["profile"], encoding="utf-8")
        click.echo(f"wrote {output / f'profile_{profile}.txt'}")
        return
    named = {"model": model or job.model, "command": _command_line(context), "methods": names}
    # After every row, beside what an earlier run left: one that is stopped loses neither.
    partial = output / "bench.partial.json"
    for result in run(job, names):
        _write_json(partial, result | named)
    result |= named
    _show(result, as_markdown)
    _write_json(output / "bench.json", result)
    partial.unlink()
    with whole_file(output / "bench.png") as temporary:
        draw(result, temporary)
    click.echo(f"wrote {output / 'bench.json'} and {output / 'bench.png'}", err=True)
    if any(row["status"] == "failed" for row in result["rows"]):
        context.exit(1)


def run(job: Job, names: list[str]) -> Iterator[dict[str, Any]]:
    """Measure the methods one after another, the floor first and last.

    Yields:
        After each, the content of bench.json so far, but for the model's name and the command.
    """
    import peft
    import torch

    cpu = job.device == "cpu"
    shared = {key: value for key, value in asdict(job).items() if key not in ("method", "model", "device", "profile")}
    rows: list[dict[str, Any]] = []
    result = {
        "device": "CPU" if cpu else torch.cuda.get_device_name(),
        "cpu": cpu,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {name: _version(name) for name in PACKAGES},
        "job": {**shared, "dtype": "fp32" if cpu else "bf16"},
        "rows": rows,
    }
    for name in names:
        needed = PEFT_CLASSES.get(name)
        if needed and not hasattr(peft, needed):
            note = f"PEFT {peft.__version__} has no {needed}"
            rows.append({"method": name, "status": "not installed", "note": note})
        else:
            rows.append(_measure(replace(job, method=name)))
        add_ratios(rows)
        yield result
    rows.append(_measure(replace(job, method="floor")) | {"again": True})
    add_ratios(rows)
    yield result


def _measure(job: Job) -> dict[str, Any]:
    """The row of one method, from a process of its own."""
    click.echo(f"{job.method}: {METHODS[job.method]} …", err=True)
    command = [sys.executable, "-m", "axolotl_supertune.bench.worker", json.dumps(asdict(job))]
    worker = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        output, errors = worker.communicate()
    finally:  # whatever ends this process ends the worker, which holds a GPU
        worker.kill()
        worker.wait()
    try:
        row: dict[str, Any] = json.loads(output.strip().rpartition("\n")[2])
    except ValueError:  # killed, or it could not start
        code = worker.returncode
        last = errors.strip().rpartition("\n")[2][:300]
        killed = f"the process was killed by {signal.Signals(-code).name if code < 0 else code} (out of host memory?)"
        note = killed if code < 0 else f"the process ended with code {code}: {last}"
        row = {"method": job.method, "status": "failed", "note": note}
    if row["status"] != "ok":
        click.echo(errors[-4000:], err=True)
    return row


def _write_json(path: Path, result: dict[str, Any]) -> None:
    with whole_file(path) as temporary:
        temporary.write_text(json.dumps(result, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _check_environment(output: Path) -> None:
    """What would otherwise be found out after the first measurement, or leave a worker behind."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    from ..ops.dispatch import requested

    try:
        requested()
        output.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=output):
            pass
    except (OSError, ValueError) as error:
        raise click.ClickException(
            f"--output {output}: {error}" if isinstance(error, OSError) else str(error)
        ) from error


def _method_names(methods: str | None) -> list[str]:
    names = list(METHODS) if methods is None else [name.strip() for name in methods.split(",") if name.strip()]
    unknown = [name for name in names if name not in METHODS]
    if unknown:
        raise click.BadParameter(f"{unknown[0]!r} is not one of {', '.join(METHODS)}.", param_hint="--methods")
    return ["floor", *(name for name in dict.fromkeys(names) if name != "floor")]


def _job(model: str | None, device: str | None, settings: dict[str, Any]) -> Job:
    """The job but for its method: the command line's settings before the YAML's before the defaults.

    Raises:
        click.ClickException: no such device, shape or model, or one too large for a CPU.
    """
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        raise click.ClickException("--device cuda: torch sees no GPU here; leave --device out to run tiny on the CPU.")
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    model = model or ("tiny" if device == "cpu" else "llama3-8b")
    given: dict[str, Any] = {"model": model} if model in SHAPES else _yaml_settings(model)
    job = Job(**{"method": "floor", "device": device, **given, **settings})
    if device == "cpu":
        if job.memory_limit is not None:
            raise click.ClickException(f"--memory-limit {job.memory_limit}: it limits a GPU, and none is used here.")
        if job.model != "tiny" and parameter_count(job.model) > _CPU_PARAMETERS:
            raise click.ClickException(
                f"--model {model}: more than {_CPU_PARAMETERS // 10**6} M parameters and no GPU; run it on a machine "
                "with one, or take --model tiny or smollm2-135m, whose numbers are not the claim."
            )
        job = replace(job, **_CPU_CALIBRATION)
    return job


def _yaml_settings(path: str) -> dict[str, Any]:
    """Fields of a Job from an Axolotl YAML; a key that it leaves out is left out."""
    import yaml

    if not path.endswith((".yml", ".yaml")) or not Path(path).is_file():
        raise click.ClickException(f"--model {path}: neither one of {', '.join(SHAPES)} nor a YAML file.")
    try:
        config = yaml.safe_load(Path(path).read_text(encoding="utf-8")) or {}
        base = config.get("base_model")
    except (yaml.YAMLError, AttributeError) as error:
        raise click.ClickException(f"--model {path}: not a YAML of keys ({error}).") from error
    if not base or not Path(base).exists():
        raise click.ClickException(
            f"base_model: {base!r} in {path} is no local folder; put the model's config.json into a folder and name "
            f"that, or bench a shape: --model {', '.join(SHAPES)}."
        )
    found = {field: config[key] for key, field in _READ.items() if config.get(key) is not None}
    if "gradient_checkpointing" in found:
        found["gradient_checkpointing"] = bool(found["gradient_checkpointing"])
    return {"model": base} | found


def _unread(path: str) -> list[str]:
    """Keys of a YAML that change what a step costs, and that the bench has no setting for."""
    import yaml

    config = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    return sorted(key for key, value in config.items() if value and (key in _COSTLY or key.startswith("liger_")))


def _command_line(context: click.Context) -> str:
    """What was typed, with the variable that chooses the kernels and without the paths of program and output."""
    chosen = os.environ.get(VARIABLE)
    words = [*([f"{VARIABLE}={chosen}"] if chosen else []), "axolotl", "supertune", "bench"]
    for parameter in context.command.params:
        if (
            parameter.name != "output"
            and context.get_parameter_source(str(parameter.name)) is ParameterSource.COMMANDLINE
        ):
            value = context.params[str(parameter.name)]
            words += [parameter.opts[0]] if value is True else [parameter.opts[0], str(value)]
    return shlex.join(words)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        # a checkout on the path
        return sys.modules[__name__.partition(".")[0]].__version__ if package == PACKAGES[0] else None


def _show(result: dict[str, Any], as_markdown: bool) -> None:
    if as_markdown:
        click.echo(markdown(result))
    else:
        print_table(result)
