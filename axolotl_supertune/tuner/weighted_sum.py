"""A weighted sum of adapters of one layer, as the tensors of a new adapter."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..ops import LowRank, Sparse

COMBINATION_TYPES = ("cat", "linear")


class Combined(NamedTuple):
    """What a combined adapter holds in one layer: Σ w·M⊙U on the union of the supports, and γ·L·R with γ = 1.

    Attributes:
        indices, values: the union (s,) and Σ w·U on it, or None without sparse parts.
        L, R: (c, r), (r, b), or None without low-rank parts.
    """

    indices: Tensor | None
    values: Tensor | None
    L: Tensor | None
    R: Tensor | None

    @property
    def rank(self) -> int:
        """r."""
        return 0 if self.R is None else self.R.shape[0]

    @property
    def sparse_count(self) -> int:
        """s."""
        return 0 if self.indices is None else self.indices.numel()


def combine(
    sparse: Sequence[tuple[float, Sparse]], low_rank: Sequence[tuple[float, LowRank]], combination_type: str, layer: str
) -> Combined:
    """Σ w·(M⊙U + γ·L·R) of one layer.

    The sparse sum is exact with either type. `cat` is exact in the low-rank part too: [w₁γ₁L₁ w₂γ₂L₂ …]·[R₁; R₂; …],
    whose rank is the sum of the ranks. `linear` keeps the rank, as LoRA's does: (Σ √|wγ|·L)·(Σ ±√|wγ|·R), with products
    of one adapter's L and another's R.

    Args:
        sparse, low_rank: (w, part) of the adapters that have one here.
        combination_type: `cat` or `linear`.
        layer: the layer's name, for messages.

    Raises:
        ValueError: `linear` of different ranks.
    """
    indices = values = L = R = None
    if sparse:
        indices = torch.cat([part.indices for _, part in sparse]).unique()  # sorted
        values = torch.zeros(indices.shape, dtype=sparse[0][1].values.dtype, device=indices.device)
        for weight, part in sparse:
            values[torch.searchsorted(indices, part.indices)] += weight * part.values.detach()
    if low_rank and combination_type == "cat":
        L = torch.cat([weight * part.scaling * part.L.detach() for weight, part in low_rank], dim=1)
        R = torch.cat([part.R.detach() for _, part in low_rank])
    elif low_rank:
        ranks = [part.R.shape[0] for _, part in low_rank]
        if len(set(ranks)) > 1:
            raise ValueError(
                f"{layer}: combination_type='linear' adds low-rank parts of one rank, these have {ranks}; use 'cat'."
            )
        shares = [weight * part.scaling for weight, part in low_rank]
        roots = [math.sqrt(abs(share)) for share in shares]
        signed = [math.copysign(root, share) for root, share in zip(roots, shares, strict=True)]
        L = torch.stack([root * part.L.detach() for root, (_, part) in zip(roots, low_rank, strict=True)]).sum(0)
        R = torch.stack([root * part.R.detach() for root, (_, part) in zip(signed, low_rank, strict=True)]).sum(0)
    return Combined(indices, values, L, R)
