"""QuantizedSupraLinear: SupraLinear on a base weight that is quantized."""

from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from ...ops import LowRank, Sparse
from ...ops.reference import autocast_dtype
from ..linear import SupraLinear
from . import BACKENDS, backend_of, dense_linear


class QuantizedSupraLinear(SupraLinear):
    """A quantized linear layer with SUPRA adapters: y = x·(W̃ + M⊙U + γ·L·R)ᵀ + bias.

    W̃ is the dequantized weight (`Backend.dequantize`). Forward and backward each form W̃ + M⊙U, rounded once to
    `weight_dtype`, and drop it: only the quantized weight is kept. The gradients are exact for that weight.

    Args:
        base_layer: a layer of a backend, without an `unsupported_reason`.
        layer_name: its name.
        weight_dtype: dtype of W̃ if the layer does not know it (8-bit).
    """

    def __init__(self, base_layer: nn.Linear, layer_name: str, weight_dtype: torch.dtype) -> None:
        super().__init__(base_layer, layer_name)
        backend = backend_of(base_layer)
        assert backend is not None, "the layer is not quantized"
        self.backend = backend
        self.weight_dtype = backend.weight_dtype(base_layer, weight_dtype)

    def base_weight(self) -> Tensor:
        """W̃ (c, b), a new tensor of `weight_dtype`."""
        return self.backend.dequantize(self.base_layer, self.weight_dtype)

    # A graph break for the compiler, which can trace neither the library's kernels nor per-layer caches.
    @torch.compiler.disable
    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """x (..., b) → (..., c), in the dtype of x."""
        return super().forward(x, *args, **kwargs)

    def unwritten_kernel_layer(self, x: Tensor) -> None:
        """None: the kernels write U into the base weight, which a quantized one does not allow."""
        return None

    def reference_output(self, x: Tensor, sparse: list[Sparse], low_rank: list[LowRank]) -> Tensor:
        """y of these parts, with a recomputed weight."""
        base = self.base_layer
        compute = self.backend.compute_dtype(base) or autocast_dtype(x.device.type) or x.dtype
        weight = partial(self.backend.dequantize, base, self.weight_dtype)
        return self.with_recomputed_weight(x, weight, sparse, low_rank, compute=compute, in_place=True)

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> NoReturn:
        """Refused: the merged weight would have to be quantized again.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError(
            f"{self.layer_name}: its weight is quantized to {self.backend.bits(self.base_layer)} bits; merging in "
            "place would quantize it again and round most of the adapter away. Call merge_and_unload(), which gives a "
            f"dequantized model in {str(self.weight_dtype).removeprefix('torch.')}, or load the base model unquantized."
        )

    def merged_linear(self, adapter_names: list[str] | None = None) -> nn.Linear:
        """A dense `nn.Linear` of `weight_dtype` with the active or the named adapters merged in, rounded once."""
        names = self.names_to_merge(adapter_names)
        return dense_linear(self.base_layer, self.weight_with(names))

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        return super()._apply(partial(_without_unsafe_cast, fn), recurse)


def dequantize_model(model: nn.Module, weight_dtype: torch.dtype, adapter_names: list[str] | None = None) -> None:
    """Replace all quantized layers by dense ones, with adapters merged in, and unmark the model as quantized.

    Args:
        model: a transformers model, in place.
        weight_dtype: dtype of weights that do not know it (8-bit).
        adapter_names: the adapters to merge; default the active ones.
    """
    for name, module in list(model.named_modules()):
        backend = backend_of(module)
        if isinstance(module, QuantizedSupraLinear):
            model.set_submodule(name, module.merged_linear(adapter_names))
        elif backend is not None and not name.endswith(".base_layer"):
            weight = backend.dequantize(module, backend.weight_dtype(module, weight_dtype))
            model.set_submodule(name, dense_linear(module, weight))
    for backend in BACKENDS:
        backend.remove_marks(model)


def _without_unsafe_cast(fn: Any, tensor: Tensor) -> Tensor:
    """fn(tensor); of packed values that are stored as floats only the move to another device, since a cast would
    destroy them."""
    result = fn(tensor)
    if result.dtype != tensor.dtype and not all(backend.is_cast_safe(tensor) for backend in BACKENDS):
        return tensor.to(device=result.device)
    return result
