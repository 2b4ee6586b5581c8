"""The fast path: one to three linear layers of one input, and a whole gated MLP, as one autograd function each.

What the reference does with a dense gradient, these do with sampled products; what it does per layer, they do once per
input. A layer's weight already holds W + M⊙U (see `inplace`). Kept for backward: the input, the thin products of the
low-rank part and, in the MLP, the two activations; no mask, no dense gradient, not the MLP's product.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from . import kernels
from .inplace import Entry
from .launch import aligned
from .reference import cast

_SEED_BIT = 2**62


class Layer(NamedTuple):
    """An adapted linear layer: its entry, made current by whoever calls, its bias (c,) and dropout probability."""

    entry: Entry
    bias: Tensor | None = None
    dropout: float = 0.0


class _Remade:
    """What is bound to this process's tensors and kernels: a copy or a pickle has None there, and makes it anew."""

    def __reduce__(self) -> Any:
        return type(None), ()


class Group(_Remade):
    """One to three layers that read the same input, with everything bound that stays from step to step.

    Those with a low-rank part drop out alike and have one padded rank: see `fit_together`.
    """

    def __init__(self, layers: Sequence[Layer], stream: int = 0, *, whole_input: bool = False) -> None:
        self.layers, self.whole_input = list(layers), whole_input
        self.entries = [layer.entry for layer in layers]
        self.dtype = self.entries[0].dtype
        self.sparse = [at for at, entry in enumerate(self.entries) if entry.plan is not None]
        self.low_rank = [at for at, entry in enumerate(self.entries) if entry.packed is not None]
        self.threshold = 0
        device = self.entries[0].weight.device
        if self.low_rank:
            chosen = [self.entries[at] for at in self.low_rank]
            lefts, rights = zip(*(entry.packed for entry in chosen if entry.packed is not None), strict=True)
            self.threshold = kernels.dropout_threshold(layers[self.low_rank[0]].dropout)
            self.narrow = kernels.Narrow(rights, self.threshold, stream)
            self.widen = kernels.Widen(lefts)
            self.narrow_each = kernels.NarrowEach(lefts)
            widths, ranks = zip(*(entry.L.shape for entry in chosen if entry.L is not None), strict=True)
            scales = [entry.scaling for entry in chosen]
            assert chosen[0].L is not None
            dtype = chosen[0].L.dtype
            self.thin = kernels.ThinGradients(rights, widths, ranks, scales, self.threshold, stream, dtype)
        # Input features that backward reads; None is all of them.
        self.columns: Tensor | None = None
        if self.sparse:
            plans = [entry.plan for entry in self.entries if entry.plan is not None]
            if not self.low_rank and not whole_input:
                self.columns, plans = kernels.few_columns(plans)
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

    def kept(self, x: Tensor, rows: Tensor) -> Tensor:
        """What backward needs of the input: x itself, or the columns of x (T, b) that the supports touch."""
        return x if self.columns is None else rows.index_select(1, self.columns)

    def forward(self, x: Tensor, seed: int) -> tuple[list[Tensor], Tensor | None]:
        """x (T, b) → (T, c) of every layer, and the thin products (T, k·r') of those with a low-rank part."""
        if not self.low_rank:
            return [F.linear(x, _weight(layer.entry), cast(layer.bias, self.dtype)) for layer in self.layers], None
        inner = self.narrow(x, seed)
        added = iter(self.widen(inner))
        outputs = []
        for layer in self.layers:
            weight, bias = _weight(layer.entry), cast(layer.bias, self.dtype)
            if layer.entry.packed is None:
                outputs.append(F.linear(x, weight, bias))
                continue
            y = next(added).addmm_(x, weight.t())
            outputs.append(y if bias is None else y.add_(bias))
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
            grads["U", at] = cast(out, values.dtype)

    def results(self, grads: dict[tuple[str, int], Tensor]) -> list[Tensor | None]:
        """Gradients in the order of `trained`."""
        return [grads.get(place) for place in self._places]


