"""What export, inspection and overlap read of a saved adapter: its config, and the names of its layers."""

import os
import re
from collections.abc import Iterable
from pathlib import Path

from peft import PeftConfig

from .config import SupraConfig

_PREFIX = "base_model.model."  # PEFT's, before a layer's name in the file


def read_config(folder: Path) -> SupraConfig:
    """The config of a saved Supra adapter.

    Raises:
        ValueError: the folder holds no trained Supra adapter, or the config is damaged.
    """
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        if not (folder / name).is_file():
            raise ValueError(f"{folder} holds no {name}, so it is no trained adapter.")
    try:
        config = PeftConfig.from_pretrained(os.fspath(folder))
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{folder}/adapter_config.json is damaged ({error!r}): copy or save the adapter again."
        ) from error
    if not isinstance(config, SupraConfig):
        raise ValueError(f"{folder} holds a {config.peft_type} adapter, not one of Super or Supra.")
    return config


def adapted_layers(names: Iterable[str]) -> list[str]:
    """The adapted layers of an adapter file, in the model's order.

    Args:
        names: of the file's tensors.

    Returns:
        Their names in the file; `base_name` gives those in the base model.
    """
    layers = [name.removesuffix(".supra_shape") for name in names if name.endswith(".supra_shape")]
    return sorted(layers, key=lambda name: [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)])


def base_name(layer: str) -> str:
    """A layer's name in the base model."""
    return layer.removeprefix(_PREFIX)
