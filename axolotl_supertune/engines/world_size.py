"""How many processes the launcher started."""

import os


def launched_processes() -> int:
    """How many processes the launcher says that it started: `WORLD_SIZE`, else 1."""
    return int(os.environ.get("WORLD_SIZE") or 1)
