"""What a YAML may say: near-misses, contradictions and unsupported modes are refused before any model loads.

Works on the raw YAML mapping, before Axolotl's own validation, and is idempotent: `merge-lora` runs it twice.
"""

import difflib
import inspect
import math
import os
import sys
from collections.abc import Iterable, Mapping, MutableMapping
from typing import Any

from transformers import BitsAndBytesConfig

from ..engines import engine_of
from ..method.calibration_data import (
    C4_DATASET,
    DEFAULT_SAMPLES,
    DEFAULT_SEQUENCE_LEN,
    DEFAULT_SPLIT,
    DEFAULT_TEXT_FIELD,
    TRAINING_SET,
    check_source,
)
from ..method.scores import SCORES
from ..ops.dispatch import requested
from ..tuner import SupraConfig
from . import gradient_checks
from .args import SupertuneArgs

Config = MutableMapping[str, Any]

ADAPTERS = ("supra", "super")
DEFAULT_SEED = 42  # Axolotl's own
# What only supra and super read; lora_exclude_modules is Axolotl's for LoRA too, though its schema forgets it.
OWN_KEYS = tuple(key for key in SupertuneArgs.model_fields if key != "lora_exclude_modules")
SHARED_KEYS = (
    "lora_r",
    "lora_alpha",
    "lora_dropout",
    "lora_target_linear",
    "lora_target_modules",
    "lora_exclude_modules",
    "peft_layers_to_transform",
    "peft_layers_pattern",
    "lora_modules_to_save",
    "lora_model_dir",
)
SPARSE_LR_GROUP = "supra_values"

# The paper's and Python's names of keys: to no spelling check are they near.
_ALIASES = {
    "r0": "lora_r",
    "r": "lora_r",
    "rank": "lora_r",
    "lora_rank": "lora_r",
    "alpha": "lora_alpha",
    "dropout": "lora_dropout",
    "lambda": "supra_lambda",
    "lambd": "supra_lambda",
    "lam": "supra_lambda",
    "density": "sparse_density",
    "sparsity": "sparse_density",
    "mask": "mask_score",
    "beta": "hybrid_beta",
    "score": "mask_score",
    "direction": "sparse_direction",
}

_DEFAULTS: dict[str, Any] = {
    "supra_lambda": 0.8,
    "mask_score": "wanda",
    "sparse_direction": "bottom",
    "support_scope": "layer",
    "budget_scope": "layer",
    "lora_alpha": 16,
    "lora_dropout": 0.05,
    "values_dtype": "fp32",
    "calibration_dataset": C4_DATASET,
    "calibration_split": DEFAULT_SPLIT,
    "calibration_text_field": DEFAULT_TEXT_FIELD,
    "calibration_samples": DEFAULT_SAMPLES,
    "calibration_sequence_len": DEFAULT_SEQUENCE_LEN,
    "calibration_batch_size": 8,
}

_TEXT_KEYS = ("calibration_split", "calibration_text_field")

# Keys that would train something else than they say, or nothing, and why.
_REFUSED: dict[str, str] = {
    "rl": "preference and RL trainers wrap the model later than the plugin can follow; not supported yet",
    "gptq": "of quantized bases those of bitsandbytes alone are supported: load_in_4bit or load_in_8bit",
    "model_quantization_config": "of quantized bases those of bitsandbytes alone are supported: load_in_4bit or "
    "load_in_8bit",
    "qlora_sharded_model_loading": "it loads bases for adapter: qlora only",
    "relora": "ReLoRA restarts have no meaning for a fixed support",
    "reward_model": "the classification head it trains is not in the adapter's layers; not supported yet",
    "process_reward_model": "the classification head it trains is not in the adapter's layers; not supported yet",
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
    "lora_mlp_kernel": "Axolotl's fused kernels know LoRA's layers only",
    "lora_qkv_kernel": "Axolotl's fused kernels know LoRA's layers only",
    "lora_o_kernel": "Axolotl's fused kernels know LoRA's layers only",
    "lora_embedding_kernel": "Axolotl's fused kernels know LoRA's layers only",
}
_REFUSED_EVEN_IF_FALSE: dict[str, str] = {
    "peft_autocast_adapter_dtype": "U, L and R are fp32 always",
    "peft_ensure_weight_tying": "layers with tied weights are not adapted",
}


