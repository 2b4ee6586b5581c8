"""Files of the command line: the YAML that a command takes, the JSON that it writes."""

import json
import math
from pathlib import Path
from typing import Any

import yaml

from ..method.atomic_files import whole_file


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file.

    Raises:
        ValueError: it is no YAML file, or holds no mapping.
    """
    try:
        mapping = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ValueError(f"{path}: not a YAML file: {error}") from error
    if not isinstance(mapping, dict):
        raise ValueError(f"{path}: not a YAML of keys.")
    return mapping


def write_json(path: Path, value: Any) -> None:
    """Write a value as JSON, whole or not at all; NaN and ±∞, which JSON does not have, become null.

    Raises:
        OSError: the file cannot be written.
    """
    text = json.dumps(_finite(value), indent=2, ensure_ascii=False, allow_nan=False, default=str)
    with whole_file(path) as temporary:
        temporary.write_text(text + "\n", encoding="utf-8")


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
