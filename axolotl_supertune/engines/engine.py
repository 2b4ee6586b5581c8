"""The interface of an engine: what the rest of the package asks about how a training is spread over processes.

To add an engine: subclass `Engine` in a file of its own and override what differs from one process; if it shards
tensors, subclass `Sharding` there too and list it in `sharding.SHARDINGS`; have `engines.engine_of` return it.
This module and the engines that shard nothing import no torch, because `plan --help` imports them.
"""

import contextlib
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from ..method.config_error import ConfigError
from .optimizer_state import partition_files, start_anew

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from .processes import Processes

Batch = TypeVar("Batch")

_REFUSED_ABOVE_ONE = ("tensor_parallel_size", "context_parallel_size", "expert_parallel_size")


@dataclass(frozen=True)
class Weights:
    """Sizes of a base model's weights, from which an engine tells what it gathers of them.

    Attributes:
        parameters: scalars of the whole model.
        linear: scalars of all linear layers but the output layer.
        blocks: decoder layers.
        width: bytes of an unquantized scalar.
        whole: bytes of the whole model, as it is stored (quantized or not).
        rest: bytes of everything outside of the linear layers: embeddings, output layer, norms.
        embedding: bytes of one embedding table.
    """

    parameters: int
    linear: int
    blocks: int
    width: int
    whole: float
    rest: float
    embedding: float

    @property
    def block(self) -> float:
        """Bytes of one decoder layer."""
        return (self.whole - self.rest) / self.blocks


class Engine:
    """How a training is spread over processes. The defaults are those of one process that shards nothing.

    Args:
        processes: how many train, one a GPU.
        settings: the engine's own config: the YAML's `fsdp_config`, or DeepSpeed's JSON.

    Attributes:
        name: for tables and messages.
        key: the YAML key that selects it, or None.
        shards_weights, shards_optimizer: whether a process holds only its part of the base weights, and of the
            optimizer's state.
        shards_while_loading: whether the base is sharded while it is loaded, so that `restore_buffers` must run.
        gathers_by: what gathers the weights in every pass, for the log; None if they are always whole.
        gradient_refusal: why the support cannot be chosen by gradient, or None if it can.
        partial_save_refusal: why it needs a trainer that saves sharded adapters whole, or None if it needs none.
    """

    name: ClassVar[str] = "one GPU"
    key: ClassVar[str | None] = None
    shards_weights: ClassVar[bool] = False
    shards_optimizer: ClassVar[bool] = False
    shards_while_loading: ClassVar[bool] = False
    gathers_by: ClassVar[str | None] = None
    gradient_refusal: ClassVar[str | None] = None
    partial_save_refusal: ClassVar[str | None] = None

    def __init__(self, processes: int = 1, settings: Mapping[str, Any] | None = None) -> None:
        self.processes = processes
        self.settings: Mapping[str, Any] = settings or {}

    # --- the YAML ---

    def check(self, cfg: MutableMapping[str, Any]) -> None:
        """Refuse YAML keys that do not work with `adapter: supra` and `super`; fill in those that are needed, in place.

        Raises:
            ValueError: names the key, the value and the remedy.
        """
        for key in _REFUSED_ABOVE_ONE:
            if (cfg.get(key) or 1) > 1:
                raise ConfigError(key, f"{cfg[key]} does not work with adapter: {cfg['adapter']} yet. Remove the key.")
        self.check_settings(cfg)
        if self.processes > 1:
            if cfg.get("ddp_broadcast_buffers"):
                raise ConfigError(
                    "ddp_broadcast_buffers",
                    "true would send every support to every process before every forward pass, "
                    "though it never changes. Remove the key.",
                )
            cfg["ddp_broadcast_buffers"] = False

    def check_settings(self, cfg: MutableMapping[str, Any]) -> None:
        """`check` for the engine's own keys and what does not work beside them."""

    def leave_out(self, cfg: MutableMapping[str, Any]) -> None:
        """Have a command that runs in one process, such as a merge, start without the engine, in place."""

    def check_installed(self) -> None:
        """Raise ValueError, with what to install, if a library of the engine is missing."""

    # --- loading and calibration ---

    def loading_keys(self, dtype: "torch.dtype | None") -> dict[str, Any]:
        """YAML keys that must have other values while the base is loaded in `dtype`."""
        return {}

    def restore_buffers(self, model: Any, dtype: "torch.dtype") -> None:
        """Give a base that was sharded while it was loaded the buffers of a plain load; called by all processes."""

    @property
    def only_first_has_weights(self) -> bool:
        """Whether process 0 loads the base and the others hold meta tensors until the model is sharded."""
        return False

    def plain_forward(self, model: Any, device: "torch.device | str") -> contextlib.AbstractContextManager[None]:
        """A context in which the base, before the engine has wrapped it, can be called on `device`."""
        move_to(model, device)
        return contextlib.nullcontext()

    def share_of(self, batches: Sequence[Batch], processes: "Processes") -> tuple[list[Batch], list[Batch]]:
        """The calibration batches of this process: those that count, and those that it only runs to help others."""
        if self.only_first_has_weights:
            return list(batches), []
        return list(batches[processes.rank :: processes.world]), []

    # --- training ---

    def prepare_trainer(self, trainer: Any) -> None:
        """Configure a trainer whose model Accelerate has not prepared yet, so that U, L and R are trained in fp32."""

    def check_optimizer_state(self, folder: Path) -> None:
        """Check that a checkpoint has an optimizer state that this engine can load.

        The Trainer goes on without the state of the optimizer or the scheduler if one is missing, and would begin the
        schedule again.

        Args:
            folder: the checkpoint.

        Raises:
            ValueError: names the file or the key, and the remedy.
        """
        if parts := partition_files(folder):
            raise ConfigError(
                "resume_from_checkpoint",
                f"the optimizer state in {folder} is DeepSpeed's. Set deepspeed as in that run "
                f"and start {len(parts)} processes to resume it, or {start_anew(folder)}.",
            )
        if not (list(folder.glob("optimizer*")) and (folder / "scheduler.pt").is_file()):
            raise ConfigError(
                "resume_from_checkpoint",
                f"{folder} has no state of the optimizer and of its schedule, which "
                "save_only_model: true leaves out; going on would begin the schedule anew. To do that, "
                f"{start_anew(folder)}.",
            )

    # --- `plan`: bytes on one GPU ---

    @property
    def checkpoints_activations(self) -> bool:
        """Whether the engine's own settings checkpoint activations."""
        return False

    @property
    def offloads_weights(self) -> bool:
        """Whether the base weights lie in host memory."""
        return False

    @property
    def offloads_optimizer(self) -> bool:
        """Whether the optimizer's state lies in host memory."""
        return False

    @property
    def weight_shards(self) -> int:
        """Into how many parts the base weights and the adapter are split."""
        return self.processes if self.shards_weights else 1

    @property
    def optimizer_shards(self) -> int:
        """Into how many parts the optimizer's state is split."""
        return self.processes if self.shards_optimizer else 1

    def master_bytes(self, trained: float) -> float:
        """A separate fp32 copy of `trained` bytes of parameters that the optimizer updates."""
        return 0.0

    def reduction_bytes(self, gradients: float, width: int, hidden: int) -> float:
        """The buffers that gradients are reduced in.

        Args:
            gradients: bytes of all gradients.
            width: bytes of a trained scalar.
            hidden: the model's hidden size.
        """
        return 0.0

    def gathered_bytes(self, weights: Weights) -> tuple[float, float]:
        """Whole weights beside the shards: while the loss is computed, and in the backward of a decoder layer."""
        return 0.0, 0.0

    def calibration_bytes(self, weights: Weights) -> float:
        """Whole weights beside the shards during the calibration."""
        return self.gathered_bytes(weights)[1]

    def planned(self, hidden: int) -> dict[str, Any]:
        """What the plan's JSON says of the engine; its keys are the same for all engines."""
        return {
            "name": self.name,
            "gpus": self.processes,
            "offloads_weights": self.offloads_weights,
            "offloads_optimizer": self.offloads_optimizer,
            "keeps_gathered": False,
            "bucket": 500_000_000,
            "overlaps": False,
            "live": 1_050_000_000,
        }


