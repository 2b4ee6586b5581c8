"""The file of an adapter: written by PEFT's save_pretrained, in the newest format and whole or not at all; read in all.

Only files are packed. A model's state dict holds plain tensors, so that whatever gathers, shards or broadcasts state
dicts (accelerate, torch's checkpoints, engines that shard) sees the shapes and dtypes that the modules have.
"""

import functools
import inspect
import json
import os
import re
import shutil
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from peft import PeftConfig, PeftModel
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from ..method.atomic_files import flush, staged
from .config import SupraConfig
from .file_format import NAMES, pack_layer, unpack_layer

WEIGHTS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"
# While a model is saved: the names of the adapters that are, or None where all of them are.
ADAPTERS_TO_SAVE: ContextVar[Sequence[str] | None] = ContextVar("ADAPTERS_TO_SAVE", default=None)


def pack(state_dict: Mapping[str, Any], values_dtypes: Mapping[str, str]) -> dict[str, Any]:
    """A state dict whose SUPRA layers are in the newest format.

    Args:
        state_dict: of a model; what is no tensor of these adapters stays as it is.
        values_dtypes: `fp32` or `bf16` for every adapter, by name.
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
    """Bring the SUPRA layers of a file, or of a state dict made from one, into format 0, in place.

    Returns:
        What is wrong with a layer, by its name; its tensors are left as they were.
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
    """`unpack`, or a ValueError that names the layer: the checksum does not match, or the format is newer."""
    for layer, problem in unpack(state_dict).items():
        raise ValueError(f"{layer.removeprefix('base_model.model.')}: {problem}")


def read_adapter(folder: str | os.PathLike[str]) -> dict[str, Tensor]:
    """The tensors of a saved adapter as the model has them, by their names without the adapter's, on the CPU.

    Raises:
        ValueError: the file is damaged, or of a newer format; the message names it and the layer.
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
        ValueError: there is no trained adapter, its config is damaged, or it is one of another method.
    """
    name = os.fspath(source)
    local = os.path.exists(name) or not may_be_on_hub
    for file in (CONFIG, WEIGHTS) if local else ():
        if not os.path.isfile(os.path.join(name, file)):
            raise ValueError(f"{name} holds no {file}, so it is no trained adapter.")
    # Of a name on the hub, PEFT's own ValueError says why it cannot be downloaded.
    broken = (ValueError, KeyError, TypeError) if local else (json.JSONDecodeError, KeyError, TypeError)
    try:
        config = PeftConfig.from_pretrained(name)
    except broken as error:
        raise ValueError(f"{name}/{CONFIG} is damaged ({error!r}): copy or save the adapter anew.") from error
    if not isinstance(config, SupraConfig):
        raise ValueError(f"{name} holds a {config.peft_type} adapter, not one of Super or Supra.")
    return config


def damaged(path: Path, error: Exception) -> ValueError:
    """What to raise for a file that safetensors cannot read."""
    return ValueError(f"{path}: {error}. The file is damaged: copy or save it anew.")


def is_packed(key: str, adapter: str) -> bool:
    """Whether a key of a state dict is one that only a file has."""
    return key.endswith((f".supra_codes.{adapter}", f".supra_checksum.{adapter}"))


# A key of a tensor: its layer, its name there, and the adapter with its dot, which may look like a tensor's name.
_KEY = re.compile(rf"(.+?)\.supra_({'|'.join(NAMES)})(\.[^.]+)?")


def _layers(tensors: Mapping[str, Any]) -> dict[tuple[str, str], dict[str, str]]:
    """Keys by layer, adapter (with its dot; empty in a file) and the name of the tensor there."""
    found: dict[tuple[str, str], dict[str, str]] = {}
    for key in tensors:
        match = _KEY.fullmatch(key)
        if match:
            layer, name, adapter = match.groups()
            found.setdefault((layer, adapter or ""), {})[name] = key
    return found


def save_whole() -> None:
    """Have `PeftModel.save_pretrained` write SUPRA adapters packed, each file whole or not at all.

    PEFT writes into a folder inside the target, from which the finished files are moved, the config last. Later calls
    do nothing; adapters of other methods, and processes that write nothing, pass through.
    """
    if not hasattr(PeftModel.save_pretrained, "saves_supra_whole"):
        PeftModel.save_pretrained = _saving_whole(PeftModel.save_pretrained)


def _saving_whole(original: Callable[..., None]) -> Callable[..., None]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def save_pretrained(self: Any, save_directory: str | os.PathLike[str], *args: Any, **kwargs: Any) -> None:
        values_dtypes = {
            name: config.values_dtype for name, config in self.peft_config.items() if isinstance(config, SupraConfig)
        }
        given = signature.bind(self, save_directory, *args, **kwargs).arguments
        if not values_dtypes or not given.get("is_main_process", True) or os.path.isfile(save_directory):
            return original(self, save_directory, *args, **kwargs)
        state_dict = kwargs.pop("state_dict", None)
        packed = pack(self.state_dict() if state_dict is None else state_dict, values_dtypes)
        target = Path(save_directory)
        target.mkdir(parents=True, exist_ok=True)
        with staged(target) as folder:
            if (target / "README.md").is_file():
                shutil.copy(target / "README.md", folder)
            token = ADAPTERS_TO_SAVE.set(given.get("selected_adapters"))
            try:
                original(self, os.fspath(folder), *args, state_dict=packed, **kwargs)
            finally:
                ADAPTERS_TO_SAVE.reset(token)
            files = [path for path in folder.rglob("*") if path.is_file()]
            for path in files:
                flush(path)
                (target / path.relative_to(folder)).parent.mkdir(parents=True, exist_ok=True)
            # A kill from here on leaves no weights beside another adapter's config: they would be computed with its α.
            for path in files:
                place = target / path.relative_to(folder)
                if path.name == CONFIG and place.is_file() and place.read_bytes() != path.read_bytes():
                    place.unlink()
            for path in sorted(files, key=lambda path: (path.name == CONFIG, path)):
                path.replace(target / path.relative_to(folder))
        return None

    save_pretrained.saves_supra_whole = True  # type: ignore[attr-defined]
    return save_pretrained
