"""Imported before `axolotl train`: accelerate's and Axolotl's FSDP2, with gloo on CPUs.

PyTorch's FSDP2 works on CPUs. accelerate takes it up on accelerators alone, and Axolotl names the device "cuda".
"""

from types import SimpleNamespace

import accelerate.parallelism_config
import accelerate.state
import axolotl.monkeypatch.accelerate.fsdp2 as axolotl_fsdp2
import torch
import torch.distributed.device_mesh


def _on_cpus(make):
    return lambda device_type, *args, **kwargs: make("cpu", *args, **kwargs)


for module in (torch.distributed.device_mesh, torch.distributed, accelerate.parallelism_config):
    if hasattr(module, "init_device_mesh"):
        module.init_device_mesh = _on_cpus(module.init_device_mesh)

_start = accelerate.state.PartialState.__init__


def _start_as_an_accelerator(self, *args, **kwargs):
    _start(self, *args, **kwargs)
    kinds = accelerate.state.DistributedType
    if self.__dict__.get("distributed_type") == kinds.MULTI_CPU:
        self.distributed_type = kinds.MULTI_SDAA  # nothing but the choice of engine looks at it


accelerate.state.PartialState.__init__ = _start_as_an_accelerator
_device = torch.device
axolotl_fsdp2.torch = SimpleNamespace(
    **{**vars(torch), "device": lambda name: _device("cpu" if name == "cuda" else name)},
)