class GatedMLP(_Remade):
    """down(silu(gate(x))·up(x)) with all three layers adapted."""

    def __init__(self, gate: Layer, up: Layer, down: Layer) -> None:
        self.layers = [gate, up, down]
        # The input of down is made again in backward, whole: its columns are no saving.
        self.gate_up, self.down = Group([gate, up]), Group([down], stream=2, whole_input=True)
        device = gate.entry.weight.device
        self.swiglu = kernels.Swiglu(gate.entry.weight.shape[0], device)
        self.trained = [*self.gate_up.trained, *self.down.trained]
        self.together = all(layer.entry.plan is not None for layer in self.layers)
        if self.together:
            plans = [*self.gate_up.products.plans, *self.down.products.plans]
            self.transpose = kernels.Transpose([plans[0].shape[1], down.entry.weight.shape[0]], device)
            self.products = kernels.SampledProducts(plans)


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
    if not torch.is_grad_enabled():
        return tuple(group_forward(x, group, keeps=False)[0])
    return _LinearGroup.apply(x, group, *group.trained)


def gated_mlp(x: Tensor, mlp: GatedMLP) -> Tensor:
    """down(silu(gate(x))·up(x)), keeping neither silu(gate) nor the product: (..., b) → (..., c)."""
    if not torch.is_grad_enabled():
        return mlp_forward(x, mlp, keeps=False)[0]
    return _GatedMLP.apply(x, mlp, *mlp.trained)


class Saved(NamedTuple):
    """What a forward leaves for its backward: tensors, the seed of its masks, and the state of U, L and R."""

    tensors: tuple[Tensor | None, ...]
    seed: int
    versions: "list[tuple[tuple[Tensor, int], ...]]"


def group_forward(x: Tensor, group: Group, *, keeps: bool = True) -> tuple[list[Tensor], Saved]:
    """Without autograd: the outputs, and what `group_backward` wants unless there will be none."""
    seed = _seed(x, group.threshold)
    rows = _rows(x, group.dtype)
    with _no_autocast(x.device.type):
        outputs, inner = group.forward(rows, seed)
    kept = group.kept(x, rows) if keeps else None
    return [_like(y, x) for y in outputs], Saved((kept, inner), seed, [entry.versions for entry in group.entries])


def group_backward(
    dys: Sequence[Tensor], saved: Saved, group: Group, *, trains: bool, wants_dx: bool
) -> tuple[Tensor | None, list[Tensor | None]]:
    """dx (..., b) in the dtype of the products, and the gradients of `group.trained`."""
    x, inner = saved.tensors
    assert x is not None
    with _Written(group.entries, saved.versions):
        rows, dy_rows = _rows(x, group.dtype), [_rows(dy, group.dtype) for dy in dys]
        dx, found = group.backward(rows, dy_rows, inner, saved.seed, trains=trains, wants_dx=wants_dx)
        if group.sparse and trains:
            group.sampled(rows, dy_rows, found)
    return _shaped(dx, dys[0]), group.results(found)


def mlp_forward(x: Tensor, mlp: GatedMLP, *, keeps: bool = True) -> tuple[Tensor, Saved]:
    """Without autograd: the output, and what `mlp_backward` wants unless there will be none."""
    seed = _seed(x, mlp.gate_up.threshold or mlp.down.threshold)
    rows = _rows(x, mlp.gate_up.dtype)
    with _no_autocast(x.device.type):
        (gate, up), inner = mlp.gate_up.forward(rows, seed)
        (y,), inner_down = mlp.down.forward(mlp.swiglu(gate, up), seed)
    saved = (mlp.gate_up.kept(x, rows) if keeps else None, gate, up, inner, inner_down)
    return _like(y, x), Saved(saved, seed, [layer.entry.versions for layer in mlp.layers])


