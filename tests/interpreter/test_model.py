"""A whole model on the fast path against the reference: outputs, gradients, and unchanged base weights."""

import copy
import io
import os
from contextlib import contextmanager

import pytest

pytest.importorskip("triton")

import torch
import torch.nn.functional as F
from kernel_cases import Block, relative_error
from peft import PeftModel, get_peft_model
from torch import nn

from axolotl_supertune import SupraConfig
from axolotl_supertune.method.sizes import KERNELS_VARIABLE
from axolotl_supertune.ops import effective_weight, sparse_linear
from axolotl_supertune.tuner import SupraLinear

# One layer with few enough entries in its supports that the interpreter computes a step in a second.
TINY = {"num_hidden_layers": 1, "hidden_size": 8, "intermediate_size": 12, "num_attention_heads": 2}
TINY |= {"num_key_value_heads": 1}


@pytest.fixture(scope="module")
def ids():
    return torch.randint(0, 97, (2, 5), generator=torch.Generator().manual_seed(7))


@pytest.fixture
def plain(tiny_llama):
    return tiny_llama(**TINY)


@contextmanager
def computed_by(kind):
    before = os.environ[KERNELS_VARIABLE]
    os.environ[KERNELS_VARIABLE] = kind
    try:
        yield
    finally:
        os.environ[KERNELS_VARIABLE] = before


def config(**changes):
    knobs = {"mask_score": "magnitude", "task_type": "CAUSAL_LM", "r0": 2, "supra_lambda": 0.5, "lora_dropout": 0.0}
    return SupraConfig(**{**knobs, "init_weights": False, **changes})


def adapt(model, seed=1, **changes):
    """Random U, L and R of a trained adapter's size, the same for one seed, in training mode."""
    torch.manual_seed(seed)
    model = get_peft_model(model, config(**changes)).train()
    with torch.no_grad():
        for layer in layers(model).values():
            for L in layer.supra_L.values():
                L.mul_(0.05)
    return model


@pytest.fixture
def make(tiny_llama):
    """A function (dtype, llama=…, **changes of the config) → an adapted model; by="reference": its twin."""

    def build(dtype=torch.float32, *, by="triton", llama=None, **changes):
        with computed_by(by):
            return adapt(tiny_llama(dtype=dtype, **{**TINY, **(llama or {})}), **changes)

    return build


def layers(model):
    return {module.layer_name: module for module in model.modules() if isinstance(module, SupraLinear)}


def attention(model):
    return model.base_model.model.model.layers[0].self_attn


def mlp(model):
    return model.base_model.model.model.layers[0].mlp


def logits(model, ids, by="triton"):
    with torch.no_grad(), computed_by(by):
        return model(ids).logits


def gradients(model):
    return {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}


def step(model, ids, by="triton", seed=5):
    """Logits, and all gradients, of one forward and backward."""
    model.zero_grad()
    torch.manual_seed(seed)
    with computed_by(by):
        out = model(ids, labels=ids)
        out.loss.backward()
    return {"logits": out.logits.detach(), **gradients(model)}


def assert_close(found, expected, tolerance=2e-5):
    assert found.keys() == expected.keys()
    errors = {name: relative_error(found[name], expected[name]) for name in found}
    bad = {name: error for name, error in errors.items() if not error <= tolerance}
    assert not bad, bad


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    assert not [name for name in found if not torch.equal(found[name], expected[name])]


def assert_near(one, other, tolerance=2e-5):
    assert one.dtype == other.dtype
    assert relative_error(one, other) <= tolerance


def assert_base(model, plain):
    """What lies in the base's weights are the base's own bits; read past everything that would restore them."""
    for name, layer in layers(model).items():
        weight = plain.get_submodule(name).weight
        assert torch.equal(layer.base_layer.weight, weight.to(layer.base_layer.weight.dtype)), name


def assert_written(model, plain):
    """The fast path ran: every layer's weight holds its support's changes."""
    for name, layer in layers(model).items():
        assert not torch.equal(layer.base_layer.weight, plain.get_submodule(name).weight), name


