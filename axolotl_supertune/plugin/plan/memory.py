"""How much GPU memory a training takes: numbers in, bytes out, each formula with its reason.

Counted is what PyTorch's allocator hands out at its peak (`torch.cuda.max_memory_allocated`), per GPU. Activations are
those of a decoder of Llama's form: RMSNorms, attention and a gated MLP a block. Integers and floats only, no torch.

Names: T tokens in a micro batch on one GPU, H hidden size, F intermediate size, V vocabulary, w bytes of a weight or an
activation (2 in bf16 and fp16), (c, b) a layer's shape.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from ...engines.engine import Engine, Weights
from ...engines.single import ONE_PROCESS
from ...method.budget import BudgetRow
from ...method.sizes import DENSE_BYTES, ENTRIES_PER_CHUNK, GATED_MLP, TOKENS_AT_ONCE, padded_rank
from .workload import Calibration, GradientPass, Shape, Step

GIB = 2**30
# cuBLAS takes 32 MiB on Hopper for each thread that multiplies: forward's and autograd's.
_WORKSPACE = 2 * 32 * 2**20
# What the driver, CUDA's context and NCCL hold outside of the allocator.
CONTEXT = 0.75 * GIB
# What the allocator holds and cannot use, at most, where the shapes of the batches change.
FRAGMENTATION = 0.05

ATTENTION_INPUTS = frozenset({"q_proj", "k_proj", "v_proj", "qkv_proj", "query_key_value", "W_pack"})
ATTENTION_OUTPUTS = frozenset({"o_proj", "dense", "out_proj"})
MLP_INPUTS = frozenset({"gate_proj", "up_proj", "gate_up_proj", "w1", "w3"})
MLP_OUTPUTS = frozenset({"down_proj", "w2"})

# Optimizer → bytes of state for each trained scalar, and whether that lies on the GPU. Blocks of 256 share an fp32
# scale in the 8-bit ones.
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
    # Paged states lie in unified memory, which is not the allocator's.
    "paged_adamw": 0.0,
    "paged_adamw_32bit": 0.0,
    "paged_adamw_8bit": 0.0,
    "paged_ademamix_32bit": 0.0,
    "paged_ademamix_8bit": 0.0,
    "paged_lion_32bit": 0.0,
    "paged_lion_8bit": 0.0,
}
# Those that update all parameters in one call make a list of temporaries as large as the parameters; fused ones none.
_FOREACH = frozenset({"adamw_torch", "rmsprop", "adagrad", "schedule_free_adamw"})


@dataclass(frozen=True)
class Estimate:
    """Bytes on one GPU.

    Attributes:
        moment: when the peak of training is reached.
        parts: what lies there at that moment; the peak is their sum.
        moments: the peak of every moment that was looked at.
        calibration: the peak of the calibration, before training; 0 if there is none.
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
        """The larger of the two."""
        return max(self.training, self.calibration)

    @property
    def needed(self) -> float:
        """What a card must have: the peak, what the allocator cannot use, and what lies outside of it."""
        return self.peak * (1 + FRAGMENTATION) + CONTEXT


