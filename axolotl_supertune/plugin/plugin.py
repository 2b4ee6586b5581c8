"""The Axolotl plugin: the hooks that Axolotl calls, in the order in which it calls them.

They check the YAML, calibrate, put the adapter into the model, and refuse to evaluate or save an adapter that is not
the trained one. The work is done in the other files of this room.
"""

import contextlib
import copy
from collections.abc import Iterator
from contextvars import ContextVar
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from axolotl.integrations.base import AdapterCapabilities, BasePlugin
from axolotl.utils.logging import get_logger
from peft import PeftConfig
from transformers import TrainerCallback

from ..engines import engine_of, running_engine
from ..engines.processes import Processes, check_processes_know_each_other, on_cpus
from ..method.activation_norms import ActivationNorms
from ..method.calibration_data import TRAINING_SET
from ..method.config_error import ConfigError
from ..tuner.base_model import read_parameter
from ..tuner.gradient import sparse_layers
from ..tuner.model_card import note_training
from . import axolotl_compat, calibrate, quantized_base, run_summary, validation
from .calibrate import Windows, max_positions, windows_of_records, windows_of_text
from .callbacks import CheckSaves, LogCost, RefuseUntrained, RequireAllTrained, RequireFp32
from .create import adapter_config, is_new, make_adapter, seed_of
from .gradient_callback import ChooseByGradient
from .load import check_not_the_start, holds_adapter, load_trained, untrained_message, what_to_name
from .provenance import check_provenance
from .resume import check_resume
from .training_record import WriteTrainingRecord
from .verify import check_same_everywhere, check_saved

LOG = get_logger(__name__)

NORMS_FILE = "activation_norms.safetensors"


_PLANNING = ContextVar("_PLANNING", default=False)


@contextlib.contextmanager
def planning() -> Iterator[None]:
    """Context of `axolotl supertune plan`: libraries of the engine need not be installed on this machine.

    It holds for every plugin object, as Axolotl's validation registers one of its own.
    """
    token = _PLANNING.set(True)
    try:
        yield
    finally:
        _PLANNING.reset(token)