def change_all(model, amount=0.01):
    """A step of an optimizer."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(amount)


# The same numbers as the reference


@pytest.mark.parametrize("supra_lambda", [0, 0.5, 1])
def test_logits_and_all_gradients_equal_the_reference(make, ids, plain, supra_lambda):
    model, twin = make(supra_lambda=supra_lambda), make(supra_lambda=supra_lambda, by="reference")
    found = step(model, ids)
    assert_close(found, step(twin, ids, by="reference"))
    assert len(found) == 1 + 7 * {0: 1, 0.5: 3, 1: 2}[supra_lambda]
    if supra_lambda < 1:
        assert_written(model, plain)
    assert vars(mlp(model))["forward"].func.__name__ == "_mlp_forward"
    assert "forward" not in vars(mlp(twin))


def test_three_training_steps_equal_the_reference(make, ids):
    results = []
    for by in ("triton", "reference"):
        model = make(by=by, target_modules=["q_proj", "k_proj", "v_proj", "down_proj"])
        optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=2e-2)
        for _ in range(3):
            step(model, ids, by=by)
            optimizer.step()
        results.append({name: each.detach() for name, each in model.named_parameters() if each.requires_grad})
    assert_close(*results, tolerance=1e-3)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_gradient_checkpointing_with_dropout_gives_the_same_gradients(make, ids, use_reentrant):
    model = make(lora_dropout=0.3)
    expected = step(model, ids)
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    model.enable_input_require_grads()
    assert_equal(step(model, ids), expected)


def test_gradient_accumulation_sums(make, ids):
    model, twin = make(), make(by="reference")
    for each, by in ((model, "triton"), (twin, "reference")):
        with computed_by(by):
            for batch in (ids, ids.flip(1)):
                each(batch, labels=batch).loss.backward()
    assert_close(gradients(model), gradients(twin))


def test_packed_sequences(make, ids):
    """Position ids that start again, in one row; and a padding mask."""
    model, twin = make(), make(by="reference")
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 0, 1, 2]])
    mask = torch.ones_like(ids)
    mask[0, :2] = 0
    knobs = [(ids.view(1, -1), {"position_ids": positions}), (ids, {"attention_mask": mask})]
    for batch, options in knobs:
        with torch.no_grad():
            found = model(batch, **options).logits
            with computed_by("reference"):
                assert_near(found, twin(batch, **options).logits)


def test_generation_token_by_token(make, ids):
    """One token at a time from the cache: T = 2, then 1."""
    model, twin = make().eval(), make(by="reference").eval()
    for batch in (ids, ids[:1]):
        knobs = {"max_new_tokens": 3, "do_sample": False, "attention_mask": torch.ones_like(batch), "pad_token_id": 0}
        found = model.generate(input_ids=batch, **knobs)
        with computed_by("reference"):
            assert torch.equal(found, twin.generate(input_ids=batch, **knobs))


# Autocast on the CPU: low-rank parts in fp16 only, the interpreter's bf16 matrix product is wrong.
@pytest.mark.parametrize(("dtype", "supra_lambda"), [(torch.bfloat16, 0), (torch.float16, 0.5)])
def test_autocast(make, ids, dtype, supra_lambda):
    found = []
    for by in ("triton", "reference"):
        model = make(by=by, supra_lambda=supra_lambda)
        with torch.autocast("cpu", dtype=dtype):
            assert attention(model).q_proj(torch.randn(3, 8)).dtype == dtype
            found.append(step(model, ids, by=by))
        assert all(each.dtype == torch.float32 for name, each in found[-1].items() if name != "logits")
        assert found[-1]["logits"].dtype == dtype
    assert_close(*found, tolerance=2e-2)


def test_autocast_on_and_off_in_turn(make, ids, plain):
    model, twin = make(supra_lambda=0), make(supra_lambda=0, by="reference")
    expected = logits(twin, ids, by="reference")
    for _ in range(2):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits(model, ids)
        assert_near(logits(model, ids), expected)
    model.state_dict()
    assert_base(model, plain)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_16_bit_base(make, ids, dtype):
    found = step(make(dtype), ids)
    assert all(each.dtype == torch.float32 for name, each in found.items() if name != "logits")
    assert_close(found, step(make(torch.float32, by="reference"), ids, by="reference"), 2e-2)


def test_dropout_acts_in_training_alone(make, ids):
    model, twin = make(lora_dropout=0.5), make(by="reference")
    expected = logits(twin, ids, by="reference")
    assert relative_error(logits(model, ids), expected) > 1e-3
    assert_near(logits(model.eval(), ids), expected)
    assert relative_error(logits(model.train(), ids), expected) > 1e-3


def test_inference_mode_then_training(make, ids, plain):
    model = make()
    with torch.inference_mode():
        model(ids)
    assert_close(step(model, ids), step(make(by="reference"), ids, by="reference"))
    model.state_dict()
    assert_base(model, plain)


@pytest.mark.parametrize("targets", [["q_proj"], ["q_proj", "k_proj"], ["k_proj", "v_proj", "up_proj", "down_proj"]])
def test_siblings_of_which_some_are_adapted(make, ids, targets):
    model = make(target_modules=targets)
    assert all(layer.shared_input is None for layer in layers(model).values())
    assert "forward" not in vars(mlp(model))
    twin = make(target_modules=targets, by="reference")
    assert_close(step(model, ids), step(twin, ids, by="reference"))


def test_an_mlp_with_another_activation_is_not_fused(make, ids):
    gelu = {"hidden_act": "gelu"}
    model = make(llama=gelu)
    assert "forward" not in vars(mlp(model))
    assert mlp(model).gate_proj.shared_input is mlp(model).up_proj.shared_input is not None
    assert_close(step(model, ids), step(make(llama=gelu, by="reference"), ids, by="reference"))


def test_biases(make, ids):
    """Frozen and trained ones; `o_proj` is alone, the others a group."""
    found = []
    for by in ("triton", "reference"):
        model = make(by=by, llama={"attention_bias": True}, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"])
        for name, layer in layers(model).items():
            nn.init.normal_(layer.base_layer.bias, generator=torch.Generator().manual_seed(len(name)))
            layer.base_layer.bias.requires_grad_(not name.endswith("k_proj"))
        found.append(step(model, ids, by=by))
    assert sum(name.endswith("bias") for name in found[0]) == 3
    assert_close(*found)


def test_a_bias_that_is_trained_from_now_on(make, ids):
    found = []
    for by in ("triton", "reference"):
        model = make(by=by, llama={"attention_bias": True}, target_modules=["o_proj"])
        step(model, ids, by=by)
        attention(model).o_proj.base_layer.bias.requires_grad_(True)
        found.append(step(model, ids, by=by))
    assert_close(*found)


def test_a_bias_trained_under_autocast(make):
    model = make(llama={"attention_bias": True}, target_modules=["o_proj"])
    layer, x = attention(model).o_proj, torch.randn(3, 8)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.float16):
        before = layer(x)
        layer.base_layer.bias.add_(10)
        assert_near(layer(x), before + 10, 1e-3)


# The base's own bits


def _disable(model, plain):
    with model.disable_adapter():
        assert_base(model, plain)


def _merge_and_unmerge(model, plain):
    model.merge_adapter()
    model.unmerge_adapter()


def _second_adapter(model, plain):
    model.add_adapter("second", config())


def _set_adapter(model, plain):
    model.add_adapter("second", config(sparse_direction="top"))
    model(torch.tensor([[1, 2, 3]]))
    model.set_adapter("second")


RESTORING = {
    "state_dict": lambda model, plain: model.state_dict(),
    "state_dict of a layer": lambda model, plain: [layer.state_dict() for layer in layers(model).values()],
    "disable_adapter": _disable,
    "merge and unmerge": _merge_and_unmerge,
    "get_base_layer": lambda model, plain: [layer.get_base_layer() for layer in layers(model).values()],
    "weight": lambda model, plain: [layer.weight for layer in layers(model).values()],
    "another adapter": _second_adapter,
    "set_adapter": _set_adapter,
    "delete_adapter": lambda model, plain: model.delete_adapter("default"),
    "deepcopy": lambda model, plain: assert_base(copy.deepcopy(model), plain),
    "float64": lambda model, plain: model.to(torch.float64),
    "bfloat16": lambda model, plain: (model.to(torch.bfloat16), plain.to(torch.bfloat16)),
    "load_state_dict": lambda model, plain: model.load_state_dict(copy.deepcopy(model.state_dict())),
    "to": lambda model, plain: model.to("cpu"),
}


@pytest.mark.parametrize("by", RESTORING)
def test_base_bits_are_restored_exactly(make, ids, plain, by):
    model = make(supra_lambda=0)
    logits(model, ids)
    assert_written(model, plain)
    RESTORING[by](model, plain)
    assert_base(model, plain)


def test_base_bits_survive_training(make, ids, plain):
    model = make()
    for _ in range(2):
        step(model, ids)
        change_all(model)
    assert_written(model, plain)
    state = model.state_dict()
    assert_base(model, plain)
    for name, layer in layers(model).items():
        assert torch.equal(state[f"base_model.model.{name}.base_layer.weight"], plain.get_submodule(name).weight)
        assert torch.equal(layer.weight, plain.get_submodule(name).weight)


def test_save_pretrained_after_a_forward(make, ids, plain, tmp_path, tiny_llama):
    model = make()
    expected = step(model, ids)["logits"]
    model.save_pretrained(tmp_path)
    assert_base(model, plain)
    loaded = PeftModel.from_pretrained(tiny_llama(**TINY), tmp_path)
    assert torch.equal(logits(loaded, ids), expected)
    assert torch.equal(logits(model, ids), expected)


@pytest.mark.parametrize("supra_lambda", [0, 0.5])
def test_merge_and_unload_equals_that_of_the_reference(make, ids, supra_lambda):
    merged = []
    for by in ("triton", "reference"):
        model = make(by=by, supra_lambda=supra_lambda)
        logits(model, ids, by=by)
        merged.append(model.merge_and_unload().state_dict())
    assert_equal(*merged)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_super_merge_writes_the_bits_that_the_forward_used(make, ids, dtype):
    model = make(dtype, supra_lambda=0)
    logits(model, ids)
    used = {name: layer.base_layer.weight.clone() for name, layer in layers(model).items()}
    model.merge_adapter()
    assert_equal({name: layer.base_layer.weight for name, layer in layers(model).items()}, used)


def test_a_merged_model_computes_as_the_reference(make, ids):
    model, twin = make().eval(), make(by="reference").eval()
    for each, by in ((model, "triton"), (twin, "reference")):
        logits(each, ids, by)
        each.merge_adapter()
    assert torch.equal(logits(model, ids), logits(twin, ids, "reference"))
    for each in (model, twin):
        each.unmerge_adapter()
    assert_near(logits(model, ids), logits(twin, ids, "reference"))


@pytest.mark.parametrize("way", ["unload", "merge_and_unload"])
def test_unloading_leaves_nothing_of_the_fast_path(make, ids, plain, way):
    model = make(supra_lambda=0)
    step(model, ids)
    patched = mlp(model)
    base = getattr(model, way)()
    assert "forward" not in vars(patched)
    assert not [key for each in base.modules() for key in vars(each) if "supra" in key]
    assert type(base.model.layers[0].self_attn.q_proj) is nn.Linear
    if way == "unload":
        assert_equal(base.state_dict(), plain.state_dict())
        assert torch.equal(logits(base, ids), logits(plain, ids))


# Adapters that come, change and go


@pytest.fixture
def two(make):
    """A function (by) → a model with two adapters of different supports, the first active."""

    def build(by="triton"):
        with computed_by(by):
            model = make(by=by)
            model.add_adapter("second", config(sparse_direction="top"))
            return model.train()

    return build


def test_switching_adapters(two, ids, plain):
    model, twin = two(), two("reference")
    for name in ("default", "second", "default", "second"):
        model.set_adapter(name)
        twin.set_adapter(name)
        assert_base(model, plain)
        assert_near(logits(model, ids), logits(twin, ids, "reference"))
        assert_written(model, plain)
    twin.set_adapter("default")
    model.set_adapter("default")
    assert_close(step(model, ids), step(twin, ids, by="reference"))


def test_deleting_the_active_adapter(two, ids, plain):
    model, twin = two(), two("reference")
    logits(model, ids)
    for each in (model, twin):
        each.delete_adapter("default")
        each.set_adapter("second")
    assert_base(model, plain)
    assert_near(logits(model, ids), logits(twin, ids, "reference"))


def test_two_active_adapters_are_left_to_the_reference(two, ids, plain):
    model, twin = two(), two("reference")
    logits(model, ids)
    for each in (model, twin):
        each.base_model.set_adapter(["default", "second"])
    with pytest.raises(RuntimeError, match=r"q_proj: SUPERTUNE_KERNELS=triton.*several adapters are active at once"):
        model(ids)
    assert_close(step(model, ids, by="auto"), step(twin, ids, by="reference"))
    assert_base(model, plain)
    for each in (model, twin):
        each.set_adapter("second")
    assert_near(logits(model, ids), logits(twin, ids, "reference"))


def test_a_sparse_and_a_low_rank_adapter_active_at_once(make, ids):
    """One part of each kind is what the kernels take, from whichever adapters."""
    found = []
    for by in ("triton", "reference"):
        model = make(by=by, supra_lambda=0)
        with computed_by(by):
            model.add_adapter("second", config(supra_lambda=1))
        model.base_model.set_adapter(["default", "second"])
        found.append(step(model, ids, by=by))
    assert len(found[0]) == 1 + 7 * 3
    assert_close(*found)


def test_another_checkpoint_in_the_middle_of_training(make, ids, plain):
    model, other = make(), make(seed=2, sparse_direction="top")
    twin = make(seed=2, sparse_direction="top", by="reference")
    step(model, ids)
    change_all(model)
    model.load_state_dict(copy.deepcopy(other.state_dict()))
    assert_base(model, plain)
    assert_close(step(model, ids), step(twin, ids, by="reference"))
    model.state_dict()
    assert_base(model, plain)


def test_deepcopy_is_right_and_independent(make, ids, plain):
    model = make()
    expected = step(model, ids)
    twin = copy.deepcopy(model)
    change_all(model)
    assert_equal(step(twin, ids), expected)
    changed = logits(model, ids)
    assert not torch.equal(changed, expected["logits"])
    change_all(twin)
    assert torch.equal(logits(twin, ids), changed)
    assert torch.equal(logits(model, ids), changed)
    for each in (model, twin):
        each.state_dict()
        assert_base(each, plain)


def test_the_layers_of_a_deepcopy_share_their_work_as_the_originals_do(make, ids):
    model = make()
    logits(model, ids)
    twin = copy.deepcopy(model)
    for one, other in ((attention(model), attention(twin)), (mlp(model), mlp(twin))):
        for names in (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")):
            members = [getattr(other, name) for name in names if hasattr(other, name)]
            if members:
                assert len({id(member.shared_input) for member in members}) == 1
                assert members[0].shared_input is not getattr(one, names[0]).shared_input
    assert len({id(layer.writer) for layer in layers(twin).values()}) == 1
    assert mlp(twin).forward.args[0] is mlp(twin)


_MLP_NAMES = ("gate_proj", "up_proj", "down_proj")


def block(by="triton", **changes):
    torch.manual_seed(0)
    with computed_by(by):
        return adapt(Block(), task_type=None, target_modules=["q_proj", "k_proj", "v_proj", *_MLP_NAMES], **changes)


def test_a_model_of_ones_own_takes_the_fast_path():
    model, twin, x = block(), block("reference"), torch.randn(3, 8)
    assert "forward" in vars(model.base_model.model.mlp)
    with torch.no_grad():
        found = model(x)
        with computed_by("reference"):
            for one, other in zip(found, twin(x), strict=True):
                assert_near(one, other)


@pytest.mark.parametrize("forward_before", [False, True])
def test_pickle_round_trip(forward_before):
    model, x = block(), torch.randn(3, 8)
    plain = {name: layer.get_base_layer().weight.clone() for name, layer in layers(model).items()}
    with torch.no_grad():
        expected = model(x)
        if not forward_before:
            model = block()
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=False)
        for each in (loaded, model):
            assert_equal({name: layer.base_layer.weight for name, layer in layers(each).items()}, plain)
            for one, other in zip(each(x), expected, strict=True):
                assert torch.equal(one, other)
        change_all(model)
        assert torch.equal(loaded(x)[0], expected[0])


def test_float64_is_left_to_the_reference(make, ids, plain):
    model, twin = make(), make(by="reference")
    logits(model, ids)
    model.to(torch.float64)
    twin.to(torch.float64)
    with pytest.raises(RuntimeError, match="float64"):
        model(ids)
    assert_close(step(model, ids, by="auto"), step(twin, ids, by="reference"), 1e-12)
    model.to(torch.float32)
    twin.to(torch.float32)
    assert_base(model, plain)
    assert_near(logits(model, ids), logits(twin, ids, "reference"))


def test_reference_may_be_asked_for_at_any_time(make, ids, plain):
    """The variable is read at every layer's first use of a setting; a model that ran on kernels gives up its weight."""
    model = make()
    found = step(model, ids)
    model.to("cpu")
    assert_close(step(model, ids, by="reference"), found)
    assert_base(model, plain)


