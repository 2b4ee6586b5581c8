"""Calibration in a training: draws token windows and measures activation norms on them, in all processes."""

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
"""Token ids (samples, sequence_len) int64 of a text, or `input_ids` and `attention_mask` of training records."""


def windows_of_text(cfg: Any, model_config: Any, tokenizer: Any = None) -> torch.Tensor:
    """Draw the calibration windows that the YAML's keys describe.

    Returns:
        (samples, length) int64 token ids; length as of `window_length`.

    Raises:
        FileNotFoundError, ValueError: the text is missing, too short, or cannot be read.
    """
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
    """Draw records of the training set, which Axolotl tokenizes and keeps in dataset_prepared_path.

    Returns:
        `input_ids` and `attention_mask`, each (samples, longest) int64.

    Raises:
        ValueError: there are fewer records than calibration_samples.
    """
    records = load_datasets(cfg=cfg).train_dataset
    return training_windows(
        records["input_ids"],
        samples=cfg.calibration_samples,
        sequence_len=window_length(cfg, model_config),
        seed=cfg.calibration_seed,
    )


def window_length(cfg: Any, model_config: Any) -> int:
    """Tokens of a calibration window: calibration_sequence_len, or the model's maximum if that is less."""
    maximum = max_positions(model_config)
    return int(cfg.calibration_sequence_len if maximum is None else min(cfg.calibration_sequence_len, maximum))


def max_positions(model_config: Any) -> int | None:
    """The longest sequence that a model takes, in tokens, or None if its config does not say."""
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
    """Measure activation norms on calibration windows; called by every process that has weights.

    Args:
        model: the base model.
        cfg: the YAML, after `validation.prepare`.
        layers: names of the layers that are adapted.
        windows: as `windows_of_text` or `windows_of_records` give them, the same in all processes.
        processes: of the run; each calibrates on its share of the batches.
        stream: keep the model on the CPU and move one decoder layer at a time to the device.

    Returns:
        The norms of the whole set of windows, and the seconds that it took.
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
    # The batches are the same for any number of processes, so that the sums of each batch are, too.
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
