"""Writes U into a weight that an engine has gathered (FSDP2, ZeRO-3), for one forward or backward of the layer.

As `inplace_weight`, but U is taken out again after each pass: the gathered copy is freed then, or used by others.
Nothing of the weight's size is allocated.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import sampling_plan, write_kernels
from .inplace_weight import WeightSlot, empty_packed
from .launcher import aligned
from .sampling_plan import SamplingPlan


class Gathered(NamedTuple):
    """The gathered tensors of one layer: W (c, b), and U (s,), L (c, r), R (r, b) or None."""

    weight: Tensor
    values: Tensor | None
    L: Tensor | None
    R: Tensor | None


class GatheredSlot:
    """U of one adapter in the gathered weight of one layer; `fused` takes it as it takes a `WeightSlot`.

    Args:
        gathered: returns the gathered tensors. It is called inside the layer's forward or backward, and raises if they
            are not gathered.
        indices: (s,) the support of U, or None.
        scaling: γ of L·R.
        dtype: the layer's compute dtype, and that of the packed copies of L and R; L's is multiplied by γ.
    """

    persistent = False

    def __init__(
        self, gathered: Callable[[], Gathered], indices: Tensor | None, scaling: float, dtype: torch.dtype
    ) -> None:
        self._gathered, self.indices, self.scaling, self.dtype = gathered, indices, scaling, dtype
        self.weight, self.values, self.L, self.R = gathered()
        self.written = False
        self.versions: tuple[tuple[Tensor, int], ...] = ()
        self.packed = empty_packed(self.weight, self.L, self.R, dtype)
        self._saved: Tensor | None = None
        if indices is not None and self.values is not None:
            self._support = write_kernels.SupportWrite(indices, self.weight.dtype, self.values.dtype)
        if self.packed is not None and self.L is not None:
            self._pack = write_kernels.PackPair(self.packed, self.L.shape[1], scaling, self.L.dtype)

    @functools.cached_property
    def sampling_plan(self) -> SamplingPlan | None:
        """Plan of the sampled products."""
        c, b = self.weight.shape
        return None if self.indices is None else sampling_plan.make_sampling_plan(self.indices, (c, b))

    def ensure_written(self) -> bool:
        """Write U into the gathered weight, and copy L and R, unless that is done.

        Returns:
            Whether U was written; the caller then calls `restore` after its pass.

        Raises:
            RuntimeError: the adapter was deleted or its tensors replaced.
        """
        if self.written:
            return False
        current = self._gathered()
        if current.values is not self.values or current.L is not self.L or current.R is not self.R:
            raise RuntimeError(
                "the adapter of a layer was deleted or replaced between a forward and its backward: call backward() "
                "first."
            )
        self.weight = current.weight
        if self.packed is not None and self.L is not None and self.R is not None:
            self._pack(aligned(self.L.detach().contiguous()), aligned(self.R.detach().contiguous()))
        if self.indices is not None and self.values is not None:
            self._saved = self._support.put(self.weight.detach(), aligned(self.values.detach()))
        self.versions = tuple(
            [(tensor, tensor._version) for tensor in (self.values, self.L, self.R) if tensor is not None]
        )
        self.written = True
        return True

    def restore(self) -> None:
        """Write W's bits back, if U is written."""
        if self.written and self._saved is not None:
            self._support.take_back(self.weight.detach(), self._saved)
        self.written, self._saved = False, None

    def is_unchanged(self) -> bool:
        """Whether U, L and R are those that the last forward used."""
        return all([tensor._version == version for tensor, version in self.versions])

    def __reduce__(self) -> Any:
        """Copies and pickles become None: they would have other tensors."""
        return type(None), ()


class WrittenSlots:
    """A context in which the slots are written: for a backward, and for a forward of slots that are not persistent.

    Slots that were not written before are restored at the end.

    Args:
        slots: those of the layers.
        versions: of a backward, U, L and R of every slot with their version counters in its forward.

    Raises:
        RuntimeError: U, L or R changed since the forward: the gradient would be that of another model.
    """

    def __init__(
        self, slots: Sequence[WeightSlot | GatheredSlot], versions: Sequence[tuple[tuple[Tensor, int], ...]] = ()
    ) -> None:
        self._slots = slots
        self._to_restore: list[WeightSlot | GatheredSlot] = []
        for of_slot in versions:
            for tensor, version in of_slot:
                if tensor._version != version:
                    raise RuntimeError(
                        "an adapter's values were changed between a forward and its backward: call backward() before "
                        "step()."
                    )

    def __enter__(self) -> None:
        try:
            for slot in self._slots:
                if slot.ensure_written():
                    self._to_restore.append(slot)
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *error: object) -> None:
        for slot in self._to_restore:
            slot.restore()
