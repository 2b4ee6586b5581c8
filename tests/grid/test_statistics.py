"""Intervals: compared with scipy's, their symmetries, and how often they contain the true difference."""

import math

import numpy as np
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st

from axolotl_supertune.grid.report.statistics import Interval, Stratum, holm, paired_bootstrap, spread, t_interval

values = st.integers(0, 2**32 - 1).map(np.random.default_rng)


def stratum(random, items=30, methods=3, weighted=False):
    weights = random.integers(1, 20, items).astype(float) if weighted else np.ones(items)
    return Stratum(random.normal(0.1, 1, (items, methods)), weights)


def bounds(intervals):
    return np.array([[each.difference, each.low, each.high] for each in intervals])


@pytest.mark.parametrize("combine", ["mean", "pooled"])
@settings(deadline=None, max_examples=20)
@given(values, st.integers(1, 3))
def test_symmetries(combine, random, count):
    """Negating, shifting or scaling the values does the same to the interval."""
    strata = [stratum(random, items, weighted=combine == "pooled") for items in (30, 7, 55)[:count]]
    run = {"combine": combine, "resamples": 400}
    plain = bounds(paired_bootstrap(strata, **run))
    assert (plain[:, 1] <= plain[:, 2]).all()
    negated = bounds(paired_bootstrap([Stratum(-each.values, each.weights) for each in strata], **run))
    np.testing.assert_allclose(negated[:, [0, 2, 1]], -plain, atol=1e-9)
    moved = [Stratum(each.values + 2 * each.weights[:, None], each.weights) for each in strata]
    np.testing.assert_allclose(bounds(paired_bootstrap(moved, **run)), plain + 2, atol=1e-9)
    scaled = [Stratum(3 * each.values, each.weights) for each in strata]
    np.testing.assert_allclose(bounds(paired_bootstrap(scaled, **run)), 3 * plain, atol=1e-9)
    alone = paired_bootstrap([Stratum(each.values[:, 1:2], each.weights) for each in strata], **run)
    np.testing.assert_allclose(bounds(alone), plain[1:2], atol=1e-9)


def test_what_is_estimated():
    """Two benchmarks, 1 + 3 items: the mean of means, and the share of sums."""
    strata = [
        Stratum(np.array([[1.0]]), np.array([2.0])),
        Stratum(np.array([[0.0], [3.0], [3.0]]), np.array([1.0, 1.0, 4.0])),
    ]
    assert paired_bootstrap(strata, "mean")[0].difference == pytest.approx((1 / 2 + 6 / 6) / 2)
    assert paired_bootstrap(strata, "pooled")[0].difference == pytest.approx(7 / 8)


def test_as_scipy_has_it():
    """One benchmark: scipy's paired percentile bootstrap, up to the noise of 20,000 resamples."""
    random = np.random.default_rng(3)
    ours, theirs = random.random(200) < 0.4, random.random(200) < 0.3
    interval = paired_bootstrap([Stratum((ours * 1.0 - theirs)[:, None], np.ones(200))], "mean", resamples=20_000)[0]
    result = scipy.stats.bootstrap(
        (ours * 1.0, theirs * 1.0),
        lambda a, b, axis: np.mean(a, axis) - np.mean(b, axis),
        paired=True,
        vectorized=True,
        method="percentile",
        n_resamples=20_000,
        rng=np.random.default_rng(4),
    )
    expected = result.confidence_interval
    assert (interval.low, interval.high) == pytest.approx((expected.low, expected.high), abs=0.006)
    assert interval.p == pytest.approx(2 * np.mean(result.bootstrap_distribution <= 0), abs=0.01)


@pytest.mark.parametrize("combine", ["mean", "pooled"])
def test_how_often_the_interval_holds_the_truth(combine):
    """Of 400 samples with the true difference 0.2 (0.1 per unit of weight), about 95 % of the intervals contain it."""
    random = np.random.default_rng(5)
    worlds = 400
    weights = [random.integers(5, 15, items).astype(float) for items in (60, 100)]
    strata = [
        Stratum(0.1 * w[:, None] * (1 + random.normal(0, 2, (len(w), worlds))), w if combine == "pooled" else w * 0.5)
        for w in weights
    ]
    truth = 0.1 if combine == "pooled" else 0.2
    intervals = paired_bootstrap(strata, combine, resamples=1000)
    share = np.mean([each.low <= truth <= each.high for each in intervals])
    assert 0.91 < share < 0.98


