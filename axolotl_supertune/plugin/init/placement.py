"""How a step fits into the memory: micro batches, gradient checkpointing, and a 4-bit base where nothing else fits."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from ..plan import memory
from ..plan.plan import make
from ..plan.result import Plan

_CPU_MICRO_BATCH, _CPU_TOKENS = 4, 2048
# Fewer records at a time leave a GPU idle: rather compute activations twice.
_ENOUGH_WITHOUT_CHECKPOINTING = 4


@dataclass(frozen=True)
class Placement:
    """What a step is divided into, and what it takes.

    Attributes:
        micro_batch: records at a time.
        accumulation: micro batches of a step.
        checkpointing: whether activations are computed a second time rather than kept.
        four_bits: whether the base is held in 4 bits.
        memory: bytes of the GPU; None on a CPU.
        needed: bytes that the plan says are needed; None if it cannot say.
        unknown: why it cannot say.
    """

    micro_batch: int
    accumulation: int
    checkpointing: bool = False
    four_bits: bool = False
    memory: float | None = None
    needed: float | None = None
    unknown: str = ""

    @property
    def on_cpu(self) -> bool:
        return self.memory is None

    @property
    def fits(self) -> bool:
        """Whether it fits, as far as is known."""
        return self.memory is None or self.needed is None or self.needed <= self.memory


def on_cpu(batch: int, sequence_len: int) -> Placement:
    """For a CPU, where large micro batches take memory and are no faster."""
    most = max(1, min(_CPU_MICRO_BATCH, _CPU_TOKENS // sequence_len))
    micro = next(size for size in _divisors(batch) if size <= most)
    return Placement(micro, batch // micro)


def on_gpu(batch: int, gpu_memory: float, mapping: Callable[[Placement], dict[str, Any]]) -> Placement:
    """The placement that computes fastest of those that fit.

    In this order: at least four records at a time; with gradient checkpointing as many as fit; then a base in 4 bits,
    with gradient checkpointing too. If none fits, the smallest of all.

    Args:
        batch: records of a step.
        gpu_memory: bytes.
        mapping: a placement → the keys of the YAML, for the plan.

    Raises:
        ValueError: what the plan raises.
    """
    sizes = list(_divisors(batch))
    for four_bits in (False, True):
        first = Placement(sizes[0], 1, checkpointing=True, four_bits=four_bits, memory=gpu_memory)
        plan = make(mapping(first), gpus=1)
        if plan.job is None or plan.estimate is None:
            return Placement(1, batch, checkpointing=True, memory=gpu_memory, unknown=plan.unknown)
        candidates = [(True, size) for size in sizes]
        if not four_bits:
            enough = min(_ENOUGH_WITHOUT_CHECKPOINTING, sizes[0])
            candidates = [(False, size) for size in sizes if size >= enough] + candidates
        for checkpointing, size in candidates:
            placement = replace(first, micro_batch=size, accumulation=batch // size, checkpointing=checkpointing)
            placement = replace(placement, needed=_needed(plan, placement))
            if placement.fits:
                return placement
    return placement


def _needed(plan: Plan, placement: Placement) -> float:
    """Bytes for a placement, from the plan of another one of the same base."""
    assert plan.job is not None
    job = plan.job
    step = replace(
        job.step,
        sequences=placement.micro_batch,
        accumulation=placement.accumulation,
        checkpointing="blocks" if placement.checkpointing else "none",
        attention="masked" if placement.micro_batch > 1 else "flash",
        evaluated_sequences=placement.micro_batch if job.step.evaluated_sequences else 0,
    )
    return memory.estimate(job.shape, plan.rows, step, job.engine, job.calibration, job.gradient).needed


def _divisors(batch: int) -> Iterator[int]:
    """The largest first."""
    return (size for size in range(batch, 0, -1) if batch % size == 0)
