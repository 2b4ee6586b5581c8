"""What a YAML may say of the processes that train, and of what shards a model over them: DDP, FSDP2, DeepSpeed."""

import importlib.util
import json
import os
from collections.abc import Mapping, MutableMapping
from importlib.metadata import version as installed
from typing import Any

from packaging.version import Version

FULL_STATE_DICT = "FULL_STATE_DICT"

_REFUSED_ABOVE_ONE = ("tensor_parallel_size", "context_parallel_size", "expert_parallel_size")
# Keys of a DeepSpeed config that would train something else than the YAML says, or U, L and R in fewer bits.
_REFUSED_IN_DEEPSPEED: dict[str, str] = {
    "optimizer": "it would take the place of the YAML's optimizer, and of sparse_lr and lr_groups. Remove it",
    "scheduler": "it would take the place of the YAML's lr_scheduler. Remove it",
    "bf16.enabled": 'DeepSpeed would cast U, L and R to bf16. Write "auto": with bf16: true in the YAML the model then '
    "computes under DeepSpeed's torch_autocast, and U, L and R stay fp32",
    "fp16.enabled": "DeepSpeed would cast U, L and R to fp16. Remove it, and use bf16: true in the YAML",
    "amp.enabled": "it is Apex's mixed precision, which casts U, L and R. Remove it, and use bf16: true in the YAML",
    "torch_autocast": "the plugin writes it as bf16 in the YAML says. Remove it",
    "zero_optimization.zero_quantized_weights": "it rounds what is trained. Remove it",
    "zero_optimization.zero_quantized_nontrainable_weights": "it rounds the base, which the scores are computed from. "
    "Remove it",
    "zero_optimization.zero_quantized_gradients": "it rounds the gradients. Remove it",
    "zero_optimization.offload_optimizer": "it was not tried, and an adapter's state is small. Remove it",
    "zero_optimization.offload_param": "it was not tried. Remove it",
    "zero_optimization.cpu_offload": "it was not tried, and an adapter's state is small. Remove it",
    "zero_optimization.cpu_offload_param": "it was not tried. Remove it",
    "zero_optimization.stage3_module_granularity_threshold": "it was not tried: gradients of layers that are gathered "
    "together are reduced before they are there, where the input needs none. Remove it",
    "zero_optimization.leaf_module": "it was not tried: gradients of layers that are gathered together are reduced "
    "before they are there, where the input needs none. Remove it",
    "zero_optimization.stage3_use_all_reduce_for_fetch_params": "what is fetched together must be of one dtype there, "
    "and an adapted layer has two: U, L and R are fp32. Remove it",
    "zero_optimization.zenflow": "it was not tried. Remove it",
    "compression_training": "it prunes or quantizes what is trained. Remove it",
    "tensor_parallel": "it is not supported yet. Remove it",
}
# Other names that DeepSpeed reads the same keys by: an old one, and the fields of which those are the aliases.
_OTHER_NAMES_IN_DEEPSPEED = {
    "bf16.enabled": "bfloat16.enabled",
    "zero_optimization.stage3_module_granularity_threshold": "zero_optimization.module_granularity_threshold",
    "zero_optimization.stage3_use_all_reduce_for_fetch_params": "zero_optimization.use_all_reduce_for_fetch_params",
}
# Keys that do nothing with this value, and shard the base otherwise than over all processes with another.
_SHARDS_OTHERWISE = {"zero_optimization.zero_hpz_partition_size": 1, "zero_optimization.mics_shard_size": -1}
_REFUSED_BESIDE_DEEPSPEED: dict[str, str] = {
    "fp16": "DeepSpeed would cast U, L and R to fp16; use bf16: true",
    "torch_compile": "it was not tried. Remove one of them",
    "deepcompile": "it was not tried. Remove it",
    "load_in_4bit": "it was not tried; DDP keeps the quantized base on every GPU, as ZeRO-1 and ZeRO-2 would",
    "load_in_8bit": "it was not tried; DDP keeps the quantized base on every GPU, as ZeRO-1 and ZeRO-2 would",
    "lora_modules_to_save": "DeepSpeed joins all that is trained in one tensor, and these modules are of the base's "
    "dtype; use DDP or FSDP2",
}


