"""A tiny Llama with an adapter, the same in every process, and what its gradients are by autograd on dense weights."""

import traceback

import torch
import torch.nn.functional as F
from tiny_llama import NARROW, make_llama

WORLD = 2
# What a step is made of, and the batches that its gradient is the sum of.
STEPS_OF = {"one": [0], "accumulated": [0, 1], "forwards first": [0, 1]}


def base(dtype, gradient_checkpointing=False):
    """The same tiny Llama in every process."""
    model = make_llama(dtype=dtype, vocab_size=61, **NARROW).train()
    if gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": gradient_checkpointing == "reentrant"})
        model.enable_input_require_grads()
    return model


def adapt(model, supra_lambda=0.5, **more):
    """`model` with an adapter that has values in U and L."""
    from peft import get_peft_model

    from axolotl_supertune import SupraConfig

    knobs = {"mask_score": "magnitude", "lora_dropout": 0.0, "init_weights": False, **more}
    torch.manual_seed(1)
    return get_peft_model(model, SupraConfig(supra_lambda=supra_lambda, task_type="CAUSAL_LM", **knobs))


def computed_by(layers):
    """The kinds of what computed dU, or the whole layer where the kernels did."""
    gradients = {type(each[1]).__name__ for layer in layers.values() for each in layer._gradients.values()}
    return gradients | {
        type(known.result.slot).__name__ for layer in layers.values() for known in layer.layer_guards.values()
    }


def build(dtype, supra_lambda=0.5, gradient_checkpointing=False):
    """The same adapted tiny Llama in every process."""
    return adapt(base(dtype, gradient_checkpointing), supra_lambda)


def adapted_layers(model):
    from axolotl_supertune.tuner import SupraLayer

    return {name: module for name, module in model.named_modules() if isinstance(module, SupraLayer)}


def batch(step):
    """(2·WORLD, 9) token ids, the same everywhere."""
    return torch.randint(0, 61, (2 * WORLD, 9), generator=torch.Generator().manual_seed(step))


def dense_computed(layer, x, sparse, low_rank):
    """The layer by autograd on its dense effective weight."""
    weight = layer.base_layer.weight
    for values, indices in sparse:
        zero = torch.zeros(weight.numel(), dtype=values.dtype)
        weight = weight + zero.scatter(0, indices.long(), values).view_as(weight)
    for L, R, scaling, _ in low_rank:
        weight = weight + scaling * L @ R
    return F.linear(x, weight, layer.base_layer.bias)


def enter(rank, store, folder, body, arguments):
    """Be one of the processes: leave what body(rank, folder, *arguments) returns, or how it failed, in RANK.pt."""
    torch.set_num_threads(1)
    try:
        outcome = body(rank, folder, *arguments)
    except Exception:
        outcome = traceback.format_exc()
    torch.save(outcome, folder / f"{rank}.pt")
