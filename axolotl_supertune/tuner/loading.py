"""PEFT's ways to load an adapter, for those of SUPRA: refused before anything is changed, or undone."""

import functools
import os
from pathlib import Path
from typing import Any

from peft import PeftConfig, PeftModel
from safetensors import SafetensorError, safe_open

from .checkpoint import CONFIG, WEIGHTS, damaged
from .config import SupraConfig
from .layer import SupraLayer
from .rollback import rollback_on_error


def load_whole() -> None:
    """Have `PeftModel.load_adapter` and `from_pretrained` leave the model as it was where they raise, name the file of
    a SUPRA adapter that safetensors cannot read, and refuse one in the place of another that computes otherwise.

    Later calls do nothing; adapters of other methods pass through.
    """
    if not hasattr(PeftModel.load_adapter, "loads_supra_whole"):
        PeftModel.load_adapter = _loading_whole(PeftModel.load_adapter)
        PeftModel.from_pretrained = _from_pretrained(PeftModel.from_pretrained)


def _loading_whole(original: Any) -> Any:
    @functools.wraps(original)
    def load_adapter(self: Any, model_id: str | os.PathLike[str], adapter_name: str, *args: Any, **kwargs: Any) -> Any:
        if isinstance(self.peft_config.get(adapter_name), SupraConfig):
            _check_replaced(self, model_id, adapter_name, kwargs)
        with rollback_on_error(self):
            try:
                return original(self, model_id, adapter_name, *args, **kwargs)
            except SafetensorError as error:
                if not isinstance(self.peft_config.get(adapter_name), SupraConfig):
                    raise
                raise damaged(Path(model_id) / WEIGHTS, error) from error

    load_adapter.loads_supra_whole = True  # type: ignore[attr-defined]
    return load_adapter


def _from_pretrained(original: Any) -> Any:
    @functools.wraps(original.__func__)
    def from_pretrained(cls: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        with rollback_on_error(model):
            return original.__func__(cls, model, *args, **kwargs)

    return classmethod(from_pretrained)


def _check_replaced(model: Any, model_id: str | os.PathLike[str], adapter_name: str, kwargs: dict[str, Any]) -> None:
    """Refuse a file whose adapter would be computed with the settings of another one: PEFT takes its tensors alone."""
    layers = [
        module for module in model.modules() if isinstance(module, SupraLayer) and adapter_name in module.supra_budget
    ]
    if any(adapter_name in layer.pending_adapters for layer in layers):
        return  # the place that a file is to fill
    folder = Path(model_id) / (kwargs.get("subfolder") or "")
    if folder.is_dir() and not (folder / CONFIG).is_file():
        return  # nothing says what its settings are
    here = model.peft_config[adapter_name]
    there = PeftConfig.from_pretrained(os.fspath(model_id), **model._split_kwargs(dict(kwargs))[0])
    if not isinstance(there, SupraConfig):
        raise ValueError(f"{model_id} holds a {there.peft_type} adapter, {adapter_name!r} is one of SUPRA.")
    low_rank = any(adapter_name in layer.supra_L for layer in layers)
    settings = {key: (getattr(there, key), getattr(here, key)) for key in ("lora_alpha", "lora_dropout") if low_rank}
    settings["modules_to_save"] = tuple(sorted(set(each.modules_to_save or ())) for each in (there, here))  # type: ignore[assignment]
    differs = [f"{key} {of_file} (here {own})" for key, (of_file, own) in settings.items() if of_file != own]
    if not differs and (folder / WEIGHTS).is_file():
        differs = _other_layers(folder / WEIGHTS, {layer.supra_layer for layer in layers})
    if differs:
        raise ValueError(
            f"{model_id} has {', '.join(differs)}, and an adapter {adapter_name!r} is here that would keep its own: "
            "load the file under another name, call delete_adapter first, or hotswap_adapter of axolotl_supertune."
        )


def _other_layers(path: Path, here: set[str]) -> list[str]:
    try:
        with safe_open(path, framework="pt") as file:
            names = list(file.keys())
    except SafetensorError:
        return []  # loading says so
    ends = ".supra_shape"
    there = {name.removesuffix(ends).removeprefix("base_model.model.") for name in names if name.endswith(ends)}
    missing = sorted(here - there)
    return [f"no {missing[0]} among its layers"] if missing and there else []
