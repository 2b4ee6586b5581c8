"""The fast path: one or several linear layers of one input, and a whole gated MLP, as one autograd function each.

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
from .kernels import Product


class Layer(NamedTuple):
    """An adapted linear layer: its entry, made current by whoever calls, its bias (c,) and dropout probability."""

    entry: Entry
    bias: Tensor | None = None
    dropout: float = 0.0


_TENSORS = ("weight", "bias", "values", "L", "R")


class _Operands:
    """One layer inside forward or backward: the tensors of its entry, and which gradients are asked for."""

    def __init__(self, layer: Layer, tensors: Sequence[Tensor | None], needed: Sequence[bool]) -> None:
        self.entry = layer.entry
        self.weight, self.bias, self.values, self.L, self.R = tensors
        self.plan = layer.entry.plan
        self.threshold = kernels.dropout_threshold(layer.dropout)
        self.needs = dict(zip(_TENSORS, needed, strict=True))
        if layer.entry.packed is not None:
            self.left, self.right = layer.entry.packed


def linear_group(x: Tensor, layers: Sequence[Layer]) -> tuple[Tensor, ...]:
    """x·Ŵᵀ + bias of one to three layers that read the same x (..., b): (..., c) each, equal to `sparse_linear`.

    Layers with a low-rank part must drop out alike.
    """
    return _LinearGroup.apply(x, tuple(layers), _seed(x, layers), *_flat(layers))


def gated_mlp(x: Tensor, gate: Layer, up: Layer, down: Layer) -> Tensor:
    """down(silu(gate(x))·up(x)), keeping neither silu(gate) nor the product: (..., b) → (..., c)."""
    layers = (gate, up, down)
    return _GatedMLP.apply(x, layers, _seed(x, layers), *_flat(layers))


class _LinearGroup(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, layers: tuple[Layer, ...], seed: Tensor | None, *flat: Tensor | None
    ) -> tuple[Tensor, ...]:
        needed = ctx.needs_input_grad[3:]
        ctx.layers, ctx.needed, ctx.x_shape, ctx.x_dtype = layers, needed, x.shape, x.dtype
        ctx.compute = _compute_dtype(x, layers)
        rows = _rows(x, ctx.compute)
        with torch.autocast(x.device.type, enabled=False):
            outputs, inner = _forward(rows, _operands(layers, flat, needed), seed)
        keep = any(needed)
        ctx.save_for_backward(rows if keep else None, inner if keep else None, seed, *flat)
        return tuple(y.view(*x.shape[:-1], y.shape[-1]) for y in outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, inner, seed, *flat = ctx.saved_tensors
        layers = _operands(ctx.layers, flat, ctx.needed)
        dys = [_rows(dy, ctx.compute) for dy in grads]
        with torch.autocast(dys[0].device.type, enabled=False):
            for layer in layers:
                layer.entry.ensure()
            dx, found = _backward(x, dys, layers, inner, seed, wants_dx=ctx.needs_input_grad[0])
            _sampled(dys, x, layers, found)
        return _shaped(ctx, dx), None, None, *_results(found)


class _GatedMLP(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, layers: tuple[Layer, ...], seed: Tensor | None, *flat: Tensor | None) -> Tensor:
        needed = ctx.needs_input_grad[3:]
        ctx.layers, ctx.needed, ctx.x_shape, ctx.x_dtype = layers, needed, x.shape, x.dtype
        ctx.compute = _compute_dtype(x, layers)
        rows = _rows(x, ctx.compute)
        operands = _operands(layers, flat, needed)
        with torch.autocast(x.device.type, enabled=False):
            (gate, up), inner = _forward(rows, operands[:2], seed)
            (y,), inner_down = _forward(kernels.swiglu(gate, up), operands[2:], seed, stream=2)
        keep = any(needed)
        ctx.save_for_backward(rows if keep else None, gate, up, inner, inner_down, seed, *flat)
        return y.view(*x.shape[:-1], y.shape[-1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, gate, up, inner, inner_down, seed, *flat = ctx.saved_tensors
        layers = _operands(ctx.layers, flat, ctx.needed)
        first, down = layers[:2], layers[2]
        dy = _rows(grad, ctx.compute)
        sparse = any(layer.needs["values"] for layer in layers)
        once = dy.shape[0] <= kernels.TOKENS_AT_ONCE
        with torch.autocast(dy.device.type, enabled=False):
            for layer in layers:
                layer.entry.ensure()
            by_itself = down.needs["values"] and not once
            h = kernels.swiglu(gate, up) if down.needs["R"] or by_itself else None
            dh, found_down = _backward(h, [dy], [down], inner_down, seed, wants_dx=True, stream=2)
            grads = kernels.swiglu_backward(dh, gate, up, transposed=sparse and once)
            del dh
            if by_itself:
                _sampled([dy], h, [down], found_down)
            del h
            dys = [grads.gate, grads.up]
            dx, found = _backward(x, dys, first, inner, seed, wants_dx=ctx.needs_input_grad[0])
            found += found_down
            if sparse and once:
                _sampled_mlp(dy, x, grads, layers, found)
            elif sparse:
                _sampled(dys, x, first, found)
        return _shaped(ctx, dx), None, None, *_results(found)


def _sampled_mlp(
    dy: Tensor, x: Tensor, grads: kernels.SwigluGrads, layers: Sequence[_Operands], found: Sequence[dict[str, Tensor]]
) -> None:
    """dU of gate, up and down in one launch, from the transposed copies that `swiglu_backward` left."""
    x_t, dy_t = kernels.transpose(x, dy)
    outs = _new_values(layers, found)
    pairs = ((grads.gate_t, x_t), (grads.up_t, x_t), (dy_t, grads.product_t))
    kernels.sampled_products([Product(*pairs[at], layers[at].plan, out) for at, out in outs.items()])
    _finish_values(layers, found, outs)


def _forward(
    x: Tensor, layers: Sequence[_Operands], seed: Tensor | None, stream: int = 0
) -> tuple[list[Tensor], Tensor | None]:
    """Outputs (T, c) of all layers, and the thin products (T, k·r') of those with a low-rank part."""
    low_rank = [layer for layer in layers if layer.R is not None]
    inner, added = None, iter(())
    if low_rank:
        inner = kernels.narrow(x, [layer.right for layer in low_rank], low_rank[0].threshold, seed, stream)
        biases = [None if layer.bias is None else layer.bias.to(x.dtype) for layer in low_rank]
        added = iter(kernels.widen(inner, [layer.left for layer in low_rank], biases))
    outputs = []
    for layer in layers:
        weight = layer.weight.to(x.dtype)
        if layer.R is not None:
            outputs.append(next(added).addmm_(x, weight.t()))
        else:
            outputs.append(F.linear(x, weight, None if layer.bias is None else layer.bias.to(x.dtype)))
    return outputs, inner


def _backward(
    x: Tensor | None,
    dys: Sequence[Tensor],
    layers: Sequence[_Operands],
    inner: Tensor | None,
    seed: Tensor | None,
    *,
    wants_dx: bool,
    stream: int = 0,
) -> tuple[Tensor | None, list[dict[str, Tensor]]]:
    """dx (T, b), and per layer the gradients of its bias, L and R."""
    found: list[dict[str, Tensor]] = [{} for _ in layers]
    dx = None
    low_rank = [at for at, layer in enumerate(layers) if layer.R is not None]
    if low_rank:
        parts = [layers[at] for at in low_rank]
        d_inner = kernels.narrow_each([dys[at] for at in low_rank], [part.left for part in parts])
        if inner is not None and any(part.needs["L"] for part in parts):
            sums = kernels.outer_each([dys[at] for at in low_rank], inner)
            ranks, scales = [part.R.shape[0] for part in parts], [part.entry.scaling for part in parts]
            grads = kernels.reduce(sums, ranks, scales, parts[0].L.dtype, transposed=True)
            for at, grad in zip(low_rank, grads, strict=True):
                found[at]["L"] = grad
        if x is not None or wants_dx:
            # Where nothing is trained no input was kept; the mask needs its shape alone.
            rows = d_inner.new_zeros((d_inner.shape[0], layers[0].weight.shape[1])) if x is None else x
            rights = [part.right for part in parts]
            sums, dx = kernels.outer(rows, d_inner, rights, parts[0].threshold, seed, stream, through=wants_dx)
            if any(part.needs["R"] for part in parts):
                rank = rights[0].shape[0]
                slices = [sums[:, rank * at : rank * (at + 1)] for at in range(len(parts))]
                ranks = [part.R.shape[0] for part in parts]
                grads = kernels.reduce(slices, ranks, [1.0] * len(parts), parts[0].R.dtype, transposed=False)
                for at, grad in zip(low_rank, grads, strict=True):
                    found[at]["R"] = grad
    for dy, layer, result in zip(dys, layers, found, strict=True):
        if wants_dx:
            weight = layer.weight.to(dy.dtype)
            dx = torch.mm(dy, weight) if dx is None else dx.addmm_(dy, weight)
        if layer.needs["bias"] and layer.bias is not None:
            result["bias"] = dy.sum(0, dtype=torch.float32).to(layer.bias.dtype)
    return dx, found


def _sampled(dys: Sequence[Tensor], x: Tensor, layers: Sequence[_Operands], found: Sequence[dict[str, Tensor]]) -> None:
    """dU of layers that share x (T, b); long inputs a piece at a time."""
    chosen = [at for at, layer in enumerate(layers) if layer.needs["values"]]
    if not chosen:
        return
    outs = _new_values(layers, found)
    size = kernels.TOKENS_AT_ONCE
    for begin in range(0, x.shape[0], size):
        x_t, *dy_ts = kernels.transpose(x[begin : begin + size], *(dys[at][begin : begin + size] for at in chosen))
        products = [Product(dy_t, x_t, layers[at].plan, outs[at]) for at, dy_t in zip(chosen, dy_ts, strict=True)]
        kernels.sampled_products(products, add=begin > 0)
    _finish_values(layers, found, outs)


def _new_values(layers: Sequence[_Operands], found: Sequence[dict[str, Tensor]]) -> dict[int, Tensor]:
    return {
        at: torch.empty(layer.values.shape, dtype=torch.float32, device=layer.values.device)
        for at, layer in enumerate(layers)
        if layer.needs["values"]
    }


def _finish_values(layers: Sequence[_Operands], found: Sequence[dict[str, Tensor]], outs: dict[int, Tensor]) -> None:
    for at, out in outs.items():
        found[at]["values"] = out.to(layers[at].values.dtype)


def _flat(layers: Sequence[Layer]) -> list[Tensor | None]:
    return [
        tensor
        for layer in layers
        for tensor in (layer.entry.weight, layer.bias, layer.entry.values, layer.entry.L, layer.entry.R)
    ]


def _operands(layers: Sequence[Layer], flat: Sequence[Tensor | None], needed: Sequence[bool]) -> list[_Operands]:
    size = len(_TENSORS)
    return [
        _Operands(layer, flat[at : at + size], needed[at : at + size])
        for layer, at in zip(layers, range(0, len(flat), size), strict=True)
    ]


def _results(found: Sequence[dict[str, Tensor]]) -> list[Tensor | None]:
    return [result.get(name) for result in found for name in _TENSORS]


def _seed(x: Tensor, layers: Sequence[Layer]) -> Tensor | None:
    """Where the masks of this call start: drawn on the device, so that nothing waits for it."""
    if not any(layer.dropout and layer.entry.R is not None for layer in layers):
        return None
    return torch.randint(2**62, (1,), device=x.device)


def _compute_dtype(x: Tensor, layers: Sequence[Layer]) -> torch.dtype:
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else layers[0].entry.weight.dtype


def _rows(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.reshape(-1, x.shape[-1]).to(dtype).contiguous()


def _shaped(ctx: Any, dx: Tensor | None) -> Tensor | None:
    return None if dx is None else dx.view(ctx.x_shape).to(ctx.x_dtype)
