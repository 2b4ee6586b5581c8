"""bitsandbytes: `Linear4bit` (nf4 and fp4, with and without double quantization) and `Linear8bitLt` (LLM.int8).

4-bit weights are what `dequantize_4bit` returns, in the dtype that the layer had before. An 8-bit weight is
W_ij = int8_ij·scale_i/127, rounded once to a dtype. LLM.int8's own forward is not a product with that weight: it also
quantizes the activations, and computes their outliers apart. A sparse delta has no exact gradient through that, so an
adapted layer computes the plain product.

bitsandbytes is imported only where a layer of it exists.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .backend import Backend, Settings

_BITS = {"Params4bit": 4, "Int8Params": 8}
_NOT_QUANTIZED_YET = "its weight is not quantized yet: move the model to its device first"
_WEIGHT_SETTINGS = ("load_in_4bit", "load_in_8bit", "bnb_4bit_quant_type", "bnb_4bit_use_double_quant")


class Bitsandbytes(Backend):
    """The backend of bitsandbytes."""

    name = "bitsandbytes"
    loaded_with = "load_in_4bit or load_in_8bit"

    def bits(self, layer: nn.Module) -> int | None:
        return _BITS.get(type(getattr(layer, "weight", None)).__name__)

    def owns_parameter(self, parameter: Tensor) -> bool:
        return type(parameter).__name__ in _BITS

    def unsupported_reason(self, layer: Any) -> str | None:
        import bitsandbytes

        kind = type(layer).__name__
        if self.bits(layer) == 4 and type(layer).forward is bitsandbytes.nn.Linear4bit.forward:
            if not layer.weight.is_meta and _quant_state(layer) is None:
                return _NOT_QUANTIZED_YET
            return None
        if self.bits(layer) == 8 and type(layer).forward is bitsandbytes.nn.Linear8bitLt.forward:
            if layer.state.has_fp16_weights:
                return "llm_int8_has_fp16_weight keeps a trainable 16-bit weight: leave it false"
            if not layer.weight.is_meta and layer.weight.dtype != torch.int8:
                return _NOT_QUANTIZED_YET
            return None
        return f"{kind} computes something else than Linear4bit and Linear8bitLt"

    def dequantize(self, layer: Any, dtype: torch.dtype) -> Tensor:
        weight = layer.weight
        if self.bits(layer) == 4:
            import bitsandbytes

            return bitsandbytes.functional.dequantize_4bit(weight.data, _quant_state(layer)).contiguous()
        scale = layer.state.SCB if weight.SCB is None else weight.SCB
        # Rounded once: int8 × fp32 is computed in fp32 and rounded when it is written to `out`.
        factor = scale.to(weight.device, torch.float32).div(127).unsqueeze(1)
        return torch.mul(weight.data, factor, out=torch.empty(weight.shape, dtype=dtype, device=weight.device))

    def weight_dtype(self, layer: Any, default: torch.dtype) -> torch.dtype:
        state = _quant_state(layer) if self.bits(layer) == 4 else None
        return default if state is None else state.dtype

    def compute_dtype(self, layer: Any) -> torch.dtype | None:
        # Of a 4-bit layer: set by bnb_4bit_compute_dtype, or by its first input.
        return getattr(layer, "compute_dtype", None)

    def identifying_tensors(self, parameter: Tensor) -> Sequence[Tensor]:
        # Not the scales of 8 bits: bitsandbytes moves them from the parameter to its layer in the first forward.
        packed = parameter.detach().reshape(-1).view(torch.uint8)
        state = getattr(parameter, "quant_state", None)
        return [packed] if state is None else [packed, state.absmax.reshape(-1)]

    def prepare(self, model: nn.Module) -> None:
        # In evaluation on a CPU with AVX512-BF16, 4-bit layers repack their weights in place and round the scales to
        # bf16.
        module: Any
        for module in model.modules():
            if self.bits(module) == 4 and hasattr(module, "support_avx512bf16_for_cpu"):
                module.support_avx512bf16_for_cpu = False

    def is_cast_safe(self, tensor: Tensor) -> bool:
        return type(tensor).__name__ != "Params4bit"

    def remove_marks(self, model: nn.Module) -> None:
        quantizer = getattr(model, "hf_quantizer", None)
        if quantizer is not None:
            quantizer.remove_quantization_config(model)
        for flag in ("is_loaded_in_4bit", "is_loaded_in_8bit", "is_4bit_serializable", "is_8bit_serializable"):
            if hasattr(model, flag):
                delattr(model, flag)

    def plain_settings(self, config: Any) -> Settings:
        fields = config if isinstance(config, dict) else config.to_dict()
        own = "bnb_4bit_" if fields.get("load_in_4bit") else "llm_int8_threshold"
        prefixes = (own, "load_in_", "llm_int8_skip_modules")
        settings = {key: value for key, value in fields.items() if key.startswith(prefixes)}
        return {key: str(value) if isinstance(value, torch.dtype) else value for key, value in sorted(settings.items())}

    def transformers_config(self, settings: Mapping[str, Any]) -> Any:
        from transformers import BitsAndBytesConfig

        return BitsAndBytesConfig(**settings)

    def owns_settings(self, settings: Mapping[str, Any]) -> bool:
        return bool(settings.get("load_in_4bit") or settings.get("load_in_8bit"))

    def weight_settings(self, settings: Mapping[str, Any]) -> Settings:
        return {key: settings[key] for key in _WEIGHT_SETTINGS if settings.get(key)}

    def describe(self, settings: Mapping[str, Any]) -> str:
        if settings.get("load_in_8bit"):
            return "8 bits"
        double = "with" if settings.get("bnb_4bit_use_double_quant") else "without"
        return f"4 bits ({settings.get('bnb_4bit_quant_type')}, {double} double quantization)"

    def stored_bits(self, settings: Mapping[str, Any]) -> int:
        return 8 if settings.get("load_in_8bit") else 4

    def stored_format(self, settings: Mapping[str, Any]) -> str:
        if settings.get("load_in_8bit"):
            return "int8"
        return "nf4-double" if settings.get("bnb_4bit_use_double_quant") else "nf4"

    def stored_bytes(self, format_name: str, weights: float, rows: float) -> float | None:
        sizes = {
            # One byte per weight, and an fp32 scale per row.
            "int8": weights + 4 * rows,
            # Half a byte per weight, and an fp32 scale per 64 weights.
            "nf4": weights * (1 / 2 + 4 / 64),
            # Double quantization: an 8-bit scale per 64 weights, and an fp32 scale per 256 of those.
            "nf4-double": weights * (1 / 2 + 1 / 64 + 4 / (64 * 256)),
        }
        return sizes.get(format_name)


def nf4_linear(weight: Tensor, bias: Tensor | None, device: torch.device) -> nn.Linear:
    """A `Linear4bit` as Axolotl loads it for qlora: nf4 with double quantization, computed in the weight's dtype.

    Args:
        weight: (c, b), quantized here.
        bias: (c,), or None.
        device: where the layer is quantized and stays.
    """
    import bitsandbytes

    out_features, in_features = weight.shape
    options: Any = {"quant_type": "nf4", "compress_statistics": True, "quant_storage": torch.bfloat16}
    layer = bitsandbytes.nn.Linear4bit(
        in_features, out_features, bias=bias is not None, compute_dtype=weight.dtype, device="meta", **options
    )
    packed: Any = bitsandbytes.nn.Params4bit(weight, requires_grad=False, module=layer, **options)
    layer.weight = packed.to(device)  # quantizes
    if bias is not None:
        layer.bias = nn.Parameter(bias)
    return layer


def _quant_state(layer: Any) -> Any:
    """Scales and shape of a 4-bit weight: kept with the parameter, or with the layer if the parameter lost them."""
    state = getattr(layer.weight, "quant_state", None)
    return getattr(layer, "quant_state", None) if state is None else state
