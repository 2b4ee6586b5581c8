"""Questions about tensors that may be sharded, answered by the `Sharding` of whichever engine shards them.

FSDP2 replaces parameters with DTensors and gathers them around the modules that `fully_shard` was called on. ZeRO-3
keeps the parameter objects, empties them to shape (0,), and gathers them around the module that owns or reads them.
"""

from typing import Any

import torch
from torch import Tensor, nn

from .engine import Sharding
from .fsdp2 import DTensorSharding
from .zero3 import Zero3Sharding

SHARDINGS: tuple[Sharding, ...] = (DTensorSharding(), Zero3Sharding())
_UNSHARDED = Sharding()
SHARDING_CALLS = "fully_shard, or deepspeed.initialize"
"""What a user calls to have a model sharded, for messages."""


def _of(tensor: Tensor | None) -> Sharding:
    for sharding in SHARDINGS:
        if sharding.matches(tensor):
            return sharding
    return _UNSHARDED


def is_sharded(layer: nn.Module) -> bool:
    """Whether the weight of a layer is whole only while an engine gathers it. Gathers nothing."""
    return any(sharding.manages(layer) for sharding in SHARDINGS)


def gathers_by_hooks(layer: nn.Module) -> bool:
    """Whether the weight is filled only while the layer's own module runs; code elsewhere may read an empty tensor."""
    return any(sharding.gathers_by_hooks and sharding.manages(layer) for sharding in SHARDINGS)


def is_gathered(layer: Any) -> bool:
    """Whether the engine has the weight ready for the pass that runs now.

    In a forward under ZeRO-3 reading `layer.weight` gathers it.
    """
    weight = layer.weight
    return _of(weight).is_gathered(weight)


def gathered_weight(layer: Any, name: str) -> Tensor:
    """The weight (out_features, in_features) of a sharded layer, gathered for the pass that the adapted layer runs in.

    Args:
        layer: a linear layer.
        name: of the adapted layer, for the message.

    Raises:
        RuntimeError: it is not gathered.
    """
    weight: Tensor = layer.weight
    sharding = _of(weight)
    if not sharding.is_gathered(weight):
        raise RuntimeError(f"{name}: {sharding.not_gathered}")
    return weight


def is_whole(tensor: Tensor) -> bool:
    """Whether the tensor is not a shard: it has its full shape here."""
    return _of(tensor).is_whole(tensor)


def whole(tensor: Tensor) -> Tensor:
    """The whole tensor: itself, or gathered into a copy if it is sharded (then every process must call this)."""
    return _of(tensor).whole(tensor)


def shape_of(tensor: Tensor) -> torch.Size:
    """The shape of the whole tensor."""
    return _of(tensor).shape_of(tensor)


def dtype_of(tensor: Tensor) -> torch.dtype:
    """The dtype in which a tensor is stored; that of the shard if ZeRO-3 has emptied the parameter."""
    return _of(tensor).dtype_of(tensor)