def prepare(cfg: Config, known_keys: Iterable[str]) -> None:
    """Check a raw config and fill in the defaults of `adapter: supra` and `adapter: super`, in place.

    Args:
        cfg: the YAML as a mapping; changed in place.
        known_keys: the keys that Axolotl itself knows.

    Raises:
        ValueError: names the key, the value and the remedy.
        FileNotFoundError: a file that a key names is not there.
    """
    _check_names(cfg, set(known_keys))
    _check_command_line(cfg, sys.argv[1:])
    adapter = cfg.get("adapter")
    if adapter not in ADAPTERS:
        ours = [key for key in OWN_KEYS if cfg.get(key) is not None]
        if ours:
            raise ValueError(
                f"{ours[0]}: {cfg[ours[0]]} has no effect with adapter: {adapter}; set adapter: supra (or super), or "
                "drop the key."
            )
        return
    requested()  # a wrong SUPERTUNE_KERNELS is told before anything is loaded
    _check_modes(cfg)
    if adapter == "super":
        if _number(cfg, "supra_lambda") not in (None, 0):
            raise ValueError(
                f"supra_lambda: {cfg['supra_lambda']} contradicts adapter: super, which is supra with supra_lambda 0; "
                "write adapter: supra."
            )
        cfg["supra_lambda"] = 0.0
    _set_quantization(cfg)
    _fill_defaults(cfg)
    method = method_config(cfg)  # raises on what the method cannot do
    if method.by_gradient:
        gradient_checks.check(cfg, has_sparse_part(cfg))
    _check_files(cfg)
    # The default, memory-efficient merge knows LoRA's file only and would write the base model back unmerged.
    cfg["merge_method"] = "legacy"
    if cfg.get("sparse_lr") is not None:
        _add_sparse_lr(cfg)


def method_config(cfg: Config, **more: Any) -> SupraConfig:
    """The PEFT config that a prepared YAML describes; `more` adds what only the model can tell."""
    return SupraConfig(
        r0=_integer(cfg, "lora_r"),
        sparse_density=_number(cfg, "sparse_density"),
        supra_lambda=_number(cfg, "supra_lambda"),
        lora_alpha=_number(cfg, "lora_alpha"),
        lora_dropout=_number(cfg, "lora_dropout"),
        mask_score=cfg["mask_score"],
        sparse_direction=cfg["sparse_direction"],
        hybrid_beta=_number(cfg, "hybrid_beta"),
        support_seed=cfg["support_seed"],
        support_scope=cfg["support_scope"],
        budget_scope=cfg["budget_scope"],
        gradient_batches=_integer(cfg, "gradient_batches"),
        low_rank_warmup_steps=_integer(cfg, "low_rank_warmup_steps") or 0,
        values_dtype=cfg["values_dtype"],
        **more,
    )


def check_provenance(cfg: Config, provenance: Mapping[str, Any], maximum: int | None) -> None:
    """Refuse `calibration_path` beside keys that say how to calibrate, unless its norms were made so.

    Args:
        cfg: the YAML.
        provenance: of the norms.
        maximum: the longest window that the model takes.

    Raises:
        ValueError: names the key, its value, and what the file says.
    """
    for name in ("dataset", "split", "text_field", "seed", "samples", "sequence_len"):
        key = f"calibration_{name}"
        asked, made = _integer(cfg, key), provenance.get(name)
        if name == "sequence_len" and asked is not None and maximum is not None:
            asked = min(asked, maximum)
        if asked is not None and asked != made:
            raise ValueError(
                f"{key}: {cfg[key]} beside calibration_path: {cfg['calibration_path']}, whose norms were made with "
                f"{'an unknown one' if made is None else made}. Drop the key to use them, or calibrate anew: axolotl "
                "supertune calibrate CONFIG --overwrite, or without calibration_path."
            )


def has_sparse_part(cfg: Config) -> bool:
    """Whether any layer gets a sparse part: all do but under a rank budget of its own with λ = 1."""
    by_density = cfg.get("sparse_density") is not None or cfg.get("budget_scope") == "density"
    return by_density or _number(cfg, "supra_lambda") != 1


def may_need_norms(cfg: Config) -> bool:
    """Whether the support needs activation norms."""
    return SCORES[cfg["mask_score"]].needs == "norms" and cfg["sparse_direction"] != "random" and has_sparse_part(cfg)


def _check_names(cfg: Config, known: set[str]) -> None:
    ours = (*OWN_KEYS, *SHARED_KEYS)
    for key in cfg:
        if key in known or key in ours:
            continue
        plain = str(key).replace("-", "_").lower()
        near = [_ALIASES[plain]] if plain in _ALIASES else difflib.get_close_matches(plain, ours, n=1, cutoff=0.75)
        if near:
            raise ValueError(f"{key}: {cfg[key]} is not a key; did you mean {near[0]}?")
        if str(key).startswith(
            ("supra_", "sparse_", "calibration_", "mask_", "hybrid_", "support_", "budget_", "low_rank_")
        ):
            raise ValueError(f"{key}: {cfg[key]} is not a key; the plugin's keys are {', '.join(OWN_KEYS)}.")