# Optimizers and gradients


@pytest.mark.parametrize("supra_lambda", [0, 0.5])
def test_values_changed_through_data_are_seen_by_the_next_forward(make, ids, supra_lambda):
    model, twin = make(supra_lambda=supra_lambda), make(supra_lambda=supra_lambda, by="reference")
    for _ in range(2):
        assert_near(logits(model, ids), logits(twin, ids, "reference"))
        for each in (model, twin):
            for parameter in each.parameters():
                if parameter.requires_grad:
                    parameter.data.add_(0.1)
    assert_near(logits(model, ids), logits(twin, ids, "reference"))


def test_values_changed_through_data_after_one_late_layer_ran_alone(make, ids):
    model, twin = make(supra_lambda=0), make(supra_lambda=0, by="reference")
    logits(model, ids)
    with torch.no_grad():
        attention(model).o_proj(torch.randn(3, 8))
    for each in (model, twin):
        for parameter in each.parameters():
            if parameter.requires_grad:
                parameter.data.add_(0.1)
    assert_near(logits(model, ids), logits(twin, ids, "reference"))


def test_parameters_put_in_the_place_of_others_are_seen(make, ids):
    model, twin = make(), make(by="reference")
    for _ in range(2):
        assert_near(logits(model, ids), logits(twin, ids, "reference"))
        for each in (model, twin):
            for layer in layers(each).values():
                layer.supra_values["default"] = nn.Parameter(layer.supra_values["default"].detach() + 0.1)
                layer.supra_L["default"].data = layer.supra_L["default"].data * 2


