"""`axolotl supertune calibrate`: measures activation norms and writes the file that `calibration_path` reads.

For models that a training holds only in shards, and for calibrating once for many runs. Axolotl loads the model as for
a training, and the same code calibrates it on the same windows: the numbers are those of a training.
"""

from pathlib import Path
from typing import Any

import yaml
from axolotl.cli.config import load_cfg
from axolotl.loaders import ModelLoader, load_tokenizer

from .. import engines
from ..tuner.targets import layer_budgets
from . import validation
from .axolotl_compat import registered_plugins
from .create import adapter_config
from .plugin import NORMS_FILE, SupertunePlugin


def calibrate_base(config: Path, output: Path | None = None, *, stream: bool = False, overwrite: bool = False) -> Path:
    """Write the activation norms of the model, layers and calibration text that a YAML describes.

    Args:
        config: the YAML.
        output: the file to write; default the YAML's `calibration_path`, else a file in its `output_dir`.
        stream: keep the model in CPU memory and move one decoder layer at a time to the device.
        overwrite: replace an existing file.

    Returns:
        The file that was written.

    Raises:
        ValueError: the YAML is refused or needs no norms, or the text is too short.
        FileNotFoundError: a file that the YAML names does not exist.
        FileExistsError: the output file exists.
    """
    raw = yaml.safe_load(config.read_text(encoding="utf-8"))
    target = output or raw.get("calibration_path")
    # Without an engine: here the model is whole. With `ddp: true` Axolotl would move it to the device as a whole.
    cfg: Any = load_cfg(str(config), **{key: None for key in (*engines.KEYS, "ddp", "calibration_path") if key in raw})
    if cfg.adapter not in validation.ADAPTERS:
        raise ValueError(f"adapter: {cfg.adapter} needs no calibration; adapter: supra or super does.")
    if not validation.method_config(cfg).needs_norms:
        raise ValueError(
            f"mask_score: {cfg.mask_score}, sparse_direction: {cfg.sparse_direction}, supra_lambda: "
            f"{cfg.supra_lambda} need no activation norms: there is nothing to calibrate."
        )
    if stream and (cfg.load_in_4bit or cfg.load_in_8bit):
        raise ValueError(
            "--stream moves layers between devices, and layers of a quantized base are quantized on the way: leave it "
            "out, a quantized base is small; or drop load_in_4bit and load_in_8bit."
        )
    path = Path(target or Path(cfg.output_dir) / NORMS_FILE)
    if path.exists() and not overwrite:
        raise FileExistsError(f"{path} is there already: --overwrite replaces it, --output names another file.")
    plugin = next(plugin for plugin in registered_plugins() if isinstance(plugin, SupertunePlugin))
    plugin.calibrates_only = True
    if stream:
        cfg.device_map = "cpu"
    model, _ = ModelLoader(cfg, load_tokenizer(cfg)).load()
    layers = list(layer_budgets(model, adapter_config(model, cfg)))
    norms, _ = plugin.measured_norms(model, cfg, layers, stream=stream)
    norms.save(path)
    return path
