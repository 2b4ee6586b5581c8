"""Imported before `axolotl train`: the processes of a run share one GPU, and talk by gloo. NCCL takes one a GPU.

What is computed, gathered and saved is what several GPUs would; how fast is not.
"""

import functools
import inspect
import os

import torch.distributed as dist
from torch.distributed import device_mesh

# Accelerate, transformers and DeepSpeed name the device by it.
os.environ["LOCAL_RANK"] = "0"


def _changed(function, change):
    """`function`, after change(its arguments by name) has been at them."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    def call(*args, **kwargs):
        bound = signature.bind(*args, **kwargs)
        change(bound.arguments)
        return function(*bound.args, **bound.kwargs)

    return call


def _by_gloo(arguments):
    arguments["backend"] = "gloo"
    for of_nccl in ("device_id", "pg_options"):
        arguments.pop(of_nccl, None)


def _by_sums(arguments):
    """Gloo does not average: the mean is the sum of parts that were divided before."""
    if arguments.get("op") == dist.ReduceOp.AVG:
        arguments["op"] = dist.ReduceOp.SUM
        arguments["input" if "input" in arguments else "tensor"].div_(dist.get_world_size(arguments.get("group")))


# A mesh on "cuda" makes a group with NCCL beside a default one of gloo.
for module in (dist, dist.distributed_c10d, device_mesh):
    for name, change in {
        "init_process_group": _by_gloo,
        "new_group": _by_gloo,
        "all_reduce": _by_sums,
        "reduce_scatter_tensor": _by_sums,
    }.items():
        if hasattr(module, name):
            setattr(module, name, _changed(getattr(module, name), change))
