"""TODO-DOC tuner.fusion."""

import importlib.util
import inspect
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..method.sizes import GATED_MLP
from ..ops.dispatch import requested
from .custom_op import number_of
from .guards import guard_together
from .linear import SupraLinear
from .shared_input import SharedInput, has_hooks, same_objects

if TYPE_CHECKING:  # Triton may be absent
    from ..ops.fused import GatedMLP


_SHARED_INPUT = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
_MLP_SOURCES = {
    "defforward(self,x):down_proj=self.down_proj(self.act_fn(self.gate_proj(x))*self.up_proj(x))returndown_proj",
    "defforward(self,x):returnself.down_proj(self.act_fn(self.gate_proj(x))*self.up_proj(x))",
}


def share_work(model: nn.Module) -> None:
    """Write all adapted layers of `model` together, group siblings, and fuse gated MLPs that are adapted throughout."""
    if requested() == "reference" or importlib.util.find_spec("triton") is None:
        return
    from ..ops.inplace_weight import BatchedWriter

    layers = [module for module in model.modules() if isinstance(module, SupraLinear)]
    writer = next((layer.writer for layer in layers if layer.writer is not None), None) or BatchedWriter()
    for layer in layers:
        layer.writer = writer
        if layer.number < 0:
            layer.number = number_of(layer)
    for parent in model.modules():
        children = parent._modules
        for name, child in children.items():
            if isinstance(child, SupraLinear):
                child.home = parent, name
        for names in _SHARED_INPUT:
            members = [child for name in names if isinstance(child := children.get(name), SupraLinear)]
            if len(members) == len(names) and all(member.shared_input is None for member in members):
                group = SharedInput(parent, names)
                for at, member in enumerate(members):
                    member.shared_input, member.shared_place = group, at
        if is_gated_mlp(parent):
            parent.forward = partial(_mlp_forward, parent)


def unshare_work(model: nn.Module) -> None:
    """Undo `share_work`: before the adapted layers are taken out."""
    for module in model.modules():
        if isinstance(module, SupraLinear):
            module.shared_input = None
        own = vars(module).get("forward")
        if isinstance(own, partial) and own.func is _mlp_forward:
            del module.forward


def is_gated_mlp(module: nn.Module) -> bool:
    """Whether a module is down(silu(gate(x))·up(x)) in so many words, with all three layers adapted."""
    layers = [module._modules.get(name) for name in GATED_MLP]
    if not all(isinstance(layer, SupraLinear) for layer in layers) or "forward" in vars(module):
        return False
    if not _is_silu(module):
        return False
    try:
        source = inspect.getsource(type(module).forward)
    except (OSError, TypeError):
        return False
    return "".join(source.split()) in _MLP_SOURCES


def _is_silu(module: nn.Module) -> bool:
    act: Any = getattr(module, "act_fn", None)
    return isinstance(act, nn.SiLU) or type(act).__name__ == "SiLUActivation" or act is nn.functional.silu


def _mlp_forward(self: Any, x: Tensor) -> Tensor:
    if torch.compiler.is_compiling():
        return type(self).forward(self, x)  # the compiler fuses what lies between the three layers
    modules = self._modules
    gate, up, down = modules.get("gate_proj"), modules.get("up_proj"), modules.get("down_proj")
    # What is fused is SiLU: another activation may have been put in since.
    one = gate.mlp_guards.get(self.training) if isinstance(gate, SupraLinear) and _is_silu(self) else None
    mlp = one.result if one is not None and one.is_valid(x) else _fitting_mlp(self, [gate, up, down], x)
    if mlp is None or has_hooks(gate) or has_hooks(up) or has_hooks(down):
        return type(self).forward(self, x)
    if mlp.persistent:
        gate.writer.refresh(*mlp.slots)
    return mlp(x)


def _fitting_mlp(parent: Any, members: list[Any], x: Tensor) -> "GatedMLP | None":
    if not all(isinstance(member, SupraLinear) for member in members):
        return None
    if any(has_hooks(member) for member in members) or not _is_silu(parent):
        return None
    layers = [member.cached_layer(x) for member in members]  # the inner activation is as x is, but for its width
    if None in layers:
        return None
    from ..ops.fused import GatedMLP, can_group

    kept, key = members[0].guard_cache, members[0].key("mlp", x)
    one = kept.get(key)
    if one is None or not one.is_valid(x):
        mlp = None if one is None else one.result
        if mlp is None or not same_objects(mlp.layers, layers):
            alike = can_group(layers[:2]) and layers[0].slot.persistent == layers[2].slot.persistent
            mlp = GatedMLP(*layers) if alike else None
        one = kept[key] = guard_together(parent, GATED_MLP, members, x, mlp)
    members[0].mlp_guards[parent.training] = one
    found: GatedMLP | None = one.result
    return found
