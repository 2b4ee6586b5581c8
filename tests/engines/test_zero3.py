"""SUPRA under DeepSpeed's ZeRO-3, two gloo processes on the CPU: what is chosen, computed and kept of parts alone."""

import importlib
import os

import pytest
import torch
from adapted_llama import STEPS_OF, WORLD, adapt, adapted_layers, base, batch, build, computed_by, dense_computed
from tiny_llama import NARROW, make_llama

pytest.importorskip("deepspeed", reason="DeepSpeed is not installed (the extra `deepspeed`)")

ZERO3 = {
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    "train_micro_batch_size_per_gpu": 2,
    "zero_allow_untested_optimizer": True,
}
# DeepSpeed records what is called in which order, and gathers ahead from the third step on.
STEPS = 3


def start(rank):
    """DeepSpeed on a CPU: its operator is compiled for a minute, and gloo cannot gather into what needs a gradient."""
    os.environ |= {"DS_ACCELERATOR": "cpu", "LOCAL_RANK": str(rank), "RANK": str(rank), "WORLD_SIZE": str(WORLD)}
    import deepspeed

    importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None
    deepspeed.comm.has_all_gather_into_tensor = lambda: False
    deepspeed.init_distributed("gloo")
    return deepspeed


def emptied(model, deepspeed):
    """A model as `zero.Init` gives it: a part of every weight in each process."""
    deepspeed.zero.Init(module=model, config_dict_or_path={**ZERO3, "train_batch_size": 2 * WORLD})
    assert all(parameter.numel() == 0 for parameter in model.parameters())
    return model


def has(parameter):
    return parameter.ds_status.name == "AVAILABLE"


SETTINGS = [
    {},
    {"whole": True},
    {"persistent": 10**6},
    {"checkpointing": "reentrant"},
    {"checkpointing": "not reentrant"},
    {"kind": "accumulated"},
    {"kind": "accumulated", "checkpointing": "reentrant", "whole": True},
    {"kind": "forwards first"},
    {"kind": "forwards first", "checkpointing": "not reentrant"},
    {"supra_lambda": 0.0},
    {"supra_lambda": 1.0, "sequential": True},
    {"at_once": True},
    {"at_once": True, "persistent": 10**6, "whole": True},
    {"at_once": True, "kind": "accumulated", "checkpointing": "reentrant"},
    {"at_once": True, "kind": "accumulated", "checkpointing": "not reentrant", "supra_lambda": 0.0},
]


def keeps_no_weight(rank, folder, settings):
    """In every setting the gradients, the weights that were saved for backward, written into or never freed."""
    deepspeed = start(rank)

    def setting(
        kind="one",
        checkpointing=False,
        whole=False,
        persistent=0,
        supra_lambda=0.5,
        sequential=False,
        at_once=False,
        steps=STEPS,
    ):
        from axolotl_supertune.engines import sharding
        from axolotl_supertune.engines.zero3 import gather_at_once

        model = base(torch.float32, checkpointing)
        before = {name: each.detach().clone() for name, each in model.named_parameters()}
        model = adapt(model if whole else emptied(model, deepspeed), supra_lambda)
        config = {**ZERO3, "gradient_accumulation_steps": len(STEPS_OF[kind]) if kind == "accumulated" else 1}
        config["zero_optimization"] = {"stage": 3, "stage3_param_persistence_threshold": persistent}
        config["zero_optimization"]["stage3_allgather_sequential"] = sequential
        trained = {name: each for name, each in model.named_parameters() if each.requires_grad}
        optimizer = torch.optim.SGD(trained.values(), lr=0.0)
        if at_once:
            gather_at_once(model)
        engine, *_ = deepspeed.initialize(model=model, config=config, optimizer=optimizer)
        layers = adapted_layers(model)
        hooked = {name for name in layers if len(layers[name]._forward_pre_hooks)}
        assert hooked == {name for name in layers if not (at_once and ".layers.1." in name)}
        shapes = {layer.base_layer.weight.ds_shape: name for name, layer in layers.items()}
        saved = []

        def pack(tensor):
            saved.append(shapes.get(tensor.shape))
            return tensor

        rows = slice(2 * rank, 2 * rank + 2)
        for _ in range(steps):
            losses = []
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                for at in STEPS_OF[kind]:
                    losses.append(engine(input_ids=batch(at)[rows], labels=batch(at)[rows]).loss)
                    if kind != "forwards first":
                        engine.backward(losses.pop())
                        if at != STEPS_OF[kind][-1]:
                            engine.step()
                if losses:
                    engine.backward(sum(losses))
            found = {name: deepspeed.utils.safe_get_full_grad(each).clone() for name, each in trained.items()}
            engine.step()
        times = len(STEPS_OF[kind]) if kind == "accumulated" else 1  # DeepSpeed takes the mean
        weights = {name: layer.base_layer.weight for name, layer in layers.items()}
        kept = [name for name, weight in weights.items() if has(weight) and not persistent]
        # Gathered with a module that is not the one that computes with it.
        kept += [name for name, each in model.named_modules() if name not in layers and each._external_params]
        plain = {name.removeprefix("base_model.model.") + ".weight": weight for name, weight in weights.items()}
        changed = [name for name, weight in plain.items() if not sharding.whole(weight).equal(before[name])]
        kinds = computed_by(layers)
        engine.destroy()
        return (
            {name: times * each for name, each in found.items()},
            [each for each in saved if each],
            changed,
            kept,
            kinds,
        )

    return [setting(**each) for each in settings]


