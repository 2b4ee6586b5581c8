"""Super and Supra on bases that bitsandbytes quantized to 4 and 8 bits, on the CPU."""

import copy
import json
import warnings

import bitsandbytes as bnb
import pytest
import torch
import torch.nn.functional as F
from peft import PeftModel, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaForCausalLM

from axolotl_supertune import SupraConfig, calibrate
from axolotl_supertune.method.activation_norms import ActivationNorms, model_fingerprint
from axolotl_supertune.method.scores import magnitude_score, wanda_score
from axolotl_supertune.method.support import random_support, select_support
from axolotl_supertune.ops import merged_weight
from axolotl_supertune.ops.dispatch import unsupported_tensor_reason
from axolotl_supertune.tuner import SupraLinear
from axolotl_supertune.tuner.base_model import read_parameter
from axolotl_supertune.tuner.quantization import BACKENDS, backend_of, dense_linear, is_quantized, stored_bytes
from axolotl_supertune.tuner.quantization.backend import Backend
from axolotl_supertune.tuner.quantization.bitsandbytes import Bitsandbytes, nf4_linear
from axolotl_supertune.tuner.quantization.linear import QuantizedSupraLinear

KINDS = {
    "nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
    "fp4": {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4"},
    "int8": {"load_in_8bit": True},
}
BITSANDBYTES = Bitsandbytes()
STORED_WIDE = {"bnb_4bit_quant_storage": torch.bfloat16}


@pytest.fixture(scope="session")
def folder(tiny_llama, tmp_path_factory):
    """The tiny Llama, saved; its biases too, so that every layer has one."""
    path = tmp_path_factory.mktemp("quantized")
    model = tiny_llama(attention_bias=True, mlp_bias=True)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(path)
    return path


@pytest.fixture
def load(folder):
    """A function (kind, dtype) → the tiny Llama quantized so; kind None is not quantized."""

    def load(kind, dtype=torch.float32, **more):
        if kind is None:
            return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        options = {**KINDS[kind], **more}
        if kind != "int8":
            options = {"bnb_4bit_compute_dtype": dtype, **STORED_WIDE, **options}
        return AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, quantization_config=BitsAndBytesConfig(**options)
        )

    return load


def config(**changes):
    knobs = {"mask_score": "magnitude", "task_type": "CAUSAL_LM", "r0": 4, "supra_lambda": 0.5, "lora_dropout": 0.0}
    return SupraConfig(**{**knobs, "init_weights": False, **changes})


def adapt(model, seed=1, **changes):
    """Random U, L and R of a trained adapter's size, in eval mode."""
    torch.manual_seed(seed)
    model = get_peft_model(model, config(**changes)).eval()
    with torch.no_grad():
        for layer in layers(model).values():
            for values in layer.supra_values.values():
                values.mul_(0.2)
            for L in layer.supra_L.values():
                L.mul_(0.05)
    return model


def layers(model):
    return {module.layer_name: module for module in model.modules() if isinstance(module, SupraLinear)}


def dense_copy(model):
    """The same adapters on an unquantized model with the dequantized weights: dense everywhere."""
    model = copy.deepcopy(model)
    for name, module in list(model.named_modules()):
        if isinstance(module, QuantizedSupraLinear):
            dense = SupraLinear(dense_linear(module.base_layer, module.base_weight()), module.layer_name)
            for key, value in vars(module).items():
                if key.startswith("supra_") or key == "_active_adapter":
                    setattr(dense, key, value)
            for key in ("supra_values", "supra_L", "supra_R", "supra_indices", "supra_shape"):
                setattr(dense, key, getattr(module, key))
            model.set_submodule(name, dense)
    return model.train(model.training)


def logits(model, ids):
    with torch.no_grad():
        return model(ids).logits


def make_layer(kind, c=24, b=64, dtype=torch.float32, bias=True):
    """One quantized layer, and the W̃ that the library's own function gives for it."""
    torch.manual_seed(0)
    plain = nn.Linear(b, c, bias=bias, dtype=dtype)
    if kind == "int8":
        layer = bnb.nn.Linear8bitLt(b, c, bias=bias, has_fp16_weights=False, threshold=6.0).to(dtype)
    else:
        options = {"quant_type": kind, "compress_statistics": kind == "nf4", "compute_dtype": dtype}
        layer = bnb.nn.Linear4bit(b, c, bias=bias, quant_storage=torch.bfloat16, **options).to(dtype)
    layer.load_state_dict(plain.state_dict())
    layer = layer.to("cpu")
    layer.requires_grad_(False)
    return layer


