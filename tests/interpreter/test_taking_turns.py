"""Switching between adapters that are written into the base weights: in one launch, and never into other layers."""

import gc
import weakref

import pytest

pytest.importorskip("triton")

import torch
from peft import get_peft_model
from torch import nn

from axolotl_supertune import SupraConfig
from axolotl_supertune.method.sizes import KERNELS_VARIABLE
from axolotl_supertune.ops import inplace_weight, sampling_plan, write_kernels
from axolotl_supertune.tuner import SupraLinear

TINY = {"num_hidden_layers": 1, "hidden_size": 8, "intermediate_size": 12, "num_attention_heads": 2}
TINY |= {"num_key_value_heads": 1}
NAMES = ("default", "other")


@pytest.fixture
def ids():
    return torch.randint(0, 97, (1, 5), generator=torch.Generator().manual_seed(7))


@pytest.fixture
def model(tiny_llama):
    torch.manual_seed(0)
    knobs = {"mask_score": "magnitude", "task_type": "CAUSAL_LM", "init_weights": False}
    model = get_peft_model(tiny_llama(**TINY), SupraConfig(r0=2, supra_lambda=0.5, **knobs))
    model.add_adapter("other", SupraConfig(r0=1, supra_lambda=0.0, sparse_direction="top", **knobs))
    return model.eval().requires_grad_(False)


@pytest.fixture
def logits(model, ids, monkeypatch):
    """A function (by="triton") → the model's logits."""

    def logits(by="triton"):
        with monkeypatch.context() as patch, torch.no_grad():
            patch.setenv(KERNELS_VARIABLE, by)
            return model(ids).logits

    return logits


@pytest.fixture
def used(model, logits):
    """The model after each adapter was used twice: what is made for them is there."""
    for name in NAMES * 2:
        model.set_adapter(name, inference_mode=True)
        logits()
        logits()
    return model


def layer_of(model):
    return model.base_model.model.model.layers[0].self_attn.k_proj


def adapted(model):
    return [module for module in model.modules() if isinstance(module, SupraLinear)]


def switched(model, name="default"):
    model.set_adapter(name, inference_mode=True)


def test_a_switch_is_a_launch_each_way_and_makes_nothing_anew(used, logits, monkeypatch):
    calls = []

    def note(owner, name):
        real = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args, **more: calls.append(name) or real(*args, **more))

    for name in ("write_supports", "restore_supports", "pack_factors", "write_table", "pack_table"):
        note(write_kernels, name)
    note(sampling_plan, "make_sampling_plan")
    note(inplace_weight.WeightSlot, "__init__")
    note(inplace_weight.WeightSlot, "write_single")
    for name in NAMES * 2:
        calls.clear()
        switched(used, name)
        assert calls == ["restore_supports"]
        expected = logits("reference")  # puts back each layer by itself, what is written
        switched(used, name)
        calls.clear()
        torch.testing.assert_close(logits(), expected, rtol=1e-5, atol=1e-5)
        assert calls == ["write_supports", *["pack_factors"] * (name == "default")]
        assert torch.equal(logits(), logits())
    calls.clear()
    with used.disable_adapter():
        logits()
    logits()
    assert calls == ["restore_supports", "write_supports"]


def taken_out(model):
    layer_of(model)  # the layer lives on, in whoever kept it
    model.kept = [layer_of(model)]
    model.base_model.model.model.layers[0].self_attn.k_proj = layer_of(model).get_base_layer()


def taken_out_before(model):
    switched(model, "other")
    taken_out(model)
    switched(model)


def taken_out_directly(model):
    model.kept = [layer_of(model)]
    model.base_model.model.model.layers[0].self_attn.k_proj = layer_of(model).base_layer


def deleted_at_a_layer(model):
    layer_of(model).delete_adapter("default")
    switched(model)  # the layer computes without an adapter


def with_another_support_at_a_layer(model):
    layer, name = layer_of(model), "default"
    layer.set_support(name, layer.supra_indices[name].flip(0).sub(layer.out_features * layer.in_features - 1).neg())
    layer.enable_adapters(False)


def disabled(model):
    layer_of(model).enable_adapters(False)


def merged(model):
    layer_of(model).merge()


def of_another(model):
    layer_of(model).set_adapter("other")


def of_another_base(model):
    layer_of(model).base_layer.weight.data.mul_(2)


def with_a_new_weight(model):
    layer = layer_of(model).base_layer
    layer.weight = nn.Parameter(2 * layer.weight.detach(), requires_grad=False)


def without_the_other(model):
    model.delete_adapter("other")


def reloaded(model):
    model.load_state_dict(model.state_dict())


def changed(model):
    for layer in adapted(model):
        layer.supra_values["default"].data.mul_(3)


@pytest.mark.parametrize(
    "action",
    [taken_out, taken_out_before, taken_out_directly, deleted_at_a_layer, with_another_support_at_a_layer,
     disabled, merged, of_another, of_another_base, with_a_new_weight, without_the_other,
     reloaded, changed],
)  # fmt: skip
def test_what_was_done_to_a_layer_since_is_heeded(used, logits, action):
    before = {id(layer.base_layer): layer.base_layer for layer in adapted(used)}
    switched(used)
    action(used)
    bits = {key: layer.weight.clone() for key, layer in before.items()}
    found, again = logits(), logits()
    expected = logits("reference")
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(again, found)
    used.state_dict()  # puts back what is written
    for key, layer in before.items():
        assert torch.equal(layer.weight, bits[key])


def tensors_of(model, name):
    stores = ("supra_values", "supra_L", "supra_R", "supra_indices")
    found = [getattr(layer, store) for layer in adapted(model) for store in stores]
    return [store[name] for store in found if name in store]


@pytest.mark.parametrize("trained", [False, True])
def test_nothing_holds_the_tensors_of_a_deleted_adapter(used, logits, ids, trained):
    switched(used)
    if trained:
        used.set_adapter("default")
        used.train()(ids, labels=ids).loss.backward()
        used.eval()
    logits()
    held = [weakref.ref(each) for tensor in tensors_of(used, "default") for each in (tensor, tensor.untyped_storage())]
    assert held
    switched(used, "other")
    used.delete_adapter("default")
    gc.collect()
    assert not [ref for ref in held if ref() is not None]
    torch.testing.assert_close(logits(), logits("reference"), rtol=1e-5, atol=1e-5)
