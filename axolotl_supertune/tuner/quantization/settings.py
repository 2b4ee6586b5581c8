"""How a base model is quantized: read from the model, stored in the adapter's config, compared when it is loaded."""

import warnings
from collections.abc import Mapping
from typing import Any

from torch import nn

from . import BACKENDS
from .backend import Backend, Settings


def backend_named(method: str | None) -> Backend | None:
    """The backend of a `quant_method`, or None."""
    return next((backend for backend in BACKENDS if backend.name == method), None)


def quant_method(config: Any) -> str:
    """The `quant_method` of a quantization config: an object of transformers, or the mapping in a config.json."""
    method = config.get("quant_method") if isinstance(config, dict) else getattr(config, "quant_method", None)
    return str(getattr(method, "value", method))


def quantization_config(model: nn.Module) -> Any:
    """transformers' quantization config of a model, or None."""
    return getattr(getattr(model, "config", None), "quantization_config", None)


def base_quantization(model: nn.Module) -> Settings | None:
    """How a transformers model is quantized, as plain values that `from_pretrained` takes; None if it is not."""
    config = quantization_config(model)
    backend = None if config is None else backend_named(quant_method(config))
    return None if backend is None else backend.plain_settings(config)


def plain_settings(config: Any) -> Settings:
    """The stored settings of a supported quantization config, an object or a mapping.

    Raises:
        ValueError: no backend supports its method.
    """
    backend = backend_named(quant_method(config))
    if backend is None:
        raise ValueError(f"no quantization backend for {quant_method(config)!r}.")
    return backend.plain_settings(config)


def describe(settings: Mapping[str, Any] | None) -> str:
    """Stored settings in words: "not quantized", "quantized to 8 bits", …"""
    backend = settings_backend(settings)
    return "not quantized" if not settings or backend is None else f"quantized to {backend.describe(settings)}"


def load_options(settings: Mapping[str, Any] | None) -> dict[str, Any]:
    """Arguments of `from_pretrained` that load a base as these stored settings say."""
    backend = settings_backend(settings)
    return {} if not settings or backend is None else {"quantization_config": backend.transformers_config(settings)}


def settings_backend(settings: Mapping[str, Any] | None) -> Backend | None:
    """The backend that stored settings belong to; None for an unquantized base."""
    return next((backend for backend in BACKENDS if settings and backend.owns_settings(settings)), None)


def record_quantization(model: nn.Module, config: Any) -> None:
    """Store the base's quantization in the config of a new adapter; for a saved adapter, warn if it differs.

    Args:
        model: the base model.
        config: a `SupraConfig`.
    """
    current = base_quantization(model)
    if config.support == "select":
        config.base_quantization = current
        return
    trained_on = config.base_quantization
    if _weight_settings(trained_on) != _weight_settings(current):
        warnings.warn(
            f"the adapter was trained on a base that was {describe(trained_on)}, this one is {describe(current)}. "
            "Unless one is the other dequantized, their weights differ slightly, and so does what the adapter gives: "
            "load the base as it was in training to get what was trained.",
            stacklevel=2,
        )


def _weight_settings(settings: Mapping[str, Any] | None) -> Settings:
    backend = settings_backend(settings)
    return {} if not settings or backend is None else backend.weight_settings(settings)
