"""Plain PyTorch, any device: what every faster path is tested against.

The sparse part is applied as a weight, rounded once: W + M⊙U in the dtype of W, exactly what a merge writes. The
low-rank part is applied as LoRA applies it, as a second product on the dropped-out input.

Between forward and backward only the layer's input is kept (and references to parameters): the effective weight is
built again in backward, and the dropout mask is drawn again from the saved generator state.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

# PyTorch's own, as it is now: DeepSpeed's zero.Init puts an autograd function in its place, of which each call costs
# the host more than a small product, and which within these functions is for nothing.
linear = F.linear


class Sparse(NamedTuple):
    """One sparse part M⊙U: `values` (s,) are U on the support, `indices` (s,) its sorted flat indices."""

    values: Tensor
    indices: Tensor


class LowRank(NamedTuple):
    """One low-rank part γ·L·R: L (c, r), R (r, b), γ, and the dropout probability of its input."""

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
    """`effective_weight` with one part, written into `weight` itself, which is contiguous."""
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
        sparse, low_rank: the parts of all active adapters; U, L, R usually fp32 whatever the dtype of W.

    Returns:
        (..., c), in the dtype a plain linear layer would give (that of W, or autocast's).

    Raises:
        ValueError: W wants a gradient; it would get none and not train, without a word.
    """
    check_frozen(weight)
    tensors = [tensor for part in sparse for tensor in part] + [tensor for part in low_rank for tensor in part[:2]]
    settings = [(part.scaling, part.dropout) for part in low_rank]
    return _applied(x, weight, bias, len(sparse), settings, *tensors)


# The compiler breaks its graph here: traced by torch 2.11, this function's backward is given zeros for dy, and U, L and
# R would not train, without a word.
@torch.compiler.disable
def _applied(*arguments: Any) -> Tensor:
    return _SparseLinear.apply(*arguments)


def check_frozen(weight: Tensor) -> None:
    """Raise ValueError where W wants a gradient: it would get none."""
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
        # Inside forward autocast is still on and in backward it is off: both cast explicitly, to the same dtype.
        ctx.compute = autocast_dtype(x.device.type)
        ctx.sparse_parts, ctx.settings = sparse_parts, settings
        with torch.autocast(x.device.type, enabled=False):
            effective = effective_weight(weight, sparse)
            y = linear(cast(x, ctx.compute), cast(effective, ctx.compute), cast(bias, ctx.compute))
            del effective
            dtype = y.dtype
            y, ctx.generator_states = add_low_rank(y, x, low_rank, ctx.compute)
        # A layer whose own parts need no gradient passes dy·Ŵ on and needs no input for that.
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
                # The reference takes the whole gradient of W and reads it on the support; it lives only here.
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
    """y (..., c) + Σ γ·dropout(x)·Rᵀ·Lᵀ for x (..., b), and the generator's state before each dropout.

    The products are computed in `compute`, or in the dtype of R and L; autocast is off where this is called.
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
        x: its input; only read where a gradient of L or R is needed.
        dy_rows: (T, c).
        dx: (..., b), what the input's gradient is added to, or None if there is to be none.
        needs: for L and R of every part in turn, whether its gradient is wanted.

    Returns:
        dx with the low-rank parts, and dL and dR of every part in turn.
    """
    grads: list[Tensor | None] = []
    for part, ((L, R, scaling, dropout), state) in enumerate(zip(low_rank, states, strict=True)):
        needs_L, needs_R = needs[2 * part : 2 * part + 2]
        scaled = cast(dy_rows.to(L.dtype) * scaling, compute)
        dinner = scaled @ cast(L, compute)
        dL = dR = None
        if needs_L or needs_R:
            assert x is not None
            dropped = cast(rows_of(_dropout_again(x.to(R.dtype).contiguous(), dropout, state)), compute)
            inner = dropped @ cast(R, compute).t()
            dL = outer_sum(scaled, inner).to(L.dtype) if needs_L else None
            dR = outer_sum(dinner, dropped).to(R.dtype) if needs_R else None
        grads += [dL, dR]
        if dx is not None:
            through = (dinner @ cast(R, compute)).view(dx.shape)
            if dropout:
                ones = torch.ones(dx.shape, dtype=R.dtype, device=dx.device)
                through = through * _dropout_again(ones, dropout, state)
            dx = dx + through
    return dx, grads


def split_parts(
    sparse_parts: int, settings: list[tuple[float, float]], tensors: Sequence[Tensor]
) -> tuple[list[Sparse], list[LowRank]]:
    cut = 2 * sparse_parts
    sparse = [Sparse(*tensors[at : at + 2]) for at in range(0, cut, 2)]
    low_rank = [
        LowRank(tensors[cut + 2 * part], tensors[cut + 2 * part + 1], scaling, dropout)
        for part, (scaling, dropout) in enumerate(settings)
    ]
    return sparse, low_rank


def _sum_sparse(weight: Tensor, sparse: Sequence[Sparse]) -> Tensor:
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
    """aᵀ·b of (tokens, m) and (tokens, n): (m, n), in fp32 for 16-bit operands, so that no gradient is rounded."""
    if a.dtype in (torch.float16, torch.bfloat16):
        if a.is_cuda:
            return torch.mm(a.t(), b, out_dtype=torch.float32)
        return a.t().float() @ b.float()
    return a.t() @ b


def rows_of(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def cast(tensor: Any, dtype: torch.dtype | None) -> Any:
    """tensor in dtype; None, and a tensor without a dtype to be in, as they are."""
    return tensor if dtype is None or tensor is None else tensor.to(dtype)


def autocast_dtype(device_type: str) -> torch.dtype | None:
    """The dtype that autocast computes in on this kind of device, or None where it is off."""
    return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None


def _generator(device: torch.device) -> tuple[Any, tuple[torch.device, ...]]:
    """The module that holds the device's default generator, and the argument that names the device to it."""
    return (torch, ()) if device.type == "cpu" else (torch.get_device_module(device), (device,))


def _generator_state(device: torch.device) -> Tensor:
    module, where = _generator(device)
    return module.get_rng_state(*where)


def _dropout_again(x: Tensor, dropout: float, state: Tensor | None) -> Tensor:
    """The dropout that was drawn at `state`, whatever was drawn since; the mask depends on the shape, not on x."""
    if state is None:
        return x
    module, where = _generator(x.device)
    now = module.get_rng_state(*where)
    module.set_rng_state(state, *where)
    try:
        return F.dropout(x, dropout)
    finally:
        module.set_rng_state(now, *where)
