"""Reads from grid.json which runs the grid has now: runs that it dropped are not reported."""

from functools import cached_property
from pathlib import Path

from pydantic import BaseModel, Field

from ..run_files import GRID_FILE, RunKey


class _Seeds(BaseModel):
    seeds: list[int] = []


class _RecordedGrid(_Seeds):
    chosen: _Seeds


class _RecordedRun(BaseModel):
    key: RunKey


class GridRecord(BaseModel):
    """The part of grid.json that says which runs belong to the grid."""

    grid: _RecordedGrid
    first_stage_runs: list[_RecordedRun] = Field(validation_alias="runs")

    @cached_property
    def first_stage_keys(self) -> set[RunKey]:
        """The runs among which learning rates are chosen."""
        return {run.key for run in self.first_stage_runs}

    @cached_property
    def _rates(self) -> set[tuple[str, float, float]]:
        return {(key.method, key.epochs, key.learning_rate) for key in self.first_stage_keys}

    def has(self, key: RunKey) -> bool:
        """Whether a run belongs to any stage of the grid."""
        seeds = (*self.grid.seeds, *self.grid.chosen.seeds)
        return key.seed in seeds and (key.method, key.epochs, key.learning_rate) in self._rates


def read_grid_record(runs_dir: Path) -> GridRecord | None:
    """Read RUNS_DIR/grid.json; None if there is none.

    Raises:
        ValueError: the file is not what a sweep writes; names it and the remedy.
    """
    path = runs_dir / GRID_FILE
    if not path.is_file():
        return None
    try:
        return GridRecord.model_validate_json(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(
            f"{path} is no grid of a sweep ({error}); sweep again to have it written anew, or remove it: then every "
            "run counts."
        ) from error