def estimate(
    shape: Shape,
    rows: Sequence[BudgetRow],
    step: Step,
    engine: Engine = ONE_PROCESS,
    calibration: Calibration | None = None,
    gradient: GradientPass | None = None,
) -> Estimate:
    """Peak memory of training an adapter with these budgets; without rows nothing is adapted (`full`).

    Raises:
        ValueError: an optimizer whose state is not known.
    """
    if step.optimizer not in OPTIMIZERS:
        raise ValueError(
            f"optimizer: {step.optimizer} keeps a state of a size that is not known here; known are "
            f"{', '.join(OPTIMIZERS)}."
        )
    weights = base_bytes(shape, step)
    held = 0.0 if engine.offloads_weights else weights / engine.weight_shards
    trained = adapter_bytes(rows, step) if step.method != "full" else 0.0
    gradients = sum(row.total for row in rows) * 4.0 if step.method != "full" else weights
    gradients += shape.saved_modules * step.width
    share, sharded = engine.optimizer_shards, engine.weight_shards
    state = optimizer_bytes(shape, rows, step) / share + engine.master_bytes(gradients)
    fixed = {
        "base weights": held,
        "adapter": trained / sharded + shape.saved_modules * step.width + index_bytes(rows, step),
        "optimizer": 0.0 if engine.offloads_optimizer else state,
        "workspace": float(_WORKSPACE),
    }
    width = step.width if step.method == "full" else 4  # of what is trained: U, L and R are fp32
    fixed["reduction buckets"] = engine.reduction_bytes(gradients, width, shape.hidden)
    kept, block, transient = activation_bytes(shape, rows, step)
    live_loss, live_block = engine.gathered_bytes(_weights(shape, step))
    accumulated = gradients / sharded if step.accumulation > 1 else 0.0
    moments = {
        "loss": {
            "gradients": accumulated,
            "gathered weights": live_loss,
            "activations": kept,
            "logits and loss": loss_bytes(shape, step),
        },
        "backward of the last block": {
            "gradients": accumulated,
            "gathered weights": live_block,
            "activations": kept + (block if step.checkpointing != "none" else 0.0) + transient,
        },
        "backward of the first block": {
            "gradients": gradients / sharded,
            "gathered weights": live_block,
            "activations": block + transient,
        },
        "optimizer step": {
            "gradients": gradients / sharded,
            "temporaries": gradients / share if step.optimizer in _FOREACH else 0.0,
        },
    }
    if step.evaluated_rows:
        moments["evaluation"] = {"gathered weights": live_loss, "logits and loss": _evaluated_bytes(shape, step)}
    if gradient is not None:
        moments["choice of the support by gradient"] = _choice(shape, rows, step, gradient)
    peaks = {moment: sum(parts.values()) + sum(fixed.values()) for moment, parts in moments.items()}
    moment = max(peaks, key=lambda name: peaks[name])
    parts = {name: size for name, size in {**fixed, **moments[moment]}.items() if size}
    return Estimate(moment, parts, peaks, _calibration(shape, step, engine, held, calibration))


def _choice(shape: Shape, rows: Sequence[BudgetRow], step: Step, gradient: GradientPass) -> dict[str, float]:
    """Dense fp32 sums of a group of layers, beside what forward keeps; a layer's dy and x are copied to fp32.

    Layers are computed one by one here, an MLP too. The optimizer's state may be there already, after a warm-up.
    """
    sizes = [row.budget.out_features * row.budget.in_features * (8.0 if gradient.squared else 4.0) for row in rows]
    every = sum(row.layers * size for row, size in zip(rows, sizes, strict=True))
    sides = max((row.budget.out_features + row.budget.in_features for row in rows), default=0)
    alone = replace(step, mlp="other")
    kept, block, transient = activation_bytes(shape, rows, alone)
    logits = loss_bytes(shape, step)
    backward = (block if step.checkpointing != "none" else 0.0) + transient + 4.0 * step.tokens * sides
    return {
        "dense gradients": min(every, max(float(DENSE_BYTES), *sizes)) if sizes else 0.0,
        "activations": kept + (backward if backward > logits else 0.0),
        "logits and loss": 0.0 if backward > logits else logits,
    }


def base_bytes(shape: Shape, step: Step) -> float:
    """The base weights of one whole model."""
    quantized = {
        "plain": shape.linear * step.width,
        # a byte each, and an fp32 scale a row
        "int8": shape.linear + 4 * shape.linear_rows,
        # half a byte each, and an fp32 scale for 64; twice quantized: 8 bits for 64, and fp32 for 256 of these
        "nf4": shape.linear * (1 / 2 + 4 / 64),
        "nf4-double": shape.linear * (1 / 2 + 1 / 64 + 4 / (64 * 256)),
    }[step.base]
    return quantized + (shape.embeddings + shape.other) * step.width


def adapter_bytes(rows: Sequence[BudgetRow], step: Step) -> float:
    """U, L and R, fp32, and for the kernels a copy of L and R in the dtype of the products, of padded rank."""
    trained = 4.0 * sum(row.total for row in rows)
    if step.method != "supra" or not step.fused:
        return trained
    padded = sum(
        row.layers * padded_rank(row.budget.rank) * (row.budget.out_features + row.budget.in_features) for row in rows
    )
    return trained + padded * step.width


def index_bytes(rows: Sequence[BudgetRow], step: Step) -> float:
    """The support: its indices; for sampled products their order by column and the table of chunks; for a W that is
    written into, its own bits."""
    if step.method != "supra":
        return 0.0
    total = 0.0
    for row in rows:
        budget = row.budget
        count = budget.sparse_count
        if not count:
            continue
        each = count * (4.0 if budget.out_features * budget.in_features < 2**31 else 8.0)
        if step.layers == "kernels":
            each += count * step.width
        if step.layers != "reference":
            by_row = budget.out_features >= budget.in_features
            owners = min(count, max(budget.out_features, budget.in_features))
            # Chunks of four entries of one owner, the last one of each half full on average; two int32 a chunk.
            chunks = count / ENTRIES_PER_CHUNK + owners / 2
            each += 8 * chunks + (0 if by_row else 4 * count)
        total += row.layers * each
    return total


