"""Processes on devices: as many at once as there are devices, all ended with the sweep, none begun too late to end."""

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

GRACE = 10.0
"""Seconds that a process gets between SIGTERM and SIGKILL."""

# The kernel ends the process when the sweep dies, however it dies: nobody may train on in a folder that the next sweep
# takes. Set before exec, in the process itself: after fork in a process with threads, Python code may hang.
_BOUND = """
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
    """The time limit came first; all processes are ended."""


@dataclass(frozen=True)
class ProcessJob:
    """One process.

    name: as progress shows it.
    command, env: of the process; `env` beside the environment and what the place says.
    log: takes its output.
    begin: makes its folder ready; called right before it starts.
    end: (exit code) → what went wrong, or None; called when it ended by itself.
    expected: () → seconds that it will take, or None where nothing like it has ended yet.
    """

    name: str
    command: Sequence[str]
    log: Path
    begin: Callable[[], None]
    end: Callable[[int], str | None]
    expected: Callable[[], float | None]
    env: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Devices:
    """Where jobs run.

    gpus: what CUDA_VISIBLE_DEVICES says, a GPU each; none: the CPU is the one device.
    jobs_per_gpu: at once on one device.
    """

    gpus: tuple[str, ...]
    jobs_per_gpu: int = 1

    @property
    def slots(self) -> list[str]:
        """One entry a place; the devices take turns, so that few jobs lie on many devices."""
        return list(self.gpus or ("",)) * self.jobs_per_gpu

    def environment(self, device: str) -> dict[str, str]:
        """Of a process on this device: its GPU alone, and its share of the cores unless the user says otherwise."""
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        threads = os.environ.get("OMP_NUM_THREADS") or str(max(1, cores // len(self.slots)))
        return {
            "TOKENIZERS_PARALLELISM": "false",
            **os.environ,
            "OMP_NUM_THREADS": threads,
            "CUDA_VISIBLE_DEVICES": device,
            "PYTHONUNBUFFERED": "1",
        }


class ProcessPool:
    """Runs jobs on devices until all have ended, a signal comes, or the time is over.

    Args:
        devices: where.
        deadline: of `time.monotonic`, or None.
        console: takes one line a job, and a bar with the time left if it is a terminal; else the lines say that.
    """

    def __init__(self, devices: Devices, deadline: float | None, console: Console) -> None:
        self._devices, self._deadline, self._console = devices, deadline, console
        self._events: SimpleQueue[tuple[ProcessJob, str, subprocess.Popen[bytes]] | int] = SimpleQueue()
        self._running: dict[int, tuple[ProcessJob, float]] = {}

    @contextlib.contextmanager
    def signals(self) -> Iterator[None]:
        """Within, SIGINT and SIGTERM end all processes, and `run` raises Signalled."""
        before = {
            each: signal.signal(each, lambda number, _: self._events.put(number))
            for each in (signal.SIGINT, signal.SIGTERM)
        }
        try:
            yield
        finally:
            for each, handler in before.items():
                signal.signal(each, handler)

    def run(self, title: str, jobs: Sequence[ProcessJob]) -> list[ProcessJob]:
        """Run all jobs, in their order.

        Returns:
            The jobs that went wrong.

        Raises:
            Signalled, OutOfTime: not all have run; those that had not ended are ended.
        """
        waiting, free, failed = list(jobs), self._devices.slots, []
        progress = Progress(
            TextColumn(f"[bold]{escape(title)}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[left]}"),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        processes: list[subprocess.Popen[bytes]] = []
        try:
            with progress:
                bar = progress.add_task(title, total=len(jobs), left="")
                while waiting or self._running:
                    while free and (job := self._next(waiting)) is not None:
                        waiting.remove(job)
                        processes.append(self._start(job, free.pop(0)))
                    if not self._running:
                        raise OutOfTime
                    progress.update(bar, left=self._left(waiting))
                    job, device, process = self._wait(lambda: progress.update(bar, left=self._left(waiting)))
                    processes.remove(process)
                    _, started = self._running.pop(process.pid)
                    free.append(device)
                    wrong = job.end(process.returncode)
                    took = f"{time.monotonic() - started:.0f} s"
                    ended = len(jobs) - len(waiting) - len(self._running)
                    so_far = "" if self._console.is_terminal else self._so_far(ended, len(jobs), waiting)
                    if wrong is None:
                        progress.console.print(f"{escape(job.name)}: {took}{so_far}")
                    else:
                        failed.append(job)
                        progress.console.print(
                            f"[red]{escape(job.name)}: failed after {took}[/]{so_far}: {escape(wrong)}"
                        )
                    progress.advance(bar)
        finally:
            end_all(processes)
            self._running.clear()
        return failed

    def _next(self, waiting: Sequence[ProcessJob]) -> ProcessJob | None:
        """The first job that would end in time."""
        if self._deadline is None:
            return next(iter(waiting), None)
        left = self._deadline - time.monotonic()
        return next((job for job in waiting if left > 0 and (job.expected() or 0) <= left), None)

    def _start(self, job: ProcessJob, device: str) -> subprocess.Popen[bytes]:
        job.begin()
        job.log.parent.mkdir(parents=True, exist_ok=True)
        with job.log.open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _BOUND, str(os.getpid()), *job.command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**self._devices.environment(device), **job.env},
                # Ctrl-C is the sweep's: at SIGINT Axolotl would save what is half trained and exit with 0.
                start_new_session=True,
            )
        self._running[process.pid] = (job, time.monotonic())

        def wait() -> None:
            process.wait()
            self._events.put((job, device, process))

        threading.Thread(target=wait, daemon=True).start()
        return process

    def _wait(self, tick: Callable[[], None]) -> tuple[ProcessJob, str, subprocess.Popen[bytes]]:
        """The next job that ends."""
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
            if event[2].pid in self._running:  # else of an earlier run of this pool, and ended by it
                return event

    def _so_far(self, ended: int, total: int, waiting: Sequence[ProcessJob]) -> str:
        """What a bar would show, for a log."""
        left = self._left(waiting) if ended < total else ""
        return f" ({ended} of {total}{', ' + left if left else ''})"

    def _left(self, waiting: Sequence[ProcessJob]) -> str:
        """How long all of it will take, judging by what has ended; nothing while that is unknown."""
        now = time.monotonic()
        expected = [job.expected() for job in waiting]
        running = [(job.expected(), now - started) for job, started in self._running.values()]
        if any(each is None for each in expected) or any(each is None for each, _ in running):
            return ""
        work = sum(each or 0 for each in expected) + sum(max(0.0, (each or 0) - done) for each, done in running)
        return f"{duration(work / len(self._devices.slots))} left"


def end_all(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """SIGTERM to each process with its children, and SIGKILL to what is there after GRACE seconds."""
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
    """2 h 5 min, 5 min, 12 s."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min"


def visible_gpus(asked: str | None) -> tuple[str, ...]:
    """What CUDA_VISIBLE_DEVICES will say, a GPU each.

    Args:
        asked: numbers among the GPUs that this process sees, comma-separated; `none` or an empty text for the CPU; None
            for all.

    Raises:
        ValueError: a GPU that is not there, or is named twice.
    """
    import torch

    count = torch.cuda.device_count()
    named = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    names = named[:count] if named else [str(number) for number in range(count)]
    if asked is None:
        return tuple(names)
    wanted = [] if asked.strip() in ("", "none") else [each.strip() for each in asked.split(",")]
    for each in wanted:
        if not each.isdigit() or int(each) >= count or wanted.count(each) > 1:
            raise ValueError(
                f"--gpus {asked}: {each!r} is not one of the {count} GPUs here, each named once, from 0 on."
            )
    return tuple(names[int(each)] for each in wanted)
