"""Selection of supports: the entries of a layer that the sparse part trains (paper, eq. psi_def).

Scores and a count go in, sorted indices come out.

A support is a 1-D tensor of flat row-major indices i·b + j into W of shape (c, b), strictly increasing, int32 where
c·b allows it. Among equal scores the lowest flat index wins, on every device. Hundreds of bf16 weights tie at the
threshold; if the order of a parallel sort decided, a support could not be reproduced.

The count-th smallest score is found by radix select. Scores become integer *keys* (`_ordered_bits`) that sort as the
scores do: a histogram of the leading bits tells which range holds the threshold, and the next histogram covers that
range only. Scores are computed in blocks of rows, so that no tensor of the layer's size is allocated.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence

import numpy
import torch
from torch import Tensor

from .budget import DEFAULT_BETA, hybrid_split
from .scores import RowScores
from .sizes import fits_int32

SUPPORT_SCOPES = ("layer", "row")
_SCORED_DIRECTIONS = ("bottom", "top", "hybrid")
SPARSE_DIRECTIONS = (*_SCORED_DIRECTIONS, "random")

# Entries per block of rows, with temporaries of up to 24 bytes per entry. On a GPU that is below 200 MiB, and smaller
# blocks would be launch-bound; on a CPU, blocks of this size stay in the cache, which is three times faster.
_BLOCK, _BLOCK_CPU = 2**23, 2**20
# Bits per histogram: 2048 int64 counts fit a GPU's shared memory several times over; three histograms cover 32 bits.
_DIGIT = 11
# When at most this many keys are left, they are sorted instead of counted in another histogram.
_FEW = 2**18

LayerScores = tuple[Sequence[int], Callable[[], RowScores]]
"""A layer's shape (c, b), and a function that returns its scores, a block of rows at a time."""

_Blocks = Callable[[], Iterator[tuple[int, Tensor]]]


def index_dtype(size: int) -> torch.dtype:
    """The dtype of flat indices into a layer of `size` = c·b weights: int32 where they fit, else int64."""
    return torch.int32 if fits_int32(size) else torch.int64


def select_support(scores: Tensor, count: int, direction: str, *, hybrid_beta: float = DEFAULT_BETA) -> Tensor:
    """ψ(W, s, ρ): the flat indices of the `count` smallest and/or largest scores of a layer.

    Args:
        scores: (c, b), finite and ≥ 0.
        count: s, 0 ≤ s ≤ c·b.
        direction: `bottom` (smallest), `top` (largest), or `hybrid` (round(β·s) largest, the rest smallest).
        hybrid_beta: β, only used by `hybrid`.

    Returns:
        (s,) sorted flat indices on the scores' device.

    Raises:
        ValueError: unknown direction, or s out of range.
    """
    table = scores if scores.dim() == 2 else scores.reshape(-1, 1)
    return select_from_blocks(
        lambda start, stop: table[start:stop], table.shape, count, direction, hybrid_beta=hybrid_beta
    )


def select_from_blocks(
    score_rows: RowScores, shape: Sequence[int], count: int, direction: str, *, hybrid_beta: float = DEFAULT_BETA
) -> Tensor:
    """`select_support` for scores that are computed a block of rows at a time.

    Args:
        score_rows: returns the scores of a range of rows, see `scores.RowScores`. Called several times for every row,
            and with an empty range (start = stop); must return the same values every time.
        shape: (c, b).
        count: s, 0 ≤ s ≤ c·b.
        direction: as for `select_support`.
        hybrid_beta: as for `select_support`.

    Returns:
        (s,) sorted flat indices on the scores' device.

    Raises:
        ValueError: unknown direction, or s out of range.
    """
    return _select_concatenated([(shape, lambda: score_rows)], count, direction, hybrid_beta)


def select_across(
    layers: Sequence[LayerScores],
    count: int,
    direction: str,
    *,
    hybrid_beta: float = DEFAULT_BETA,
) -> list[Tensor]:
    """The `count` smallest and/or largest scores of several layers together; ties go to the earlier layers.

    Args:
        layers: shape and scores of each. The functions are called several times, for one layer after another, so that
            only one layer's weight must be in memory.
        count: s of all layers together, 0 ≤ s ≤ Σ c·b.
        direction, hybrid_beta: as for `select_support`, over the scores of all layers.

    Returns:
        Per layer its sorted flat indices, possibly empty, on the scores' device.

    Raises:
        ValueError: unknown direction, or s out of range.
    """
    chosen = _select_concatenated(layers, count, direction, hybrid_beta)
    sizes = [rows * width for (rows, width), _ in layers]
    bounds = torch.tensor(sizes, dtype=torch.int64).cumsum(0)
    cuts = torch.searchsorted(chosen.cpu(), bounds[:-1].to(chosen.dtype))
    return [
        (indices - (int(end) - size)).to(index_dtype(size))
        for indices, end, size in zip(chosen.tensor_split(cuts), bounds, sizes, strict=True)
    ]


