"""The Triton kernels of the fast path, each behind a function of plain tensors.

Shapes: T tokens, b input and c output features, s entries of a support, r rank, r' the rank padded to what the matrix
units take. All sums are fp32; no atomics, so the same inputs give the same bits. Layers that share an input share a
launch, at most three of them. Settings are fixed, from measurements on an H200: nothing is autotuned at start. Under
TRITON_INTERPRET=1 the same kernels run on CPU tensors.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import launch

# Transposed operands are padded to a multiple of this many tokens, with zeros.
_PAD = 64
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


def restore_support(weight: Tensor, indices: Tensor, saved: Tensor) -> None:
    """W[support] ← W0: the bits that were there before."""
    count = indices.numel()
    if count:
        launch(_restore, (triton.cdiv(count, 1024),), weight, indices, saved, count, 1024)


class WriteTable(NamedTuple):
    """Many layers' writes for one launch: rows of (weight, indices, values, saved, count), int64 addresses; which row
    each block of entries belongs to, and each row's first block; one tensor of each kind, for its dtype."""

    rows: Tensor
    owner: Tensor
    first: Tensor
    example: tuple[Tensor, Tensor, Tensor]


_WRITE_BLOCK = 1024


def write_table(layers: Sequence[tuple[Tensor, Tensor, Tensor, Tensor]]) -> WriteTable:
    """Table of (weight, indices, values, saved) of layers on one device and of the same dtypes."""
    device = layers[0][0].device
    rows = [[*(tensor.data_ptr() for tensor in layer), layer[1].numel()] for layer in layers]
    blocks = torch.tensor([triton.cdiv(row[4], _WRITE_BLOCK) for row in rows])
    owner = torch.repeat_interleave(torch.arange(len(rows)), blocks)
    table = torch.tensor(rows, dtype=torch.int64)
    first = blocks.cumsum(0) - blocks
    weight, indices, values, _ = layers[0]
    return WriteTable(
        table.to(device), owner.int().to(device), first.int().to(device), (weight.detach(), indices, values.detach())
    )


def write_supports(table: WriteTable) -> None:
    """W[support] ← round(W0 + U) for every row, in place and past autograd's version counters; W0 is `saved`."""
    blocks = table.owner.numel()
    if blocks:
        launch(_write, (blocks,), *table.example, table.rows, table.owner, table.first, _WRITE_BLOCK)


class PackTable(NamedTuple):
    """Many thin factors' copies for one launch: rows of (source, copy, r, n, strides), and a scale each."""

    rows: Tensor
    scales: Tensor
    owner: Tensor
    first: Tensor
    example: tuple[Tensor, Tensor]


_PACK_BLOCK = 256


def pack_table(factors: Sequence[tuple[Tensor, float, Tensor]]) -> PackTable:
    """Table of thin factors F (r, n), any strides, with a scale and a contiguous copy (r', n) each.

    All factors are of one dtype and device, all copies of one dtype and r'.
    """
    device = factors[0][0].device
    rows = [[factor.data_ptr(), copy.data_ptr(), *factor.shape, *factor.stride()] for factor, _, copy in factors]
    blocks = torch.tensor([triton.cdiv(row[3], _PACK_BLOCK) for row in rows])
    owner = torch.repeat_interleave(torch.arange(len(rows)), blocks)
    return PackTable(
        torch.tensor(rows, dtype=torch.int64).to(device),
        torch.tensor([scale for _, scale, _ in factors], dtype=torch.float32).to(device),
        owner.int().to(device),
        (blocks.cumsum(0) - blocks).int().to(device),
        (factors[0][0], factors[0][2]),
    )


def pack_factors(table: PackTable) -> None:
    """Fill every copy of the table anew: scale·F below the true rank, zeros above."""
    args = (*table.example, table.rows, table.scales, table.owner, table.first)
    launch(_pack, (table.owner.numel(),), *args, table.example[1].shape[0], _PACK_BLOCK)


def padded_rank(rank: int) -> int:
    """r': the rank that the kernels compute with, a power of two of at least 16."""
    return max(16, triton.next_power_of_2(rank))