def test_backward_after_the_step_is_refused(make, ids):
    model = make()
    loss = model(ids, labels=ids).loss
    change_all(model)
    with pytest.raises(RuntimeError, match=r"call backward\(\) before step\(\)"):
        loss.backward()


def test_backward_after_a_step_and_another_forward_is_refused(make, ids):
    model = make()
    loss = model(ids, labels=ids).loss
    change_all(model)
    logits(model, ids)
    with pytest.raises(RuntimeError, match=r"call backward\(\) before step\(\)"):
        loss.backward()


def _other_adapter_forward(model, ids):
    model.set_adapter("second")
    logits(model, ids)
    model.set_adapter("default")


def _eval_forward(model, ids):
    model.eval()
    logits(model, ids.flip(1))
    model.train()


def _disabled_forward(model, ids):
    with model.disable_adapter():
        logits(model, ids)


def _autocast_forward(model, ids):
    with torch.autocast("cpu", dtype=torch.float16):
        logits(model, ids)


def _merged_forward(model, ids):
    model.merge_adapter()
    logits(model, ids)
    model.unmerge_adapter()


BETWEEN = {
    "state_dict": lambda model, ids: model.state_dict(),
    "forward": logits,
    "eval forward": _eval_forward,
    "deepcopy": lambda model, ids: copy.deepcopy(model),
    "disabled forward": _disabled_forward,
    "merged forward": _merged_forward,
    "forward of another adapter": _other_adapter_forward,
    "forward in another dtype": _autocast_forward,
}


