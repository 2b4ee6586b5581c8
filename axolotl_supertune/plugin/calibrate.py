"""TODO-DOC plugin.calibrate."""

import time
from typing import Any

import torch
from axolotl.common.datasets import load_datasets
from axolotl.loaders import load_tokenizer

from ..engines import engine_of
from ..engines.processes import Processes
from ..method.activation_norms import ActivationNorms
from ..method.calibration_data import TRAINING_SET, batches_of, calibration_windows, training_windows
from ..method.layerwise import streamed
from ..tuner.base_calibration import calibrate
from .run_summary import training_facts

Windows = torch.Tensor | dict[str, torch.Tensor]


def windows_of_text(cfg: Any, model_config: Any, tokenizer: Any = None) -> torch.Tensor:
    """The calibration windows that the keys describe, no longer than the model takes."""
    return calibration_windows(
        tokenizer or load_tokenizer(cfg),
        cfg.calibration_dataset,
        samples=cfg.calibration_samples,
        sequence_len=window_length(cfg, model_config),
        seed=cfg.calibration_seed,
        split=cfg.calibration_split,
        text_field=cfg.calibration_text_field,
    )


def windows_of_records(cfg: Any, model_config: Any) -> dict[str, torch.Tensor]:
    """Records of the training set, as Axolotl prepares it and keeps it in dataset_prepared_path."""
    records = load_datasets(cfg=cfg).train_dataset
    return training_windows(
        records["input_ids"],
        samples=cfg.calibration_samples,
        sequence_len=window_length(cfg, model_config),
        seed=cfg.calibration_seed,
    )


def window_length(cfg: Any, model_config: Any) -> int:
    """Tokens of a calibration window: calibration_sequence_len, or what the model takes if that is less."""
    maximum = max_positions(model_config)
    return int(cfg.calibration_sequence_len if maximum is None else min(cfg.calibration_sequence_len, maximum))


def max_positions(model_config: Any) -> int | None:
    """The longest sequence that a model takes, or None if its config does not say."""
    text = model_config.get_text_config() if hasattr(model_config, "get_text_config") else model_config
    return getattr(text, "max_position_embeddings", None)


def measured_norms(
    model: Any,
    cfg: Any,
    layers: list[str],
    windows: Windows,
    processes: Processes,
    *,
    stream: bool = False,
) -> tuple[ActivationNorms, float]:
    """Norms on these windows, and the seconds that they took.

    Args:
        model, layers: the base model and the layers that are adapted.
        windows: of `windows_of_text` or `windows_of_records`.
        stream: the model lies on the CPU and stays there; its decoder layers visit the device one at a time.
    """
    provenance = {
        "model": cfg.base_model,
        "revision": cfg.revision_of_model,
        "dataset": cfg.calibration_dataset,
        "split": cfg.calibration_split,
        "text_field": cfg.calibration_text_field,
        "seed": cfg.calibration_seed,
        "sequence_len": window_length(cfg, model.config),
    }
    if cfg.calibration_dataset == TRAINING_SET:
        provenance["training_data"] = training_facts(cfg)[0]["Training data"]
    # Whole batches, as one process has them: what a batch sums to does not depend on who computes it.
    batches = batches_of(windows, cfg.calibration_batch_size)
    engine = engine_of(cfg)
    batches, uncounted = engine.share_of(batches, processes)
    place = streamed(model, cfg.device) if stream else engine.plain_forward(model, cfg.device)
    start = time.perf_counter()
    with place:
        norms = calibrate(
            model,
            batches,
            layers=layers,
            provenance=provenance,
            uncounted=uncounted,
            total_tokens=sum(
                int(batch["attention_mask"].sum()) if isinstance(batch, dict) else batch.numel() for batch in batches
            ),
            progress=processes.is_first,
            sum_processes=None if engine.only_first_has_weights else processes.sum,
        )
    return norms, time.perf_counter() - start
