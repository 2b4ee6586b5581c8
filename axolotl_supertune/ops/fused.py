"""The fast path: one to three linear layers of one input, and a whole gated MLP, as one autograd function each.

What the reference does with a dense gradient, these do with sampled products; what it does per layer, they do once per
input. A layer's weight already holds W + M⊙U (see `inplace`). Kept for backward: the input, the thin products of the
low-rank part and, in the MLP, the two activations; no mask, no dense gradient, not the MLP's product.
"""

import contextlib
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..method import sizes
from . import kernels, sampling_plan
from .gathered_weight import GatheredSlot
from .inplace_weight import WeightSlot
from .launcher import aligned
from .reference import cast, linear

_SEED_BIT = 2**62


class Layer(NamedTuple):
    """An adapted linear layer: its slot, made current by whoever calls, its bias (c,) and dropout probability.

    A `GatheredSlot` is made current here, around each forward and backward.
    """

    slot: WeightSlot | GatheredSlot
    bias: Tensor | None = None
    dropout: float = 0.0


class Sampling(NamedTuple):
    """What the sampled products of layers of one input need: the input features (n,) that they read, None for all; the
    transposition of their operands; the products."""

    columns: Tensor | None
    transpose: kernels.Transpose
    products: kernels.SampledProducts


class _Remade:
    """What is bound to this process's tensors and kernels: a copy or a pickle has None there, and makes it anew."""

    def __reduce__(self) -> Any:
        return type(None), ()


