"""How activation norms were made, compared with the calibration keys of a YAML."""

from collections.abc import Iterator, Mapping
from typing import Any

from ..method.config_error import ConfigError
from .yaml_values import integer

FIELDS = ("dataset", "split", "text_field", "seed", "samples", "sequence_len")
"""Entries of a provenance that a key `calibration_NAME` of the YAML sets."""


def calibration_differences(
    cfg: Mapping[str, Any], made: Mapping[str, Any], maximum: int | None
) -> Iterator[tuple[str, Any]]:
    """Yield (name, value in the provenance or None) for every calibration key that asks for something else.

    Args:
        cfg: the YAML; keys that are not set ask for nothing.
        made: the provenance of some norms.
        maximum: the longest window that the model takes, in tokens, to which calibration_sequence_len is cut.
    """
    for name in FIELDS:
        asked = integer(cfg, f"calibration_{name}")
        if name == "sequence_len" and asked is not None and maximum is not None:
            asked = min(asked, maximum)
        if asked is not None and asked != made.get(name):
            yield name, made.get(name)


def check_provenance(cfg: Mapping[str, Any], made: Mapping[str, Any], maximum: int | None) -> None:
    """Refuse `calibration_path` beside calibration keys, unless its norms were made as those say.

    Args:
        cfg, made, maximum: as in `calibration_differences`.

    Raises:
        ConfigError: names the key, its value, and what the file says.
    """
    for name, value in calibration_differences(cfg, made, maximum):
        key = f"calibration_{name}"
        raise ConfigError(
            key,
            f"{cfg[key]} beside calibration_path: {cfg['calibration_path']}, whose norms were made with "
            f"{'an unknown one' if value is None else value}. Drop the key to use them, or calibrate anew: axolotl "
            "supertune calibrate CONFIG --overwrite, or without calibration_path.",
        )
