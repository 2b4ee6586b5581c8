"""Budget and support of each target layer, as a `SupraConfig` describes them."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..engines import sharding
from ..method.budget import DEFAULT_BETA, LayerBudget, density_budgets, layer_budget
from ..method.progress import progress
from ..method.scores import SCORES, RowScores, check_weight
from ..method.support import (
    index_dtype,
    random_rows_support,
    random_support,
    select_across,
    select_from_blocks,
    select_within_rows,
)
from .config import SupraConfig
from .quantization import backend_of

# Each needs some 24 MB beside the weight.
_MOST_THREADS = 16


def budgets_of(layers: Mapping[str, Any], config: SupraConfig) -> dict[str, LayerBudget]:
    """The budget of every layer.

    With `budget_scope: global`, a provisional budget: `supports_of` replaces its sparse count.

    Args:
        layers: linear layers by name; weights may be on the meta device.

    Raises:
        ValueError: a saved adapter has no sizes for one of the layers.
        BudgetError: a budget that a layer cannot have.
    """
    if config.combination is not None:
        return {name: _combined_budget(layer, config.combination, name) for name, layer in layers.items()}
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
    """The support (s,) of every layer, on its weight's device; None if s = 0 or if a checkpoint will bring it.

    Where the model is sharded, all processes must call this: weights are gathered one by one.

    Args:
        layers: linear layers by name.
        budgets: of these layers. With `budget_scope: global` they are updated to the sparse counts that the layers got.
        config: how supports are chosen; with `budget_scope: global` its `sparse_counts` are filled in.
        weight_dtype: dtype of the dequantized weight, used where a quantized layer does not record its original dtype.

    Raises:
        ValueError: a weight or score that is NaN or infinite, or layers to compare on the meta device.
    """
    read_weight: dict[str, Callable[[], Tensor]] = {
        name: partial(_whole_weight, layer, weight_dtype, config) for name, layer in layers.items()
    }
    if config.compares_layers and config.support == "select":
        return _supports_of_all(layers, read_weight, budgets, config)
    tasks = [
        partial(_support_of_layer, layers[name], read_weight[name], budget, config, name)
        for name, budget in budgets.items()
    ]
    independent = config.support_device is None and all(_is_plain_on_cpu(layer) for layer in layers.values())
    with progress("Choosing supports", total=len(tasks), unit="layer") as bar:
        supports = dict.fromkeys(budgets)
        for name, support in zip(budgets, _results(tasks, threads=independent), strict=True):
            supports[name] = support
            bar.update()
    return supports


def _is_plain_on_cpu(layer: Any) -> bool:
    """Whether reading a layer's weight takes no other process, no other device and no memory."""
    return layer.weight.device.type == "cpu" and sharding.is_whole(layer.weight) and backend_of(layer) is None


def _results(tasks: Sequence[Callable[[], Tensor | None]], *, threads: bool) -> Iterator[Tensor | None]:
    """The results of functions, in order; with `threads`, as many run at once as PyTorch has threads.

    One thread a layer is faster than all threads on one layer after another. Above all it does not wait: PyTorch's
    threads meet after each of the many short operations, and where other processes keep the cores busy, each meeting
    waits for the slowest.
    """
    count = min(torch.get_num_threads(), _MOST_THREADS, len(tasks)) if threads else 1
    if count < 2:
        yield from (task() for task in tasks)
        return
    before = torch.get_num_threads()
    executor = ThreadPoolExecutor(count, "supports", initializer=torch.set_num_threads, initargs=(1,))
    try:
        yield from executor.map(lambda task: task(), tasks)
    finally:
        executor.shutdown(cancel_futures=True)
        torch.set_num_threads(before)  # the setting of a thread is also that of threads to come


def placeholder(weight: Tensor, count: int, size: int) -> Tensor:
    """A support in place of one that will be chosen by gradient; with U = 0 it has no effect.

    Args:
        weight: its device is used; may be packed.
        count: s.
        size: c·b.

    Returns:
        (s,) the first s indices.
    """
    return torch.arange(count, dtype=index_dtype(size), device=weight.device)


