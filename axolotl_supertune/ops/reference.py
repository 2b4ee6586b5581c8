"""The adapted linear layer in plain PyTorch on any device; the faster paths are tested against it.

The sparse part changes the weight: W + M⊙U, summed in fp32 and rounded once to the dtype of W, as a merge does. The
low-rank part is a second product on the input after dropout, as in LoRA.

Forward saves only the input and references to the parameters. Backward forms W + M⊙U again, draws the dropout mask
again from the saved generator state, and takes dU from the dense gradient dyᵀ·x, as the paper does.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

# A reference to PyTorch's function: DeepSpeed's zero.Init replaces F.linear by an autograd function that costs the host
# more than a small product, and has no use inside the autograd functions here.
linear = F.linear


class Sparse(NamedTuple):
    """A sparse part M⊙U: `values` (s,) are U on the support, `indices` (s,) the support: sorted flat indices."""

    values: Tensor
    indices: Tensor


class LowRank(NamedTuple):
    """A low-rank part γ·L·R: L (c, r), R (r, b), γ as `scaling`, and the dropout probability of its input."""

    L: Tensor
    R: Tensor
    scaling: float
    dropout: float = 0.0


def effective_weight(weight: Tensor, sparse: Sequence[Sparse]) -> Tensor:
    """W + Σ M⊙U, summed in fp32 (or wider) and rounded once to the dtype of W.

    Args:
        weight: (c, b).
        sparse: parts to add, in order; their supports may overlap.

    Returns:
        (c, b), a new tensor, or `weight` itself if there is nothing to add.
    """
    if not sparse:
        return weight
    if len(sparse) == 1:
        return add_sparse_(weight.detach().clone(memory_format=torch.contiguous_format), sparse[0])
    return _sum_sparse(weight, sparse).to(weight.dtype)


def add_sparse_(weight: Tensor, part: Sparse) -> Tensor:
    """`effective_weight` with one part, in place; `weight` is contiguous."""
    flat, (values, indices) = weight.view(-1), part
    flat[indices] = (flat[indices].to(_wide(weight, values)) + values.detach()).to(weight.dtype)
    return weight


def merged_weight(weight: Tensor, sparse: Sequence[Sparse], low_rank: Sequence[LowRank]) -> Tensor:
    """Ŵ = W + Σ M⊙U + Σ γ·L·R, summed in fp32 (or wider) and rounded once to the dtype of W."""
    if not low_rank:
        return effective_weight(weight, sparse)
    total = _sum_sparse(weight, sparse)
    for L, R, scaling, _ in low_rank:
        total += scaling * (L.detach().to(total.dtype) @ R.detach().to(total.dtype))
    return total.to(weight.dtype)


def sparse_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    sparse: Sequence[Sparse] = (),
    low_rank: Sequence[LowRank] = (),
) -> Tensor:
    """x·Ŵᵀ + bias with Ŵ = W + Σ M⊙U + Σ γ·L·R (eq. supra_update).

    Args:
        x: (..., b).
        weight: (c, b), frozen: it gets no gradient.
        bias: (c,) or None.
        sparse, low_rank: the parts of all active adapters; U, L and R are usually fp32, whatever the dtype of W.

    Returns:
        (..., c), in the dtype of a plain linear layer: that of W, or autocast's.

    Raises:
        ValueError: W requires a gradient; it would get none and silently not train.
    """
    check_frozen(weight)
    tensors = [tensor for part in sparse for tensor in part] + [tensor for part in low_rank for tensor in part[:2]]
    settings = [(part.scaling, part.dropout) for part in low_rank]
    return _apply(x, weight, bias, len(sparse), settings, *tensors)


# A graph break for the compiler: traced by torch 2.11, this function's backward gets zeros for dy, and U, L and R
# silently do not train.
@torch.compiler.disable
def _apply(*arguments: Any) -> Tensor:
    return _SparseLinear.apply(*arguments)


def check_frozen(weight: Tensor) -> None:
    """Raise ValueError if W requires a gradient, which it would not get."""
    if weight.requires_grad and torch.is_grad_enabled():
        raise ValueError("the weight of an adapted layer is trainable: freeze it, only U, L and R are trained here.")


class _SparseLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        sparse_parts: int,
        settings: list[tuple[float, float]],
        *tensors: Tensor,
    ) -> Tensor:
        sparse, low_rank = split_parts(sparse_parts, settings, tensors)
        # Autocast is on in forward and off in backward: both cast explicitly, to the same dtype.
        ctx.compute = autocast_dtype(x.device.type)
        ctx.sparse_parts, ctx.settings = sparse_parts, settings
        with torch.autocast(x.device.type, enabled=False):
            effective = effective_weight(weight, sparse)
            y = linear(cast(x, ctx.compute), cast(effective, ctx.compute), cast(bias, ctx.compute))
            del effective
            dtype = y.dtype
            y, ctx.generator_states = add_low_rank(y, x, low_rank, ctx.compute)
        # dx = dy·Ŵ needs no input: it is saved only if a part of this layer needs a gradient.
        keep_x = any(ctx.needs_input_grad[5:])
        ctx.save_for_backward(x if keep_x else None, weight, *tensors)
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.x_dtype = x.dtype
        return y.to(dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, *tensors = ctx.saved_tensors
        sparse, low_rank = split_parts(ctx.sparse_parts, ctx.settings, tensors)
        needs_x, _, needs_bias, _, _, *needs = ctx.needs_input_grad
        device, compute = dy.device, ctx.compute
        with torch.autocast(device.type, enabled=False):
            dy_rows = rows_of(dy)
            dx = None
            if needs_x:
                dx = cast(dy, compute) @ cast(effective_weight(weight, sparse), compute)
            grads: list[Tensor | None] = [None] * len(tensors)

            if any(needs[: 2 * len(sparse) : 2]):
                # The dense gradient of W, read on the support and freed at once.
                full = outer_sum(cast(dy_rows, compute), cast(rows_of(x), compute))
                for part, (values, indices) in enumerate(sparse):
                    if needs[2 * part]:
                        grads[2 * part] = full.view(-1)[indices].to(values.dtype)
                del full

            cut = 2 * len(sparse)
            dx, grads[cut:] = low_rank_gradients(
                x, dy_rows, dx, low_rank, ctx.generator_states, needs[cut:], ctx.compute
            )
            dbias = dy_rows.sum(0).to(ctx.bias_dtype) if needs_bias else None
        return None if dx is None else dx.to(ctx.x_dtype), None, dbias, None, None, *grads


def add_low_rank(
    y: Tensor, x: Tensor, low_rank: Sequence[LowRank], compute: torch.dtype | None
) -> tuple[Tensor, list[Tensor | None]]:
    """y (..., c) + Σ γ·dropout(x)·Rᵀ·Lᵀ for x (..., b), and the state of the random generator before each dropout.

    Products are in `compute`, or in the dtype of R and L if that is None. The caller has turned autocast off.
    """
    states = []
    for L, R, scaling, dropout in low_rank:
        states.append(_generator_state(x.device) if dropout else None)
        dropped = F.dropout(x.to(R.dtype).contiguous(), dropout)
        inner = linear(cast(dropped, compute), cast(R, compute))
        y = y + linear(inner, cast(L, compute)) * scaling
    return y, states


def low_rank_gradients(
    x: Tensor | None,
    dy_rows: Tensor,
    dx: Tensor | None,
    low_rank: Sequence[LowRank],
    states: Sequence[Tensor | None],
    needs: Sequence[bool],
    compute: torch.dtype | None,
) -> tuple[Tensor | None, list[Tensor | None]]:
    """Backward of `add_low_rank`.

    Args:
        x: its input (..., b); may be None if no gradient of L or R is needed.
        dy_rows: (T, c).
        dx: (..., b), the gradient of x so far; None if it is not needed.
        states: the generator states from forward.
        needs: per part, whether the gradients of L and of R are needed: [L_0, R_0, L_1, …].
        compute: as in forward.

    Returns:
        dx plus the low-rank parts', and [dL_0, dR_0, dL_1, …].
    """
    grads: list[Tensor | None] = []
    for part, ((L, R, scaling, dropout), state) in enumerate(zip(low_rank, states, strict=True)):
        needs_L, needs_R = needs[2 * part : 2 * part + 2]
        scaled = cast(dy_rows.to(L.dtype) * scaling, compute)
        dinner = scaled @ cast(L, compute)
        mask = _dropout_mask(x if dx is None else dx, R.dtype, dropout, state)
        dL = dR = None
        if needs_L or needs_R:
            assert x is not None
            dropped = rows_of(x.to(R.dtype).contiguous())
            if mask is not None:
                dropped = dropped * rows_of(mask)
            dropped = cast(dropped, compute)
            inner = dropped @ cast(R, compute).t()
            dL = outer_sum(scaled, inner).to(L.dtype) if needs_L else None
            dR = outer_sum(dinner, dropped).to(R.dtype) if needs_R else None
        grads += [dL, dR]
        if dx is not None:
            through = (dinner @ cast(R, compute)).view(dx.shape)
            dx = dx + (through if mask is None else through * mask)
    return dx, grads


def split_parts(
    sparse_parts: int, settings: list[tuple[float, float]], tensors: Sequence[Tensor]
) -> tuple[list[Sparse], list[LowRank]]:
    """The parts from the flat tensors that an autograd function takes, and (scaling, dropout) of the low-rank ones."""
    cut = 2 * sparse_parts
    sparse = [Sparse(*tensors[at : at + 2]) for at in range(0, cut, 2)]
    low_rank = [
        LowRank(tensors[cut + 2 * part], tensors[cut + 2 * part + 1], scaling, dropout)
        for part, (scaling, dropout) in enumerate(settings)
    ]
    return sparse, low_rank


def _sum_sparse(weight: Tensor, sparse: Sequence[Sparse]) -> Tensor:
    """W + Σ M⊙U (c, b) in fp32 (or fp64), not rounded."""
    wide = _wide(weight, *(part.values for part in sparse))
    total = weight.detach().to(wide, copy=True, memory_format=torch.contiguous_format)
    flat = total.view(-1)
    for values, indices in sparse:
        flat[indices] += values.detach().to(total.dtype)
    return total


def _wide(*tensors: Tensor) -> torch.dtype:
    """fp64 if any operand is, else fp32."""
    return torch.float64 if any(tensor.dtype == torch.float64 for tensor in tensors) else torch.float32


def outer_sum(a: Tensor, b: Tensor) -> Tensor:
    """aᵀ·b (m, n) of a (T, m) and b (T, n); in fp32 for 16-bit operands, so that gradients are not rounded."""
    if a.dtype in (torch.float16, torch.bfloat16):
        if a.is_cuda:
            return torch.mm(a.t(), b, out_dtype=torch.float32)
        return a.t().float() @ b.float()
    return a.t() @ b


def rows_of(x: Tensor) -> Tensor:
    """(..., n) → (T, n)."""
    return x.reshape(-1, x.shape[-1])


def cast(tensor: Any, dtype: torch.dtype | None) -> Any:
    """The tensor in this dtype; unchanged if either is None."""
    return tensor if dtype is None or tensor is None else tensor.to(dtype)


def autocast_dtype(device_type: str) -> torch.dtype | None:
    """Autocast's dtype on this type of device, or None where it is off."""
    return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None


def _generator(device: torch.device) -> tuple[Any, tuple[torch.device, ...]]:
    """The torch module with the device's default random generator, and the device argument of its functions."""
    return (torch, ()) if device.type == "cpu" else (torch.get_device_module(device), (device,))


def _generator_state(device: torch.device) -> Tensor:
    module, device_argument = _generator(device)
    return module.get_rng_state(*device_argument)


def _dropout_mask(like: Tensor | None, dtype: torch.dtype, dropout: float, state: Tensor | None) -> Tensor | None:
    """What the dropout at `state` multiplied by: 0 or 1/(1 - p). None without dropout. Later states are preserved.

    Args:
        like: has the shape of the dropout's input, on which the mask depends, and its device.
        dtype, dropout: of the dropout.
        state: the generator's state before it.
    """
    if state is None or like is None:
        return None
    module, device_argument = _generator(like.device)
    current = module.get_rng_state(*device_argument)
    module.set_rng_state(state, *device_argument)
    try:
        return F.dropout(torch.ones(like.shape, dtype=dtype, device=like.device), dropout)
    finally:
        module.set_rng_state(current, *device_argument)
