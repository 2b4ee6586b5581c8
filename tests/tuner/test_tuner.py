import copy
import json
import pickle
import subprocess
import sys
import weakref
from dataclasses import replace

import pytest
import torch
from peft import LoraConfig, PeftConfig, PeftModel, get_peft_model
from peft.utils.peft_types import PeftType
from safetensors.torch import save_file
from torch import nn
from transformers.pytorch_utils import Conv1D

from axolotl_supertune import SupraConfig, budget_table, calibrate
from axolotl_supertune.method.budget import BudgetError
from axolotl_supertune.method.scores import SCORES, Score, wanda_score
from axolotl_supertune.method.support import random_support, select_support
from axolotl_supertune.tuner import SupraLayer, SupraLinear, read_adapter
from axolotl_supertune.tuner.targets import layer_budgets, target_layers

LAMBDAS = [0, 0.3, 0.5, 0.8, 1]
DIRECTIONS = ["bottom", "top", "hybrid", "random"]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
PROJECTIONS = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


def config(**changes):
    return SupraConfig(**{"mask_score": "magnitude", "task_type": "CAUSAL_LM", **changes})


def drawn_adapter(model, **changes):
    """An adapter with random U, L and R of a trained adapter's size, in eval mode."""
    torch.manual_seed(1)
    model = get_peft_model(model, config(init_weights=False, **changes))
    with torch.no_grad():
        for layer in supra_layers(model).values():
            for name, values in layer.supra_values.items():
                layer.supra_values[name].copy_(values * 0.05)
            for name, L in layer.supra_L.items():
                layer.supra_L[name].copy_(L * 0.01)
    return model.eval()


def logits(model, ids):
    with torch.no_grad():
        return model(ids).logits


def loss(model, ids):
    return model(ids, labels=ids).loss


def supra_layers(model):
    return {module.layer_name: module for module in model.modules() if isinstance(module, SupraLayer)}


def supports(model, adapter="default"):
    return {name: layer.supra_indices[adapter] for name, layer in supra_layers(model).items()}


def base_weights(model):
    return {name: layer.get_base_layer().weight.detach().clone() for name, layer in supra_layers(model).items()}


def parameters(model):
    return {name: tensor.detach().clone() for name, tensor in model.named_parameters() if tensor.requires_grad}


def assert_same(first, second):
    assert first.keys() == second.keys()
    assert first
    for name in first:
        assert first[name].dtype == second[name].dtype, name
        assert torch.equal(first[name], second[name]), name


def edit_checkpoint(folder, change):
    """Leaves a file of format 0, which has no checksum."""
    path = folder / "adapter_model.safetensors"
    tensors = read_adapter(folder)
    change(tensors)
    save_file(tensors, path)


class Body(nn.Module):
    """A model of one layer, named `lin`."""

    def __init__(self, layer):
        super().__init__()
        self.lin = layer

    def forward(self, x):
        return self.lin(x)


# What is adapted, and how much


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("supra_lambda", LAMBDAS)
def test_adapted_model_equals_the_base_at_step_0(llama, norms, ids, supra_lambda, direction):
    expected = logits(llama, ids)
    knobs = {"mask_score": "wanda", "activation_norms": norms, "sparse_direction": direction}
    model = get_peft_model(llama, config(supra_lambda=supra_lambda, **knobs))
    assert torch.equal(logits(model, ids), expected)
    assert torch.equal(logits(model.train(), ids), expected)


@pytest.mark.parametrize("supra_lambda", LAMBDAS)
def test_trained_tensors_have_the_shapes_of_the_budget(llama, supra_lambda):
    model = get_peft_model(llama, config(supra_lambda=supra_lambda))
    for name, layer in supra_layers(model).items():
        c, b, rank = layer.out_features, layer.in_features, int(supra_lambda * 8)
        count = (8 - rank) * (c + b)
        shapes = {key.split(".")[0]: tuple(value.shape) for key, value in parameters(layer).items()}
        expected = {"supra_values": (count,)} if count else {}
        expected |= {"supra_L": (c, rank), "supra_R": (rank, b)} if rank else {}
        assert shapes == expected, name
        assert {value.dtype for value in parameters(layer).values()} == {torch.float32}


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("mask_score", ["wanda", "magnitude"])
def test_support_is_the_methods_selection(llama, norms, mask_score, direction):
    weights = {name: module.weight.detach().clone() for name, module in llama.named_modules() if name in norms.norms}
    knobs = {"mask_score": mask_score, "activation_norms": norms, "sparse_direction": direction, "support_seed": 3}
    model = get_peft_model(llama, config(supra_lambda=0.5, **knobs))
    found = supports(model)
    assert found.keys() == weights.keys()
    for name, weight in weights.items():
        count = 4 * sum(weight.shape)
        if direction == "random":
            expected = random_support(weight.numel(), count, seed=3, layer=name)
        else:
            score = wanda_score(weight, norms[name]) if mask_score == "wanda" else weight.abs()
            expected = select_support(score, count, direction, hybrid_beta=0.5)
        assert torch.equal(found[name], expected), name


def test_a_new_score_is_one_entry_of_the_registry(tiny_llama, monkeypatch):
    """Supports of a score that only the registry knows, through the config and the choice of supports."""

    def rows(weight, _, *, layer):
        return lambda start, stop: -weight[start:stop].float()

    monkeypatch.setitem(SCORES, "negative", Score("weight", "−W", rows))
    model = get_peft_model(tiny_llama(), config(mask_score="negative"))
    for layer in supra_layers(model).values():
        count = layer.supra_budget["default"].sparse_count
        expected = select_support(-layer.get_base_layer().weight.detach().float(), count, "bottom")
        assert torch.equal(layer.supra_indices["default"], expected)


def test_random_support_does_not_depend_on_the_other_target_layers(tiny_llama):
    few = get_peft_model(tiny_llama(), config(sparse_direction="random", target_modules=["up_proj"]))
    many = get_peft_model(tiny_llama(), config(sparse_direction="random"))
    for name, indices in supports(few).items():
        assert torch.equal(indices, supports(many)[name])


