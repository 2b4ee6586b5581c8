"""Compares methods with the reference: test scores item by item, validation NLLs seed by seed."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..rate_selection import Choice
from ..run_files import Run, Scores
from .metrics import METRICS, Metric, has_values, item_values, item_weights, metric_value
from .statistics import (
    CONFIDENCE,
    NO_DIFFERENCE,
    Interval,
    Spread,
    Stratum,
    holm,
    paired_bootstrap,
    spread,
    t_interval,
)

ONE_SEED = "one seed"
NOT_AFTER_HOLM = "not after Holm"
# With fewer items than this, percentile intervals are too narrow to be trusted.
FEW_ITEMS = 30


@dataclass(frozen=True)
class Result:
    """A method at its chosen learning rate: its usable runs by seed, and the scores of those that were scored."""

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
        """Mean and deviation of a value of the runs; None if no run has it."""
        return spread([number for run in self.runs.values() if (number := value(run)) is not None])


@dataclass(frozen=True)
class Comparison:
    """The difference of a method's test scores to those of the reference with the same number of epochs.

    reference: None for the model before training.
    by_seed: the difference within each seed that both were scored with.
    holm: the interval's p, adjusted for all comparisons of this metric.
    items: number of resampled items; of the smallest benchmark where benchmarks are averaged.
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
        """better, worse, or NO_DIFFERENCE."""
        return self.interval.verdict(self.metric.higher_is_better)

    @property
    def doubts(self) -> list[str]:
        """Reasons not to rely on a verdict of better or worse; empty for NO_DIFFERENCE."""
        if self.verdict == NO_DIFFERENCE:
            return []
        opposite_sign = any(value * self.interval.difference <= 0 for value in self.by_seed.values())
        doubts = {
            NOT_AFTER_HOLM: self.holm > 1 - CONFIDENCE,
            "few items": self.items < FEW_ITEMS,
            ONE_SEED: len(self.by_seed) < 2,
            "not in every seed": opposite_sign,
        }
        return [doubt for doubt, applies in doubts.items() if applies]

    @property
    def verdict_text(self) -> str:
        """The verdict with its doubts in brackets."""
        return with_doubts(self.verdict, self.doubts)


@dataclass(frozen=True)
class SeedDifference:
    """The difference of a method's validation NLL to that of the reference with the same number of epochs.

    by_seed: the difference within each seed that both ran with, in nats a token.
    interval: Student's, over these seeds; None for fewer than two.
    holm: the interval's p, adjusted for all methods.
    """

    result: Result
    reference: Result
    by_seed: dict[int, float]
    interval: Interval | None
    holm: float | None

    @property
    def verdict(self) -> str:
        """better, worse or NO_DIFFERENCE; ONE_SEED without an interval."""
        return self.interval.verdict(higher_is_better=False) if self.interval is not None else ONE_SEED

    @property
    def doubts(self) -> list[str]:
        """Reasons not to rely on a verdict of better or worse."""
        is_decided = self.verdict not in (NO_DIFFERENCE, ONE_SEED)
        return [NOT_AFTER_HOLM] if is_decided and self.holm is not None and self.holm > 1 - CONFIDENCE else []

    @property
    def verdict_text(self) -> str:
        """The verdict with its doubts in brackets."""
        return with_doubts(self.verdict, self.doubts)


def with_doubts(text: str, doubts: Sequence[str]) -> str:
    """Append doubts to a verdict or a method's name, in brackets."""
    return f"{text} ({', '.join(doubts)})" if doubts else text


