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
import triton
import triton.language as tl
from torch import Tensor

from .launch import Call

# Transposed operands are padded to a multiple of this many tokens, with zeros.
PAD = 64
# Longer inputs are transposed and multiplied a piece at a time: the transposed copies stay small.
TOKENS_AT_ONCE = 16384
# Entries that one program of the sampled product computes, and tokens it reads at once.
_CHUNK = 4
_TOKENS = 256
# One Philox call gives eight 16-bit numbers, for eight neighbouring features of a token.
_LEVELS = 65536
MAX_PARTS = 3


class Plan(NamedTuple):
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


def make_plan(indices: Tensor, shape: tuple[int, int]) -> Plan:
    """Plan for a support of a (c, b) layer; synchronises with the device once, at start.

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
    pieces = (counts + _CHUNK - 1) // _CHUNK
    owner = torch.repeat_interleave(torch.arange(width, device=flat.device), pieces)
    first = pieces.cumsum(0) - pieces
    start = (ends - counts)[owner] + (torch.arange(owner.numel(), device=flat.device) - first[owner]) * _CHUNK
    start = torch.cat([start, torch.tensor([flat.numel()], device=flat.device)])
    return Plan(indices, None if order is None else order.int(), owner.int(), start.int(), by_row=by_row, shape=(c, b))


class WriteTable(NamedTuple):
    """Many layers' writes for one launch: which layer each block of entries belongs to, and the bound kernel."""

    owner: Tensor
    call: Call


_WRITE_BLOCK = 1024


