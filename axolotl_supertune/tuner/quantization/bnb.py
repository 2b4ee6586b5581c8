"""Linear layers that bitsandbytes quantized: what their weight is, as a tensor of floats.

4-bit (`Linear4bit`: nf4 and fp4, single and double quantization): the weight is what `dequantize_4bit` gives, in the
dtype the layer had before. 8-bit (`Linear8bitLt`): the weight is W_ij = int8_ij·scale_i/127, rounded once to a dtype.
LLM.int8 itself computes something else than a product with that weight: it quantizes the activations too, and takes
their outliers apart. No sparse delta has an exact gradient through that, so an adapted layer takes the plain product.

bitsandbytes is imported only where a layer of it is at hand.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

_BITS = {"Params4bit": 4, "Int8Params": 8}


def bits(layer: nn.Module) -> int | None:
    """4 or 8 for a layer of bitsandbytes, None for any other."""
    return _BITS.get(type(getattr(layer, "weight", None)).__name__)


def obstacle(layer: Any) -> str | None:
    """Why a layer of bitsandbytes has no weight that `dequantized` gives, or None."""
    import bitsandbytes

    kind = type(layer).__name__
    if bits(layer) == 4 and type(layer).forward is bitsandbytes.nn.Linear4bit.forward:
        if not layer.weight.is_meta and _state(layer) is None:
            return "its weight is not quantized yet: move the model to its device first"
        return None
    if bits(layer) == 8 and type(layer).forward is bitsandbytes.nn.Linear8bitLt.forward:
        if layer.state.has_fp16_weights:
            return "llm_int8_has_fp16_weight keeps a trainable 16-bit weight: leave it false"
        if not layer.weight.is_meta and layer.weight.dtype != torch.int8:
            return "its weight is not quantized yet: move the model to its device first"
        return None
    return f"{kind} computes something else than Linear4bit and Linear8bitLt"


def dequantized(layer: Any, dtype: torch.dtype) -> Tensor:
    """The weight of a layer that `obstacle` has nothing against.

    Args:
        layer: a `Linear4bit` or `Linear8bitLt`.
        dtype: of the result, for 8-bit; 4-bit layers have their own, see `weight_dtype`.

    Returns:
        (c, b), new and contiguous; the same bits at every call.
    """
    weight = layer.weight
    if bits(layer) == 4:
        import bitsandbytes

        return bitsandbytes.functional.dequantize_4bit(weight.data, _state(layer)).contiguous()
    scale = layer.state.SCB if weight.SCB is None else weight.SCB
    # Rounded once: the product of int8 and fp32 is an fp32 that is rounded as it is written.
    factor = scale.to(weight.device, torch.float32).div(127).unsqueeze(1)
    return torch.mul(weight.data, factor, out=torch.empty(weight.shape, dtype=dtype, device=weight.device))


def weight_dtype(layer: Any, otherwise: torch.dtype) -> torch.dtype:
    """The dtype of `dequantized`: the one that a 4-bit layer was quantized from; of 8-bit layers nobody knows it."""
    state = _state(layer) if bits(layer) == 4 else None
    return otherwise if state is None else state.dtype


def dense(layer: Any, weight: Tensor) -> nn.Linear:
    """`nn.Linear` with this weight (c, b) and the layer's bias, frozen as the layer is."""
    with torch.device("meta"):
        linear = nn.Linear(layer.in_features, layer.out_features, bias=layer.bias is not None)
    linear.weight = nn.Parameter(weight, requires_grad=False)
    if layer.bias is not None:
        bias = layer.bias.data.to(weight.dtype)
        linear.bias = nn.Parameter(bias, requires_grad=layer.bias.requires_grad)
    return linear.train(layer.training)


def keep_exact(model: nn.Module) -> None:
    """Keep 4-bit layers from rewriting their weights.

    In evaluation on a CPU with AVX512-BF16 bitsandbytes repacks them in place and rounds their scales to bf16.
    """
    module: Any
    for module in model.modules():
        if bits(module) == 4 and hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False


def stored(parameter: Tensor) -> Sequence[Tensor]:
    """What identifies a parameter, each 1-D: itself; or, of a quantized one, its bytes and, of 4 bits, its scales.

    The scales of 8 bits are left out: bitsandbytes moves them from the parameter to its layer at the first forward.
    """
    data = parameter.detach().reshape(-1)
    if type(parameter).__name__ not in _BITS:
        return [data]
    state = getattr(parameter, "quant_state", None)
    return [data.view(torch.uint8), *([] if state is None else [state.absmax.reshape(-1)])]


def _state(layer: Any) -> Any:
    """The scales and the shape of a 4-bit weight: with the parameter, or with the layer where that lost it."""
    state = getattr(layer.weight, "quant_state", None)
    return getattr(layer, "quant_state", None) if state is None else state