def test_equal_methods_do_not_differ():
    nothing = paired_bootstrap([Stratum(np.zeros((50, 1)), np.ones(50))], "mean", resamples=200)[0]
    assert nothing == Interval(0.0, 0.0, 0.0, 1.0)
    assert nothing.verdict(True) == "no difference seen"


def test_what_only_rounding_tells_apart_is_equal():
    """Means over three seeds: each item's difference is 0 up to rounding."""
    noise = np.full((50, 1), (0.1 + 0.2) - 0.3)
    assert (
        paired_bootstrap([Stratum(noise, np.ones(50))], "mean", resamples=200)[0].verdict(True) == "no difference seen"
    )


def test_seeded():
    strata = [stratum(np.random.default_rng(1), 500)]
    first, again, other = (paired_bootstrap(strata, "mean", resamples=300, seed=seed) for seed in (0, 0, 1))
    assert first == again
    assert first != other


def test_blocks_change_nothing_but_memory(monkeypatch):
    """More items than one block holds."""
    strata = [stratum(np.random.default_rng(1), 50, methods=1)]
    whole = bounds(paired_bootstrap(strata, "mean", resamples=300))
    monkeypatch.setattr("axolotl_supertune.grid.report.statistics._BLOCK", 120)
    np.testing.assert_allclose(bounds(paired_bootstrap(strata, "mean", resamples=300)), whole)


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [
        (0.1, 0.2, "better"),
        (-0.2, -0.1, "worse"),
        (0.0, 0.2, "no difference seen"),
        (-0.1, 0.2, "no difference seen"),
        (math.nan, math.nan, "no difference seen"),
    ],
)
def test_verdict(low, high, verdict):
    interval = Interval(0.1, low, high, 0.05)
    assert interval.verdict(higher_is_better=True) == verdict
    opposite = {"better": "worse", "worse": "better"}.get(verdict, verdict)
    assert interval.verdict(higher_is_better=False) == opposite


@pytest.mark.parametrize("combine", ["mean", "pooled"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("part", ["values", "weights"])
def test_what_is_not_finite_is_refused(combine, bad, part):
    """Every comparison with NaN is false, which would give a small p."""
    random = np.random.default_rng(0)
    strata = [stratum(random), stratum(random)]
    getattr(strata[1], part).flat[7] = bad
    with pytest.raises(ValueError, match="NaN or infinity"):
        paired_bootstrap(strata, combine, resamples=100)
    with pytest.raises(ValueError, match="NaN or infinite"):
        t_interval([0.1, bad])


def test_without_items_there_is_no_interval():
    with pytest.raises(ValueError, match="has none"):
        paired_bootstrap([], "mean")
    with pytest.raises(ValueError, match="has none"):
        paired_bootstrap([Stratum(np.empty((0, 1)), np.empty(0))], "mean")


@given(st.lists(st.floats(0, 1), max_size=8))
def test_holm(p_values):
    adjusted = holm(p_values)
    count = len(p_values)
    for p, each in zip(p_values, adjusted, strict=True):
        assert p <= each <= min(1, count * p)  # not below p, not above Bonferroni's
        # By its definition: the largest of (m − rank)·p over what is as small or smaller.
        smaller = sorted(other for other in p_values if other <= p)
        assert each == min(1, max((count - rank) * other for rank, other in enumerate(smaller)))


def test_holm_by_hand():
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])


def test_spread():
    assert spread([]) is None
    assert spread([2.0]) == (spread([2.0]).__class__)(2.0, None, 1)
    three = spread([1.0, 2.0, 6.0])
    assert (three.mean, three.deviation, three.count) == (3.0, pytest.approx(7**0.5), 3)


@given(st.lists(st.floats(-1, 1).map(lambda value: round(value, 3)), min_size=2, max_size=6))
def test_the_interval_over_seeds_is_students_paired_test(differences):
    """scipy's test of a mean; for equal differences, where scipy gives NaN, the interval is that number."""
    interval = t_interval(differences)
    if len(set(differences)) == 1:
        assert (interval.low, interval.high) == (interval.difference, interval.difference)
        assert interval.p == (1 if differences[0] == 0 else 0)
        return
    result = scipy.stats.ttest_1samp(differences, 0)
    low, high = result.confidence_interval(0.95)
    found = [interval.difference, interval.low, interval.high, interval.p]
    np.testing.assert_allclose(found, [np.mean(differences), low, high, result.pvalue], rtol=1e-6, atol=1e-9)


def test_one_seed_says_nothing():
    assert t_interval([]) is None
    assert t_interval([0.3]) is None
