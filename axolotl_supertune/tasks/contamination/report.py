"""The contamination report, a JSON file: made from training sets, written, and read again by the lm-eval tasks."""

import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from ...method.atomic_files import whole_file
from ..benchmarks import BENCHMARKS, find_benchmark, load_benchmark
from .comparison import NGRAM, THRESHOLD, find_matches, question_of
from .training_files import TrainingSet, read_training

FORMAT = "supertune_contamination"
VERSION = 1

Report = dict[str, Any]


def contamination_report(
    train_files: Sequence[str | os.PathLike[str]],
    benchmarks: Iterable[str] = tuple(BENCHMARKS),
    *,
    field: str | None = None,
    threshold: float = THRESHOLD,
    data_dir: str | os.PathLike[str] | None = None,
) -> Report:
    """Read training sets and compare them with benchmarks.

    Args:
        train_files: local files (json, jsonl, either with .gz, parquet), or hub ids (`owner/name[:config]`), of which
            the `train` split is read.
        benchmarks: names from BENCHMARKS.
        field: the column that holds the questions; default: the first of QUESTION_FIELDS with text in it. All other
            text of a record is compared too.
        threshold: in (0, 1], the smallest share of a test question's words that makes a record a near-duplicate.
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
    """Compare training sets that were read before; as `contamination_report`."""
    if not 0 < threshold <= 1:
        raise ValueError(f"threshold {threshold} is not in (0, 1].")
    if not training:
        raise ValueError("no training file was named.")
    chosen = [find_benchmark(name) for name in benchmarks]
    questions = [
        question_of(benchmark, index, record["instruction"])
        for benchmark in chosen
        for index, record in enumerate(load_benchmark(benchmark.name, data_dir))
    ]
    matches = find_matches(training, questions, threshold)

    report: Report = {
        "format": FORMAT,
        "version": VERSION,
        "rule": {"ngram": NGRAM, "threshold": threshold},
        "train": [
            {"path": source.path, **source.identity, "records": len(source.records), "field": source.field}
            for source in training
        ],
        "benchmarks": {},
    }
    for benchmark in chosen:
        own = [question for question in questions if question.benchmark == benchmark.name]
        exact = [question for question in own if question in matches.exact]
        entry: dict[str, Any] = {
            "n": benchmark.records,
            "sha256": benchmark.sha256,
            "exact": [question.index for question in exact],
            "exact_train": [list(matches.exact[question]) for question in exact],
        }
        for level, overlaps in (("near", matches.near), ("template", matches.template)):
            entry[level] = [
                {
                    "index": question.index,
                    "train": list(overlaps[question][1]),
                    "overlap": round(overlaps[question][0], 4),
                }
                for question in own
                if question in overlaps
            ]
        entry["clean"] = len(own) - len(entry["exact"]) - len(entry["near"])
        report["benchmarks"][benchmark.name] = entry
    return report


def write_report(report: Report, path: str | os.PathLike[str]) -> None:
    """Write a report as JSON, whole or not at all."""
    with whole_file(path) as temporary:
        temporary.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def load_report(path: str | os.PathLike[str]) -> Report:
    """Read a report and check that it is about the benchmark files that this package knows.

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
            f"{path} is a contamination report of version {report.get('version')}, not {VERSION}: make it again."
        )
    if not isinstance(report.get("benchmarks"), dict):
        raise ValueError(f"{path} is damaged: it has no benchmarks. Make it again.")
    for name in report["benchmarks"]:
        try:
            clean_indices(report, name)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error
    return report


def clean_indices(report: Report, benchmark: str) -> list[int]:
    """The numbers of the test records that are neither an exact match nor a near-duplicate, ascending, from 0.

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
            f"{entry.get('sha256') if isinstance(entry, dict) else None}, expected {known.sha256}): make it again."
        )
    try:
        contaminated = {*entry["exact"], *(match["index"] for match in entry["near"])}
        clean = [index for index in range(known.records) if index not in contaminated]
        consistent = len(contaminated) + len(clean) == known.records and len(clean) == entry["clean"]
    except (KeyError, TypeError):
        consistent = False
    if not consistent:
        raise ValueError(f"the contamination report's entry for {known.name} is damaged: make it again.")
    return clean
