"""The effective weight W + M⊙U kept in the base weight itself, W's own bits beside it, for all layers in one launch.

Writing s slots takes microseconds where a second copy of the weight takes its memory and two passes over it. The
price is that a base weight is not itself while an adapter is written in: whoever reads it must `restore` first, and
what is restored are the very bits that were there.
"""

import functools
import itertools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..method.sizes import padded_rank
from . import kernels, write_kernels
from .kernels import SamplingPlan


class WeightSlot:
    """One layer with one adapter: what is written into its weight, and the copies of L and R that the kernels read.

    Args:
        weight: (c, b), contiguous, not trained.
        values, indices: U (s,) and its support, or None.
        L, R: (c, r), (r, b), or None; γ = `scaling`.
        dtype: what the layer computes in; the copies of L and R are of it, γ multiplied into L.
    """

    # What is written stays until it is restored, from forward to forward; see `gathered` for weights that do not.
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
        # Whether the model still calls the layer; it is asked before the slot is written together with others.
        self.is_called: Callable[[], bool] = lambda: True
        self.saved: Tensor | None = None
        self._alone: _Tables | None = None
        self._address = 0
        # U, L and R with the counts of their changes when they were last written.
        self.versions: tuple[tuple[Tensor, int], ...] = ()
        # (γ·Lᵀ, R) as the kernels read them: (r', c), (r', b).
        self.packed = room_for_factors(weight, L, R, dtype)

    @functools.cached_property
    def plan(self) -> SamplingPlan | None:
        """How its sampled products walk over the support: made for the first backward, nothing else needs it."""
        c, b = self.weight.shape
        return None if self.indices is None else kernels.make_sampling_plan(self.indices, (c, b))

    def is_of(self, *operands: Any) -> bool:
        """Whether this slot was made of these very objects, in the order of the constructor."""
        mine = (self.weight, self.values, self.indices, self.L, self.R, self.scaling, self.dtype)
        return all(one is other for one, other in zip(mine[:5], operands[:5], strict=True)) and mine[5:] == operands[5:]

    def ensure(self) -> bool:
        """For a backward: write again if the weight was restored, or written by another slot, since the forward.

        Returns:
            Whether it was; whoever asked then restores it afterwards.
        """
        if self.written and self.weight.data_ptr() == self._address:
            return False
        if self.weight.data_ptr() != self._address:
            raise RuntimeError(
                "the weight of an adapted layer was replaced between a forward and its backward (by a merge?): call "
                "backward() first."
            )
        self._write_single()
        return True

    def restore(self) -> None:
        """Put W's bits back; nothing if nothing is written, or if another tensor was put in the weight's place."""
        if self.written and self.indices is not None and self.weight.data_ptr() == self._address:
            assert self.saved is not None
            self.weight.detach().view(-1)[self.indices.long()] = self.saved
        self.written = self.fresh = False

    def _write_single(self) -> None:
        self.prepare()
        self.written = True
        if self._alone is None or not self._alone.hold():
            self._alone = _Tables([self])
        self._alone.run()

    def prepare(self) -> None:
        """Save W on the support before the first write."""
        moved = self.weight.data_ptr() != self._address
        if self.indices is not None and (moved or not self.written):
            # One slot at a time is written into a weight: what this one saves as W must be W.
            owner = _owners.get(self.weight.data_ptr())
            if owner is not None and owner is not self:
                owner.restore()
            _owners[self.weight.data_ptr()] = self
            # If another tensor was put in the weight's place, what it holds is W.
            if self.saved is None or moved:
                with torch.inference_mode(False):
                    self.saved = torch.empty(self.indices.shape, dtype=self.weight.dtype, device=self.weight.device)
            torch.index_select(self.weight.detach().view(-1), 0, self.indices, out=self.saved)
            # Whoever kept W for a backward of its own shall hear of it. Later writes put down the same bits again, or
            # those of the next step, and pass by the counter.
            torch.autograd.graph.increment_version(self.weight)
        self._address = self.weight.data_ptr()

    def note_written(self) -> None:
        """After a write: remember of which U, L and R."""
        self.written = True
        self.versions = tuple([(each, each._version) for each in (self.values, self.L, self.R) if each is not None])

    def is_current(self) -> bool:
        """Whether U, L and R are, as far as autograd's counters tell, what was written."""
        if self.weight.data_ptr() != self._address:
            return False
        for tensor, version in self.versions:  # noqa: SIM110 (a generator takes longer, and this is asked all the time)
            if tensor._version != version:
                return False
        return True

    def is_unchanged(self) -> bool:
        """Whether the layer still is what the last forward computed with."""
        return self.written and self.is_current()

    @property
    def kind(self) -> tuple[Any, ...]:
        """What slots of one table have in common; U, L and R may change their dtype."""
        rank = None if self.packed is None else self.packed[0].shape[0]
        dtypes = (None if each is None else each.dtype for each in (self.weight, self.values, self.L, self.indices))
        return self.weight.device, self.dtype, rank, *dtypes


