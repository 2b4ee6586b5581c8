"""Supports of columns, spread over rows, and budgets over all layers, in a (tiny) Llama."""

import pytest
import torch
from peft import PeftModel, get_peft_model
from tiny_llama import NARROW, make_llama

from axolotl_supertune import SupraConfig, budget_table, calibrate
from axolotl_supertune.method.budget import density_budgets
from axolotl_supertune.method.support import row_counts, select_support
from axolotl_supertune.tuner.gradient import sparse_layers
from axolotl_supertune.tuner.targets import layer_budgets

IDS = torch.randint(3, 64, (2, 12), generator=torch.Generator().manual_seed(1))


def llama():
    model = make_llama(vocab_size=64, **NARROW)
    for at, layer in enumerate(model.model.layers):  # so that one has nothing small, and all that is large
        layer.mlp.up_proj.weight.data += float(at)
    return model


@pytest.fixture(scope="module")
def norms():
    return calibrate(llama(), [IDS], progress=False)


def adapted(norms=None, **knobs):
    knobs = {"r0": 4, "supra_lambda": 0.0, "mask_score": "magnitude", **knobs}
    return get_peft_model(llama(), SupraConfig(activation_norms=norms, task_type="CAUSAL_LM", **knobs))


def total(model):
    return sum(row.total for row in budget_table(model))


BUDGET = 4 * 2 * (2 * (32 + 32) + 2 * (16 + 32) + 3 * (48 + 32))


def test_by_activation_a_support_is_made_of_columns(norms):
    model = adapted(norms, mask_score="activation", sparse_direction="top")
    for layer in sparse_layers(model):
        indices = layer.supra_indices["default"]
        order = norms[layer.layer_name].sort(descending=True, stable=True).indices.tolist()
        touched = set((indices % layer.in_features).tolist())
        columns = -(-len(indices) // layer.out_features)
        assert touched == set(order[:columns])
    with pytest.raises(ValueError, match="mask_score='activation' needs activation norms"):
        adapted(mask_score="activation")


@pytest.mark.parametrize("direction", ["bottom", "top", "hybrid", "random"])
def test_a_support_is_spread_over_the_rows(norms, direction):
    model = adapted(norms, mask_score="wanda", sparse_direction=direction, support_scope="row")
    assert total(model) == BUDGET
    for layer in sparse_layers(model):
        rows = layer.supra_indices["default"].div(layer.in_features, rounding_mode="floor")
        expected = row_counts(len(rows), layer.out_features)
        assert torch.equal(rows.bincount(minlength=layer.out_features), expected)


def test_one_density_reaches_every_layer(tmp_path):
    model = adapted(supra_lambda=0.5, budget_scope="density")
    shapes = {layer.layer_name: (layer.out_features, layer.in_features) for layer in sparse_layers(model)}
    expected = density_budgets(shapes, supra_lambda=0.5, r0=4)
    assert {layer.layer_name: layer.supra_budget["default"] for layer in sparse_layers(model)} == expected
    assert layer_budgets(llama(), model.peft_config["default"]) == expected
    model.save_pretrained(tmp_path)
    PeftModel.from_pretrained(llama(), tmp_path)


@pytest.mark.parametrize("direction", ["bottom", "top", "hybrid"])
@pytest.mark.parametrize("supra_lambda", [0.0, 0.5])
def test_scores_of_all_layers_are_one_set(direction, supra_lambda, tmp_path):
    model = adapted(sparse_direction=direction, supra_lambda=supra_lambda, budget_scope="global")
    assert total(model) == BUDGET
    base = llama()
    ranks = 4 * supra_lambda
    names = list(layer_budgets(base, SupraConfig(r0=4, mask_score="magnitude", supra_lambda=supra_lambda)))
    weights = [base.get_submodule(name).weight.detach().abs() for name in names]
    count = BUDGET - int(ranks * BUDGET / 4)
    joined = select_support(torch.cat([each.flatten() for each in weights]), count, direction)
    counts = model.peft_config["default"].sparse_counts
    assert list(counts) == names
    start = 0
    found = {layer.layer_name: layer.supra_indices["default"] for layer in sparse_layers(model)}
    for name, weight in zip(names, weights, strict=True):
        here = joined[(joined >= start) & (joined < start + weight.numel())] - start
        assert counts[name] == len(here)
        assert torch.equal(found.get(name, torch.empty(0, dtype=torch.int32)), here), name
        start += weight.numel()
    large = counts["model.layers.1.mlp.up_proj"]
    assert (large == 0) if direction == "bottom" else (large > 48 * 32 // 4)

    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=0.1)
    model.train()(input_ids=IDS, labels=IDS).loss.backward()
    optimizer.step()
    logits = model.eval()(input_ids=IDS).logits
    model.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(llama(), tmp_path)
    assert torch.equal(loaded.eval()(input_ids=IDS).logits, logits)
    assert loaded.peft_config["default"].sparse_counts == counts
    merged = model.merge_and_unload().eval()
    torch.testing.assert_close(merged(input_ids=IDS).logits, logits, rtol=1e-3, atol=1e-3)


def test_an_adapter_of_compared_layers_loads_on_those_layers_alone(tmp_path):
    model = adapted(budget_scope="global", target_modules=["q_proj", "v_proj"])
    model.save_pretrained(tmp_path)
    config = model.peft_config["default"]
    config.target_modules = {"q_proj", "k_proj"}
    with pytest.raises(ValueError, match="k_proj: the adapter's scores were compared over other layers"):
        layer_budgets(llama(), config)


def test_weights_that_are_not_there_cannot_be_compared():
    with torch.device("meta"):
        model = make_llama(vocab_size=64, **NARROW)
    with pytest.raises(ValueError, match="budget_scope: global compares the scores of real weights"):
        get_peft_model(model, SupraConfig(mask_score="magnitude", budget_scope="global", supra_lambda=0.0, r0=4))


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"support_scope": "column"}, "support_scope='column' is not one of layer, row"),
        ({"budget_scope": "model"}, "budget_scope='model' is not one of layer, density, global"),
        ({"budget_scope": "density", "sparse_density": 0.1, "r0": None}, "has no effect with sparse_density=0.1"),
        (
            {"budget_scope": "global", "sparse_direction": "random"},
            "go with sparse_direction='random', which compares no",
        ),
        ({"budget_scope": "global", "mask_score": "gradient"}, "go with mask_score='gradient', which would need"),
        (
            {"budget_scope": "global", "support_scope": "row"},
            "go with support_scope='row', which compares scores within",
        ),
        ({"budget_scope": "global", "supra_lambda": 1}, "go with supra_lambda=1, which has no sparse part"),
    ],
)
def test_contradictions_are_refused(knobs, message):
    with pytest.raises(ValueError, match=message):
        SupraConfig(**knobs)
