"""Chooses the implementation of a layer: the Triton kernels where they support it, else the reference.

Each choice of the reference on a CUDA device has a reason, which is warned about once or, with
SUPERTUNE_KERNELS=triton, raised.
"""

import functools
import importlib.util
import os
import warnings
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ..method.sizes import KERNELS_VARIABLE
from .reference import LowRank, Sparse, autocast_dtype

_BACKENDS = ("auto", "triton", "reference")
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_MAX_RANK = 128
_warned: set[str] = set()


def requested() -> str:
    """The value of SUPERTUNE_KERNELS: `auto` (default), `triton` or `reference`.

    Raises:
        ValueError: any other value.
    """
    backend = os.environ.get(KERNELS_VARIABLE, "auto") or "auto"
    if backend not in _BACKENDS:
        raise ValueError(f"{KERNELS_VARIABLE}={backend} is not one of {', '.join(_BACKENDS)}.")
    return backend


def unsupported_device_reason(device: torch.device, dtype: torch.dtype) -> str | None:
    """The reason why the Triton kernels do not run on this device in this dtype, or None where they do."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if dtype not in _DTYPES:
        return f"the kernels compute in fp16, bf16 or fp32, not {dtype}"
    if device.type == "cuda":
        oldest = (8, 0) if dtype == torch.bfloat16 else (7, 0)  # compute capability
        if torch.version.hip is None and torch.cuda.get_device_capability(device) < oldest:
            return f"{dtype} needs a GPU of compute capability {oldest[0]}.{oldest[1]} or newer"
        return None
    if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1" and requested() == "triton":
        return None
    return f"the kernels run on CUDA devices, not on {device.type}"


def describe_implementation(device: torch.device, dtype: torch.dtype, rank: int) -> str:
    """One line for a log: the implementation of adapted layers of this rank, on this device, in this dtype.

    Raises:
        RuntimeError: SUPERTUNE_KERNELS=triton and the kernels do not support them.
    """
    backend = requested()
    if backend == "reference":
        return f"reference ({KERNELS_VARIABLE}=reference)"
    reason = unsupported_device_reason(device, dtype)
    if reason is None and rank > _MAX_RANK:
        reason = f"rank {rank} is above {_MAX_RANK}"
    if reason is None:
        return f"Triton, on {device}"
    if backend == "triton":
        raise RuntimeError(f"{KERNELS_VARIABLE}=triton, but the Triton kernels cannot compute this model: {reason}.")
    return f"reference, not Triton: {reason}"


def takes_kernels(
    x: Tensor,
    weight: Tensor,
    sparse: Sequence[Sparse],
    low_rank: Sequence[LowRank],
    *,
    layer: str,
) -> bool:
    """Whether the Triton kernels compute a layer with these active parts.

    Args:
        x: the input (..., b).
        weight: (c, b).
        sparse, low_rank: the parts of all active adapters.
        layer: its name, for messages.

    Raises:
        RuntimeError: SUPERTUNE_KERNELS=triton and the kernels do not support the layer.

    Warns:
        UserWarning: once per reason, where a layer on a CUDA device takes the reference without being asked to.
    """
    backend = requested()
    if backend == "reference":
        return False
    reason = unsupported_tensor_reason(x, weight, sparse, low_rank)
    if reason is None:
        reason = _unsupported_device_reason(x.device, compute_dtype(x, weight), backend)
    return _report(reason, x, backend, layer)


def takes_sampled_products(x: Tensor, dtype: torch.dtype, shape: tuple[int, int], *, layer: str) -> bool:
    """Whether the Triton kernels compute dU of a layer whose weight is recomputed (see `recomputed_weight`).

    Args:
        x: the input (..., b).
        dtype: of the products.
        shape: (c, b) of the layer.
        layer: its name, for messages.

    Raises:
        RuntimeError: as `takes_kernels`, which also says when this warns.
    """
    backend = requested()
    if backend == "reference":
        return False
    reason = "the input is empty" if not x.numel() else None
    if min(shape) == 1:
        reason = f"a layer of shape {shape} is left to it"
    return _report(reason or _unsupported_device_reason(x.device, dtype, backend), x, backend, layer)


def _report(reason: str | None, x: Tensor, backend: str, layer: str) -> bool:
    """Whether there is no reason against the kernels; if there is one, raise or warn as the public functions say."""
    if reason is None:
        return True
    if backend == "triton":
        raise RuntimeError(
            f"{layer}: {KERNELS_VARIABLE}=triton, but the Triton kernels cannot compute this layer: {reason}."
        )
    if x.device.type == "cuda" and x.numel() and reason not in _warned:
        _warned.add(reason)
        warnings.warn(f"{layer}: computed by the slower reference path: {reason}.", stacklevel=4)
    return False


def compute_dtype(x: Tensor, weight: Tensor) -> torch.dtype:
    """The dtype of the matrix products: autocast's where it is on, else the weight's."""
    return autocast_dtype(x.device.type) or weight.dtype


def unsupported_tensor_reason(
    x: Tensor, weight: Tensor, sparse: Sequence[Sparse], low_rank: Sequence[LowRank]
) -> str | None:
    """The reason why the Triton kernels do not support these tensors, or None; torch.compile can trace this."""
    if x.device != weight.device:
        return f"the input is on {x.device} and the weight on {weight.device}"
    if weight.requires_grad:
        return "its weight is trainable"
    if len(sparse) > 1 or len(low_rank) > 1:
        return "several adapters are active at once"
    if low_rank and low_rank[0].L.shape[1] > _MAX_RANK:
        return f"rank {low_rank[0].L.shape[1]} is above {_MAX_RANK}"
    if not weight.is_contiguous() or type(weight) not in (nn.Parameter, Tensor):
        return f"its weight is no plain contiguous tensor ({type(weight).__name__})"
    if weight.dtype not in _DTYPES:
        return f"its weight is {weight.dtype}"
    if min(weight.shape) == 1:
        return f"a layer of shape {tuple(weight.shape)} is left to it"
    if x.numel() == 0:
        return "the input is empty"
    return None


@functools.cache
def _unsupported_device_reason(device: torch.device, dtype: torch.dtype, backend: str) -> str | None:
    """`unsupported_device_reason`, cached: every layer on the reference path needs it in every forward."""
    return unsupported_device_reason(device, dtype)
