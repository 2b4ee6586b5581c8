"""Launching Triton kernels at a few microseconds each.

Triton's own dispatch takes tens of microseconds of Python a launch; a step of a small model has hundreds, and the GPU
would wait. Here what a launch was compiled for is looked up by what Triton specialises on (dtypes, alignment,
divisibility, constants), and the compiled kernel is called as Triton's documentation of ahead-of-time use does.
"""

import os
from typing import Any

import torch
from torch import Tensor

_compiled: dict[tuple[Any, ...], Any] = {}
_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, num_warps: int = 4, num_stages: int = 3) -> None:
    """kernel[grid](*args): tensors and numbers first, then the constexpr arguments, in the kernel's order.

    The first argument is a tensor; the kernel runs on its device.
    """
    if _INTERPRETED or torch.compiler.is_compiling():
        kernel[grid](*args, num_warps=num_warps, num_stages=num_stages)
        return
    device = args[0].device.index
    if device != torch.cuda.current_device():
        with torch.cuda.device(device):
            _launch(kernel, grid, args, device, num_warps, num_stages)
    else:
        _launch(kernel, grid, args, device, num_warps, num_stages)


def _launch(
    kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], device: int, num_warps: int, num_stages: int
) -> None:
    key = (kernel.__name__, device, num_warps, num_stages, *map(_kind, args))
    compiled = _compiled.get(key)
    if compiled is None:
        _compiled[key] = kernel[grid](*args, num_warps=num_warps, num_stages=num_stages)
    else:
        compiled[(*grid, 1, 1)[:3]](*args)


def _kind(value: Any) -> Any:
    """All that Triton may specialise on: a compiled kernel is reused only where all of it is the same."""
    if isinstance(value, Tensor):
        return value.dtype, value.data_ptr() % 16 == 0
    if isinstance(value, float):
        return float
    # Constants are compiled in; small ones are told apart by value, sizes by what Triton asks of them.
    if isinstance(value, int) and not isinstance(value, bool) and value > _CONSTANT_LIMIT:
        return value % 16 == 0, value > 2**31 - 1
    return value


# No constexpr of ours is larger; a runtime number below it costs at most a second compilation.
_CONSTANT_LIMIT = 4096
