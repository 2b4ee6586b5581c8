"""Caches kernel dispatch per layer while its guards hold.

Which kernels compute an adapted layer depends on its tensors, adapters, dtypes and modes. Finding that out takes far
longer than looking whether any of it has changed, so the answer of one forward is kept for the next, behind a `Guard`.

Internals that this file reaches into: `_parameters`, `_buffers` and `_modules` of torch's modules,
`_disable_adapters`, `_active_adapter` and `merged_adapters` of PEFT's layers. If one were renamed, the first forward
with kernels would raise (KeyError or AttributeError): tests/interpreter/test_model.py.
"""

import copy
from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor, nn

from ..ops.reference import autocast_dtype


class Guard:
    """A cached result, and everything that must be unchanged for it to be used again.

    `is_valid` runs in every forward of every layer. It reads `__dict__`s and parameter tables directly, because a
    module's own attribute look-up would be most of its cost.

    Args:
        modules: the `SupraLinear`s that the result depends on.
        x: the input of the forward in which the result was computed.
        result: what is cached.
        entries: further (mapping, key, value): the mapping must hold the identical value.
    """

    __slots__ = ("_active", "_autocast", "_biases", "_device", "_entries", "_kind", "_merged", "_weights", "result")

    def __init__(
        self, modules: Sequence[Any], x: Tensor, result: Any, entries: Iterable[tuple[Any, Any, Any]] = ()
    ) -> None:
        self.result = result
        self._device, self._kind, self._autocast = x.device, x.device.type, autocast_dtype(x.device.type)
        self._entries: list[tuple[Any, Any, Any]] = list(entries)
        for module in modules:
            own = vars(module)
            names = ("training", "_disable_adapters", "merged_adapters")
            self._entries += [(own, name, own[name]) for name in names]
            base = module.base_layer
            # An engine may replace the layer's table of parameters when it shards the model.
            self._entries += [(module._modules, "base_layer", base), (vars(base), "_parameters", base._parameters)]
            stores = (module.supra_values, module.supra_L, module.supra_R, module.supra_indices)
            tables = [base._parameters]
            for store in stores:
                tables += (store._parameters, store._buffers)
            tables += (module.supra_scaling, module.supra_dropout)
            for table in tables:
                self._entries += [(table, key, value) for key, value in table.items() if value is not None]
        # A copy: PEFT assigns a new list at a switch of adapters, or changes the list in place.
        self._active = [(vars(module), copy.copy(module._active_adapter)) for module in modules]
        self._merged = [module.merged_adapters for module in modules]
        self._weights = [(module.base_layer.weight, module.base_layer.weight.dtype) for module in modules]
        biases = [module.base_layer.bias for module in modules]
        self._biases = [(bias, bias.requires_grad) for bias in biases if bias is not None]

    def __reduce__(self) -> Any:
        """Copies and pickles of a layer start without cached results."""
        return type(None), ()

    def is_valid(self, x: Tensor) -> bool:
        """Whether the result may be used for input `x`: nothing that it depends on has changed."""
        if x.device != self._device or not x.numel() or autocast_dtype(self._kind) is not self._autocast:
            return False
        for table, key, value in self._entries:
            if table.get(key) is not value:
                return False
        for own, active in self._active:
            if own["_active_adapter"] != active:
                return False
        for weight, dtype in self._weights:
            if weight.requires_grad or weight.dtype is not dtype:
                return False
        for bias, trained in self._biases:
            if bias.requires_grad is not trained:
                return False
        for merged in self._merged:  # noqa: SIM110 (a generator takes longer)
            if merged:
                return False
        return True


def guard_together(parent: nn.Module, names: Sequence[str], members: Sequence[Any], x: Tensor, result: Any) -> Guard:
    """A guard of children of one module: valid while the children are in place and the guard of each is valid.

    Args:
        parent: the module that holds the children.
        names: of the children in `parent`.
        members: the children, `SupraLinear`s that each have a guard of their own.
        x, result: as `Guard` takes them.
    """
    entries: list[tuple[Any, Any, Any]] = [
        (parent._modules, name, member) for name, member in zip(names, members, strict=True)
    ]
    entries += [(member.layer_guards, member.training, member.layer_guards[member.training]) for member in members]
    return Guard(members, x, result, entries)
