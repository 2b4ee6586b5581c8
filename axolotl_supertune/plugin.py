"""The Axolotl plugin: thin hooks that calibrate, adapt the model, and guard against an adapter nobody trained."""

import contextlib
import hashlib
import importlib
import io
import math
import os
import sys
import time
from collections.abc import Iterable
from dataclasses import replace
from datetime import timedelta
from importlib.metadata import version as installed
from pathlib import Path
from typing import Any

import torch
from axolotl.common.datasets import load_datasets
from axolotl.integrations.base import AdapterCapabilities, BasePlugin, PluginManager
from axolotl.loaders import adapter as axolotl_adapter
from axolotl.loaders import load_tokenizer
from axolotl.loaders.adapter import _get_peft_task_type, find_all_linear_names
from axolotl.loaders.utils import load_model_config
from axolotl.utils.distributed import init_distributed_state
from axolotl.utils.logging import get_logger
from axolotl.utils.schemas.config import AxolotlInputConfig
from axolotl.utils.train import determine_last_checkpoint
from peft import PeftConfig, get_peft_model
from rich.console import Console
from torch.distributed.fsdp import MixedPrecisionPolicy
from transformers import TrainerCallback

from . import checks, engine_checks, quantized_base, sharded_base
from .calibration import ActivationNorms, calibrate
from .callbacks import CheckSaves, LogCost, RefuseUntrained, RequireAllTrained, RequireFp32
from .corpus import TRAINING_SET, batches_of, calibration_windows, training_windows
from .gradient_support import ChooseByGradient
from .layer_by_layer import gathered_in_turn, streamed
from .ops.choice import described
from .processes import Processes
from .sharded import by_zero3
from .table import layer_table
from .trained import (
    check_not_the_start,
    check_resume,
    check_same_everywhere,
    check_saved,
    holds_adapter,
    load_trained,
    untrained,
    what_to_name,
)
from .tuner import SupraConfig, SupraLayer, budget_table
from .tuner.base import base_quantization
from .tuner.card import note_training
from .tuner.gradient import sparse_layers
from .tuner.model import layer_budgets
from .tuner.quantized import QuantizedSupraLinear

LOG = get_logger(__name__)

NORMS_FILE = "activation_norms.safetensors"


