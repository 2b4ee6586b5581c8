"""Peak of the memory that PyTorch allocates on a CUDA device."""

import torch


class PeakMemory:
    """The peak of allocated CUDA memory since this was made, in bytes; 0 on other devices.

    Making one resets the device's peak statistics.

    Attributes:
        before: bytes that were allocated when this was made.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device if device.type == "cuda" else None
        self._peak = self.before = 0
        if self._device is not None:
            torch.cuda.synchronize(self._device)
            torch.cuda.reset_peak_memory_stats(self._device)
            self.before = torch.cuda.memory_allocated(self._device)

    def read(self) -> int:
        """Wait for the device and return the peak so far.

        Others may reset the statistics in between (Axolotl does at every log): earlier readings count too.
        """
        if self._device is not None:
            torch.cuda.synchronize(self._device)
            self._peak = max(self._peak, torch.cuda.max_memory_allocated(self._device))
        return self._peak
