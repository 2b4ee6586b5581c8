"""Wording that error messages share."""

from collections.abc import Iterable


def listed(names: Iterable[str], limit: int = 3) -> str:
    """The first names, and how many more there are, for messages."""
    every = list(names)
    return ", ".join(every[:limit]) + (f" and {len(every) - limit} more" if len(every) > limit else "")
