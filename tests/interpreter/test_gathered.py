"""Layers whose weights FSDP2 gathers, in one process: kernels compute in the gathered copies and restore them."""

import pytest

pytest.importorskip("triton")

import torch
import torch.distributed as dist
from peft import get_peft_model
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from axolotl_supertune import SupraConfig
from axolotl_supertune.method.sizes import KERNELS_VARIABLE
from axolotl_supertune.ops import sparse_linear
from axolotl_supertune.ops.kernels import Swiglu
from axolotl_supertune.ops.recomputed_weight import BlockGradient
from axolotl_supertune.tuner import SupraLayer, SupraLinear

TINY = {"num_hidden_layers": 2, "hidden_size": 8, "intermediate_size": 12, "num_attention_heads": 2}
TINY |= {"num_key_value_heads": 1}


@pytest.fixture
def mesh(tmp_path):
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def make(tiny_llama, supra_lambda=0.5, checkpointing=False, **changes):
    knobs = {"mask_score": "magnitude", "r0": 2, "supra_lambda": supra_lambda, "init_weights": False, **changes}
    model = tiny_llama(**TINY).train()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    model = get_peft_model(model, SupraConfig(lora_dropout=0.0, task_type="CAUSAL_LM", **knobs))
    return model, [module for module in model.modules() if isinstance(module, SupraLayer)]


def shard(model, mesh, units="blocks", reshard=True, **more):
    blocks = list(model.base_model.model.model.layers)
    layers = [module for module in model.modules() if isinstance(module, SupraLayer)]
    for module in layers if units == "layers" else blocks:
        fully_shard(module, mesh=mesh, reshard_after_forward=reshard, **more)
    fully_shard(model, mesh=mesh, reshard_after_forward=reshard, **more)


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def step(model, ids):
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return loss.detach(), {name: whole(each.grad) for name, each in model.named_parameters() if each.requires_grad}


@pytest.fixture
def ids():
    return torch.randint(0, 97, (2, 5), generator=torch.Generator().manual_seed(7))


@pytest.fixture
def dense(monkeypatch, ids):
    """A function: the loss and the gradients of a model, in plain autograd."""

    def dense(model):
        with monkeypatch.context() as patch:
            patch.setenv(KERNELS_VARIABLE, "reference")
            patch.setattr(
                SupraLinear,
                "reference_output",
                lambda layer, x, *parts: sparse_linear(x, layer.base_layer.weight, layer.base_layer.bias, *parts),
            )
            return step(model, ids)

    return dense


def slots(layers):
    return [known.result.slot for layer in layers for known in layer.layer_guards.values()]


@pytest.mark.parametrize(
    ("asked", "supra_lambda", "checkpointing", "units", "reshard"),
    [
        ("triton", 0.5, False, "blocks", True),
        ("triton", 0, True, "blocks", True),
        ("triton", 0.5, True, "blocks", False),
        ("triton", 0, False, "layers", False),
        ("triton", 0.5, True, "layers", True),
        ("triton", 1, False, "blocks", False),
        ("reference", 0.5, True, "blocks", True),
        ("reference", 0, False, "layers", False),
    ],
)
def test_gathered_layers_compute_as_dense_ones(
    tiny_llama, mesh, monkeypatch, ids, dense, asked, supra_lambda, checkpointing, units, reshard
):
    torch.manual_seed(0)
    model, _ = make(tiny_llama, supra_lambda, checkpointing)
    state = {name: each.clone() for name, each in model.state_dict().items()}
    loss, exact = dense(model)
    monkeypatch.setenv(KERNELS_VARIABLE, asked)
    model, layers = make(tiny_llama, supra_lambda, checkpointing)
    model.load_state_dict(state)
    shard(model, mesh, units, reshard)
    for _ in range(2):  # the second finds what the first has made
        model.zero_grad()
        found_loss, found = step(model, ids)
        torch.testing.assert_close(found_loss, loss)
        assert found.keys() == exact.keys()
        for name, one in exact.items():
            torch.testing.assert_close(found[name], one, rtol=1e-5, atol=1e-6)
    computed = slots(layers)
    if asked == "triton":
        assert len(computed) == len(layers)
        assert not any(slot.persistent or slot.written for slot in computed)
        shared = [layer.shared_input is not None for layer in layers if layer.layer_name.endswith("q_proj")]
        assert shared == [units == "blocks"] * TINY["num_hidden_layers"]
    else:
        assert not computed
        sparse = [layer for layer in layers if layer.supra_values]
        assert {type(layer._gradients["default"][1]) for layer in sparse} == ({BlockGradient} if sparse else set())
    assert type(layers[0].base_layer.weight).__name__ == "DTensor"
    for name, tensor in model.state_dict().items():
        if name in state:  # bit for bit: nothing is left in what stays gathered
            assert torch.equal(whole(tensor), state[name]), name


