"""The method on a CUDA device gives what it gives on the CPU."""

import copy
import time

import pytest
import torch
from peft import PeftModel, get_peft_model
from torch import nn

from axolotl_supertune import SupraConfig, calibrate
from axolotl_supertune.method.cuda_memory import PeakMemory
from axolotl_supertune.method.scores import magnitude_score, wanda_score
from axolotl_supertune.method.sizes import KERNELS_VARIABLE
from axolotl_supertune.method.support import select_support
from axolotl_supertune.ops import LowRank, Sparse, effective_weight, sparse_linear


@pytest.mark.parametrize("direction", ["bottom", "top", "hybrid"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_support_is_the_same_on_both_devices_ties_included(direction, dtype):
    weight = (torch.randn(512, 384, generator=torch.Generator().manual_seed(0)) * 0.02).to(dtype)
    norm = torch.rand(384, generator=torch.Generator().manual_seed(1))
    for score in (lambda w: magnitude_score(w), lambda w: wanda_score(w, norm.to(w.device))):
        here = select_support(score(weight), 5000, direction)
        there = select_support(score(weight.cuda()), 5000, direction)
        assert torch.equal(here, there.cpu())


def test_a_model_on_the_cpu_has_its_supports_chosen_on_the_gpu_a_layer_at_a_time(tiny_llama):
    sizes = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 8, "dtype": torch.bfloat16}
    ids = torch.randint(0, 97, (2, 32), generator=torch.Generator().manual_seed(0))
    norms = calibrate(tiny_llama(**sizes), [ids], progress=False)
    found = []
    for device in (None, "cuda"):
        memory = PeakMemory(torch.device("cuda"))
        model = get_peft_model(tiny_llama(**sizes), SupraConfig(activation_norms=norms, support_device=device))
        # The largest layer has 2 MiB; choosing takes 24 bytes an entry of a block beside it.
        peak = memory.read() - memory.before
        assert peak == 0 if device is None else 2 * 2**20 <= peak <= 40 * 2**20
        assert {each.device.type for each in model.state_dict().values()} == {"cpu"}
        found.append({name: each for name, each in model.state_dict().items() if "supra_indices" in name})
    assert found[0].keys() == found[1].keys()
    assert len(found[0]) == 56
    assert all(torch.equal(found[1][name], support) for name, support in found[0].items())


def test_choosing_on_the_gpu_is_faster_than_on_the_cpu():
    """At the shape of Llama-3-70B's gate_proj; `-s` prints the seconds, the copy to the device included."""
    seconds = {}
    layer = nn.Linear(8192, 28672, bias=False, dtype=torch.bfloat16)
    with torch.no_grad():
        layer.weight.normal_(generator=torch.Generator().manual_seed(0)).mul_(0.02)
    for device in ("cpu", "cuda", "cuda"):  # the first on the device starts it up
        knobs = {"mask_score": "magnitude", "target_modules": ["layer"], "support_device": device}
        model = nn.ModuleDict({"layer": nn.Linear(8192, 28672, bias=False, device="meta")})
        model["layer"].weight = layer.weight
        start = time.perf_counter()
        get_peft_model(model, SupraConfig(supra_lambda=0.3, **knobs))
        seconds[device] = time.perf_counter() - start
    print(f"one layer of 8192 x 28672: {seconds['cpu']:.2f} s on the CPU, {seconds['cuda']:.2f} s on the GPU")
    assert seconds["cuda"] < seconds["cpu"]


def parts(device, dtype, dropout=0.0):
    generator = torch.Generator().manual_seed(3)
    c, b, s, r = 48, 80, 700, 5
    make = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    x, weight = make(3, 17, b), make(c, b) * 0.1
    values, L, R = make(s) * 0.1, make(c, r) * 0.1, make(r, b) * 0.1
    indices = torch.randperm(c * b, generator=generator)[:s].sort().values.int()
    moved = [tensor.to(device=device, dtype=dtype) for tensor in (x, weight)]
    trained = [tensor.to(device).requires_grad_() for tensor in (values, L, R)]
    if dtype == torch.float64:
        trained = [tensor.detach().double().requires_grad_() for tensor in trained]
    x, weight = moved[0].requires_grad_(), moved[1]
    sparse = [Sparse(trained[0], indices.to(device))]
    low_rank = [LowRank(trained[1], trained[2], 2.0, dropout)]
    return x, weight, sparse, low_rank, [x, *trained]


def run(device, dtype):
    x, weight, sparse, low_rank, leaves = parts(device, dtype)
    y = sparse_linear(x, weight, None, sparse, low_rank)
    y.backward(torch.linspace(-1, 1, y.numel(), device=device, dtype=y.dtype).view_as(y))
    return [y.detach(), *(leaf.grad for leaf in leaves)]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-4)])