@pytest.mark.parametrize("device", [None, "cpu", torch.device("meta")])
def test_supports_are_chosen_on_the_device_asked_for_one_layer_there_at_a_time(llama, norms, monkeypatch, device):
    seen, there = [], []
    score = SCORES["wanda"].rows

    def score_rows(weight, activation_norm, *, layer):
        assert not any(each() is not None for each in there), "the layer before is still there"
        if weight.is_meta:
            there.append(weakref.ref(weight))
        seen.append((layer, weight.device.type))
        real = llama.get_submodule(layer).weight  # of a meta tensor nothing can be read
        return score(real if weight.is_meta else weight, activation_norm, layer=layer)

    monkeypatch.setitem(SCORES, "wanda", replace(SCORES["wanda"], rows=score_rows))
    expected = supports(get_peft_model(copy.deepcopy(llama), config(mask_score="wanda", activation_norms=norms)))
    seen.clear()
    asked = config(mask_score="wanda", activation_norms=norms, support_device=device)
    model = get_peft_model(copy.deepcopy(llama), asked)
    assert [name for name, _ in seen] == list(expected)
    assert {kind for _, kind in seen} == {"cpu" if device is None else torch.device(device).type}
    assert_same(supports(model), expected)
    assert {each.device.type for each in model.state_dict().values()} == {"cpu"}


def test_the_device_is_no_part_of_an_adapter(llama, tmp_path):
    model = get_peft_model(llama, config(support_device=torch.device("cpu")))
    model.save_pretrained(tmp_path)
    assert "support_device" not in json.loads((tmp_path / "adapter_config.json").read_text())
    assert PeftConfig.from_pretrained(tmp_path).support_device is None


def test_hybrid_beta_reaches_the_selection(tiny_llama):
    top = get_peft_model(tiny_llama(), config(sparse_direction="top"))
    hybrid = get_peft_model(tiny_llama(), config(sparse_direction="hybrid", hybrid_beta=1.0))
    assert_same(supports(top), supports(hybrid))


def test_density_budget_reaches_the_layers(llama):
    model = get_peft_model(llama, config(sparse_density=0.25, supra_lambda=0))
    for layer in supra_layers(model).values():
        assert len(layer.supra_values["default"]) == layer.out_features * layer.in_features // 4


def test_scaling_is_alpha_over_the_layers_own_rank(llama):
    model = get_peft_model(llama, config(supra_lambda=0.8, lora_alpha=12))
    assert {layer.supra_scaling["default"] for layer in supra_layers(model).values()} == {2.0}


@pytest.mark.parametrize("target_modules", [None, "all-linear"])
def test_default_is_every_linear_layer_but_the_head(llama, target_modules):
    model = get_peft_model(llama, config(target_modules=target_modules))
    assert {name.rpartition(".")[2] for name in supra_layers(model)} == PROJECTIONS
    assert len(supra_layers(model)) == 14
    assert type(model.base_model.model.lm_head) is nn.Linear


def test_exclude_modules(llama):
    model = get_peft_model(llama, config(exclude_modules=["k_proj", "down_proj"]))
    assert {name.rpartition(".")[2] for name in supra_layers(model)} == PROJECTIONS - {"k_proj", "down_proj"}


def test_layers_to_transform(llama):
    model = get_peft_model(llama, config(target_modules=["q_proj", "up_proj"], layers_to_transform=[1]))
    assert list(supra_layers(model)) == ["model.layers.1.self_attn.q_proj", "model.layers.1.mlp.up_proj"]


def test_target_layers_and_budgets_need_no_adapter(llama):
    knobs = config(target_modules=["q_proj", "k_proj"], exclude_modules=["model.layers.0.self_attn.k_proj"])
    names = [f"model.layers.{at}.self_attn.{name}" for at, name in ((0, "q_proj"), (1, "q_proj"), (1, "k_proj"))]
    assert list(target_layers(llama, knobs)) == names
    assert [budget.total for budget in layer_budgets(llama, knobs).values()] == [8 * 128, 8 * 128, 8 * 96]
    assert not supra_layers(llama)


def test_printed_counts_are_exact(llama, capsys):
    everything = sum(parameter.numel() for parameter in llama.parameters())
    model = get_peft_model(llama, config())
    trained = 2 * 8 * (2 * (64 + 64) + 2 * (32 + 64) + 3 * (96 + 64))
    model.print_trainable_parameters()
    assert f"trainable params: {trained:,} || all params: {everything + trained:,} " in capsys.readouterr().out


def test_budget_table_has_a_row_per_kind_of_layer(llama):
    table = budget_table(get_peft_model(llama, config(supra_lambda=0.5)))
    assert [row.kind for row in table] == [
        *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    ]
    assert {row.layers for row in table} == {2}
    k_proj = table[1]
    assert (k_proj.budget.rank, k_proj.budget.sparse_count, k_proj.total) == (4, 4 * 96, 2 * 8 * 96)


# Training


@pytest.mark.parametrize("supra_lambda", [0, 0.5, 1])
def test_training_moves_every_part_and_nothing_of_the_base(llama, ids, supra_lambda):
    model = get_peft_model(llama, config(supra_lambda=supra_lambda, lora_dropout=0.0)).train()
    frozen = {name: value.detach().clone() for name, value in model.named_parameters() if not value.requires_grad}
    before, indices = parameters(model), copy.deepcopy(supports(model)) if supra_lambda < 1 else {}
    assert all("supra_" in name for name in before)
    train(model, ids, steps=3)
    for name, value in parameters(model).items():
        assert not torch.equal(value, before[name]), name
    for name, value in model.named_parameters():
        if name in frozen:
            assert torch.equal(value, frozen[name]), name
    for name, value in indices.items():
        assert torch.equal(value, supports(model)[name])


