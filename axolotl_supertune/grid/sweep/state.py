"""A grid and its RUNS_DIR as it is: which runs there are, whether they are the grid's, and which rates they choose."""

import copy
from pathlib import Path
from typing import Any, Literal

from ...plugin import axolotl_compat, validation
from ...plugin.args import SupertuneArgs
from ..config import (
    CALIBRATION_FOLDER,
    CONTAMINATION_FILE,
    OF_THE_GRID,
    PREPARED_FOLDER,
    RECORD,
    SUPERTUNE,
    Grid,
    GridError,
    check_keys,
    read_grid,
    read_mapping,
)
from ..rate_selection import Choice, Trial, choose_rates
from ..records import CONFIG_FILE, SCORES_FILE, Run, RunKey, Scores, Setup, read_runs, read_scores
from .file_digests import FileDigests, calibration_paths, data_paths, digest
from .prepare import DATA_SEED
from .scoring import ASKED, trained_on

# What does not change activation norms; an unknown key counts as one that does.
_NO_MATTER = {
    *OF_THE_GRID,
    *(key for key in SupertuneArgs.model_fields if not key.startswith("calibration_")),
    *("adapter", "lora_r", "lora_alpha", "lora_dropout", "dataset_prepared_path"),
    "lr_groups",  # what checks.prepare makes of sparse_lr
} - {"lora_exclude_modules"}

# What does not change how data is tokenized and ordered: an unknown key counts as one that does. Axolotl's own name for
# tokenized data leaves some of those out.
_NO_MATTER_TO_DATA = _NO_MATTER | {*SupertuneArgs.model_fields}

# Where things lie, which changes with the folder and not with what is computed.
_PLACES = ("output_dir", "dataset_prepared_path", "calibration_path")

_SHOWN = 5
"""Of what is refused, so many are named, and the others counted."""

State = Literal["done", "failed", "stopped", "new"]


