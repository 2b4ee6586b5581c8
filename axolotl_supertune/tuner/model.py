"""SupraModel: chooses each target layer's budget and support, and puts SupraLinear in its place."""

import contextlib
import copy
import math
from collections.abc import Iterator
from typing import Any, ClassVar

from peft.tuners.tuners_utils import (
    BaseTuner,
    BaseTunerLayer,
    _maybe_include_all_linear_layers,
    check_target_module_exists,
)
from torch import Tensor, nn

from ..method.budget import BudgetRow, LayerBudget, budget_rows
from .base_model import DTYPES, REMEDY, check_base, loaded_dtype, note_quantization, read_parameter
from .checkpoint import is_packed, unpack_checked
from .config import SupraConfig, exact_targets
from .fusion import share_work, unshare_work
from .layer import SupraLayer
from .linear import SupraLinear, mixed_batch
from .quantization import bnb
from .quantization.linear import QuantizedSupraLinear
from .selection import budgets_of, supports_of
from .weighted_sum import COMBINATION_TYPES, Combined, combine

# Whose attributes no adapter may have the name of.
_NAMED = nn.ParameterDict()


class SupraModel(BaseTuner):
    """A model whose target layers carry SUPRA adapters.

    Args:
        model: the base model.
        config: what to adapt and how.
        adapter_name: the adapter's name.

    Raises:
        TypeError: a target module is neither a plain `nn.Linear` nor a `Linear4bit` or `Linear8bitLt` of bitsandbytes,
            or the model carries adapters of another method.
        ValueError: no layer matched, a budget above a layer's size, missing or foreign activation norms, NaN weights.

    Example:

        >>> norms = calibrate(model, windows.split(8))
        >>> model = get_peft_model(model, SupraConfig(supra_lambda=0.8, activation_norms=norms, task_type="CAUSAL_LM"))
    """

    prefix: str = "supra_"
    tuner_layer_cls = SupraLayer
    target_module_mapping: ClassVar[dict[str, Any]] = {}

    def __init__(self, model: nn.Module, *args: Any, **kwargs: Any) -> None:
        # Before PEFT puts this config in the place of the other method's, which share the model's `peft_config`.
        for name, module in model.named_modules():
            if isinstance(module, BaseTunerLayer) and not isinstance(module, SupraLayer):
                raise TypeError(
                    f"{name}: already adapted by {type(module).__name__}; SUPRA shares a model with no other method: a "
                    "save would hold one of the two. Call merge_and_unload() or unload() of the other first."
                )
        super().__init__(model, *args, **kwargs)

    def _prepare_model(self, peft_config: SupraConfig, model: nn.Module) -> None:
        """Choose every support before the first layer is replaced: no error leaves a half-adapted model."""
        for module in model.modules():
            if isinstance(module, SupraLayer):
                module.restore()
        check_base(model)
        bnb.keep_exact(model)
        note_quantization(model, peft_config)
        layers = _matching_layers(model, peft_config)  # none: PEFT says so, in its own words
        if not layers and any(isinstance(module, SupraLayer) for module in model.modules()):
            raise ValueError(_none_matched(model, peft_config))  # PEFT 0.20 says so of the first adapter alone
        for module in model.modules():
            if isinstance(module, SupraLayer) and module.merged and module.supra_layer in layers:
                raise ValueError(
                    f"{module.supra_layer}: an adapter is merged here, unmerge it before another one is added."
                )
        budgets = budgets_of(layers, peft_config)
        selecting = [
            name for name, budget in budgets.items() if budget.sparse_count and not layers[name].weight.is_meta
        ]
        if peft_config.needs_norms and selecting:
            norms = peft_config.loaded_norms()
            if norms is None:
                raise ValueError(
                    f"mask_score={peft_config.mask_score!r} needs activation norms: pass SupraConfig(activation_norms="
                    "calibrate(model, batches)) or a saved file, or use mask_score='magnitude'."
                )
            norms.check_model(model, read=read_parameter)
            peft_config.calibration = dict(norms.provenance)
        self._weight_dtype = loaded_dtype(model)
        self._supports = supports_of(layers, budgets, peft_config, self._weight_dtype)
        self._budgets = budgets

    def inject_adapter(self, model: nn.Module, *args: Any, **kwargs: Any) -> None:
        """Put the adapter in, as PEFT does, and let layers of one input compute together."""
        name = args[0] if args else kwargs["adapter_name"]
        if not name or "." in name or hasattr(_NAMED, name):
            raise ValueError(
                f"adapter name {name!r}: it becomes an attribute of torch's containers, so it has no dot and is none "
                "that these have (values, keys, items, training, …): choose another."
            )
        before = {
            id(module): module.supra_budget.get(name) for module in model.modules() if isinstance(module, SupraLayer)
        }
        # As PEFT 0.21 does: with 0.20 an adapter that is loaded for inference would freeze those that are there.
        trained = [(each, each.requires_grad) for each in model.parameters()] if before else []
        super().inject_adapter(model, *args, **kwargs)
        for module in list(model.modules()):
            # Of an adapter that had the name, where the new one has nothing.
            old = before.get(id(module))
            if isinstance(module, SupraLayer) and old is not None and module.supra_budget.get(name) is old:
                module.delete_adapter(name)
        for parameter, is_trained in trained:
            parameter.requires_grad_(is_trained)
        share_work(model)

    def _enable_peft_forward_hooks(self, *args: Any, **kwargs: Any) -> contextlib.AbstractContextManager[None]:
        """Where PEFT passes what `forward` and `generate` are given on to a tuner, and drops it afterwards."""
        names = kwargs.get("adapter_names")
        if names is not None:
            raise ValueError(mixed_batch(names))
        return contextlib.nullcontext()

    def set_adapter(self, *args: Any, **kwargs: Any) -> None:
        """Make adapters active, as PEFT does; what those before wrote into the weights is taken out of all at once."""
        self._restore()
        super().set_adapter(*args, **kwargs)

    def enable_adapter_layers(self) -> None:
        """As PEFT does."""
        self._restore()
        super().enable_adapter_layers()

    def disable_adapter_layers(self) -> None:
        """As PEFT does."""
        self._restore()
        super().disable_adapter_layers()

    def _restore(self) -> None:
        writers = {id(each.writer): each.writer for each in self._adapted_layers() if isinstance(each, SupraLinear)}
        for writer in writers.values():
            if writer is not None:
                writer.restore()

    def merge_adapter(self, adapter_names: list[str] | None = None, safe_merge: bool = False) -> None:
        """Merge in place, as PEFT does, after a look at all layers: no error leaves a half-merged model."""
        for layer in self._adapted_layers():
            if isinstance(layer, QuantizedSupraLinear):
                layer.merge()  # says why not
            layer.check_merge(safe_merge, adapter_names)
        super().merge_adapter(adapter_names)

    def _unload_and_optionally_merge(
        self,
        merge: bool = True,
        progressbar: bool = False,
        safe_merge: bool = False,
        adapter_names: list[str] | None = None,
    ) -> Any:
        """Take the adapters out, as PEFT does; merged into a quantized base, the whole model is dequantized."""
        if merge:
            self._check_merge_allowed()
            for layer in self._adapted_layers():
                layer.check_merge(safe_merge, adapter_names)
        unshare_work(self.model)
        if merge and any(isinstance(layer, QuantizedSupraLinear) for layer in self._adapted_layers()):
            self._dequantize(adapter_names)
        return super()._unload_and_optionally_merge(
            merge=merge, progressbar=progressbar, safe_merge=False, adapter_names=adapter_names
        )

    def _adapted_layers(self) -> list[SupraLayer]:
        return [module for module in self.model.modules() if isinstance(module, SupraLayer)]

    def _dequantize(self, adapter_names: list[str] | None) -> None:
        """Put dense layers in the place of all quantized ones, and leave no sign of quantization on the model."""
        for name, module in list(self.model.named_modules()):
            if isinstance(module, QuantizedSupraLinear):
                self.model.set_submodule(name, module.merged_linear(adapter_names))
            elif bnb.bits(module) and not name.endswith(".base_layer"):
                weight = bnb.dequantized(module, bnb.weight_dtype(module, self._weight_dtype))
                self.model.set_submodule(name, bnb.dense(module, weight))
        quantizer = getattr(self.model, "hf_quantizer", None)
        if quantizer is not None:
            quantizer.remove_quantization_config(self.model)
        for flag in ("is_loaded_in_4bit", "is_loaded_in_8bit", "is_4bit_serializable", "is_8bit_serializable"):
            if hasattr(self.model, flag):
                delattr(self.model, flag)

    def delete_adapter(self, adapter_name: str) -> None:
        """Remove an adapter.

        Raises:
            ValueError: there is none of this name, or it is merged.
        """
        if any(adapter_name in layer.merged_adapters for layer in self._adapted_layers()):
            # In the words of PEFT 0.21; 0.20 would delete it.
            raise ValueError(
                f"Cannot delete adapter(s) {[adapter_name]} while they are merged. Please unmerge them first."
            )
        super().delete_adapter(adapter_name)

    def add_weighted_adapter(
        self,
        adapters: list[str],
        weights: list[float],
        adapter_name: str,
        combination_type: str = "cat",
        svd_rank: int | None = None,
        svd_clamp: float | None = None,
        svd_full_matrices: bool = True,
        svd_driver: str | None = None,
        density: float | None = None,
        majority_sign_method: str = "total",
    ) -> None:
        """Add the weighted sum Σ w·(M⊙U + γ·L·R) of adapters as a new one, which is saved and loaded as any other.

        The sparse part lies on the union of the supports and is exact; the supports may differ or be equal.

        Args:
            adapters, weights: what is added; weights may be negative, and numbers of Python, numpy or torch.
            adapter_name: of the new adapter; it is not made active.
            combination_type: `cat`: exact, the rank is the sum of the ranks. `linear`: as LoRA's, all ranks equal, only
                close; the sparse part is exact there too.
            svd_rank, svd_clamp, svd_full_matrices, svd_driver, density, majority_sign_method: LoRA's, of types that are
                refused here.

        Raises:
            ValueError: another type or its arguments; unknown, merged or repeated adapters, or some that train modules
                in full; a taken name; weights that are not as many finite numbers; `linear` of different ranks.
            RuntimeError: an adapter is still to be loaded.
        """
        if combination_type not in COMBINATION_TYPES:
            raise ValueError(
                f"combination_type={combination_type!r} is none of {', '.join(COMBINATION_TYPES)}: svd, ties, dare and "
                "magnitude_prune are about low-rank parts, or change the support. 'cat' is exact."
            )
        given = {
            "svd_rank": svd_rank is not None,
            "svd_clamp": svd_clamp is not None,
            "svd_full_matrices": svd_full_matrices is not True,
            "svd_driver": svd_driver is not None,
            "density": density is not None,
            "majority_sign_method": majority_sign_method != "total",
        }
        if any(given.values()):
            name = next(name for name, is_given in given.items() if is_given)
            raise ValueError(f"{name} has no effect with combination_type={combination_type!r}: drop it.")
        weights = _numbers(weights)
        self._check_combinable(adapters, weights, adapter_name)
        shares = dict(zip(adapters, weights, strict=True))
        combined = {}
        for layer in self._adapted_layers():
            sparse = [(shares[name], layer.sparse_parts([name])[0]) for name in shares if name in layer.supra_values]
            low_rank = [(shares[name], layer.low_rank_parts([name])[0]) for name in shares if name in layer.supra_L]
            if sparse or low_rank:
                combined[layer.supra_layer] = combine(sparse, low_rank, combination_type, layer.supra_layer)
        modules = [name for name, _ in _modules(self.model)]
        self.peft_config[adapter_name] = _combined_config(
            [self.peft_config[name] for name in adapters], shares, combination_type, combined, modules
        )
        try:
            self.inject_adapter(self.model, adapter_name)
        except Exception:
            del self.peft_config[adapter_name]
            raise
        for layer in self._adapted_layers():
            if layer.supra_layer in combined:
                layer.take(adapter_name, combined[layer.supra_layer])

    def _check_combinable(self, adapters: list[str], weights: list[float], adapter_name: str) -> None:
        if not adapters or len(set(adapters)) < len(adapters) or len(weights) != len(adapters):
            raise ValueError(f"adapters={adapters} and weights={weights}: give different adapters, a weight for each.")
        if adapter_name in self.peft_config:
            raise ValueError(f"an adapter {adapter_name!r} exists already: give another name, or delete it.")
        for name in adapters:
            if name not in self.peft_config:
                raise ValueError(f"no adapter {name!r}: there are {', '.join(self.peft_config)}.")
            if self.peft_config[name].modules_to_save:
                raise ValueError(
                    f"adapter {name!r} trains modules in full (modules_to_save="
                    f"{self.peft_config[name].modules_to_save}), which cannot be added up."
                )
        for layer in self._adapted_layers():
            if layer.merged:
                raise ValueError(f"{layer.supra_layer}: an adapter is merged here: call unmerge_adapter() first.")
            layer.check_loaded(adapters)

    @classmethod
    def _get_adapter_state_dict(cls, *args: Any, state_dict: dict[str, Any], adapter_name: str, **kwargs: Any) -> Any:
        """What PEFT ≥ 0.21 takes for an adapter's: tensors of its layers, and those that stand for them in a file."""
        found = super()._get_adapter_state_dict(*args, state_dict=state_dict, adapter_name=adapter_name, **kwargs)
        return found | {key: state_dict[key] for key in state_dict if is_packed(key, adapter_name)}

    @classmethod
    def _remap_adapter_state_dict_for_load(cls, *args: Any, state_dict: dict[str, Any], **kwargs: Any) -> Any:
        """PEFT ≥ 0.21 looks for the names of the model's tensors in a file."""
        unpack_checked(state_dict)
        return super()._remap_adapter_state_dict_for_load(*args, state_dict=state_dict, **kwargs)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        """Check all that a checkpoint brings before the first tensor is copied: no error leaves a half-loaded model."""
        unpack_checked(state_dict)
        known = set()
        for name, module in self.named_modules():
            if isinstance(module, SupraLayer):
                module.check_checkpoint(state_dict, f"{prefix}{name}.")
                known |= {
                    f"{prefix}{name}.{tensor}" for each in module.supra_shape for tensor in module.tensor_names(each)
                }
        for key in state_dict:
            layer, mark, rest = key.removeprefix(prefix).partition(f".{self.prefix}")
            # PEFT 0.20 puts the adapter's name into every key, 0.21 only into those of layers that the model has.
            adapter = rest.partition(".")[2]
            if mark and key not in known and (not adapter or adapter in self.peft_config):
                raise ValueError(
                    f"{layer.removeprefix('model.')}: the checkpoint adapts this layer and the model does not: load it "
                    "on the base model, with the target modules, that it was trained on."
                )
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def _create_and_replace(
        self,
        peft_config: SupraConfig,
        adapter_name: str,
        target: Any,
        target_name: str,
        parent: nn.Module,
        current_key: str,
        **optional_kwargs: Any,
    ) -> None:
        _check_supported(target, current_key)
        layer: Any = target
        if not isinstance(target, SupraLinear):
            is_quantized = bnb.bits(target) is not None
            layer = (
                QuantizedSupraLinear(target, current_key, self._weight_dtype)
                if is_quantized
                else SupraLinear(target, current_key)
            )
        if layer is not target:
            layer._active_adapter = adapter_name
        layer.update_layer(
            adapter_name,
            self._budgets.pop(current_key),
            self._supports.pop(current_key),
            awaits_checkpoint=peft_config.support == "saved",
            awaits_gradient=peft_config.support == "select" and peft_config.awaits_gradient,
            lora_alpha=peft_config.lora_alpha,
            lora_dropout=peft_config.lora_dropout,
            init_weights=peft_config.init_weights,
            inference_mode=peft_config.inference_mode,
        )
        if layer is not target:
            if adapter_name not in self.active_adapters:
                layer.requires_grad_(False)
            self._replace_module(parent, target_name, layer, target)


