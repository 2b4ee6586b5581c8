"""What was found out about adapted layers in one forward, kept for the next as long as nothing has changed."""

import copy
from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

from ..ops.reference import autocast_dtype


class Known:
    """Something found for layers, and all that must be as it was for it to be used again.

    This is asked in every forward, where a module's own attribute look-up would be most of the cost.

    Args:
        modules: the `SupraLinear`s.
        x: the input of the forward in which it was found.
        found: what was found.
        places: further (mapping, key, value) that must hold the very same value.
    """

    __slots__ = ("_active", "_autocast", "_biases", "_device", "_kind", "_merged", "_places", "_weights", "found")

    def __init__(
        self, modules: Sequence[Any], x: Tensor, found: Any, places: Iterable[tuple[Any, Any, Any]] = ()
    ) -> None:
        self.found = found
        self._device, self._kind, self._autocast = x.device, x.device.type, autocast_dtype(x.device.type)
        self._places: list[tuple[Any, Any, Any]] = list(places)
        for module in modules:
            own = vars(module)
            names = ("training", "_disable_adapters", "merged_adapters")
            self._places += [(own, name, own[name]) for name in names]
            base = module.base_layer
            # DeepSpeed's ZeRO-3 puts another table of parameters in the place of the layer's.
            self._places += [(module._modules, "base_layer", base), (vars(base), "_parameters", base._parameters)]
            stores = (module.supra_values, module.supra_L, module.supra_R, module.supra_indices)
            tables = [base._parameters]
            for store in stores:
                tables += (store._parameters, store._buffers)
            tables += (module.supra_scaling, module.supra_dropout)
            for table in tables:
                self._places += [(table, key, value) for key, value in table.items() if value is not None]
        # PEFT makes a new list at every switch, or changes the one it has.
        self._active = [(vars(module), copy.copy(module._active_adapter)) for module in modules]
        self._merged = [module.merged_adapters for module in modules]
        self._weights = [(module.base_layer.weight, module.base_layer.weight.dtype) for module in modules]
        biases = [module.base_layer.bias for module in modules]
        self._biases = [(bias, bias.requires_grad) for bias in biases if bias is not None]

    def __reduce__(self) -> Any:
        """Of a copy of the layers nothing is known."""
        return type(None), ()

    def holds(self, x: Tensor) -> bool:
        """Whether nothing has changed since."""
        if x.device != self._device or not x.numel() or autocast_dtype(self._kind) is not self._autocast:
            return False
        for place, key, value in self._places:
            if place.get(key) is not value:
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