def own_dequantized(layer, dtype):
    if isinstance(layer, bnb.nn.Linear4bit):
        return bnb.functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state)
    scale = layer.weight.SCB if layer.weight.SCB is not None else layer.state.SCB
    return (layer.weight.data.double() * scale.double()[:, None] / 127).to(dtype)


def wrap(layer, dtype=torch.float32, supra_lambda=0.5, dropout=0.0, **changes):
    model = nn.ModuleDict({"layer": layer})
    torch.manual_seed(1)
    knobs = {"target_modules": ["layer"], "supra_lambda": supra_lambda, "lora_dropout": dropout, "task_type": None}
    adapted = get_peft_model(model, config(**{**knobs, **changes}))
    wrapped = adapted.base_model.model["layer"]
    wrapped.weight_dtype = BITSANDBYTES.weight_dtype(layer, dtype)
    return wrapped


# --- the weight


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", KINDS)
def test_the_weight_is_the_librarys_own(kind, dtype):
    layer = make_layer(kind, dtype=dtype)
    found = BITSANDBYTES.dequantize(layer, dtype)
    expected = own_dequantized(layer, dtype)
    assert found.dtype == dtype
    assert found.shape == (24, 64)
    tolerance = {"rtol": 1e-6, "atol": 0} if dtype == torch.float32 else {"rtol": 0, "atol": 0}
    torch.testing.assert_close(found, expected, **tolerance)
    assert found.data_ptr() != BITSANDBYTES.dequantize(layer, dtype).data_ptr()
    layer.eval()(torch.zeros(3, 64, dtype=dtype))  # 8-bit layers move their scales at the first forward
    assert torch.equal(BITSANDBYTES.dequantize(layer, dtype), found)


def test_layers_that_are_none_of_bitsandbytes_have_no_bits():
    assert [BITSANDBYTES.bits(make_layer(kind)) for kind in KINDS] == [4, 4, 8]
    assert BITSANDBYTES.bits(nn.Linear(2, 2)) is None
    assert BITSANDBYTES.bits(nn.ReLU()) is None


def test_a_4_bit_layer_never_rewrites_its_weight_on_a_cpu(load, ids):
    model = load("nf4")
    for module in model.modules():
        if isinstance(module, bnb.nn.Linear4bit):
            module.support_avx512bf16_for_cpu = True
    before = model_fingerprint(model, read_parameter)
    norms = calibrate(model, [ids], progress=False)
    assert model_fingerprint(model, read_parameter) == before == norms.fingerprint
    adapted = adapt(model, activation_norms=norms, mask_score="wanda")
    with adapted.disable_adapter():
        logits(adapted, ids)
    assert model_fingerprint(adapted.base_model.model, read_parameter) == before


# --- one layer against float64 autograd on the dequantized weight


@pytest.mark.parametrize("supra_lambda", [0, 0.5, 1])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_forward_and_all_gradients_are_exact_for_the_dequantized_weight(kind, bias, supra_lambda):
    layer = wrap(make_layer(kind, bias=bias), supra_lambda=supra_lambda)
    if bias:
        layer.base_layer.bias.requires_grad_()
    W = layer.base_weight().double()
    x = torch.randn(2, 5, 64, generator=torch.Generator().manual_seed(2)).requires_grad_()
    dy = torch.randn(2, 5, 24, generator=torch.Generator().manual_seed(3))
    y = layer(x)
    leaves = {"x": x} | ({"bias": layer.base_layer.bias} if bias else {})
    leaves |= {
        store: getattr(layer, store)["default"]
        for store in ("supra_values", "supra_L", "supra_R")
        if "default" in getattr(layer, store)
    }
    found = dict(zip(leaves, torch.autograd.grad(y, list(leaves.values()), dy), strict=True))

    exact = {name: leaf.detach().double().requires_grad_() for name, leaf in leaves.items()}
    total = W
    if "supra_values" in exact:
        indices = layer.supra_indices["default"].long()
        total = W + torch.zeros(W.numel()).double().index_put((indices,), exact["supra_values"]).view_as(W)
    if "supra_L" in exact:
        total = total + layer.supra_scaling["default"] * exact["supra_L"] @ exact["supra_R"]
    reference = F.linear(exact["x"], total, exact.get("bias"))
    torch.testing.assert_close(y.double(), reference, rtol=1e-5, atol=1e-5)
    expected = torch.autograd.grad(reference, list(exact.values()), dy.double())
    for (name, gradient), other in zip(found.items(), expected, strict=True):
        assert gradient.dtype == torch.float32
        error = float((gradient.double() - other).norm() / other.norm())
        assert error < 2e-6, (name, error)


