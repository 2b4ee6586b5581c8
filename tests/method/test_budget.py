from fractions import Fraction
from math import floor

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from peft import get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from axolotl_supertune import SupraConfig, budget_table
from axolotl_supertune.method.budget import BudgetError, density_budgets, exact_fraction, hybrid_split, layer_budget

LAMBDAS = [0, 0.3, 0.5, 0.8, 1]

# As published: name → (config, trained parameters at r0 = 8).
LLAMA_1B = {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 128256,
    "tie_word_embeddings": True,
}
LLAMA_8B = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
}


@pytest.mark.parametrize(
    ("supra_lambda", "rank", "sparse_count"),
    [(0, 0, 8 * 150), (0.3, 2, 6 * 150), (0.5, 4, 4 * 150), (0.8, 6, 2 * 150), (1, 8, 0)],
)
def test_rank_budget_follows_the_paper(supra_lambda, rank, sparse_count):
    budget = layer_budget(100, 50, supra_lambda=supra_lambda, r0=8)
    assert (budget.total, budget.rank, budget.sparse_count) == (1200, rank, sparse_count)
    assert budget.low_rank_count == rank * 150
    assert budget.density == Fraction(sparse_count, 5000)


def test_r0_defaults_to_8():
    assert layer_budget(100, 50, supra_lambda=0.8).total == 8 * 150


@pytest.mark.parametrize(
    ("supra_lambda", "r0", "rank"),
    [(0.3, 10, 3), (0.29, 100, 29), (1 / 3, 3, 1), (0.57, 100, 57), (0.7, 10, 7), (0.1 + 0.2, 10, 3), (0.999, 8, 7)],
)
def test_rank_is_free_of_floating_error(supra_lambda, r0, rank):
    assert layer_budget(4096, 4096, supra_lambda=supra_lambda, r0=r0).rank == rank


@pytest.mark.parametrize(("density", "total"), [(0.29, 29), (0.07, 7), (0.58, 58), (0.1, 10), (1 / 3, 33), (1, 100)])
def test_density_total_is_free_of_floating_error(density, total):
    assert layer_budget(10, 10, supra_lambda=0, sparse_density=density).total == total


def test_density_budget_leaves_the_rounding_remainder_to_the_sparse_part():
    budget = layer_budget(100, 60, supra_lambda=1, sparse_density=0.1)
    assert (budget.total, budget.rank, budget.sparse_count) == (600, 3, 120)


def test_budget_may_take_the_whole_layer():
    assert layer_budget(6, 3, supra_lambda=0, r0=2).sparse_count == 18
    assert layer_budget(7, 5, supra_lambda=0, sparse_density=1).sparse_count == 35


