"""Scores from ∂L/∂W of frozen linear layers: what SIFT and RoSA choose their supports by.

A layer's gradient is dyᵀx. It is formed where backward passes the layer, and added into that layer's own sum; no
weight gets a `.grad`, no optimizer a state, and nothing that is trained is touched. Sums are dense, fp32, so only a
group of layers has one at a time: the batches are passed once for every group, and a group's scores are handed out and
dropped before the next one begins. A group's sums take `DENSE_BYTES`, or are those of one larger layer; how layers are
grouped does not change a score.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from .sizes import DENSE_BYTES

B = TypeVar("B")


class _Observed(torch.autograd.Function):
    """y, whose backward shows x (…, b) and dy (…, c) to `take`.

    x is saved as autograd saves tensors, so that checkpointing drops it and computes it again. The anchor needs a
    gradient, so that backward comes here whatever else is frozen.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, anchor: Tensor, take: Callable[[Tensor, Tensor], None]) -> Tensor:
        ctx.save_for_backward(x)
        ctx.take = take
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (dy,) = gradients
        (x,) = ctx.saved_tensors
        ctx.take(x, dy)
        return None, dy, torch.zeros((), device=dy.device), None


def gradient_scores(
    layers: Mapping[str, nn.Module],
    batches: Sequence[Sequence[B]],
    loss_of: Callable[[B], Tensor],
    *,
    squared: bool = False,
    sum_processes: Callable[[Tensor], Tensor] | None = None,
    dense_bytes: int = DENSE_BYTES,
) -> Iterator[tuple[str, Tensor]]:
    """The score of one layer after another: |mean of ∂L/∂W| over the batches, or the mean of its squares.

    Args:
        layers: by name, what is called with x (…, b) and returns y (…, c) and has `in_features` and `out_features`: a
            linear layer, or one that wraps it. What it trains itself may be frozen.
        batches: micro-batches of every batch, of this process; each batch has at least one in some process.
        loss_of: the share of a micro-batch in its batch's loss, a scalar: over micro-batches and processes these add
            up to L. Called several times for each, and must answer the same each time.
        squared: RoSA's score, Σ_batches (∂L/∂W)²/n, in place of |Σ_batches ∂L/∂W|/n.
        sum_processes: where several processes have a part of every batch: gives the sum over them of a CPU vector.
        dense_bytes: what the sums of a group may take.

    Yields:
        (name, (c, b) fp32 on the layer's device), in the order of `layers`.

    Raises:
        ValueError: a gradient that is NaN or infinite, or zero all over.
    """
    if not batches:
        raise ValueError("no batch to take gradients from.")
    for group in _groups(layers, dense_bytes // (2 if squared else 1)):
        sums = _Sums(group, squared, sum_processes)
        with sums.observing():
            for batch in batches:
                for micro_batch in batch:
                    loss_of(micro_batch).backward()
                sums.end_batch()
        for name in group:
            yield name, _checked(sums.score(name, len(batches)), name)


def _groups(layers: Mapping[str, nn.Module], dense_bytes: int) -> Iterator[dict[str, nn.Module]]:
    group: dict[str, nn.Module] = {}
    held = 0
    for name, layer in layers.items():
        size = 4 * _size(layer)
        if group and held + size > dense_bytes:
            yield group
            group, held = {}, 0
        group[name] = layer
        held += size
    if group:
        yield group


def passes(layers: Mapping[str, nn.Module], *, squared: bool = False, dense_bytes: int = DENSE_BYTES) -> int:
    """How often the batches are passed."""
    return sum(1 for _ in _groups(layers, dense_bytes // (2 if squared else 1)))


class _Sums:
    """The dense sums of a group of layers."""

    def __init__(
        self, layers: dict[str, nn.Module], squared: bool, sum_processes: Callable[[Tensor], Tensor] | None
    ) -> None:
        self._layers, self._squared, self._sum_processes = layers, squared, sum_processes
        # ∂L/∂W: of one batch if it is to be squared, else of all.
        self._sums: dict[str, Tensor] = {name: _zeros(layer) for name, layer in layers.items()}
        self._squares = {name: torch.zeros_like(total) for name, total in self._sums.items()} if squared else {}

    def observing(self) -> "_Hooks":
        return _Hooks({name: (layer, self._sums[name]) for name, layer in self._layers.items()})

    def end_batch(self) -> None:
        for name, square in self._squares.items():
            total = self._over_processes(self._sums[name])
            square.addcmul_(total, total)
            self._sums[name].zero_()

    def score(self, name: str, count: int) -> Tensor:
        """The score of a layer, which is forgotten here."""
        total = self._sums.pop(name)
        if self._squared:
            return self._squares.pop(name).div_(count)
        return self._over_processes(total).abs_().div_(count)

    def _over_processes(self, total: Tensor) -> Tensor:
        if self._sum_processes is None:
            return total
        return self._sum_processes(total.reshape(-1).cpu()).view_as(total).to(total.device)


class _Hooks:
    """Forward hooks that put `_Observed` behind layers."""

    def __init__(self, observed: dict[str, tuple[nn.Module, Tensor]]) -> None:
        self._observed = observed
        self._handles: list[Any] = []

    def __enter__(self) -> None:
        for layer, total in self._observed.values():
            self._handles.append(layer.register_forward_hook(self._hook(total), with_kwargs=True))

    def __exit__(self, *_: Any) -> None:
        for handle in self._handles:
            handle.remove()

    @staticmethod
    def _hook(total: Tensor) -> Any:
        anchor = torch.zeros((), device=total.device, requires_grad=True)

        def take(x: Tensor, dy: Tensor) -> None:
            x, dy = x.detach().reshape(-1, x.shape[-1]), dy.reshape(-1, dy.shape[-1])
            total.addmm_(dy.to(total.dtype).t(), x.to(total.dtype))

        def observe(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], y: Tensor) -> Tensor:
            if not torch.is_grad_enabled():
                return y  # a checkpointed forward, which runs again in backward
            return _Observed.apply(args[0] if args else kwargs["x"], y, anchor, take)

        return observe


def _size(layer: Any) -> int:
    return int(layer.out_features * layer.in_features)


def _zeros(layer: Any) -> Tensor:
    device = getattr(layer, "base_layer", layer).weight.device
    return torch.zeros(layer.out_features, layer.in_features, dtype=torch.float32, device=device)


def _checked(score: Tensor, layer: str) -> Tensor:
    largest = float(score.max())
    if largest == 0:
        raise ValueError(
            f"{layer}: its gradient is zero all over: no trained token reached this layer. Leave it out of the target "
            "modules, or take more batches (gradient_batches)."
        )
    if not torch.isfinite(score.max()) or not torch.isfinite(score.sum()):
        raise ValueError(
            f"{layer}: its gradient is NaN or infinite; check the base model, its dtype and the training data."
        )
    return score
