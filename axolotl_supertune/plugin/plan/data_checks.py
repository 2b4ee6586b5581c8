"""Checks of a run's files before it starts: training data, calibration text, norms, and the adapter to start from.

No weight is loaded and nothing is downloaded. What only a download or the weights could tell is listed as unchecked.
"""

import gzip
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from axolotl.loaders import load_tokenizer
from axolotl.utils.dict import DictDefault
from huggingface_hub import try_to_load_from_cache

from ...method.activation_norms import ActivationNorms
from ...method.calibration_data import LOCAL_SUFFIXES, TRAINING_SET, training_windows
from ...tuner import SupraConfig
from ...tuner.base_model import read_parameter
from ..axolotl_compat import PREPARED_FOLDER
from ..calibrate import max_positions, window_length, windows_of_text
from ..create import is_new
from ..load import kept_settings
from ..provenance import check_provenance
from ..validation import method_config

# A name that ends so is a local file and not a dataset on the hub.
_FILE_SUFFIXES = (*LOCAL_SUFFIXES, ".csv", ".arrow")
_TOKENIZER_FILES = ("tokenizer_config.json", "tokenizer.json", "tokenizer.model", "vocab.json")
# Prefixes of the keys that decide which calibration windows are drawn.
_WINDOW_KEYS = (
    "calibration_",
    "base_model",
    "revision_of_model",
    "tokenizer",
    "special_tokens",
    "tokens",
    "added_tokens",
)
# Axolotl's dataset types that make at most one training record of one record.
_ONE_TO_ONE = ("alpaca", "chat_template", "input_output")


@dataclass
class Findings:
    """Results of a check.

    Attributes:
        refusals: errors that the run would surely raise.
        unchecked: what could not be checked, and why.
    """

    refusals: list[str] = field(default_factory=list)
    unchecked: list[str] = field(default_factory=list)


def data_findings(cfg: Mapping[str, Any]) -> Findings:
    """Check that the files of `datasets` and `test_datasets` exist and are not empty.

    Args:
        cfg: the YAML of any adapter, or of full fine-tuning.
    """
    findings = Findings()
    prepared = Path(cfg.get("dataset_prepared_path") or PREPARED_FOLDER)
    is_prepared = any(prepared.glob("*")) and not cfg.get("skip_prepare_dataset")
    for key, path in _dataset_paths(cfg):
        if os.path.isfile(path) and os.path.getsize(path) == 0:
            findings.refusals.append(f"{key}: {path} is empty; it needs at least one record.")
        elif os.path.exists(path):
            continue
        elif "://" in path or not _must_be_local(path):
            findings.unchecked.append(f"{key}: {path} is no local file, and plan downloads nothing")
        elif is_prepared:
            findings.unchecked.append(
                f"{key}: there is no file or folder {path}, so training needs what `axolotl preprocess` made of it in "
                f"{prepared} (dataset_prepared_path); plan does not look whether that is there"
            )
        else:
            findings.refusals.append(f"{key}: there is no file or folder {path}. Name one, or a dataset on the hub.")
    return findings


def start_findings(cfg: Any, asked: SupraConfig) -> Findings:
    """Check that `lora_model_dir` holds an adapter, and list the settings in which it differs from the YAML.

    Args:
        cfg: the YAML of super or supra, with its defaults.
        asked: the adapter that it describes. Training keeps the settings of the one in `lora_model_dir`.
    """
    findings = Findings()
    folder = cfg.get("lora_model_dir")
    if not folder:
        return findings
    if not os.path.exists(folder):
        findings.unchecked.append(
            f"lora_model_dir: there is no folder {folder}, and plan downloads nothing from the hub"
        )
        return findings
    try:
        kept = kept_settings(cfg, folder, asked)
    except ValueError as error:
        findings.refusals.append(str(error))
        return findings
    if kept:
        findings.unchecked.append(
            f"lora_model_dir: training keeps the settings of the adapter in {folder}, and this plan is of the YAML's, "
            f"which differ: {kept}"
        )
    return findings


