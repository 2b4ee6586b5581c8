"""The fast path: autograd functions for one to three adapted layers of one input, and for an adapted gated MLP.

Where `reference` forms a dense gradient of W, these compute sampled products, and passes over the input are shared by
the layers. The weights hold W + M⊙U already (`inplace_weight`). Forward saves the input (or the columns of it that the
supports touch), the products x·Rᵀ of rank r', and in the MLP gate and up. Neither dropout masks nor silu(gate)·up are
saved.

`Group` and `GatedMLP` bind kernels to layers; `group_forward` and its siblings compute without autograd; the autograd
functions are at the end.
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
from .gathered_weight import GatheredSlot, WrittenSlots
from .inplace_weight import WeightSlot
from .operands import as_matrix, as_operand, in_shape_of, linear_without_view, mask_seed
from .reference import cast


class KernelLayer(NamedTuple):
    """An adapted linear layer: its slot, bias (c,) and dropout probability.

    The caller writes a `WeightSlot` before a forward (`BatchedWriter.write_for_forward`). A `GatheredSlot` is written
    here, for each forward and backward.
    """

    slot: WeightSlot | GatheredSlot
    bias: Tensor | None = None
    dropout: float = 0.0


class SupportGradientKernels(NamedTuple):
    """Kernels for dU of layers that share an input.

    Attributes:
        columns: (n,) the input features that the supports touch, or None for all.
        transpose: transposes the operands.
        products: the sampled products.
    """

    columns: Tensor | None
    transpose: kernels.Transpose
    products: kernels.SampledProducts


class _NotCopied:
    """Base of objects that are bound to this process's tensors and kernels: copies and pickles get None instead."""

    def __reduce__(self) -> Any:
        return type(None), ()


