"""Supports chosen by gradient on layers that the kernels compute equal those of the reference, and train."""

import os

import pytest

pytest.importorskip("triton")

import torch
from peft import get_peft_model

from axolotl_supertune import SupraConfig
from axolotl_supertune.method.sizes import KERNELS_VARIABLE
from axolotl_supertune.tuner.gradient import choose_supports, sparse_layers

TINY = {"num_hidden_layers": 1, "hidden_size": 8, "intermediate_size": 12, "num_attention_heads": 2}
TINY |= {"num_key_value_heads": 1}


@pytest.mark.parametrize("supra_lambda", [0.0, 0.5])
def test_the_support_is_that_of_the_reference(tiny_llama, supra_lambda, monkeypatch):
    ids = torch.randint(0, 97, (2, 5), generator=torch.Generator().manual_seed(7))
    chosen = []
    for kind in ("reference", "triton"):
        monkeypatch.setenv(KERNELS_VARIABLE, kind)
        assert os.environ[KERNELS_VARIABLE] == kind
        torch.manual_seed(0)
        knobs = {"mask_score": "gradient", "sparse_direction": "top", "r0": 2, "lora_dropout": 0.0}
        model = get_peft_model(tiny_llama(**TINY), SupraConfig(supra_lambda=supra_lambda, **knobs)).train()
        for layer in sparse_layers(model):
            for L in layer.supra_L.values():
                torch.nn.init.normal_(L, std=0.1)
        loss = lambda ids, model=model: model(input_ids=ids, labels=ids).loss  # noqa: E731
        choose_supports(model, [[ids]], loss)
        assert all(each.grad is None for each in model.parameters())
        loss(ids).backward()
        for layer in sparse_layers(model):
            assert layer.supra_values["default"].grad.abs().sum() > 0
            assert not layer._forward_hooks
        chosen.append({layer.layer_name: layer.supra_indices["default"] for layer in sparse_layers(model)})
        chosen.append({layer.layer_name: layer.supra_values["default"].grad for layer in sparse_layers(model)})
    assert len(chosen[0]) == 7
    for name, support in chosen[0].items():
        assert torch.equal(chosen[2][name], support), name
        torch.testing.assert_close(chosen[3][name], chosen[1][name], rtol=1e-3, atol=1e-6)