def calibration_findings(
    cfg: Any, model: Any, model_config: Any, layers: list[str], texts_read: dict[str, Findings] | None = None
) -> Findings:
    """Check the norms in `calibration_path`, or that the calibration text is long enough.

    Args:
        cfg: the YAML of super or supra, with its defaults.
        model: the base model on the meta device.
        model_config: its config.
        layers: names of the layers with a sparse part.
        texts_read: findings about local texts from earlier calls, by the keys that they depend on; these texts are not
            read again. New findings are added.
    """
    findings = Findings()
    if not is_new(cfg) or not method_config(cfg).needs_norms:
        return findings
    if cfg.get("calibration_path"):
        return _norms_findings(cfg, model, model_config, layers)
    if cfg["calibration_dataset"] == TRAINING_SET:
        return _records_findings(cfg)
    keys = repr({key: value for key, value in sorted(cfg.items()) if key.startswith(_WINDOW_KEYS)})
    texts_read = {} if texts_read is None else texts_read
    if keys not in texts_read:
        texts_read[keys] = _text_findings(cfg, model_config)
    return texts_read[keys]


def gradient_findings(cfg: Any, batches: int, gpus: int = 1) -> Findings:
    """Check that there are enough records for `gradient_batches`, and steps for `low_rank_warmup_steps`.

    Args:
        cfg: the YAML of super or supra whose support is chosen by gradient, with its defaults.
        batches: gradient_batches.
        gpus: how many processes train.
    """
    findings = Findings()
    if not is_new(cfg):
        return findings
    records = most_records(cfg)
    if records is None:
        findings.unchecked.append(
            f"gradient_batches: whether there are {batches} batches, as the records could not be counted"
        )
        return findings
    size = cfg.get("gradient_accumulation_steps") or 1
    micro_batches = math.ceil(records / ((cfg.get("micro_batch_size") or 1) * gpus))
    if micro_batches <= (batches - 1) * size:
        findings.refusals.append(
            f"gradient_batches: {batches} batches of {size} micro batches in each process were asked for, and the "
            f"training set has {micro_batches} micro batches at most; lower it to {max(1, micro_batches // size)}, or "
            "use more records."
        )
    warmup = int(cfg.get("low_rank_warmup_steps") or 0)
    steps = math.ceil(math.ceil(micro_batches / size) * float(cfg.get("num_epochs") or 1))
    if warmup and not cfg.get("max_steps") and steps <= warmup:
        findings.refusals.append(
            f"low_rank_warmup_steps: {warmup} leaves none of this run's {steps} steps (at most) to the sparse part; "
            "lower it."
        )
    return findings


def is_here(name: str, files: tuple[str, ...], revision: str | None = None) -> bool:
    """Whether one of these files of a model is in its folder, or in the hub's cache on this machine.

    Args:
        name: a folder, or a model on the hub.
        files: names of files.
        revision: of a model on the hub.
    """
    if os.path.isdir(name):
        return any(Path(name, file).is_file() for file in files)
    try:
        return any(isinstance(try_to_load_from_cache(name, file, revision=revision), str) for file in files)
    except ValueError:  # not a valid name on the hub
        return False


def most_records(cfg: Mapping[str, Any]) -> int | None:
    """An upper bound of the training records that `datasets` give, without those of `val_set_size`.

    Axolotl drops some (too long, or without a label) when it prepares them.

    Returns:
        None if there is no bound: files that are not here or not counted, or types that may make several records of
        one.
    """
    total = 0
    for dataset in cfg.get("datasets") or []:
        kind = dataset.get("type")
        one_to_one = isinstance(kind, Mapping) or str(kind).startswith(_ONE_TO_ONE)
        counted = one_to_one and not dataset.get("data_files")
        count = _count_records(Path(str(dataset.get("path")))) if counted else None
        if count is None:
            return None
        total += count
    validation = cfg.get("val_set_size") or 0
    return total - math.ceil(validation if validation >= 1 else validation * total)


