"""Errors about one key of a YAML: they carry the key, so that callers need not read it out of the message."""

from typing import Any


class _KeyedError(Exception):
    """Base of the two errors below.

    Args:
        path: the key, or the way to it: `supra_lambda`, `datasets[0].path`, `fsdp_config.offload_params`.
        text: the rest of the message: the value, what is wrong with it, and the remedy. The message is "path: text".

    Attributes:
        path: as given.
        key: the top-level key: `datasets` of `datasets[0].path`.
    """

    def __init__(self, path: str, text: str) -> None:
        super().__init__(f"{path}: {text}")
        self.path, self.text = path, text

    @property
    def key(self) -> str:
        return self.path.partition(".")[0].partition("[")[0]

    def __str__(self) -> str:
        return f"{self.path}: {self.text}"

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.path, self.text)


class ConfigError(_KeyedError, ValueError):
    """A key has a wrong value, contradicts another one, or asks for what is not supported."""


class MissingFileError(_KeyedError, FileNotFoundError):
    """A key names a file or folder that does not exist."""
