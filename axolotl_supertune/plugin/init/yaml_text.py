"""Writes keys, values and comments as YAML."""

import textwrap
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import yaml

_WIDTH = 112


@dataclass(frozen=True)
class Key:
    """A top-level key. The comment stands behind a value on one line where it fits, else above the key."""

    name: str
    value: Any
    comment: str = ""


@dataclass(frozen=True)
class Comment:
    """A paragraph of its own; its line breaks are kept."""

    text: str


def yaml_text(parts: Iterable[Key | Comment | None]) -> str:
    """The YAML of keys and comments; None is an empty line."""
    lines: list[str] = []
    for part in parts:
        if part is None:
            lines.append("")
        elif isinstance(part, Comment):
            lines += _commented(part.text)
        else:
            lines += _key(part)
    return "\n".join(lines) + "\n"


def _key(part: Key) -> list[str]:
    lines = _value(part.name, part.value)
    if not part.comment:
        return lines
    behind = f"{lines[0].ljust(31)} # {part.comment}"
    if len(lines) == 1 and len(behind) <= _WIDTH + 8:
        return [behind]
    return [*_commented(part.comment), *lines]


class _Dumper(yaml.SafeDumper):
    """Writes texts with line breaks on one line, in double quotes."""


def _text(dumper: _Dumper, value: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style='"' if "\n" in value else None)


_Dumper.add_representer(str, _text)


def _value(name: str, value: Any) -> list[str]:
    if isinstance(value, float):
        return [f"{name}: {_rate(value)}"]
    dumped = yaml.dump({name: value}, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=10_000)
    return dumped.rstrip("\n").splitlines()


def _rate(value: float) -> str:
    """YAML 1.1 takes 5e-4 for text: 5.0e-4."""
    if value == 0 or value >= 0.01:
        return repr(value)
    mantissa, exponent = f"{value:e}".split("e")
    return f"{float(mantissa)}e{int(exponent)}"


def _commented(text: str) -> list[str]:
    lines: list[str] = []
    for line in text.split("\n"):
        indent = len(line) - len(line.lstrip())
        wrapped = textwrap.wrap(
            line, _WIDTH, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False
        )
        lines += [f"# {each}".rstrip() for each in wrapped or [""]]
    return lines