@pytest.mark.parametrize("fails", ["forward", "backward"])
def test_a_failure_leaves_the_gathered_weights_as_they_were(tiny_llama, mesh, monkeypatch, ids, fails):
    monkeypatch.setenv(KERNELS_VARIABLE, "triton")
    torch.manual_seed(0)
    model, _ = make(tiny_llama)
    state = {name: each.clone() for name, each in model.state_dict().items()}
    shard(model, mesh, reshard=False)
    step(model, ids)

    def fail(*_, **__):
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(Swiglu, "__call__" if fails == "forward" else "backward", fail)
        with pytest.raises(MemoryError):
            step(model, ids)
    for block in model.base_model.model.model.layers:
        for name, layer in block.named_modules():
            if isinstance(layer, SupraLinear):
                weight = layer.base_layer.weight
                key = next(
                    key
                    for key in state
                    if key.endswith(f"{layer.layer_name.partition('layers.')[2]}.base_layer.weight")
                )
                assert torch.equal(whole(weight), state[key]), name


def test_adapters_take_turns_in_gathered_weights(tiny_llama, mesh, monkeypatch, ids):
    torch.manual_seed(0)
    model, layers = make(tiny_llama)
    model.add_adapter("other", SupraConfig(task_type="CAUSAL_LM", mask_score="magnitude", r0=1, supra_lambda=0.0,
                                           sparse_direction="top", init_weights=False))  # fmt: skip
    model.eval().requires_grad_(False)
    monkeypatch.setenv(KERNELS_VARIABLE, "reference")
    expected = {}
    for name in ("default", "other"):
        model.set_adapter(name, inference_mode=True)
        expected[name] = model(ids).logits
    shard(model, mesh)
    monkeypatch.setenv(KERNELS_VARIABLE, "triton")
    made = {}
    for name in ("default", "other", "default", "other"):
        model.set_adapter(name, inference_mode=True)
        with torch.no_grad():
            torch.testing.assert_close(model(ids).logits, expected[name], rtol=1e-5, atol=1e-5)
        found = slots(layers)
        assert all(one is again for one, again in zip(found, made.setdefault(name, found), strict=True))


def with_another(tiny_llama):
    torch.manual_seed(0)
    model, layers = make(tiny_llama)
    model.add_adapter("other", SupraConfig(task_type="CAUSAL_LM", mask_score="magnitude", r0=2, supra_lambda=0.5,
                                           sparse_direction="top", init_weights=False))  # fmt: skip
    return model, layers


@pytest.mark.parametrize("switch", ["another", "off"])
def test_a_switch_between_siblings_is_heeded(tiny_llama, mesh, monkeypatch, ids, switch):
    monkeypatch.setenv(KERNELS_VARIABLE, "triton")
    model, _ = with_another(tiny_llama)
    shard(model.eval(), mesh, reshard=False)
    x = torch.randn(1, 5, TINY["hidden_size"])
    with torch.no_grad():
        model(ids)  # leaves the weights gathered
        attention = model.base_model.model.model.layers[0].self_attn

        def switched():
            model.set_adapter("other") if switch == "another" else model.base_model.disable_adapter_layers()

        attention.q_proj(x)
        switched()
        found = attention.k_proj(x)
        assert torch.equal(found, attention.k_proj(x.clone()))


def test_a_backward_after_its_adapter_was_deleted_is_refused(tiny_llama, mesh, monkeypatch, ids):
    monkeypatch.setenv(KERNELS_VARIABLE, "triton")
    model, _ = with_another(tiny_llama)
    shard(model, mesh, reshard=False)
    loss = model(input_ids=ids, labels=ids).loss
    model.delete_adapter("default")
    with pytest.raises(RuntimeError, match="deleted or replaced"):
        loss.backward()


@pytest.mark.parametrize("units", ["blocks", "layers"])
@pytest.mark.parametrize("kept", [("q_proj", "up_proj"), ("q_proj", "k_proj", "v_proj", "o_proj", "down_proj")])
def test_layers_whose_weights_fsdp_ignores_compute_as_dense_ones(
    tiny_llama, mesh, monkeypatch, ids, dense, units, kept
):
    torch.manual_seed(0)
    model, layers = make(tiny_llama)
    state = {name: each.clone() for name, each in model.state_dict().items()}
    loss, exact = dense(model)
    monkeypatch.setenv(KERNELS_VARIABLE, "triton")
    model, layers = make(tiny_llama)
    model.load_state_dict(state)
    ignored = {layer.base_layer.weight for layer in layers if layer.layer_name.endswith(kept)}
    shard(model, mesh, units, ignored_params=ignored)
    for _ in range(2):
        model.zero_grad()
        found_loss, found = step(model, ids)
        torch.testing.assert_close(found_loss, loss)
        for name, one in exact.items():
            torch.testing.assert_close(found[name], one, rtol=1e-5, atol=1e-6)
    assert not any(slot.persistent or slot.written for slot in slots(layers))
    for name, tensor in model.state_dict().items():
        assert torch.equal(whole(tensor), state[name]), name
