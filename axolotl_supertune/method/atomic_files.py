"""Files and folders that are whole or absent: written in a folder beside their name, flushed, then renamed over it.

A process that is killed leaves its folder, `.saving.…`. The next one that writes there removes it: the folder's lock
says whether its owner lives, on this machine or, where the file system locks across them, on another.
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
    """Yield a name on `path`'s file system; on success what is there becomes `path`, on any error it is removed."""
    target = Path(path)
    with staged(target.parent) as folder:
        temporary = folder / target.name
        yield temporary
        put(temporary, target)


@contextlib.contextmanager
def writing(path: str | os.PathLike[str]) -> Iterator[None]:
    """Turn what the disk or its rights refuse inside into a ValueError that names the file, the reason and the remedy.

    `path` is the file of which the error names a temporary one, or none. Other errors of the file system pass.
    """
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, SafetensorError) as error:
        number = error.errno if isinstance(error, OSError) else _error_number(str(error))
        if number not in _REFUSALS:
            raise
        named = getattr(error, "filename", None)
        place = os.fspath(path) if named is None or _PREFIX in str(named) else named
        remedy = "Give this user the rights" if number in (errno.EACCES, errno.EPERM) else "Make room"
        raise ValueError(f"{place}: {os.strerror(number)}. {remedy}, or name another place.") from error


def _error_number(text: str) -> int | None:
    """Of what safetensors tells of a failed write: "… (os error 28)"."""
    found = re.search(r"\(os error (\d+)\)", text)
    return int(found[1]) if found else None


def put(written: Path, target: Path) -> None:
    """Rename a finished file over `target`, on disk before it has the name."""
    flush(written)
    written.replace(target)


def flush(written: Path) -> None:
    """Make a finished file an ordinary one, and have it on disk."""
    # safetensors (as mkstemp) makes files that their owner alone can read; a finished one is an ordinary file.
    written.chmod(0o666 & ~umask())
    with written.open("rb") as file:
        os.fsync(file.fileno())


def umask() -> int:
    """The mode bits that new files of this process do not get."""
    mask = os.umask(0)
    os.umask(mask)
    return mask


@contextlib.contextmanager
def staged(parent: Path) -> Iterator[Path]:
    """A new folder inside `parent`, to write in and rename from; removed afterwards, with what is left in it."""
    parent.mkdir(parents=True, exist_ok=True)
    _remove_left(parent)
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
        # Where nothing can be locked, nothing is removed either.
        with contextlib.suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX)
        if (folder / _LOCK).exists():
            return folder, lock
        os.close(lock)  # another process found the lock before it was held


def _remove_left(parent: Path) -> None:
    for folder in parent.glob(f"{_PREFIX}*"):
        try:
            lock = os.open(folder / _LOCK, os.O_RDWR)
        except OSError:
            continue  # not one of these, or being made, or being removed
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        except OSError:
            continue  # its owner lives
        finally:
            os.close(lock)
