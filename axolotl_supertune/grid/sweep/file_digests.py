"""sha256 of the local files that runs read, so that changed files of the same name are noticed."""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ...method.calibration_data import TRAINING_SET


class FileDigests:
    """sha256 of files and folders; each is read once, so that all stages of a sweep see it as it was at the start."""

    def __init__(self) -> None:
        self._digests: dict[str, str | None] = {}

    def of(self, paths: Iterable[str]) -> dict[str, str]:
        """Digests by path, of the paths that exist locally; datasets on the hub are left out.

        Raises:
            OSError: a file cannot be read.
        """
        digests = {path: self._of(path) for path in paths}
        return {path: digest for path, digest in digests.items() if digest is not None}

    def _of(self, name: str) -> str | None:
        if name not in self._digests:
            path = Path(name)
            self._digests[name] = _of_folder(path) if path.is_dir() else _of_file(path) if path.is_file() else None
        return self._digests[name]


def digest(content: Any) -> str:
    """Twelve hexadecimal digits of a JSON-like value, to name what is made from it."""
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()[:12]


def data_paths(settings: Mapping[str, Any], keys: tuple[str, ...] = ("datasets", "test_datasets")) -> list[str]:
    """The paths and data_files of a YAML's datasets."""
    return [path for key in keys for dataset in settings.get(key) or () for path in _paths_of(dataset)]


def calibration_paths(settings: Mapping[str, Any]) -> list[str]:
    """The files on which a YAML's activation norms are measured."""
    source = settings.get("calibration_dataset")
    if source == TRAINING_SET:
        return data_paths(settings, ("datasets",))
    return [source] if isinstance(source, str) else []


def _paths_of(dataset: Any) -> Iterator[str]:
    if isinstance(dataset, Mapping):
        files = dataset.get("data_files")
        for name in (dataset.get("path"), *(files if isinstance(files, (list, tuple)) else [files])):
            if isinstance(name, str):
                yield name


def _of_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _of_folder(folder: Path) -> str:
    """Digest of the names and contents of all files in a folder, but for what `datasets` writes beside its data."""
    combined = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        relative = path.relative_to(folder)
        is_cache = path.name.startswith("cache-") or path.suffix == ".lock"
        is_hidden = any(part.startswith(".") for part in relative.parts)
        if path.is_file() and not is_cache and not is_hidden:
            combined.update(f"{relative.as_posix()} {_of_file(path)}\n".encode())
    return combined.hexdigest()
