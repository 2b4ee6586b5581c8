"""Numbers of a raw YAML, some of which YAML 1.1 reads as strings."""

from collections.abc import Mapping
from typing import Any

from ..method.config_error import ConfigError


def integer(cfg: Mapping[str, Any], key: str) -> Any:
    """The key's value; a string of digits is read as an integer."""
    value = cfg.get(key)
    return int(value) if isinstance(value, str) and value.strip().lstrip("-").isdigit() else value


def number(cfg: Mapping[str, Any], key: str) -> Any:
    """The key's value; a string such as `1e-3`, which is no number to YAML 1.1, is read as a float.

    Raises:
        ConfigError: the string is not a number.
    """
    value = cfg.get(key)
    if not isinstance(value, str):
        return value
    try:
        return float(value)
    except ValueError:
        raise ConfigError(key, f"{value} is not a number.") from None
