"""Supports chosen by the gradients of training batches: SIFT's and RoSA's."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ..method.gradient_scores import gradient_scores
from ..method.scores import SCORES
from .layer import SupraLayer
from .selection import select_in_layer

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
    """Choose the supports of an adapter with `mask_score` gradient or squared_gradient; U is 0 and stays so.

    The gradient is that of W in Ŵ, with L and R as they are and no dropout on them. No parameter gets a `.grad`.

    Args:
        model: a `PeftModel`, or any module that holds the adapted layers; not wrapped by DDP.
        batches, loss_of, sum_processes: as `gradients.gradient_scores` takes them. Every process chooses, from the same
            sums, the same supports.
        adapter_name: the adapter.
        step: training steps that L and R have had, to be recorded.

    Raises:
        ValueError: the adapter's supports are not chosen by gradient, or have been; a gradient that is zero all over,
            NaN or infinite.
    """
    config = model.peft_config[adapter_name]
    if not config.awaits_gradient:
        raise ValueError(
            f"adapter {adapter_name!r} awaits no support: mask_score is {config.mask_score!r}, sparse_direction "
            f"{config.sparse_direction!r}, and its gradient was taken: {config.gradient}."
        )
    await_no_more(model, adapter_name)
    layers: dict[str, Any] = {layer.supra_layer: layer for layer in sparse_layers(model, adapter_name)}
    with _frozen(model, adapter_name):
        scores = gradient_scores(
            layers, batches, loss_of, squared=SCORES[config.mask_score].squares_gradients, sum_processes=sum_processes
        )
        chosen = {
            name: _selected(score, layers[name].supra_budget[adapter_name].sparse_count, config)
            for name, score in scores
        }
    for name, support in chosen.items():
        layers[name].set_support(adapter_name, support)
    config.gradient = {"batches": len(batches), "step": step}


def _selected(score: Tensor, count: int, config: Any) -> Tensor:
    return select_in_layer(lambda start, stop: score[start:stop], score.shape, count, config)


def await_no_more(model: nn.Module, adapter_name: str = "default") -> None:
    """Let an adapter whose support is still to be chosen be run: it is W + γ·L·R until then."""
    for layer in sparse_layers(model, adapter_name):
        layer.pending_adapters.pop(adapter_name, None)


def hold_values(model: nn.Module, adapter_name: str = "default") -> Callable[[], None]:
    """Keep U where it is, gradients of 0, whatever optimizer holds it. Returns what ends that."""
    handles = [
        layer.supra_values[adapter_name].register_hook(torch.zeros_like) for layer in sparse_layers(model, adapter_name)
    ]

    def release() -> None:
        for handle in handles:
            handle.remove()

    return release


def sparse_layers(model: nn.Module, adapter_name: str = "default") -> list[SupraLayer]:
    """The layers in which an adapter has a sparse part."""
    return [
        module for module in model.modules() if isinstance(module, SupraLayer) and adapter_name in module.supra_values
    ]


@contextlib.contextmanager
def _frozen(model: nn.Module, adapter_name: str) -> Iterator[None]:
    """No parameter is trained inside, and the adapter drops nothing out."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    dropouts = [module.supra_dropout for module in model.modules() if isinstance(module, SupraLayer)]
    before = [dict(each) for each in dropouts]
    for parameter in trained:
        parameter.requires_grad_(False)
    for each in dropouts:
        each.update({name: 0.0 for name in each if name == adapter_name})
    try:
        yield
    finally:
        for parameter in trained:
            parameter.requires_grad_(True)
        for each, old in zip(dropouts, before, strict=True):
            each.update(old)
