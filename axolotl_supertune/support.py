"""Which entries of a layer the sparse part trains (paper, eq. psi_def): scores and a count in, sorted indices out.

A support is a 1-D tensor of flat row-major indices i·b + j into W of shape (c, b), strictly increasing, int32 where
c·b allows it. Among equal scores the lower flat index wins, on every device: bf16 weights tie by the hundreds at the
threshold, and a support that depended on the order of a parallel sort could not be reproduced.
"""

import hashlib

import numpy
import torch
from torch import Tensor

from .budget import hybrid_split

SPARSE_DIRECTIONS = ("bottom", "top", "hybrid", "random")


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
    flat = scores.reshape(-1)
    _check_count(count, flat.numel())
    if direction == "bottom":
        chosen = _smallest(flat, count)
    elif direction == "top":
        chosen = _smallest(-flat, count)
    elif direction == "hybrid":
        k_top, k_bottom = hybrid_split(count, hybrid_beta)
        chosen = _smallest(-flat, k_top)
        # What the top took is out of the bottom's reach, so the two stay disjoint even where every score ties.
        chosen |= _smallest(flat.masked_fill(chosen, torch.inf), k_bottom)
    else:
        raise ValueError(f"sparse_direction={direction!r} is not one of {', '.join(SPARSE_DIRECTIONS)}.")
    return chosen.nonzero().squeeze(1).to(index_dtype(flat.numel()))


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


def _smallest(flat: Tensor, count: int) -> Tensor:
    """Boolean mask of the `count` smallest values; of those equal to the largest one taken, the lowest indices."""
    if count == 0:
        return torch.zeros_like(flat, dtype=torch.bool)
    threshold = flat.kthvalue(count).values
    chosen = flat < threshold
    ties = (flat == threshold).nonzero().squeeze(1)
    chosen[ties[: count - int(chosen.sum())]] = True
    return chosen


def _check_count(count: int, size: int) -> None:
    if not 0 <= count <= size:
        raise ValueError(f"a support of {count:,} entries does not fit a layer of {size:,} weights.")
