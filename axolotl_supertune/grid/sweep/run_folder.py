"""A run's folder: preparing it for a training, checking its checkpoints, and reading the end of its log."""

import json
import shutil
from pathlib import Path
from typing import Any

import yaml

from ...method.atomic_files import whole_file
from ...plugin.plugin import NORMS_FILE
from ..run_files import RUN_FILE, SCORES_FILE, last_words

LOG_FILE = "log.txt"
ADAPTER_FOLDER = "adapter"
# Lines of the log that a failed run is recorded with.
_TAIL = 30


def make_ready(folder: Path, *, resumable: bool) -> None:
    """Remove what an earlier training left, but for whole checkpoints and the log if the run can resume from them."""
    for name in (RUN_FILE, SCORES_FILE):
        (folder / name).unlink(missing_ok=True)
    for checkpoint in checkpoints(folder):
        if not is_whole(checkpoint):
            shutil.rmtree(checkpoint)
    if not (resumable and checkpoints(folder)):
        shutil.rmtree(folder / ADAPTER_FOLDER, ignore_errors=True)
        (folder / LOG_FILE).unlink(missing_ok=True)


def checkpoints(folder: Path) -> list[Path]:
    """The checkpoints of a run, whole or not."""
    return [path for path in (folder / ADAPTER_FOLDER).glob("checkpoint-*") if path.name.rpartition("-")[2].isdigit()]


def last_step(folder: Path) -> int:
    """The step of the latest whole checkpoint; 0 without one."""
    return max((int(path.name.rpartition("-")[2]) for path in checkpoints(folder) if is_whole(path)), default=0)


def is_whole(checkpoint: Path) -> bool:
    """Whether a checkpoint is complete, with the optimizer's and the schedule's state.

    Without these states, which `save_only_model` omits, the Trainer would restart the learning rate schedule.
    """
    if not all((checkpoint / name).is_file() for name in ("optimizer.pt", "scheduler.pt")):
        return False
    try:
        json.loads((checkpoint / "trainer_state.json").read_text(encoding="utf-8"))  # the Trainer writes it last
    except (OSError, ValueError):
        return False
    return True


def has_weights(folder: Path) -> bool:
    """Whether the folder holds a trained model or adapter."""
    return any(path.name != NORMS_FILE for path in (folder / ADAPTER_FOLDER).glob("*.safetensors"))


def as_yaml(settings: dict[str, Any]) -> str:
    """The text of a run's config.yml."""
    return yaml.safe_dump(settings, sort_keys=False, allow_unicode=True, width=100)


def write(path: Path, text: str) -> None:
    """Write a text file that is whole or absent."""
    with whole_file(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def tail(log: Path, code: int) -> str:
    """How a process ended, and the last lines of its log.

    Args:
        code: the exit code; negative for a signal.
    """
    ended = f"signal {-code}" if code < 0 else f"exit code {code}"
    text = log.read_text(encoding="utf-8", errors="replace") if log.is_file() else ""
    # Progress bars overwrite a line with carriage returns.
    lines = [line.rpartition("\r")[2] for line in text.rstrip().split("\n")]
    return "\n".join([f"ended with {ended}", *lines[-_TAIL:]])


def last_line(log: Path, code: int) -> str:
    """A failure in one line: how the process ended, the last line of its log, and the log's path."""
    ended, _, lines = tail(log, code).partition("\n")
    return f"{ended}: {last_words(lines)} ({log})"
