"""All figures of a report, and their files; equal findings give equal files."""

import io
from typing import TYPE_CHECKING, Any

from ..findings import GridFindings
from .cost import cost, mean_accuracy
from .curves import curves
from .differences import differences
from .learning_rates import learning_rates

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORMATS = ("png", "svg")


def make_figures(findings: GridFindings) -> "dict[str, Figure]":
    """All figures for which there is data, by name."""
    made = {"curves": curves(findings), "learning_rates": learning_rates(findings)}
    if any(mean_accuracy(result) for result in findings.results):
        made["cost"] = cost(findings)
    if findings.comparisons:
        made["differences"] = differences(findings)
    return made


def render(figure: "Figure", name: str, kind: str) -> bytes:
    """The bytes of a PNG or SVG file, without date, version and random identifiers.

    Args:
        kind: one of FORMATS.
    """
    import matplotlib

    metadata: dict[str, Any] = {"Software": None} if kind == "png" else {"Date": None, "Creator": None}
    file = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": name, "svg.fonttype": "none"}):
        figure.savefig(file, format=kind, dpi=150, metadata=metadata)
    return file.getvalue()
