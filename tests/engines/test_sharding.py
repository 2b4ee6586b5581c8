"""A model that FSDP2 or ZeRO-3 manages: kernels leave it alone, and what was written in before is not lost unseen."""

import copy
from collections import OrderedDict
from types import SimpleNamespace

import pytest
import torch
from peft import get_peft_model

from axolotl_supertune import SupraConfig
from axolotl_supertune.engines import sharding
from axolotl_supertune.tuner import linear
from axolotl_supertune.tuner.guards import Guard


@pytest.fixture
def layer(llama):
    model = get_peft_model(llama, SupraConfig(mask_score="magnitude"))
    return model.base_model.model.model.layers[0].mlp.up_proj


def by_fsdp2(layer):
    layer.base_layer._is_fsdp_managed_module = True


def by_zero3(layer):
    layer.base_layer.weight.ds_id = 0
    layer.base_layer.weight.ds_status = SimpleNamespace(name="AVAILABLE")


@pytest.fixture(params=[by_fsdp2, by_zero3], ids=lambda function: function.__name__)
def mark(request):
    """A function (layer) that makes it look sharded, and gathered."""
    return request.param


@pytest.mark.parametrize("asked", ["auto", "reference"])
def test_on_a_cpu_or_where_it_is_asked_for_the_weight_is_made_anew(layer, mark, monkeypatch, asked):
    monkeypatch.setenv("SUPERTUNE_KERNELS", asked)
    mark(layer)
    assert layer.unwritten_kernel_layer(torch.zeros(1, 64)) is None
    assert not layer._is_compilable(torch.zeros(1, 64))
    layer(torch.zeros(1, 64)).sum().backward()
    assert layer._gradients


def test_what_the_kernels_write_into_a_gathered_weight_does_not_stay(layer, mark, monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setattr(linear, "takes_kernels", lambda *args, **kwargs: True)
    mark(layer)
    assert not layer.unwritten_kernel_layer(torch.zeros(1, 64)).slot.persistent
    assert not layer._slots
    assert not layer._is_compilable(torch.zeros(1, 64))


def test_a_demand_for_the_kernels_is_met_or_refused(layer, mark, monkeypatch):
    monkeypatch.setenv("SUPERTUNE_KERNELS", "triton")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    mark(layer)
    with pytest.raises(RuntimeError, match=r"up_proj: SUPERTUNE_KERNELS=triton, .*CUDA devices, not on cpu"):
        layer(torch.zeros(1, 64))


def test_a_trainable_weight_is_refused(layer, mark):
    mark(layer)
    layer.base_layer.weight.requires_grad_()
    with pytest.raises(ValueError, match="the weight of an adapted layer is trainable"):
        layer(torch.zeros(1, 64))


def test_what_computes_the_gradient_is_made_once_for_a_support_and_not_copied(layer, mark):
    mark(layer)
    found = []
    for _ in range(2):
        layer(torch.ones(1, 64)).sum().backward()
        found.append(layer._gradients["default"][1])
    assert found[0] is found[1]
    assert copy.deepcopy(layer)._gradients == {}
    support = layer.supra_indices["default"].flip(0).sort().values
    layer.set_support("default", support)
    assert layer._gradients == {}
    layer(torch.ones(1, 64)).sum().backward()
    assert layer._gradients["default"][0] is support


def test_sharding_written_weights_is_refused(layer, mark):
    layer._slots["default"] = SimpleNamespace(written=True, restore=lambda: None)
    mark(layer)
    with pytest.raises(RuntimeError, match=r"up_proj: the model was sharded while .*state_dict\(\) before fully_shard"):
        layer(torch.zeros(1, 64))
    layer._slots.clear()
    assert layer(torch.zeros(1, 64)).shape == (1, 96)


def test_what_was_found_before_zero_3_is_not_used_after_it(layer):
    """It puts another table of parameters in the place of the layer's; the parameters are the same."""
    x = torch.zeros(1, 64)
    known = Guard([layer], x, "found")
    assert known.is_valid(x)
    layer.base_layer._parameters = OrderedDict(layer.base_layer._parameters)
    assert not known.is_valid(x)


def test_a_weight_that_zero_3_has_not_gathered_names_the_layer(layer):
    by_zero3(layer)
    layer.base_layer.weight.ds_status.name = "INFLIGHT"
    with pytest.raises(RuntimeError, match=r"layers\.0\.mlp\.up_proj: ZeRO-3 has not gathered its weight"):
        layer(torch.zeros(1, 64))


def test_an_emptied_parameter_has_the_shape_and_dtype_of_what_is_kept():
    emptied = torch.nn.Parameter(torch.empty(0))
    emptied.ds_id, emptied.ds_shape = 0, torch.Size((3, 5))
    emptied.ds_tensor = torch.zeros(8, dtype=torch.bfloat16)
    assert sharding.shape_of(emptied) == (3, 5)
    assert sharding.dtype_of(emptied) == torch.bfloat16
    plain = torch.zeros(2, dtype=torch.float64)
    assert (sharding.shape_of(plain), sharding.dtype_of(plain)) == ((2,), torch.float64)
    assert sharding.whole(plain) is plain
