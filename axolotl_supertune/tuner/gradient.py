"""Choice of supports by the gradients of training batches, as in SIFT and RoSA."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ..method.gradient_scores import gradient_scores, passes
from ..method.progress import progress
from ..method.scores import SCORES
from .layer import SupraLayer
from .selection import select_by_config

B = TypeVar("B")


def choose_supports(
    model: Any,
    batches: Sequence[Sequence[B]],
    loss_of: Callable[[B], Tensor],
    *,
    adapter_name: str = "default",
    sum_processes: Callable[[Tensor], Tensor] | None = None,
    step: int = 0,
) -> None:
    """Choose the supports of an adapter with a gradient score (`mask_score`); U stays 0.

    The gradient is taken with respect to W in Ŵ, with the present L and R and without dropout. No parameter gets a
    `.grad`.

    Args:
        model: a `PeftModel`, or any module that holds the adapted layers; not wrapped by DDP.
        batches, loss_of, sum_processes: as `gradient_scores.gradient_scores` takes them. All processes choose the same
            supports, from the same sums.
        adapter_name: the adapter.
        step: number of training steps that L and R have had; recorded in the config.

    Raises:
        ValueError: the adapter's supports are not chosen by gradient, or already have been; a gradient that is entirely
            zero, NaN or infinite.
    """
    config = model.peft_config[adapter_name]
    if not config.awaits_gradient:
        raise ValueError(
            f"adapter {adapter_name!r} awaits no support: mask_score is {config.mask_score!r}, sparse_direction "
            f"{config.sparse_direction!r}, and its gradient was taken: {config.gradient}."
        )
    allow_placeholders(model, adapter_name)
    layers: dict[str, Any] = {layer.layer_name: layer for layer in sparse_layers(model, adapter_name)}
    squared = SCORES[config.mask_score].squares_gradients
    micro_batches = passes(layers, squared=squared) * sum(map(len, batches))

    def counted_loss(micro_batch: Any) -> Tensor:
        bar.update()
        return loss_of(micro_batch)

    with (
        _frozen(model, adapter_name),
        progress("Choosing supports by gradient", total=micro_batches, unit="micro batch") as bar,
    ):
        scores = gradient_scores(layers, batches, counted_loss, squared=squared, sum_processes=sum_processes)
        chosen = {
            name: _selected(score, layers[name].supra_budget[adapter_name].sparse_count, config)
            for name, score in scores
        }
    for name, support in chosen.items():
        layers[name].set_support(adapter_name, support)
    config.gradient = {"batches": len(batches), "step": step}


def _selected(score: Tensor, count: int, config: Any) -> Tensor:
    return select_by_config(lambda start, stop: score[start:stop], score.shape, count, config)


def allow_placeholders(model: nn.Module, adapter_name: str = "default") -> None:
    """Allow forwards of an adapter whose support is yet to be chosen: until then it computes W + γ·L·R."""
    for layer in sparse_layers(model, adapter_name):
        layer.pending_adapters.pop(adapter_name, None)


def freeze_values(model: nn.Module, adapter_name: str = "default") -> Callable[[], None]:
    """Replace the gradients of U by zeros, though an optimizer may hold U. Returns a function that ends this."""
    handles = [
        layer.supra_values[adapter_name].register_hook(torch.zeros_like) for layer in sparse_layers(model, adapter_name)
    ]

    def release() -> None:
        for handle in handles:
            handle.remove()

    return release


def sparse_layers(model: nn.Module, adapter_name: str = "default") -> list[SupraLayer]:
    """The layers in which the adapter has a sparse part."""
    return [
        module for module in model.modules() if isinstance(module, SupraLayer) and adapter_name in module.supra_values
    ]


@contextlib.contextmanager
def _frozen(model: nn.Module, adapter_name: str) -> Iterator[None]:
    """Context in which no parameter requires a gradient and the adapter has no dropout."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    dropouts = [module.supra_dropout for module in model.modules() if isinstance(module, SupraLayer)]
    before = [dict(dropout) for dropout in dropouts]
    for parameter in trained:
        parameter.requires_grad_(False)
    for dropout in dropouts:
        if adapter_name in dropout:
            dropout[adapter_name] = 0.0
    try:
        yield
    finally:
        for parameter in trained:
            parameter.requires_grad_(True)
        for dropout, old in zip(dropouts, before, strict=True):
            dropout.update(old)