_undisturbed: dict[str, torch.Tensor] = {}


@pytest.mark.parametrize("event", BETWEEN)
def test_nothing_between_a_forward_and_its_backward_disturbs_either(two, ids, plain, event):
    """DPO runs another adapter, or none, between the two; a callback saves or evaluates there."""
    if not _undisturbed:
        _undisturbed.update(step(two(), ids))
    model, expected = two(), _undisturbed
    out = model(ids, labels=ids)
    BETWEEN[event](model, ids)
    for name in [name for name, each in model.named_parameters() if "supra_" in name and "second" in name]:
        model.get_parameter(name).requires_grad_(False)
    out.loss.backward()
    assert_close({"logits": out.logits.detach(), **gradients(model)}, expected, 1e-6)
    assert torch.equal(logits(model, ids), expected["logits"])
    model.state_dict()
    assert_base(model, plain)


def test_training_and_evaluation_in_two_dtypes_leave_the_base_its_bits(make, ids, plain):
    """Each has a slot of its own; whichever wrote last, what is saved is the base."""
    model = make(supra_lambda=0)
    for training in (True, False, True, False):
        model.train(training)
        with torch.no_grad(), torch.autocast("cpu", torch.float16, enabled=training):
            model(ids)
        if not training:
            continue
        model.state_dict()
        assert_base(model, plain)


