"""What the task YAMLs call: documents of a benchmark, their prompts, the answers in model output, and the metrics."""

from collections.abc import Sequence
from typing import Any

from datasets import Dataset

from .benchmarks import BENCHMARKS, load_benchmark
from .contamination import clean_indices, load_report
from .extraction import answers, is_correct
from .prompt import alpaca_prompt


def load(
    benchmark: str, supertune_data_dir: str | None = None, supertune_contamination: str | None = None, **_: Any
) -> dict[str, Dataset]:
    """The documents of one benchmark.

    Args:
        benchmark: its name, from the task's YAML.
        supertune_data_dir: folder of the six files, from `--metadata`.
        supertune_contamination: path of a contamination report, from `--metadata`; `clean` is 1 for items that it does
            not list as exact or near matches.

    Returns:
        {"test": documents with instruction, answer, kind, and clean (1, 0, or -1 without a report)}.
    """
    records = load_benchmark(benchmark, data_dir=supertune_data_dir)
    clean = None
    if supertune_contamination:
        clean = set(clean_indices(load_report(supertune_contamination), benchmark))
    kind = BENCHMARKS[benchmark].kind
    rows = [
        {
            "instruction": record["instruction"],
            "answer": str(record["answer"]),
            "kind": kind,
            "clean": -1 if clean is None else int(index in clean),
        }
        for index, record in enumerate(records)
    ]
    return {"test": Dataset.from_list(rows)}


def prompt(doc: dict[str, Any]) -> str:
    """The Alpaca prompt of one document."""
    return alpaca_prompt(doc["instruction"])


def extract(resps: Sequence[Sequence[str]], docs: Sequence[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """A filter of the harness: response → the answers that both rules read from it, which logged samples then show."""
    return [[answers(text, doc["kind"]) for text in texts] for texts, doc in zip(resps, docs, strict=True)]


def score(doc: dict[str, Any], results: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Metrics of one document, 0 or 1: `acc` by the published rule, `acc_strict`, and both again if it is clean."""
    extracted = results[0]
    correct = {rule: float(is_correct(extracted[rule], doc["answer"], doc["kind"])) for rule in ("published", "strict")}
    metrics = {"acc": correct["published"], "acc_strict": correct["strict"]}
    if doc["clean"] >= 0:
        metrics["n_clean"] = float(doc["clean"])
    if doc["clean"] == 1:
        metrics |= {"acc_clean": correct["published"], "acc_strict_clean": correct["strict"]}
    return metrics


def total(items: Sequence[float]) -> float:
    """Aggregation of `n_clean`: how many items were clean."""
    return sum(items)
