"""Makes a new adapter as the YAML describes it, the same in all processes."""

import hashlib
import math
import re
from collections.abc import Callable, Iterable
from typing import Any

import torch
from axolotl.utils.logging import get_logger
from peft import get_peft_model

from ..engines import engine_of
from ..engines.processes import Processes
from ..method.activation_norms import ActivationNorms
from ..method.config_error import ConfigError
from ..tuner import SupraConfig, SupraLayer
from ..tuner.quantization.settings import base_quantization
from ..tuner.targets import layer_budgets
from . import axolotl_compat, validation

LOG = get_logger(__name__)


def is_new(cfg: Any) -> bool:
    """Whether the run makes a new adapter, as no adapter or checkpoint is named to start from."""
    return not (cfg.lora_model_dir or cfg.merge_lora or axolotl_compat.last_checkpoint(cfg))


def adapter_config(model: Any, cfg: Any) -> SupraConfig:
    """The PEFT config that the YAML describes for this model.

    Args:
        model: the base model, maybe on the meta device.
        cfg: the YAML, after `validation.prepare`.
    """
    more = {"task_type": axolotl_compat.task_type(model), "base_quantization": base_quantization(model)}
    return validation.method_config(cfg, **more, **_targets(model, cfg))


def _targets(model: Any, cfg: Any) -> dict[str, Any]:
    """Which modules are adapted, by the keys and rules of Axolotl's LoRA."""
    modules = cfg.lora_target_modules or []
    if cfg.lora_target_linear:
        named = [modules] if isinstance(modules, str) else modules
        modules = sorted({*named, *axolotl_compat.linear_layer_names(model)})
    return {
        "target_modules": modules,
        "exclude_modules": cfg.lora_exclude_modules or None,
        "layers_to_transform": cfg.peft_layers_to_transform,
        "layers_pattern": cfg.peft_layers_pattern,
        "modules_to_save": cfg.lora_modules_to_save or None,
    }


def check_all_matched(cfg: Any, model: Any, layers: Iterable[str]) -> None:
    """Refuse a name or number in the YAML that matches no module; PEFT would ignore it if others in its list match.

    Args:
        cfg: the YAML.
        model: the base model, maybe on the meta device.
        layers: names of the layers that are adapted.

    Raises:
        ConfigError: names the key and the value.
    """
    modules = [name for name, _ in model.named_modules() if name]

    def idle_in(key: str, matches: Callable[[str, str], Any]) -> list[tuple[str, str]]:
        asked = [cfg[key]] if isinstance(cfg[key], str) else cfg[key] or []
        return [(key, name) for name in asked if not any(matches(name, module) for module in modules)]

    # As PEFT matches them: a string is a regex, a list has last parts of names; modules_to_save has ends of names.
    pattern = isinstance(cfg.lora_exclude_modules, str)
    excludes = re.fullmatch if pattern else lambda name, module: f".{module}".endswith(f".{name}")
    idle = idle_in("lora_exclude_modules", excludes)
    idle += idle_in("lora_modules_to_save", lambda name, module: module.endswith(name))
    if idle:
        kinds = sorted({module.rpartition(".")[2] for module in modules if not module.rpartition(".")[2].isdigit()})
        raise ConfigError(idle[0][0], f"{idle[0][1]} matches no module of the model, which has {', '.join(kinds)}.")
    blocks = cfg.peft_layers_to_transform
    for block in [blocks] if isinstance(blocks, int) else blocks or []:
        if not any(str(block) in layer.split(".") for layer in layers):
            raise ConfigError(
                "peft_layers_to_transform",
                f"{block} is the number of no block with a layer that is adapted; they are numbered from 0.",
            )
    asked = cfg.lora_target_modules if isinstance(cfg.lora_target_modules, list) else []
    idle = [name for name in asked if not any(layer == name or layer.endswith(f".{name}") for layer in layers)]
    if idle:
        kinds = sorted({layer.rpartition(".")[2] for layer in layers})
        raise ConfigError(
            "lora_target_modules", f"{idle[0]} matches no layer that is adapted ({', '.join(kinds)} are)."
        )


def make_adapter(model: Any, cfg: Any, processes: Processes, norms: Callable[..., ActivationNorms]) -> Any:
    """The model with the adapter that the YAML describes, the same in all processes; called by all of them.

    Args:
        model: the base model.
        cfg: the YAML, after `validation.prepare`.
        processes: of the run.
        norms: (model, cfg, names of the layers) → their activation norms. Called if the support needs any; if only
            process 0 has weights, only there.

    Raises:
        ValueError: a name or number in the YAML matches nothing, or the model's layers cannot have such an adapter.
    """
    config = adapter_config(model, cfg)
    budgets = layer_budgets(model, config)
    check_all_matched(cfg, model, budgets)
    first_chooses = engine_of(cfg).only_first_has_weights
    if first_chooses and not processes.is_first:
        config.support = "saved"
    elif config.needs_norms and any(budget.sparse_count for budget in budgets.values()):
        config.activation_norms = norms(model, cfg, list(budgets))
    if model.device.type == "cpu" and torch.device(cfg.device or "cpu").type == "cuda":
        # A base that is to be sharded may still be on the CPU, where choosing supports is slow.
        config.support_device = cfg.device
    sparse = sum(bool(budget.sparse_count) for budget in budgets.values())
    if sparse and config.support == "select" and not config.by_gradient:
        LOG.info("Choosing the supports of %d layers: %s.", sparse, config.choice_of_support)
    seed = seed_of(cfg)
    # R follows from the config's seed, though Axolotl 0.19 seeds nothing before the trainer exists.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        adapted = get_peft_model(model, config)
    if axolotl_compat.draws_lora_by_name():
        _draw_by_name(adapted, seed)
    if first_chooses:
        _use_supports_of_process_0(adapted, processes)
    return adapted


def seed_of(cfg: Any) -> int:
    """The YAML's seed, or Axolotl's default."""
    return validation.DEFAULT_SEED if cfg.seed is None else int(cfg.seed)


def _use_supports_of_process_0(model: Any, processes: Processes) -> None:
    """Give the adapters of all processes the supports that process 0 chose."""
    config = model.peft_config["default"]
    config.support = "select"  # as in process 0
    config.calibration = processes.from_first(lambda: config.calibration)
    layers = [module for module in model.modules() if isinstance(module, SupraLayer)]
    chosen = [layer for layer in layers if "default" in layer.supra_indices]
    indices = [layer.supra_indices["default"] for layer in chosen]
    supports = [index.cpu() if processes.is_first else torch.empty(index.shape, dtype=index.dtype) for index in indices]
    processes.broadcast(supports)
    if not processes.is_first:
        for layer, support in zip(chosen, supports, strict=True):
            layer.set_support("default", support)
        for layer in layers:
            layer.pending_adapters.pop("default", None)


def _draw_by_name(model: Any, seed: int) -> None:
    """Draw every R, Kaiming-uniform, from the seed and its layer's name, in place.

    Axolotl 0.21 draws LoRA's A so; an adapter with λ = 1 then starts as LoRA does.
    """
    for name, module in model.named_modules():
        if not isinstance(module, SupraLayer):
            continue
        for adapter, R in module.supra_R.items():
            digest = hashlib.sha256(f"{name}.{adapter}".encode()).digest()
            own_seed = (seed + int.from_bytes(digest[:4], "little")) % (2**63 - 1)
            generator = torch.Generator().manual_seed(own_seed)
            drawn = torch.nn.init.kaiming_uniform_(torch.empty(R.shape), a=math.sqrt(5), generator=generator)
            R.data.copy_(drawn)
