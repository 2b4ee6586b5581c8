"""Launches compiled Triton kernels directly, past Triton's own dispatch.

Triton's dispatch takes tens of microseconds of Python per launch and queries the driver about every tensor argument. A
training step has hundreds of launches, so that on a slow host the GPU would wait. A `Call` binds the arguments that do
not change once; those that change are passed as addresses.
"""

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

Launch = Callable[[tuple[int, int, int], int, tuple[Any, ...]], Any]

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

# The kernel argument for a tensor: its address, or under the interpreter the tensor itself.
address: Any = (lambda tensor: tensor) if INTERPRETED else Tensor.data_ptr


class Call:
    """A Triton kernel with its trailing arguments bound, compiled at its first launch.

    Args:
        kernel: a `triton.jit` function. Its arguments, in this order: those that change from call to call (tensors,
            aligned to 16 bytes, then numbers, which the kernel must not specialise on), those of `bound`, and the
            constants.
        dtypes: of the tensors that change. Later calls are not checked for dtype or device.
        bound: tensors and numbers that stay the same. The tensors are on `device`; this object keeps them alive.
        constants: the constexpr arguments.
        device: the CUDA device, or the CPU under the interpreter.
        num_warps, num_stages: Triton's launch options.
    """

    __slots__ = ("_bound", "_constants", "_device", "_dtypes", "_kernel", "_launch", "_options", "_tail")

    def __init__(
        self,
        kernel: Any,
        dtypes: tuple[torch.dtype, ...],
        bound: tuple[Any, ...],
        constants: tuple[Any, ...],
        device: torch.device,
        *,
        num_warps: int = 4,
        num_stages: int = 3,
    ) -> None:
        self._kernel, self._dtypes, self._bound, self._constants = kernel, dtypes, bound, constants
        self._options = {"num_warps": num_warps, "num_stages": num_stages}
        self._device = device.index or 0
        self._tail = (*(address(item) if isinstance(item, Tensor) else item for item in bound), *constants)
        self._launch: Launch | None = None

    def __call__(self, grid: tuple[int, int, int], *args: Any) -> None:
        """Launch with the arguments that change, tensors as `address` returns them; an empty grid launches nothing."""
        if INTERPRETED:
            if all(grid):
                self._kernel[grid](*args, *self._tail, **self._options)
        elif self._device == torch._C._cuda_getDevice():
            if self._launch is None:
                self._launch = self._compile(args)
            self._launch(grid, torch._C._cuda_getCurrentRawStream(self._device), (*args, *self._tail))
        else:
            with torch.cuda.device(self._device):
                self(grid, *args)

    def _compile(self, args: tuple[Any, ...]) -> Launch:
        numbers = args[len(self._dtypes) :]
        arguments = (*self._dtypes, *numbers, *self._bound, *self._constants)
        compiled = self._kernel.warmup(*arguments, grid=(1, 1, 1), **self._options)
        return direct_launch(compiled.result() if hasattr(compiled, "result") else compiled, len(arguments))


def direct_launch(compiled: Any, count: int) -> Launch:
    """A launch function for a compiled kernel of `count` arguments: Triton's C launcher with fixed arguments bound.

    Triton prepares each launch in Python that takes longer than the launch. A dry call with the C launcher replaced
    records the arguments that it gets. If grid, stream and kernel arguments are not at the positions that every Triton
    version so far uses, the returned function goes through Triton's own launch.
    """

    def through_triton(grid: tuple[int, int, int], stream: int, args: tuple[Any, ...]) -> None:
        compiled[grid](*args, stream=stream)

    launcher = compiled.run
    launch = getattr(launcher, "launch", None)
    if launch is None:
        return through_triton
    recorded: list[Any] = []
    markers: list[Any] = [object() for _ in range(4 + count)]
    grid_and_stream, arguments = markers[:4], markers[4:]
    launcher.launch = lambda *args: recorded.extend(args)
    try:
        compiled[tuple(grid_and_stream[:3])](*arguments, stream=grid_and_stream[3])
    except TypeError:  # Triton computes with the grid, because the kernel needs scratch memory
        return through_triton
    finally:
        launcher.launch = launch
    if recorded[:4] == grid_and_stream and recorded[-count:] == arguments:
        fixed = recorded[4:-count]
        return lambda grid, stream, args: launch(*grid, stream, *fixed, *args)
    if recorded[:4] == grid_and_stream and list(recorded[-1]) == arguments:
        fixed = recorded[4:-1]
        return lambda grid, stream, args: launch(*grid, stream, *fixed, args)
    return through_triton


def aligned(x: Tensor) -> Tensor:
    """x, or a copy if x does not begin at a multiple of 16 bytes: the kernels are compiled for that alignment."""
    return x if x.data_ptr() % 16 == 0 else x.clone()


def split_addresses(buffer: Tensor, sizes: Sequence[int]) -> list[Any]:
    """Addresses of consecutive operands of these numbers of elements in a contiguous buffer, as `address` returns them.

    One allocation and a few additions; allocating a tensor per operand would cost more than the launch.
    """
    if INTERPRETED:
        return list(buffer.view(-1).split([*sizes, buffer.numel() - sum(sizes)]))[: len(sizes)]
    addresses, position, width = [], buffer.data_ptr(), buffer.element_size()
    for size in sizes:
        addresses.append(position)
        position += size * width
    return addresses
