"""Methods against the reference: test scores question by question, validation NLLs seed by seed."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from ..rate_selection import Choice
from ..records import Run, Scores
from .statistics import (
    CONFIDENCE,
    NO_DIFFERENCE,
    Array,
    Interval,
    Spread,
    Stratum,
    holm,
    over_seeds,
    paired_bootstrap,
    spread,
)

ONE_SEED = "one seed"
# Below it a percentile interval is too narrow to be believed.
FEW_ITEMS = 30


@dataclass(frozen=True)
class Metric:
    """What is compared with the reference.

    combine: how benchmarks make one number, as `paired_bootstrap` has it.
    unit: what its numbers are multiplied by to be shown.
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


@dataclass(frozen=True)
class Result:
    """A method at its chosen rate: its finished runs, by seed, and the scores of those that have some."""

    choice: Choice
    runs: dict[int, Run]
    scores: dict[int, Scores]

    @property
    def method(self) -> str:
        return self.choice.method

    @property
    def epochs(self) -> float:
        return self.choice.epochs

    def over_seeds(self, value: Callable[[Run], float | None]) -> Spread | None:
        return spread([each for run in self.runs.values() if (each := value(run)) is not None])


@dataclass(frozen=True)
class Comparison:
    """A method against the reference of the same number of epochs.

    reference: None: the model before training.
    by_seed: the difference within each seed that both were scored with.
    holm: p, adjusted for all comparisons of this metric.
    items: that were resampled; of the smallest benchmark, where benchmarks are averaged.
    """

    metric: Metric
    result: Result
    reference: Result | None
    interval: Interval
    by_seed: dict[int, float]
    holm: float
    items: int

    @property
    def verdict(self) -> str:
        return self.interval.verdict(self.metric.higher_is_better)

    @property
    def doubts(self) -> list[str]:
        """What a verdict of better or worse does not withstand."""
        if self.verdict == NO_DIFFERENCE:
            return []
        opposed = any(value * self.interval.difference <= 0 for value in self.by_seed.values())
        doubts = {
            "not after Holm": self.holm > 1 - CONFIDENCE,
            "few items": self.items < FEW_ITEMS,
            "one seed": len(self.by_seed) < 2,
            "not in every seed": opposed,
        }
        return [doubt for doubt, stands in doubts.items() if stands]

    @property
    def said(self) -> str:
        """The verdict with its doubts."""
        return with_doubts(self.verdict, self.doubts)


@dataclass(frozen=True)
class SeedDifference:
    """A method's validation NLL less the reference's of the same number of epochs.

    by_seed: within each seed that both ran with.
    interval: Student's over these seeds; None of fewer than two.
    holm: its p, adjusted for all methods.
    """

    result: Result
    reference: Result
    by_seed: dict[int, float]
    interval: Interval | None
    holm: float | None

    @property
    def verdict(self) -> str:
        """ONE_SEED where nothing can be said."""
        return self.interval.verdict(higher_is_better=False) if self.interval is not None else ONE_SEED

    @property
    def doubts(self) -> list[str]:
        """What a verdict of better or worse does not withstand."""
        decided = self.verdict not in (NO_DIFFERENCE, ONE_SEED)
        return ["not after Holm"] if decided and self.holm is not None and self.holm > 1 - CONFIDENCE else []

    @property
    def said(self) -> str:
        """The verdict with its doubts."""
        return with_doubts(self.verdict, self.doubts)


def with_doubts(text: str, doubts: Sequence[str]) -> str:
    """A verdict or a method's name, with what a verdict does not withstand in brackets."""
    return f"{text} ({', '.join(doubts)})" if doubts else text


def right(scores: Sequence[Scores], benchmark: str, rule: str = "correct", clean: bool = False) -> Array:
    """(models, items): 1 where the answer is right; `rule` is correct or correct_strict, `clean` leaves clean items."""
    each = [scored.benchmarks[benchmark] for scored in scores]
    rows = np.array([_bits(getattr(one, rule)) for one in each])
    if not clean:
        return rows
    mask = each[0].clean
    return rows[:, _bits(mask) == 1] if mask is not None else rows[:, :0]


def accuracies(scores: Sequence[Scores], rule: str = "correct", clean: bool = False) -> dict[str, Array]:
    """Share of right answers, (models,), by benchmark; `mean`, unweighted, where every benchmark has items."""
    found = {name: right(scores, name, rule, clean) for name in scores[0].benchmarks} if scores else {}
    shares = {name: rows.mean(1) for name, rows in found.items() if rows.shape[1]}
    if shares and len(shares) == len(found):
        shares["mean"] = np.mean(list(shares.values()), axis=0)
    return shares


def gold_nlls(scores: Sequence[Scores]) -> dict[str, Array]:
    """NLL of the gold targets in nats a token, (models,), by benchmark; `pooled` over all targets.

    Left out are benchmarks in which one of the models has a value that is not finite; then there is no `pooled` either.
    """
    sums = {}
    for name in scores[0].benchmarks if scores else ():
        each = [scored.benchmarks[name] for scored in scores]
        if each[0].gold_tokens:
            sums[name] = np.array([sum(one.gold_nll) for one in each]), sum(each[0].gold_tokens)
    found = {name: nll / tokens for name, (nll, tokens) in sums.items() if np.isfinite(nll).all()}
    if found and len(found) == len(sums):
        totals = np.sum([nll for nll, _ in sums.values()], axis=0)
        found["pooled"] = totals / sum(tokens for _, tokens in sums.values())
    return found


