"""Refusal of base models whose layers were quantized by a library without a backend (GPTQ, AWQ, HQQ, torchao, …)."""

from torch import Tensor, nn

from . import BACKENDS, REMEDY, backend_of
from .settings import backend_named, quant_method, quantization_config

# Attributes in which layers of other libraries keep packed weights.
_PACKED = ("qweight", "W_q", "qzeros", "weight_packed")


def check_base(model: nn.Module) -> None:
    """Raise TypeError, naming a layer and its type, if a library without a backend quantized the model."""
    config = quantization_config(model)
    method = None if config is None else quant_method(config)
    if backend_named(method) is not None:
        method = None
    supported = ("torch", *(backend.name for backend in BACKENDS))
    for name, module in model.named_modules():
        if backend_of(module) is not None:
            continue
        kind, weight = type(module).__name__, getattr(module, "weight", None)
        has_foreign_weight = isinstance(weight, Tensor) and _library(weight) not in supported
        # A layer without a packed weight of its own is recognised only by its class.
        has_foreign_class = method is not None and "Linear" in kind and type(module) is not nn.Linear
        if has_foreign_weight or has_foreign_class or any(hasattr(module, key) for key in _PACKED):
            kind = f"{kind}, its weight a {type(weight).__name__}" if has_foreign_weight else kind
            by = method or _library(weight if has_foreign_weight else module)
            raise TypeError(f"{name}: the layer is quantized by {by} ({kind}). {REMEDY}")
    if method is not None:
        raise TypeError(f"the base model is quantized by {method}, says its quantization_config. {REMEDY}")


def _library(thing: object) -> str:
    """The top-level package that an object's class comes from."""
    return type(thing).__module__.partition(".")[0]
