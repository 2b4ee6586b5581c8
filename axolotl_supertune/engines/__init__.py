"""Engines: one process, DDP, FSDP2 and DeepSpeed's ZeRO, each behind the interface of `engine.Engine`.

`engine_of(cfg)` gives the engine that a YAML names. Importing this package loads no torch.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from .world_size import launched_processes

if TYPE_CHECKING:  # commands must be able to print their help without torch
    from .engine import Engine

SELECTING_KEYS = ("deepspeed", "fsdp_config")
"""The YAML keys that each select an engine other than one process or DDP."""
KEYS = (*SELECTING_KEYS, "fsdp", "fsdp_version")
"""All YAML keys that select and configure such an engine."""


def engine_of(cfg: Mapping[str, Any], processes: int | None = None) -> "Engine":
    """The engine that a YAML mapping names.

    Args:
        cfg: raw, or as Axolotl validated it.
        processes: how many train, one a GPU; None: `WORLD_SIZE`, else 1.

    Raises:
        ValueError: a DeepSpeed config that cannot be read, or whose ZeRO stage is none of 0 to 3.
    """
    count = processes or launched_processes()
    if cfg.get("deepspeed"):
        from .deepspeed import read_config, stage_of

        config = read_config(cfg["deepspeed"])
        if stage_of(config) == 3:
            from .zero3 import Zero3

            return Zero3(count, config)
        from .zero1_2 import Zero1And2, ZeroOff

        return Zero1And2(count, config) if stage_of(config) else ZeroOff(count, config)
    if cfg.get("fsdp") or cfg.get("fsdp_config"):
        from .fsdp2 import FSDP2

        return FSDP2(count, cfg.get("fsdp_config") or {})
    if count > 1:
        from .ddp import DDP

        return DDP(count)
    from .single import ONE_PROCESS

    return ONE_PROCESS


def running_engine(cfg: Mapping[str, Any], trainer: Any) -> "Engine":
    """The engine that a trainer runs under: Accelerate's own environment may switch on FSDP without the YAML."""
    if getattr(trainer.accelerator.state, "fsdp_plugin", None) is not None:
        from .fsdp2 import FSDP2

        return FSDP2(launched_processes(), cfg.get("fsdp_config"))
    return engine_of(cfg)
