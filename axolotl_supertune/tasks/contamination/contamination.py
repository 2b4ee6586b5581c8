"""How many test questions a model has seen in training, and which ones it has not.

Text is compared as words: Unicode NFKC, casefold, then every run of letters and every number ("1,000" is 1000, "6.8" is
one word); punctuation and spaces are dropped. Of AQuA, the question is compared without its answer choices.

- exact: all words of the test question follow one another in a training record: in its question, in any other text of
  it, or across two of them (a context column, then a question column).
- near: in one text of one training record, at least `threshold` of the test question's words lie in runs of NGRAM words
  that both share, numbers counted as equal (a run has two other words or more); and around these runs are all of the
  test question's numbers.
- template: the same overlap, but other numbers. The exercise was seen, not this question: listed, and kept as clean.

Clean is what is neither exact nor near. Each question has one level, the first that holds.

Chosen by reading. In LLM-Adapters' math_data.json there are 33 near hits at 0.65; 32 are the same question ("0.3 mile"
for "0.3 of a mile", a word left out, a name or the order changed), the lowest at 0.72, and 1 is another. Of the 6 from
0.5 to 0.57, 2 are the same question; below 0.5, none of the 8 down to 0.32. GSM8K's training split has no near hit; its
largest overlap with equal numbers is 0.42, another question. Of the template hits, none of 59 read at random is the
same question. The usual rule, 80% of all runs of 8 words, numbers as they are, finds none of the 33. Where question and
solution share one text, more numbers are near: 36 instead of 33 hits. 100,000 records take about 15 s.
"""

import dataclasses
import gzip
import hashlib
import io
import json
import os
import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...method.atomic_files import whole_file
from ..benchmarks import BENCHMARKS, Benchmark, find_benchmark, load_benchmark

if TYPE_CHECKING:
    from rich.table import Table

FORMAT = "supertune_contamination"
VERSION = 1
NGRAM = 5
THRESHOLD = 0.65
LEVELS = ("exact", "near", "template")

# Columns that hold a question, the more telling first. The last two are lists of turns.
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
SUFFIXES = (".json", ".jsonl", ".json.gz", ".jsonl.gz", ".parquet")

_NUMBER = "0"  # any number, where numbers count as equal
_WORD = re.compile(r"\d+(?:,\d{3})+(?!\d)(?:\.\d+)?|\d+(?:\.\d+)?|[^\W\d_]+")
_CHOICES = re.compile(r"answer choices\s*:", re.IGNORECASE)
_SHORTEST_STEM = 8
_HUB_ID = re.compile(r"[\w-][\w.-]*(?:/[\w.-]+)?(?::[\w.-]+)?")
_USER_ROLES = ("user", "human")

Report = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class TrainingRecord:
    question: str
    texts: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class TrainingSet:
    """What was read from one source.

    identity: {"sha256": …} of a file, {"revision": …} of a hub dataset.
    field: the column that holds the questions.
    """

    path: str
    identity: dict[str, str]
    field: str
    records: list[TrainingRecord]


# A training record: the number of the training set, and of the record in it.
_Place = tuple[int, int]


@dataclasses.dataclass(frozen=True, eq=False)
class _Question:
    benchmark: str
    index: int
    words: tuple[str, ...]
    numbers: Counter[str]


def contamination_report(
    train_files: Sequence[str | os.PathLike[str]],
    benchmarks: Iterable[str] = tuple(BENCHMARKS),
    *,
    field: str | None = None,
    threshold: float = THRESHOLD,
    data_dir: str | os.PathLike[str] | None = None,
) -> Report:
    """Compare training sets with benchmarks.

    Args:
        train_files: local files (json, jsonl, either with .gz, parquet), or hub ids (`owner/name[:config]`), of which
            the `train` split is read.
        benchmarks: names from BENCHMARKS.
        field: the column that holds the questions; default: the first of QUESTION_FIELDS with text in it. All other
            text of a record is compared too.
        threshold: in (0, 1], the share of a test question's words from which on a record is a near-duplicate.
        data_dir: as in `load_benchmark`.

    Returns:
        The report, ready for JSON. An overlap's `train` and `exact_train` are [number of the file, number of the record
        in it], from 0.

    Raises:
        FileNotFoundError: a training file, or a benchmark's file, that is not there.
        ValueError: a training file that is empty, unreadable or without questions, or a threshold out of range.
        OSError: as in `load_benchmark`.
    """
    return compare([read_training(path, field) for path in train_files], benchmarks, threshold, data_dir)