def select_within_rows(
    score_rows: RowScores, shape: Sequence[int], count: int, direction: str, *, hybrid_beta: float = DEFAULT_BETA
) -> Tensor:
    """The support with `support_scope: row`: each row has its share of the count; scores compete only within a row.

    The first k rows have ⌊k·s/c⌋ entries together, so each row has ⌊s/c⌋ or one more, and the longer rows are evenly
    spaced. For `hybrid`, the top entries are spread the same way: the rows up to any row that hold n entries together
    have ⌊n·k_top/s⌋ top ones.

    Args, returns and raises: as `select_from_blocks`.
    """
    rows, width = shape
    _check_count(count, rows * width)
    k_top, _ = _split(count, direction, hybrid_beta)
    sample = score_rows(0, 0)
    counts, top = row_counts(count, rows), torch.zeros(rows, dtype=torch.int64)
    if k_top:
        ends = counts.cumsum(0) * k_top // count
        top = ends.diff(prepend=torch.zeros(1, dtype=torch.int64))
    counts, top = counts.to(sample.device), top.to(sample.device)
    step = max(1, (_BLOCK_CPU if sample.is_cpu else _BLOCK) // width)
    chosen = []
    for start in range(0, rows, step):
        stop = min(start + step, rows)
        keys = _ordered_bits(score_rows(start, stop)).view(stop - start, width)
        mask = _smallest_in_each_row(keys.bitwise_not(), top[start:stop])
        if k_top < count:
            keys.masked_fill_(mask, torch.iinfo(keys.dtype).max)
            mask |= _smallest_in_each_row(keys, (counts - top)[start:stop])
        chosen.append((mask.view(-1).nonzero().squeeze(1) + start * width).to(index_dtype(rows * width)))
    return torch.cat(chosen)


def row_counts(count: int, rows: int) -> Tensor:
    """Entries in each row when `count` entries are spread over `rows` rows, (rows,) int64: ⌊(k+1)·s/c⌋ − ⌊k·s/c⌋."""
    ends = torch.arange(rows + 1, dtype=torch.int64) * count // rows
    return ends.diff()


def _smallest_in_each_row(keys: Tensor, counts: Tensor) -> Tensor:
    """Mask of the `counts[k]` smallest keys of each row k; ties go to the lower column."""
    mask = torch.zeros_like(keys, dtype=torch.bool)
    most = int(counts.max()) if counts.numel() else 0
    if not most:
        return mask
    order = keys.sort(dim=1, stable=True).indices[:, :most]
    taken = torch.arange(most, device=keys.device) < counts[:, None]
    return mask.scatter_(1, order, taken)


def _split(count: int, direction: str, hybrid_beta: float) -> tuple[int, int]:
    """(k_top, k_bottom) of a direction; ValueError if it is `random`, which takes no scores, or unknown."""
    if direction == "random":
        raise ValueError("direction='random' needs no scores: call random_support.")
    if direction not in _SCORED_DIRECTIONS:
        raise ValueError(f"direction={direction!r} is not one of {', '.join(_SCORED_DIRECTIONS)}.")
    return {"bottom": (0, count), "top": (count, 0)}.get(direction) or hybrid_split(count, hybrid_beta)


def _select_concatenated(layers: Sequence[LayerScores], count: int, direction: str, hybrid_beta: float) -> Tensor:
    """Sorted indices into the concatenation of the layers' flattened scores."""
    size = sum(rows * width for (rows, width), _ in layers)
    _check_count(count, size)
    k_top, k_bottom = _split(count, direction, hybrid_beta)
    # An empty block of scores, for their device and dtype.
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
            del score_rows  # frees this layer's weight before the next one is made

    def descending() -> Iterator[tuple[int, Tensor]]:
        for offset, keys in ascending():
            yield offset, keys.bitwise_not_()

    if not k_top:
        return _smallest(ascending, integers.bits, size, k_bottom)
    top = _smallest(descending, integers.bits, size, k_top)
    if not k_bottom:
        return top

    # Entries of the top are excluded from the bottom, so that the two are disjoint even where all scores tie.
    bounds = torch.tensor(starts[1:], dtype=top.dtype, device=top.device)
    taken = top.tensor_split(torch.searchsorted(top, bounds).cpu())

    def untaken() -> Iterator[tuple[int, Tensor]]:
        for (offset, keys), indices in zip(ascending(), taken, strict=True):
            yield offset, keys.index_fill_(0, indices.long() - offset, integers.max)

    return torch.cat([top, _smallest(untaken, integers.bits, size, k_bottom)]).sort().values


def random_support(size: int, count: int, *, seed: int, layer: str) -> Tensor:
    """`count` of `size` flat indices, drawn uniformly without replacement.

    Drawn on the CPU from (seed, layer name), so that neither the device nor the other target layers matter.

    Returns:
        (count,) sorted flat indices on the CPU.
    """
    _check_count(count, size)
    drawn = numpy.sort(_generator(seed, layer).choice(size, size=count, replace=False, shuffle=False))
    return torch.from_numpy(drawn).to(index_dtype(size))


def random_rows_support(shape: Sequence[int], count: int, *, seed: int, layer: str) -> Tensor:
    """`random_support` with the entries spread evenly over the rows, as in `select_within_rows`."""
    rows, width = shape
    _check_count(count, rows * width)
    generator = _generator(seed, layer)
    drawn = [
        numpy.sort(generator.choice(width, size=in_row, replace=False, shuffle=False)) + row * width
        for row, in_row in enumerate(row_counts(count, rows).tolist())
        if in_row
    ]
    indices = numpy.concatenate(drawn) if drawn else numpy.empty(0, dtype=numpy.int64)
    return torch.from_numpy(indices).to(index_dtype(rows * width))


def _generator(seed: int, layer: str) -> numpy.random.Generator:
    digest = hashlib.sha256(layer.encode()).digest()
    return numpy.random.default_rng([seed, int.from_bytes(digest[:8], "little")])


def _ordered_bits(scores: Tensor) -> Tensor:
    """Integer keys with the order of the scores: a new flat tensor, int32 for scores up to fp32, else int64.

    The bits of floats ≥ 0, read as integers, sort like the floats; of negative ones all bits but the sign are inverted.
    """
    narrow = scores.dtype in (torch.float16, torch.bfloat16, torch.float32)
    floats = scores.reshape(-1).to(torch.float32 if narrow else torch.float64)
    keys = floats.add(0.0).view(torch.int32 if narrow else torch.int64)  # −0 + 0 is 0: equal scores get equal keys
    integers = torch.iinfo(keys.dtype)
    return keys.bitwise_xor_((keys >> (integers.bits - 1)).bitwise_and_(integers.max))


def _smallest(blocks: _Blocks, bits: int, size: int, count: int) -> Tensor:
    """Sorted indices of the `count` ≥ 1 smallest keys; ties at the threshold go to the lowest indices."""
    threshold, tied = _threshold(blocks, bits, size, count)
    left: Tensor | int = tied  # a device counter, so that the host only waits for `nonzero` in this loop
    chosen = []
    for offset, keys in blocks():
        ties = keys == threshold
        ties_so_far = ties.cumsum(0, dtype=torch.int32)
        mask = (ties & (ties_so_far <= left)) | (keys < threshold)
        left = left - ties_so_far[-1]
        chosen.append((mask.nonzero().squeeze(1) + offset).to(index_dtype(size)))
    return torch.cat(chosen)


def _threshold(blocks: _Blocks, bits: int, size: int, rank: int) -> tuple[int, int]:
    """The rank-th smallest key (rank ≥ 1), and how many of its ties are among the `rank` smallest keys."""
    # Invariant: the threshold is the rank-th smallest of the `inside` keys for which key >> shift == prefix.
    prefix: int | None = None
    shift, inside = bits, size
    while inside > _FEW and shift:
        digit = min(_DIGIT, shift)
        # The first digit contains the sign bit, so it can be negative.
        lowest = -(1 << (digit - 1)) if prefix is None else prefix << digit
        counts = [
            torch.bincount((_keys_with_prefix(keys, prefix, shift) >> (shift - digit)) - lowest, minlength=1 << digit)
            for _, keys in blocks()
        ]
        cumulative = torch.stack(counts).sum(0).cumsum(0).cpu()
        at = int(torch.searchsorted(cumulative, rank))
        below = int(cumulative[at - 1]) if at else 0
        prefix, shift = lowest + at, shift - digit
        rank, inside = rank - below, int(cumulative[at]) - below
    if prefix is not None and not shift:
        return prefix, rank
    few = torch.cat([_keys_with_prefix(keys, prefix, shift) for _, keys in blocks()])
    threshold = few.topk(rank, largest=False, sorted=False).values.max()
    return int(threshold), rank - int((few < threshold).sum())


def _keys_with_prefix(keys: Tensor, prefix: int | None, shift: int) -> Tensor:
    """The keys whose leading bits are `prefix`; all of them for None."""
    return keys if prefix is None else keys[(keys >> shift) == prefix]


def _check_count(count: int, size: int) -> None:
    if not 0 <= count <= size:
        raise ValueError(f"a support of {count:,} entries does not fit {size:,} weights.")