class SupertunePlugin(BasePlugin):
    """Makes `adapter: supra` and `adapter: super` trainable: `plugins: [axolotl_supertune.SupertunePlugin]`.

    Attributes:
        calibrates_only: set by `axolotl supertune calibrate`. The calibration text is read even if the YAML names an
            adapter or a checkpoint, and `load_adapter` returns the bare model.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calibrates_only = False
        self._inference = False
        self._processes: Processes | None = None
        self._replaced: dict[str, Any] = {}  # the YAML's values of keys that differ while the base is loaded
        self._windows: Windows | None = None
        self._calibrated: str | None = None  # where the norms came from, for the log
        self._resumes: Path | None = None  # the checkpoint
        self._untrained = False
        self._awaits_gradient = False
        self._finished = False  # post_train has been called once

    def register(self, cfg: Any) -> None:
        """Check the raw YAML, fill in defaults, and find the trained adapter for `axolotl inference`.

        Raises:
            ValueError, FileNotFoundError: a key is refused; names it, its value and the remedy.
        """
        validation.prepare(cfg, axolotl_compat.config_keys(axolotl_compat.registered_argument_classes()))
        self._inference = bool(cfg.get("inference"))  # not in the validated config: Axolotl's schema drops it
        if cfg.get("adapter") not in validation.ADAPTERS:
            return
        if self._inference or cfg.get("merge_lora") or axolotl_compat.is_merging():
            # Inference and merging run in one process. merge-lora loads the YAML twice and sets merge_lora only the
            # second time; `is_merging` covers the first.
            engine_of(cfg).leave_out(cfg)
        if not _PLANNING.get():
            engine_of(cfg).check_installed()
        output_dir = Path(cfg.get("output_dir") or ".")
        if self._inference or cfg.get("merge_lora"):
            check_not_the_start(cfg, output_dir)
        elif problem := validation.missing_evaluations(cfg):
            LOG.warning("%s", problem)
        if cfg.get("merge_lora"):
            quantized_base.load_as_trained(cfg, Path(cfg.get("lora_model_dir") or output_dir))
        if self._inference and not cfg.get("lora_model_dir"):
            if not holds_adapter(output_dir):
                raise ConfigError(
                    "lora_model_dir",
                    f"not set, and {output_dir} (output_dir) holds no adapter: there is no trained model to run. "
                    f"{what_to_name(output_dir)}",
                )
            cfg["lora_model_dir"] = str(output_dir)
            LOG.warning("lora_model_dir is not set: using the adapter in output_dir, %s.", output_dir)

    def get_input_args(self) -> str:
        """The dotted path of the class with the plugin's YAML keys."""
        return "axolotl_supertune.plugin.args.SupertuneArgs"

    def get_adapter_capabilities(self) -> list[AdapterCapabilities]:
        """The names that `adapter` may have."""
        return [AdapterCapabilities(name=name) for name in validation.ADAPTERS]

    def pre_model_load(self, cfg: Any) -> None:
        """Complete the base's quantization config and draw the calibration windows, before the model is loaded.

        Raises:
            ValueError, FileNotFoundError: the calibration text or norms are missing or unsuitable, the base is
                quantized by another library, or an untrained adapter would be evaluated.
        """
        self._windows = None
        self._calibrated = None
        self._finished = False
        if cfg.adapter not in validation.ADAPTERS:
            return
        self._processes = _connected_processes()
        replacements = engine_of(cfg).loading_keys(cfg.torch_dtype)
        # Copies, assigned one by one: `update` of Axolotl's config merges nested mappings in place.
        self._replaced = {key: copy.deepcopy(cfg[key]) for key in replacements}
        for key, value in replacements.items():
            cfg[key] = value
        # If one process failed alone, the others would wait for it to load its part of the base.
        with self._processes.synchronized("reading the base model's config"):
            model_config = axolotl_compat.load_model_config(cfg)
            quantized_base.complete(cfg, model_config)
            new = self.calibrates_only or is_new(cfg)
            if new and not self.calibrates_only and axolotl_compat.is_evaluating():
                raise ValueError(untrained_message(cfg.output_dir))
        with self._processes.synchronized("making a new adapter" if new else "reading a trained adapter"):
            pass  # Nothing to do: fails if the processes disagree on the step.
        if not new:
            return
        if cfg.calibration_path:
            with self._processes.synchronized("reading calibration_path"):
                norms = ActivationNorms.load(cfg.calibration_path)
                check_provenance(cfg, norms.provenance, max_positions(model_config))
        elif validation.method_config(cfg).needs_norms:
            with self._processes.synchronized("reading the calibration text"):
                if cfg.calibration_dataset == TRAINING_SET:
                    # In all processes: Axolotl's loading of the data is collective.
                    self._windows = windows_of_records(cfg, model_config)
                else:
                    LOG.info("Reading the calibration text, %s.", cfg.calibration_dataset)
                    self._windows = self._processes.from_first(lambda: windows_of_text(cfg, model_config))

    def post_model_build(self, cfg: Any, model: Any) -> None:
        """Prepare a quantized or sharded base model for training, in place.

        Axolotl sets the dtypes of what is not quantized after this hook.
        """
        if cfg.adapter in validation.ADAPTERS:
            for key, value in self._replaced.items():
                cfg[key] = value
            self._replaced = {}
            quantized_base.prepare(cfg, model)
            engine = engine_of(cfg)
            if engine.shards_while_loading:
                assert self._processes is not None, "pre_model_load came first"
                with self._processes.synchronized("preparing the base model"):
                    engine.restore_buffers(model, cfg.torch_dtype)

    def load_adapter(
        self, model: Any, cfg: Any, inference: bool = False, config_only: bool = False
    ) -> tuple[Any, PeftConfig | None] | None:
        """Load the adapter that `lora_model_dir` or a checkpoint names, else make a new one.

        Returns:
            (the adapted model, its PEFT config or None); with a config, Axolotl writes it into output_dir before
            training begins. (model, None) while only calibrating. None if `adapter` is neither supra nor super.

        Raises:
            ValueError: the YAML and the adapter or model do not fit; names the key and the remedy.
        """
        if cfg.adapter not in validation.ADAPTERS:
            return None
        if config_only:
            raise ConfigError("rl", f"{cfg.rl} does not work with adapter: {cfg.adapter} yet.")
        if self.calibrates_only:
            return model, None
        processes = self._processes = self._processes or _connected_processes()
        with processes.synchronized("loading the adapter"):
            model = self._load_adapter(model, cfg, inference)
            check_same_everywhere(model, processes)
        # Weights of an earlier run stay in output_dir until this one ends; a new config beside them, with another α,
        # would change what they compute.
        has_earlier = holds_adapter(Path(cfg.output_dir))
        return model, None if has_earlier else model.peft_config["default"]

    def _load_adapter(self, model: Any, cfg: Any, inference: bool) -> Any:
        frozen = inference or self._inference or bool(cfg.merge_lora)
        checkpoint = None if frozen else axolotl_compat.last_checkpoint(cfg)
        self._resumes = Path(checkpoint) if checkpoint else None
        trained_folder = cfg.lora_model_dir or checkpoint
        self._untrained = not trained_folder
        if checkpoint:
            world = self._processes.world if self._processes else 1
            check_resume(cfg, checkpoint, adapter_config(model, cfg), engine_of(cfg, world))
        if trained_folder:
            model = load_trained(model, cfg, trained_folder, asked=adapter_config(model, cfg), trainable=not frozen)
        else:
            assert self._processes is not None
            model = make_adapter(model, cfg, self._processes, self._norms)
        self._awaits_gradient = model.peft_config["default"].awaits_gradient and bool(sparse_layers(model))
        note_training(model, *run_summary.training_facts(cfg))
        # Checkpoints are in fp32, so that a run resumes exactly; `post_train` sets the dtype of the finished file.
        model.peft_config["default"].values_dtype = "fp32"
        line = run_summary.calibration_line(model, self._calibrated or "as the adapter was made")
        LOG.info("\n%s%s\nKernels: %s", run_summary.layer_text(model), line, run_summary.kernels(model, cfg))
        return model

    def add_callbacks_post_trainer(self, cfg: Any, trainer: Any) -> list[TrainerCallback]:
        """Configure the engine for training, and return the callbacks that check the run and log its costs.

        Raises:
            ValueError: one process sees several GPUs, or the engine does not run.
        """
        if cfg.adapter not in validation.ADAPTERS:
            return []
        if trainer.args.n_gpu > 1:
            raise ValueError(
                f"One process sees {trainer.args.n_gpu} GPUs and would train with torch.nn.DataParallel, whose copies "
                "of the model the adapter does not follow: run one process per GPU (axolotl train CONFIG --launcher "
                f"accelerate -- --num_processes {trainer.args.n_gpu}), or one GPU (CUDA_VISIBLE_DEVICES=0)."
            )
        # Not in `post_trainer_create`, which `axolotl evaluate` does not call.
        running_engine(cfg, trainer).prepare_trainer(trainer)
        assert self._processes is not None, "load_adapter came first"
        callbacks = [
            # Before CheckSaves, which reads the whole file: a run that is killed meanwhile has its record.
            WriteTrainingRecord(self._processes, cfg.sparse_lr),
            RequireAllTrained(),
            RequireFp32(),
            CheckSaves(self._processes, self._resumes),
        ]
        cost = None
        if hasattr(trainer, "store_metrics"):  # the user's own trainer_cls may not have it
            cost = LogCost(trainer)
            callbacks.append(cost)
        if self._awaits_gradient:
            callbacks.append(ChooseByGradient(trainer, self._processes, seed_of(cfg), cost))
        if self._untrained:
            callbacks.append(RefuseUntrained(cfg.output_dir))
        return callbacks

    def post_train(self, cfg: Any, model: Any) -> None:
        """Set the dtype of the final save, then check the saved file.

        Axolotl calls this twice. First, when training ends: sets the dtype in which the adapter is saved. Then, after
        the save: checks the file.

        Raises:
            RuntimeError: the saved file is not the model's adapter.
        """
        if cfg.adapter not in validation.ADAPTERS:
            return
        if self._finished and (self._processes is None or self._processes.is_first):
            check_saved(model, Path(cfg.output_dir))
        self._finished = True
        model.peft_config["default"].values_dtype = cfg.values_dtype

    def _norms(self, model: Any, cfg: Any, layers: list[str]) -> ActivationNorms:
        """The activation norms of a new adapter: from calibration_path, or measured and saved into output_dir."""
        if cfg.calibration_path:
            norms = ActivationNorms.load(cfg.calibration_path)
            norms.check_model(model, f"calibration_path: the norms in {cfg.calibration_path}", read=read_parameter)
            self._calibrated = f"read from {cfg.calibration_path}"
            return norms
        norms, seconds = self.measured_norms(model, cfg, layers)
        processes = self._processes
        assert processes is not None
        several = processes.world > 1 and not engine_of(cfg).only_first_has_weights
        self._calibrated = f"{seconds:.1f} s" + (f" in {processes.world} processes" if several else "")
        path = Path(cfg.output_dir) / NORMS_FILE
        if processes.is_first:
            norms.save(path)
            LOG.info("Activation norms saved to %s; calibration_path reuses them.", path)
        return norms

    def measured_norms(
        self, model: Any, cfg: Any, layers: list[str], *, stream: bool = False
    ) -> tuple[ActivationNorms, float]:
        """`calibrate.measured_norms` on the windows that `pre_model_load` drew.

        Raises:
            RuntimeError: `pre_model_load` drew none.
        """
        windows, processes = self._windows, self._processes
        if windows is None or processes is None:
            raise RuntimeError("no calibration windows were drawn: pre_model_load did not run before load_adapter.")
        return calibrate.measured_norms(model, cfg, layers, windows, processes, stream=stream)


def _connected_processes() -> Processes:
    """Connect the processes of this run, which Axolotl may do only when the Trainer is made.

    Raises:
        ValueError: the launcher started several processes that do not know of each other.
    """
    seconds = axolotl_compat.process_timeout()
    axolotl_compat.init_distributed_state()
    if on_cpus() and not torch.distributed.is_initialized():
        # As Accelerate does, later.
        torch.distributed.init_process_group("gloo", timeout=timedelta(seconds=seconds))
    check_processes_know_each_other(torch.distributed.is_initialized())
    return Processes(seconds, f"{axolotl_compat.TIMEOUT_VARIABLE}=SECONDS waits longer.")
