"""Scoring a model with lm-evaluation-harness: its arguments, and the call."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..method.adapter_files import CONFIG, WEIGHTS
from . import TASK_FOLDER
from .benchmarks import DATA_DIR_KEY

CONTAMINATION_KEY = "supertune_contamination"
_SAVED = ("results", "groups", "n-samples", "versions", "config")


def model_arguments(settings: Mapping[str, Any], trained: str | Path | None) -> dict[str, Any]:
    """`model_args` of the harness for a training.

    Args:
        settings: the training's YAML.
        trained: its output: a folder with an adapter, which goes on the base model, or with a whole model, which takes
            the base's place; None: the base model.

    Raises:
        ValueError: the YAML names no base_model.
    """
    if not settings.get("base_model"):
        raise ValueError("base_model: the config names none.")
    whole = trained is not None and not (Path(trained) / CONFIG).is_file()
    arguments: dict[str, Any] = {"pretrained": str(trained) if whole else settings["base_model"]}
    if settings.get("revision_of_model") and not whole:
        arguments["revision"] = settings["revision_of_model"]
    if settings.get("tokenizer_config"):
        arguments["tokenizer"] = settings["tokenizer_config"]
    if settings.get("bf16") in (True, "auto", "full"):
        arguments["dtype"] = "bfloat16"
    if trained is not None and not whole:
        arguments["peft"] = str(trained)
    return arguments


def check_adapter(folder: Path) -> Path:
    """The folder, if the harness can score the adapter in it.

    Raises:
        ValueError: there is no trained adapter, or its base was quantized.
    """
    if not (folder / WEIGHTS).is_file():
        raise ValueError(f"{folder} holds no trained adapter ({WEIGHTS}): train first, or name one with --adapter.")
    if json.loads((folder / CONFIG).read_text(encoding="utf-8")).get("base_quantization"):
        raise ValueError(
            f"{folder} was trained on a quantized base, and the harness loads bases unquantized: the score would be "
            "that of another model. Run axolotl merge-lora, then "
            f"lm_eval --model hf --model_args pretrained={folder}/merged --tasks …."
        )
    return folder


def task_metadata(
    arguments: Mapping[str, Any], data_dir: str | None = None, contamination: str | None = None
) -> dict[str, Any]:
    """What the harness passes on to our tasks.

    Args:
        arguments: of `model_arguments`; the perplexity task reads the tokenizer's name there.
        data_dir: folder of the six benchmark files.
        contamination: path of a contamination report.
    """
    metadata = dict(arguments)
    if data_dir:
        metadata[DATA_DIR_KEY] = data_dir
    if contamination:
        metadata[CONTAMINATION_KEY] = contamination
    return metadata


def evaluate(
    arguments: dict[str, Any],
    tasks: Sequence[str],
    *,
    limit: float | None = None,
    batch_size: int | str = 8,
    device: str | None = None,
    data_dir: str | None = None,
    contamination: str | None = None,
) -> tuple[dict[str, Any], list[str]]:
    """Score a model on lm-eval tasks, ours among them.

    Args:
        arguments: of `model_arguments`.
        limit: items per task; below 1, a share of them.
        data_dir, contamination: as in `task_metadata`.

    Returns:
        The results to save (scores, counts, versions), and the harness's tables of them for the terminal.
    """
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager
    from lm_eval.utils import make_table

    metadata = task_metadata(arguments, data_dir, contamination)
    results = simple_evaluate(
        model="hf",
        model_args=arguments,
        tasks=list(tasks),
        limit=limit,
        batch_size=batch_size,
        device=device,
        task_manager=TaskManager(include_path=str(TASK_FOLDER), metadata=metadata),
        metadata=metadata,
        log_samples=False,
    )
    tables = [make_table(results)] + ([make_table(results, "groups")] if results.get("groups") else [])
    return {key: results[key] for key in _SAVED if key in results}, tables
