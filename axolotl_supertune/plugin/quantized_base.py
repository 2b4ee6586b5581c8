"""4-bit and 8-bit bases under Axolotl: loaded, prepared and merged as it does for qlora and lora."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from axolotl.loaders import model as loader
from axolotl.utils.dict import DictDefault

from ..tuner.base_model import REMEDY, base_quantization, plain_settings, quant_method


def complete(cfg: Any, model_config: Any) -> None:
    """Fill in how the base is quantized: what Axolotl's loader says for qlora (4 bits) and lora (8 bits).

    nf4 with double quantization, computed in the run's dtype, stored as bytes, changed by `bnb_config_kwargs`. Called
    before the model is built; the loader holds the very mapping that is changed here.

    Raises:
        ValueError: the base model is quantized already, by another method.
    """
    saved = getattr(model_config, "quantization_config", None)
    if saved and quant_method(saved) != "bitsandbytes":
        raise ValueError(f"base_model: {cfg.base_model} is quantized by {quant_method(saved)}. {REMEDY}")
    if not (cfg.load_in_4bit or cfg.load_in_8bit):
        return
    as_lora = DictDefault({**cfg, "adapter": "qlora" if cfg.load_in_4bit else "lora"})
    stand_in: Any = SimpleNamespace(cfg=as_lora, model_config=model_config, model_kwargs={}, is_fsdp_enabled=False)
    loader.ModelLoader._set_quantization_config(stand_in)
    found = stand_in.model_kwargs["quantization_config"].to_dict()
    settings = {key: value for key, value in found.items() if not key.startswith("_")}
    if not (cfg.bnb_config_kwargs or {}).get("bnb_4bit_quant_storage"):
        # Axolotl stores the bytes as bf16 for FSDP's sake; what casts a model to another dtype would cast them too, as
        # `axolotl inference` does.
        settings["bnb_4bit_quant_storage"] = "uint8"
    cfg.overrides_of_model_kwargs["quantization_config"].update({**settings, "quant_method": "bitsandbytes"})


def prepare(cfg: Any, model: Any) -> None:
    """Check that a built base is quantized as asked, and prepare it for training as Axolotl does for qlora.

    Raises:
        RuntimeError: it is not.
    """
    found = base_quantization(model)
    if cfg.load_in_4bit or cfg.load_in_8bit:
        wanted = plain_settings(cfg.overrides_of_model_kwargs["quantization_config"].to_dict())
        if found != wanted:
            raise RuntimeError(
                f"load_in_{4 if cfg.load_in_4bit else 8}bit: the base model was to be loaded with {wanted}, but was "
                f"with {found}. This Axolotl loads models in a way that the plugin does not know; please report it."
            )
    # Merging needs the weights alone.
    if found is not None and not cfg.merge_lora:
        loader.prepare_model_for_kbit_training(model, use_gradient_checkpointing=cfg.gradient_checkpointing)


def load_as_trained(cfg: Any, adapter: Path) -> None:
    """For `merge-lora`, which turns the quantization off: have the base loaded as the adapter saw it in training."""
    path = adapter / "adapter_config.json"
    saved = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    if saved.get("base_quantization"):
        overrides = dict(cfg.get("overrides_of_model_kwargs") or {})
        settings = {**saved["base_quantization"], "quant_method": "bitsandbytes"}
        cfg["overrides_of_model_kwargs"] = {**overrides, "quantization_config": settings}
