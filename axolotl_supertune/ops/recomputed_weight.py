"""The adapted linear layer for a weight that is formed again at each use: dequantized, or gathered from shards.

Computes what `reference` computes. Forward saves the input and the function that forms the weight, and nothing of the
weight's size. dU does not come from a dense gradient: `SampledGradient` uses the Triton kernels, `BlockGradient` plain
products of a block of output rows at a time.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..method import sizes
from . import sampling_plan
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
"""Returns the frozen weight W (c, b). Called in forward and in backward, it returns the same bits."""
SupportGradient = Callable[[Tensor, Tensor], Tensor]
"""(x (T, b), dy (T, c)) → dU (s,): Σ_t dy[t, i]·x[t, j] for every entry (i, j) of a support, fp32 (or fp64)."""

# Elements of a block of output rows: 16 MiB in fp32.
_BLOCK = 2**22


class BlockGradient:
    """dU in plain PyTorch: dense dyᵀ·x of a block of output rows at a time, read on the support.

    The constructor waits for the device once.

    Args:
        indices: (s,) the support: sorted flat indices.
        shape: (c, b) of the layer.
        block: elements of a block of rows; a block has at least one row.
    """

    def __init__(self, indices: Tensor, shape: tuple[int, int], *, block: int = _BLOCK) -> None:
        rows, width = shape
        self._indices, self._width = indices, width
        step = max(1, block // width)
        row_bounds = [*range(0, rows, step), rows]
        flat_bounds = torch.tensor([row * width for row in row_bounds], device=indices.device)
        cuts = torch.searchsorted(indices.long(), flat_bounds).tolist()
        blocks = zip(row_bounds, row_bounds[1:], cuts, cuts[1:], strict=False)
        # (first row, last row, begin, end): entries begin:end of the support are in these rows.
        self._blocks = [bounds for bounds in blocks if bounds[3] > bounds[2]]

    def __call__(self, x: Tensor, dy: Tensor) -> Tensor:
        dtype = torch.promote_types(torch.promote_types(x.dtype, dy.dtype), torch.float32)
        du = torch.empty(self._indices.numel(), dtype=dtype, device=x.device)
        for first, last, begin, end in self._blocks:
            block = outer_sum(dy[:, first:last], x).view(-1)
            du[begin:end] = block[self._indices[begin:end] - first * self._width]
        return du


class SampledGradient:
    """dU by the sampled products of the Triton kernels. The constructor waits for the device once.

    Args:
        indices: (s,) the support: sorted flat indices.
        shape: (c, b) of the layer.
    """

    def __init__(self, indices: Tensor, shape: tuple[int, int]) -> None:
        out_features, in_features = shape
        self._plan, self._widths = sampling_plan.make_sampling_plan(indices, shape), [in_features, out_features]
        self._kernels: dict[torch.dtype, Any] = {}

    def _bound_kernels(self, dtype: torch.dtype) -> Any:
        """The transposition, the products, and the tokens that they take at once."""
        from . import kernels

        if dtype not in self._kernels:
            device = self._plan.indices.device
            transpose = kernels.Transpose(self._widths, dtype, device)
            self._kernels[dtype] = transpose, kernels.SampledProducts([self._plan], dtype), sizes.TOKENS_PER_TRANSPOSE
        return self._kernels[dtype]

    def __call__(self, x: Tensor, dy: Tensor) -> Tensor:
        transpose, products, most = self._bound_kernels(x.dtype)
        (out,) = products.new()
        x, dy = aligned(x.contiguous()), aligned(dy.contiguous())
        for begin in range(0, x.shape[0], most):
            tokens = min(most, x.shape[0] - begin)
            buffer, (x_t, dy_t) = transpose(x[begin : begin + tokens], dy[begin : begin + tokens])
            products([(dy_t, x_t)], tokens, [out], add=begin > 0)
            del buffer  # the kernels have read it
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
    """`sparse_linear` for a weight that is not stored: x·Ŵᵀ + bias with Ŵ = W + Σ M⊙U + Σ γ·L·R.

    W + Σ M⊙U is summed in fp32 and rounded once to the dtype of W, in forward and again in backward.

    Args:
        x: (..., b).
        weight: returns W (c, b), which gets no gradient. What it reads must not change until backward.
        bias: (c,) or None.
        sparse, low_rank: the parts of all active adapters; U, L and R are usually fp32, whatever the dtype of W.
        gradients: how dU is computed, for each of `sparse`: a `BlockGradient` or a `SampledGradient` of its support.
        compute: the dtype of the products with W, for layers that have their own (quantized ones); the result is then
            in the dtype of x. By default both are autocast's dtype, or that of W.
        in_place: the tensor that `weight` returns is contiguous and not used elsewhere: M⊙U is added to it, not to a
            copy.

    Returns:
        (..., c).
    """
    tensors = [tensor for part in sparse for tensor in part] + [tensor for part in low_rank for tensor in part[:2]]
    settings = [(part.scaling, part.dropout) for part in low_rank]
    return _RecomputedWeightLinear.apply(
        x, bias, _Settings(weight, in_place, tuple(gradients), compute, settings), *tensors
    )


class _Settings(NamedTuple):
    """Arguments of `recomputed_weight_linear` that are not tensors."""

    weight: Weight
    in_place: bool
    gradients: tuple[SupportGradient, ...]
    compute: torch.dtype | None
    low_rank: list[tuple[float, float]]  # (γ, dropout) per part

    def effective(self, sparse: Sequence[Sparse]) -> Tensor:
        """W + Σ M⊙U (c, b)."""
        weight = self.weight()
        if self.in_place and len(sparse) == 1:
            return add_sparse_(weight, sparse[0])
        return effective_weight(weight, sparse)


class _RecomputedWeightLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, settings: _Settings, *tensors: Tensor) -> Tensor:
        sparse, low_rank = split_parts(len(settings.gradients), settings.low_rank, tensors)
        # Autocast is on in forward and off in backward: both cast explicitly, to the same dtype.
        ctx.autocast = autocast_dtype(x.device.type)
        with torch.autocast(x.device.type, enabled=False):
            effective = settings.effective(sparse)
            ctx.compute = settings.compute or ctx.autocast or effective.dtype
            y = linear(x.to(ctx.compute), effective.to(ctx.compute), cast(bias, ctx.compute))
            del effective
            y, ctx.generator_states = add_low_rank(y, x, low_rank, ctx.autocast)
        ctx.save_for_backward(x if any(ctx.needs_input_grad[3:]) else None, *tensors)
        ctx.settings, ctx.bias_dtype, ctx.x_dtype = settings, None if bias is None else bias.dtype, x.dtype
        return y.to(x.dtype if settings.compute else ctx.compute)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, *tensors = ctx.saved_tensors
        settings: _Settings = ctx.settings
        sparse, low_rank = split_parts(len(settings.gradients), settings.low_rank, tensors)
        needs_x, needs_bias, _, *needs = ctx.needs_input_grad
        with torch.autocast(dy.device.type, enabled=False):
            dy_rows = rows_of(dy)
            dx = dy.to(ctx.compute) @ settings.effective(sparse).to(ctx.compute) if needs_x else None
            grads: list[Tensor | None] = [None] * (2 * len(sparse))
            if any(needs[: 2 * len(sparse) : 2]):
                operands = rows_of(x).to(ctx.compute), dy_rows.to(ctx.compute)
                for part, (gradient, (values, _)) in enumerate(zip(settings.gradients, sparse, strict=True)):
                    if needs[2 * part]:
                        grads[2 * part] = gradient(*operands).to(values.dtype)
                del operands
            dx, of_low_rank = low_rank_gradients(
                x, dy_rows, dx, low_rank, ctx.generator_states, needs[2 * len(sparse) :], ctx.autocast
            )
            dbias = dy_rows.sum(0).to(ctx.bias_dtype) if needs_bias else None
        return None if dx is None else dx.to(ctx.x_dtype), dbias, None, *grads, *of_low_rank
