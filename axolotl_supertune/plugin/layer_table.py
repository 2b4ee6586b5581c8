"""The table of what an adapter trains: logged at the start of a training, printed by a plan."""

from collections.abc import Sequence

from rich.table import Table

from ..method.budget import BudgetRow
from ..tuner import SupraConfig


def layer_table(rows: Sequence[BudgetRow], config: SupraConfig) -> Table:
    """Rank, sparse entries, density and parameters per kind of layer, and the totals."""
    method = "Super" if config.supra_lambda == 0 else f"Supra, λ = {config.supra_lambda}"
    budget = f"r0 = {config.r0}" if config.r0 is not None else f"density {config.sparse_density}"
    shared = "" if config.budget_scope == "layer" else f", budget_scope {config.budget_scope}"
    title = f"{method}: {config.choice_of_support}, {budget}{shared}"
    table = Table(title=title, title_justify="left")
    for name in (
        "layers",
        "shape",
        "rank",
        "density",
        "sparse entries, each",
        "sparse entries, all",
        "parameters, all",
    ):
        table.add_column(name, justify="left" if name in ("layers", "shape") else "right")
    sparse = size = 0
    for row in rows:
        each = row.budget
        sparse += row.layers * each.sparse_count
        size += row.layers * each.out_features * each.in_features
        table.add_row(
            f"{row.layers} × {row.kind}",
            f"{each.out_features} × {each.in_features}",
            str(each.rank),
            f"{float(each.density):.4%}",
            f"{each.sparse_count:,}",
            f"{row.layers * each.sparse_count:,}",
            f"{row.total:,}",
        )
    table.add_section()
    table.add_row("total", "", "", f"{sparse / size:.4%}", "", f"{sparse:,}", f"{sum(row.total for row in rows):,}")
    return table