def select_by_config(rows: RowScores, shape: Any, count: int, config: SupraConfig) -> Tensor:
    """The support (count,) of one layer by the config's direction and scope; arguments as for `select_from_blocks`."""
    select = select_within_rows if config.support_scope == "row" else select_from_blocks
    return select(rows, shape, count, config.sparse_direction, hybrid_beta=_beta(config))


def _support_of_layer(
    layer: Any, read_weight: Callable[[], Tensor], budget: LayerBudget, config: SupraConfig, name: str
) -> Tensor | None:
    """The support of one layer, chosen by its own scores or at random; None as for `supports_of`."""
    device = layer.weight.device
    if config.support == "saved" or layer.weight.is_meta:
        return None
    count = budget.sparse_count
    # Only one full weight is in memory at a time. It is read for s = 0 too, to refuse a NaN in it.
    full = read_weight()
    if not count or config.by_gradient or config.sparse_direction == "random":
        check_weight(full, layer=name)
        if not count:
            return None
        if config.by_gradient:
            return placeholder(layer.weight, count, full.numel())
        if config.support_scope == "row":
            return random_rows_support(full.shape, count, seed=config.support_seed, layer=name)
        return random_support(full.numel(), count, seed=config.support_seed, layer=name)
    return select_by_config(_rows(full, config, name), full.shape, count, config).to(device)


def _supports_of_all(
    layers: Mapping[str, Any],
    read_weight: Mapping[str, Callable[[], Tensor]],
    budgets: dict[str, LayerBudget],
    config: SupraConfig,
) -> dict[str, Tensor | None]:
    """The supports of all layers by comparing all their scores; updates `budgets` and the config's `sparse_counts`."""
    abstract = next((name for name, layer in layers.items() if layer.weight.is_meta), None)
    if abstract is not None:
        raise ValueError(
            f"{abstract}: budget_scope: global compares the scores of real weights, and this one is on the meta "
            "device: load the base model whole."
        )

    def scores(name: str) -> RowScores:
        bar.update()
        return _rows(read_weight[name](), config, name)

    compared = [((budget.out_features, budget.in_features), partial(scores, name)) for name, budget in budgets.items()]
    count = sum(budget.sparse_count for budget in budgets.values())
    # Every layer is read in several passes, whose number depends on the scores.
    with progress("Comparing the scores of all layers", total=None, unit="layer") as bar:
        chosen = select_across(compared, count, config.sparse_direction, hybrid_beta=_beta(config))
    config.sparse_counts = {name: len(support) for name, support in zip(layers, chosen, strict=True)}
    for name, layer_count in config.sparse_counts.items():
        budgets[name] = _with_count(budgets[name], layer_count)
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
    return DEFAULT_BETA if config.hybrid_beta is None else config.hybrid_beta


def _whole_weight(layer: Any, default_dtype: torch.dtype, config: SupraConfig) -> Tensor:
    """The whole, dequantized weight of a layer, on the device that chooses supports.

    A sharded weight is gathered, so all processes choose the supports of all layers, in one order.
    """
    weight = sharding.whole(layer.weight)
    backend = backend_of(layer)
    if backend is not None and not weight.is_meta:
        weight = backend.dequantize(layer, backend.weight_dtype(layer, default_dtype))
    weight = weight.detach()
    return weight if config.support_device is None else weight.to(config.support_device)


def _with_count(budget: LayerBudget, count: int) -> LayerBudget:
    """A budget with another number of sparse entries."""
    return replace(budget, total=budget.low_rank_count + count, sparse_count=count)


def _combined_budget(base: Any, combination: Mapping[str, Any], name: str) -> LayerBudget:
    """The budget of a layer of a combined adapter, from the sizes that its config stores."""
    sizes = combination["layers"].get(name)
    if sizes is None:
        raise ValueError(
            f"{name}: the combined adapter has nothing for this layer: load it on the base model it was made on."
        )
    rank, count = sizes
    total = count + rank * (base.out_features + base.in_features)
    return LayerBudget(base.out_features, base.in_features, total, rank, count)
