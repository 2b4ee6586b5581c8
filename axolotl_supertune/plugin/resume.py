"""Adapters that exist: which one a command means, whether it is whole and the same in all processes, whether the YAML
agrees with it."""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors
import torch
from axolotl.utils.logging import get_logger

from ..tuner import SupraConfig
from ..tuner.base_digest import same_weights
from .load import RUN_FIELDS, _differences, _read_config

LOG = get_logger(__name__)
CHECKPOINT_FILES = ("adapter_config.json", "adapter_model.safetensors", "trainer_state.json")


def check_resume(
    cfg: Any, checkpoint: str, asked: SupraConfig, processes: int = 1, zero: Mapping[str, Any] | None = None
) -> None:
    """Refuse a checkpoint that is incomplete, whose run was another one than the YAML describes, or whose optimizer
    state this run cannot load.

    Args:
        cfg: the YAML.
        checkpoint: the folder that is resumed.
        asked: the adapter that the YAML describes.
        processes: how many train.
        zero: the `zero_optimization` of DeepSpeed's config, if that trains.

    Raises:
        ValueError: names the file or the key, and the remedy.
    """
    folder = Path(checkpoint)
    missing = [name for name in CHECKPOINT_FILES if not (folder / name).is_file()]
    if not missing:
        try:
            safetensors.safe_open(os.fspath(folder / "adapter_model.safetensors"), framework="pt").keys()
        except safetensors.SafetensorError as error:
            missing = [f"readable adapter_model.safetensors ({error})"]
    if missing:
        raise ValueError(
            f"resume_from_checkpoint: {checkpoint} is incomplete, it has no {missing[0]}; the run probably stopped "
            "while writing it. Delete it to resume from the one before."
        )
    _check_optimizer(zero, folder, processes)
    _check_sparse_lr(cfg, folder)
    saved = _read_config(checkpoint, "resume_from_checkpoint", cfg.adapter)
    differs = _differences(saved, asked, "the YAML says", (*RUN_FIELDS, "base_quantization"))
    if not differs:
        _check_base(cfg, checkpoint, saved)
        differs = _calibrated_otherwise(cfg, saved, asked)
    if not differs and cfg.lora_model_dir:
        start = _read_config(cfg.lora_model_dir, "lora_model_dir", cfg.adapter)
        differs = _differences(saved, start, f"lora_model_dir {cfg.lora_model_dir} has")
    if differs:
        raise ValueError(
            f"resume_from_checkpoint: the checkpoint {checkpoint} was trained with {differs}. Set it back to resume, "
            "or use another output_dir to start anew."
        )


def _check_base(cfg: Any, checkpoint: str, saved: SupraConfig) -> None:
    """The supports, and all that was trained, are of the weights of one base; another name may be that of a copy."""
    had, has = saved.base_model_name_or_path, cfg.base_model
    if not had or had == has or os.path.realpath(had) == os.path.realpath(has):
        return
    same = same_weights((had, saved.revision), (has, cfg.revision_of_model))
    if same is None:
        LOG.warning(
            "base_model: %s, but the checkpoint %s was trained on %s; whether they are the same weights could not be "
            "checked, as not all of their files are here.",
            has,
            checkpoint,
            had,
        )
    elif not same:
        raise ValueError(
            f"base_model: {has} has other weights than {had}, which the checkpoint {checkpoint} was trained on. Set it "
            f"back to resume, or use another output_dir to start anew."
        )


def _calibrated_otherwise(cfg: Any, saved: SupraConfig, asked: SupraConfig) -> str:
    """In which keys the support was calibrated otherwise than the YAML says."""
    made = saved.calibration or {}
    if cfg.calibration_path or not (asked.needs_norms and asked.has_sparse_part):
        return ""
    found = []
    for name in ("dataset", "split", "text_field", "seed", "samples", "sequence_len"):
        key = f"calibration_{name}"
        # A window is no longer than the model takes, whatever the YAML says.
        shortened = name == "sequence_len" and name in made and made[name] < cfg[key]
        if name in made and cfg[key] is not None and made[name] != cfg[key] and not shortened:
            found.append(f"{key} {made[name]} (the YAML says {cfg[key]})")
    return ", ".join(found)


