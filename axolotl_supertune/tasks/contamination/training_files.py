"""Training data as questions and texts: local JSON, JSON Lines and Parquet files, and datasets of the Hugging Face hub.

Local JSON is read by the standard library, not by `datasets`, which turns the text "2024-01-31" into a date: here texts
stay texts, and an error names the line.
"""

import dataclasses
import gzip
import hashlib
import io
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SUFFIXES = (".json", ".jsonl", ".json.gz", ".jsonl.gz", ".parquet")
# Columns that hold a question, the most likely first. The last two are lists of turns.
QUESTION_FIELDS = (
    "instruction",
    "question",
    "problem",
    "prompt",
    "query",
    "input",
    "text",
    "messages",
    "conversations",
)

_HUB_ID = re.compile(r"[\w-][\w.-]*(?:/[\w.-]+)?(?::[\w.-]+)?")
_USER_ROLES = ("user", "human")


@dataclasses.dataclass(frozen=True)
class TrainingRecord:
    """One training example: its question ("" if it has none), and all its different texts, the question among them."""

    question: str
    texts: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class TrainingSet:
    """The records of one file or hub dataset.

    Attributes:
        path: as it was named.
        identity: {"sha256": …} of a file, {"revision": …} of a hub dataset.
        field: the column that holds the questions.
        records: in the file's order.
    """

    path: str
    identity: dict[str, str]
    field: str
    records: list[TrainingRecord]


def read_training(source: str | os.PathLike[str], field: str | None = None) -> TrainingSet:
    """Read one training set.

    Args:
        source: a local file (SUFFIXES), a folder that `datasets` reads, or a hub id `owner/name[:config]`, of which the
            `train` split is read.
        field: the column that holds the questions; None: the first of QUESTION_FIELDS with text in it.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is empty, cannot be read, or has no question column.
    """
    name = os.fspath(source)
    if os.path.isfile(name):
        content = Path(name).read_bytes()
        identity = {"sha256": hashlib.sha256(content).hexdigest()}
        try:
            rows = _parse(name, content)
        except Exception as error:  # pyarrow and gzip have errors of their own
            raise ValueError(f"{name} cannot be read as training data: {error or type(error).__name__}.") from error
    elif os.path.isdir(name) or (not name.endswith(SUFFIXES) and _HUB_ID.fullmatch(name)):
        rows, identity = _load_from_hub(name)
    else:
        raise FileNotFoundError(f"there is no training file {name}.")
    if not rows:
        raise ValueError(f"{name} holds no training record.")
    for number, row in enumerate(rows):
        if not isinstance(row, dict):
            raise ValueError(f"{name}: record {number} is a {type(row).__name__}, not an object with columns.")
    column = _question_field(name, rows, field)
    records = [TrainingRecord(_first_text(row.get(column)), tuple(dict.fromkeys(_texts(row)))) for row in rows]
    return TrainingSet(name, identity, column, records)


def _parse(name: str, content: bytes) -> list[Any]:
    """The records in a file's content, by the file's name."""
    if not name.endswith(SUFFIXES):
        raise ValueError(f"its name ends in none of {', '.join(SUFFIXES)}")
    if not content:
        raise ValueError("the file is empty")
    if name.endswith(".parquet"):
        import pyarrow.parquet

        return pyarrow.parquet.read_table(io.BytesIO(content)).to_pylist()
    text = (gzip.decompress(content) if name.endswith(".gz") else content).decode("utf-8-sig")
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        if error.msg != "Extra data" and text.strip():
            raise
        return list(_parse_lines(text))
    if isinstance(value, dict):
        value = value["data"] if isinstance(value.get("data"), list) else [value]
    if not isinstance(value, list):
        raise ValueError(f"it holds one {type(value).__name__}, neither a list nor lines of records")
    return value


def _parse_lines(text: str) -> Iterator[Any]:
    # Not splitlines(): it also splits at U+2028 and the like, which JSON allows inside a string.
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            try:
                yield json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"line {number}: {error}") from error


def _load_from_hub(name: str) -> tuple[list[Any], dict[str, str]]:
    """The train split of a hub dataset or a local dataset folder, and its revision."""
    import datasets  # slow to import; a local file does not need it

    path, _, config = name.partition(":") if not os.path.isdir(name) else (name, "", "")
    try:
        builder = datasets.load_dataset_builder(path, config or None)
        builder.download_and_prepare()
        table = builder.as_dataset(split="train").with_format("arrow")[:]
    except Exception as error:
        raise ValueError(
            f"there is no training file {name}, and as a hub dataset (split train) it cannot be read: "
            f"{error or type(error).__name__}. Name a local file ({', '.join(SUFFIXES)}), or OWNER/NAME[:CONFIG]."
        ) from error
    return table.to_pylist(), {"revision": str(builder.hash)}


def _question_field(name: str, rows: list[dict[str, Any]], field: str | None) -> str:
    """The column that holds the questions: `field` if given, else the first of QUESTION_FIELDS with text in it."""
    columns = list(dict.fromkeys(column for row in rows for column in row))
    if field is not None:
        if not any(_first_text(row.get(field)) for row in rows):
            raise ValueError(f"{name}: no record has text in {field}; the columns are {', '.join(columns)}.")
        return field
    by_name = {column.casefold(): column for column in reversed(columns)}
    for known in QUESTION_FIELDS:
        column = by_name.get(known)
        if column is not None and any(_first_text(row.get(column)) for row in rows):
            return column
    raise ValueError(
        f"{name}: no question column; the columns are {', '.join(columns)}, and none of {', '.join(QUESTION_FIELDS)} "
        "has text. Name it with --field."
    )


def _first_text(value: Any) -> str:
    """The question in a column: its text, or the first user turn's, or failing that the first text in it; else ""."""
    if isinstance(value, list):
        turns = [turn for turn in value if isinstance(turn, dict)]
        users = [turn for turn in turns if (turn.get("role") or turn.get("from")) in _USER_ROLES]
        if users:
            value = users[0].get("content", users[0].get("value"))
    return next((text for text in _texts(value) if text.strip()), "")


def _texts(value: Any) -> Iterator[str]:
    """All strings in nested lists and mappings."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _texts(item)
