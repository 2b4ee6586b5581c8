"""Checks of a checkpoint before training resumes from it: it is whole, and its run is the one in the YAML."""

import os
from pathlib import Path
from typing import Any

import safetensors
from axolotl.utils.logging import get_logger

from ..engines.engine import Engine
from ..method.adapter_files import CONFIG, WEIGHTS
from ..method.config_error import ConfigError
from ..tuner import SupraConfig
from ..tuner.base_digest import same_weights
from .load import RUN_FIELDS, config_of, differences
from .provenance import calibration_differences
from .training_record import read_training_record

LOG = get_logger(__name__)
CHECKPOINT_FILES = (CONFIG, WEIGHTS, "trainer_state.json")


def check_resume(cfg: Any, checkpoint: str, asked: SupraConfig, engine: Engine) -> None:
    """Refuse a checkpoint that is incomplete, of a different run, or whose optimizer state this run cannot load.

    Args:
        cfg: the YAML.
        checkpoint: the folder that is resumed.
        asked: the adapter that the YAML describes.
        engine: the engine of the run that resumes.

    Raises:
        ConfigError: names the file or the key, and the remedy.
    """
    folder = Path(checkpoint)
    missing = [name for name in CHECKPOINT_FILES if not (folder / name).is_file()]
    if not missing:
        try:
            safetensors.safe_open(os.fspath(folder / WEIGHTS), framework="pt").keys()
        except safetensors.SafetensorError as error:
            missing = [f"readable {WEIGHTS} ({error})"]
    if missing:
        raise ConfigError(
            "resume_from_checkpoint",
            f"{checkpoint} is incomplete, it has no {missing[0]}; the run probably stopped while writing it. Delete it "
            "to resume from the one before.",
        )
    engine.check_optimizer_state(folder)
    _check_sparse_lr(cfg, folder)
    saved = config_of(checkpoint, "resume_from_checkpoint")
    differs = differences(saved, asked, "the YAML says", (*RUN_FIELDS, "base_quantization"))
    if not differs:
        _check_base(cfg, checkpoint, saved)
        differs = _calibrated_otherwise(cfg, saved, asked)
    if not differs and cfg.lora_model_dir:
        start = config_of(cfg.lora_model_dir, "lora_model_dir")
        differs = differences(saved, start, f"lora_model_dir {cfg.lora_model_dir} has")
    if differs:
        raise ConfigError(
            "resume_from_checkpoint",
            f"the checkpoint {checkpoint} was trained with {differs}. Set it back to resume, or use another output_dir "
            "to start anew.",
        )


def _check_base(cfg: Any, checkpoint: str, saved: SupraConfig) -> None:
    """Refuse a base model with other weights than the checkpoint's; another name may be that of a copy."""
    trained, asked = saved.base_model_name_or_path, cfg.base_model
    if not trained or trained == asked or os.path.realpath(trained) == os.path.realpath(asked):
        return
    same = same_weights((trained, saved.revision), (asked, cfg.revision_of_model))
    if same is None:
        LOG.warning(
            "base_model: %s, but the checkpoint %s was trained on %s; whether they are the same weights could not be "
            "checked, as not all of their files are here.",
            asked,
            checkpoint,
            trained,
        )
    elif not same:
        raise ConfigError(
            "base_model",
            f"{asked} has other weights than {trained}, which the checkpoint {checkpoint} was trained on. Set it back "
            "to resume, or use another output_dir to start anew.",
        )


def _calibrated_otherwise(cfg: Any, saved: SupraConfig, asked: SupraConfig) -> str:
    """The calibration keys that differ from how the saved support was chosen, for the message; "" if none does."""
    made = saved.calibration or {}
    if cfg.calibration_path or not asked.needs_norms:
        return ""
    return ", ".join(
        f"calibration_{name} {value} (the YAML says {cfg[f'calibration_{name}']})"
        # A window is never longer than the model takes, and the checkpoint's were not.
        for name, value in calibration_differences(cfg, made, made.get("sequence_len"))
        if name in made
    )


def _check_sparse_lr(cfg: Any, folder: Path) -> None:
    """Refuse another sparse_lr: the optimizer's state has its groups of parameters, and their learning rates."""
    try:
        record = read_training_record(folder)
    except ValueError as error:
        raise ConfigError("resume_from_checkpoint", str(error)) from error
    if record is None:
        LOG.warning(
            "The checkpoint %s does not say with which sparse_lr it was trained, so that was not compared with the "
            "YAML: resume it with the same one.",
            folder,
        )
        return
    trained, asked = record["sparse_lr"], None if cfg.sparse_lr is None else float(cfg.sparse_lr)
    if trained != asked:
        raise ConfigError(
            "sparse_lr",
            f"{cfg.sparse_lr}, but the checkpoint {folder} was trained with {'none' if trained is None else trained}: "
            "its optimizer state has the groups of parameters, and their rates, of that. Set it back to resume, or "
            f"start anew from its adapter: lora_model_dir: {folder}.",
        )