class Group(_Remade):
    """One to three layers that read the same input, with everything bound that stays the same from step to step.

    Those with a low-rank part drop out alike and have one padded rank: see `can_group`.
    """

    def __init__(self, layers: Sequence[Layer], stream: int = 0, *, whole_input: bool = False) -> None:
        self.layers, self.whole_input = list(layers), whole_input
        self.slots = [layer.slot for layer in layers]
        self.persistent = self.slots[0].persistent
        self.dtype = self.slots[0].dtype
        self.sparse = [at for at, slot in enumerate(self.slots) if slot.indices is not None]
        self.low_rank = [at for at, slot in enumerate(self.slots) if slot.packed is not None]
        self.threshold = 0
        if self.low_rank:
            chosen = [self.slots[at] for at in self.low_rank]
            lefts, rights = zip(*(slot.packed for slot in chosen if slot.packed is not None), strict=True)
            self.threshold = kernels.dropout_threshold(layers[self.low_rank[0]].dropout)
            self.narrow = kernels.Narrow(rights, self.threshold, stream)
            self.widen = kernels.Widen(lefts)
            self.narrow_each = kernels.NarrowEach(lefts)
            widths, ranks = zip(*(slot.L.shape for slot in chosen if slot.L is not None), strict=True)
            scales = [slot.scaling for slot in chosen]
            assert chosen[0].L is not None
            dtype = chosen[0].L.dtype
            self.thin = kernels.ThinGradients(rights, widths, ranks, scales, self.threshold, stream, dtype)
        # What autograd is told of, a layer's operands as they come, and where in it those of each kind are.
        self.trained: list[Tensor] = []
        self._places: dict[str, list[int]] = {"U": [], "L": [], "R": []}
        self._biases: list[tuple[int, int]] = []
        for at, (layer, slot) in enumerate(zip(layers, self.slots, strict=True)):
            for name, tensor in (("U", slot.values), ("L", slot.L), ("R", slot.R)):
                if tensor is not None:
                    self._places[name].append(len(self.trained))
                    self.trained.append(tensor)
            if layer.bias is not None and layer.bias.requires_grad:
                self._biases.append((at, len(self.trained)))
                self.trained.append(layer.bias)

    # Waits for the device, and takes memory: for the first forward with a backward, so that switching between adapters
    # that are not trained costs neither.
    @functools.cached_property
    def sampling(self) -> "Sampling":
        """What backward reads of the input, and what computes dU of the layers with a support."""
        columns, plans = None, [slot.plan for slot in self.slots if slot.plan is not None]
        if not self.low_rank and not self.whole_input:
            columns, plans = sampling_plan.few_columns(plans)
        sizes = [plans[0].shape[1], *(plan.shape[0] for plan in plans)]
        transpose = kernels.Transpose(sizes, self.dtype, plans[0].indices.device)
        return Sampling(columns, transpose, kernels.SampledProducts(plans, self.dtype))

    def __call__(self, x: Tensor) -> tuple[Tensor, ...]:
        """`linear_group`."""
        return linear_group(x, self)

    def kept(self, x: Tensor) -> Tensor:
        """What backward needs of the input: x (..., b) itself, or the columns (T, n) that the supports touch."""
        columns = self.sampling.columns if self.sparse else None
        return x if columns is None else x.view(-1, x.shape[-1]).index_select(1, columns)

    def forward(self, x: Tensor, seed: int) -> tuple[list[Tensor], Tensor | None]:
        """x (..., b) → (..., c) of every layer, and the thin products (T, k·r') of those with a low-rank part."""
        if not self.low_rank:
            return [_linear(x, _weight(layer.slot), cast(layer.bias, self.dtype)) for layer in self.layers], None
        inner = self.narrow(x, seed)
        added = iter(self.widen(inner, x.shape[:-1]))
        rows = _matrix(x)
        outputs = []
        for layer in self.layers:
            weight, bias = _weight(layer.slot), cast(layer.bias, self.dtype)
            if layer.slot.packed is None:
                outputs.append(_linear(x, weight, bias))
                continue
            y = next(added)
            _matrix(y).addmm_(rows, weight.t())
            outputs.append(y if bias is None else y.add_(bias))
        return outputs, inner

    def backward(
        self, x: Tensor, dys: Sequence[Tensor], inner: Tensor | None, seed: int, *, trains: bool, wants_dx: bool
    ) -> tuple[Tensor | None, list[Tensor | None]]:
        """dx (T, b), and the gradients of `trained`; those of U are None."""
        grads: list[Tensor | None] = [None] * len(self.trained)
        dx = None
        if self.low_rank and inner is not None:
            chosen = dys if len(self.low_rank) == len(dys) else [dys[at] for at in self.low_rank]
            d_inner = self.narrow_each(chosen)
            if trains:
                lefts, rights, dx = self.thin(x, chosen, inner, d_inner, seed, through=wants_dx)
                for name, found in (("L", lefts), ("R", rights)):
                    for place, grad in zip(self._places[name], found, strict=True):
                        grads[place] = grad
            elif wants_dx:
                dx = self.thin.through(x, d_inner, seed)
        if wants_dx:
            for dy, slot in zip(dys, self.slots, strict=True):
                rows, weight = _matrix(dy), _weight(slot)
                dx = torch.mm(rows, weight) if dx is None else dx.addmm_(rows, weight)
        for at, place in self._biases:
            bias = self.trained[place]
            grads[place] = _matrix(dys[at]).sum(0, dtype=torch.float32).to(bias.dtype)
        return dx, grads

    def sampled(self, x: Tensor, dys: Sequence[Tensor], grads: list[Tensor | None]) -> None:
        """Put dU of every layer with a support into `grads`; long inputs a piece at a time."""
        chosen = dys if len(self.sparse) == len(dys) else [dys[at] for at in self.sparse]
        _, transpose, products = self.sampling
        outs = products.new()
        size = sizes.TOKENS_AT_ONCE
        tokens = x.numel() // x.shape[-1]
        if tokens <= size:
            buffer, (x_t, *dy_ts) = transpose(x, *chosen)
            products([(dy_t, x_t) for dy_t in dy_ts], tokens, outs)
        else:
            x, chosen = _matrix(x), [_matrix(dy) for dy in chosen]
            for begin in range(0, tokens, size):
                some = min(size, tokens - begin)
                buffer, (x_t, *dy_ts) = transpose(x[begin : begin + some], *(dy[begin : begin + some] for dy in chosen))
                products([(dy_t, x_t) for dy_t in dy_ts], some, outs, add=begin > 0)
        del buffer  # until here the kernels read it
        self.keep_sampled(outs, grads)

    def keep_sampled(self, outs: Sequence[Tensor], grads: list[Tensor | None]) -> None:
        """Put sampled products into `grads`, in the dtype of U."""
        for place, out in zip(self._places["U"], outs, strict=True):
            dtype = self.trained[place].dtype
            grads[place] = out if dtype is torch.float32 else out.to(dtype)