def test_a_moved_model_keeps_nothing_that_lies_where_it_was(make, ids):
    """The kernels' copies of L and R are on the old device; a forward on the new one makes its own."""
    model = make(supra_lambda=0.5)
    before = logits(model, ids)
    old = {name: layer.layer_guards[True].result for name, layer in layers(model).items()}
    model.to("cpu")
    assert torch.equal(logits(model, ids), before)
    assert all(layer.layer_guards[True].result is not old[name] for name, layer in layers(model).items())


@pytest.mark.parametrize("way", ["unload", "disable", "merge"])
def test_backward_after_the_adapter_left_keeps_the_base(make, ids, plain, way):
    model = make(supra_lambda=0)
    loss = model(ids, labels=ids).loss
    if way == "unload":
        base = model.unload()
        loss.backward()
        assert_equal(base.state_dict(), plain.state_dict())
    elif way == "disable":
        with model.disable_adapter():
            loss.backward()
            assert torch.equal(logits(model, ids), logits(plain, ids))
        model.state_dict()
        assert_base(model, plain)
    else:
        model.merge_adapter()
        merged = logits(model, ids)
        with pytest.raises(RuntimeError, match="replaced between a forward and its backward"):
            loss.backward()
        assert torch.equal(logits(model, ids), merged)
        model.unmerge_adapter()
        assert_base(model, plain)


def test_a_graph_that_kept_the_base_weight_is_told_that_it_changed(make, ids):
    model = make(supra_lambda=0)
    model.enable_input_require_grads()
    with model.disable_adapter():
        loss = model(ids, labels=ids).loss
    logits(model, ids)
    with pytest.raises(RuntimeError, match="inplace operation"):
        loss.backward()


# Layers that share an input


def alone(layer, x):
    """One layer by the reference."""
    weight = layer.get_base_layer().weight.clone()  # the next layer's forward writes into the weight itself
    return sparse_linear(x, weight, None, layer.sparse_parts(["default"]), layer.low_rank_parts(["default"]))


def test_siblings_called_with_one_input_are_computed_once(make, monkeypatch):
    from axolotl_supertune.ops import fused

    calls = []
    original = fused.linear_group
    monkeypatch.setattr(fused, "linear_group", lambda x, group: calls.append(len(group.layers)) or original(x, group))
    model, x = make(), torch.randn(2, 3, 8)
    q, k, v = attention(model).q_proj, attention(model).k_proj, attention(model).v_proj
    outputs = [q(x), v(x), k(x)]  # in any order after the first
    assert calls == [3]
    for layer, y in zip((q, v, k), outputs, strict=True):
        assert_near(y, alone(layer, x))


