"""Which entries of a layer the sparse part trains (paper, eq. psi_def): scores and a count in, sorted indices out.

A support is a 1-D tensor of flat row-major indices i·b + j into W of shape (c, b), strictly increasing, int32 where
c·b allows it. Among equal scores the lower flat index wins, on every device: bf16 weights tie by the hundreds at the
threshold, and a support that depended on the order of a parallel sort could not be reproduced.

The count-th smallest score is found by a radix select: floats order as their bit patterns do, so a histogram of the
leading bits names the range that holds it, and the next one looks into that range alone. Scores are asked for in blocks
of rows and never held for the whole layer.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence

import numpy
import torch
from torch import Tensor

from .budget import hybrid_split

SUPPORT_SCOPES = ("layer", "row")
SPARSE_DIRECTIONS = ("bottom", "top", "hybrid", "random")

# Entries of one block of rows, whose temporaries take up to 24 bytes an entry: below 200 MiB on a GPU, where smaller
# blocks would be bound by their launches; on a CPU they stay in reach of the cache, three times faster.
_BLOCK, _BLOCK_CPU = 2**23, 2**20
# A histogram of 2048 int64 counts fits a GPU's shared memory several times over; three of them read 32 bits.
_DIGIT = 11
# So few keys are ordered at once instead of by another histogram.
_FEW = 2**18

ScoreRows = Callable[[int, int], Tensor]
"""(start, stop) → the scores of these rows, (stop − start, b)."""
_Blocks = Callable[[], Iterator[tuple[int, Tensor]]]


def index_dtype(size: int) -> torch.dtype:
    """int32 while every flat index below `size` = c·b fits, int64 beyond."""
    return torch.int32 if size <= 2**31 else torch.int64


def select_support(scores: Tensor, count: int, direction: str, *, hybrid_beta: float = 0.5) -> Tensor:
    """ψ(W, s, ρ): the `count` smallest and/or largest scores of a layer, flattened.

    Args:
        scores: (c, b), finite and ≥ 0.
        count: s, 0 ≤ s ≤ c·b.
        direction: `bottom` (smallest), `top` (largest), or `hybrid` (round(β·s) largest, the rest smallest).
        hybrid_beta: β, only read by `hybrid`.

    Returns:
        (s,) sorted flat indices on the scores' device.

    Raises:
        ValueError: unknown direction, or s out of range.
    """
    table = scores if scores.dim() == 2 else scores.reshape(-1, 1)
    return select_by_rows(lambda start, stop: table[start:stop], table.shape, count, direction, hybrid_beta=hybrid_beta)


def select_by_rows(
    score_rows: ScoreRows, shape: Sequence[int], count: int, direction: str, *, hybrid_beta: float = 0.5
) -> Tensor:
    """`select_support` of a layer whose scores are computed a block of rows at a time.

    Args:
        score_rows: the scores of a range of rows, as `scores.score_rows` makes it; called several times for every row
            and for none (start = stop), and must answer the same each time.
        shape: (c, b).
        count: s, 0 ≤ s ≤ c·b.
        direction: as for `select_support`.
        hybrid_beta: as for `select_support`.

    Returns:
        (s,) sorted flat indices on the scores' device.

    Raises:
        ValueError: unknown direction, or s out of range.
    """
    return _select([(shape, lambda: score_rows)], count, direction, hybrid_beta)


def select_across(
    layers: Sequence[tuple[Sequence[int], Callable[[], ScoreRows]]],
    count: int,
    direction: str,
    *,
    hybrid_beta: float = 0.5,
) -> list[Tensor]:
    """The `count` smallest and/or largest scores of several layers together; of equal ones those of the first layers.

    Args:
        layers: the shape (c, b) of each, and what makes its `score_rows`: called several times, one layer after
            another, so that what it holds need not be there for all.
        count: s of all layers, 0 ≤ s ≤ Σ c·b.
        direction, hybrid_beta: as for `select_support`; the scores of all layers are one set.

    Returns:
        For every layer its sorted flat indices, maybe none, on the scores' device.

    Raises:
        ValueError: unknown direction, or s out of range.
    """
    chosen = _select(layers, count, direction, hybrid_beta)
    sizes = [rows * width for (rows, width), _ in layers]
    bounds = torch.tensor(sizes, dtype=torch.int64).cumsum(0)
    cuts = torch.searchsorted(chosen.cpu(), bounds[:-1].to(chosen.dtype))
    return [
        (mine - (int(end) - size)).to(index_dtype(size))
        for mine, end, size in zip(chosen.tensor_split(cuts), bounds, sizes, strict=True)
    ]


def select_each_row(
    score_rows: ScoreRows, shape: Sequence[int], count: int, direction: str, *, hybrid_beta: float = 0.5
) -> Tensor:
    """`select_by_rows` with the scores compared within a row, and the count spread evenly over the rows.

    The first k rows have ⌊k·s/c⌋ entries together, so that every row has ⌊s/c⌋ or one more, and the longer ones lie
    evenly apart; and of the first n entries ⌊n·k_top/s⌋ are top ones, where a hybrid has both.

    Args, returns and raises: as `select_by_rows`.
    """
    rows, width = shape
    _check_count(count, rows * width)
    k_top, _ = _split(count, direction, hybrid_beta)
    sample = score_rows(0, 0)
    each, top = row_counts(count, rows), torch.zeros(rows, dtype=torch.int64)
    if k_top:
        ends = each.cumsum(0) * k_top // count
        top = ends.diff(prepend=torch.zeros(1, dtype=torch.int64))
    each, top = each.to(sample.device), top.to(sample.device)
    step = max(1, (_BLOCK_CPU if sample.is_cpu else _BLOCK) // width)
    chosen = []
    for start in range(0, rows, step):
        stop = min(start + step, rows)
        keys = _ordered_bits(score_rows(start, stop)).view(stop - start, width)
        mask = _first_of_rows(keys.bitwise_not(), top[start:stop])
        if k_top < count:
            keys.masked_fill_(mask, torch.iinfo(keys.dtype).max)
            mask |= _first_of_rows(keys, (each - top)[start:stop])
        chosen.append((mask.view(-1).nonzero().squeeze(1) + start * width).to(index_dtype(rows * width)))
    return torch.cat(chosen)


def row_counts(count: int, rows: int) -> Tensor:
    """How many of `count` entries each of `rows` rows has, (rows,) int64: ⌊(k+1)·s/c⌋ − ⌊k·s/c⌋ for row k."""
    ends = torch.arange(rows + 1, dtype=torch.int64) * count // rows
    return ends.diff()


def _first_of_rows(keys: Tensor, counts: Tensor) -> Tensor:
    """A mask of the `counts` smallest keys of every row; of equal ones the first."""
    mask = torch.zeros_like(keys, dtype=torch.bool)
    most = int(counts.max()) if counts.numel() else 0
    if not most:
        return mask
    order = keys.sort(dim=1, stable=True).indices[:, :most]
    taken = torch.arange(most, device=keys.device) < counts[:, None]
    return mask.scatter_(1, order, taken)


def _split(count: int, direction: str, hybrid_beta: float) -> tuple[int, int]:
    """(k_top, k_bottom)."""
    if direction not in ("bottom", "top", "hybrid"):
        raise ValueError(f"sparse_direction={direction!r} is not one of {', '.join(SPARSE_DIRECTIONS)}.")
    return {"bottom": (0, count), "top": (count, 0)}.get(direction) or hybrid_split(count, hybrid_beta)


def _select(
    layers: Sequence[tuple[Sequence[int], Callable[[], ScoreRows]]], count: int, direction: str, hybrid_beta: float
) -> Tensor:
    """Sorted indices into the layers' flattened scores, one layer after another."""
    size = sum(rows * width for (rows, width), _ in layers)
    _check_count(count, size)
    k_top, k_bottom = _split(count, direction, hybrid_beta)
    sample = _ordered_bits(layers[0][1]()(0, 0))
    if count in (0, size):
        return torch.arange(count, dtype=index_dtype(size), device=sample.device)
    integers = torch.iinfo(sample.dtype)
    block = _BLOCK_CPU if sample.is_cpu else _BLOCK
    parts = [(rows, width, max(1, block // width)) for (rows, width), _ in layers]
    starts = []
    offset = 0
    for rows, width, step in parts:
        starts += [offset + start * width for start in range(0, rows, step)]
        offset += rows * width

    def ascending() -> Iterator[tuple[int, Tensor]]:
        at = iter(starts)
        for (rows, _, step), (_, make) in zip(parts, layers, strict=True):
            score_rows = make()
            for start in range(0, rows, step):
                yield next(at), _ordered_bits(score_rows(start, min(start + step, rows)))
            del score_rows  # before the next one is made

    def descending() -> Iterator[tuple[int, Tensor]]:
        for offset, keys in ascending():
            yield offset, keys.bitwise_not_()

    if not k_top:
        return _smallest(ascending, integers.bits, size, k_bottom)
    top = _smallest(descending, integers.bits, size, k_top)
    if not k_bottom:
        return top

    # What the top took is out of the bottom's reach, so the two stay disjoint even where every score ties.
    bounds = torch.tensor(starts[1:], dtype=top.dtype, device=top.device)
    taken = top.tensor_split(torch.searchsorted(top, bounds).cpu())

    def untaken() -> Iterator[tuple[int, Tensor]]:
        for (offset, keys), mine in zip(ascending(), taken, strict=True):
            yield offset, keys.index_fill_(0, mine.long() - offset, integers.max)

    return torch.cat([top, _smallest(untaken, integers.bits, size, k_bottom)]).sort().values


def random_support(size: int, count: int, *, seed: int, layer: str) -> Tensor:
    """`count` of `size` flat indices, uniformly without replacement.

    Drawn on the CPU from (seed, layer name): the same whatever the device, and whatever other layers are adapted.

    Returns:
        (count,) sorted flat indices on the CPU.
    """
    _check_count(count, size)
    drawn = numpy.sort(_generator(seed, layer).choice(size, size=count, replace=False, shuffle=False))
    return torch.from_numpy(drawn).to(index_dtype(size))


def random_rows_support(shape: Sequence[int], count: int, *, seed: int, layer: str) -> Tensor:
    """`random_support` spread over the rows as `select_each_row` spreads it."""
    rows, width = shape
    _check_count(count, rows * width)
    generator = _generator(seed, layer)
    drawn = [
        numpy.sort(generator.choice(width, size=each, replace=False, shuffle=False)) + row * width
        for row, each in enumerate(row_counts(count, rows).tolist())
        if each
    ]
    found = numpy.concatenate(drawn) if drawn else numpy.empty(0, dtype=numpy.int64)
    return torch.from_numpy(found).to(index_dtype(rows * width))


def _generator(seed: int, layer: str) -> numpy.random.Generator:
    digest = hashlib.sha256(layer.encode()).digest()
    return numpy.random.default_rng([seed, int.from_bytes(digest[:8], "little")])


def _ordered_bits(scores: Tensor) -> Tensor:
    """Integers that order as the scores do, equal where these are: a new flat int32 tensor, int64 beyond fp32.

    A float's bits, read as an integer, order as the floats ≥ 0; of negative ones all bits but the sign are inverted.
    """
    narrow = scores.dtype in (torch.float16, torch.bfloat16, torch.float32)
    floats = scores.reshape(-1).to(torch.float32 if narrow else torch.float64)
    keys = floats.add(0.0).view(torch.int32 if narrow else torch.int64)  # −0 + 0 is the 0 that it equals
    integers = torch.iinfo(keys.dtype)
    return keys.bitwise_xor_((keys >> (integers.bits - 1)).bitwise_and_(integers.max))


def _smallest(blocks: _Blocks, bits: int, size: int, count: int) -> Tensor:
    """Sorted indices of the `count` ≥ 1 smallest keys; of those equal to the largest one taken, the lowest indices."""
    threshold, kept = _threshold(blocks, bits, size, count)
    left: Tensor | int = kept  # counted down on the device: of this loop, the host waits for `nonzero` alone
    chosen = []
    for offset, keys in blocks():
        ties = keys == threshold
        passed = ties.cumsum(0, dtype=torch.int32)
        mask = (ties & (passed <= left)) | (keys < threshold)
        left = left - passed[-1]
        chosen.append((mask.nonzero().squeeze(1) + offset).to(index_dtype(size)))
    return torch.cat(chosen)


def _threshold(blocks: _Blocks, bits: int, size: int, rank: int) -> tuple[int, int]:
    """The rank-th smallest key, rank ≥ 1, and how many of the keys equal to it are among the `rank` smallest."""
    # The key sought is the rank-th smallest of `inside` keys, those with key >> shift == prefix.
    prefix: int | None = None
    shift, inside = bits, size
    while inside > _FEW and shift:
        digit = min(_DIGIT, shift)
        # The first digit holds the sign, so it starts below zero.
        lowest = -(1 << (digit - 1)) if prefix is None else prefix << digit
        counts = [
            torch.bincount((_within(keys, prefix, shift) >> (shift - digit)) - lowest, minlength=1 << digit)
            for _, keys in blocks()
        ]
        passed = torch.stack(counts).sum(0).cumsum(0).cpu()
        at = int(torch.searchsorted(passed, rank))
        below = int(passed[at - 1]) if at else 0
        prefix, shift = lowest + at, shift - digit
        rank, inside = rank - below, int(passed[at]) - below
    if prefix is not None and not shift:
        return prefix, rank
    few = torch.cat([_within(keys, prefix, shift) for _, keys in blocks()])
    threshold = few.topk(rank, largest=False, sorted=False).values.max()
    return int(threshold), rank - int((few < threshold).sum())


def _within(keys: Tensor, prefix: int | None, shift: int) -> Tensor:
    return keys if prefix is None else keys[(keys >> shift) == prefix]


def _check_count(count: int, size: int) -> None:
    if not 0 <= count <= size:
        raise ValueError(f"a support of {count:,} entries does not fit a layer of {size:,} weights.")
