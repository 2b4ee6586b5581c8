"""Axolotl plugin that records a run of a grid: `sweep` adds it to every YAML, and it writes the run's run.json.

Recorded YAMLs name the class by this module's path.
"""

import json
import math
import os
import time
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil
import torch
from axolotl.integrations.base import BasePlugin
from peft.tuners.tuners_utils import BaseTunerLayer
from transformers import TrainerCallback

from ..method.budget import DEFAULT_R0, exact_fraction
from ..method.cuda_memory import PeakMemory
from ..plugin.axolotl_compat import draws_lora_by_name
from ..plugin.create import seed_of
from .run_files import RUN_FILE, Run

VARIABLE = "SUPERTUNE_RUN"
"""Environment variable with fields of `Run` that the sweep knows, as JSON: key, config_sha256, setup, jobs_per_gpu."""
PACKAGES = ("axolotl-supertune", "axolotl", "peft", "transformers", "torch", "lm_eval")
NLL = "validation_nll"
"""Key of the validation NLL in the Trainer's log history."""


def installed(packages: tuple[str, ...] = PACKAGES) -> dict[str, str]:
    """Versions of the installed packages, and of this one even if it is only on the path."""
    from .. import __version__

    versions = {"axolotl-supertune": __version__}
    for package in packages:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return versions


def device_name() -> str:
    """The GPU's name, or `cpu`."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


class RecordPlugin(BasePlugin):
    """Makes a run depend on its seed alone, evaluates its last step, and writes run.json once the model is saved."""

    def __init__(self) -> None:
        super().__init__()
        self._record: _Record | None = None
        self._saved = False

    def pre_lora_load(self, cfg: Any, model: Any) -> None:
        """Seed LoRA's initial weights where Axolotl does not: 0.19 draws them before it seeds anything."""
        if not draws_lora_by_name():
            torch.manual_seed(seed_of(cfg))

    def add_callbacks_post_trainer(self, cfg: Any, trainer: Any) -> list[TrainerCallback]:
        """The callback that measures the run.

        Raises:
            ValueError: the run was not started by a sweep, or has no validation data.
        """
        if VARIABLE not in os.environ:
            raise ValueError(
                f"plugins: {type(self).__name__} records the runs of `axolotl supertune sweep`, and {VARIABLE} is not "
                "set: to train this YAML alone, drop the plugin."
            )
        if trainer.eval_dataset is None:
            raise ValueError("test_datasets: there is no validation data, by which a run of a grid is judged.")
        self._record = _Record(trainer)
        return [self._record]

    def post_train(self, cfg: Any, model: Any) -> None:
        """Write run.json at the second call: Axolotl calls this when training ends and again when all is saved."""
        if self._saved and self._record is not None:
            self._record.run().write(Path(cfg.output_dir).parent / RUN_FILE)
        self._saved = True


class _Record(TrainerCallback):
    """Measures the fields of a `Run` during training.

    Args:
        trainer: its `prediction_step` is wrapped to weight losses by tokens; the Trainer's own eval_loss is the mean of
            the batches' losses, whatever their numbers of tokens.
    """

    def __init__(self, trainer: Any) -> None:
        self._state = trainer.state
        self._nats: torch.Tensor | float = 0.0
        self._tokens: torch.Tensor | int = 0
        self._memory: PeakMemory | None = None
        self._peak = 0  # bytes
        self._resumed = False
        self._trainable = 0
        self._budget: int | None = None
        prediction_step = trainer.prediction_step

        def sum_losses(model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            tokens = (inputs["labels"][..., 1:] != -100).sum()
            step = prediction_step(model, inputs, *args, **kwargs)
            self._nats = self._nats + step[0].double() * tokens.to(step[0].device)
            self._tokens = self._tokens + tokens.to(step[0].device)
            return step

        trainer.prediction_step = sum_losses

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._state, self._resumed = state, state.global_step > 0
        model = kwargs["model"]
        self._trainable = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
        self._budget = _budget(model)
        self._memory = PeakMemory(args.device)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step >= state.max_steps:
            control.should_evaluate = True
        if self._memory and (control.should_log or control.should_evaluate or control.should_save):
            # Before Axolotl resets the statistics, as it does at every log.
            self._peak = max(self._peak, self._memory.read())

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # Checkpoints keep the state's log history.
        state.log_history.append({"step": state.global_step, NLL: float(self._nats) / max(int(self._tokens), 1)})
        self._nats, self._tokens = 0.0, 0
        self._memory = PeakMemory(args.device)  # the peak of training, not of evaluations

    def run(self) -> Run:
        """The record, once the model is saved."""
        history = self._state.log_history
        process = psutil.Process()
        return Run(
            **json.loads(os.environ[VARIABLE]),
            status="done",
            started=datetime.fromtimestamp(process.create_time(), UTC).isoformat(timespec="seconds"),
            seconds=time.time() - process.create_time(),
            train_seconds=None
            if self._resumed
            else next(entry["train_runtime"] for entry in history if "train_runtime" in entry),
            steps=self._state.global_step,
            trainable_parameters=self._trainable,
            budget_parameters=self._budget,
            peak_memory_gib=self._peak / 2**30 if self._peak else None,
            losses=_last_by_step(history, "loss"),
            eval_losses=_last_by_step(history, NLL),
            device=device_name(),
            versions=installed(),
        )


def _last_by_step(history: list[dict[str, Any]], key: str) -> list[tuple[int, float]]:
    """(step, value), ascending; of a step that was logged twice, as a resumed run does, the last value."""
    return sorted({int(entry["step"]): float(entry[key]) for entry in history if key in entry}.items())


def _budget(model: Any) -> int | None:
    """Parameters that the budget allows, over the adapted layers; None without any.

    Σ r0(out_features + in_features), or Σ ⌊density · out_features · in_features⌋.
    """
    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    if not layers:
        return None
    config = model.peft_config["default"]
    density = getattr(config, "sparse_density", None)
    if density is not None:
        return sum(math.floor(exact_fraction(density) * layer.out_features * layer.in_features) for layer in layers)
    r0 = getattr(config, "r0", None) or getattr(config, "r", None) or DEFAULT_R0
    return sum(r0 * (layer.out_features + layer.in_features) for layer in layers)