def optimizer_bytes(shape: Shape, rows: Sequence[BudgetRow], step: Step) -> float:
    """The optimizer's whole state: that of fp32 parameters in full width, that of bf16 ones in theirs."""
    each = OPTIMIZERS[step.optimizer]
    own = sum(row.total for row in rows) * each if step.method != "full" else 0.0
    whole = shape.parameters if step.method == "full" else shape.saved_modules
    narrow = each if each < 4 else each * step.width / 4  # 8-bit states are 8-bit whatever the parameter is
    return own + whole * narrow


def loss_bytes(shape: Shape, step: Step) -> float:
    """What the loss takes beside the activations of the blocks, at its own peak."""
    tokens, logits = step.tokens, float(step.tokens * shape.vocabulary)
    if step.loss == "fused":
        # Liger's chunks are as many as V holds H, rounded up to a power of two of tokens; cut cross entropy needs less.
        # Both make the gradient of the hidden states in forward or right after it.
        chunk = 1 << max(0, math.ceil(tokens / math.ceil(shape.vocabulary / shape.hidden)) - 1).bit_length()
        return min(chunk, tokens) * shape.vocabulary * step.width + tokens * shape.hidden * step.width
    each = {
        # Backward: log-softmax in fp32, its gradient, and that of the logits in fp32. (Forward has less at once: the
        # logits, their fp32 copy, log-softmax.)
        "transformers": 12,
        # The logits, and their gradient twice: in chunks and put together; or the fp32 copy that accelerate hands out.
        "chunked": max(3 * step.width, step.width + 4),
        # The logits, their fp32 copy in which Liger puts the gradient, and the one that accelerate hands out.
        "liger": (step.width if step.width < 4 else 0) + 8,
    }[step.loss]
    return each * logits


def _evaluated_bytes(shape: Shape, step: Step) -> float:
    """The logits of an evaluation, their fp32 copy and log-softmax, none of which is kept for a backward."""
    tokens = step.evaluated_rows * step.length
    if step.loss == "fused":
        return loss_bytes(shape, replace(step, rows=step.evaluated_rows))
    return float(tokens * shape.vocabulary * (8 + (step.width if step.width < 4 else 0)))


def activation_bytes(shape: Shape, rows: Sequence[BudgetRow], step: Step) -> tuple[float, float, float]:
    """What forward keeps for backward (but for the loss), what one block of it does, and what its backward adds."""
    per_token = _kept(shape, rows, step)
    block = step.tokens * per_token
    checkpoint = {"none": block, "blocks": step.tokens * shape.hidden * step.width, "offloaded": 0}[step.checkpointing]
    # The final norm keeps its input, in fp32 or, Liger's, as it is; if it and the head are trained also what they read.
    norm = step.width if step.thin_norms else 4
    tail = step.tokens * shape.hidden * (norm + (2 * step.width if step.method == "full" else 0))
    if step.method != "full" and step.checkpointing == "none":
        tail -= step.tokens * shape.hidden * norm  # the first norm's input needs no gradient
    mask = step.rows * step.length**2 if step.attention == "masked" else 0  # the one that all blocks are given, bool
    return shape.blocks * checkpoint + tail + mask, block, _transient(shape, rows, step)


