"""What of a training its memory depends on: the model's shape, a micro batch, the engine, and what comes before it."""

from dataclasses import dataclass
from typing import Literal

from ...engines.engine import Engine

Method = Literal["supra", "lora", "full"]
Base = Literal["plain", "int8", "nf4", "nf4-double"]
Layers = Literal["kernels", "gathered", "recomputed", "reference"]
Attention = Literal["flash", "repeated", "masked", "eager"]
Checkpointing = Literal["none", "blocks", "offloaded"]
Mlp = Literal["plain", "liger", "other"]
Loss = Literal["transformers", "chunked", "liger", "fused"]


@dataclass(frozen=True)
class Shape:
    """What of a model its memory depends on; counts are of scalars.

    Attributes:
        hidden, intermediate, blocks, heads, kv_heads, head_dim, vocabulary: as the model's config has them.
        linear: weights of all linear layers but the output layer: what bitsandbytes quantizes.
        linear_rows: output features of all of them: int8 keeps a scale for each.
        embeddings: the input embedding, and the output layer unless it is tied to it.
        other: everything else, norms mostly.
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
    linear_rows: int
    embeddings: int
    other: int
    widest: int
    norms: int = 2
    qk_norm: bool = False
    saved_modules: int = 0

    @property
    def parameters(self) -> int:
        """All of them, tied ones once."""
        return self.linear + self.embeddings + self.other


@dataclass(frozen=True)
class Step:
    """One micro batch on one GPU.

    Attributes:
        rows, length: T = rows·length.
        method: `supra` is Super too; `lora` is PEFT's with an fp32 adapter and no autocast; `full` trains all weights.
        width: w, bytes of a weight and of an activation.
        base: how the linear layers' weights lie in memory.
        layers: what computes the adapted ones: the `kernels`, in weights that stay or in those that are `gathered`
            whenever they are used; the `reference` in plain PyTorch; or for weights that are dequantized whenever they
            are used (`recomputed`) plain PyTorch with the kernels' sampled products.
        mlp: `plain` is down(silu(gate(x))·up(x)) in so many words, which the kernels compute as one; `liger` is
            Liger's, which keeps no silu(gate); `other` is eager code of another form.
        dropout: whether the low-rank part drops out.
        attention: `flash` keeps q, k, v and the output; `repeated` keys and values for every head; `masked` a mask of
            every block too; `eager` the weights of every head.
        checkpointing: `blocks` keeps a block's input and computes it again; `offloaded` keeps that in host memory.
        loss: who computes it. `fused` makes no logits (cut cross entropy, Liger's fused linear cross entropy).
        thin_norms: the norms are Liger's, which keep no fp32 copy.
        optimizer: one of `memory.OPTIMIZERS`.
        accumulation: micro batches an update.
        evaluated_rows: rows of a batch of an evaluation, 0 without one.
    """

    rows: int
    length: int
    method: Method = "supra"
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
    evaluated_rows: int = 0

    @property
    def tokens(self) -> int:
        """T."""
        return self.rows * self.length

    @property
    def fused(self) -> bool:
        """Whether the kernels compute whole layers."""
        return self.layers in ("kernels", "gathered")


@dataclass(frozen=True)
class Calibration:
    """The forward pass before training: windows and tokens in each, of one batch."""

    rows: int
    length: int


@dataclass(frozen=True)
class GradientPass:
    """Forward and backward over training batches to choose the support; RoSA's squares need two sums a layer."""

    squared: bool = False


@dataclass(frozen=True)
class Job:
    """What the estimate is made of."""

    shape: Shape
    step: Step
    engine: Engine
    calibration: Calibration | None
    gradient: GradientPass | None = None
