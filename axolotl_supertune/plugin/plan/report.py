"""A plan as tables and lines for a person, and as JSON for a program."""

from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from ...engines.single import ONE_PROCESS
from . import memory
from .memory import GIB, Estimate
from .result import Plan
from .workload import Job, Step

if TYPE_CHECKING:
    from rich.console import Console

_SETTINGS = (
    "supra_lambda",
    "r0",
    "sparse_density",
    "mask_score",
    "sparse_direction",
    "hybrid_beta",
    "support_scope",
    "budget_scope",
    "gradient_batches",
    "low_rank_warmup_steps",
)

# Names in the table of what the estimate, and so the JSON, calls otherwise.
_MOMENTS = {
    "loss": "while the loss is computed",
    "backward of the last block": "in the backward pass of the last block",
    "backward of the first block": "in the backward pass of the first block",
    "optimizer step": "in the optimizer's step",
    "evaluation": "in an evaluation",
    "choice of the support by gradient": "while gradients choose the support",
}
_PARTS = {
    "adapter": "adapter: U, L, R and the support's indices",
    "optimizer": "state of the optimizer",
    "workspace": "workspace of matrix products",
    "reduction buckets": "buffers that sum gradients over the GPUs",
    "gathered weights": "base weights gathered from the other GPUs",
}


def as_json(plan: Plan) -> dict[str, Any]:
    """The whole plan as plain values; memory in GiB."""
    sparse = sum(row.layers * row.budget.sparse_count for row in plan.rows)
    size = sum(row.layers * row.budget.out_features * row.budget.in_features for row in plan.rows)
    common: dict[str, Any] = {
        "base_model": plan.cfg["base_model"],
        "adapter": plan.cfg["adapter"],
        "method": _method(plan),
        "layers": [
            {"kind": row.kind, "layers": row.layers}
            | asdict(row.budget)
            | {"density": float(row.budget.density), "parameters": row.total}
            for row in plan.rows
        ],
        "total": {
            "parameters": sum(row.total for row in plan.rows),
            "sparse_count": sparse,
            "density": sparse / size,
        },
        "refused": plan.refusals,
        "unchecked": plan.unchecked,
    }
    if plan.estimate is None or plan.job is None:
        return common | {"memory": None, "memory_unknown": plan.unknown}
    return common | {"memory": _memory(plan, plan.estimate, plan.job)}


def _method(plan: Plan) -> dict[str, Any]:
    """The method's settings; None for those that have no effect."""
    unused: set[str] = set()
    if not plan.method.has_sparse_part:
        unused = {"mask_score", "sparse_direction", "support_scope", "gradient_batches"}
    elif plan.method.sparse_direction == "random":
        unused = {"mask_score"}
    return {key: None if key in unused else getattr(plan.method, key) for key in _SETTINGS}


# Fields of `workload` that have other names in the JSON, which programs read.
_JSON_KEYS = {"sequences": "rows", "evaluated_sequences": "evaluated_rows", "linear_out_features": "linear_rows"}


def _with_json_keys(fields: list[tuple[str, Any]]) -> dict[str, Any]:
    return {_JSON_KEYS.get(name, name): value for name, value in fields}


def _memory(plan: Plan, estimate: Estimate, job: Job) -> dict[str, Any]:
    return {
        **asdict(replace(job, engine=ONE_PROCESS), dict_factory=_with_json_keys),  # an engine has no fields to copy
        "engine": job.engine.planned(job.shape.hidden),
        "moment": estimate.moment,
        "parts_gib": {name: size / GIB for name, size in estimate.parts.items()},
        "moments_gib": {name: size / GIB for name, size in estimate.moments.items()},
        "training_peak_gib": estimate.training / GIB,
        "calibration_peak_gib": estimate.calibration / GIB,
        "needed_gib": estimate.needed / GIB,
        "gpu_memory_gib": None if plan.gpu_memory is None else plan.gpu_memory / GIB,
        "fits": plan.fits,
        "notes": plan.notes,
    }


