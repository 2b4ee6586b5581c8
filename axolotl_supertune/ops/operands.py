"""Operands of the kernels: layout, alignment and dtype of activations, and the seed of dropout masks."""

import torch
from torch import Tensor

from .launcher import aligned
from .reference import linear

_SEED_BIT = 2**62


def mask_seed(x: Tensor, threshold: int) -> int:
    """The seed of the dropout masks of one forward, from the device's random generator; 0 if the threshold is 0.

    It is computed on the host, so that nothing waits for the device. Code that restores the generator (gradient
    checkpointing) restores the masks.
    """
    if not threshold:
        return 0
    if x.device.type == "cuda":
        generator = torch.cuda.default_generators[x.device.index]
        offset = generator.get_offset()
        generator.set_offset(offset + 4)  # as after a kernel that draws four numbers per thread
        mixed = generator.initial_seed() * 0x9E3779B97F4A7C15 + offset * 0xD1B54A32D192ED03
    else:
        mixed = int(torch.randint(_SEED_BIT, (1,)))
    return mixed % _SEED_BIT + _SEED_BIT


def as_operand(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x (..., n), contiguous, aligned, in the dtype of the products."""
    if x.dtype is not dtype:
        x = x.to(dtype)
    return aligned(x if x.is_contiguous() else x.contiguous())


def as_matrix(x: Tensor) -> Tensor:
    """(..., n) → (T, n), a view."""
    return x if x.dim() == 2 else x.view(-1, x.shape[-1])


def in_shape_of(dx: Tensor | None, dy: Tensor) -> Tensor | None:
    """dx (T, b) → (..., b), the leading dimensions being those of dy (..., c)."""
    return dx if dx is None or dy.dim() == 2 else dx.view(*dy.shape[:-1], dx.shape[-1])


def linear_without_view(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x·Wᵀ + bias; not a view for autograd, which would forbid the caller to change it in place."""
    if bias is None or x.dim() == 2:
        return linear(x, weight, bias)
    y = linear(as_matrix(x), weight, bias)
    return torch.ops.aten._unsafe_view.default(y, (*x.shape[:-1], y.shape[-1]))