def target_layers(model: nn.Module, config: SupraConfig) -> dict[str, nn.Linear]:
    """The base layers that `config` adapts, by name in the base model, in the model's order.

    Raises:
        ValueError: none matched.
        TypeError: a matched module cannot be adapted.
    """
    layers = _matching_layers(model, config)
    if not layers:
        raise ValueError(_none_matched(model, config))
    return layers


def _none_matched(model: nn.Module, config: SupraConfig) -> str:
    return (
        f"no layer matched: target_modules={config.target_modules!r}, exclude_modules={config.exclude_modules!r}, "
        f"layers_to_transform={config.layers_to_transform!r} leave nothing to adapt in {type(model).__name__}."
    )


def layer_budgets(model: nn.Module, config: SupraConfig) -> dict[str, LayerBudget]:
    """The budget of every layer that `config` adapts; shapes are enough, weights may be on the meta device."""
    return budgets_of(target_layers(model, config), config)


def budget_table(model: nn.Module, adapter_name: str = "default") -> list[BudgetRow]:
    """What an adapter trains, per kind of layer (last part of the name) and budget, in the model's order."""
    return budget_rows(
        {
            module.supra_layer: module.supra_budget[adapter_name]
            for module in model.modules()
            if isinstance(module, SupraLayer) and adapter_name in module.supra_budget
        }
    )


