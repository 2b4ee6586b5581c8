"""What the files hold that a run reads: two texts of one name are two."""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ...method.calibration_data import TRAINING_SET


class FileDigests:
    """sha256 of local files and folders, each read once: a sweep is about what they held when it began."""

    def __init__(self) -> None:
        self._read: dict[str, str | None] = {}

    def of(self, paths: Iterable[str]) -> dict[str, str]:
        """By path, of those that are there: names on the hub are not.

        Raises:
            OSError: a file cannot be read.
        """
        found = {path: self._of(path) for path in paths}
        return {path: digest for path, digest in found.items() if digest is not None}

    def _of(self, path: str) -> str | None:
        if path not in self._read:
            place = Path(path)
            self._read[path] = _of_folder(place) if place.is_dir() else _of_file(place) if place.is_file() else None
        return self._read[path]


def digest(found: Any) -> str:
    """Twelve hexadecimal digits, for the name of what is made from this."""
    return hashlib.sha256(json.dumps(found, sort_keys=True, default=str).encode()).hexdigest()[:12]


def data_paths(settings: Mapping[str, Any], keys: tuple[str, ...] = ("datasets", "test_datasets")) -> list[str]:
    """Training and validation data, as a YAML names them."""
    return [path for key in keys for each in settings.get(key) or () for path in _named(each)]


def calibration_paths(settings: Mapping[str, Any]) -> list[str]:
    """What the activation norms of a YAML are measured on."""
    source = settings.get("calibration_dataset")
    if source == TRAINING_SET:
        return data_paths(settings, ("datasets",))
    return [source] if isinstance(source, str) else []


def _named(dataset: Any) -> Iterator[str]:
    if isinstance(dataset, Mapping):
        files = dataset.get("data_files")
        for name in (dataset.get("path"), *(files if isinstance(files, (list, tuple)) else [files])):
            if isinstance(name, str):
                yield name


def _of_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _of_folder(folder: Path) -> str:
    whole = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        inside = path.relative_to(folder)
        # `datasets` writes cache-….arrow, locks and hidden files beside the data that it reads.
        made = path.name.startswith("cache-") or path.suffix == ".lock" or any(p.startswith(".") for p in inside.parts)
        if path.is_file() and not made:
            whole.update(f"{inside.as_posix()} {_of_file(path)}\n".encode())
    return whole.hexdigest()