def train(model, ids, steps, lr=1e-3):
    optimizer = torch.optim.Adam([value for value in model.parameters() if value.requires_grad], lr=lr)
    losses = []
    for _ in range(steps):
        step_loss = loss(model, ids)
        step_loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(step_loss.item())
    return losses


@pytest.mark.parametrize("dropout", [0.0, 0.05])
def test_lambda_1_trains_step_by_step_like_peft_lora(tiny_llama, ids, dropout):
    def run(knobs):
        base = tiny_llama()
        torch.manual_seed(42)
        model = get_peft_model(base, knobs).train()
        torch.manual_seed(43)
        return model, train(model, ids, steps=5)

    lora_knobs = {"r": 8, "lora_alpha": 16, "lora_dropout": dropout, "target_modules": "all-linear"}
    lora, lora_losses = run(LoraConfig(task_type="CAUSAL_LM", **lora_knobs))
    supra, supra_losses = run(config(supra_lambda=1, r0=8, lora_alpha=16, lora_dropout=dropout))
    assert supra_losses == pytest.approx(lora_losses, rel=1e-6)
    assert lora_losses[-1] < lora_losses[0]
    trained = {
        name.replace("supra_L.default", "lora_B.default.weight"): value for name, value in parameters(supra).items()
    }
    trained = {name.replace("supra_R.default", "lora_A.default.weight"): value for name, value in trained.items()}
    expected = parameters(lora)
    assert trained.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(trained[name], expected[name], rtol=1e-4, atol=1e-6)


def test_lambda_1_starts_with_the_bits_of_peft_lora(tiny_llama):
    def start(knobs):
        base = tiny_llama()
        torch.manual_seed(42)
        return list(parameters(get_peft_model(base, knobs)).items())

    lora = start(LoraConfig(task_type="CAUSAL_LM", r=8, target_modules="all-linear"))
    R = [value for name, value in start(config(supra_lambda=1)) if "supra_R" in name]
    A = [value for name, value in lora if "lora_A" in name]
    assert all(torch.equal(one, other) for one, other in zip(R, A, strict=True))


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_gradient_checkpointing_gives_the_same_gradients(tiny_llama, ids, use_reentrant, dropout):
    def gradients(checkpointing):
        model = drawn_adapter(tiny_llama(), supra_lambda=0.5, lora_dropout=dropout)
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
            model.enable_input_require_grads()
        model.train()
        torch.manual_seed(5)
        loss(model, ids).backward()
        return {name: value.grad for name, value in model.named_parameters() if value.requires_grad}

    plain, checkpointed = gradients(False), gradients(True)
    assert plain.keys() == checkpointed.keys()
    for name in plain:
        assert float(plain[name].abs().max()) > 0, name
        torch.testing.assert_close(plain[name], checkpointed[name], rtol=1e-6, atol=1e-9)


def test_dropout_acts_in_training_alone(llama, ids):
    model = drawn_adapter(llama, supra_lambda=1, lora_dropout=0.5)
    assert torch.equal(logits(model, ids), logits(model, ids))
    model.train()
    assert not torch.equal(logits(model, ids), logits(model, ids))


def test_an_adapter_is_deterministic_from_a_seed(tiny_llama):
    def fresh():
        torch.manual_seed(0)
        return parameters(get_peft_model(tiny_llama(), config()))

    assert_same(fresh(), fresh())


def test_deepcopy_of_an_adapted_model_is_independent(llama, ids):
    model = drawn_adapter(llama, supra_lambda=0.5)
    expected = logits(model, ids)
    twin = copy.deepcopy(model)
    assert torch.equal(logits(twin, ids), expected)
    train(twin.train(), ids, steps=1)
    assert torch.equal(logits(model, ids), expected)


# Save and load


@pytest.mark.parametrize("low_cpu_mem_usage", [False, True])
@pytest.mark.parametrize("supra_lambda", [0, 0.5, 1])
def test_loaded_adapter_gives_the_bits_of_the_saved_one(tiny_llama, ids, tmp_path, supra_lambda, low_cpu_mem_usage):
    model = drawn_adapter(tiny_llama(), supra_lambda=supra_lambda)
    model.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(tiny_llama(), tmp_path, low_cpu_mem_usage=low_cpu_mem_usage)
    assert torch.equal(logits(loaded, ids), logits(model, ids))
    for name, layer in supra_layers(loaded).items():
        saved = supra_layers(model)[name]
        assert_same(layer.state_dict(), saved.state_dict())
        assert not any(tensor.is_meta for tensor in layer.state_dict().values())


@pytest.mark.parametrize("low_cpu_mem_usage", [False, True])
def test_support_is_loaded_never_chosen_again(tiny_llama, norms, tmp_path, monkeypatch, low_cpu_mem_usage):
    model = get_peft_model(tiny_llama(), config(mask_score="wanda", activation_norms=norms))
    model.save_pretrained(tmp_path)

    def refuse(*args, **kwargs):
        raise AssertionError("a support was chosen at load")

    for chooser in ("select_from_blocks", "random_support", "_rows"):
        monkeypatch.setattr(f"axolotl_supertune.tuner.selection.{chooser}", refuse)
    loaded = PeftModel.from_pretrained(tiny_llama(seed=0), tmp_path, low_cpu_mem_usage=low_cpu_mem_usage)
    assert_same(supports(loaded), supports(model))
    assert {indices.dtype for indices in supports(loaded).values()} == {torch.int32}


def test_support_does_not_follow_the_base_it_is_loaded_on(tiny_llama, tmp_path):
    """Other weights of the same shapes would give another support."""
    model = get_peft_model(tiny_llama(seed=0), config())
    model.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(tiny_llama(seed=1), tmp_path)
    assert_same(supports(loaded), supports(model))