class GatedMLP(_Remade):
    """down(silu(gate(x))·up(x)) with all three layers adapted."""

    def __init__(self, gate: Layer, up: Layer, down: Layer) -> None:
        self.layers = [gate, up, down]
        # The input of down is made again in backward, whole: its columns are no saving.
        self.gate_up, self.down = Group([gate, up]), Group([down], stream=2, whole_input=True)
        self.slots = [layer.slot for layer in self.layers]
        self.persistent = self.gate_up.persistent
        weight = gate.slot.weight
        self.swiglu = kernels.Swiglu(weight.shape[0], gate.slot.dtype, weight.device)
        self.trained = [*self.gate_up.trained, *self.down.trained]
        self.together = all(layer.slot.indices is not None for layer in self.layers)

    @functools.cached_property
    def sampling(self) -> "Sampling":
        """What computes dU of all three layers at once, where each has a support."""
        plans = [*self.gate_up.sampling.products.plans, *self.down.sampling.products.plans]
        sizes, dtype = [plans[0].shape[1], plans[2].shape[0]], self.down.dtype
        transpose = kernels.Transpose(sizes, dtype, plans[0].indices.device)
        return Sampling(self.gate_up.sampling.columns, transpose, kernels.SampledProducts(plans, dtype))

    def __call__(self, x: Tensor) -> Tensor:
        """`gated_mlp`."""
        return gated_mlp(x, self)


def can_group(layers: Sequence[Layer]) -> bool:
    """Whether a `Group` takes these layers: one dtype, dropout and padded rank; all their weights stay, or none."""
    low_rank = [layer for layer in layers if layer.slot.packed is not None]
    return (
        len({(layer.slot.dtype, layer.slot.persistent) for layer in layers}) == 1
        and len({layer.dropout for layer in low_rank}) <= 1
        and len({layer.slot.packed[0].shape[0] for layer in low_rank if layer.slot.packed is not None}) <= 1
    )


def linear_group(x: Tensor, group: Group) -> tuple[Tensor, ...]:
    """x·Ŵᵀ + bias of the layers of a group for x (..., b): (..., c) each, equal to `sparse_linear`."""
    if not torch.is_grad_enabled():
        return tuple(group_forward(x, group, keeps=False)[0])
    return _apply(_LinearGroup, x, group, *group.trained)


def gated_mlp(x: Tensor, mlp: GatedMLP) -> Tensor:
    """down(silu(gate(x))·up(x)), keeping neither silu(gate) nor the product: (..., b) → (..., c)."""
    if not torch.is_grad_enabled():
        return mlp_forward(x, mlp, keeps=False)[0]
    return _apply(_GatedMLP, x, mlp, *mlp.trained)


class Saved(NamedTuple):
    """What a forward leaves for its backward: tensors, the seed of its masks, and the state of U, L and R."""

    tensors: tuple[Tensor | None, ...]
    seed: int
    versions: "list[tuple[tuple[Tensor, int], ...]]"


def group_forward(x: Tensor, group: Group, *, keeps: bool = True) -> tuple[list[Tensor], Saved]:
    """Without autograd: the outputs, and what `group_backward` wants unless there will be none."""
    seed = _seed(x, group.threshold)
    x = _operand(x, group.dtype)
    with _NOTHING if group.persistent else _Written(group.slots):
        outputs, inner = group.forward(x, seed)
    return outputs, Saved((group.kept(x) if keeps else None, inner), seed, [slot.versions for slot in group.slots])


