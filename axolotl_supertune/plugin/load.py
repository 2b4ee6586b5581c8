"""TODO-DOC plugin.load."""

import json
import os
from pathlib import Path
from typing import Any

from axolotl.utils.logging import get_logger
from peft import PeftConfig, PeftModel

from ..tuner import SupraConfig

LOG = get_logger(__name__)

# What decides which weights an adapter trains and how; a run that goes on must agree with its checkpoint on all of it.
RUN_FIELDS = (
    "r0",
    "sparse_density",
    "supra_lambda",
    "lora_alpha",
    "lora_dropout",
    "mask_score",
    "sparse_direction",
    "hybrid_beta",
    "support_seed",
    "support_scope",
    "budget_scope",
    "gradient_batches",
    "low_rank_warmup_steps",
    "target_modules",
    "exclude_modules",
    "layers_to_transform",
    "layers_pattern",
    "modules_to_save",
)


def holds_adapter(folder: Path) -> bool:
    """Whether a finished save is there; Axolotl writes adapter_config.json before training has begun."""
    return (folder / "adapter_model.safetensors").is_file()


def what_to_name(output_dir: Path) -> str:
    """The remedy where no trained adapter is named: output_dir, its newest checkpoint, or training."""
    if holds_adapter(output_dir):
        return f"Name the trained one: --lora-model-dir={output_dir} (lora_model_dir in the YAML)."
    checkpoints = [path for path in output_dir.glob("checkpoint-*") if holds_adapter(path)]
    if checkpoints:
        newest = max(checkpoints, key=lambda path: path.stat().st_mtime)
        return f"A run that did not finish left {newest}: pass --lora-model-dir={newest}."
    return "Train first, or pass --lora-model-dir."


def untrained(output_dir: str) -> str:
    """Why evaluating is refused."""
    return f"this would evaluate a new, untrained adapter, which is the base model. {what_to_name(Path(output_dir))}"


def check_not_the_start(cfg: Any, output_dir: Path) -> None:
    """Refuse to merge, or talk to, the adapter that a finished run started from."""
    start = cfg.get("lora_model_dir")
    if not start or not holds_adapter(output_dir):
        return
    if output_dir.resolve() not in (Path(start).resolve(), *Path(start).resolve().parents):
        raise ValueError(
            f"lora_model_dir: {start} is the adapter that this run started from; the trained one is in output_dir. "
            f"Pass --lora-model-dir={output_dir}, or name another output_dir to use the start."
        )


def _read_config(folder: str, key: str, adapter: str) -> SupraConfig:
    if os.path.exists(folder) and not holds_adapter(Path(folder)):
        raise ValueError(f"{key}: {folder} holds no trained adapter. {what_to_name(Path(folder))}")
    if os.path.exists(folder) and not (Path(folder) / "adapter_config.json").is_file():
        raise ValueError(f"{key}: {folder} holds no adapter_config.json, so it is no adapter.")
    try:
        saved = PeftConfig.from_pretrained(folder)
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(f"{key}: {folder}/adapter_config.json is damaged ({error!r}).") from error
    if not isinstance(saved, SupraConfig):
        raise ValueError(f"{key}: {folder} holds a {saved.peft_type} adapter, not one of adapter: {adapter}.")
    return saved


def _differences(saved: SupraConfig, asked: SupraConfig, other: str, fields: tuple[str, ...] = RUN_FIELDS) -> str:
    seeded = asked.sparse_direction == "random"
    return ", ".join(
        f"{name} {getattr(saved, name)} ({other} {getattr(asked, name)})"
        for name in fields
        if getattr(saved, name) != getattr(asked, name) and (name != "support_seed" or seeded)
    )


def kept_settings(cfg: Any, folder: str, asked: SupraConfig) -> str:
    """Say in which settings the adapter in `folder` is another than `asked`, the YAML's; "" where in none.

    Raises:
        ValueError: `folder` holds no adapter of this method, or a damaged one; names it.
    """
    return _differences(_read_config(folder, "lora_model_dir", cfg.adapter), asked, "the YAML says")


def load_trained(model: Any, cfg: Any, folder: str, asked: SupraConfig, trainable: bool) -> Any:
    differs = kept_settings(cfg, folder, asked)
    if differs:
        LOG.warning("The adapter in %s has its own settings and keeps them: %s.", folder, differs)
    if Path(folder).resolve() != Path(cfg.output_dir).resolve():
        LOG.info("Loading the adapter in %s, not one in output_dir (%s).", folder, cfg.output_dir)
    placement = {"max_memory": {"cpu": "256GiB"}, "device_map": {"": "cpu"}} if cfg.lora_on_cpu else {}
    return PeftModel.from_pretrained(model, folder, is_trainable=trainable, **placement)
