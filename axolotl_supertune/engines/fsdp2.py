"""FSDP2 (PyTorch's `fully_shard`): its YAML keys, calibration on the CPU copy, fp32 training and DTensors.

Internals that this file reaches into:
- `_is_fsdp_managed_module`, an attribute that `fully_shard` sets for torch.compile. Without it a sharded layer would be
  taken for a plain one and its effective weight written into memory that is freed: tests/engines/test_fully_shard.py.
- `accelerator.state.fsdp_plugin.mixed_precision_policy`, which Accelerate reads when it prepares the model. If that
  changed, L and R would be gathered in bf16: `RequireFp32` raises at the first step, and
  tests/plugin/test_validation.py::test_fsdp2_keeps_the_adapter_in_fp32 tells.
"""

import contextlib
from collections.abc import Mapping, MutableMapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from ..method.config_error import ConfigError
from ..method.layerwise import streamed
from .engine import Engine, Sharding, Weights

FULL_STATE_DICT = "FULL_STATE_DICT"


class FSDP2(Engine):
    """Base and adapter are sharded over all processes; a decoder layer is gathered while it is used."""

    name = "FSDP2"
    key = "fsdp_config"
    shards_weights = True
    shards_optimizer = True
    gathers_by = "FSDP"
    gradient_refusal = "a process holds a part of every weight, and so of every gradient"
    partial_save_refusal = (
        "its checkpoints would hold one process's part of an adapter. Use Axolotl 0.21 or newer (Python 3.12), or DDP: "
        "remove fsdp_config"
    )

    def setting(self, key: str) -> Any:
        """A key of fsdp_config, whose old name begins with fsdp_."""
        return _setting(self.settings, key)

    def check_settings(self, cfg: MutableMapping[str, Any]) -> None:
        """Refuse FSDP1, offloading, sharded checkpoints and what was not tested beside FSDP2."""
        config = cfg.get("fsdp_config") or {}
        version = cfg.get("fsdp_version") or config.get("fsdp_version")
        if str(version) != "2":
            raise ConfigError(
                "fsdp_version",
                f"{version} is FSDP1, which PyTorch and Axolotl have deprecated; adapter: "
                f"{cfg['adapter']} does not work with it. Write fsdp_version: 2.",
            )
        if cfg.get("fsdp") or not config:
            raise ConfigError(
                "fsdp", f"{cfg.get('fsdp')} is how FSDP1 was configured; write fsdp_config, with fsdp_version: 2."
            )
        _check_config(config, cfg)
        for key in ("load_in_4bit", "load_in_8bit"):
            if cfg.get(key):
                raise ConfigError(
                    key,
                    "true was not tested with FSDP2, which would shard packed codes; remove fsdp_config (DDP "
                    "keeps the quantized base on every GPU) or load the base in bf16.",
                )
        if cfg.get("torch_compile"):
            raise ConfigError("torch_compile", "true was not tested with FSDP2; remove one of them.")
        if (cfg.get("dp_replicate_size") or 1) > 1:
            raise ConfigError(
                "dp_replicate_size", f"{cfg['dp_replicate_size']} was not tested with FSDP2. Remove the key."
            )

    @property
    def only_first_has_weights(self) -> bool:
        """True with `cpu_ram_efficient_loading`: FSDP sends the weights to the others when it shards them."""
        return bool(self.setting("cpu_ram_efficient_loading"))

    def plain_forward(self, model: Any, device: torch.device | str) -> contextlib.AbstractContextManager[None]:
        """What is to be sharded waits on the CPU, and may be too large for one device: layers visit it one by one."""
        if model.device.type == "cpu":
            return streamed(model, device)
        return super().plain_forward(model, device)

    def prepare_trainer(self, trainer: Any) -> None:
        """Keep Accelerate's bf16 away from the shards: it would gather U, L and R in bf16 and round their gradients.

        The base is in bf16 without it.
        """
        plugin = trainer.accelerator.state.fsdp_plugin
        policy = plugin.mixed_precision_policy or MixedPrecisionPolicy()
        plugin.mixed_precision_policy = replace(policy, param_dtype=None, reduce_dtype=torch.float32)

    @property
    def checkpoints_activations(self) -> bool:
        return bool(self.setting("activation_checkpointing"))

    @property
    def offloads_weights(self) -> bool:
        return bool(self.setting("offload_params"))

    @property
    def offloads_optimizer(self) -> bool:
        return self.offloads_weights

    @property
    def keeps_gathered(self) -> bool:
        """Whether weights stay whole from forward to backward."""
        return self.setting("reshard_after_forward") is False and not self.offloads_weights

    def gathered_bytes(self, weights: Weights) -> tuple[float, float]:
        """Axolotl wraps every decoder layer, and all the rest as one unit that stays from its forward to the end.

        Of the decoder layers there are the one at work, the one that is prefetched, and the buffer it arrives in.
        """
        if self.keeps_gathered:
            return weights.whole, weights.whole
        return weights.rest, weights.rest + 3 * weights.block

    def planned(self, hidden: int) -> dict[str, Any]:
        return super().planned(hidden) | {"keeps_gathered": self.keeps_gathered}


def _check_config(config: MutableMapping[str, Any], cfg: Mapping[str, Any]) -> None:
    if _setting(config, "offload_params"):
        raise ConfigError(
            "fsdp_config.offload_params",
            "true keeps supports on the CPU, away from the weights that they index; it was not tested. Remove the key.",
        )
    for key in ("state_dict_type", "final_state_dict_type"):
        if _setting(config, key) not in (None, FULL_STATE_DICT):
            raise ConfigError(
                f"fsdp_config.{key}",
                f"{_setting(config, key)} leaves no adapter_model.safetensors in a checkpoint; "
                f"write {FULL_STATE_DICT}: of an adapter it is small.",
            )
    if _setting(config, "state_dict_type") is None:
        config["state_dict_type"] = FULL_STATE_DICT
    if _setting(config, "cpu_ram_efficient_loading") and cfg.get("budget_scope") == "global":
        raise ConfigError(
            "fsdp_config.cpu_ram_efficient_loading",
            "true leaves all processes but one without weights to compare, as "
            "budget_scope: global does. Remove one of them.",
        )


def _setting(config: Mapping[str, Any], key: str) -> Any:
    return config.get(key, config.get(f"fsdp_{key}"))


class DTensorSharding(Sharding):
    """Parameters are DTensors; while `fully_shard` has gathered a module they are plain tensors."""

    not_gathered = (
        "FSDP has not gathered its weight, only this process's shard is here. Call the layer through the module that "
        "fully_shard was applied to, one around the adapter (its decoder layer, or the SupraLinear, not the linear "
        "layer inside: auto_wrap_policy: TRANSFORMER_BASED_WRAP), and let the loss depend on that module's output; or "
        "call that module's unshard() before."
    )

    def matches(self, tensor: Tensor | None) -> bool:
        return isinstance(tensor, DTensor)

    def manages(self, layer: nn.Module) -> bool:
        # Set on modules even while their parameters are gathered.
        return getattr(layer, "_is_fsdp_managed_module", False)

    def is_gathered(self, weight: Tensor) -> bool:
        return False

    def whole(self, tensor: Tensor) -> Tensor:
        return tensor.full_tensor()  # type: ignore[attr-defined]

    def is_whole(self, tensor: Tensor) -> bool:
        return False
