"""SUPRA under FSDP2 (`fully_shard`), two gloo processes on the CPU: what the whole model computes, trains and saves."""

import copy
import os

import pytest
import torch
import torch.distributed as dist
from adapted_llama import STEPS_OF, WORLD, adapted_layers, batch, build, computed_by, dense_computed

STEPS = 3


def shard(model, reshard=True, units="blocks and the rest"):
    """As accelerate does: every decoder layer, then the rest; parameters keep their dtype.

    `units` may be other modules: the "blocks" alone, every "adapted" layer and the rest, or the "linear" layers inside.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    settings = {
        "mesh": init_device_mesh("cpu", (WORLD,)),
        "mp_policy": MixedPrecisionPolicy(param_dtype=None, reduce_dtype=torch.float32),
        "reshard_after_forward": reshard,
    }
    blocks = list(model.base_model.model.model.layers)
    adapted = list(adapted_layers(model).values())
    inner = [layer.base_layer for layer in adapted]
    for module in {"adapted": adapted, "linear": inner}.get(units, blocks):
        fully_shard(module, **settings)
    return model if units == "blocks" else fully_shard(model, **settings)


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


def trains(rank, folder, dtype, supra_lambda, gradient_checkpointing):
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    from axolotl_supertune.plugin.verify import check_saved

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
    from axolotl_supertune.tuner import read_adapter

    model = build(dtype, supra_lambda, gradient_checkpointing)
    losses, gradients = train(model, slice(None))
    for found, grads in run(trains, dtype, supra_lambda, gradient_checkpointing):
        torch.testing.assert_close(found.float(), losses.float(), rtol=tolerance, atol=0)
        assert grads.keys() == gradients.keys()
        for name, gradient in gradients.items():
            assert gradient.norm() > 0
            assert (grads[name] - gradient).norm() <= tolerance * gradient.norm(), name
    model.save_pretrained(tmp_path / "whole")
    ours, theirs = (read_adapter(tmp_path / name) for name in ("whole", "adapter"))
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        if "indices" in name or "shape" in name:
            assert torch.equal(theirs[name], tensor), name
        elif dtype == torch.float32:
            torch.testing.assert_close(theirs[name], tensor, rtol=0, atol=1e-4)


SETTINGS = [
    {},
    {"reshard": False},
    {"checkpointing": "reentrant"},
    {"checkpointing": "reentrant", "reshard": False},
    {"checkpointing": "not reentrant"},
    {"checkpointing": "not reentrant", "reshard": False},
    {"kind": "accumulated"},
    {"kind": "accumulated", "reshard": False},
    {"kind": "forwards first"},
    {"kind": "forwards first", "checkpointing": "not reentrant"},
    {"units": "blocks"},
    {"units": "blocks", "checkpointing": "reentrant", "kind": "accumulated"},
    {"units": "adapted"},
    {"units": "adapted", "reshard": False},
    {"dtype": torch.float32},
    {"dtype": torch.float32, "checkpointing": "not reentrant"},
]


def step(model, kind, rows):
    """The adapter's gradients after the batches of one step, whole."""
    losses = []
    for at in STEPS_OF[kind]:
        if kind == "accumulated" and hasattr(model, "set_requires_gradient_sync"):
            model.set_requires_gradient_sync(at == 1)
        ids = batch(at)[rows]
        losses.append(model(input_ids=ids, labels=ids).loss)
        if kind != "forwards first":
            losses.pop().backward()
    if losses:
        sum(losses).backward()
    return {name: whole(each.grad).clone() for name, each in model.named_parameters() if each.requires_grad}


# More of them, in one process, are in tests/interpreter: the interpreter is slow.
OF_KERNELS = [{"dtype": torch.float32, "units": "blocks"}]


