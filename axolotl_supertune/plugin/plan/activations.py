"""Activations and logits of a training step: what forward keeps for backward, and what backward needs beside it.

The model is a decoder of Llama's form: RMSNorms, attention and a gated MLP in each block. No torch.

Names: T tokens in a micro batch on one GPU, H hidden size, F intermediate size, V vocabulary, w bytes of a weight or an
activation (2 in bf16 and fp16).
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from ...method.budget import BudgetRow
from ...method.sizes import GATED_MLP, TOKENS_PER_TRANSPOSE, padded_rank
from .workload import Shape, Step

ATTENTION_INPUTS = frozenset({"q_proj", "k_proj", "v_proj", "qkv_proj", "query_key_value", "W_pack"})
ATTENTION_OUTPUTS = frozenset({"o_proj", "dense", "out_proj"})
MLP_INPUTS = frozenset({"gate_proj", "up_proj", "gate_up_proj", "w1", "w3"})
MLP_OUTPUTS = frozenset({"down_proj", "w2"})


class Activations(NamedTuple):
    """Bytes of activations.

    Attributes:
        kept: what the forward of the whole model keeps for its backward, without the logits.
        block: what the forward of one block keeps if it is not checkpointed.
        backward: what the backward of one block needs beside what was kept.
    """

    kept: float
    block: float
    backward: float


def activation_bytes(shape: Shape, budgets: Sequence[BudgetRow], step: Step) -> Activations:
    """The activations of a step with adapters of these budgets."""
    hidden_states = step.tokens * shape.hidden
    block = step.tokens * _kept_per_token(shape, budgets, step)
    checkpoint = {"none": block, "blocks": hidden_states * step.width, "offloaded": 0}[step.checkpointing]
    # The final norm keeps its input, in fp32 or, if it is Liger's, in its own dtype. Without checkpointing the first
    # norm keeps none: its input needs no gradient.
    final_norm = hidden_states * (step.width if step.thin_norms else 4) if step.checkpointing != "none" else 0
    mask = step.sequences * step.length**2 if step.attention == "masked" else 0  # bool, shared by all blocks
    return Activations(shape.blocks * checkpoint + final_norm + mask, block, _block_backward(shape, budgets, step))


def loss_bytes(shape: Shape, step: Step) -> float:
    """What the loss takes beside the activations of the blocks, at its own peak."""
    tokens, logits = step.tokens, float(step.tokens * shape.vocabulary)
    if step.loss == "fused":
        # Liger makes ⌈V/H⌉ chunks, rounded up to a power of two of tokens; cut cross entropy needs less. Both make the
        # gradient of the hidden states in forward or right after it.
        chunk = 1 << max(0, math.ceil(tokens / math.ceil(shape.vocabulary / shape.hidden)) - 1).bit_length()
        return min(chunk, tokens) * shape.vocabulary * step.width + tokens * shape.hidden * step.width
    per_logit = {
        # In backward: log-softmax in fp32, its gradient, and the fp32 gradient of the logits. (Forward has less at
        # once: the logits, their fp32 copy, log-softmax.)
        "transformers": 12,
        # The logits, and their gradient twice, in chunks and joined; or the fp32 copy that accelerate hands out.
        "chunked": max(3 * step.width, step.width + 4),
        # The logits, their fp32 copy in which Liger puts the gradient, and the one that accelerate hands out.
        "liger": (step.width if step.width < 4 else 0) + 8,
    }[step.loss]
    return per_logit * logits


def evaluated_bytes(shape: Shape, step: Step) -> float:
    """The logits of an evaluation, their fp32 copy and log-softmax, of which none is kept for a backward."""
    tokens = step.evaluated_sequences * step.length
    if step.loss == "fused":
        return loss_bytes(shape, replace(step, sequences=step.evaluated_sequences))
    return float(tokens * shape.vocabulary * (8 + (step.width if step.width < 4 else 0)))


def _kept_per_token(shape: Shape, budgets: Sequence[BudgetRow], step: Step) -> float:
    """Bytes that one block keeps for its backward, for each token."""
    kinds = {row.kind for row in budgets}
    kept = _kept_by_norms(shape, step)
    # An adapted layer keeps its input; layers that read one input keep it once.
    kept += step.width * shape.hidden * (bool(kinds & ATTENTION_INPUTS) + bool(kinds & MLP_INPUTS))
    kept += _kept_by_attention(shape, step)
    kept += _kept_by_mlp(shape, budgets, step)
    if step.fused:
        # The inner product of the low-rank part, of padded rank.
        kept += sum(row.layers * padded_rank(row.budget.rank) for row in budgets) * step.width / shape.blocks
    # Layers of other names: each has an input of its own.
    known = ATTENTION_INPUTS | ATTENTION_OUTPUTS | MLP_INPUTS | MLP_OUTPUTS
    others = sum(row.layers * row.budget.in_features * step.width for row in budgets if row.kind not in known)
    return kept + others / shape.blocks


def _kept_by_norms(shape: Shape, step: Step) -> float:
    """A norm keeps its input in fp32; Liger's in the dtype that it has."""
    features = shape.norms * shape.hidden
    if shape.qk_norm:
        features += (shape.heads + shape.kv_heads) * shape.head_dim
    return float(features) * (step.width if step.thin_norms else 4)


