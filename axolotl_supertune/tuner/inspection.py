"""Inspection of a saved adapter: what each layer holds, where its support lies, and how far its weights moved."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor

from ..method.adapter_files import WEIGHTS
from .checkpoint import read_adapter, read_config
from .config import SupraConfig
from .layer_names import adapted_layers, base_name

# In the order of a block's forward pass.
_KINDS = ("q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj", "gate_proj", "up_proj", "gate_up_proj", "down_proj")
_CELLS = 64  # of the picture, along a side of a matrix
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
_KNOBS_OF_A_SUM = ("lora_alpha", "values_dtype")


@dataclass(frozen=True)
class LayerReport:
    """One adapted layer.

    Attributes:
        layer: its name in the base model.
        rows, columns: its shape, (out_features, in_features).
        rank, entries, density, parameters: what was trained; density is entries / (rows·columns).
        rows_touched, columns_touched: how many hold at least one entry.
        moved_rms, moved_max: root mean square and largest |U|, over the entries.
        sparse_norm, low_rank_norm: Frobenius norms ‖U‖ and ‖γ·L·R‖.
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

    @property
    def kind(self) -> str:
        """The last part of its name, such as q_proj."""
        return self.layer.rpartition(".")[2]

    @property
    def block(self) -> int:
        """The number of its block: the first number in its name, or 0."""
        number = re.search(r"\d+", self.layer)
        return int(number[0]) if number else 0


@dataclass(frozen=True)
class KindReport:
    """All adapted layers of one kind, such as q_proj.

    Attributes:
        kind: the last part of their names.
        layers: how many they are.
        shapes, ranks: the different (out_features, in_features) and ranks among them, sorted.
        entries, parameters: what was trained, summed.
        density: entries / weights of these layers.
        rows_touched, columns_touched: share of the rows and columns that hold at least one entry, in [0, 1].
        moved_rms, moved_max: root mean square and largest |U|, over the entries.
        low_rank_rms: root mean square of γ·L·R, over all weights of these layers.
    """

    kind: str
    layers: int
    shapes: list[tuple[int, int]]
    ranks: list[int]
    entries: int
    parameters: int
    density: float
    rows_touched: float
    columns_touched: float
    moved_rms: float
    moved_max: float
    low_rank_rms: float


@dataclass(frozen=True)
class AdapterReport:
    """A saved adapter, read and measured.

    Attributes:
        config: its PEFT config.
        tensors: as `read_adapter` gives them.
        layers: one report per layer, in the model's order.
        size: of adapter_model.safetensors, in bytes.
    """

    config: SupraConfig
    tensors: Mapping[str, Tensor]
    layers: list[LayerReport]
    size: int

    @property
    def awaits_gradient(self) -> bool:
        """Whether the support is still to be chosen by gradients: the stored indices are placeholders."""
        return bool(self.config.awaits_gradient and any(layer.entries for layer in self.layers))

    def as_json(self) -> dict[str, Any]:
        """Knobs, provenance, kinds of layer and layers, for a JSON file."""
        config = self.config
        knobs: dict[str, Any] = {name: getattr(config, name) for name in _KNOBS}
        if config.combination is not None:  # the summed adapters had knobs of their own
            knobs |= {name: None for name in _KNOBS if name not in _KNOBS_OF_A_SUM}
            knobs["combination"] = {key: value for key, value in config.combination.items() if key != "layers"}
        return {
            "base_model": config.base_model_name_or_path,
            "bytes": self.size,
            "calibration": config.calibration,
            "gradient": config.gradient,
            "awaits_gradient": self.awaits_gradient,
            **knobs,
            "kinds": [asdict(kind) for kind in kind_reports(self.layers)],
            "layers": [asdict(layer) for layer in self.layers],
        }