def group_backward(
    dys: Sequence[Tensor], saved: Saved, group: Group, *, trains: bool, wants_dx: bool
) -> tuple[Tensor | None, list[Tensor | None]]:
    """dx (..., b) in the dtype of the products, and the gradients of `group.trained`."""
    x, inner = saved.tensors
    assert x is not None
    with _Written(group.slots, saved.versions):
        x, operands = _operand(x, group.dtype), [_operand(dy, group.dtype) for dy in dys]
        dx, grads = group.backward(x, operands, inner, saved.seed, trains=trains, wants_dx=wants_dx)
        if group.sparse and trains:
            group.sampled(x, operands, grads)
    return _shaped(dx, dys[0]), grads


def mlp_forward(x: Tensor, mlp: GatedMLP, *, keeps: bool = True) -> tuple[Tensor, Saved]:
    """Without autograd: the output, and what `mlp_backward` wants unless there will be none."""
    seed = _seed(x, mlp.gate_up.threshold or mlp.down.threshold)
    x = _operand(x, mlp.gate_up.dtype)
    with _NOTHING if mlp.persistent else _Written(mlp.slots):
        (gate, up), inner = mlp.gate_up.forward(x, seed)
        (y,), inner_down = mlp.down.forward(mlp.swiglu(gate, up), seed)
    saved = (mlp.gate_up.kept(x) if keeps else None, gate, up, inner, inner_down)
    return y, Saved(saved, seed, [slot.versions for slot in mlp.slots])


def mlp_backward(
    grad: Tensor, saved: Saved, mlp: GatedMLP, *, trains: bool, wants_dx: bool
) -> tuple[Tensor | None, list[Tensor | None]]:
    """dx (..., b) in the dtype of the products, and the gradients of `mlp.trained`."""
    x, gate, up, inner, inner_down = saved.tensors
    assert x is not None
    assert gate is not None
    assert up is not None
    with _Written(mlp.slots, saved.versions):
        x, dy = _operand(x, mlp.gate_up.dtype), _operand(grad, mlp.down.dtype)
        tokens = dy.numel() // dy.shape[-1]
        together = trains and mlp.together and tokens <= sizes.TOKENS_AT_ONCE
        down_alone = trains and bool(mlp.down.sparse) and not together
        # The product is needed whole for dR of down, and for its dU where that is not taken from the transposed one.
        h = mlp.swiglu(gate, up) if mlp.down.low_rank or down_alone else gate
        dh, found_down = mlp.down.backward(h, [dy], inner_down, saved.seed, trains=trains, wants_dx=True)
        assert dh is not None
        if down_alone:
            mlp.down.sampled(h, [dy], found_down)
        del h
        d_gate, d_up, buffer, transposed = mlp.swiglu.backward(dh, gate, up, transposed=together)
        del dh
        dys = [d_gate, d_up]
        dx, found = mlp.gate_up.backward(x, dys, inner, saved.seed, trains=trains, wants_dx=wants_dx)
        if together:
            gate_t, up_t, h_t = transposed
            _, transpose, products = mlp.sampling
            others, (x_t, dy_t) = transpose(x, dy)
            outs = products.new()
            products([(gate_t, x_t), (up_t, x_t), (dy_t, h_t)], tokens, outs)
            del buffer, others  # until here the kernels read them
            mlp.gate_up.keep_sampled(outs[:2], found)
            mlp.down.keep_sampled(outs[2:], found_down)
        elif trains and mlp.gate_up.sparse:
            mlp.gate_up.sampled(x, dys, found)
    return _shaped(dx, grad), [*found, *found_down]


