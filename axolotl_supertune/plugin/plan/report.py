"""A plan as tables and lines for a person, and as JSON for a program."""

from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from ...engines.single import ONE_PROCESS
from . import memory
from .memory import GIB, Estimate
from .result import Plan
from .workload import Job

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

    from ..run_summary import layer_table

    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=140)
    console.print(layer_table(plan.rows, plan.method))
    if plan.estimate is None or plan.job is None:
        _line(console, f"Memory: not estimated: {plan.unknown}")
    else:
        _show_memory(console, plan, plan.estimate, plan.job)
    for refusal in plan.refusals:
        _line(console, f"Refused: {refusal}")
    for unchecked in plan.unchecked:
        _line(console, f"Unchecked: {unchecked}.")
    if not plan.refusals:
        _line(console, "Nothing in this config is refused" + (" by what could be checked." if plan.unchecked else "."))


def _show_memory(console: "Console", plan: Plan, estimate: Estimate, job: Job) -> None:
    from rich.table import Table

    step, engine = job.step, job.engine
    processes = engine.name if engine.processes == 1 else f"{engine.name} on {engine.processes} GPUs"
    _line(console, f"Memory of one GPU, {processes}: {step.sequences} × {step.length} tokens")
    table = Table()
    table.add_column("at the peak: " + estimate.moment)
    table.add_column("GiB", justify="right")
    for name, size in estimate.parts.items():
        table.add_row(name, f"{size / GIB:.2f}")
    table.add_section()
    table.add_row("training", f"{estimate.training / GIB:.2f}")
    if estimate.calibration:
        table.add_row("calibration, before it", f"{estimate.calibration / GIB:.2f}")
    console.print(table)
    _line(
        console,
        f"A card needs {estimate.needed / GIB:.1f} GiB: the peak, {memory.FRAGMENTATION:.0%} that the allocator "
        f"cannot use, {memory.CONTEXT / GIB} GiB of CUDA's own.",
    )
    if plan.gpu_memory is not None:
        left = (plan.gpu_memory - estimate.needed) / GIB
        fits = f"fits, {left:.1f} GiB are left" if left >= 0 else f"does not fit, {-left:.1f} GiB are missing"
        _line(console, f"{plan.gpu_memory / GIB:.1f} GiB: {fits}.")
    for note in plan.notes:
        _line(console, f"Taken for granted: {note}.")


def _line(console: "Console", text: str) -> None:
    console.print(text, markup=False, soft_wrap=True)
