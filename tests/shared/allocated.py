"""What a block of code allocates on the CPU, counted as CUDA's allocator counts: live bytes and their peak."""

import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def kept_bytes(forward, known):
    """Bytes of the storages that `forward()` keeps for its backward, beside those of the `known` tensors."""
    already = {tensor.untyped_storage().data_ptr() for tensor in known}
    kept = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in already:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        alive = forward()
    del alive
    return sum(kept.values())


class Allocated(TorchDispatchMode):
    """Sees every storage that an operator returns; `known` tensors are there already and do not count.

    Attributes:
        live: bytes of the storages that are alive.
        peak: the most that `live` ever was.
    """

    def __init__(self, known=()):
        super().__init__()
        self.live = self.peak = 0
        self._storages = weakref.WeakKeyDictionary()
        for tensor in known:
            self._storages[tensor.untyped_storage()] = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and not tensor.is_meta:
                self._see(tensor.untyped_storage())
        return result

    def _see(self, storage):
        if storage in self._storages:
            return
        size = storage.nbytes()
        self._storages[storage] = size
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._gone, size)

    def _gone(self, size):
        self.live -= size