class _Written:
    """While a backward runs: the weights hold what its forward used, and afterwards what they held before.

    So too while a forward runs, of layers whose weights do not stay.

    Raises:
        RuntimeError: U, L or R changed since the forward; the gradient would be that of another model.
    """

    def __init__(
        self, slots: "Sequence[WeightSlot | GatheredSlot]", versions: "Sequence[tuple[tuple[Tensor, int], ...]]" = ()
    ) -> None:
        self._slots = slots
        self._again: list[WeightSlot | GatheredSlot] = []
        for each in versions:
            for tensor, version in each:
                if tensor._version != version:
                    raise RuntimeError(
                        "an adapter's values were changed between a forward and its backward: call backward() before "
                        "step()."
                    )

    def __enter__(self) -> None:
        try:
            for slot in self._slots:
                if slot.ensure():
                    self._again.append(slot)
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *error: object) -> None:
        for slot in self._again:
            slot.restore()


_NOTHING = contextlib.nullcontext()


def _apply(function: Any, *args: Any) -> Any:
    """`function.apply`, straight to C where no functorch transform is active."""
    if torch._C._are_functorch_transforms_active():
        return function.apply(*args)
    return super(torch.autograd.Function, function).apply(*args)


def _once_differentiable(backward: Any) -> Any:
    """torch's own, but for the price where nobody asked for a graph of the backward."""
    whole = once_differentiable(backward)

    @functools.wraps(backward)
    def chosen(ctx: Any, *dys: Tensor) -> Any:
        return whole(ctx, *dys) if torch.is_grad_enabled() else backward(ctx, *dys)

    return chosen


class _LinearGroup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, *trained: Tensor) -> tuple[Tensor, ...]:
        outputs, (tensors, ctx.seed, ctx.versions) = group_forward(x, group)
        ctx.group, ctx.x_dtype = group, x.dtype
        ctx.save_for_backward(*tensors)
        return tuple(outputs)

    @staticmethod
    @_once_differentiable
    def backward(ctx: Any, *dys: Tensor) -> Any:
        needs = ctx.needs_input_grad
        saved = Saved(ctx.saved_tensors, ctx.seed, ctx.versions)
        dx, grads = group_backward(dys, saved, ctx.group, trains=any(needs[2:]), wants_dx=needs[0])
        return dx if dx is None or dx.dtype is ctx.x_dtype else dx.to(ctx.x_dtype), None, *grads


class _GatedMLP(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, mlp: GatedMLP, *trained: Tensor) -> Tensor:
        y, (tensors, ctx.seed, ctx.versions) = mlp_forward(x, mlp)
        ctx.mlp, ctx.x_dtype = mlp, x.dtype
        ctx.save_for_backward(*tensors)
        return y

    @staticmethod
    @_once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        needs = ctx.needs_input_grad
        saved = Saved(ctx.saved_tensors, ctx.seed, ctx.versions)
        dx, grads = mlp_backward(dy, saved, ctx.mlp, trains=any(needs[2:]), wants_dx=needs[0])
        return dx if dx is None or dx.dtype is ctx.x_dtype else dx.to(ctx.x_dtype), None, *grads


def _weight(slot: WeightSlot | GatheredSlot) -> Tensor:
    """The effective weight in the dtype of the products."""
    weight = slot.weight
    return weight if weight.dtype is slot.dtype else weight.to(slot.dtype)


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


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x·Wᵀ + bias, never a view to autograd, which would forbid whoever gets it to change it."""
    if bias is None or x.dim() == 2:
        return linear(x, weight, bias)
    y = linear(_matrix(x), weight, bias)
    return torch.ops.aten._unsafe_view.default(y, (*x.shape[:-1], y.shape[-1]))


def _operand(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x (..., n), contiguous, aligned, in the dtype of the products."""
    if x.dtype is not dtype:
        x = x.to(dtype)
    return aligned(x if x.is_contiguous() else x.contiguous())


def _matrix(x: Tensor) -> Tensor:
    """(..., n) → (T, n)."""
    return x if x.dim() == 2 else x.view(-1, x.shape[-1])


def _shaped(dx: Tensor | None, dy: Tensor) -> Tensor | None:
    """dx (T, b) in the shape of dy (..., c) but for the last dimension."""
    return dx if dx is None or dy.dim() == 2 else dx.view(*dy.shape[:-1], dx.shape[-1])
