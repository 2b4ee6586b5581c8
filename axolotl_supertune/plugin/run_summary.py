"""What a run says of itself: in the log before its first step, and in the model card."""

import io
import os
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from ..engines import engine_of
from ..method.calibration_data import TRAINING_SET
from ..ops.dispatch import described
from ..tuner import SupraLayer, budget_table
from ..tuner.gradient import sparse_layers
from ..tuner.quantization.linear import QuantizedSupraLinear
from .axolotl_compat import axolotl_version
from .layer_table import layer_table


def table(model: Any) -> str:
    """The table of what is trained, as plain text."""
    console = Console(file=io.StringIO(), width=120, color_system=None)
    console.print(layer_table(budget_table(model), model.peft_config["default"]))
    return console.file.getvalue()  # type: ignore[attr-defined]


def kernels(model: Any, cfg: Any) -> str:
    """What will compute the adapted layers; the model may still be on its way to the device."""
    device = torch.device(cfg.device or "cpu")
    mixed = {"bf16": torch.bfloat16, "fp16": torch.float16}
    dtypes = [dtype for key, dtype in mixed.items() if cfg.get(key) and cfg.get(key) != "full"]
    layers = [module for module in model.modules() if isinstance(module, SupraLayer)]
    dense = [layer for layer in layers if not isinstance(layer, QuantizedSupraLinear)]
    dtype = dtypes[0] if dtypes else getattr(layers[0], "weight_dtype", layers[0].base_layer.weight.dtype)
    if not dense:
        how = "the gradient of U alone; quantized weights are dequantized in every pass"
        return f"{described(device, dtype, rank=0)} ({how})"
    rank = max(budget.rank for layer in dense for budget in layer.supra_budget.values())
    gathers = engine_of(cfg).gathers_by
    gathering = f"; {gathers} gathers the weights in every pass" if gathers else ""
    return described(device, dtype, rank) + gathering


def training(cfg: Any) -> tuple[dict[str, str], list[str]]:
    """For the model card: what Axolotl trained on and how, and the data sets' names on the hub."""
    paths = [str(each["path"]) for each in cfg.datasets or [] if each.get("path")]
    hub = [path for path in paths if not os.path.exists(path) and "://" not in path]
    steps = f"{cfg.max_steps} steps" if cfg.max_steps else f"{cfg.num_epochs or 1:g} epochs"
    lines = {
        "Training data": ", ".join(path if path in hub else Path(path).name for path in paths) or "not named",
        "Training": f"{steps}, learning rate {cfg.learning_rate}"
        + (f", {cfg.sparse_lr} of the single weights" if cfg.sparse_lr else "")
        + f", {cfg.optimizer}, seed {cfg.seed}",
        "Axolotl": axolotl_version(),
    }
    return lines, hub


def calibration_line(model: Any, how: str) -> str:
    """How the support is or was chosen; `how` says where activation norms came from."""
    config = model.peft_config["default"]
    made = config.calibration
    if config.awaits_gradient and sparse_layers(model):
        after = f" after {config.low_rank_warmup_steps} steps" if config.low_rank_warmup_steps else ""
        return f"Support: to be chosen by the {config.mask_score} of {config.gradient_batches} training batches{after}"
    if made is None:
        return "Calibration: none needed"
    if made.get("dataset") == TRAINING_SET:
        return (
            f"Calibration: {made['samples']} training records, {made['tokens']:,} tokens of {made['training_data']} "
            f"(seed {made['seed']}), model {made['model']}: {how}"
        )
    return (
        f"Calibration: {made['samples']} × {made.get('sequence_len', '?')} tokens of {made.get('dataset', '?')} "
        f"(seed {made.get('seed', '?')}), model {made['model']}: {how}"
    )
