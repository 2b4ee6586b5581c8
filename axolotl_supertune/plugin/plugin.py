"""The Axolotl plugin: thin hooks that calibrate, adapt the model, and guard against an adapter nobody trained."""

from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from axolotl.integrations.base import AdapterCapabilities, BasePlugin
from axolotl.utils.logging import get_logger
from peft import PeftConfig
from torch.distributed.fsdp import MixedPrecisionPolicy
from transformers import TrainerCallback

from ..engines import checks, zero3_base
from ..engines.processes import Processes
from ..engines.zero3_base import gather_at_once
from ..method.activation_norms import ActivationNorms
from ..method.calibration_data import TRAINING_SET
from ..tuner.base_model import read_parameter
from ..tuner.gradient import sparse_layers
from ..tuner.model_card import note_training
from . import axolotl_compat, quantized_base, run_summary, validation
from .calibrate import Windows, max_positions, measured_norms, windows_of_records, windows_of_text
from .callbacks import CheckSaves, LogCost, RefuseUntrained, RequireAllTrained, RequireFp32
from .create import adapter_config, is_new, make_adapter, seed_of
from .gradient_callback import ChooseByGradient
from .load import check_not_the_start, holds_adapter, load_trained, untrained, what_to_name
from .resume import check_resume
from .verify import check_same_everywhere, check_saved

LOG = get_logger(__name__)

NORMS_FILE = "activation_norms.safetensors"


