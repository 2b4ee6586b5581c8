"""The parameter budget of a layer, and its split by λ into low-rank and sparse parameters (paper, section 3.3).

Integers only, no torch: the counts that are printed, trained and saved are exact.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction

# A decimal such as 0.29 has no exact binary floating-point value. Denominators up to 1e9 are far finer than anyone
# types and far coarser than a double's rounding error, so the nearest such fraction is the decimal that was meant.
_MAX_DENOMINATOR = 10**9

DEFAULT_R0 = 8
DEFAULT_BETA = 0.5
BUDGET_SCOPES = ("layer", "density", "global")


class BudgetError(ValueError):
    """A budget that a layer cannot have: more parameters than weights, or none. The message names the layer."""


@dataclass(frozen=True)
class LayerBudget:
    """The parameter budget of one linear layer W of shape (out_features, in_features) = (c, b).

    Attributes:
        out_features: c.
        in_features: b.
        total: T, trainable scalars of the layer.
        rank: r, rank of the low-rank part L·R.
        sparse_count: s = T − r(c+b), entries of the sparse part M⊙U.
    """

    out_features: int
    in_features: int
    total: int
    rank: int
    sparse_count: int

    @property
    def low_rank_count(self) -> int:
        """l = r(c+b), scalars in L and R together."""
        return self.rank * (self.out_features + self.in_features)

    @property
    def density(self) -> Fraction:
        """s / (c·b), the fraction of the weights that the sparse part trains."""
        return Fraction(self.sparse_count, self.out_features * self.in_features)


@dataclass(frozen=True)
class BudgetRow:
    """Layers of one kind (`q_proj`, …) and budget: a row of the table that `plan` prints and a training logs."""

    kind: str
    layers: int
    budget: LayerBudget

    @property
    def total(self) -> int:
        """Trainable scalars of all these layers."""
        return self.layers * self.budget.total


def budget_rows(budgets: Mapping[str, LayerBudget]) -> list[BudgetRow]:
    """Group budgets, given by layer name, by the kind of layer (last part of the name) and budget; order is kept."""
    counts: dict[tuple[str, LayerBudget], int] = {}
    for layer, budget in budgets.items():
        key = (layer.rpartition(".")[2], budget)
        counts[key] = counts.get(key, 0) + 1
    return [BudgetRow(kind, count, budget) for (kind, budget), count in counts.items()]


def exact_fraction(value: float) -> Fraction:
    """The decimal fraction that `value` was written as, without binary rounding: 0.29 → 29/100."""
    return Fraction(value).limit_denominator(_MAX_DENOMINATOR)


def check_lambda(supra_lambda: float) -> None:
    """Raise ValueError unless λ lies in [0, 1]."""
    if isinstance(supra_lambda, bool) or not isinstance(supra_lambda, (int, float)) or not 0 <= supra_lambda <= 1:
        raise ValueError(
            f"supra_lambda={supra_lambda!r} is not in [0, 1]: it is the share of the budget that goes to the "
            "low-rank part (0 is Super, 1 is LoRA)."
        )


def check_r0(r0: int) -> None:
    """Raise ValueError unless the reference rank r0 is a positive integer."""
    if isinstance(r0, bool) or not isinstance(r0, int) or r0 < 1:
        raise ValueError(
            f"r0={r0!r} (lora_r in a YAML) is not a positive integer: it is the rank whose size is matched."
        )


def check_density(sparse_density: float) -> None:
    """Raise ValueError unless the density p lies in (0, 1]."""
    if (
        isinstance(sparse_density, bool)
        or not isinstance(sparse_density, (int, float))
        or not math.isfinite(sparse_density)
        or not 0 < sparse_density <= 1
    ):
        raise ValueError(
            f"sparse_density={sparse_density!r} is not in (0, 1]: it is a layer's trained share of weights."
        )


def layer_budget(
    out_features: int,
    in_features: int,
    *,
    supra_lambda: float,
    r0: int | None = None,
    sparse_density: float | None = None,
    layer: str = "layer",
) -> LayerBudget:
    """Split one layer's budget between the low-rank and the sparse part.

    T = r0(c+b) (eq. rank_equivalent_budget) or T = ⌊p·c·b⌋ (eq. density_equivalent_budget), then
    r = ⌊λT/(c+b)⌋ (eq. lora_adaptive_r), l = r(c+b), s = T − l.

    Args:
        out_features: c.
        in_features: b.
        supra_lambda: λ in [0, 1], the low-rank share.
        r0: reference rank of the rank-equivalent budget; 8 if neither budget is given.
        sparse_density: p in (0, 1] of the density budget.
        layer: the layer's name, for error messages.

    Raises:
        ValueError: λ, r0 or p out of range, or both budgets given.
        BudgetError: T is larger than the layer, or 0.
    """
    check_lambda(supra_lambda)
    if r0 is not None and sparse_density is not None:
        raise ValueError(f"two budgets, r0={r0} and sparse_density={sparse_density}: give one of them.")
    size = out_features * in_features
    sides = out_features + in_features
    if sparse_density is not None:
        check_density(sparse_density)
        total = math.floor(exact_fraction(sparse_density) * size)
        source = f"sparse_density={sparse_density}"
        remedy = "raise sparse_density or leave this layer out of the target modules"
    else:
        r0 = DEFAULT_R0 if r0 is None else r0
        check_r0(r0)
        total = r0 * sides
        source = f"r0={r0} (lora_r in a YAML)"
        remedy = "leave this layer out of the target modules"
        if size >= sides:
            remedy = f"use r0 ≤ {size // sides} or {remedy}"
    if total > size or total == 0:
        problem = f"more than its {size:,} weights" if total else "no trainable parameter"
        raise BudgetError(
            f"{layer}: {source} gives this {out_features}×{in_features} layer T = {total:,} parameters, {problem}; "
            f"{remedy}."
        )
    return _split(out_features, in_features, total, supra_lambda)


def density_budgets(
    shapes: Mapping[str, tuple[int, int]], *, supra_lambda: float, r0: int | None = None
) -> dict[str, LayerBudget]:
    """Budgets at one density for all layers, ρ = Σ r0(c+b) / Σ c·b: the total rank budget, distributed by layer size.

    T_i = ⌊ρ·c_i·b_i⌋, as in the authors' code; r_i, l_i and s_i follow as in `layer_budget`.

    Args:
        shapes: (c, b) by layer name.
        supra_lambda: λ in [0, 1].
        r0: reference rank, 8 if not given.

    Raises:
        ValueError: λ or r0 out of range.
        BudgetError: ρ is above 1, or so small that a layer gets no parameter.
    """
    check_lambda(supra_lambda)
    r0 = DEFAULT_R0 if r0 is None else r0
    check_r0(r0)
    size = sum(c * b for c, b in shapes.values())
    requested = r0 * sum(c + b for c, b in shapes.values())
    budgets = {}
    for name, (c, b) in shapes.items():
        total = requested * c * b // size
        if requested > size or not total:
            raise BudgetError(
                f"{name}: budget_scope: density with r0={r0} (lora_r in a YAML) gives this {c}×{b} layer T = {total:,} "
                f"parameters, a share of {requested / size:.3g} of its weights; use another r0, or leave it out of the "
                "target modules."
            )
        budgets[name] = _split(c, b, total, supra_lambda)
    return budgets


def _split(out_features: int, in_features: int, total: int, supra_lambda: float) -> LayerBudget:
    """A budget of `total` parameters, of which ⌊λT/(c+b)⌋·(c+b) are low-rank and the rest sparse."""
    sides = out_features + in_features
    rank = math.floor(exact_fraction(supra_lambda) * total / sides)
    return LayerBudget(out_features, in_features, total, rank, total - rank * sides)


def hybrid_split(sparse_count: int, hybrid_beta: float) -> tuple[int, int]:
    """(k_top, k_bottom) of the hybrid support: k_top = round(β·s), ties to even as Python rounds (paper, appendix).

    Raises:
        ValueError: β not in [0, 1].
    """
    check_beta(hybrid_beta)
    k_top = round(exact_fraction(hybrid_beta) * sparse_count)
    return k_top, sparse_count - k_top


def check_beta(hybrid_beta: float) -> None:
    """Raise ValueError unless β lies in [0, 1]."""
    if isinstance(hybrid_beta, bool) or not isinstance(hybrid_beta, (int, float)) or not 0 <= hybrid_beta <= 1:
        raise ValueError(f"hybrid_beta={hybrid_beta!r} is not in [0, 1]: it is the share of the largest scores.")
