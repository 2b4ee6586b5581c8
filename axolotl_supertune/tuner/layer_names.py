"""Names of the adapted layers in an adapter file, and in the base model."""

import re
from collections.abc import Iterable

_PREFIX = "base_model.model."  # PEFT's, before a layer's name in the file


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
