"""The result of planning a training. Imports no torch."""

from collections.abc import MutableMapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ...method.budget import BudgetRow
from .memory import Estimate
from .workload import Job

if TYPE_CHECKING:
    from ...tuner import SupraConfig


@dataclass
class Plan:
    """What a config trains, how much memory that takes, and what is refused.

    Attributes:
        cfg: the config as training would have it, without the keys that are refused.
        method: the adapter's PEFT config.
        rows: budgets, per kind of layer.
        refusals: the errors that training would raise, in the order in which they would come up.
        job: the inputs of the memory estimate; None if the memory cannot be estimated.
        estimate: the memory of one GPU; None if it cannot be estimated.
        unknown: why it cannot be estimated.
        notes: what the estimate assumes.
        unchecked: what training might refuse, and only a download or the weights would tell.
        gpu_memory: bytes of one GPU, if given.
    """

    cfg: MutableMapping[str, Any]
    method: "SupraConfig"
    rows: list[BudgetRow]
    refusals: list[str]
    job: Job | None = None
    estimate: Estimate | None = None
    unknown: str = ""
    notes: list[str] = field(default_factory=list)
    unchecked: list[str] = field(default_factory=list)
    gpu_memory: float | None = None

    @property
    def fits(self) -> bool | None:
        """Whether one GPU has enough memory; None if its memory or the estimate is not known."""
        if self.gpu_memory is None or self.estimate is None:
            return None
        return self.estimate.needed <= self.gpu_memory
