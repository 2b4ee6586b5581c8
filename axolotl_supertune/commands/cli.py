"""`axolotl supertune …`: commands beside Axolotl's own."""

import json
import os
from pathlib import Path
from typing import Any

import click

from ..bench.run import bench
from ..grid.command import sweep
from ..grid.report.report import report
from ..method.atomic_files import whole_file, writing
from ..plugin.plan.plan import plan
from ..tasks import TASK_FOLDER
from ..tasks.contamination.contamination import contamination
from ..tuner.export import export
from ..tuner.inspection import inspect
from ..tuner.overlap import overlap


@click.group()
def supertune() -> None:
    """Super and Supra: plan, calibrate, evaluate, inspect, export; grids; contamination checks; what a step costs."""


supertune.add_command(contamination)
supertune.add_command(bench)
supertune.add_command(plan)
supertune.add_command(export)
supertune.add_command(inspect)
supertune.add_command(overlap)
supertune.add_command(report)
supertune.add_command(sweep)


@supertune.command("calibrate")
@click.argument("config", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option(
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Default: the config's calibration_path, else OUTPUT_DIR/activation_norms.safetensors.",
)
@click.option(
    "--stream", is_flag=True, help="Keep the model in CPU memory, with one decoder layer at a time on the device."
)
@click.option("--overwrite", is_flag=True, help="Replace the norms that are there.")
def calibrate(config: Path, output: Path | None, stream: bool, overwrite: bool) -> None:
    """Measure the activation norms of CONFIG's base model on one device, and write them for calibration_path.

    For models that a training holds only in shards, and to calibrate once for many runs.
    """
    if int(os.environ.get("WORLD_SIZE") or 1) > 1:
        raise click.ClickException(f"WORLD_SIZE={os.environ['WORLD_SIZE']}: this command runs in one process.")
    from ..plugin.calibrate_base import calibrate_base

    try:
        with writing(output or "the activation norms"):
            path = calibrate_base(config, output, stream=stream, overwrite=overwrite)
    except (ValueError, FileNotFoundError, FileExistsError) as error:
        raise click.ClickException(str(error)) from error
    click.echo(f"wrote {path}; calibration_path: {path} in the YAML uses it")


@supertune.command("eval")
@click.argument("config", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--tasks", default="supertune_math", show_default=True, help="Comma-separated lm-eval tasks.")
@click.option("--adapter", type=click.Path(path_type=Path), help="Adapter folder. Default: the config's output_dir.")
@click.option("--base", "base_only", is_flag=True, help="Score the base model without an adapter.")
@click.option("--limit", type=float, help="Items per task (below 1: a share).")
@click.option("--batch-size", default="8", show_default=True)
@click.option("--device", help="Default: cuda where there is one, else cpu.")
@click.option("--data-dir", help="Folder of the six benchmark files (SUPERTUNE_DATA_DIR).")
@click.option("--contamination", "report", type=click.Path(exists=True), help="Report: adds acc_clean, n_clean.")
@click.option("--output", type=click.Path(path_type=Path), help="Default: OUTPUT_DIR/supertune_eval.json.")
def evaluate(
    config: Path,
    tasks: str,
    adapter: Path | None,
    base_only: bool,
    limit: float | None,
    batch_size: str,
    device: str | None,
    data_dir: str | None,
    report: str | None,
    output: Path | None,
) -> None:
    """Score the trained adapter of CONFIG with lm-evaluation-harness.

    Axolotl's own `axolotl lm-eval` gives the harness output_dir as a whole model, which an adapter is not.
    """
    import yaml

    settings = yaml.safe_load(config.read_text(encoding="utf-8"))
    arguments = model_arguments(settings, adapter, base_only)
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager
    from lm_eval.utils import make_table

    from .. import tuner  # noqa: F401 (registers SUPRA, also where the start-up hook is off)

    metadata: dict[str, Any] = dict(arguments)
    if data_dir:
        metadata["supertune_data_dir"] = data_dir
    if report:
        metadata["supertune_contamination"] = report
    results = simple_evaluate(
        model="hf",
        model_args=arguments,
        tasks=tasks.split(","),
        limit=limit,
        batch_size=int(batch_size) if batch_size.isdigit() else batch_size,
        device=device,
        task_manager=TaskManager(include_path=str(TASK_FOLDER), metadata=metadata),
        metadata=metadata,
        log_samples=False,
    )
    click.echo(make_table(results))
    if results.get("groups"):
        click.echo(make_table(results, "groups"))
    target = output or Path(settings["output_dir"]) / "supertune_eval.json"
    kept = {key: results[key] for key in ("results", "groups", "n-samples", "versions", "config") if key in results}
    with whole_file(target) as temporary:
        temporary.write_text(json.dumps(kept, indent=2, default=str) + "\n", encoding="utf-8")
    click.echo(f"wrote {target}")


def model_arguments(settings: dict[str, Any], adapter: Path | None, base_only: bool) -> dict[str, Any]:
    """`model_args` of the harness for a config.

    Raises:
        click.ClickException: the config has no base_model, there is no trained adapter, or its base was quantized.
    """
    if not settings.get("base_model"):
        raise click.ClickException("base_model: the config names none.")
    arguments: dict[str, Any] = {"pretrained": settings["base_model"]}
    if settings.get("revision_of_model"):
        arguments["revision"] = settings["revision_of_model"]
    if settings.get("tokenizer_config"):
        arguments["tokenizer"] = settings["tokenizer_config"]
    if settings.get("bf16") in (True, "auto", "full"):
        arguments["dtype"] = "bfloat16"
    if base_only:
        return arguments
    folder = adapter or Path(settings.get("output_dir") or ".")
    if not (folder / "adapter_model.safetensors").is_file():
        raise click.ClickException(
            f"{folder} holds no trained adapter (adapter_model.safetensors): train first, or name one with --adapter."
        )
    if json.loads((folder / "adapter_config.json").read_text(encoding="utf-8")).get("base_quantization"):
        raise click.ClickException(
            f"{folder} was trained on a quantized base, and the harness loads bases unquantized: the score would be "
            "that of another model. Run axolotl merge-lora, then "
            f"lm_eval --model hf --model_args pretrained={folder}/merged --tasks …."
        )
    return {**arguments, "peft": str(folder)}