def _dataset_paths(cfg: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(key, path) of every data set, as ("datasets[0].path", "data.jsonl")."""
    paths = []
    for key in ("datasets", "test_datasets"):
        datasets = cfg.get(key) or []
        for index, dataset in enumerate(datasets if isinstance(datasets, (list, tuple)) else []):
            path = dataset.get("path") if isinstance(dataset, Mapping) else None
            if isinstance(path, str):
                paths.append((f"{key}[{index}].path", path))
    return paths


def _must_be_local(path: str) -> bool:
    return path.startswith(("/", ".", "~")) or path.count("/") > 1 or path.endswith(_FILE_SUFFIXES)


def _count_records(path: Path) -> int | None:
    """How many records a local file has; None if it does not exist or is of a kind that is not counted."""
    if not path.is_file():
        return None
    name = path.name
    if name.endswith(".parquet"):
        from pyarrow.parquet import ParquetFile

        return int(ParquetFile(path).metadata.num_rows)
    if not name.endswith((".json", ".jsonl", ".json.gz", ".jsonl.gz")):
        return None
    opened = gzip.open if name.endswith(".gz") else open
    with opened(path, "rb") as file:
        if file.read(1) == b"[":
            file.seek(0)
            return len(json.load(file))
        file.seek(0)
        return sum(1 for line in file if line.strip())


def _norms_findings(cfg: Any, model: Any, model_config: Any, layers: list[str]) -> Findings:
    path = cfg["calibration_path"]
    try:
        norms = ActivationNorms.load(path)
        check_provenance(cfg, norms.provenance, max_positions(model_config))
        norms.check_model(model, f"calibration_path: the norms in {path}", read=read_parameter)
        for layer in layers:
            norms[layer]  # raises for a layer without norms
    except (ValueError, OSError) as error:
        return Findings(refusals=[str(error)])
    return Findings(
        unchecked=["calibration_path: whether its norms were measured on these weights, which plan does not read"]
    )


def _records_findings(cfg: Any) -> Findings:
    records = most_records(cfg)
    samples = cfg["calibration_samples"]
    if records is None or records >= samples:
        return Findings(
            unchecked=[
                f"calibration_samples: training needs {samples} records after tokenizing, and plan tokenizes none"
            ]
        )
    try:
        training_windows([[0]] * records, samples=samples, sequence_len=1)
    except ValueError as error:
        return Findings(refusals=[str(error)])
    return Findings()


def _text_findings(cfg: Any, model_config: Any) -> Findings:
    source = str(cfg["calibration_dataset"])
    if not os.path.exists(source):  # a missing local file was refused before
        return Findings(unchecked=[f"calibration_dataset: {source} is no local file, and plan downloads nothing"])
    name = str(cfg.get("tokenizer_config") or cfg.get("base_model_config") or cfg["base_model"])
    length = window_length(cfg, model_config)
    question = (
        f"calibration_dataset: {source} must hold {cfg['calibration_samples']} windows of {length} tokens, and plan "
        "cannot count them: "
    )
    if cfg.get("added_tokens_overrides"):  # Axolotl would write another tokenizer into output_dir
        return Findings(unchecked=[f"{question}added_tokens_overrides makes another tokenizer"])
    if not is_here(name, _TOKENIZER_FILES, cfg.get("revision_of_model")):
        return Findings(unchecked=[f"{question}the tokenizer of {name} is not on this machine"])
    with_tokenizer = DictDefault({**cfg, "tokenizer_config": name})
    try:
        tokenizer = load_tokenizer(with_tokenizer)
    except (ValueError, OSError) as error:
        return Findings(unchecked=[f"{question}the tokenizer of {name} cannot be loaded: {error}"])
    try:
        windows_of_text(with_tokenizer, model_config, tokenizer)
    except (ValueError, OSError) as error:
        return Findings(refusals=[str(error)])
    return Findings()
