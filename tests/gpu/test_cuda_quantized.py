"""4-bit and 8-bit bases on a GPU: exact gradients without a dense one, merges to the bit, and memory beside QLoRA's."""

import copy
import json
import subprocess
import sys
from dataclasses import asdict

import pytest

pytest.importorskip("triton")

import bitsandbytes as bnb
import torch
from peft import PeftModel, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from axolotl_supertune import SupraConfig, calibrate
from axolotl_supertune.bench.measurement import Measurement
from axolotl_supertune.method.cuda_memory import PeakMemory
from axolotl_supertune.ops.recomputed_weight import BlockGradient, SampledGradient
from axolotl_supertune.tuner.quantization.linear import QuantizedSupraLinear

NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
NF4 |= {"bnb_4bit_compute_dtype": torch.bfloat16, "bnb_4bit_quant_storage": torch.bfloat16}
KINDS = {"nf4": NF4, "int8": {"load_in_8bit": True}}
MIB = 2**20


def draw(*shape, seed=7, dtype=torch.bfloat16):
    return torch.randn(*shape, generator=torch.Generator("cuda").manual_seed(seed), device="cuda").to(dtype)


def make_layer(kind, c, b, supra_lambda=0.0):
    options = {"quant_storage": torch.bfloat16, "compute_dtype": torch.bfloat16}
    if kind == "nf4":
        layer = bnb.nn.LinearNF4(b, c, bias=False, **options)
    else:
        layer = bnb.nn.Linear8bitLt(b, c, bias=False, has_fp16_weights=False, threshold=6.0)
    layer.weight.data = (draw(c, b) * 0.02).cpu()
    knobs = {"mask_score": "magnitude", "r0": 8, "supra_lambda": supra_lambda, "lora_dropout": 0.0}
    config = SupraConfig(target_modules=["layer"], init_weights=False, **knobs)
    model = nn.ModuleDict({"layer": layer}).to("cuda")
    layer = get_peft_model(model, config).base_model.model["layer"]
    layer.weight_dtype = torch.bfloat16
    return layer


def relative_error(one, other):
    return float((one.double() - other.double()).norm() / other.double().norm())


@pytest.mark.parametrize("tokens", [1, 7, 3136, 20000])
@pytest.mark.parametrize(("c", "b"), [(1024, 4096), (4096, 1024)])
def test_sampled_products_on_their_own(c, b, tokens):
    indices = torch.randperm(c * b, generator=torch.Generator().manual_seed(1))[:40000].sort().values.int().cuda()
    x, dy = draw(tokens, b), draw(tokens, c, seed=8)
    exact = (dy.double().t() @ x.double()).view(-1)[indices]
    assert relative_error(SampledGradient(indices, (c, b))(x, dy), exact) < 1e-5
    # The dense product's own error, which grows with the number of tokens: 2.3e-5 for 20,000 on an H200.
    assert relative_error(BlockGradient(indices, (c, b))(x, dy), exact) < 5e-5


@pytest.mark.parametrize("supra_lambda", [0.0, 0.5])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_exact_for_the_dequantized_weight(kind, supra_lambda):
    layer = make_layer(kind, 1024, 2048, supra_lambda)
    x, dy = draw(300, 2048).requires_grad_(), draw(300, 1024, seed=8)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        y = layer(x)
    y.backward(dy)
    assert type(layer._gradients["default"][1]) is SampledGradient
    values, indices = layer.supra_values["default"], layer.supra_indices["default"]
    exact = (dy.double().t() @ x.detach().double()).view(-1)[indices]
    assert relative_error(values.grad, exact) < 1e-5
    total = layer.weight_with(["default"]).double()
    assert relative_error(y, x.detach().double() @ total.t()) < 2e-2
    assert relative_error(x.grad, dy.double() @ total) < 2e-2
    if supra_lambda:
        L, R = layer.supra_L["default"], layer.supra_R["default"]
        dR = layer.supra_scaling["default"] * L.detach().double().t() @ dy.double().t() @ x.detach().double()
        assert relative_error(R.grad, dR) < 2e-2


