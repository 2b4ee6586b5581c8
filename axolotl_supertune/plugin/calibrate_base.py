"""`axolotl supertune calibrate`: the norms that `calibration_path` takes, without a training.

For models that a training holds only in shards, and to calibrate once for many runs. The model is loaded as Axolotl
loads it for training and calibrated by the same code on the same windows: the numbers are those of a training.
"""

from pathlib import Path
from typing import Any

import yaml
from axolotl.cli.config import load_cfg
from axolotl.integrations.base import PluginManager
from axolotl.loaders import ModelLoader, load_tokenizer

from ..tuner.model import layer_budgets
from . import validation
from .create import adapter_config
from .plugin import NORMS_FILE, SupertunePlugin

# How a training distributes the model; here it is whole.
_ENGINES = ("fsdp", "fsdp_config", "fsdp_version", "deepspeed")


class _BaseLoader(ModelLoader):
    """Axolotl's loader, up to where it would make an adapter."""

    def _load_adapters(self) -> None:
        return None

    def _apply_post_lora_load_setup(self, skip_move_to_device: bool) -> None:
        pass


def calibrate_base(config: Path, output: Path | None = None, *, stream: bool = False, overwrite: bool = False) -> Path:
    """Write the norms of the model, layers and calibration text that a YAML describes.

    Args:
        config: the YAML.
        output: the file; default its `calibration_path`, else in its `output_dir`.
        stream: keep the model in CPU memory, with one decoder layer at a time on the device.
        overwrite: replace a file that is there.

    Returns:
        The file.

    Raises:
        ValueError: the YAML is refused, needs no norms, or the text is too short.
        FileNotFoundError: a file that it names is not there.
        FileExistsError: the file is there already.
    """
    raw = yaml.safe_load(config.read_text(encoding="utf-8"))
    target = output or raw.get("calibration_path")
    cfg: Any = load_cfg(str(config), **{key: None for key in (*_ENGINES, "calibration_path") if key in raw})
    if cfg.adapter not in validation.ADAPTERS:
        raise ValueError(f"adapter: {cfg.adapter} needs no calibration; adapter: supra or super does.")
    if not validation.may_need_norms(cfg):
        raise ValueError(
            f"mask_score: {cfg.mask_score}, sparse_direction: {cfg.sparse_direction}, supra_lambda: "
            f"{cfg.supra_lambda} need no activation norms: there is nothing to calibrate."
        )
    if stream and (cfg.load_in_4bit or cfg.load_in_8bit):
        raise ValueError(
            "--stream moves layers between devices, and bitsandbytes quantizes them on the way: leave it out, a "
            "quantized base is small; or drop load_in_4bit and load_in_8bit."
        )
    path = Path(target or Path(cfg.output_dir) / NORMS_FILE)
    if path.exists() and not overwrite:
        raise FileExistsError(f"{path} is there already: --overwrite replaces it, --output names another file.")
    plugin = next(each for each in PluginManager.get_instance().plugins.values() if isinstance(each, SupertunePlugin))
    plugin.calibrates_only = True
    if stream:
        cfg.device_map = "cpu"
    loader = _BaseLoader(cfg, load_tokenizer(cfg))
    model, _ = loader.load()
    layers = list(layer_budgets(model, adapter_config(model, cfg)))
    norms, _ = plugin.measured_norms(model, cfg, layers, stream=stream)
    norms.save(path)
    return path
