"""Callbacks of a training: four checks that stop a run that would go wrong, and the costs in the Trainer's logs.

Internals that this file reaches into: `store_metrics` of Axolotl's trainer, with which its own metrics reach the
logs. If it were renamed, training would raise AttributeError before its first step: tests/plugin/test_train.py.
"""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import TrainerCallback

from ..engines.optimizer_state import trained_groups
from ..engines.processes import Processes
from ..engines.sharding import dtype_of, shape_of
from ..method.cuda_memory import PeakMemory
from ..tuner import SupraLayer
from .load import untrained_message
from .verify import adapter_tensors, check_saved


class RequireAllTrained(TrainerCallback):
    """Raises ValueError before the first step unless the optimizer has every trainable parameter.

    Some optimizers take matrices only, and U is a vector.
    """

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        optimizer, model = kwargs.get("optimizer"), kwargs.get("model")
        if optimizer is None or model is None:
            return
        optimized = {id(parameter) for group in trained_groups(optimizer) for parameter in group}
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and id(parameter) not in optimized:
                raise ValueError(
                    f"optimizer: {type(optimizer).__name__} does not hold {name}, which would stay untrained; use "
                    "another one, such as adamw_torch_fused."
                )


class RequireFp32(TrainerCallback):
    """Raises RuntimeError before the first step if U, L or R is not fp32, as after a cast by an engine."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        for name, tensor in adapter_tensors(kwargs["model"]).items():
            dtype = dtype_of(tensor)
            if name.endswith((".supra_values", ".supra_L", ".supra_R")) and dtype != torch.float32:
                raise RuntimeError(
                    f"{name} has become {dtype}: U, L and R are trained in fp32, and something that prepared "
                    "the model has cast them. Please report this, with the config and the versions of axolotl and "
                    "accelerate."
                )


class RefuseUntrained(TrainerCallback):
    """Raises ValueError at the first evaluated batch unless training has begun.

    Args:
        output_dir: the YAML's, where a trained adapter may be.
    """

    def __init__(self, output_dir: str) -> None:
        self._output_dir = output_dir
        self._training = False

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self._training = True

    def on_prediction_step(self, *args: Any, **kwargs: Any) -> None:
        if not self._training:
            raise ValueError(untrained_message(self._output_dir))


class CheckSaves(TrainerCallback):
    """Raises in all processes unless a checkpoint that was just written, or resumed, holds the whole adapter.

    Args:
        processes: of the run.
        resumed: the checkpoint that training resumes from, if any.
    """

    def __init__(self, processes: Processes, resumed: Path | None = None) -> None:
        self._processes, self._resumed = processes, resumed

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._resumed is not None:
            with self._processes.synchronized("checking the checkpoint that is resumed"):
                check_saved(kwargs["model"], self._resumed, values=True, reads=self._processes.is_first)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        with self._processes.synchronized("checking a checkpoint"):
            if self._processes.is_first:
                check_saved(kwargs["model"], Path(args.output_dir) / f"checkpoint-{state.global_step}")


class LogCost(TrainerCallback):
    """Adds a run's costs to the Trainer's logs, and so to the console and to every tracker:

    - `supertune/tokens_per_second`: tokens of this process since the last log, per second of training; evaluations and
      saves are left out. Positions with attention mask 0 do not count. A batch without a mask (packed sequences, with
      some attention implementations) counts in full. Axolotl's `tokens/train_per_sec_per_gpu` counts the tokens with a
      label instead, and includes the time of evaluations and saves.
    - `supertune/peak_memory_gib`: peak of allocated CUDA memory since training began, in GiB; not on a CPU. Axolotl's
      `memory/max_allocated (GiB)` is the peak since the last log.
    - `supertune/adapter_mib`, in the first log: memory of all tensors of the Supra adapters, in MiB, indices included
      (4 bytes each in memory, 2 in the file).
    - `supertune/trainable_parameters`, in the first log: trainable scalars, `lora_modules_to_save` included.

    The last step is logged, too, if `logging_steps` does not divide the number of steps, unless logging is off.

    Waits for the device only when the Trainer is about to log, evaluate or save.

    Args:
        trainer: an Axolotl trainer; its `training_step` is wrapped, as callbacks do not get the batches.
    """

    def __init__(self, trainer: Any) -> None:
        self._store = trainer.store_metrics
        self._tokens: Tensor | int = 0
        self._started = self._stopped = time.perf_counter()
        self._peak: PeakMemory | None = None
        training_step = trainer.training_step

        def counted(model: Any, inputs: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
            self._tokens = self._tokens + _tokens(inputs)
            return training_step(model, inputs, *args, **kwargs)

        trainer.training_step = counted

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # Axolotl resets the statistics at every log too: no peak is lost but that of loading and calibration.
        self._peak = PeakMemory(args.device)
        self._tokens = 0
        self._started = self._stopped = time.perf_counter()
        model = kwargs["model"]
        trainable = sum(shape_of(parameter).numel() for parameter in model.parameters() if parameter.requires_grad)
        self._store({"supertune/adapter_mib": _adapter_bytes(model) / 2**20})
        self._store({"supertune/trainable_parameters": trainable}, reduction="max")  # integers have no mean

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step >= state.max_steps and args.logging_strategy != "no":
            control.should_log = True
        if not (control.should_log or control.should_evaluate or control.should_save):
            return
        peak = self._peak.read() if self._peak is not None else 0
        self._stopped = time.perf_counter()
        tokens, elapsed = int(self._tokens), self._stopped - self._started
        if not (control.should_log and tokens and elapsed > 0):
            return
        self._store({"supertune/tokens_per_second": tokens / elapsed})
        if peak:
            self._store({"supertune/peak_memory_gib": peak / 2**30}, reduction="max")
        self._tokens, self._started = 0, self._stopped

    def on_epoch_end(self, *args: Any, **kwargs: Any) -> None:
        self.on_step_end(*args, **kwargs)

    def on_evaluate(self, *args: Any, **kwargs: Any) -> None:
        self._leave_out()

    def on_save(self, *args: Any, **kwargs: Any) -> None:
        self._leave_out()

    def leave_out(self, seconds: float) -> None:
        """Leave out seconds since the last log that were spent on something else than training."""
        self._started += seconds

    def _leave_out(self) -> None:
        """Leave out the time since the last step."""
        now = time.perf_counter()
        self._started += now - self._stopped
        self._stopped = now


def _tokens(inputs: Mapping[str, Any]) -> Tensor | int:
    """The number of positions of a batch that are not padding; a tensor on the batch's device if it must be counted."""
    mask = inputs.get("attention_mask")
    if isinstance(mask, Tensor) and mask.dim() == 2:
        return mask.count_nonzero()  # in a pack, the mask has the number of the sequence: 1, 2, …
    ids = inputs.get("input_ids")
    return ids.numel() if isinstance(ids, Tensor) else 0


def _adapter_bytes(model: nn.Module) -> int:
    """Bytes of all tensors of the Supra layers, without their base weights; shared tensors count once."""
    tensors: dict[int, Tensor] = {}
    for module in model.modules():
        if isinstance(module, SupraLayer):
            for name, tensor in (*module.named_parameters(), *module.named_buffers()):
                if not name.startswith("base_layer."):
                    tensors[id(tensor)] = tensor
    return sum(shape_of(tensor).numel() * tensor.element_size() for tensor in tensors.values())
