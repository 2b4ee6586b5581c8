"""Which learning rate each method gets: by validation NLL alone. No argument here holds a test score."""

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from .records import Run, RunKey


@dataclass(frozen=True)
class Trial:
    """All that a choice knows of a run.

    validation_nll: None, NaN or infinite where the run failed, diverged or was not evaluated.
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
    """A method's rate.

    validation_nll: at that rate, the mean over `seeds`.
    seeds: on which the rates were compared.
    tried: all rates of the method, those that failed included, ascending.
    """

    method: str
    epochs: float
    learning_rate: float
    validation_nll: float
    seeds: tuple[int, ...]
    tried: tuple[float, ...]

    @property
    def edge(self) -> Literal["lowest", "highest", "only"] | None:
        """Where in its grid the rate lies, if not between two others."""
        if len(self.tried) == 1:
            return "only"
        return {self.tried[0]: "lowest", self.tried[-1]: "highest"}.get(self.learning_rate)  # type: ignore[return-value]


def choose_rates(trials: Iterable[Trial]) -> dict[tuple[str, float], Choice | None]:
    """For each method and number of epochs the rate of the lowest mean validation NLL; ties go to the lower rate.

    Rates are compared on equal terms, that is on the seeds that the same rates were trained with: of all seeds the one
    with the most usable rates (ties: the lower seed), and those that have exactly the same ones. A rate that diverged
    on one of the seeds with the most rates tried is no choice, however good on others; the only rate that was tried
    stays one, by its other seeds. Seeds that were added at the chosen rate alone later, where several were tried, so
    never change the choice; those that were added at two rates, because the choice moved in between, could. Sweep and
    report therefore give the runs of the grid's first stage and no others.

    Returns:
        By (method, epochs), sorted; None where no run can be used.
    """
    methods: dict[tuple[str, float], list[Trial]] = defaultdict(list)
    for trial in trials:
        methods[trial.key.method, trial.key.epochs].append(trial)
    return {name: _choose(*name, methods[name]) for name in sorted(methods)}


def _choose(method: str, epochs: float, trials: list[Trial]) -> Choice | None:
    tried_with: dict[int, set[float]] = defaultdict(set)
    for trial in trials:
        tried_with[trial.key.seed].add(trial.key.learning_rate)
    widest = max(len(rates) for rates in tried_with.values())
    diverged = {
        trial.key.learning_rate for trial in trials if trial.diverged and len(tried_with[trial.key.seed]) == widest > 1
    }
    found: dict[int, dict[float, float]] = defaultdict(dict)
    for trial in trials:
        if trial.usable and trial.key.learning_rate not in diverged:
            assert trial.validation_nll is not None
            found[trial.key.seed][trial.key.learning_rate] = trial.validation_nll
    if not found:
        return None
    rates = found[min(found, key=lambda seed: (-len(found[seed]), seed))].keys()
    seeds = sorted(seed for seed in found if found[seed].keys() == rates)
    means = {rate: math.fsum(found[seed][rate] for seed in seeds) / len(seeds) for rate in rates}
    best = min(means, key=lambda rate: (means[rate], rate))
    tried = tuple(sorted({trial.key.learning_rate for trial in trials}))
    return Choice(method, epochs, best, means[best], tuple(seeds), tried)