def compare(
    training: Sequence[TrainingSet],
    benchmarks: Iterable[str] = tuple(BENCHMARKS),
    threshold: float = THRESHOLD,
    data_dir: str | os.PathLike[str] | None = None,
) -> Report:
    """`contamination_report` on training sets that were read before."""
    if not 0 < threshold <= 1:
        raise ValueError(f"threshold {threshold} is not in (0, 1].")
    if not training:
        raise ValueError("no training file was named.")
    chosen = [find_benchmark(name) for name in benchmarks]
    questions = [
        _question(benchmark, index, record["instruction"])
        for benchmark in chosen
        for index, record in enumerate(load_benchmark(benchmark.name, data_dir))
    ]
    exact, near, template = _match(training, questions, threshold)

    report: Report = {
        "format": FORMAT,
        "version": VERSION,
        "rule": {"ngram": NGRAM, "threshold": threshold},
        "train": [
            {"path": each.path, **each.identity, "records": len(each.records), "field": each.field} for each in training
        ],
        "benchmarks": {},
    }
    for benchmark in chosen:
        own = [question for question in questions if question.benchmark == benchmark.name]
        entry: dict[str, Any] = {
            "n": benchmark.records,
            "sha256": benchmark.sha256,
            "exact": [question.index for question in own if question in exact],
            "exact_train": [list(exact[question]) for question in own if question in exact],
        }
        for level, found in (("near", near), ("template", template)):
            entry[level] = [
                {"index": question.index, "train": list(found[question][1]), "overlap": round(found[question][0], 4)}
                for question in own
                if question in found
            ]
        entry["clean"] = len(own) - len(entry["exact"]) - len(entry["near"])
        report["benchmarks"][benchmark.name] = entry
    return report


