"""Under torch.compile an adapted layer is one operator: no graph break, and the eager gradients."""

import gc
import weakref

import pytest
import torch
from peft import get_peft_model

from axolotl_supertune import SupraConfig


def make_model(tiny_llama, supra_lambda):
    config = SupraConfig(
        r0=1,
        supra_lambda=supra_lambda,
        mask_score="magnitude",
        lora_dropout=0.0,
        init_weights=False,
        target_modules=["q_proj", "gate_proj", "up_proj", "down_proj"],
        task_type="CAUSAL_LM",
    )
    torch.manual_seed(3)
    return get_peft_model(tiny_llama(num_hidden_layers=1), config).train()


def gradients(model, ids):
    model.zero_grad(set_to_none=True)
    out = model(input_ids=ids, labels=ids, use_cache=False)
    out.loss.backward()
    return out.loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("supra_lambda", [0, 1])
def test_no_graph_break_and_the_eager_gradients(supra_lambda, tiny_llama, ids):
    ids = ids[:, :5]
    model = make_model(tiny_llama, supra_lambda)
    loss, expected = gradients(model, ids)
    torch._dynamo.reset()
    assert torch._dynamo.explain(model)(input_ids=ids, labels=ids, use_cache=False).graph_break_count == 0
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    model.zero_grad(set_to_none=True)
    out = compiled(input_ids=ids, labels=ids, use_cache=False)
    out.loss.backward()
    torch.testing.assert_close(out.loss.detach(), loss)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-4, atol=1e-6)


def test_a_compiled_model_sees_what_an_optimizer_changed(tiny_llama, ids):
    ids = ids[:, :5]
    model = make_model(tiny_llama, 0)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager")
    with torch.no_grad():
        before = compiled(input_ids=ids, use_cache=False).logits
        for name, parameter in model.named_parameters():
            if "supra_values" in name:
                parameter.data.mul_(3)  # no trace in autograd's version counter
        after = compiled(input_ids=ids, use_cache=False).logits
        torch.testing.assert_close(after, model(input_ids=ids, use_cache=False).logits)
    assert not torch.equal(before, after)


def test_a_layer_whose_bias_trains_is_left_to_eager_mode():
    torch.manual_seed(3)
    settings = {"r0": 2, "supra_lambda": 0.5, "lora_dropout": 0.0, "mask_score": "magnitude"}
    config = SupraConfig(**settings, init_weights=False, target_modules=["0"])
    model = get_peft_model(torch.nn.Sequential(torch.nn.Linear(16, 32)), config)
    model.base_model.model[0].base_layer.bias.requires_grad_()
    x = torch.randn(5, 16)

    def found(run):
        model.zero_grad()
        run(x).square().sum().backward()
        return {name: each.grad.clone() for name, each in model.named_parameters() if each.requires_grad}

    expected = found(model)
    assert len(expected) == 4
    torch._dynamo.reset()
    torch.testing.assert_close(found(torch.compile(model, backend="eager")), expected)


def test_a_compiled_layer_holds_nothing_of_a_deleted_adapter(tiny_llama):
    model = make_model(tiny_llama, 0)
    layer = model.base_model.model.model.layers[0].self_attn.q_proj
    x = torch.randn(2, layer.in_features)

    def forward():
        return torch.ops.axolotl_supertune.adapted_linear(
            x, layer._trained(), layer.operator_number, layer.out_features
        )[0]

    config = model.peft_config["default"]
    model.add_adapter("other", config)
    forward().sum().backward()
    model.set_adapter("other")
    y = forward()
    held = weakref.ref(layer.supra_values["default"])
    model.delete_adapter("default")
    gc.collect()
    assert held() is None
    y.sum().backward()  # of an adapter that is still there
    assert layer.supra_values["other"].grad is not None
    y = forward()
    layer.delete_adapter("other")
    with pytest.raises(RuntimeError, match="q_proj: the adapter was deleted"):
        y.sum().backward()
