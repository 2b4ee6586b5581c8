"""SupraModel: the PEFT tuner that puts SupraLinear in the place of the target layers.

`targets` decides which layers those are, `selection` what is trained in each.

Internals that this file reaches into: `_prepare_model`, `_create_and_replace`, `_replace_module`,
`_unload_and_optionally_merge` and `_check_merge_allowed` of PEFT's `BaseTuner`, which methods in PEFT's own tree
override or call, too. If one were renamed or got other arguments, no layer would be adapted or merged:
tests/tuner/test_tuner.py, and PEFT's own tests with SUPRA (tests/conformance).
"""

from typing import Any, ClassVar

from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn

from . import quantization
from .base_model import loaded_dtype, read_parameter
from .checkpoint import is_packed, unpack_checked
from .config import SupraConfig
from .fusion import share_work, unshare_work
from .layer import SupraLayer
from .linear import SupraLinear, mixed_batch
from .peft_compat import CompatTuner, requires_grad_kept
from .quantization.foreign import check_base
from .quantization.linear import QuantizedSupraLinear, dequantize_model
from .quantization.settings import record_quantization
from .rollback import snapshot_if_pending
from .selection import budgets_of, supports_of
from .targets import base_modules, check_supported, matching_layers, none_matched
from .weighted_sum import check_combination, combine_layers, combined_config, finite_numbers

# An adapter's name becomes a key of nn.ParameterDict, which must not hide one of its attributes.
_PARAMETER_DICT = nn.ParameterDict()