def _check_command_line(cfg: Config, arguments: Iterable[str]) -> None:
    """Refuse a key of ours on the command line that did not arrive: `axolotl train` drops options it does not know."""
    words = list(arguments)
    for word, following in zip(words, [*words, ""][1:], strict=True):
        name, equals, value = word.partition("=")
        key = name.removeprefix("--").replace("-", "_")
        if name.startswith("--") and key in OWN_KEYS:
            value = value if equals else following
            arrived = cfg.get(key)
            try:
                same = float(arrived) == float(value)  # type: ignore[arg-type]
            except (TypeError, ValueError):
                same = str(arrived) == value
            if not same:
                raise ValueError(
                    f"{name} {value} on the command line did not reach the config ({key}: {arrived}): Axolotl drops "
                    f"plugin keys there. Write it in the YAML, or run accelerate launch -m axolotl.cli.train … "
                    f"--{key}={value}."
                )


def _check_modes(cfg: Config) -> None:
    for key, reason in _REFUSED.items():
        if cfg.get(key):
            raise ValueError(
                f"{key}: {cfg[key]} does not work with adapter: {cfg['adapter']}: {reason}. Remove the key."
            )
    for key, reason in _REFUSED_EVEN_IF_FALSE.items():
        if cfg.get(key) is not None:
            raise ValueError(
                f"{key}: {cfg[key]} does not work with adapter: {cfg['adapter']}: {reason}. Remove the key."
            )
    if "muon" in str(cfg.get("optimizer")).lower():
        raise ValueError(
            f"optimizer: {cfg['optimizer']} updates matrices only and would leave the sparse values untrained; use "
            "adamw_torch_fused."
        )
    engine_of(cfg).check(cfg)


def _set_quantization(cfg: Config) -> None:
    """Have the base loaded in 4 or 8 bits: Axolotl itself reads the two keys for lora and qlora alone.

    The config that is set here says no more than how many bits; `quantized_base.complete` says the rest.
    """
    asked = [key for key in ("load_in_4bit", "load_in_8bit") if cfg.get(key)]
    if len(asked) == 2:
        raise ValueError("load_in_4bit: true and load_in_8bit: true: a base is quantized one way, drop one of them.")
    if cfg.get("nf4_backend") not in (None, "bitsandbytes"):
        raise ValueError(
            f"nf4_backend: {cfg['nf4_backend']} does not work with adapter: {cfg['adapter']}: of quantized bases those "
            "of bitsandbytes alone are supported. Remove the key."
        )
    more = cfg.get("bnb_config_kwargs")
    if more and asked != ["load_in_4bit"] and not cfg.get("merge_lora"):  # merge-lora itself turns load_in_4bit off
        raise ValueError(
            f"bnb_config_kwargs: {dict(more)} has no effect without load_in_4bit: true, for which alone Axolotl reads "
            "it; set that, or drop the key."
        )
    known = set(inspect.signature(BitsAndBytesConfig).parameters) - {"kwargs", "load_in_4bit", "load_in_8bit"}
    for key, value in (more or {}).items():
        if key not in known:
            raise ValueError(
                f"bnb_config_kwargs.{key}: {value} is no setting of transformers' BitsAndBytesConfig; those are "
                f"{', '.join(sorted(known))}."
            )
    if not asked:
        return
    overrides = dict(cfg.get("overrides_of_model_kwargs") or {})
    placeholder = {asked[0]: True}
    if overrides.get("quantization_config") not in (None, placeholder):
        raise ValueError(
            f"{asked[0]}: true and overrides_of_model_kwargs.quantization_config both say how the base is quantized; "
            "keep one of them (bnb_config_kwargs changes the settings of load_in_4bit)."
        )
    cfg["overrides_of_model_kwargs"] = {**overrides, "quantization_config": placeholder}


def _fill_defaults(cfg: Config) -> None:
    # Beside calibration_path, only what the YAML itself says of a calibration is to be compared with the file.
    calibrates = not cfg.get("calibration_path")
    no_text = _TEXT_KEYS if cfg.get("calibration_dataset") == TRAINING_SET else ()
    for key in no_text:
        if cfg.get(key) is not None:
            raise ValueError(
                f"{key}: {cfg[key]} has no effect with calibration_dataset: {TRAINING_SET}, whose records are those of "
                "the YAML's datasets; drop it."
            )
    for key in ("streaming", "pretraining_dataset") if no_text else ():
        if cfg.get(key):
            raise ValueError(
                f"{key}: {cfg[key]} does not work with calibration_dataset: {TRAINING_SET}: records are drawn from a "
                f"training set that is there as a whole. Remove {key}, or name a text."
            )
    for key, value in _DEFAULTS.items():
        if cfg.get(key) is None and key not in no_text and (calibrates or not key.startswith("calibration_")):
            cfg[key] = value
    if cfg.get("lora_r") is None and cfg.get("sparse_density") is None:
        cfg["lora_r"] = 8
    if cfg.get("lora_target_linear") is None and not cfg.get("lora_target_modules"):
        cfg["lora_target_linear"] = True
    if not cfg.get("lora_target_linear") and not cfg.get("lora_target_modules"):
        raise ValueError(
            "lora_target_linear: false without lora_target_modules leaves no layer to adapt; name modules, or drop the "
            "key to adapt all linear layers but lm_head."
        )
    seed = _integer(cfg, "seed")
    for key in ("support_seed", "calibration_seed") if calibrates else ("support_seed",):
        if cfg.get(key) is None:
            cfg[key] = DEFAULT_SEED if seed is None else seed


