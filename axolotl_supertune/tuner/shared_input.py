"""Adapted layers that read one input, computed together: q, k and v; gate and up; a whole gated MLP.

One pass over the shared input serves the low-rank parts of all, one transposed copy their sampled products, and the
gradient of the input is summed inside the matrix products. A model's own code stays as it is: the first layer that is
called computes its siblings too, and they hand out what is there when they are called with the very same tensor.
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

# A model that calls a sibling with another input gains nothing here: after so many times in a row it is left alone.
_PATIENCE = 3


class SharedInput:
    """Siblings of one module that are usually called one after another on the same tensor."""

    def __init__(self, parent: nn.Module, names: Sequence[str]) -> None:
        self._parent, self._names = parent, names
        self._members: list[SupraLinear] = [getattr(parent, name) for name in names]
        self._x: Tensor | None = None
        self._key: Any = None
        self._kind = "cpu"
        self._outputs: dict[int, Tensor] = {}
        self._misses = 0
        # One for training and one for evaluation: the group of all members.
        self._guards: dict[bool, Guard] = {}
        self._computed_by: Group | None = None

    def output(self, layer: SupraLinear, x: Tensor) -> Tensor | None:
        """y of `layer`, or None if it is to be computed alone."""
        at = layer.shared_place
        if self._x is x and at in self._outputs and self._key == _key(x, self._kind) and self._still(at):
            y = self._outputs.pop(at)
            if not self._outputs:
                self._x, self._misses = None, 0
            return y
        if self._outputs:
            self._outputs, self._x = {}, None
            self._misses += 1
            if self._misses >= _PATIENCE:
                self.dissolve()
                return None
        if at != 0 or x.is_inference():  # of an inference tensor nobody can tell whether it was changed
            return None
        known = self._guards.get(layer.training)
        group = known.result if known is not None and known.is_valid(x) else self._fitting_group(x)
        if group is None:
            return None
        if group.persistent:
            layer.writer.refresh(*group.slots)  # type: ignore[union-attr] # share_work gave it one
        y, *others = group(x)
        self._computed_by, self._kind = group, x.device.type
        self._x, self._key, self._outputs = x, _key(x, self._kind), dict(enumerate(others, start=1))
        return y

    def _still(self, at: int) -> bool:
        """Whether the adapter of a member is what it was when its output was computed."""
        known, group = self._guards.get(self._members[at].training), self._computed_by
        if known is None or group is None or known.result is not group:
            return False
        # What is written into a weight that stays is taken out by whoever switches adapters; nothing tells of others.
        return group.slots[at].is_unchanged() and (group.persistent or known.is_valid(self._x))  # type: ignore[arg-type]

    def _fitting_group(self, x: Tensor) -> "Group | None":
        if not same_objects([self._parent._modules.get(name) for name in self._names], self._members):
            self.dissolve()  # a member was taken out by hand
            return None
        # If hooks of its own gather each layer, siblings may be empty now, and reading them here would gather them.
        if any(gathers_by_hooks(member.base_layer) and has_hooks(member) for member in self._members):
            self.dissolve()
            return None
        layers = []
        for member in self._members:
            layer = member.cached_layer(x)
            if layer is None:
                # An engine that gathers each layer separately will do so in the next forward too.
                if is_sharded(member.base_layer) and not is_gathered(member.base_layer):
                    self.dissolve()
                return None
            layers.append(layer)
        first = self._members[0]
        key = first.key("shared", x)
        known = first.guard_cache.get(key)
        if known is None or not same_objects(known.result.layers, layers) or not known.is_valid(x):
            from ..ops import fused

            group = known.result if known is not None and same_objects(known.result.layers, layers) else None
            if group is None:
                if not fused.can_group(layers):
                    self.dissolve()
                    return None
                group = fused.Group(layers)
            known = first.guard_cache[key] = guard_together(self._parent, self._names, self._members, x, group)
        self._guards[first.training] = known
        return known.result

    def dissolve(self) -> None:
        """Let every member compute alone from now on."""
        for member in self._members:
            member.shared_input = None

    def invalidate_caches(self) -> None:
        """Drop what was found of the members, and what was computed with it: the tensors of one may be taken out."""
        self._x, self._key, self._outputs, self._computed_by = None, None, {}, None
        first = self._members[0]
        for found in (self._guards, first.guard_cache, first.mlp_guards):
            found.clear()

    def __getstate__(self) -> dict[str, Any]:
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
    return bool(layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks or layer._backward_pre_hooks)


def _key(x: Tensor, kind: str) -> tuple[Any, ...]:
    """What a stored output depends on beside the input itself, on this kind of device."""
    return torch.is_grad_enabled(), torch.is_autocast_enabled(kind), x._version


def same_objects(one: Sequence[Any], other: Sequence[Any]) -> bool:
    """Whether two sequences hold the very same objects."""
    return all(a is b for a, b in zip(one, other, strict=True))
