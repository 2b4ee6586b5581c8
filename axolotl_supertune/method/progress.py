"""Progress bars on stderr, for work that may take long."""

import sys
from typing import Any

import torch
from tqdm import tqdm

# Work that is shorter shows no bar.
_DELAY_SECONDS = 2.0
# Between two lines where stderr is a file, which keeps them all.
_FILE_SECONDS = 10.0


def progress(description: str, *, total: int | None, unit: str) -> Any:
    """A tqdm bar that appears after two seconds, in the first process only; in a file a line every ten seconds.

    Args:
        description: of what is being done.
        total: of units; None if it is not known.
        unit: what `update` counts.
    """
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    return tqdm(
        desc=description,
        total=total,
        unit=unit,
        delay=_DELAY_SECONDS,
        mininterval=0.1 if sys.stderr.isatty() else _FILE_SECONDS,
        disable=distributed and torch.distributed.get_rank() != 0,
    )