def transpose(*tensors: Tensor) -> list[Tensor]:
    """Up to four (T, n), contiguous → (n, T rounded up), zeros behind T."""
    tokens = tensors[0].shape[0]
    padded = triton.cdiv(tokens, _PAD) * _PAD
    outs = [torch.empty((x.shape[1], padded), dtype=x.dtype, device=x.device) for x in tensors]
    blocks = [triton.cdiv(x.shape[1], 64) for x in tensors]
    ends = [sum(blocks[: at + 1]) for at in range(len(blocks))]
    xs, ys = _filled(tensors, 4), _filled(outs, 4)
    widths, ends = _filled([x.shape[1] for x in tensors], 4), _filled(ends, 4)
    grid = (triton.cdiv(padded, 64), ends[-1])
    launch(_transpose, grid, *xs, *ys, *widths, *ends[:3], tokens, padded, len(tensors), 64, 64)
    return outs


class Product(NamedTuple):
    """One sampled product: dyᵀ (c, T') and xᵀ (b, T') of `transpose`, a plan, and where the result goes: (s,) fp32."""

    dy_t: Tensor
    x_t: Tensor
    plan: Plan
    out: Tensor


def sampled_products(products: Sequence[Product], *, add: bool = False) -> None:
    """out[e] (+)= Σ_t dy[t, i]·x[t, j] for every entry e = (i, j) of each support: M ⊙ (dyᵀx), never dense.

    Args:
        products: one to three, with the same T'.
        add: add to `out` instead of overwriting it.
    """
    products = [each for each in products if each.plan.owner.numel()]
    if not products:
        return
    ends, total, args = [], 0, []
    for dy_t, x_t, plan, out in products:
        total += plan.owner.numel()
        ends.append(total)
        own, other = (dy_t, x_t) if plan.by_row else (x_t, dy_t)
        order = plan.owner if plan.order is None else plan.order
        args.append((own, other, plan.indices, order, plan.owner, plan.start, out, plan.shape[1], int(plan.by_row)))
    flat = [value for part in _filled(args, MAX_PARTS) for value in part]
    padded = products[0].x_t.shape[1]
    numbers = (*_filled(ends, MAX_PARTS)[:2], padded, len(products), add, _CHUNK, _TOKENS)
    launch(_sampled_product, (total,), *flat, *numbers, num_warps=1)


def dropout_threshold(probability: float) -> int:
    """Of 65536 equally likely draws, how many drop; p is met to 1/131072."""
    return min(round(probability * _LEVELS), _LEVELS - 1)


def narrow(
    x: Tensor, factors: Sequence[Tensor], threshold: int = 0, seed: Tensor | None = None, stream: int = 0
) -> Tensor:
    """dropout(x)·Fᵀ of one to three packed factors in one pass over x; factor k drops by stream + k.

    Args:
        x: (T, n), contiguous.
        factors: (r', n) each.
        threshold, seed, stream: of the dropout; seed (1,) int64.

    Returns:
        (T, k·r') in x's dtype.
    """
    tokens, width = x.shape
    rank = factors[0].shape[0]
    out = torch.empty((tokens, len(factors) * rank), dtype=x.dtype, device=x.device)
    drop = threshold > 0
    numbers = (tokens, width, threshold, stream, len(factors), drop, rank, 16, 256)
    args = (x, x if seed is None else seed, out, *_filled(factors, MAX_PARTS), *numbers)
    launch(_narrow, (triton.cdiv(tokens, 16),), *args, num_warps=8, num_stages=3 if x.element_size() == 2 else 1)
    return out


def narrow_each(xs: Sequence[Tensor], factors: Sequence[Tensor]) -> Tensor:
    """x_k·F_kᵀ of one to three inputs (T, n_k) with a packed factor (r', n_k) each: (T, k·r')."""
    tokens = xs[0].shape[0]
    rank = factors[0].shape[0]
    out = torch.empty((tokens, len(xs) * rank), dtype=xs[0].dtype, device=xs[0].device)
    widths = _filled([x.shape[1] for x in xs], MAX_PARTS)
    args = (*_filled(xs, MAX_PARTS), out, *_filled(factors, MAX_PARTS), *widths, tokens, len(xs), rank, 16, 256)
    stages = 3 if xs[0].element_size() == 2 else 1
    launch(_narrow_each, (triton.cdiv(tokens, 16), len(xs)), *args, num_stages=stages)
    return out


