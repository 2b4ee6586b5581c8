"""DDP: every process holds the whole model and a copy of the adapter; gradients are averaged."""

from .engine import Engine


class DDP(Engine):
    """PyTorch's DistributedDataParallel."""

    name = "DDP"

    def reduction_bytes(self, gradients: float, width: int, hidden: int) -> float:
        """Buckets that are filled from the gradients, and as large."""
        return gradients
