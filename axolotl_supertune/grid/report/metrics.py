"""Accuracies and gold NLLs of scored models, and the metrics by which methods are compared.

Scores hold one character or number per item; the functions here turn them into arrays over models, items or both.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from ..run_files import Scores
from .statistics import Array


@dataclass(frozen=True)
class Metric:
    """A number by which methods are compared.

    combine: how benchmarks make one number, as `paired_bootstrap` takes it.
    unit: factor from stored to displayed numbers.
    """

    name: str
    title: str
    higher_is_better: bool
    combine: Literal["mean", "pooled"]
    unit: float = 1.0


METRICS = (
    Metric("accuracy", "mean accuracy, all items (points)", True, "mean", 100),
    Metric("accuracy_clean", "mean accuracy, clean items (points)", True, "mean", 100),
    Metric("gold_nll", "gold targets' NLL (nats a token)", False, "pooled"),
)


def correct_answers(scores: Sequence[Scores], benchmark: str, rule: str = "correct", clean: bool = False) -> Array:
    """Which items each model answers correctly: (models, items), 0 or 1.

    Args:
        rule: `correct` (the published rule) or `correct_strict`.
        clean: only the items that the contamination report did not find in the training data; without a report there
            are none.
    """
    of_models = [scored.benchmarks[benchmark] for scored in scores]
    answers = np.array([_bits(getattr(of_model, rule)) for of_model in of_models])
    if not clean:
        return answers
    mask = of_models[0].clean
    return answers[:, _bits(mask) == 1] if mask is not None else answers[:, :0]


def accuracies(scores: Sequence[Scores], rule: str = "correct", clean: bool = False) -> dict[str, Array]:
    """Share of correct answers, (models,), by benchmark; also their unweighted `mean` if every benchmark has items.

    Arguments as in `correct_answers`. Benchmarks without items are left out.
    """
    answers = {name: correct_answers(scores, name, rule, clean) for name in scores[0].benchmarks} if scores else {}
    shares = {name: of_benchmark.mean(1) for name, of_benchmark in answers.items() if of_benchmark.shape[1]}
    if shares and len(shares) == len(answers):
        shares["mean"] = np.mean(list(shares.values()), axis=0)
    return shares


def gold_nlls(scores: Sequence[Scores]) -> dict[str, Array]:
    """NLL of the gold targets in nats a token, (models,), by benchmark; `pooled` over all targets of all benchmarks.

    A benchmark in which any model has a value that is not finite is left out, and then there is no `pooled` either.
    """
    sums = {}
    for name in scores[0].benchmarks if scores else ():
        of_models = [scored.benchmarks[name] for scored in scores]
        if of_models[0].gold_tokens:
            sums[name] = np.array([sum(of_model.gold_nll) for of_model in of_models]), sum(of_models[0].gold_tokens)
    nlls = {name: nll / tokens for name, (nll, tokens) in sums.items() if np.isfinite(nll).all()}
    if nlls and len(nlls) == len(sums):
        totals = np.sum([nll for nll, _ in sums.values()], axis=0)
        nlls["pooled"] = totals / sum(tokens for _, tokens in sums.values())
    return nlls


def has_values(metric: Metric, scores: Sequence[Scores]) -> bool:
    """Whether there are scores and the metric is finite for all of them."""
    return bool(scores) and (metric.name != "gold_nll" or "pooled" in gold_nlls(scores))


def metric_value(metric: Metric, scores: Scores) -> float:
    """The metric of one model, over all benchmarks."""
    if metric.name == "gold_nll":
        return float(gold_nlls([scores])["pooled"][0])
    return float(accuracies([scores], clean=metric.name == "accuracy_clean")["mean"][0])


def item_values(metric: Metric, benchmark: str, scores: Sequence[Scores]) -> Array:
    """Each item's value, (items,), averaged over the models."""
    if metric.name == "gold_nll":
        return np.mean([scored.benchmarks[benchmark].gold_nll for scored in scores], axis=0)
    return correct_answers(scores, benchmark, clean=metric.name == "accuracy_clean").mean(0)


def item_weights(metric: Metric, benchmark: str, scores: Scores) -> Array:
    """Each item's weight, (items,): its gold target's tokens for the NLL, else 1."""
    if metric.name == "gold_nll":
        return np.array(scores.benchmarks[benchmark].gold_tokens, dtype=np.float64)
    return np.ones(correct_answers([scores], benchmark, clean=metric.name == "accuracy_clean").shape[1])


def _bits(text: str) -> Array:
    """An array of 0.0 and 1.0 from a text of the characters 0 and 1."""
    return np.frombuffer(text.encode("ascii"), dtype=np.uint8).astype(np.float64) - ord("0")
