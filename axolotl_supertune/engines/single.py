"""One process on one device: the defaults of `Engine`."""

from .engine import Engine


class SingleProcess(Engine):
    """One process on one GPU, or on the CPU."""


ONE_PROCESS = SingleProcess()
