"""What RUNS_DIR holds of a grid: which runs there are, whether they match the grid, and which rates they choose."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

from ..config import CONTAMINATION_FILE, GridError
from ..rate_selection import Choice, Trial, choose_rates
from ..read_config import read_grid, read_mapping
from ..run_files import CONFIG_FILE, SCORES_FILE, Run, RunKey, Scores, Setup, read_runs, read_scores
from .run_folder import has_weights, last_step
from .run_settings import RunSettings
from .scoring import SCORING_KEYS, files_of_report

# Keys of paths, which change with the folder and not with what is computed.
_PATH_KEYS = ("output_dir", "dataset_prepared_path", "calibration_path")

# How many refused files a message names; the others are counted.
_MAX_NAMED = 5

Status = Literal["done", "failed", "stopped", "new"]


class SweepState:
    """A grid and the records of its runs.

    Args:
        path: the GRID file.

    Raises:
        GridError, FileNotFoundError: the grid cannot be run.
        ValueError: a file in RUNS_DIR is damaged; names it.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.grid = path, read_grid(path)
        self.runs_dir = Path(self.grid.output_dir)
        self.settings = RunSettings(self.grid, path)
        self.records: dict[RunKey, Run] = {}
        self.read()

    def read(self) -> None:
        """Read the records from RUNS_DIR."""
        self.records = {run.key: run for run in read_runs(self.runs_dir)}

    def check(self) -> None:
        """Compare every finished run, and every score, that could be used with what the grid says now.

        Raises:
            GridError: some were made with other settings or files; names them and the key or file.
        """
        usable = self._usable()
        _refuse(
            f"{self.runs_dir}: finished runs were trained otherwise than {self.path} says now",
            [f"{self.runs_dir / key.folder}: {reason}" for key in usable if (reason := self.difference(key))],
            "Put the grid and its files back, give it another output_dir, or remove those folders to train them again.",
        )
        if self.grid.score.runs == "none":
            return
        _refuse(
            f"{self.runs_dir}: scores were made otherwise than {self.path} says now",
            [f"{self.scores_file(key)}: {reason}" for key in (None, *usable) if (reason := self._scores_differ(key))],
            "Put the grid and its files back, or remove those scores.json files to score again.",
        )

    def _usable(self) -> list[RunKey]:
        """The finished runs from which a rate could be chosen, or that could be at a chosen rate or scored."""
        grid, takes_all = self.grid, self.grid.score.runs == "all"
        seeds = {*grid.seeds, *grid.chosen.seeds}
        rates = {(key.method, key.epochs, key.learning_rate) for key in grid.keys}
        return [
            key
            for key in self.done()
            if takes_all or (key.seed in seeds and (key.method, key.epochs, key.learning_rate) in rates)
        ]

    def status(self, key: RunKey) -> Status:
        """Whether a run finished, failed, was started, or is new, by its folder."""
        run = self.records.get(key)
        if run is None:
            return "stopped" if (self.runs_dir / key.folder / CONFIG_FILE).is_file() else "new"
        return run.status

    def action(self, key: RunKey, *, retry_failed: bool) -> str:
        """What a sweep would do with a run: "train", "go on from step …", or "" for nothing."""
        status = self.status(key)
        if status == "done" or (status == "failed" and not retry_failed):
            return ""
        step = last_step(self.runs_dir / key.folder) if self.can_resume(key) else 0
        return f"go on from step {step}" if step else "train"

    def difference(self, key: RunKey) -> str | None:
        """The first key of a run's config.yml, or file that it read, that differs from the grid's; None: all agree."""
        recorded, now = self._recorded_yaml(key), self.settings.of(key)
        if recorded is None:
            return f"there is no {CONFIG_FILE}, which says how"
        for name in sorted({*recorded, *now} - set(_PATH_KEYS)):
            if recorded.get(name) != now.get(name):
                return f"{name}: {recorded.get(name)} recorded, {now.get(name)} now"
        run = self.records.get(key)
        if run is None or run.setup is None:
            return None
        files = self.settings.files(key)
        if run.setup.files is None:  # an old record: only the contamination report knows what it was trained on
            return _differing_file(self._reported_files(), files, set())
        removed = {*self.settings.paths(key)} - {*files}  # no reason to refuse: the run needs them no more
        return _differing_file(run.setup.files, files, {*run.setup.files, *files} - removed)

    def can_resume(self, key: RunKey) -> bool:
        """Whether an unfinished run may resume from its checkpoints: its YAML and its files are unchanged."""
        recorded, now = self._recorded_yaml(key), self.settings.of(key)
        return (
            recorded is not None
            and self.difference(key) is None
            # The names of shared data and norms are digests of what they were made from.
            and all(Path(recorded.get(name) or "").name == Path(now.get(name) or "").name for name in _PATH_KEYS)
        )

    def _recorded_yaml(self, key: RunKey) -> dict[str, Any] | None:
        path = self.runs_dir / key.folder / CONFIG_FILE
        return read_mapping(path) if path.is_file() else None

    def _reported_files(self) -> dict[str, str]:
        """sha256 of the training files in the contamination report, by path."""
        report = self.runs_dir / CONTAMINATION_FILE
        return files_of_report(report) if report.is_file() else {}

    def choices(self) -> dict[tuple[str, float], Choice | None]:
        """Each method's best rate by (method, epochs), chosen among the runs of the first stage, `train`."""
        return choose_rates(Trial.of(self.records[key]) for key in self.grid.keys if key in self.records)

    def further_seeds(self) -> list[RunKey]:
        """The runs of the second stage, further seeds at the best rates.

        They are those of the methods that always get them, and of the leading ones.
        """
        chosen, keys = self.grid.chosen, []
        choices = {name: choice for name, choice in self.choices().items() if choice is not None}
        for epochs in self.grid.epochs:
            of_epochs = {method: choice for (method, number), choice in choices.items() if number == epochs}
            ranked = sorted(of_epochs, key=lambda method: of_epochs[method].validation_nll)
            leading = [method for method in ranked if method not in chosen.methods][: chosen.leading]
            keys += [
                RunKey(method=method, learning_rate=of_epochs[method].learning_rate, epochs=epochs, seed=seed)
                for seed in chosen.seeds
                for method in self.grid.methods
                if seed not in self.grid.seeds and method in of_epochs and method in (*chosen.methods, *leading)
            ]
        return keys

    def best(self) -> list[RunKey]:
        """The finished runs at each method's best rate, of all seeds of the grid, that did not diverge."""
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
        """The finished runs that the last stage scores."""
        return {"all": self.done, "chosen": self.best, "none": list}[self.grid.score.runs]()

    def unscored(self) -> list[RunKey]:
        """The runs of `to_score` without scores."""
        return [key for key in self.to_score() if self.scores(key) is None]

    def done(self) -> list[RunKey]:
        """The finished runs of the grid's methods."""
        return [key for key, run in self.records.items() if run.status == "done" and key.method in self.grid.methods]

    def has_weights(self, key: RunKey) -> bool:
        """Whether the run's trained model or adapter is kept."""
        return has_weights(self.runs_dir / key.folder)

    def scores_file(self, key: RunKey | None) -> Path:
        """The path of a run's scores, or for None of the base's; the file may not exist."""
        return self.runs_dir / ("base" if key is None else key.folder) / SCORES_FILE

    def scores(self, key: RunKey | None) -> Scores | None:
        """The scores of a run, or for None of the base; None if there are none."""
        path = self.scores_file(key)
        return read_scores(path) if path.is_file() else None

    def _scores_differ(self, key: RunKey | None) -> str | None:
        """How scores differ from what the grid asks now; None: they agree, or there are none."""
        scores = self.scores(key)
        if scores is None:
            return None
        if scores.key != key:
            return f"it is of {scores.key.folder if scores.key else 'the base model'}"
        for name, value in self.grid.score.model_dump(include=set(SCORING_KEYS)).items():
            if scores.asked.get(name) != value:
                return f"score.{name}: {scores.asked.get(name)} recorded, {value} now"
        base_model = Setup.of(self.grid.settings(key) if key else self.grid.base_settings).base_model
        if scores.base_model not in (None, base_model):
            return f"base_model: {scores.base_model} recorded, {base_model} now"
        return _differing_file(scores.files or {}, self.settings.training_files(), set())


def _refuse(what: str, reasons: list[str], remedy: str) -> None:
    """Raise GridError with the first reasons, unless there are none."""
    if reasons:
        more = [f"and {len(reasons) - _MAX_NAMED} more"] if len(reasons) > _MAX_NAMED else []
        raise GridError("\n  ".join([f"{what} ({len(reasons)}):", *reasons[:_MAX_NAMED], *more]) + f"\n{remedy}")


def _differing_file(recorded: dict[str, str], now: dict[str, str], required: Iterable[str]) -> str | None:
    """The first file whose digests differ, among those in both and those of `required`, which may lack in one."""
    for path in sorted((recorded.keys() & now.keys()) | set(required)):
        before, after = recorded.get(path, "none"), now.get(path, "none")
        if before != after:
            return f"{path}: sha256 {before[:12]} recorded, {after[:12]} now"
    return None
