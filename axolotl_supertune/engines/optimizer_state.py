"""Recognises optimizers that DeepSpeed wraps, and checkpoints in which it wrote their state.

Internals that this file reaches into: the attributes `bit16_groups` and `fp16_groups` of DeepSpeed's ZeRO optimizers,
and the names of the files in a checkpoint. If they changed, every run with DeepSpeed would be refused at its first
step, or when it is resumed: tests/plugin/test_several_processes.py.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


def trained_groups(optimizer: Any) -> "Iterable[Iterable[Tensor]]":
    """The parameters that an optimizer trains, as the model has them: ZeRO's `param_groups` are flat partitions."""
    zero = getattr(optimizer, "optimizer", None)
    groups = getattr(zero, "bit16_groups", None) or getattr(zero, "fp16_groups", None)  # stages 1 and 2; stage 3
    return [group["params"] for group in optimizer.param_groups] if groups is None else groups


def partition_files(folder: Path) -> dict[int, Path]:
    """Process → its part of the optimizer's state in a checkpoint that DeepSpeed wrote; empty for any other."""
    return {int(path.name.split("_")[3]): path for path in folder.glob("global_step*/*zero_pp_rank_*_optim_states.pt")}


def start_anew(folder: Path) -> str:
    """The remedy for an optimizer's state that cannot be loaded."""
    return f"start anew from its adapter: lora_model_dir: {folder}"
