"""The Triton kernels of the fast path, each behind a small class that binds what stays from step to step.

Shapes: T tokens, b input and c output features, s entries of a support, r rank, r' the rank padded to what the matrix
units take. All sums are fp32; no atomics, so the same inputs give the same bits. Layers that share an input share a
launch, at most three of them. Settings are fixed, from measurements on an H200: nothing is autotuned at start. Under
TRITON_INTERPRET=1 the same kernels run on CPU tensors.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..method.sizes import ENTRIES_PER_CHUNK
from . import programs
from .launcher import Call, address, places

# Transposed operands are padded to a multiple of this many tokens, with zeros.
PAD = 64
# Tokens that one program of the sampled product reads at once.
_TOKENS = 256
# One Philox call gives eight 16-bit numbers, for eight neighbouring features of a token.
_LEVELS = 65536
MAX_PARTS = 3


class SamplingPlan(NamedTuple):
    """How the sampled product walks over one support: chunks of a few entries that share an output feature (`by_row`)
    or an input feature.

    indices (s,) are the support itself; `order` (s,) int32 sorts it by input feature, None if `by_row`; chunk k holds
    entries start[k]:start[k+1] in that order, all of feature owner[k]; both int32. `shape` is (c, b).
    """

    indices: Tensor
    order: Tensor | None
    owner: Tensor
    start: Tensor
    by_row: bool
    shape: tuple[int, int]


def make_sampling_plan(indices: Tensor, shape: tuple[int, int]) -> SamplingPlan:
    """SamplingPlan for a support of a (c, b) layer; synchronises with the device once, at start.

    The smaller operand is gathered, the larger one streamed: what is gathered then fits the L2 cache.
    """
    c, b = shape
    by_row = c >= b
    flat = indices.long()
    order = None
    if by_row:
        owners, width = flat // b, c
    else:
        columns = flat % b
        order = torch.argsort(columns, stable=True)
        owners, width = columns[order], b
    counts = torch.bincount(owners, minlength=width)
    ends = counts.cumsum(0)
    pieces = (counts + ENTRIES_PER_CHUNK - 1) // ENTRIES_PER_CHUNK
    owner = torch.repeat_interleave(torch.arange(width, device=flat.device), pieces)
    first = pieces.cumsum(0) - pieces
    start = (ends - counts)[owner] + (
        torch.arange(owner.numel(), device=flat.device) - first[owner]
    ) * ENTRIES_PER_CHUNK
    start = torch.cat([start, torch.tensor([flat.numel()], device=flat.device)])
    return SamplingPlan(
        indices, None if order is None else order.int(), owner.int(), start.int(), by_row=by_row, shape=(c, b)
    )


def few_columns(plans: Sequence[SamplingPlan]) -> tuple[Tensor | None, list[SamplingPlan]]:
    """The input features (n,) that supports of one input touch, and the plans over those alone; all if that saves less
    than half: then None and the plans themselves."""
    width = plans[0].shape[1]
    columns = torch.unique(torch.cat([plan.indices.long() % width for plan in plans]))
    count = columns.numel()
    if count < 2 or 2 * count > width:
        return None, list(plans)
    place = torch.zeros(width, dtype=torch.int64, device=columns.device)
    place[columns] = torch.arange(count, device=columns.device)
    compact = []
    for plan in plans:
        flat = plan.indices.long()
        indices = (flat // width * count + place[flat % width]).to(plan.indices.dtype)
        compact.append(make_sampling_plan(indices, (plan.shape[0], count)))
    return columns, compact


def dropout_threshold(probability: float) -> int:
    """Of 65536 equally likely draws, how many drop; p is met to 1/131072."""
    return min(round(probability * _LEVELS), _LEVELS - 1)


class Transpose:
    """Up to four (T, n_k), contiguous → (n_k, T'), T' the tokens rounded up, zeros behind T, in one launch."""

    def __init__(self, widths: Sequence[int], dtype: torch.dtype, device: torch.device) -> None:
        self._widths = list(widths)
        ends = _filled(_ends(widths, 64), 4)
        self._blocks = ends[-1]
        self._fill = 4 - len(widths)
        bound = (*_filled(widths, 4), *ends[:3])
        self._call = Call(programs.transpose, (dtype,) * 8, bound, (len(widths), 64, 64), device)

    def __call__(self, *xs: Tensor) -> tuple[Tensor, list[Any]]:
        """The copies, one after another in a buffer, and the places of each: it is the caller's to keep the buffer."""
        tokens = xs[0].numel() // self._widths[0]
        blocks = -(-tokens // PAD)
        sizes = [width * blocks * PAD for width in self._widths]
        buffer = xs[0].new_empty(sum(sizes))
        outs = places(buffer, sizes)
        operands = [address(x) for x in xs]
        fill = self._fill
        self._call(
            (blocks, self._blocks, 1), *operands, *operands[-1:] * fill, *outs, *outs[-1:] * fill, tokens, blocks
        )
        return buffer, outs


class SampledProducts:
    """dU[e] = Σ_t dy[t, i]·x[t, j] for every entry e = (i, j) of one to three supports: M ⊙ (dyᵀx), never dense."""

    def __init__(self, plans: Sequence[SamplingPlan], dtype: torch.dtype) -> None:
        self.plans = list(plans)
        device = plans[0].indices.device
        self._results = [_like_nothing((plan.indices.numel(),), torch.float32, device) for plan in plans]
        ends = _filled(list(accumulate(plan.owner.numel() for plan in plans)), MAX_PARTS)
        self._chunks = ends[-1]
        self._fill = MAX_PARTS - len(plans)
        tables: list[Any] = []
        for plan in _filled(self.plans, MAX_PARTS):
            order = plan.owner if plan.order is None else plan.order
            tables += (plan.indices, order, plan.owner, plan.start, plan.shape[1], int(plan.by_row))
        dtypes = (dtype, dtype, torch.float32) * MAX_PARTS
        bound = (*tables, *ends[:2])
        self._calls = [
            Call(
                programs.sampled_product,
                dtypes,
                bound,
                (len(plans), add, ENTRIES_PER_CHUNK, _TOKENS),
                device,
                num_warps=1,
            )
            for add in (False, True)
        ]

    def new(self) -> list[Tensor]:
        """Room for the results: (s_k,) fp32 each."""
        return [torch.empty_like(each, memory_format=torch.contiguous_format) for each in self._results]

    def __call__(
        self, pairs: Sequence[tuple[Any, Any]], tokens: int, outs: Sequence[Tensor], *, add: bool = False
    ) -> None:
        """Fill `outs`, or add to them, from the places of (dyᵀ (c, T'), xᵀ (b, T')) of each part, as `Transpose` of
        inputs of this many tokens gives them."""
        operands: list[Any] = []
        for (dy_t, x_t), plan, out in zip(pairs, self.plans, outs, strict=True):
            operands += (dy_t, x_t, address(out)) if plan.by_row else (x_t, dy_t, address(out))
        operands += operands[-3:] * self._fill
        self._calls[add]((self._chunks, 1, 1), *operands, -(-tokens // PAD))


class Narrow:
    """γ·dropout(x)·Fᵀ of one to three packed factors (r', b), in one pass over x; factor k drops by stream + k."""

    def __init__(self, factors: Sequence[Tensor], threshold: int, stream: int) -> None:
        self._rank, width = factors[0].shape
        self._columns = len(factors) * self._rank
        bound = (*_filled(factors, MAX_PARTS), width, threshold, stream)
        constants = (len(factors), threshold > 0, self._rank, 16, 128)
        stages = 4 if factors[0].element_size() == 2 else 1
        dtypes = (factors[0].dtype,) * 2
        self._width = width
        self._call = Call(programs.narrow, dtypes, bound, constants, factors[0].device, num_stages=stages)

    def __call__(self, x: Tensor, seed: int) -> Tensor:
        """(..., b) → (T, k·r') in x's dtype."""
        tokens = x.numel() // self._width
        out = x.new_empty((tokens, self._columns))
        self._call((-(-tokens // 16), 1, 1), address(x), address(out), tokens, seed)
        return out


class NarrowEach:
    """dy_k·F_kᵀ of one to three dy_k (T, c_k) with a packed factor (r', c_k) each, in one launch."""

    def __init__(self, factors: Sequence[Tensor]) -> None:
        self._parts, self._rank = len(factors), factors[0].shape[0]
        self._fill = MAX_PARTS - self._parts
        bound = (*_filled(factors, MAX_PARTS), *_filled([factor.shape[1] for factor in factors], MAX_PARTS))
        constants = (self._parts, self._rank, 32, 128)
        stages = 4 if factors[0].element_size() == 2 else 1
        dtypes = (factors[0].dtype,) * 4
        self._width = factors[0].shape[1]
        self._call = Call(programs.narrow_each, dtypes, bound, constants, factors[0].device, num_stages=stages)

    def __call__(self, dys: Sequence[Tensor]) -> Tensor:
        """(..., c_k) each → (T, k·r')."""
        tokens = dys[0].numel() // self._width
        out = dys[0].new_empty((tokens, self._parts * self._rank))
        operands = [address(dy) for dy in dys]
        operands += operands[-1:] * self._fill
        self._call((-(-tokens // 32), self._parts, 1), *operands, address(out), tokens)
        return out


class Widen:
    """inner_k·F_k: (T, k·r') with packed factors (r', c_k) → (T, c_k) each, in one launch."""

    def __init__(self, factors: Sequence[Tensor]) -> None:
        self._widths = [factor.shape[1] for factor in factors]
        self._fill = MAX_PARTS - len(factors)
        ends = _filled(_ends(self._widths, 128), MAX_PARTS)
        self._blocks = ends[-1]
        bound = (*_filled(factors, MAX_PARTS), *_filled(self._widths, MAX_PARTS), *ends[:2])
        constants = (len(factors), factors[0].shape[0], 64, 128)
        self._call = Call(programs.widen, (factors[0].dtype,) * 4, bound, constants, factors[0].device)

    def __call__(self, inner: Tensor, lead: Sequence[int]) -> list[Tensor]:
        """(*lead, c_k) each; the product of `lead` is T."""
        tokens = inner.shape[0]
        outs = [inner.new_empty((*lead, width)) for width in self._widths]
        operands = [address(out) for out in outs]
        operands += operands[-1:] * self._fill
        self._call((self._blocks, -(-tokens // 64), 1), address(inner), *operands, tokens)
        return outs


class ThinGradients:
    """dL and dR of one to three layers that share x, and what passes through them to x.

    dL_k = γ·dy_kᵀ·inner_k and dR_k = d_inner_kᵀ·dropout(x), summed over spans of tokens and then, in a fixed order,
    over the spans; through: Σ_k mask_k ⊙ (d_inner_k·R_k)/(1-p).

    Args:
        rights: packed R (r', b) each.
        widths, ranks, scales: c_k, r_k and γ_k.
        threshold, stream: of the dropout, as `Narrow` had them.
        dtype: of the gradients.
    """

    def __init__(
        self,
        rights: Sequence[Tensor],
        widths: Sequence[int],
        ranks: Sequence[int],
        scales: Sequence[float],
        threshold: int,
        stream: int,
        dtype: torch.dtype,
    ) -> None:
        parts, device, kind = len(rights), rights[0].device, rights[0].dtype
        self._rank, self._b = rights[0].shape
        self._parts, self._fill, self._width = parts, MAX_PARTS - parts, widths[0]
        bound = (*_filled(rights, MAX_PARTS), self._b, threshold, stream)
        self._outer = [
            Call(
                programs.outer,
                (kind, kind, torch.float32, kind),
                bound,
                (parts, threshold > 0, through, self._rank, 32, 64),
                device,
            )
            for through in (False, True)
        ]
        ends = _filled(_ends(widths, 64), MAX_PARTS)
        self._blocks_x, self._blocks_dy = -(-self._b // 64), ends[-1]
        self._columns = sum(widths)
        starts = [0, *accumulate(widths)][:parts]
        each = (*_filled(widths, MAX_PARTS), *ends[:2], *_filled(starts, MAX_PARTS), self._columns)
        dtypes: tuple[torch.dtype, ...] = (*(kind,) * 4, torch.float32)
        self._outer_each = Call(programs.outer_each, dtypes, each, (parts, self._rank, 32, 64), device)
        reduced = (*_filled(widths, MAX_PARTS), *_filled(starts, MAX_PARTS), *_filled(list(ranks), MAX_PARTS))
        reduced += (*_filled([float(scale) for scale in scales], MAX_PARTS), self._columns, self._b)
        dtypes = (torch.float32, torch.float32, *(dtype,) * 6)
        self._reduce = Call(programs.reduce, dtypes, reduced, (parts, self._rank, 64), device, num_warps=2)
        self._reduce_blocks = -(-max(self._b, *widths) // 64)
        shapes = [*zip(widths, ranks, strict=True), *((rank, self._b) for rank in ranks)]
        self._results = [_like_nothing(shape, dtype, device) for shape in shapes]

    def __call__(
        self, x: Tensor, dys: Sequence[Tensor], inner: Tensor, d_inner: Tensor, seed: int, *, through: bool
    ) -> tuple[list[Tensor], list[Tensor], Tensor | None]:
        """From x (..., b) and dy_k (..., c_k): dL_k (c_k, r_k), dR_k (r_k, b), and (T, b) in x's dtype or None."""
        tokens = x.numel() // self._b
        splits_x, span_x = _splits(tokens, self._blocks_x)
        splits_dy, span_dy = _splits(tokens, self._blocks_dy)
        sizes = [splits_x * self._parts * self._rank * self._b, splits_dy * self._rank * self._columns]
        buffer = torch.empty(sum(sizes), dtype=torch.float32, device=x.device)
        sums_x, sums_dy = places(buffer, sizes)
        passed = self._pass(x, d_inner, sums_x, seed, splits_x, span_x, through=through)
        operands = [address(dy) for dy in dys]
        operands += operands[-1:] * self._fill
        self._outer_each((self._blocks_dy, splits_dy, 1), *operands, address(inner), sums_dy, tokens, span_dy)
        outs = [torch.empty_like(each, memory_format=torch.contiguous_format) for each in self._results]
        d_left, d_right = outs[: self._parts], outs[self._parts :]
        left, right = [address(each) for each in d_left], [address(each) for each in d_right]
        fill = self._fill
        grid = (self._reduce_blocks, 2 * self._parts, 1)
        self._reduce(grid, sums_dy, sums_x, *left, *left[-1:] * fill, *right, *right[-1:] * fill, splits_dy, splits_x)
        return d_left, d_right, passed

    def through(self, x: Tensor, d_inner: Tensor, seed: int) -> Tensor:
        """Only what passes through to x: for layers of which nothing is trained."""
        splits, span = _splits(x.numel() // self._b, self._blocks_x)
        sums = torch.empty(splits * self._parts * self._rank * self._b, dtype=torch.float32, device=x.device)
        passed = self._pass(x, d_inner, address(sums), seed, splits, span, through=True)
        assert passed is not None
        return passed

    def _pass(
        self, x: Tensor, d_inner: Tensor, sums: Any, seed: int, splits: int, span: int, *, through: bool
    ) -> Tensor | None:
        tokens = x.numel() // self._b
        passed = x.new_empty((tokens, self._b)) if through else None
        to = address(x if passed is None else passed)
        self._outer[through]((self._blocks_x, splits, 1), address(x), address(d_inner), sums, to, tokens, span, seed)
        return passed


class Swiglu:
    """silu(gate)·up with the roundings of the two eager operations, and its gradients; all (..., n), contiguous."""

    def __init__(self, width: int, dtype: torch.dtype, device: torch.device) -> None:
        self._width, self._blocks = width, -(-width // 64)
        self._forward = Call(programs.swiglu, (dtype,) * 3, (width,), (2048,), device)
        self._backward = [
            Call(programs.swiglu_backward, (dtype,) * 8, (width,), (transposed, 64, 64), device, num_warps=8)
            for transposed in (False, True)
        ]

    def __call__(self, gate: Tensor, up: Tensor) -> Tensor:
        out = torch.empty_like(gate)
        count = gate.numel()
        self._forward((-(-count // 2048), 1, 1), address(gate), address(up), address(out), count // self._width)
        return out

    def backward(
        self, dh: Tensor, gate: Tensor, up: Tensor, *, transposed: bool
    ) -> tuple[Tensor, Tensor, Tensor | None, list[Any]]:
        """d_gate and d_up; if `transposed`, also a buffer with d_gateᵀ, d_upᵀ and the transposed product, and their
        places, as `Transpose` gives them.

        One pass: the copies are free next to the three eager kernels that this replaces.
        """
        tokens = gate.numel() // self._width
        blocks = -(-tokens // PAD)
        d_gate, d_up = torch.empty_like(gate), torch.empty_like(gate)
        operands = [address(each) for each in (dh, gate, up, d_gate, d_up)]
        buffer, outs = None, operands[1:2] * 3
        if transposed:
            size = self._width * blocks * PAD
            buffer = gate.new_empty(3 * size)
            outs = places(buffer, [size] * 3)
        self._backward[transposed]((blocks, self._blocks, 1), *operands, *outs, tokens, blocks)
        return d_gate, d_up, buffer, outs


def dropout_mask(
    seed: int, shape: tuple[int, int], probability: float, device: torch.device, stream: int = 0
) -> Tensor:
    """(T, n) bool: what the kernels keep at this seed and stream; for tests and whoever wants to see it."""
    tokens, width = shape
    out = torch.empty(shape, dtype=torch.int8, device=device)
    bound = (width, dropout_threshold(probability), stream)
    call = Call(programs.mask, (torch.int8,), bound, (16, 128), device)
    call((-(-tokens // 16), -(-width // 128), 1), address(out), tokens, seed)
    return out.bool()


def _filled(values: Sequence[Any], count: int) -> list[Any]:
    """A kernel has a fixed number of arguments: the last part stands in for those that are not there."""
    return [*values, *(list(values[-1:]) * (count - len(values)))]


def _like_nothing(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A pattern for `empty_like`, the quickest way to a new tensor; without memory of its own."""
    return torch.empty((), dtype=dtype, device=device).expand(shape)


def _ends(widths: Sequence[int], block: int) -> list[int]:
    """Where each part's blocks end."""
    return list(accumulate(-(-width // block) for width in widths))


def _splits(tokens: int, blocks: int) -> tuple[int, int]:
    """Into how many spans of tokens a sum is cut so that the chip is filled, and their length."""
    splits = max(1, min(-(-tokens // 128), -(-512 // blocks)))
    span = -(-tokens // (splits * 64)) * 64
    return -(-tokens // span), span
