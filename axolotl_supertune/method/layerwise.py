"""Run a model that does not fit on one device, one decoder layer at a time: streamed from the CPU, or gathered.

Internals that this file reaches into: `_no_split_modules` of transformers' models, the class names of decoder layers.
If it were renamed, a model could not be streamed, and the error says so: tests/plugin/test_calibrate_base.py.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn


@contextlib.contextmanager
def streamed(model: nn.Module, device: torch.device | str) -> Iterator[None]:
    """Context in which a model on the CPU runs on `device`, with one decoder layer on it at a time.

    Embeddings, final norm and output layer stay on `device` throughout. The CPU copies are kept: afterwards the model
    has its original tensors again, tied weights included.

    Raises:
        ValueError: the model does not name its decoder layers (transformers' `_no_split_modules`).
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
    """Context in which a sharded model runs without its engine, with one decoder layer gathered at a time.

    All processes must run the same number of forward passes. Embeddings, final norm and output layer are gathered one
    by one as well.

    Args:
        model: the sharded model.
        gathered: parameters → a context in which they hold their full values.
    """
    blocks, others = decoder_layers(model)
    units = [(block, list(block.parameters())) for block in blocks]
    units += [(module, list(module.parameters(recurse=False))) for module in others]
    hooks = []
    try:
        for module, parameters in units:
            if parameters:
                # Entered before and left after each call of the module.
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
    """The decoder layers of a model (empty if it does not name them), and all modules outside them."""
    kinds = set(getattr(model, "_no_split_modules", None) or ())
    blocks: list[nn.Module] = []
    inside: set[nn.Module] = set()
    for module in model.modules():
        if type(module).__name__ in kinds and module not in inside:
            blocks.append(module)
            inside.update(module.modules())
    return blocks, [module for module in model.modules() if module not in inside]


class _Moved:
    """The tensors of some modules, moved to another device and back."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        stores = [store for module in modules for store in (module._parameters, module._buffers)]
        self._tensors: list[tuple[Any, str, Tensor]] = [
            (store, name, tensor) for store in stores for name, tensor in store.items() if tensor is not None
        ]

    def to(self, device: torch.device | str) -> None:
        copies: dict[int, Tensor] = {}  # by identity, so that tied tensors stay tied
        for store, name, tensor in self._tensors:
            if id(tensor) not in copies:
                copy = tensor.detach().to(device)
                copies[id(tensor)] = (
                    nn.Parameter(copy, requires_grad=False) if isinstance(tensor, nn.Parameter) else copy
                )
            store[name] = copies[id(tensor)]

    def back(self) -> None:
        for store, name, tensor in self._tensors:
            store[name] = tensor
