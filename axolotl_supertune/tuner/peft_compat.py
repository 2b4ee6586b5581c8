"""Everything that reaches into PEFT's internals, or differs between its versions (0.20 and 0.21), in one place.

PEFT has no hook for a method outside its own tree. Importing `axolotl_supertune.tuner` therefore

- adds SUPRA to the enum `PeftType` and to PEFT's tables of methods (`register`);
- replaces `save_pretrained`, `load_adapter` and `create_or_update_model_card` of `PeftModel` by functions that call the
  original at once unless the model has a SUPRA adapter (`extend`);
- replaces `PeftModel.from_pretrained` by a function that calls the original inside a context, which does nothing until
  a SUPRA adapter is put into the model (`extend_from_pretrained`).

Each section says what it reaches into, what would break, and which test tells. This module imports nothing else of the
tuner.
"""

import copy
import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from peft import PeftModel
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING

# A private module of PEFT, for VeRA and others. Without it the tuner, and so every test of it, fails at import.
from peft.tuners._buffer_dict import BufferDict
from peft.tuners.tuners_utils import BaseTuner, _maybe_include_all_linear_layers, check_target_module_exists
from peft.utils import register_peft_method
from peft.utils.peft_types import PeftType
from torch import Tensor, nn

__all__ = [
    "BufferDict",
    "CompatTuner",
    "extend",
    "extend_from_pretrained",
    "has_supra_adapter",
    "peft_type",
    "register",
    "requires_grad_kept",
    "target_matcher",
]

NAME = "SUPRA"


# The enum of methods. Reaches into the attributes of Python's `Enum`; a change there would break the look-ups
# PeftType.SUPRA and PeftType("SUPRA"), pickles and JSON.
# Test: test_tuner.py::test_peft_type_survives_pickle_and_deepcopy.
def peft_type() -> PeftType:
    """`PeftType.SUPRA`, added to the enum at the first call. Its value is its name, so pickle and JSON round-trip."""
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
    """Register the method with PEFT; later calls do nothing."""
    if peft_type() not in PEFT_TYPE_TO_CONFIG_MAPPING:
        register_peft_method(name=NAME.lower(), config_cls=config_cls, model_cls=model_cls, prefix=model_cls.prefix)


def has_supra_adapter(model: PeftModel) -> bool:
    """Whether one of the adapters of a `PeftModel` is SUPRA's."""
    return any(config.peft_type == NAME for config in model.peft_config.values())


# PeftModel's methods. The originals keep their signatures and do their work; the replacements only act before and after
# it. A renamed method raises AttributeError at import. Tests: test_peft_compat.py (other methods pass through at no
# cost), test_checkpoint.py, test_several.py::test_a_refused_load_leaves_the_model_as_it_was, test_model_card.py.
def extend(name: str, replacement: Callable[..., Any]) -> None:
    """Replace `PeftModel.<name>` for models with a SUPRA adapter; for others the original is called at once.

    Args:
        name: of the method.
        replacement: (original, model, *args, **kwargs) → what the method returns.
    """
    original = getattr(PeftModel, name)
    if hasattr(original, "extended_for_supra"):
        return

    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not has_supra_adapter(self):
            return original(self, *args, **kwargs)
        return replacement(original, self, *args, **kwargs)

    method.extended_for_supra = True  # type: ignore[attr-defined]
    setattr(PeftModel, name, method)


