"""Launching Triton kernels without a look-up at every launch.

Triton's own dispatch takes tens of microseconds of Python a launch, and asks the driver about every tensor it is given.
A training step has hundreds of launches, and on a slow host the GPU would wait for them. A `Call` binds what never
changes once; what changes it is given as addresses.
"""

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

Launch = Callable[[tuple[int, int, int], int, tuple[Any, ...]], Any]

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

# What a kernel is given for a tensor: its address; the tensor itself where Triton interprets.
address: Any = (lambda tensor: tensor) if INTERPRETED else Tensor.data_ptr


class Call:
    """A kernel with its last arguments and constants bound.

    Args:
        kernel: a `triton.jit` function whose arguments are, in this order: those that change from call to call (first
            tensors, aligned to 16 bytes; then numbers, which the kernel must not specialise on), those of `bound`, and
            the constants.
        dtypes: of the tensors that change. Nobody checks that those given later are of them, and on `device`.
        bound: tensors and numbers that stay. The tensors are on `device`, and live as long as this.
        constants: the constexpr arguments.
        device: where it runs.
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
        self._tail = (*(address(each) if isinstance(each, Tensor) else each for each in bound), *constants)
        self._launch: Launch | None = None

    def __call__(self, grid: tuple[int, int, int], *args: Any) -> None:
        """Launch with the arguments that change, tensors as `address` gives them; nothing if the grid is empty."""
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
    """What launches a compiled kernel of `count` arguments: the function in C that Triton itself calls in the end.

    Triton prepares every launch anew, in Python that takes longer than the launch. What it hands to that function is
    seen once, from a call that stands in for it; where grid, stream and arguments are not found where every Triton
    so far has them, Triton's own way is taken.
    """

    def usual(grid: tuple[int, int, int], stream: int, args: tuple[Any, ...]) -> None:
        compiled[grid](*args, stream=stream)

    launcher = compiled.run
    launch = getattr(launcher, "launch", None)
    if launch is None:
        return usual
    seen: list[Any] = []
    changing: list[Any] = [object() for _ in range(4 + count)]
    first, last = changing[:4], changing[4:]
    launcher.launch = lambda *args: seen.extend(args)
    try:
        compiled[tuple(first[:3])](*last, stream=first[3])
    except TypeError:  # it computes with the grid: the kernel needs scratch memory
        return usual
    finally:
        launcher.launch = launch
    if seen[:4] == first and seen[-count:] == last:
        fixed = seen[4:-count]
        return lambda grid, stream, args: launch(*grid, stream, *fixed, *args)
    if seen[:4] == first and list(seen[-1]) == last:
        fixed = seen[4:-1]
        return lambda grid, stream, args: launch(*grid, stream, *fixed, args)
    return usual


def aligned(x: Tensor) -> Tensor:
    """x itself, or a copy where a view begins in the middle of 16 bytes: the kernels were compiled for whole ones."""
    return x if x.data_ptr() % 16 == 0 else x.clone()


def places(buffer: Tensor, sizes: Sequence[int]) -> list[Any]:
    """Where operands of these numbers of elements lie, one after another, in a contiguous buffer: as `address` says.

    One allocation and a few additions serve where a tensor each would cost more than the launch.
    """
    if INTERPRETED:
        return list(buffer.view(-1).split([*sizes, buffer.numel() - sum(sizes)]))[: len(sizes)]
    found, at, each = [], buffer.data_ptr(), buffer.element_size()
    for size in sizes:
        found.append(at)
        at += size * each
    return found
