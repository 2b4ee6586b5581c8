"""Tables as CSV, JSON and LaTeX. Markdown is written by templates/report.md.jinja."""

import math
import re
from typing import Any

import pandas as pd

from .tables import Record, Table, rounded

# Headings of columns that are aligned left; all others are numbers, aligned right.
TEXT_COLUMNS = frozenset({"method", "of", "verdict", "by seed"})


def csv_text(table: Table) -> str:
    """The records with a header line; None is an empty cell, NaN is `nan`."""
    rows = [{key: _csv_value(value) for key, value in record.items()} for record in table.records]
    return pd.DataFrame(rows, dtype=object).to_csv(index=False, lineterminator="\n")


def _csv_value(value: Any) -> Any:
    # pandas would leave the cell of NaN empty, as that of None.
    return str(value) if isinstance(value, float) and math.isnan(value) else rounded(value)


def json_records(table: Table) -> list[Record]:
    """The records, rounded, with None for NaN and infinity."""
    return [{key: _finite(rounded(value)) for key, value in record.items()} for record in table.records]


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def latex(table: Table) -> str:
    """A floating table as wide as the text; needs the packages booktabs and graphicx."""
    tabular = (
        table.cells.style.hide(axis="index")
        .format(_tex)
        .format_index(lambda heading: rf"\textbf{{{_tex(heading)}}}", axis="columns")
        .to_latex(column_format="".join("l" if name in TEXT_COLUMNS else "r" for name in table.cells), hrules=True)
    )
    lines = [
        r"\begin{table}[htbp]",
        r"\centering",
        r"\scriptsize",
        rf"\caption{{{_tex(table.title)}.}}",
        rf"\label{{tab:{table.name}}}",
        r"\resizebox{\textwidth}{!}{%",
        tabular + "}",
        r"\end{table}",
    ]
    return "\n".join(lines) + "\n"


_TEX = {
    "\\": r"\textbackslash{}",
    **{sign: f"\\{sign}" for sign in "&%$#_{}"},
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "–": "--",
    "±": r"$\pm$",
    "×": r"$\times$",
    "λ": r"$\lambda$",
    "β": r"$\beta$",
    "‡": r"$^\ddagger$",
    "<": r"$<$",
    ">": r"$>$",
}


def _tex(text: str) -> str:
    """Escape a text for LaTeX; a learning rate (5e-4) becomes a power of ten."""
    if rate := re.fullmatch(r"(\d(?:\.\d+)?)e(-?\d+)", text):
        factor, power = rate.groups()
        return f"$10^{{{power}}}$" if factor == "1" else rf"${factor}\cdot10^{{{power}}}$"
    # A bracket at the start of a row would be read as an argument of the \\ before it.
    return re.sub(r"^\[", "{[}", "".join(_TEX.get(sign, sign) for sign in text))
