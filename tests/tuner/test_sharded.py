"""A model that `fully_shard` manages: the kernels leave it alone, and what was written in before is not lost unseen."""

from types import SimpleNamespace

import pytest
import torch
from peft import get_peft_model

from axolotl_supertune import SupraConfig
from axolotl_supertune.ops.choice import takes_kernels


@pytest.fixture
def layer(llama):
    model = get_peft_model(llama, SupraConfig(mask_score="magnitude"))
    return model.base_model.model.model.layers[0].mlp.up_proj


def test_the_kernels_are_not_taken_and_a_demand_for_them_is_refused(layer, monkeypatch):
    x, weight = torch.zeros(1, 64), layer.base_layer.weight
    sparse = layer.sparse_parts(["default"])
    monkeypatch.setenv("SUPERTUNE_KERNELS", "auto")
    assert not takes_kernels(x, weight, sparse, [], layer="up_proj", sharded=True)
    monkeypatch.setenv("SUPERTUNE_KERNELS", "triton")
    with pytest.raises(RuntimeError, match=r"up_proj: SUPERTUNE_KERNELS=triton, .*: FSDP gathers its weight"):
        takes_kernels(x, weight, sparse, [], layer="up_proj", sharded=True)


def test_sharding_written_weights_is_refused(layer):
    layer._entry = SimpleNamespace(written=True, restore=lambda: None)
    layer.base_layer._is_fsdp_managed_module = True
    with pytest.raises(RuntimeError, match=r"up_proj: the model was sharded while .*state_dict\(\) before fully_shard"):
        layer(torch.zeros(1, 64))
    layer._entry = None
    assert layer(torch.zeros(1, 64)).shape == (1, 96)
