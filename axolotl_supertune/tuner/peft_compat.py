"""Make PEFT know SUPRA. PEFT has no hook for methods outside its tree: the enum of types is extended first."""

from typing import Any

from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
from peft.utils import register_peft_method
from peft.utils.peft_types import PeftType

NAME = "SUPRA"


def peft_type() -> PeftType:
    """`PeftType.SUPRA`, added to the enum at the first call; value equals name, so pickle and JSON round-trip."""
    if NAME not in PeftType.__members__:
        member = str.__new__(PeftType, NAME)
        member._name_ = NAME
        member._value_ = NAME
        member.__objclass__ = PeftType
        member._sort_order_ = len(PeftType.__members__)
        PeftType._member_names_.append(NAME)
        PeftType._member_map_[NAME] = member
        PeftType._value2member_map_[NAME] = member
        type.__setattr__(PeftType, NAME, member)
    return PeftType[NAME]


def register(config_cls: Any, model_cls: Any) -> None:
    """Register the method once; later calls do nothing."""
    if peft_type() not in PEFT_TYPE_TO_CONFIG_MAPPING:
        register_peft_method(name=NAME.lower(), config_cls=config_cls, model_cls=model_cls, prefix=model_cls.prefix)
