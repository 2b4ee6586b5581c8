"""A sweep: trains a grid's missing runs, chooses rates by validation NLL, trains their further seeds, and scores."""

import contextlib
import json
import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

from filelock import FileLock, Timeout
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ...method.atomic_files import whole_file
from ...method.calibration_data import TRAINING_SET
from ...plugin.plan.data_checks import Findings, data_findings
from ..config import CONTAMINATION_FILE, GridError
from ..run_files import GRID_FILE, RunKey
from .devices import Devices
from .dry_run import foresee, list_runs
from .jobs import ProcessJob, ProcessPool
from .run_folder import ADAPTER_FOLDER
from .run_jobs import Commands, RunJobs
from .scoring import files_of_report
from .state import SweepState

LOCK_FILE = ".sweep.lock"

Stage = Literal["train", "choose", "score"]


class Sweep:
    """Runs the stages of a grid.

    Args:
        path: the GRID file.
        devices: where the runs train and are scored.
        console: takes the progress.
        time_limit: seconds from now, or None.
        retry_failed: whether failed runs are started again.
        commands: the processes that are started.

    Raises:
        GridError, FileNotFoundError: the grid cannot be run; nothing was started.
        ValueError: a file in RUNS_DIR is damaged; names it.
    """

    def __init__(
        self,
        path: Path,
        devices: Devices,
        console: Console,
        *,
        time_limit: float | None = None,
        retry_failed: bool = False,
        commands: Commands | None = None,
    ) -> None:
        deadline = None if time_limit is None else time.monotonic() + time_limit
        self._state = SweepState(path)
        self.grid, self.runs_dir, self._path = self._state.grid, self._state.runs_dir, path
        self._console, self._retry_failed = console, retry_failed
        self._pool = ProcessPool(devices, deadline, console)
        self._jobs = RunJobs(self._state, devices, commands or Commands())
        self._failures: list[str] = []  # what failed, for the last lines of output

    def sweep(self, until: Stage = "score") -> bool:
        """Run what is missing.

        Args:
            until: the last stage: `train`; `choose` (rates are chosen and their further seeds trained); `score`.

        Returns:
            Whether nothing failed.

        Raises:
            Signalled, OutOfTime: not all has run; nothing is running, and the next sweep continues.
            GridError: records contradict the grid (see `SweepState.check`), data is missing, another sweep uses this
                RUNS_DIR, or training data changed while this one ran.
            ValueError: a record in RUNS_DIR is damaged; names it.
        """
        with self._locked(), self._pool.signals():
            self._state.read()
            self._state.check()
            self._check_data()
            self._write_grid()
            self._run_missing("training", self.grid.keys)
            if until != "train":
                self._run_missing("further seeds", self._state.further_seeds())
                if until == "score" and self.grid.score.runs != "none":
                    self._train_again()
                    self._score_missing()
                self._delete_weights()
        for failure in sorted(set(self._failures)):
            self._console.print(f"[red]failed:[/] {escape(failure)}")
        return not self._failures

    def listing(self) -> str:
        """The runs with what `sweep` would do, one per line (see `dry_run.list_runs`)."""
        return list_runs(self._state, retry_failed=self._retry_failed)

    def foresee(self) -> Findings:
        """Why missing runs would be refused (see `dry_run.foresee`)."""
        return foresee(self._state, retry_failed=self._retry_failed)

    def summary(self) -> Table:
        """A table of the chosen rates, by validation NLL."""
        done = len(self._state.done())
        table = Table(box=box.SIMPLE_HEAD, title=f"{done} {'run' if done == 1 else 'runs'} done in {self.runs_dir}")
        table.add_column("method")
        for column in ("epochs", "learning rate", "validation NLL", ""):
            table.add_column(column, justify="right")
        choices = [choice for choice in self._state.choices().values() if choice is not None]
        for choice in sorted(choices, key=lambda choice: (choice.epochs, choice.validation_nll)):
            edge = {"lowest": "the lowest tried", "highest": "the highest tried"}.get(choice.edge or "", "")
            table.add_row(
                choice.method, f"{choice.epochs:g}", f"{choice.learning_rate:g}", f"{choice.validation_nll:.4f}", edge
            )
        return table

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Keep other sweeps out of RUNS_DIR."""
        self.runs_dir.mkdir(parents=True, exist_ok=True)
        lock = FileLock(self.runs_dir / LOCK_FILE, timeout=0)
        try:
            with lock:
                yield
        except Timeout:
            raise GridError(
                f"output_dir: another sweep is running in {self.runs_dir}; wait for it, end it, or give this grid "
                "another output_dir."
            ) from None

    def _check_data(self) -> None:
        """Raise GridError for what would refuse the data of a run still to be trained.

        One run of each method is checked, since all of them read the same data.
        """
        to_train = [key for key in (*self.grid.keys, *self._state.further_seeds()) if self._is_to_train(key)]
        run_of_method = {key.method: key for key in to_train}
        for method, key in run_of_method.items():
            if refusals := data_findings(self._state.settings.uncalibrated(key)).refusals:
                raise GridError(f"{self._path}: methods.{method}: {refusals[0]}")

    def _is_to_train(self, key: RunKey) -> bool:
        status = self._state.status(key)
        return status in ("new", "stopped") or (status == "failed" and self._retry_failed)

    def _write_grid(self) -> None:
        """Write grid.json: the grid with the YAMLs of the runs of its first stage, `train`."""
        runs = [
            {"key": key.model_dump(), "folder": key.folder.as_posix(), "yaml": self._state.settings.of(key)}
            for key in self.grid.keys
        ]
        with whole_file(self.runs_dir / GRID_FILE) as temporary:
            content = {"format": 1, "grid": self.grid.model_dump(), "base": self.grid.base_settings, "runs": runs}
            temporary.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")

    def _run_missing(self, title: str, keys: Sequence[RunKey]) -> None:
        """Train the runs that have not ended; those that failed before count as failed unless they are retried."""
        to_train = [key for key in keys if self._is_to_train(key)]
        self._failures += [
            str(key.folder) for key in keys if key not in to_train and self._state.status(key) == "failed"
        ]
        self._train(title, to_train)

    def _train(self, title: str, keys: Sequence[RunKey]) -> None:
        """Train runs, after preparing the data and the norms that they share."""
        if not keys:
            return
        self._prepare(keys)
        ready = [key for key in keys if self._has_data(key) and self._has_norms(key)]
        self._failures += [str(key.folder) for key in keys if key not in ready]
        self._run(title, [self._jobs.train(key) for key in ready])

    def _prepare(self, keys: Sequence[RunKey]) -> None:
        """Tokenize data and measure norms, each once by the first run that needs it."""
        settings = self._state.settings
        data: dict[Path, RunKey] = {}
        norms: dict[Path, RunKey] = {}
        for key in keys:
            if (path := settings.prepared(key)) is not None and not path.is_dir():
                data.setdefault(path, key)
            if (path := settings.norms(key)) is not None and not path.is_file():
                norms.setdefault(path, key)
        jobs = [self._jobs.tokenize(path, key) for path, key in data.items()]
        if any(self.grid.settings(key).get("calibration_dataset") == TRAINING_SET for key in norms.values()):
            # Calibrating reads the tokenized data, and would tokenize it itself, in another order, if it were missing.
            self._run("preparing", jobs)
            jobs = []
            norms = {path: key for path, key in norms.items() if self._has_data(key)}
        jobs += [self._jobs.calibrate(path, key) for path, key in norms.items()]
        self._run("preparing", jobs)

    def _has_data(self, key: RunKey) -> bool:
        """Whether the tokenized data that a run shares exists, if it shares any."""
        path = self._state.settings.prepared(key)
        return path is None or path.is_dir()

    def _has_norms(self, key: RunKey) -> bool:
        """Whether the activation norms that a run shares exist, if it shares any."""
        path = self._state.settings.norms(key)
        return path is None or path.is_file()

    def _run(self, title: str, jobs: Sequence[ProcessJob]) -> None:
        """Run jobs and note those that fail."""
        if jobs:
            self._failures += [job.name for job in self._pool.run(title, jobs)]

    def _train_again(self) -> None:
        """Train runs that are to be scored and whose weights were deleted.

        A second training may end with another NLL, so that another rate is chosen: this is repeated until no run that
        is to be scored lacks weights; no run is retrained twice.
        """
        trained: set[RunKey] = set()
        while missing := [k for k in self._state.unscored() if k not in trained and not self._state.has_weights(k)]:
            self._console.print(
                "1 run that is to be scored has no weights any more: it trains again."
                if len(missing) == 1
                else f"{len(missing)} runs that are to be scored have no weights any more: they train again."
            )
            trained |= {*missing}
            self._train("training again", missing)
            untrained = [key for key in self._state.further_seeds() if self._state.status(key) in ("new", "stopped")]
            self._train("further seeds", untrained)

    def _score_missing(self) -> None:
        """Score the base model and the runs, after comparing the training data with the benchmarks."""
        base: list[RunKey | None] = [None] if self._state.scores(None) is None else []
        missing = [*base, *self._state.unscored()]
        without_weights = [key for key in missing if key is not None and not self._state.has_weights(key)]
        self._failures += [f"score {key.folder}: it left no weights" for key in without_weights]
        if missing and self._report_contamination():
            self._run("scoring", self._jobs.score([key for key in missing if key not in without_weights]))

    def _report_contamination(self) -> bool:
        """Make the contamination report, without which no model is scored; whether that succeeded.

        Raises:
            GridError: training data changed since the sweep began.
        """
        report = self.runs_dir / CONTAMINATION_FILE
        self._run("comparing training and test data", [self._jobs.report_contamination()])
        if not report.is_file():
            return False
        trained = self._state.settings.training_files()
        for path, reported in files_of_report(report).items():
            if trained.get(path, reported) != reported:
                report.unlink()
                raise GridError(
                    f"{path}: was changed while this sweep ran (sha256 {trained[path][:12]} when it began, "
                    f"{reported[:12]} now), and no model is scored beside a report on other data: put it back, and "
                    "sweep again."
                )
        return True

    def _delete_weights(self) -> None:
        """Delete the weights that no stage needs any more, unless all are kept."""
        if self.grid.keep == "all":
            return
        needed = {*self._state.best(), *self._state.unscored()}
        for key in self._state.done():
            if key not in needed:
                shutil.rmtree(self.runs_dir / key.folder / ADAPTER_FOLDER, ignore_errors=True)
