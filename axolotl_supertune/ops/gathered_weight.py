"""The effective weight W + M⊙U of a layer whose weight is gathered for each use (FSDP2, ZeRO-3): in the gathered copy.

As in `inplace`, M⊙U is written into the weight and taken out again, but around one forward or backward of the layer:
the copy is gone afterwards, or shared with whoever gathered it. Nothing of the weight's size is made.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import kernels, write_kernels
from .inplace_weight import room_for_factors
from .kernels import SamplingPlan
from .launcher import aligned


class Gathered(NamedTuple):
    """What is gathered for one layer, as it is now: W (c, b), and U (s,), L (c, r), R (r, b) or None."""

    weight: Tensor
    values: Tensor | None
    L: Tensor | None
    R: Tensor | None


class GatheredSlot:
    """One such layer with one adapter, in the place of an `WeightSlot` for the functions of `fused`.

    Args:
        now: () → what is gathered; it is called within the layer's forward or backward, and raises where it is not.
        indices: (s,) the support of U, or None.
        scaling: γ of L·R.
        dtype: what the layer computes in; the copies of L and R are of it, γ multiplied into L.
    """

    persistent = False

    def __init__(self, now: Callable[[], Gathered], indices: Tensor | None, scaling: float, dtype: torch.dtype) -> None:
        self._now, self.indices, self.scaling, self.dtype = now, indices, scaling, dtype
        self.weight, self.values, self.L, self.R = now()
        self.written = False
        self.versions: tuple[tuple[Tensor, int], ...] = ()
        self.packed = room_for_factors(self.weight, self.L, self.R, dtype)
        self._saved: Tensor | None = None
        if indices is not None and self.values is not None:
            self._support = write_kernels.SupportWrite(indices, self.weight.dtype, self.values.dtype)
        if self.packed is not None and self.L is not None:
            self._pack = write_kernels.PackPair(self.packed, self.L.shape[1], scaling, self.L.dtype)

    @functools.cached_property
    def plan(self) -> SamplingPlan | None:
        """How its sampled products walk over the support."""
        c, b = self.weight.shape
        return None if self.indices is None else kernels.make_sampling_plan(self.indices, (c, b))

    def ensure(self) -> bool:
        """Write M⊙U into the gathered weight, and copy L and R.

        Returns:
            Whether this did it; whoever asked then takes it out again, with `restore`.

        Raises:
            RuntimeError: the adapter has other tensors by now, or none.
        """
        if self.written:
            return False
        now = self._now()
        if now.values is not self.values or now.L is not self.L or now.R is not self.R:
            raise RuntimeError(
                "the adapter of a layer was deleted or replaced between a forward and its backward: call backward() "
                "first."
            )
        self.weight = now.weight
        if self.packed is not None and self.L is not None and self.R is not None:
            self._pack(aligned(self.L.detach().contiguous()), aligned(self.R.detach().contiguous()))
        if self.indices is not None and self.values is not None:
            self._saved = self._support.put(self.weight.detach(), aligned(self.values.detach()))
        self.versions = tuple([(each, each._version) for each in (self.values, self.L, self.R) if each is not None])
        self.written = True
        return True

    def restore(self) -> None:
        """Put W's bits back; nothing if nothing is written."""
        if self.written and self._saved is not None:
            self._support.take_back(self.weight.detach(), self._saved)
        self.written, self._saved = False, None

    def is_unchanged(self) -> bool:
        """Whether U, L and R are what the last forward computed with."""
        return all([tensor._version == version for tensor, version in self.versions])

    def __reduce__(self) -> Any:
        """A copy has other tensors."""
        return type(None), ()
