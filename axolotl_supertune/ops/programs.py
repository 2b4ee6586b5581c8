"""Triton functions of the computing kernels; `kernels` binds and launches them, and says the shapes.

`do_not_specialize` names the arguments that change from call to call, so that one compilation serves every sequence
length. Layer sizes are specialised on, for wide loads. Where up to three layers (PARTS) share a launch, a program finds
its layer by its block number: `end0` is the first block of the second layer, `end1` that of the third.
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["tokens", "blocks", "end0", "end1", "end2"])
def transpose(
    x0, x1, x2, x3, out0, out1, out2, out3, tokens, blocks, width0, width1, width2, width3, end0, end1, end2,
    PARTS: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """out_k (n_k, blocks·64) = x_kᵀ, zeros behind T; see `kernels.Transpose`. Program (block of T, block of all n)."""
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
def sampled_product(
    own0, other0, out0, own1, other1, out1, own2, other2, out2, blocks,
    indices0, order0, owner0, start0, features0, by_row0,
    indices1, order1, owner1, start1, features1, by_row1,
    indices2, order2, owner2, start2, features2, by_row2,
    end0, end1, PARTS: tl.constexpr, ADD: tl.constexpr, BN: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """out[entry] = own[owner] · other[feature] for the entries of a chunk; see `kernels.SampledProducts`.

    `own` is the transposed operand of the side that the chunk's entries share, `other` that of the other side. Program
    (chunk over all parts).
    """
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
    """(BT, BN) bool: the features that dropout keeps; `octet` are the BN / 8 numbers of eight features each.

    A pure function of its arguments, so that backward draws the mask of forward again.
    """
    zero = t[:, None] * 0 + octet[None, :] * 0
    a, b, c, d = tl.philox(seed, zero + t[:, None], zero + octet[None, :], zero + stream, zero, 7)
    words = tl.join(tl.join(a, b), tl.join(c, d))
    halves = tl.reshape(tl.join(words & 0xFFFF, words >> 16), [BT, BN])
    return halves.to(tl.int32) >= threshold


@triton.jit
def _packed_tile(factor, n, width, RANK: tl.constexpr):
    """Columns n of a packed factor, (RANK, len(n)); zeros beyond its width."""
    r = tl.arange(0, RANK)
    return tl.load(factor + r[:, None] * width + n[None, :], mask=n[None, :] < width, other=0.0)


@triton.jit
def _thin(
    tile, total, seed, t, n0, n, width, factor, threshold, stream,
    DROP: tl.constexpr, RANK: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """total + dropout(tile)·factorᵀ: one step over n of `narrow`, without dropout's 1/(1-p)."""
    if DROP:
        kept = _kept(seed, stream, t, n0 // 8 + tl.arange(0, BN // 8), threshold, BT, BN)
        tile = tl.where(kept, tile, tl.zeros_like(tile))
    return tl.dot(tile, tl.trans(_packed_tile(factor, n, width, RANK)), total, input_precision="ieee")


@triton.jit(do_not_specialize=["tokens", "seed", "threshold", "stream"])
def narrow(
    x, out, tokens, seed, factor0, factor1, factor2, width, threshold, stream,
    PARTS: tl.constexpr, DROP: tl.constexpr, RANK: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """out (T, PARTS·RANK) = dropout_k(x)·factor_kᵀ; see `kernels.Narrow`. Program (block of T)."""
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
def narrow_each(
    x0, x1, x2, out, tokens, factor0, factor1, factor2, width0, width1, width2,
    PARTS: tl.constexpr, RANK: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """out (T, PARTS·RANK) = x_k·factor_kᵀ; see `kernels.NarrowEach`. Program (block of T, part)."""
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


@triton.jit(do_not_specialize=["tokens", "end0", "end1"])
def widen(
    inner, out0, out1, out2, tokens, factor0, factor1, factor2, width0, width1, width2, end0, end1,
    PARTS: tl.constexpr, RANK: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """out_k (T, n_k) = inner_k·factor_k; see `kernels.Widen`. Program (block of all n, block of T)."""
    block = tl.program_id(0)
    out, factor, width, begin, part = out0, factor0, width0, 0, 0
    if PARTS > 1 and block >= end0:
        out, factor, width, begin, part = out1, factor1, width1, end0, 1
    if PARTS > 2 and block >= end1:
        out, factor, width, begin, part = out2, factor2, width2, end1, 2
    n = (block - begin) * BN + tl.arange(0, BN)
    t = tl.program_id(1) * BT + tl.arange(0, BT)
    r = tl.arange(0, RANK)
    place = inner + t[:, None].to(tl.int64) * (PARTS * RANK) + part * RANK + r[None, :]
    left = tl.load(place, mask=t[:, None] < tokens, other=0.0)
    result = tl.dot(left, _packed_tile(factor, n, width, RANK), input_precision="ieee")
    to = t[:, None].to(tl.int64) * width + n[None, :]
    tl.store(out + to, result.to(out.dtype.element_ty), mask=(t[:, None] < tokens) & (n[None, :] < width))


@triton.jit
def _outer_part(
    tile, total, passed, left, seed, t, n0, weights, threshold, stream,
    DROP: tl.constexpr, THROUGH: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """One step over tokens of `outer`: total + leftᵀ·dropout(tile), and passed + the masked left·weights."""
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
def outer(
    x, inner, sums, passed_pointer, tokens, span, seed, factor0, factor1, factor2, width, threshold, stream,
    PARTS: tl.constexpr, DROP: tl.constexpr, THROUGH: tl.constexpr,
    RANK: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Per span of tokens innerᵀ·dropout(x), and the gradient of x through the factors; see `kernels.ThinGradients`.

    sums is (spans, PARTS·RANK, b) in fp32. Program (block of b, span).
    """
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


@triton.jit(do_not_specialize=["tokens", "span", "end0", "end1"])
def outer_each(
    x0, x1, x2, inner, sums, tokens, span, width0, width1, width2, end0, end1, start0, start1, start2, columns,
    PARTS: tl.constexpr, RANK: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """sums (spans, RANK, Σ c_k) = inner_kᵀ·x_k per span of tokens, fp32. Program (block of all c, span)."""
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


@triton.jit(do_not_specialize=["splits_dy", "splits_x", "rank0", "rank1", "rank2"])
def reduce(
    sums_dy, sums_x, left0, left1, left2, right0, right1, right2, splits_dy, splits_x,
    width0, width1, width2, start0, start1, start2, rank0, rank1, rank2, scale0, scale1, scale2, columns, features,
    PARTS: tl.constexpr, RANK: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Sum the spans of `outer_each` and `outer` in a fixed order: dL_k (c, r) scaled, and dR_k (r, b).

    Program (block of n, which): `which` < PARTS is a dL, the others are dR.
    """
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
def swiglu(gate, up, out, tokens, width, BLOCK: tl.constexpr):
    """out = silu(gate)·up; see `kernels.Swiglu`."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < tokens.to(tl.int64) * width
    g = tl.load(gate + at, mask=mask, other=0.0).to(tl.float32)
    u = tl.load(up + at, mask=mask, other=0.0).to(tl.float32)
    kind = out.dtype.element_ty
    silu = (g / (1.0 + tl.exp(-g))).to(kind).to(tl.float32)
    tl.store(out + at, (silu * u).to(kind), mask=mask)


@triton.jit(do_not_specialize=["tokens", "blocks"])
def swiglu_backward(
    dh, gate, up, d_gate, d_up, d_gate_t, d_up_t, product_t, tokens, blocks, width,
    TRANSPOSED: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """d_gate and d_up from dh, and if TRANSPOSED their transposed copies and that of silu(gate)·up."""
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
        stored = (n[:, None] < width) & (t[None, :] < padded)
        tl.store(d_gate_t + to, tl.trans(dg), mask=stored)
        tl.store(d_up_t + to, tl.trans(du), mask=stored)
        tl.store(product_t + to, tl.trans((silu * u).to(kind)), mask=stored)


@triton.jit(do_not_specialize=["tokens", "seed", "threshold", "stream"])
def mask(out, tokens, seed, width, threshold, stream, BT: tl.constexpr, BN: tl.constexpr):
    """out (T, n) = the dropout mask; see `kernels.dropout_mask`."""
    t = tl.program_id(0) * BT + tl.arange(0, BT)
    n0 = tl.program_id(1) * BN
    n = n0 + tl.arange(0, BN)
    kept = _kept(seed, stream, t, n0 // 8 + tl.arange(0, BN // 8), threshold, BT, BN)
    at = t[:, None].to(tl.int64) * width + n[None, :]
    tl.store(out + at, kept.to(tl.int8), mask=(t[:, None] < tokens) & (n[None, :] < width))
