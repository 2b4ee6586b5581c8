"""The kernels that write into weights and into copies of the thin factors, each behind a table or a small class.

They are what makes W + M⊙U of a base weight and what `kernels` computes with; shapes and names are as there.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from . import write_programs as programs
from .launcher import Call, address

_WRITE_BLOCK = 1024
_PACK_BLOCK = 256


class WriteTable(NamedTuple):
    """Many layers' writes for one launch: which layer each block of entries belongs to, and the bound kernels."""

    owner: Tensor
    write: Call
    restore: Call


def write_table(layers: Sequence[tuple[Tensor, Tensor, Tensor, Tensor]]) -> WriteTable:
    """Table of (weight, indices, values, saved) of layers on one device and of the same dtypes."""
    device = layers[0][0].device
    rows = [[*(tensor.data_ptr() for tensor in layer), layer[1].numel()] for layer in layers]
    blocks = torch.tensor([-(-row[4] // _WRITE_BLOCK) for row in rows])
    owner = torch.repeat_interleave(torch.arange(len(rows)), blocks)
    table = torch.tensor(rows, dtype=torch.int64)
    first = blocks.cumsum(0) - blocks
    owner = owner.int().to(device)
    # Of each kind of tensor one is named, for its dtype; the addresses of all are in the table.
    example = [tensor.detach() for tensor in layers[0][:3]]
    bound = (*example, table.to(device), owner, first.int().to(device))
    calls = [Call(programs.write, (), bound, (adds, _WRITE_BLOCK), device) for adds in (True, False)]
    return WriteTable(owner, *calls)


def write_supports(table: WriteTable) -> None:
    """W[support] ← round(W0 + U) for every row, in place and past autograd's version counters; W0 is `saved`."""
    table.write((table.owner.numel(), 1, 1))


def restore_supports(table: WriteTable) -> None:
    """W[support] ← W0 for every row, as `write_supports`."""
    table.restore((table.owner.numel(), 1, 1))


class PackTable(NamedTuple):
    """Many thin factors' copies for one launch: which factor each block belongs to, and the bound kernel."""

    owner: Tensor
    call: Call


def pack_table(factors: Sequence[tuple[Tensor, float, Tensor]]) -> PackTable:
    """Table of thin factors F (r, n), any strides, with a scale and a contiguous copy (r', n) each.

    All factors are of one dtype and device, all copies of one dtype and r'.
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
    return PackTable(owner, Call(programs.pack, (), bound, (copy.shape[0], _PACK_BLOCK), device))


def pack_factors(table: PackTable) -> None:
    """Fill every copy of the table anew: scale·F below the true rank, zeros above."""
    table.call((table.owner.numel(), 1, 1))


class SupportWrite:
    """W[support] ← round(W + U) in a weight at any place, and back: for one that is not here for long."""

    def __init__(self, indices: Tensor, weight: torch.dtype, values: torch.dtype) -> None:
        self._indices, self._blocks = indices, -(-indices.numel() // _WRITE_BLOCK)
        bound, constants = (indices, indices.numel()), (_WRITE_BLOCK,)
        self._put = Call(programs.put, (weight, values, weight), bound, constants, indices.device)
        self._take_back = Call(programs.take_back, (weight, weight), bound, constants, indices.device)

    def put(self, weight: Tensor, values: Tensor) -> Tensor:
        """Add values (s,) to a contiguous weight (c, b), in fp32, rounded once; returns what was there, (s,)."""
        saved = torch.empty(self._indices.shape, dtype=weight.dtype, device=weight.device)
        self._put((self._blocks, 1, 1), address(weight), address(values), address(saved))
        return saved

    def take_back(self, weight: Tensor, saved: Tensor) -> None:
        """Put back what was there before."""
        self._take_back((self._blocks, 1, 1), address(weight), address(saved))


class PackPair:
    """γ·Lᵀ and R of one layer into their packed copies (r', c) and (r', b), from wherever L (c, r) and R (r, b) are."""

    def __init__(self, copies: tuple[Tensor, Tensor], rank: int, scale: float, dtype: torch.dtype) -> None:
        (padded, c), b = copies[0].shape, copies[1].shape[1]
        blocks = -(-c // _PACK_BLOCK)
        self._blocks = blocks + -(-b // _PACK_BLOCK)
        bound = (*copies, c, b, rank, float(scale), blocks)
        self._call = Call(programs.pack_pair, (dtype, dtype), bound, (padded, _PACK_BLOCK), copies[0].device)

    def __call__(self, L: Tensor, R: Tensor) -> None:
        """L and R contiguous."""
        self._call((self._blocks, 1, 1), address(L), address(R))