def test_siblings_called_with_different_inputs_stay_right_and_are_parted(make):
    model = make()
    members = [attention(model).q_proj, attention(model).k_proj, attention(model).v_proj]
    for turn in range(4):
        xs = [torch.randn(2, 3, 8, requires_grad=True) for _ in members]
        outputs = [member(x) for member, x in zip(members, xs, strict=True)]
        for member, x, y in zip(members, xs, outputs, strict=True):
            expected = alone(member, x)
            assert_near(y, expected)
            if turn == 0:
                dy = torch.randn(y.shape)
                assert_near(torch.autograd.grad(y, x, dy)[0], torch.autograd.grad(expected, x, dy)[0])
        assert (members[0].shared_input is None) == (turn >= 2)


@pytest.mark.parametrize("grad", [torch.no_grad, torch.inference_mode])
def test_an_input_changed_in_place_is_another_input(make, grad):
    model = make()
    q, k = attention(model).q_proj, attention(model).k_proj
    with grad():
        x = torch.randn(2, 3, 8)
        q(x)
        x.add_(1)
        assert_near(k(x), alone(k, x))


@pytest.mark.parametrize("event", ["step", "disable", "set_adapter", "eval"])
def test_outputs_kept_for_siblings_do_not_outlive_the_model_they_are_of(two, event):
    """One projection called alone, as a probe does, leaves no outputs for a later call on its input."""
    model, x = two(), torch.randn(2, 3, 8)
    q, k = attention(model).q_proj, attention(model).k_proj
    with torch.no_grad():
        q(x)
        if event == "step":
            change_all(model)
            assert_near(k(x), alone(k, x))
        elif event == "disable":
            with model.disable_adapter():
                assert_near(k(x), F.linear(x, k.get_base_layer().weight))
        elif event == "set_adapter":
            model.set_adapter("second")
            weight = effective_weight(k.get_base_layer().weight, k.sparse_parts(["second"]))
            assert_near(k(x), sparse_linear(x, weight, None, (), k.low_rank_parts(["second"])))
        else:
            for layer in layers(model).values():
                layer.supra_dropout["default"] = 0.9
            model.eval()
            assert_near(k(x), alone(k, x))


@pytest.mark.parametrize("name", ["q_proj", "k_proj", "up_proj", "down_proj"])
@pytest.mark.parametrize("kind", ["forward", "pre", "backward"])
def test_hooks_of_shared_layers_still_fire(make, ids, name, kind):
    in_attention = name in ("q_proj", "k_proj")
    knobs = {"target_modules": ["q_proj", "k_proj", "v_proj"] if in_attention else list(_MLP_NAMES), "r0": 1}
    model, twin = make(supra_lambda=0, **knobs), make(supra_lambda=0, by="reference", **knobs)
    seen = []
    for each in (model, twin):
        layer = getattr(attention(each) if in_attention else mlp(each), name)
        if kind == "forward":
            layer.register_forward_hook(lambda module, args, y: seen.append(y.shape) or y * 2)
        elif kind == "pre":
            layer.register_forward_pre_hook(lambda module, args: seen.append(args[0].shape) or (args[0] * 2,))
        else:
            layer.register_full_backward_hook(
                lambda module, dxs, dys: seen.append(dys[0].shape) or tuple(dx * 2 for dx in dxs)
            )
            each.enable_input_require_grads()
    if kind == "backward":
        assert_close(step(model, ids), step(twin, ids, by="reference"))
    else:
        assert_near(logits(model, ids), logits(twin, ids, by="reference"))
    assert len(seen) == 2
    assert seen[0] == seen[1]


def test_a_plain_layer_in_the_place_of_an_adapted_one(make, ids):
    """Whoever takes single layers out of the model: the fused MLP and the group take notice."""
    model, twin = make(), make(by="reference")
    for each, by in ((model, "triton"), (twin, "reference")):
        logits(each, ids, by)
        mlp(each).up_proj = mlp(each).up_proj.get_base_layer()
        attention(each).k_proj = attention(each).k_proj.get_base_layer()
    assert_near(logits(model, ids), logits(twin, ids, "reference"))


def test_an_empty_input_names_the_reason(make):
    model = make()
    with pytest.raises(RuntimeError, match="the input is empty"):
        attention(model).o_proj(torch.empty(0, 8))
    with computed_by("auto"):
        assert attention(model).o_proj(torch.empty(0, 8)).shape == (0, 8)


# torch.compile: a backend that runs what Dynamo and AOTAutograd made, without a C++ compiler.