def dense_step(model, kind):
    """The adapter's gradients after the batches of one step."""
    losses = [model(input_ids=batch(at), labels=batch(at)).loss for at in STEPS_OF[kind]]
    sum(losses).backward()
    return {name: each.grad for name, each in model.named_parameters() if each.requires_grad}


@pytest.mark.parametrize(
    ("settings", "kernels"),
    [(SETTINGS, "auto"), ([{"at_once": True, "steps": 1}], "triton")],
    ids=["", "triton"],
)
def test_gradients_are_the_dense_ones_and_nothing_is_kept_for_them(run, monkeypatch, settings, kernels):
    from axolotl_supertune.tuner import SupraLinear

    monkeypatch.setattr(SupraLinear, "reference_output", dense_computed)
    expected = {
        (kind, supra_lambda): dense_step(build(torch.float32, supra_lambda), kind)
        for kind in STEPS_OF
        for supra_lambda in (0.5, 0.0, 1.0)
    }
    if kernels == "triton":
        pytest.importorskip("triton")
        monkeypatch.setenv("SUPERTUNE_KERNELS", kernels)
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    for outcomes in run(keeps_no_weight, settings):
        for setting, (found, saved, changed, kept, kinds) in zip(settings, outcomes, strict=True):
            exact = expected[setting.get("kind", "one"), setting.get("supra_lambda", 0.5)]
            assert found.keys() == exact.keys()
            for name, gradient in exact.items():
                assert gradient.norm() > 0
                assert found[name].dtype == torch.float32
                assert (found[name] - gradient).norm() <= 1e-5 * gradient.norm(), (setting, name)
            assert saved == changed == kept == [], setting
            sparse = {"BlockGradient"} if setting.get("supra_lambda") != 1 else set()
            assert kinds == ({"GatheredSlot"} if kernels == "triton" else sparse)


def test_what_is_gathered_at_once_has_an_input_that_needs_a_gradient():
    from deepspeed.utils import z3_leaf_module

    from axolotl_supertune.engines.zero3 import gather_at_once

    for transformed, marked in ((None, {1, 2, 3}), ([1, 3], {2, 3}), ([3], set())):
        knobs = {"layers_to_transform": transformed, "target_modules": ["q_proj", "down_proj"]}
        model = adapt(make_llama(**NARROW, num_hidden_layers=4).train(), **knobs)
        gather_at_once(model)
        blocks = model.get_base_model().model.layers
        assert {at for at, block in enumerate(blocks) if z3_leaf_module(block)} == marked
        assert sum(z3_leaf_module(module) for module in model.modules()) == len(marked)


