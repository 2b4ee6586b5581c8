"""DeepSpeed's ZeRO-3: the base is sharded while it is loaded, and gathered by hooks in every pass.

A *plain load* is `from_pretrained` without ZeRO-3. `zero.Init` casts every floating tensor made while a model is built,
not only parameters; RoPE's frequencies, fp32 in a plain load, are then rounded to bf16. `load_plain_buffers` repairs
that.

Internals that this file reaches into:
- Attributes of a parameter: `ds_id`, `ds_shape`, `ds_tensor`, `ds_status`. If one were renamed, sharded parameters
  would be taken for empty ones: tests/engines/test_zero3.py and test_sharding.py.
- transformers: `no_init_weights`, `local_torch_dtype`, `set_zero3_state` build a second model as `from_pretrained`
  does; `_is_hf_initialized`, `initialize_weights` and `_get_dtype_plan` say what it computes and keeps in fp32. If one
  changed, buffers would differ from those of a plain load:
  tests/engines/test_zero3.py::test_a_base_that_is_loaded_under_zero_init_is_the_one_of_a_plain_load.
- `set_z3_leaf_module`, DeepSpeed's public mark on modules that are gathered in one go.
"""

import contextlib
import copy
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..method.config_error import ConfigError
from ..method.layerwise import decoder_layers, gathered_in_turn
from .deepspeed import AUTO, DeepSpeed
from .engine import Batch, Sharding, Weights, move_to
from .optimizer_state import start_anew

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from .processes import Processes

_REMEDY = "Use ZeRO-1 or ZeRO-2, FSDP2 or DDP for this model."


class Zero3(DeepSpeed):
    """Base weights and adapter are sharded over all processes from loading on.

    While loading, every process reads the whole checkpoint into CPU memory.
    """

    name = "ZeRO-3"
    shards_weights = True
    shards_while_loading = True
    gathers_by = "DeepSpeed"
    part_files = True

    def loading_keys(self, dtype: torch.dtype | None) -> dict[str, Any]:
        """Switches DeepSpeed's bf16 on while a bf16 base is loaded: `zero.Init` takes the dtype from nothing else.

        Training uses the YAML's value again.
        """
        return {"deepspeed": {**self.settings, "bf16": {"enabled": True}}} if dtype is torch.bfloat16 else {}

    def restore_buffers(self, model: Any, dtype: torch.dtype) -> None:
        load_plain_buffers(model, dtype)

    def plain_forward(self, model: Any, device: torch.device | str) -> contextlib.AbstractContextManager[None]:
        """One decoder layer is gathered at a time; every process must run the same number of batches."""
        move_to(model, device)
        return gathered_in_turn(model, gathered)

    def share_of(self, batches: Sequence[Batch], processes: "Processes") -> tuple[list[Batch], list[Batch]]:
        """The batches of this process, as in `Engine`.

        A process with one batch fewer also runs the first one, uncounted, because every process must take part in every
        gather.
        """
        mine, _ = super().share_of(batches, processes)
        most = len(range(0, len(batches), processes.world))
        return mine, list(batches[:1]) * (most - len(mine))

    def prepare_trainer(self, trainer: Any) -> None:
        super().prepare_trainer(trainer)
        gather_at_once(trainer.model)

    def check_partition(self, folder: Path, optimizer: Path) -> None:
        """Refuse a checkpoint whose optimizer state is grouped by another `sub_group_size` than the config says.

        `auto` on either side is not compared.
        """
        # Mapped: the file may hold large tensors, and only its config is read.
        written = torch.load(optimizer, map_location="cpu", weights_only=False, mmap=True)["ds_config"]
        key, default = "sub_group_size", 10**9
        was, asked = (zero.get(key, default) for zero in (written["zero_optimization"], self.zero))
        if AUTO not in (was, asked) and int(float(was)) != int(float(asked)):
            raise ConfigError(
                "resume_from_checkpoint",
                f"the optimizer state in {folder} is in groups of zero_optimization.{key}: "
                f"{was}, and deepspeed says {asked}. Set it back to resume, or {start_anew(folder)}.",
            )

    @property
    def overlaps(self) -> bool:
        return False  # stage 3 has one bucket

    def gathered_bytes(self, weights: Weights) -> tuple[float, float]:
        if self.processes == 1 and not self.offloads_weights:
            return 0.0, 0.0  # DeepSpeed's one partition is the weight itself
        # A decoder layer is gathered in one go, however little may stay gathered.
        live = min(weights.parameters, max(self.live, weights.linear / weights.blocks)) * float(weights.width)
        return live, live

    def calibration_bytes(self, weights: Weights) -> float:
        """DeepSpeed has not wrapped the model yet: `plain_forward` gathers one decoder layer, or the embeddings."""
        return max(weights.block, weights.embedding)


class Zero3Sharding(Sharding):
    """Parameters are of shape (0,) unless they are gathered; attributes `ds_*` say what they are as a whole."""

    gathers_by_hooks = True
    not_gathered = (
        "ZeRO-3 has not gathered its weight, only this process's part is here. Make the adapter before "
        "deepspeed.initialize, call the SupraLinear and not the linear layer inside, and let the loss depend on its "
        "output."
    )

    def matches(self, tensor: Tensor | None) -> bool:
        return hasattr(tensor, "ds_id")

    def manages(self, layer: nn.Module) -> bool:
        # Not `layer.weight`: in a forward of DeepSpeed's engine reading an empty parameter gathers it, and registers it
        # with the module that is running.
        return self.matches(layer._parameters.get("weight"))

    def is_gathered(self, weight: Tensor) -> bool:
        return weight.ds_status.name == "AVAILABLE"  # type: ignore[attr-defined]

    def whole(self, tensor: Tensor) -> Tensor:
        with gathered([tensor]):
            return tensor.detach().clone()

    def shape_of(self, tensor: Tensor) -> torch.Size:
        return tensor.ds_shape  # type: ignore[attr-defined]

    def dtype_of(self, tensor: Tensor) -> torch.dtype:
        part = getattr(tensor, "ds_tensor", None)
        return tensor.dtype if part is None else part.dtype

    def is_whole(self, tensor: Tensor) -> bool:
        return tensor.shape == self.shape_of(tensor)