class SupraModel(CompatTuner):
    """A model whose target layers carry SUPRA adapters.

    Args:
        model: the base model.
        config: what to adapt and how.
        adapter_name: the adapter's name.

    Raises:
        TypeError: a target module is neither a plain `nn.Linear` nor a layer of a supported quantization library, or
            the model carries adapters of another method.
        ValueError: no layer matched, a budget above a layer's size, missing or foreign activation norms, NaN weights.

    Example:

        >>> norms = calibrate(model, windows.split(8))
        >>> model = get_peft_model(model, SupraConfig(supra_lambda=0.8, activation_norms=norms, task_type="CAUSAL_LM"))
    """

    prefix: str = "supra_"
    tuner_layer_cls = SupraLayer
    target_module_mapping: ClassVar[dict[str, Any]] = {}

    mixed_batch_error = staticmethod(mixed_batch)
    is_packed = staticmethod(is_packed)
    unpack = staticmethod(unpack_checked)

    def __init__(self, model: nn.Module, *args: Any, **kwargs: Any) -> None:
        # First: PEFT would replace the other method's configs in the model's `peft_config` by this one.
        for name, module in model.named_modules():
            if isinstance(module, BaseTunerLayer) and not isinstance(module, SupraLayer):
                raise TypeError(
                    f"{name}: already adapted by {type(module).__name__}; SUPRA shares a model with no other method: a "
                    "save would hold one of the two. Call merge_and_unload() or unload() of the other first."
                )
        snapshot_if_pending(model)
        super().__init__(model, *args, **kwargs)

    def _prepare_model(self, peft_config: SupraConfig, model: nn.Module) -> None:
        """Choose all supports before the first layer is replaced, so that no error leaves a half-adapted model."""
        for layer in _supra_layers(model):
            layer.restore()
        check_base(model)
        quantization.prepare(model)
        record_quantization(model, peft_config)
        layers = matching_layers(model, peft_config)  # if there is none, PEFT raises its own error
        adapted = _supra_layers(model)
        if not layers and adapted:
            raise ValueError(none_matched(model, peft_config))  # PEFT 0.20 only raises it for the first adapter
        for layer in adapted:
            if layer.merged and layer.layer_name in layers:
                raise ValueError(
                    f"{layer.layer_name}: an adapter is merged here, unmerge it before another one is added."
                )
        budgets = budgets_of(layers, peft_config)
        if any(budget.sparse_count and not layers[name].weight.is_meta for name, budget in budgets.items()):
            _check_norms(peft_config, model)
        self._weight_dtype = loaded_dtype(model)
        self._supports = supports_of(layers, budgets, peft_config, self._weight_dtype)
        self._budgets = budgets

    def inject_adapter(self, model: nn.Module, *args: Any, **kwargs: Any) -> None:
        """Add the adapter, as PEFT does, and let layers that read one input compute together."""
        name = args[0] if args else kwargs["adapter_name"]
        if not name or "." in name or hasattr(_PARAMETER_DICT, name):
            raise ValueError(
                f"adapter name {name!r}: it becomes an attribute of torch's containers, so it has no dot and is none "
                "that these have (values, keys, items, training, …): choose another."
            )
        before = [(layer, layer.supra_budget.get(name)) for layer in _supra_layers(model)]
        with requires_grad_kept(model, enabled=bool(before)):
            super().inject_adapter(model, *args, **kwargs)
            # Where an adapter of this name was replaced, remove it from layers that the new one does not have.
            for layer, budget in before:
                if budget is not None and layer.supra_budget.get(name) is budget:
                    layer.delete_adapter(name)
        share_work(model)

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
        check_supported(target, current_key)
        layer: Any = target
        if not isinstance(target, SupraLinear):
            if quantization.is_quantized(target):
                layer = QuantizedSupraLinear(target, current_key, self._weight_dtype)
            else:
                layer = SupraLinear(target, current_key)
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

    def adapted_layers(self) -> list[SupraLayer]:
        """The adapted layers, in the model's order."""
        return _supra_layers(self.model)

    def set_adapter(self, *args: Any, **kwargs: Any) -> None:
        """Make adapters active, as PEFT does, after the weights of all layers were restored together."""
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
        """Restore the base weights of all layers in a few launches."""
        writers = {id(layer.writer): layer.writer for layer in self.adapted_layers() if isinstance(layer, SupraLinear)}
        for writer in writers.values():
            if writer is not None:
                writer.restore()

    def merge_adapter(self, adapter_names: list[str] | None = None, safe_merge: bool = False) -> None:
        """Merge in place, as PEFT does, after all layers were checked: no error leaves a half-merged model."""
        for layer in self.adapted_layers():
            if isinstance(layer, QuantizedSupraLinear):
                layer.merge()  # raises
            layer.check_merge(safe_merge, adapter_names)
        super().merge_adapter(adapter_names)

    def _unload_and_optionally_merge(
        self,
        merge: bool = True,
        progressbar: bool = False,
        safe_merge: bool = False,
        adapter_names: list[str] | None = None,
    ) -> Any:
        """Remove the adapters, as PEFT does. Merging into a quantized base dequantizes the whole model."""
        if merge:
            self._check_merge_allowed()
            for layer in self.adapted_layers():
                layer.check_merge(safe_merge, adapter_names)
        unshare_work(self.model)
        if merge and any(isinstance(layer, QuantizedSupraLinear) for layer in self.adapted_layers()):
            dequantize_model(self.model, self._weight_dtype, adapter_names)
        return super()._unload_and_optionally_merge(
            merge=merge, progressbar=progressbar, safe_merge=False, adapter_names=adapter_names
        )

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
            svd_rank, svd_clamp, svd_full_matrices, svd_driver, density, majority_sign_method: LoRA's, for types that
                are refused here.

        Raises:
            ValueError: another type or its arguments; unknown, merged or repeated adapters, or some that train modules
                in full; a taken name; weights that are not as many finite numbers; `linear` of different ranks.
            RuntimeError: an adapter is still to be loaded.
        """
        check_combination(
            combination_type,
            svd_rank=svd_rank is not None,
            svd_clamp=svd_clamp is not None,
            svd_full_matrices=svd_full_matrices is not True,
            svd_driver=svd_driver is not None,
            density=density is not None,
            majority_sign_method=majority_sign_method != "total",
        )
        weights = finite_numbers(weights)
        self._check_combinable(adapters, weights, adapter_name)
        weight_of = dict(zip(adapters, weights, strict=True))
        combined = combine_layers(self.adapted_layers(), weight_of, combination_type)
        self.peft_config[adapter_name] = combined_config(
            {name: self.peft_config[name] for name in adapters},
            weight_of,
            combination_type,
            combined,
            [name for name, _ in base_modules(self.model)],
        )
        try:
            self.inject_adapter(self.model, adapter_name)
        except Exception:
            del self.peft_config[adapter_name]
            raise
        for layer in self.adapted_layers():
            if layer.layer_name in combined:
                layer.set_tensors(adapter_name, combined[layer.layer_name])

    def _check_combinable(self, adapters: list[str], weights: list[float], adapter_name: str) -> None:
        """Raise unless these adapters can be added up under a new name; errors as for `add_weighted_adapter`."""
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
        for layer in self.adapted_layers():
            if layer.merged:
                raise ValueError(f"{layer.layer_name}: an adapter is merged here: call unmerge_adapter() first.")
            layer.check_loaded(adapters)

    def _load_from_state_dict(self, state_dict: dict[str, Tensor], prefix: str, *args: Any, **kwargs: Any) -> None:
        """Check the whole checkpoint before the first tensor is copied, so that no error leaves a half-loaded model."""
        unpack_checked(state_dict)
        known = set()
        for name, module in self.named_modules():
            if isinstance(module, SupraLayer):
                module.check_checkpoint(state_dict, f"{prefix}{name}.")
                for adapter in module.supra_shape:
                    known |= {f"{prefix}{name}.{tensor}" for tensor in module.tensor_names(adapter)}
        for key in state_dict:
            layer, mark, rest = key.removeprefix(prefix).partition(f".{self.prefix}")
            # PEFT 0.20 adds the adapter's name to every key, 0.21 only to those of layers that the model has.
            adapter = rest.partition(".")[2]
            if mark and key not in known and (not adapter or adapter in self.peft_config):
                raise ValueError(
                    f"{layer.removeprefix('model.')}: the checkpoint adapts this layer and the model does not: load it "
                    "on the base model, with the target modules, that it was trained on."
                )
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)


def _supra_layers(model: nn.Module) -> list[SupraLayer]:
    return [module for module in model.modules() if isinstance(module, SupraLayer)]


def _check_norms(config: SupraConfig, model: nn.Module) -> None:
    """If the score needs activation norms: check that they are given and belong to the model, and record their origin.

    Raises:
        ValueError: no norms, or those of another model.
    """
    if not config.needs_norms:
        return
    norms = config.loaded_norms()
    if norms is None:
        raise ValueError(
            f"mask_score={config.mask_score!r} needs activation norms: pass SupraConfig(activation_norms="
            "calibrate(model, batches)) or a saved file, or use mask_score='magnitude'."
        )
    norms.check_model(model, read=read_parameter)
    config.calibration = dict(norms.provenance)