def mlp_backward(
    grad: Tensor, saved: Saved, mlp: GatedMLP, *, trains: bool, wants_dx: bool
) -> tuple[Tensor | None, list[Tensor | None]]:
    """dx (..., b) in the dtype of the products, and the gradients of `mlp.trained`."""
    x, gate, up, inner, inner_down = saved.tensors
    assert x is not None
    assert gate is not None
    assert up is not None
    with _Written([layer.entry for layer in mlp.layers], saved.versions):
        rows, dy = _rows(x, mlp.gate_up.dtype), _rows(grad, mlp.down.dtype)
        together = trains and mlp.together and dy.shape[0] <= kernels.TOKENS_AT_ONCE
        down_alone = trains and bool(mlp.down.sparse) and not together
        # The product is needed whole for dR of down, and for its dU where that is not taken from the transposed one.
        h = mlp.swiglu(gate, up) if mlp.down.low_rank or down_alone else gate
        dh, found_down = mlp.down.backward(h, [dy], inner_down, saved.seed, trains=trains, wants_dx=True)
        assert dh is not None
        if down_alone:
            mlp.down.sampled(h, [dy], found_down)
        del h
        d_gate, d_up, *transposed = mlp.swiglu.backward(dh, gate, up, transposed=together)
        del dh
        dys = [d_gate, d_up]
        dx, found = mlp.gate_up.backward(rows, dys, inner, saved.seed, trains=trains, wants_dx=wants_dx)
        if together:
            gate_t, up_t, h_t = transposed
            x_t, dy_t = mlp.transpose(rows, dy)
            outs = mlp.products.new()
            mlp.products([(gate_t, x_t), (up_t, x_t), (dy_t, h_t)], outs)
            mlp.gate_up.keep_sampled(outs[:2], found)
            mlp.down.keep_sampled(outs[2:], found_down)
        elif trains and mlp.gate_up.sparse:
            mlp.gate_up.sampled(rows, dys, found)
    return _shaped(dx, grad), [*mlp.gate_up.results(found), *mlp.down.results(found_down)]


class _Written:
    """While a backward runs: the weights hold what its forward used, and afterwards what they held before.

    Raises:
        RuntimeError: U, L or R changed since the forward; the gradient would be that of another model.
    """

    def __init__(self, entries: Sequence[Entry], versions: "list[tuple[tuple[Tensor, int], ...]]") -> None:
        self._entries = entries
        for each in versions:
            for tensor, version in each:
                if tensor._version != version:
                    raise RuntimeError(
                        "an adapter's values were changed between a forward and its backward: call backward() before "
                        "step()."
                    )

    def __enter__(self) -> None:
        self._again = [entry for entry in self._entries if entry.ensure()]

    def __exit__(self, *error: object) -> None:
        for entry in self._again:
            entry.restore()


class _LinearGroup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, *trained: Tensor) -> tuple[Tensor, ...]:
        outputs, saved = group_forward(x, group)
        ctx.group, ctx.rest, ctx.x_dtype = group, saved[1:], x.dtype
        ctx.save_for_backward(*saved.tensors)
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *dys: Tensor) -> Any:
        needs = ctx.needs_input_grad
        saved = Saved(ctx.saved_tensors, *ctx.rest)
        dx, grads = group_backward(dys, saved, ctx.group, trains=any(needs[2:]), wants_dx=needs[0])
        return cast(dx, ctx.x_dtype), None, *grads


class _GatedMLP(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, mlp: GatedMLP, *trained: Tensor) -> Tensor:
        y, saved = mlp_forward(x, mlp)
        ctx.mlp, ctx.rest, ctx.x_dtype = mlp, saved[1:], x.dtype
        ctx.save_for_backward(*saved.tensors)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        needs = ctx.needs_input_grad
        saved = Saved(ctx.saved_tensors, *ctx.rest)
        dx, grads = mlp_backward(dy, saved, ctx.mlp, trains=any(needs[2:]), wants_dx=needs[0])
        return cast(dx, ctx.x_dtype), None, *grads


def _no_autocast(kind: str) -> Any:
    """The products run in the dtype that the entries name; entering nothing is cheaper than leaving autocast."""
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()


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
    if not x.is_contiguous():
        x = x.contiguous()
    x = aligned(x)
    return x if x.dim() == 2 else x.view(-1, x.shape[-1])


def _like(y: Tensor, x: Tensor) -> Tensor:
    """y (T, c) in the shape of x (..., b) but for the last dimension; not a view to autograd, which would forbid
    to change it."""
    return y if x.dim() == 2 else torch.ops.aten._unsafe_view(y, (*x.shape[:-1], y.shape[-1]))


def _shaped(dx: Tensor | None, dy: Tensor) -> Tensor | None:
    return None if dx is None else _like(dx, dy)
