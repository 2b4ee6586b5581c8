"""Recognises a checkpoint whose optimizer state DeepSpeed wrote: every engine must, when it resumes one."""

from pathlib import Path


def partition_files(folder: Path) -> dict[int, Path]:
    """Process → its part of the optimizer's state in a checkpoint that DeepSpeed wrote; empty for any other."""
    return {int(path.name.split("_")[3]): path for path in folder.glob("global_step*/*zero_pp_rank_*_optim_states.pt")}


def start_anew(folder: Path) -> str:
    """The remedy for an optimizer's state that cannot be loaded."""
    return f"start anew from its adapter: lora_model_dir: {folder}"
