"""The processes of a sweep as jobs: tokenizing, calibrating, training, comparing data, scoring."""

import hashlib
import json
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ..config import CALIBRATION_FOLDER, CONTAMINATION_FILE, RECORD
from ..record import VARIABLE, installed
from ..run_files import CONFIG_FILE, RUN_FILE, Run, RunKey, Setup, read_run, read_scores
from .devices import Devices
from .jobs import ProcessJob
from .run_folder import LOG_FILE, as_yaml, checkpoints, last_line, make_ready, tail, write
from .scoring import Request
from .state import SweepState


@dataclass(frozen=True)
class Commands:
    """The command lines of a sweep's processes; their arguments are appended."""

    train: Sequence[str] = (sys.executable, "-m", "axolotl.cli.train")
    score: Sequence[str] = (sys.executable, "-m", "axolotl_supertune.grid.sweep.scoring")
    prepare: Sequence[str] = (sys.executable, "-m", "axolotl_supertune.grid.sweep.prepare")
    contamination: Sequence[str] = (sys.executable, "-m", "axolotl_supertune.tasks", "contamination")


class RunJobs:
    """Makes the jobs of a sweep."""

    def __init__(self, state: SweepState, devices: Devices, commands: Commands) -> None:
        self._state, self._devices, self._commands = state, devices, commands
        self.grid, self.runs_dir = state.grid, state.runs_dir

    def tokenize(self, target: Path, key: RunKey) -> ProcessJob:
        """Tokenize the data of a run, and of all that share it, into the folder `target`."""
        return self._prepare("data", "tokenizing", target, key, file_prefix="tokenizing-")

    def calibrate(self, target: Path, key: RunKey) -> ProcessJob:
        """Measure the activation norms of a run, and of all that share them, into the file `target`."""
        return self._prepare("norms", f"calibrating for {key.method}, seed {key.seed}", target, key)

    def _prepare(self, kind: str, name: str, target: Path, key: RunKey, file_prefix: str = "") -> ProcessJob:
        config = self.runs_dir / CALIBRATION_FOLDER / f"{file_prefix}{target.stem}.yml"
        log = config.with_suffix(".log")

        def begin() -> None:
            settings = without_record(self._state.settings.uncalibrated(key))
            settings["output_dir"] = config.with_suffix("").as_posix()
            write(config, as_yaml(settings))
            log.unlink(missing_ok=True)

        def end(code: int) -> str | None:
            shutil.rmtree(config.with_suffix(""), ignore_errors=True)
            return None if code == 0 and target.exists() else last_line(log, code)

        return ProcessJob(name, [*self._commands.prepare, kind, str(config), str(target)], log, begin, end)

    def train(self, key: RunKey) -> ProcessJob:
        """Train a run; without a run.json at its end it is recorded as failed."""
        folder = self.runs_dir / key.folder
        settings = self._state.settings.of(key)
        config = as_yaml(settings)
        record = {
            "key": key.model_dump(),
            "config_sha256": hashlib.sha256(config.encode()).hexdigest(),
            "setup": Setup.of(settings, self._state.settings.files(key)).model_dump(),
            "jobs_per_gpu": self._devices.jobs_per_gpu,
        }
        started = datetime.now(UTC)

        def begin() -> None:
            nonlocal started
            started = datetime.now(UTC)
            make_ready(folder, resumable=self._state.can_resume(key))
            self._state.records.pop(key, None)
            write(folder / CONFIG_FILE, config)

        def end(code: int) -> str | None:
            error = None
            if not (folder / RUN_FILE).is_file():
                error = last_line(folder / LOG_FILE, code)
                self._record_failure(folder, record, started, code)
            self._state.records[key] = read_run(folder / RUN_FILE)
            if error is None and self.grid.keep != "all":
                for checkpoint in checkpoints(folder):
                    shutil.rmtree(checkpoint)
            return error

        return ProcessJob(
            str(key.folder),
            [*self._commands.train, str(folder / CONFIG_FILE)],
            folder / LOG_FILE,
            begin,
            end,
            lambda: self._expected_seconds(key),
            {VARIABLE: json.dumps(record)},
        )

    def _record_failure(self, folder: Path, record: dict[str, Any], started: datetime, code: int) -> None:
        Run(
            **record,
            status="failed",
            error=tail(folder / LOG_FILE, code),
            started=started.isoformat(timespec="seconds"),
            seconds=(datetime.now(UTC) - started).total_seconds(),
            versions=installed(),
        ).write(folder / RUN_FILE)

    def _expected_seconds(self, key: RunKey) -> float | None:
        """The longest of the method's finished runs, or else of all, scaled by epochs; None while there are none."""
        done = [run for run in self._state.records.values() if run.status == "done"]
        similar = [run for run in done if run.key.method == key.method] or done
        same_epochs = [run.seconds for run in similar if run.key.epochs == key.epochs]
        return max(same_epochs or [run.seconds / run.key.epochs * key.epochs for run in similar], default=None)

    def report_contamination(self) -> ProcessJob:
        """Compare the training data of the whole grid with the benchmarks."""
        report = self.runs_dir / CONTAMINATION_FILE
        log = report.with_suffix(".log")
        data_dir = ["--data-dir", self.grid.score.data_dir] if self.grid.score.data_dir else []

        def begin() -> None:
            report.unlink(missing_ok=True)
            log.unlink(missing_ok=True)

        def end(code: int) -> str | None:
            return None if report.is_file() else last_line(log, code)

        command = [*self._commands.contamination, *self._training_sources(), "--output", str(report), *data_dir]
        return ProcessJob("contamination", command, log, begin, end)

    def _training_sources(self) -> list[str]:
        """All training data of the grid without duplicates, as PATH or PATH:NAME."""
        datasets = [dataset for settings in self.grid.all_settings for dataset in settings.get("datasets") or []]
        names = dict.fromkeys((dataset["path"], dataset.get("name")) for dataset in datasets)
        return [f"{path}:{name}" if name else path for path, name in names]

    def score(self, keys: Sequence[RunKey | None]) -> list[ProcessJob]:
        """Score runs, and for None the base model; how long each takes is estimated from all that are scored."""
        all_keys: list[RunKey | None] = [None, *self._state.to_score()]
        seconds = [scores.seconds for key in all_keys if (scores := self._state.scores(key))]
        return [self._score(key, seconds) for key in keys]

    def _score(self, key: RunKey | None, seconds: list[float]) -> ProcessJob:
        """Score one model; `seconds` is appended to."""
        path = self._state.scores_file(key)
        log = path.with_name("score.log")
        settings = self.grid.settings(key) if key else self.grid.base_settings
        request = Request(
            key=key,
            settings=settings,
            trained=settings["output_dir"] if key else None,
            score=self.grid.score,
            contamination=str(self.runs_dir / CONTAMINATION_FILE),
            output=str(path),
            jobs_per_gpu=self._devices.jobs_per_gpu,
        )

        def begin() -> None:
            log.unlink(missing_ok=True)

        def end(code: int) -> str | None:
            if not path.is_file():
                return last_line(log, code)
            seconds.append(read_scores(path).seconds)
            return None

        return ProcessJob(
            f"score {key.folder if key else 'base'}",
            [*self._commands.score, request.model_dump_json()],
            log,
            begin,
            end,
            lambda: max(seconds, default=None),
        )


def without_record(settings: dict[str, Any]) -> dict[str, Any]:
    """A run's YAML without the plugin that records it, which only a sweep's training may use."""
    return {**settings, "plugins": [plugin for plugin in settings["plugins"] if plugin != RECORD]}
