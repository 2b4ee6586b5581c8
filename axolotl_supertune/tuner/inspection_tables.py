"""What `axolotl supertune inspect` prints: an adapter's settings, a table by kind of layer, and one by layer."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..method.adapter_files import WEIGHTS
from .inspection import AdapterReport, KindReport, LayerReport, kind_reports, summed
from .model_card import method_name, settings, with_quantization

if TYPE_CHECKING:
    from rich.table import Table

LEGEND = (
    "entries: single weights that are trained; density: their share of the weights.\n"
    "rows, cols: share of the rows (outputs) and columns (inputs) with an entry.\n"
    "U: change of an entry. γLR: change of every weight by the low-rank part.\n"
    "rms: root mean square; max: the largest, without its sign."
)


def heading(report: AdapterReport, folder: Path) -> str:
    """The adapter's settings and sizes, one a line."""
    config, layers = report.config, report.layers
    entries, parameters = sum(layer.entries for layer in layers), sum(layer.parameters for layer in layers)
    low_rank = parameters - entries
    parts = [f"{entries:,} single weights"] * bool(entries) + [f"{low_rank:,} of the low-rank part"] * bool(low_rank)
    facts = {
        "Base model": with_quantization(config.base_model_name_or_path or "not named", config),
        **settings(config, has_support=bool(entries)),
        "Trained": f"{parameters:,} parameters in {len(layers)} layers: {' and '.join(parts)}",
        **({"In full": ", ".join(config.modules_to_save)} if config.modules_to_save else {}),
        "File": f"{WEIGHTS}, {_size(report.size)}, values in {config.values_dtype}",
    }
    width = max(map(len, facts)) + 1
    lines = [f"  {f'{name}:':<{width}} {text}" for name, text in facts.items()]
    return "\n".join([f"{method_name(config)} adapter {folder}", *lines])


def kind_table(layers: Sequence[LayerReport]) -> "Table":
    """A table by kind of layer, with a last row for all layers; 80 characters wide for a model of 70B."""
    table = _table("layers")
    for kind in kind_reports(layers):
        table.add_row(f"{kind.layers} × {kind.kind}", *_cells(kind))
    table.add_section()
    table.add_row(f"{len(layers)} layers", *_cells(summed("", layers)))
    return table


def layer_table(layers: Sequence[LayerReport]) -> "Table":
    """A table with a row for each layer."""
    table = _table("layer", "shape")
    for layer in layers:
        table.add_row(layer.layer, f"{layer.rows} × {layer.columns}", *_cells(summed(layer.kind, [layer])))
    return table


def _table(*left: str) -> "Table":
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE, show_edge=False, pad_edge=False, collapse_padding=True)
    for name in left:
        table.add_column(name, overflow="fold")
    for name in ("rank", "entries", "density", "rows", "cols", "U rms", "U max", "γLR rms"):
        table.add_column(name, justify="right", no_wrap=True)  # where space is short, names are folded and not numbers
    return table


def _cells(kind: KindReport) -> list[str]:
    sparse, low_rank = bool(kind.entries), bool(kind.ranks[-1])
    return [
        _range(kind.ranks),
        f"{kind.entries:,}",
        f"{100 * kind.density:.3f}%",
        _share(kind.rows_touched),
        _share(kind.columns_touched),
        _change(kind.moved_rms) if sparse else "–",
        _change(kind.moved_max) if sparse else "–",
        _change(kind.low_rank_rms) if low_rank else "–",
    ]


def _range(numbers: Sequence[int]) -> str:
    """`6`, or `4–8`."""
    return str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]}–{numbers[-1]}"


def _share(share: float) -> str:
    """A share as a percentage, rounded down: only all of them are 100 %."""
    return f"{int(100 * share)}%"


def _change(value: float) -> str:
    """Two digits: `0.00025`, `0.020`."""
    return f"{value:#.2g}".rstrip(".")


def _size(size: int) -> str:
    return f"{size / 2**20:.1f} MiB" if size >= 2**20 else f"{size / 2**10:.1f} KiB"
