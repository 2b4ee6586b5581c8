"""Loading SUPRA adapters through PEFT: mismatches are refused before anything changes, and errors are rolled back.

Internals that this file reaches into: `PeftModel._split_kwargs`, which separates the Hub's arguments from the others.
If it were renamed, replacing a loaded SUPRA adapter by a file would raise AttributeError:
tests/tuner/test_several.py.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from peft import PeftConfig
from safetensors import SafetensorError, safe_open

from ..method.adapter_files import CONFIG, WEIGHTS
from .checkpoint import damaged
from .config import SupraConfig
from .layer import SupraLayer
from .peft_compat import extend, extend_from_pretrained
from .rollback import rollback_on_error, rollback_once_adapted


def extend_loading() -> None:
    """Extend `PeftModel.load_adapter` and `from_pretrained` for SUPRA adapters; later calls do nothing.

    They leave the model as it was if they raise, name a file that safetensors cannot read, and refuse a file in the
    place of a loaded adapter that has other settings.
    """
    extend("load_adapter", _load_adapter)
    extend_from_pretrained(rollback_once_adapted)


def _load_adapter(
    original: Callable[..., Any],
    model: Any,
    model_id: str | os.PathLike[str],
    adapter_name: str,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """`PeftModel.load_adapter` of a model with SUPRA adapters."""
    if isinstance(model.peft_config.get(adapter_name), SupraConfig):
        _check_replaced(model, model_id, adapter_name, kwargs)
    with rollback_on_error(model):
        try:
            return original(model, model_id, adapter_name, *args, **kwargs)
        except SafetensorError as error:
            if not isinstance(model.peft_config.get(adapter_name), SupraConfig):
                raise
            raise damaged(Path(model_id) / WEIGHTS, error) from error


def _check_replaced(model: Any, model_id: str | os.PathLike[str], adapter_name: str, kwargs: dict[str, Any]) -> None:
    """Refuse a file whose settings differ from those of the loaded adapter that it would replace.

    PEFT copies only the tensors: the adapter would be computed with the α and dropout of the one before.
    """
    layers = [
        module for module in model.modules() if isinstance(module, SupraLayer) and adapter_name in module.supra_budget
    ]
    if any(adapter_name in layer.pending_adapters for layer in layers):
        return  # an adapter without tensors yet, which this file brings
    folder = Path(model_id) / (kwargs.get("subfolder") or "")
    if folder.is_dir() and not (folder / CONFIG).is_file():
        return  # no settings to compare
    loaded = model.peft_config[adapter_name]
    saved = PeftConfig.from_pretrained(os.fspath(model_id), **model._split_kwargs(dict(kwargs))[0])
    if not isinstance(saved, SupraConfig):
        raise ValueError(f"{model_id} holds a {saved.peft_type} adapter, {adapter_name!r} is one of SUPRA.")
    low_rank = any(adapter_name in layer.supra_L for layer in layers)
    settings = {key: (getattr(saved, key), getattr(loaded, key)) for key in ("lora_alpha", "lora_dropout") if low_rank}
    settings["modules_to_save"] = tuple(sorted(set(each.modules_to_save or ())) for each in (saved, loaded))  # type: ignore[assignment]
    differences = [f"{key} {in_file} (here {own})" for key, (in_file, own) in settings.items() if in_file != own]
    if not differences and (folder / WEIGHTS).is_file():
        differences = _missing_layers(folder / WEIGHTS, {layer.layer_name for layer in layers})
    if differences:
        raise ValueError(
            f"{model_id} has {', '.join(differences)}, and an adapter {adapter_name!r} is here that would keep its "
            "own: load the file under another name, call delete_adapter first, or hotswap_adapter of axolotl_supertune."
        )


def _missing_layers(path: Path, adapted: set[str]) -> list[str]:
    """In words, a layer of the loaded adapter that the file lacks; empty if it has all."""
    try:
        with safe_open(path, framework="pt") as file:
            names = list(file.keys())
    except SafetensorError:
        return []  # loading reports it
    suffix = ".supra_shape"
    saved = {name.removesuffix(suffix).removeprefix("base_model.model.") for name in names if name.endswith(suffix)}
    missing = sorted(adapted - saved)
    return [f"no {missing[0]} among its layers"] if missing and saved else []