class SweepState:
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
        self.contents = FileDigests()
        self._norms: dict[RunKey, Path | None] = {}
        self._reads: dict[RunKey, list[str]] = {}
        for key in self.grid.keys:
            self.norms(key)
        self.records: dict[RunKey, Run] = {}
        self.read()

    def read(self) -> None:
        """Take the records from RUNS_DIR."""
        self.records = {run.key: run for run in read_runs(self.runs_dir)}

    def check(self) -> None:
        """Compare everything finished that could be used with what the grid says now.

        Raises:
            GridError: runs that were trained, or scores that were made, otherwise; names them, the key or the file.
        """
        could = self._usable()
        _refuse(
            f"{self.runs_dir}: finished runs were trained otherwise than {self.path} says now",
            [f"{self.runs_dir / key.folder}: {other}" for key in could if (other := self.difference(key))],
            "Put the grid and its files back, give it another output_dir, or remove those folders to train them again.",
        )
        if self.grid.score.runs != "none":
            _refuse(
                f"{self.runs_dir}: scores were made otherwise than {self.path} says now",
                [f"{self.scores_file(key)}: {other}" for key in (None, *could) if (other := self._scored_other(key))],
                "Put the grid and its files back, or remove those scores.json files to score again.",
            )

    def _usable(self) -> list[RunKey]:
        """The finished runs that a choice could be made from, fall on, or have scored."""
        grid, everything = self.grid, self.grid.score.runs == "all"
        seeds = {*grid.seeds, *grid.chosen.seeds}
        rates = {(key.method, key.epochs, key.learning_rate) for key in grid.keys}
        return [
            key
            for key in self.done()
            if everything or (key.seed in seeds and (key.method, key.epochs, key.learning_rate) in rates)
        ]

    def state(self, key: RunKey) -> State:
        """Of one run, as its folder says."""
        run = self.records.get(key)
        if run is None:
            return "stopped" if (self.runs_dir / key.folder / CONFIG_FILE).is_file() else "new"
        return run.status

    def difference(self, key: RunKey) -> str | None:
        """In which key a run's config.yml differs from what the grid says now, or which file; None: in nothing."""
        there, now = self._yaml_there(key), self.settings(key)
        if there is None:
            return f"there is no {CONFIG_FILE}, which says how"
        for name in sorted({*there, *now} - set(_PLACES)):
            if there.get(name) != now.get(name):
                return f"{name}: {there.get(name)} there, {now.get(name)} now"
        run = self.records.get(key)
        if run is None or run.setup is None:
            return None
        if run.setup.files is None:  # an old record: what it trained on is known from its contamination report alone
            return _other_file(self._reported(), self.files(key), set())
        here = self.files(key)
        gone = {*self._reads[key]} - {*here}  # and nothing to be read from them: the run is finished
        return _other_file(run.setup.files, here, {*run.setup.files, *here} - gone)

    def goes_on(self, key: RunKey) -> bool:
        """Whether a run that did not finish may go on from its checkpoints: its YAML and its files are the same."""
        there, now = self._yaml_there(key), self.settings(key)
        return (
            there is not None
            and self.difference(key) is None
            # The names of what was prepared tell the files, and the order of the records, apart.
            and all(Path(there.get(name) or "").name == Path(now.get(name) or "").name for name in _PLACES)
        )

    def _yaml_there(self, key: RunKey) -> dict[str, Any] | None:
        path = self.runs_dir / key.folder / CONFIG_FILE
        return read_mapping(path) if path.is_file() else None

    def _reported(self) -> dict[str, str]:
        """The training files that there is a contamination report of."""
        report = self.runs_dir / CONTAMINATION_FILE
        return trained_on(report) if report.is_file() else {}

    def settings(self, key: RunKey) -> dict[str, Any]:
        """The whole YAML of a run, with the calibration that it shares."""
        settings = self.uncalibrated(key)
        if norms := self.norms(key):
            settings.pop("calibration_batch_size", None)
            settings["calibration_path"] = norms.as_posix()
        return settings

    def uncalibrated(self, key: RunKey) -> dict[str, Any]:
        """The YAML of a run that is to calibrate itself, with the tokenized data that it shares."""
        settings = self.grid.settings(key)
        if prepared := self.prepared(key):
            settings["dataset_prepared_path"] = prepared.as_posix()
        return settings

    def prepared(self, key: RunKey) -> Path | None:
        """The folder of tokenized data that a run shares with all that tokenize alike; None: the grid leaves it alone.

        Axolotl knows prepared data by its path, and would not see that the file holds something else.
        """
        settings, ours = self.grid.settings(key), self.runs_dir / PREPARED_FOLDER
        folder = Path(settings.get("dataset_prepared_path") or ours)
        found = self.contents.of(data_paths(settings))
        if settings.get("skip_prepare_dataset") or not (found or folder == ours):
            return None
        matter = {
            name: value
            for name, value in settings.items()
            if name not in _NO_MATTER_TO_DATA and not name.startswith(("lora_", "peft_"))
        }
        return folder / digest({**matter, "files": found, "seed": DATA_SEED})

    def norms(self, key: RunKey) -> Path | None:
        """The file of activation norms that a run shares with all that calibrate alike; None: it needs none.

        Raises:
            GridError: the plugin refuses the run's YAML; names the method.
        """
        if key not in self._norms:
            settings = copy.deepcopy(self.grid.settings(key))
            own = settings.get("calibration_path")
            try:
                validation.prepare(settings, self._known)
            except (ValueError, FileNotFoundError) as error:
                raise GridError(f"{self.path}: methods.{key.method}: {error}") from error
            measured = settings.get("adapter") in validation.ADAPTERS and validation.method_config(settings).needs_norms
            texts = ([own] if own else calibration_paths(settings)) if measured else []
            self._reads[key] = [*data_paths(settings), *texts]
            matter = {name: value for name, value in sorted(settings.items()) if name not in _NO_MATTER}
            if found := self.contents.of(texts):
                matter["files"] = found
            shared = self.runs_dir / CALIBRATION_FOLDER / f"{digest(matter)}.safetensors"
            self._norms[key] = shared if measured and not own else None
        return self._norms[key]

    def files(self, key: RunKey) -> dict[str, str]:
        """sha256 of the local files that a run reads, by the path that its YAML names; of those that are there."""
        self.norms(key)
        return self.contents.of(self._reads[key])

    def training_files(self) -> dict[str, str]:
        """The same of all training data of the grid."""
        every = [self.grid.base_settings, *(method.settings for method in self.grid.methods.values())]
        return self.contents.of(path for settings in every for path in data_paths(settings, ("datasets",)))

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
        """The finished runs at each method's best rate, of all seeds of the grid; without those that diverged."""
        rates = {name: choice.learning_rate for name, choice in self.choices().items() if choice is not None}
        seeds = {*self.grid.seeds, *self.grid.chosen.seeds}
        return [
            key
            for key in self.done()
            if rates.get((key.method, key.epochs)) == key.learning_rate
            and key.seed in seeds
            and Trial.of(self.records[key]).usable
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
        """The scores of a run, or of the base, if there are any."""
        path = self.scores_file(key)
        return read_scores(path) if path.is_file() else None

    def _scored_other(self, key: RunKey | None) -> str | None:
        """In what there are scores of something else than the grid asks now; None: in nothing, or there are none."""
        scores = self.scored(key)
        if scores is None:
            return None
        if scores.key != key:
            return f"it is of {scores.key.folder if scores.key else 'the base model'}"
        for name, value in self.grid.score.model_dump(include=set(ASKED)).items():
            if scores.asked.get(name) != value:
                return f"score.{name}: {scores.asked.get(name)} there, {value} now"
        base_model = Setup.of(self.grid.settings(key) if key else self.grid.base_settings).base_model
        if scores.base_model not in (None, base_model):
            return f"base_model: {scores.base_model} there, {base_model} now"
        return _other_file(scores.files or {}, self.training_files(), set())


def _refuse(what: str, differing: list[str], remedy: str) -> None:
    if differing:
        more = [f"and {len(differing) - _SHOWN} more"] if len(differing) > _SHOWN else []
        raise GridError("\n  ".join([f"{what} ({len(differing)}):", *differing[:_SHOWN], *more]) + f"\n{remedy}")


def _other_file(there: dict[str, str], now: dict[str, str], also: set[str]) -> str | None:
    """The first file of both that holds something else, or of `also` that one of them lacks."""
    for path in sorted((there.keys() & now.keys()) | also):
        before, here = there.get(path, "none"), now.get(path, "none")
        if before != here:
            return f"{path}: sha256 {before[:12]} there, {here[:12]} now"
    return None


def _known_keys(grid: Grid) -> set[str]:
    """Axolotl's keys, and those of the plugins that the grid names.

    Raises:
        GridError: a plugin cannot be loaded.
    """
    arguments = [f"{SupertuneArgs.__module__}.{SupertuneArgs.__name__}"]
    every = [grid.base_settings, *(method.settings for method in grid.methods.values())]
    for name in dict.fromkeys(name for settings in every for name in settings.get("plugins") or []):
        if name in (SUPERTUNE, RECORD):
            continue
        try:
            argument_class = axolotl_compat.argument_class_of(name)
            if argument_class:
                axolotl_compat.config_keys([argument_class])  # raises here, where the plugin can be named
                arguments.append(argument_class)
        except (ImportError, AttributeError, ValueError) as error:
            raise GridError(f"plugins: {name} cannot be loaded: {error}; install it, or remove it.") from error
    return axolotl_compat.config_keys(arguments)