@pytest.mark.parametrize("low_cpu_mem_usage", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_adapter_loads_unrounded_on_a_base_of_any_dtype(tiny_llama, ids, tmp_path, dtype, low_cpu_mem_usage):
    model = drawn_adapter(tiny_llama(), supra_lambda=0.5)
    model.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(tiny_llama(dtype=dtype), tmp_path, low_cpu_mem_usage=low_cpu_mem_usage)
    for name, layer in supra_layers(loaded).items():
        saved = supra_layers(model)[name]
        for part in ("supra_values", "supra_L", "supra_R", "supra_indices"):
            one, other = getattr(layer, part)["default"], getattr(saved, part)["default"]
            assert one.dtype == other.dtype == (torch.int32 if part == "supra_indices" else torch.float32)
            assert torch.equal(one, other)
    assert logits(loaded, ids).dtype == dtype
    assert bool(torch.isfinite(logits(loaded, ids)).all())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_adapter_made_on_a_sixteen_bit_base_keeps_fp32_and_int32(tiny_llama, dtype):
    model = get_peft_model(tiny_llama(dtype=dtype), config(supra_lambda=0.5))
    assert {value.dtype for value in parameters(model).values()} == {torch.float32}
    for name, indices in supports(model).items():
        layer = supra_layers(model)[name]
        expected = select_support(layer.get_base_layer().weight.float().abs(), len(indices), "bottom")
        assert torch.equal(indices, expected)
        assert indices.dtype == torch.int32


def test_checkpoint_says_saved_and_the_config_in_memory_does_not_change(llama, norms, tmp_path):
    model = get_peft_model(llama, config(mask_score="wanda", activation_norms=norms))
    model.save_pretrained(tmp_path)
    written = json.loads((tmp_path / "adapter_config.json").read_text())
    assert written["peft_type"] == "SUPRA"
    assert written["support"] == "saved"
    assert "activation_norms" not in written
    assert written["calibration"] == norms.provenance
    assert model.peft_config["default"].support == "select"
    assert model.peft_config["default"].activation_norms is norms


@pytest.mark.parametrize("supra_lambda", [0, 0.5, 1])
def test_saved_config_without_weights_runs_and_merges_nothing(tiny_llama, ids, tmp_path, supra_lambda):
    get_peft_model(tiny_llama(), config(supra_lambda=supra_lambda)).save_pretrained(tmp_path)
    model = get_peft_model(tiny_llama(), PeftConfig.from_pretrained(tmp_path))
    with pytest.raises(RuntimeError, match=r"model\.layers\.0\.\S+: .*adapter 'default' .*not loaded"):
        logits(model, ids)
    with pytest.raises(RuntimeError, match="is not loaded"):
        model.merge_and_unload()


@pytest.mark.parametrize("part", ["supra_indices", "supra_shape", "supra_values", "supra_L", "supra_R"])
@pytest.mark.parametrize("low_cpu_mem_usage", [False, True])
def test_checkpoint_that_lost_a_part_is_refused(tiny_llama, tmp_path, part, low_cpu_mem_usage):
    drawn_adapter(tiny_llama(), supra_lambda=0.5).save_pretrained(tmp_path)
    layer = "model.layers.1.mlp.up_proj"
    edit_checkpoint(tmp_path, lambda tensors: tensors.pop(f"base_model.model.{layer}.{part}"))
    with pytest.raises(ValueError, match=rf"{layer}: the checkpoint holds a part of adapter 'default'.*not its {part}"):
        PeftModel.from_pretrained(tiny_llama(), tmp_path, low_cpu_mem_usage=low_cpu_mem_usage)


def test_checkpoint_that_lost_a_layer_cannot_run(tiny_llama, ids, tmp_path):
    drawn_adapter(tiny_llama(), supra_lambda=0.5).save_pretrained(tmp_path)
    layer = "model.layers.1.mlp.up_proj"

    def drop(tensors):
        for name in [name for name in tensors if layer in name]:
            del tensors[name]

    edit_checkpoint(tmp_path, drop)
    with pytest.warns(UserWarning, match="missing"):
        model = PeftModel.from_pretrained(tiny_llama(), tmp_path)
    with pytest.raises(RuntimeError, match=rf"{layer}: adapter 'default' is not loaded"):
        logits(model, ids)


def _swap(indices):
    indices[[0, 1]] = indices[[1, 0]]


def _repeat(indices):
    indices[1] = indices[0]


def _negative(indices):
    indices[0] = -7


def _too_large(indices):
    indices[-1] = 96 * 64


@pytest.mark.parametrize("low_cpu_mem_usage", [False, True])
@pytest.mark.parametrize("damage", [_swap, _repeat, _negative, _too_large])
def test_damaged_support_names_the_layer(tiny_llama, tmp_path, damage, low_cpu_mem_usage):
    get_peft_model(tiny_llama(), config()).save_pretrained(tmp_path)
    layer = "model.layers.1.mlp.up_proj"
    edit_checkpoint(tmp_path, lambda tensors: damage(tensors[f"base_model.model.{layer}.supra_indices"]))
    with pytest.raises(ValueError, match=rf"{layer}: the adapter's support is not a sorted set of indices below 6,144"):
        PeftModel.from_pretrained(tiny_llama(), tmp_path, low_cpu_mem_usage=low_cpu_mem_usage)


@pytest.mark.parametrize("low_cpu_mem_usage", [False, True])
@pytest.mark.parametrize("supra_lambda", [0, 0.5, 1])
def test_adapter_of_a_base_of_other_shapes_names_the_layer(tiny_llama, tmp_path, supra_lambda, low_cpu_mem_usage):
    get_peft_model(tiny_llama(), config(supra_lambda=supra_lambda)).save_pretrained(tmp_path)
    other = tiny_llama(intermediate_size=128)
    with pytest.raises(ValueError, match=r"mlp\.\w+: the adapter was made for a layer of shape \(96, 64\)"):
        PeftModel.from_pretrained(other, tmp_path, low_cpu_mem_usage=low_cpu_mem_usage)


@pytest.mark.parametrize("low_cpu_mem_usage", [False, True])
def test_adapter_of_the_transposed_layer_names_the_layer(tmp_path, low_cpu_mem_usage):
    """Both layers have c + b = 30 and c·b = 200: with λ = 0 every saved tensor would fit."""
    knobs = {"target_modules": ["lin"], "supra_lambda": 0, "r0": 2, "mask_score": "magnitude"}
    get_peft_model(Body(nn.Linear(10, 20)), SupraConfig(**knobs)).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"lin: .* shape \(20, 10\), this one is \(10, 20\)"):
        PeftModel.from_pretrained(Body(nn.Linear(20, 10)), tmp_path, low_cpu_mem_usage=low_cpu_mem_usage)