@pytest.mark.parametrize("kind", KINDS)
def test_in_bf16_gradients_are_within_its_rounding_and_summed_in_fp32(kind):
    layer = wrap(make_layer(kind, dtype=torch.bfloat16), dtype=torch.bfloat16, supra_lambda=0)
    assert layer.base_weight().dtype == torch.bfloat16
    x = torch.randn(40, 64, generator=torch.Generator().manual_seed(2)).bfloat16().requires_grad_()
    dy = torch.randn(40, 24, generator=torch.Generator().manual_seed(3)).bfloat16()
    layer(x).backward(dy)
    values = layer.supra_values["default"]
    exact = (dy.double().t() @ x.detach().double()).view(-1)[layer.supra_indices["default"]]
    assert values.grad.dtype == torch.float32
    # The operands are bf16 already: nothing else is rounded.
    torch.testing.assert_close(values.grad.double(), exact, rtol=1e-5, atol=1e-5)
    effective = layer.weight_with(["default"]).double()
    torch.testing.assert_close(x.grad.double(), dy.double() @ effective, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("kind", KINDS)
def test_dropout_and_autocast(kind):
    layer = wrap(make_layer(kind), dropout=0.5).train()
    plain = SupraLinear(dense_linear(layer.base_layer, layer.base_weight()), "layer")
    plain._active_adapter = ["default"]
    for key in ("values", "L", "R", "indices", "scaling", "dropout"):
        setattr(plain, f"supra_{key}", getattr(layer, f"supra_{key}"))
    if kind != "int8":
        layer.base_layer.compute_dtype = None  # else the layer's own dtype goes before autocast's

    def run(module, autocast):
        x = torch.randn(3, 64, generator=torch.Generator().manual_seed(2)).requires_grad_()
        torch.manual_seed(7)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            y = module(x).float()
        leaves = [x, *(getattr(module, f"supra_{key}")["default"] for key in ("values", "L", "R"))]
        return [y, *torch.autograd.grad(y.sum(), leaves)]

    plain.train()
    for autocast in (False, True):
        for one, other in zip(run(layer, autocast), run(plain, autocast), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    assert not torch.equal(run(layer, False)[0], run(layer.eval(), False)[0])


@pytest.mark.parametrize("kind", KINDS)
def test_the_result_has_the_dtype_of_the_input(kind):
    layer = wrap(make_layer(kind, dtype=torch.bfloat16), dtype=torch.bfloat16)
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(3, 64).to(dtype).requires_grad_()
        y = layer(x)
        assert y.dtype == dtype == layer.base_layer(x).dtype
        y.sum().backward()


@pytest.mark.parametrize("kind", KINDS)
def test_between_the_passes_nothing_of_the_weights_size_is_kept(kind):
    layer = wrap(make_layer(kind, c=96, b=128))
    kept = []
    x = torch.randn(3, 128, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: (kept.append(tensor.numel()), tensor)[1], lambda t: t):
        y = layer(x)
    assert kept
    assert max(kept) < 96 * 128 / 4
    y.sum().backward()


# --- a whole model


@pytest.mark.parametrize("score", ["wanda", "magnitude", "random"])
@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_supports_are_those_of_the_dequantized_weights(load, ids, kind, score):
    model = load(kind, torch.bfloat16)
    norms = calibrate(model, [ids], progress=False) if score == "wanda" else None
    knobs = {"sparse_direction": "random"} if score == "random" else {"mask_score": score}
    adapted = adapt(model, supra_lambda=0, activation_norms=norms, **knobs)
    assert len(layers(adapted)) == 14
    for name, layer in layers(adapted).items():
        assert isinstance(layer, QuantizedSupraLinear)
        W, indices = own_dequantized(layer.base_layer, torch.bfloat16), layer.supra_indices["default"]
        count = layer.supra_budget["default"].sparse_count
        assert count == 4 * (W.shape[0] + W.shape[1]) == indices.numel()
        if score == "random":
            expected = random_support(W.numel(), count, seed=0, layer=name)
        else:
            scores = magnitude_score(W) if norms is None else wanda_score(W, norms[name])
            expected = select_support(scores, count, "bottom")
        assert torch.equal(indices, expected), name


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_norms_are_saved_and_taken_by_the_same_quantized_model_alone(load, ids, kind, tmp_path):
    norms = calibrate(load(kind), [ids], progress=False)
    norms.save(tmp_path / "norms.safetensors")
    again = ActivationNorms.load(tmp_path / "norms.safetensors")
    again.check_model(load(kind), read=read_parameter)
    adapt(load(kind), activation_norms=again, mask_score="wanda")
    others = [None, *(other for other in KINDS if other != kind)]
    for other in others:
        with pytest.raises(ValueError, match="made for another model"):
            again.check_model(load(other), read=read_parameter)


@pytest.mark.parametrize("checkpointing", [None, False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_model_computes_and_learns_as_its_dequantized_copy(load, ids, kind, checkpointing):
    model = adapt(load(kind), lora_dropout=0.2).train()
    plain = dense_copy(model)
    if checkpointing is not None:
        model.base_model.model.gradient_checkpointing_enable({"use_reentrant": checkpointing})
        model.enable_input_require_grads()
    results = []
    for each in (model, plain):
        torch.manual_seed(5)
        loss = each(ids, labels=ids).loss
        loss.backward()
        results.append((loss, {n: p.grad for n, p in each.named_parameters() if p.requires_grad}))
    (loss, grads), (other_loss, other_grads) = results
    torch.testing.assert_close(loss, other_loss, rtol=1e-5, atol=1e-5)
    assert grads.keys() == other_grads.keys()
    assert len(grads) == 42
    for name, grad in grads.items():
        assert float((grad - other_grads[name]).norm() / other_grads[name].norm()) < 1e-4, name
    assert all(
        type(p).__name__ in ("Params4bit", "Int8Params") for n, p in model.named_parameters() if "base_layer.w" in n
    )


@pytest.mark.parametrize("kind", KINDS)
def test_training_lowers_the_loss_and_leaves_the_base_alone(load, ids, kind):
    model = get_peft_model(load(kind), config(init_weights=True)).train()
    before = model_fingerprint(model.base_model.model, read_parameter)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _ in range(10):
        loss = model(ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.25
    assert model_fingerprint(model.base_model.model, read_parameter) == before


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_step_0_is_the_4_bit_base(load, ids, kind):
    base = load(kind)
    before = logits(base, ids)
    adapted = get_peft_model(base, config(init_weights=True)).eval()
    torch.testing.assert_close(logits(adapted, ids), before, rtol=1e-5, atol=1e-5)
    with adapted.disable_adapter():
        assert torch.equal(logits(adapted, ids), before)


def test_step_0_of_8_bits_is_the_plain_product_and_disabling_gives_llm_int8(load, ids):
    base = load("int8")
    int8 = logits(base, ids)
    adapted = get_peft_model(base, config(init_weights=True)).eval()
    plain = logits(dense_copy(adapted), ids)
    torch.testing.assert_close(logits(adapted, ids), plain, rtol=1e-5, atol=1e-5)
    with adapted.disable_adapter():
        assert torch.equal(logits(adapted, ids), int8)
    assert not torch.equal(int8, plain)


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_several_adapters_switch_add_and_delete(load, ids, kind):
    model = adapt(load(kind))
    one = logits(model, ids)
    torch.manual_seed(2)
    model.add_adapter("other", config(sparse_direction="top"))
    model.set_adapter("other")
    other = logits(model, ids)
    assert not torch.equal(one, other)
    torch.testing.assert_close(other, logits(dense_copy(model), ids), rtol=1e-4, atol=1e-5)
    model.base_model.set_adapter(["default", "other"])
    both = logits(model, ids)
    torch.testing.assert_close(both, logits(dense_copy(model), ids), rtol=1e-4, atol=1e-5)
    model(ids, labels=ids).loss.backward()
    model.set_adapter("default")
    assert torch.equal(logits(model, ids), one)
    model.delete_adapter("other")
    assert torch.equal(logits(model, ids), one)


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_save_and_load_on_a_quantized_base(load, ids, kind, tmp_path):
    model = adapt(load(kind))
    expected = logits(model, ids)
    model.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "adapter_config.json").read_text())["base_quantization"]
    assert saved["load_in_4bit"] is (kind == "nf4")
    assert saved["load_in_8bit"] is (kind == "int8")
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="the adapter was trained on a base")
        loaded = PeftModel.from_pretrained(load(kind), tmp_path)
    assert torch.equal(logits(loaded, ids), expected)
    assert {name: layer.supra_indices["default"].dtype for name, layer in layers(loaded).items()} == dict.fromkeys(
        layers(model), torch.int32
    )
    # What it says is what from_pretrained takes.
    again = AutoModelForCausalLM.from_pretrained(
        model.base_model.model.config._name_or_path,
        dtype=torch.float32,
        quantization_config=BitsAndBytesConfig(**saved),
    )
    assert torch.equal(logits(PeftModel.from_pretrained(again, tmp_path), ids), expected)


@pytest.mark.parametrize(
    ("kind", "then", "here"), [("nf4", "4 bits .nf4, with", "not quantized"), ("int8", "8 bits", "")]
)
def test_loading_on_another_base_is_told(load, ids, kind, then, here, tmp_path):
    adapt(load(kind)).save_pretrained(tmp_path)
    with pytest.warns(UserWarning, match=f"trained on a base that was quantized to {then}.*this one is .*{here}"):
        PeftModel.from_pretrained(load(None if kind == "nf4" else "fp4"), tmp_path)


def test_an_adapter_of_a_plain_base_on_a_quantized_one_is_told(load, tmp_path):
    adapt(load(None)).save_pretrained(tmp_path)
    with pytest.warns(UserWarning, match="on a base that was not quantized, this one is quantized to 8 bits"):
        PeftModel.from_pretrained(load("int8"), tmp_path)


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_copies_make_what_is_bound_to_tensors_anew(load, ids, kind):
    model = adapt(load(kind)).train()
    model(ids, labels=ids).loss.backward()  # what is made per layer is made now
    model.eval()
    expected = logits(model, ids)
    assert torch.equal(logits(copy.deepcopy(model), ids), expected)
    assert all(layer._gradients for layer in layers(model).values())

    layer = wrap(make_layer(kind))
    x = torch.randn(3, 64)
    layer(x).sum().backward()
    again = copy.deepcopy(layer)  # bitsandbytes' own 4-bit layers lose their scales in a pickle
    assert layer._gradients
    assert not again._gradients
    assert torch.equal(again(x), layer(x))


@pytest.mark.parametrize("kind", KINDS)
def test_a_cast_of_the_model_leaves_the_quantized_weights_alone(load, ids, kind):
    model = adapt(load(kind))
    before = {name: layer.base_weight() for name, layer in layers(model).items()}
    model.to("cpu", dtype=torch.float16)  # what axolotl inference does with a dtype of its own
    for name, layer in layers(model).items():
        assert torch.equal(layer.base_weight(), before[name])
        assert layer.supra_values["default"].dtype == torch.float16
    assert torch.isfinite(logits(model, ids)).all()


# --- merging


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("supra_lambda", [0, 0.5, 1])
@pytest.mark.parametrize("kind", KINDS)
def test_merge_and_unload_gives_a_dense_model(load, ids, kind, supra_lambda, dtype, tmp_path):
    model = adapt(load(kind, dtype), supra_lambda=supra_lambda)
    before = logits(model, ids)
    weights = {
        name: merged_weight(
            own_dequantized(layer.base_layer, dtype), layer.sparse_parts(["default"]), layer.low_rank_parts(["default"])
        )
        for name, layer in layers(model).items()
    }
    merged = model.merge_and_unload(safe_merge=True)
    assert isinstance(merged, LlamaForCausalLM)
    assert all(type(each) is nn.Parameter and each.dtype == dtype for each in merged.parameters())
    for name, weight in weights.items():
        layer = merged.get_submodule(name)
        assert type(layer) is nn.Linear
        exact = kind != "int8" or dtype == torch.bfloat16
        assert torch.equal(layer.weight, weight) if exact else torch.allclose(layer.weight, weight, rtol=1e-6)
    after = logits(merged, ids)
    if supra_lambda == 0 and dtype == torch.bfloat16:
        assert torch.equal(after, before)  # the bits that training used
    torch.testing.assert_close(after, before, rtol=1e-3, atol=1e-4 if dtype == torch.float32 else 5e-2)

    assert not hasattr(merged.config, "quantization_config")
    assert not hasattr(merged, "hf_quantizer")
    assert not getattr(merged, "is_loaded_in_4bit", False)
    assert not getattr(merged, "is_loaded_in_8bit", False)
    assert merged.to(dtype=torch.bfloat16).dtype == torch.bfloat16  # what axolotl merge-lora does next
    merged.save_pretrained(tmp_path)
    assert "quantization_config" not in json.loads((tmp_path / "config.json").read_text())
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    loaded = again.state_dict()
    assert all(torch.equal(tensor, loaded[name]) for name, tensor in merged.state_dict().items())


def test_layers_that_are_quantized_and_not_adapted_are_dequantized_too(load, ids):
    model = adapt(load("nf4"), target_modules=["q_proj"])
    expected = logits(model, ids)
    merged = model.merge_and_unload()
    assert not any(is_quantized(module) for module in merged.modules())
    torch.testing.assert_close(logits(merged, ids), expected, rtol=1e-3, atol=1e-4)


def test_layers_that_were_left_unquantized_are_adapted_as_ever(load, ids):
    skipped = ["lm_head", "q_proj"]
    model = adapt(load("nf4", llm_int8_skip_modules=skipped), mask_score="magnitude")
    assert {type(layer) for name, layer in layers(model).items() if name.endswith("q_proj")} == {SupraLinear}
    assert {type(layer) for name, layer in layers(model).items() if not name.endswith("q_proj")} == {
        QuantizedSupraLinear
    }
    expected = logits(model, ids)
    torch.testing.assert_close(logits(dense_copy(model), ids), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(logits(model.merge_and_unload(), ids), expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(("kind", "bits"), [("nf4", 4), ("int8", 8)])
def test_merging_in_place_is_refused_and_changes_nothing(load, ids, kind, bits):
    skipped = {"llm_int8_skip_modules": ["lm_head", "q_proj"]}  # a dense layer comes first
    model = adapt(load(kind, **skipped))
    expected = logits(model, ids)
    message = rf"k_proj: its weight is quantized to {bits} bits; .*merge_and_unload\(\).*load the base model unquant"
    with pytest.raises(RuntimeError, match=message):
        model.merge_adapter()
    with pytest.raises(RuntimeError, match="quantized to"):
        layers(model)["model.layers.0.self_attn.k_proj"].merge()
    assert not any(layer.merged for layer in layers(model).values())
    assert torch.equal(logits(model, ids), expected)
    with pytest.warns(UserWarning, match="Already unmerged"):
        model.unmerge_adapter()


@pytest.mark.parametrize("kind", [None, "nf4", "int8"])
@pytest.mark.parametrize("in_place", [False, True])
def test_a_nan_in_a_late_layer_leaves_every_layer_as_it_was(load, ids, kind, in_place):
    model = adapt(load(kind))
    last = layers(model)["model.layers.1.mlp.down_proj"]
    value = last.supra_values["default"].data
    before, kept = logits(model, ids), value[3].item()
    value[3] = float("nan")
    if in_place and kind is None:
        with pytest.raises(ValueError, match=r"layers\.1\.mlp\.down_proj: NaNs detected"):
            model.merge_adapter(safe_merge=True)
    elif not in_place:
        with pytest.raises(ValueError, match=r"layers\.1\.mlp\.down_proj: NaNs detected"):
            model.merge_and_unload(safe_merge=True)
    assert len(layers(model)) == 14
    assert not any(layer.merged for layer in layers(model).values())
    value[3] = kept
    assert torch.equal(logits(model, ids), before)


def test_merging_named_adapters_and_unloading(load, ids):
    model = adapt(load("nf4"))
    torch.manual_seed(2)
    model.add_adapter("other", config(sparse_direction="top"))
    model.set_adapter("other")
    expected = logits(model, ids)
    merged = copy.deepcopy(model).merge_and_unload(adapter_names=["other"])
    torch.testing.assert_close(logits(merged, ids), expected, rtol=1e-3, atol=1e-4)
    with model.disable_adapter():
        plain = logits(model, ids)
    unloaded = model.unload()
    assert torch.equal(logits(unloaded, ids), plain)
    assert unloaded.is_loaded_in_4bit
    assert unloaded.config.quantization_config.load_in_4bit


def test_delta_weight_has_the_shape_of_the_layer(load):
    layer = layers(adapt(load("nf4")))["model.layers.0.mlp.down_proj"]
    assert layer.get_delta_weight("default").shape == (64, 96)


def test_a_merge_into_an_adapter_that_is_not_loaded_is_refused_before_anything_changes(load):
    model = get_peft_model(load("nf4"), config(support="saved"))
    with pytest.raises(RuntimeError, match="not loaded"):
        model.merge_and_unload()
    assert len(layers(model)) == 14


# --- the kernels and the compiler


@pytest.mark.parametrize("kind", KINDS)
def test_the_kernels_that_keep_w_plus_u_in_the_weight_refuse_a_quantized_one(kind):
    layer = make_layer(kind)
    assert "no plain contiguous tensor" in unsupported_tensor_reason(torch.zeros(2, 64), layer.weight, [], [])
    assert wrap(layer).unwritten_kernel_layer(torch.zeros(2, 64)) is None


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_torch_compile_breaks_its_graph_and_computes_the_same(kind):
    layer = wrap(make_layer(kind)).train()
    block = nn.Sequential(nn.Linear(64, 64), layer)
    x = torch.randn(3, 64)

    def run(module):
        y = module(x).sum()
        return [y, *torch.autograd.grad(y, [layer.supra_values["default"], block[0].weight])]

    compiled = torch.compile(block, backend="aot_eager")
    for one, other in zip(run(compiled), run(block), strict=True):
        torch.testing.assert_close(one, other)


# --- what is refused


class QuantLinear(nn.Module):
    """What GPTQ and AWQ layers look like."""

    def __init__(self):
        super().__init__()
        self.in_features, self.out_features = 8, 8
        self.register_buffer("qweight", torch.zeros(1, 8, dtype=torch.int32))

    def forward(self, x):
        return x


def torchao_layer():
    torchao = pytest.importorskip("torchao.quantization")
    model = nn.Sequential(nn.Linear(64, 64))
    torchao.quantize_(model, torchao.Int8WeightOnlyConfig())
    return model[0]


@pytest.mark.parametrize(
    ("layer", "kind"), [(QuantLinear, "QuantLinear"), (torchao_layer, "Linear, its weight a ")], ids=["gptq", "torchao"]
)
def test_layers_that_other_libraries_quantized_are_refused_by_name(layer, kind):
    model = nn.Sequential(nn.Linear(64, 64), layer())
    with pytest.raises(TypeError, match=rf"^1: the layer is quantized by \w+ \({kind}.*bitsandbytes.*load_in_4bit"):
        get_peft_model(model, config(target_modules=["0"], task_type=None))
    assert type(model[0]) is nn.Linear


@pytest.mark.parametrize("method", ["gptq", "awq", "hqq", "torchao", "fp8", "compressed-tensors"])
def test_a_base_that_says_another_method_is_refused(llama, method):
    llama.config.quantization_config = {"quant_method": method, "bits": 4}
    with pytest.raises(TypeError, match=f"quantized by {method}, says its quantization_config.*load_in_4bit"):
        get_peft_model(llama, config())


def test_the_layer_is_named_where_its_class_shows_the_method(llama):
    class HqqLinear(nn.Linear):
        pass

    llama.model.layers[0].mlp.up_proj = HqqLinear(64, 96)
    llama.config.quantization_config = {"quant_method": "hqq"}
    with pytest.raises(TypeError, match=r"layers\.0\.mlp\.up_proj: the layer is quantized by hqq \(HqqLinear\)"):
        get_peft_model(llama, config())


def unquantized(kind):
    if kind == 4:
        return bnb.nn.Linear4bit(8, 8)
    return bnb.nn.Linear8bitLt(8, 8, has_fp16_weights=kind == 16)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (4, "not quantized yet: move the model"),
        (8, "not quantized yet: move the model"),
        (16, "llm_int8_has_fp16_weight"),
    ],
)
def test_layers_of_bitsandbytes_without_a_frozen_quantized_weight_are_refused(kind, reason):
    model = nn.Sequential(unquantized(kind), nn.Linear(8, 8))
    with pytest.raises(TypeError, match=rf"^0: .*{reason}"):
        get_peft_model(model, config(r0=1, target_modules=["0", "1"], task_type=None))


def test_another_layer_of_bitsandbytes_is_refused():
    class Odd(bnb.nn.Linear4bit):
        def forward(self, x):
            return x

    model = nn.Sequential(Odd(64, 64)).to("cpu")
    with pytest.raises(TypeError, match=r"^0: Odd computes something else"):
        get_peft_model(model, config(target_modules=["0"], task_type=None))


class PackedParameter(nn.Parameter):
    """int8 codes of a library that only this file knows."""


class PackedLinear(nn.Linear):
    """y = x·(codes/64)ᵀ + bias."""

    def __init__(self, c, b):
        super().__init__(b, c)
        codes = torch.randint(-64, 64, (c, b), dtype=torch.int8)
        self.weight = PackedParameter(codes, requires_grad=False)

    def forward(self, x):
        return F.linear(x, self.weight.to(x.dtype) / 64, self.bias)


class Packed(Backend):
    name = "packed"
    loaded_with = "a packed file"

    def bits(self, layer):
        return 8 if self.owns_parameter(getattr(layer, "weight", None)) else None

    def owns_parameter(self, parameter):
        return type(parameter) is PackedParameter

    def unsupported_reason(self, layer):
        return None

    def dequantize(self, layer, dtype):
        return layer.weight.data.to(dtype) / 64

    def weight_dtype(self, layer, default):
        return default

    def identifying_tensors(self, parameter):
        return [parameter.detach().reshape(-1).view(torch.uint8)]

    def prepare(self, model):
        pass

    def remove_marks(self, model):
        model.is_packed = False

    def plain_settings(self, config):
        return {"packed": True}

    def transformers_config(self, settings):
        return dict(settings)

    def owns_settings(self, settings):
        return bool(settings.get("packed"))

    def weight_settings(self, settings):
        return dict(settings)

    def describe(self, settings):
        return "8 bits (packed)"

    def stored_bits(self, settings):
        return 8

    def stored_format(self, settings):
        return "packed"

    def stored_bytes(self, format_name, weights, rows):
        return weights if format_name == "packed" else None


def test_a_new_library_is_one_entry_of_the_registry():
    BACKENDS.append(Packed())
    try:
        torch.manual_seed(0)
        base = PackedLinear(24, 64)
        assert type(backend_of(base)) is Packed
        layer = wrap(base)
        assert isinstance(layer, QuantizedSupraLinear)
        assert torch.equal(layer.base_weight(), base.weight.float() / 64)
        expected = F.linear(torch.ones(2, 64), layer.weight_with(["default"]), base.bias)
        torch.testing.assert_close(layer(torch.ones(2, 64)), expected)
        layer(torch.ones(2, 64)).sum().backward()
        assert layer.supra_values["default"].grad.abs().sum() > 0
        assert stored_bytes("packed", 10.0, 1.0) == 10.0
    finally:
        BACKENDS.pop()


@pytest.mark.parametrize("bias", [False, True])
def test_an_nf4_layer_is_made_of_a_weight(bias):
    torch.manual_seed(0)
    weight, bias = torch.randn(24, 64), torch.randn(24) if bias else None
    layer = nf4_linear(weight, bias, torch.device("cpu"))
    assert BITSANDBYTES.unsupported_reason(layer) is None
    found = BITSANDBYTES.dequantize(layer, torch.float32)
    assert found.dtype == torch.float32
    assert (found - weight).norm() < 0.15 * weight.norm()
    x = torch.randn(3, 64)
    torch.testing.assert_close(layer(x), F.linear(x, found, bias), rtol=1e-4, atol=1e-4)


def test_a_format_that_no_library_has_is_refused():
    with pytest.raises(ValueError, match="'int3' is not a format of bitsandbytes"):
        stored_bytes("int3", 1.0, 1.0)
