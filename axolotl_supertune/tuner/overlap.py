"""Overlap of supports: how many trained entries adapters of one base share, beside what chance would give."""

import csv
import io
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .base_digest import compared
from .checkpoint import read_adapter, read_config
from .config import SupraConfig
from .layer_names import adapted_layers, base_name

if TYPE_CHECKING:
    from rich.table import Table

POOLED = "all layers"


@dataclass(frozen=True)
class Support:
    """The support of one layer: sorted flat indices into (rows, columns), int64."""

    rows: int
    columns: int
    indices: Tensor


@dataclass(frozen=True)
class Overlap:
    """The shared entries of two supports, of one layer or of many layers pooled.

    Attributes:
        a, b: the adapters' names.
        layer: its name; `*.KIND` or `all layers` where layers are pooled.
        size: number of weights.
        in_a, in_b, shared: numbers of entries.
        chance: entries that random supports of these sizes share on average; added up over pooled layers.
    """

    a: str
    b: str
    layer: str
    size: int
    in_a: int
    in_b: int
    shared: int
    chance: float

    @property
    def jaccard(self) -> float | None:
        """Jaccard index: entries in both supports by entries in either; None where both are empty."""
        return _jaccard(self.shared, self.in_a + self.in_b)

    @property
    def expected(self) -> float | None:
        """The Jaccard index of random supports, to within one part in their number of entries."""
        return _jaccard(self.chance, self.in_a + self.in_b)

    def record(self) -> dict[str, object]:
        """All numbers, for JSON or CSV."""
        return asdict(self) | {"jaccard": self.jaccard, "expected_jaccard": self.expected}


def _jaccard(shared: float, both: int) -> float | None:
    """Jaccard index of two sets.

    Args:
        both: the sum of their sizes.
    """
    return shared / (both - shared) if both else None


def read_supports(folders: Sequence[Path]) -> list[dict[str, Support]]:
    """The supports of saved adapters by layer, in the model's order; a layer without a sparse part has an empty one.

    Raises:
        ValueError: no Supra adapter, a damaged one, one whose support is still to be chosen, or one of other layers or
            shapes than the first; the message says what differs.
    """
    adapters: list[dict[str, Support]] = []
    for folder in folders:
        config = read_config(folder)
        if config.awaits_gradient and config.supra_lambda < 1:
            raise ValueError(
                f"{folder} was written during low_rank_warmup_steps: its support is still to be chosen; take a later "
                "checkpoint."
            )
        tensors = read_adapter(folder)
        supports = {}
        for layer in adapted_layers(tensors):
            rows, columns = tensors[f"{layer}.supra_shape"].tolist()
            indices = tensors.get(f"{layer}.supra_indices", tensors[f"{layer}.supra_shape"][:0]).long()
            supports[base_name(layer)] = Support(rows, columns, indices)
        adapters.append(supports)
        _check_layers(adapters[0], supports, folders[0], folder)
    return adapters


def _check_layers(first: Mapping[str, Support], other: Mapping[str, Support], folder: Path, other_folder: Path) -> None:
    """Refuse adapters of different layers or shapes."""
    unshared = sorted(first.keys() ^ other.keys())
    if unshared:
        names = ", ".join(unshared[:3]) + (f" and {len(unshared) - 3} more" if len(unshared) > 3 else "")
        raise ValueError(f"{other_folder} and {folder} adapt different layers: only one of them has {names}.")
    for name, support in first.items():
        compared_to = other[name]
        if (support.rows, support.columns) != (compared_to.rows, compared_to.columns):
            raise ValueError(
                f"{name} is {compared_to.rows} × {compared_to.columns} in {other_folder} and {support.rows} × "
                f"{support.columns} in {folder}: they are of different bases."
            )


def notes_on_bases(folders: Sequence[Path]) -> list[str]:
    """Notes on adapters whose base differs from the first one's by name, revision or quantization.

    Their layers are alike, but equal indices may name different weights. If the files of both bases are on this
    machine, the note says whether they hold the same weights.
    """
    first, *others = [_base(read_config(folder)) for folder in folders]
    notes = []
    for base in dict.fromkeys(others):
        if base == first:
            continue
        adapters = ", ".join(str(folder) for folder, other in zip(folders[1:], others, strict=True) if other == base)
        differences = []
        if base[:2] != first[:2]:
            first_name, name = (
                f"{name} (revision {revision})" if revision else name for name, revision, _ in (first, base)
            )
            differences.append(f"{name} and {first_name}: {compared(first[:2], base[:2])}")
        if base[2] != first[2]:
            differences.append(
                f"base_quantization {base[2]} and {first[2]}, so that scores were not of the same numbers"
            )
        notes.append(f"{adapters} and {folders[0]} name different bases, {'; '.join(differences)}.")
    return notes


