"""Holds the effective weight W + M⊙U in the base weight itself, and saves W's bits on the support.

Writing the s entries of all layers takes microseconds, in one launch per device and combination of dtypes; a second
copy of each weight would take its memory and two passes over it. While U is written, the base weight is not W: code
that reads it calls `restore` first, which puts the saved bits back exactly.

`WeightSlot` is one layer with one adapter; `BatchedWriter` writes the slots of a model together.
"""

import functools
import itertools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..method.sizes import padded_rank
from . import sampling_plan, write_kernels
from .sampling_plan import SamplingPlan


class WeightSlot:
    """U of one adapter in the weight of one layer, and the packed copies of L and R that the kernels read.

    Args:
        weight: (c, b), contiguous, frozen.
        values, indices: U (s,) and its support (s,), or None.
        L, R: (c, r) and (r, b), or None.
        scaling: γ.
        dtype: the layer's compute dtype, and that of the packed copies; L's is multiplied by γ.

    Attributes:
        written: whether the weight holds W + M⊙U of this slot.
        fresh: whether the slot was written with its group and no forward has used it since.
        place: number of the slot in its `BatchedWriter`, in the order in which layers are first called.
        is_called: whether the model still calls the layer; asked before the slot is written with others.
        saved: (s,) W's bits on the support.
        versions: U, L and R with their autograd version counters at the last write.
        packed: γ·Lᵀ (r', c) and R (r', b), padded with zeros; None without a low-rank part.
    """

    # U stays written from forward to forward, until `restore`; a `GatheredSlot` is written for one pass only.
    persistent = True

    def __init__(
        self,
        weight: Tensor,
        values: Tensor | None,
        indices: Tensor | None,
        L: Tensor | None,
        R: Tensor | None,
        scaling: float,
        dtype: torch.dtype,
    ) -> None:
        self.weight, self.values, self.indices = weight, values, indices
        self.L, self.R, self.scaling, self.dtype = L, R, scaling, dtype
        self.written = False
        self.fresh = False
        self.place = -1
        self.is_called: Callable[[], bool] = lambda: True
        self.saved: Tensor | None = None
        self._own_tables: _Tables | None = None
        self._address = 0
        self.versions: tuple[tuple[Tensor, int], ...] = ()
        self.packed = empty_packed(weight, L, R, dtype)

    @functools.cached_property
    def sampling_plan(self) -> SamplingPlan | None:
        """Plan of the sampled products; made for the first backward."""
        c, b = self.weight.shape
        return None if self.indices is None else sampling_plan.make_sampling_plan(self.indices, (c, b))

    def is_made_of(self, *operands: Any) -> bool:
        """Whether the slot holds exactly these objects, in the order of the constructor."""
        own = (self.weight, self.values, self.indices, self.L, self.R, self.scaling, self.dtype)
        return (
            all(own_tensor is tensor for own_tensor, tensor in zip(own[:5], operands[:5], strict=True))
            and own[5:] == operands[5:]
        )

    def ensure_written(self) -> bool:
        """Write U for a backward if the weight was restored, or written by another slot, since the forward.

        Returns:
            Whether U was written; the caller then restores the weight after its backward.

        Raises:
            RuntimeError: the weight has other memory than in the forward.
        """
        if self.written and self.weight.data_ptr() == self._address:
            return False
        if self.weight.data_ptr() != self._address:
            raise RuntimeError(
                "the weight of an adapted layer was replaced between a forward and its backward (by a merge?): call "
                "backward() first."
            )
        self.write_single()
        return True

    def restore(self) -> None:
        """Write W's bits back, if U is written and the weight still has the same memory."""
        if self.written and self.indices is not None and self.weight.data_ptr() == self._address:
            assert self.saved is not None
            self.weight.detach().view(-1)[self.indices.long()] = self.saved
        self.written = self.fresh = False

    def write_single(self) -> None:
        """Write this slot, without the others of the model."""
        self.save_base_entries()
        self.written = True
        if self._own_tables is None or not self._own_tables.are_written():
            self._own_tables = _Tables([self])
        self._own_tables.write()

    def save_base_entries(self) -> None:
        """Save W on the support before a write, unless U is written in it already."""
        moved = self.weight.data_ptr() != self._address
        if self.indices is not None and (moved or not self.written):
            # A weight holds one slot at a time: it must be W when its bits are saved.
            owner = _owners.get(self.weight.data_ptr())
            if owner is not None and owner is not self:
                owner.restore()
            _owners[self.weight.data_ptr()] = self
            # A new weight tensor has no U in it yet.
            if self.saved is None or moved:
                with torch.inference_mode(False):
                    self.saved = torch.empty(self.indices.shape, dtype=self.weight.dtype, device=self.weight.device)
            torch.index_select(self.weight.detach().view(-1), 0, self.indices, out=self.saved)
            # Only this first write raises the version counter, so that autograd raises if a graph of other code saved W
            # for its backward. Later writes put the same bits or those of the next step.
            torch.autograd.graph.increment_version(self.weight)
        self._address = self.weight.data_ptr()

    def record_written_state(self) -> None:
        """Record which state of U, L and R was written."""
        self.written = True
        self.versions = tuple(
            [(tensor, tensor._version) for tensor in (self.values, self.L, self.R) if tensor is not None]
        )

    def is_current(self) -> bool:
        """Whether U, L and R are in the state that was written, by their version counters."""
        if self.weight.data_ptr() != self._address:
            return False
        for tensor, version in self.versions:  # noqa: SIM110 (a generator is slower, and this runs in every forward)
            if tensor._version != version:
                return False
        return True

    def is_unchanged(self) -> bool:
        """Whether weight, U, L and R are those that the last forward used."""
        return self.written and self.is_current()

    @property
    def kind(self) -> tuple[Any, ...]:
        """Device and dtypes, equal for all slots of one `_Tables`; recomputed, as U, L and R may change their dtype."""
        rank = None if self.packed is None else self.packed[0].shape[0]
        dtypes = (
            None if tensor is None else tensor.dtype for tensor in (self.weight, self.values, self.L, self.indices)
        )
        return self.weight.device, self.dtype, rank, *dtypes


