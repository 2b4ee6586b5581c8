"""Checks of a YAML before any model is loaded: misspelt keys, contradictions, unsupported modes, missing files.

Works on the raw YAML, before Axolotl's own validation. `merge-lora` loads the YAML twice, so `prepare` must be
idempotent. Keys that do not work with super and supra at all are in `refusals`.
"""

import difflib
import math
import os
import sys
from collections.abc import Iterable, Mapping, MutableMapping
from typing import Any

from ..method.adapter_files import CONFIG as ADAPTER_CONFIG
from ..method.budget import DEFAULT_R0
from ..method.calibration_data import (
    C4_DATASET,
    DEFAULT_SAMPLES,
    DEFAULT_SEQUENCE_LEN,
    DEFAULT_SPLIT,
    DEFAULT_TEXT_FIELD,
    TRAINING_SET,
    check_source,
)
from ..method.config_error import ConfigError, MissingFileError
from ..ops import dispatch
from ..tuner import SupraConfig
from . import refusals
from .args import SupertuneArgs
from .yaml_values import integer, number

Config = MutableMapping[str, Any]

ADAPTERS = ("supra", "super")
DEFAULT_SEED = 42  # Axolotl's default
# Keys that only supra and super read. lora_exclude_modules is read for LoRA, too, but not in Axolotl's schema.
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
# The name of the group that sparse_lr makes; also the substring by which Axolotl finds the parameters U.
SPARSE_LR_GROUP = "supra_values"
_PREFIXES = ("supra_", "sparse_", "calibration_", "mask_", "hybrid_", "support_", "budget_", "low_rank_")

_WEIGHTS_OF_A_MODEL = ("model", "pytorch_model", "tf_model", "flax_model", "consolidated")

# Names of keys in the paper and in PEFT, which a comparison of spellings would not find.
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

# Keys that mean nothing for calibration_dataset: training_set.
_TEXT_KEYS = ("calibration_split", "calibration_text_field")


def missing_evaluations(cfg: Config) -> str | None:
    """Why Axolotl would evaluate nothing although the YAML asks for it, with the remedy; None if it evaluates.

    Axolotl turns `evals_per_epoch` into a fraction of all steps, and takes no fraction of 1.
    """
    has_data = cfg.get("val_set_size") or cfg.get("test_datasets")
    evaluations, epochs = cfg.get("evals_per_epoch"), cfg.get("num_epochs") or 1
    if not has_data or not evaluations or float(evaluations) * float(epochs) != 1:
        return None
    return (
        f"evals_per_epoch: {evaluations} with num_epochs: {epochs:g}: Axolotl evaluates nothing then, not even before "
        "the first step, and says nothing. Set evals_per_epoch: 2, or eval_steps."
    )


def prepare(cfg: Config, known_keys: Iterable[str]) -> None:
    """Check a raw config and fill in the defaults of `adapter: supra` and `adapter: super`, in place.

    Args:
        cfg: the YAML as a mapping; changed in place.
        known_keys: the keys of Axolotl and of all plugins.

    Raises:
        ConfigError: names the key, the value and the remedy. A ValueError.
        MissingFileError: a file that a key names does not exist. A FileNotFoundError.
        ValueError: two settings of the method contradict each other.
    """
    from . import quantized_base  # imports Axolotl's loaders, which reading a grid's file does not need

    _check_names(cfg, set(known_keys))
    _check_command_line(cfg, sys.argv[1:])
    adapter = cfg.get("adapter")
    if adapter not in ADAPTERS:
        ours = [key for key in OWN_KEYS if cfg.get(key) is not None]
        if ours:
            raise ConfigError(
                ours[0],
                f"{cfg[ours[0]]} has no effect with adapter: {adapter}; set adapter: supra (or super), or drop the "
                "key.",
            )
        return
    dispatch.requested()  # refuses a wrong SUPERTUNE_KERNELS before anything is loaded
    refusals.check_modes(cfg)
    if adapter == "super":
        if number(cfg, "supra_lambda") not in (None, 0):
            raise ConfigError(
                "supra_lambda",
                f"{cfg['supra_lambda']} contradicts adapter: super, which is supra with supra_lambda 0; write "
                "adapter: supra.",
            )
        cfg["supra_lambda"] = 0.0
    quantized_base.check_keys(cfg)
    _fill_defaults(cfg)
    config = method_config(cfg)  # raises ValueError for settings that contradict each other
    if config.by_gradient:
        refusals.check_gradient(cfg, config)
    _check_files(cfg, config)
    # Axolotl's default merge reads LoRA's file format only, and would write the base model back unmerged.
    cfg["merge_method"] = "legacy"
    if cfg.get("sparse_lr") is not None:
        _add_sparse_lr(cfg, config)