class SupertunePlugin(BasePlugin):
    """`plugins: [axolotl_supertune.SupertunePlugin]` makes `adapter: supra` and `adapter: super` trainable."""

    def __init__(self) -> None:
        super().__init__()
        self._windows: torch.Tensor | dict[str, torch.Tensor] | None = None
        self._calibrated: str | None = None
        self._untrained = False
        self._inference = False
        self._processes: Processes | None = None
        self._finished = False
        self._awaits_gradient = False
        self._resumes: Path | None = None
        # What the YAML says, while the base is loaded with something else.
        self._deepspeed: Any = None
        # `axolotl supertune calibrate`: the text is read whatever there is to resume.
        self.calibrates_only = False
        # `axolotl supertune plan`: the machine that trains is another one.
        self.plans_only = False

    def register(self, cfg: Any) -> None:
        """Check the raw YAML and fill in defaults; find the trained adapter for `axolotl inference`."""
        checks.prepare(cfg, _known_keys())
        self._inference = bool(cfg.get("inference"))  # Axolotl's schema drops the key
        if cfg.get("adapter") not in checks.ADAPTERS:
            return
        if self._inference or cfg.get("merge_lora") or _called_from("axolotl.cli.merge_lora", "do_cli"):
            # One process does that. Axolotl would start DeepSpeed all the same (for merge-lora in a first look at the
            # YAML, before it says merge_lora), and under ZeRO-3 load a base without weights.
            cfg["deepspeed"] = None
        if not self.plans_only:
            engine_checks.check_deepspeed_is_installed(cfg)
        trained = Path(cfg.get("output_dir") or ".")
        if self._inference or cfg.get("merge_lora"):
            check_not_the_start(cfg, trained)
        if cfg.get("merge_lora"):
            quantized_base.load_as_trained(cfg, Path(cfg.get("lora_model_dir") or trained))
        if self._inference and not cfg.get("lora_model_dir"):
            if not holds_adapter(trained):
                raise ValueError(
                    f"lora_model_dir is not set and {trained} (output_dir) holds no adapter: nothing trained is there "
                    f"to talk to. {what_to_name(trained)}"
                )
            cfg["lora_model_dir"] = str(trained)
            LOG.warning("lora_model_dir is not set: using the adapter in output_dir, %s.", trained)

    def get_input_args(self) -> str:
        """Where Axolotl finds the keys."""
        return "axolotl_supertune.args.SupertuneArgs"

    def get_adapter_capabilities(self) -> list[AdapterCapabilities]:
        """The two adapter names."""
        return [AdapterCapabilities(name=name) for name in checks.ADAPTERS]

    def pre_model_load(self, cfg: Any) -> None:
        """Say how the base is quantized, and draw the calibration windows: text that is missing costs no model load."""
        self._windows = None
        self._calibrated = None
        self._finished = False
        if cfg.adapter not in checks.ADAPTERS:
            return
        self._processes = _processes()
        if engine_checks.is_zero3(cfg) and cfg.torch_dtype is torch.bfloat16:
            # zero.Init takes the base's dtype from here and from nothing else; training does not, see `_keep_fp32`.
            self._deepspeed = cfg.deepspeed
            cfg.deepspeed = {**engine_checks.deepspeed_config(cfg.deepspeed), "bf16": {"enabled": True}}
        # Where one process failed on its own the others would wait for it to load its part of a base.
        with self._processes.together("reading the base model's config"):
            model_config = load_model_config(cfg)
            quantized_base.complete(cfg, model_config)
            new = self.calibrates_only or _is_new(cfg)
            if new and not self.calibrates_only and _is_evaluation():
                raise ValueError(untrained(cfg.output_dir))
        with self._processes.together("making a new adapter" if new else "reading a trained adapter"):
            pass  # leaves with an error where they do not all do the same
        if not new:
            return
        if cfg.calibration_path:
            with self._processes.together("reading calibration_path"):
                norms = ActivationNorms.load(cfg.calibration_path)
                checks.check_provenance(cfg, norms.provenance, _max_positions(model_config))
        elif checks.may_need_norms(cfg):
            with self._processes.together("reading the calibration text"):
                if cfg.calibration_dataset == TRAINING_SET:
                    # Here and not in process 0 alone: Axolotl's own loading asks all of them.
                    self._windows = _training_windows(cfg, model_config)
                else:
                    self._windows = self._processes.from_first(lambda: _windows(cfg, model_config))

    def post_model_build(self, cfg: Any, model: Any) -> None:
        """Prepare a quantized base, before Axolotl settles the dtypes of what is not quantized, or a sharded one."""
        if cfg.adapter in checks.ADAPTERS:
            if self._deepspeed is not None:
                cfg.deepspeed, self._deepspeed = self._deepspeed, None
            quantized_base.prepare(cfg, model)
            if engine_checks.is_zero3(cfg):
                assert self._processes is not None, "pre_model_load came first"
                with self._processes.together("preparing the base model"):
                    sharded_base.put_right(model, cfg.torch_dtype)

    def load_adapter(
        self, model: Any, cfg: Any, inference: bool = False, config_only: bool = False
    ) -> tuple[Any, PeftConfig | None] | None:
        """Load the adapter that `lora_model_dir` or a checkpoint names, else make a new one."""
        if cfg.adapter not in checks.ADAPTERS:
            return None
        if config_only:
            raise ValueError(f"rl: {cfg.rl} does not work with adapter: {cfg.adapter} yet.")
        processes = self._processes = self._processes or _processes()
        with processes.together("loading the adapter"):
            model = self._load_adapter(model, cfg, inference)
            check_same_everywhere(model, processes)
        return model, model.peft_config["default"]

    def _load_adapter(self, model: Any, cfg: Any, inference: bool) -> Any:
        frozen = inference or self._inference or bool(cfg.merge_lora)
        checkpoint = None if frozen else determine_last_checkpoint(cfg)
        self._resumes = Path(checkpoint) if checkpoint else None
        trained = cfg.lora_model_dir or checkpoint
        self._untrained = not trained
        if checkpoint:
            zero = engine_checks.deepspeed_config(cfg.deepspeed)["zero_optimization"] if cfg.deepspeed else None
            world = self._processes.world if self._processes else 1
            check_resume(cfg, checkpoint, adapter_config(model, cfg), world, zero)
        if trained:
            model = load_trained(model, cfg, trained, asked=adapter_config(model, cfg), trainable=not frozen)
        else:  # a branch of its own: this one calibrates
            model = self._new_adapter(model, cfg)
        self._awaits_gradient = model.peft_config["default"].awaits_gradient and bool(sparse_layers(model))
        note_training(model, *_training(cfg))
        # A run must go on from a checkpoint exactly; `post_train` asks for what the finished adapter is stored in.
        model.peft_config["default"].values_dtype = "fp32"
        line = _calibration_line(model, self._calibrated or "as the adapter was made")
        LOG.info("\n%s%s\nKernels: %s", _table(model), line, _kernels(model, cfg))
        return model

    def add_callbacks_post_trainer(self, cfg: Any, trainer: Any) -> list[TrainerCallback]:
        """Log what the run costs; stop an untrained adapter's evaluation, and an optimizer that leaves some out."""
        if cfg.adapter not in checks.ADAPTERS:
            return []
        if trainer.args.n_gpu > 1:
            raise ValueError(
                f"One process sees {trainer.args.n_gpu} GPUs and would train with torch.nn.DataParallel, whose copies "
                "of the model the adapter does not follow: run one process per GPU (axolotl train CONFIG --launcher "
                f"accelerate -- --num_processes {trainer.args.n_gpu}), or one GPU (CUDA_VISIBLE_DEVICES=0)."
            )
        fsdp = getattr(trainer.accelerator.state, "fsdp_plugin", None)
        if fsdp is not None:
            # With bf16 Accelerate would gather U, L and R in bf16 and round their gradients; the base is bf16 already.
            fsdp.mixed_precision_policy = replace(
                fsdp.mixed_precision_policy or MixedPrecisionPolicy(), param_dtype=None, reduce_dtype=torch.float32
            )
        assert self._processes is not None, "load_adapter came first"
        if cfg.deepspeed:
            _keep_fp32(trainer)
        callbacks = [RequireAllTrained(), RequireFp32(), CheckSaves(self._processes, self._resumes)]
        cost = None
        if hasattr(trainer, "store_metrics"):  # a trainer_cls of the user's own need not have it
            cost = LogCost(trainer)
            callbacks.append(cost)
        if self._awaits_gradient:
            callbacks.append(ChooseByGradient(trainer, self._processes, _seed(cfg), cost))
        if self._untrained:
            callbacks.append(RefuseUntrained(cfg.output_dir))
        return callbacks

    def post_train(self, cfg: Any, model: Any) -> None:
        """Check the final save. Axolotl calls this twice: when training ends, and when the adapter is saved."""
        if cfg.adapter not in checks.ADAPTERS:
            return
        if self._finished and (self._processes is None or self._processes.is_first):
            check_saved(model, Path(cfg.output_dir))
        self._finished = True
        model.peft_config["default"].values_dtype = cfg.values_dtype

    def _new_adapter(self, model: Any, cfg: Any) -> Any:
        assert self._processes is not None
        processes = self._processes
        config = adapter_config(model, cfg)
        budgets = layer_budgets(model, config)
        _check_all_matched(cfg, budgets)
        # Then process 0 alone holds weights to choose from, and FSDP sends them to the others when it shards.
        alone = bool(cfg.fsdp_config and cfg.fsdp_config.cpu_ram_efficient_loading)
        if alone and not processes.is_first:
            config.support = "saved"
        elif config.needs_norms and any(budget.sparse_count for budget in budgets.values()):
            config.activation_norms = self._norms(model, cfg, list(budgets), alone=alone)
        if model.device.type == "cpu" and torch.device(cfg.device or "cpu").type == "cuda":
            # What FSDP is to shard waits on the CPU, which chooses slowly.
            config.support_device = cfg.device
        seed = _seed(cfg)
        # Axolotl 0.19 seeds nothing before the trainer exists; R must follow from the config's seed all the same.
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            adapted = get_peft_model(model, config)
        if hasattr(axolotl_adapter, "reinit_lora_from_seed"):
            _draw_by_name(adapted, seed)
        if alone:
            _take_supports_of_first(adapted, processes)
        return adapted

    def _norms(self, model: Any, cfg: Any, layers: list[str], *, alone: bool) -> ActivationNorms:
        if cfg.calibration_path:
            norms = ActivationNorms.load(cfg.calibration_path)
            norms.check_model(model, f"calibration_path: the norms in {cfg.calibration_path}")
            self._calibrated = f"read from {cfg.calibration_path}"
            return norms
        # What FSDP is to shard waits on the CPU, and may be too large for one device.
        stream = bool(cfg.fsdp_config) and model.device.type == "cpu"
        norms, seconds = self.measured_norms(model, cfg, layers, stream=stream, alone=alone)
        processes = self._processes
        assert processes is not None
        several = processes.world > 1 and not alone
        self._calibrated = f"{seconds:.1f} s" + (f" in {processes.world} processes" if several else "")
        path = Path(cfg.output_dir) / NORMS_FILE
        if processes.is_first:
            norms.save(path)
            LOG.info("Activation norms saved to %s; calibration_path reuses them.", path)
        return norms

    def measured_norms(
        self, model: Any, cfg: Any, layers: list[str], *, stream: bool = False, alone: bool = False
    ) -> tuple[ActivationNorms, float]:
        """Norms on the windows of `pre_model_load`, and the seconds that they took.

        Args:
            model, layers: the base model and the layers that are adapted.
            stream: the model lies on the CPU and stays there; its decoder layers visit the device one at a time.
            alone: the other processes have no weights and do not call this; else each takes a part of the windows.
        """
        windows, processes = self._windows, self._processes
        if windows is None or processes is None:
            raise RuntimeError("no calibration windows were drawn: pre_model_load did not run before load_adapter.")
        if not stream and torch.device(cfg.device).type != "cpu" and model.device.type == "cpu":
            model.to(cfg.device)
        provenance = {
            "model": cfg.base_model,
            "revision": cfg.revision_of_model,
            "dataset": cfg.calibration_dataset,
            "split": cfg.calibration_split,
            "text_field": cfg.calibration_text_field,
            "seed": cfg.calibration_seed,
            "sequence_len": _window_length(cfg, model.config),
        }
        if cfg.calibration_dataset == TRAINING_SET:
            provenance["training_data"] = _training(cfg)[0]["Training data"]
        # Whole batches, as one process has them: what a batch sums to does not depend on who computes it.
        batches = batches_of(windows, cfg.calibration_batch_size)
        together, uncounted = by_zero3(model), []
        if not alone:
            parts = [batches[rank :: processes.world] for rank in range(processes.world)]
            if together:  # whoever has one batch less still helps to gather
                uncounted = batches[:1] * (len(parts[0]) - len(parts[processes.rank]))
            batches = parts[processes.rank]
        place: Any = streamed(model, cfg.device) if stream else contextlib.nullcontext()
        start = time.perf_counter()
        with gathered_in_turn(model) if together else place:
            norms = calibrate(
                model,
                batches,
                layers=layers,
                provenance=provenance,
                uncounted=uncounted,
                total_tokens=sum(
                    int(batch["attention_mask"].sum()) if isinstance(batch, dict) else batch.numel()
                    for batch in batches
                ),
                progress=processes.is_first,
                sum_processes=None if alone else processes.sum,
            )
        return norms, time.perf_counter() - start