@given(
    out_features=st.integers(1, 20_000),
    in_features=st.integers(1, 20_000),
    thousandths=st.integers(0, 1000),
    data=st.data(),
)
def test_rank_budget_is_exact(out_features, in_features, thousandths, data):
    size, sides = out_features * in_features, out_features + in_features
    if size < sides:
        return
    r0 = data.draw(st.integers(1, size // sides))
    budget = layer_budget(out_features, in_features, supra_lambda=thousandths / 1000, r0=r0)
    _check_split(budget, Fraction(thousandths, 1000), r0 * sides)
    assert budget.rank == r0 * thousandths // 1000


@given(
    out_features=st.integers(1, 20_000),
    in_features=st.integers(1, 20_000),
    thousandths=st.integers(0, 1000),
    percent=st.integers(1, 100),
)
def test_density_budget_is_exact(out_features, in_features, thousandths, percent):
    size = out_features * in_features
    if percent * size < 100:
        return
    budget = layer_budget(out_features, in_features, supra_lambda=thousandths / 1000, sparse_density=percent / 100)
    _check_split(budget, Fraction(thousandths, 1000), percent * size // 100)


def _check_split(budget, supra_lambda, total):
    assert budget.total == total
    assert budget.total == budget.low_rank_count + budget.sparse_count
    assert budget.rank <= supra_lambda * total / (budget.out_features + budget.in_features) < budget.rank + 1
    assert all(type(value) is int for value in (budget.total, budget.rank, budget.sparse_count, budget.low_rank_count))
    assert 0 <= budget.sparse_count <= budget.out_features * budget.in_features


@given(numerator=st.integers(0, 10_000), denominator=st.integers(1, 10_000))
def test_exact_fraction_recovers_what_was_typed(numerator, denominator):
    assert exact_fraction(numerator / denominator) == Fraction(numerator, denominator)


def test_budget_above_the_layer_names_layer_key_and_largest_r0():
    with pytest.raises(BudgetError, match=r"model\.k_proj: r0=4 .*lora_r.*r0 ≤ 3"):
        layer_budget(6, 8, supra_lambda=0.5, r0=4, layer="model.k_proj")


def test_budget_of_one_too_many_is_refused():
    with pytest.raises(BudgetError, match="T = 2 parameters, more than its 1 weights"):
        layer_budget(1, 1, supra_lambda=0, r0=1)


def test_density_below_one_weight_names_layer_and_key():
    with pytest.raises(BudgetError, match=r"tiny: sparse_density=0\.01 .*no trainable parameter"):
        layer_budget(3, 3, supra_lambda=0, sparse_density=0.01, layer="tiny")


def test_both_budgets_are_refused():
    with pytest.raises(ValueError, match=r"r0=8 and sparse_density=0\.1"):
        layer_budget(10, 10, supra_lambda=0, r0=8, sparse_density=0.1)


@pytest.mark.parametrize("value", [-0.1, 1.0001, float("nan"), float("inf"), "0.5", None, True])
def test_lambda_outside_0_1_is_refused(value):
    with pytest.raises(ValueError, match="supra_lambda="):
        layer_budget(100, 100, supra_lambda=value)


@pytest.mark.parametrize("value", [0, -1, 2.0, "8", True])
def test_r0_that_is_no_positive_integer_is_refused(value):
    with pytest.raises(ValueError, match="r0="):
        layer_budget(100, 100, supra_lambda=0.5, r0=value)


@pytest.mark.parametrize("value", [0, -0.1, 1.1, float("nan"), float("inf"), "0.5", True])
def test_density_outside_0_1_is_refused(value):
    with pytest.raises(ValueError, match="sparse_density="):
        layer_budget(100, 100, supra_lambda=0.5, sparse_density=value)


@pytest.mark.parametrize(
    ("count", "beta", "split"),
    [(10, 0, (0, 10)), (10, 1, (10, 0)), (10, 0.3, (3, 7)), (7, 0.5, (4, 3)), (5, 0.5, (2, 3)), (0, 0.5, (0, 0))],
)
def test_hybrid_split_rounds_beta_times_s(count, beta, split):
    assert hybrid_split(count, beta) == split


@given(count=st.integers(0, 10**9), thousandths=st.integers(0, 1000))
def test_hybrid_split_keeps_the_count(count, thousandths):
    k_top, k_bottom = hybrid_split(count, thousandths / 1000)
    assert k_top + k_bottom == count
    assert k_top == round(Fraction(thousandths, 1000) * count)
    assert floor(k_top) == k_top >= 0
    assert k_bottom >= 0


@pytest.mark.parametrize("beta", [-0.1, 1.1, float("nan"), "0.5", True])
def test_beta_outside_0_1_is_refused(beta):
    with pytest.raises(ValueError, match="hybrid_beta="):
        hybrid_split(10, beta)


@pytest.mark.parametrize("supra_lambda", LAMBDAS)
@pytest.mark.parametrize(("shape", "total"), [(LLAMA_1B, 5_636_096), (LLAMA_8B, 20_971_520)], ids=["1b", "8b"])
def test_llama_totals_match_the_paper(shape, total, supra_lambda):
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**shape))
    model = get_peft_model(model, SupraConfig(mask_score="magnitude", supra_lambda=supra_lambda))
    assert model.get_nb_trainable_parameters()[0] == total
    table = budget_table(model)
    assert sum(row.total for row in table) == total
    assert {row.kind for row in table} == {
        *("q_proj", "k_proj", "v_proj", "o_proj"),
        *("gate_proj", "up_proj", "down_proj"),
    }
    assert {row.layers for row in table} == {shape["num_hidden_layers"]}
    assert {row.budget.rank for row in table} == {floor(supra_lambda * 8)}


def test_one_density_for_all_layers_is_the_authors():
    """Llama-3.2-1B, r0 = 8: k and v get 6,074 entries where their own budget is 20,480 (the authors round up)."""
    block = {"q": (2048, 2048), "k": (512, 2048), "v": (512, 2048), "o": (2048, 2048)}
    block |= {"gate": (8192, 2048), "up": (8192, 2048), "down": (2048, 8192)}
    shapes = {f"{at}.{name}": shape for at in range(16) for name, shape in block.items()}
    budgets = density_budgets(shapes, supra_lambda=0.0, r0=8)
    assert budgets["0.k"].total in (6073, 6074)
    asked = 8 * sum(c + b for c, b in shapes.values())
    found = sum(each.total for each in budgets.values())
    assert asked - len(shapes) < found <= asked
    size = sum(c * b for c, b in shapes.values())
    for name, (c, b) in shapes.items():
        assert budgets[name].total == asked * c * b // size
    mixed = density_budgets(shapes, supra_lambda=0.5, r0=8)["0.down"]
    assert mixed.rank == budgets["0.down"].total // 2 // (8192 + 2048)
    assert mixed.total == mixed.sparse_count + mixed.low_rank_count == budgets["0.down"].total


def test_a_density_that_cannot_be_is_told():
    with pytest.raises(BudgetError, match=r"a: budget_scope: density with r0=9 .* gives this 8×8 layer T = 144"):
        density_budgets({"a": (8, 8)}, supra_lambda=0.0, r0=9)
    with pytest.raises(BudgetError, match=r"b: .* gives this 1×1 layer T = 0"):
        density_budgets({"a": (64, 64), "b": (1, 1)}, supra_lambda=0.0, r0=1)
