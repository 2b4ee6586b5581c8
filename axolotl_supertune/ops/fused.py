"""The fast path: one to three linear layers of one input, and a whole gated MLP, as one autograd function each.

What the reference does with a dense gradient, these do with sampled products; what it does per layer, they do once per
input. A layer's weight already holds W + M⊙U (see `inplace`). Kept for backward: the input, the thin products of the
low-rank part and, in the MLP, the two activations; no mask, no dense gradient, not the MLP's product.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from . import kernels
from .inplace import Entry
from .launch import aligned

_SEED_BIT = 2**62


class Layer(NamedTuple):
    """An adapted linear layer: its entry, made current by whoever calls, its bias (c,) and dropout probability."""

    entry: Entry
    bias: Tensor | None = None
    dropout: float = 0.0


class Group:
    """One to three layers that read the same input, with everything bound that stays from step to step.

    Those with a low-rank part drop out alike and have one padded rank: see `fit_together`.
    """

    def __init__(self, layers: Sequence[Layer], stream: int = 0) -> None:
        self.layers = list(layers)
        self.entries = [layer.entry for layer in layers]
        self.dtype = self.entries[0].dtype
        self.biases = [None if layer.bias is None else layer.bias.to(self.dtype) for layer in layers]
        self.sparse = [at for at, entry in enumerate(self.entries) if entry.plan is not None]
        self.low_rank = [at for at, entry in enumerate(self.entries) if entry.packed is not None]
        self.threshold = 0
        device = self.entries[0].weight.device
        if self.low_rank:
            chosen = [self.entries[at] for at in self.low_rank]
            lefts, rights = zip(*(entry.packed for entry in chosen if entry.packed is not None), strict=True)
            self.threshold = kernels.dropout_threshold(layers[self.low_rank[0]].dropout)
            self.narrow = kernels.Narrow(rights, self.threshold, stream)
            self.widen = kernels.Widen(lefts, [self.biases[at] for at in self.low_rank])
            self.narrow_each = kernels.NarrowEach(lefts)
            widths, ranks = zip(*(entry.L.shape for entry in chosen if entry.L is not None), strict=True)
            scales = [entry.scaling for entry in chosen]
            assert chosen[0].L is not None
            dtype = chosen[0].L.dtype
            self.thin = kernels.ThinGradients(rights, widths, ranks, scales, self.threshold, stream, dtype)
        if self.sparse:
            plans = [entry.plan for entry in self.entries if entry.plan is not None]
            self.transpose = kernels.Transpose([plans[0].shape[1], *(plan.shape[0] for plan in plans)], device)
            self.products = kernels.SampledProducts(plans)
        # What autograd is told of: a layer's operands as they come in `trained`, and where each one's gradient goes.
        self.trained: list[Tensor] = []
        self._places: list[tuple[str, int]] = []
        for at, (layer, entry) in enumerate(zip(layers, self.entries, strict=True)):
            named = {"U": entry.values, "L": entry.L, "R": entry.R, "bias": layer.bias}
            for name, tensor in named.items():
                if tensor is not None and (name != "bias" or tensor.requires_grad):
                    self.trained.append(tensor)
                    self._places.append((name, at))

    def forward(self, x: Tensor, seed: int) -> tuple[list[Tensor], Tensor | None]:
        """x (T, b) → (T, c) of every layer, and the thin products (T, k·r') of those with a low-rank part."""
        if not self.low_rank:
            pairs = zip(self.entries, self.biases, strict=True)
            return [F.linear(x, _weight(entry), bias) for entry, bias in pairs], None
        inner = self.narrow(x, seed)
        added = self.widen(inner)
        if len(added) == len(self.entries):
            return [y.addmm_(x, _weight(entry).t()) for y, entry in zip(added, self.entries, strict=True)], inner
        outputs = []
        for at, entry in enumerate(self.entries):
            if at in self.low_rank:
                outputs.append(added[self.low_rank.index(at)].addmm_(x, _weight(entry).t()))
            else:
                outputs.append(F.linear(x, _weight(entry), self.biases[at]))
        return outputs, inner

    def backward(
        self, x: Tensor, dys: list[Tensor], inner: Tensor | None, seed: int, *, trains: bool, wants_dx: bool
    ) -> tuple[Tensor | None, dict[tuple[str, int], Tensor]]:
        """dx (T, b), and the gradients of L, R and bias by (name, layer)."""
        grads: dict[tuple[str, int], Tensor] = {}
        dx = None
        if self.low_rank and inner is not None:
            chosen = dys if len(self.low_rank) == len(dys) else [dys[at] for at in self.low_rank]
            d_inner = self.narrow_each(chosen)
            if trains:
                lefts, rights, dx = self.thin(x, chosen, inner, d_inner, seed, through=wants_dx)
                for at, left, right in zip(self.low_rank, lefts, rights, strict=True):
                    grads["L", at], grads["R", at] = left, right
            elif wants_dx:
                dx = self.thin.through(x, d_inner, seed)
        for at, (dy, entry) in enumerate(zip(dys, self.entries, strict=True)):
            if wants_dx:
                dx = torch.mm(dy, _weight(entry)) if dx is None else dx.addmm_(dy, _weight(entry))
            bias = self.layers[at].bias
            if bias is not None and bias.requires_grad:
                grads["bias", at] = dy.sum(0, dtype=torch.float32).to(bias.dtype)
        return dx, grads

    def sampled(self, x: Tensor, dys: list[Tensor], grads: dict[tuple[str, int], Tensor]) -> None:
        """Add dU of every layer with a support to `grads`; long inputs a piece at a time."""
        chosen = dys if len(self.sparse) == len(dys) else [dys[at] for at in self.sparse]
        outs = self.products.new()
        size = kernels.TOKENS_AT_ONCE
        if x.shape[0] <= size:
            x_t, *dy_ts = self.transpose(x, *chosen)
            self.products([(dy_t, x_t) for dy_t in dy_ts], outs)
        else:
            for begin in range(0, x.shape[0], size):
                x_t, *dy_ts = self.transpose(x[begin : begin + size], *(dy[begin : begin + size] for dy in chosen))
                self.products([(dy_t, x_t) for dy_t in dy_ts], outs, add=begin > 0)
        self.keep_sampled(outs, grads)

    def keep_sampled(self, outs: Sequence[Tensor], grads: dict[tuple[str, int], Tensor]) -> None:
        """Put sampled products where `results` finds them, in the dtype of U."""
        for at, out in zip(self.sparse, outs, strict=True):
            values = self.entries[at].values
            assert values is not None
            grads["U", at] = out if values.dtype == out.dtype else out.to(values.dtype)

    def results(self, grads: dict[tuple[str, int], Tensor]) -> list[Tensor | None]:
        """Gradients in the order of `trained`."""
        return [grads.get(place) for place in self._places]


class GatedMLP:
    """down(silu(gate(x))·up(x)) with all three layers adapted."""

    def __init__(self, gate: Layer, up: Layer, down: Layer) -> None:
        self.layers = [gate, up, down]
        self.gate_up, self.down = Group([gate, up]), Group([down], stream=2)
        device = gate.entry.weight.device
        self.swiglu = kernels.Swiglu(gate.entry.weight.shape[0], device)
        self.trained = [*self.gate_up.trained, *self.down.trained]
        plans = [layer.entry.plan for layer in self.layers]
        self.together = None not in plans
        if self.together:
            widths = [gate.entry.weight.shape[1], down.entry.weight.shape[0]]
            self.transpose = kernels.Transpose(widths, device)
            self.products = kernels.SampledProducts([plan for plan in plans if plan is not None])


def fit_together(layers: Sequence[Layer]) -> bool:
    """Whether a `Group` takes these layers: one dtype, one dropout, one padded rank."""
    low_rank = [layer for layer in layers if layer.entry.packed is not None]
    return (
        len({layer.entry.dtype for layer in layers}) == 1
        and len({layer.dropout for layer in low_rank}) <= 1
        and len({layer.entry.packed[0].shape[0] for layer in low_rank if layer.entry.packed is not None}) <= 1
    )


def linear_group(x: Tensor, group: Group) -> tuple[Tensor, ...]:
    """x·Ŵᵀ + bias of the layers of a group for x (..., b): (..., c) each, equal to `sparse_linear`."""
    return _LinearGroup.apply(x, group, _seed(x, group.threshold), *group.trained)


def gated_mlp(x: Tensor, mlp: GatedMLP) -> Tensor:
    """down(silu(gate(x))·up(x)), keeping neither silu(gate) nor the product: (..., b) → (..., c)."""
    return _GatedMLP.apply(x, mlp, _seed(x, mlp.gate_up.threshold or mlp.down.threshold), *mlp.trained)


class _LinearGroup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, seed: int, *trained: Tensor) -> tuple[Tensor, ...]:
        ctx.group, ctx.seed, ctx.x_shape, ctx.x_dtype = group, seed, x.shape, x.dtype
        rows = _rows(x, group.dtype)
        if torch.is_autocast_enabled(x.device.type):
            with torch.autocast(x.device.type, enabled=False):
                outputs, inner = group.forward(rows, seed)
        else:
            outputs, inner = group.forward(rows, seed)
        ctx.save_for_backward(rows, inner)
        if x.dim() == 2:
            return tuple(outputs)
        return tuple([y.view(*x.shape[:-1], y.shape[-1]) for y in outputs])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        group: Group = ctx.group
        x, inner = ctx.saved_tensors
        trains = any(ctx.needs_input_grad[3:])
        for entry in group.entries:
            entry.ensure()
        dys = [_rows(dy, group.dtype) for dy in grads]
        wants_dx = ctx.needs_input_grad[0]
        dx, found = group.backward(x, dys, inner, ctx.seed, trains=trains, wants_dx=wants_dx)
        if group.sparse and trains:
            group.sampled(x, dys, found)
        return _shaped(ctx, dx), None, None, *group.results(found)


