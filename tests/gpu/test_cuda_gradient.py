"""Supports chosen by gradient on a GPU: bf16, the kernels, checkpointing, and how much of it is dense at once."""

import pytest

pytest.importorskip("triton")

import torch
from peft import get_peft_model
from tiny_llama import make_llama

from axolotl_supertune import SupraConfig
from axolotl_supertune.method.cuda_memory import PeakMemory
from axolotl_supertune.method.gradient_scores import gradient_scores
from axolotl_supertune.method.support import select_support
from axolotl_supertune.tuner.gradient import choose_supports, sparse_layers


def llama(**changes):
    shape = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4, "max_position_embeddings": 2048}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4}
    return make_llama(vocab_size=512, **{**shape, **heads, **changes}).train().cuda().bfloat16()


def batches(count, rows=4, length=128):
    draw = torch.Generator().manual_seed(1)
    return [[torch.randint(0, 512, (rows, length), generator=draw).cuda()] for _ in range(count)]


def loss_of(model):
    return lambda ids: model(input_ids=ids, labels=ids).loss


@pytest.mark.parametrize("reentrant", [None, False, True])
@pytest.mark.parametrize("supra_lambda", [0.0, 0.5])
def test_the_support_is_that_of_dense_gradients(supra_lambda, reentrant):
    given = batches(2)
    config = SupraConfig(
        mask_score="gradient", sparse_direction="top", supra_lambda=supra_lambda, task_type="CAUSAL_LM"
    )
    model = get_peft_model(llama(), config).train()
    if reentrant is not None:
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    choose_supports(model, given, loss_of(model))
    dense = llama().train()
    for batch in given:
        loss_of(dense)(batch[0]).backward()
    for layer in sparse_layers(model):
        chosen = layer.supra_indices["default"]
        score = dense.get_submodule(layer.layer_name).weight.grad.float().abs()
        expected = select_support(score, len(chosen), "top")
        shared = len(set(chosen.tolist()) & set(expected.tolist())) / len(chosen)
        assert shared > 0.9, (layer.layer_name, shared)  # the dense one is rounded to bf16
    assert all(each.grad is None for each in model.parameters())
    loss_of(model)(given[0][0]).backward()
    assert all(layer.supra_values["default"].grad.abs().sum() > 0 for layer in sparse_layers(model))


@pytest.mark.parametrize("squared", [False, True])
def test_no_more_than_a_group_is_dense(squared):
    model = llama(num_hidden_layers=8).train().requires_grad_(False)
    layers = {name: each for name, each in model.named_modules() if isinstance(each, torch.nn.Linear)}
    layers.pop("lm_head")
    every = sum(4 * each.weight.numel() for each in layers.values())
    given = batches(2)

    def peak(dense_bytes):
        memory = PeakMemory(torch.device("cuda"))
        for _ in gradient_scores(layers, given, loss_of(model), squared=squared, dense_bytes=dense_bytes):
            pass
        return memory.read() - memory.before

    peak(2**40)  # what a first pass allocates for good
    whole, few = peak(2**40), peak(every // 8)
    factor = 2 if squared else 1
    # All layers' sums less an eighth of them, but for the last group's, which the next one's may meet.
    assert whole - few > 0.7 * every * factor - (every // 8) * factor
