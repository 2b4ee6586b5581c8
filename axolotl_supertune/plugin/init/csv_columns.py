"""Finds columns and fields of a CSV file that Axolotl would not read as text: pandas reads it, and guesses types."""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

# pandas reads these fields as nothing (`keep_default_na`), quoted or not.
NOTHING = frozenset(
    {"", "#N/A", "#N/A N/A", "#NA", "-1.#IND", "-1.#QNAN", "-NaN", "-nan", "1.#IND", "1.#QNAN", "<NA>"}
    | {"N/A", "NA", "NULL", "NaN", "None", "n/a", "nan", "null"}
)
_NUMBER = re.compile(r"\s*[-+]?(\d+\.?\d*(e[-+]?\d+)?|\.\d+(e[-+]?\d+)?)\s*|[-+]?inf(inity)?", re.ASCII | re.IGNORECASE)
_SHOWN = 3


class CsvColumns:
    """What the fields of the columns that are trained on would be read as; give it the records one by one.

    Args:
        path: the file, for the messages.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._kinds: dict[str, set[str]] = {}
        self._lost: list[str] = []
        self._lost_count = 0

    def add(self, where: str, record: Mapping[str, str], columns: Iterable[str], context: str) -> None:
        """Look at a record.

        Args:
            where: its place.
            record: its fields.
            columns: those that are trained on.
            context: the one of them that may be empty; "" if there is none.
        """
        lost = []
        for name in columns:
            field = record[name]
            if field not in NOTHING:
                self._kinds.setdefault(name, set()).add(_kind(field))
            elif name != context:
                lost.append(f"{name} is {field!r}" if field else f"an empty {name}")
        if lost:
            self._lost_count += 1
            if len(self._lost) < _SHOWN:
                self._lost.append(f"{where}: {', '.join(lost)}")

    def check(self) -> None:
        """Refuse what would not be read as text.

        Raises:
            ValueError: names the column, or the records and their fields, and the remedy.
        """
        for name, kinds in self._kinds.items():
            if kinds in ({"numbers"}, {"true and false"}):
                kind = next(iter(kinds))
                raise ValueError(
                    f"--data {self._path}: the column {name} holds only {kind}, which Axolotl reads from CSV as {kind} "
                    f"and not as text. Save the file as .jsonl, with the {kind} in quotes."
                )
        if self._lost_count:
            more = f"; and {self._lost_count - _SHOWN} more" if self._lost_count > _SHOWN else ""
            raise ValueError(
                f"--data {self._path}: {self._lost_count} records have a field that Axolotl reads from CSV as no text "
                f"at all. {'; '.join(self._lost)}{more}. Remove them; if the word is meant, save the file as .jsonl."
            )


def _kind(field: str) -> str:
    if field.lower() in ("true", "false"):
        return "true and false"
    return "numbers" if _NUMBER.fullmatch(field) else "text"
