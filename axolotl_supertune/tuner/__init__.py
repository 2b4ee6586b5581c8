"""SUPRA as a PEFT tuner: config, model, layer. Importing it registers the method with PEFT (see `peft_compat`)."""

from .checkpoint import extend_saving, read_adapter
from .config import SupraConfig
from .hotswap import hotswap_adapter
from .layer import SupraLayer
from .linear import SupraLinear
from .loading import extend_loading
from .model import SupraModel
from .model_card import extend_model_card
from .peft_compat import register
from .targets import budget_table, target_layers

register(SupraConfig, SupraModel)
extend_saving()
extend_loading()
extend_model_card()

__all__ = [
    "SupraConfig",
    "SupraLayer",
    "SupraLinear",
    "SupraModel",
    "budget_table",
    "hotswap_adapter",
    "read_adapter",
    "target_layers",
]
