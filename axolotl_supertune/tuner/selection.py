"""What an adapter trains in each layer: its budget, and the support that the scores choose."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..engines import sharding
from ..method.budget import LayerBudget, density_budgets, layer_budget
from ..method.scores import SCORES, RowScores, check_weight
from ..method.support import (
    index_dtype,
    random_rows_support,
    random_support,
    select_across,
    select_by_rows,
    select_each_row,
)
from .config import SupraConfig
from .quantization import bnb


def budgets_of(layers: Mapping[str, Any], config: SupraConfig) -> dict[str, LayerBudget]:
    """The budget of every layer; with `budget_scope: global`, until supports are chosen, what each would have alone.

    Args:
        layers: linear layers by name; weights may be on the meta device.
    """
    if config.combination is not None:
        return {name: _combined(layer, config.combination, name) for name, layer in layers.items()}
    if config.budget_scope == "density":
        shapes = {name: (layer.out_features, layer.in_features) for name, layer in layers.items()}
        return density_budgets(shapes, supra_lambda=config.supra_lambda, r0=config.r0)
    budgets = {
        name: layer_budget(
            layer.out_features,
            layer.in_features,
            supra_lambda=config.supra_lambda,
            r0=config.r0,
            sparse_density=config.sparse_density,
            layer=name,
        )
        for name, layer in layers.items()
    }
    if config.sparse_counts is None:
        return budgets
    missing = budgets.keys() - config.sparse_counts.keys()
    if missing:
        raise ValueError(
            f"{min(missing)}: the adapter's scores were compared over other layers: load it on the base model, with "
            "the target modules, that it was trained on."
        )
    return {name: _with_count(budget, config.sparse_counts[name]) for name, budget in budgets.items()}


def supports_of(
    layers: Mapping[str, Any], budgets: dict[str, LayerBudget], config: SupraConfig, weight_dtype: torch.dtype
) -> dict[str, Tensor | None]:
    """The support of every layer, beside its weight, or None where a checkpoint is to bring it or there is none.

    With `budget_scope: global` what each layer got is put into `budgets` and into the config.

    Args:
        layers: linear layers by name.
        weight_dtype: of the dequantized weight of a layer that does not know it.
    """
    weights: dict[str, Callable[[], Tensor]] = {
        name: partial(_weight, layer, weight_dtype, config) for name, layer in layers.items()
    }
    if config.compares_layers and config.support == "select":
        return _across(layers, weights, budgets, config)
    return {name: _alone(layers[name], weights[name], budget, config, name) for name, budget in budgets.items()}


def placeholder(weight: Tensor, count: int, size: int) -> Tensor:
    """A support that holds the place of one that is still to be chosen: with U = 0 it changes nothing.

    Args:
        weight: beside which it lies, maybe in packed codes.
        count, size: s and c·b.
    """
    return torch.arange(count, dtype=index_dtype(size), device=weight.device)


def select_in_layer(rows: RowScores, shape: Any, count: int, config: SupraConfig) -> Tensor:
    """The `count` entries of one layer that the config's direction and scope take."""
    select = select_each_row if config.support_scope == "row" else select_by_rows
    return select(rows, shape, count, config.sparse_direction, hybrid_beta=_beta(config))


def _alone(
    layer: Any, weight: Callable[[], Tensor], budget: LayerBudget, config: SupraConfig, name: str
) -> Tensor | None:
    home = layer.weight.device
    if config.support == "saved" or layer.weight.is_meta:
        return None
    count = budget.sparse_count
    # One dequantized or moved weight at a time.
    here = weight()
    if not count or config.by_gradient or config.sparse_direction == "random":
        check_weight(here, layer=name)
        if not count:
            return None
        if config.by_gradient:
            return placeholder(layer.weight, count, here.numel())
        draw = partial(random_rows_support, here.shape) if config.support_scope == "row" else None
        draw = draw or partial(random_support, here.numel())
        return draw(count, seed=config.support_seed, layer=name)
    return select_in_layer(_rows(here, config, name), here.shape, count, config).to(home)


def _across(
    layers: Mapping[str, Any],
    weights: Mapping[str, Callable[[], Tensor]],
    budgets: dict[str, LayerBudget],
    config: SupraConfig,
) -> dict[str, Tensor | None]:
    abstract = next((name for name, layer in layers.items() if layer.weight.is_meta), None)
    if abstract is not None:
        raise ValueError(
            f"{abstract}: budget_scope: global compares the scores of real weights, and this one is on the meta "
            "device: load the base model whole."
        )
    compared = [
        (
            (budgets[name].out_features, budgets[name].in_features),
            lambda name=name: _rows(weights[name](), config, name),
        )
        for name in layers
    ]
    count = sum(budget.sparse_count for budget in budgets.values())
    chosen = select_across(compared, count, config.sparse_direction, hybrid_beta=_beta(config))
    config.sparse_counts = {name: len(support) for name, support in zip(layers, chosen, strict=True)}
    for name, here in config.sparse_counts.items():
        budgets[name] = _with_count(budgets[name], here)
    return {
        name: support.to(layers[name].weight.device) if len(support) else None
        for name, support in zip(layers, chosen, strict=True)
    }


def _rows(weight: Tensor, config: SupraConfig, name: str) -> RowScores:
    """The scores of one layer, a block of rows at a time, for a `mask_score` of weights or activation norms."""
    score = SCORES[config.mask_score]
    norms = config.loaded_norms() if score.needs == "norms" else None
    assert score.rows is not None, "scores of gradients are computed by tuner.gradient"
    return score.rows(weight, None if norms is None else norms[name], layer=name)


def _beta(config: SupraConfig) -> float:
    return 0.5 if config.hybrid_beta is None else config.hybrid_beta


def _weight(layer: Any, otherwise: torch.dtype, config: SupraConfig) -> Tensor:
    """What the scores are computed from, where supports are chosen: the weight, dequantized where it is quantized.

    A sharded weight is gathered, so all processes choose the supports of all layers, in one order.
    """
    weight = sharding.whole(layer.weight)
    if bnb.bits(layer) is not None and not weight.is_meta:
        weight = bnb.dequantized(layer, bnb.weight_dtype(layer, otherwise))
    weight = weight.detach()
    return weight if config.support_device is None else weight.to(config.support_device)


def _with_count(budget: LayerBudget, count: int) -> LayerBudget:
    """A budget whose sparse part has been given another size."""
    return replace(budget, total=budget.low_rank_count + count, sparse_count=count)


def _combined(base: Any, combination: Mapping[str, Any], name: str) -> LayerBudget:
    sizes = combination["layers"].get(name)
    if sizes is None:
        raise ValueError(
            f"{name}: the combined adapter has nothing for this layer: load it on the base model it was made on."
        )
    rank, count = sizes
    total = count + rank * (base.out_features + base.in_features)
    return LayerBudget(base.out_features, base.in_features, total, rank, count)
