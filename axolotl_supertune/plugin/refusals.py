"""YAML keys that do not work with `adapter: supra` and `adapter: super`, each with the reason.

To refuse a key, add a line to a table here and a case to tests/plugin/test_validation.py. plugin/README.md says where
other keys are refused: those of engines, contradictions, values of the method's own settings.
"""

from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

from ..engines import engine_of
from ..method.calibration_data import TRAINING_SET
from ..method.config_error import ConfigError
from ..tuner import SupraConfig
from ..tuner.quantization import BACKENDS, SUPPORTED_BASES

_NEW_HEAD = "the classification head it trains is not in the adapter's layers; not supported yet"
_LORA_KERNELS = "Axolotl's fused kernels know LoRA's layers only"
_WHOLE_TRAINING_SET = "records are drawn from a training set that is there as a whole"

# Key -> why. With these set, something else would be trained than the key says, or nothing.
REFUSED: dict[str, str] = {
    "rl": "preference and RL trainers wrap the model later than the plugin can follow; not supported yet",
    "gptq": SUPPORTED_BASES,
    "model_quantization_config": SUPPORTED_BASES,
    "qlora_sharded_model_loading": "it loads bases for adapter: qlora only",
    "relora": "ReLoRA restarts have no meaning for a fixed support",
    "reward_model": _NEW_HEAD,
    "process_reward_model": _NEW_HEAD,
    "qat": "quantization-aware training replaces the layers that SUPRA adapts",
    "unfrozen_parameters": "base weights trained so are not in the adapter file and would be lost; name whole modules "
    "in lora_modules_to_save instead",
    "lora_target_parameters": "SUPRA adapts linear layers, not bare parameters",
    "lora_fan_in_fan_out": "SUPRA adapts torch.nn.Linear only",
    "lora_rank_pattern": "every layer's rank follows from its budget and supra_lambda",
    "lora_alpha_pattern": "one lora_alpha serves all layers",
    "loraplus_lr_ratio": "LoRA+ looks for LoRA's parameter names; use sparse_lr or lr_groups",
    "peft_use_dora": "DoRA is another parameterisation",
    "peft_use_rslora": "the scaling is lora_alpha / r",
    "peft_layer_replication": "replicated layers would share one support",
    "peft_init_lora_weights": "L starts at zero and R Kaiming-uniform, so that step 0 is the base model",
    "peft_trainable_token_indices": "not supported; use lora_modules_to_save",
    "peft": "LoftQ initialises LoRA's own factors",
    "lora_mlp_kernel": _LORA_KERNELS,
    "lora_qkv_kernel": _LORA_KERNELS,
    "lora_o_kernel": _LORA_KERNELS,
    "lora_embedding_kernel": _LORA_KERNELS,
}
# The same for keys that are refused whatever their value, false included.
REFUSED_EVEN_IF_FALSE: dict[str, str] = {
    "peft_autocast_adapter_dtype": "U, L and R are always fp32",
    "peft_ensure_weight_tying": "layers with tied weights are not adapted",
}
# Key -> the values that are not refused, and why others are.
REFUSED_UNLESS: dict[str, tuple[list[str], str]] = {
    "nf4_backend": ([backend.name for backend in BACKENDS], SUPPORTED_BASES),
}
# Key -> why, beside calibration_dataset: training_set.
REFUSED_BESIDE_TRAINING_SET: dict[str, str] = {
    "streaming": _WHOLE_TRAINING_SET,
    "pretraining_dataset": _WHOLE_TRAINING_SET,
}
# Key -> why, beside a mask_score that needs gradients.
REFUSED_BESIDE_GRADIENT: dict[str, str] = {
    "fp16": "gradients underflow in fp16 without the scale that training finds as it goes; bf16: true needs none",
    "torch_compile": "it was not tested",
    "streaming": _WHOLE_TRAINING_SET,
    "pretraining_dataset": _WHOLE_TRAINING_SET,
}


def check_modes(cfg: MutableMapping[str, Any]) -> None:
    """Refuse keys that do not work with this adapter; `Engine.check` also sets ddp_broadcast_buffers, in place.

    Raises:
        ConfigError: names the key, its value, the reason and the remedy.
    """
    for key, reason in _set_keys(cfg):
        raise ConfigError(key, f"{cfg[key]} does not work with adapter: {cfg['adapter']}: {reason}. Remove the key.")
    if "muon" in str(cfg.get("optimizer")).lower():
        raise ConfigError(
            "optimizer",
            f"{cfg['optimizer']} updates matrices only and would leave the sparse values untrained; use "
            "adamw_torch_fused.",
        )
    if cfg.get("calibration_dataset") == TRAINING_SET:
        for key, reason in REFUSED_BESIDE_TRAINING_SET.items():
            if cfg.get(key):
                raise ConfigError(
                    key,
                    f"{cfg[key]} does not work with calibration_dataset: {TRAINING_SET}: {reason}. Remove {key}, or "
                    "name a text.",
                )
    engine = engine_of(cfg)
    engine.check(cfg)
    if engine.key and engine.partial_save_refusal:
        from . import axolotl_compat  # loads Axolotl, which a grid's report does without

        if not axolotl_compat.saves_sharded_adapters():
            raise ConfigError(
                engine.key,
                f"{engine.name} does not work with adapter: {cfg['adapter']} under Axolotl "
                f"{axolotl_compat.axolotl_version()}: {engine.partial_save_refusal}.",
            )


def _set_keys(cfg: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    yield from ((key, reason) for key, reason in REFUSED.items() if cfg.get(key))
    yield from ((key, reason) for key, reason in REFUSED_EVEN_IF_FALSE.items() if cfg.get(key) is not None)
    for key, (allowed, reason) in REFUSED_UNLESS.items():
        if cfg.get(key) not in (None, *allowed):
            yield key, reason


def check_gradient(cfg: Mapping[str, Any], config: SupraConfig) -> None:
    """Refuse keys beside which the support cannot be chosen by gradient.

    Args:
        cfg: the YAML, whose mask_score needs gradients.
        config: of the adapter that it describes.

    Raises:
        ConfigError: names the key, its value, the reason and the remedy.
    """
    warmup = config.low_rank_warmup_steps
    if not config.has_sparse_part:
        if warmup:
            raise ConfigError(
                "low_rank_warmup_steps",
                f"{warmup} has no effect with supra_lambda: 1, which is LoRA: there is no sparse part to train after "
                "the warm-up; drop it.",
            )
        return
    engine = engine_of(cfg)
    by_engine = {engine.key: engine.gradient_refusal} if engine.key and engine.gradient_refusal else {}
    for key, reason in (by_engine | REFUSED_BESIDE_GRADIENT).items():
        if cfg.get(key):
            # A mapping or a list is long; that it is there is enough.
            value = cfg[key] if isinstance(cfg[key], str | bool | int) else "it"
            raise ConfigError(
                key,
                f"{value} does not work with mask_score: {cfg['mask_score']}: {reason}. Remove {key}, or choose the "
                "support by mask_score: wanda or magnitude.",
            )
    steps = cfg.get("max_steps")
    if isinstance(steps, int) and 0 < steps <= warmup:
        raise ConfigError(
            "low_rank_warmup_steps",
            f"{warmup} leaves none of max_steps: {steps} to the sparse part; lower it.",
        )
    if warmup and cfg.get("load_best_model_at_end"):
        raise ConfigError(
            "load_best_model_at_end",
            f"true does not work with low_rank_warmup_steps: {warmup}: the best checkpoint may be one from before the "
            "support was chosen. Remove load_best_model_at_end, or low_rank_warmup_steps.",
        )
