"""Computing kernels of the fast path: one class per Triton function of `programs`, which binds, allocates and launches.

| class | computes | Triton function |
|---|---|---|
| `Transpose` | xᵀ, padded to whole blocks of tokens | `transpose` |
| `SampledProducts` | dU: entries of dyᵀ·x on supports | `sampled_product` |
| `Narrow`, `NarrowEach` | products down to rank r: dropout(x)·Rᵀ and γ·dy·L | `narrow`, `narrow_each` |
| `Widen` | products up from rank r | `widen` |
| `ThinGradients` | dL, dR and the low-rank part of dx | `outer`, `outer_each`, `reduce` |
| `Swiglu` | silu(gate)·up and its gradients | `swiglu`, `swiglu_backward` |

Shapes: T tokens, b input and c output features, s entries of a support, r rank, r' the rank padded for the matrix
units. A packed factor is a copy of L or R, transposed to (r', n) and padded with zeros (`write_kernels`). Sums are fp32
and there are no atomics: equal inputs give equal bits. One launch serves up to three layers that share an input. Tile
sizes are fixed, from measurements on an H200; nothing is autotuned. TRITON_INTERPRET=1 runs the kernels on CPU tensors.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from ..method.sizes import ENTRIES_PER_CHUNK
from . import programs
from .launcher import Call, address, split_addresses
from .sampling_plan import SamplingPlan

# Transposed operands are padded to a multiple of this many tokens, with zeros.
PAD = 64
# Tokens that one program of the sampled product reads at once.
_TOKENS = 256
# Values of one 16-bit random number. A Philox call gives eight, for eight neighbouring features of a token.
_LEVELS = 65536
# Layers that one launch serves.
MAX_PARTS = 3


def dropout_threshold(probability: float) -> int:
    """How many of 65536 equally likely draws drop a feature; within 1/131072 of the probability."""
    return min(round(probability * _LEVELS), _LEVELS - 1)


class Transpose:
    """Transposed copies of up to four matrices in one launch: (T, n_k) → (n_k, T'), T' being T rounded up to `PAD`.

    Args:
        widths: n_k.
        dtype, device: of the matrices, which are contiguous.
    """

    def __init__(self, widths: Sequence[int], dtype: torch.dtype, device: torch.device) -> None:
        self._widths = list(widths)
        ends = _repeated_last(_block_ends(widths, 64), 4)
        self._blocks = ends[-1]
        self._fill = 4 - len(widths)
        bound = (*_repeated_last(widths, 4), *ends[:3])
        self._call = Call(programs.transpose, (dtype,) * 8, bound, (len(widths), 64, 64), device)

    def __call__(self, *xs: Tensor) -> tuple[Tensor, list[Any]]:
        """A buffer with the copies, and the address of each. The caller keeps the buffer while they are read."""
        tokens = xs[0].numel() // self._widths[0]
        blocks = -(-tokens // PAD)
        sizes = [width * blocks * PAD for width in self._widths]
        buffer = xs[0].new_empty(sum(sizes))
        outs = split_addresses(buffer, sizes)
        operands = [address(x) for x in xs]
        fill = self._fill
        self._call(
            (blocks, self._blocks, 1), *operands, *operands[-1:] * fill, *outs, *outs[-1:] * fill, tokens, blocks
        )
        return buffer, outs


class SampledProducts:
    """dU = M⊙(dyᵀ·x) of one to three layers: Σ_t dy[t, i]·x[t, j] for every entry (i, j) of a support, never dense.

    Args:
        plans: of the supports.
        dtype: of the operands; sums and results are fp32.
    """

    def __init__(self, plans: Sequence[SamplingPlan], dtype: torch.dtype) -> None:
        self.plans = list(plans)
        device = plans[0].indices.device
        self._results = [_template((plan.indices.numel(),), torch.float32, device) for plan in plans]
        ends = _repeated_last(list(accumulate(plan.owner.numel() for plan in plans)), MAX_PARTS)
        self._chunks = ends[-1]
        self._fill = MAX_PARTS - len(plans)
        tables: list[Any] = []
        for plan in _repeated_last(self.plans, MAX_PARTS):
            order = plan.owner if plan.order is None else plan.order
            tables += (plan.indices, order, plan.owner, plan.start, plan.shape[1], int(plan.by_row))
        dtypes = (dtype, dtype, torch.float32) * MAX_PARTS
        bound = (*tables, *ends[:2])
        self._calls = [
            Call(
                programs.sampled_product,
                dtypes,
                bound,
                (len(plans), add, ENTRIES_PER_CHUNK, _TOKENS),
                device,
                num_warps=1,
            )
            for add in (False, True)
        ]

    def new(self) -> list[Tensor]:
        """Uninitialised results: (s_k,) fp32 per layer."""
        return [torch.empty_like(result, memory_format=torch.contiguous_format) for result in self._results]

    def __call__(
        self, pairs: Sequence[tuple[Any, Any]], tokens: int, outs: Sequence[Tensor], *, add: bool = False
    ) -> None:
        """Write the products to `outs`, or add them.

        Args:
            pairs: per layer the addresses of dyᵀ (c, T') and xᵀ (b, T'), as `Transpose` returns them.
            tokens: T of the inputs that were transposed.
            outs: (s_k,) fp32 each.
            add: add to `outs`.
        """
        operands: list[Any] = []
        for (dy_t, x_t), plan, out in zip(pairs, self.plans, outs, strict=True):
            operands += (dy_t, x_t, address(out)) if plan.by_row else (x_t, dy_t, address(out))
        operands += operands[-3:] * self._fill
        self._calls[add]((self._chunks, 1, 1), *operands, -(-tokens // PAD))


class Narrow:
    """dropout(x)·F_kᵀ with one to three packed factors R (r', b), in one pass over x.

    Args:
        factors: the packed factors.
        threshold: of the dropout, see `dropout_threshold`; 0 for none.
        stream: number of the first dropout mask; the k-th layer that has a low-rank part uses mask stream + k.
    """

    def __init__(self, factors: Sequence[Tensor], threshold: int, stream: int) -> None:
        self._rank, width = factors[0].shape
        self._columns = len(factors) * self._rank
        bound = (*_repeated_last(factors, MAX_PARTS), width, threshold, stream)
        constants = (len(factors), threshold > 0, self._rank, 16, 128)
        stages = 4 if factors[0].element_size() == 2 else 1
        dtypes = (factors[0].dtype,) * 2
        self._width = width
        self._call = Call(programs.narrow, dtypes, bound, constants, factors[0].device, num_stages=stages)

    def __call__(self, x: Tensor, seed: int) -> Tensor:
        """x (..., b) → (T, k·r') in its dtype, for k factors; `seed` is that of the masks."""
        tokens = x.numel() // self._width
        out = x.new_empty((tokens, self._columns))
        self._call((-(-tokens // 16), 1, 1), address(x), address(out), tokens, seed)
        return out


class NarrowEach:
    """dy_k·F_kᵀ of one to three dy_k (T, c_k) with one packed factor γL (r', c_k) each, in one launch."""

    def __init__(self, factors: Sequence[Tensor]) -> None:
        self._parts, self._rank = len(factors), factors[0].shape[0]
        self._fill = MAX_PARTS - self._parts
        bound = (
            *_repeated_last(factors, MAX_PARTS),
            *_repeated_last([factor.shape[1] for factor in factors], MAX_PARTS),
        )
        constants = (self._parts, self._rank, 32, 128)
        stages = 4 if factors[0].element_size() == 2 else 1
        dtypes = (factors[0].dtype,) * 4
        self._width = factors[0].shape[1]
        self._call = Call(programs.narrow_each, dtypes, bound, constants, factors[0].device, num_stages=stages)

    def __call__(self, dys: Sequence[Tensor]) -> Tensor:
        """dy_k (..., c_k) → (T, k·r'), for k of them."""
        tokens = dys[0].numel() // self._width
        out = dys[0].new_empty((tokens, self._parts * self._rank))
        operands = [address(dy) for dy in dys]
        operands += operands[-1:] * self._fill
        self._call((-(-tokens // 32), self._parts, 1), *operands, address(out), tokens)
        return out


class Widen:
    """inner_k·F_k with one to three packed factors γL (r', c_k), in one launch: (T, k·r') → (T, c_k) each."""

    def __init__(self, factors: Sequence[Tensor]) -> None:
        self._widths = [factor.shape[1] for factor in factors]
        self._fill = MAX_PARTS - len(factors)
        ends = _repeated_last(_block_ends(self._widths, 128), MAX_PARTS)
        self._blocks = ends[-1]
        bound = (*_repeated_last(factors, MAX_PARTS), *_repeated_last(self._widths, MAX_PARTS), *ends[:2])
        constants = (len(factors), factors[0].shape[0], 64, 128)
        self._call = Call(programs.widen, (factors[0].dtype,) * 4, bound, constants, factors[0].device)

    def __call__(self, inner: Tensor, lead: Sequence[int]) -> list[Tensor]:
        """inner (T, k·r') → (*lead, c_k) each; the product of `lead` is T."""
        tokens = inner.shape[0]
        outs = [inner.new_empty((*lead, width)) for width in self._widths]
        operands = [address(out) for out in outs]
        operands += operands[-1:] * self._fill
        self._call((self._blocks, -(-tokens // 64), 1), address(inner), *operands, tokens)
        return outs


class ThinGradients:
    """dL and dR of one to three layers that share x, and the gradient of x through their low-rank parts.

    dL_k = γ·dy_kᵀ·inner_k and dR_k = d_inner_kᵀ·dropout(x) are summed over spans of tokens, and then over the spans in
    a fixed order. The gradient of x is Σ_k mask_k ⊙ (d_inner_k·R_k)/(1-p).

    Args:
        rights: packed R (r', b) each.
        widths, ranks, scales: c_k, r_k and γ_k.
        threshold, stream: of the dropout, as `Narrow` got them.
        dtype: of dL and dR.
    """

    def __init__(
        self,
        rights: Sequence[Tensor],
        widths: Sequence[int],
        ranks: Sequence[int],
        scales: Sequence[float],
        threshold: int,
        stream: int,
        dtype: torch.dtype,
    ) -> None:
        parts, device, kind = len(rights), rights[0].device, rights[0].dtype
        self._rank, self._b = rights[0].shape
        self._parts, self._fill, self._width = parts, MAX_PARTS - parts, widths[0]
        bound = (*_repeated_last(rights, MAX_PARTS), self._b, threshold, stream)
        self._outer = [
            Call(
                programs.outer,
                (kind, kind, torch.float32, kind),
                bound,
                (parts, threshold > 0, through, self._rank, 32, 64),
                device,
            )
            for through in (False, True)
        ]
        ends = _repeated_last(_block_ends(widths, 64), MAX_PARTS)
        self._blocks_x, self._blocks_dy = -(-self._b // 64), ends[-1]
        self._columns = sum(widths)
        starts = [0, *accumulate(widths)][:parts]
        bound_each = (*_repeated_last(widths, MAX_PARTS), *ends[:2], *_repeated_last(starts, MAX_PARTS), self._columns)
        dtypes: tuple[torch.dtype, ...] = (*(kind,) * 4, torch.float32)
        self._outer_each = Call(programs.outer_each, dtypes, bound_each, (parts, self._rank, 32, 64), device)
        reduced = (
            *_repeated_last(widths, MAX_PARTS),
            *_repeated_last(starts, MAX_PARTS),
            *_repeated_last(list(ranks), MAX_PARTS),
        )
        reduced += (*_repeated_last([float(scale) for scale in scales], MAX_PARTS), self._columns, self._b)
        dtypes = (torch.float32, torch.float32, *(dtype,) * 6)
        self._reduce = Call(programs.reduce, dtypes, reduced, (parts, self._rank, 64), device, num_warps=2)
        self._reduce_blocks = -(-max(self._b, *widths) // 64)
        shapes = [*zip(widths, ranks, strict=True), *((rank, self._b) for rank in ranks)]
        self._results = [_template(shape, dtype, device) for shape in shapes]

    def __call__(
        self, x: Tensor, dys: Sequence[Tensor], inner: Tensor, d_inner: Tensor, seed: int, *, through: bool
    ) -> tuple[list[Tensor], list[Tensor], Tensor | None]:
        """dL_k (c_k, r_k) and dR_k (r_k, b), and if `through` the gradient of x (T, b) in its dtype, else None.

        Args:
            x: (..., b), the input before dropout.
            dys: (..., c_k) each.
            inner: (T, k·r'), from `Narrow`.
            d_inner: (T, k·r'), from `NarrowEach`.
            seed: of the masks, as `Narrow` got it.
            through: whether the gradient of x is computed.
        """
        tokens = x.numel() // self._b
        splits_x, span_x = _splits(tokens, self._blocks_x)
        splits_dy, span_dy = _splits(tokens, self._blocks_dy)
        sizes = [splits_x * self._parts * self._rank * self._b, splits_dy * self._rank * self._columns]
        buffer = torch.empty(sum(sizes), dtype=torch.float32, device=x.device)
        sums_x, sums_dy = split_addresses(buffer, sizes)
        passed = self._pass(x, d_inner, sums_x, seed, splits_x, span_x, through=through)
        operands = [address(dy) for dy in dys]
        operands += operands[-1:] * self._fill
        self._outer_each((self._blocks_dy, splits_dy, 1), *operands, address(inner), sums_dy, tokens, span_dy)
        outs = [torch.empty_like(result, memory_format=torch.contiguous_format) for result in self._results]
        d_left, d_right = outs[: self._parts], outs[self._parts :]
        left, right = [address(grad) for grad in d_left], [address(grad) for grad in d_right]
        fill = self._fill
        grid = (self._reduce_blocks, 2 * self._parts, 1)
        self._reduce(grid, sums_dy, sums_x, *left, *left[-1:] * fill, *right, *right[-1:] * fill, splits_dy, splits_x)
        return d_left, d_right, passed

    def through(self, x: Tensor, d_inner: Tensor, seed: int) -> Tensor:
        """Only the gradient of x (T, b): for layers that are not trained."""
        splits, span = _splits(x.numel() // self._b, self._blocks_x)
        sums = torch.empty(splits * self._parts * self._rank * self._b, dtype=torch.float32, device=x.device)
        passed = self._pass(x, d_inner, address(sums), seed, splits, span, through=True)
        assert passed is not None
        return passed

    def _pass(
        self, x: Tensor, d_inner: Tensor, sums: Any, seed: int, splits: int, span: int, *, through: bool
    ) -> Tensor | None:
        tokens = x.numel() // self._b
        passed = x.new_empty((tokens, self._b)) if through else None
        to = address(x if passed is None else passed)
        self._outer[through]((self._blocks_x, splits, 1), address(x), address(d_inner), sums, to, tokens, span, seed)
        return passed


class Swiglu:
    """silu(gate)·up and its gradients, rounded as the two eager operations round; all (..., n) and contiguous.

    Args:
        width: n.
        dtype, device: of gate and up.
    """

    def __init__(self, width: int, dtype: torch.dtype, device: torch.device) -> None:
        self._width, self._blocks = width, -(-width // 64)
        self._forward = Call(programs.swiglu, (dtype,) * 3, (width,), (2048,), device)
        self._backward = [
            Call(programs.swiglu_backward, (dtype,) * 8, (width,), (transposed, 64, 64), device, num_warps=8)
            for transposed in (False, True)
        ]

    def __call__(self, gate: Tensor, up: Tensor) -> Tensor:
        out = torch.empty_like(gate)
        count = gate.numel()
        self._forward((-(-count // 2048), 1, 1), address(gate), address(up), address(out), count // self._width)
        return out

    def backward(
        self, dh: Tensor, gate: Tensor, up: Tensor, *, transposed: bool
    ) -> tuple[Tensor, Tensor, Tensor | None, list[Any]]:
        """d_gate and d_up, and if `transposed` a buffer with d_gateᵀ, d_upᵀ and (silu(gate)·up)ᵀ and their addresses.

        The copies are those of `Transpose`. They are made in the same pass, and cost nothing beside the three eager
        kernels that this replaces. Without `transposed` the buffer is None.
        """
        tokens = gate.numel() // self._width
        blocks = -(-tokens // PAD)
        d_gate, d_up = torch.empty_like(gate), torch.empty_like(gate)
        operands = [address(tensor) for tensor in (dh, gate, up, d_gate, d_up)]
        buffer, outs = None, operands[1:2] * 3
        if transposed:
            size = self._width * blocks * PAD
            buffer = gate.new_empty(3 * size)
            outs = split_addresses(buffer, [size] * 3)
        self._backward[transposed]((blocks, self._blocks, 1), *operands, *outs, tokens, blocks)
        return d_gate, d_up, buffer, outs


def dropout_mask(
    seed: int, shape: tuple[int, int], probability: float, device: torch.device, stream: int = 0
) -> Tensor:
    """(T, n) bool: the features that the kernels keep at this seed and stream; for tests."""
    tokens, width = shape
    out = torch.empty(shape, dtype=torch.int8, device=device)
    bound = (width, dropout_threshold(probability), stream)
    call = Call(programs.mask, (torch.int8,), bound, (16, 128), device)
    call((-(-tokens // 16), -(-width // 128), 1), address(out), tokens, seed)
    return out.bool()


def _repeated_last(values: Sequence[Any], count: int) -> list[Any]:
    """`values`, the last repeated up to `count`: a kernel has a fixed number of arguments and may ignore some."""
    return [*values, *(list(values[-1:]) * (count - len(values)))]


def _template(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A template without memory for `empty_like`, which is the quickest way to allocate a tensor."""
    return torch.empty((), dtype=dtype, device=device).expand(shape)


def _block_ends(widths: Sequence[int], block: int) -> list[int]:
    """Cumulated number of blocks after each width."""
    return list(accumulate(-(-width // block) for width in widths))


def _splits(tokens: int, blocks: int) -> tuple[int, int]:
    """Number and length of the spans of tokens that a sum is cut into, so that about 512 programs fill the GPU."""
    splits = max(1, min(-(-tokens // 128), -(-512 // blocks)))
    span = -(-tokens // (splits * 64)) * 64
    return -(-tokens // span), span