class Group(_NotCopied):
    """One to three layers that read the same input, with their kernels bound.

    Args:
        layers: for which `can_group` holds.
        stream: number of the first dropout mask; the k-th layer that has a low-rank part uses mask stream + k.
        whole_input: save the whole input for backward, not only the columns that the supports touch.

    Attributes:
        sparse, low_rank: indices of the layers with such a part.
        trained: the tensors that autograd is given: U, L, R and a trained bias of each layer in turn.
        threshold: of the dropout, see `kernels.dropout_threshold`.
    """

    def __init__(self, layers: Sequence[KernelLayer], stream: int = 0, *, whole_input: bool = False) -> None:
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
        # The tensors for autograd, and the indices of each kind among them.
        self.trained: list[Tensor] = []
        self._indices: dict[str, list[int]] = {"U": [], "L": [], "R": []}
        self._biases: list[tuple[int, int]] = []
        for at, (layer, slot) in enumerate(zip(layers, self.slots, strict=True)):
            for name, tensor in (("U", slot.values), ("L", slot.L), ("R", slot.R)):
                if tensor is not None:
                    self._indices[name].append(len(self.trained))
                    self.trained.append(tensor)
            if layer.bias is not None and layer.bias.requires_grad:
                self._biases.append((at, len(self.trained)))
                self.trained.append(layer.bias)

    # Made for the first forward with a backward: it waits for the device and takes memory, which switching between
    # adapters without training them should not.
    @functools.cached_property
    def support_gradient(self) -> SupportGradientKernels:
        """Kernels for dU of the layers with a support."""
        columns, plans = None, [slot.sampling_plan for slot in self.slots if slot.sampling_plan is not None]
        if not self.low_rank and not self.whole_input:
            columns, plans = sampling_plan.few_columns(plans)
        widths = [plans[0].shape[1], *(plan.shape[0] for plan in plans)]
        transpose = kernels.Transpose(widths, self.dtype, plans[0].indices.device)
        return SupportGradientKernels(columns, transpose, kernels.SampledProducts(plans, self.dtype))

    def __call__(self, x: Tensor) -> tuple[Tensor, ...]:
        """y (..., c) of every layer for x (..., b), see `linear_group`."""
        return linear_group(x, self)

    def saved_input(self, x: Tensor) -> Tensor:
        """The input for backward: x (..., b) itself, or its columns (T, n) that the supports touch."""
        columns = self.support_gradient.columns if self.sparse else None
        return x if columns is None else x.view(-1, x.shape[-1]).index_select(1, columns)

    def forward(self, x: Tensor, seed: int) -> tuple[list[Tensor], Tensor | None]:
        """x (..., b) → y (..., c) of every layer, and dropout(x)·Rᵀ (T, k·r') of the k layers with a low-rank part."""
        if not self.low_rank:
            return [
                linear_without_view(x, _weight(layer.slot), cast(layer.bias, self.dtype)) for layer in self.layers
            ], None
        inner = self.narrow(x, seed)
        added = iter(self.widen(inner, x.shape[:-1]))
        rows = as_matrix(x)
        outputs = []
        for layer in self.layers:
            weight, bias = _weight(layer.slot), cast(layer.bias, self.dtype)
            if layer.slot.packed is None:
                outputs.append(linear_without_view(x, weight, bias))
                continue
            y = next(added)
            as_matrix(y).addmm_(rows, weight.t())
            outputs.append(y if bias is None else y.add_(bias))
        return outputs, inner

    def backward(
        self, x: Tensor, dys: Sequence[Tensor], inner: Tensor | None, seed: int, *, trains: bool, wants_dx: bool
    ) -> tuple[Tensor | None, list[Tensor | None]]:
        """dx (T, b) or None, and the gradients of `trained`; those of U are None (see `add_sampled`)."""
        grads: list[Tensor | None] = [None] * len(self.trained)
        dx = None
        if self.low_rank and inner is not None:
            chosen = dys if len(self.low_rank) == len(dys) else [dys[at] for at in self.low_rank]
            d_inner = self.narrow_each(chosen)
            if trains:
                d_left, d_right, dx = self.thin(x, chosen, inner, d_inner, seed, through=wants_dx)
                for name, of_kind in (("L", d_left), ("R", d_right)):
                    for index, grad in zip(self._indices[name], of_kind, strict=True):
                        grads[index] = grad
            elif wants_dx:
                dx = self.thin.through(x, d_inner, seed)
        if wants_dx:
            for dy, slot in zip(dys, self.slots, strict=True):
                rows, weight = as_matrix(dy), _weight(slot)
                dx = torch.mm(rows, weight) if dx is None else dx.addmm_(rows, weight)
        for at, index in self._biases:
            bias = self.trained[index]
            grads[index] = as_matrix(dys[at]).sum(0, dtype=torch.float32).to(bias.dtype)
        return dx, grads

    def add_sampled(self, x: Tensor, dys: Sequence[Tensor], grads: list[Tensor | None]) -> None:
        """Compute dU of every layer with a support into `grads`; long inputs in pieces of `TOKENS_PER_TRANSPOSE`."""
        chosen = dys if len(self.sparse) == len(dys) else [dys[at] for at in self.sparse]
        _, transpose, products = self.support_gradient
        outs = products.new()
        size = sizes.TOKENS_PER_TRANSPOSE
        tokens = x.numel() // x.shape[-1]
        if tokens <= size:
            buffer, (x_t, *dy_ts) = transpose(x, *chosen)
            products([(dy_t, x_t) for dy_t in dy_ts], tokens, outs)
        else:
            x, chosen = as_matrix(x), [as_matrix(dy) for dy in chosen]
            for begin in range(0, tokens, size):
                end = min(begin + size, tokens)
                buffer, (x_t, *dy_ts) = transpose(x[begin:end], *(dy[begin:end] for dy in chosen))
                products([(dy_t, x_t) for dy_t in dy_ts], end - begin, outs, add=begin > 0)
        del buffer  # the kernels have read it
        self.store_sampled(outs, grads)

    def store_sampled(self, outs: Sequence[Tensor], grads: list[Tensor | None]) -> None:
        """Put sampled products (s,) fp32 into `grads`, in the dtype of U."""
        for index, out in zip(self._indices["U"], outs, strict=True):
            dtype = self.trained[index].dtype
            grads[index] = out if dtype is torch.float32 else out.to(dtype)