CHOICES = [
    {"mask_score": "wanda"},
    {"mask_score": "wanda", "budget_scope": "global", "sparse_direction": "hybrid"},
    {"mask_score": "magnitude", "support_scope": "row", "sparse_direction": "top"},
    {"sparse_direction": "random", "support_seed": 3},
]
IDS = [torch.randint(0, 61, (2, 9), generator=torch.Generator().manual_seed(seed)) for seed in range(3)]


def chosen(model, norms):
    """The support of every layer, for each of CHOICES; and the last model."""
    supports = []
    for knobs in CHOICES:
        more = {"activation_norms": norms} if knobs.get("mask_score") == "wanda" else {}
        adapted = adapt(model, 0.5, **knobs, **more)
        layers = adapted_layers(adapted)
        supports.append({name: layer.supra_indices["default"] for name, layer in layers.items()})
        if knobs is not CHOICES[-1]:
            adapted.unload()
    return supports, adapted


def chooses(rank, folder):
    """Norms, supports and outputs of a model that no process holds, and how much of it was gathered at once."""
    from axolotl_supertune import calibrate
    from axolotl_supertune.engines.processes import Processes
    from axolotl_supertune.engines.zero3 import gathered
    from axolotl_supertune.method.activation_norms import model_fingerprint
    from axolotl_supertune.method.layerwise import gathered_in_turn
    from axolotl_supertune.tuner.base_model import read_parameter
    from axolotl_supertune.tuner.linear import SupraLinear

    deepspeed = start(rank)
    model = emptied(base(torch.float32), deepspeed)
    processes = Processes(60.0, "")
    most = 0

    def look(*_):
        nonlocal most
        most = max(most, sum(each.ds_numel for each in model.parameters() if has(each)))

    hooks = [module.register_forward_pre_hook(look) for module in model.modules() if not list(module.children())]
    with gathered_in_turn(model, gathered):
        # Of three batches the second process has one, and helps with the third.
        mine, others = IDS[rank::WORLD], IDS[:1] * rank
        norms = calibrate(model, mine, uncounted=others, progress=False, sum_processes=processes.sum)
    for hook in hooks:
        hook.remove()
    supports, adapted = chosen(model, norms)
    layer = adapted.base_model.model.model.layers[1].self_attn.q_proj
    assert isinstance(layer, SupraLinear)
    try:
        told = layer(torch.ones(3, 32))
    except RuntimeError as error:
        told = str(error)
    optimizer = torch.optim.SGD([each for each in adapted.parameters() if each.requires_grad], lr=0.0)
    config = {**ZERO3, "train_batch_size": 2 * WORLD}
    deepspeed.initialize(model=adapted, config=config, optimizer=optimizer)
    with torch.no_grad():
        outputs = [adapted(IDS[0]).logits.clone()]
        with adapted.disable_adapter():
            outputs.append(adapted(IDS[0]).logits.clone())
    freed = not any(has(each) for each in adapted.parameters())
    return norms, model_fingerprint(adapted.get_base_model(), read_parameter), most, supports, told, outputs, freed


def test_supports_and_norms_are_those_of_the_whole_model(run):
    from axolotl_supertune import calibrate

    model = base(torch.float32)
    size, block = (sum(each.numel() for each in part.parameters()) for part in (model, model.model.layers[0]))
    norms = calibrate(model, IDS, progress=False)
    supports, adapted = chosen(model, norms)
    with torch.no_grad():
        outputs = [adapted(IDS[0]).logits]
        with adapted.disable_adapter():
            outputs.append(adapted(IDS[0]).logits)
    assert not torch.equal(*outputs)
    for found, fingerprint, most, their_supports, told, their_outputs, freed in run(chooses):
        assert found.fingerprint == fingerprint == norms.fingerprint
        assert found.provenance == norms.provenance
        assert found.norms.keys() == norms.norms.keys()
        assert all(torch.equal(found[name], norm) for name, norm in norms.norms.items())
        assert most == block < size, "one decoder layer at a time"
        for knobs, here, there in zip(CHOICES, supports, their_supports, strict=True):
            assert here.keys() == there.keys()
            assert all(torch.equal(there[name], support) for name, support in here.items()), knobs
        assert told.startswith("model.layers.1.self_attn.q_proj: ZeRO-3 has not gathered its weight")
        for one, other in zip(outputs, their_outputs, strict=True):
            torch.testing.assert_close(other, one, rtol=1e-5, atol=1e-6)
        assert freed


SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 61, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "max_position_embeddings": 256, "pad_token_id": 0}
MODELS = {
    "llama": {},
    "llama-yarn": {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 500000.0}},
    "gemma3_text": {"head_dim": 8, "layer_types": ["sliding_attention", "full_attention"], "rms_norm_eps": 1e-6},
    "deepseek_v3": {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2}
    | {"moe_intermediate_size": 16, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
    | {"qk_nope_head_dim": 8, "first_k_dense_replace": 1, "num_key_value_heads": 4},
}


def tensors_of(model):
    """Of every parameter and buffer the dtype in which it is kept, and the value."""
    from axolotl_supertune.engines import sharding

    named = (*model.named_parameters(), *model.named_buffers())
    return {name: (sharding.dtype_of(each), sharding.whole(each).detach().clone()) for name, each in named}


def loads(rank, folder, dtype):
    """Every model of MODELS as transformers loads it under ZeRO-3, put right."""
    start(rank)
    from transformers import AutoModelForCausalLM
    from transformers.integrations import HfDeepSpeedConfig

    from axolotl_supertune.engines import zero3

    config = {**ZERO3, "train_batch_size": 2 * WORLD, "bf16": {"enabled": dtype is torch.bfloat16}}
    alive = HfDeepSpeedConfig(config)  # transformers holds no more than a weak reference
    found = {}
    for name in MODELS:
        model = AutoModelForCausalLM.from_pretrained(folder / name, dtype=dtype)
        assert zero3.is_sharded_by_zero3(model)
        state = torch.random.get_rng_state()
        zero3.load_plain_buffers(model, dtype)
        assert torch.random.get_rng_state().equal(state)
        found[name] = tensors_of(model)
    refused = []
    for kind in ("more", "fewer", "kept in fp32") if dtype is torch.bfloat16 else ():
        model = AutoModelForCausalLM.from_pretrained(folder / "llama", dtype=torch.bfloat16)
        if kind == "more":
            model.model.norm.register_buffer("scale", torch.ones(1))
        elif kind == "fewer":
            del model.model.rotary_emb.original_inv_freq
        else:
            type(model)._keep_in_fp32_modules_strict = {"layers.*.input_layernorm"}
        try:
            zero3.load_plain_buffers(model, torch.bfloat16)
        except ValueError as error:
            refused.append(str(error))
    del alive
    return found, refused


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_base_that_is_loaded_under_zero_init_is_the_one_of_a_plain_load(run, tmp_path, dtype):
    """zero.Init rounds what is computed while a model is built, RoPE's frequencies for one, to the weights' dtype."""
    from transformers import AutoConfig, AutoModelForCausalLM

    plain = {}
    for name, more in MODELS.items():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(name.partition("-")[0], **{**SIZES, **more}))
        for buffer_name, buffer in model.named_buffers():
            if buffer_name.endswith("e_score_correction_bias"):
                buffer.copy_(torch.tensor([5.0, 5.01, 5.02, 5.03]))
        model.save_pretrained(tmp_path / name)
        plain[name] = tensors_of(AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype=dtype))
        assert any(each is torch.float32 for each, _ in plain[name].values()), "buffers at least"
    for found, refused in run(loads, dtype):
        for name, tensors in plain.items():
            assert found[name].keys() == tensors.keys()
            for tensor, (kept, value) in tensors.items():
                assert found[name][tensor][0] is kept, (name, tensor)
                assert torch.equal(found[name][tensor][1], value), (name, tensor)
        if dtype is torch.float32:
            continue
        assert len(refused) == 3
        assert refused[0].startswith("model.norm.scale: a plain load of the base model has no such tensor. Use ZeRO-1")
        assert refused[1].startswith("model.rotary_emb.original_inv_freq: ZeRO-3 loads the base model without this")
        assert refused[2].startswith("model.layers.0.input_layernorm.weight: ZeRO-3 loads it as torch.bfloat16 of")
        assert "a plain load as torch.float32" in refused[2]
