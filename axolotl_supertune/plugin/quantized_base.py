"""Base models in 4 or 8 bits: their YAML keys and bitsandbytes config, preparing them for training, and merging.

Axolotl reads `load_in_4bit` for qlora and `load_in_8bit` for lora only. The same settings are given to its loader here
by way of `overrides_of_model_kwargs.quantization_config`.
"""

import inspect
import json
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import Any

from transformers import BitsAndBytesConfig

from ..method.adapter_files import CONFIG
from ..method.config_error import ConfigError
from ..tuner.quantization import REMEDY
from ..tuner.quantization.settings import (
    backend_named,
    base_quantization,
    plain_settings,
    quant_method,
    settings_backend,
)
from .axolotl_compat import prepare_quantized_model, unquantized_modules


def check_keys(cfg: MutableMapping[str, Any]) -> None:
    """Check the YAML keys of quantized bases, and have Axolotl's loader quantize the base, in place.

    Idempotent. The config that is set here only says how many bits; `complete` fills in the rest.

    Args:
        cfg: the raw YAML.

    Raises:
        ConfigError: names the key, its value and the remedy.
    """
    asked = [key for key in ("load_in_4bit", "load_in_8bit") if cfg.get(key)]
    if len(asked) == 2:
        raise ConfigError("load_in_4bit", "true and load_in_8bit: true: a base is quantized one way, drop one of them.")
    _check_bnb_config_kwargs(cfg, asked)
    if not asked:
        return
    overrides = dict(cfg.get("overrides_of_model_kwargs") or {})
    placeholder = {asked[0]: True}
    if overrides.get("quantization_config") not in (None, placeholder):
        raise ConfigError(
            asked[0],
            "true and overrides_of_model_kwargs.quantization_config both say how the base is quantized; keep one of "
            "them (bnb_config_kwargs changes the settings of load_in_4bit).",
        )
    cfg["overrides_of_model_kwargs"] = {**overrides, "quantization_config": placeholder}


def _check_bnb_config_kwargs(cfg: MutableMapping[str, Any], asked: list[str]) -> None:
    changes = cfg.get("bnb_config_kwargs")
    # merge-lora turns load_in_4bit off itself.
    if changes and asked != ["load_in_4bit"] and not cfg.get("merge_lora"):
        raise ConfigError(
            "bnb_config_kwargs",
            f"{dict(changes)} is read only with load_in_4bit: true; set it, or remove bnb_config_kwargs.",
        )
    settings = set(inspect.signature(BitsAndBytesConfig).parameters) - {"kwargs", "load_in_4bit", "load_in_8bit"}
    for key, value in (changes or {}).items():
        if key not in settings:
            raise ConfigError(
                f"bnb_config_kwargs.{key}",
                f"{value} is no setting of transformers' BitsAndBytesConfig; those are {', '.join(sorted(settings))}.",
            )


def stored_format(cfg: Mapping[str, Any]) -> str:
    """How a YAML has the weights of the base stored: "plain", or the `stored_format` of a quantization backend."""
    settings: dict[str, Any] = {}
    if cfg.get("load_in_8bit"):
        settings = {"load_in_8bit": True}
    elif cfg.get("load_in_4bit"):
        settings = {"load_in_4bit": True, "bnb_4bit_use_double_quant": True, **(cfg.get("bnb_config_kwargs") or {})}
    backend = settings_backend(settings)
    return "plain" if backend is None else backend.stored_format(settings)


def quantization_config(cfg: Any, model_config: Any) -> BitsAndBytesConfig:
    """The bitsandbytes config that Axolotl's loader makes for qlora (4 bits) or lora (8 bits).

    4 bits: nf4 with double quantization, computed in the run's dtype, changed by `bnb_config_kwargs`. One setting
    differs: the packed weights are stored as bytes unless `bnb_config_kwargs` says otherwise. Axolotl stores them as
    bf16, which FSDP needs; a cast of the model to another dtype, as in `axolotl inference`, would then cast the codes.

    Args:
        cfg: the config, with load_in_4bit or load_in_8bit.
        model_config: the base model's; if bitsandbytes has quantized the base already, its settings are taken.
    """
    changes = cfg.bnb_config_kwargs or {} if cfg.load_in_4bit else {}
    saved = getattr(model_config, "quantization_config", None)
    settings: dict[str, Any]
    if saved:
        settings = dict(saved)
    elif cfg.load_in_4bit:
        settings = {
            "load_in_4bit": True,
            "bnb_4bit_compute_dtype": cfg.torch_dtype,
            "bnb_4bit_use_double_quant": True,
            "bnb_4bit_quant_type": "nf4",
            "llm_int8_skip_modules": unquantized_modules(cfg.model_config_type, 4),
            **changes,
        }
    else:
        settings = {"load_in_8bit": True, "llm_int8_skip_modules": unquantized_modules(cfg.model_config_type, 8)}
    if not changes.get("bnb_4bit_quant_storage"):
        settings["bnb_4bit_quant_storage"] = "uint8"
    return BitsAndBytesConfig(**settings)


def check_base(name: str, model_config: Any) -> None:
    """Refuse a base that is stored quantized by a library without a backend.

    Raises:
        ValueError: names the base, the library and the remedy.
    """
    saved = getattr(model_config, "quantization_config", None)
    if saved and backend_named(quant_method(saved)) is None:
        raise ValueError(f"base_model: {name} is quantized by {quant_method(saved)}. {REMEDY}")


def complete(cfg: Any, model_config: Any) -> None:
    """Fill in `overrides_of_model_kwargs.quantization_config`, in place, before the model is built.

    Axolotl's loader already holds that very mapping, so it must not be replaced by another.

    Raises:
        ValueError: the base model is quantized already, by a library without a backend.
    """
    check_base(cfg.base_model, model_config)
    if not (cfg.load_in_4bit or cfg.load_in_8bit):
        return
    fields = quantization_config(cfg, model_config).to_dict()
    settings = {key: value for key, value in fields.items() if not key.startswith("_")}
    cfg.overrides_of_model_kwargs["quantization_config"].update({**settings, "quant_method": quant_method(fields)})


def prepare(cfg: Any, model: Any) -> None:
    """Check that a base model was quantized as asked, and prepare it for training as Axolotl does for qlora.

    Raises:
        RuntimeError: it was quantized otherwise, or not at all.
    """
    actual = base_quantization(model)
    if cfg.load_in_4bit or cfg.load_in_8bit:
        wanted = plain_settings(cfg.overrides_of_model_kwargs["quantization_config"].to_dict())
        if actual != wanted:
            raise RuntimeError(
                f"load_in_{4 if cfg.load_in_4bit else 8}bit: the base model was to be loaded with {wanted}, but was "
                f"loaded with {actual}. This version of Axolotl loads models in a way that the plugin does not know; "
                "please report it."
            )
    # Merging only needs the weights.
    if actual is not None and not cfg.merge_lora:
        prepare_quantized_model(model, gradient_checkpointing=cfg.gradient_checkpointing)


def load_as_trained(cfg: Any, adapter: Path) -> None:
    """Have the base model loaded as quantized as in training, for `merge-lora`, which turns quantization off.

    Args:
        cfg: the raw YAML; changed in place.
        adapter: the folder of the trained adapter, whose config has the settings.
    """
    path = adapter / CONFIG
    saved = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    backend = settings_backend(saved.get("base_quantization"))
    if backend is not None:
        overrides = dict(cfg.get("overrides_of_model_kwargs") or {})
        settings = {**saved["base_quantization"], "quant_method": backend.name}
        cfg["overrides_of_model_kwargs"] = {**overrides, "quantization_config": settings}
