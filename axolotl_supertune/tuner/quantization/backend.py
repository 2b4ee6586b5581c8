"""`Backend`: everything that the tuner must know of a library that quantizes linear layers.

To support a library, write a subclass in a file of its own here, add an instance to `BACKENDS` in `__init__.py`, and
test it as tests/tuner/test_quantized.py tests bitsandbytes.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

Settings = dict[str, Any]
"""How a base is quantized, as plain values: keyword arguments of the library's config class in transformers."""


class Backend(ABC):
    """A quantization library.

    An adapted layer computes y = x·(W̃ + M⊙U + γ·L·R)ᵀ + bias, where W̃ (c, b) is the dequantized weight. W̃ must be the
    same bits at every call of `dequantize`, since forward and backward each call it.

    Attributes:
        name: the library's `quant_method` in transformers' quantization configs.
        loaded_with: the YAML keys that load a base so, for messages: "load_in_4bit or load_in_8bit".
    """

    name: str
    loaded_with: str

    @abstractmethod
    def bits(self, layer: nn.Module) -> int | None:
        """Bits per weight of a layer that this library quantized; None for any other module."""

    @abstractmethod
    def owns_parameter(self, parameter: Tensor) -> bool:
        """Whether a parameter is a weight that this library quantized."""

    @abstractmethod
    def unsupported_reason(self, layer: Any) -> str | None:
        """Why one of its layers cannot be adapted, or None if it can."""

    @abstractmethod
    def dequantize(self, layer: Any, dtype: torch.dtype) -> Tensor:
        """The weight W̃ of a layer without an `unsupported_reason`: (c, b), new and contiguous.

        Args:
            layer: the quantized layer.
            dtype: what `weight_dtype` returned for the layer.
        """

    @abstractmethod
    def weight_dtype(self, layer: Any, default: torch.dtype) -> torch.dtype:
        """The dtype of W̃: the one that the layer was quantized from, or `default` if the layer does not know it."""

    def compute_dtype(self, layer: Any) -> torch.dtype | None:
        """The dtype in which the layer multiplies, or None for autocast's, or else that of its input."""
        return None

    @abstractmethod
    def identifying_tensors(self, parameter: Tensor) -> Sequence[Tensor]:
        """1-D tensors that identify a quantized parameter: its packed values and scales.

        They must not change when the model runs or is moved; the fingerprint of a base is made from them.
        """

    @abstractmethod
    def prepare(self, model: nn.Module) -> None:
        """Before a model is calibrated or adapted: prevent its layers from rewriting their weights. Idempotent."""

    def is_cast_safe(self, tensor: Tensor) -> bool:
        """Whether a tensor of a layer may be cast to another float dtype. Packed values stored as floats may not."""
        return True

    @abstractmethod
    def remove_marks(self, model: nn.Module) -> None:
        """After all layers were dequantized: remove what marks the model as quantized."""

    @abstractmethod
    def plain_settings(self, config: Any) -> Settings:
        """The settings that an adapter stores, as plain values.

        Args:
            config: transformers' quantization config, or the mapping in a config.json.
        """

    @abstractmethod
    def transformers_config(self, settings: Mapping[str, Any]) -> Any:
        """transformers' quantization config of stored settings, for `from_pretrained`."""

    @abstractmethod
    def owns_settings(self, settings: Mapping[str, Any]) -> bool:
        """Whether stored settings are this library's."""

    @abstractmethod
    def weight_settings(self, settings: Mapping[str, Any]) -> Settings:
        """The settings on which the dequantized weights depend; bases that agree in them have equal weights."""

    @abstractmethod
    def describe(self, settings: Mapping[str, Any]) -> str:
        """The settings in a few words: "4 bits (nf4, with double quantization)"."""

    @abstractmethod
    def stored_bits(self, settings: Mapping[str, Any]) -> int:
        """Bits per weight of stored settings."""

    @abstractmethod
    def stored_format(self, settings: Mapping[str, Any]) -> str:
        """The format of weights with these stored settings, as `plan` names it and `stored_bytes` takes it."""

    @abstractmethod
    def stored_bytes(self, format_name: str, weights: float, rows: float) -> float | None:
        """Bytes of quantized weights with their scales, or None if the format is not this library's.

        Args:
            format_name: what `stored_format` returns.
            weights: number of weights.
            rows: number of rows of all weight matrices together.
        """
