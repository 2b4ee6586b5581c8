"""`axolotl supertune sweep GRID`: train what is missing, choose rates by validation NLL, train their seeds, score."""

import contextlib
import hashlib
import json
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from filelock import FileLock, Timeout
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ...method.atomic_files import whole_file
from ...method.calibration_data import TRAINING_SET
from ...plugin import validation
from ...plugin.plan import plan as planning
from ...plugin.plan.data_checks import Findings, data_findings, is_here
from ..config import CALIBRATION_FOLDER, CONTAMINATION_FILE, RECORD, GridError
from ..record import VARIABLE, installed
from ..records import CONFIG_FILE, GRID_FILE, RUN_FILE, Run, RunKey, Setup, read_run, read_scores
from .jobs import Devices, ProcessJob, ProcessPool
from .run_folder import (
    ADAPTER_FOLDER,
    LOG_FILE,
    as_yaml,
    checkpoints,
    holds_weights,
    is_whole,
    last_line,
    make_ready,
    tail,
    write,
)
from .scoring import Request, trained_on
from .state import SweepState

LOCK_FILE = ".sweep.lock"

TRAIN = (sys.executable, "-m", "axolotl.cli.train")
SCORE = (sys.executable, "-m", "axolotl_supertune.grid.sweep.scoring")
PREPARE = (sys.executable, "-m", "axolotl_supertune.grid.sweep.prepare")
CONTAMINATION = (sys.executable, "-m", "axolotl_supertune.tasks", "contamination")

Stage = Literal["train", "choose", "score"]


