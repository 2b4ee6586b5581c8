"""One method's measurement in a fresh process: `python -m axolotl_supertune.bench.worker JOB_AS_JSON`.

The last line of stdout is the row, as JSON. An error is a row too: the other methods shall go on.
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
from .job import ON_4_BITS, Job, model_config
from .methods import PaperLinear, apply_method

GIB, MIB = 2**30, 2**20
_PACKAGE = __name__.partition(".")[0]
_PROFILED_STEPS = 3
_CALIBRATION_BATCH = 8


class Watch:
    """Seconds and CUDA memory of a `with` block. Memory is None on a CPU, where nobody counts it.

    Attributes:
        seconds: wall time, the device's work included.
        peak_gib: peak of allocated memory.
        extra_gib: how far that lies above what was allocated before.
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


def measure(job: Job) -> dict[str, Any]:
    """Build the model with random weights, apply the method, train `job.warmup + job.steps` steps.

    Returns:
        The row: what `report.COLUMNS` shows and more; a quantity that does not exist is None.
    """
    device = torch.device(job.device)
    torch.manual_seed(0)
    if job.memory_limit is not None:
        torch.cuda.set_per_process_memory_fraction(job.memory_limit * GIB / torch.cuda.mem_get_info()[1])
    model = build_model(job)
    if job.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    vocabulary = model.config.vocab_size
    row: dict[str, Any] = {"method": job.method, "status": "ok"}
    norms = None
    if job.method == "super-wanda":
        norms = _skewed_norms(model, job, row)
    known = {tensor.data_ptr() for tensor in _held_tensors(model)}
    with Watch(device) as watch:
        model = apply_method(model, job, norms)
    if job.method not in ("floor", "full", "lora", "lora-bf16", "qlora"):
        row |= {"selection_seconds": watch.seconds, "selection_extra_gib": watch.extra_gib}

    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-5, fused=device.type == "cuda") if trained else None
    ids = torch.randint(0, vocabulary, (job.batch_size, job.sequence_len), device=device)

    def step() -> Tensor:
        with torch.autocast(device.type, torch.bfloat16) if job.autocast else nullcontext():
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    with Watch(device) as warmup:
        for _ in range(job.warmup):
            loss = step()
    if job.profile:
        return row | {"profile": _profile(step, device)}
    with Watch(device) as watch:
        times = sorted(_milliseconds(step, device) for _ in range(job.steps))
    if not bool(torch.isfinite(loss)):
        raise FloatingPointError(f"the loss is {loss.item()} after warm-up: what was timed is not training.")
    state = [] if optimizer is None else [list(held.values()) for held in optimizer.state.values()]
    tokens = job.batch_size * job.sequence_len
    return row | {
        "trainable": sum(parameter.numel() for parameter in trained),
        "checkpoint_bytes": _checkpoint_bytes(model, job.method),
        "warmup_seconds": warmup.seconds,  # kernels that compile at first use do it here
        "peak_gib": watch.peak_gib,
        "adam_mib": _mib([value for held in state for value in held if isinstance(value, Tensor)]),
        "index_mib": _mib([tensor for tensor in _held_tensors(model) if tensor.data_ptr() not in known]),
        "step_ms": median(times),
        "step_ms_min": times[0],
        "steps_per_s": 1000 / median(times),
        "tokens_per_s": 1000 * tokens / median(times),
    }


def build_model(job: Job) -> Any:
    """The model of `job.model` with random weights, made on the device; bf16, on a CPU fp32; or quantized to 4 bits."""
    dtype = torch.bfloat16 if job.device.startswith("cuda") else torch.float32
    quantized = job.method in ON_4_BITS
    with torch.device("meta" if quantized else job.device):
        model = AutoModelForCausalLM.from_config(
            model_config(job.model), dtype=dtype, attn_implementation=job.attn_implementation
        )
    if quantized:
        _quantize(model, torch.device(job.device), dtype)
    model.config.use_cache = False  # as trainers set it: no keys and values for a generation that never comes
    return model.train()