def _check_optimizer(zero: Mapping[str, Any] | None, folder: Path, processes: int) -> None:
    """The Trainer itself goes on without the optimizer's and the scheduler's state where it finds one of them missing,
    at the first step's learning rate, and DeepSpeed says little of what it cannot load."""
    ranks = {int(path.name.split("_")[3]): path for path in folder.glob("global_step*/*zero_pp_rank_*_optim_states.pt")}
    if zero and not ranks:
        raise ValueError(
            f"resume_from_checkpoint: {folder} has no optimizer state of DeepSpeed, so it was written without it. "
            "Remove deepspeed to resume it."
        )
    anew = f"start anew from its adapter: lora_model_dir: {folder}"
    if ranks and not zero:
        raise ValueError(
            f"resume_from_checkpoint: the optimizer state in {folder} is DeepSpeed's. Set deepspeed as in that run "
            f"and start {len(ranks)} processes to resume it, or {anew}."
        )
    if not zero and not (list(folder.glob("optimizer*")) and (folder / "scheduler.pt").is_file()):
        raise ValueError(
            f"resume_from_checkpoint: {folder} has no state of the optimizer and of its schedule, which "
            f"save_only_model: true leaves out; going on would begin the schedule anew. To do that, {anew}."
        )
    if ranks and zero:
        _check_deepspeed_parts(zero, folder, ranks, processes, anew)


def _check_sparse_lr(cfg: Any, folder: Path) -> None:
    """The optimizer's groups of parameters; what loads them knows their number, and not why."""
    card = folder / "README.md"
    line = re.search(r"^- \*\*Training:\*\* .*$", card.read_text(encoding="utf-8"), re.M) if card.is_file() else None
    if line is None:
        return
    had = re.search(r", (\S+) of the single weights", line.group())
    # The rates in an optimizer's state replace those of the YAML.
    if (float(had.group(1)) if had else None) != (None if cfg.sparse_lr is None else float(cfg.sparse_lr)):
        raise ValueError(
            f"sparse_lr: {cfg.sparse_lr}, but the checkpoint {folder} was trained with "
            f"{had.group(1) if had else 'none'}: its optimizer state has the groups of parameters, and their rates, of "
            f"that. Set it back to resume, or start anew from its adapter: lora_model_dir: {folder}."
        )


def _check_deepspeed_parts(
    zero: Mapping[str, Any], folder: Path, ranks: dict[int, Path], processes: int, anew: str
) -> None:
    # How many parts there were a lost one does not say; but every process leaves its generators' state, too.
    parts = max(len(list(folder.glob("rng_state*.pth"))), max(ranks) + 1)
    if parts != processes:
        raise ValueError(
            f"resume_from_checkpoint: the optimizer state in {folder} is in {parts} parts, one a process, and "
            f"DeepSpeed loads it in as many only; these are {processes}. Start {parts}."
        )
    step = next(iter(ranks.values())).parent
    wanted = [folder / "latest", *(step / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in range(parts))]
    # ZeRO-1 and ZeRO-2 write, and read, one file for all processes.
    shared = step / "mp_rank_00_model_states.pt"
    of_ranks = [step / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt" for rank in range(parts)]
    by_zero3 = any(path.is_file() for path in of_ranks)
    wanted += of_ranks if by_zero3 else [shared]
    missing = [path for path in wanted if not path.is_file()]
    if missing:
        raise ValueError(
            f"resume_from_checkpoint: {folder} is incomplete, it has no {missing[0].relative_to(folder)}, a part of "
            f"DeepSpeed's state. Delete it to resume from the one before, or {anew}."
        )
    if by_zero3 != (zero["stage"] == 3):
        raise ValueError(
            f"resume_from_checkpoint: {folder} was written under {'ZeRO-3' if by_zero3 else 'ZeRO-1 or ZeRO-2'}, and "
            f"deepspeed says zero_optimization.stage: {zero['stage']}, which reads another layout. Set it to "
            f"{'3' if by_zero3 else '1 or 2'} to resume, or {anew}."
        )
    if by_zero3:
        # Mapped: of a file that holds tensors of any size the few bytes of its config are read.
        written = torch.load(wanted[1], map_location="cpu", weights_only=False, mmap=True)["ds_config"]
        key, none = "sub_group_size", 10**9
        was, asked = (each.get(key, none) for each in (written["zero_optimization"], zero))
        if "auto" not in (was, asked) and int(float(was)) != int(float(asked)):
            raise ValueError(
                f"resume_from_checkpoint: the optimizer state in {folder} is in groups of zero_optimization.{key}: "
                f"{was}, and deepspeed says {asked}. Set it back to resume, or {anew}."
            )