class Sweep:
    """A grid and its RUNS_DIR.

    Args:
        path: the GRID file.
        devices: devices, and jobs on each.
        console: takes the progress.
        time_limit: seconds from now, or None.
        retry_failed: start failed runs again.
        train, score, prepare, contamination: the commands; what they are to do is appended.

    Raises:
        GridError, FileNotFoundError: the grid cannot be run; nothing was started.
        ValueError: RUNS_DIR holds a file that is not what it should be; names it.
    """

    def __init__(
        self,
        path: Path,
        devices: Devices,
        console: Console,
        *,
        time_limit: float | None = None,
        retry_failed: bool = False,
        train: Sequence[str] = TRAIN,
        score: Sequence[str] = SCORE,
        prepare: Sequence[str] = PREPARE,
        contamination: Sequence[str] = CONTAMINATION,
    ) -> None:
        deadline = None if time_limit is None else time.monotonic() + time_limit
        self._state = SweepState(path)
        self.grid, self.runs_dir, self._path = self._state.grid, self._state.runs_dir, path
        self._devices, self._console, self._retry_failed = devices, console, retry_failed
        self._train, self._score, self._prepare, self._contamination = train, score, prepare, contamination
        self._pool = ProcessPool(devices, deadline, console)
        self._failed: set[str] = set()

    def sweep(self, until: Stage = "score") -> bool:
        """Run what is missing.

        Returns:
            Whether nothing failed.

        Raises:
            Signalled, OutOfTime: not all has run; nothing is running, and the next sweep goes on.
            GridError: records contradict the grid (see `SweepState.check`), data is missing, another sweep uses
                this RUNS_DIR, or training data changed while this one ran.
        """
        with self._locked(), self._pool.signals():
            self._state.read()
            self._state.check()
            self._check_data()
            self._write_grid()
            self._run_missing("training", self.grid.keys)
            if until != "train":
                self._run_missing("other seeds", self._state.second_stage())
                if until == "score" and self.grid.score.runs != "none":
                    self._train_again()
                    self._score_missing()
                self._tidy()
        for name in sorted(self._failed):
            self._console.print(f"[red]failed:[/] {escape(name)}")
        return not self._failed

    def plan(self) -> str:
        """What `sweep` would run, as far as is known before it does: a line each with stage, run, state and action.

        Raises:
            GridError: see `SweepState.check`.
        """
        self._state.check()
        lines: list[tuple[str, str, str, str]] = []
        ended = all(self._state.state(key) in ("done", "failed") for key in self.grid.keys)
        for stage, keys in (
            ("training", self.grid.keys),
            ("other seeds", self._state.second_stage() if ended else []),
        ):
            lines += [(stage, str(key.folder), self._state.state(key), self._would(key)) for key in keys]
        chosen, seeds = self.grid.chosen, [seed for seed in self.grid.chosen.seeds if seed not in self.grid.seeds]
        if not ended and seeds:
            names = [*chosen.methods, *([f"the {chosen.leading} leading"] if chosen.leading else [])]
            which = f"seeds {', '.join(map(str, seeds))} of {', '.join(names)}"
            lines.append(("other seeds", which, "", "when training has ended"))
        if self.grid.score.runs != "none":
            for scored in [None, *(self._state.to_score() if ended else [])]:
                there = self._state.scored(scored) is not None
                lines.append(
                    ("scoring", str(scored.folder) if scored else "base", *(("done", "") if there else ("", "score")))
                )
            if not ended:
                lines.append(("scoring", f"{self.grid.score.runs} runs", "", "when training has ended"))
        width = max(len(run) for _, run, _, _ in lines)
        shown = [f"{stage:<11}  {run:<{width}}  {state:<7}  {would}".rstrip() for stage, run, state, would in lines]
        missing = sum(1 for *_, would in lines if would.startswith(("train", "go on")))
        return "\n".join([*shown, f"{missing} runs to train, {len(self._state.done())} done, in {self.runs_dir}"])

    def foresee(self) -> Findings:
        """What the runs that are missing would be refused for, each with the methods that it is about.

        As `axolotl supertune plan` has it, from local files: no weights are loaded and nothing is downloaded.
        """
        about: dict[tuple[str, str], list[str]] = {}
        texts_read: dict[str, Findings] = {}
        missing: dict[tuple[str, float], RunKey] = {}
        for key in self.grid.keys:
            if self._would(key):
                missing.setdefault((key.method, key.epochs), key)
        for key in missing.values():
            settings, norms = self._state.uncalibrated(key), self._state.norms(key)
            if norms is not None and norms.is_file():
                settings = self._state.settings(key)
            settings["plugins"] = [each for each in settings["plugins"] if each != RECORD]
            said = _foresee(settings, texts_read)
            for kind in ("refusals", "unchecked"):
                for each in getattr(said, kind):
                    methods = about.setdefault((kind, each), [])
                    methods += [key.method] if key.method not in methods else []
        every = len({method for method, _ in missing})
        together = Findings()
        for (kind, each), methods in about.items():
            which = "" if len(methods) == every else f"{', '.join(methods)}: "
            getattr(together, kind).append(which + each)
        return together

    def _check_data(self) -> None:
        """Raises GridError for a file of the data sets that is missing, unless nothing is to be made of it any more."""
        missing = [key for key in (*self.grid.keys, *self._state.second_stage()) if self._would(key)]
        for key in {key.method: key for key in missing}.values():
            if refusals := data_findings(self._state.uncalibrated(key)).refusals:
                raise GridError(f"{self._path}: methods.{key.method}: {refusals[0]}")

    def summary(self) -> Table:
        """The chosen rates, by validation NLL."""
        table = Table(box=box.SIMPLE_HEAD, title=f"{len(self._state.done())} runs done in {self.runs_dir}")
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

    def _would(self, key: RunKey) -> str:
        state = self._state.state(key)
        if state == "done" or (state == "failed" and not self._retry_failed):
            return ""
        folder = self.runs_dir / key.folder
        whole = [each for each in checkpoints(folder) if is_whole(each)] if self._state.goes_on(key) else []
        step = max((int(each.name.rpartition("-")[2]) for each in whole), default=0)
        return f"go on from step {step}" if step else "train"

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
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

    def _write_grid(self) -> None:
        runs = [
            {"key": key.model_dump(), "folder": key.folder.as_posix(), "yaml": self._state.settings(key)}
            for key in self.grid.keys
        ]
        with whole_file(self.runs_dir / GRID_FILE) as temporary:
            content = {"format": 1, "grid": self.grid.model_dump(), "base": self.grid.base_settings, "runs": runs}
            temporary.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")

    def _run_missing(self, title: str, keys: Sequence[RunKey]) -> None:
        states = {key: self._state.state(key) for key in keys}
        again = ("new", "stopped", "failed") if self._retry_failed else ("new", "stopped")
        self._failed |= {str(key.folder) for key, state in states.items() if state == "failed" and state not in again}
        self._run_all(title, [key for key, state in states.items() if state in again])

    def _run_all(self, title: str, keys: Sequence[RunKey]) -> None:
        if not keys:
            return
        state = self._state
        of_data: dict[Path, RunKey] = {}  # the first of the runs that tokenize alike
        for key in keys:
            if (path := state.prepared(key)) is not None and not path.is_dir():
                of_data.setdefault(path, key)
        jobs = [self._shared("data", path, key) for path, key in of_data.items()]
        makers: dict[Path, RunKey] = {}
        for key in keys:
            if (path := self._state.norms(key)) is not None and not path.is_file():
                makers.setdefault(path, key)
        if any(self.grid.settings(key).get("calibration_dataset") == TRAINING_SET for key in makers.values()):
            self._pool_run("preparing", jobs)  # which they read, and would make themselves where it is not
            jobs = []
            makers = {
                path: key for path, key in makers.items() if (data := state.prepared(key)) is None or data.is_dir()
            }
        jobs += [self._shared("norms", path, key) for path, key in makers.items()]
        self._pool_run("preparing", jobs)
        # Without them a run cannot start; that making them failed is told already.
        ready = [
            key
            for key in keys
            if ((norms := state.norms(key)) is None or norms.is_file())
            and ((data := state.prepared(key)) is None or data.is_dir())
        ]
        self._failed |= {str(key.folder) for key in keys if key not in ready}
        self._pool_run(title, [self._training(key) for key in ready])

    def _pool_run(self, title: str, jobs: Sequence[ProcessJob]) -> None:
        if jobs:
            self._failed |= {job.name for job in self._pool.run(title, jobs)}

    def _shared(self, kind: str, target: Path, key: RunKey) -> ProcessJob:
        """A job that makes what several runs read: `kind` of prepare.py, by the YAML of one of them."""
        config = self.runs_dir / CALIBRATION_FOLDER / f"{'tokenizing-' if kind == 'data' else ''}{target.stem}.yml"
        log = config.with_suffix(".log")

        def begin() -> None:
            settings = self._state.uncalibrated(key)
            settings["plugins"] = [each for each in settings["plugins"] if each != RECORD]
            settings["output_dir"] = config.with_suffix("").as_posix()
            write(config, as_yaml(settings))
            log.unlink(missing_ok=True)

        def end(code: int) -> str | None:
            shutil.rmtree(config.with_suffix(""), ignore_errors=True)
            return None if code == 0 and target.exists() else last_line(log, code)

        name = {"data": "tokenizing", "norms": f"calibrating for {key.method}, seed {key.seed}"}[kind]
        return ProcessJob(name, [*self._prepare, kind, str(config), str(target)], log, begin, end, lambda: None)

    def _training(self, key: RunKey) -> ProcessJob:
        folder = self.runs_dir / key.folder
        settings = self._state.settings(key)
        text = as_yaml(settings)
        known = {
            "key": key.model_dump(),
            "config_sha256": hashlib.sha256(text.encode()).hexdigest(),
            "setup": Setup.of(settings, self._state.files(key)).model_dump(),
            "jobs_per_gpu": self._devices.jobs_per_gpu,
        }
        started = datetime.now(UTC)

        def begin() -> None:
            nonlocal started
            started = datetime.now(UTC)
            make_ready(folder, resumable=self._state.goes_on(key))
            self._state.records.pop(key, None)
            write(folder / CONFIG_FILE, text)

        def end(code: int) -> str | None:
            wrong = None
            if not (folder / RUN_FILE).is_file():
                wrong = last_line(folder / LOG_FILE, code)
                Run(
                    **known,  # type: ignore[arg-type]
                    status="failed",
                    error=tail(folder / LOG_FILE, code),
                    started=started.isoformat(timespec="seconds"),
                    seconds=(datetime.now(UTC) - started).total_seconds(),
                    versions=installed(),
                ).write(folder / RUN_FILE)
            self._state.records[key] = read_run(folder / RUN_FILE)
            if wrong is None and self.grid.keep != "all":
                for each in checkpoints(folder):
                    shutil.rmtree(each)
            return wrong

        command = [*self._train, str(folder / CONFIG_FILE)]
        env = {VARIABLE: json.dumps(known)}
        return ProcessJob(str(key.folder), command, folder / LOG_FILE, begin, end, lambda: self._expected(key), env)

    def _expected(self, key: RunKey) -> float | None:
        """Seconds: the longest of the method's runs, or else of all, an epoch; None while none is done."""
        done = [run for run in self._state.records.values() if run.status == "done"]
        like = [run for run in done if run.key.method == key.method] or done
        same = [run.seconds for run in like if run.key.epochs == key.epochs]
        return max(same or [run.seconds / run.key.epochs * key.epochs for run in like], default=None)

    def _train_again(self) -> None:
        """Train the runs that are to be scored and whose weights are gone.

        A second training may end with another NLL, and the choice fall elsewhere: until nothing is missing any more.
        """
        done: set[RunKey] = set()
        while gone := [key for key in self._unscored() if key not in done and not self._has_weights(key)]:
            self._console.print(f"{len(gone)} runs that are to be scored have no weights any more: they train again.")
            done |= {*gone}
            self._run_all("training again", gone)
            others = [key for key in self._state.second_stage() if self._state.state(key) in ("new", "stopped")]
            self._run_all("other seeds", others)

    def _unscored(self) -> list[RunKey]:
        return [key for key in self._state.to_score() if self._state.scored(key) is None]

    def _has_weights(self, key: RunKey) -> bool:
        return holds_weights(self.runs_dir / key.folder)

    def _score_missing(self) -> None:
        seconds = [scores.seconds for key in (None, *self._state.to_score()) if (scores := self._state.scored(key))]
        base: list[RunKey | None] = [None] if self._state.scored(None) is None else []
        missing = [*base, *self._unscored()]
        without = [key for key in missing if key is not None and not self._has_weights(key)]
        self._failed |= {f"score {key.folder}: it left no weights" for key in without}
        if missing and self._report_contamination():
            self._pool_run("scoring", [self._scoring(key, seconds) for key in missing if key not in without])

    def _report_contamination(self) -> bool:
        """Whether there is a report of the training data: no model is scored without."""
        report = self.runs_dir / CONTAMINATION_FILE
        log = report.with_suffix(".log")
        sources = [f"{each['path']}:{each['name']}" if each.get("name") else each["path"] for each in self._datasets()]
        data_dir = ["--data-dir", self.grid.score.data_dir] if self.grid.score.data_dir else []

        def begin() -> None:
            report.unlink(missing_ok=True)
            log.unlink(missing_ok=True)

        command = [*self._contamination, *sources, "--output", str(report), *data_dir]
        job = ProcessJob(
            "contamination",
            command,
            log,
            begin,
            lambda code: None if report.is_file() else last_line(log, code),
            lambda: None,
        )
        self._pool_run("comparing training and test data", [job])
        if not report.is_file():
            return False
        trained = self._state.training_files()
        for path, found in trained_on(report).items():
            if trained.get(path, found) != found:
                report.unlink()
                raise GridError(
                    f"{path}: was changed while this sweep ran (sha256 {trained[path][:12]} when it began, "
                    f"{found[:12]} now), and no model is scored beside a report on other data: put it back, and sweep "
                    "again."
                )
        return True

    def _datasets(self) -> list[dict[str, Any]]:
        """All training data of the grid, each once."""
        every = [self.grid.base_settings, *(method.settings for method in self.grid.methods.values())]
        found = {
            (each["path"], each.get("name")): each for settings in every for each in settings.get("datasets") or []
        }
        return list(found.values())

    def _scoring(self, key: RunKey | None, seconds: list[float]) -> ProcessJob:
        path = self._state.scores_file(key)
        log = path.with_name("score.log")
        settings = self.grid.settings(key or self.grid.keys[0])
        request = Request(
            key=key,
            settings=settings if key else self.grid.base_settings,
            trained=settings["output_dir"] if key else None,
            score=self.grid.score,
            contamination=str(self.runs_dir / CONTAMINATION_FILE),
            output=str(path),
            jobs_per_gpu=self._devices.jobs_per_gpu,
        )

        def end(code: int) -> str | None:
            if not path.is_file():
                return last_line(log, code)
            seconds.append(read_scores(path).seconds)
            return None

        return ProcessJob(
            f"score {key.folder if key else 'base'}",
            [*self._score, request.model_dump_json()],
            log,
            lambda: log.unlink(missing_ok=True),
            end,
            lambda: max(seconds, default=None),
        )

    def _tidy(self) -> None:
        """Drop the weights that no stage needs any more, unless all are kept."""
        if self.grid.keep == "all":
            return
        needed = {
            *self._state.best(),
            *(key for key in self._state.to_score() if not self._state.scores_file(key).is_file()),
        }
        for key in self._state.done():
            if key not in needed:
                shutil.rmtree(self.runs_dir / key.folder / ADAPTER_FOLDER, ignore_errors=True)


def _foresee(settings: dict[str, Any], texts_read: dict[str, Findings]) -> Findings:
    """What of a run's YAML is refused, and what is unchecked."""
    base = settings["base_model"]
    if settings.get("adapter") not in validation.ADAPTERS:
        return data_findings(settings)
    if not is_here(base, ("config.json",), settings.get("revision_of_model")):
        said = data_findings(settings)
        said.unchecked.append(f"base_model: {base}, whose config is not here, and what depends on its layers")
        return said
    try:
        found = planning.make(settings, gpus=1, texts_read=texts_read)
    except ValueError as error:
        return Findings([str(error)])
    return Findings(found.refusals, found.unchecked)


@contextlib.contextmanager
def disk_errors(place: Path | str) -> Iterator[None]:
    """Turn what the disk refuses (full, no rights) into a ValueError that says how the sweep goes on.

    Args:
        place: named where the error names no file, as that of a full disk does.
    """
    try:
        yield
    except OSError as error:
        if error.errno is None or isinstance(error, FileNotFoundError):
            raise
        raise ValueError(
            f"{error.filename or place}: {error.strerror}. What is done stays, and the same command goes on when that "
            "is mended: make room, or give this grid an output_dir that can be written."
        ) from error
