"""The GPU memory that a training takes: numbers in, bytes out, each formula with its reason.

What is counted is the peak of PyTorch's allocator (`torch.cuda.max_memory_allocated`) on one GPU. Activations are in
`activations`; what an engine shards, gathers and buffers it says itself. Integers and floats, no torch.

Names: T tokens in a micro batch on one GPU, H hidden size, V vocabulary, w bytes of a weight or an activation (2 in
bf16 and fp16), (c, b) a layer's shape.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from ...engines.engine import Engine, Weights
from ...engines.single import ONE_PROCESS
from ...method.budget import BudgetRow
from ...method.sizes import DENSE_BYTES, ENTRIES_PER_CHUNK, fits_int32, padded_rank, samples_by_row
from .activations import Activations, activation_bytes, evaluated_bytes, loss_bytes
from .workload import Calibration, GradientPass, Shape, Step

GIB = 2**30
# On Hopper cuBLAS takes 32 MiB for each thread that multiplies: forward's and autograd's.
_WORKSPACE = 2 * 32 * 2**20
# What the driver, the CUDA context and NCCL hold outside of the allocator.
CONTEXT = 0.75 * GIB
# What the allocator holds and cannot use, at most, when the shapes of the batches change.
FRAGMENTATION = 0.05

# Optimizer → bytes of its state on the GPU for each trained scalar. In 8-bit states blocks of 256 share an fp32 scale.
_TWO_FP32, _TWO_8BIT = 8.0, 2.0 + 2 * 4 / 256
OPTIMIZERS: dict[str, float] = {
    "adamw_torch": _TWO_FP32,
    "adamw_torch_fused": _TWO_FP32,
    "adamw_hf": _TWO_FP32,
    "adamw_apex_fused": _TWO_FP32,
    "adamw_anyprecision": 4.0,
    "adamw_8bit": _TWO_8BIT,
    "adamw_bnb_8bit": _TWO_8BIT,
    "adamw_torch_8bit": _TWO_8BIT,
    "ao_adamw_8bit": _TWO_8BIT,
    "ao_adamw_fp8": _TWO_8BIT,
    "adamw_torch_4bit": 1.0 + 2 * 4 / 128,
    "ao_adamw_4bit": 1.0 + 2 * 4 / 128,
    "ademamix": 12.0,
    "ademamix_8bit": 3.0 + 3 * 4 / 256,
    "schedule_free_adamw": _TWO_FP32,
    "schedule_free_sgd": 4.0,
    "schedule_free_radam": _TWO_FP32,
    "optimi_adamw": _TWO_FP32,
    "adopt_adamw": _TWO_FP32,
    "lion_32bit": 4.0,
    "lion_8bit": 1.0 + 4 / 256,
    "lion_pytorch": 4.0,
    "rmsprop": 4.0,
    "rmsprop_bnb": 4.0,
    "rmsprop_bnb_8bit": 1.0 + 4 / 256,
    "adagrad": 4.0,
    "sgd": 0.0,
    # Paged states lie in unified memory, which the allocator does not count.
    "paged_adamw": 0.0,
    "paged_adamw_32bit": 0.0,
    "paged_adamw_8bit": 0.0,
    "paged_ademamix_32bit": 0.0,
    "paged_ademamix_8bit": 0.0,
    "paged_lion_32bit": 0.0,
    "paged_lion_8bit": 0.0,
}
# Optimizers that update all parameters in one call make temporaries as large as the parameters; fused ones make none.
_FOREACH = frozenset({"adamw_torch", "rmsprop", "adagrad", "schedule_free_adamw"})


@dataclass(frozen=True)
class Estimate:
    """Bytes on one GPU.

    Attributes:
        moment: when training reaches its peak.
        parts: what is allocated at that moment; the peak is their sum.
        moments: the peak of every moment that was considered.
        calibration: the peak of the calibration before training; 0 without one.
    """

    moment: str
    parts: dict[str, float]
    moments: dict[str, float] = field(default_factory=dict)
    calibration: float = 0.0

    @property
    def training(self) -> float:
        """The peak since training began: what `supertune/peak_memory_gib` measures."""
        return sum(self.parts.values())

    @property
    def peak(self) -> float:
        """The larger one of training's and the calibration's."""
        return max(self.training, self.calibration)

    @property
    def needed(self) -> float:
        """What a card must have: the peak, what the allocator cannot use, and what lies outside of it."""
        return self.peak * (1 + FRAGMENTATION) + CONTEXT


def estimate(
    shape: Shape,
    budgets: Sequence[BudgetRow],
    step: Step,
    engine: Engine = ONE_PROCESS,
    calibration: Calibration | None = None,
    gradient: GradientPass | None = None,
) -> Estimate:
    """Peak memory of training an adapter.

    Args:
        shape: of the base model.
        budgets: one row for each kind of layer.
        step: a micro batch.
        engine: with the number of its processes.
        calibration, gradient: passes before training that choose the support.

    Raises:
        ValueError: an optimizer whose state is of unknown size.
    """
    if step.optimizer not in OPTIMIZERS:
        raise ValueError(
            f"optimizer: {step.optimizer} keeps a state of a size that is not known here; known are "
            f"{', '.join(OPTIMIZERS)}."
        )
    fixed = _fixed_parts(shape, budgets, step, engine)
    moments = _moments(shape, budgets, step, engine)
    if gradient is not None:
        moments["choice of the support by gradient"] = _choice(shape, budgets, step, gradient)
    peaks = {moment: sum(parts.values()) + sum(fixed.values()) for moment, parts in moments.items()}
    highest = max(peaks, key=lambda moment: peaks[moment])
    parts = {name: size for name, size in {**fixed, **moments[highest]}.items() if size}
    before = 0.0 if calibration is None else _calibration(shape, step, engine, calibration)
    return Estimate(highest, parts, peaks, before)


def _fixed_parts(shape: Shape, budgets: Sequence[BudgetRow], step: Step, engine: Engine) -> dict[str, float]:
    """What is allocated throughout training."""
    gradients = _gradient_bytes(shape, budgets, step)
    saved_modules = shape.saved_modules * step.width
    # A gradient has the bytes of what is trained.
    state = optimizer_bytes(shape, budgets, step) / engine.optimizer_shards + engine.master_bytes(gradients)
    return {
        "base weights": _resident_base_bytes(shape, step, engine),
        "adapter": adapter_bytes(budgets, step) / engine.weight_shards + saved_modules + index_bytes(budgets, step),
        "optimizer": 0.0 if engine.offloads_optimizer else state,
        "workspace": float(_WORKSPACE),
        "reduction buckets": engine.reduction_bytes(gradients, 4, shape.hidden),  # U, L and R are fp32
    }


def _moments(shape: Shape, budgets: Sequence[BudgetRow], step: Step, engine: Engine) -> dict[str, dict[str, float]]:
    """What is allocated beside the fixed parts, at the moments of a step that can be its peak."""
    activations = activation_bytes(shape, budgets, step)
    in_loss, in_block = engine.gathered_bytes(_weights(shape, step))
    all_gradients = _gradient_bytes(shape, budgets, step)
    gradients = all_gradients / engine.weight_shards
    accumulated = gradients if step.accumulation > 1 else 0.0
    moments = {
        "loss": {
            "gradients": accumulated,
            "gathered weights": in_loss,
            "activations": activations.kept,
            "logits and loss": loss_bytes(shape, step),
        },
        "backward of the last block": {
            "gradients": accumulated,
            "gathered weights": in_block,
            "activations": activations.kept + _block_again(step, activations) + activations.backward,
        },
        "backward of the first block": {
            "gradients": gradients,
            "gathered weights": in_block,
            "activations": activations.block + activations.backward,
        },
        "optimizer step": {
            "gradients": gradients,
            "temporaries": all_gradients / engine.optimizer_shards if step.optimizer in _FOREACH else 0.0,
        },
    }
    if step.evaluated_sequences:
        moments["evaluation"] = {"gathered weights": in_loss, "logits and loss": evaluated_bytes(shape, step)}
    return moments


def _choice(shape: Shape, budgets: Sequence[BudgetRow], step: Step, gradient: GradientPass) -> dict[str, float]:
    """Bytes allocated while the support is chosen by gradient, beside the fixed parts.

    Dense fp32 sums of a group of layers and what forward keeps; a layer's dy and x are copied to fp32.

    Layers are computed one by one here, also those of an MLP. After a warm-up the optimizer's state is there already.
    """
    sizes = [row.budget.out_features * row.budget.in_features * (8.0 if gradient.squared else 4.0) for row in budgets]
    all_sums = sum(row.layers * size for row, size in zip(budgets, sizes, strict=True))
    copied_features = max((row.budget.out_features + row.budget.in_features for row in budgets), default=0)
    activations = activation_bytes(shape, budgets, replace(step, mlp="other"))
    logits = loss_bytes(shape, step)
    backward = _block_again(step, activations) + activations.backward + 4.0 * step.tokens * copied_features
    return {
        "dense gradients": min(all_sums, max(float(DENSE_BYTES), *sizes)) if sizes else 0.0,
        "activations": activations.kept + (backward if backward > logits else 0.0),
        "logits and loss": 0.0 if backward > logits else logits,
    }


def _block_again(step: Step, activations: Activations) -> float:
    """A checkpointed block is computed again before its backward."""
    return activations.block if step.checkpointing != "none" else 0.0


def _calibration(shape: Shape, step: Step, engine: Engine, calibration: Calibration) -> float:
    """The peak of a forward pass that keeps nothing."""
    tokens = calibration.sequences * calibration.length
    # The embeddings, a block's input, its residual and the normalised one; silu(gate), up and their product.
    forward = tokens * step.width * (4 * shape.hidden + 3 * shape.intermediate)
    base = _resident_base_bytes(shape, step, engine)
    return base + forward + engine.calibration_bytes(_weights(shape, step)) + _WORKSPACE


def base_bytes(shape: Shape, step: Step) -> float:
    """Bytes of the base weights of one whole model."""
    linear = float(shape.linear * step.width)
    if step.base != "plain":
        from ...tuner.quantization import stored_bytes  # loads torch

        linear = stored_bytes(step.base, shape.linear, shape.linear_out_features)
    return linear + (shape.embeddings + shape.other) * step.width


def _resident_base_bytes(shape: Shape, step: Step, engine: Engine) -> float:
    """The part of the base weights that stays on one GPU."""
    return 0.0 if engine.offloads_weights else base_bytes(shape, step) / engine.weight_shards


def _weights(shape: Shape, step: Step) -> Weights:
    """The sizes from which an engine tells what it gathers."""
    return Weights(
        parameters=shape.parameters,
        linear=shape.linear,
        blocks=shape.blocks,
        width=step.width,
        whole=base_bytes(shape, step),
        rest=(shape.embeddings + shape.other) * step.width,
        embedding=shape.vocabulary * shape.hidden * step.width,
    )


def _gradient_bytes(shape: Shape, budgets: Sequence[BudgetRow], step: Step) -> float:
    """All gradients: fp32 ones of U, L and R, and those of modules that are trained in full."""
    return sum(row.total for row in budgets) * 4.0 + shape.saved_modules * step.width


def adapter_bytes(budgets: Sequence[BudgetRow], step: Step) -> float:
    """U, L and R in fp32; for the kernels also a copy of L and R in the dtype of the products, of padded rank."""
    trained = 4.0 * sum(row.total for row in budgets)
    if not step.fused:
        return trained
    padded = sum(
        row.layers * padded_rank(row.budget.rank) * (row.budget.out_features + row.budget.in_features)
        for row in budgets
    )
    return trained + padded * step.width


def index_bytes(budgets: Sequence[BudgetRow], step: Step) -> float:
    """The supports: their indices; for sampled products their order by column and a table of chunks; if U is written
    into W also the bits of W that it replaces."""
    return sum(row.layers * _index_bytes_of_layer(row, step) for row in budgets if row.budget.sparse_count)


def _index_bytes_of_layer(row: BudgetRow, step: Step) -> float:
    """`index_bytes` of one layer with a support."""
    budget = row.budget
    count = budget.sparse_count
    size = count * (4.0 if fits_int32(budget.out_features * budget.in_features) else 8.0)
    if step.layers == "kernels":
        size += count * step.width
    if step.layers != "reference":
        by_row = samples_by_row(budget.out_features, budget.in_features)
        owners = min(count, max(budget.out_features, budget.in_features))
        # A chunk holds entries of one row or column, and the last one of each is half full on average; two int32 each.
        chunks = count / ENTRIES_PER_CHUNK + owners / 2
        size += 8 * chunks + (0 if by_row else 4 * count)
    return size


def optimizer_bytes(shape: Shape, budgets: Sequence[BudgetRow], step: Step) -> float:
    """The optimizer's whole state. That of bf16 parameters is in bf16, unless it is quantized to 8 bits or less."""
    per_scalar = OPTIMIZERS[step.optimizer]
    narrow = per_scalar if per_scalar < 4 else per_scalar * step.width / 4
    return sum(row.total for row in budgets) * per_scalar + shape.saved_modules * narrow