def test_modules_to_save_are_trained_and_saved(tiny_llama, ids, tmp_path):
    model = get_peft_model(tiny_llama(), config(modules_to_save=["lm_head"])).train()
    train(model, ids, steps=2)
    assert any("lm_head" in name for name in parameters(model))
    model.eval().save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(tiny_llama(), tmp_path)
    assert torch.equal(logits(loaded, ids), logits(model, ids))
    assert not torch.equal(logits(loaded, ids), logits(tiny_llama(), ids))


def test_training_goes_on_from_a_loaded_adapter(tiny_llama, ids, tmp_path):
    model = drawn_adapter(tiny_llama(), supra_lambda=0.5, lora_dropout=0.0)
    model.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(tiny_llama(), tmp_path, is_trainable=True)
    assert train(loaded.train(), ids, steps=2) == train(model.train(), ids, steps=2)
    assert_same(parameters(loaded), parameters(model))


def test_loaded_adapter_is_frozen_unless_asked(tiny_llama, tmp_path):
    get_peft_model(tiny_llama(), config()).save_pretrained(tmp_path)
    assert not parameters(PeftModel.from_pretrained(tiny_llama(), tmp_path))


# Merge


@pytest.mark.parametrize("dtype", DTYPES)
def test_merged_logits_are_the_adapted_ones_bit_for_bit_without_low_rank_part(tiny_llama, ids, dtype):
    model = drawn_adapter(tiny_llama(dtype=dtype), supra_lambda=0)
    adapted = logits(model, ids)
    assert not torch.equal(adapted, logits(tiny_llama(dtype=dtype), ids))
    assert torch.equal(logits(model.merge_and_unload(), ids), adapted)


@pytest.mark.parametrize("supra_lambda", [0.3, 0.5, 0.8, 1])
def test_merged_logits_are_the_adapted_ones_within_1e_5_in_fp32(llama, ids, supra_lambda):
    base = logits(llama, ids)
    model = drawn_adapter(llama, supra_lambda=supra_lambda)
    adapted = logits(model, ids)
    assert float((adapted - base).abs().max()) > 1e-3
    torch.testing.assert_close(logits(model.merge_and_unload(), ids), adapted, rtol=0, atol=1e-5)


@pytest.mark.parametrize("supra_lambda", [0, 0.5, 1])
def test_every_merged_bf16_weight_is_the_exact_sum_rounded_once(tiny_llama, supra_lambda):
    model = drawn_adapter(tiny_llama(dtype=torch.bfloat16), supra_lambda=supra_lambda)
    exact = {name: exact_sum(layer) for name, layer in supra_layers(model).items()}
    model.merge_adapter()
    for name, merged in base_weights(model).items():
        assert merged.dtype == torch.bfloat16
        # bf16 has 8 significant bits: with |x| = m·2^e, m in [1/2, 1), half a step is 2^(e − 9). 1e-8: the fp32 sum.
        half_step = torch.ldexp(torch.ones_like(exact[name]), torch.frexp(exact[name]).exponent - 9)
        assert bool(((merged.double() - exact[name]).abs() <= half_step + 1e-8).all()), name


def exact_sum(layer, adapter="default"):
    total = layer.get_base_layer().weight.detach().double()
    if adapter in layer.supra_values:
        total.view(-1)[layer.supra_indices[adapter].long()] += layer.supra_values[adapter].detach().double()
    if adapter in layer.supra_L:
        scaling = layer.supra_scaling[adapter]
        total += scaling * layer.supra_L[adapter].detach().double() @ layer.supra_R[adapter].detach().double()
    return total


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("supra_lambda", [0, 0.5, 1])
def test_unmerge_restores_the_base_bit_for_bit(tiny_llama, ids, supra_lambda, dtype):
    model = drawn_adapter(tiny_llama(dtype=dtype), supra_lambda=supra_lambda)
    adapted, before = logits(model, ids), base_weights(model)
    model.merge_adapter()
    assert any(not torch.equal(weight, before[name]) for name, weight in base_weights(model).items())
    model.unmerge_adapter()
    assert_same(base_weights(model), before)
    assert torch.equal(logits(model, ids), adapted)


def test_merge_and_unload_leaves_a_plain_model(llama, tiny_llama):
    merged = drawn_adapter(llama, supra_lambda=0.5).merge_and_unload()
    assert not supra_layers(merged)
    assert merged.state_dict().keys() == tiny_llama().state_dict().keys()


def test_unload_gives_the_base_back(llama, tiny_llama):
    plain = drawn_adapter(llama, supra_lambda=0.5).unload()
    assert_same(dict(plain.state_dict()), dict(tiny_llama().state_dict()))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("part", ["supra_values", "supra_L"])
def test_safe_merge_refuses_what_is_not_finite(llama, part, bad):
    model = drawn_adapter(llama, supra_lambda=0.5)
    name, layer = next(iter(supra_layers(model).items()))
    with torch.no_grad():
        getattr(layer, part)["default"].view(-1)[0] = bad
    before = layer.get_base_layer().weight.clone()
    with pytest.raises(
        ValueError, match=f"{name}: NaNs detected in the merged weights. The adapter default seems to be broken"
    ):
        layer.merge(safe_merge=True)
    assert torch.equal(layer.get_base_layer().weight, before)
    assert not layer.merged


def test_merging_twice_adds_once(llama):
    model = drawn_adapter(llama, supra_lambda=0.5)
    model.merge_adapter()
    once = base_weights(model)
    with pytest.warns(UserWarning, match="[Aa]lready"):
        model.merge_adapter()
    assert_same(base_weights(model), once)


