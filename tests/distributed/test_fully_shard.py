"""SUPRA under FSDP2 (`fully_shard`), two gloo processes on the CPU: what the whole model computes, trains and saves."""

import copy
import traceback

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

WORLD = 2
STEPS = 3


def build(dtype, supra_lambda=0.5, gradient_checkpointing=False):
    """The same adapted tiny Llama in every process, with values in U and L."""
    from peft import get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    from axolotl_supertune import SupraConfig

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 61}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False}
    model = LlamaForCausalLM(LlamaConfig(**sizes, **heads)).to(dtype)
    if gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.enable_input_require_grads()
    config = SupraConfig(
        supra_lambda=supra_lambda, mask_score="magnitude", lora_dropout=0.0, task_type="CAUSAL_LM", init_weights=False
    )
    return get_peft_model(model, config)


def shard(model):
    """As accelerate does: every decoder layer, then the rest; parameters keep their dtype."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    settings = {
        "mesh": init_device_mesh("cpu", (WORLD,)),
        "mp_policy": MixedPrecisionPolicy(param_dtype=None, reduce_dtype=torch.float32),
        "reshard_after_forward": True,
    }
    for layer in model.base_model.model.model.layers:
        fully_shard(layer, **settings)
    return fully_shard(model, **settings)


def batch(step):
    """(2·WORLD, 9) token ids, the same everywhere."""
    return torch.randint(0, 61, (2 * WORLD, 9), generator=torch.Generator().manual_seed(step))


def train(model, rows):
    """Losses of a few AdamW steps, and the adapter's gradients of the first."""
    trained = {name: each for name, each in model.named_parameters() if each.requires_grad}
    optimizer = torch.optim.AdamW(trained.values(), lr=1e-2, weight_decay=0.0)
    losses, first = [], {}
    for step in range(STEPS):
        ids = batch(step)[rows]
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        if step == 0:
            first = {name: whole(each.grad).clone() for name, each in trained.items()}
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses), first


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def _enter(rank, body, folder, arguments):
    store = dist.FileStore(str(folder / "store"), WORLD)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD)
    torch.set_num_threads(1)
    try:
        outcome = body(rank, folder, *arguments)
    except Exception:
        outcome = traceback.format_exc()
    torch.save(outcome, folder / f"{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture
def run(tmp_path):
    """A function (body, *arguments) → what body(rank, folder, *arguments) returned in each process."""

    def run(body, *arguments):
        multiprocessing.start_processes(_enter, (body, tmp_path, arguments), WORLD, start_method="spawn")
        outcomes = [torch.load(tmp_path / f"{rank}.pt", weights_only=False) for rank in range(WORLD)]
        for outcome in outcomes:
            assert not isinstance(outcome, str), outcome
        return outcomes

    return run


def trains(rank, folder, dtype, supra_lambda, gradient_checkpointing):
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    from axolotl_supertune.trained import check_saved

    model = shard(build(dtype, supra_lambda, gradient_checkpointing))
    layer = model.base_model.model.model.layers[0].self_attn.q_proj
    assert type(layer.base_layer.weight).__name__ == "DTensor"
    losses, gradients = train(model, slice(2 * rank, 2 * rank + 2))
    dist.all_reduce(losses)
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = get_model_state_dict(model, options=options)
    if rank == 0:
        model.save_pretrained(folder / "adapter", state_dict=state)
        check_saved(model, folder / "adapter")
    return losses / WORLD, gradients


@pytest.mark.parametrize(
    ("dtype", "supra_lambda", "gradient_checkpointing", "tolerance"),
    [
        (torch.float32, 0.5, False, 1e-5),
        (torch.float32, 0.0, True, 1e-5),
        (torch.bfloat16, 0.5, False, 2e-2),
    ],
)
def test_it_trains_as_the_whole_model_does_and_saves_all(
    run, tmp_path, dtype, supra_lambda, gradient_checkpointing, tolerance
):
    from safetensors.torch import load_file

    model = build(dtype, supra_lambda, gradient_checkpointing)
    losses, gradients = train(model, slice(None))
    for found, grads in run(trains, dtype, supra_lambda, gradient_checkpointing):
        torch.testing.assert_close(found.float(), losses.float(), rtol=tolerance, atol=0)
        assert grads.keys() == gradients.keys()
        for name, gradient in gradients.items():
            assert gradient.norm() > 0
            assert (grads[name] - gradient).norm() <= tolerance * gradient.norm(), name
    model.save_pretrained(tmp_path / "whole")
    ours, theirs = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("whole", "adapter"))
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        if "indices" in name or "shape" in name:
            assert torch.equal(theirs[name], tensor), name
        elif dtype == torch.float32:
            torch.testing.assert_close(theirs[name], tensor, rtol=0, atol=1e-4)


def refuses_kernels(rank, folder):
    """Which layers the kernels were asked for, and why they were refused, inside a forward."""
    from axolotl_supertune.ops import choice
    from axolotl_supertune.tuner.layer import SupraLinear

    model = shard(build(torch.float32))
    told = []
    original = choice.tensor_obstacle

    def listen(x, weight, *args, **kwargs):
        told.append((type(weight).__name__, original(x, weight, *args, **kwargs), original(x, weight, *args)))
        return told[-1][1]

    choice.tensor_obstacle = listen
    train(model, slice(2 * rank, 2 * rank + 2))
    layers = [module for module in model.modules() if isinstance(module, SupraLinear)]
    return told, len(layers), [layer._entry is None for layer in layers]


def test_the_kernels_refuse_gathered_weights(run):
    for told, layers, entries in run(refuses_kernels):
        assert len(told) >= STEPS * layers
        for kind, reason, otherwise in told:
            assert "FSDP gathers its weight" in reason
            # Without the mark it would look like any weight.
            assert (kind, otherwise) == ("Parameter", None)
        assert all(entries)


def meets_meta(rank, folder):
    """Rank 0 holds the model, rank 1 only its shapes, as cpu_ram_efficient_loading has it."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    model = build(torch.float32)
    state = copy.deepcopy(model.state_dict() if rank == 0 else {})
    rotary = copy.deepcopy(model.base_model.model.model.rotary_emb)  # no part of the state: accelerate keeps it, too
    model = shard(model.to("meta"))
    model.to_empty(device="cpu")
    model.base_model.model.model.rotary_emb = rotary
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, state, options=options)
    losses, _ = train(model, slice(2 * rank, 2 * rank + 2))
    dist.all_reduce(losses)
    return losses / WORLD


def test_a_model_that_one_process_holds_trains_alike(run):
    losses, _ = train(build(torch.float32), slice(None))
    for found in run(meets_meta):
        torch.testing.assert_close(found, losses, rtol=1e-5, atol=0)
