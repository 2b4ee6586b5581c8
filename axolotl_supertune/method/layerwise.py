"""Running a model that no device holds as a whole: decoder layers visit it, or are gathered on it, one at a time."""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn


@contextlib.contextmanager
def streamed(model: nn.Module, device: torch.device | str) -> Iterator[None]:
    """Inside, a model that lies on the CPU runs on `device`, with one decoder layer there at a time.

    Embeddings, final norm and output layer are there all the time. The CPU keeps its copy: afterwards every tensor is
    the one that it was, tied weights included.

    Raises:
        ValueError: the model does not say what its decoder layers are (transformers' `_no_split_modules`).
    """
    blocks, others = decoder_layers(model)
    if not blocks:
        raise ValueError(f"{type(model).__name__} does not name its decoder layers: it cannot be streamed.")
    rest = _Moved(others)
    rest.to(device)
    hooks = []
    try:
        for block in blocks:
            moved = _Moved(list(block.modules()))
            hooks.append(block.register_forward_pre_hook(lambda *_, moved=moved: moved.to(device)))
            hooks.append(block.register_forward_hook(lambda *_, moved=moved: moved.back(), always_call=True))
        yield
    finally:
        for hook in hooks:
            hook.remove()
        rest.back()


@contextlib.contextmanager
def gathered_in_turn(
    model: nn.Module, gathered: Callable[[Iterable[Tensor]], contextlib.AbstractContextManager[None]]
) -> Iterator[None]:
    """Inside, a sharded model runs without its engine, with one decoder layer gathered at a time.

    Every process must run it equally often. Embeddings, final norm and output layer are gathered one by one.

    Args:
        model: the sharded model.
        gathered: parameters → a context inside which they hold their values.
    """
    blocks, others = decoder_layers(model)
    units = [(block, list(block.parameters())) for block in blocks]
    units += [(module, list(module.parameters(recurse=False))) for module in others]
    hooks = []
    try:
        for module, parameters in units:
            if parameters:
                # A unit is entered and left in one call of its module: one place for the context that is open.
                opened = contextlib.ExitStack()

                def enter(*_: Any, opened: Any = opened, parameters: Any = parameters) -> None:
                    opened.enter_context(gathered(parameters))

                hooks.append(module.register_forward_pre_hook(enter))
                hooks.append(module.register_forward_hook(lambda *_, opened=opened: opened.close(), always_call=True))
        yield
    finally:
        for hook in hooks:
            hook.remove()


def decoder_layers(model: nn.Module) -> tuple[list[nn.Module], list[nn.Module]]:
    """The decoder layers of a model (none if it does not say what they are), and the modules outside them."""
    kinds = set(getattr(model, "_no_split_modules", None) or ())
    blocks: list[nn.Module] = []
    inside: set[nn.Module] = set()
    for module in model.modules():
        if type(module).__name__ in kinds and module not in inside:
            blocks.append(module)
            inside.update(module.modules())
    return blocks, [module for module in model.modules() if module not in inside]


class _Moved:
    """Modules whose tensors are on another device for a while."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        stores = [store for module in modules for store in (module._parameters, module._buffers)]
        self._places: list[tuple[Any, str, Tensor]] = [
            (store, name, tensor) for store in stores for name, tensor in store.items() if tensor is not None
        ]

    def to(self, device: torch.device | str) -> None:
        made: dict[int, Tensor] = {}  # tied ones stay tied
        for store, name, tensor in self._places:
            if id(tensor) not in made:
                there = tensor.detach().to(device)
                made[id(tensor)] = (
                    nn.Parameter(there, requires_grad=False) if isinstance(tensor, nn.Parameter) else there
                )
            store[name] = made[id(tensor)]

    def back(self) -> None:
        for store, name, tensor in self._places:
            store[name] = tensor