def method_config(cfg: Config, **more: Any) -> SupraConfig:
    """The PEFT config that a prepared YAML describes.

    Args:
        cfg: the YAML, after `prepare`.
        more: fields that only the model can tell.
    """
    return SupraConfig(
        r0=integer(cfg, "lora_r"),
        sparse_density=number(cfg, "sparse_density"),
        supra_lambda=number(cfg, "supra_lambda"),
        lora_alpha=number(cfg, "lora_alpha"),
        lora_dropout=number(cfg, "lora_dropout"),
        mask_score=cfg["mask_score"],
        sparse_direction=cfg["sparse_direction"],
        hybrid_beta=number(cfg, "hybrid_beta"),
        support_seed=cfg["support_seed"],
        support_scope=cfg["support_scope"],
        budget_scope=cfg["budget_scope"],
        gradient_batches=integer(cfg, "gradient_batches"),
        low_rank_warmup_steps=integer(cfg, "low_rank_warmup_steps") or 0,
        values_dtype=cfg["values_dtype"],
        **more,
    )


def _check_names(cfg: Config, known: set[str]) -> None:
    """Refuse misspelt keys of ours: Axolotl drops keys that it does not know without a message."""
    ours = (*OWN_KEYS, *SHARED_KEYS)
    for key in cfg:
        if key in known or key in ours:
            continue
        plain = str(key).replace("-", "_").lower()
        similar = [_ALIASES[plain]] if plain in _ALIASES else difflib.get_close_matches(plain, ours, n=1, cutoff=0.75)
        if similar:
            raise ConfigError(str(key), f"{cfg[key]} is not a key; did you mean {similar[0]}?")
        if str(key).startswith(_PREFIXES):
            raise ConfigError(str(key), f"{cfg[key]} is not a key; the plugin's keys are {', '.join(OWN_KEYS)}.")


def _check_command_line(cfg: Config, arguments: Iterable[str]) -> None:
    """Refuse a key of ours on the command line that did not reach the config: `axolotl train` drops unknown options."""
    words = list(arguments)
    for word, following in zip(words, [*words, ""][1:], strict=True):
        name, equals, value = word.partition("=")
        key = name.removeprefix("--").replace("-", "_")
        if not name.startswith("--") or key not in OWN_KEYS:
            continue
        value = value if equals else following
        if not _is_equal(cfg.get(key), value):
            raise ValueError(
                f"{name} {value} on the command line did not reach the config ({key}: {cfg.get(key)}): Axolotl drops "
                f"plugin keys there. Write it in the YAML, or run accelerate launch -m axolotl.cli.train … "
                f"--{key}={value}."
            )


def _is_equal(value: Any, text: str) -> bool:
    try:
        return float(value) == float(text)
    except (TypeError, ValueError):
        return str(value) == text


def _fill_defaults(cfg: Config) -> None:
    # Beside calibration_path, the file is compared with what the YAML itself says, so no calibration default is set.
    calibrates = not cfg.get("calibration_path")
    without_text = cfg.get("calibration_dataset") == TRAINING_SET
    if without_text:
        _check_training_set(cfg)
    for key, value in _DEFAULTS.items():
        skipped = (without_text and key in _TEXT_KEYS) or (not calibrates and key.startswith("calibration_"))
        if cfg.get(key) is None and not skipped:
            cfg[key] = value
    if cfg.get("lora_r") is None and cfg.get("sparse_density") is None:
        cfg["lora_r"] = DEFAULT_R0
    if cfg.get("lora_target_linear") is None and not cfg.get("lora_target_modules"):
        cfg["lora_target_linear"] = True
    if not cfg.get("lora_target_linear") and not cfg.get("lora_target_modules"):
        raise ConfigError(
            "lora_target_linear",
            "false without lora_target_modules leaves no layer to adapt; name modules, or drop the key to adapt all "
            "linear layers but lm_head.",
        )
    seed = integer(cfg, "seed")
    for key in ("support_seed", "calibration_seed") if calibrates else ("support_seed",):
        if cfg.get(key) is None:
            cfg[key] = DEFAULT_SEED if seed is None else seed


