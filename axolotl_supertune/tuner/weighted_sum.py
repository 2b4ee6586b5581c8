"""A weighted sum of adapters as a new adapter: the tensors of each layer, and the config."""

import copy
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..ops import LowRank, Sparse
from .config import SupraConfig, exact_targets

COMBINATION_TYPES = ("cat", "linear")


class Combined(NamedTuple):
    """The tensors of a combined adapter in one layer: Σ w·M⊙U on the union of the supports, and γ·L·R with γ = 1.

    Attributes:
        indices, values: the union of the supports (s,) and Σ w·U on it (s,), or None without sparse parts.
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
        sparse, low_rank: (w, part) of the adapters that have such a part in this layer.
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


def combine_layers(layers: Iterable[Any], weights: Mapping[str, float], combination_type: str) -> dict[str, Combined]:
    """`combine` in all layers, by layer name; layers in which none of the adapters has a part are left out.

    Args:
        layers: `SupraLayer`s.
        weights: adapter name → w.
        combination_type: as for `combine`.
    """
    combined = {}
    for layer in layers:
        sparse = [(weights[name], layer.sparse_parts([name])[0]) for name in weights if name in layer.supra_values]
        low_rank = [(weights[name], layer.low_rank_parts([name])[0]) for name in weights if name in layer.supra_L]
        if sparse or low_rank:
            combined[layer.layer_name] = combine(sparse, low_rank, combination_type, layer.layer_name)
    return combined


def combined_config(
    parts: Mapping[str, SupraConfig],
    weights: Mapping[str, float],
    combination_type: str,
    combined: Mapping[str, Combined],
    modules: Sequence[str],
) -> SupraConfig:
    """The config of a combined adapter. It stores the rank and sparse count of each layer; γ = 1 at the largest rank.

    Args:
        parts: the configs of the adapters, by name.
        weights: adapter name → w.
        combination_type: as for `combine`.
        combined: the tensors, by layer name.
        modules: names of all modules of the base model.
    """
    first = next(iter(parts.values()))
    config = copy.copy(first)
    targets = exact_targets(combined, modules)
    config.target_modules = targets if isinstance(targets, str) else set(targets)
    config.exclude_modules = None
    config.layers_to_transform = config.layers_pattern = None
    config.support, config.activation_norms, config.calibration = "saved", None, None
    config.sparse_counts = config.gradient = None
    config.values_dtype = "fp32"  # the dtype of one part would round the sum
    config.lora_alpha = max((layer.rank for layer in combined.values()), default=0) or first.lora_alpha
    config.combination = {
        "type": combination_type,
        "weights": dict(weights),
        "parts": {name: part.as_part() for name, part in parts.items()},
        "layers": {name: [layer.rank, layer.sparse_count] for name, layer in combined.items()},
    }
    return config


def check_combination(combination_type: str, **is_given: bool) -> None:
    """Raise ValueError for an unknown type, or if an argument of LoRA's other types is given.

    Args:
        combination_type: `cat` or `linear`.
        is_given: name of an argument → whether it differs from its default.
    """
    if combination_type not in COMBINATION_TYPES:
        raise ValueError(
            f"combination_type={combination_type!r} is none of {', '.join(COMBINATION_TYPES)}: svd, ties, dare and "
            "magnitude_prune are about low-rank parts, or change the support. 'cat' is exact."
        )
    for name, given in is_given.items():
        if given:
            raise ValueError(f"{name} has no effect with combination_type={combination_type!r}: drop it.")


def finite_numbers(weights: Any) -> list[float]:
    """Weights as Python floats, which JSON can store; ValueError unless all are finite numbers."""
    try:
        numbers = [float(weight) for weight in weights if not isinstance(weight, (str, bytes))]
    except (TypeError, ValueError, RuntimeError):
        numbers = []
    if len(numbers) < len(weights) or not all(map(math.isfinite, numbers)):
        raise ValueError(f"weights={weights} are not all finite numbers.")
    return numbers
