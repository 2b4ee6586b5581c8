"""Gloo processes on the CPU, each of which calls a function of the test's."""

import forked
import torch.distributed as dist


def start(enter, arguments, world, *, join=True):
    """Processes of one group that call enter(rank, store, *arguments), the first of which is a folder of theirs."""
    return forked.start(_member, (enter, world, *arguments), world, join=join)


def _member(rank, enter, world, folder, *arguments):
    store = dist.FileStore(str(folder / "store"), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    try:
        enter(rank, store, folder, *arguments)
    finally:
        # Threads of gloo's that outlive the interpreter can abort the process.
        if dist.is_initialized():
            dist.destroy_process_group()
