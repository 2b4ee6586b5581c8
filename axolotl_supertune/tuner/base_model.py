"""What the base model is: the dtype it was loaded in, and whether and by whom it was quantized."""

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..engines import sharding
from .config import SupraConfig
from .quantization import bnb

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
REMEDY = (
    "SUPRA adapts unquantized bases and those that bitsandbytes quantizes: load the original model in bf16, with "
    "load_in_4bit or load_in_8bit if it is to be small."
)
# Where layers that other libraries quantize keep their weights.
_PACKED = ("qweight", "W_q", "qzeros", "weight_packed")
# Of a quantization config, what the weights depend on.
_OF_WEIGHTS = ("load_in_4bit", "load_in_8bit", "bnb_4bit_quant_type", "bnb_4bit_use_double_quant")


def loaded_dtype(model: nn.Module) -> torch.dtype:
    """The dtype that a model was loaded in, before it was quantized: an 8-bit weight is dequantized to it."""
    dtype = getattr(getattr(model, "config", None), "dtype", None)
    if isinstance(dtype, torch.dtype):
        return dtype
    found = (each.dtype for each in model.parameters() if each.dtype in DTYPES and type(each) is nn.Parameter)
    return next(found, torch.float16)  # what LLM.int8 computes in


def read_parameter(parameter: Tensor) -> tuple[Sequence[Tensor], torch.Size]:
    """`ReadParameter` of any base: sharded parameters are gathered, quantized ones give their stored bytes."""
    return bnb.stored(sharding.whole(parameter)), sharding.shape_of(parameter)


def base_quantization(model: nn.Module) -> dict[str, Any] | None:
    """How bitsandbytes quantized a transformers model, as plain values that `from_pretrained` takes, or None."""
    config = getattr(getattr(model, "config", None), "quantization_config", None)
    return None if config is None or quant_method(config) != "bitsandbytes" else plain_settings(config)


def plain_settings(config: Any) -> dict[str, Any]:
    """Of a bitsandbytes config, an object or a mapping, what its number of bits reads, as plain values."""
    fields = config if isinstance(config, dict) else config.to_dict()
    own = "bnb_4bit_" if fields.get("load_in_4bit") else "llm_int8_threshold"
    kept = {key: value for key, value in fields.items() if key.startswith((own, "load_in_", "llm_int8_skip_modules"))}
    return {key: str(value) if isinstance(value, torch.dtype) else value for key, value in sorted(kept.items())}


def quant_method(config: Any) -> str:
    """The name of a quantization config's method: that of an object, or of the mapping in a config.json."""
    method = config.get("quant_method") if isinstance(config, dict) else getattr(config, "quant_method", None)
    return str(getattr(method, "value", method))


def note_quantization(model: nn.Module, config: SupraConfig) -> None:
    """Write down how the base is quantized; of a saved adapter, warn where it was another way."""
    here = base_quantization(model)
    if config.support == "select":
        config.base_quantization = here
        return
    then = config.base_quantization

    def weights(fields: dict[str, Any] | None) -> dict[str, Any]:
        return {key: (fields or {}).get(key) for key in _OF_WEIGHTS if (fields or {}).get(key)}

    if weights(then) != weights(here):
        warnings.warn(
            f"the adapter was trained on a base that was {_quantization_in_words(then)}, this one is "
            f"{_quantization_in_words(here)}. Unless one is the other dequantized, their weights differ slightly, and "
            "so does what the adapter gives: load the base as it was in training to get what was trained.",
            stacklevel=2,
        )


def _quantization_in_words(fields: dict[str, Any] | None) -> str:
    if not fields:
        return "not quantized"
    if fields.get("load_in_8bit"):
        return "quantized to 8 bits"
    double = "with" if fields.get("bnb_4bit_use_double_quant") else "without"
    return f"quantized to 4 bits ({fields.get('bnb_4bit_quant_type')}, {double} double quantization)"


def check_base(model: nn.Module) -> None:
    """Raise TypeError, naming a layer and its type, where another library than bitsandbytes quantized the model."""
    config = getattr(getattr(model, "config", None), "quantization_config", None)
    method = None if config is None or quant_method(config) == "bitsandbytes" else quant_method(config)
    for name, module in model.named_modules():
        kind, weight = type(module).__name__, getattr(module, "weight", None)
        foreign = isinstance(weight, Tensor) and _library(weight) not in ("torch", "bitsandbytes")
        # Without a packed weight of its own, the method's layers show themselves by their class alone.
        odd = method is not None and "Linear" in kind and type(module) is not nn.Linear
        if foreign or odd or any(hasattr(module, key) for key in _PACKED):
            kind = f"{kind}, its weight a {type(weight).__name__}" if foreign else kind
            by = method or _library(weight if foreign else module)
            raise TypeError(f"{name}: the layer is quantized by {by} ({kind}). {REMEDY}")
    if method is not None:
        raise TypeError(f"the base model is quantized by {method}, says its quantization_config. {REMEDY}")


def _library(thing: object) -> str:
    return type(thing).__module__.partition(".")[0]