def test_merge_over_a_frozen_parameter_keeps_the_parameter_object(llama):
    model = drawn_adapter(llama, supra_lambda=0)
    objects = [id(layer.get_base_layer().weight) for layer in supra_layers(model).values()]
    model.merge_adapter()
    model.unmerge_adapter()
    assert [id(layer.get_base_layer().weight) for layer in supra_layers(model).values()] == objects


def test_get_delta_weight_is_what_a_merge_adds(llama):
    model = drawn_adapter(llama, supra_lambda=0.5)
    for layer in supra_layers(model).values():
        expected = exact_sum(layer) - layer.get_base_layer().weight.double()
        torch.testing.assert_close(layer.get_delta_weight("default").double(), expected, rtol=1e-5, atol=1e-7)


# Several adapters


@pytest.fixture
def two_adapters(llama):
    """`default` (bottom, λ = 0.5) and `second` (all of the layer's first indices and more: they overlap)."""
    model = drawn_adapter(llama, supra_lambda=0.5)
    model.add_adapter("second", config(init_weights=False, sparse_direction="random", supra_lambda=0.3))
    return model


def test_two_adapters_have_their_own_support_and_overlap(two_adapters):
    first, second = supports(two_adapters), supports(two_adapters, "second")
    for name in first:
        together = set(first[name].tolist()) & set(second[name].tolist())
        assert 0 < len(together) < len(first[name]) < len(second[name])


def test_second_adapter_leaves_the_first_alone(llama, ids):
    model = drawn_adapter(llama, supra_lambda=0.5)
    expected, support = logits(model, ids), copy.deepcopy(supports(model))
    model.add_adapter("second", config(init_weights=False, sparse_direction="top"))
    assert torch.equal(logits(model, ids), expected)
    assert_same(supports(model), support)


def test_second_adapter_is_chosen_from_the_base_weight(two_adapters):
    two_adapters.add_adapter("third", config(supra_lambda=0.5))
    assert_same(supports(two_adapters, "third"), supports(two_adapters))


def test_set_adapter_switches_output_and_training(two_adapters, ids):
    first = logits(two_adapters, ids)
    two_adapters.set_adapter("second")
    assert not torch.equal(logits(two_adapters, ids), first)
    assert all(".second" in name for name in parameters(two_adapters))
    two_adapters.set_adapter("default")
    assert torch.equal(logits(two_adapters, ids), first)
    assert all(".default" in name for name in parameters(two_adapters))


def test_two_active_adapters_add_up(two_adapters, ids):
    two_adapters.base_model.set_adapter(["default", "second"])
    both = logits(two_adapters, ids)
    with torch.no_grad():
        for layer in supra_layers(two_adapters).values():
            weight = layer.get_base_layer().weight
            weight.copy_(weight + layer.get_delta_weight("default") + layer.get_delta_weight("second"))
    torch.testing.assert_close(logits(two_adapters.unload(), ids), both, rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_merging_two_at_once_one_by_one_and_unmerging(tiny_llama, dtype):
    model = drawn_adapter(tiny_llama(dtype=dtype), supra_lambda=0)
    model.add_adapter("second", config(init_weights=False, sparse_direction="random", supra_lambda=0))
    before = base_weights(model)
    model.merge_adapter(["default", "second"])
    at_once = base_weights(model)
    for name, layer in supra_layers(model).items():
        total = before[name].float().clone().view(-1)
        for adapter in ("default", "second"):
            total[layer.supra_indices[adapter].long()] += layer.supra_values[adapter].detach()
        assert torch.equal(at_once[name].view(-1), total.to(dtype)), name
    model.unmerge_adapter()
    assert_same(base_weights(model), before)
    model.merge_adapter(["default"])
    model.merge_adapter(["second"])
    assert_same(base_weights(model), at_once)
    model.unmerge_adapter()
    assert_same(base_weights(model), before)


def test_delete_adapter_leaves_nothing_of_it(two_adapters, ids):
    expected = logits(two_adapters, ids)
    two_adapters.delete_adapter("second")
    assert not [name for name in two_adapters.state_dict() if name.endswith(".second")]
    for layer in supra_layers(two_adapters).values():
        for attribute in (*layer.adapter_layer_names, *layer.other_param_names):
            assert "second" not in getattr(layer, attribute), attribute
    assert torch.equal(logits(two_adapters, ids), expected)
    assert "second" not in two_adapters.peft_config


def test_name_of_a_deleted_adapter_can_be_used_again(llama, ids):
    model = drawn_adapter(llama, supra_lambda=0.5)
    model.add_adapter("second", config(support="saved"))
    model.delete_adapter("second")
    model.add_adapter("second", config())
    model.set_adapter("second")
    with model.disable_adapter():
        expected = logits(model, ids)
    assert torch.equal(logits(model, ids), expected)


def test_loading_a_second_adapter_keeps_both(tiny_llama, two_adapters, ids, tmp_path):
    two_adapters.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(tiny_llama(), tmp_path)
    loaded.load_adapter(tmp_path / "second", adapter_name="second")
    for adapter in ("default", "second"):
        two_adapters.set_adapter(adapter)
        loaded.set_adapter(adapter)
        assert torch.equal(logits(loaded, ids), logits(two_adapters, ids))
        assert_same(supports(loaded, adapter), supports(two_adapters, adapter))


@pytest.mark.parametrize("merged", [False, True])
def test_disable_adapter_gives_the_base(llama, ids, merged):
    expected = logits(llama, ids)
    model = drawn_adapter(llama, supra_lambda=0.5)
    adapted = logits(model, ids)
    if merged:
        model.merge_adapter()
    with model.disable_adapter():
        assert torch.equal(logits(model, ids), expected)
    torch.testing.assert_close(logits(model, ids), adapted, rtol=0, atol=1e-5)


def test_adding_to_a_merged_layer_is_refused(llama):
    model = drawn_adapter(llama, supra_lambda=0.5)
    model.merge_adapter()
    with pytest.raises(ValueError, match=r"model\.layers\.0\.self_attn\.q_proj: an adapter is merged here"):
        model.add_adapter("second", config())


def test_mixed_adapters_in_one_batch_are_refused(llama, ids):
    model = drawn_adapter(llama, supra_lambda=0.5)
    with pytest.raises(ValueError, match="adapter_names"):
        next(iter(supra_layers(model).values()))(torch.ones(1, 64), adapter_names=["default"])


# Bad input


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"supra_lambda": 1.5}, r"supra_lambda=1\.5 is not in \[0, 1\]"),
        ({"supra_lambda": -0.1}, r"supra_lambda=-0\.1"),
        ({"supra_lambda": float("nan")}, "supra_lambda=nan"),
        ({"r0": 0}, "r0=0"),
        ({"r0": 4.0}, r"r0=4\.0"),
        ({"sparse_density": 0}, "sparse_density=0 "),
        ({"sparse_density": 1.2}, r"sparse_density=1\.2"),
        ({"sparse_density": 0.1, "r0": 8}, r"two budgets, r0=8 and sparse_density=0\.1"),
        ({"mask_score": "hessian"}, "mask_score='hessian' is not one of wanda, magnitude"),
        ({"sparse_direction": "up"}, "sparse_direction='up' is not one of bottom, top, hybrid, random"),
        ({"hybrid_beta": 0.3}, r"hybrid_beta=0\.3 has no effect with sparse_direction: bottom"),
        ({"sparse_direction": "hybrid", "hybrid_beta": 1.3}, r"hybrid_beta=1\.3 is not in \[0, 1\]"),
        ({"lora_dropout": 1.0}, r"lora_dropout=1\.0 is not in \[0, 1\)"),
        ({"lora_dropout": -0.1}, r"lora_dropout=-0\.1"),
        ({"lora_alpha": float("inf")}, "lora_alpha=inf is not a finite number"),
        ({"lora_alpha": "16"}, "lora_alpha='16'"),
        ({"lora_alpha": 0}, "lora_alpha=0 scales the low-rank part to nothing"),
        ({"support_seed": -1}, "support_seed=-1"),
        ({"support_seed": 0.5}, r"support_seed=0\.5"),
        ({"support": "fresh"}, "support='fresh' is not one of select, saved"),
        ({"layers_to_transform": [0]}, "layers_to_transform=.* has no effect with target_modules='all-linear'"),
        ({"layers_pattern": "h", "target_modules": ["q_proj"]}, "layers_pattern='h' needs layers_to_transform"),
    ],
)
def test_bad_knob_is_named_with_its_value(knobs, message):
    with pytest.raises(ValueError, match=message):
        SupraConfig(**knobs)