class SupertunePlugin(BasePlugin):
    """`plugins: [axolotl_supertune.SupertunePlugin]` makes `adapter: supra` and `adapter: super` trainable."""

    def __init__(self) -> None:
        super().__init__()
        self._windows: Windows | None = None
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
        validation.prepare(cfg, axolotl_compat.config_keys(axolotl_compat.registered_argument_classes()))
        self._inference = bool(cfg.get("inference"))  # Axolotl's schema drops the key
        if cfg.get("adapter") not in validation.ADAPTERS:
            return
        if self._inference or cfg.get("merge_lora") or axolotl_compat.is_merging():
            # One process does that. Axolotl would start DeepSpeed all the same (for merge-lora in a first look at the
            # YAML, before it says merge_lora), and under ZeRO-3 load a base without weights.
            cfg["deepspeed"] = None
        if not self.plans_only:
            checks.check_deepspeed_is_installed(cfg)
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
        return "axolotl_supertune.plugin.args.SupertuneArgs"

    def get_adapter_capabilities(self) -> list[AdapterCapabilities]:
        """The two adapter names."""
        return [AdapterCapabilities(name=name) for name in validation.ADAPTERS]

    def pre_model_load(self, cfg: Any) -> None:
        """Say how the base is quantized, and draw the calibration windows: text that is missing costs no model load."""
        self._windows = None
        self._calibrated = None
        self._finished = False
        if cfg.adapter not in validation.ADAPTERS:
            return
        self._processes = _processes()
        if checks.is_zero3(cfg) and cfg.torch_dtype is torch.bfloat16:
            # zero.Init takes the base's dtype from here and from nothing else; training does not, see `_keep_fp32`.
            self._deepspeed = cfg.deepspeed
            cfg.deepspeed = {**checks.deepspeed_config(cfg.deepspeed), "bf16": {"enabled": True}}
        # Where one process failed on its own the others would wait for it to load its part of a base.
        with self._processes.together("reading the base model's config"):
            model_config = axolotl_compat.load_model_config(cfg)
            quantized_base.complete(cfg, model_config)
            new = self.calibrates_only or is_new(cfg)
            if new and not self.calibrates_only and axolotl_compat.is_evaluating():
                raise ValueError(untrained(cfg.output_dir))
        with self._processes.together("making a new adapter" if new else "reading a trained adapter"):
            pass  # leaves with an error where they do not all do the same
        if not new:
            return
        if cfg.calibration_path:
            with self._processes.together("reading calibration_path"):
                norms = ActivationNorms.load(cfg.calibration_path)
                validation.check_provenance(cfg, norms.provenance, max_positions(model_config))
        elif validation.may_need_norms(cfg):
            with self._processes.together("reading the calibration text"):
                if cfg.calibration_dataset == TRAINING_SET:
                    # Here and not in process 0 alone: Axolotl's own loading asks all of them.
                    self._windows = windows_of_records(cfg, model_config)
                else:
                    self._windows = self._processes.from_first(lambda: windows_of_text(cfg, model_config))

    def post_model_build(self, cfg: Any, model: Any) -> None:
        """Prepare a quantized base, before Axolotl settles the dtypes of what is not quantized, or a sharded one."""
        if cfg.adapter in validation.ADAPTERS:
            if self._deepspeed is not None:
                cfg.deepspeed, self._deepspeed = self._deepspeed, None
            quantized_base.prepare(cfg, model)
            if checks.is_zero3(cfg):
                assert self._processes is not None, "pre_model_load came first"
                with self._processes.together("preparing the base model"):
                    zero3_base.put_right(model, cfg.torch_dtype)

    def load_adapter(
        self, model: Any, cfg: Any, inference: bool = False, config_only: bool = False
    ) -> tuple[Any, PeftConfig | None] | None:
        """Load the adapter that `lora_model_dir` or a checkpoint names, else make a new one."""
        if cfg.adapter not in validation.ADAPTERS:
            return None
        if config_only:
            raise ValueError(f"rl: {cfg.rl} does not work with adapter: {cfg.adapter} yet.")
        if self.calibrates_only:
            return model, None
        processes = self._processes = self._processes or _processes()
        with processes.together("loading the adapter"):
            model = self._load_adapter(model, cfg, inference)
            check_same_everywhere(model, processes)
        # Axolotl writes the config into output_dir before training begins: beside the weights of an earlier run, which
        # are replaced when this one ends, they would be computed with its α until then.
        keeps = holds_adapter(Path(cfg.output_dir))
        return model, None if keeps else model.peft_config["default"]

    def _load_adapter(self, model: Any, cfg: Any, inference: bool) -> Any:
        frozen = inference or self._inference or bool(cfg.merge_lora)
        checkpoint = None if frozen else axolotl_compat.last_checkpoint(cfg)
        self._resumes = Path(checkpoint) if checkpoint else None
        trained = cfg.lora_model_dir or checkpoint
        self._untrained = not trained
        if checkpoint:
            zero = checks.deepspeed_config(cfg.deepspeed)["zero_optimization"] if cfg.deepspeed else None
            world = self._processes.world if self._processes else 1
            check_resume(cfg, checkpoint, adapter_config(model, cfg), world, zero)
        if trained:
            model = load_trained(model, cfg, trained, asked=adapter_config(model, cfg), trainable=not frozen)
        else:  # a branch of its own: this one calibrates
            assert self._processes is not None
            model = make_adapter(model, cfg, self._processes, self._norms)
        self._awaits_gradient = model.peft_config["default"].awaits_gradient and bool(sparse_layers(model))
        note_training(model, *run_summary.training(cfg))
        # A run must go on from a checkpoint exactly; `post_train` asks for what the finished adapter is stored in.
        model.peft_config["default"].values_dtype = "fp32"
        line = run_summary.calibration_line(model, self._calibrated or "as the adapter was made")
        LOG.info("\n%s%s\nKernels: %s", run_summary.table(model), line, run_summary.kernels(model, cfg))
        return model

    def add_callbacks_post_trainer(self, cfg: Any, trainer: Any) -> list[TrainerCallback]:
        """Log what the run costs; stop an untrained adapter's evaluation, and an optimizer that leaves some out."""
        if cfg.adapter not in validation.ADAPTERS:
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
            if checks.is_zero3(cfg):
                gather_at_once(trainer.model)
        callbacks = [RequireAllTrained(), RequireFp32(), CheckSaves(self._processes, self._resumes)]
        cost = None
        if hasattr(trainer, "store_metrics"):  # a trainer_cls of the user's own need not have it
            cost = LogCost(trainer)
            callbacks.append(cost)
        if self._awaits_gradient:
            callbacks.append(ChooseByGradient(trainer, self._processes, seed_of(cfg), cost))
        if self._untrained:
            callbacks.append(RefuseUntrained(cfg.output_dir))
        return callbacks

    def post_train(self, cfg: Any, model: Any) -> None:
        """Check the final save. Axolotl calls this twice: when training ends, and when the adapter is saved."""
        if cfg.adapter not in validation.ADAPTERS:
            return
        if self._finished and (self._processes is None or self._processes.is_first):
            check_saved(model, Path(cfg.output_dir))
        self._finished = True
        model.peft_config["default"].values_dtype = cfg.values_dtype

    def _norms(self, model: Any, cfg: Any, layers: list[str], *, alone: bool) -> ActivationNorms:
        if cfg.calibration_path:
            norms = ActivationNorms.load(cfg.calibration_path)
            norms.check_model(model, f"calibration_path: the norms in {cfg.calibration_path}", read=read_parameter)
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
        """Norms on the windows of `pre_model_load`, and the seconds that they took: `new_adapter.measured_norms`."""
        windows, processes = self._windows, self._processes
        if windows is None or processes is None:
            raise RuntimeError("no calibration windows were drawn: pre_model_load did not run before load_adapter.")
        return measured_norms(model, cfg, layers, windows, processes, stream=stream, alone=alone)


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
    seconds = axolotl_compat.process_timeout()
    axolotl_compat.init_distributed_state()
    if checks.on_cpus() and not torch.distributed.is_initialized():
        # Accelerate would do the same, but only when the Trainer is made.
        torch.distributed.init_process_group("gloo", timeout=timedelta(seconds=seconds))
    checks.check_processes_know_each_other(torch.distributed.is_initialized())
    return Processes(seconds, f"{axolotl_compat.TIMEOUT_VARIABLE}=SECONDS waits longer.")
