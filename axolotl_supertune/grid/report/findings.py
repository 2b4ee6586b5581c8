"""What a report says about a grid, as data: chosen rates, results, comparisons and notes."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..rate_selection import Choice
from ..run_files import Run, Scores
from .comparisons import Comparison, Result, SeedDifference

# Relative deviation of the trained parameters from the method's budget beyond which it is pointed out.
BUDGET_TOLERANCE = 0.005


@dataclass(frozen=True)
class GridFindings:
    """Everything that a report says.

    runs: runs of the grid that ended, by method, rate, epochs and seed.
    left_out: runs that ended and that the grid no longer has.
    choices: chosen rates by (method, epochs), sorted; None where no run is usable.
    results: by epochs, then the reference, then by validation NLL.
    base: scores of the model before training.
    benchmarks: (items, clean items) by benchmark, clean items None without a contamination report; empty without
        scores.
    comparisons: with the reference.
    against_base: with the model before training; empty if that was not scored.
    seed_differences: of all results but the reference's, in their order; empty without the reference.
    reference: the method that the others are compared with.
    resamples, seed: of the bootstrap.
    score_files: all scores that were read, by path.
    notes: sentences on what failed, is missing, or limits what the numbers say.
    """

    runs: list[Run]
    left_out: list[Run]
    choices: dict[tuple[str, float], Choice | None]
    results: list[Result]
    base: Scores | None
    benchmarks: dict[str, tuple[int, int | None]]
    comparisons: list[Comparison]
    against_base: list[Comparison]
    seed_differences: list[SeedDifference]
    reference: str
    resamples: int
    seed: int
    score_files: Mapping[Path, Scores] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def label(self, method: str, epochs: float) -> str:
        """The method's name, with its number of epochs if the grid has several."""
        several = len({epochs for _, epochs in self.choices}) > 1
        return f"{method} ({epochs:g} epochs)" if several else method

    @property
    def base_validation_nll(self) -> float | None:
        """Validation NLL of the model before training, if a run evaluated it, in nats a token."""
        first = [run.eval_losses[0] for run in self.runs if run.eval_losses and run.eval_losses[0][0] == 0]
        return first[0][1] if first else None

    @property
    def setup(self) -> dict[str, list[Any]]:
        """Conditions that runs should have in common: every value that occurs, sorted.

        base_models, datasets, test_datasets, budgets: as the runs' YAMLs name them.
        budget_parameters: numbers.
        devices: "cpu" or the GPU's name.
        versions: "package version".
        """
        setups = [run.setup for run in self.runs if run.setup is not None]
        values: dict[str, set[Any]] = {
            "base_models": {setup.base_model for setup in setups},
            "datasets": {", ".join(setup.datasets) for setup in setups},
            "test_datasets": {", ".join(setup.test_datasets) for setup in setups},
            "budgets": {setup.budget for setup in setups},
            "budget_parameters": {run.budget_parameters for run in self.runs},
            "devices": {run.device for run in self.runs},
            "versions": {f"{name} {version}" for run in self.runs for name, version in run.versions.items()},
        }
        return {kind: sorted(value for value in of_kind if value) for kind, of_kind in values.items()}
