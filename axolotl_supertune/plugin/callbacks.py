"""What the plugin adds to a training: four guards, and what a run costs in the Trainer's logs."""

import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import TrainerCallback

from ..engines.processes import Processes
from ..engines.sharding import dtype_of, shape_of
from ..method.cuda_memory import PeakMemory
from ..tuner import SupraLayer
from .load import untrained
from .verify import adapter_tensors, check_saved


class RequireAllTrained(TrainerCallback):
    """Raises at the first step unless the optimizer holds every trainable parameter: some take matrices only."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        optimizer, model = kwargs.get("optimizer"), kwargs.get("model")
        if optimizer is None or model is None:
            return
        held = {id(parameter) for group in _groups(optimizer) for parameter in group}
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and id(parameter) not in held:
                raise ValueError(
                    f"optimizer: {type(optimizer).__name__} does not hold {name}, which would stay untrained; use "
                    "another one, such as adamw_torch_fused."
                )


def _groups(optimizer: Any) -> Iterable[Iterable[Tensor]]:
    """The parameters that an optimizer trains; of DeepSpeed's ZeRO, `param_groups` are flat partitions of them."""
    zero = getattr(optimizer, "optimizer", None)
    groups = getattr(zero, "bit16_groups", None) or getattr(zero, "fp16_groups", None)  # stages 1 and 2; stage 3
    return [group["params"] for group in optimizer.param_groups] if groups is None else groups


class RequireFp32(TrainerCallback):
    """Raises at the first step if something has cast U, L or R, as DeepSpeed's bf16 would."""

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
    """Raises at the first evaluated batch unless training began."""

    def __init__(self, output_dir: str) -> None:
        self._output_dir = output_dir
        self._training = False

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self._training = True

    def on_prediction_step(self, *args: Any, **kwargs: Any) -> None:
        if not self._training:
            raise ValueError(untrained(self._output_dir))


class CheckSaves(TrainerCallback):
    """Raises in all processes unless a checkpoint holds the whole adapter: one just written, and one just resumed.

    Args:
        processes: of the run.
        resumed: the checkpoint that training goes on from, if any.
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
    """Adds to what the Trainer logs, and so to the console and to every tracker:

    - `supertune/tokens_per_second`: tokens that this process trained on since the last log, over the time since then
      without evaluations and saves. Positions with attention mask 0 do not count; of a batch without a mask (packed
      sequences, with some attention implementations) all do. Axolotl's `tokens/train_per_sec_per_gpu` counts the
      tokens with a label instead, and evaluations and saves as time.
    - `supertune/peak_memory_gib`: the most CUDA memory that was allocated since training began, in GiB; not on a CPU.
      Axolotl's `memory/max_allocated (GiB)` starts again at every log.
    - `supertune/adapter_mib`, in the first log: all tensors of the Supra adapters in memory, in MiB: indices included,
      with 4 bytes each where the file has 2.
    - `supertune/trainable_parameters`, in the first log: trainable scalars, `lora_modules_to_save` included.

    The last step is logged too where `logging_steps` does not divide their number, unless nothing is to be logged.

    The device is waited for where the Trainer is about to log, evaluate or save, never in between.

    Args:
        trainer: an Axolotl trainer; its `training_step` is wrapped to see the batches, which callbacks do not.
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
        """Time since the last log that was spent on something else than training."""
        self._started += seconds

    def _leave_out(self) -> None:
        """The time since the last step is not training."""
        now = time.perf_counter()
        self._started += now - self._stopped
        self._stopped = now


def _tokens(inputs: Mapping[str, Any]) -> Tensor | int:
    """How many positions of a batch are no padding, on the batch's device where only the device knows."""
    mask = inputs.get("attention_mask")
    if isinstance(mask, Tensor) and mask.dim() == 2:
        return mask.count_nonzero()  # Axolotl numbers the sequences of a pack 1, 2, … in its mask
    ids = inputs.get("input_ids")
    return ids.numel() if isinstance(ids, Tensor) else 0


def _adapter_bytes(model: nn.Module) -> int:
    tensors: dict[int, Tensor] = {}
    for module in model.modules():
        if isinstance(module, SupraLayer):
            for name, tensor in (*module.named_parameters(), *module.named_buffers()):
                if not name.startswith("base_layer."):
                    tensors[id(tensor)] = tensor
    return sum(shape_of(tensor).numel() * tensor.element_size() for tensor in tensors.values())