def check(cfg: MutableMapping[str, Any]) -> None:
    """Refuse what does not work with `adapter: supra` and `adapter: super`, and fill in what they need, in place.

    Raises:
        ValueError: names the key, the value and the remedy.
    """
    for key in _REFUSED_ABOVE_ONE:
        if (cfg.get(key) or 1) > 1:
            raise ValueError(f"{key}: {cfg[key]} does not work with adapter: {cfg['adapter']} yet. Remove the key.")
    if cfg.get("fsdp") or cfg.get("fsdp_config"):
        _check_fsdp(cfg)
    if cfg.get("deepspeed"):
        _check_deepspeed(cfg)
    if _world() > 1:
        if cfg.get("ddp_broadcast_buffers"):
            raise ValueError(
                "ddp_broadcast_buffers: true would send every support to every process before every forward pass, "
                "though it never changes. Remove the key."
            )
        cfg["ddp_broadcast_buffers"] = False


def _check_fsdp(cfg: MutableMapping[str, Any]) -> None:
    config = cfg.get("fsdp_config") or {}
    version = cfg.get("fsdp_version") or config.get("fsdp_version")
    if str(version) != "2":
        raise ValueError(
            f"fsdp_version: {version} is FSDP1, which PyTorch and Axolotl have deprecated; adapter: {cfg['adapter']} "
            "does not work with it. Write fsdp_version: 2."
        )
    if cfg.get("fsdp") or not config:
        raise ValueError(
            f"fsdp: {cfg.get('fsdp')} is how FSDP1 was configured; write fsdp_config, with fsdp_version: 2."
        )
    axolotl = installed("axolotl")
    if Version(axolotl) < Version("0.21"):
        raise ValueError(
            f"fsdp_config: FSDP2 does not work with adapter: {cfg['adapter']} under Axolotl {axolotl}: its checkpoints "
            "hold one process's part of an adapter, and what cannot be sharded, a support, must not be integers there. "
            "Use Axolotl 0.21 or newer (Python 3.12), or DDP: remove fsdp_config."
        )
    if _fsdp(config, "offload_params"):
        raise ValueError(
            "fsdp_config.offload_params: true keeps supports on the CPU, away from the weights that they index; it was "
            "not tried. Remove the key."
        )
    for key in ("state_dict_type", "final_state_dict_type"):
        if _fsdp(config, key) not in (None, FULL_STATE_DICT):
            raise ValueError(
                f"fsdp_config.{key}: {_fsdp(config, key)} leaves no adapter_model.safetensors in a checkpoint; write "
                f"{FULL_STATE_DICT}: of an adapter it is small."
            )
    if _fsdp(config, "state_dict_type") is None:
        config["state_dict_type"] = FULL_STATE_DICT
    if _fsdp(config, "cpu_ram_efficient_loading") and cfg.get("budget_scope") == "global":
        raise ValueError(
            "fsdp_config.cpu_ram_efficient_loading: true leaves all processes but one without weights to compare, as "
            "budget_scope: global does. Remove one of them."
        )
    if cfg.get("torch_compile"):
        raise ValueError("torch_compile: true was not tried with FSDP2; remove one of them.")
    if (cfg.get("dp_replicate_size") or 1) > 1:
        raise ValueError(f"dp_replicate_size: {cfg['dp_replicate_size']} was not tried with FSDP2. Remove the key.")


def _fsdp(config: Mapping[str, Any], key: str) -> Any:
    """A key of fsdp_config, whose old names begin with fsdp_."""
    return config.get(key, config.get(f"fsdp_{key}"))