def write_report(report: Report, path: str | os.PathLike[str]) -> None:
    with whole_file(path) as temporary:
        temporary.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def load_report(path: str | os.PathLike[str]) -> Report:
    """A report that `write_report` wrote, about the benchmarks as they are here.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: not a report, of another version, damaged, or about other test files.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(f"there is no contamination report {path}.")
    try:
        report = json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not a contamination report: it is not valid JSON ({error}).") from error
    if not isinstance(report, dict) or report.get("format") != FORMAT:
        raise ValueError(f"{path} is not a contamination report: it does not say format: {FORMAT}.")
    if report.get("version") != VERSION:
        raise ValueError(
            f"{path} is a contamination report of version {report.get('version')}, not {VERSION}: make it anew."
        )
    if not isinstance(report.get("benchmarks"), dict):
        raise ValueError(f"{path} is damaged: it has no benchmarks. Make it anew.")
    for name in report["benchmarks"]:
        try:
            clean_indices(report, name)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error
    return report


def clean_indices(report: Report, benchmark: str) -> list[int]:
    """The numbers of the test records that are neither an exact match nor a near-duplicate, ascending.

    Raises:
        ValueError: the report does not cover this benchmark, covers another version of its file, or contradicts itself.
    """
    known = find_benchmark(benchmark)
    entry = report["benchmarks"].get(known.name)
    if entry is None:
        raise ValueError(
            f"the contamination report leaves out {known.name}; it covers {', '.join(report['benchmarks']) or 'none'}."
        )
    if not isinstance(entry, dict) or entry.get("sha256") != known.sha256 or entry.get("n") != known.records:
        raise ValueError(
            f"the contamination report is about another {known.name} test file (sha256 "
            f"{entry.get('sha256') if isinstance(entry, dict) else None}, expected {known.sha256}): make it anew."
        )
    try:
        seen = {*entry["exact"], *(each["index"] for each in entry["near"])}
        clean = [index for index in range(known.records) if index not in seen]
        consistent = len(seen) + len(clean) == known.records and len(clean) == entry["clean"]
    except (KeyError, TypeError):
        consistent = False
    if not consistent:
        raise ValueError(f"the contamination report's entry for {known.name} is damaged: make it anew.")
    return clean


# Comparing


def words(text: str) -> list[str]:
    """`text` as it is compared."""
    text = unicodedata.normalize("NFKC", text).casefold()
    return [word.replace(",", "") for word in _WORD.findall(text)]


def _is_number(word: str) -> bool:
    return word[0].isdecimal()


def _masked(text: Iterable[str]) -> list[str]:
    return [_NUMBER if _is_number(word) else word for word in text]


def _grams(text: Sequence[str]) -> Iterator[tuple[str, ...]]:
    return zip(*(text[at:] for at in range(NGRAM)), strict=False)


def _question(benchmark: Benchmark, index: int, instruction: str) -> _Question:
    asked = words(instruction)
    if benchmark.kind == "letter":
        stem = words(_CHOICES.split(instruction)[0])
        asked = stem if len(stem) >= _SHORTEST_STEM else asked
    return _Question(benchmark.name, index, tuple(asked), Counter(filter(_is_number, asked)))


def _match(
    training: Sequence[TrainingSet], questions: Sequence[_Question], threshold: float
) -> tuple[dict[_Question, _Place], dict[_Question, tuple[float, _Place]], dict[_Question, tuple[float, _Place]]]:
    """For exact, near and template: each question's first record, its best (overlap, record), the same."""
    beginnings: dict[tuple[str, ...], list[_Question]] = defaultdict(list)
    index: dict[tuple[str, ...], list[tuple[_Question, int]]] = defaultdict(list)
    for question in questions:
        beginnings[question.words[:NGRAM]].append(question)
        for at, gram in enumerate(_grams(_masked(question.words))):
            if sum(word != _NUMBER for word in gram) >= 2:  # not a bare equation
                index[gram].append((question, at))

    exact: dict[_Question, _Place] = {}
    near: dict[_Question, tuple[float, _Place]] = {}
    template: dict[_Question, tuple[float, _Place]] = {}
    for place, texts in _word_texts(training):
        whole = [word for text in texts for word in text]
        for at, gram in enumerate(_grams(whole)):
            for question in beginnings.get(gram, ()):
                if tuple(whole[at : at + len(question.words)]) == question.words:
                    exact.setdefault(question, place)
        for text in texts:
            for question, overlap, around in _overlaps(text, index, threshold):
                level = near if question.numbers <= Counter(filter(_is_number, around)) else template
                if question not in level or overlap > level[question][0]:
                    level[question] = (overlap, place)
    near = {question: found for question, found in near.items() if question not in exact}
    template = {q: found for q, found in template.items() if q not in exact and q not in near}
    return exact, near, template


def _word_texts(training: Sequence[TrainingSet]) -> Iterator[tuple[_Place, list[list[str]]]]:
    for number, each in enumerate(training):
        for at, record in enumerate(each.records):
            yield (number, at), [words(text) for text in record.texts]


def _overlaps(
    text: Sequence[str], index: dict[tuple[str, ...], list[tuple[_Question, int]]], threshold: float
) -> Iterator[tuple[_Question, float, Sequence[str]]]:
    """Each question with at least `threshold` of its words in runs that `text` shares: it, that share, and where.

    Where is the part of `text` from the first shared run to the last, each at its first occurrence, with room on both
    sides for the words not shared, but no more: a solution after the question has numbers of its own.
    """
    first: dict[tuple[str, ...], int] = {}
    for at, gram in enumerate(_grams(_masked(text))):
        if gram in index:
            first.setdefault(gram, at)
    shared: dict[_Question, list[tuple[int, int]]] = defaultdict(list)
    for gram, there in first.items():
        for question, at in index[gram]:
            shared[question].append((at, there))
    for question, runs in shared.items():
        length = len(question.words)
        if len(runs) * NGRAM < threshold * length:
            continue
        covered = len({at + step for at, _ in runs for step in range(NGRAM)})
        if covered >= threshold * length:
            room = NGRAM + length - covered
            begin = min(there for _, there in runs) - room
            end = max(there for _, there in runs) + NGRAM + room
            yield question, covered / length, text[max(begin, 0) : end]


