"""A layer whose weight exists only while it is used: dequantized, or gathered, in forward and again in backward.

The mathematics is the reference's. Between forward and backward the input is kept and how to make the weight; nothing
of the size of the weight. The gradient of U is never taken from a dense one: sampled products where the Triton kernels
run, else a block of output rows at a time.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..method import sizes
from .launcher import aligned
from .reference import (
    LowRank,
    Sparse,
    add_low_rank,
    add_sparse_,
    autocast_dtype,
    cast,
    effective_weight,
    linear,
    low_rank_gradients,
    outer_sum,
    rows_of,
    split_parts,
)

Weight = Callable[[], Tensor]
"""() → the frozen weight W (c, b); called once in forward and once in backward, and gives the same bits both times."""
SupportGradient = Callable[[Tensor, Tensor], Tensor]
"""(x (T, b), dy (T, c)) → dU (s,): Σ_t dy[t, i]·x[t, j] for every entry (i, j) of a support, in fp32 (or wider)."""

# Entries of one block of output rows: 16 MiB in fp32.
_BLOCK = 2**22


class BlockGradient:
    """dU by plain products, a block of output rows at a time; synchronises with the device once, here.

    Args:
        indices: (s,) the support's sorted flat indices.
        shape: (c, b) of the layer.
        block: entries of a block of rows, at least one row.
    """

    def __init__(self, indices: Tensor, shape: tuple[int, int], *, block: int = _BLOCK) -> None:
        rows, width = shape
        self._indices, self._width = indices, width
        step = max(1, block // width)
        firsts = [*range(0, rows, step), rows]
        bounds = torch.tensor([first * width for first in firsts], device=indices.device)
        cuts = torch.searchsorted(indices.long(), bounds).tolist()
        blocks = zip(firsts, firsts[1:], cuts, cuts[1:], strict=False)
        self._blocks = [each for each in blocks if each[3] > each[2]]

    def __call__(self, x: Tensor, dy: Tensor) -> Tensor:
        dtype = torch.promote_types(torch.promote_types(x.dtype, dy.dtype), torch.float32)
        found = torch.empty(self._indices.numel(), dtype=dtype, device=x.device)
        for first, last, begin, end in self._blocks:
            block = outer_sum(dy[:, first:last], x).view(-1)
            found[begin:end] = block[self._indices[begin:end] - first * self._width]
        return found


class SampledGradient:
    """dU by the Triton kernels' sampled products; synchronises with the device once, here.

    Args:
        indices: (s,) the support's sorted flat indices.
        shape: (c, b) of the layer.
    """

    def __init__(self, indices: Tensor, shape: tuple[int, int]) -> None:
        from . import kernels

        out_features, in_features = shape
        self._plan, self._widths = kernels.make_sampling_plan(indices, shape), [in_features, out_features]
        self._kernels: dict[torch.dtype, Any] = {}

    def _of(self, dtype: torch.dtype) -> Any:
        from . import kernels

        if dtype not in self._kernels:
            device = self._plan.indices.device
            transpose = kernels.Transpose(self._widths, dtype, device)
            self._kernels[dtype] = transpose, kernels.SampledProducts([self._plan], dtype), sizes.TOKENS_AT_ONCE
        return self._kernels[dtype]

    def __call__(self, x: Tensor, dy: Tensor) -> Tensor:
        transpose, products, most = self._of(x.dtype)
        (out,) = products.new()
        x, dy = aligned(x.contiguous()), aligned(dy.contiguous())
        for begin in range(0, x.shape[0], most):
            some = min(most, x.shape[0] - begin)
            buffer, (x_t, dy_t) = transpose(x[begin : begin + some], dy[begin : begin + some])
            products([(dy_t, x_t)], some, [out], add=begin > 0)
            del buffer  # until here the kernels read it
        return out


def recomputed_weight_linear(
    x: Tensor,
    weight: Weight,
    bias: Tensor | None = None,
    sparse: Sequence[Sparse] = (),
    low_rank: Sequence[LowRank] = (),
    gradients: Sequence[SupportGradient] = (),
    *,
    compute: torch.dtype | None = None,
    in_place: bool = False,
) -> Tensor:
    """x·Ŵᵀ + bias with Ŵ = W + Σ M⊙U + Σ γ·L·R, as `sparse_linear`, for a W that is not kept.

    W + Σ M⊙U is summed in fp32 and rounded once to the dtype of W, in forward and again in backward.

    Args:
        x: (..., b).
        weight: makes W (c, b), which gets no gradient. Whatever it reads must stay as it is until backward.
        bias: (c,) or None.
        sparse, low_rank: the parts of all active adapters; U, L, R usually fp32 whatever the dtype of W.
        gradients: for each of `sparse`, how its dU is computed: a `BlockGradient` or a `SampledGradient` of its
            support.
        compute: the dtype of the products with W, where the layer has one of its own; the result is then in the dtype
            of x. By default both are autocast's dtype, or that of W.
        in_place: what `weight` returns is contiguous and nobody else's: M⊙U is added in it and not in a copy.

    Returns:
        (..., c).
    """
    tensors = [tensor for part in sparse for tensor in part] + [tensor for part in low_rank for tensor in part[:2]]
    settings = [(part.scaling, part.dropout) for part in low_rank]
    return _RecomputedWeightLinear.apply(x, bias, _How(weight, in_place, tuple(gradients), compute, settings), *tensors)


class _How(NamedTuple):
    """What of a call is no tensor."""

    weight: Weight
    in_place: bool
    gradients: tuple[SupportGradient, ...]
    compute: torch.dtype | None
    settings: list[tuple[float, float]]

    def effective(self, sparse: Sequence[Sparse]) -> Tensor:
        weight = self.weight()
        if self.in_place and len(sparse) == 1:
            return add_sparse_(weight, sparse[0])
        return effective_weight(weight, sparse)


class _RecomputedWeightLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, how: _How, *tensors: Tensor) -> Tensor:
        sparse, low_rank = split_parts(len(how.gradients), how.settings, tensors)
        # As in the reference: autocast is on here and off in backward, so both cast explicitly.
        ctx.autocast = autocast_dtype(x.device.type)
        with torch.autocast(x.device.type, enabled=False):
            effective = how.effective(sparse)
            ctx.compute = how.compute or ctx.autocast or effective.dtype
            y = linear(x.to(ctx.compute), effective.to(ctx.compute), cast(bias, ctx.compute))
            del effective
            y, ctx.generator_states = add_low_rank(y, x, low_rank, ctx.autocast)
        ctx.save_for_backward(x if any(ctx.needs_input_grad[3:]) else None, *tensors)
        ctx.how, ctx.bias_dtype, ctx.x_dtype = how, None if bias is None else bias.dtype, x.dtype
        return y.to(x.dtype if how.compute else ctx.compute)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, *tensors = ctx.saved_tensors
        how: _How = ctx.how
        sparse, low_rank = split_parts(len(how.gradients), how.settings, tensors)
        needs_x, needs_bias, _, *needs = ctx.needs_input_grad
        with torch.autocast(dy.device.type, enabled=False):
            dy_rows = rows_of(dy)
            dx = dy.to(ctx.compute) @ how.effective(sparse).to(ctx.compute) if needs_x else None
            grads: list[Tensor | None] = [None] * (2 * len(sparse))
            if any(needs[: 2 * len(sparse) : 2]):
                operands = rows_of(x).to(ctx.compute), dy_rows.to(ctx.compute)
                for part, (found, (values, _)) in enumerate(zip(how.gradients, sparse, strict=True)):
                    if needs[2 * part]:
                        grads[2 * part] = found(*operands).to(values.dtype)
                del operands
            dx, of_low_rank = low_rank_gradients(
                x, dy_rows, dx, low_rank, ctx.generator_states, needs[2 * len(sparse) :], ctx.autocast
            )
            dbias = dy_rows.sum(0).to(ctx.bias_dtype) if needs_bias else None
        return None if dx is None else dx.to(ctx.x_dtype), dbias, None, *grads, *of_low_rank
