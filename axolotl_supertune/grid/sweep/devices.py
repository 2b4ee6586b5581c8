"""The devices on which a sweep runs its processes."""

import os
from dataclasses import dataclass


@dataclass(frozen=True)
class Devices:
    """Devices and how many processes share each.

    gpus: a value of CUDA_VISIBLE_DEVICES per GPU; empty: the CPU is the only device.
    jobs_per_gpu: processes at once on one device.
    """

    gpus: tuple[str, ...]
    jobs_per_gpu: int = 1

    @property
    def slots(self) -> list[str]:
        """The device of each process that can run at once; devices alternate, so that few processes spread out."""
        return list(self.gpus or ("",)) * self.jobs_per_gpu

    def environment(self, device: str) -> dict[str, str]:
        """The environment of a process: it sees this device only, and gets its share of the cores.

        An OMP_NUM_THREADS that is set already is kept.
        """
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        threads = os.environ.get("OMP_NUM_THREADS") or str(max(1, cores // len(self.slots)))
        return {
            "TOKENIZERS_PARALLELISM": "false",
            **os.environ,
            "OMP_NUM_THREADS": threads,
            "CUDA_VISIBLE_DEVICES": device,
            "PYTHONUNBUFFERED": "1",
        }


def visible_gpus(asked: str | None) -> tuple[str, ...]:
    """The value of CUDA_VISIBLE_DEVICES for each GPU that a sweep uses.

    Args:
        asked: numbers among the GPUs that this process sees, separated by commas; `none` or an empty text for the CPU;
            None for all GPUs.

    Raises:
        ValueError: there is no such GPU, or one is named twice.
    """
    import torch

    count = torch.cuda.device_count()
    visible = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    names = visible[:count] if visible else [str(number) for number in range(count)]
    if asked is None:
        return tuple(names)
    numbers = [] if asked.strip() in ("", "none") else [number.strip() for number in asked.split(",")]
    for number in numbers:
        if not number.isdigit() or int(number) >= count or numbers.count(number) > 1:
            raise ValueError(
                f"--gpus {asked}: {number!r} is not one of the {count} GPUs here, each named once, from 0 on."
            )
    return tuple(names[int(number)] for number in numbers)
