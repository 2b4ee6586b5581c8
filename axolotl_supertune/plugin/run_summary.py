"""The start-up log of a training, the facts of its model card, and the table of what an adapter trains."""

import io
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from ..engines import engine_of
from ..method.budget import BudgetRow
from ..method.calibration_data import TRAINING_SET
from ..ops.dispatch import describe_implementation
from ..tuner import SupraConfig, SupraLayer, budget_table
from ..tuner.gradient import sparse_layers
from ..tuner.quantization.linear import QuantizedSupraLinear
from .axolotl_compat import axolotl_version


def layer_heading(config: SupraConfig) -> str:
    """One line above `layer_table`: the method, how its support is chosen, and its budget."""
    method = "Super" if config.supra_lambda == 0 else f"Supra, λ = {config.supra_lambda}"
    rank = config.r0
    budget = f"density {config.sparse_density}" if rank is None else f"the budget of a LoRA of rank {rank}"
    scope = "" if config.budget_scope == "layer" else f", budget_scope {config.budget_scope}"
    return f"{method}: {config.choice_of_support}, {budget}{scope}"


def layer_table(rows: Sequence[BudgetRow]) -> Table:
    """Rank, sparse entries, density and parameters per kind of layer, and the totals; at most 80 characters wide."""
    table = Table(box=box.SIMPLE, show_edge=False, pad_edge=False, collapse_padding=True)
    for name in (
        "layers",
        "shape",
        "rank",
        "density",
        "sparse\nentries\neach",
        "sparse\nentries\nin all",
        "parameters\nin all",
    ):
        table.add_column(name, justify="left" if name in ("layers", "shape") else "right", vertical="bottom")
    sparse = size = 0
    for row in rows:
        layer = row.budget
        sparse += row.layers * layer.sparse_count
        size += row.layers * layer.out_features * layer.in_features
        table.add_row(
            f"{row.layers} × {row.kind}",
            f"{layer.out_features} × {layer.in_features}",
            str(layer.rank),
            f"{float(layer.density):.4%}",
            f"{layer.sparse_count:,}",
            f"{row.layers * layer.sparse_count:,}",
            f"{row.total:,}",
        )
    table.add_section()
    table.add_row("total", "", "", f"{sparse / size:.4%}", "", f"{sparse:,}", f"{sum(row.total for row in rows):,}")
    return table


def layer_text(model: Any) -> str:
    """`layer_heading` and `layer_table` of an adapted model as plain text."""
    text = io.StringIO()
    console = Console(file=text, width=120, color_system=None)
    console.print(layer_heading(model.peft_config["default"]), markup=False, highlight=False, soft_wrap=True)
    console.print(layer_table(budget_table(model)))
    return text.getvalue()


def kernels(model: Any, cfg: Any) -> str:
    """Which kernels will compute the adapted layers on the training's device, where the model may not be yet."""
    device = torch.device(cfg.device or "cpu")
    mixed = {"bf16": torch.bfloat16, "fp16": torch.float16}
    dtypes = [dtype for key, dtype in mixed.items() if cfg.get(key) and cfg.get(key) != "full"]
    layers = [module for module in model.modules() if isinstance(module, SupraLayer)]
    dense = [layer for layer in layers if not isinstance(layer, QuantizedSupraLinear)]
    dtype = dtypes[0] if dtypes else getattr(layers[0], "weight_dtype", layers[0].base_layer.weight.dtype)
    if not dense:
        how = "the gradient of U alone; quantized weights are dequantized in every pass"
        return f"{describe_implementation(device, dtype, rank=0)} ({how})"
    rank = max(budget.rank for layer in dense for budget in layer.supra_budget.values())
    gathers = engine_of(cfg).gathers_by
    gathering = f"; {gathers} gathers the weights in every pass" if gathers else ""
    return describe_implementation(device, dtype, rank) + gathering


def training_facts(cfg: Any) -> tuple[dict[str, str], list[str]]:
    """What Axolotl trains on and how, for the model card.

    Returns:
        The lines of the card by heading, and the names of the data sets that are on the hub.
    """
    paths = [str(dataset["path"]) for dataset in cfg.datasets or [] if dataset.get("path")]
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
    """One line of the log: what the support was, or will be, chosen on.

    Args:
        model: the adapted model.
        how: where the activation norms came from: a file, or so many seconds of calibration.
    """
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