_SHARDING = Zero3Sharding()


@contextlib.contextmanager
def gathered(parameters: Iterable[Tensor]) -> Iterator[None]:
    """Inside, parameters of ZeRO-3 hold their values, for reading only; every process must call this.

    Other tensors are left alone.
    """
    sharded = [parameter for parameter in parameters if _SHARDING.matches(parameter)]
    if not sharded:
        yield
        return
    from deepspeed.runtime.zero import GatheredParameters

    with GatheredParameters(sharded):
        yield


def is_sharded_by_zero3(model: nn.Module) -> bool:
    """Whether ZeRO-3 shards a model."""
    return any(_SHARDING.matches(parameter) for parameter in model.parameters())


def gather_at_once(model: nn.Module) -> None:
    """Have ZeRO-3 gather and free each decoder layer in one go; to be called before `deepspeed.initialize`.

    DeepSpeed's hooks around every module inside take a good part of the host's time in a step. The decoder layers up to
    and including the first with trained parameters keep DeepSpeed's per-module hooks: that layer's input needs no
    gradient, and DeepSpeed would then reduce its gradients before they have been computed. A layer that is gathered at
    once must run its backward before its next forward, except for the recomputation of checkpointing.
    """
    list_of = {
        id(child): id(parent) for parent in model.modules() if isinstance(parent, nn.ModuleList) for child in parent
    }
    trained: set[int] = set()
    for block in decoder_layers(model)[0]:
        parent = list_of.get(id(block))
        if parent is None:
            continue
        if parent in trained:
            from deepspeed.utils import set_z3_leaf_module

            set_z3_leaf_module(block, True)
        elif any(parameter.requires_grad for parameter in block.parameters()):
            trained.add(parent)


def load_plain_buffers(model: "PreTrainedModel", dtype: torch.dtype) -> None:
    """Give a model the buffers of a plain load, in dtype and value, if ZeRO-3 shards it.

    Args:
        model: as `from_pretrained` returned it.
        dtype: that it was loaded in.

    Raises:
        ValueError: names the parameter or buffer that has another dtype or shape than a plain load gives it, and cannot
            be computed anew because it comes out of the checkpoint.
    """
    if not is_sharded_by_zero3(model):
        return
    plain = _plain_model(model, dtype)
    keeps_fp32 = _kept_in_fp32(plain, dtype)
    expected = dict(plain.named_parameters(remove_duplicate=False))
    for name, parameter in model.named_parameters(remove_duplicate=False):
        _check_as_expected(name, parameter, expected, keeps_fp32)
    plain_buffers = dict(plain.named_buffers(remove_duplicate=False))
    non_persistent = {name for name, _ in plain.named_non_persistent_buffers(remove_duplicate=False)}
    buffers = dict(model.named_buffers(remove_duplicate=False))
    for name, buffer in buffers.items():
        if name not in non_persistent:
            _check_as_expected(name, buffer, plain_buffers, keeps_fp32)
            continue
        owner, _, own_name = name.rpartition(".")
        model.get_submodule(owner)._buffers[own_name] = plain_buffers[name].to(buffer.device)
    if lost := non_persistent - buffers.keys():
        raise ValueError(f"{min(lost)}: ZeRO-3 loads the base model without this buffer. {_REMEDY}")


def _check_as_expected(name: str, tensor: Tensor, expected: dict[str, Tensor], keeps_fp32: Any) -> None:
    if name not in expected:
        raise ValueError(f"{name}: a plain load of the base model has no such tensor. {_REMEDY}")
    dtype = torch.float32 if keeps_fp32(name) else expected[name].dtype
    sharding = _SHARDING if _SHARDING.matches(tensor) else Sharding()
    loaded, shape = sharding.dtype_of(tensor), sharding.shape_of(tensor)
    if (loaded, shape) != (dtype, expected[name].shape):
        raise ValueError(
            f"{name}: ZeRO-3 loads it as {loaded} of shape {tuple(shape)}, a plain load as {dtype} of "
            f"shape {tuple(expected[name].shape)}: it would train on another base model. {_REMEDY}"
        )


def _plain_model(model: "PreTrainedModel", dtype: torch.dtype) -> Any:
    """The model as a plain load builds it: buffers on the CPU, weights on the meta device."""
    from accelerate import init_empty_weights
    from transformers.initialization import no_init_weights
    from transformers.modeling_utils import local_torch_dtype, set_zero3_state

    # `set_zero3_state` keeps models inside this one from being built under zero.Init.
    with torch.random.fork_rng(devices=[]):
        with set_zero3_state(), local_torch_dtype(dtype), no_init_weights(), init_empty_weights(include_buffers=False):
            plain = type(model)(copy.deepcopy(model.config))
        # A plain load computes what is not in the checkpoint after it has read that, and outside of the model's dtype.
        for tensor in plain.state_dict(keep_vars=True).values():
            tensor._is_hf_initialized = True
        plain.initialize_weights()
    return plain


def _kept_in_fp32(plain: Any, dtype: torch.dtype) -> Any:
    """A function: name → whether transformers loads that tensor in fp32 even if the model's dtype is another."""
    patterns = [re.compile(glob.replace("*", ".*")) for glob in plain._get_dtype_plan(dtype)]
    return lambda name: any(pattern.search(name) for pattern in patterns)