def empty_packed(
    weight: Tensor, L: Tensor | None, R: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor] | None:
    """Uninitialised packed copies (r', c) of L (c, r) and (r', b) of R (r, b); None without a low-rank part."""
    if L is None or R is None:
        return None
    rank = padded_rank(R.shape[0])
    with torch.inference_mode(False):  # may be made in an evaluation and used in training
        left, right = (torch.empty((rank, size), dtype=dtype, device=R.device) for size in weight.shape)
    return left, right


# Address of a weight → the slot that wrote to it last.
_owners: "weakref.WeakValueDictionary[int, WeightSlot]" = weakref.WeakValueDictionary()


class BatchedWriter:
    """Writes the slots of all layers together, at the first layer of each forward.

    Layers ask once each, in the order of their first call. One that asks again or out of order begins a new forward,
    and everything is written again, because an optimizer can change U, L and R without changing their version counters.

    Slots that were written together are a *group*; a group that was restored as a whole can be written again with the
    tables that it has.
    """

    # Number of restored groups whose tables are kept for being written again: one per set of active adapters.
    _MAX_RESTORED_GROUPS = 16

    def __init__(self) -> None:
        self._last = -1
        # Groups that were written and then restored as a whole, the latest first.
        self._restored_groups: list[list[_Tables]] = []
        # Whether nothing was written since they were restored.
        self._is_restored = False
        self._slots: weakref.WeakValueDictionary[int, WeightSlot] = weakref.WeakValueDictionary()
        self._counter = itertools.count()
        self._tables: list[_Tables] = []

    def __deepcopy__(self, memo: dict[int, Any]) -> "BatchedWriter":
        return BatchedWriter()

    def __reduce__(self) -> Any:
        return BatchedWriter, ()

    def add(self, slot: WeightSlot) -> WeightSlot:
        """Write this slot with the others from now on; returns it."""
        slot.place = next(self._counter)
        self._slots[slot.place] = slot
        self._tables = []
        return slot

    def write_for_forward(self, *slots: WeightSlot) -> None:
        """Write U, L and R of `slots` if they may have changed, in this order. Called by the layers' forward.

        Inside a backward (gradient checkpointing) a slot is written only where its weight was restored.
        """
        if torch._C._current_graph_task_id() != -1:
            # Inside a backward (gradient checkpointing), values are those of the forward.
            for slot in slots:
                slot.ensure_written()
            return
        for slot in slots:
            if not slot.written:
                if not (self._is_restored and self._rewrite_group_of(slot)):
                    slot.write_single()
            elif not (slot.fresh and slot.place > self._last and slot.is_current()):
                self._write_all()
            slot.fresh = False
            self._last = slot.place
        self._is_restored = False

    def restore(self) -> None:
        """Restore all weights, for instance before other adapters are used; those of one group in one launch.

        The next forward with these adapters writes them together again.
        """
        if self._tables and all([tables.are_written() for tables in self._tables]):
            for tables in self._tables:
                tables.restore()
            others = [group for group in self._restored_groups if group is not self._tables]
            self._restored_groups = [self._tables, *others][: self._MAX_RESTORED_GROUPS]
            self._is_restored = True
        for slot in self._slots.values():
            if slot.written:
                slot.restore()

    @staticmethod
    def restore_others(weight: Tensor) -> None:
        """Restore a weight that this model shares with another one, whose adapter is written into it."""
        owner = _owners.get(weight.data_ptr()) if type(weight) in (nn.Parameter, Tensor) else None
        if owner is not None and owner.written:
            owner.restore()

    def forget_groups(self) -> None:
        """Forget the groups restored so far.

        A layer's forward then writes no other layer's weight before that layer is called itself, for it may have left
        the model.
        """
        self._restored_groups = []

    def remove(self, *slots: WeightSlot) -> None:
        """Stop writing these slots. Graphs may still refer to them, but nothing would restore their weights."""
        for slot in slots:
            self._slots.pop(slot.place, None)
        self._restored_groups, self._tables = [], []

    def _rewrite_group_of(self, slot: WeightSlot) -> bool:
        """Write the restored group that contains this slot; returns False where there is none that can be written."""
        for group in self._restored_groups:
            if any(tables.contains(slot) for tables in group):
                if not all(tables.can_be_rewritten() for tables in group):
                    return False
                self._tables = group
                for tables in group:
                    tables.save_base_entries()
                    tables.write(fresh=True)
                return True
        return False

    def _write_all(self) -> None:
        """Write all slots that are written; with new tables if there are more of them, or a tensor has moved."""
        count = sum([slot.written for slot in self._slots.values()])
        if count != sum([tables.count for tables in self._tables]) or not all(
            [tables.are_written() for tables in self._tables]
        ):
            slots_of_kind: dict[Any, list[WeightSlot]] = {}
            for slot in self._slots.values():
                if slot.written:
                    slot.save_base_entries()
                    slots_of_kind.setdefault(slot.kind, []).append(slot)
            self._tables = [_Tables(slots) for slots in slots_of_kind.values()]
        for tables in self._tables:
            tables.write(fresh=True)


