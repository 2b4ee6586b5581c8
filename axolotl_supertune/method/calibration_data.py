"""Calibration data: windows of tokens from C4, a hub dataset, a local file, or the records of the training set.

Text is sampled as in Wanda's C4 loader: documents are visited in a seeded random order, and each that is at least as
long as a window gives one window at a random position, until there are enough. If a source has too few such documents,
the windows are drawn from all disjoint windows of its long documents. A `.txt` file is one document.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor

from .config_error import MissingFileError
from .progress import progress

TRAINING_SET = "training_set"  # value of calibration_dataset: calibrate on records of the training data
C4_DATASET = "allenai/c4"
C4_FILE = "en/c4-train.00000-of-01024.json.gz"
DEFAULT_SPLIT = "train"
DEFAULT_TEXT_FIELD = "text"
DEFAULT_SAMPLES = 128
DEFAULT_SEQUENCE_LEN = 2048

_JSON_SUFFIXES = (".json", ".jsonl", ".json.gz", ".jsonl.gz")
LOCAL_SUFFIXES = (".txt", ".parquet", *_JSON_SUFFIXES)
# Size of the shuffle buffer of streamed documents.
_SHUFFLE_BUFFER = 10_000


def calibration_windows(
    tokenizer: Any,
    source: str = C4_DATASET,
    *,
    samples: int = DEFAULT_SAMPLES,
    sequence_len: int = DEFAULT_SEQUENCE_LEN,
    seed: int = 0,
    split: str = DEFAULT_SPLIT,
    text_field: str = DEFAULT_TEXT_FIELD,
) -> Tensor:
    """Draw `samples` windows of `sequence_len` tokens from `source`.

    Args:
        tokenizer: a transformers tokenizer.
        source: a local .txt, .json(l), .json(l).gz or .parquet file, or a hub dataset (streamed); of
            `allenai/c4`, shard 0 of the English training split.
        samples: number of windows.
        sequence_len: tokens per window.
        seed: of all random choices.
        split, text_field: the split and column to read; not used for a .txt file.

    Returns:
        (samples, sequence_len) int64 token ids.

    Raises:
        FileNotFoundError: the local file does not exist.
        ValueError: too little text (the message says how many tokens were found), no such column, or an unreadable
            source.
    """
    source = os.fspath(source)
    if samples < 1 or sequence_len < 1:
        raise ValueError(
            f"calibration_samples={samples} and calibration_sequence_len={sequence_len} must be at least 1."
        )
    random = numpy.random.default_rng(seed)
    windows: list[list[int]] = []
    long_documents: list[list[int]] = []
    documents = tokens = longest = 0
    with progress("Drawing calibration windows", total=samples, unit="window") as bar:
        for text in _documents(source, split, text_field, seed):
            ids = tokenizer(text, verbose=False)["input_ids"]
            documents += 1
            tokens += len(ids)
            longest = max(longest, len(ids))
            if len(ids) < sequence_len:
                continue
            start = int(random.integers(len(ids) - sequence_len + 1))
            windows.append(ids[start : start + sequence_len])
            long_documents.append(ids)
            bar.update()
            if len(windows) == samples:
                return torch.tensor(windows, dtype=torch.int64)

    disjoint = [window for ids in long_documents for window in _disjoint_windows(ids, sequence_len, random)]
    if len(disjoint) < samples:
        raise ValueError(
            f"calibration_dataset {source} is too short: {samples} windows of {sequence_len} tokens were asked for, "
            f"{len(disjoint)} were found ({tokens:,} tokens in {documents:,} documents, the longest {longest:,}). "
            "Lower calibration_samples or calibration_sequence_len, or give more text."
        )
    chosen = numpy.sort(random.choice(len(disjoint), size=samples, replace=False))
    return torch.tensor([disjoint[index] for index in chosen], dtype=torch.int64)


def training_windows(
    records: Sequence[Sequence[int]], *, samples: int, sequence_len: int, seed: int = 0
) -> dict[str, Tensor]:
    """Draw `samples` training records, each a window with prompt and answer, as in training.

    Args:
        records: token ids per record.
        samples: number of records to draw.
        sequence_len: length to which longer records are cut.
        seed: of the draw.

    Returns:
        `input_ids` and `attention_mask`, both (samples, longest) int64, padded at the end with mask 0.

    Raises:
        ValueError: fewer records than samples.
    """
    if len(records) < samples:
        raise ValueError(
            f"calibration_samples: {samples} records were asked for, and the training set has {len(records)}; lower it."
        )
    drawn = numpy.sort(numpy.random.default_rng(seed).choice(len(records), size=samples, replace=False))
    chosen = [torch.tensor(records[int(index)][:sequence_len], dtype=torch.int64) for index in drawn]
    ids = torch.nn.utils.rnn.pad_sequence(chosen, batch_first=True)
    lengths = torch.tensor([len(record) for record in chosen])
    return {"input_ids": ids, "attention_mask": (torch.arange(ids.shape[1]) < lengths[:, None]).long()}


def batches_of(windows: Tensor | Mapping[str, Tensor], size: int) -> list[Any]:
    """Split windows into batches of `size`; padded windows are cut to the longest of their batch."""
    if isinstance(windows, Tensor):
        return list(windows.split(size))
    parts = zip(windows["input_ids"].split(size), windows["attention_mask"].split(size), strict=True)
    return [
        {"input_ids": ids[:, : int(mask.sum(1).max())], "attention_mask": mask[:, : int(mask.sum(1).max())]}
        for ids, mask in parts
    ]


def check_source(source: str) -> None:
    """Raise MissingFileError, a FileNotFoundError, if `source` names a local file that does not exist."""
    if _is_local(source) and not Path(source).is_file():
        raise MissingFileError("calibration_dataset", f"there is no file {source}.")


def _disjoint_windows(ids: list[int], length: int, random: numpy.random.Generator) -> Iterator[list[int]]:
    """Consecutive windows of a document, from a random offset."""
    start = int(random.integers(len(ids) % length + 1))
    for begin in range(start, len(ids) - length + 1, length):
        yield ids[begin : begin + length]


def _is_local(source: str) -> bool:
    return source.endswith(LOCAL_SUFFIXES) or os.path.exists(source)


def _documents(source: str, split: str, text_field: str, seed: int) -> Iterator[str]:
    """The texts of a source in random order; arguments and errors as for `calibration_windows`."""
    check_source(source)
    try:
        if source.endswith(".txt"):
            yield Path(source).read_text(encoding="utf-8")
            return
        import datasets  # slow to import, and not needed for a .txt

        if _is_local(source):
            builder = "parquet" if source.endswith(".parquet") else "json"
            if not source.endswith(LOCAL_SUFFIXES):
                raise ValueError(f"its name ends in none of {', '.join(LOCAL_SUFFIXES)}")
            rows = datasets.load_dataset(builder, data_files=source, split="train", streaming=True)
        else:
            files = {"data_files": {split: C4_FILE}} if source == C4_DATASET and split == DEFAULT_SPLIT else {}
            rows = datasets.load_dataset(source, split=split, streaming=True, **files)
        for row in rows.shuffle(seed=seed, buffer_size=_SHUFFLE_BUFFER):
            if text_field not in row:
                raise ValueError(f"no column {text_field!r} (calibration_text_field) among {', '.join(row)}")
            if not isinstance(row[text_field], str):
                kind = type(row[text_field]).__name__
                raise ValueError(f"column {text_field!r} (calibration_text_field) holds {kind}, not text")
            if row[text_field]:
                yield row[text_field]
    except Exception as error:
        reason = str(error) or type(error).__name__
        raise ValueError(
            f"calibration_dataset {source} cannot be read: {reason}. Name a readable local file "
            f"({', '.join(LOCAL_SUFFIXES)}) or a hub dataset, reuse norms with calibration_path, or use mask_score: "
            "magnitude, which needs no calibration."
        ) from error
