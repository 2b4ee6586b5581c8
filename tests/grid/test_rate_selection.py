"""The choice of each method's learning rate."""

import dataclasses
import inspect
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from axolotl_supertune.grid.rate_selection import Choice, Trial, choose_rates
from axolotl_supertune.grid.run_files import RunKey

RATES = (5e-5, 1e-4, 5e-4, 1e-3)
nlls = st.one_of(st.none(), st.floats(0.1, 10), st.just(math.nan), st.just(math.inf))


def trial(rate, seed, nll, method="super", epochs=1):
    return Trial(RunKey(method=method, learning_rate=rate, epochs=epochs, seed=seed), nll)


def choose(*trials):
    return choose_rates(trials)["super", 1]


def test_nothing_that_chooses_can_be_given_a_score():
    assert [field.name for field in dataclasses.fields(Trial)] == ["key", "validation_nll"]
    assert set(RunKey.model_fields) == {"method", "learning_rate", "epochs", "seed"}
    assert list(inspect.signature(choose_rates).parameters) == ["trials"]
    assert list(inspect.signature(Trial.of).parameters) == ["run"]


@given(st.dictionaries(st.sampled_from(RATES), nlls, min_size=1), st.randoms())
def test_the_lowest_validation_nll_wins_whatever_the_order(grid, random):
    trials = [trial(rate, 0, nll) for rate, nll in grid.items()]
    random.shuffle(trials)
    usable = {rate: nll for rate, nll in grid.items() if nll is not None and math.isfinite(nll)}
    choice = choose(*trials)
    if not usable:
        assert choice is None
        return
    assert choice.validation_nll == min(usable.values())
    assert choice.learning_rate == min(rate for rate, nll in usable.items() if nll == choice.validation_nll)
    assert choice.tried == tuple(sorted(grid))


@given(
    st.dictionaries(st.sampled_from(RATES), st.floats(0.1, 10), min_size=2),
    st.lists(st.floats(0.1, 10), min_size=1, max_size=3),
)
def test_seeds_added_at_the_chosen_rate_do_not_change_it(grid, later):
    first = [trial(rate, 0, nll) for rate, nll in grid.items()]
    chosen = choose(*first)
    again = [trial(chosen.learning_rate, seed, nll) for seed, nll in enumerate(later, start=1)]
    assert choose(*first, *again) == chosen


def test_rates_are_compared_by_their_mean_over_the_seeds_that_ran_them_all():
    choice = choose(trial(1e-4, 0, 1.0), trial(1e-4, 1, 1.4), trial(5e-4, 0, 1.1), trial(5e-4, 1, 1.1))
    assert (choice.learning_rate, choice.validation_nll, choice.seeds) == (5e-4, pytest.approx(1.1), (0, 1))
    # Seed 1 failed at 5e-4: its other run says nothing of how the two compare.
    choice = choose(trial(1e-4, 0, 1.0), trial(1e-4, 1, 1.4), trial(5e-4, 0, 1.1), trial(5e-4, 1, None))
    assert (choice.learning_rate, choice.seeds) == (1e-4, (0,))


@pytest.mark.parametrize("diverged", [math.nan, math.inf])
@pytest.mark.parametrize("other", [1.2, None])
def test_a_rate_that_diverged_on_a_seed_is_not_chosen(diverged, other):
    """That its other seeds did not diverge is luck: the next seed may."""
    trials = [trial(1e-4, 0, 1.2), trial(1e-4, 1, other), trial(5e-4, 0, 0.5), trial(5e-4, 1, diverged)]
    choice = choose(*trials)
    assert (choice.learning_rate, choice.validation_nll) == (1e-4, pytest.approx(1.2))
    assert choice.seeds == ((0, 1) if other else (0,))
    assert choice.tried == (1e-4, 5e-4)
    assert choose(*trials[2:], trial(1e-4, 0, None), trial(1e-4, 1, None)) is None
    alone = choose(*trials[2:])  # nothing was chosen between
    assert (alone.learning_rate, alone.seeds) == (5e-4, (0,))


@given(st.sampled_from([math.nan, math.inf]))
def test_a_seed_added_at_the_chosen_rate_that_diverged_does_not_change_it(nll):
    first = [trial(1e-4, 0, 1.0), trial(5e-4, 0, 0.5)]
    assert choose(*first, trial(5e-4, 1, nll)) == choose(*first)


def test_methods_and_epochs_are_chosen_for_apart():
    choices = choose_rates(
        [trial(1e-4, 0, 1.0), trial(5e-4, 0, 2.0), trial(5e-4, 0, 0.5, epochs=3), trial(1e-3, 0, None, method="lora")]
    )
    assert list(choices) == [("lora", 1), ("super", 1), ("super", 3)]
    assert choices["super", 1].learning_rate == 1e-4
    assert choices["super", 3].learning_rate == 5e-4
    assert choices["lora", 1] is None


@pytest.mark.parametrize(
    ("rate", "tried", "edge"),
    [
        (1e-4, (1e-4,), "only"),
        (1e-4, (1e-4, 5e-4), "lowest"),
        (5e-4, (1e-4, 5e-4), "highest"),
        (1e-4, (5e-5, 1e-4, 5e-4), None),
    ],
)
def test_edge(rate, tried, edge):
    assert Choice("super", 1, rate, 1.0, (0,), tried).edge == edge


def test_a_rate_below_one_that_failed_is_not_at_the_edge():
    assert choose(trial(1e-4, 0, 2.0), trial(5e-4, 0, 1.0), trial(1e-3, 0, math.nan)).edge is None
