"""SupraLinear on a base weight that bitsandbytes quantized to 4 or 8 bits."""

from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from ...ops import LowRank, Sparse
from ...ops.reference import autocast_dtype
from ..linear import SupraLinear
from . import bnb


class QuantizedSupraLinear(SupraLinear):
    """`Linear4bit` or `Linear8bitLt` with SUPRA adapters: y = x·(W̃ + M⊙U + γ·L·R)ᵀ + bias.

    W̃ is the dequantized weight (see `quantized`). Forward and backward each make W̃ + M⊙U anew, rounded once to
    `weight_dtype`, and drop it: what is kept is the quantized weight alone. The gradients are exact for that weight.

    Args:
        base_layer: a layer that `quantized.obstacle` has nothing against.
        layer: its name.
        weight_dtype: of W̃ where the layer does not know it (8-bit).
    """

    def __init__(self, base_layer: nn.Linear, layer: str, weight_dtype: torch.dtype) -> None:
        super().__init__(base_layer, layer)
        self.weight_dtype = bnb.weight_dtype(base_layer, weight_dtype)

    def base_weight(self) -> Tensor:
        """W̃ (c, b), a new tensor of `weight_dtype`."""
        return bnb.dequantized(self.base_layer, self.weight_dtype)

    # The compiler breaks its graph here: it can look neither into bitsandbytes nor into what is made per layer.
    @torch.compiler.disable
    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """x (..., b) → (..., c), in the dtype of x."""
        return super().forward(x, *args, **kwargs)

    def cached_layer(self, x: Tensor) -> None:
        """None: the kernels keep W + M⊙U in the base weight, and a quantized one has no room for it."""
        return None

    def computed(self, x: Tensor, sparse: list[Sparse], low_rank: list[LowRank]) -> Tensor:
        """y with these parts, as `recomputed_weight_linear`."""
        base = self.base_layer
        # As bitsandbytes chooses it: a 4-bit layer has its own, set by bnb_4bit_compute_dtype or by its first input.
        compute = getattr(base, "compute_dtype", None) or autocast_dtype(x.device.type) or x.dtype
        weight = partial(bnb.dequantized, base, self.weight_dtype)
        return self.with_recomputed_weight(x, weight, sparse, low_rank, compute=compute, in_place=True)

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> NoReturn:
        """Refused: the merged weight would have to be quantized again.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError(
            f"{self.supra_layer}: its weight is quantized to {bnb.bits(self.base_layer)} bits; merging in place "
            "would quantize it again and round most of the adapter away. Call merge_and_unload(), which gives a "
            f"dequantized model in {str(self.weight_dtype).removeprefix('torch.')}, or load the base model unquantized."
        )

    def merged_linear(self, adapter_names: list[str] | None = None) -> nn.Linear:
        """A dense `nn.Linear` of `weight_dtype` with the active or the named adapters merged in, rounded once."""
        names = self.names_to_merge(adapter_names)
        return bnb.dense(self.base_layer, self.weight_with(names))

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        return super()._apply(partial(_uncast, fn), recurse)


def _uncast(fn: Any, tensor: Tensor) -> Tensor:
    """fn(tensor); of packed bytes that are stored as floats, only the move: a cast would destroy them."""
    found = fn(tensor)
    packed = type(tensor).__name__ == "Params4bit" and found.dtype != tensor.dtype
    return tensor.to(device=found.device) if packed else found
