"""A custom operator for torch.compile: one adapted layer, with a known output shape and a registered gradient.

The compiler does not trace into it and does not break its graph; the layer is computed by the same kernels as in eager
mode. Inputs are the tensors that autograd must know, x and U, L, R, and a number that names the layer.
"""

import itertools
import weakref
from typing import Any

import torch
from torch import Tensor

from ..ops import compute_dtype

# Operators take only tensors and numbers: a layer is passed as its number.
_layers: "weakref.WeakValueDictionary[int, Any]" = weakref.WeakValueDictionary()
_numbers = itertools.count()


def new_operator_number(layer: Any) -> int:
    """A new number under which the operators find this layer, as long as it lives."""
    number = next(_numbers)
    _layers[number] = layer
    return number


@torch.library.custom_op("axolotl_supertune::adapted_linear", mutates_args=())
def adapted_linear(x: Tensor, trained: list[Tensor], number: int, out_features: int) -> list[Tensor]:
    """Forward of an adapted layer.

    Args:
        x: (..., b).
        trained: U, L and R of the active adapter, as `SupraLinear` passes them; only autograd reads them.
        number: of the layer, see `new_operator_number`.
        out_features: c.

    Returns:
        y (..., c); dropout(x)·Rᵀ (T, r'), empty without a low-rank part; int64 [seed of the masks, id of the group], on
        the CPU.

    Raises:
        RuntimeError: the kernels do not support the layer after all.
    """
    from ..ops.fused import group_forward

    layer = _layers[number]
    group = layer.own_group(x, whole_input=True)
    if group is None:
        raise RuntimeError(f"{layer.layer_name}: the kernels cannot compute this layer under torch.compile.")
    (y,), saved = group_forward(x, group)
    inner = saved.tensors[1]
    # Backward needs this group even if other forwards come between; the layer keeps it alive.
    layer.compiled_groups[id(group)] = group
    return [y, x.new_empty(0) if inner is None else inner, torch.tensor([saved.seed, id(group)])]


@adapted_linear.register_fake
def _(x: Tensor, trained: list[Tensor], number: int, out_features: int) -> list[Tensor]:
    layer = _layers[number]
    dtype = compute_dtype(x, layer.base_layer.weight)
    width = layer.saved_low_rank_width()
    inner = x.new_empty((x.numel() // x.shape[-1], width), dtype=dtype) if width else x.new_empty(0)
    seed = torch.empty(2, dtype=torch.int64, device="cpu")
    return [x.new_empty((*x.shape[:-1], out_features), dtype=dtype), inner, seed]


@torch.library.custom_op("axolotl_supertune::adapted_linear_backward", mutates_args=())
def adapted_linear_backward(
    x: Tensor, dy: Tensor, inner: Tensor, seed: Tensor, trained: list[Tensor], number: int, wants_dx: bool
) -> list[Tensor]:
    """Backward of `adapted_linear`.

    Returns:
        dx (..., b), empty unless `wants_dx`, and the gradients of `trained`.

    Raises:
        RuntimeError: the adapter was deleted since the forward.
    """
    from ..ops.fused import Saved, group_backward

    start, group_id = seed.tolist()
    saved = Saved((x, inner if inner.numel() else None), start, [])
    layer = _layers[number]
    group = layer.compiled_groups.get(group_id)
    if group is None:
        raise RuntimeError(
            f"{layer.layer_name}: the adapter was deleted between a compiled forward and its backward: call "
            "backward() before delete_adapter()."
        )
    dx, grads = group_backward((dy,), saved, group, trains=bool(trained), wants_dx=wants_dx)
    return [x.new_empty(0) if dx is None else dx.to(x.dtype), *(grad for grad in grads if grad is not None)]


@adapted_linear_backward.register_fake
def _(
    x: Tensor, dy: Tensor, inner: Tensor, seed: Tensor, trained: list[Tensor], number: int, wants_dx: bool
) -> list[Tensor]:
    return [x.new_empty(x.shape if wants_dx else 0), *(torch.empty_like(tensor) for tensor in trained)]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    x, trained, ctx.number, _ = inputs
    _, inner, seed = output
    ctx.save_for_backward(x, inner, seed, *trained)


def _backward(ctx: Any, grads: list[Tensor]) -> tuple[Any, ...]:
    x, inner, seed, *trained = ctx.saved_tensors
    wants_dx = ctx.needs_input_grad[0]
    dx, *gradients = adapted_linear_backward(x, grads[0], inner, seed, trained, ctx.number, wants_dx)
    return dx if wants_dx else None, gradients, None, None


adapted_linear.register_autograd(_backward, setup_context=_setup_context)
