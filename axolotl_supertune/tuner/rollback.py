"""Snapshot of a model's adapters, and rollback when adding a SUPRA adapter fails.

Internals that this file reaches into: `Module._modules` of torch, and the attributes of PEFT in `_ADAPTER_STATE`. If
one were renamed, a failed load would leave a part of the new adapter behind: tests/tuner/test_several.py.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from torch import nn

from .fusion import share_work, unshare_work
from .layer import SupraLayer

# Attributes of PEFT's models, layers and wrappers that name the active adapters and those that a wrapper holds.
_ADAPTER_STATE = ("active_adapter", "_active_adapter", "_adapters")


class ModelSnapshot:
    """A model's module tree, adapters, configs, training modes and `requires_grad` flags. No tensor is copied.

    Args:
        model: a `PeftModel`, or a base model that is about to be adapted.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._modules = [(module, dict(module._modules), module.training) for module in model.modules()]
        self._trained = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
        self._state = [
            (module, name, _copied(vars(module)[name]))
            for module, _, _ in self._modules
            for name in _ADAPTER_STATE
            if name in vars(module)
        ]
        self._adapters = [
            (module, set(module.supra_shape)) for module, _, _ in self._modules if isinstance(module, SupraLayer)
        ]
        self._configs = [
            (module, vars(module)["peft_config"], dict(vars(module)["peft_config"]))
            for module, _, _ in self._modules
            if isinstance(vars(module).get("peft_config"), dict)
        ]

    def restore(self) -> None:
        """Remove everything that was added since. Values that were changed in place keep their changes."""
        unshare_work(self._model)
        for module in self._model.modules():
            if isinstance(module, SupraLayer):
                module.restore()
        for layer, names in self._adapters:
            for name in set(layer.supra_budget) - names:
                layer.delete_adapter(name)
        had_configs = {id(module) for module, _, _ in self._configs}
        for module, children, training in self._modules:
            if module._modules != children:
                module._modules.clear()
                module._modules.update(children)
            module.training = training
            if id(module) not in had_configs and isinstance(vars(module).get("peft_config"), dict):
                del module.peft_config
        for module, configs, entries in self._configs:
            configs.clear()
            configs.update(entries)
            module.peft_config = configs
        for module, name, value in self._state:
            vars(module)[name] = _copied(value)
        for parameter, is_trained in self._trained:
            parameter.requires_grad_(is_trained)
        share_work(self._model)


class _Pending:
    """The snapshot of a `rollback_once_adapted`, None until SUPRA begins to adapt the model."""

    snapshot: ModelSnapshot | None = None


_PENDING: ContextVar[_Pending | None] = ContextVar("_PENDING", default=None)


@contextmanager
def rollback_on_error(model: nn.Module) -> Iterator[None]:
    """Context that restores a model with SUPRA adapters to its present state if an error occurs inside."""
    snapshot = ModelSnapshot(model)
    try:
        yield
    except BaseException:
        snapshot.restore()
        raise


@contextmanager
def rollback_once_adapted(model: nn.Module) -> Iterator[None]:
    """`rollback_on_error` for a model that may or may not get a SUPRA adapter inside.

    The snapshot is taken when SUPRA begins to adapt the model; for other methods nothing is done.
    """
    pending = _Pending()
    token = _PENDING.set(pending)
    try:
        yield
    except BaseException:
        if pending.snapshot is not None and any(isinstance(module, SupraLayer) for module in model.modules()):
            pending.snapshot.restore()
        raise
    finally:
        _PENDING.reset(token)


def snapshot_if_pending(model: nn.Module) -> None:
    """Take the snapshot of a `rollback_once_adapted`; called before the first change to the model."""
    pending = _PENDING.get()
    if pending is not None and pending.snapshot is None:
        pending.snapshot = ModelSnapshot(model)


def _copied(value: Any) -> Any:
    return value.copy() if isinstance(value, (list, set)) else value