def _check_deepspeed(cfg: MutableMapping[str, Any]) -> None:
    config = deepspeed_config(cfg["deepspeed"])

    def value(dotted: str) -> Any:
        found: Any = config
        for key in dotted.split("."):
            found = found.get(key) if isinstance(found, Mapping) else None
        # "none" is how DeepSpeed spells an offload that is off.
        return None if isinstance(found, Mapping) and found.get("device") == "none" else found

    stage = value("zero_optimization.stage")
    if stage not in (1, 2, 3):
        raise ValueError(
            f"deepspeed: zero_optimization.stage: {stage} shards nothing; write 1, 2 or 3, or remove deepspeed (DDP)."
        )
    others = {other: _REFUSED_IN_DEEPSPEED[key] for key, other in _OTHER_NAMES_IN_DEEPSPEED.items()}
    for key, reason in (_REFUSED_IN_DEEPSPEED | others).items():
        if value(key) not in (None, False, "auto"):
            raise ValueError(f"deepspeed: {key}: {value(key)} does not work with adapter: {cfg['adapter']}: {reason}.")
    for key, nothing in _SHARDS_OTHERWISE.items():
        if value(key) not in (None, nothing):
            raise ValueError(
                f"deepspeed: {key}: {value(key)} does not work with adapter: {cfg['adapter']}: it was not tried. "
                "Remove it."
            )
    for key in ("communication_data_type", "data_types.grad_accum_dtype"):
        if value(key) not in (None, "fp32"):
            raise ValueError(
                f"deepspeed: {key}: {value(key)} rounds the gradients of U, L and R, which are fp32. Remove it."
            )
    for key, reason in _REFUSED_BESIDE_DEEPSPEED.items():
        if cfg.get(key):
            raise ValueError(f"{key}: {cfg[key]} does not work with deepspeed and adapter: {cfg['adapter']}: {reason}.")


def deepspeed_config(named: Any) -> Mapping[str, Any]:
    """The DeepSpeed config that the YAML's `deepspeed` is, or names.

    Raises:
        ValueError: a file that is not there, or no JSON.
    """
    if isinstance(named, Mapping):
        return named
    try:
        with open(named, encoding="utf-8") as file:
            return json.load(file)
    except (OSError, ValueError) as error:
        raise ValueError(f"deepspeed: {named} cannot be read as a DeepSpeed config: {error}.") from error


def is_zero3(cfg: Mapping[str, Any]) -> bool:
    """Whether the YAML asks for DeepSpeed's ZeRO-3."""
    return (
        bool(cfg.get("deepspeed"))
        and (deepspeed_config(cfg["deepspeed"]).get("zero_optimization") or {}).get("stage") == 3
    )


def on_cpus() -> bool:
    """Whether a launcher started several processes that train on CPUs."""
    return _world() > 1 and os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes")


def _world() -> int:
    return int(os.environ.get("WORLD_SIZE") or 1)


def check_processes_know_each_other(distributed: bool) -> None:
    """Raise ValueError if a launcher started several processes and each of them takes itself for the only one."""
    if _world() > 1 and not distributed:
        raise ValueError(
            f"WORLD_SIZE={_world()}, but these processes do not know of each other: each would train alone and write "
            "the same output_dir. On CPUs set ACCELERATE_USE_CPU=true; for one process use --launcher python."
        )


def check_deepspeed_is_installed(cfg: MutableMapping[str, Any]) -> None:
    """Raise ValueError, with what to install, where the YAML asks for DeepSpeed and it is not there."""
    if cfg.get("deepspeed") and importlib.util.find_spec("deepspeed") is None:
        raise ValueError(
            "deepspeed: DeepSpeed is not installed. Install the extra of axolotl-supertune, pip install "
            "'axolotl-supertune[deepspeed]' (in a checkout: pip install -e '.[deepspeed]'), or remove the key (DDP)."
        )
