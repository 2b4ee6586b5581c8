"""Adapter files: `save_pretrained` writes them atomically in the newest format, and all formats are read.

Only files are packed (see `file_format`). A model's state dict holds plain tensors, so that code that gathers, shards
or broadcasts state dicts (engines, accelerate, torch's checkpoints) sees the shapes and dtypes of the modules.
"""

import inspect
import json
import os
import re
import shutil
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from peft import PeftConfig
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from ..method.adapter_files import CONFIG, WEIGHTS
from ..method.atomic_files import flush, staged
from .config import SupraConfig
from .file_format import NAMES, pack_layer, unpack_layer
from .peft_compat import extend

# While a model is being saved: the names of the saved adapters, or None for all.
ADAPTERS_TO_SAVE: ContextVar[Sequence[str] | None] = ContextVar("ADAPTERS_TO_SAVE", default=None)


def pack(state_dict: Mapping[str, Any], values_dtypes: Mapping[str, str]) -> dict[str, Any]:
    """A copy of a state dict in which the tensors of SUPRA layers are in the newest format.

    Args:
        state_dict: of a model; other tensors are kept.
        values_dtypes: adapter name → `fp32` or `bf16`.
    """
    packed = dict(state_dict)
    for (layer, adapter), keys in _layers(state_dict).items():
        if adapter.removeprefix(".") in values_dtypes:
            tensors = pack_layer(
                {name: packed.pop(key) for name, key in keys.items()}, values_dtypes[adapter.removeprefix(".")]
            )
            packed.update({f"{layer}.supra_{name}{adapter}": tensor for name, tensor in tensors.items()})
    return packed


def unpack(state_dict: MutableMapping[str, Tensor]) -> dict[str, str]:
    """Convert the SUPRA layers of a file, or of a state dict made from one, to format 0, in place.

    Returns:
        Layer name → error, for damaged layers; their tensors are not changed.
    """
    problems = {}
    for (layer, adapter), keys in _layers(state_dict).items():
        try:
            plain = unpack_layer({name: state_dict[key] for name, key in keys.items()})
        except ValueError as error:
            problems[layer] = str(error)
            continue
        for key in keys.values():
            del state_dict[key]
        state_dict.update({f"{layer}.supra_{name}{adapter}": tensor for name, tensor in plain.items()})
    return problems


def unpack_checked(state_dict: MutableMapping[str, Tensor]) -> None:
    """`unpack`; ValueError with the layer's name if a checksum does not match or the format is newer."""
    for layer, problem in unpack(state_dict).items():
        raise ValueError(f"{layer.removeprefix('base_model.model.')}: {problem}")


def read_adapter(folder: str | os.PathLike[str]) -> dict[str, Tensor]:
    """The tensors of a saved adapter in format 0 on the CPU, by name (without the adapter's name).

    Raises:
        ValueError: the file is damaged, or of a newer format. The message names file and layer.
    """
    path = Path(folder) / WEIGHTS
    try:
        tensors = load_file(path)
        unpack_checked(tensors)
    except SafetensorError as error:
        raise damaged(path, error) from error
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    return tensors


def read_config(source: str | os.PathLike[str], *, may_be_on_hub: bool = False) -> SupraConfig:
    """The config of a saved SUPRA adapter.

    Args:
        source: the adapter's folder.
        may_be_on_hub: a source that is no local path is the name of an adapter on the hub, which PEFT downloads.

    Raises:
        ValueError: there is no trained adapter, its config is damaged or has a setting that `SupraConfig` refuses, or
            it is one of another method.
    """
    name = os.fspath(source)
    local = os.path.exists(name) or not may_be_on_hub
    for file in (CONFIG, WEIGHTS) if local else ():
        if not os.path.isfile(os.path.join(name, file)):
            raise ValueError(f"{name} holds no {file}, so it is no trained adapter.")
    try:
        config = PeftConfig.from_pretrained(name)
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError) as error:
        raise ValueError(f"{name}/{CONFIG} is damaged ({error!r}): copy or save the adapter anew.") from error
    except ValueError as error:
        if not local:
            raise  # PEFT's message says why the adapter cannot be downloaded
        raise ValueError(f"{name}/{CONFIG}: {error}") from error
    if not isinstance(config, SupraConfig):
        raise ValueError(f"{name} holds a {config.peft_type} adapter, not one of Super or Supra.")
    return config


def damaged(path: Path, error: Exception) -> ValueError:
    """The error for a file that safetensors cannot read."""
    return ValueError(f"{path}: {error}. The file is damaged: copy or save it anew.")


def is_packed(key: str, adapter_name: str) -> bool:
    """Whether a key of a state dict is a tensor of an adapter that only files have."""
    return key.endswith((f".supra_codes.{adapter_name}", f".supra_checksum.{adapter_name}"))


# Layer, tensor and, with its dot, adapter. An adapter may have the name of a tensor.
_KEY = re.compile(rf"(.+?)\.supra_({'|'.join(NAMES)})(\.[^.]+)?")


def _layers(tensors: Mapping[str, Any]) -> dict[tuple[str, str], dict[str, str]]:
    """(layer, adapter with its dot, empty in a file) → tensor name → key."""
    layers: dict[tuple[str, str], dict[str, str]] = {}
    for key in tensors:
        match = _KEY.fullmatch(key)
        if match:
            layer, name, adapter = match.groups()
            layers.setdefault((layer, adapter or ""), {})[name] = key
    return layers


def extend_saving() -> None:
    """Extend `PeftModel.save_pretrained`: SUPRA adapters are packed and written atomically. Later calls do nothing."""
    extend("save_pretrained", _save_pretrained)


def _save_pretrained(
    original: Callable[..., None], model: Any, save_directory: str | os.PathLike[str], *args: Any, **kwargs: Any
) -> None:
    """`PeftModel.save_pretrained` of a model with SUPRA adapters.

    PEFT writes to a folder inside the target, from which the finished files are moved, the config last. Processes that
    write nothing (`is_main_process=False`) call PEFT's method unchanged.
    """
    values_dtypes = {
        name: config.values_dtype for name, config in model.peft_config.items() if isinstance(config, SupraConfig)
    }
    given = inspect.signature(original).bind(model, save_directory, *args, **kwargs).arguments
    if not given.get("is_main_process", True) or os.path.isfile(save_directory):
        return original(model, save_directory, *args, **kwargs)
    state_dict = kwargs.pop("state_dict", None)
    packed = pack(model.state_dict() if state_dict is None else state_dict, values_dtypes)
    target = Path(save_directory)
    target.mkdir(parents=True, exist_ok=True)
    with staged(target) as folder:
        if (target / "README.md").is_file():
            shutil.copy(target / "README.md", folder)
        token = ADAPTERS_TO_SAVE.set(given.get("selected_adapters"))
        try:
            original(model, os.fspath(folder), *args, state_dict=packed, **kwargs)
        finally:
            ADAPTERS_TO_SAVE.reset(token)
        _move_files(folder, target)
    return None


def _move_files(folder: Path, target: Path) -> None:
    """Move the files of an adapter to its folder, so that a kill never leaves weights beside another config."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    for path in files:
        flush(path)
        (target / path.relative_to(folder)).parent.mkdir(parents=True, exist_ok=True)
    # Weights beside another adapter's config would be computed with its α: a config that changes is removed first.
    for path in files:
        destination = target / path.relative_to(folder)
        if path.name == CONFIG and destination.is_file() and destination.read_bytes() != path.read_bytes():
            destination.unlink()
    for path in sorted(files, key=lambda path: (path.name == CONFIG, path)):
        path.replace(target / path.relative_to(folder))
