"""Measures one method, in a process of its own: `python -m axolotl_supertune.bench.worker JOB_AS_JSON`.

The last line of stdout is the row of the table, as JSON. An error becomes a row as well, so that the other methods are
still measured.
"""

import json
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from statistics import median
from types import TracebackType
from typing import Any, Self

import torch
from peft import PeftModel
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from ..method.activation_norms import ActivationNorms
from ..method.cuda_memory import PeakMemory
from ..tuner.base_calibration import calibrate
from ..tuner.quantization import nf4_linear
from .measurement import ON_4_BITS, Measurement, model_config
from .methods import PaperLinear, apply_method

GIB, MIB = 2**30, 2**20
_PACKAGE = __name__.partition(".")[0]
_PROFILED_STEPS = 3
_CALIBRATION_BATCH = 8


class Watch:
    """Context that measures wall time and CUDA memory. Memory is None on a CPU.

    Attributes:
        seconds: wall time, including the device's work.
        peak_gib: peak of allocated memory.
        extra_gib: the peak minus what was allocated at the start.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.seconds = 0.0
        self.peak_gib: float | None = None
        self.extra_gib: float | None = None

    def __enter__(self) -> Self:
        self._memory = PeakMemory(self._device)
        self._start = time.perf_counter()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._device.type == "cuda" and error is None:
            peak = self._memory.read()
            self.peak_gib, self.extra_gib = peak / GIB, (peak - self._memory.before) / GIB
        self.seconds = time.perf_counter() - self._start


def measure(measurement: Measurement) -> dict[str, Any]:
    """Build the model with random weights, apply the method, and train `measurement.warmup + measurement.steps` steps.

    Returns:
        The row: the values that `report.COLUMNS` shows and more; None where a value does not exist.

    Raises:
        FloatingPointError: the loss is not finite.
    """
    device = torch.device(measurement.device)
    torch.manual_seed(0)
    if measurement.memory_limit is not None:
        torch.cuda.set_per_process_memory_fraction(measurement.memory_limit * GIB / torch.cuda.mem_get_info()[1])
    model = build_model(measurement)
    if measurement.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    vocabulary = model.config.vocab_size
    row: dict[str, Any] = {"method": measurement.method, "status": "ok"}
    norms = None
    if measurement.method == "super-wanda":
        norms = _skewed_norms(model, measurement, row)
    present = {tensor.data_ptr() for tensor in _extra_tensors(model)}
    with Watch(device) as watch:
        model = apply_method(model, measurement, norms)
    if measurement.method not in ("floor", "full", "lora", "lora-bf16", "qlora"):
        row |= {"selection_seconds": watch.seconds, "selection_extra_gib": watch.extra_gib}

    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-5, fused=device.type == "cuda") if trained else None
    ids = torch.randint(0, vocabulary, (measurement.batch_size, measurement.sequence_len), device=device)

    def step() -> Tensor:
        with torch.autocast(device.type, torch.bfloat16) if measurement.autocast else nullcontext():
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    with Watch(device) as warmup:
        for _ in range(measurement.warmup):
            loss = step()
    if measurement.profile:
        return row | {"profile": _profile(step, device)}
    with Watch(device) as watch:
        times = sorted(_milliseconds(step, device) for _ in range(measurement.steps))
    if not bool(torch.isfinite(loss)):
        raise FloatingPointError(f"the loss is {loss.item()} after warm-up: what was timed is not training.")
    state = [] if optimizer is None else [list(of_one.values()) for of_one in optimizer.state.values()]
    tokens = measurement.batch_size * measurement.sequence_len
    return row | {
        "trainable": sum(parameter.numel() for parameter in trained),
        "checkpoint_bytes": _checkpoint_bytes(model, measurement.method),
        "warmup_seconds": warmup.seconds,  # includes compilation of kernels at first use
        "peak_gib": watch.peak_gib,
        "adam_mib": _mib([value for of_one in state for value in of_one if isinstance(value, Tensor)]),
        "index_mib": _mib([tensor for tensor in _extra_tensors(model) if tensor.data_ptr() not in present]),
        "step_ms": median(times),
        "step_ms_min": times[0],
        "steps_per_s": 1000 / median(times),
        "tokens_per_s": 1000 * tokens / median(times),
    }


def build_model(measurement: Measurement) -> Any:
    """The measured model with random weights on the device: bf16 (fp32 on a CPU), or quantized to 4 bits."""
    dtype = torch.bfloat16 if measurement.device.startswith("cuda") else torch.float32
    quantized = measurement.method in ON_4_BITS
    with torch.device("meta" if quantized else measurement.device):
        model = AutoModelForCausalLM.from_config(
            model_config(measurement.model), dtype=dtype, attn_implementation=measurement.attn_implementation
        )
    if quantized:
        _quantize(model, torch.device(measurement.device), dtype)
    model.config.use_cache = False  # as trainers do: no key-value cache
    return model.train()


def _quantize(model: Any, device: torch.device, dtype: torch.dtype) -> None:
    """Give a model on the meta device random weights; all linear layers except the head in 4 bits, as Axolotl's qlora.

    Layers are filled one at a time, so that only one is on the GPU unquantized.
    """
    head = model.get_output_embeddings()
    modules: Any = list(model.named_modules())
    for name, module in modules:
        if isinstance(module, nn.Linear) and module is not head:
            weight = torch.randn(module.weight.shape, dtype=dtype, device=device) * 0.02
            bias = None if module.bias is None else torch.zeros(module.out_features, dtype=dtype, device=device)
            model.set_submodule(name, nf4_linear(weight, bias, device))
        elif any(buffer.is_meta for buffer in module.buffers(recurse=False)):
            with device:
                module.__init__(module.config)  # rotary embeddings, computed from the config
        else:
            for key, parameter in module._parameters.items():
                if parameter is not None:
                    drawn = torch.randn(parameter.shape, dtype=dtype, device=device) * 0.02
                    module._parameters[key] = nn.Parameter(drawn + 1 if parameter.dim() == 1 else drawn)
    model.tie_weights()
    model.is_loaded_in_4bit = True  # read by PEFT's LoRA


def _skewed_norms(model: Any, measurement: Measurement, row: dict[str, Any]) -> ActivationNorms:
    """Activation norms of random ids, made uneven; adds the cost of calibration and of a bare forward to the row."""
    device = torch.device(measurement.device)
    ids = torch.randint(
        0,
        model.config.vocab_size,
        (measurement.calibration_samples, measurement.calibration_sequence_len),
        device=device,
    )
    batches = ids.split(_CALIBRATION_BATCH)

    def forward(batches: tuple[Tensor, ...]) -> None:
        with torch.no_grad():
            for batch in batches:
                model.base_model(input_ids=batch, use_cache=False)

    forward(batches[:1])  # warm-up: libraries load and the allocator grows
    with Watch(device) as bare:
        forward(batches)
    with Watch(device) as watch:
        norms = calibrate(model, batches, progress=False)
    row |= {
        "calibration_seconds": watch.seconds,
        "calibration_peak_gib": watch.peak_gib,
        "calibration_forward_seconds": bare.seconds,
        "calibration_forward_peak_gib": bare.peak_gib,
    }
    # Features of a random model have similar norms (log-deviation 0.1 to 0.6); those of a trained one differ by orders
    # of magnitude, which concentrates the support in few columns. Scaling the embeddings' columns would change the
    # first layer only, so every norm is multiplied by a lognormal factor: the cost of a step
    # depends on where the support is.
    generator = torch.Generator().manual_seed(0)
    for norm in norms.norms.values():
        norm.mul_(torch.randn(norm.shape, generator=generator).exp())
    return norms


def _milliseconds(step: Callable[[], Tensor], device: torch.device) -> float:
    """Duration of a step; on CUDA between two events."""
    if device.type != "cuda":
        start = time.perf_counter()
        step()
        return 1000 * (time.perf_counter() - start)
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    step()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end)


def _profile(step: Callable[[], Tensor], device: torch.device) -> str:
    """torch.profiler's table of three steps, sorted by the device's time."""
    from torch.profiler import ProfilerActivity, profile

    cuda = device.type == "cuda"
    with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]) as profiler:
        for _ in range(_PROFILED_STEPS):
            step()
        if cuda:
            torch.cuda.synchronize()
    order = "self_cuda_time_total" if cuda else "self_cpu_time_total"
    return profiler.key_averages().table(sort_by=order, row_limit=40, max_name_column_width=100)


def _checkpoint_bytes(model: nn.Module, method: str) -> int:
    """Bytes of the method's checkpoint; counted, not written, where PEFT does not write it."""
    if isinstance(model, PeftModel):
        with tempfile.TemporaryDirectory() as folder:
            # With save_embedding_layers=False, PEFT does not query the hub for the base model's vocabulary.
            model.save_pretrained(folder, save_embedding_layers=False)
            return sum(file.stat().st_size for file in Path(folder).rglob("*.safetensors"))
    if method == "full":  # parameters() yields tied weights once, as a checkpoint holds them
        return sum(parameter.nbytes for parameter in model.parameters())
    layers: list[Any] = [layer for layer in model.modules() if isinstance(layer, PaperLinear)]
    return sum(layer.values.nbytes + layer.indices.nbytes for layer in layers)