# Reading


def read_training(source: str | os.PathLike[str], field: str | None = None) -> TrainingSet:
    """All questions and texts of one training set; arguments and errors as in `contamination_report`."""
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
    strange = next((at for at, row in enumerate(rows) if not isinstance(row, dict)), None)
    if strange is not None:
        raise ValueError(f"{name}: record {strange} is a {type(rows[strange]).__name__}, not an object with columns.")
    column = _question_field(name, rows, field)
    records = [TrainingRecord(_first_text(row.get(column)), tuple(dict.fromkeys(_texts(row)))) for row in rows]
    return TrainingSet(name, identity, column, records)


def _parse(name: str, content: bytes) -> list[Any]:
    if not name.endswith(SUFFIXES):
        raise ValueError(f"its name ends in none of {', '.join(SUFFIXES)}")
    if not content:
        raise ValueError("the file is empty")
    if name.endswith(".parquet"):
        import pyarrow.parquet

        return pyarrow.parquet.read_table(io.BytesIO(content)).to_pylist()
    text = (gzip.decompress(content) if name.endswith(".gz") else content).decode("utf-8-sig")
    try:
        whole = json.loads(text)
    except json.JSONDecodeError as error:
        if error.msg != "Extra data" and text.strip():
            raise
        return list(_parse_lines(text))
    if isinstance(whole, dict):
        whole = whole["data"] if isinstance(whole.get("data"), list) else [whole]
    if not isinstance(whole, list):
        raise ValueError(f"it holds one {type(whole).__name__}, neither a list nor lines of records")
    return whole


def _parse_lines(text: str) -> Iterator[Any]:
    # Not splitlines(): it also splits at U+2028 and the like, which JSON allows inside a string.
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            try:
                yield json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"line {number}: {error}") from error


def _load_from_hub(name: str) -> tuple[list[Any], dict[str, str]]:
    import datasets  # heavy; a local file needs none of it

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
    """A column's question: its text, or the first user turn's, or failing that the first text in it."""
    if isinstance(value, list):
        turns = [turn for turn in value if isinstance(turn, dict)]
        users = [turn for turn in turns if (turn.get("role") or turn.get("from")) in _USER_ROLES]
        if users:
            value = users[0].get("content", users[0].get("value"))
    return next((text for text in _texts(value) if text.strip()), "")


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _texts(each)


def summary_table(report: Report) -> "Table":
    """The counts of every benchmark and their totals."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("benchmark")
    for column in ("n", "exact", "near", "clean", "clean %", "of these, same template"):
        table.add_column(column, justify="right")
    total = [0] * 5
    for name, entry in report["benchmarks"].items():
        row = [entry["n"], len(entry["exact"]), len(entry["near"]), entry["clean"], len(entry["template"])]
        total = [before + more for before, more in zip(total, row, strict=True)]
        table.add_row(name, *_cells(row))
    table.add_section()
    table.add_row("all", *_cells(total))
    return table


def _cells(row: list[int]) -> list[str]:
    n, exact, near, clean, template = row
    return [str(n), str(exact), str(near), str(clean), f"{100 * clean / n:.1f}", str(template)]


def match_lines(
    report: Report, level: str, training: Sequence[TrainingSet], data_dir: str | os.PathLike[str] | None
) -> Iterator[str]:
    """Every match of one level, as three lines of text: where it is, the test question, the training question."""
    for name, entry in report["benchmarks"].items():
        records = load_benchmark(name, data_dir)
        if level == "exact":
            matches = [(index, place, 1.0) for index, place in zip(entry["exact"], entry["exact_train"], strict=True)]
        else:
            matches = [(match["index"], match["train"], match["overlap"]) for match in entry[level]]
        for index, (number, at), overlap in matches:
            source = training[number]
            yield f"{level} {name} {index} = {source.path} {at}, overlap {overlap:.2f}"
            yield f"  test:  {' '.join(records[index]['instruction'].split())}"
            yield f"  train: {' '.join(source.records[at].question.split())}"