def show(plan: Plan) -> None:
    """Print tables and lines to stdout; in a pipe or a file 140 characters wide."""
    from rich.console import Console

    from ..run_summary import layer_heading, layer_table

    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=140)
    _line(console, layer_heading(plan.method))
    console.print(layer_table(plan.rows), "")
    if plan.estimate is None or plan.job is None:
        _line(console, f"Memory is not estimated: {plan.unknown}")
    else:
        _show_memory(console, plan, plan.estimate, plan.job)
    for refusal in plan.refusals:
        _line(console, f"Refused: {refusal}")
    for unchecked in plan.unchecked:
        _line(console, f"Not checked: {unchecked}.")
    if plan.refusals:
        _line(console, "Training would not start: mend what is refused above.")
    elif plan.unchecked:
        _line(console, "Nothing in this config is refused, but for what is not checked above.")
    else:
        _line(console, "Nothing in this config is refused.")


def _show_memory(console: "Console", plan: Plan, estimate: Estimate, job: Job) -> None:
    from rich import box
    from rich.table import Table

    step, needed = job.step, estimate.needed / GIB
    sequences = f"{step.sequences} sequence{'' if step.sequences == 1 else 's'} of {step.length} tokens"
    _line(console, f"{_gpus(job)} needs about {needed:.1f} GiB of memory, for micro batches of {sequences}:")
    table = Table(box=box.SIMPLE, show_edge=False, pad_edge=False)
    table.add_column(f"at the peak, {_MOMENTS.get(estimate.moment, estimate.moment)}")
    table.add_column("GiB", justify="right")

    def add(name: str, size: float) -> None:
        table.add_row(name, f"{size / GIB:.2f}")

    for name, size in estimate.parts.items():
        add(_PARTS.get(name, name), size)
    table.add_section()
    add("peak of training, the sum", estimate.training)
    if estimate.calibration:
        add("peak of the calibration before it", estimate.calibration)
    unusable = f"{memory.FRAGMENTATION:.0%}"
    add(f"{unusable} more, which PyTorch's allocator cannot use", estimate.peak * memory.FRAGMENTATION)
    add("CUDA itself", memory.CONTEXT)
    table.add_section()
    add(f"needed: the {'higher ' if estimate.calibration else ''}peak, {unusable} and CUDA", estimate.needed)
    console.print(table, "")
    if plan.gpu_memory is not None:
        left = plan.gpu_memory / GIB - needed
        given = f"into the {plan.gpu_memory / GIB:.1f} GiB of --gpu-memory"
        if left >= 0:
            _line(console, f"It fits {given}: {left:.1f} GiB are left.")
        else:
            remedy = _remedy(plan.gpu_memory, estimate, step)
            _line(console, f"It does not fit {given}: {-left:.1f} GiB are missing. {remedy}")
    for note in plan.notes:
        _line(console, f"Assumed: {note}.")


def _gpus(job: Job) -> str:
    """`The GPU`, or `Each of the 4 GPUs (FSDP2)`."""
    engine = job.engine
    if engine.processes > 1:
        return f"Each of the {engine.processes} GPUs ({engine.name})"
    return "The GPU" if engine.name == ONE_PROCESS.name else f"The GPU ({engine.name})"


def _remedy(gpu_memory: float, estimate: Estimate, step: Step) -> str:
    """What would lower the memory that is needed, for a plan that does not fit into these bytes."""
    kept = sum(size for name, size in estimate.parts.items() if name not in ("activations", "logits and loss"))
    if kept * (1 + memory.FRAGMENTATION) + memory.CONTEXT > gpu_memory:
        quantize = "quantize it, " if step.base == "plain" else ""
        return f"The base model alone is too large: {quantize}shard it over more GPUs, or take a smaller one."
    if estimate.calibration > estimate.training:
        return "The calibration needs most: lower calibration_batch_size."
    ways = ["gradient_checkpointing: true"] if step.checkpointing == "none" else []
    ways += ["a lower micro_batch_size"] if step.sequences > 1 else []
    return f"Less is needed with {', '.join([*ways, 'a lower sequence_len'])}."


def _line(console: "Console", text: str) -> None:
    console.print(text, markup=False, soft_wrap=True)
