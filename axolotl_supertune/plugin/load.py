"""Trained adapters: which one a command means, and loading it for training, evaluation or inference."""

from pathlib import Path
from typing import Any

from axolotl.utils.logging import get_logger
from peft import PeftModel

from ..method.adapter_files import WEIGHTS
from ..method.config_error import ConfigError
from ..tuner import SupraConfig
from ..tuner.checkpoint import read_config

LOG = get_logger(__name__)

# Fields that decide which weights an adapter trains and how; a resumed run must agree with its checkpoint on them.
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
    """Whether a folder has an adapter's weights; adapter_config.json alone is there before training has begun."""
    return (folder / WEIGHTS).is_file()


def what_to_name(output_dir: Path) -> str:
    """The remedy if no trained adapter is named: to name output_dir or its newest checkpoint, or to train."""
    if holds_adapter(output_dir):
        return f"Name the trained one: --lora-model-dir={output_dir} (lora_model_dir in the YAML)."
    checkpoints = [path for path in output_dir.glob("checkpoint-*") if holds_adapter(path)]
    if checkpoints:
        newest = max(checkpoints, key=lambda path: path.stat().st_mtime)
        return f"A run that did not finish left {newest}: pass --lora-model-dir={newest}."
    return "Train first, or pass --lora-model-dir."


def untrained_message(output_dir: str) -> str:
    """The message that refuses to evaluate a new adapter."""
    return f"this would evaluate a new, untrained adapter, which is the base model. {what_to_name(Path(output_dir))}"


def check_not_the_start(cfg: Any, output_dir: Path) -> None:
    """Refuse to merge, or to chat with, the adapter that a finished run started from.

    Raises:
        ConfigError: lora_model_dir names an adapter outside of output_dir, which holds a trained one.
    """
    start = cfg.get("lora_model_dir")
    if not start or not holds_adapter(output_dir):
        return
    if output_dir.resolve() not in (Path(start).resolve(), *Path(start).resolve().parents):
        raise ConfigError(
            "lora_model_dir",
            f"{start} is the adapter that this run started from; the trained one is in output_dir. "
            f"Pass --lora-model-dir={output_dir}, or name another output_dir to use the start.",
        )


def config_of(folder: str, key: str) -> SupraConfig:
    """The config of the adapter that a key of the YAML names.

    Args:
        folder: the key's value: a folder, or the name of an adapter on the hub.
        key: for the message.

    Raises:
        ConfigError: there is no trained adapter of this method, or its config is damaged.
    """
    if Path(folder).exists() and not holds_adapter(Path(folder)):
        raise ConfigError(key, f"{folder} holds no trained adapter. {what_to_name(Path(folder))}")
    try:
        return read_config(folder, may_be_on_hub=True)
    except ValueError as error:
        raise ConfigError(key, str(error)) from error


def differences(saved: SupraConfig, asked: SupraConfig, source: str, fields: tuple[str, ...] = RUN_FIELDS) -> str:
    """The fields in which two configs differ, as "mask_score wanda (the YAML says magnitude), …"; "" if in none.

    Args:
        saved: the config of a saved adapter.
        asked: the config that it is compared with.
        source: where `asked` comes from, with a verb: "the YAML says".
        fields: which fields to compare. support_seed only counts for a random support.
    """
    random = asked.sparse_direction == "random"
    return ", ".join(
        f"{name} {getattr(saved, name)} ({source} {getattr(asked, name)})"
        for name in fields
        if getattr(saved, name) != getattr(asked, name) and (name != "support_seed" or random)
    )


def kept_settings(cfg: Any, folder: str, asked: SupraConfig) -> str:
    """`differences` of the adapter in `folder`, which keeps its own settings, from the YAML's.

    Args:
        cfg: the YAML.
        folder: what lora_model_dir names.
        asked: the adapter that the YAML describes.

    Raises:
        ConfigError: there is no trained adapter of this method, or its config is damaged.
    """
    return differences(config_of(folder, "lora_model_dir"), asked, "the YAML says")


def load_trained(model: Any, cfg: Any, folder: str, asked: SupraConfig, trainable: bool) -> Any:
    """The model with the adapter in `folder`; warns about settings in which it differs from the YAML.

    Args:
        model: the base model.
        cfg: the YAML.
        folder: a folder, or the name of an adapter on the hub.
        asked: the adapter that the YAML describes.
        trainable: whether it is trained further.

    Raises:
        ConfigError: there is no trained adapter of this method, or its config is damaged.
    """
    kept = kept_settings(cfg, folder, asked)
    if kept:
        LOG.warning("The adapter in %s has its own settings and keeps them: %s.", folder, kept)
    if Path(folder).resolve() != Path(cfg.output_dir).resolve():
        LOG.info("Loading the adapter in %s, not one in output_dir (%s).", folder, cfg.output_dir)
    placement = {"max_memory": {"cpu": "256GiB"}, "device_map": {"": "cpu"}} if cfg.lora_on_cpu else {}
    return PeftModel.from_pretrained(model, folder, is_trainable=trainable, **placement)
