"""Gradient scores |∂L/∂W| and (∂L/∂W)² of frozen linear layers, by which SIFT and RoSA choose their supports.

The gradient of a layer, dyᵀ·x, is computed when backward reaches the layer, and is added to a sum per layer. No weight
gets a `.grad`, and no trained parameter is touched. The sums are dense and fp32, as large as the weights in fp32, so
the layers are processed in groups whose sums take at most `DENSE_BYTES` (or one larger layer): all batches are run once
per group, and the scores of a group are yielded and freed before the next. The grouping does not change the scores.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from .sizes import DENSE_BYTES

B = TypeVar("B")


class _Observed(torch.autograd.Function):
    """Identity on y whose backward calls `take(x, dy)` with x (…, b) and dy (…, c).

    x is saved through autograd, so that gradient checkpointing can drop and recompute it. `anchor` requires a gradient,
    so that backward runs here even if everything else is frozen.
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
    """Yield the score of each layer: |mean of ∂L/∂W| over the batches, or the mean of (∂L/∂W)².

    Args:
        layers: by name, modules that map x (…, b) to y (…, c) and have `in_features` and `out_features`: linear layers
            or modules around one. Their parameters may be frozen.
        batches: this process's micro-batches of each batch. Every batch has at least one in some process.
        loss_of: a micro-batch's contribution to the loss L of its batch, a scalar; the contributions of all
            micro-batches and processes add up to L. Called several times per micro-batch; must be deterministic.
        squared: RoSA's score Σ_batches (∂L/∂W)²/n instead of |Σ_batches ∂L/∂W|/n.
        sum_processes: sums a CPU vector over all processes, where several each have a part of every batch.
        dense_bytes: limit for the sums of a group, in bytes.

    Yields:
        (name, (c, b) fp32 on the layer's device), in the order of `layers`.

    Raises:
        ValueError: a gradient that is NaN, infinite or entirely zero.
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
    """The layers in order, in groups whose fp32 sums fit `dense_bytes`; a larger layer is a group of its own."""
    group: dict[str, nn.Module] = {}
    group_bytes = 0
    for name, layer in layers.items():
        size = 4 * _size(layer)
        if group and group_bytes + size > dense_bytes:
            yield group
            group, group_bytes = {}, 0
        group[name] = layer
        group_bytes += size
    if group:
        yield group


def passes(layers: Mapping[str, nn.Module], *, squared: bool = False, dense_bytes: int = DENSE_BYTES) -> int:
    """How many times `gradient_scores` runs all batches: the number of groups."""
    return sum(1 for _ in _groups(layers, dense_bytes // (2 if squared else 1)))


class _Sums:
    """The dense gradient sums of a group of layers."""

    def __init__(
        self, layers: dict[str, nn.Module], squared: bool, sum_processes: Callable[[Tensor], Tensor] | None
    ) -> None:
        self._layers, self._squared, self._sum_processes = layers, squared, sum_processes
        # Σ ∂L/∂W: of the current batch if it will be squared, else of all batches.
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
        """The score of a layer; its sums are freed."""
        total = self._sums.pop(name)
        if self._squared:
            return self._squares.pop(name).div_(count)
        return self._over_processes(total).abs_().div_(count)

    def _over_processes(self, total: Tensor) -> Tensor:
        if self._sum_processes is None:
            return total
        return self._sum_processes(total.reshape(-1).cpu()).view_as(total).to(total.device)


class _Hooks:
    """A context in which forward hooks apply `_Observed` to the outputs of layers."""

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
                return y  # a checkpointed forward: it runs again, with gradients, in backward
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
            f"{layer}: its gradient is zero everywhere: no trained token reached this layer. Leave it out of the "
            "target modules, or take more batches (gradient_batches)."
        )
    if not torch.isfinite(score.max()) or not torch.isfinite(score.sum()):
        raise ValueError(
            f"{layer}: its gradient is NaN or infinite; check the base model, its dtype and the training data."
        )
    return score