def _kept_by_attention(shape: Shape, step: Step) -> float:
    """q, k, v, the output (which is the input of o_proj), and the sums of exponentials in fp32."""
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    kept_keys = keys if step.attention == "flash" else queries
    kept = step.width * (2 * queries + 2 * kept_keys) + 4 * shape.heads
    if step.attention == "masked":
        kept += step.width * step.length  # the mask in the dtype of the queries, made anew in every block
    elif step.attention == "eager":
        kept += shape.heads * step.length * (4 + step.width)  # softmax in fp32, and rounded
    return float(kept)


def _kept_by_mlp(shape: Shape, budgets: Sequence[BudgetRow], step: Step) -> float:
    """gate and up; eager code also silu(gate), and the product if down is adapted."""
    tensors = 2
    if not _mlp_is_fused(budgets, step):
        adapts_down = any(row.kind in MLP_OUTPUTS for row in budgets)
        tensors = (2 if step.mlp == "liger" else 3) + adapts_down
    return float(step.width * shape.intermediate * tensors)


def _block_backward(shape: Shape, budgets: Sequence[BudgetRow], step: Step) -> float:
    """Bytes that the backward of one block needs beside what was kept: those of the MLP, where it is widest."""
    w, hidden, inner, tokens = step.width, shape.hidden, shape.intermediate, step.tokens
    transposed = min(tokens, TOKENS_PER_TRANSPOSE)
    if _mlp_is_fused(budgets, step):
        # Gradients of the output, the product, gate and up; transposed copies of the last three, a piece at a time.
        return w * (tokens * (hidden + 3 * inner) + 3 * inner * transposed)
    gradients = w * tokens * (hidden + inner)  # of the output and the product; eager code then has two more for one
    following = [float(w * tokens * inner)]
    if step.base != "plain" or not step.fused:
        following.append(shape.widest * w)  # the dequantized or the effective weight
    if any(row.budget.sparse_count for row in budgets):
        # The reference makes the whole gradient of W in fp32; sampled products read transposed copies.
        following.append(4.0 * shape.widest if step.layers == "reference" else w * transposed * (hidden + inner))
    if any(row.budget.rank for row in budgets) and not step.fused:
        wide = inner if any(row.kind in MLP_OUTPUTS for row in budgets) else hidden
        # What passes through L and R, in fp32, with its sum; dropout draws its mask again, on ones.
        following.append(tokens * wide * (16 if step.dropout else 8))
    return gradients + max(following)


def _mlp_is_fused(budgets: Sequence[BudgetRow], step: Step) -> bool:
    """Whether the kernels compute the MLP as one function: it is Llama's, and all three layers are adapted."""
    return step.fused and step.mlp == "plain" and {row.kind for row in budgets} >= set(GATED_MLP)
