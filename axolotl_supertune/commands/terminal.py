"""The terminal that tables are printed on."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console


def console(width: int) -> "Console":
    """A rich console: as wide as the terminal, or `width` characters where stdout is a file or a pipe."""
    from rich.console import Console

    terminal = Console(highlight=False)
    return terminal if terminal.is_terminal else Console(highlight=False, width=width)