def _seed(cfg: Any) -> int:
    return checks.DEFAULT_SEED if cfg.seed is None else int(cfg.seed)


def _keep_fp32(trainer: Any) -> None:
    """Have DeepSpeed compute in bf16 under autocast, as one GPU does, and leave U, L and R in fp32.

    Its own bf16 mode casts the whole model, and a config without a word about bf16 would get it from Accelerate.

    Raises:
        ValueError: DeepSpeed is not what trains.
    """
    state = trainer.accelerator.state
    if getattr(state, "deepspeed_plugin", None) is None:
        raise ValueError(
            "deepspeed: this run would train without it, on the CPU. Remove the key, or unset ACCELERATE_USE_CPU."
        )
    config = state.deepspeed_plugin.deepspeed_config
    config["bf16"] = {"enabled": False}
    # No kind of module has its gradients reduced in bf16.
    config["torch_autocast"] = {
        "enabled": bool(trainer.args.bf16),
        "dtype": "bfloat16",
        "lower_precision_safe_modules": [],
    }
    config.setdefault("gradient_clipping", trainer.args.max_grad_norm or 0.0)  # else max_grad_norm would do nothing


def _processes() -> Processes:
    """The processes of this run.

    Raises:
        ValueError: the launcher started several, and they do not know of each other.
    """
    seconds = float(os.environ.get("AXOLOTL_NCCL_TIMEOUT", 1800))  # Axolotl's own, for its own group
    init_distributed_state()
    if engine_checks.on_cpus() and not torch.distributed.is_initialized():
        # Accelerate would do the same, but only when the Trainer is made.
        torch.distributed.init_process_group("gloo", timeout=timedelta(seconds=seconds))
    engine_checks.check_processes_know_each_other(torch.distributed.is_initialized())
    return Processes(seconds, "AXOLOTL_NCCL_TIMEOUT=SECONDS waits longer.")