def _bits(text: str) -> Array:
    return np.frombuffer(text.encode("ascii"), dtype=np.uint8).astype(np.float64) - ord("0")


def has_values(metric: Metric, scores: Sequence[Scores]) -> bool:
    """Whether there are scores, and all of them can be compared by the metric."""
    return bool(scores) and (metric.name != "gold_nll" or "pooled" in gold_nlls(scores))


def compare(
    results: Sequence[Result],
    reference: str,
    benchmarks: dict[str, tuple[int, int | None]],
    resamples: int,
    seed: int,
) -> list[Comparison]:
    """All others with the reference; p is adjusted for all comparisons of a metric."""
    found = []
    for metric in METRICS:
        of_metric: list[Comparison] = []
        for epochs in dict.fromkeys(each.epochs for each in results):
            of_epochs = [each for each in results if each.epochs == epochs]
            against = next((each for each in of_epochs if each.method == reference), None)
            if against is not None:
                others = [each for each in of_epochs if each is not against]
                of_metric += _compared(metric, others, against, against.scores, benchmarks, resamples, seed)
        found += _adjusted(of_metric)
    return found


def compare_with_base(
    results: Sequence[Result],
    base: Scores,
    benchmarks: dict[str, tuple[int, int | None]],
    resamples: int,
    seed: int,
) -> list[Comparison]:
    """All results with the model before training, which is the same for every seed; a metric is a family of its own."""
    found = []
    for metric in METRICS:
        theirs = dict.fromkeys((at for each in results for at in each.scores), base)
        found += _adjusted(_compared(metric, results, None, theirs, benchmarks, resamples, seed))
    return found


def _compared(
    metric: Metric,
    others: Sequence[Result],
    against: Result | None,
    theirs: dict[int, Scores],
    benchmarks: dict[str, tuple[int, int | None]],
    resamples: int,
    seed: int,
) -> list[Comparison]:
    """`theirs`: of `against`, by seed. None where nothing can be compared; p not adjusted yet."""
    others = [each for each in others if has_values(metric, list(each.scores.values()))]
    if not others or not has_values(metric, list(theirs.values())):
        return []
    strata = [_stratum(metric, name, others, list(theirs.values())) for name in benchmarks]
    if metric.combine == "pooled":
        strata = [each for each in strata if len(each.weights)]
    if not strata or not all(len(each.weights) for each in strata):
        return []
    intervals = paired_bootstrap(strata, metric.combine, resamples=resamples, seed=seed)
    items = (sum if metric.combine == "pooled" else min)(len(each.weights) for each in strata)
    return [
        Comparison(metric, each, against, interval, _by_seed(metric, each.scores, theirs), math.nan, items)
        for each, interval in zip(others, intervals, strict=True)
    ]


def _adjusted(comparisons: Sequence[Comparison]) -> list[Comparison]:
    adjusted = holm([each.interval.p for each in comparisons])
    return [replace(each, holm=p) for each, p in zip(comparisons, adjusted, strict=True)]


def seed_differences(results: Sequence[Result], reference: str) -> list[SeedDifference]:
    """Validation NLLs of all others less the reference's; p is adjusted for those that have an interval."""
    found = []
    for result in results:
        against = next((each for each in results if (each.method, each.epochs) == (reference, result.epochs)), None)
        if against is None or against is result:
            continue
        ours, theirs = _validation_nlls(result), _validation_nlls(against)
        by_seed = {seed: ours[seed] - theirs[seed] for seed in sorted(ours.keys() & theirs.keys())}
        found.append(SeedDifference(result, against, by_seed, over_seeds(list(by_seed.values())), None))
    told = [(at, each.interval.p) for at, each in enumerate(found) if each.interval is not None]
    for (at, _), adjusted in zip(told, holm([p for _, p in told]), strict=True):
        found[at] = replace(found[at], holm=adjusted)
    return found


def _validation_nlls(result: Result) -> dict[int, float]:
    return {seed: run.validation_nll for seed, run in result.runs.items() if run.validation_nll is not None}


def _stratum(metric: Metric, benchmark: str, others: Sequence[Result], against: Sequence[Scores]) -> Stratum:
    theirs = _items(metric, benchmark, against)
    values = np.column_stack([_items(metric, benchmark, list(each.scores.values())) - theirs for each in others])
    if metric.name == "gold_nll":
        return Stratum(values, np.array(against[0].benchmarks[benchmark].gold_tokens, dtype=np.float64))
    return Stratum(values, np.ones(len(values)))


def _items(metric: Metric, benchmark: str, scores: Sequence[Scores]) -> Array:
    """(items,), averaged over the seeds."""
    if metric.name == "gold_nll":
        return np.mean([scored.benchmarks[benchmark].gold_nll for scored in scores], axis=0)
    return right(scores, benchmark, clean=metric.name == "accuracy_clean").mean(0)


def _by_seed(metric: Metric, ours: dict[int, Scores], theirs: dict[int, Scores]) -> dict[int, float]:
    def value(scores: Scores) -> float:
        if metric.name == "gold_nll":
            return float(gold_nlls([scores])["pooled"][0])
        return float(accuracies([scores], clean=metric.name == "accuracy_clean")["mean"][0])

    return {seed: value(ours[seed]) - value(theirs[seed]) for seed in sorted(ours.keys() & theirs.keys())}
