"""Order in which the sampled product walks over a support: chunks of entries that share a row or a column.

`kernels.SampledProducts` computes dU = M⊙(dyᵀ·x) with one program per chunk. A chunk reads the operand of the shared
feature once, and gathers one feature of the other operand per entry.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..method.sizes import ENTRIES_PER_CHUNK, samples_by_row


class SamplingPlan(NamedTuple):
    """A support, cut into chunks of at most `ENTRIES_PER_CHUNK` entries that share an output or an input feature.

    Attributes:
        indices: (s,) the support: sorted flat indices into (c, b).
        order: (s,) int32, the permutation that sorts the support by input feature; None if `by_row`.
        owner: (chunks,) int32, the feature that the entries of a chunk share.
        start: (chunks + 1,) int32; chunk k is entries start[k]:start[k + 1] in that order.
        by_row: whether chunks share an output feature, not an input feature.
        shape: (c, b).
    """

    indices: Tensor
    order: Tensor | None
    owner: Tensor
    start: Tensor
    by_row: bool
    shape: tuple[int, int]


def make_sampling_plan(indices: Tensor, shape: tuple[int, int]) -> SamplingPlan:
    """Plan of a support of a (c, b) layer. Waits for the device once."""
    c, b = shape
    by_row = samples_by_row(c, b)
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
    chunks = (counts + ENTRIES_PER_CHUNK - 1) // ENTRIES_PER_CHUNK
    owner = torch.repeat_interleave(torch.arange(width, device=flat.device), chunks)
    first = chunks.cumsum(0) - chunks
    chunk_of_owner = torch.arange(owner.numel(), device=flat.device) - first[owner]
    start = (ends - counts)[owner] + chunk_of_owner * ENTRIES_PER_CHUNK
    start = torch.cat([start, torch.tensor([flat.numel()], device=flat.device)])
    return SamplingPlan(
        indices, None if order is None else order.int(), owner.int(), start.int(), by_row=by_row, shape=(c, b)
    )


def few_columns(plans: Sequence[SamplingPlan]) -> tuple[Tensor | None, list[SamplingPlan]]:
    """The input features (n,) that supports of layers of one input touch, and their plans with b cut to these n.

    Returns None and the plans as they are if that would leave out less than half of the features.
    """
    width = plans[0].shape[1]
    columns = torch.unique(torch.cat([plan.indices.long() % width for plan in plans]))
    count = columns.numel()
    if count < 2 or 2 * count > width:
        return None, list(plans)
    position = torch.zeros(width, dtype=torch.int64, device=columns.device)
    position[columns] = torch.arange(count, device=columns.device)
    compact = []
    for plan in plans:
        flat = plan.indices.long()
        indices = (flat // width * count + position[flat % width]).to(plan.indices.dtype)
        compact.append(make_sampling_plan(indices, (plan.shape[0], count)))
    return columns, compact