class Sharding:
    """How an engine's sharded tensors are recognised and gathered. The defaults are those of an unsharded tensor.

    Attributes:
        gathers_by_hooks: whether a weight is filled only while its layer's own module runs; code elsewhere may read an
            empty tensor.
        not_gathered: the rest of a message that begins with the layer's name, for a weight of which only a part is
            here.
    """

    gathers_by_hooks: ClassVar[bool] = False
    not_gathered: ClassVar[str] = ""

    def matches(self, tensor: "Tensor | None") -> bool:
        """Whether the tensor is sharded this way."""
        return True

    def manages(self, layer: "nn.Module") -> bool:
        """Whether the weight of a layer is whole only while the engine gathers it. Must not gather it."""
        return False

    def is_gathered(self, weight: "Tensor") -> bool:
        """Whether the engine has a weight ready for the pass that runs now."""
        return True

    def whole(self, tensor: "Tensor") -> "Tensor":
        """The whole tensor, a copy if it is sharded; every process must call this."""
        return tensor

    def shape_of(self, tensor: "Tensor") -> "torch.Size":
        """The shape of the whole tensor."""
        return tensor.shape

    def dtype_of(self, tensor: "Tensor") -> "torch.dtype":
        """The dtype in which the tensor is stored."""
        return tensor.dtype

    def is_whole(self, tensor: "Tensor") -> bool:
        """Whether the tensor is not a shard: it has its full shape here."""
        return True


def move_to(model: Any, device: "torch.device | str") -> None:
    """Move a model from the CPU to the device that trains."""
    import torch

    if torch.device(device).type != "cpu" and model.device.type == "cpu":
        model.to(device)