def _windows(cfg: Any, model_config: Any, tokenizer: Any = None) -> torch.Tensor:
    """The calibration windows that the keys describe, no longer than the model takes."""
    return calibration_windows(
        tokenizer or load_tokenizer(cfg),
        cfg.calibration_dataset,
        samples=cfg.calibration_samples,
        sequence_len=_window_length(cfg, model_config),
        seed=cfg.calibration_seed,
        split=cfg.calibration_split,
        text_field=cfg.calibration_text_field,
    )


def _training_windows(cfg: Any, model_config: Any) -> dict[str, torch.Tensor]:
    """Records of the training set, as Axolotl prepares it and keeps it in dataset_prepared_path."""
    records = load_datasets(cfg=cfg).train_dataset
    return training_windows(
        records["input_ids"],
        samples=cfg.calibration_samples,
        sequence_len=_window_length(cfg, model_config),
        seed=cfg.calibration_seed,
    )


def _window_length(cfg: Any, model_config: Any) -> int:
    maximum = _max_positions(model_config)
    return int(cfg.calibration_sequence_len if maximum is None else min(cfg.calibration_sequence_len, maximum))


def _take_supports_of_first(model: Any, processes: Processes) -> None:
    """Give the adapters of all processes the supports that process 0 chose."""
    config = model.peft_config["default"]
    config.support = "select"  # chosen, by whichever process
    config.calibration = processes.from_first(lambda: config.calibration)
    layers = [module for module in model.modules() if isinstance(module, SupraLayer)]
    chosen = [layer for layer in layers if "default" in layer.supra_indices]
    here = [layer.supra_indices["default"] for layer in chosen]
    supports = [each.cpu() if processes.is_first else torch.empty(each.shape, dtype=each.dtype) for each in here]
    processes.broadcast(supports)
    if not processes.is_first:
        for layer, support in zip(chosen, supports, strict=True):
            layer.take_support("default", support)
        for layer in layers:
            layer.supra_unloaded.pop("default", None)