def _matching_layers(model: nn.Module, config: SupraConfig) -> dict[str, nn.Linear]:
    matching = _maybe_include_all_linear_layers(copy.copy(config), model)
    layers = {}
    for name, module in _modules(model):
        if name and check_target_module_exists(matching, name):
            _check_supported(module, name)
            layers[name] = module
    _check_unshared(model, layers)
    return layers


def _check_unshared(model: nn.Module, layers: dict[str, nn.Linear]) -> None:
    """Refuse a weight that another module uses too, itself or its memory: adapted here and plain there, it could not be
    merged."""
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
    """Equal for two parameters that lie at one place; those that lie nowhere yet are equal to none but themselves."""
    plain = type(parameter) is nn.Parameter and not parameter.is_meta and parameter.numel()
    return (parameter.device, parameter.data_ptr()) if plain else id(parameter)


def _modules(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Named modules with every adapted layer standing for its base layer, and nothing of what is inside it."""
    inside: tuple[str, ...] = ()
    for name, module in model.named_modules():
        if inside and name.startswith(inside):
            continue
        if isinstance(module, BaseTunerLayer):
            inside += (f"{name}.",)
            module = module.get_base_layer()
        yield name, module


def _numbers(weights: Any) -> list[float]:
    """Weights as Python has them, which the config is saved with."""
    try:
        numbers = [float(weight) for weight in weights if not isinstance(weight, (str, bytes))]
    except (TypeError, ValueError, RuntimeError):
        numbers = []
    if len(numbers) < len(weights) or not all(map(math.isfinite, numbers)):
        raise ValueError(f"weights={weights} are not all finite numbers.")
    return numbers


def _combined_config(
    parts: list[SupraConfig],
    shares: dict[str, float],
    combination_type: str,
    combined: dict[str, Combined],
    modules: list[str],
) -> SupraConfig:
    """The config of a combined adapter: the sizes of its layers are written down; γ = 1 where the rank is largest."""
    first = parts[0]
    config = copy.copy(first)
    targets = exact_targets(combined, modules)
    config.target_modules = targets if isinstance(targets, str) else set(targets)
    config.exclude_modules = None
    config.layers_to_transform = config.layers_pattern = None
    config.support, config.activation_norms, config.calibration = "saved", None, None
    config.sparse_counts = config.gradient = None
    config.values_dtype = "fp32"  # that of one part would round the sum
    config.lora_alpha = max((layer.rank for layer in combined.values()), default=0) or first.lora_alpha
    config.combination = {
        "type": combination_type,
        "weights": shares,
        "parts": {name: part.as_part() for name, part in zip(shares, parts, strict=True)},
        "layers": {name: [layer.rank, layer.sparse_count] for name, layer in combined.items()},
    }
    return config


def _check_supported(module: nn.Module, name: str) -> None:
    """Refuse, by name and reason, what SupraLinear would compute otherwise than the layer itself does."""
    base: Any = module.get_base_layer() if isinstance(module, BaseTunerLayer) else module
    kind = type(base).__name__
    if isinstance(module, BaseTunerLayer) and not isinstance(module, SupraLayer):
        raise TypeError(
            f"{name}: already adapted by {type(module).__name__}; SUPRA shares a layer with no other method."
        )
    if not isinstance(base, nn.Linear):
        raise TypeError(f"{name}: SUPRA adapts torch.nn.Linear, not {kind}; take it out of target_modules.")
    is_quantized = bnb.bits(base) is not None
    if not is_quantized and base.weight.dtype not in DTYPES:
        raise TypeError(f"{name}: the layer is quantized ({kind}, weight {base.weight.dtype}). {REMEDY}")
    reason = bnb.obstacle(base) if is_quantized else None
    if reason:
        pass
    elif isinstance(base, nn.modules.linear.NonDynamicallyQuantizableLinear):
        reason = "its module reads the weight and never calls the layer (nn.MultiheadAttention)"
    elif not is_quantized and type(base).forward is not nn.Linear.forward:
        reason = f"{kind} computes something else than nn.Linear"
    elif "forward" in vars(base):
        reason = "its forward was replaced, as accelerate does for a model spread over devices or offloaded"
    elif hasattr(base, "parametrizations"):
        reason = "its weight is parametrized"
    elif base._forward_hooks or base._forward_pre_hooks:
        reason = "it has forward hooks, which an adapter would pass by; register them after the adapter is made"
    if reason:
        raise TypeError(f"{name}: {reason}; take it out of target_modules.")
