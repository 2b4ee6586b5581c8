"""Several adapters on one model: sums of them, one swapped for a file's, switching off, merges that are refused."""

import inspect

import numpy
import pytest
import torch
from nested import Nested
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraModel

from axolotl_supertune import SupraConfig, SupraModel, hotswap_adapter
from axolotl_supertune.tuner import SupraLayer
from axolotl_supertune.tuner.config import exact_targets
from axolotl_supertune.tuner.weighted_sum import combine

KNOBS = {"mask_score": "magnitude", "task_type": "CAUSAL_LM", "init_weights": False, "lora_dropout": 0}


def config(**changes):
    return SupraConfig(**{**KNOBS, **changes})


def scale(model):
    """Random U, L and R of a trained adapter's size."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "supra_" in name:
                parameter.mul_(0.05)
    return model.eval()


def with_adapters(model, **configs):
    """A model with an adapter for each (name, config)."""
    torch.manual_seed(1)
    (first, first_config), *others = configs.items()
    model = get_peft_model(model, first_config, adapter_name=first)
    for name, each in others:
        model.add_adapter(name, each)
    return scale(model)


def logits(model, ids):
    with torch.no_grad():
        return model(ids).logits


def layers(model):
    return {module.layer_name: module for module in model.modules() if isinstance(module, SupraLayer)}


def bits(model):
    """All tensors as bytes: NaN equals itself."""
    return {name: tensor.clone().view(torch.uint8) for name, tensor in model.state_dict().items()}


def assert_same(first, second):
    assert first.keys() == second.keys()
    for name in first:
        assert torch.equal(first[name], second[name]), name


def delta(model, adapter):
    """The dense fp64 delta of every layer that has the adapter, from its tensors alone."""
    found = {}
    for name, layer in layers(model).items():
        total = torch.zeros(layer.out_features, layer.in_features, dtype=torch.float64)
        if adapter in layer.supra_values:
            total.view(-1)[layer.supra_indices[adapter].long()] += layer.supra_values[adapter].detach().double()
        if adapter in layer.supra_L:
            L, R = layer.supra_L[adapter].detach().double(), layer.supra_R[adapter].detach().double()
            total += layer.supra_scaling[adapter] * (L @ R)
        found[name] = total
    return found


# Weighted sums

PAIRS = {
    "equal supports": (dict(supra_lambda=0), dict(supra_lambda=0)),
    "supports overlap": (dict(supra_lambda=0), dict(supra_lambda=0, sparse_direction="random")),
    "disjoint supports": (dict(supra_lambda=0, r0=4), dict(supra_lambda=0, r0=4, sparse_direction="top")),
    "both parts": (dict(supra_lambda=0.5), dict(supra_lambda=0.5, sparse_direction="top", lora_alpha=3)),
    "low-rank": (dict(supra_lambda=1), dict(supra_lambda=1, lora_alpha=32)),
    "sparse and low-rank": (dict(supra_lambda=0), dict(supra_lambda=1)),
    "other layers": (
        dict(supra_lambda=0.5, target_modules=["q_proj", "up_proj"]),
        dict(supra_lambda=0.5, target_modules=["q_proj", "down_proj"]),
    ),
}


@pytest.fixture(params=PAIRS)
def pair(request, tiny_llama):
    first, second = PAIRS[request.param]
    return with_adapters(tiny_llama(), first=config(**first), second=config(**second))


@pytest.mark.parametrize("weights", [(1, 1), (0.3, 0.7), (2, -0.5), (0, 1)])
def test_cat_is_the_weighted_sum_of_the_deltas(pair, weights):
    pair.add_weighted_adapter(["first", "second"], list(weights), "sum", combination_type="cat")
    first, second, found = (delta(pair, name) for name in ("first", "second", "sum"))
    for name in found:
        torch.testing.assert_close(found[name], weights[0] * first[name] + weights[1] * second[name], rtol=0, atol=1e-7)


def test_cat_computes_what_both_active_adapters_do(pair, ids):
    pair.base_model.set_adapter(["first", "second"])
    both = logits(pair, ids)
    pair.add_weighted_adapter(["first", "second"], [1.0, 1.0], "sum")
    assert torch.equal(logits(pair, ids), both)  # it is not made active
    pair.set_adapter("sum")
    torch.testing.assert_close(logits(pair, ids), both, rtol=0, atol=1e-5)


def test_combined_support_is_the_union_and_no_entry_occurs_twice(tiny_llama):
    model = with_adapters(
        tiny_llama(), first=config(supra_lambda=0), second=config(supra_lambda=0, sparse_direction="random")
    )
    model.add_weighted_adapter(["first", "second"], [1, 1], "sum")
    for layer in layers(model).values():
        union = set(layer.supra_indices["first"].tolist()) | set(layer.supra_indices["second"].tolist())
        assert layer.supra_indices["sum"].tolist() == sorted(union)
        assert layer.supra_indices["sum"].dtype == layer.supra_indices["first"].dtype
        assert layer.supra_budget["sum"].sparse_count == len(union) == layer.supra_values["sum"].numel()


def test_equal_supports_stay_what_they_are(tiny_llama):
    model = with_adapters(tiny_llama(), first=config(supra_lambda=0), second=config(supra_lambda=0))
    model.add_weighted_adapter(["first", "second"], [0.25, -4], "sum", combination_type="linear")
    for layer in layers(model).values():
        assert torch.equal(layer.supra_indices["sum"], layer.supra_indices["first"])
        expected = 0.25 * layer.supra_values["first"] - 4 * layer.supra_values["second"]
        assert torch.equal(layer.supra_values["sum"], expected)


@pytest.mark.parametrize("weights", [[1.0, 1.0], [0.7, -0.2]])
def test_linear_is_peft_loras_linear_where_lambda_is_1(tiny_llama, weights):
    ours = with_adapters(
        tiny_llama(), first=config(supra_lambda=1), second=config(supra_lambda=1, lora_alpha=4, lora_dropout=0.1)
    )
    lora = get_peft_model(
        tiny_llama(), LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM"), "first"
    )
    lora.add_adapter("second", LoraConfig(r=8, lora_alpha=4, target_modules="all-linear", task_type="CAUSAL_LM"))
    modules = dict(lora.base_model.model.named_modules())
    with torch.no_grad():
        for name, layer in layers(ours).items():
            for adapter in ("first", "second"):
                modules[name].lora_A[adapter].weight.copy_(layer.supra_R[adapter])
                modules[name].lora_B[adapter].weight.copy_(layer.supra_L[adapter])
    for model in (ours, lora):
        model.add_weighted_adapter(["first", "second"], weights, "sum", combination_type="linear")
    for name, found in delta(ours, "sum").items():
        expected = modules[name].get_delta_weight("sum").double()
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
        assert layers(ours)[name].supra_R["sum"].shape == layers(ours)[name].supra_R["first"].shape


@pytest.mark.parametrize("combination_type", ["cat", "linear"])
def test_combined_adapter_is_saved_and_loaded_without_the_others(pair, tiny_llama, ids, tmp_path, combination_type):
    pair.add_weighted_adapter(["first", "second"], [0.5, 0.5], "sum", combination_type=combination_type)
    pair.set_adapter("sum")
    pair.save_pretrained(tmp_path, selected_adapters=["sum"])
    loaded = PeftModel.from_pretrained(tiny_llama(), tmp_path / "sum")
    assert torch.equal(logits(loaded, ids), logits(pair, ids))
    assert loaded.peft_config["default"].combination["type"] == combination_type
    assert loaded.peft_config["default"].combination["weights"] == {"first": 0.5, "second": 0.5}


def test_combined_adapter_can_be_trained_merged_and_combined_again(pair, ids):
    pair.add_weighted_adapter(["first", "second"], [0.5, 0.5], "sum")
    pair.add_weighted_adapter(["sum", "first"], [2.0, -1.0], "again")
    first, second, found = (delta(pair, name) for name in ("first", "second", "again"))
    for name in found:
        torch.testing.assert_close(found[name], second[name] if name in second else 0 * first[name], atol=1e-6, rtol=0)
    pair.set_adapter("again")
    trained = {name for name, parameter in pair.named_parameters() if parameter.requires_grad}
    assert trained
    assert all(name.endswith(".again") for name in trained)
    pair(ids, labels=ids).loss.backward()
    assert all(parameter.grad is not None for name, parameter in pair.named_parameters() if name in trained)
    expected = logits(pair, ids)
    pair.merge_adapter()
    torch.testing.assert_close(logits(pair, ids), expected, rtol=0, atol=1e-5)


def test_a_combined_adapter_loads_on_its_own_layers_alone(pair, tiny_llama, tmp_path):
    pair.add_weighted_adapter(["first", "second"], [0.5, 0.5], "sum")
    pair.save_pretrained(tmp_path, selected_adapters=["sum"])
    changed = SupraConfig.from_pretrained(tmp_path / "sum")
    changed.combination["layers"].pop("model.layers.1.self_attn.q_proj")
    with pytest.raises(ValueError, match=r"model\.layers\.1\.self_attn\.q_proj: the combined adapter has nothing"):
        get_peft_model(tiny_llama(), changed)


def test_a_sum_is_saved_exactly_whatever_its_first_part_is_saved_in(tiny_llama, ids, tmp_path):
    model = with_adapters(tiny_llama(), first=config(values_dtype="bf16"), second=config())
    model.add_weighted_adapter(["first", "second"], [0.7, 0.3], "sum")
    model.set_adapter("sum")
    model.save_pretrained(tmp_path, selected_adapters=["sum"])
    assert torch.equal(logits(PeftModel.from_pretrained(tiny_llama(), tmp_path / "sum"), ids), logits(model, ids))
    parts = SupraConfig.from_pretrained(tmp_path / "sum").parts()
    assert list(parts) == ["first", "second"]
    assert parts["first"].mask_score == "magnitude"


@pytest.mark.parametrize(
    "weights", [numpy.array([0.5, -2], "float32"), [numpy.float64(0.5), -2], torch.tensor([0.5, -2])]
)
def test_weights_are_numbers_of_any_library(tiny_llama, weights, tmp_path):
    model = with_adapters(tiny_llama(), first=config(), second=config(sparse_direction="top"))
    model.add_weighted_adapter(["first", "second"], weights, "sum")
    model.add_weighted_adapter(["first", "second"], [0.5, -2], "plain")
    found, expected = delta(model, "sum"), delta(model, "plain")
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    model.save_pretrained(tmp_path, selected_adapters=["sum"])
    saved = SupraConfig.from_pretrained(tmp_path / "sum").combination["weights"]
    assert saved == {"first": 0.5, "second": -2}


def test_a_sum_adapts_the_layers_of_its_parts_and_none_of_a_longer_name(tmp_path):
    of_one = dict(target_modules="^lin$", task_type=None)
    model = with_adapters(Nested(), first=config(**of_one), second=config(**of_one, sparse_direction="top"))
    model.add_weighted_adapter(["first", "second"], [0.5, 0.5], "sum")
    model.set_adapter("sum")
    model.save_pretrained(tmp_path, selected_adapters=["sum"])
    loaded = PeftModel.from_pretrained(Nested(), tmp_path / "sum").eval()
    assert list(layers(loaded)) == ["lin"]
    x = torch.arange(64).view(2, 32) / 64
    assert torch.equal(loaded(x), model(x))


def test_targets_are_exact():
    assert exact_targets(["a.b", "c"], ["", "a", "a.b", "c", "d.cc"]) == ["a.b", "c"]
    assert exact_targets(["a.b", "c"], ["a", "a.b", "c", "d.c"]) == r"a\.b|c"
    assert exact_targets(["a.b"], ["a.b", "x.y.a.b"]) == r"a\.b"
    assert exact_targets(["a.b"], None) == r"a\.b"
    assert exact_targets(["c", "d.c"], ["c", "d", "d.c"]) == ["c", "d.c"]


def test_no_combination_is_no_key_of_the_saved_config(tmp_path):
    config().save_pretrained(tmp_path)
    assert "combination" not in (tmp_path / "adapter_config.json").read_text()


def test_arguments_are_named_as_loras():
    ours, loras = (inspect.signature(model.add_weighted_adapter).parameters for model in (SupraModel, LoraModel))
    assert list(ours) == list(loras)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(combination_type="svd"), "combination_type='svd' is none of cat, linear: svd, ties"),
        (dict(combination_type="ties"), "combination_type='ties' is none of"),
        (dict(svd_rank=4), "svd_rank has no effect with combination_type='cat'"),
        (dict(density=0.5), "density has no effect"),
        (dict(majority_sign_method="frequency"), "majority_sign_method has no effect"),
        (dict(adapters=["first", "third"]), "no adapter 'third': there are first, second"),
        (dict(adapters=["first", "first"]), "give different adapters"),
        (dict(adapters=[], weights=[]), "give different adapters"),
        (dict(weights=[1]), "a weight for each"),
        (dict(weights=[1, float("nan")]), "not all finite"),
        (dict(weights=[1, "1"]), "not all finite"),
        (dict(weights=[1, torch.ones(2)]), "not all finite"),
        (dict(adapter_name="second"), "an adapter 'second' exists already"),
        (dict(combination_type="linear"), r"q_proj: combination_type='linear' .* these have \[8, 4\]; use 'cat'"),
    ],
)
def test_weighted_sum_that_means_nothing_is_refused_and_adds_nothing(tiny_llama, arguments, message):
    model = with_adapters(tiny_llama(), first=config(supra_lambda=1), second=config(supra_lambda=0.5))
    before = bits(model)
    given = dict(adapters=["first", "second"], weights=[1, 1], adapter_name="sum")
    with pytest.raises(ValueError, match=message):
        model.add_weighted_adapter(**{**given, **arguments})
    assert_same(bits(model), before)
    assert set(model.peft_config) == {"first", "second"}


def test_weighted_sum_of_merged_or_unloaded_or_fully_trained_adapters_is_refused(tiny_llama):
    model = with_adapters(tiny_llama(), first=config(), second=config(modules_to_save=["lm_head"]))
    with pytest.raises(ValueError, match="adapter 'second' trains modules in full"):
        model.add_weighted_adapter(["first", "second"], [1, 1], "sum")
    model.add_adapter("empty", config(support="saved"))
    with pytest.raises(RuntimeError, match="adapter 'empty' is not loaded"):
        model.add_weighted_adapter(["first", "empty"], [1, 1], "sum")
    model.merge_adapter(["first"])
    with pytest.raises(ValueError, match="an adapter is merged here: call unmerge_adapter"):
        model.add_weighted_adapter(["first"], [1], "sum")


def test_combining_nothing_gives_nothing():
    assert combine([], [], "cat", "layer") == (None, None, None, None)


# Hot-swap


@pytest.fixture
def saved(tiny_llama, tmp_path):
    """Folder of an adapter of other values, supports and α than the adapter `default` of `hot`."""
    model = with_adapters(tiny_llama(), default=config(supra_lambda=0.5, sparse_direction="top", lora_alpha=3))
    model.save_pretrained(tmp_path / "saved")
    return tmp_path / "saved"


@pytest.fixture
def hot(tiny_llama):
    return with_adapters(tiny_llama(), default=config(supra_lambda=0.5), other=config(supra_lambda=0))


def test_hotswap_computes_what_the_file_does_in_the_parameters_that_were_there(hot, saved, tiny_llama, ids):
    parameters = {name: parameter for name, parameter in hot.named_parameters() if parameter.requires_grad}
    training = hot.train().training
    hotswap_adapter(hot, saved, "default")
    assert hot.training is training
    assert {id(each) for each in parameters.values()} == {id(each) for each in hot.parameters() if each.requires_grad}
    assert set(hot.peft_config) == {"default", "other"}
    assert not [name for name in hot.state_dict() if "incoming" in name]
    assert hot.peft_config["default"].lora_alpha == 3
    expected = logits(PeftModel.from_pretrained(tiny_llama(), saved), ids)
    assert torch.equal(logits(hot.eval(), ids), expected)


def test_hotswap_takes_no_name_that_an_adapter_has(saved, tiny_llama, ids):
    names = {"math": config(supra_lambda=0.5), "incoming_math": config(supra_lambda=0), "incoming_math_": config()}
    model = with_adapters(tiny_llama(), **names)
    others = {name: tensor for name, tensor in bits(model).items() if "incoming" in name}
    hotswap_adapter(model, saved, "math")
    assert list(model.peft_config) == list(names)
    assert_same({name: tensor for name, tensor in bits(model).items() if "incoming" in name}, others)
    assert torch.equal(logits(model, ids), logits(PeftModel.from_pretrained(tiny_llama(), saved), ids))


def test_hotswap_leaves_a_frozen_adapter_frozen(saved, tiny_llama, ids):
    model = PeftModel.from_pretrained(tiny_llama(), saved)
    hotswap_adapter(model, saved, "default")
    assert not any(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(supra_lambda=0.8), "has rank 6 and .* adapter 'default' rank 4"),
        (dict(target_modules=["q_proj"], supra_lambda=0.5), "has nothing here, adapter 'default' rank 4"),
        (dict(supra_lambda=0.5, modules_to_save=["lm_head"]), r"modules_to_save=\['lm_head'\]"),
    ],
)
def test_hotswap_of_another_size_is_refused_and_changes_nothing(hot, tiny_llama, tmp_path, ids, change, message):
    with_adapters(tiny_llama(), default=config(**change)).save_pretrained(tmp_path)
    before, expected = bits(hot), logits(hot, ids)
    with pytest.raises(ValueError, match=message):
        hotswap_adapter(hot, tmp_path, "default")
    after = {name.replace(".original_module.", "."): each for name, each in bits(hot).items()}
    assert_same(after, before)
    assert torch.equal(logits(hot, ids), expected)


def test_hotswap_of_another_method_or_name_or_a_merged_adapter_is_refused(hot, saved, tiny_llama, tmp_path):
    get_peft_model(tiny_llama(), LoraConfig(target_modules=["q_proj"])).save_pretrained(tmp_path / "lora")
    before = bits(hot)
    with pytest.raises(ValueError, match="no adapter 'third': there are default, other"):
        hotswap_adapter(hot, saved, "third")
    with pytest.raises(Exception, match=r"LORA|Lora"):
        hotswap_adapter(hot, tmp_path / "lora", "default")
    assert_same(bits(hot), before)
    hot.merge_adapter()
    with pytest.raises(ValueError, match="adapter 'default' is merged"):
        hotswap_adapter(hot, saved, "default")


# Loads that are refused


def shape(model):
    """Everything of a model but its values: modules, adapters, modes, what is active and what is trained."""
    state = {name: repr(type(module)) for name, module in model.named_modules()}
    state |= {f"{name} mode": module.training for name, module in model.named_modules()}
    state |= {f"{name} trained": parameter.requires_grad for name, parameter in model.named_parameters()}
    state |= {f"{name} active": layer.active_adapters for name, layer in layers(model).items()}
    state |= {f"{name} of": set(layer.supra_budget) for name, layer in layers(model).items()}
    return state | {"adapters": list(getattr(model, "peft_config", ())), "forward": forwards(model)}


def forwards(model):
    return [name for name, module in model.named_modules() if "forward" in vars(module)]


def flip(folder):
    path = folder / "adapter_model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


@pytest.fixture(params=["damaged", "cut off", "other base", "other budget", "damaged, more layers", "no file"])
def unloadable(request, tiny_llama, tmp_path):
    """Folder of an adapter that no model of `tiny_llama` may load."""
    base = tiny_llama(num_hidden_layers=3) if request.param == "other base" else tiny_llama()
    knobs = {"modules_to_save": ["lm_head"]} if request.param == "damaged, more layers" else {}
    targets = ["up_proj"] if request.param == "other base" else ["q_proj", "gate_proj", "up_proj", "down_proj"]
    # λ = 1: without a sparse part a shell looks like an adapter that was trained.
    with_adapters(base, default=config(supra_lambda=1, target_modules=targets, **knobs)).save_pretrained(tmp_path)
    path = tmp_path / "adapter_model.safetensors"
    if request.param.startswith("damaged"):
        flip(tmp_path)
    elif request.param == "cut off":
        path.write_bytes(path.read_bytes()[:-100])
    elif request.param == "other budget":
        of = tmp_path / "adapter_config.json"
        of.write_text(of.read_text().replace('"r0": 8', '"r0": 6'))
    elif request.param == "no file":
        path.unlink()
    return tmp_path


@pytest.mark.parametrize("is_trainable", [False, True])
def test_a_refused_load_leaves_the_model_as_it_was(tiny_llama, unloadable, ids, tmp_path, is_trainable):
    model = with_adapters(tiny_llama(), one=config(target_modules=["q_proj", "k_proj", "v_proj"]), two=config(r0=2))
    model.base_model.set_adapter(["one", "two"])
    model.train()
    next(parameter for name, parameter in model.named_parameters() if name.endswith(".two")).requires_grad_(False)
    before, tensors, expected = shape(model), bits(model), logits(model.eval(), ids)
    model.train()
    with pytest.raises((ValueError, OSError)):
        model.load_adapter(unloadable, "third", is_trainable=is_trainable)
    assert shape(model) == before
    assert_same(bits(model), tensors)
    assert torch.equal(logits(model.eval(), ids), expected)
    model.save_pretrained(tmp_path / "again")
    assert {path.name for path in (tmp_path / "again").iterdir()} == {"one", "two", "README.md"}
    model.add_adapter("third", config())  # the name is free


def test_a_refused_load_leaves_the_base_as_it_was(tiny_llama, unloadable, ids):
    base = tiny_llama()
    before, tensors, expected = shape(base), bits(base), logits(base, ids)
    with pytest.raises((ValueError, OSError)):
        PeftModel.from_pretrained(base, unloadable)
    assert shape(base) == before
    assert_same(bits(base), tensors)
    assert not hasattr(base, "peft_config")
    assert torch.equal(logits(base, ids), expected)
    get_peft_model(base, config())


def test_a_refused_load_of_other_sizes_copies_nothing_into_a_live_adapter(hot, tiny_llama, tmp_path):
    with_adapters(tiny_llama(), default=config(supra_lambda=0.5, r0=4)).save_pretrained(tmp_path)
    before = bits(hot)
    with pytest.raises(ValueError, match=r"supra_\w+ has shape .* in the checkpoint and .* in adapter 'default'"):
        hot.load_adapter(tmp_path, "default")
    assert_same(bits(hot), before)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(lora_alpha=3), r"has lora_alpha 3 \(here 16\)"),
        (dict(lora_dropout=0.5), r"has lora_dropout 0\.5 \(here 0\)"),
        (dict(modules_to_save=["lm_head"]), r"has modules_to_save \['lm_head'\] \(here \[\]\)"),
        (dict(target_modules=["q_proj"]), r"has no model\.layers\.0\.mlp\.down_proj among its layers"),
    ],
)
def test_a_file_that_computes_otherwise_does_not_take_the_place_of_an_adapter(
    hot, tiny_llama, tmp_path, change, message
):
    with_adapters(tiny_llama(), default=config(supra_lambda=0.5, **change)).save_pretrained(tmp_path)
    before = shape(hot), bits(hot)
    with pytest.raises(ValueError, match=message + ".*another name, call delete_adapter first, or hotswap_adapter"):
        hot.load_adapter(tmp_path, "default")
    assert shape(hot) == before[0]
    assert_same(bits(hot), before[1])


def test_an_equal_adapter_and_one_without_a_low_rank_part_take_the_place_of_another(hot, tiny_llama, tmp_path, ids):
    equal = with_adapters(tiny_llama(), default=config(supra_lambda=0.5, sparse_direction="top"))
    equal.save_pretrained(tmp_path / "equal")
    hot.load_adapter(tmp_path / "equal", "default")
    assert torch.equal(logits(hot, ids), logits(equal, ids))
    sparse = with_adapters(tiny_llama(), default=config(supra_lambda=0, lora_alpha=3))
    sparse.save_pretrained(tmp_path / "sparse")
    hot.load_adapter(tmp_path / "sparse", "other")
    hot.set_adapter("other")
    assert torch.equal(logits(hot, ids), logits(sparse, ids))


# Names


@pytest.mark.parametrize("name", ["a.b", "values", "items", "training", ""])
def test_a_name_that_torch_cannot_hold_is_refused_and_adds_nothing(hot, tiny_llama, name):
    before = shape(hot), bits(hot)
    with pytest.raises(ValueError, match=f"adapter name '{name}'.*choose another"):
        hot.add_adapter(name, config())
    with pytest.raises(ValueError, match="choose another"):
        hot.add_weighted_adapter(["default", "other"], [1, 1], name)
    assert shape(hot) == before[0]
    assert_same(bits(hot), before[1])
    base = tiny_llama()
    with pytest.raises(ValueError, match="choose another"):
        get_peft_model(base, config(), adapter_name=name)
    assert not layers(base)


# A batch of several adapters


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_adapters_mixed_in_a_batch_are_refused(hot, ids, mode):
    getattr(hot, mode)()
    names = ["default", "other", "no such adapter"]
    with pytest.raises(ValueError, match=r"adapter_names=\['default', 'other', .*: switch with set_adapter"):
        hot(ids, adapter_names=names)
    with pytest.raises(ValueError, match="SUPRA cannot mix adapters within a batch"):
        hot.generate(input_ids=ids, adapter_names=names, max_new_tokens=1)
    expected = logits(hot, ids)
    with torch.no_grad():
        assert torch.equal(hot(ids, adapter_names=None).logits, expected)


# Switching off, deleting


def test_nested_disable_switches_on_only_at_the_outer_end(hot, tiny_llama, ids):
    base, adapted = logits(tiny_llama(), ids), logits(hot, ids)
    assert not torch.equal(base, adapted)
    with hot.disable_adapter():
        with hot.disable_adapter():
            assert torch.equal(logits(hot, ids), base)
        assert torch.equal(logits(hot, ids), base)
    assert torch.equal(logits(hot, ids), adapted)


def test_switching_while_disabled_takes_effect_when_it_is_enabled(hot, tiny_llama, ids):
    base = logits(tiny_llama(), ids)
    hot.set_adapter("other")
    expected = logits(hot, ids)
    hot.set_adapter("default")
    with hot.disable_adapter():
        hot.set_adapter("other")
        assert torch.equal(logits(hot, ids), base)
    assert torch.equal(logits(hot, ids), expected)


def test_deleting_a_merged_adapter_is_refused_and_deletes_nothing(hot, ids):
    hot.merge_adapter()
    expected = logits(hot, ids)
    with pytest.raises(ValueError, match=r"Cannot delete adapter\(s\) \['default'\] while they are merged"):
        hot.delete_adapter("default")
    hot.delete_adapter("other")
    assert set(hot.peft_config) == {"default"}
    assert torch.equal(logits(hot, ids), expected)


# Merges that are refused as a whole


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("how", ["merge_adapter", "merge_and_unload"])
def test_safe_merge_of_what_is_not_finite_in_the_last_layer_merges_no_layer(hot, ids, how, bad):
    name, last = list(layers(hot).items())[-1]
    with torch.no_grad():
        last.supra_values["default"][0] = bad
    before, modules = bits(hot), {name: module for name, module in hot.named_modules()}
    with pytest.raises(ValueError, match=rf"{name}: NaNs detected in the merged weights. The adapter default seems"):
        getattr(hot, how)(safe_merge=True)
    assert_same(bits(hot), before)
    assert {name: module for name, module in hot.named_modules()} == modules
    assert not any(layer.merged for layer in layers(hot).values())
    hot.set_adapter("other")
    hot.merge_adapter(safe_merge=True)
    hot.unmerge_adapter()
    assert_same(bits(hot), before)


def test_merge_of_an_adapter_that_one_layer_still_waits_for_merges_no_layer(hot):
    last = list(layers(hot).values())[-1]
    last.pending_adapters["default"] = True
    before = bits(hot)
    for merge in (hot.merge_adapter, hot.merge_and_unload):
        with pytest.raises(RuntimeError, match="adapter 'default' is not loaded"):
            merge()
    assert_same(bits(hot), before)
    assert not any(layer.merged for layer in layers(hot).values())


def test_safe_merge_beside_a_merged_adapter_counts_both(tiny_llama):
    """Each finite in fp16, their sum is not."""
    model = with_adapters(tiny_llama(dtype=torch.float16), first=config(supra_lambda=0), second=config(supra_lambda=0))
    with torch.no_grad():
        for layer in layers(model).values():
            for values in layer.supra_values.values():
                values.fill_(40_000)
    before = bits(model)
    model.merge_adapter(["first"], safe_merge=True)
    with pytest.raises(ValueError, match="The adapter second seems to be broken"):
        model.merge_adapter(["second"], safe_merge=True)
    model.unmerge_adapter()
    assert_same(bits(model), before)


# Loading beside what is there


@pytest.mark.parametrize("is_trainable", [False, True])
def test_an_adapter_that_is_loaded_leaves_the_others_trained_or_frozen_as_they_were(hot, saved, is_trainable):
    before = {name: parameter.requires_grad for name, parameter in hot.named_parameters()}
    assert any(before.values())
    hot.load_adapter(saved, "loaded", is_trainable=is_trainable)
    after = {name: each.requires_grad for name, each in hot.named_parameters() if not name.endswith(".loaded")}
    assert after == before


def test_a_second_adapter_that_matches_no_layer_is_refused(hot):
    with pytest.raises(ValueError, match=r"no layer matched: target_modules=\{'base_layer'\}"):
        hot.add_adapter("nothing", config(target_modules=["base_layer"]))
    assert set(hot.peft_config) == {"default", "other"}


# A name again

AGAIN = {
    "low-rank for sparse": (dict(supra_lambda=0), dict(supra_lambda=1)),
    "sparse for both": (dict(supra_lambda=0.5), dict(supra_lambda=0)),
    "other layers": (dict(target_modules=["q_proj", "v_proj"]), dict(target_modules=["v_proj", "up_proj"])),
}


@pytest.mark.parametrize("again", ["add_adapter", "get_peft_model"])
@pytest.mark.parametrize("change", AGAIN)
@pytest.mark.filterwarnings("ignore:You are trying to modify a model")
def test_an_adapter_that_takes_a_name_leaves_nothing_of_the_one_that_had_it(tiny_llama, ids, tmp_path, change, again):
    before, after = AGAIN[change]
    model = with_adapters(tiny_llama(), default=config(**before))
    logits(model, ids)
    plain = tiny_llama()
    torch.manual_seed(2)
    if again == "add_adapter":
        try:
            model.add_adapter("default", config(**after))
        except ValueError as error:  # from PEFT 0.21 on, before anything is changed
            if "already exists" in str(error):
                return
            raise
    else:
        model = get_peft_model(model.get_base_model(), config(**after))
    torch.manual_seed(2)
    fresh = get_peft_model(plain, config(**after)).eval()
    assert_same(
        {name: tensor for name, tensor in bits(model.eval()).items() if ".supra_" in name},
        {name: tensor for name, tensor in bits(fresh).items() if ".supra_" in name},
    )
    assert torch.equal(logits(model, ids), logits(fresh, ids))
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(PeftModel.from_pretrained(tiny_llama(), tmp_path).eval(), ids), logits(fresh, ids))


@pytest.mark.parametrize("targets", [["q_proj"], ["v_proj"]], ids=["other layers", "the same"])
def test_a_model_of_another_method_is_refused_and_keeps_its_config(tiny_llama, targets):
    model = get_peft_model(tiny_llama(), LoraConfig(target_modules=["v_proj"]))
    own = model.peft_config["default"]
    for carrier in (model, model.get_base_model()):
        with pytest.raises(TypeError, match=r"layers\.0\.self_attn\.v_proj: already adapted by Linear; .*unload\(\)"):
            get_peft_model(carrier, config(target_modules=targets))
    assert model.peft_config["default"] is own
    get_peft_model(model.unload(), config(target_modules=targets))


@pytest.mark.parametrize("what", ["weight", "adapter"])
def test_nothing_is_loaded_over_what_is_merged(hot, tiny_llama, ids, what):
    hot.merge_adapter()
    before = bits(hot)
    with torch.no_grad():
        new = {name: tensor * 2 if tensor.is_floating_point() else tensor for name, tensor in hot.state_dict().items()}
    marks = {"weight": ".base_layer.weight", "adapter": ".supra_"}
    loaded = {name: tensor for name, tensor in new.items() if marks[what] in name}
    with pytest.raises(ValueError, match=r"layers\.0\.self_attn\.q_proj: .*merged here: call unmerge_adapter\(\)"):
        hot.load_state_dict(loaded, strict=False)
    assert_same(bits(hot), before)
    hot.unmerge_adapter()
    hot.load_state_dict(loaded, strict=False)
