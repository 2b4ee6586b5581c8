"""What local files say of a run before it starts: whether its data, calibration text and norms will do.

No weight is loaded and nothing is downloaded; what only a download or the weights could tell is named as unchecked.
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
from ..axolotl_compat import PREPARED_FOLDER
from ..calibrate import max_positions, window_length, windows_of_text
from ..create import is_new
from ..load import kept_settings
from ..provenance import check_provenance
from ..validation import method_config

# Names with these endings are files, whatever else may be missing.
_FILES = (*LOCAL_SUFFIXES, ".csv", ".arrow")
_TOKENIZER_FILES = ("tokenizer_config.json", "tokenizer.json", "tokenizer.model", "vocab.json")
# Keys that windows are drawn by begin so.
_DRAWN_BY = ("calibration_", "base_model", "revision_of_model", "tokenizer", "special_tokens", "tokens", "added_tokens")
# Types of Axolotl's that make one record of one record, or none.
_ONE_TO_ONE = ("alpaca", "chat_template", "input_output")


@dataclass
class Said:
    """
    refusals: the errors that the run would give, as far as they are sure.
    unchecked: what was not looked at, and why.
    """

    refusals: list[str] = field(default_factory=list)
    unchecked: list[str] = field(default_factory=list)


def look_at_data(cfg: Mapping[str, Any]) -> Said:
    """Say which files of `datasets` and `test_datasets` are missing or empty, and which only a download would show.

    Args:
        cfg: the YAML of any adapter, and of full fine-tuning.
    """
    said = Said()
    prepared = Path(cfg.get("dataset_prepared_path") or PREPARED_FOLDER)
    is_prepared = any(prepared.glob("*")) and not cfg.get("skip_prepare_dataset")
    for where, path in _named(cfg):
        if os.path.isfile(path) and os.path.getsize(path) == 0:
            said.refusals.append(f"{where}: {path} is empty; it needs at least one record.")
        elif os.path.exists(path):
            continue
        elif "://" in path or not _can_only_be_local(path):
            said.unchecked.append(f"{where}: {path}, which would have to be downloaded")
        elif is_prepared:
            said.unchecked.append(
                f"{where}: there is no file or folder {path}, and whether it was prepared in {prepared} "
                "(dataset_prepared_path) before"
            )
        else:
            said.refusals.append(f"{where}: there is no file or folder {path}. Name one, or a dataset on the hub.")
    return said


def look_at_start(cfg: Any, asked: SupraConfig) -> Said:
    """Say whether `lora_model_dir` holds an adapter, and with which settings of its own: training keeps those.

    Args:
        cfg: the YAML of super or supra, with its defaults.
        asked: what it describes.
    """
    said = Said()
    folder = cfg.get("lora_model_dir")
    if not folder:
        return said
    if not os.path.exists(folder):
        said.unchecked.append(
            f"lora_model_dir: there is no folder {folder}; from the hub it would have to be downloaded"
        )
        return said
    try:
        differs = kept_settings(cfg, folder, asked)
    except ValueError as error:
        said.refusals.append(str(error))
        return said
    if differs:
        said.unchecked.append(
            f"lora_model_dir: the adapter in {folder} has its own settings and keeps them, and planned are the YAML's: "
            f"{differs}"
        )
    return said


def look_at_calibration(
    cfg: Any, model: Any, model_config: Any, layers: list[str], texts_read: dict[str, Said] | None = None
) -> Said:
    """Say what training would of the norms in `calibration_path`, or of the text that it would calibrate on.

    Args:
        cfg: the YAML of super or supra, with its defaults.
        model: on the meta device.
        model_config: its config.
        layers: those with a sparse part.
        texts_read: what was said of local texts before, whose windows are not drawn again; is added to.
    """
    said = Said()
    if not is_new(cfg) or not method_config(cfg).needs_norms:
        return said
    if cfg.get("calibration_path"):
        try:
            norms = ActivationNorms.load(cfg["calibration_path"])
            check_provenance(cfg, norms.provenance, max_positions(model_config))
            from ...tuner.base_model import read_parameter

            norms.check_model(model, f"calibration_path: the norms in {cfg['calibration_path']}", read=read_parameter)
            for layer in layers:
                norms[layer]
        except (ValueError, OSError) as error:
            said.refusals.append(str(error))
        else:
            said.unchecked.append("calibration_path: whether its norms are of these weights, which were not read")
    elif cfg["calibration_dataset"] == TRAINING_SET:
        _look_at_records(cfg, said)
    else:
        alike = repr({key: value for key, value in sorted(cfg.items()) if key.startswith(_DRAWN_BY)})
        texts_read = {} if texts_read is None else texts_read
        if alike not in texts_read:
            texts_read[alike] = _look_at_text(cfg, model_config)
        return texts_read[alike]
    return said


def look_at_gradient(cfg: Any, batches: int, gpus: int = 1) -> Said:
    """Say whether there are too few records for `gradient_batches`, or steps for `low_rank_warmup_steps`.

    Args:
        cfg: the YAML of super or supra whose support is chosen by gradient, with its defaults.
        batches: gradient_batches.
        gpus: processes.
    """
    said = Said()
    if not is_new(cfg):
        return said
    records = most_records(cfg)
    if records is None:
        said.unchecked.append(f"gradient_batches: {batches} against the batches that there are")
        return said
    size = cfg.get("gradient_accumulation_steps") or 1
    micro_batches = math.ceil(records / ((cfg.get("micro_batch_size") or 1) * gpus))
    if micro_batches <= (batches - 1) * size:
        said.refusals.append(
            f"gradient_batches: {batches} batches of {size} micro batches in each process were asked for, and the "
            f"training set has {micro_batches} micro batches at most; lower it to {max(1, micro_batches // size)}, or "
            "use more records."
        )
    warmup = int(cfg.get("low_rank_warmup_steps") or 0)
    steps = math.ceil(math.ceil(micro_batches / size) * float(cfg.get("num_epochs") or 1))
    if warmup and not cfg.get("max_steps") and steps <= warmup:
        said.refusals.append(
            f"low_rank_warmup_steps: {warmup} leaves none of this run's {steps} steps (at most) to the sparse part; "
            "lower it."
        )
    return said


def is_here(name: str, files: tuple[str, ...], revision: str | None = None) -> bool:
    """Whether one of these files of a model is in its folder, or in the hub's cache."""
    if os.path.isdir(name):
        return any(Path(name, file).is_file() for file in files)
    try:
        return any(isinstance(try_to_load_from_cache(name, file, revision=revision), str) for file in files)
    except ValueError:  # no name of the hub's
        return False


