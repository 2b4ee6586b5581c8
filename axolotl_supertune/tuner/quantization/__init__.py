"""Base models with quantized layers: the registry of libraries, `BACKENDS`, and look-ups in it.

`backend.Backend` says what a library must provide. `linear` holds the adapted layer, `settings` how a base is
quantized, `foreign` the refusal of bases that no backend supports.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .backend import Backend
from .bitsandbytes import Bitsandbytes, nf4_linear

__all__ = [
    "BACKENDS",
    "REMEDY",
    "SUPPORTED_BASES",
    "Backend",
    "backend_of",
    "dense_linear",
    "identifying_tensors",
    "is_quantized",
    "nf4_linear",
    "prepare",
    "stored_bytes",
]

BACKENDS: list[Backend] = [Bitsandbytes()]

_NAMES = " or ".join(backend.name for backend in BACKENDS)
_LOADED_WITH = " or ".join(backend.loaded_with for backend in BACKENDS)

REMEDY = (
    f"SUPRA adapts unquantized bases and those that {_NAMES} quantizes: load the original model in bf16, with "
    f"{_LOADED_WITH} if it is to be small."
)
SUPPORTED_BASES = f"only bases quantized by {_NAMES} are supported: {_LOADED_WITH}"
"""The reason why YAML keys of other libraries are refused."""


def backend_of(layer: nn.Module) -> Backend | None:
    """The library that quantized a layer; None for a layer that none of them did."""
    return next((backend for backend in BACKENDS if backend.bits(layer) is not None), None)


def is_quantized(layer: nn.Module) -> bool:
    """Whether one of the libraries quantized a layer."""
    return backend_of(layer) is not None


def identifying_tensors(parameter: Tensor) -> Sequence[Tensor]:
    """1-D tensors that identify a parameter's values: itself, or the packed values and scales of a quantized one."""
    for backend in BACKENDS:
        if backend.owns_parameter(parameter):
            return backend.identifying_tensors(parameter)
    return [parameter.detach().reshape(-1)]


def prepare(model: nn.Module) -> None:
    """Prevent quantized layers from rewriting their weights; call before a model is calibrated or adapted."""
    for backend in BACKENDS:
        backend.prepare(model)


def dense_linear(layer: Any, weight: Tensor) -> nn.Linear:
    """`nn.Linear` with this weight (c, b) and a quantized layer's bias, frozen like the layer."""
    with torch.device("meta"):
        linear = nn.Linear(layer.in_features, layer.out_features, bias=layer.bias is not None)
    linear.weight = nn.Parameter(weight, requires_grad=False)
    if layer.bias is not None:
        bias = layer.bias.data.to(weight.dtype)
        linear.bias = nn.Parameter(bias, requires_grad=layer.bias.requires_grad)
    return linear.train(layer.training)


def stored_bytes(format_name: str, weights: float, rows: float) -> float:
    """Bytes of quantized weights with their scales, for `plan`; arguments as for `Backend.stored_bytes`.

    Raises:
        ValueError: no library has this format.
    """
    for backend in BACKENDS:
        size = backend.stored_bytes(format_name, weights, rows)
        if size is not None:
            return size
    raise ValueError(f"{format_name!r} is not a format of {', '.join(backend.name for backend in BACKENDS)}.")
