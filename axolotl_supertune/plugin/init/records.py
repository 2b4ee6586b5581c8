"""Reads the records of a file of training data one by one, each with the place that a message about it names."""

import csv
import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SUFFIXES = (".jsonl", ".json", ".parquet", ".csv")
_ROWS_AT_ONCE = 1024


def read_records(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The records of a .jsonl, .json, .parquet or .csv file: (`line 3`, its columns).

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: another kind of file, an empty one, or a broken record; names the file, the record and the remedy.
    """
    # The datasets library takes these for patterns, in the folders of a relative path too.
    if re.search(r"[][*?]", str(path.absolute())):
        raise ValueError(
            f"--data {path}: Axolotl takes [, ], * and ? in a path for a pattern ({path.absolute()}). Rename the file "
            "or the folder."
        )
    if path.is_dir():
        raise ValueError(f"--data {path}: a folder. Name one file of {_listed(SUFFIXES)}.")
    if not path.exists():
        raise FileNotFoundError(
            f"--data: there is no file {path}. Name one on this machine; a data set on the hub has to be downloaded "
            "first."
        )
    suffix = path.suffix.lower()
    if suffix not in SUFFIXES:
        raise ValueError(f"--data {path}: its name ends in none of {_listed(SUFFIXES)}. Convert it to one of them.")
    if os.path.getsize(path) == 0:
        raise ValueError(f"--data {path}: the file is empty; it needs at least one record.")
    readers = {".jsonl": _json_lines, ".json": _json, ".parquet": _parquet, ".csv": _csv}
    try:
        yield from readers[suffix](path)
    except UnicodeDecodeError as error:
        raise ValueError(f"--data {path}: not UTF-8 text ({error}). Save it as UTF-8.") from error


def _json(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    with path.open(encoding="utf-8") as file:
        head = file.read(4096).lstrip()
    if head[:2] == "\ufeff[":  # Axolotl reads a byte order mark before JSON lines and CSV, not before a list
        raise ValueError(f"--data {path}: the file begins with a byte order mark. Save it as UTF-8 without one.")
    if head[:1] != "[":
        yield from _json_lines(path)
        return
    try:
        records = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"--data {path}: no JSON ({error}).") from error
    for number, record in enumerate(records, 1):
        yield f"record {number}", _mapping(path, f"record {number}", record)


def _json_lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    with path.open(encoding="utf-8-sig") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except ValueError as error:
                raise ValueError(
                    f"--data {path}: line {number} is no JSON ({error}): {line.strip()[:60]!r}. Every line must be one "
                    "record, or the file one list of records with a name that ends in .json."
                ) from error
            yield f"line {number}", _mapping(path, f"line {number}", record)


def _mapping(path: Path, where: str, record: Any) -> dict[str, Any]:
    if not isinstance(record, dict):
        raise ValueError(
            f"--data {path}: {where} is {type(record).__name__}, not an object with columns: {str(record)[:60]!r}."
        )
    try:
        json.dumps(record, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"--data {path}: {where} holds {error.object[error.start]!r}, half of a character (a lone surrogate), "
            "which is no text. Remove it."
        ) from error
    return record


def _csv(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    csv.field_size_limit(sys.maxsize)
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file, restkey="")
        names = reader.fieldnames or []
        if len(names) == 1 and (other := re.search(r"[;\t|]", names[0])):
            raise ValueError(
                f"--data {path}: the first line names one column, {names[0]!r}. Axolotl reads fields that commas "
                f"separate, not {other[0]!r}: save the file with commas, or as .jsonl."
            )
        for number, record in enumerate(reader, 1):
            if "" in record or None in record.values():
                raise ValueError(
                    f"--data {path}: record {number}, which ends in line {reader.line_num}, has not as many fields as "
                    f"the first line names columns ({', '.join(reader.fieldnames or [])}). Quote texts with commas."
                )
            yield f"record {number}", dict(record)


def _parquet(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    from pyarrow import ArrowException
    from pyarrow.parquet import ParquetFile

    try:
        file = ParquetFile(path)
    except (ArrowException, OSError) as error:
        raise ValueError(f"--data {path}: no Parquet file ({error}).") from error
    number = 0
    for batch in file.iter_batches(_ROWS_AT_ONCE):
        for record in batch.to_pylist():
            number += 1
            yield f"record {number}", record


def _listed(names: tuple[str, ...]) -> str:
    return ", ".join(names)