class GatedMLP(_NotCopied):
    """down(silu(gate(x))·up(x)) with all three layers adapted, and their kernels bound."""

    def __init__(self, gate: KernelLayer, up: KernelLayer, down: KernelLayer) -> None:
        self.layers = [gate, up, down]
        # Backward forms the input of down again as a whole: saving only its columns saves nothing.
        self.gate_up, self.down = Group([gate, up]), Group([down], stream=2, whole_input=True)
        self.slots = [layer.slot for layer in self.layers]
        self.persistent = self.gate_up.persistent
        weight = gate.slot.weight
        self.swiglu = kernels.Swiglu(weight.shape[0], gate.slot.dtype, weight.device)
        self.trained = [*self.gate_up.trained, *self.down.trained]
        # Then dU of all three can come from one launch.
        self.all_sparse = all(layer.slot.indices is not None for layer in self.layers)

    @functools.cached_property
    def support_gradient(self) -> SupportGradientKernels:
        """Kernels for dU of all three layers in one launch, where each has a support."""
        gate_up, down = self.gate_up.support_gradient, self.down.support_gradient
        plans = [*gate_up.products.plans, *down.products.plans]
        widths, dtype = [plans[0].shape[1], plans[2].shape[0]], self.down.dtype
        transpose = kernels.Transpose(widths, dtype, plans[0].indices.device)
        return SupportGradientKernels(gate_up.columns, transpose, kernels.SampledProducts(plans, dtype))

    def __call__(self, x: Tensor) -> Tensor:
        """y (..., c) of x (..., b), see `gated_mlp`."""
        return gated_mlp(x, self)


def can_group(layers: Sequence[KernelLayer]) -> bool:
    """Whether one `Group` can hold these layers: one dtype, dropout and padded rank; all slots persistent, or none."""
    low_rank = [layer for layer in layers if layer.slot.packed is not None]
    return (
        len({(layer.slot.dtype, layer.slot.persistent) for layer in layers}) == 1
        and len({layer.dropout for layer in low_rank}) <= 1
        and len({layer.slot.packed[0].shape[0] for layer in low_rank if layer.slot.packed is not None}) <= 1
    )


def linear_group(x: Tensor, group: Group) -> tuple[Tensor, ...]:
    """x·Ŵᵀ + bias (..., c) of every layer of a group for x (..., b); `reference.sparse_linear` of each."""
    if not torch.is_grad_enabled():
        return tuple(group_forward(x, group, keeps=False)[0])
    return _apply(_LinearGroup, x, group, *group.trained)


def gated_mlp(x: Tensor, mlp: GatedMLP) -> Tensor:
    """down(silu(gate(x))·up(x)): x (..., b) → (..., c). Saves neither silu(gate) nor the product for backward."""
    if not torch.is_grad_enabled():
        return mlp_forward(x, mlp, keeps=False)[0]
    return _apply(_GatedMLP, x, mlp, *mlp.trained)


class Saved(NamedTuple):
    """What a forward saves for its backward: tensors, the seed of its masks, and the versions of U, L and R."""

    tensors: tuple[Tensor | None, ...]
    seed: int
    versions: "list[tuple[tuple[Tensor, int], ...]]"


def group_forward(x: Tensor, group: Group, *, keeps: bool = True) -> tuple[list[Tensor], Saved]:
    """The outputs without autograd, and with `keeps` what `group_backward` needs."""
    seed = mask_seed(x, group.threshold)
    x = as_operand(x, group.dtype)
    with _NO_WRITE if group.persistent else WrittenSlots(group.slots):
        outputs, inner = group.forward(x, seed)
    saved = (group.saved_input(x) if keeps else None, inner)
    return outputs, Saved(saved, seed, [slot.versions for slot in group.slots])


def group_backward(
    dys: Sequence[Tensor], saved: Saved, group: Group, *, trains: bool, wants_dx: bool
) -> tuple[Tensor | None, list[Tensor | None]]:
    """dx (..., b) in the dtype of the products, or None, and the gradients of `group.trained`."""
    x, inner = saved.tensors
    assert x is not None
    with WrittenSlots(group.slots, saved.versions):
        x, operands = as_operand(x, group.dtype), [as_operand(dy, group.dtype) for dy in dys]
        dx, grads = group.backward(x, operands, inner, saved.seed, trains=trains, wants_dx=wants_dx)
        if group.sparse and trains:
            group.add_sampled(x, operands, grads)
    return in_shape_of(dx, dys[0]), grads


