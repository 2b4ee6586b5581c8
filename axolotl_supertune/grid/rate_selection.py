"""Chooses each method's learning rate by validation NLL. Test scores are no argument here."""

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from .run_files import Run, RunKey


@dataclass(frozen=True)
class Trial:
    """What the choice of a rate knows of a run.

    validation_nll: nats a token; None if the run failed or was not evaluated, NaN or infinite if it diverged.
    """

    key: RunKey
    validation_nll: float | None

    @classmethod
    def of(cls, run: Run) -> "Trial":
        return cls(run.key, run.validation_nll if run.status == "done" else None)

    @property
    def usable(self) -> bool:
        return self.validation_nll is not None and math.isfinite(self.validation_nll)

    @property
    def diverged(self) -> bool:
        return self.validation_nll is not None and not self.usable


@dataclass(frozen=True)
class Choice:
    """The chosen rate of a method.

    validation_nll: the mean over `seeds` at that rate, in nats a token.
    seeds: the seeds on which the rates were compared.
    tried: all rates of the method, including those of failed runs, ascending.
    """

    method: str
    epochs: float
    learning_rate: float
    validation_nll: float
    seeds: tuple[int, ...]
    tried: tuple[float, ...]

    @property
    def edge(self) -> Literal["lowest", "highest", "only"] | None:
        """Whether the rate is the lowest, the highest or the only one that was tried; None between two others."""
        if len(self.tried) == 1:
            return "only"
        return {self.tried[0]: "lowest", self.tried[-1]: "highest"}.get(self.learning_rate)  # type: ignore[return-value]


def choose_rates(trials: Iterable[Trial]) -> dict[tuple[str, float], Choice | None]:
    """Choose for each method and number of epochs the rate with the lowest mean validation NLL; ties: the lower rate.

    Rates are compared only on seeds with the same usable rates: the seed with the most of them (ties: the lower seed),
    and all seeds with exactly those. A rate that diverged on one of the seeds with the most tried rates is excluded,
    unless it is the only rate of the method, which is then judged by its other seeds.

    Seeds that are added later at the chosen rate therefore never change a choice among several rates. Seeds added at
    two rates, because the choice moved in between, could; so callers pass the runs of the grid's first stage only.

    Returns:
        Choices by (method, epochs), sorted; None where no run is usable.
    """
    methods: dict[tuple[str, float], list[Trial]] = defaultdict(list)
    for trial in trials:
        methods[trial.key.method, trial.key.epochs].append(trial)
    return {name: _choose(*name, methods[name]) for name in sorted(methods)}


def _choose(method: str, epochs: float, trials: list[Trial]) -> Choice | None:
    tried_by_seed: dict[int, set[float]] = defaultdict(set)
    for trial in trials:
        tried_by_seed[trial.key.seed].add(trial.key.learning_rate)
    most = max(len(rates) for rates in tried_by_seed.values())
    diverged = {
        trial.key.learning_rate for trial in trials if trial.diverged and len(tried_by_seed[trial.key.seed]) == most > 1
    }
    nlls: dict[int, dict[float, float]] = defaultdict(dict)  # by seed and rate
    for trial in trials:
        if trial.usable and trial.key.learning_rate not in diverged:
            assert trial.validation_nll is not None
            nlls[trial.key.seed][trial.key.learning_rate] = trial.validation_nll
    if not nlls:
        return None
    rates = nlls[min(nlls, key=lambda seed: (-len(nlls[seed]), seed))].keys()
    seeds = sorted(seed for seed in nlls if nlls[seed].keys() == rates)
    means = {rate: math.fsum(nlls[seed][rate] for seed in seeds) / len(seeds) for rate in rates}
    best = min(means, key=lambda rate: (means[rate], rate))
    tried = tuple(sorted({trial.key.learning_rate for trial in trials}))
    return Choice(method, epochs, best, means[best], tuple(seeds), tried)
