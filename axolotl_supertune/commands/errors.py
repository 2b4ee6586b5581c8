"""What a command does with an error that its user can mend: one line and exit code 1, no traceback."""

import contextlib
import errno
from collections.abc import Iterator
from pathlib import Path

import click

from ..method.atomic_files import writing


@contextlib.contextmanager
def user_errors(output: Path | str | None = None) -> Iterator[None]:
    """Turn ValueError and OSError (a missing file, a full disk) into click's error.

    Args:
        output: the file or folder being written. Named when the disk refuses and the error names only a temporary file.

    Raises:
        click.ClickException: with the error's message.
    """
    try:
        with writing(output or "the output"):
            yield
    except (ValueError, OSError) as error:
        if _closed_pipe(error):
            raise
        raise click.ClickException(str(error)) from error


@contextlib.contextmanager
def disk_errors(place: Path | str) -> Iterator[None]:
    """Turn any refusal of the file system into a ValueError that says how to continue a sweep; inside `user_errors`.

    Args:
        place: named if the error names no file, as that of a full disk does.

    Raises:
        ValueError: of an OSError other than a missing file or a closed pipe.
    """
    try:
        yield
    except OSError as error:
        if error.errno is None or isinstance(error, FileNotFoundError) or _closed_pipe(error):
            raise
        raise ValueError(
            f"{error.filename or place}: {error.strerror}. What is done stays, and the same command goes on when that "
            "is mended: make room, or give this grid an output_dir that can be written."
        ) from error


def _closed_pipe(error: Exception) -> bool:
    """Whether stdout was closed, as by `| head`: click then ends the command quietly."""
    return isinstance(error, OSError) and error.errno == errno.EPIPE
