"""Exchanges values between the processes of a run, and stops all of them with the error of the one that failed.

Everything goes over a separate gloo group on the CPU, which notices a dead process and has a timeout.
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

from .world_size import launched_processes

T = TypeVar("T")


class OtherProcessFailed(RuntimeError):
    """Another process failed; the message contains its error."""


class Processes:
    """The processes of this run; only this one if torch.distributed is not initialized.

    All processes must call every method, in the same order and inside `synchronized`.

    Args:
        timeout: seconds to wait for the slowest process.
        how_to_wait: what sets the timeout, for the message.

    Attributes:
        rank, world: the number of this process, and how many there are.
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
        """A block that either all processes complete, or that raises in each of them.

        Args:
            step: what the block does, for the message: "choosing the supports".

        Raises:
            OtherProcessFailed: the block failed in another process.
            RuntimeError: another process ended, does not answer, or is in another block.
        """
        self._step = step
        try:
            yield
        except OtherProcessFailed:
            raise
        except Exception as error:
            # A process that cannot be reached sees the connection break.
            with contextlib.suppress(RuntimeError):
                self._exchange(None, f"{type(error).__name__}: {error}")
            raise
        self._exchange(None)

    def gather(self, value: T) -> list[T]:
        """The values of all processes, by rank."""
        return self._exchange(value)

    def from_first(self, make: Callable[[], T]) -> T:
        """What `make` returns in process 0, the only one that calls it."""
        return self._exchange(make() if self.is_first else None)[0]

    def sum(self, vector: Tensor) -> Tensor:
        """The sum of the CPU vectors (n,) of all processes; one process computes it, so that all get equal bits."""
        self._exchange(vector.shape)
        if self.world > 1:
            with self._explained():
                dist.reduce(vector, dst=0, group=self._group)
                dist.broadcast(vector, src=0, group=self._group)
        return vector

    def broadcast(self, tensors: list[Tensor]) -> None:
        """Copy the CPU tensors of process 0 into those of the others, which have the same number, shapes and dtypes."""
        self._exchange(None)
        if self.world > 1:
            with self._explained():
                for tensor in tensors:
                    dist.broadcast(tensor, src=0, group=self._group)

    def _exchange(self, value: Any, error: str | None = None) -> list[Any]:
        if self.world == 1:
            return [value]
        answers: list[Any] = [None] * self.world
        with self._explained():
            dist.all_gather_object(answers, (self._step, error, value), group=self._group)
        if any(text is not None for _, text, _ in answers):
            # No process ends and breaks its connections before all have read the error.
            with contextlib.suppress(RuntimeError):
                dist.barrier(group=self._group)
        for rank, (step, text, _) in enumerate(answers):
            if text is not None and rank != self.rank:
                raise OtherProcessFailed(f"process {rank} of {self.world} failed while {step}: {text}")
        elsewhere = [rank for rank, (step, _, _) in enumerate(answers) if step != self._step]
        if elsewhere and error is None:
            raise RuntimeError(
                f"process {self.rank} is {self._step} and process {elsewhere[0]} is {answers[elsewhere[0]][0]}: they "
                "do not see the same files (checkpoints, calibration_path); give them one output_dir."
            )
        return [value for _, _, value in answers]

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
