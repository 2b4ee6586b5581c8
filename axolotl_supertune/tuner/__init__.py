"""SUPRA as a PEFT tuner: config, model, layer. Importing it registers the method with PEFT."""

from .checkpoint import read_adapter, save_whole
from .config import SupraConfig
from .hotswap import hotswap_adapter
from .layer import SupraLayer
from .linear import SupraLinear
from .loading import load_whole
from .model import SupraModel, budget_table, target_layers
from .model_card import write_cards
from .peft_compat import register

register(SupraConfig, SupraModel)
save_whole()
load_whole()
write_cards()

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