def _draw_by_name(model: Any, seed: int) -> None:
    """Draw every R from the seed and its layer's name, as Axolotl 0.21 draws LoRA's A: λ = 1 starts as LoRA does."""
    for name, module in model.named_modules():
        if not isinstance(module, SupraLayer):
            continue
        for adapter, R in module.supra_R.items():
            digest = hashlib.sha256(f"{name}.{adapter}".encode()).digest()
            own_seed = (seed + int.from_bytes(digest[:4], "little")) % (2**63 - 1)
            generator = torch.Generator().manual_seed(own_seed)
            drawn = torch.nn.init.kaiming_uniform_(torch.empty(R.shape), a=math.sqrt(5), generator=generator)
            R.data.copy_(drawn)


def _is_evaluation() -> bool:
    """Whether `axolotl evaluate` is what runs."""
    return _called_from("axolotl.evaluate", "evaluate")


def _called_from(module: str, function: str) -> bool:
    """Whether a function of Axolotl's is running: for commands of which their config says nothing."""
    frame: Any = sys._getframe()
    while frame is not None:
        # Of a module that is run as a command the name is __main__.
        spec = frame.f_globals.get("__spec__")
        if frame.f_code.co_name == function and getattr(spec, "name", None) == module:
            return True
        frame = frame.f_back
    return False


def _is_new(cfg: Any) -> bool:
    return not (cfg.lora_model_dir or cfg.merge_lora or determine_last_checkpoint(cfg))


def _targets(model: Any, cfg: Any) -> dict[str, Any]:
    """The keys that Axolotl reads for LoRA, read the same way."""
    modules = cfg.lora_target_modules or []
    if cfg.lora_target_linear:
        modules = sorted({*([modules] if isinstance(modules, str) else modules), *find_all_linear_names(model)})
    return {
        "target_modules": modules,
        "exclude_modules": cfg.lora_exclude_modules or None,
        "layers_to_transform": cfg.peft_layers_to_transform,
        "layers_pattern": cfg.peft_layers_pattern,
        "modules_to_save": cfg.lora_modules_to_save or None,
    }


def adapter_config(model: Any, cfg: Any) -> SupraConfig:
    """The PEFT config that the YAML describes for this model."""
    more = {"task_type": _get_peft_task_type(model), "base_quantization": base_quantization(model)}
    return checks.method_config(cfg, **more, **_targets(model, cfg))


