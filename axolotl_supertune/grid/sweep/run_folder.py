"""A run's folder: what it holds of an attempt to train, and what is left of it for the next one."""

import json
import shutil
from pathlib import Path
from typing import Any

import yaml

from ...method.atomic_files import whole_file
from ...plugin.plugin import NORMS_FILE
from ..records import RUN_FILE, SCORES_FILE, last_words

LOG_FILE = "log.txt"
ADAPTER_FOLDER = "adapter"
_TAIL = 30
"""Lines of the log that a failed run is recorded with."""


def make_ready(folder: Path, *, resumable: bool) -> None:
    """Leave of an earlier attempt what a new one goes on from: whole checkpoints of the same YAML, or nothing."""
    for name in (RUN_FILE, SCORES_FILE):
        (folder / name).unlink(missing_ok=True)
    for checkpoint in checkpoints(folder):
        if not is_whole(checkpoint):
            shutil.rmtree(checkpoint)
    if not (resumable and checkpoints(folder)):
        shutil.rmtree(folder / ADAPTER_FOLDER, ignore_errors=True)
        (folder / LOG_FILE).unlink(missing_ok=True)


def checkpoints(folder: Path) -> list[Path]:
    """Of a run, whole or not."""
    return [path for path in (folder / ADAPTER_FOLDER).glob("checkpoint-*") if path.name.rpartition("-")[2].isdigit()]


def is_whole(checkpoint: Path) -> bool:
    """Whether the Trainer had written all of it, the states among it without which it would begin the schedule anew."""
    if not all((checkpoint / name).is_file() for name in ("optimizer.pt", "scheduler.pt")):
        return False  # save_only_model leaves them out
    try:
        json.loads((checkpoint / "trainer_state.json").read_text(encoding="utf-8"))  # the Trainer writes it last
    except (OSError, ValueError):
        return False
    return True


def holds_weights(folder: Path) -> bool:
    """Whether there is a trained model or adapter."""
    return any(path.name != NORMS_FILE for path in (folder / ADAPTER_FOLDER).glob("*.safetensors"))


def as_yaml(settings: dict[str, Any]) -> str:
    """A run's config.yml."""
    return yaml.safe_dump(settings, sort_keys=False, allow_unicode=True, width=100)


def write(path: Path, text: str) -> None:
    """A file that is whole or absent."""
    with whole_file(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def tail(log: Path, code: int) -> str:
    """How a process ended, and the last lines that it printed."""
    ended = f"signal {-code}" if code < 0 else f"exit code {code}"
    text = log.read_text(encoding="utf-8", errors="replace") if log.is_file() else ""
    # Progress bars overwrite a line with carriage returns.
    lines = [line.rpartition("\r")[2] for line in text.rstrip().split("\n")]
    return "\n".join([f"ended with {ended}", *lines[-_TAIL:]])


def last_line(log: Path, code: int) -> str:
    """What to print of a failure: how the process ended, the last line, and where the others are."""
    ended, _, lines = tail(log, code).partition("\n")
    return f"{ended}: {last_words(lines)} ({log})"
