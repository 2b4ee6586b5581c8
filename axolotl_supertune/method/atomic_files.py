"""Atomic writes: a file is written to a temporary folder beside its target, flushed to disk, then renamed over it.

A process that is killed leaves its temporary folder, `.saving.…`, behind. The next process that writes there removes
it. A lock in the folder tells whether its owner is alive: on this machine, or on another one if the file system
supports locks across machines.
"""

import contextlib
import errno
import fcntl
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

_PREFIX = ".saving."
_LOCK = "lock"
_REFUSALS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM)


@contextlib.contextmanager
def whole_file(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a temporary path to write to. On success it is renamed to `path`, on an error removed."""
    target = Path(path)
    with staged(target.parent) as folder:
        temporary = folder / target.name
        yield temporary
        put(temporary, target)


@contextlib.contextmanager
def writing(path: str | os.PathLike[str]) -> Iterator[None]:
    """Turn errors of a full disk or missing rights into a ValueError that names the file, the reason and the remedy.

    `path` is named if the error names no file or a temporary one. Other file system errors pass through.
    """
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, SafetensorError) as error:
        number = error.errno if isinstance(error, OSError) else _error_number(str(error))
        if number not in _REFUSALS:
            raise
        filename = getattr(error, "filename", None)
        place = os.fspath(path) if filename is None or _PREFIX in str(filename) else filename
        remedy = "Give this user the rights" if number in (errno.EACCES, errno.EPERM) else "Make room"
        raise ValueError(f"{place}: {os.strerror(number)}. {remedy}, or name another place.") from error


def _error_number(text: str) -> int | None:
    """The errno in the message of a failed write by safetensors, "… (os error 28)", which carries it nowhere else."""
    match = re.search(r"\(os error (\d+)\)", text)
    return int(match[1]) if match else None


def put(written: Path, target: Path) -> None:
    """Flush a finished file to disk and rename it over `target`."""
    flush(written)
    written.replace(target)


def flush(written: Path) -> None:
    """Give a finished file ordinary permissions, and flush it to disk."""
    # safetensors, like mkstemp, creates files that only their owner can read.
    written.chmod(0o666 & ~umask())
    with written.open("rb") as file:
        os.fsync(file.fileno())


def umask() -> int:
    """The umask of this process."""
    mask = os.umask(0)
    os.umask(mask)
    return mask


@contextlib.contextmanager
def staged(parent: Path) -> Iterator[Path]:
    """Context with a new folder inside `parent` to write files in and rename them from; removed at the end."""
    parent.mkdir(parents=True, exist_ok=True)
    _remove_abandoned(parent)
    folder, lock = _locked_folder(parent)
    try:
        (folder / "files").mkdir()
        yield folder / "files"
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _locked_folder(parent: Path) -> tuple[Path, int]:
    while True:
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
        lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        # On a file system without locks, `_remove_abandoned` removes nothing.
        with contextlib.suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX)
        if (folder / _LOCK).exists():
            return folder, lock
        os.close(lock)  # another process removed the folder before the lock was taken


def _remove_abandoned(parent: Path) -> None:
    """Remove the temporary folders of processes that have died."""
    for folder in parent.glob(f"{_PREFIX}*"):
        try:
            lock = os.open(folder / _LOCK, os.O_RDWR)
        except OSError:
            continue  # another kind of folder, or one that is being created or removed
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        except OSError:
            continue  # its owner is alive
        finally:
            os.close(lock)
