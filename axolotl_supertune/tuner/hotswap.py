"""Replace a loaded adapter's tensors in place by those of a file; PEFT's `hotswap_adapter` only supports LoRA."""

from typing import Any

import torch
from peft import PeftModel

from .layer import SupraLayer
from .rollback import ModelSnapshot


def hotswap_adapter(
    model: PeftModel, model_name_or_path: str, adapter_name: str, torch_device: str | None = None, **kwargs: Any
) -> None:
    """Replace a loaded adapter by one from a file, in place.

    Name, parameter objects and active state are kept, so an optimizer or a compiled graph keeps its references. Values,
    supports, α and dropout become those of the file.

    Args:
        model: from `get_peft_model` or `PeftModel.from_pretrained`.
        model_name_or_path, torch_device, kwargs: as for `PeftModel.load_adapter`.
        adapter_name: the adapter to replace.

    Raises:
        ValueError: no such adapter; it is merged; the file has other layers, ranks or sparse counts, or is not a SUPRA
            adapter; either adapter trains modules in full. The model is then unchanged.
    """
    tuner: Any = model.base_model
    layers = [module for module in tuner.modules() if isinstance(module, SupraLayer)]
    if adapter_name not in model.peft_config:
        raise ValueError(f"no adapter {adapter_name!r}: there are {', '.join(model.peft_config)}.")
    if any(adapter_name in layer.merged_adapters for layer in layers):
        raise ValueError(f"adapter {adapter_name!r} is merged: call unmerge_adapter() before it is swapped.")
    config_before, before = model.peft_config[adapter_name], ModelSnapshot(model)
    incoming = f"incoming_{adapter_name}"
    while incoming in model.peft_config:
        incoming += "_"
    try:
        # Without is_trainable PEFT would switch the whole model to eval mode.
        model.load_adapter(model_name_or_path, incoming, is_trainable=True, torch_device=torch_device, **kwargs)
        config = model.peft_config[incoming]
        for checked in (config_before, config):
            if checked.modules_to_save:
                raise ValueError(
                    f"modules_to_save={checked.modules_to_save} are not swapped in place: load the adapter under a "
                    "name of its own and set_adapter it."
                )
        layers = [module for module in tuner.modules() if isinstance(module, SupraLayer)]
        for layer in layers:
            old, new = layer.supra_budget.get(adapter_name), layer.supra_budget.get(incoming)
            if old != new:
                raise ValueError(
                    f"{layer.layer_name}: {model_name_or_path} has {_sizes(new)} here, adapter {adapter_name!r} "
                    f"{_sizes(old)}: load it under a name of its own and set_adapter it."
                )
            if incoming in layer.pending_adapters:
                raise ValueError(f"{layer.layer_name}: {model_name_or_path} holds no tensors for this layer.")
        for layer in layers:
            if incoming in layer.supra_budget:
                _swap(layer, adapter_name, incoming)
        config.inference_mode = config_before.inference_mode
    finally:
        before.restore()
    model.peft_config[adapter_name] = config


def _swap(layer: SupraLayer, adapter_name: str, incoming: str) -> None:
    """Copy the tensors and settings of adapter `incoming` of a layer to those of `adapter_name`."""
    layer.invalidate_caches()
    with torch.no_grad():
        for store in (*layer.adapter_layer_names, "supra_indices"):
            tensors = getattr(layer, store)
            if incoming in tensors:
                tensors[adapter_name].copy_(tensors[incoming])
    for settings in (layer.supra_scaling, layer.supra_dropout):
        if incoming in settings:
            settings[adapter_name] = settings[incoming]
    layer.pending_adapters.pop(adapter_name, None)


def _sizes(budget: Any) -> str:
    return "nothing" if budget is None else f"rank {budget.rank} and {budget.sparse_count:,} entries"
