"""Spread over seeds, and paired bootstrap intervals over items; arrays in, numbers out.

What is resampled are the items (questions) of each benchmark, the same ones for both methods; each item's value is
first averaged over a method's seeds. The intervals therefore say how the difference between these trained models
depends on which questions were asked. They do not say how it depends on the seeds: the standard deviation over seeds
does, the differences seed by seed, and of the validation NLL, whose records are not kept one by one, `over_seeds`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

RESAMPLES = 10_000
CONFIDENCE = 0.95
NO_DIFFERENCE = "no difference seen"
# Numbers in one block of resampled counts: 32 MiB.
_BLOCK = 1 << 22

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Spread:
    """A mean over seeds; `deviation` (of the sample, n − 1) is None with a single one."""

    mean: float
    deviation: float | None
    count: int


def spread(values: Sequence[float] | Array) -> Spread | None:
    """None where there are no values."""
    numbers = np.asarray(values, dtype=np.float64)
    if not numbers.size:
        return None
    deviation = float(numbers.std(ddof=1)) if numbers.size > 1 else None
    return Spread(float(numbers.mean()), deviation, numbers.size)


@dataclass(frozen=True)
class Stratum:
    """The items of one benchmark.

    values: (items, methods), per item what a method has more than the reference.
    weights: (items,) positive; the benchmark's value is Σ values / Σ weights.
    """

    values: Array
    weights: Array


@dataclass(frozen=True)
class Interval:
    """A difference to the reference, its interval, and the two-sided p that belongs to it."""

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
    """Intervals of the methods' differences; items are resampled within each benchmark, the same for all methods.

    Args:
        strata: one a benchmark, with the same methods.
        combine: `mean`, the unweighted mean of the benchmarks' values; `pooled`, Σ values / Σ weights over all items.

    Returns:
        One Interval a method.

    Raises:
        ValueError: no benchmark, or one without items, or a value or weight that is not finite.
    """
    if not strata or any(not len(stratum.weights) for stratum in strata):
        raise ValueError("a bootstrap needs items: a benchmark has none.")
    if not all(np.isfinite(part).all() for stratum in strata for part in (stratum.values, stratum.weights)):
        raise ValueError("a bootstrap needs finite values: a benchmark has NaN or infinity; leave that method out.")
    random = np.random.default_rng(seed)
    observed = _combined([(each.values.sum(0)[None], each.weights.sum()[None]) for each in strata], combine)[0]
    sums = [_resampled_sums(stratum, resamples, random) for stratum in strata]
    # What cancels but for rounding is no difference.
    drawn = _combined(sums, combine).round(12)
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(drawn, [tail, 1 - tail], axis=0)
    # With the observed data as one draw more, p is never 0.
    below, above = ((1 + side.sum(0)) / (1 + resamples) for side in (drawn <= 0, drawn >= 0))
    p = np.minimum(1, 2 * np.minimum(below, above))
    return [Interval(*map(float, each)) for each in zip(observed, low, high, p, strict=True)]


def over_seeds(differences: Sequence[float]) -> Interval | None:
    """Student's interval and p of the mean of paired differences, one a seed; None of fewer than two.

    It says how the difference depends on the seed of the training, and nothing of other data.

    Raises:
        ValueError: a difference that is not finite.
    """
    from scipy.stats import t

    if not np.isfinite(differences).all():
        raise ValueError("Student's interval needs finite differences: one is NaN or infinite; leave that seed out.")

    found = spread(differences)
    if found is None or found.deviation is None:
        return None
    if min(differences) == max(differences):  # a mean and a deviation of equal numbers are so but for rounding
        only = float(differences[0])
        return Interval(only, only, only, 1.0 if only == 0 else 0.0)
    error, freedom = found.deviation / found.count**0.5, found.count - 1
    half = float(t.ppf((1 + CONFIDENCE) / 2, freedom)) * error
    p = 2 * float(t.sf(abs(found.mean) / error, freedom))
    return Interval(found.mean, found.mean - half, found.mean + half, p)


def _resampled_sums(stratum: Stratum, resamples: int, random: np.random.Generator) -> tuple[Array, Array]:
    """Σ values, (resamples, methods), and Σ weights, (resamples,), of items drawn with replacement."""
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
    if combine == "mean":
        means = [values / weights[:, None] for values, weights in sums]
        return np.mean(means, axis=0)
    values, weights = (np.sum(part, axis=0) for part in zip(*sums, strict=True))
    return values / weights[:, None]


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's adjustment of p values for their number, in the order given."""
    adjusted = [1.0] * len(p_values)
    largest = 0.0
    for rank, at in enumerate(sorted(range(len(p_values)), key=lambda at: p_values[at])):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[at]))
        adjusted[at] = largest
    return adjusted
