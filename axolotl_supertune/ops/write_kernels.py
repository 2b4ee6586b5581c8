"""Writing kernels: U into a weight on its support and W's bits back, and packed copies of L and R.

For weights that stay in place, one launch writes all layers: a table on the device holds their addresses. For one layer
at a time (gathered weights) `SupportWrite` and `PackPair` take addresses at each call. Each has its Triton function in
`write_programs`. Shapes are those of `kernels`.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from . import write_programs
from .launcher import Call, address

_WRITE_BLOCK = 1024
_PACK_BLOCK = 256


class WriteTable(NamedTuple):
    """One launch's writes to the weights of many layers.

    Attributes:
        owner: (blocks,) int32, the layer of each block of `_WRITE_BLOCK` entries.
        write, restore: the bound kernels.
    """

    owner: Tensor
    write: Call
    restore: Call


def write_table(layers: Sequence[tuple[Tensor, Tensor, Tensor, Tensor]]) -> WriteTable:
    """Table of layers on one device with equal dtypes.

    Args:
        layers: per layer weight (c, b), indices (s,), values (s,) and saved (s,), the last in the dtype of the weight.
    """
    device = layers[0][0].device
    rows = [[*(tensor.data_ptr() for tensor in layer), layer[1].numel()] for layer in layers]
    blocks = torch.tensor([-(-row[4] // _WRITE_BLOCK) for row in rows])
    owner = torch.repeat_interleave(torch.arange(len(rows)), blocks)
    table = torch.tensor(rows, dtype=torch.int64)
    first = blocks.cumsum(0) - blocks
    owner = owner.int().to(device)
    # One tensor of each kind is passed for its dtype; the addresses of all are in the table.
    example = [tensor.detach() for tensor in layers[0][:3]]
    bound = (*example, table.to(device), owner, first.int().to(device))
    calls = [Call(write_programs.write, (), bound, (adds, _WRITE_BLOCK), device) for adds in (True, False)]
    return WriteTable(owner, *calls)


def write_supports(table: WriteTable) -> None:
    """W[support] ← round(saved + U) of every layer; autograd's version counters do not change."""
    table.write((table.owner.numel(), 1, 1))


def restore_supports(table: WriteTable) -> None:
    """W[support] ← saved of every layer; autograd's version counters do not change."""
    table.restore((table.owner.numel(), 1, 1))


class PackTable(NamedTuple):
    """One launch's packed copies of many low-rank factors.

    Attributes:
        owner: (blocks,) int32, the factor of each block of `_PACK_BLOCK` columns.
        call: the bound kernel.
    """

    owner: Tensor
    call: Call


def pack_table(factors: Sequence[tuple[Tensor, float, Tensor]]) -> PackTable:
    """Table of low-rank factors on one device with equal dtypes, whose copies have equal dtypes and r'.

    Args:
        factors: per factor F (r, n) of any strides, its scale, and the contiguous copy (r', n).
    """
    device = factors[0][0].device
    rows = [[factor.data_ptr(), copy.data_ptr(), *factor.shape, *factor.stride()] for factor, _, copy in factors]
    blocks = torch.tensor([-(-row[3] // _PACK_BLOCK) for row in rows])
    owner = torch.repeat_interleave(torch.arange(len(rows)), blocks)
    owner = owner.int().to(device)
    scales = torch.tensor([scale for _, scale, _ in factors], dtype=torch.float32).to(device)
    first = (blocks.cumsum(0) - blocks).int().to(device)
    factor, _, copy = factors[0]
    bound = (factor, copy, torch.tensor(rows, dtype=torch.int64).to(device), scales, owner, first)
    return PackTable(owner, Call(write_programs.pack, (), bound, (copy.shape[0], _PACK_BLOCK), device))


def pack_factors(table: PackTable) -> None:
    """Fill every copy of the table: scale·F in its first r rows, zeros in the others."""
    table.call((table.owner.numel(), 1, 1))


class SupportWrite:
    """Writes U into one weight and takes it out again, with the weight's address passed at each call.

    Args:
        indices: (s,) the support: flat indices.
        weight, values: dtypes of the weight and of U.
    """

    def __init__(self, indices: Tensor, weight: torch.dtype, values: torch.dtype) -> None:
        self._indices, self._blocks = indices, -(-indices.numel() // _WRITE_BLOCK)
        bound, constants = (indices, indices.numel()), (_WRITE_BLOCK,)
        self._put = Call(write_programs.put, (weight, values, weight), bound, constants, indices.device)
        self._take_back = Call(write_programs.take_back, (weight, weight), bound, constants, indices.device)

    def put(self, weight: Tensor, values: Tensor) -> Tensor:
        """Add values (s,) to a contiguous weight (c, b) in fp32, rounded once. Returns the old values (s,)."""
        saved = torch.empty(self._indices.shape, dtype=weight.dtype, device=weight.device)
        self._put((self._blocks, 1, 1), address(weight), address(values), address(saved))
        return saved

    def take_back(self, weight: Tensor, saved: Tensor) -> None:
        """Write the old values (s,) back."""
        self._take_back((self._blocks, 1, 1), address(weight), address(saved))


class PackPair:
    """Copies L and R of one layer, packed, in one launch; their addresses are passed at each call.

    Args:
        copies: (r', c) for γ·Lᵀ and (r', b) for R.
        rank: r.
        scale: γ.
        dtype: of L and R.
    """

    def __init__(self, copies: tuple[Tensor, Tensor], rank: int, scale: float, dtype: torch.dtype) -> None:
        (padded, c), b = copies[0].shape, copies[1].shape[1]
        blocks = -(-c // _PACK_BLOCK)
        self._blocks = blocks + -(-b // _PACK_BLOCK)
        bound = (*copies, c, b, rank, float(scale), blocks)
        self._call = Call(write_programs.pack_pair, (dtype, dtype), bound, (padded, _PACK_BLOCK), copies[0].device)

    def __call__(self, L: Tensor, R: Tensor) -> None:
        """Fill the copies from L (c, r) and R (r, b), both contiguous."""
        self._call((self._blocks, 1, 1), address(L), address(R))
