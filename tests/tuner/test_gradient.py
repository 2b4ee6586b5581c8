"""`choose_supports` on a real (tiny) Llama against dense gradients."""

import pytest
import torch
from peft import PeftModel, get_peft_model
from tiny_llama import NARROW, make_llama

from axolotl_supertune import SupraConfig
from axolotl_supertune.method import progress
from axolotl_supertune.method.support import select_support
from axolotl_supertune.tuner.gradient import choose_supports, freeze_values, sparse_layers

IDS = torch.randint(3, 64, (4, 2, 12), generator=torch.Generator().manual_seed(1))


def llama():
    return make_llama(vocab_size=64, **NARROW).train()


def adapted(score="gradient", direction="top", **changes):
    config = SupraConfig(r0=4, mask_score=score, sparse_direction=direction, task_type="CAUSAL_LM", **changes)
    return get_peft_model(llama(), config)


def loss_of(model):
    return lambda ids: model(input_ids=ids, labels=ids).loss


def dense(batches, squared, merged=None):
    model = llama() if merged is None else merged
    model = model.double().train().requires_grad_(True)
    names = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    weights = [model.get_submodule(name).weight for name in names]
    taken = [torch.autograd.grad(loss_of(model)(ids), weights) for ids in batches]
    stacked = [torch.stack(each) for each in zip(*taken, strict=True)]
    means = [each.square().mean(0) if squared else each.mean(0).abs() for each in stacked]
    return dict(zip(names, means, strict=True))


def test_a_slow_choice_shows_how_many_batches_are_done(capsys, monkeypatch):
    monkeypatch.setattr(progress, "_DELAY_SECONDS", 0)
    model = adapted()
    choose_supports(model.train(), [[ids] for ids in IDS], loss_of(model))
    error = capsys.readouterr().err
    assert "Choosing supports by gradient" in error
    assert "4/4" in error


@pytest.mark.parametrize("score", ["gradient", "squared_gradient"])
@pytest.mark.parametrize("direction", ["top", "bottom", "hybrid"])
@pytest.mark.parametrize("supra_lambda", [0.0, 0.5])
def test_the_support_is_that_of_the_dense_gradient(score, direction, supra_lambda):
    model = adapted(score, direction, supra_lambda=supra_lambda)
    trained = {name for name, each in model.named_parameters() if each.requires_grad}
    choose_supports(model.train(), [[ids] for ids in IDS], loss_of(model))
    scores = dense(IDS, score == "squared_gradient")
    layers = sparse_layers(model)
    assert len(layers) == 14
    for layer in layers:
        chosen = layer.supra_indices["default"]
        count = layer.supra_budget["default"].sparse_count
        expected = select_support(scores[layer.layer_name], count, direction)
        same = len(set(chosen.tolist()) & set(expected.tolist()))
        assert same >= 0.98 * count, layer.layer_name  # fp32 orders near ties otherwise than fp64
        assert torch.equal(chosen, chosen.unique())
    assert {name for name, each in model.named_parameters() if each.requires_grad} == trained
    assert all(each.grad is None for each in model.parameters())
    assert model.peft_config["default"].gradient == {"batches": 4, "step": 0}


def test_of_a_trained_low_rank_part_it_is_the_gradient_around_it():
    model = adapted(supra_lambda=0.5, lora_dropout=0.9)
    for layer in sparse_layers(model):
        torch.nn.init.normal_(layer.supra_L["default"], std=0.5)
    choose_supports(model.train(), [[IDS[0]]], loss_of(model), step=7)
    assert model.peft_config["default"].gradient["step"] == 7
    found = {layer.layer_name: set(layer.supra_indices["default"].tolist()) for layer in sparse_layers(model)}
    scores = dense(IDS[:1], False, model.merge_and_unload())
    plain = dense(IDS[:1], False)
    shares = []
    for name, chosen in found.items():
        count = len(chosen)
        assert len(chosen & set(select_support(scores[name], count, "top").tolist())) >= 0.98 * count
        shares.append(len(chosen & set(select_support(plain[name], count, "top").tolist())) / count)
    assert min(shares) < 0.9  # the low-rank part moved the gradient


def test_an_adapter_whose_support_is_not_chosen_is_neither_run_nor_merged():
    model = adapted(supra_lambda=0.0)
    with pytest.raises(RuntimeError, match=r"chosen by gradient, call tuner\.gradient\.choose_supports"):
        model(input_ids=IDS[0])
    with pytest.raises(RuntimeError, match="choose_supports"):
        model.merge_adapter()
    choose_supports(model, [[IDS[0]]], loss_of(model))
    model(input_ids=IDS[0])
    with pytest.raises(ValueError, match="awaits no support"):
        choose_supports(model, [[IDS[0]]], loss_of(model))


def test_a_saved_support_comes_back_and_is_not_chosen_again(tmp_path):
    model = adapted(supra_lambda=0.0)
    choose_supports(model, [[IDS[0]]], loss_of(model))
    model.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(llama(), tmp_path)
    config = loaded.peft_config["default"]
    assert (config.gradient, config.gradient_batches) == ({"batches": 1, "step": 0}, 8)
    assert not config.awaits_gradient
    for one, other in zip(sparse_layers(model), sparse_layers(loaded), strict=True):
        assert torch.equal(one.supra_indices["default"], other.supra_indices["default"])


def test_held_values_stay_at_zero_under_adam():
    model = adapted(supra_lambda=0.5)
    for layer in sparse_layers(model):
        layer.pending_adapters.clear()
    release = freeze_values(model)
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=0.1)
    loss_of(model)(IDS[0]).backward()
    optimizer.step()
    layers = sparse_layers(model)
    assert all(not layer.supra_values["default"].any() for layer in layers)
    assert all(layer.supra_L["default"].any() for layer in layers)
    release()
    loss_of(model)(IDS[0]).backward()
    optimizer.step()
    assert all(layer.supra_values["default"].all() for layer in layers)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mask_score": "magnitude", "gradient_batches": 2}, "gradient_batches=2 has no effect with mask_score"),
        ({"mask_score": "gradient", "sparse_direction": "random", "gradient_batches": 2}, "gradient_batches=2 has no"),
        ({"mask_score": "wanda", "low_rank_warmup_steps": 2}, "low_rank_warmup_steps=2 has no effect"),
        ({"mask_score": "gradient", "gradient_batches": 0}, "gradient_batches=0 is not an integer ≥ 1"),
        ({"mask_score": "gradient", "low_rank_warmup_steps": 1.5}, "low_rank_warmup_steps=1.5 is not an integer ≥ 0"),
        ({"mask_score": "gradient", "low_rank_warmup_steps": 2, "supra_lambda": 0.0}, "needs a low-rank part"),
    ],
)
def test_contradictions_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        SupraConfig(**changes)
