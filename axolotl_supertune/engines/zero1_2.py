"""DeepSpeed's ZeRO-1 and ZeRO-2: every process holds the whole model, and its part of the optimizer's state.

Stage 2 also partitions the gradients; for this package the two differ in nothing else.
"""

from collections.abc import Mapping
from typing import Any

from .deepspeed import DeepSpeed


class Zero1And2(DeepSpeed):
    """ZeRO-1 or ZeRO-2, as the config's stage says."""

    name = "ZeRO-1"

    def __init__(self, processes: int = 1, settings: Mapping[str, Any] | None = None) -> None:
        super().__init__(processes, settings)
        self.name = f"ZeRO-{self.stage}"  # type: ignore[misc]


class ZeroOff(DeepSpeed):
    """DeepSpeed with ZeRO's stage 0, which shards nothing: `plan` counts it as DDP, training refuses it."""

    name = "DDP"
    shards_optimizer = False

    def reduction_bytes(self, gradients: float, width: int, hidden: int) -> float:
        return gradients

    def master_bytes(self, trained: float) -> float:
        return 0.0
