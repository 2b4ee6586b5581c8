"""Inputs of the memory estimate: the model's shape, a micro batch, the engine, and the passes before training."""

from dataclasses import dataclass
from typing import Literal

from ...engines.engine import Engine

Base = str  # "plain", or the `stored_format` of a quantization backend
Layers = Literal["kernels", "gathered", "recomputed", "reference"]
Attention = Literal["flash", "repeated", "masked", "eager"]
Checkpointing = Literal["none", "blocks", "offloaded"]
Mlp = Literal["plain", "liger", "other"]
Loss = Literal["transformers", "chunked", "liger", "fused"]


@dataclass(frozen=True)
class Shape:
    """The sizes of a decoder model. Counts are of scalars.

    Attributes:
        hidden, intermediate, blocks, heads, kv_heads, head_dim, vocabulary: as in the model's config.
        linear: weights of all linear layers but the output layer: what a quantized base quantizes.
        linear_out_features: output features of these layers, summed: int8 keeps a scale for each.
        embeddings: the input embedding, and the output layer unless it is tied to it.
        other: everything else, mostly norms.
        widest: weights of the largest linear layer in a block.
        norms: norms of a block on its hidden states.
        qk_norm: whether queries and keys go through norms of their own.
        saved_modules: scalars of modules that are trained in full beside the adapter (lora_modules_to_save).
    """

    hidden: int
    intermediate: int
    blocks: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    linear: int
    linear_out_features: int
    embeddings: int
    other: int
    widest: int
    norms: int = 2
    qk_norm: bool = False
    saved_modules: int = 0

    @property
    def parameters(self) -> int:
        """All scalars of the model, tied ones once."""
        return self.linear + self.embeddings + self.other


@dataclass(frozen=True)
class Step:
    """One micro batch on one GPU.

    Attributes:
        sequences, length: sequences and tokens in each; T = sequences·length. Some attention
            kernels take a packed batch as one sequence.
        width: w, bytes of a weight and of an activation.
        base: how the weights of the linear layers are stored.
        layers: what computes the adapted layers: the `kernels`, on weights that stay or on weights that are `gathered`
            for each use; the `reference` in plain PyTorch; or, for weights that are dequantized for each use
            (`recomputed`), plain PyTorch with the kernels' sampled products.
        mlp: `plain` is written as down(silu(gate(x))·up(x)), which the kernels compute as one; `liger` is Liger's,
            which keeps no silu(gate); `other` is eager code of another form.
        dropout: whether the low-rank part has dropout.
        attention: `flash` keeps q, k, v and the output; `repeated` also keys and values repeated for every head;
            `masked` also a mask in every block; `eager` the weights of every head.
        checkpointing: `blocks` keeps the input of a block and computes the block again; `offloaded` keeps that input in
            host memory.
        loss: what computes it. `fused` makes no logits (cut cross entropy, Liger's fused linear cross entropy).
        thin_norms: whether the norms are Liger's, which keep no fp32 copy.
        optimizer: a key of `memory.OPTIMIZERS`.
        accumulation: micro batches per update.
        evaluated_sequences: sequences in a batch of an evaluation, 0 without one.
    """

    sequences: int
    length: int
    width: int = 2
    base: Base = "plain"
    layers: Layers = "kernels"
    mlp: Mlp = "plain"
    dropout: bool = True
    attention: Attention = "flash"
    checkpointing: Checkpointing = "none"
    loss: Loss = "transformers"
    thin_norms: bool = False
    optimizer: str = "adamw_torch_fused"
    accumulation: int = 1
    evaluated_sequences: int = 0

    @property
    def tokens(self) -> int:
        """T."""
        return self.sequences * self.length

    @property
    def fused(self) -> bool:
        """Whether the kernels compute whole layers."""
        return self.layers in ("kernels", "gathered")


@dataclass(frozen=True)
class Calibration:
    """The forward passes before training: windows in a batch, and tokens in each window."""

    sequences: int
    length: int


@dataclass(frozen=True)
class GradientPass:
    """Forward and backward passes that choose the support; RoSA's squared gradients need two sums for each layer."""

    squared: bool = False


@dataclass(frozen=True)
class Job:
    """The arguments of `memory.estimate`."""

    shape: Shape
    step: Step
    engine: Engine
    calibration: Calibration | None
    gradient: GradientPass | None = None
