"""Which implementation computes a layer: the Triton kernels where they can, else the reference, never in silence."""

import functools
import importlib.util
import os
import warnings
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from .reference import LowRank, Sparse, autocast_dtype

VARIABLE = "SUPERTUNE_KERNELS"
_CHOICES = ("auto", "triton", "reference")
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_MAX_RANK = 128
_warned: set[str] = set()


def requested() -> str:
    """What SUPERTUNE_KERNELS asks for: `auto` (default), `triton` or `reference`.

    Raises:
        ValueError: it is something else.
    """
    asked = os.environ.get(VARIABLE, "auto") or "auto"
    if asked not in _CHOICES:
        raise ValueError(f"{VARIABLE}={asked} is not one of {', '.join(_CHOICES)}.")
    return asked


def unsupported_device_reason(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why the Triton kernels do not run on this device with this dtype, or None."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if dtype not in _DTYPES:
        return f"the kernels compute in fp16, bf16 or fp32, not {dtype}"
    if device.type == "cuda":
        oldest = (8, 0) if dtype == torch.bfloat16 else (7, 0)
        if torch.version.hip is None and torch.cuda.get_device_capability(device) < oldest:
            return f"{dtype} needs a GPU of compute capability {oldest[0]}.{oldest[1]} or newer"
        return None
    if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1" and requested() == "triton":
        return None
    return f"the kernels run on CUDA devices, not on {device.type}"


def described(device: torch.device, dtype: torch.dtype, rank: int) -> str:
    """One line for a log: what computes the adapted layers of this rank on this device in this dtype.

    Raises:
        RuntimeError: SUPERTUNE_KERNELS=triton and the kernels cannot.
    """
    asked = requested()
    if asked == "reference":
        return f"reference ({VARIABLE}=reference)"
    reason = unsupported_device_reason(device, dtype)
    if reason is None and rank > _MAX_RANK:
        reason = f"rank {rank} is above {_MAX_RANK}"
    if reason is None:
        return f"Triton, on {device}"
    if asked == "triton":
        raise RuntimeError(f"{VARIABLE}=triton, but the Triton kernels cannot compute this model: {reason}.")
    return f"reference, not Triton: {reason}"


def takes_kernels(
    x: Tensor,
    weight: Tensor,
    sparse: Sequence[Sparse],
    low_rank: Sequence[LowRank],
    *,
    layer: str,
) -> bool:
    """Whether a layer with these active parts is computed by the Triton kernels.

    Args:
        layer: its name, for messages.

    Raises:
        RuntimeError: SUPERTUNE_KERNELS=triton and it cannot be.

    Warns:
        UserWarning: once per reason, where a CUDA device takes the reference path without having been asked to.
    """
    asked = requested()
    if asked == "reference":
        return False
    reason = unsupported_tensor_reason(x, weight, sparse, low_rank)
    if reason is None:
        reason = _unsupported_device_reason(x.device, compute_dtype(x, weight), asked)
    return _decided(reason, x, asked, layer)


def takes_sampled_products(x: Tensor, dtype: torch.dtype, shape: tuple[int, int], *, layer: str) -> bool:
    """Whether the gradient of U of a layer that keeps no weight is computed by the Triton kernels.

    Args:
        x: the layer's input.
        dtype: of the products.
        shape: (c, b) of the layer.
        layer: its name, for messages.

    Raises, and warns:
        as `takes_kernels`.
    """
    asked = requested()
    if asked == "reference":
        return False
    reason = "the input is empty" if not x.numel() else None
    if min(shape) == 1:
        reason = f"a layer of shape {shape} is left to it"
    return _decided(reason or _unsupported_device_reason(x.device, dtype, asked), x, asked, layer)


def _decided(reason: str | None, x: Tensor, asked: str, layer: str) -> bool:
    if reason is None:
        return True
    if asked == "triton":
        raise RuntimeError(f"{layer}: {VARIABLE}=triton, but the Triton kernels cannot compute this layer: {reason}.")
    if x.device.type == "cuda" and x.numel() and reason not in _warned:
        _warned.add(reason)
        warnings.warn(f"{layer}: computed by the slower reference path: {reason}.", stacklevel=4)
    return False


def compute_dtype(x: Tensor, weight: Tensor) -> torch.dtype:
    """The dtype of the products: autocast's, or the weight's."""
    return autocast_dtype(x.device.type) or weight.dtype


def unsupported_tensor_reason(
    x: Tensor, weight: Tensor, sparse: Sequence[Sparse], low_rank: Sequence[LowRank]
) -> str | None:
    """Why the Triton kernels cannot compute a layer with these tensors, or None; torch.compile can look into it."""
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
def _unsupported_device_reason(device: torch.device, dtype: torch.dtype, asked: str) -> str | None:
    """`unsupported_device_reason`, asked by every layer that takes the reference path in every forward."""
    return unsupported_device_reason(device, dtype)