def write_table(layers: Sequence[tuple[Tensor, Tensor, Tensor, Tensor]]) -> WriteTable:
    """Table of (weight, indices, values, saved) of layers on one device and of the same dtypes."""
    device = layers[0][0].device
    rows = [[*(tensor.data_ptr() for tensor in layer), layer[1].numel()] for layer in layers]
    blocks = torch.tensor([-(-row[4] // _WRITE_BLOCK) for row in rows])
    owner = torch.repeat_interleave(torch.arange(len(rows)), blocks)
    table = torch.tensor(rows, dtype=torch.int64)
    first = blocks.cumsum(0) - blocks
    owner = owner.int().to(device)
    # Of each kind of tensor one is named, for its dtype; the addresses of all are in the table.
    example = [tensor.detach() for tensor in layers[0][:3]]
    bound = (*example, table.to(device), owner, first.int().to(device))
    return WriteTable(owner, Call(_write, bound, (_WRITE_BLOCK,), device))


def write_supports(table: WriteTable) -> None:
    """W[support] ← round(W0 + U) for every row, in place and past autograd's version counters; W0 is `saved`."""
    blocks = table.owner.numel()
    if blocks:
        table.call((blocks, 1, 1))


class PackTable(NamedTuple):
    """Many thin factors' copies for one launch: which factor each block belongs to, and the bound kernel."""

    owner: Tensor
    call: Call


_PACK_BLOCK = 256


def pack_table(factors: Sequence[tuple[Tensor, float, Tensor]]) -> PackTable:
    """Table of thin factors F (r, n), any strides, with a scale and a contiguous copy (r', n) each.

    All factors are of one dtype and device, all copies of one dtype and r'.
    """
    device = factors[0][0].device
    rows = [[factor.data_ptr(), copy.data_ptr(), *factor.shape, *factor.stride()] for factor, _, copy in factors]
    blocks = torch.tensor([-(-row[3] // _PACK_BLOCK) for row in rows])
    owner = torch.repeat_interleave(torch.arange(len(rows)), blocks)
    owner = owner.int().to(device)
    scales = torch.tensor([scale for _, scale, _ in factors], dtype=torch.float32).to(device)
    first = (blocks.cumsum(0) - blocks).int().to(device)
    factor, _, copy = factors[0]
    bound = (factor, copy, torch.tensor(rows, dtype=torch.int64).to(device), scales, owner, first)
    return PackTable(owner, Call(_pack, bound, (copy.shape[0], _PACK_BLOCK), device))


def pack_factors(table: PackTable) -> None:
    """Fill every copy of the table anew: scale·F below the true rank, zeros above."""
    table.call((table.owner.numel(), 1, 1))


def padded_rank(rank: int) -> int:
    """r': the rank that the kernels compute with, a power of two of at least 16."""
    return max(16, triton.next_power_of_2(rank))


def dropout_threshold(probability: float) -> int:
    """Of 65536 equally likely draws, how many drop; p is met to 1/131072."""
    return min(round(probability * _LEVELS), _LEVELS - 1)


class Transpose:
    """Up to four (T, n_k), contiguous → (n_k, T rounded up), zeros behind T, in one launch."""

    def __init__(self, widths: Sequence[int], device: torch.device) -> None:
        self._widths = list(widths)
        ends = _filled(_ends(widths, 64), 4)
        self._blocks = ends[-1]
        self._fill = 4 - len(widths)
        self._call = Call(_transpose, (*_filled(widths, 4), *ends[:3]), (len(widths), 64, 64), device)

    def __call__(self, *xs: Tensor) -> list[Tensor]:
        tokens = xs[0].shape[0]
        blocks = -(-tokens // PAD)
        outs = [x.new_empty((width, blocks * PAD)) for x, width in zip(xs, self._widths, strict=True)]
        xs = (*xs, *(xs[-1:] * self._fill))
        self._call((blocks, self._blocks, 1), *xs, *outs, *(outs[-1:] * self._fill), tokens, blocks)
        return outs


class SampledProducts:
    """dU[e] = Σ_t dy[t, i]·x[t, j] for every entry e = (i, j) of one to three supports: M ⊙ (dyᵀx), never dense."""

    def __init__(self, plans: Sequence[Plan]) -> None:
        self._plans = list(plans)
        self._sizes = [plan.indices.numel() for plan in plans]
        device = plans[0].indices.device
        ends = _filled(list(accumulate(plan.owner.numel() for plan in plans)), MAX_PARTS)
        self._chunks = ends[-1]
        self._fill = MAX_PARTS - len(plans)
        tables: list[Any] = []
        for plan in _filled(self._plans, MAX_PARTS):
            order = plan.owner if plan.order is None else plan.order
            tables += (plan.indices, order, plan.owner, plan.start, plan.shape[1], int(plan.by_row))
        self._calls = {
            add: Call(_sampled_product, (*tables, *ends[:2]), (len(plans), add, _CHUNK, _TOKENS), device, num_warps=1)
            for add in (False, True)
        }

    def new(self) -> Sequence[Tensor]:
        """Room for the results: (s_k,) fp32 each."""
        device = self._plans[0].indices.device
        return torch.empty(sum(self._sizes), dtype=torch.float32, device=device).split_with_sizes(self._sizes)

    def __call__(self, pairs: Sequence[tuple[Tensor, Tensor]], outs: Sequence[Tensor], *, add: bool = False) -> None:
        """Fill `outs`, or add to them, from (dyᵀ (c, T'), xᵀ (b, T')) of each part, as `Transpose` gives them."""
        operands: list[Tensor] = []
        for (dy_t, x_t), plan, out in zip(pairs, self._plans, outs, strict=True):
            operands += (dy_t, x_t, out) if plan.by_row else (x_t, dy_t, out)
        operands += operands[-3:] * self._fill
        self._calls[add]((self._chunks, 1, 1), *operands, pairs[0][1].shape[1] // PAD)


class Narrow:
    """γ·dropout(x)·Fᵀ of one to three packed factors (r', b), in one pass over x; factor k drops by stream + k."""

    def __init__(self, factors: Sequence[Tensor], threshold: int, stream: int) -> None:
        self._rank, width = factors[0].shape
        self._columns = len(factors) * self._rank
        bound = (*_filled(factors, MAX_PARTS), width, threshold, stream)
        constants = (len(factors), threshold > 0, self._rank, 16, 128)
        stages = 4 if factors[0].element_size() == 2 else 1
        self._call = Call(_narrow, bound, constants, factors[0].device, num_stages=stages)

    def __call__(self, x: Tensor, seed: int) -> Tensor:
        """(T, b) → (T, k·r') in x's dtype."""
        tokens = x.shape[0]
        out = x.new_empty((tokens, self._columns))
        self._call((-(-tokens // 16), 1, 1), x, out, tokens, seed)
        return out


class NarrowEach:
    """dy_k·F_kᵀ of one to three dy_k (T, c_k) with a packed factor (r', c_k) each, in one launch."""

    def __init__(self, factors: Sequence[Tensor]) -> None:
        self._parts, self._rank = len(factors), factors[0].shape[0]
        self._fill = MAX_PARTS - self._parts
        bound = (*_filled(factors, MAX_PARTS), *_filled([factor.shape[1] for factor in factors], MAX_PARTS))
        constants = (self._parts, self._rank, 32, 128)
        stages = 4 if factors[0].element_size() == 2 else 1
        self._call = Call(_narrow_each, bound, constants, factors[0].device, num_stages=stages)

    def __call__(self, dys: Sequence[Tensor]) -> Tensor:
        """(T, k·r')."""
        tokens = dys[0].shape[0]
        out = dys[0].new_empty((tokens, self._parts * self._rank))
        self._call((-(-tokens // 32), self._parts, 1), *dys, *(dys[-1:] * self._fill), out, tokens)
        return out


class Widen:
    """inner_k·F_k + bias_k: (T, k·r') with packed factors (r', c_k) → (T, c_k) each, in one launch."""

    def __init__(self, factors: Sequence[Tensor], biases: Sequence[Tensor | None]) -> None:
        self._widths = [factor.shape[1] for factor in factors]
        self._fill = MAX_PARTS - len(factors)
        ends = _filled(_ends(self._widths, 128), MAX_PARTS)
        self._blocks = ends[-1]
        places = [factor if bias is None else bias for factor, bias in zip(factors, biases, strict=True)]
        present = [int(bias is not None) for bias in biases]
        bound = [*_filled(factors, MAX_PARTS), *_filled(places, MAX_PARTS), *_filled(self._widths, MAX_PARTS)]
        bound += (*_filled(present, MAX_PARTS), *ends[:2])
        constants = (len(factors), factors[0].shape[0], 64, 128)
        self._call = Call(_widen, tuple(bound), constants, factors[0].device)

    def __call__(self, inner: Tensor) -> list[Tensor]:
        tokens = inner.shape[0]
        outs = [inner.new_empty((tokens, width)) for width in self._widths]
        self._call((self._blocks, -(-tokens // 64), 1), inner, *outs, *(outs[-1:] * self._fill), tokens)
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
        parts, device = len(rights), rights[0].device
        self._rank, self._b = rights[0].shape
        self._parts, self._dtype, self._widths, self._ranks = parts, dtype, list(widths), list(ranks)
        self._fill = MAX_PARTS - parts
        bound = (*_filled(rights, MAX_PARTS), self._b, threshold, stream)
        self._outer = {
            through: Call(_outer, bound, (parts, threshold > 0, through, self._rank, 32, 64), device)
            for through in (False, True)
        }
        ends = _filled(_ends(widths, 64), MAX_PARTS)
        self._blocks_x, self._blocks_dy = -(-self._b // 64), ends[-1]
        self._columns = sum(widths)
        starts = [0, *accumulate(widths)][:parts]
        each = (*_filled(widths, MAX_PARTS), *ends[:2], *_filled(starts, MAX_PARTS), self._columns)
        self._outer_each = Call(_outer_each, each, (parts, self._rank, 32, 64), device)
        reduced = (*_filled(widths, MAX_PARTS), *_filled(starts, MAX_PARTS), *_filled(list(ranks), MAX_PARTS))
        reduced += (*_filled([float(scale) for scale in scales], MAX_PARTS), self._columns, self._b)
        self._reduce = Call(_reduce, reduced, (parts, self._rank, 64), device, num_warps=2)
        self._reduce_blocks = -(-max(self._b, *widths) // 64)
        self._shapes = [(width, rank) for width, rank in zip(widths, ranks, strict=True)]
        self._shapes += [(rank, self._b) for rank in ranks]

    def __call__(
        self, x: Tensor, dys: Sequence[Tensor], inner: Tensor, d_inner: Tensor, seed: int, *, through: bool
    ) -> tuple[list[Tensor], list[Tensor], Tensor | None]:
        """dL_k (c_k, r_k), dR_k (r_k, b), and (T, b) in x's dtype or None."""
        tokens = x.shape[0]
        sums_x, passed = self._sums_x(x, d_inner, seed, through=through)
        splits, span = _splits(tokens, self._blocks_dy)
        sums_dy = torch.empty((splits, self._rank, self._columns), dtype=torch.float32, device=x.device)
        operands = (*dys, *(dys[-1:] * self._fill), inner, sums_dy)
        self._outer_each((self._blocks_dy, splits, 1), *operands, tokens, span)
        outs = [torch.empty(shape, dtype=self._dtype, device=x.device) for shape in self._shapes]
        d_left, d_right = outs[: self._parts], outs[self._parts :]
        places = (*d_left, *(d_left[-1:] * self._fill), *d_right, *(d_right[-1:] * self._fill))
        grid = (self._reduce_blocks, 2 * self._parts, 1)
        self._reduce(grid, sums_dy, sums_x, *places, splits, sums_x.shape[0])
        return d_left, d_right, passed

    def through(self, x: Tensor, d_inner: Tensor, seed: int) -> Tensor:
        """Only what passes through to x: for layers of which nothing is trained."""
        passed = self._sums_x(x, d_inner, seed, through=True)[1]
        assert passed is not None
        return passed

    def _sums_x(self, x: Tensor, d_inner: Tensor, seed: int, *, through: bool) -> tuple[Tensor, Tensor | None]:
        tokens = x.shape[0]
        splits, span = _splits(tokens, self._blocks_x)
        sums = torch.empty((splits, self._parts * self._rank, self._b), dtype=torch.float32, device=x.device)
        passed = torch.empty_like(x) if through else None
        operands = (x, d_inner, sums, x if passed is None else passed)
        self._outer[through]((self._blocks_x, splits, 1), *operands, tokens, span, seed)
        return sums, passed


class Swiglu:
    """silu(gate)·up with the roundings of the two eager operations, and its gradients; all (T, n), contiguous."""

    def __init__(self, width: int, device: torch.device) -> None:
        self._width, self._blocks = width, -(-width // 64)
        self._forward = Call(_swiglu, (width,), (2048,), device)
        self._backward = {
            transposed: Call(_swiglu_backward, (width,), (transposed, 64, 64), device, num_warps=8)
            for transposed in (False, True)
        }

    def __call__(self, gate: Tensor, up: Tensor) -> Tensor:
        out = torch.empty_like(gate)
        self._forward((-(-gate.numel() // 2048), 1, 1), gate, up, out, gate.shape[0])
        return out

    def backward(self, dh: Tensor, gate: Tensor, up: Tensor, *, transposed: bool) -> list[Tensor]:
        """d_gate and d_up; if `transposed`, also d_gateᵀ, d_upᵀ and the transposed product, as `Transpose` gives them.

        One pass: the copies are free next to the three eager kernels that this replaces.
        """
        tokens = gate.shape[0]
        blocks = -(-tokens // PAD)
        outs = [torch.empty_like(gate), torch.empty_like(gate)]
        outs += [gate.new_empty((self._width, blocks * PAD)) for _ in range(3)] if transposed else []
        places = outs if transposed else (*outs, gate, gate, gate)
        self._backward[transposed]((blocks, self._blocks, 1), dh, gate, up, *places, tokens, blocks)
        return outs


def dropout_mask(
    seed: int, shape: tuple[int, int], probability: float, device: torch.device, stream: int = 0
) -> Tensor:
    """(T, n) bool: what the kernels keep at this seed and stream; for tests and whoever wants to see it."""
    tokens, width = shape
    out = torch.empty(shape, dtype=torch.int8, device=device)
    call = Call(_mask, (width, dropout_threshold(probability), stream), (16, 128), device)
    call((-(-tokens // 16), -(-width // 128), 1), out, tokens, seed)
    return out.bool()


def _filled(values: Sequence[Any], count: int) -> list[Any]:
    """A kernel has a fixed number of arguments: the last part stands in for those that are not there."""
    return [*values, *(list(values[-1:]) * (count - len(values)))]


def _ends(widths: Sequence[int], block: int) -> list[int]:
    """Where each part's blocks end."""
    return list(accumulate(-(-width // block) for width in widths))


def _splits(tokens: int, blocks: int) -> tuple[int, int]:
    """Into how many spans of tokens a sum is cut so that the chip is filled, and their length."""
    splits = max(1, min(-(-tokens // 128), -(-512 // blocks)))
    span = -(-tokens // (splits * 64)) * 64
    return -(-tokens // span), span


@triton.jit
def _write(weight, indices, values, rows, owner, first, BLOCK: tl.constexpr):
    """The first three arguments only name the types that the addresses in `rows` point to."""
    block = tl.program_id(0)
    row = tl.load(owner + block)
    at = rows + row * 5
    to = tl.load(at).to(tl.pointer_type(weight.dtype.element_ty))
    places = tl.load(at + 1).to(tl.pointer_type(indices.dtype.element_ty))
    change = tl.load(at + 2).to(tl.pointer_type(values.dtype.element_ty))
    before = tl.load(at + 3).to(tl.pointer_type(weight.dtype.element_ty))
    count = tl.load(at + 4)
    entry = (block - tl.load(first + row)).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = entry < count
    place = tl.load(places + entry, mask=mask, other=0).to(tl.int64)
    value = tl.load(before + entry, mask=mask, other=0.0).to(tl.float32)
    value += tl.load(change + entry, mask=mask, other=0.0).to(tl.float32)
    tl.store(to + place, value.to(weight.dtype.element_ty), mask=mask)


@triton.jit
def _pack(factor, copy, rows, scales, owner, first, RANK: tl.constexpr, BLOCK: tl.constexpr):
    block = tl.program_id(0)
    row = tl.load(owner + block)
    at = rows + row * 6
    source = tl.load(at).to(tl.pointer_type(factor.dtype.element_ty))
    target = tl.load(at + 1).to(tl.pointer_type(copy.dtype.element_ty))
    rank = tl.load(at + 2)
    width = tl.load(at + 3)
    n = (block - tl.load(first + row)).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    r = tl.arange(0, RANK).to(tl.int64)
    inside = (r[:, None] < rank) & (n[None, :] < width)
    tile = tl.load(source + r[:, None] * tl.load(at + 4) + n[None, :] * tl.load(at + 5), mask=inside, other=0.0)
    scaled = (tile.to(tl.float32) * tl.load(scales + row)).to(copy.dtype.element_ty)
    tl.store(target + r[:, None] * width + n[None, :], scaled, mask=n[None, :] < width)


@triton.jit(do_not_specialize=["tokens", "blocks", "end0", "end1", "end2"])
def _transpose(
    x0, x1, x2, x3, out0, out1, out2, out3, tokens, blocks, width0, width1, width2, width3, end0, end1, end2,
    PARTS: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    padded = blocks * 64
    block = tl.program_id(1)
    x, out, width, begin = x0, out0, width0, 0
    if PARTS > 1 and block >= end0:
        x, out, width, begin = x1, out1, width1, end0
    if PARTS > 2 and block >= end1:
        x, out, width, begin = x2, out2, width2, end1
    if PARTS > 3 and block >= end2:
        x, out, width, begin = x3, out3, width3, end2
    t = tl.program_id(0) * BT + tl.arange(0, BT)
    n = (block - begin) * BN + tl.arange(0, BN)
    at = t[:, None].to(tl.int64) * width + n[None, :]
    tile = tl.load(x + at, mask=(t[:, None] < tokens) & (n[None, :] < width), other=0.0)
    to = n[:, None].to(tl.int64) * padded + t[None, :]
    tl.store(out + to, tl.trans(tile), mask=(n[:, None] < width) & (t[None, :] < padded))


@triton.jit(do_not_specialize=["blocks", "by_row0", "by_row1", "by_row2", "end0", "end1"])
def _sampled_product(
    own0, other0, out0, own1, other1, out1, own2, other2, out2, blocks,
    indices0, order0, owner0, start0, features0, by_row0,
    indices1, order1, owner1, start1, features1, by_row1,
    indices2, order2, owner2, start2, features2, by_row2,
    end0, end1, PARTS: tl.constexpr, ADD: tl.constexpr, BN: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    padded = blocks * 64
    chunk = tl.program_id(0)
    own, other, indices, order, owner, start, out = own0, other0, indices0, order0, owner0, start0, out0
    features, by_row, base = features0, by_row0, 0
    if PARTS > 1 and chunk >= end0:
        own, other, indices, order, owner, start, out = own1, other1, indices1, order1, owner1, start1, out1
        features, by_row, base = features1, by_row1, end0
    if PARTS > 2 and chunk >= end1:
        own, other, indices, order, owner, start, out = own2, other2, indices2, order2, owner2, start2, out2
        features, by_row, base = features2, by_row2, end1
    chunk -= base
    begin = tl.load(start + chunk)
    n = tl.arange(0, BN)
    mask = n < tl.load(start + chunk + 1) - begin
    entry = begin + n
    entry = tl.load(order + entry, mask=mask & (n * 0 + by_row == 0), other=entry)
    flat = tl.load(indices + entry, mask=mask, other=0)
    row = flat // features
    feature = tl.where(n * 0 + by_row != 0, flat - row * features, row).to(tl.int64)
    line = own + tl.load(owner + chunk).to(tl.int64) * padded
    lines = other + feature[:, None] * padded
    total = tl.zeros([BN, BT], dtype=tl.float32)
    whole = padded // BT * BT
    for t0 in range(0, whole, BT):
        t = t0 + tl.arange(0, BT)
        a = tl.load(line + t).to(tl.float32)
        b = tl.load(lines + t[None, :], mask=mask[:, None], other=0.0).to(tl.float32)
        total += a[None, :] * b
    if whole < padded:
        t = whole + tl.arange(0, BT)
        a = tl.load(line + t, mask=t < padded, other=0.0).to(tl.float32)
        b = tl.load(lines + t[None, :], mask=mask[:, None] & (t < padded)[None, :], other=0.0).to(tl.float32)
        total += a[None, :] * b
    result = tl.sum(total, 1)
    if ADD:
        result += tl.load(out + entry, mask=mask, other=0.0)
    tl.store(out + entry, result, mask=mask)


@triton.jit
def _kept(seed, stream, t, octet, threshold, BT: tl.constexpr, BN: tl.constexpr):
    """(BT, BN) bool: which of BN features, in BN / 8 octets, dropout keeps; depends on these arguments alone."""
    zero = t[:, None] * 0 + octet[None, :] * 0
    a, b, c, d = tl.philox(seed, zero + t[:, None], zero + octet[None, :], zero + stream, zero, 7)
    words = tl.join(tl.join(a, b), tl.join(c, d))
    halves = tl.reshape(tl.join(words & 0xFFFF, words >> 16), [BT, BN])
    return halves.to(tl.int32) >= threshold


@triton.jit
def _packed_tile(factor, n, width, RANK: tl.constexpr):
    """(RANK, len(n)) of a packed factor, zeros outside."""
    r = tl.arange(0, RANK)
    return tl.load(factor + r[:, None] * width + n[None, :], mask=n[None, :] < width, other=0.0)


@triton.jit
def _thin(
    tile, total, seed, t, n0, n, width, factor, threshold, stream,
    DROP: tl.constexpr, RANK: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    if DROP:
        kept = _kept(seed, stream, t, n0 // 8 + tl.arange(0, BN // 8), threshold, BT, BN)
        tile = tl.where(kept, tile, tl.zeros_like(tile))
    return tl.dot(tile, tl.trans(_packed_tile(factor, n, width, RANK)), total, input_precision="ieee")


@triton.jit(do_not_specialize=["tokens", "seed", "threshold", "stream"])
def _narrow(
    x, out, tokens, seed, factor0, factor1, factor2, width, threshold, stream,
    PARTS: tl.constexpr, DROP: tl.constexpr, RANK: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0) * BT + tl.arange(0, BT)
    r = tl.arange(0, RANK)
    total0 = tl.zeros([BT, RANK], dtype=tl.float32)
    total1 = tl.zeros([BT, RANK], dtype=tl.float32)
    total2 = tl.zeros([BT, RANK], dtype=tl.float32)
    for n0 in range(0, width, BN):
        n = n0 + tl.arange(0, BN)
        at = t[:, None].to(tl.int64) * width + n[None, :]
        tile = tl.load(x + at, mask=(t[:, None] < tokens) & (n[None, :] < width), other=0.0)
        total0 = _thin(tile, total0, seed, t, n0, n, width, factor0, threshold, stream, DROP, RANK, BT, BN)
        if PARTS > 1:
            total1 = _thin(tile, total1, seed, t, n0, n, width, factor1, threshold, stream + 1, DROP, RANK, BT, BN)
        if PARTS > 2:
            total2 = _thin(tile, total2, seed, t, n0, n, width, factor2, threshold, stream + 2, DROP, RANK, BT, BN)
    to = out + t[:, None].to(tl.int64) * (PARTS * RANK) + r[None, :]
    mask = t[:, None] < tokens
    kind = out.dtype.element_ty
    scale = 65536.0 / (65536.0 - threshold)
    tl.store(to, (total0 * scale).to(kind), mask=mask)
    if PARTS > 1:
        tl.store(to + RANK, (total1 * scale).to(kind), mask=mask)
    if PARTS > 2:
        tl.store(to + 2 * RANK, (total2 * scale).to(kind), mask=mask)


@triton.jit(do_not_specialize=["tokens"])
def _narrow_each(
    x0, x1, x2, out, tokens, factor0, factor1, factor2, width0, width1, width2,
    PARTS: tl.constexpr, RANK: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(1)
    x, factor, width = x0, factor0, width0
    if PARTS > 1 and part == 1:
        x, factor, width = x1, factor1, width1
    if PARTS > 2 and part == 2:
        x, factor, width = x2, factor2, width2
    t = tl.program_id(0) * BT + tl.arange(0, BT)
    r = tl.arange(0, RANK)
    total = tl.zeros([BT, RANK], dtype=tl.float32)
    for n0 in range(0, width, BN):
        n = n0 + tl.arange(0, BN)
        at = t[:, None].to(tl.int64) * width + n[None, :]
        tile = tl.load(x + at, mask=(t[:, None] < tokens) & (n[None, :] < width), other=0.0)
        total = tl.dot(tile, tl.trans(_packed_tile(factor, n, width, RANK)), total, input_precision="ieee")
    to = out + t[:, None].to(tl.int64) * (PARTS * RANK) + part * RANK + r[None, :]
    tl.store(to, total.to(out.dtype.element_ty), mask=t[:, None] < tokens)


@triton.jit(do_not_specialize=["tokens", "with_bias0", "with_bias1", "with_bias2", "end0", "end1"])
def _widen(
    inner, out0, out1, out2, tokens, factor0, factor1, factor2, bias0, bias1, bias2, width0, width1, width2,
    with_bias0, with_bias1, with_bias2, end0, end1,
    PARTS: tl.constexpr, RANK: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    out, factor, bias, width, with_bias, begin, part = out0, factor0, bias0, width0, with_bias0, 0, 0
    if PARTS > 1 and block >= end0:
        out, factor, bias, width, with_bias, begin, part = out1, factor1, bias1, width1, with_bias1, end0, 1
    if PARTS > 2 and block >= end1:
        out, factor, bias, width, with_bias, begin, part = out2, factor2, bias2, width2, with_bias2, end1, 2
    n = (block - begin) * BN + tl.arange(0, BN)
    t = tl.program_id(1) * BT + tl.arange(0, BT)
    r = tl.arange(0, RANK)
    place = inner + t[:, None].to(tl.int64) * (PARTS * RANK) + part * RANK + r[None, :]
    left = tl.load(place, mask=t[:, None] < tokens, other=0.0)
    result = tl.dot(left, _packed_tile(factor, n, width, RANK), input_precision="ieee")
    result += tl.load(bias + n, mask=(n < width) & (n * 0 + with_bias != 0), other=0.0).to(tl.float32)[None, :]
    to = t[:, None].to(tl.int64) * width + n[None, :]
    tl.store(out + to, result.to(out.dtype.element_ty), mask=(t[:, None] < tokens) & (n[None, :] < width))


@triton.jit
def _outer_part(
    tile, total, passed, left, seed, t, n0, weights, threshold, stream,
    DROP: tl.constexpr, THROUGH: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    if THROUGH:
        back = tl.dot(left, weights, input_precision="ieee")
    if DROP:
        kept = _kept(seed, stream, t, n0 // 8 + tl.arange(0, BN // 8), threshold, BT, BN)
        tile = tl.where(kept, tile, tl.zeros_like(tile))
        if THROUGH:
            back = tl.where(kept, back, 0.0)
    if THROUGH:
        passed += back
    return tl.dot(tl.trans(left), tile, total, input_precision="ieee"), passed


@triton.jit(do_not_specialize=["tokens", "span", "seed", "threshold", "stream"])
def _outer(
    x, inner, sums, passed_pointer, tokens, span, seed, factor0, factor1, factor2, width, threshold, stream,
    PARTS: tl.constexpr, DROP: tl.constexpr, THROUGH: tl.constexpr,
    RANK: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    n0 = tl.program_id(0) * BN
    split = tl.program_id(1)
    n = n0 + tl.arange(0, BN)
    r = tl.arange(0, RANK)
    weights0 = _packed_tile(factor0, n, width, RANK)
    weights1 = weights0
    weights2 = weights0
    if PARTS > 1:
        weights1 = _packed_tile(factor1, n, width, RANK)
    if PARTS > 2:
        weights2 = _packed_tile(factor2, n, width, RANK)
    total0 = tl.zeros([RANK, BN], dtype=tl.float32)
    total1 = tl.zeros([RANK, BN], dtype=tl.float32)
    total2 = tl.zeros([RANK, BN], dtype=tl.float32)
    scale = 65536.0 / (65536.0 - threshold)
    last = tl.minimum(split * span + span, tokens)
    for t0 in range(split * span, last, BT):
        t = t0 + tl.arange(0, BT)
        valid = t[:, None] < last
        at = t[:, None].to(tl.int64) * width + n[None, :]
        inside = valid & (n[None, :] < width)
        tile = tl.load(x + at, mask=inside, other=0.0)
        left = inner + t[:, None].to(tl.int64) * (PARTS * RANK) + r[None, :]
        passed = tl.zeros([BT, BN], dtype=tl.float32)
        total0, passed = _outer_part(tile, total0, passed, tl.load(left, mask=valid, other=0.0), seed, t, n0, weights0,
                                     threshold, stream, DROP, THROUGH, BT, BN)  # fmt: skip
        if PARTS > 1:
            total1, passed = _outer_part(tile, total1, passed, tl.load(left + RANK, mask=valid, other=0.0), seed, t,
                                         n0, weights1, threshold, stream + 1, DROP, THROUGH, BT, BN)  # fmt: skip
        if PARTS > 2:
            total2, passed = _outer_part(tile, total2, passed, tl.load(left + 2 * RANK, mask=valid, other=0.0), seed,
                                         t, n0, weights2, threshold, stream + 2, DROP, THROUGH, BT, BN)  # fmt: skip
        if THROUGH:
            tl.store(passed_pointer + at, (passed * scale).to(passed_pointer.dtype.element_ty), mask=inside)
    to = sums + (split * (PARTS * RANK) + r[:, None]).to(tl.int64) * width + n[None, :]
    mask = n[None, :] < width
    tl.store(to, total0 * scale, mask=mask)
    if PARTS > 1:
        tl.store(to + RANK * width, total1 * scale, mask=mask)
    if PARTS > 2:
        tl.store(to + 2 * RANK * width, total2 * scale, mask=mask)


@triton.jit(do_not_specialize=["tokens", "span", "end0", "end1", "start0", "start1", "start2"])
def _outer_each(
    x0, x1, x2, inner, sums, tokens, span, width0, width1, width2, end0, end1, start0, start1, start2, columns,
    PARTS: tl.constexpr, RANK: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    split = tl.program_id(1)
    x, width, start, begin, part = x0, width0, start0, 0, 0
    if PARTS > 1 and block >= end0:
        x, width, start, begin, part = x1, width1, start1, end0, 1
    if PARTS > 2 and block >= end1:
        x, width, start, begin, part = x2, width2, start2, end1, 2
    n = (block - begin) * BN + tl.arange(0, BN)
    r = tl.arange(0, RANK)
    total = tl.zeros([RANK, BN], dtype=tl.float32)
    last = tl.minimum(split * span + span, tokens)
    for t0 in range(split * span, last, BT):
        t = t0 + tl.arange(0, BT)
        valid = t[:, None] < last
        at = t[:, None].to(tl.int64) * width + n[None, :]
        tile = tl.load(x + at, mask=valid & (n[None, :] < width), other=0.0)
        place = inner + t[:, None].to(tl.int64) * (PARTS * RANK) + part * RANK + r[None, :]
        total = tl.dot(tl.trans(tl.load(place, mask=valid, other=0.0)), tile, total, input_precision="ieee")
    to = sums + (split * RANK + r[:, None]).to(tl.int64) * columns + start + n[None, :]
    tl.store(to, total, mask=n[None, :] < width)


@triton.jit(do_not_specialize=["splits_dy", "splits_x", "rank0", "rank1", "rank2", "start0", "start1", "start2"])
def _reduce(
    sums_dy, sums_x, left0, left1, left2, right0, right1, right2, splits_dy, splits_x,
    width0, width1, width2, start0, start1, start2, rank0, rank1, rank2, scale0, scale1, scale2, columns, features,
    PARTS: tl.constexpr, RANK: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Parts 0 to PARTS are the dL, scaled and stored (c, r); those after them the dR, stored (r, b)."""
    which = tl.program_id(1)
    part = which % PARTS
    left, right, width, start, rank, scale = left0, right0, width0, start0, rank0, scale0
    if PARTS > 1 and part == 1:
        left, right, width, start, rank, scale = left1, right1, width1, start1, rank1, scale1
    if PARTS > 2 and part == 2:
        left, right, width, start, rank, scale = left2, right2, width2, start2, rank2, scale2
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    r = tl.arange(0, RANK)
    total = tl.zeros([RANK, BN], dtype=tl.float32)
    if which < PARTS:
        inside = (r[:, None] < rank) & (n[None, :] < width)
        place = sums_dy + r[:, None] * columns + start + n[None, :]
        for _ in range(0, splits_dy):
            total += tl.load(place, mask=inside, other=0.0)
            place += RANK * columns
        total = (total * scale).to(left.dtype.element_ty)
        tl.store(left + n[None, :] * rank + r[:, None], total, mask=inside)
    else:
        inside = (r[:, None] < rank) & (n[None, :] < features)
        place = sums_x + (part * RANK + r[:, None]) * features + n[None, :]
        for _ in range(0, splits_x):
            total += tl.load(place, mask=inside, other=0.0)
            place += PARTS * RANK * features
        tl.store(right + r[:, None] * features + n[None, :], total.to(right.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["tokens"])
def _swiglu(gate, up, out, tokens, width, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < tokens.to(tl.int64) * width
    g = tl.load(gate + at, mask=mask, other=0.0).to(tl.float32)
    u = tl.load(up + at, mask=mask, other=0.0).to(tl.float32)
    kind = out.dtype.element_ty
    silu = (g / (1.0 + tl.exp(-g))).to(kind).to(tl.float32)
    tl.store(out + at, (silu * u).to(kind), mask=mask)


@triton.jit(do_not_specialize=["tokens", "blocks"])
def _swiglu_backward(
    dh, gate, up, d_gate, d_up, d_gate_t, d_up_t, product_t, tokens, blocks, width,
    TRANSPOSED: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    padded = blocks * 64
    t = tl.program_id(0) * BT + tl.arange(0, BT)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    at = t[:, None].to(tl.int64) * width + n[None, :]
    inside = (t[:, None] < tokens) & (n[None, :] < width)
    d = tl.load(dh + at, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(gate + at, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + at, mask=inside, other=0.0).to(tl.float32)
    kind = d_gate.dtype.element_ty
    sigmoid = 1.0 / (1.0 + tl.exp(-g))
    silu = (g * sigmoid).to(kind).to(tl.float32)
    through = (d * u).to(kind).to(tl.float32)
    dg = (through * sigmoid * (1.0 + g * (1.0 - sigmoid))).to(kind)
    du = (d * silu).to(kind)
    tl.store(d_gate + at, dg, mask=inside)
    tl.store(d_up + at, du, mask=inside)
    if TRANSPOSED:
        to = n[:, None].to(tl.int64) * padded + t[None, :]
        there = (n[:, None] < width) & (t[None, :] < padded)
        tl.store(d_gate_t + to, tl.trans(dg), mask=there)
        tl.store(d_up_t + to, tl.trans(du), mask=there)
        tl.store(product_t + to, tl.trans((silu * u).to(kind)), mask=there)


@triton.jit(do_not_specialize=["tokens", "seed", "threshold", "stream"])
def _mask(out, tokens, seed, width, threshold, stream, BT: tl.constexpr, BN: tl.constexpr):
    t = tl.program_id(0) * BT + tl.arange(0, BT)
    n0 = tl.program_id(1) * BN
    n = n0 + tl.arange(0, BN)
    kept = _kept(seed, stream, t, n0 // 8 + tl.arange(0, BN // 8), threshold, BT, BN)
    at = t[:, None].to(tl.int64) * width + n[None, :]
    tl.store(out + at, kept.to(tl.int8), mask=(t[:, None] < tokens) & (n[None, :] < width))
