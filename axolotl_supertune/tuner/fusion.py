"""Sets up the fast path of an adapted model: batched writes, groups of layers with one input, and fused gated MLPs.

`share_work` runs after adapters are injected. Without Triton it does nothing, and every layer computes on its own.

A gated MLP is fused only if its forward is, apart from white space, one of `_MLP_SOURCES`, and its activation SiLU:
`_mlp_forward` then replaces the forward of the instance. A model class with an adapted MLP of another form is warned
about once; tests/tuner/test_fusion.py fails if a transformers release changes the form.
"""

import importlib.util
import inspect
import warnings
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..method.sizes import GATED_MLP
from ..ops.dispatch import requested
from .custom_op import new_operator_number
from .guards import guard_together
from .linear import SupraLinear
from .shared_input import SharedInput, has_hooks, same_objects

if TYPE_CHECKING:  # Triton may be absent
    from ..ops.fused import GatedMLP

# Names of sibling layers that read the same input in transformers' models.
_SHARED_INPUT = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
# Source of the forward of LlamaMLP and its kin, without white space.
_MLP_SOURCES = {
    "defforward(self,x):down_proj=self.down_proj(self.act_fn(self.gate_proj(x))*self.up_proj(x))returndown_proj",
    "defforward(self,x):returnself.down_proj(self.act_fn(self.gate_proj(x))*self.up_proj(x))",
}
_warned: set[type] = set()


def share_work(model: nn.Module) -> None:
    """Let the adapted layers of `model` share writes, inputs and MLPs; layers that already do are left alone.

    Warns:
        UserWarning: once per class, for a gated MLP whose three layers are adapted but which cannot be fused.
    """
    if requested() == "reference" or importlib.util.find_spec("triton") is None:
        return
    from ..ops.inplace_weight import BatchedWriter

    layers = [module for module in model.modules() if isinstance(module, SupraLinear)]
    writer = next((layer.writer for layer in layers if layer.writer is not None), None) or BatchedWriter()
    for layer in layers:
        layer.writer = writer
        if layer.operator_number < 0:
            layer.operator_number = new_operator_number(layer)
    for parent in model.modules():
        for name, child in parent._modules.items():
            if isinstance(child, SupraLinear):
                child.place_in_parent = parent, name
        for names in _SHARED_INPUT:
            _group(parent, names)
        if _is_adapted_mlp(parent) and not _is_fused(parent):
            reason = unfused_reason(parent)
            if reason is None:
                parent.forward = partial(_mlp_forward, parent)
            else:
                _warn_unfused(parent, reason)


def unshare_work(model: nn.Module) -> None:
    """Undo `share_work`, before the adapted layers are removed."""
    for module in model.modules():
        if isinstance(module, SupraLinear):
            module.shared_input = None
        if _is_fused(module):
            del module.forward


def unfused_reason(mlp: nn.Module) -> str | None:
    """The reason why a gated MLP with three adapted layers cannot be fused, or None."""
    if "forward" in vars(mlp):
        return "its forward was replaced"
    try:
        source = inspect.getsource(type(mlp).forward)
    except (OSError, TypeError):
        return "the source of its forward cannot be read"
    if "".join(source.split()) not in _MLP_SOURCES:
        return "its forward is not written as that of LlamaMLP"
    if not _is_silu(mlp):
        return f"its activation is {type(getattr(mlp, 'act_fn', None)).__name__}, not SiLU"
    return None


def _group(parent: nn.Module, names: tuple[str, ...]) -> None:
    """Group the adapted children of these names, if all are there and none is in a group yet."""
    children = parent._modules
    members = [child for name in names if isinstance(child := children.get(name), SupraLinear)]
    if len(members) == len(names) and all(member.shared_input is None for member in members):
        group = SharedInput(parent, names)
        for position, member in enumerate(members):
            member.shared_input, member.position_in_group = group, position


def _is_adapted_mlp(module: nn.Module) -> bool:
    """Whether a module has the three layers of a gated MLP, all adapted."""
    return all(isinstance(module._modules.get(name), SupraLinear) for name in GATED_MLP)


def _is_fused(module: nn.Module) -> bool:
    """Whether `share_work` has replaced the module's forward."""
    own = vars(module).get("forward")
    return isinstance(own, partial) and own.func is _mlp_forward


def _is_silu(module: nn.Module) -> bool:
    act: Any = getattr(module, "act_fn", None)
    return isinstance(act, nn.SiLU) or type(act).__name__ == "SiLUActivation" or act is nn.functional.silu


def _warn_unfused(mlp: nn.Module, reason: str) -> None:
    """Warn once per class that an MLP is not fused, if the kernels could run here and take its (unquantized) layers."""
    kind = type(mlp)
    could_run = torch.cuda.is_available() or requested() == "triton"
    if kind in _warned or not could_run or any(type(mlp._modules[name]) is not SupraLinear for name in GATED_MLP):
        return
    _warned.add(kind)
    warnings.warn(
        f"{kind.__module__}.{kind.__qualname__} is not computed by the fused MLP kernels: {reason}. Its layers are "
        "computed one after another, which takes longer and saves up to two more activations of the MLP's inner width "
        "per token for backward.",
        stacklevel=3,
    )


def _mlp_forward(self: Any, x: Tensor) -> Tensor:
    """Forward of a fused MLP: x (..., b) → (..., c); the module's own forward wherever the kernels do not apply."""
    if torch.compiler.is_compiling():
        return type(self).forward(self, x)  # the compiler fuses the operations between the three layers
    modules = self._modules
    gate, up, down = modules.get("gate_proj"), modules.get("up_proj"), modules.get("down_proj")
    # The activation may have been replaced since `share_work`.
    guard = gate.mlp_guards.get(self.training) if isinstance(gate, SupraLinear) and _is_silu(self) else None
    mlp = guard.result if guard is not None and guard.is_valid(x) else _cached_mlp(self, [gate, up, down], x)
    if mlp is None or has_hooks(gate) or has_hooks(up) or has_hooks(down):
        return type(self).forward(self, x)
    if mlp.persistent:
        gate.writer.write_for_forward(*mlp.slots)
    return mlp(x)


def _cached_mlp(parent: Any, members: list[Any], x: Tensor) -> "GatedMLP | None":
    """The three layers as one function of the kernels, or None where these do not compute it; cached by the gate."""
    if not all(isinstance(member, SupraLinear) for member in members):
        return None
    if any(has_hooks(member) for member in members) or not _is_silu(parent):
        return None
    layers = [member.unwritten_kernel_layer(x) for member in members]  # of x, only dtype and device matter here
    if None in layers:
        return None
    from ..ops.fused import GatedMLP, can_group

    cache, key = members[0].guard_cache, members[0].key("mlp", x)
    guard = cache.get(key)
    if guard is None or not guard.is_valid(x):
        mlp = None if guard is None else guard.result
        if mlp is None or not same_objects(mlp.layers, layers):
            fits = can_group(layers[:2]) and layers[0].slot.persistent == layers[2].slot.persistent
            mlp = GatedMLP(*layers) if fits else None
        guard = cache[key] = guard_together(parent, GATED_MLP, members, x, mlp)
    members[0].mlp_guards[parent.training] = guard
    cached: GatedMLP | None = guard.result
    return cached