def _check_training_set(cfg: Config) -> None:
    """Refuse keys of a calibration text beside calibration_dataset: training_set."""
    for key in _TEXT_KEYS:
        if cfg.get(key) is not None:
            raise ConfigError(
                key,
                f"{cfg[key]} has no effect with calibration_dataset: {TRAINING_SET}, whose records are those of the "
                "YAML's datasets; drop it.",
            )


def check_base(name: Any) -> None:
    """Refuse a base model whose name is a path, if there is no such folder, or if the folder holds only an adapter.

    The errors of transformers and the hub would mislead; beside an adapter Axolotl saves a config.json.

    Raises:
        MissingFileError: names the key, the folder and the remedy.
        ConfigError: the folder holds an adapter and no model.
    """
    if not isinstance(name, str):
        return
    if os.path.isdir(name):
        files = os.listdir(name)
        if ADAPTER_CONFIG in files and not any(file.startswith(_WEIGHTS_OF_A_MODEL) for file in files):
            raise ConfigError(
                "base_model",
                f"{name} holds an adapter and no model. Name the adapter's base model; to go on from the adapter, name "
                "this folder in lora_model_dir.",
            )
        return
    if name.startswith(("/", "./", "../", "~")) or name.count("/") > 1:
        home = " (~ is not expanded)" if name.startswith("~") else ""
        raise MissingFileError(
            "base_model",
            f"there is no folder {name}{home}. Name the folder that holds the model's config.json, or a model on the "
            "hub as OWNER/NAME.",
        )


def _check_files(cfg: Config, config: SupraConfig) -> None:
    check_base(cfg.get("base_model"))
    datasets = cfg.get("datasets") or []
    for index, dataset in enumerate(datasets if isinstance(datasets, list) else []):
        path = dataset.get("path") if isinstance(dataset, dict) else None
        if isinstance(path, str) and os.path.isfile(path) and os.path.getsize(path) == 0:
            raise ConfigError(f"datasets[{index}].path", f"{path} is empty; it needs at least one training record.")
    if cfg.get("calibration_path"):
        _check_calibration_path(cfg, config)
    elif config.needs_norms and cfg["calibration_dataset"] != TRAINING_SET:
        check_source(cfg["calibration_dataset"])
    resume = cfg.get("resume_from_checkpoint")
    if isinstance(resume, str) and not os.path.isdir(resume):
        raise MissingFileError("resume_from_checkpoint", f"there is no folder {resume}.")


def _check_calibration_path(cfg: Config, config: SupraConfig) -> None:
    path = cfg["calibration_path"]
    if not config.needs_norms:
        raise ConfigError(
            "calibration_path",
            f"{path} has no effect with mask_score: {cfg['mask_score']}, sparse_direction: {cfg['sparse_direction']}, "
            f"supra_lambda: {cfg['supra_lambda']}; drop it.",
        )
    if not os.path.isfile(path):
        raise MissingFileError(
            "calibration_path", f"there is no file {path}; axolotl supertune calibrate CONFIG writes it."
        )
    if cfg.get("calibration_batch_size") is not None:
        raise ConfigError(
            "calibration_batch_size",
            f"{cfg['calibration_batch_size']} has no effect with calibration_path: {path}; drop one of them.",
        )


def _add_sparse_lr(cfg: Config, config: SupraConfig) -> None:
    """Turn sparse_lr into a group of Axolotl's lr_groups."""
    rate = number(cfg, "sparse_lr")
    if isinstance(rate, bool) or not isinstance(rate, (int, float)) or not 0 < rate < math.inf:
        raise ConfigError("sparse_lr", f"{cfg['sparse_lr']} is not a positive number.")
    groups = cfg.get("lr_groups") or []
    if not isinstance(groups, list) or not all(isinstance(group, Mapping) for group in groups):
        raise ConfigError("lr_groups", f"{groups} is not a list of groups, each with name, modules and lr.")
    if not config.has_sparse_part:
        raise ConfigError(
            "sparse_lr", f"{cfg['sparse_lr']} has no effect with supra_lambda: 1, which is LoRA; drop it."
        )
    ours = {"name": SPARSE_LR_GROUP, "modules": [SPARSE_LR_GROUP], "lr": rate}
    others = [group for group in groups if group != ours]
    if any(group.get("name") == SPARSE_LR_GROUP for group in others):
        raise ConfigError("lr_groups", f"the name {SPARSE_LR_GROUP} is what sparse_lr makes; use one of the two.")
    cfg["lr_groups"] = [ours, *others]  # a parameter belongs to the first group that matches it
