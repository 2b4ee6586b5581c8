"""Another adapter's tensors in the place of one that is loaded: PEFT's `hotswap_adapter`, which knows LoRA alone."""

from typing import Any

import torch
from peft import PeftModel

from .layer import SupraLayer
from .rollback import ModelSnapshot


def hotswap_adapter(
    model: PeftModel, model_name_or_path: str, adapter_name: str, torch_device: str | None = None, **kwargs: Any
) -> None:
    """Put the adapter of a file into the tensors of a loaded one, in place: its name, its parameters and whether it is
    active stay; values, supports, α and dropout are the file's. What holds the parameters (an optimizer, a compiled
    graph) goes on holding them.

    Args:
        model: what `get_peft_model` or `PeftModel.from_pretrained` gave.
        model_name_or_path, torch_device, kwargs: as for `PeftModel.load_adapter`.
        adapter_name: the adapter that is replaced.

    Raises:
        ValueError: no such adapter; it is merged; the file has other layers, ranks or numbers of entries, or is no
            SUPRA adapter; either trains modules in full. The model is then as it was.
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
        # is_trainable: else PEFT puts the whole model into evaluation.
        model.load_adapter(model_name_or_path, incoming, is_trainable=True, torch_device=torch_device, **kwargs)
        config = model.peft_config[incoming]
        for each in (config_before, config):
            if each.modules_to_save:
                raise ValueError(
                    f"modules_to_save={each.modules_to_save} are not swapped in place: load the adapter under a name "
                    "of its own and set_adapter it."
                )
        layers = [module for module in tuner.modules() if isinstance(module, SupraLayer)]
        for layer in layers:
            old, new = layer.supra_budget.get(adapter_name), layer.supra_budget.get(incoming)
            if old != new:
                raise ValueError(
                    f"{layer.supra_layer}: {model_name_or_path} has {_sizes(new)} here, adapter {adapter_name!r} "
                    f"{_sizes(old)}: load it under a name of its own and set_adapter it."
                )
            if incoming in layer.pending_adapters:
                raise ValueError(f"{layer.supra_layer}: {model_name_or_path} holds no tensors for this layer.")
        for layer in layers:
            if incoming in layer.supra_budget:
                _swap(layer, adapter_name, incoming)
        config.inference_mode = config_before.inference_mode
    finally:
        before.restore()
    model.peft_config[adapter_name] = config


def _swap(layer: SupraLayer, adapter_name: str, incoming: str) -> None:
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