def read_report(folder: Path) -> AdapterReport:
    """Read and measure the adapter in a folder; no base model is needed.

    Raises:
        ValueError: there is no Supra adapter, or its file is damaged.
        OSError: a file cannot be read.
    """
    config = read_config(folder)
    tensors = read_adapter(folder)
    size = (folder / WEIGHTS).stat().st_size
    return AdapterReport(config, tensors, layer_reports(tensors, config.lora_alpha), size)


def layer_reports(tensors: Mapping[str, Tensor], lora_alpha: float) -> list[LayerReport]:
    """One report per adapted layer, in the model's order.

    Args:
        tensors: as `read_adapter` gives them.
        lora_alpha: α; γ = α/r.
    """
    return [_layer_report(tensors, layer, lora_alpha) for layer in adapted_layers(tensors)]


def _layer_report(tensors: Mapping[str, Tensor], layer: str, lora_alpha: float) -> LayerReport:
    """Measure one layer, by its name in the file."""
    rows, columns = tensors[f"{layer}.supra_shape"].tolist()
    indices = tensors.get(f"{layer}.supra_indices", torch.empty(0, dtype=torch.int64)).long()
    U = tensors.get(f"{layer}.supra_values", torch.empty(0))
    L, R = tensors.get(f"{layer}.supra_L"), tensors.get(f"{layer}.supra_R")
    rank, low_rank_norm = 0, 0.0
    if L is not None and R is not None:
        rank = len(R)
        # ‖L·R‖² is the sum of the entries of (LᵀL)⊙(RRᵀ), r × r: L·R, of the layer's size, is not computed.
        square = float(((L.T @ L).double() * (R @ R.T).double()).sum())
        low_rank_norm = lora_alpha / rank * max(square, 0.0) ** 0.5
    return LayerReport(
        layer=base_name(layer),
        rows=rows,
        columns=columns,
        rank=rank,
        entries=len(indices),
        density=len(indices) / (rows * columns),
        parameters=len(indices) + rank * (rows + columns),
        rows_touched=len((indices // columns).unique()),
        columns_touched=len((indices % columns).unique()),
        moved_rms=float(U.square().mean().sqrt()) if len(U) else 0.0,
        moved_max=float(U.abs().max()) if len(U) else 0.0,
        sparse_norm=float(U.norm()),
        low_rank_norm=low_rank_norm,
    )


def kind_reports(reports: Sequence[LayerReport]) -> list[KindReport]:
    """One report per kind of layer, in the order of a block's forward pass; unknown kinds come last, as they appear."""
    kinds = list(dict.fromkeys(report.kind for report in reports))
    kinds.sort(key=lambda kind: _KINDS.index(kind) if kind in _KINDS else len(_KINDS))
    return [summed(kind, [report for report in reports if report.kind == kind]) for kind in kinds]


def summed(kind: str, reports: Sequence[LayerReport]) -> KindReport:
    """The sum of these layers, at least one, under the name `kind`."""
    weights = sum(report.rows * report.columns for report in reports)
    entries = sum(report.entries for report in reports)
    return KindReport(
        kind=kind,
        layers=len(reports),
        shapes=sorted({(report.rows, report.columns) for report in reports}),
        ranks=sorted({report.rank for report in reports}),
        entries=entries,
        parameters=sum(report.parameters for report in reports),
        density=entries / weights,
        rows_touched=sum(report.rows_touched for report in reports) / sum(report.rows for report in reports),
        columns_touched=sum(report.columns_touched for report in reports) / sum(report.columns for report in reports),
        moved_rms=_root(sum(report.sparse_norm**2 for report in reports) / max(entries, 1)),
        # numpy's, as Python's max may lose a NaN.
        moved_max=float(numpy.max([report.moved_max for report in reports])),
        low_rank_rms=_root(sum(report.low_rank_norm**2 for report in reports) / weights),
    )


def _root(square: float) -> float:
    return float(numpy.sqrt(square))


def draw(tensors: Mapping[str, Tensor], reports: Sequence[LayerReport], path: Path) -> None:
    """Draw a PNG of an adapter.

    At the top, how far the weights of each layer moved, by block and kind of layer. Below, for each kind of layer over
    all blocks, where in the matrix the support lies, and how far the weights moved there.
    """
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    kinds = list(dict.fromkeys(report.kind for report in reports))
    blocks = sorted({report.block for report in reports})
    figure, axes = plt.subplots(
        1 + len(kinds), 2, figsize=(9, 2.6 * (1 + len(kinds))), layout="constrained", squeeze=False
    )
    top = figure.add_subplot(axes[0, 0].get_gridspec()[0, :])
    for axis in axes[0]:
        axis.remove()
    image = top.imshow(_moved_by_layer(reports, kinds, blocks), aspect="auto", interpolation="nearest")
    top.set(title="change of a weight, root mean square over the layer", xlabel="block")
    top.set_xticks(range(len(blocks)), [str(block) for block in blocks], fontsize=6)
    top.set_yticks(range(len(kinds)), kinds)
    figure.colorbar(image, ax=top)
    for row, kind in enumerate(kinds, start=1):
        density, moved, (height, width) = support_map(tensors, [report for report in reports if report.kind == kind])
        panels = (density, "support: share of the weights"), (moved, "sparse change, root mean square")
        for axis, (values, title) in zip(axes[row], panels, strict=True):
            image = axis.imshow(values, aspect="auto", interpolation="nearest", extent=(0, width, height, 0))
            axis.set_title(f"{kind}: {title}", fontsize=8)
            axis.tick_params(labelsize=6)
            figure.colorbar(image, ax=axis)
    figure.savefig(path, format="png", dpi=120)
    plt.close(figure)


def _moved_by_layer(reports: Sequence[LayerReport], kinds: Sequence[str], blocks: Sequence[int]) -> numpy.ndarray:
    """Root mean square change of a weight, (kinds, blocks); NaN where there is no layer."""
    squares = numpy.full((len(kinds), len(blocks)), numpy.nan)
    for report in reports:
        cell = kinds.index(report.kind), blocks.index(report.block)
        square = (report.sparse_norm**2 + report.low_rank_norm**2) / (report.rows * report.columns)
        squares[cell] = numpy.nansum([squares[cell], square])
    return numpy.sqrt(squares)


def support_map(
    tensors: Mapping[str, Tensor], reports: Sequence[LayerReport]
) -> tuple[numpy.ndarray, numpy.ndarray, tuple[int, int]]:
    """Where in the matrix the supports of layers of one kind lie, in at most 64 × 64 cells.

    Returns:
        For every cell the share of its weights that are in a support, and the root mean square of U over all its
        weights; and the (rows, columns) of the largest layer.
    """
    rows, columns = max((report.rows, report.columns) for report in reports)
    down, across = min(_CELLS, rows), min(_CELLS, columns)
    cells = down * across
    counts, squares, weights = (torch.zeros(cells, dtype=torch.float64) for _ in range(3))
    names = {base_name(layer): layer for layer in adapted_layers(tensors)}
    for report in reports:
        cell_of_row = torch.arange(report.rows) * down // report.rows
        cell_of_column = torch.arange(report.columns) * across // report.columns
        area = cell_of_row.bincount(minlength=down)[:, None] * cell_of_column.bincount(minlength=across)
        weights += area.flatten()
        if report.entries:
            name = names[report.layer]
            indices = tensors[f"{name}.supra_indices"].long()
            cell = cell_of_row[indices // report.columns] * across + cell_of_column[indices % report.columns]
            counts += cell.bincount(minlength=cells)
            squares += cell.bincount(tensors[f"{name}.supra_values"].double().square(), minlength=cells)
    density, mean_square = ((total / weights).view(down, across) for total in (counts, squares))
    return density.numpy(), mean_square.sqrt().numpy(), (rows, columns)
