"""Target layers: which linear layers of a model a config adapts, and which modules it must refuse."""

from collections.abc import Iterator
from typing import Any

from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn

from ..method.budget import BudgetRow, LayerBudget, budget_rows
from .base_model import FLOAT_DTYPES
from .config import SupraConfig
from .layer import SupraLayer
from .peft_compat import target_matcher
from .quantization import REMEDY, backend_of
from .selection import budgets_of


def target_layers(model: nn.Module, config: SupraConfig) -> dict[str, nn.Linear]:
    """The base layers that `config` adapts, by name in the base model, in the model's order.

    Raises:
        ValueError: none matched.
        TypeError: a matched module cannot be adapted.
    """
    layers = matching_layers(model, config)
    if not layers:
        raise ValueError(none_matched(model, config))
    return layers


def layer_budgets(model: nn.Module, config: SupraConfig) -> dict[str, LayerBudget]:
    """The budget of every layer that `config` adapts; weights may be on the meta device. Errors: as `target_layers`."""
    return budgets_of(target_layers(model, config), config)


def budget_table(model: nn.Module, adapter_name: str = "default") -> list[BudgetRow]:
    """What an adapter trains, per kind of layer (last part of the name) and budget, in the model's order."""
    return budget_rows(
        {
            module.layer_name: module.supra_budget[adapter_name]
            for module in model.modules()
            if isinstance(module, SupraLayer) and adapter_name in module.supra_budget
        }
    )


def matching_layers(model: nn.Module, config: SupraConfig) -> dict[str, nn.Linear]:
    """`target_layers`, empty if none matched."""
    is_target = target_matcher(config, model)
    layers = {}
    for name, module in base_modules(model):
        if is_target(name):
            check_supported(module, name)
            layers[name] = module
    _check_unshared(model, layers)
    return layers


def none_matched(model: nn.Module, config: SupraConfig) -> str:
    """The error message for a config without a matching layer."""
    return (
        f"no layer matched: target_modules={config.target_modules!r}, exclude_modules={config.exclude_modules!r}, "
        f"layers_to_transform={config.layers_to_transform!r} leave nothing to adapt in {type(model).__name__}."
    )


def base_modules(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Named modules as in the base model: in place of an adapted layer its base layer, without what is inside it."""
    adapted: tuple[str, ...] = ()
    for name, module in model.named_modules():
        if adapted and name.startswith(adapted):
            continue
        if isinstance(module, BaseTunerLayer):
            adapted += (f"{name}.",)
            module = module.get_base_layer()
        yield name, module


def check_supported(module: nn.Module, name: str) -> None:
    """Raise TypeError, with name and reason, for a module whose output SupraLinear would not reproduce.

    Args:
        module: a target module, or a `SupraLayer` that gets another adapter.
        name: its name.
    """
    base: Any = module.get_base_layer() if isinstance(module, BaseTunerLayer) else module
    kind = type(base).__name__
    if isinstance(module, BaseTunerLayer) and not isinstance(module, SupraLayer):
        raise TypeError(
            f"{name}: already adapted by {type(module).__name__}; SUPRA shares a layer with no other method."
        )
    if not isinstance(base, nn.Linear):
        raise TypeError(f"{name}: SUPRA adapts torch.nn.Linear, not {kind}; take it out of target_modules.")
    backend = backend_of(base)
    if backend is None and base.weight.dtype not in FLOAT_DTYPES:
        raise TypeError(f"{name}: the layer is quantized ({kind}, weight {base.weight.dtype}). {REMEDY}")
    reason = _plain_unsupported_reason(base) if backend is None else backend.unsupported_reason(base)
    reason = reason or _unsupported_reason(base)
    if reason:
        raise TypeError(f"{name}: {reason}; take it out of target_modules.")


def _plain_unsupported_reason(base: nn.Linear) -> str | None:
    """Why an unquantized layer cannot be adapted, or None."""
    if isinstance(base, nn.modules.linear.NonDynamicallyQuantizableLinear):
        return "its module reads the weight and never calls the layer (nn.MultiheadAttention)"
    if type(base).forward is not nn.Linear.forward:
        return f"{type(base).__name__} computes something else than nn.Linear"
    return None


def _unsupported_reason(base: nn.Linear) -> str | None:
    """Why a layer cannot be adapted, quantized or not, or None."""
    if "forward" in vars(base):
        return "its forward was replaced, as accelerate does for a model spread over devices or offloaded"
    if hasattr(base, "parametrizations"):
        return "its weight is parametrized"
    if base._forward_hooks or base._forward_pre_hooks:
        return "it has forward hooks, which an adapter would pass by; register them after the adapter is made"
    return None


def _check_unshared(model: nn.Module, layers: dict[str, nn.Linear]) -> None:
    """Refuse a weight that another module also uses, the same parameter or the same memory: it could not be merged."""
    names: dict[Any, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(_memory(parameter), []).append(name.removesuffix(".weight").removesuffix(".base_layer"))
    for name, layer in layers.items():
        shared = [other for other in names.get(_memory(layer.weight), []) if other != name]
        if shared:
            raise ValueError(
                f"{name}: its weight is also that of {shared[0]} (tied or shared), and adapting one would change the "
                "other at a merge; leave it out of the target modules."
            )


def _memory(parameter: Tensor) -> Any:
    """Identifies the memory of a parameter; one without memory (meta, sharded) is only identical to itself."""
    has_memory = type(parameter) is nn.Parameter and not parameter.is_meta and parameter.numel()
    return (parameter.device, parameter.data_ptr()) if has_memory else id(parameter)