class _GatedMLP(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, mlp: GatedMLP, seed: int, *trained: Tensor) -> Tensor:
        ctx.mlp, ctx.seed, ctx.x_shape, ctx.x_dtype = mlp, seed, x.shape, x.dtype
        rows = _rows(x, mlp.gate_up.dtype)
        with torch.autocast(x.device.type, enabled=False):
            (gate, up), inner = mlp.gate_up.forward(rows, seed)
            (y,), inner_down = mlp.down.forward(mlp.swiglu(gate, up), seed)
        ctx.save_for_backward(rows, gate, up, inner, inner_down)
        return y.view(*x.shape[:-1], y.shape[-1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        mlp: GatedMLP = ctx.mlp
        seed = ctx.seed
        x, gate, up, inner, inner_down = ctx.saved_tensors
        trains = any(ctx.needs_input_grad[3:])
        for layer in mlp.layers:
            layer.entry.ensure()
        dy = _rows(grad, mlp.down.dtype)
        together = trains and mlp.together and dy.shape[0] <= kernels.TOKENS_AT_ONCE
        down_alone = trains and bool(mlp.down.sparse) and not together
        # The product is needed whole for dR of down, and for its dU where that is not taken from the transposed one.
        h = mlp.swiglu(gate, up) if mlp.down.low_rank or down_alone else gate
        dh, found_down = mlp.down.backward(h, [dy], inner_down, seed, trains=trains, wants_dx=True)
        assert dh is not None
        if down_alone:
            mlp.down.sampled(h, [dy], found_down)
        del h
        d_gate, d_up, *transposed = mlp.swiglu.backward(dh, gate, up, transposed=together)
        del dh
        dys, wants_dx = [d_gate, d_up], ctx.needs_input_grad[0]
        dx, found = mlp.gate_up.backward(x, dys, inner, seed, trains=trains, wants_dx=wants_dx)
        if together:
            gate_t, up_t, h_t = transposed
            x_t, dy_t = mlp.transpose(x, dy)
            outs = mlp.products.new()
            mlp.products([(gate_t, x_t), (up_t, x_t), (dy_t, h_t)], outs)
            mlp.gate_up.keep_sampled(outs[:2], found)
            mlp.down.keep_sampled(outs[2:], found_down)
        elif trains and mlp.gate_up.sparse:
            mlp.gate_up.sampled(x, dys, found)
        return _shaped(ctx, dx), None, None, *mlp.gate_up.results(found), *mlp.down.results(found_down)


def _weight(entry: Entry) -> Tensor:
    """The effective weight in the dtype of the products."""
    weight = entry.weight
    return weight if weight.dtype is entry.dtype else weight.to(entry.dtype)


def _seed(x: Tensor, threshold: int) -> int:
    """Where the masks of this call start: from the generator's seed and offset, on the host, so that nothing waits.

    What restores the generator (gradient checkpointing) restores the masks.
    """
    if not threshold:
        return 0
    if x.device.type == "cuda":
        generator = torch.cuda.default_generators[x.device.index]
        offset = generator.get_offset()
        generator.set_offset(offset + 4)  # as a kernel that draws four numbers a thread would leave it
        mixed = generator.initial_seed() * 0x9E3779B97F4A7C15 + offset * 0xD1B54A32D192ED03
    else:
        mixed = int(torch.randint(_SEED_BIT, (1,)))
    return mixed % _SEED_BIT + _SEED_BIT


def _rows(x: Tensor, dtype: torch.dtype) -> Tensor:
    """(T, n), contiguous, aligned, in the dtype of the products."""
    if x.dtype is not dtype:
        x = x.to(dtype)
    rows = x.contiguous().view(-1, x.shape[-1])
    return rows if rows.data_ptr() % 16 == 0 else aligned(rows)


def _shaped(ctx: Any, dx: Tensor | None) -> Tensor | None:
    if dx is None:
        return None
    dx = dx.view(ctx.x_shape)
    return dx if dx.dtype == ctx.x_dtype else dx.to(ctx.x_dtype)
