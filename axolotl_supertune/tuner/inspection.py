"""Inspection of an adapter: what is in it, where its support lies, and how far it moved."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table
    from torch import Tensor

    from . import SupraConfig

# Cells along the longer side of a matrix in the picture.
_CELLS = 64
_KNOBS = (
    "r0",
    "sparse_density",
    "supra_lambda",
    "mask_score",
    "sparse_direction",
    "support_scope",
    "budget_scope",
    "lora_alpha",
    "values_dtype",
)


@dataclass(frozen=True)
class LayerReport:
    """One adapted layer.

    Attributes:
        layer, rows, columns: its name in the base model, and its shape (c, b).
        rank, entries, density, parameters: what was trained; density is entries / (c·b).
        rows_touched, columns_touched: that hold an entry at least.
        moved_rms, moved_max: of U, over its entries.
        low_rank_norm: ‖γ·L·R‖ (Frobenius), beside `sparse_norm`, ‖U‖.
    """

    layer: str
    rows: int
    columns: int
    rank: int
    entries: int
    density: float
    parameters: int
    rows_touched: int
    columns_touched: int
    moved_rms: float
    moved_max: float
    sparse_norm: float
    low_rank_norm: float


@dataclass(frozen=True)
class AdapterReport:
    """A saved adapter, read and measured.

    Attributes:
        config: its PEFT config.
        tensors: as `read_adapter` gives them.
        layers: one report a layer, in the model's order.
        size: of adapter_model.safetensors, in bytes.
    """

    config: "SupraConfig"
    tensors: "dict[str, Tensor]"
    layers: list[LayerReport]
    size: int

    @property
    def awaits_gradient(self) -> bool:
        """Whether the support is still to be chosen by gradients: the stored indices are placeholders."""
        return bool(self.config.awaits_gradient and any(layer.entries for layer in self.layers))

    def as_json(self) -> dict[str, Any]:
        """Knobs, provenance and layers, for a JSON file."""
        config = self.config
        knobs: dict[str, Any] = {name: getattr(config, name) for name in _KNOBS}
        if config.combination is not None:  # the summed adapters had knobs of their own
            knobs |= dict.fromkeys(_KNOBS[:-2])
            knobs["combination"] = {key: value for key, value in config.combination.items() if key != "layers"}
        return {
            "base_model": config.base_model_name_or_path,
            "bytes": self.size,
            "calibration": config.calibration,
            "gradient": config.gradient,
            "awaits_gradient": self.awaits_gradient,
            **knobs,
            "layers": [asdict(layer) for layer in self.layers],
        }


def read_report(folder: Path) -> AdapterReport:
    """Read and measure the adapter in a folder; no base model is needed.

    Raises:
        ValueError: no Supra adapter is there, or its file is damaged.
        OSError: a file cannot be read.
    """
    from . import read_adapter
    from .checkpoint import read_config

    config = read_config(folder)
    tensors = read_adapter(folder)
    size = (folder / "adapter_model.safetensors").stat().st_size
    return AdapterReport(config, tensors, layer_reports(tensors, config.lora_alpha), size)


def layer_reports(tensors: "dict[str, Tensor]", lora_alpha: float) -> list[LayerReport]:
    """One report per adapted layer, in the model's order.

    Args:
        tensors: as `read_adapter` gives them.
        lora_alpha: α; γ = α/r.
    """
    import torch

    from .export import adapted

    reports = []
    for layer in adapted(tensors):
        part = {name: tensors.get(f"{layer}.supra_{name}") for name in ("indices", "values", "L", "R")}
        rows, columns = tensors[f"{layer}.supra_shape"].tolist()
        indices, values, L, R = (part[name] for name in ("indices", "values", "L", "R"))
        where = torch.empty(0, dtype=torch.int64) if indices is None else indices.long()
        U = torch.empty(0) if values is None else values
        rank = 0 if R is None else len(R)
        # ‖L·R‖² is the sum of the entries of (LᵀL)⊙(RRᵀ): nothing of the layer's size is made.
        square = 0.0 if L is None or R is None else float(((L.T @ L).double() * (R @ R.T).double()).sum())
        reports.append(
            LayerReport(
                layer=layer.removeprefix("base_model.model."),
                rows=rows,
                columns=columns,
                rank=rank,
                entries=len(where),
                density=len(where) / (rows * columns),
                parameters=len(where) + rank * (rows + columns),
                rows_touched=len((where // columns).unique()),
                columns_touched=len((where % columns).unique()),
                moved_rms=float(U.square().mean().sqrt()) if len(U) else 0.0,
                moved_max=float(U.abs().max()) if len(U) else 0.0,
                sparse_norm=float(U.norm()),
                low_rank_norm=lora_alpha / rank * max(square, 0.0) ** 0.5 if rank else 0.0,
            )
        )
    return reports


def report_table(reports: list[LayerReport], title: str) -> "Table":
    """The reports, and their totals."""
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for at, name in enumerate(
        ("layer", "shape", "rank", "entries", "density", "rows", "columns", "U, rms", "U, max", "‖U‖", "γ‖LR‖")
    ):
        table.add_column(name, justify="right" if at > 1 else "left", overflow="fold")
    for each in reports:
        table.add_row(
            each.layer,
            f"{each.rows} × {each.columns}",
            str(each.rank),
            f"{each.entries:,}",
            f"{each.density:.3%}",
            f"{each.rows_touched / each.rows:.0%}",
            f"{each.columns_touched / each.columns:.0%}",
            f"{each.moved_rms:.2e}",
            f"{each.moved_max:.2e}",
            f"{each.sparse_norm:.3g}",
            f"{each.low_rank_norm:.3g}",
        )
    table.add_section()
    entries, parameters = sum(each.entries for each in reports), sum(each.parameters for each in reports)
    table.add_row(f"{len(reports)} layers", f"{parameters:,} parameters", "", f"{entries:,}", *[""] * 7)
    return table


def draw(tensors: "dict[str, Tensor]", reports: list[LayerReport], path: Path) -> None:
    """A PNG: how far each layer moved, by block and kind; and of each kind of layer, where in the matrix the support
    lies and how far it moved there, over all blocks."""
    import re

    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt
    import numpy

    kinds = list(dict.fromkeys(each.layer.rpartition(".")[2] for each in reports))
    numbers = [re.findall(r"\d+", each.layer) for each in reports]
    blocks = sorted({int(found[0]) if found else 0 for found in numbers})
    moved = numpy.full((len(kinds), len(blocks)), numpy.nan)
    for each, found in zip(reports, numbers, strict=True):
        at = kinds.index(each.layer.rpartition(".")[2]), blocks.index(int(found[0]) if found else 0)
        norm = (each.sparse_norm**2 + each.low_rank_norm**2) / (each.rows * each.columns)
        moved[at] = numpy.nansum([moved[at], norm])
    figure, axes = plt.subplots(
        1 + len(kinds), 2, figsize=(9, 2.6 * (1 + len(kinds))), layout="constrained", squeeze=False
    )
    top = figure.add_subplot(axes[0, 0].get_gridspec()[0, :])
    for each in axes[0]:
        each.remove()
    image = top.imshow(numpy.sqrt(moved), aspect="auto", interpolation="nearest")
    top.set(title="change of a weight, root mean square over the layer", xlabel="block")
    top.set_xticks(range(len(blocks)), [str(block) for block in blocks], fontsize=6)
    top.set_yticks(range(len(kinds)), kinds)
    figure.colorbar(image, ax=top)
    for row, kind in enumerate(kinds, start=1):
        counts, squares, shape = _where(tensors, [each for each in reports if each.layer.rpartition(".")[2] == kind])
        panels = (counts, "support: share of the weights"), (squares, "sparse change, root mean square")
        for axis, (values, title) in zip(axes[row], panels, strict=True):
            image = axis.imshow(values, aspect="auto", interpolation="nearest", extent=(0, shape[1], shape[0], 0))
            axis.set_title(f"{kind}: {title}", fontsize=8)
            axis.tick_params(labelsize=6)
            figure.colorbar(image, ax=axis)
    figure.savefig(path, format="png", dpi=120)
    plt.close(figure)


def _where(tensors: "dict[str, Tensor]", reports: list[LayerReport]) -> tuple[Any, Any, tuple[int, int]]:
    """Over layers of one kind, by cells of the matrix: density of the support, and rms of U spread over all weights."""
    import torch

    rows, columns = max((each.rows, each.columns) for each in reports)
    down, across = min(_CELLS, rows), min(_CELLS, columns)
    counts, squares = (torch.zeros(down * across, dtype=torch.float64) for _ in range(2))
    weights = torch.zeros(down * across, dtype=torch.float64)
    for each in reports:
        cell_of_row = torch.arange(each.rows) * down // each.rows
        cell_of_column = torch.arange(each.columns) * across // each.columns
        area = cell_of_row.bincount(minlength=down)[:, None] * cell_of_column.bincount(minlength=across)
        weights += area.flatten()
        name = next(key for key in (f"base_model.model.{each.layer}", each.layer) if f"{key}.supra_shape" in tensors)
        if each.entries:
            where = tensors[f"{name}.supra_indices"].long()
            cells = cell_of_row[where // each.columns] * across + cell_of_column[where % each.columns]
            counts += cells.bincount(minlength=down * across)
            squares += cells.bincount(tensors[f"{name}.supra_values"].double().square(), minlength=down * across)
    shaped = [(each / weights).view(down, across) for each in (counts, squares)]
    return shaped[0].numpy(), shaped[1].sqrt().numpy(), (rows, columns)
