"""A grid and its RUNS_DIR as it is: which runs there are, whether they are the grid's, and which rates they choose."""

import copy
import hashlib
import importlib
import json
from pathlib import Path
from typing import Any, Literal

import yaml
from axolotl.utils.schemas.config import AxolotlInputConfig

from .. import checks
from ..args import SupertuneArgs
from .choice import Choice, Trial, choose_rates
from .grid import CALIBRATION_FOLDER, OF_THE_GRID, RECORD, SUPERTUNE, Grid, GridError, check_keys, read_grid
from .runs import CONFIG_FILE, SCORES_FILE, Run, RunKey, Scores, read_runs, read_scores
from .scoring import ASKED

# What does not change activation norms; an unknown key counts as one that does.
_NO_MATTER = {
    *OF_THE_GRID,
    *(key for key in SupertuneArgs.model_fields if not key.startswith("calibration_")),
    *("adapter", "lora_r", "lora_alpha", "lora_dropout", "dataset_prepared_path"),
} - {"lora_exclude_modules"}

# Where things lie, which changes with the folder and not with what is computed.
_PLACES = ("output_dir", "dataset_prepared_path", "calibration_path")

State = Literal["done", "failed", "stopped", "new"]


class Present:
    """What is there of a grid.

    Args:
        path: the GRID file.

    Raises:
        GridError, FileNotFoundError: the grid cannot be run.
        ValueError: RUNS_DIR holds a file that is not what it should be; names it.
    """

    def __init__(self, path: Path) -> None:
        self.grid, self.path = read_grid(path), path
        self.runs_dir = Path(self.grid.output_dir)
        self._known = _known_keys(self.grid)
        check_keys(self.grid, path, self._known)
        self._norms: dict[RunKey, Path | None] = {}
        for key in self.grid.keys:
            self.norms(key)
        self.records: dict[RunKey, Run] = {}
        self.read()

    def read(self) -> None:
        """Take the records from RUNS_DIR."""
        self.records = {run.key: run for run in read_runs(self.runs_dir)}

    def state(self, key: RunKey) -> State:
        """Of one run, as its folder says.

        Raises:
            GridError: it is done, with another YAML than the grid gives it now; names the difference.
        """
        folder = self.runs_dir / key.folder
        run = self.records.get(key)
        if run is None:
            return "stopped" if (folder / CONFIG_FILE).is_file() else "new"
        if run.status == "done" and (difference := self.difference(key)):
            raise GridError(
                f"{folder} was trained with another YAML than {self.path} gives it now: {difference}. Put the grid "
                "back, give it another output_dir, or remove that folder to train it again."
            )
        return run.status

    def difference(self, key: RunKey) -> str | None:
        """The first key in which a run's config.yml differs from what the grid says now; None where none does."""
        path = self.runs_dir / key.folder / CONFIG_FILE
        there = yaml.safe_load(path.read_text(encoding="utf-8")) if path.is_file() else {}
        now = self.settings(key)
        for name in sorted({*there, *now} - set(_PLACES)):
            if there.get(name) != now.get(name):
                return f"{name}: {there.get(name)} there, {now.get(name)} now"
        return None

    def settings(self, key: RunKey) -> dict[str, Any]:
        """The whole YAML of a run, with the calibration that it shares."""
        settings = self.grid.settings(key)
        if norms := self.norms(key):
            settings.pop("calibration_batch_size", None)
            settings["calibration_path"] = norms.as_posix()
        return settings

    def norms(self, key: RunKey) -> Path | None:
        """The file of activation norms that a run shares with all that calibrate alike; None: it needs none.

        Raises:
            GridError: the plugin refuses the run's YAML; names the method.
        """
        if key not in self._norms:
            settings = copy.deepcopy(self.grid.settings(key))
            shares = not settings.get("calibration_path")
            try:
                checks.prepare(settings, self._known)
            except (ValueError, FileNotFoundError) as error:
                raise GridError(f"{self.path}: methods.{key.method}: {error}") from error
            needs = settings.get("adapter") in checks.ADAPTERS and shares and checks.may_need_norms(settings)
            matter = {name: value for name, value in sorted(settings.items()) if name not in _NO_MATTER}
            digest = hashlib.sha256(json.dumps(matter, sort_keys=True, default=str).encode()).hexdigest()[:12]
            self._norms[key] = self.runs_dir / CALIBRATION_FOLDER / f"{digest}.safetensors" if needs else None
        return self._norms[key]

    def choices(self) -> dict[tuple[str, float], Choice | None]:
        """Each method's best rate, by (method, epochs), from the runs of the first stage."""
        return choose_rates(Trial.of(self.records[key]) for key in self.grid.keys if key in self.records)

    def second_stage(self) -> list[RunKey]:
        """The other seeds of the methods that always get them and of the leading ones, each at its best rate."""
        chosen, choices, keys = self.grid.chosen, self.choices(), []
        for epochs in self.grid.epochs:
            found = {name: choice for (name, of), choice in choices.items() if of == epochs and choice is not None}
            ranked = sorted(found, key=lambda name: found[name].validation_nll)
            leading = [name for name in ranked if name not in chosen.methods][: chosen.leading]
            keys += [
                RunKey(method=name, learning_rate=found[name].learning_rate, epochs=epochs, seed=seed)
                for seed in chosen.seeds
                for name in self.grid.methods
                if seed not in self.grid.seeds and name in found and name in (*chosen.methods, *leading)
            ]
        return keys

    def best(self) -> list[RunKey]:
        """The finished runs at each method's best rate, of all seeds of the grid."""
        rates = {name: choice.learning_rate for name, choice in self.choices().items() if choice is not None}
        seeds = {*self.grid.seeds, *self.grid.chosen.seeds}
        return [
            key for key in self.done() if rates.get((key.method, key.epochs)) == key.learning_rate and key.seed in seeds
        ]

    def to_score(self) -> list[RunKey]:
        """The finished runs that the third stage asks."""
        return {"all": self.done, "chosen": self.best, "none": list}[self.grid.score.runs]()

    def done(self) -> list[RunKey]:
        """The finished runs of the grid's methods."""
        return [key for key, run in self.records.items() if run.status == "done" and key.method in self.grid.methods]

    def scores_file(self, key: RunKey | None) -> Path:
        """Of a run, or of the base; it may not be there."""
        return self.runs_dir / ("base" if key is None else key.folder) / SCORES_FILE

    def scored(self, key: RunKey | None) -> Scores | None:
        """The scores of a run, or of the base, if there are any.

        Raises:
            GridError: they were asked otherwise than the grid asks now.
        """
        path = self.scores_file(key)
        if not path.is_file():
            return None
        scores = read_scores(path)
        for name, value in self.grid.score.model_dump(include=set(ASKED)).items():
            if scores.asked.get(name) != value:
                raise GridError(
                    f"{path} was made with score: {{{name}: {scores.asked.get(name)}}}, and {self.path} says "
                    f"{value}: put it back, or remove the scores.json files to score again."
                )
        return scores


def _known_keys(grid: Grid) -> set[str]:
    """Axolotl's keys, and those of the plugins that the grid names.

    Raises:
        GridError: a plugin cannot be loaded.
    """
    known = set()
    models: list[Any] = [AxolotlInputConfig, SupertuneArgs]
    every = [grid.base_settings, *(method.settings for method in grid.methods.values())]
    for name in dict.fromkeys(name for settings in every for name in settings.get("plugins") or []):
        if name in (SUPERTUNE, RECORD):
            continue
        try:
            module, _, plugin = name.rpartition(".")
            dotted = getattr(importlib.import_module(module), plugin)().get_input_args()
            if dotted:
                module, _, arguments = dotted.rpartition(".")
                models.append(getattr(importlib.import_module(module), arguments))
        except (ImportError, AttributeError, ValueError) as error:
            raise GridError(f"plugins: {name} cannot be loaded: {error}; install it, or remove it.") from error
    for model in models:
        known |= set(model.model_fields)
        known |= {field.alias for field in model.model_fields.values() if field.alias}
    return known