def check_base(name: Any) -> None:
    """Refuse a base model that can only be a folder, and is none: the hub would say that it is no name of a model.

    Raises:
        FileNotFoundError: names the key, the folder and the remedy.
    """
    if not isinstance(name, str) or os.path.isdir(name):
        return
    if name.startswith(("/", "./", "../", "~")) or name.count("/") > 1:
        home = " (~ is not expanded)" if name.startswith("~") else ""
        raise FileNotFoundError(
            f"base_model: there is no folder {name}{home}. Name the folder that holds the model's config.json, or a "
            "model on the hub as OWNER/NAME."
        )


def _check_files(cfg: Config) -> None:
    check_base(cfg.get("base_model"))
    datasets = cfg.get("datasets") or []
    for at, dataset in enumerate(datasets if isinstance(datasets, list) else []):
        path = dataset.get("path") if isinstance(dataset, dict) else None
        if isinstance(path, str) and os.path.isfile(path) and os.path.getsize(path) == 0:
            raise ValueError(f"datasets[{at}].path: {path} is empty; it needs at least one training record.")
    needed = may_need_norms(cfg)
    if cfg.get("calibration_path"):
        if not needed:
            raise ValueError(
                f"calibration_path: {cfg['calibration_path']} has no effect with mask_score: {cfg['mask_score']}, "
                f"sparse_direction: {cfg['sparse_direction']}, supra_lambda: {cfg['supra_lambda']}; drop it."
            )
        if not os.path.isfile(cfg["calibration_path"]):
            raise FileNotFoundError(
                f"calibration_path: there is no file {cfg['calibration_path']}; axolotl supertune calibrate CONFIG "
                "writes it."
            )
        if cfg.get("calibration_batch_size") is not None:
            raise ValueError(
                f"calibration_batch_size: {cfg['calibration_batch_size']} has no effect with calibration_path: "
                f"{cfg['calibration_path']}; drop one of them."
            )
    elif needed and cfg["calibration_dataset"] != TRAINING_SET:
        check_source(cfg["calibration_dataset"])
    resume = cfg.get("resume_from_checkpoint")
    if isinstance(resume, str) and not os.path.isdir(resume):
        raise FileNotFoundError(f"resume_from_checkpoint: there is no folder {resume}.")


def _add_sparse_lr(cfg: Config) -> None:
    rate = _number(cfg, "sparse_lr")
    if isinstance(rate, bool) or not isinstance(rate, (int, float)) or not 0 < rate < math.inf:
        raise ValueError(f"sparse_lr: {cfg['sparse_lr']} is not a positive number.")
    groups = cfg.get("lr_groups") or []
    if not isinstance(groups, list) or not all(isinstance(group, Mapping) for group in groups):
        raise ValueError(f"lr_groups: {groups} is not a list of groups, each with name, modules and lr.")
    if not has_sparse_part(cfg):
        raise ValueError(f"sparse_lr: {cfg['sparse_lr']} has no effect with supra_lambda: 1, which is LoRA; drop it.")
    ours = {"name": SPARSE_LR_GROUP, "modules": [SPARSE_LR_GROUP], "lr": rate}
    others = [group for group in groups if group != ours]
    if any(group.get("name") == SPARSE_LR_GROUP for group in others):
        raise ValueError(f"lr_groups: the name {SPARSE_LR_GROUP} is what sparse_lr makes; use one of the two.")
    cfg["lr_groups"] = [ours, *others]  # the first group that matches a parameter has it


def _integer(cfg: Config, key: str) -> Any:
    """The key's value, a string of digits read as an integer."""
    value = cfg.get(key)
    return int(value) if isinstance(value, str) and value.strip().lstrip("-").isdigit() else value


def _number(cfg: Config, key: str) -> Any:
    """The key's value, with YAML's `1e-3` (a string to YAML 1.1) read as a number."""
    value = cfg.get(key)
    if not isinstance(value, str):
        return value
    try:
        return float(value)
    except ValueError:
        raise ValueError(f"{key}: {value} is not a number.") from None