def test_forward_and_all_gradients_match_the_cpu(dtype, tolerance):
    for here, there in zip(run("cpu", dtype), run("cuda", dtype), strict=True):
        assert (here - there.cpu()).norm() <= tolerance * here.norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_gradients_are_fp32_and_close_to_the_exact_ones(dtype):
    exact, found = run("cpu", torch.float64), run("cuda", dtype)
    assert all(gradient.dtype == torch.float32 for gradient in found[2:])
    for reference, gradient in zip(exact, found, strict=True):
        assert (reference - gradient.cpu().double()).norm() <= 2e-2 * reference.norm()


def test_backward_draws_the_mask_of_its_forward():
    x, weight, sparse, low_rank, leaves = parts("cuda", torch.float32, dropout=0.5)
    torch.manual_seed(11)
    y = sparse_linear(x, weight, None, sparse, low_rank)
    torch.rand(1000, device="cuda")
    after = torch.cuda.get_rng_state()
    y.sum().backward()
    assert torch.equal(torch.cuda.get_rng_state(), after)
    ours = [leaf.grad.clone() for leaf in leaves]

    for leaf in leaves:
        leaf.grad = None
    torch.manual_seed(11)
    values, L, R = leaves[1:]
    dense = weight.clone().view(-1).index_add(0, sparse[0].indices.long(), values).view_as(weight)
    dropped = torch.nn.functional.dropout(x, 0.5)
    (x @ dense.t() + (dropped @ R.t()) @ L.t() * 2.0).sum().backward()
    for leaf, gradient in zip(leaves, ours, strict=True):
        torch.testing.assert_close(gradient, leaf.grad, rtol=1e-3, atol=1e-3)


def test_autocast_computes_in_bf16():
    x, weight, sparse, low_rank, leaves = parts("cuda", torch.float32)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        y = sparse_linear(x, weight, None, sparse, low_rank)
    assert y.dtype == torch.bfloat16
    y.float().sum().backward()
    assert all(torch.isfinite(leaf.grad).all() and leaf.grad.dtype == torch.float32 for leaf in leaves)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_super_merge_writes_the_bits_that_training_used(dtype, tiny_llama, ids, tmp_path, monkeypatch):
    model = tiny_llama(dtype=dtype).cuda()
    norms = calibrate(model, [ids], progress=False)
    on_cpu = calibrate(tiny_llama(dtype=torch.float32), [ids], progress=False)
    assert all(torch.allclose(norms[name], on_cpu[name], rtol=0.05) for name in norms.norms)
    adapted = get_peft_model(
        model, SupraConfig(supra_lambda=0, activation_norms=norms, init_weights=False, task_type="CAUSAL_LM")
    )
    ids = ids.cuda()
    before = adapted(ids).logits
    adapted.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(tiny_llama(dtype=dtype).cuda(), tmp_path)
    assert torch.equal(loaded(ids).logits, before)
    layer = loaded.base_model.model.model.layers[0].mlp.down_proj
    trained = effective_weight(layer.get_base_layer().weight, layer.sparse_parts(["default"]))
    merged = copy.deepcopy(loaded).merge_and_unload()
    assert torch.equal(merged.model.layers[0].mlp.down_proj.weight, trained)
    # The kernels' SiLU and torch's differ in fp32's last bit.
    torch.testing.assert_close(merged(ids).logits, before, rtol=1e-5, atol=1e-6)
    monkeypatch.setenv(KERNELS_VARIABLE, "reference")
    plain = PeftModel.from_pretrained(tiny_llama(dtype=dtype).cuda(), tmp_path)
    assert torch.equal(merged(ids).logits, plain(ids).logits)
