"""A layer whose weight FSDP2 gathers, on one process: of the kernels it takes the sampled products alone."""

import pytest

pytest.importorskip("triton")

import torch
import torch.distributed as dist
from peft import get_peft_model
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from axolotl_supertune import SupraConfig
from axolotl_supertune.ops import choice, sparse_linear
from axolotl_supertune.ops.transient import BlockGradient, SampledGradient
from axolotl_supertune.tuner import SupraLayer, SupraLinear

TINY = {"num_hidden_layers": 2, "hidden_size": 8, "intermediate_size": 12, "num_attention_heads": 2}
TINY |= {"num_key_value_heads": 1}


@pytest.fixture
def mesh(tmp_path):
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("supra_lambda", [0, 0.5])
def test_a_gathered_layer_takes_sampled_products_alone(tiny_llama, mesh, monkeypatch, supra_lambda, checkpointing):
    ids = torch.randint(0, 97, (2, 5), generator=torch.Generator().manual_seed(7))

    def make():
        knobs = {"mask_score": "magnitude", "r0": 2, "supra_lambda": supra_lambda, "init_weights": False}
        model = tiny_llama(**TINY).train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        model = get_peft_model(model, SupraConfig(lora_dropout=0.0, task_type="CAUSAL_LM", **knobs))
        return model, [module for module in model.modules() if isinstance(module, SupraLayer)]

    def step(model):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        trained = {name: each.grad for name, each in model.named_parameters() if each.requires_grad}
        return loss.detach(), {
            name: grad.full_tensor() if hasattr(grad, "full_tensor") else grad for name, grad in trained.items()
        }

    torch.manual_seed(0)
    model, layers = make()
    model_state = {name: each.clone() for name, each in model.state_dict().items()}
    with monkeypatch.context() as patch:
        patch.setenv(choice.VARIABLE, "reference")
        patch.setattr(
            SupraLinear,
            "computed",
            lambda layer, x, *parts: sparse_linear(x, layer.base_layer.weight, layer.base_layer.bias, *parts),
        )
        loss, exact = step(model)
    assert all(not layer._gradients for layer in layers)
    for asked, gradient in (("triton", SampledGradient), ("reference", BlockGradient)):
        monkeypatch.setenv(choice.VARIABLE, asked)
        model, layers = make()
        model.load_state_dict(model_state)
        for block in model.base_model.model.model.layers:
            fully_shard(block, mesh=mesh, reshard_after_forward=True)
        fully_shard(model, mesh=mesh, reshard_after_forward=True)
        found_loss, found = step(model)
        assert type(layers[0].base_layer.weight).__name__ == "DTensor"
        assert {type(layer._gradients["default"][1]) for layer in layers} == {gradient}
        assert all(layer._entry is None for layer in layers)
        torch.testing.assert_close(found_loss, loss)
        assert found.keys() == exact.keys()
        for name, one in exact.items():
            torch.testing.assert_close(found[name], one, rtol=1e-5, atol=1e-6)