@pytest.fixture
def fresh_compiler():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def block_step(run, model, x, seed=5):
    model.zero_grad()
    x = x.clone().requires_grad_()
    torch.manual_seed(seed)
    outputs = run(x)
    sum(y.square().sum() for y in outputs).backward()
    return {"0": outputs[0].detach(), "1": outputs[1].detach(), "x": x.grad, **gradients(model)}


@pytest.mark.usefixtures("fresh_compiler")
def test_compiled_model_keeps_the_masks_of_its_forward_whatever_runs_before_its_backward():
    model, x = block(lora_dropout=0.5), torch.randn(3, 8)
    compiled = torch.compile(model, backend="aot_eager")
    expected = block_step(compiled, model, x)
    model.zero_grad()
    leaf = x.clone().requires_grad_()
    torch.manual_seed(5)
    outputs = compiled(leaf)
    model.eval()
    with torch.no_grad():
        compiled(x)
    model.train()
    sum(y.square().sum() for y in outputs).backward()
    assert_close({"0": outputs[0].detach(), "1": outputs[1].detach(), "x": leaf.grad, **gradients(model)}, expected)


@pytest.mark.usefixtures("fresh_compiler")
def test_compiled_model_sees_adapters_switched_and_disabled():
    model, x = block(), torch.randn(3, 8)
    compiled = torch.compile(model, backend="aot_eager")
    with torch.no_grad():
        on = compiled(x)
        assert_near(on[0], model(x)[0])
        with model.disable_adapter():
            off = compiled(x)
            assert_near(off[0], model(x)[0])
        assert_near(compiled(x)[0], on[0])
        model.merge_adapter()
        assert_near(compiled(x)[0], model(x)[0])
        model.unmerge_adapter()
    assert relative_error(off[0], on[0]) > 1e-3


@pytest.mark.parametrize("view", ["plain", "transposed", "three dimensions"])
@pytest.mark.parametrize("supra_lambda", [0, 0.5, 1])
def test_the_compilers_operator_is_described_rightly(view, supra_lambda):
    layer = block(supra_lambda=supra_lambda).base_model.model.q_proj
    views = {"plain": torch.randn(3, 8), "transposed": torch.randn(8, 3).t(), "three dimensions": torch.randn(2, 3, 8)}
    x = views[view].requires_grad_()
    arguments = (x, layer._trained(), layer.operator_number, layer.out_features)
    checks = ("test_schema", "test_faketensor", "test_autograd_registration")
    torch.library.opcheck(torch.ops.axolotl_supertune.adapted_linear.default, arguments, test_utils=checks)
    y, inner, seed = torch.ops.axolotl_supertune.adapted_linear(*arguments)
    backward = (x, torch.randn_like(y), inner, seed, layer._trained(), layer.operator_number, True)
    backward = tuple(each.detach() if isinstance(each, torch.Tensor) else each for each in backward)
    operator = torch.ops.axolotl_supertune.adapted_linear_backward.default
    torch.library.opcheck(operator, backward, test_utils=checks[:2])


# Weights and modules that are not this model's alone


@pytest.mark.parametrize("read", ["disabled", "merged", "on the reference", "saved"])
def test_a_weight_of_two_models_is_the_bases_to_each(make, ids, plain, tiny_llama, read):
    """DPO's reference model may share its weights with the one that is trained."""
    shared = tiny_llama(**TINY)
    one = adapt(shared, supra_lambda=0)
    twin = tiny_llama(**TINY)
    for name, module in plain.named_modules():
        if isinstance(module, nn.Linear) and name != "lm_head":
            twin.get_submodule(name).weight = layers(one)[name].base_layer.weight
    two = adapt(twin, seed=2, supra_lambda=0, sparse_direction="top")
    alone = make(supra_lambda=0), adapt(tiny_llama(**TINY), seed=2, supra_lambda=0, sparse_direction="top")
    for model, expected in [*zip((one, two), alone, strict=True)] * 2:
        assert_near(logits(model, ids), logits(expected, ids))
    logits(one, ids)
    assert_written(one, plain)
    if read == "disabled":
        with two.disable_adapter():
            assert torch.equal(logits(two, ids), logits(plain, ids))
    elif read == "merged":
        assert_near(logits(copy.deepcopy(two).merge_and_unload(), ids), logits(alone[1], ids))
    elif read == "on the reference":
        assert_near(logits(two, ids, by="reference"), logits(alone[1], ids))
    else:
        for name, layer in layers(two).items():
            assert torch.equal(layer.state_dict()["base_layer.weight"], plain.get_submodule(name).weight)
    assert_near(logits(one, ids), logits(alone[0], ids))


def test_an_activation_that_is_put_in_later_is_computed(make, ids):
    model, expected = make(), make()
    logits(model, ids)
    for each in (model, expected):
        mlp(each).act_fn = nn.GELU()
    assert_close(step(model, ids), step(expected, ids, by="reference"))
