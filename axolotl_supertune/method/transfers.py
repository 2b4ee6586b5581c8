"""Copies of tensors between devices."""

from collections.abc import Sequence

import torch
from torch import Tensor


def to_cpu(vectors: Sequence[Tensor]) -> list[Tensor]:
    """Copy 1-D tensors of one dtype to the CPU, with a single transfer per device."""
    copies: dict[int, Tensor] = {}
    for device in {vector.device for vector in vectors}:
        indices = [index for index, vector in enumerate(vectors) if vector.device == device]
        joined = torch.cat([vectors[index] for index in indices]).cpu()
        copies.update(zip(indices, joined.split([vectors[index].numel() for index in indices]), strict=True))
    return [copies[index] for index in range(len(vectors))]
