"""Overlap of supports: how much of their supports adapters of one base share, beside what chance would give."""

import csv
import io
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table
    from torch import Tensor

    from . import SupraConfig

POOLED = "all layers"


@dataclass(frozen=True)
class Support:
    """One layer's trained entries: sorted flat indices into (rows, columns), int64."""

    rows: int
    columns: int
    indices: "Tensor"


@dataclass(frozen=True)
class Overlap:
    """How much two supports of a layer, or of many layers pooled, share.

    a, b: the adapters' names.
    size: weights there are.
    in_a, in_b, shared: entries.
    chance: of `size` weights, as many as random supports of these sizes share on average; layers add up.
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
        """Shared entries by those in either; None where neither holds any."""
        return _share(self.shared, self.in_a + self.in_b)

    @property
    def expected(self) -> float | None:
        """The Jaccard index of random supports, to within one part in their number of entries."""
        return _share(self.chance, self.in_a + self.in_b)

    def record(self) -> dict[str, object]:
        return asdict(self) | {"jaccard": self.jaccard, "expected_jaccard": self.expected}


def _share(shared: float, both: int) -> float | None:
    return shared / (both - shared) if both else None


def read_supports(folders: Sequence[Path]) -> list[dict[str, Support]]:
    """The supports of saved adapters, by layer, in the model's order; low-rank parts have none.

    Raises:
        ValueError: no Supra adapter, a damaged one, or one of other layers or shapes than the first; the message says
            what differs.
    """
    from . import read_adapter
    from .checkpoint import read_config
    from .export import adapted

    found: list[dict[str, Support]] = []
    for folder in folders:
        config = read_config(folder)
        if config.awaits_gradient and config.supra_lambda < 1:
            raise ValueError(
                f"{folder} was written during low_rank_warmup_steps: its support is still to be chosen; take a later "
                "checkpoint."
            )
        tensors = read_adapter(folder)
        supports = {}
        for layer in adapted(tensors):
            rows, columns = tensors[f"{layer}.supra_shape"].tolist()
            indices = tensors.get(f"{layer}.supra_indices", tensors[f"{layer}.supra_shape"][:0]).long()
            supports[layer.removeprefix("base_model.model.")] = Support(rows, columns, indices)
        found.append(supports)
        _check_layers(found[0], supports, folders[0], folder)
    return found


def notes_on_bases(folders: Sequence[Path]) -> list[str]:
    """What is to be known of adapters whose layers are alike, but whose bases are other ones than the first's by name,
    revision or quantization: entries of their supports lie at the same places, maybe of other weights."""
    from .base_digest import compared
    from .checkpoint import read_config

    first, *others = [_base(read_config(folder)) for folder in folders]
    notes = []
    for base in dict.fromkeys(others):
        if base == first:
            continue
        these = ", ".join(str(folder) for folder, its in zip(folders[1:], others, strict=True) if its == base)
        said = []
        if base[:2] != first[:2]:
            ours, theirs = (
                f"{name} (revision {revision})" if revision else name for name, revision, _ in (first, base)
            )
            said.append(f"{theirs} and {ours}: {compared(first[:2], base[:2])}")
        if base[2] != first[2]:
            said.append(f"base_quantization {base[2]} and {first[2]}, so that scores were not of the same numbers")
        notes.append(f"{these} and {folders[0]} name different bases, {'; '.join(said)}.")
    return notes


def _base(config: "SupraConfig") -> tuple[str, str | None, str]:
    """Name or folder, revision and quantization of an adapter's base."""
    name = config.base_model_name_or_path or "an unnamed one"
    quantized = json.dumps(config.base_quantization, sort_keys=True) if config.base_quantization else "none"
    return os.path.realpath(name) if os.path.isdir(name) else name, config.revision, quantized


def _check_layers(first: Mapping[str, Support], other: Mapping[str, Support], folder: Path, other_folder: Path) -> None:
    alone = [*(first.keys() - other.keys()), *(other.keys() - first.keys())]
    if alone:
        names = ", ".join(sorted(alone)[:3]) + (f" and {len(alone) - 3} more" if len(alone) > 3 else "")
        raise ValueError(f"{other_folder} and {folder} adapt different layers: only one of them has {names}.")
    for name, support in first.items():
        there = other[name]
        if (support.rows, support.columns) != (there.rows, there.columns):
            raise ValueError(
                f"{name} is {there.rows} × {there.columns} in {other_folder} and {support.rows} × {support.columns} in "
                f"{folder}: they are of different bases."
            )