def snapshot(model):
    """What an error may not change: kinds of modules, the parameters' bits and which of them are trained."""
    kinds = {name: type(module) for name, module in model.named_modules()}
    values = {name: (value.requires_grad, value.detach().clone()) for name, value in model.named_parameters()}
    return kinds, values


def assert_unmodified(model, before):
    kinds, values = before
    assert {name: type(module) for name, module in model.named_modules()} == kinds
    assert not hasattr(model, "peft_config")
    for name, value in model.named_parameters():
        assert value.requires_grad == values[name][0], name
        assert torch.equal(value, values[name][1]), name


def test_missing_norms_are_asked_for_before_anything_is_replaced(llama):
    before = snapshot(llama)
    with pytest.raises(ValueError, match=r"mask_score='wanda' needs activation norms.*calibrate"):
        get_peft_model(llama, SupraConfig())
    assert_unmodified(llama, before)


@pytest.mark.parametrize("knobs", [{"supra_lambda": 1}, {"sparse_direction": "random"}, {"mask_score": "magnitude"}])
def test_norms_are_not_asked_for_where_none_are_used(llama, ids, knobs):
    logits(get_peft_model(llama, SupraConfig(**knobs)), ids)


def test_norms_of_fewer_layers_name_the_missing_one(llama, ids):
    some = calibrate(llama, [ids], layers=["model.layers.0.self_attn.q_proj"], progress=False)
    before = snapshot(llama)
    with pytest.raises(ValueError, match=r"model\.layers\.0\.self_attn\.k_proj: no activation norms for this layer"):
        get_peft_model(llama, SupraConfig(activation_norms=some))
    assert_unmodified(llama, before)


def test_norms_may_be_a_path(llama, norms, tmp_path):
    norms.save(tmp_path / "norms.safetensors")
    model = get_peft_model(llama, SupraConfig(activation_norms=str(tmp_path / "norms.safetensors")))
    assert model.peft_config["default"].calibration == norms.provenance


def test_norms_of_another_type_are_refused(llama):
    with pytest.raises(ValueError, match="activation_norms is a dict"):
        get_peft_model(llama, SupraConfig(activation_norms={"q_proj": torch.ones(64)}))


@pytest.mark.parametrize("knobs", [{"r0": 22}, {"r0": 22, "supra_lambda": 1}, {"r0": 22, "mask_score": "wanda"}])
def test_budget_above_a_layer_names_it_and_leaves_the_model_alone(llama, knobs):
    """22·(32 + 64) is more than the 2,048 weights of k_proj, and the first layer q_proj would still fit."""
    before = snapshot(llama)
    with pytest.raises(BudgetError, match=r"model\.layers\.0\.self_attn\.k_proj: r0=22 .*r0 ≤ 21"):
        get_peft_model(llama, config(**knobs))
    assert_unmodified(llama, before)


def test_a_refused_config_can_be_corrected(llama, tiny_llama, ids):
    with pytest.raises(BudgetError):
        get_peft_model(llama, config(r0=22))
    model = get_peft_model(llama, config(r0=4))
    assert_same(supports(model), supports(get_peft_model(tiny_llama(), config(r0=4))))
    assert torch.equal(logits(model, ids), logits(tiny_llama(), ids))


