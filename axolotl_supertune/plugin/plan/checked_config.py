"""The config that training would have, and every error that it would raise before the model is loaded.

What is refused is removed and the rest is checked again, so that all refusals are named and the rest can be planned.
"""

import contextlib
import copy
import logging
import os
from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass, field
from typing import Any

from axolotl.utils.dict import DictDefault
from pydantic import ValidationError

from ...engines import KEYS
from ...method.config_error import ConfigError, MissingFileError
from .. import axolotl_compat, validation
from ..args import SupertuneArgs
from ..plugin import planning

# Keys that decide the budgets: without them there is nothing to plan.
_BUDGET_KEYS = {*SupertuneArgs.model_fields, *validation.SHARED_KEYS, "adapter", "base_model"}


@dataclass
class CheckedConfig:
    """A config after all checks.

    Attributes:
        cfg: the config as training would have it, without the keys that are refused.
        refusals: the messages of the errors, in the order in which they would come up.
        removed: the keys that are refused, with their values.
    """

    cfg: Any
    refusals: list[str] = field(default_factory=list)
    removed: dict[str, Any] = field(default_factory=dict)


def checked_config(raw: MutableMapping[str, Any], gpus: int) -> CheckedConfig:
    """Check a YAML as training with so many processes would.

    Args:
        raw: the YAML's mapping, which is left as it is.
        gpus: how many processes train, one a GPU.

    Raises:
        ValueError: the adapter is another one, or a key that decides the budgets is refused.
        MissingFileError: a key that decides the budgets names a file that does not exist.
    """
    _check_plannable(raw)
    with _quiet():
        return _checked(raw, gpus)


def _checked(raw: MutableMapping[str, Any], gpus: int) -> CheckedConfig:
    axolotl_compat.register_plugins(raw.get("plugins") or [])
    known = axolotl_compat.config_keys(axolotl_compat.registered_argument_classes())
    refusals: list[str] = []
    left = copy.deepcopy(dict(raw))
    while True:
        cfg = DictDefault(copy.deepcopy(left))
        try:
            with _world_size(gpus):
                validation.prepare(cfg, known)
            break
        except (ConfigError, MissingFileError) as error:
            refusals.append(str(error))
            left = _without(left, error)
    with planning(), _world_size(1):  # checks of the number of processes have run above
        cfg = _validated(cfg, gpus, refusals)
    return CheckedConfig(cfg, refusals, {key: value for key, value in raw.items() if key not in left})


def _validated(cfg: Any, gpus: int, refusals: list[str]) -> Any:
    """The config after Axolotl's validation; what it refuses is added to `refusals`.

    Values of a wrong type are removed, so that nothing is computed with them, and the rest is validated again.
    Validation changes the config that it is given, also one that it then refuses: it is given a copy.
    """
    for _ in range(2):
        try:
            return axolotl_compat.validated(copy.deepcopy(cfg), gpus)
        except ValidationError as error:
            for each in error.errors():
                place = ".".join(str(part) for part in each["loc"])
                refusals.append(f"{place}: {each['input']}: {each['msg']}." if place else each["msg"])
            wrong = {str(each["loc"][0]) for each in error.errors() if each["loc"]} - _BUDGET_KEYS
            cfg = DictDefault({key: value for key, value in cfg.items() if key not in wrong})
            if not wrong:
                break
        except (ValueError, ImportError) as error:
            refusals.append(str(error))
            break
    return cfg


def _check_plannable(raw: MutableMapping[str, Any]) -> None:
    if raw.get("adapter") not in validation.ADAPTERS:
        remedy = ""
        if isinstance(raw.get("methods"), dict):
            remedy = " This is a file of a grid: `axolotl supertune sweep GRID --dry-run` checks the YAMLs of its runs."
        raise ConfigError("adapter", f"{raw.get('adapter')}: only supra and super are planned.{remedy}")
    if not raw.get("base_model"):
        raise ConfigError("base_model", "the config names none.")


def _without(left: dict[str, Any], error: ConfigError | MissingFileError) -> dict[str, Any]:
    """The config without the key at fault; raises the error if the budgets depend on that key.

    A mode or a file that training refuses leaves the rest worth planning; a wrong budget does not.
    """
    if error.key in KEYS:  # those of an engine only make sense together
        return {key: value for key, value in left.items() if key not in KEYS}
    removable = error.key not in _BUDGET_KEYS or error.key.startswith("calibration_")
    if error.key not in left or not removable:
        raise error
    return {key: value for key, value in left.items() if key != error.key}


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Leave out what Axolotl logs of its progress; warnings stay."""
    before = logging.root.manager.disable
    logging.disable(max(before, logging.INFO))
    try:
        yield
    finally:
        logging.disable(before)


@contextlib.contextmanager
def _world_size(processes: int) -> Iterator[None]:
    """Set the number of processes that the checks see."""
    before = os.environ.get("WORLD_SIZE")
    os.environ["WORLD_SIZE"] = str(processes)
    try:
        yield
    finally:
        if before is None:
            del os.environ["WORLD_SIZE"]
        else:
            os.environ["WORLD_SIZE"] = before