def keeps_no_weight(rank, folder, settings):
    """In every setting the gradients, the weights that were saved for backward, and those that were written into.

    Last, the weights that the reference would have saved: it keeps a reference to what FSDP frees and fills again.
    """
    from axolotl_supertune.tuner import linear

    def setting(dtype=torch.float64, checkpointing=False, kind="one", **of_shard):
        model = build(dtype, gradient_checkpointing=checkpointing).to(dtype)
        before = {name: layer.base_layer.weight.clone() for name, layer in adapted_layers(model).items()}
        model = shard(model, **of_shard)
        layers = adapted_layers(model)
        saved = []

        def pack(tensor):
            for name, layer in layers.items():
                weight = layer.base_layer.weight
                shared = type(weight).__name__ == "Parameter" and tensor.data_ptr() == weight.data_ptr()
                if shared or tensor.shape == weight.shape:
                    saved.append(name)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            found = step(model, kind, slice(2 * rank, 2 * rank + 2))
        kinds = computed_by(layers)
        weights = {name: whole(layer.base_layer.weight) for name, layer in layers.items()}
        changed = [name for name, weight in weights.items() if not torch.equal(weight, before[name])]
        return found, saved, kinds, changed + [name for name, layer in layers.items() if layer._slots]

    outcomes = [setting(**each) for each in settings]
    os.environ["SUPERTUNE_KERNELS"] = "reference"
    gathered, linear.is_sharded = linear.is_sharded, lambda module: False
    by_reference = shard(build(torch.float64).to(torch.float64))
    saved = []
    names = {layer.base_layer.weight.shape: name for name, layer in adapted_layers(by_reference).items()}
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: saved.append(names.get(tensor.shape)) or tensor, lambda tensor: tensor
    ):
        step(by_reference, "one", slice(2 * rank, 2 * rank + 2))
    linear.is_sharded = gathered
    return outcomes, [name for name in saved if name]


@pytest.mark.parametrize(("settings", "kernels"), [(SETTINGS, "auto"), (OF_KERNELS, "triton")], ids=["", "triton"])
def test_gradients_are_the_dense_ones_and_no_weight_is_saved_for_them(run, monkeypatch, settings, kernels):
    from axolotl_supertune.tuner import SupraLinear

    monkeypatch.setattr(SupraLinear, "reference_output", dense_computed)
    expected = {
        (dtype, kind): step(build(dtype).to(dtype), kind, slice(None))
        for kind in STEPS_OF
        for dtype in (torch.float32, torch.float64)
    }
    assert all(gradient.norm() > 0 for each in expected.values() for gradient in each.values())
    if kernels == "triton":
        pytest.importorskip("triton")
        monkeypatch.setenv("SUPERTUNE_KERNELS", kernels)
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    for outcomes, saved_by_reference in run(keeps_no_weight, settings):
        assert len(outcomes) == len(settings)
        for setting, (found, saved, kinds, written) in zip(settings, outcomes, strict=True):
            dtype = setting.get("dtype", torch.float64)
            # The processes' gradients are summed in fp32.
            tolerance = 1e-6 if dtype == torch.float64 else 1e-5
            exact = expected[dtype, setting.get("kind", "one")]
            assert found.keys() == exact.keys()
            for name, gradient in exact.items():
                assert found[name].dtype == dtype
                assert (found[name] - gradient).norm() <= tolerance * gradient.norm(), (setting, name)
            assert saved == written == [], setting
            assert kinds == {"GatheredSlot" if kernels == "triton" else "BlockGradient"}
        assert len(saved_by_reference) == 14


def is_not_gathered(rank, folder):
    """What a layer says whose weight is not there: in a forward, in a backward, under fully_shard of its inside."""
    told = []

    def expect(function):
        try:
            function()
        except RuntimeError as error:
            told.append(str(error))
        else:
            told.append("nothing")

    model = shard(build(torch.float32))
    ids, x = batch(0)[:2], torch.ones(3, 32)
    block = model.base_model.model.model.layers[1]
    layer = block.self_attn.q_proj
    model(input_ids=ids)
    expect(lambda: layer(x))
    block.unshard()
    y = layer(x)
    block.reshard()
    # The loss is something else than what comes out of the block: FSDP gathers nothing for that.
    inner = []
    handle = layer.register_forward_hook(lambda *args: inner.append(args[2]))
    model(input_ids=ids)
    handle.remove()
    expect(lambda: inner[0].sum().backward())
    expect(lambda: shard(build(torch.float32), units="linear")(input_ids=ids))
    return told, y.detach()


def test_a_weight_that_is_not_gathered_is_an_error_that_says_what_to_do(run):
    model = build(torch.float32)
    expected = model.base_model.model.model.layers[1].self_attn.q_proj(torch.ones(3, 32))
    for told, y in run(is_not_gathered):
        assert len(told) == 3
        for message, name in zip(
            told, (r"layers.1.self_attn.q_proj",) * 2 + ("layers.0.self_attn.q_proj",), strict=True
        ):
            assert message.startswith(f"model.{name}: FSDP has not gathered its weight")
            assert "its decoder layer, or the SupraLinear, not the linear layer inside" in message
        torch.testing.assert_close(y, expected)


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
