"""Triton functions of the writing kernels; `write_kernels` binds and launches them, and says the shapes."""

import triton
import triton.language as tl


@triton.jit
def write(weight, indices, values, rows, owner, first, ADD: tl.constexpr, BLOCK: tl.constexpr):
    """weight[support] = saved, plus U if ADD, for every row of the table; see `write_kernels.WriteTable`.

    The first three arguments are only there for their dtypes; the addresses of all tensors are in `rows`.
    """
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
    value = tl.load(before + entry, mask=mask, other=0.0)
    if ADD:
        value = value.to(tl.float32) + tl.load(change + entry, mask=mask, other=0.0).to(tl.float32)
    tl.store(to + place, value.to(weight.dtype.element_ty), mask=mask)


@triton.jit
def pack(factor, copy, rows, scales, owner, first, RANK: tl.constexpr, BLOCK: tl.constexpr):
    """copy (RANK, n) = scale·factor (r, n) of every row, zeros beyond r; see `write_kernels.PackTable`."""
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


@triton.jit
def put(weight, values, saved, indices, count, BLOCK: tl.constexpr):
    """weight[indices] += values in fp32, rounded once; saved = the old entries; see `write_kernels.SupportWrite`."""
    entry = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = entry < count
    place = weight + tl.load(indices + entry, mask=mask, other=0).to(tl.int64)
    before = tl.load(place, mask=mask, other=0.0)
    tl.store(saved + entry, before, mask=mask)
    value = before.to(tl.float32) + tl.load(values + entry, mask=mask, other=0.0).to(tl.float32)
    tl.store(place, value.to(weight.dtype.element_ty), mask=mask)


@triton.jit
def take_back(weight, saved, indices, count, BLOCK: tl.constexpr):
    """weight[indices] = saved."""
    entry = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = entry < count
    place = weight + tl.load(indices + entry, mask=mask, other=0).to(tl.int64)
    tl.store(place, tl.load(saved + entry, mask=mask, other=0.0), mask=mask)


@triton.jit(do_not_specialize=["rank"])
def pack_pair(left, right, left_copy, right_copy, c, b, rank, scale, blocks, RANK: tl.constexpr, BLOCK: tl.constexpr):
    """Packed copies of L and R of one layer; see `write_kernels.PackPair`. The first `blocks` programs copy L."""
    block = tl.program_id(0)
    r = tl.arange(0, RANK)[:, None].to(tl.int64)
    kind = left_copy.dtype.element_ty
    if block < blocks:
        n = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)[None, :]
        tile = tl.load(left + n * rank + r, mask=(r < rank) & (n < c), other=0.0)
        tl.store(left_copy + r * c + n, (tile.to(tl.float32) * scale).to(kind), mask=n < c)
    else:
        n = (block - blocks).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)[None, :]
        tile = tl.load(right + r * b + n, mask=(r < rank) & (n < b), other=0.0)
        tl.store(right_copy + r * b + n, tile.to(kind), mask=n < b)