def extend_from_pretrained(context: Callable[[nn.Module], AbstractContextManager[None]]) -> None:
    """Have `PeftModel.from_pretrained` run inside `context(model)`, for every method: only the file tells which it is.

    Args:
        context: made of the base model; must cost nothing unless the adapter is SUPRA's.
    """
    bound: Any = PeftModel.from_pretrained
    if hasattr(bound, "extended_for_supra"):
        return
    original = bound.__func__

    @functools.wraps(original)
    def from_pretrained(cls: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        with context(model):
            return original(cls, model, *args, **kwargs)

    from_pretrained.extended_for_supra = True  # type: ignore[attr-defined]
    PeftModel.from_pretrained = classmethod(from_pretrained)


# Target modules. PEFT decides before a layer is replaced which layers match, with two functions, one of them private;
# the budget of all layers must be known before that.
# Tests: test_tuner.py::test_default_is_every_linear_layer_but_the_head, test_several.py::test_targets_are_exact.
def target_matcher(config: Any, model: nn.Module) -> Callable[[str], bool]:
    """A function that tells whether PEFT would adapt the module of this name."""
    matching = _maybe_include_all_linear_layers(copy.copy(config), model)
    return lambda name: bool(name) and bool(check_target_module_exists(matching, name))


# When an adapter is loaded for inference, PEFT 0.20 freezes the other adapters; 0.21 does not.
# Test: test_several.py::test_an_adapter_that_is_loaded_leaves_the_others_trained_or_frozen_as_they_were.
@contextmanager
def requires_grad_kept(model: nn.Module, *, enabled: bool) -> Iterator[None]:
    """Context in which an adapter is added; afterwards every earlier parameter is trained or frozen as before.

    Args:
        model: the model.
        enabled: False for the first adapter, at which PEFT freezes the base.
    """
    flags = [(parameter, parameter.requires_grad) for parameter in model.parameters()] if enabled else []
    yield
    for parameter, is_trained in flags:
        parameter.requires_grad_(is_trained)


class CompatTuner(BaseTuner):
    """`BaseTuner` with the methods that PEFT calls by private names or that differ between its versions."""

    # Called by PeftModel.forward and generate with their arguments. Without it PEFT drops `adapter_names` and computes
    # the batch with the active adapter. Test: test_tuner.py::test_mixed_adapters_in_one_batch_are_refused.
    def _enable_peft_forward_hooks(self, *args: Any, **kwargs: Any) -> AbstractContextManager[None]:
        if kwargs.get("adapter_names") is not None:
            raise ValueError(self.mixed_batch_error(kwargs["adapter_names"]))
        return nullcontext()

    # PEFT ≥ 0.21 filters a state dict by the names of the model's tensors before it is loaded, which would drop the
    # packed ones of a file. 0.20 does not have these two methods.
    # Test: test_checkpoint.py, every load of a saved adapter, with PEFT 0.21.
    @classmethod
    def _get_adapter_state_dict(cls, *args: Any, state_dict: dict[str, Any], adapter_name: str, **kwargs: Any) -> Any:
        tensors = super()._get_adapter_state_dict(*args, state_dict=state_dict, adapter_name=adapter_name, **kwargs)
        return tensors | {key: state_dict[key] for key in state_dict if cls.is_packed(key, adapter_name)}

    @classmethod
    def _remap_adapter_state_dict_for_load(cls, *args: Any, state_dict: dict[str, Any], **kwargs: Any) -> Any:
        cls.unpack(state_dict)
        return super()._remap_adapter_state_dict_for_load(*args, state_dict=state_dict, **kwargs)

    # Test: test_several.py::test_deleting_a_merged_adapter_is_refused_and_deletes_nothing.
    def delete_adapter(self, adapter_name: str) -> None:
        """Remove an adapter.

        Raises:
            ValueError: it does not exist, or it is merged (in the words of PEFT 0.21; 0.20 would delete it).
        """
        if any(adapter_name in layer.merged_adapters for layer in self.adapted_layers()):
            raise ValueError(
                f"Cannot delete adapter(s) {[adapter_name]} while they are merged. Please unmerge them first."
            )
        super().delete_adapter(adapter_name)

    def adapted_layers(self) -> list[Any]:
        """The adapted layers of the model."""
        raise NotImplementedError

    @staticmethod
    def mixed_batch_error(adapter_names: Any) -> str:
        """The message for a batch of several adapters."""
        raise NotImplementedError

    @staticmethod
    def is_packed(key: str, adapter_name: str) -> bool:
        """Whether a key of a file's state dict is a tensor that only files have."""
        raise NotImplementedError

    @staticmethod
    def unpack(state_dict: dict[str, Tensor]) -> None:
        """Replace a file's packed tensors by those that the model has, in place."""
        raise NotImplementedError