def _known_keys() -> set[str]:
    """Axolotl's keys and those of every registered plugin."""
    known = set(AxolotlInputConfig.model_fields)
    for dotted in PluginManager.get_instance().get_input_args():
        module, _, name = dotted.rpartition(".")
        known |= set(getattr(importlib.import_module(module), name).model_fields)
    return known


def _check_all_matched(cfg: Any, layers: Iterable[str]) -> None:
    """Refuse a misspelt name in a list of target modules: the others would train without it."""
    asked = cfg.lora_target_modules if isinstance(cfg.lora_target_modules, list) else []
    idle = [name for name in asked if not any(layer == name or layer.endswith(f".{name}") for layer in layers)]
    if idle:
        kinds = sorted({layer.rpartition(".")[2] for layer in layers})
        raise ValueError(f"lora_target_modules: {idle[0]} matches no layer that is adapted ({', '.join(kinds)} are).")


def _max_positions(model_config: Any) -> int | None:
    text = model_config.get_text_config() if hasattr(model_config, "get_text_config") else model_config
    return getattr(text, "max_position_embeddings", None)


def _table(model: Any) -> str:
    """The table of what is trained, as plain text."""
    console = Console(file=io.StringIO(), width=120, color_system=None)
    console.print(layer_table(budget_table(model), model.peft_config["default"]))
    return console.file.getvalue()  # type: ignore[attr-defined]


def _kernels(model: Any, cfg: Any) -> str:
    """What will compute the adapted layers; the model may still be on its way to the device."""
    device = torch.device(cfg.device or "cpu")
    mixed = {"bf16": torch.bfloat16, "fp16": torch.float16}
    dtypes = [dtype for key, dtype in mixed.items() if cfg.get(key) and cfg.get(key) != "full"]
    layers = [module for module in model.modules() if isinstance(module, SupraLayer)]
    dense = [layer for layer in layers if not isinstance(layer, QuantizedSupraLinear)]
    dtype = dtypes[0] if dtypes else getattr(layers[0], "weight_dtype", layers[0].base_layer.weight.dtype)
    gathers = "FSDP" if cfg.fsdp_config else "DeepSpeed" if engine_checks.is_zero3(cfg) else None
    if gathers or not dense:
        every_pass = f"{gathers} gathers the weights" if gathers else "quantized weights are dequantized"
        return f"{described(device, dtype, rank=0)} (the gradient of U alone; {every_pass} in every pass)"
    rank = max(budget.rank for layer in dense for budget in layer.supra_budget.values())
    return described(device, dtype, rank)


def _training(cfg: Any) -> tuple[dict[str, str], list[str]]:
    """For the model card: what Axolotl trained on and how, and the data sets' names on the hub."""
    paths = [str(each["path"]) for each in cfg.datasets or [] if each.get("path")]
    hub = [path for path in paths if not os.path.exists(path) and "://" not in path]
    steps = f"{cfg.max_steps} steps" if cfg.max_steps else f"{cfg.num_epochs or 1:g} epochs"
    lines = {
        "Training data": ", ".join(path if path in hub else Path(path).name for path in paths) or "not named",
        "Training": f"{steps}, learning rate {cfg.learning_rate}"
        + (f", {cfg.sparse_lr} of the single weights" if cfg.sparse_lr else "")
        + f", {cfg.optimizer}, seed {cfg.seed}",
        "Axolotl": installed("axolotl"),
    }
    return lines, hub


def _calibration_line(model: Any, how: str) -> str:
    config = model.peft_config["default"]
    made = config.calibration
    if config.awaits_gradient and sparse_layers(model):
        after = f" after {config.low_rank_warmup_steps} steps" if config.low_rank_warmup_steps else ""
        return f"Support: to be chosen by the {config.mask_score} of {config.gradient_batches} training batches{after}"
    if made is None:
        return "Calibration: none needed"
    if made.get("dataset") == TRAINING_SET:
        return (
            f"Calibration: {made['samples']} training records, {made['tokens']:,} tokens of {made['training_data']} "
            f"(seed {made['seed']}), model {made['model']}: {how}"
        )
    return (
        f"Calibration: {made['samples']} × {made.get('sequence_len', '?')} tokens of {made.get('dataset', '?')} "
        f"(seed {made.get('seed', '?')}), model {made['model']}: {how}"
    )