class _Tables:
    """Tables on the device for writing several slots of one `kind` in one launch.

    The slots have saved W on their supports before.
    """

    def __init__(self, slots: list[WeightSlot]) -> None:
        self.count = len(slots)
        self._slots = [weakref.ref(slot) for slot in slots]
        self._addresses = self._current_addresses(slots)
        self._write_table = self._pack_table = None
        writes = [
            (slot.weight, slot.indices, slot.values, slot.saved)
            for slot in slots
            if slot.indices is not None and slot.values is not None and slot.saved is not None
        ]
        if writes:
            self._write_table = write_kernels.write_table(writes)
        packs = []
        for slot in slots:
            if slot.L is not None and slot.R is not None and slot.packed is not None:
                packs.append((slot.L.detach().t(), slot.scaling, slot.packed[0]))
                packs.append((slot.R.detach(), 1.0, slot.packed[1]))
        if packs:
            self._pack_table = write_kernels.pack_table(packs)

    @staticmethod
    def _current_addresses(slots: list[Any]) -> list[int]:
        """Addresses of all tensors in a table; a tensor that changes its dtype changes its address too."""
        tensors = [(slot.weight, slot.values, slot.saved, slot.L, slot.R) for slot in slots]
        return [tensor.data_ptr() for of_slot in tensors for tensor in of_slot if tensor is not None]

    def are_written(self) -> bool:
        """Whether the addresses are still valid and all slots are written."""
        return self._are_valid(written=True)

    def can_be_rewritten(self) -> bool:
        """Whether the addresses are still valid, no slot is written, and the model calls all layers."""
        return self._are_valid(written=False) and all([slot.is_called() for ref in self._slots if (slot := ref())])

    def _are_valid(self, *, written: bool) -> bool:
        """Whether all slots exist, are `written` or not as asked, and have the tensors of the tables."""
        slots = [ref() for ref in self._slots]
        as_expected = [slot is not None and slot.written is written for slot in slots]
        return all(as_expected) and self._current_addresses(slots) == self._addresses

    def contains(self, slot: WeightSlot) -> bool:
        """Whether the tables write this slot."""
        return any([ref() is slot for ref in self._slots])

    def save_base_entries(self) -> None:
        """Save all weights on their supports before the first write."""
        for ref in self._slots:
            slot = ref()
            if slot is not None:
                slot.save_base_entries()

    def restore(self) -> None:
        """Restore all weights."""
        if self._write_table is not None:
            write_kernels.restore_supports(self._write_table)
        for ref in self._slots:
            slot = ref()
            if slot is not None:
                slot.written = slot.fresh = False

    def write(self, *, fresh: bool = False) -> None:
        """Write U of all slots and copy their L and R."""
        if self._write_table is not None:
            write_kernels.write_supports(self._write_table)
        if self._pack_table is not None:
            write_kernels.pack_factors(self._pack_table)
        for ref in self._slots:
            slot = ref()
            if slot is not None:
                slot.record_written_state()
                slot.fresh = fresh
