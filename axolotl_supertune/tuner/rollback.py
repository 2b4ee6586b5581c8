"""What a model is like before adapters are put into it, to have it so again where that fails."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from .fusion import share_work, unshare_work
from .layer import SupraLayer

# Of PEFT's models, layers and wrappers: which adapters are active, and which ones a wrapper holds.
_STATE = ("active_adapter", "_active_adapter", "_adapters")


class Before:
    """A model's modules, adapters, modes and what of it is trained, as they are now; no tensor is copied.

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
            for name in _STATE
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
        """Take out what was put in since; values that were changed in place stay."""
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
        for module, configs, held in self._configs:
            configs.clear()
            configs.update(held)
            module.peft_config = configs
        for module, name, value in self._state:
            vars(module)[name] = _copied(value)
        for parameter, is_trained in self._trained:
            parameter.requires_grad_(is_trained)
        share_work(self._model)


@contextmanager
def undone_on_error(model: nn.Module) -> Iterator[None]:
    """Inside, adapters of SUPRA are put into `model`; any error leaves the model as it was before."""
    before = Before(model)
    try:
        yield
    except BaseException:
        if any(isinstance(module, SupraLayer) for module in model.modules()):
            before.restore()
        raise


def _copied(value: Any) -> Any:
    return value.copy() if isinstance(value, (list, set)) else value
