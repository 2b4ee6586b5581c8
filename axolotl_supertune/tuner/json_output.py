"""JSON on stdout that a pipe into a parser can read: nothing else is printed there, and every number is one of JSON's.

Axolotl prints its banner, and logs, on stdout, and does so before it imports a command of ours: only the start-up hook
(`_autoload`) is early enough. Where it is off, the banner stands before the JSON.
"""

import json
import math
import os
import sys
from collections.abc import Sequence
from typing import Any

import click

# Commands whose `--json` is a flag.
_COMMANDS = ("inspect", "overlap")
_reserved: int | None = None


def reserve_stdout(argv: Sequence[str]) -> None:
    """Of a process whose command line asks for JSON, let all that is printed on stdout go to stderr from now on.

    Args:
        argv: the command line without the program's name.
    """
    global _reserved
    words = [word for word in argv if not word.startswith("-")]
    if _reserved is None and words[:1] == ["supertune"] and words[1:2] and words[1] in _COMMANDS and "--json" in argv:
        sys.stdout.flush()
        _reserved = os.dup(1)
        os.dup2(2, 1)


def print_json(value: Any) -> None:
    """Print a value as JSON, indented, on the stdout that this process was started with; NaN and ∞ become null."""
    text = json.dumps(_finite(value), indent=2, allow_nan=False)
    if _reserved is None:
        click.echo(text)
        return
    with open(_reserved, "w", encoding="utf-8", closefd=False) as stdout:
        stdout.write(text + "\n")


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