def widen(inner: Tensor, factors: Sequence[Tensor], biases: Sequence[Tensor | None]) -> list[Tensor]:
    """inner_k·F_k + bias_k: (T, k·r') with packed factors (r', n_k) → (T, n_k) each, in one launch."""
    tokens = inner.shape[0]
    rank = inner.shape[1] // len(factors)
    outs = [torch.empty((tokens, factor.shape[1]), dtype=inner.dtype, device=inner.device) for factor in factors]
    blocks = [triton.cdiv(factor.shape[1], 128) for factor in factors]
    ends = _filled([sum(blocks[: at + 1]) for at in range(len(blocks))], MAX_PARTS)
    widths = _filled([factor.shape[1] for factor in factors], MAX_PARTS)
    with_bias = _filled([int(bias is not None) for bias in biases], MAX_PARTS)
    places = _filled([inner if bias is None else bias for bias in biases], MAX_PARTS)
    args = (inner, *_filled(outs, MAX_PARTS), *_filled(factors, MAX_PARTS), *places, *widths, *with_bias, *ends[:2])
    launch(_widen, (ends[-1], triton.cdiv(tokens, 64)), *args, tokens, len(factors), rank, 64, 128)
    return outs


def outer(
    x: Tensor,
    inner: Tensor,
    factors: Sequence[Tensor],
    threshold: int,
    seed: Tensor | None,
    stream: int,
    *,
    through: bool,
) -> tuple[Tensor, Tensor | None]:
    """What a thin product leaves behind, in one pass over x: Σ_t inner_kᵀ·dropout(x), and inner·F through the masks.

    Args:
        x: (T, n), contiguous.
        inner: (T, k·r'), the gradient at the thin side.
        factors: packed (r', n) each.
        threshold, seed, stream: as `narrow` had them.
        through: also return Σ_k mask_k ⊙ (inner_k·F_k)/(1-p): the gradient that passes to x.

    Returns:
        (splits, k·r', n) fp32 partial sums, see `reduce`; (T, n) in x's dtype or None.
    """
    tokens, width = x.shape
    rank = factors[0].shape[0]
    blocks = triton.cdiv(width, 64)
    splits, span = _splits(tokens, blocks)
    sums = torch.empty((splits, len(factors) * rank, width), dtype=torch.float32, device=x.device)
    passed = torch.empty((tokens, width), dtype=x.dtype, device=x.device) if through else None
    args = (x, x if seed is None else seed, inner, sums, x if passed is None else passed, *_filled(factors, MAX_PARTS))
    numbers = (tokens, width, span, threshold, stream, len(factors), threshold > 0, through, rank, 32, 64)
    launch(_outer, (blocks, splits), *args, *numbers)
    return sums, passed


def outer_each(xs: Sequence[Tensor], inner: Tensor) -> list[Tensor]:
    """Σ_t inner_kᵀ·x_k of up to three (T, n_k) and the columns k of inner (T, k·r'): partial (splits, r', n_k)."""
    tokens = xs[0].shape[0]
    rank = inner.shape[1] // len(xs)
    blocks = [triton.cdiv(x.shape[1], 64) for x in xs]
    ends = _filled([sum(blocks[: at + 1]) for at in range(len(blocks))], MAX_PARTS)
    splits, span = _splits(tokens, ends[-1])
    sums = [torch.empty((splits, rank, x.shape[1]), dtype=torch.float32, device=x.device) for x in xs]
    widths = _filled([x.shape[1] for x in xs], MAX_PARTS)
    args = (*_filled(xs, MAX_PARTS), inner, *_filled(sums, MAX_PARTS), *widths, *ends[:2])
    launch(_outer_each, (ends[-1], splits), *args, tokens, span, len(xs), rank, 64, 64)
    return sums


