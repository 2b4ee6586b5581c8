"""Computes sibling layers that read the same input together: q, k and v, or gate and up.

One pass over the input serves the low-rank parts of all siblings, one transposed copy their sampled products, and the
gradient of the input is summed inside the matrix products. The model's code is not changed: the first sibling to be
called computes the others too, which return their stored outputs when they are called with the identical tensor.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..engines.sharding import gathers_by_hooks, is_gathered, is_sharded
from .guards import Guard, guard_together
from .linear import SupraLinear

if TYPE_CHECKING:  # Triton may be absent
    from ..ops.fused import Group

# After so many unused outputs in a row the group is dissolved: the model calls its siblings with other inputs.
_PATIENCE = 3


class SharedInput:
    """A group of sibling layers that are usually called one after another with the same tensor.

    Args:
        parent: their parent module.
        names: theirs in the parent, in the order of the calls.
    """

    def __init__(self, parent: nn.Module, names: Sequence[str]) -> None:
        self._parent, self._names = parent, names
        self._members: list[SupraLinear] = [getattr(parent, name) for name in names]
        self._x: Tensor | None = None
        self._key: Any = None
        self._kind = "cpu"
        self._outputs: dict[int, Tensor] = {}
        self._misses = 0
        # The `Group` of all members, for training (True) and evaluation (False).
        self._guards: dict[bool, Guard] = {}
        self._computed_by: Group | None = None

    def output(self, layer: SupraLinear, x: Tensor) -> Tensor | None:
        """y (..., c) of a member for x (..., b); None if it must be computed on its own."""
        position = layer.position_in_group
        if (
            self._x is x
            and position in self._outputs
            and self._key == _key(x, self._kind)
            and self._is_current(position)
        ):
            y = self._outputs.pop(position)
            if not self._outputs:
                self._x, self._misses = None, 0
            return y
        if self._outputs:
            self._outputs, self._x = {}, None
            self._misses += 1
            if self._misses >= _PATIENCE:
                self.dissolve()
                return None
        if position != 0 or x.is_inference():  # inference tensors have no version counter that tells of changes
            return None
        guard = self._guards.get(layer.training)
        group = guard.result if guard is not None and guard.is_valid(x) else self._cached_group(x)
        if group is None:
            return None
        if group.persistent:
            layer.writer.write_for_forward(*group.slots)  # type: ignore[union-attr] # share_work gave it one
        y, *others = group(x)
        self._computed_by, self._kind = group, x.device.type
        self._x, self._key, self._outputs = x, _key(x, self._kind), dict(enumerate(others, start=1))
        return y

    def _is_current(self, position: int) -> bool:
        """Whether the adapter of a member is the one that its stored output was computed with."""
        guard, group = self._guards.get(self._members[position].training), self._computed_by
        if guard is None or group is None or guard.result is not group:
            return False
        # A switch of adapters restores persistent slots, which `is_unchanged` sees; for others only the guard tells.
        return group.slots[position].is_unchanged() and (group.persistent or guard.is_valid(self._x))  # type: ignore[arg-type]

    def _cached_group(self, x: Tensor) -> "Group | None":
        """The group of all members for the kernels, or None where these do not compute it; cached by the first."""
        if not same_objects([self._parent._modules.get(name) for name in self._names], self._members):
            self.dissolve()  # a member was replaced in the parent
            return None
        # If hooks of its own gather each layer, siblings may be empty now, and reading them here would gather them.
        if any(gathers_by_hooks(member.base_layer) and has_hooks(member) for member in self._members):
            self.dissolve()
            return None
        layers = []
        for member in self._members:
            layer = member.unwritten_kernel_layer(x)
            if layer is None:
                # An engine that gathers each layer separately will do so in the next forward too.
                if is_sharded(member.base_layer) and not is_gathered(member.base_layer):
                    self.dissolve()
                return None
            layers.append(layer)
        first = self._members[0]
        key = first.key("shared", x)
        guard = first.guard_cache.get(key)
        if guard is None or not same_objects(guard.result.layers, layers) or not guard.is_valid(x):
            from ..ops import fused

            group = guard.result if guard is not None and same_objects(guard.result.layers, layers) else None
            if group is None:
                if not fused.can_group(layers):
                    self.dissolve()
                    return None
                group = fused.Group(layers)
            guard = first.guard_cache[key] = guard_together(self._parent, self._names, self._members, x, group)
        self._guards[first.training] = guard
        return guard.result

    def dissolve(self) -> None:
        """Let every member compute on its own from now on."""
        for member in self._members:
            member.shared_input = None

    def invalidate_caches(self) -> None:
        """Drop cached groups and stored outputs: the tensors of a member may have been replaced."""
        self._x, self._key, self._outputs, self._computed_by = None, None, {}, None
        first = self._members[0]
        for cache in (self._guards, first.guard_cache, first.mlp_guards):
            cache.clear()

    def __getstate__(self) -> dict[str, Any]:
        """State for copies and pickles, without caches and stored outputs."""
        return {
            **self.__dict__,
            "_x": None,
            "_key": None,
            "_outputs": {},
            "_misses": 0,
            "_guards": {},
            "_computed_by": None,
        }


def has_hooks(layer: nn.Module) -> bool:
    """Whether a module has forward or backward hooks, which run only if the module itself is called."""
    return bool(layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks or layer._backward_pre_hooks)


def _key(x: Tensor, kind: str) -> tuple[Any, ...]:
    """The state, beside the identity of x, that a stored output depends on; `kind` is the type of device."""
    return torch.is_grad_enabled(), torch.is_autocast_enabled(kind), x._version


def same_objects(first: Sequence[Any], second: Sequence[Any]) -> bool:
    """Whether two sequences of equal length hold identical objects."""
    return all(a is b for a, b in zip(first, second, strict=True))
