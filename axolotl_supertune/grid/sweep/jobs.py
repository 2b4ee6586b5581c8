"""Runs processes on devices: as many at once as there are slots, all ended with the sweep, none started too late."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from .devices import Devices

GRACE = 10.0
"""Seconds that a process gets between SIGTERM and SIGKILL."""

# Has the kernel end the process when the sweep dies, however it dies: it must not go on in a folder that the next
# sweep uses. Set in the process itself, before exec: Python code that runs after the fork of a process with threads
# (subprocess's preexec_fn) may hang.
_DIE_WITH_PARENT = """
import ctypes, os, signal, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
if os.getppid() != int(sys.argv[1]):
    sys.exit(1)
os.execvp(sys.argv[2], sys.argv[2:])
"""


class Signalled(Exception):
    """SIGINT or SIGTERM came; all processes are ended."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


class OutOfTime(Exception):
    """The time limit was reached; all processes are ended."""


def _unknown() -> None:
    return None


@dataclass(frozen=True)
class ProcessJob:
    """One process to run.

    name: shown in the progress.
    command: the command line.
    log: file that takes the output.
    begin: prepares the process's folder; called right before it starts.
    end: exit code → an error message or None; called when the process ended by itself.
    expected: () → estimated seconds, or None while nothing similar has ended.
    env: variables in addition to the device's environment.
    """

    name: str
    command: Sequence[str]
    log: Path
    begin: Callable[[], None]
    end: Callable[[int], str | None]
    expected: Callable[[], float | None] = _unknown
    env: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class _Running:
    job: ProcessJob
    device: str
    process: "subprocess.Popen[bytes]"
    started: float
    """Of `time.monotonic`."""


class ProcessPool:
    """Runs jobs on devices until all have ended, a signal comes, or the time is over.

    Args:
        deadline: as `time.monotonic` counts, or None.
        console: takes a line per job, and on a terminal a progress bar with the remaining time.
    """

    def __init__(self, devices: Devices, deadline: float | None, console: Console) -> None:
        self._devices, self._deadline, self._console = devices, deadline, console
        self._events: SimpleQueue[_Running | int] = SimpleQueue()
        self._running: list[_Running] = []

    @contextlib.contextmanager
    def signals(self) -> Iterator[None]:
        """Within this context SIGINT and SIGTERM end all processes, and `run` raises Signalled."""
        before = {
            number: signal.signal(number, lambda number, _: self._events.put(number))
            for number in (signal.SIGINT, signal.SIGTERM)
        }
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def run(self, title: str, jobs: Sequence[ProcessJob]) -> list[ProcessJob]:
        """Run all jobs in their order.

        Returns:
            The jobs that failed.

        Raises:
            Signalled, OutOfTime: some jobs have not run; those that were running are ended.
        """
        waiting, free, failed = list(jobs), self._devices.slots, []
        progress = self._progress_bar(title)
        try:
            with progress:
                bar = progress.add_task(title, total=len(jobs), left="")
                while waiting or self._running:
                    while free and (job := self._next(waiting)) is not None:
                        waiting.remove(job)
                        self._start(job, free.pop(0))
                    if not self._running:
                        raise OutOfTime
                    progress.update(bar, left=self._remaining(waiting))
                    ended = self._wait(lambda: progress.update(bar, left=self._remaining(waiting)))
                    self._running.remove(ended)
                    free.append(ended.device)
                    if not self._finish(ended, len(jobs), waiting, progress.console):
                        failed.append(ended.job)
                    progress.advance(bar)
        finally:
            end_all([running.process for running in self._running])
            self._running.clear()
        return failed

    def _progress_bar(self, title: str) -> Progress:
        return Progress(
            TextColumn(f"[bold]{escape(title)}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[left]}"),
            console=self._console,
            disable=not self._console.is_terminal,
        )

    def _next(self, waiting: Sequence[ProcessJob]) -> ProcessJob | None:
        """The first job that is expected to end in time."""
        if self._deadline is None:
            return next(iter(waiting), None)
        left = self._deadline - time.monotonic()
        return next((job for job in waiting if left > 0 and (job.expected() or 0) <= left), None)

    def _start(self, job: ProcessJob, device: str) -> None:
        job.begin()
        job.log.parent.mkdir(parents=True, exist_ok=True)
        with job.log.open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _DIE_WITH_PARENT, str(os.getpid()), *job.command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**self._devices.environment(device), **job.env},
                # Keeps Ctrl-C from the process: at SIGINT Axolotl saves the half-trained model and exits with 0.
                start_new_session=True,
            )
        running = _Running(job, device, process, time.monotonic())
        self._running.append(running)

        def wait() -> None:
            process.wait()
            self._events.put(running)

        threading.Thread(target=wait, daemon=True).start()

    def _wait(self, tick: Callable[[], None]) -> _Running:
        """Wait for the next process that ends, calling `tick` every second."""
        while True:
            seconds = 1.0 if self._deadline is None else min(1.0, max(0.0, self._deadline - time.monotonic()))
            try:
                event = self._events.get(timeout=seconds)
            except Empty:
                if self._deadline is not None and time.monotonic() >= self._deadline:
                    raise OutOfTime from None
                tick()
                continue
            if isinstance(event, int):
                raise Signalled(event)
            if event in self._running:  # others are of an earlier `run`, which ended them
                return event

    def _finish(self, ended: _Running, total: int, waiting: Sequence[ProcessJob], console: Console) -> bool:
        """Report an ended process; whether it succeeded."""
        error = ended.job.end(ended.process.returncode)
        name, seconds = escape(ended.job.name), f"{time.monotonic() - ended.started:.0f} s"
        state = "" if self._console.is_terminal else self._state(total, waiting)
        if error is None:
            console.print(f"{name}: {seconds}{state}")
        else:
            console.print(f"[red]{name}: failed after {seconds}[/]{state}: {escape(error)}")
        return error is None

    def _state(self, total: int, waiting: Sequence[ProcessJob]) -> str:
        """What the progress bar would show, for a console that is a file."""
        ended = total - len(waiting) - len(self._running)
        remaining = self._remaining(waiting) if ended < total else ""
        return f" ({ended} of {total}{', ' + remaining if remaining else ''})"

    def _remaining(self, waiting: Sequence[ProcessJob]) -> str:
        """The remaining time, estimated from jobs that have ended; "" while that is unknown."""
        now = time.monotonic()
        expected = [job.expected() for job in waiting]
        running = [(running.job.expected(), now - running.started) for running in self._running]
        if any(seconds is None for seconds in expected) or any(seconds is None for seconds, _ in running):
            return ""
        work = sum(seconds or 0 for seconds in expected)
        work += sum(max(0.0, (seconds or 0) - elapsed) for seconds, elapsed in running)
        return f"{duration(work / len(self._devices.slots))} left"


def end_all(processes: Sequence["subprocess.Popen[bytes]"]) -> None:
    """Send SIGTERM to each process with its children, and SIGKILL to those that still run after GRACE seconds."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        for process in processes:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, number)
        until = time.monotonic() + GRACE
        for process in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=max(0.0, until - time.monotonic()))


def duration(seconds: float) -> str:
    """A duration in words: 2 h 5 min, 5 min, 12 s."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min"
