"""A model that `fully_shard` manages: the kernels leave it alone, and what was written in before is not lost unseen."""

import copy
from types import SimpleNamespace

import pytest
import torch
from peft import get_peft_model

from axolotl_supertune import SupraConfig
from axolotl_supertune.tuner import layer as tuner_layer


@pytest.fixture
def layer(llama):
    model = get_peft_model(llama, SupraConfig(mask_score="magnitude"))
    return model.base_model.model.model.layers[0].mlp.up_proj


@pytest.mark.parametrize("asked", ["auto", "triton", "reference"])
def test_no_kernel_that_writes_into_weights_is_taken(layer, monkeypatch, asked):
    monkeypatch.setenv("SUPERTUNE_KERNELS", asked)
    monkeypatch.setattr(tuner_layer, "takes_kernels", lambda *args, **kwargs: pytest.fail("nobody is to ask"))
    layer.base_layer._is_fsdp_managed_module = True
    assert layer.known_layer(torch.zeros(1, 64)) is None
    assert not layer._compilable(torch.zeros(1, 64))


def test_a_demand_for_the_kernels_is_met_by_sampled_products_or_refused(layer, monkeypatch):
    monkeypatch.setenv("SUPERTUNE_KERNELS", "triton")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    layer.base_layer._is_fsdp_managed_module = True
    y = layer(torch.zeros(1, 64))
    with pytest.raises(RuntimeError, match=r"up_proj: SUPERTUNE_KERNELS=triton, .*CUDA devices, not on cpu"):
        y.sum().backward()


def test_a_trainable_weight_is_refused(layer):
    layer.base_layer._is_fsdp_managed_module = True
    layer.base_layer.weight.requires_grad_()
    with pytest.raises(ValueError, match="the weight of an adapted layer is trainable"):
        layer(torch.zeros(1, 64))


def test_what_computes_the_gradient_is_made_once_for_a_support_and_not_copied(layer):
    layer.base_layer._is_fsdp_managed_module = True
    found = []
    for _ in range(2):
        layer(torch.ones(1, 64)).sum().backward()
        found.append(layer._gradients["default"][1])
    assert found[0] is found[1]
    assert copy.deepcopy(layer)._gradients == {}
    support = layer.supra_indices["default"].flip(0).sort().values
    layer.take_support("default", support)
    assert layer._gradients == {}
    layer(torch.ones(1, 64)).sum().backward()
    assert layer._gradients["default"][0] is support


def test_sharding_written_weights_is_refused(layer):
    layer._entry = SimpleNamespace(written=True, restore=lambda: None)
    layer.base_layer._is_fsdp_managed_module = True
    with pytest.raises(RuntimeError, match=r"up_proj: the model was sharded while .*state_dict\(\) before fully_shard"):
        layer(torch.zeros(1, 64))
    layer._entry = None
    assert layer(torch.zeros(1, 64)).shape == (1, 96)
