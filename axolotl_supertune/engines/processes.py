"""The processes of one run: what one finds out all know, and where one fails all end, with its error.

Everything goes over a gloo group of its own, on the CPU: it notices a process that died, and its waits have an end.
"""

import contextlib
import hashlib
import os
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from . import launched_processes

T = TypeVar("T")


class OtherProcessFailed(RuntimeError):
    """Another process failed; its error is in the message."""


class Processes:
    """All processes of this run, or this one alone where torch.distributed is not initialized.

    Every method is called by all of them, in the same order and inside `synchronized`.

    Args:
        timeout: seconds to wait for the slowest.
        how_to_wait: for the message, what sets the timeout.

    Attributes:
        rank, world: which process this is, and of how many.
    """

    def __init__(self, timeout: float, how_to_wait: str) -> None:
        self.rank, self.world = 0, 1
        self._timeout, self._how_to_wait = timeout, how_to_wait
        self._group: Any = None
        self._step = ""
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            self.rank, self.world = dist.get_rank(), dist.get_world_size()
            self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout))

    @property
    def is_first(self) -> bool:
        """Whether this is the process that writes files."""
        return self.rank == 0

    @contextlib.contextmanager
    def synchronized(self, step: str) -> Iterator[None]:
        """Leave the block with all processes, or with an error in each.

        Args:
            step: what is done in the block, for the message: "choosing the supports".

        Raises:
            OtherProcessFailed: the block failed in another process.
            RuntimeError: another process ended, does not answer, or is somewhere else.
        """
        self._step = step
        try:
            yield
        except OtherProcessFailed:
            raise
        except Exception as error:
            # Whoever cannot be told will see the connection break.
            with contextlib.suppress(RuntimeError):
                self._exchange(None, f"{type(error).__name__}: {error}")
            raise
        self._exchange(None)

    def gather(self, value: T) -> list[T]:
        """The values of all processes, by rank."""
        return self._exchange(value)

    def from_first(self, make: Callable[[], T]) -> T:
        """What `make` returns in process 0, which alone calls it."""
        return self._exchange(make() if self.is_first else None)[0]

    def sum(self, vector: Tensor) -> Tensor:
        """The sum of the processes' vectors (n,), a CPU tensor: added up in one place, so the same bits for all."""
        self._exchange(vector.shape)
        if self.world > 1:
            with self._explained():
                dist.reduce(vector, dst=0, group=self._group)
                dist.broadcast(vector, src=0, group=self._group)
        return vector

    def broadcast(self, tensors: list[Tensor]) -> None:
        """Put process 0's content into CPU tensors, in place; all have as many, of the same shapes and dtypes."""
        self._exchange(None)
        if self.world > 1:
            with self._explained():
                for tensor in tensors:
                    dist.broadcast(tensor, src=0, group=self._group)

    def _exchange(self, value: Any, error: str | None = None) -> list[Any]:
        if self.world == 1:
            return [value]
        found: list[Any] = [None] * self.world
        with self._explained():
            dist.all_gather_object(found, (self._step, error, value), group=self._group)
        if any(text is not None for _, text, _ in found):
            # Nobody ends, and breaks its connections, before all have read this.
            with contextlib.suppress(RuntimeError):
                dist.barrier(group=self._group)
        for rank, (step, text, _) in enumerate(found):
            if text is not None and rank != self.rank:
                raise OtherProcessFailed(f"process {rank} of {self.world} failed while {step}: {text}")
        elsewhere = [rank for rank, (step, _, _) in enumerate(found) if step != self._step]
        if elsewhere and error is None:
            raise RuntimeError(
                f"process {self.rank} is {self._step} and process {elsewhere[0]} is {found[elsewhere[0]][0]}: they do "
                "not see the same files (checkpoints, calibration_path); give them one output_dir."
            )
        return [value for _, _, value in found]

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise RuntimeError(
                f"process {self.rank} of {self.world}, while {self._step}: another process ended, or did not answer "
                f"within {self._timeout:g} s; its own output says why. {self._how_to_wait} ({error})"
            ) from error


def on_cpus() -> bool:
    """Whether a launcher started several processes that train on CPUs."""
    return launched_processes() > 1 and os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes")


def check_processes_know_each_other(distributed: bool) -> None:
    """Raise ValueError if a launcher started several processes and torch.distributed connects none of them."""
    if launched_processes() > 1 and not distributed:
        raise ValueError(
            f"WORLD_SIZE={launched_processes()}, but these processes do not know of each other: each would train alone "
            "and write the same output_dir. On CPUs set ACCELERATE_USE_CPU=true; for one process use --launcher python."
        )


def digest_of(tensor: Tensor) -> str:
    """sha256 of a tensor's shape, dtype and bits."""
    digest = hashlib.sha256(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
    digest.update(tensor.detach().contiguous().cpu().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
