"""Launching Triton kernels without a look-up at every launch.

Triton's own dispatch takes tens of microseconds of Python a launch. A training step has hundreds of launches, and on a
slow host the GPU would wait for them. A `Call` binds what never changes once, so that nothing is looked up again.
"""

import os
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


class Call:
    """A kernel with its last arguments and constants bound.

    Args:
        kernel: a `triton.jit` function whose arguments are, in this order: those that change from call to call (first
            tensors, aligned to 16 bytes and always of the same dtypes; then numbers, which the kernel must not
            specialise on), those of `bound`, and the constants.
        bound: tensors and numbers that stay. The tensors are on the kernel's device.
        constants: the constexpr arguments.
        device: where it runs.
    """

    __slots__ = ("_compiled", "_device", "_kernel", "_options", "_tail")

    def __init__(
        self,
        kernel: Any,
        bound: tuple[Any, ...],
        constants: tuple[Any, ...],
        device: torch.device,
        *,
        num_warps: int = 4,
        num_stages: int = 3,
    ) -> None:
        self._kernel, self._tail = kernel, (*bound, *constants)
        self._options = {"num_warps": num_warps, "num_stages": num_stages}
        self._device = device.index or 0
        self._compiled: Any = None

    def __call__(self, grid: tuple[int, int, int], *args: Any) -> None:
        """Launch with the arguments that change; nothing if the grid is empty."""
        if self._compiled is None or INTERPRETED or torch.compiler.is_compiling():
            if not all(grid):
                return
            # Triton compiles for the current device, and launches there.
            with nullcontext() if INTERPRETED else torch.cuda.device(self._device):
                self._compiled = self._kernel[grid](*args, *self._tail, **self._options)
        elif self._device == torch.cuda.current_device():
            self._compiled[grid](*args, *self._tail, stream=_stream(self._device))
        else:
            with torch.cuda.device(self._device):
                self._compiled[grid](*args, *self._tail, stream=_stream(self._device))


def aligned(x: Tensor) -> Tensor:
    """x itself, or a copy where a view begins in the middle of 16 bytes: the kernels were compiled for whole ones."""
    return x if x.data_ptr() % 16 == 0 else x.clone()


def _stream(device: int) -> int:
    return torch._C._cuda_getCurrentRawStream(device)
