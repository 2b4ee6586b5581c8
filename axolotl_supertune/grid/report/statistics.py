"""Means over seeds, paired bootstrap intervals over test items, Student's intervals over seeds, Holm's adjustment.

The bootstrap resamples the items (questions) of each benchmark, the same items for both methods, after averaging each
item over a method's seeds. Its intervals therefore say how a difference between these trained models depends on the
choice of questions, and nothing about the choice of seeds. For the seeds there are the standard deviation and, for the
validation NLL, which is not recorded record by record, `t_interval`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

RESAMPLES = 10_000
CONFIDENCE = 0.95
NO_DIFFERENCE = "no difference seen"
# Counts of resampled items that are held at once: 2**22 float64 are 32 MiB.
_BLOCK = 1 << 22

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Spread:
    """Mean and sample standard deviation (n − 1) over `count` seeds; `deviation` is None for a single seed."""

    mean: float
    deviation: float | None
    count: int


def spread(values: Sequence[float] | Array) -> Spread | None:
    """Summarize values, (seeds,); None if there are none."""
    numbers = np.asarray(values, dtype=np.float64)
    if not numbers.size:
        return None
    deviation = float(numbers.std(ddof=1)) if numbers.size > 1 else None
    return Spread(float(numbers.mean()), deviation, numbers.size)


@dataclass(frozen=True)
class Stratum:
    """The items of one benchmark, as a stratum of the bootstrap.

    values: (items, methods) float64, each method's value of the item less the reference's.
    weights: (items,) float64, positive; the benchmark's value is Σ values / Σ weights.
    """

    values: Array
    weights: Array


@dataclass(frozen=True)
class Interval:
    """A difference to the reference with its confidence interval and two-sided p."""

    difference: float
    low: float
    high: float
    p: float

    def verdict(self, higher_is_better: bool) -> str:
        """`better` or `worse` where the interval excludes 0, else NO_DIFFERENCE."""
        if self.low > 0:
            return "better" if higher_is_better else "worse"
        if self.high < 0:
            return "worse" if higher_is_better else "better"
        return NO_DIFFERENCE


def paired_bootstrap(
    strata: Sequence[Stratum],
    combine: Literal["mean", "pooled"],
    *,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> list[Interval]:
    """Percentile intervals of the methods' differences to the reference.

    Items are drawn with replacement within each benchmark, the same ones for all methods.

    Args:
        strata: one per benchmark, all with the same methods.
        combine: `mean` is the unweighted mean of the benchmarks' values, `pooled` is Σ values / Σ weights over all
            items of all benchmarks.

    Returns:
        One Interval per method.

    Raises:
        ValueError: there is no benchmark, a benchmark has no items, or a value or weight is not finite.
    """
    if not strata or any(not len(stratum.weights) for stratum in strata):
        raise ValueError("a bootstrap needs items: a benchmark has none.")
    if not all(np.isfinite(part).all() for stratum in strata for part in (stratum.values, stratum.weights)):
        raise ValueError("a bootstrap needs finite values: a benchmark has NaN or infinity; leave that method out.")
    random = np.random.default_rng(seed)
    observed = _combined([(each.values.sum(0)[None], each.weights.sum()[None]) for each in strata], combine)[0]
    sums = [_resampled_sums(stratum, resamples, random) for stratum in strata]
    # Differences that cancel up to rounding errors count as 0.
    drawn = _combined(sums, combine).round(12)
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(drawn, [tail, 1 - tail], axis=0)
    # Counting the observed data as one more draw keeps p above 0.
    below, above = ((1 + side.sum(0)) / (1 + resamples) for side in (drawn <= 0, drawn >= 0))
    p = np.minimum(1, 2 * np.minimum(below, above))
    return [Interval(*map(float, each)) for each in zip(observed, low, high, p, strict=True)]


def t_interval(differences: Sequence[float]) -> Interval | None:
    """Student's interval and p of the mean of paired differences, one per seed; None for fewer than two.

    It says how the difference depends on the training's seed, and nothing about other data.

    Raises:
        ValueError: a difference is not finite.
    """
    from scipy.stats import ttest_1samp

    if not np.isfinite(differences).all():
        raise ValueError("Student's interval needs finite differences: one is NaN or infinite; leave that seed out.")
    if len(differences) < 2:
        return None
    if min(differences) == max(differences):  # no deviation: the test would divide by 0, or by a rounding error
        constant = float(differences[0])
        return Interval(constant, constant, constant, 1.0 if constant == 0 else 0.0)
    test = ttest_1samp(differences, 0.0)
    low, high = test.confidence_interval(CONFIDENCE)
    return Interval(float(np.mean(differences)), float(low), float(high), float(test.pvalue))


def _resampled_sums(stratum: Stratum, resamples: int, random: np.random.Generator) -> tuple[Array, Array]:
    """Draw items with replacement: their Σ values, (resamples, methods), and Σ weights, (resamples,)."""
    items = len(stratum.weights)
    columns = np.column_stack([stratum.values, stratum.weights])
    block = max(1, _BLOCK // items)
    parts = []
    for start in range(0, resamples, block):
        rows = min(block, resamples - start)
        drawn = random.integers(items, size=(rows, items))
        drawn += items * np.arange(rows)[:, None]
        counts = np.bincount(drawn.ravel(), minlength=rows * items).reshape(rows, items)
        parts.append(counts.astype(np.float64) @ columns)
    sums = np.concatenate(parts)
    return sums[:, :-1], sums[:, -1]


def _combined(sums: Sequence[tuple[Array, Array]], combine: str) -> Array:
    """One number per resample and method, (resamples, methods), from each benchmark's sums."""
    if combine == "mean":
        means = [values / weights[:, None] for values, weights in sums]
        return np.mean(means, axis=0)
    values, weights = (np.sum(part, axis=0) for part in zip(*sums, strict=True))
    return values / weights[:, None]


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's adjustment of p values for multiple comparisons, in the order given."""
    adjusted = [1.0] * len(p_values)
    largest = 0.0
    for rank, at in enumerate(sorted(range(len(p_values)), key=lambda at: p_values[at])):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[at]))
        adjusted[at] = largest
    return adjusted
