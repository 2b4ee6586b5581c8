"""Super and Supra: sparse and sparse-plus-low-rank fine-tuning as a PEFT tuner and an Axolotl plugin.

Importing this package loads neither torch, peft nor axolotl; each public name loads what it needs at first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from .method.activation_norms import ActivationNorms
    from .method.calibration_data import calibration_windows
    from .plugin.plugin import SupertunePlugin
    from .tuner import SupraConfig, SupraModel, budget_table, hotswap_adapter
    from .tuner.base_calibration import calibrate

_HOME = {
    "ActivationNorms": ".method.activation_norms",
    "calibrate": ".tuner.base_calibration",
    "calibration_windows": ".method.calibration_data",
    "SupertunePlugin": ".plugin.plugin",
    "SupraConfig": ".tuner",
    "SupraModel": ".tuner",
    "budget_table": ".tuner",
    "hotswap_adapter": ".tuner",
}

__all__ = [
    "ActivationNorms",
    "SupertunePlugin",
    "SupraConfig",
    "SupraModel",
    "__version__",
    "budget_table",
    "calibrate",
    "calibration_windows",
    "hotswap_adapter",
]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOME[name], __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(_HOME))