def mlp_forward(x: Tensor, mlp: GatedMLP, *, keeps: bool = True) -> tuple[Tensor, Saved]:
    """The output without autograd, and with `keeps` what `mlp_backward` needs."""
    seed = mask_seed(x, mlp.gate_up.threshold or mlp.down.threshold)
    x = as_operand(x, mlp.gate_up.dtype)
    with _NO_WRITE if mlp.persistent else WrittenSlots(mlp.slots):
        (gate, up), inner = mlp.gate_up.forward(x, seed)
        (y,), inner_down = mlp.down.forward(mlp.swiglu(gate, up), seed)
    saved = (mlp.gate_up.saved_input(x) if keeps else None, gate, up, inner, inner_down)
    return y, Saved(saved, seed, [slot.versions for slot in mlp.slots])


def mlp_backward(
    grad: Tensor, saved: Saved, mlp: GatedMLP, *, trains: bool, wants_dx: bool
) -> tuple[Tensor | None, list[Tensor | None]]:
    """dx (..., b) in the dtype of the products, or None, and the gradients of `mlp.trained`."""
    x, gate, up, inner, inner_down = saved.tensors
    assert x is not None
    assert gate is not None
    assert up is not None
    with WrittenSlots(mlp.slots, saved.versions):
        x, dy = as_operand(x, mlp.gate_up.dtype), as_operand(grad, mlp.down.dtype)
        tokens = dy.numel() // dy.shape[-1]
        one_launch = trains and mlp.all_sparse and tokens <= sizes.TOKENS_PER_TRANSPOSE
        down_first = trains and bool(mlp.down.sparse) and not one_launch
        # silu(gate)·up is needed for dR of down, and for its dU unless that uses the transposed copy of the product.
        # Otherwise `gate` is a stand-in that nothing reads.
        h = mlp.swiglu(gate, up) if mlp.down.low_rank or down_first else gate
        dh, grads_down = mlp.down.backward(h, [dy], inner_down, saved.seed, trains=trains, wants_dx=True)
        assert dh is not None
        if down_first:
            mlp.down.add_sampled(h, [dy], grads_down)
        del h
        d_gate, d_up, buffer, transposed = mlp.swiglu.backward(dh, gate, up, transposed=one_launch)
        del dh
        dys = [d_gate, d_up]
        dx, grads = mlp.gate_up.backward(x, dys, inner, saved.seed, trains=trains, wants_dx=wants_dx)
        if one_launch:
            gate_t, up_t, h_t = transposed
            _, transpose, products = mlp.support_gradient
            copies, (x_t, dy_t) = transpose(x, dy)
            outs = products.new()
            products([(gate_t, x_t), (up_t, x_t), (dy_t, h_t)], tokens, outs)
            del buffer, copies  # the kernels have read them
            mlp.gate_up.store_sampled(outs[:2], grads)
            mlp.down.store_sampled(outs[2:], grads_down)
        elif trains and mlp.gate_up.sparse:
            mlp.gate_up.add_sampled(x, dys, grads)
    return in_shape_of(dx, grad), [*grads, *grads_down]


# Persistent slots were written by the caller (`BatchedWriter.write_for_forward`).
_NO_WRITE = contextlib.nullcontext()


def _apply(function: Any, *args: Any) -> Any:
    """Call the C++ `apply` directly; `Function.apply` adds Python checks that only functorch needs."""
    if torch._C._are_functorch_transforms_active():
        return function.apply(*args)
    return super(torch.autograd.Function, function).apply(*args)


def _once_differentiable(backward: Any) -> Any:
    """torch's `once_differentiable`, without its cost where no graph of the backward is recorded."""
    checked = once_differentiable(backward)

    @functools.wraps(backward)
    def chosen(ctx: Any, *dys: Tensor) -> Any:
        return checked(ctx, *dys) if torch.is_grad_enabled() else backward(ctx, *dys)

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