def overlaps(supports: Mapping[str, Mapping[str, Support]]) -> list[Overlap]:
    """Of every pair: each layer, each kind of layer (`*.q_proj`) where there are several of it, and all together.

    Args:
        supports: by adapter and layer; the same layers in each.
    """
    import torch

    found = []
    for a, b in combinations(supports, 2):
        layers = []
        for name, ours in supports[a].items():
            theirs = supports[b][name]
            _, counts = torch.cat([ours.indices, theirs.indices]).unique(return_counts=True)
            size, sizes = ours.rows * ours.columns, (len(ours.indices), len(theirs.indices))
            shared = int((counts == 2).sum())
            layers.append(Overlap(a, b, name, size, *sizes, shared, sizes[0] * sizes[1] / size))
        kinds: dict[str, list[Overlap]] = {}
        for each in layers:
            kinds.setdefault(each.layer.rpartition(".")[2], []).append(each)
        found += layers
        found += [_pooled(f"*.{kind}", of_kind) for kind, of_kind in kinds.items() if len(of_kind) > 1]
        found.append(_pooled(POOLED, layers))
    return found


def _pooled(name: str, layers: Sequence[Overlap]) -> Overlap:
    def total(key: str) -> int:
        return sum(getattr(each, key) for each in layers)

    chance = sum(each.chance for each in layers)
    return Overlap(layers[0].a, layers[0].b, name, total("size"), total("in_a"), total("in_b"), total("shared"), chance)


def short_names(folders: Sequence[Path]) -> list[str]:
    """What tells the folders apart: their paths without the parts that all begin and end with.

    Raises:
        ValueError: one is named twice.
    """
    parts = [Path(os.path.abspath(folder)).parts for folder in folders]
    if len(set(parts)) < len(parts):
        raise ValueError("an adapter is named twice; compare different ones.")
    start, end, shortest = 0, 0, min(map(len, parts))
    while start < shortest - 1 and len({each[start] for each in parts}) == 1:
        start += 1
    while end < shortest - start - 1 and len({each[-1 - end] for each in parts}) == 1:
        end += 1
    return ["/".join(each[start : len(each) - end]) for each in parts]


def layer_table(found: Sequence[Overlap]) -> "Table":
    """One pair, layer by layer."""
    from rich.table import Table

    table = Table(title=f"a: {found[0].a}, b: {found[0].b}", title_justify="left")
    for name in ("layer", "entries of a", "of b", "shared", "Jaccard", "of random supports"):
        table.add_column(name, justify="left" if name == "layer" else "right", overflow="fold")
    layers = sum(not each.layer.startswith("*.") and each.layer != POOLED for each in found)
    for at, each in enumerate(found):
        if at == layers or each.layer == POOLED:
            table.add_section()
        counts = (f"{count:,}" for count in (each.in_a, each.in_b, each.shared))
        table.add_row(each.layer, *counts, _shown(each.jaccard), _shown(each.expected))
    return table


def matrix(found: Sequence[Overlap], names: Sequence[str]) -> "Table":
    """All pairs, pooled over the layers; in brackets what random supports of those sizes would have."""
    from rich.table import Table

    pooled = {frozenset((each.a, each.b)): each for each in found if each.layer == POOLED}
    title = "Jaccard index of the supports, all layers pooled (in brackets: of random supports of these sizes)"
    table = Table(title=title, title_justify="left")
    for heading in ("", *names):
        table.add_column(heading, justify="right" if heading else "left", overflow="fold")
    for name in names:
        pairs = (pooled.get(frozenset((name, other))) for other in names)
        cells = ("" if pair is None else f"{_shown(pair.jaccard)} ({_shown(pair.expected)})" for pair in pairs)
        table.add_row(name, *cells)
    return table


def csv_text(found: Sequence[Overlap]) -> str:
    """Every pair's layers, kinds and total, one a line."""
    file = io.StringIO()
    records = [each.record() for each in found]
    writer = csv.DictWriter(file, list(records[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(records)
    return file.getvalue()


def _shown(value: float | None) -> str:
    return "–" if value is None else f"{value:.4f}"
