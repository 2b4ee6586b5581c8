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
    rows, width = shape
    size = rows * width
    _check_count(count, size)
    if direction not in ("bottom", "top", "hybrid"):
        raise ValueError(f"sparse_direction={direction!r} is not one of {', '.join(SPARSE_DIRECTIONS)}.")
    sample = _ordered_bits(score_rows(0, 0))
    if count in (0, size):
        return torch.arange(count, dtype=index_dtype(size), device=sample.device)
    k_top, k_bottom = {"bottom": (0, count), "top": (count, 0)}.get(direction) or hybrid_split(count, hybrid_beta)
    integers = torch.iinfo(sample.dtype)
    step = max(1, (_BLOCK_CPU if sample.is_cpu else _BLOCK) // width)
    starts = range(0, rows, step)

    def ascending() -> Iterator[tuple[int, Tensor]]:
        for start in starts:
            yield start * width, _ordered_bits(score_rows(start, min(start + step, rows)))

    def descending() -> Iterator[tuple[int, Tensor]]:
        for offset, keys in ascending():
            yield offset, keys.bitwise_not_()

    if not k_top:
        return _smallest(ascending, integers.bits, size, k_bottom)
    top = _smallest(descending, integers.bits, size, k_top)
    if not k_bottom:
        return top

    # What the top took is out of the bottom's reach, so the two stay disjoint even where every score ties.
    bounds = torch.tensor([start * width for start in starts[1:]], dtype=top.dtype, device=top.device)
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
    digest = hashlib.sha256(layer.encode()).digest()
    generator = numpy.random.default_rng([seed, int.from_bytes(digest[:8], "little")])
    drawn = numpy.sort(generator.choice(size, size=count, replace=False, shuffle=False))
    return torch.from_numpy(drawn).to(index_dtype(size))


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