def reduce(
    sums: Sequence[Tensor], ranks: Sequence[int], scales: Sequence[float], dtype: torch.dtype, *, transposed: bool
) -> list[Tensor]:
    """Σ over the first axis of (splits, r', n_k) each, times a scale: (r_k, n_k), or (n_k, r_k) if `transposed`.

    The order of the sum is fixed. The views in `sums` may be slices of the middle axis.
    """
    outs = []
    for part, rank in zip(sums, ranks, strict=True):
        shape = (part.shape[2], rank) if transposed else (rank, part.shape[2])
        outs.append(torch.empty(shape, dtype=dtype, device=part.device))
    widths = _filled([part.shape[2] for part in sums], MAX_PARTS)
    args = (*_filled(sums, MAX_PARTS), *_filled(outs, MAX_PARTS), *widths, *_filled(ranks, MAX_PARTS))
    numbers = (*_filled([float(scale) for scale in scales], MAX_PARTS), sums[0].shape[0])
    strides = _filled([part.stride(0) for part in sums], MAX_PARTS)
    grid = (triton.cdiv(max(widths), 64), len(sums))
    constants = (len(sums), transposed, sums[0].shape[1], 64)
    launch(_reduce, grid, *args, *strides, *numbers, *constants, num_warps=2)
    return outs


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate)·up with the roundings of the two eager operations; all (T, n), contiguous."""
    out = torch.empty_like(gate)
    count = gate.numel()
    launch(_swiglu, (triton.cdiv(count, 2048),), gate, up, out, count, 2048)
    return out


class SwigluGrads(NamedTuple):
    """Gradients of `swiglu`, and where asked the transposed ones and the transposed product."""

    gate: Tensor
    up: Tensor
    gate_t: Tensor | None
    up_t: Tensor | None
    product_t: Tensor | None


def swiglu_backward(dh: Tensor, gate: Tensor, up: Tensor, *, transposed: bool) -> SwigluGrads:
    """One pass over dh, gate and up (T, n): the gradients, and in the same pass what the sampled products read.

    The transposed copies are free next to the three eager kernels that this replaces.
    """
    tokens, width = gate.shape
    padded = triton.cdiv(tokens, _PAD) * _PAD
    grads = [torch.empty_like(gate), torch.empty_like(up)]
    shape = (width, padded)
    copies = [torch.empty(shape, dtype=gate.dtype, device=gate.device) for _ in range(3)] if transposed else [gate] * 3
    grid = (triton.cdiv(padded, 64), triton.cdiv(width, 64))
    args = (dh, gate, up, *grads, *copies, tokens, padded, width, transposed, 64, 64)
    launch(_swiglu_backward, grid, *args, num_warps=8)
    return SwigluGrads(*grads, *(copies if transposed else (None, None, None)))


def dropout_mask(seed: Tensor, shape: tuple[int, int], probability: float, stream: int = 0) -> Tensor:
    """(T, n) bool: what `narrow` and `outer` keep at this seed and stream; for tests and whoever wants to see it."""
    tokens, width = shape
    out = torch.empty(shape, dtype=torch.int8, device=seed.device)
    grid = (triton.cdiv(tokens, 16), triton.cdiv(width, 128))
    launch(_mask, grid, out, seed, tokens, width, dropout_threshold(probability), stream, 16, 128)
    return out.bool()


def _filled(values: Sequence, count: int) -> list:
    """A launch has a fixed number of arguments: the last part stands in for those that are not there."""
    return [values[min(at, len(values) - 1)] for at in range(count)]


def _splits(tokens: int, blocks: int) -> tuple[int, int]:
    """Into how many spans of tokens a sum is cut so that the chip is filled, and their length."""
    splits = max(1, min(triton.cdiv(tokens, 128), triton.cdiv(512, blocks)))
    span = triton.cdiv(triton.cdiv(tokens, splits), 64) * 64
    return triton.cdiv(tokens, span), span


@triton.jit
def _restore(weight, indices, saved, count, BLOCK: tl.constexpr):
    entry = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = entry < count
    at = tl.load(indices + entry, mask=mask, other=0).to(tl.int64)
    tl.store(weight + at, tl.load(saved + entry, mask=mask, other=0.0), mask=mask)


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


@triton.jit(do_not_specialize=["end0", "end1", "end2"])
def _transpose(
    x0, x1, x2, x3, out0, out1, out2, out3, width0, width1, width2, width3, end0, end1, end2, tokens, padded,
    PARTS: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
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


@triton.jit(do_not_specialize=["by_row0", "by_row1", "by_row2", "end0", "end1"])
def _sampled_product(
    own0, other0, indices0, order0, owner0, start0, out0, features0, by_row0,
    own1, other1, indices1, order1, owner1, start1, out1, features1, by_row1,
    own2, other2, indices2, order2, owner2, start2, out2, features2, by_row2,
    end0, end1, padded, PARTS: tl.constexpr, ADD: tl.constexpr, BN: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
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


@triton.jit(do_not_specialize=["threshold", "stream"])
def _narrow(
    x, seed_pointer, out, factor0, factor1, factor2, tokens, width, threshold, stream,
    PARTS: tl.constexpr, DROP: tl.constexpr, RANK: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0) * BT + tl.arange(0, BT)
    r = tl.arange(0, RANK)
    seed = 0
    if DROP:
        seed = tl.load(seed_pointer)
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


@triton.jit
def _narrow_each(
    x0, x1, x2, out, factor0, factor1, factor2, width0, width1, width2, tokens,
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


@triton.jit(do_not_specialize=["with_bias0", "with_bias1", "with_bias2", "end0", "end1"])
def _widen(
    inner, out0, out1, out2, factor0, factor1, factor2, bias0, bias1, bias2, width0, width1, width2,
    with_bias0, with_bias1, with_bias2, end0, end1, tokens,
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


@triton.jit(do_not_specialize=["threshold", "stream"])
def _outer(
    x, seed_pointer, inner, sums, passed_pointer, factor0, factor1, factor2,
    tokens, width, span, threshold, stream,
    PARTS: tl.constexpr, DROP: tl.constexpr, THROUGH: tl.constexpr,
    RANK: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    n0 = tl.program_id(0) * BN
    split = tl.program_id(1)
    n = n0 + tl.arange(0, BN)
    r = tl.arange(0, RANK)
    seed = 0
    if DROP:
        seed = tl.load(seed_pointer)
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


@triton.jit(do_not_specialize=["end0", "end1"])
def _outer_each(
    x0, x1, x2, inner, sums0, sums1, sums2, width0, width1, width2, end0, end1, tokens, span,
    PARTS: tl.constexpr, RANK: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    split = tl.program_id(1)
    x, sums, width, begin, part = x0, sums0, width0, 0, 0
    if PARTS > 1 and block >= end0:
        x, sums, width, begin, part = x1, sums1, width1, end0, 1
    if PARTS > 2 and block >= end1:
        x, sums, width, begin, part = x2, sums2, width2, end1, 2
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
    to = sums + (split * RANK + r[:, None]).to(tl.int64) * width + n[None, :]
    tl.store(to, total, mask=n[None, :] < width)


@triton.jit(do_not_specialize=["rank0", "rank1", "rank2", "splits"])
def _reduce(
    sums0, sums1, sums2, out0, out1, out2, width0, width1, width2, rank0, rank1, rank2, stride0, stride1, stride2,
    scale0, scale1, scale2, splits,
    PARTS: tl.constexpr, TRANSPOSED: tl.constexpr, RANK: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(1)
    sums, out, width, rank, stride, scale = sums0, out0, width0, rank0, stride0, scale0
    if PARTS > 1 and part == 1:
        sums, out, width, rank, stride, scale = sums1, out1, width1, rank1, stride1, scale1
    if PARTS > 2 and part == 2:
        sums, out, width, rank, stride, scale = sums2, out2, width2, rank2, stride2, scale2
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    r = tl.arange(0, RANK)
    inside = (r[:, None] < rank) & (n[None, :] < width)
    total = tl.zeros([RANK, BN], dtype=tl.float32)
    for _ in range(0, splits):
        total += tl.load(sums + r[:, None] * width + n[None, :], mask=inside, other=0.0)
        sums += stride
    total = (total * scale).to(out.dtype.element_ty)
    if TRANSPOSED:
        tl.store(out + n[None, :] * rank + r[:, None], total, mask=inside)
    else:
        tl.store(out + r[:, None] * width + n[None, :], total, mask=inside)


@triton.jit
def _swiglu(gate, up, out, count, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < count
    g = tl.load(gate + at, mask=mask, other=0.0).to(tl.float32)
    u = tl.load(up + at, mask=mask, other=0.0).to(tl.float32)
    kind = out.dtype.element_ty
    silu = (g / (1.0 + tl.exp(-g))).to(kind).to(tl.float32)
    tl.store(out + at, (silu * u).to(kind), mask=mask)


@triton.jit
def _swiglu_backward(
    dh, gate, up, d_gate, d_up, d_gate_t, d_up_t, product_t, tokens, padded, width,
    TRANSPOSED: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
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


@triton.jit(do_not_specialize=["threshold", "stream"])
def _mask(out, seed_pointer, tokens, width, threshold, stream, BT: tl.constexpr, BN: tl.constexpr):
    t = tl.program_id(0) * BT + tl.arange(0, BT)
    n0 = tl.program_id(1) * BN
    n = n0 + tl.arange(0, BN)
    kept = _kept(tl.load(seed_pointer), stream, t, n0 // 8 + tl.arange(0, BN // 8), threshold, BT, BN)
    at = t[:, None].to(tl.int64) * width + n[None, :]
    tl.store(out + at, kept.to(tl.int8), mask=(t[:, None] < tokens) & (n[None, :] < width))