def _base(config: SupraConfig) -> tuple[str, str | None, str]:
    """Name or real folder, revision and quantization of an adapter's base."""
    name = config.base_model_name_or_path or "an unnamed one"
    quantization = json.dumps(config.base_quantization, sort_keys=True) if config.base_quantization else "none"
    return os.path.realpath(name) if os.path.isdir(name) else name, config.revision, quantization


def overlaps(supports: Mapping[str, Mapping[str, Support]]) -> list[Overlap]:
    """The overlaps of every pair of adapters.

    Args:
        supports: adapter → layer → support; the same layers in all.

    Returns:
        For each pair: its layers, the kinds of layers (`*.q_proj`) that several layers are of, and all layers pooled.
    """
    records = []
    for a, b in combinations(supports, 2):
        layers = [_layer_overlap(a, b, name, support, supports[b][name]) for name, support in supports[a].items()]
        kinds: dict[str, list[Overlap]] = {}
        for layer in layers:
            kinds.setdefault(layer.layer.rpartition(".")[2], []).append(layer)
        records += layers
        records += [_pooled(f"*.{kind}", of_kind) for kind, of_kind in kinds.items() if len(of_kind) > 1]
        records.append(_pooled(POOLED, layers))
    return records


def _layer_overlap(a: str, b: str, layer: str, first: Support, second: Support) -> Overlap:
    _, counts = torch.cat([first.indices, second.indices]).unique(return_counts=True)
    size, in_a, in_b = first.rows * first.columns, len(first.indices), len(second.indices)
    return Overlap(a, b, layer, size, in_a, in_b, int((counts == 2).sum()), in_a * in_b / size)


def _pooled(name: str, layers: Sequence[Overlap]) -> Overlap:
    def total(attribute: str) -> int:
        return sum(getattr(layer, attribute) for layer in layers)

    chance = sum(layer.chance for layer in layers)
    return Overlap(layers[0].a, layers[0].b, name, total("size"), total("in_a"), total("in_b"), total("shared"), chance)


def short_names(folders: Sequence[Path]) -> list[str]:
    """Short names that tell folders apart: their paths without the first and last parts that all share.

    Raises:
        ValueError: a folder is named twice.
    """
    paths = [Path(os.path.abspath(folder)).parts for folder in folders]
    if len(set(paths)) < len(paths):
        raise ValueError("an adapter is named twice; compare different ones.")
    start, end, shortest = 0, 0, min(map(len, paths))
    while start < shortest - 1 and len({parts[start] for parts in paths}) == 1:
        start += 1
    while end < shortest - start - 1 and len({parts[-1 - end] for parts in paths}) == 1:
        end += 1
    return ["/".join(parts[start : len(parts) - end]) for parts in paths]


def layer_table(pairs: Sequence[Overlap]) -> "Table":
    """One pair of adapters, layer by layer."""
    from rich.table import Table

    table = Table(title=f"a: {pairs[0].a}, b: {pairs[0].b}", title_justify="left")
    for name in ("layer", "entries of a", "of b", "shared", "Jaccard", "of random supports"):
        table.add_column(name, justify="left" if name == "layer" else "right", overflow="fold")
    layers = sum(not pair.layer.startswith("*.") and pair.layer != POOLED for pair in pairs)
    for number, pair in enumerate(pairs):
        if number == layers or pair.layer == POOLED:
            table.add_section()
        counts = (f"{count:,}" for count in (pair.in_a, pair.in_b, pair.shared))
        table.add_row(pair.layer, *counts, _shown(pair.jaccard), _shown(pair.expected))
    return table


def matrix(pairs: Sequence[Overlap], names: Sequence[str]) -> "Table":
    """All pairs, pooled over the layers; in brackets the Jaccard index of random supports of those sizes."""
    from rich.table import Table

    pooled = {frozenset((pair.a, pair.b)): pair for pair in pairs if pair.layer == POOLED}
    title = "Jaccard index of the supports, all layers pooled (in brackets: of random supports of these sizes)"
    table = Table(title=title, title_justify="left")
    for heading in ("", *names):
        table.add_column(heading, justify="right" if heading else "left", overflow="fold")
    for name in names:
        row = (pooled.get(frozenset((name, other))) for other in names)
        cells = ("" if pair is None else f"{_shown(pair.jaccard)} ({_shown(pair.expected)})" for pair in row)
        table.add_row(name, *cells)
    return table


def csv_text(pairs: Sequence[Overlap]) -> str:
    """All overlaps as CSV, one a line."""
    file = io.StringIO()
    records = [pair.record() for pair in pairs]
    writer = csv.DictWriter(file, list(records[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(records)
    return file.getvalue()


def _shown(value: float | None) -> str:
    return "–" if value is None else f"{value:.4f}"