@dataclass(frozen=True)
class ScoreComparer:
    """Compares test scores by the paired bootstrap.

    benchmarks: names, in the report's order.
    resamples, seed: of the bootstrap.
    """

    benchmarks: Sequence[str]
    resamples: int
    seed: int

    def with_reference(self, results: Sequence[Result], reference: str) -> list[Comparison]:
        """Compare every method with the reference of its number of epochs.

        p is adjusted for all comparisons of a metric, over all numbers of epochs.
        """
        comparisons = []
        for metric in METRICS:
            of_metric: list[Comparison] = []
            for epochs in dict.fromkeys(result.epochs for result in results):
                same_epochs = [result for result in results if result.epochs == epochs]
                against = next((result for result in same_epochs if result.method == reference), None)
                if against is not None:
                    others = [result for result in same_epochs if result is not against]
                    of_metric += self._compare(metric, others, against, against.scores)
            comparisons += _adjust(of_metric)
        return comparisons

    def with_base(self, results: Sequence[Result], base: Scores) -> list[Comparison]:
        """Compare every method with the model before training, which is the same for every seed.

        p is adjusted for all of these comparisons of a metric, apart from those with the reference.
        """
        base_by_seed = dict.fromkeys((seed for result in results for seed in result.scores), base)
        comparisons = []
        for metric in METRICS:
            comparisons += _adjust(self._compare(metric, results, None, base_by_seed))
        return comparisons

    def _compare(
        self, metric: Metric, results: Sequence[Result], against: Result | None, theirs: dict[int, Scores]
    ) -> list[Comparison]:
        """Compare results with the scores `theirs` (by seed) of `against`, p not yet adjusted (holm is NaN).

        Results without values of the metric are left out; empty if `theirs` has none or a benchmark lacks items.
        """
        reference_scores = list(theirs.values())
        results = [result for result in results if has_values(metric, list(result.scores.values()))]
        if not results or not has_values(metric, reference_scores):
            return []
        strata = [_stratum(metric, name, results, reference_scores) for name in self.benchmarks]
        if metric.combine == "pooled":
            strata = [stratum for stratum in strata if len(stratum.weights)]
        if not strata or not all(len(stratum.weights) for stratum in strata):
            return []
        intervals = paired_bootstrap(strata, metric.combine, resamples=self.resamples, seed=self.seed)
        items = (sum if metric.combine == "pooled" else min)(len(stratum.weights) for stratum in strata)
        return [
            Comparison(metric, result, against, interval, _by_seed(metric, result.scores, theirs), math.nan, items)
            for result, interval in zip(results, intervals, strict=True)
        ]


def _stratum(metric: Metric, benchmark: str, results: Sequence[Result], reference: Sequence[Scores]) -> Stratum:
    theirs = item_values(metric, benchmark, reference)
    ours = [item_values(metric, benchmark, list(result.scores.values())) for result in results]
    return Stratum(np.column_stack(ours) - theirs[:, None], item_weights(metric, benchmark, reference[0]))


def _by_seed(metric: Metric, ours: dict[int, Scores], theirs: dict[int, Scores]) -> dict[int, float]:
    return {
        seed: metric_value(metric, ours[seed]) - metric_value(metric, theirs[seed])
        for seed in sorted(ours.keys() & theirs.keys())
    }


def _adjust(comparisons: Sequence[Comparison]) -> list[Comparison]:
    adjusted = holm([comparison.interval.p for comparison in comparisons])
    return [replace(comparison, holm=p) for comparison, p in zip(comparisons, adjusted, strict=True)]


def seed_differences(results: Sequence[Result], reference: str) -> list[SeedDifference]:
    """Differences of all validation NLLs to the reference's; p is adjusted for those that have an interval."""
    differences = []
    for result in results:
        against = next((r for r in results if (r.method, r.epochs) == (reference, result.epochs)), None)
        if against is None or against is result:
            continue
        ours, theirs = _validation_nlls(result), _validation_nlls(against)
        by_seed = {seed: ours[seed] - theirs[seed] for seed in sorted(ours.keys() & theirs.keys())}
        differences.append(SeedDifference(result, against, by_seed, t_interval(list(by_seed.values())), None))
    p_values = {at: each.interval.p for at, each in enumerate(differences) if each.interval is not None}
    for at, adjusted in zip(p_values, holm(list(p_values.values())), strict=True):
        differences[at] = replace(differences[at], holm=adjusted)
    return differences


def _validation_nlls(result: Result) -> dict[int, float]:
    return {seed: run.validation_nll for seed, run in result.runs.items() if run.validation_nll is not None}