def room_for_factors(
    weight: Tensor, L: Tensor | None, R: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor] | None:
    """Empty (r', c) and (r', b) for copies of L (c, r) and R (r, b); None without a low-rank part."""
    if L is None or R is None:
        return None
    rank = padded_rank(R.shape[0])
    with torch.inference_mode(False):  # made in an evaluation, used in training
        left, right = (torch.empty((rank, size), dtype=dtype, device=R.device) for size in weight.shape)
    return left, right


# By the address of their weight: the slots that wrote last.
_owners: "weakref.WeakValueDictionary[int, WeightSlot]" = weakref.WeakValueDictionary()


class BatchedWriter:
    """All layers of a model, written together: the first layer of a forward writes for those after it.

    A layer takes what is written once, and in the order in which layers are called; when it asks again, or out of turn,
    everything is written anew: an optimizer may have changed U, L and R without a trace in autograd's version counters.
    """

    # Of how many sets of adapters it is remembered what was written together.
    _SETS = 16

    def __init__(self) -> None:
        self._last = -1
        # What was written together before it was restored together, the latest first, and whether nothing was since.
        self._before: list[list[_Tables]] = []
        self._is_restored = False
        self._slots: weakref.WeakValueDictionary[int, WeightSlot] = weakref.WeakValueDictionary()
        self._counter = itertools.count()
        self._tables: list[_Tables] = []

    def __deepcopy__(self, memo: dict[int, Any]) -> "BatchedWriter":
        return BatchedWriter()

    def __reduce__(self) -> Any:
        return BatchedWriter, ()

    def add(self, slot: WeightSlot) -> WeightSlot:
        """Take part from now on."""
        slot.place = next(self._counter)
        self._slots[slot.place] = slot
        self._tables = []
        return slot

    def refresh(self, *slots: WeightSlot) -> None:
        """Make the weights and the copies of `slots` current, in this order."""
        if torch._C._current_graph_task_id() != -1:
            # Inside a backward (gradient checkpointing): what its forward used still holds.
            for slot in slots:
                slot.ensure()
            return
        for slot in slots:
            if not slot.written:
                if not (self._is_restored and self._write_again(slot)):
                    slot._write_single()
            elif not (slot.fresh and slot.place > self._last and slot.is_current()):
                self._run()
            slot.fresh = False
            self._last = slot.place
        self._is_restored = False

    def restore(self) -> None:
        """Put the bits of all weights back, before other adapters are used; what a `refresh` wrote, in one launch.

        The forward that uses these adapters again writes them together.
        """
        if self._tables and all([tables.hold() for tables in self._tables]):
            for tables in self._tables:
                tables.restore()
            self._before = [self._tables, *(each for each in self._before if each is not self._tables)][: self._SETS]
            self._is_restored = True
        for slot in self._slots.values():
            if slot.written:
                slot.restore()

    @staticmethod
    def restore_others(weight: Tensor) -> None:
        """Put the bits of a weight back that is also another model's, whose adapter is written into it."""
        owner = _owners.get(weight.data_ptr()) if type(weight) in (nn.Parameter, Tensor) else None
        if owner is not None and owner.written:
            owner.restore()

    def forget(self) -> None:
        """Write no layer for another from now on, until all have been used again: one may have left."""
        self._before = []

    def drop(self, *slots: WeightSlot) -> None:
        """Write these no more, though a graph or a group of layers may still hold them: nobody would restore them."""
        for slot in slots:
            self._slots.pop(slot.place, None)
        self._before, self._tables = [], []

    def _write_again(self, slot: WeightSlot) -> bool:
        """Write what was written together with this slot before, if it can be."""
        for before in self._before:
            if any(tables.has(slot) for tables in before):
                if not all(tables.can_return() for tables in before):
                    return False
                self._tables = before
                for tables in before:
                    tables.prepare()
                    tables.run(fresh=True)
                return True
        return False

    def _run(self) -> None:
        # The tables are of all slots that were written when they were made: one that is written since makes new ones.
        count = sum([slot.written for slot in self._slots.values()])
        if count != sum([tables.count for tables in self._tables]) or not all([each.hold() for each in self._tables]):
            groups: dict[Any, list[WeightSlot]] = {}
            for slot in self._slots.values():
                if slot.written:
                    slot.prepare()
                    groups.setdefault(slot.kind, []).append(slot)
            self._tables = [_Tables(slots) for slots in groups.values()]
        for tables in self._tables:
            tables.run(fresh=True)