@pytest.mark.parametrize("kind", KINDS)
def test_neither_pass_makes_more_of_the_weights_size_than_the_weight(kind):
    layer = make_layer(kind, 14336, 4096)
    x, dy = draw(256, 4096).requires_grad_(), draw(256, 14336, seed=8)
    layer(x).backward(dy)  # what is made once per layer is made
    weight = 14336 * 4096 * 2
    forward = PeakMemory(torch.device("cuda"))
    y = layer(x)
    # The activations of these 256 tokens take 9 MiB, kept is the input.
    assert torch.cuda.memory_allocated() - forward.before < 16 * MIB
    assert forward.read() - forward.before < weight + 40 * MIB
    backward = PeakMemory(torch.device("cuda"))
    y.backward(dy)
    assert backward.read() - forward.before < weight + 60 * MIB


@pytest.fixture
def load(tiny_llama, tmp_path):
    tiny_llama(hidden_size=128, intermediate_size=256).save_pretrained(tmp_path / "base")

    def load(kind):
        config = BitsAndBytesConfig(**KINDS[kind])
        return AutoModelForCausalLM.from_pretrained(
            tmp_path / "base", dtype=torch.bfloat16, quantization_config=config, device_map={"": 0}
        )

    return load


@pytest.mark.parametrize("supra_lambda", [0.0, 0.5])
@pytest.mark.parametrize("kind", KINDS)
def test_a_model_calibrates_trains_saves_loads_and_merges(load, ids, tmp_path, kind, supra_lambda):
    ids = ids.cuda()
    model = load(kind)
    norms = calibrate(model, [ids], progress=False)
    config = SupraConfig(r0=4, supra_lambda=supra_lambda, activation_norms=norms, task_type="CAUSAL_LM")
    model = get_peft_model(model, config).train()
    assert sum(isinstance(module, QuantizedSupraLinear) for module in model.modules()) == 14
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-2)
    losses = []
    for _ in range(10):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = model(ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.1
    model.eval().save_pretrained(tmp_path / "adapter")
    with torch.no_grad():
        trained = model(ids).logits
        loaded = PeftModel.from_pretrained(load(kind), tmp_path / "adapter")
        assert torch.equal(loaded(ids).logits, trained)
        weights = {
            module.layer_name: module.weight_with(["default"])
            for module in model.modules()
            if isinstance(module, QuantizedSupraLinear)
        }
        merged = copy.deepcopy(model).merge_and_unload(safe_merge=True)
        for name, weight in weights.items():
            assert torch.equal(merged.get_submodule(name).weight, weight)
        if supra_lambda == 0:
            assert torch.equal(merged(ids).logits, trained)
        assert relative_error(merged(ids).logits, trained) < 2e-2
    assert not hasattr(merged.config, "quantization_config")


def measured(method, **options):
    """A row of the bench, from a process of its own."""
    measurement = Measurement(method, device="cuda", steps=3, warmup=2, **options)
    command = [sys.executable, "-m", "axolotl_supertune.bench.worker", json.dumps(asdict(measurement))]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    row = json.loads(output.strip().rpartition("\n")[2])
    assert row["status"] == "ok", row
    print(f"{method}: peak {row['peak_gib']:.2f} GiB, step {row['step_ms']:.1f} ms")
    return row


@pytest.mark.parametrize("checkpointing", [False, True])
def test_qsupra_takes_no_more_memory_than_qlora(checkpointing):
    options = {"model": "llama3.2-1b", "batch_size": 8, "autocast": True, "gradient_checkpointing": checkpointing}
    qlora = measured("qlora", **options)["peak_gib"]
    for method in ("qsupra", "qsuper"):
        assert measured(method, **options)["peak_gib"] <= 1.02 * qlora


def test_an_8b_model_trains_within_24_gib():
    if torch.cuda.mem_get_info()[1] < 24 * 2**30:
        pytest.skip("needs a GPU of 24 GiB or more")
    options = {"model": "llama3-8b", "batch_size": 16, "autocast": True, "gradient_checkpointing": True}
    row = measured("qsupra", memory_limit=24.0, **options)
    assert row["peak_gib"] < 24
    assert row["trainable"] <= 20_971_520