def most_records(cfg: Mapping[str, Any]) -> int | None:
    """The most training records that `datasets` can give, without those of `val_set_size`.

    Axolotl drops some (too long, without a label) when it prepares them.

    Returns:
        None where that cannot be told: files that are not here, or of a kind that is not counted, types that may make
        several records of one.
    """
    total = 0
    for dataset in cfg.get("datasets") or []:
        kind = dataset.get("type")
        known = isinstance(kind, Mapping) or str(kind).startswith(_ONE_TO_ONE)
        count = _records(Path(str(dataset.get("path")))) if known and not dataset.get("data_files") else None
        if count is None:
            return None
        total += count
    held_out = cfg.get("val_set_size") or 0
    return total - math.ceil(held_out if held_out >= 1 else held_out * total)


def _named(cfg: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(key, path) of every data set."""
    found = []
    for key in ("datasets", "test_datasets"):
        every = cfg.get(key) or []
        for at, dataset in enumerate(every if isinstance(every, (list, tuple)) else []):
            path = dataset.get("path") if isinstance(dataset, Mapping) else None
            if isinstance(path, str):
                found.append((f"{key}[{at}].path", path))
    return found


def _can_only_be_local(path: str) -> bool:
    return path.startswith(("/", ".", "~")) or path.count("/") > 1 or path.endswith(_FILES)


def _records(path: Path) -> int | None:
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


def _look_at_records(cfg: Any, said: Said) -> None:
    records = most_records(cfg)
    samples = cfg["calibration_samples"]
    if records is None or records >= samples:
        said.unchecked.append(
            f"calibration_samples: {samples} against the records that are left when all are tokenized"
        )
        return
    try:
        training_windows([[0]] * records, samples=samples, sequence_len=1)
    except ValueError as error:
        said.refusals.append(str(error))


def _look_at_text(cfg: Any, model_config: Any) -> Said:
    source = str(cfg["calibration_dataset"])
    if not os.path.exists(source):  # a local one that is missing was refused
        return Said(unchecked=[f"calibration_dataset: {source}, which would have to be downloaded"])
    name = str(cfg.get("tokenizer_config") or cfg.get("base_model_config") or cfg["base_model"])
    length = window_length(cfg, model_config)
    asked = f"calibration_dataset: whether {source} has {cfg['calibration_samples']} windows of {length} tokens"
    if cfg.get("added_tokens_overrides"):  # Axolotl would write another tokenizer into output_dir
        return Said(unchecked=[f"{asked}: added_tokens_overrides make a tokenizer of its own"])
    if not is_here(name, _TOKENIZER_FILES, cfg.get("revision_of_model")):
        return Said(unchecked=[f"{asked}: the tokenizer of {name} is not here"])
    with_tokenizer = DictDefault({**cfg, "tokenizer_config": name})
    try:
        tokenizer = load_tokenizer(with_tokenizer)
    except (ValueError, OSError) as error:
        return Said(unchecked=[f"{asked}: the tokenizer of {name} cannot be loaded: {error}"])
    try:
        windows_of_text(with_tokenizer, model_config, tokenizer)
    except (ValueError, OSError) as error:
        return Said([str(error)])
    return Said()