def _mib(tensors: list[Tensor]) -> float:
    """Size of the tensors in MiB; shared memory counts once."""
    return sum(tensor.nbytes for tensor in {tensor.data_ptr(): tensor for tensor in tensors}.values()) / MIB


def _extra_tensors(model: nn.Module) -> Iterator[Tensor]:
    """All tensors of modules that are not parameters: buffers, and those in plain attributes."""
    parameters = {parameter.data_ptr() for parameter in model.parameters()}
    for module in model.modules():
        for key, value in vars(module).items():
            if key not in (
                "_parameters",
                "_modules",
                "peft_config",
            ):  # a PEFT config holds the norms, which training does not need
                yield from (tensor for tensor in _inside(value) if tensor.data_ptr() not in parameters)


def _inside(value: Any) -> Iterator[Tensor]:
    """All tensors in a value: in containers, and in attributes of this package's objects."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _inside(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _inside(item)
    elif (
        type(value).__module__.startswith(_PACKAGE) and not isinstance(value, nn.Module) and hasattr(value, "__dict__")
    ):
        yield from _inside(vars(value))  # objects of this package that layers hold


def main() -> None:
    """Measure the measurement given on the command line and print its row."""
    measurement = Measurement(**json.loads(sys.argv[1]))
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("default")
            row = measure(measurement)
        # such as "computed by the slower reference path"
        row["warnings"] = sorted({str(warning.message) for warning in caught if warning.category is UserWarning})
    except Exception as error:
        traceback.print_exc()
        lines = str(error).splitlines() or [""]
        row = {"method": measurement.method, "status": "failed", "note": f"{type(error).__name__}: {lines[0][:300]}"}
    print(json.dumps(row))


if __name__ == "__main__":
    main()