@pytest.mark.parametrize("mask_score", ["wanda", "magnitude"])
def test_nan_weight_names_the_layer(llama, norms, mask_score):
    with torch.no_grad():
        llama.model.layers[1].mlp.up_proj.weight[3, 3] = float("nan")
    unchecked = copy.copy(norms)
    unchecked.check_model = lambda model, read: None
    knobs = {"mask_score": mask_score, "activation_norms": unchecked}
    with pytest.raises(ValueError, match=r"model\.layers\.1\.mlp\.up_proj: its weight hold 1 NaN"):
        get_peft_model(llama, config(**knobs))


def test_nan_weight_leaves_the_model_alone(llama):
    with torch.no_grad():
        llama.model.layers[1].mlp.up_proj.weight[3, 3] = float("nan")
    kinds = {name: type(module) for name, module in llama.named_modules()}
    with pytest.raises(ValueError, match="NaN"):
        get_peft_model(llama, config())
    assert {name: type(module) for name, module in llama.named_modules()} == kinds


@pytest.mark.parametrize(
    ("layer", "kind"),
    [
        (nn.Embedding(10, 20), "Embedding"),
        (Conv1D(20, 10), "Conv1D"),
        (nn.Conv1d(10, 20, 1), "Conv1d"),
        (nn.LayerNorm(20), "LayerNorm"),
    ],
    ids=["Embedding", "Conv1D", "Conv1d", "LayerNorm"],
)
def test_module_that_is_not_linear_is_named(layer, kind):
    model = Body(layer)
    with pytest.raises(TypeError, match=rf"lin: SUPRA adapts torch\.nn\.Linear, not {kind}"):
        get_peft_model(model, SupraConfig(mask_score="magnitude", target_modules=["lin"]))
    assert model.lin is layer


def test_quantized_weight_is_named():
    layer = nn.Linear(20, 20)
    layer.weight = nn.Parameter(torch.zeros(20, 20, dtype=torch.int8), requires_grad=False)
    with pytest.raises(TypeError, match="lin: the layer is quantized"):
        get_peft_model(Body(layer), SupraConfig(mask_score="magnitude", target_modules=["lin"]))


def test_layer_of_another_method_is_named(llama):
    model = get_peft_model(llama, LoraConfig(target_modules=["q_proj"])).base_model.model
    with pytest.raises(TypeError, match=r"model\.layers\.0\.self_attn\.q_proj: already adapted by Linear"):
        get_peft_model(model, config(target_modules=["q_proj"]))


def test_no_layer_matched(llama):
    with pytest.raises(ValueError, match="nothing_proj"):
        get_peft_model(llama, config(target_modules=["nothing_proj"]))
    with pytest.raises(ValueError, match=r"no layer matched: target_modules=\{'nothing_proj'\}"):
        target_layers(llama, config(target_modules=["nothing_proj"]))


# The config and the PEFT registry


def test_peft_type_survives_pickle_and_deepcopy():
    member = PeftType.SUPRA
    assert pickle.loads(pickle.dumps(member)) is member
    assert copy.deepcopy(member) is member
    assert PeftType("SUPRA") is member
    assert member in list(PeftType)
    assert member == "SUPRA"


@pytest.mark.parametrize("twin", [copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))])
def test_config_survives_pickle_and_deepcopy(norms, twin):
    original = SupraConfig(
        supra_lambda=0.3, target_modules=["q_proj"], sparse_direction="hybrid", activation_norms=norms
    )
    other = twin(original)
    assert other.to_dict() == original.to_dict()
    assert other.peft_type is PeftType.SUPRA
    assert torch.equal(
        next(iter(other.activation_norms.norms.values())), next(iter(original.activation_norms.norms.values()))
    )


def test_config_survives_save_and_load(tmp_path):
    original = SupraConfig(supra_lambda=0.3, sparse_density=0.01, sparse_direction="hybrid", hybrid_beta=0.25)
    original.save_pretrained(tmp_path)
    loaded = PeftConfig.from_pretrained(tmp_path)
    assert type(loaded) is SupraConfig
    assert {**loaded.to_dict(), "support": "select"} == original.to_dict()


def test_equal_configs_are_equal_files(tmp_path):
    names = ["v_proj", "k_proj", "up_proj", "q_proj", "o_proj"]
    for folder, listed in (("a", names), ("b", names[::-1])):
        SupraConfig(target_modules=listed, exclude_modules=listed).save_pretrained(tmp_path / folder)
    written = [(tmp_path / folder / "adapter_config.json").read_text() for folder in "ab"]
    assert written[0] == written[1]
    assert json.loads(written[0])["target_modules"] == sorted(names)


def test_defaults_are_the_papers():
    default = SupraConfig()
    assert (default.r0, default.supra_lambda, default.lora_alpha, default.lora_dropout) == (8, 0.8, 16, 0.05)
    assert (default.mask_score, default.sparse_direction, default.hybrid_beta) == ("wanda", "bottom", None)
    assert SupraConfig(sparse_direction="hybrid").hybrid_beta == 0.5
    assert SupraConfig(sparse_density=0.1).r0 is None


def test_repr_names_the_layer_kind(llama):
    model = get_peft_model(llama, config(target_modules=["q_proj"]))
    layer = model.base_model.model.model.layers[0].self_attn.q_proj
    assert isinstance(layer, SupraLinear)
    assert repr(layer).startswith("supra.SupraLinear(")


def test_import_loads_nothing_heavy():
    code = """
import sys
import axolotl_supertune
heavy = {"torch", "peft", "axolotl", "transformers", "datasets", "numpy"} & set(sys.modules)
assert not heavy, heavy
assert "SupraConfig" in dir(axolotl_supertune)
import axolotl_supertune.method.budget
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_unknown_name_is_an_attribute_error():
    import axolotl_supertune

    with pytest.raises(AttributeError, match="SupraConfg"):
        axolotl_supertune.SupraConfg  # noqa: B018