class _Tables:
    """The device tables of some slots of one kind, all of them prepared."""

    def __init__(self, slots: list[WeightSlot]) -> None:
        self.count = len(slots)
        self._slots = [weakref.ref(slot) for slot in slots]
        self._addresses = self._now(slots)
        self._write = self._pack = None
        writes = [
            (slot.weight, slot.indices, slot.values, slot.saved)
            for slot in slots
            if slot.indices is not None and slot.values is not None and slot.saved is not None
        ]
        if writes:
            self._write = write_kernels.write_table(writes)
        packs = []
        for slot in slots:
            if slot.L is not None and slot.R is not None and slot.packed is not None:
                packs.append((slot.L.detach().t(), slot.scaling, slot.packed[0]))
                packs.append((slot.R.detach(), 1.0, slot.packed[1]))
        if packs:
            self._pack = write_kernels.pack_table(packs)

    @staticmethod
    def _now(slots: list[Any]) -> list[int]:
        """Where everything lies that a table names; a tensor of another dtype lies elsewhere too."""
        tensors = [(slot.weight, slot.values, slot.saved, slot.L, slot.R) for slot in slots]
        return [tensor.data_ptr() for each in tensors for tensor in each if tensor is not None]

    def hold(self) -> bool:
        """Whether these tables still say where the slots are, and all of them are written."""
        return self._hold(written=True)

    def can_return(self) -> bool:
        """Whether these tables still say where the slots are, none of them is written, and all layers are called."""
        return self._hold(written=False) and all([slot.is_called() for ref in self._slots if (slot := ref())])

    def _hold(self, *, written: bool) -> bool:
        slots = [ref() for ref in self._slots]
        as_asked = [slot is not None and slot.written is written for slot in slots]
        return all(as_asked) and self._now(slots) == self._addresses

    def has(self, slot: WeightSlot) -> bool:
        return any([ref() is slot for ref in self._slots])

    def prepare(self) -> None:
        """Save all weights on their supports, before they are written anew."""
        for ref in self._slots:
            slot = ref()
            if slot is not None:
                slot.prepare()

    def restore(self) -> None:
        """Put the bits of all weights back."""
        if self._write is not None:
            write_kernels.restore_supports(self._write)
        for ref in self._slots:
            slot = ref()
            if slot is not None:
                slot.written = slot.fresh = False

    def run(self, *, fresh: bool = False) -> None:
        """Write and copy anew."""
        if self._write is not None:
            write_kernels.write_supports(self._write)
        if self._pack is not None:
            write_kernels.pack_factors(self._pack)
        for ref in self._slots:
            slot = ref()
            if slot is not None:
                slot.note_written()
                slot.fresh = fresh