def _quantize(model: Any, device: torch.device, dtype: torch.dtype) -> None:
    """Fill a model of shapes with random weights, all linear layers but the head in 4 bits, one layer at a time.

    As Axolotl loads a base for qlora; never more than one layer is there unquantized, so that a small card suffices.
    """
    import bitsandbytes

    head = model.get_output_embeddings()
    options: Any = {"quant_type": "nf4", "compress_statistics": True, "quant_storage": torch.bfloat16}
    modules: Any = list(model.named_modules())
    for name, module in modules:
        if isinstance(module, nn.Linear) and module is not head:
            weight = torch.randn(module.weight.shape, dtype=dtype, device=device) * 0.02
            bias, shape = module.bias is not None, (module.in_features, module.out_features)
            layer = bitsandbytes.nn.Linear4bit(*shape, bias=bias, compute_dtype=dtype, device="meta", **options)
            packed: Any = bitsandbytes.nn.Params4bit(weight, requires_grad=False, module=layer, **options)
            layer.weight = packed.to(device)  # quantizes
            if bias:
                layer.bias = nn.Parameter(torch.zeros(module.out_features, dtype=dtype, device=device))
            model.set_submodule(name, layer)
        elif any(buffer.is_meta for buffer in module.buffers(recurse=False)):
            with device:
                module.__init__(module.config)  # rotary embeddings, whose numbers follow from the config
        else:
            for key, parameter in module._parameters.items():
                if parameter is not None:
                    drawn = torch.randn(parameter.shape, dtype=dtype, device=device) * 0.02
                    module._parameters[key] = nn.Parameter(drawn + 1 if parameter.dim() == 1 else drawn)
    model.tie_weights()
    model.is_loaded_in_4bit = True  # what PEFT's LoRA asks


def _skewed_norms(model: Any, job: Job, row: dict[str, Any]) -> ActivationNorms:
    """Calibrate on random ids, note what it cost beside the bare forward pass, and return norms that vary."""
    device = torch.device(job.device)
    ids = torch.randint(
        0, model.config.vocab_size, (job.calibration_samples, job.calibration_sequence_len), device=device
    )
    batches = ids.split(_CALIBRATION_BATCH)

    def forward(several: tuple[Tensor, ...]) -> None:
        with torch.no_grad():
            for batch in several:
                model.base_model(input_ids=batch, use_cache=False)

    forward(batches[:1])  # libraries load and the allocator grows; what is timed below is the work
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
    # A random model's features have similar norms (log-deviation 0.1 to 0.6), and scaling the embeddings' columns lasts
    # one layer: the residual stream forgets them. A trained model's norms differ by orders of magnitude, which crowds
    # the support into few columns. So each is multiplied by a lognormal factor here; a step's cost depends on where the
    # support lies, not on why.
    generator = torch.Generator().manual_seed(0)
    for norm in norms.norms.values():
        norm.mul_(torch.randn(norm.shape, generator=generator).exp())
    return norms


def _milliseconds(step: Callable[[], Tensor], device: torch.device) -> float:
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
    """Size of what the method saves; what PEFT does not write is counted, not written."""
    if isinstance(model, PeftModel):
        with tempfile.TemporaryDirectory() as folder:
            # Told not to save embeddings, PEFT does not ask the hub about the base model's vocabulary.
            model.save_pretrained(folder, save_embedding_layers=False)
            return sum(file.stat().st_size for file in Path(folder).rglob("*.safetensors"))
    if method == "full":  # parameters() names tied weights once, as a checkpoint does
        return sum(parameter.nbytes for parameter in model.parameters())
    layers: list[Any] = [layer for layer in model.modules() if isinstance(layer, PaperLinear)]
    return sum(layer.values.nbytes + layer.indices.nbytes for layer in layers)


def _mib(tensors: list[Tensor]) -> float:
    return sum(tensor.nbytes for tensor in {tensor.data_ptr(): tensor for tensor in tensors}.values()) / MIB


def _held_tensors(model: nn.Module) -> Iterator[Tensor]:
    """All tensors that modules hold and that are no parameters: buffers, and those in plain attributes."""
    parameters = {parameter.data_ptr() for parameter in model.parameters()}
    for module in model.modules():
        for key, value in vars(module).items():
            if key not in ("_parameters", "_modules", "peft_config"):  # a config holds the norms, which are no index
                yield from (tensor for tensor in _inside(value) if tensor.data_ptr() not in parameters)


def _inside(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for each in value.values():
            yield from _inside(each)
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _inside(each)
    elif (
        type(value).__module__.startswith(_PACKAGE) and not isinstance(value, nn.Module) and hasattr(value, "__dict__")
    ):
        yield from _inside(vars(value))  # what our layers keep in objects of their own


def main() -> None:
    """Measure the job of the command line and print the row."""
    job = Job(**json.loads(sys.argv[1]))
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("default")
            row = measure(job)
        # "computed by the slower reference path" must not be lost
        row["warnings"] = sorted({str(each.message) for each in caught if each.category is UserWarning})
    except Exception as error:
        traceback.print_exc()
        lines = str(error).splitlines() or [""]
        row = {"method": job.method, "status": "failed", "note": f"{type(error).__name__}: {lines[0][:300]}"}
    print(json.dumps(row))


if __name__ == "__main__":
    main()