def _kept(shape: Shape, rows: Sequence[BudgetRow], step: Step) -> float:
    """Bytes that one block keeps for its backward, a token."""
    w, hidden, inner = step.width, shape.hidden, shape.intermediate
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    kinds = {row.kind for row in rows}
    own = step.method == "supra"
    whole = step.method == "full"

    # A norm keeps its input in fp32 (Liger's: as it is), and where its own weight is trained the normalised one.
    kept = float(shape.norms) * hidden * ((w if step.thin_norms else 4) + (w if whole else 0))
    if shape.qk_norm:
        kept += (queries + keys) * (w if step.thin_norms else 4)
    # An adapted or trained layer keeps its input; layers of one input keep it once.
    keeps = (lambda names: own and bool(kinds & names)) if not whole else (lambda names: True)
    kept += w * hidden * (keeps(ATTENTION_INPUTS) + keeps(MLP_INPUTS))
    # Attention keeps q, k, v, its output (which is the input of o_proj), and the sums of exponentials.
    repeated = keys if step.attention == "flash" else queries
    kept += w * (2 * queries + 2 * repeated) + 4 * shape.heads
    if step.attention == "masked":
        kept += w * step.length  # the mask in the dtype of the queries, made anew in every block
    elif step.attention == "eager":
        kept += shape.heads * step.length * (4 + w)  # softmax in fp32, and rounded
    # The MLP keeps gate and up; eager code silu(gate) too, and the product where down is adapted.
    if _mlp_is_fused(rows, step):
        kept += w * inner * 2
    else:
        kept += w * inner * ((2 if step.mlp == "liger" else 3) + keeps(MLP_OUTPUTS))
    known = ATTENTION_INPUTS | ATTENTION_OUTPUTS | MLP_INPUTS | MLP_OUTPUTS
    if own and step.fused:
        # The low-rank part's inner product, of padded rank.
        kept += sum(row.layers * padded_rank(row.budget.rank) for row in rows) * w / shape.blocks
    if own:
        # Layers of other names: each an input of its own.
        kept += sum(row.layers * row.budget.in_features * w for row in rows if row.kind not in known) / shape.blocks
    if step.method == "lora":
        # The input in fp32 as dropout leaves it, for every layer its own, the mask, a byte each, and the inner product.
        each = 5 if step.dropout else 4
        kept += sum(row.layers * (row.budget.in_features * each + 4 * row.budget.rank) for row in rows) / shape.blocks
    return kept


def _transient(shape: Shape, rows: Sequence[BudgetRow], step: Step) -> float:
    """Bytes that the backward of one block needs beside what was kept: the MLP's, where it is widest."""
    w, hidden, inner, tokens = step.width, shape.hidden, shape.intermediate, step.tokens
    at_once = min(tokens, TOKENS_AT_ONCE)
    if _mlp_is_fused(rows, step):
        # The gradients of the output, the product, gate and up; transposed copies of the last three, a piece at a time.
        return w * (tokens * (hidden + 3 * inner) + 3 * inner * at_once)
    gradients = w * tokens * (hidden + inner)  # of the output and the product; eager code then has two more for one
    following = [float(w * tokens * inner)]
    sparse, low_rank = any(row.budget.sparse_count for row in rows), any(row.budget.rank for row in rows)
    if step.base != "plain" or (step.method == "supra" and not step.fused):
        following.append(shape.widest * w)  # the dequantized or the effective weight
    if step.method == "supra" and sparse:
        # The reference makes the whole gradient of W in fp32; sampled products read transposed copies.
        whole, copies = 4.0 * shape.widest, w * at_once * (hidden + inner)
        following.append(whole if step.layers == "reference" else copies)
    if step.method == "supra" and low_rank and not step.fused:
        wide = inner if any(row.kind in MLP_OUTPUTS for row in rows) else hidden
        # What passes through L and R, in fp32, with its sum; dropout draws its mask again, on ones.
        following.append(tokens * wide * (16 if step.dropout else 8))
    return gradients + max(following)


def _mlp_is_fused(rows: Sequence[BudgetRow], step: Step) -> bool:
    """Whether the kernels compute the MLP as one: all three layers adapted, and it is Llama's."""
    own = step.method == "supra" and step.fused
    return own and step.mlp == "plain" and {row.kind for row in rows} >= set(GATED_MLP)


def _weights(shape: Shape, step: Step) -> Weights:
    """The sizes that an engine tells its gathered weights from."""
    return Weights(
        parameters=shape.parameters,
        linear=shape.linear,
        blocks=shape.blocks,
        width=step.width,
        whole=base_bytes(shape, step),
        rest=(shape.embeddings + shape.other) * step.width,
        embedding=shape.vocabulary * shape.hidden * step.width,
    )


def _calibration(shape: Shape, step: Step, engine: Engine, held: float, calibration: Calibration | None) -> float:
    if calibration is None:
        return 0.0
    tokens = calibration.rows * calibration.length
    # The embeddings, a block's input, its residual and the normalised one; silu(gate), up and their product.
    forward = tokens * step.width * (4 * shape.hidden + 3 * shape.intermediate)
    return held + forward + engine.calibration_bytes(_weights(shape, step)) + _WORKSPACE
