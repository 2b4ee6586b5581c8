"""Models that are sharded: what a parameter is as a whole, and whether a layer's weight is here while it computes.

FSDP2 (`fully_shard`) puts DTensors in the place of parameters, and gathers them around the modules that it was called
on. DeepSpeed's ZeRO-3 leaves the parameters what they are, empties them to shape (0,), and gathers them around the
module that owns them, or that was seen to read them: an adapted layer reads the weight of the layer inside it. Under
`zero.Init` they are empty from the start, so that no process ever holds the model.

DeepSpeed is imported only where a parameter of it is at hand.
"""

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


def is_sharded(layer: nn.Module) -> bool:
    """Whether a layer's weight is here only while something gathers it."""
    # `fully_shard` marks what it manages so for torch.compile. Not `layer.weight`: in a forward of DeepSpeed's engine a
    # look at an empty parameter gathers it, and has it gathered ever after with the module that is running.
    return getattr(layer, "_is_fsdp_managed_module", False) or _is_zero3(layer._parameters.get("weight"))


def by_zero3(model: nn.Module) -> bool:
    """Whether ZeRO-3 shards a model: then no process holds a weight, and each must help where one needs it."""
    return any(_is_zero3(parameter) for parameter in model.parameters())


def is_by_zero3(layer: nn.Module) -> bool:
    """Whether ZeRO-3 shards a layer's weight."""
    return _is_zero3(layer._parameters.get("weight"))


def _is_zero3(parameter: Tensor | None) -> bool:
    return hasattr(parameter, "ds_id")


def is_gathered(layer: Any) -> bool:
    """Whether the weight of a sharded layer is whole now. A look at one of ZeRO-3, in a forward, gathers it."""
    weight = layer.weight
    return not isinstance(weight, DTensor) and (not _is_zero3(weight) or weight.ds_status.name == "AVAILABLE")


def gathered_weight(layer: Any, name: str) -> Tensor:
    """The weight (c, b) of a sharded layer, gathered for the forward or the backward of the adapted layer that runs.

    Args:
        layer: a linear layer.
        name: of the adapted layer, for the message.

    Raises:
        RuntimeError: it is not gathered.
    """
    weight: Tensor = layer.weight
    if isinstance(weight, DTensor):
        raise RuntimeError(
            f"{name}: FSDP has not gathered its weight, only this process's shard is here. Call the layer through the "
            "module that fully_shard was applied to, one around the adapter (its decoder layer, or the SupraLinear, "
            "not the linear layer inside: auto_wrap_policy: TRANSFORMER_BASED_WRAP), and let the loss depend on that "
            "module's output; or call that module's unshard() before."
        )
    if _is_zero3(weight) and weight.ds_status.name != "AVAILABLE":  # type: ignore[attr-defined]
        raise RuntimeError(
            f"{name}: ZeRO-3 has not gathered its weight, only this process's part is here. Make the adapter before "
            "deepspeed.initialize, call the SupraLinear and not the linear layer inside, and let the loss depend on "
            "its output."
        )
    return weight


def is_whole(tensor: Tensor) -> bool:
    """Whether all of a tensor is here."""
    return not isinstance(tensor, DTensor) and tensor.shape == shape_of(tensor)


def whole(tensor: Tensor) -> Tensor:
    """A tensor, gathered if it is sharded (then a copy, and every process must call this)."""
    if isinstance(tensor, DTensor):
        return tensor.full_tensor()
    if not _is_zero3(tensor):
        return tensor
    with gathered([tensor]):
        return tensor.detach().clone()


@contextlib.contextmanager
def gathered(parameters: Iterable[Tensor]) -> Iterator[None]:
    """Inside, parameters of ZeRO-3 hold their values, which are to be left as they are; every process must call this.

    Other tensors are left alone.
    """
    emptied = [parameter for parameter in parameters if _is_zero3(parameter)]
    if not emptied:
        yield
        return
    from deepspeed.runtime.zero import GatheredParameters

    with GatheredParameters(emptied):
        yield


def shape_of(tensor: Tensor) -> torch.Size:
    """The shape of the whole tensor."""
    return tensor.ds_shape if _is_zero3(tensor) else tensor.shape  # type: ignore[attr-defined]


def dtype_of(tensor: Tensor) -> torch.dtype:
    """The dtype in which a tensor is kept: of one that ZeRO-3 has emptied, that of the part that is here."""
    part = getattr(tensor, "ds_tensor", None)
    return tensor.dtype if part is None else part.dtype
