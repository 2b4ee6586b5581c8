"""Tests of ours in the surroundings of PEFT's: trained parameters as it checks every method, and what is refused."""

import pytest
import torch
from peft import get_peft_model, get_peft_model_state_dict
from tests.test_custom_models import (
    MLP,
    MLP_2x_same_shape,
    ModelConv2D,
    ModelEmbConv1D,
    ModelMha,
)
from tests.test_custom_models import (
    TestRequiresGrad as RequiresGrad,
)
from torch import nn
from transformers.pytorch_utils import Conv1D

from axolotl_supertune import SupraConfig
from axolotl_supertune.tuner.checkpoint import read_adapter

PARTS = {0: ["values"], 0.5: ["values", "L", "R"], 1: ["L", "R"]}


def _config(layer, supra_lambda):
    return SupraConfig(target_modules=[layer], supra_lambda=supra_lambda, r0=4, mask_score="magnitude")


def _trained(supra_lambda, layer, adapter):
    return [f"base_model.model.{layer}.supra_{part}.{adapter}" for part in PARTS[supra_lambda]]


@pytest.mark.parametrize("second_layer", ["lin0", "lin1"])
@pytest.mark.parametrize("supra_lambda", PARTS)
def test_requires_grad_follows_the_active_adapters(supra_lambda, second_layer):
    model = get_peft_model(MLP_2x_same_shape(), _config("lin0", supra_lambda))
    check = RequiresGrad().check_requires_grad
    first = _trained(supra_lambda, "lin0", "default")
    second = _trained(supra_lambda, second_layer, "adapter1")
    check(model, *first)
    model.add_adapter("adapter1", _config(second_layer, supra_lambda))
    check(model, *first)
    model.set_adapter("adapter1")
    check(model, *second)
    model.set_adapter("default")
    check(model, *first)
    model.base_model.set_adapter(["default", "adapter1"])
    check(model, *first, *second)


@pytest.mark.parametrize("supra_lambda", PARTS)
def test_only_the_named_adapter_is_saved_whatever_names_its_name_is_part_of(tmp_path, supra_lambda):
    model = get_peft_model(MLP(), _config("lin0", supra_lambda))
    expected = get_peft_model_state_dict(model)
    for name in ("default2", "other_default", "foodefault_bar", "efaul"):
        model.add_adapter(name, _config("lin0", supra_lambda))
    model.save_pretrained(tmp_path, selected_adapters=["default"])
    found = read_adapter(tmp_path)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


class Gpt2Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.c_attn = Conv1D(8, 4)


@pytest.mark.parametrize(
    ("model", "target", "kind"),
    [
        (ModelEmbConv1D, "emb", "Embedding"),
        (ModelEmbConv1D, "conv1d", "Conv1D"),
        (ModelConv2D, "conv2d", "Conv2d"),
        (Gpt2Layer, "c_attn", "Conv1D"),
        (ModelMha, "mha", "MultiheadAttention"),
    ],
)
def test_module_that_is_not_linear_is_refused_by_name(model, target, kind):
    model = model()
    before = {name: type(module) for name, module in model.named_modules()}
    with pytest.raises(TypeError, match=rf"^{target}: SUPRA adapts torch.nn.Linear, not {kind}; take it out of"):
        get_peft_model(model, SupraConfig(target_modules=["lin0", target], mask_score="magnitude", r0=1))
    assert {name: type(module) for name, module in model.named_modules()} == before


def test_trained_biases_are_no_part_of_the_method():
    with pytest.raises(TypeError, match="bias"):
        SupraConfig(target_modules=["lin0"], bias="all")
    model = get_peft_model(MLP(), SupraConfig(target_modules=["lin0", "lin1"], mask_score="magnitude", r0=1))
    assert not any(parameter.requires_grad for name, parameter in model.named_parameters() if "bias" in name)
