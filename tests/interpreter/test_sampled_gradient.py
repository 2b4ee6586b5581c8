"""`SampledGradient`: dU by sampled products for layers whose weight is recomputed."""

import pytest

pytest.importorskip("triton")

import bitsandbytes as bnb
import torch
from kernel_cases import SUPPORTS, make_support, relative_error
from peft import get_peft_model
from torch import nn

from axolotl_supertune import SupraConfig
from axolotl_supertune.method import sizes
from axolotl_supertune.method.sizes import KERNELS_VARIABLE
from axolotl_supertune.ops import Sparse, dispatch
from axolotl_supertune.ops.recomputed_weight import BlockGradient, SampledGradient, recomputed_weight_linear

SHAPES = [(16, 9), (9, 16), (2, 2), (33, 70)]


def operands(c, b, tokens, dtype=torch.float32):
    random = torch.Generator().manual_seed(3)
    return [torch.randn(tokens, width, generator=random).to(dtype) for width in (b, c)]


@pytest.mark.parametrize("kind", SUPPORTS)
@pytest.mark.parametrize(("c", "b"), SHAPES)
def test_equals_the_gradient_in_blocks(c, b, kind):
    indices = make_support(c, b, min(40, c * b // 2), kind)
    x, dy = operands(c, b, 5)
    found = SampledGradient(indices, (c, b))(x, dy)
    assert found.shape == indices.shape
    assert relative_error(found, BlockGradient(indices, (c, b))(x.double(), dy.double())) < 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_sums_in_fp32_whatever_the_operands(dtype):
    indices = make_support(16, 9, 40)
    x, dy = operands(16, 9, 70, dtype)
    found = SampledGradient(indices, (16, 9))(x, dy)
    assert found.dtype == torch.float32
    assert relative_error(found, BlockGradient(indices, (16, 9))(x.double(), dy.double())) < 1e-6


def test_long_inputs_are_taken_a_piece_at_a_time(monkeypatch):
    monkeypatch.setattr(sizes, "TOKENS_PER_TRANSPOSE", 64)
    indices = make_support(16, 9, 40)
    x, dy = operands(16, 9, 150)
    found = SampledGradient(indices, (16, 9))(x, dy)
    assert relative_error(found, BlockGradient(indices, (16, 9))(x.double(), dy.double())) < 1e-6


def test_operands_that_are_views_are_copied():
    indices = make_support(16, 9, 40)
    x, dy = operands(16, 9, 6)
    exact = SampledGradient(indices, (16, 9))(x, dy)
    odd = torch.cat([x.new_zeros(1), x.flatten()])[1:].view_as(x)
    assert odd.data_ptr() % 16
    assert torch.equal(SampledGradient(indices, (16, 9))(odd, dy.t().contiguous().t()), exact)


def test_the_whole_layer_and_the_choice():
    indices, values = make_support(16, 9, 40), torch.linspace(-1, 1, 40, requires_grad=True)
    x, dy = operands(16, 9, 6)
    x.requires_grad_()
    weight = torch.randn(16, 9, generator=torch.Generator().manual_seed(5))
    assert dispatch.takes_sampled_products(x, torch.float32, (16, 9), layer="q_proj")
    found = []
    for kind in (SampledGradient, BlockGradient):
        gradient = kind(indices, (16, 9))
        y = recomputed_weight_linear(x, weight.clone, None, [Sparse(values, indices)], [], [gradient], in_place=True)
        found.append([y, *torch.autograd.grad(y, [x, values], dy)])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("supra_lambda", [0, 0.5])
@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_a_quantized_layer_takes_them_alone(kind, supra_lambda, monkeypatch):
    torch.manual_seed(0)
    layer = bnb.nn.LinearNF4(64, 24) if kind == "nf4" else bnb.nn.Linear8bitLt(64, 24, has_fp16_weights=False)
    layer.weight.data.normal_()  # the fixture fills what nobody writes with NaN
    knobs = {"mask_score": "magnitude", "r0": 2, "supra_lambda": supra_lambda, "init_weights": False}
    config = SupraConfig(target_modules=["layer"], lora_dropout=0.0, **knobs)
    model = get_peft_model(nn.ModuleDict({"layer": layer}).to("cpu"), config)
    layer = model.base_model.model["layer"]
    x, dy = operands(24, 64, 5)
    x.requires_grad_()
    leaves = [x, *(each for each in layer.parameters() if each.requires_grad)]
    found = []
    for asked, gradient in (("triton", SampledGradient), ("reference", BlockGradient)):
        monkeypatch.setenv(KERNELS_VARIABLE, asked)
        y = layer(x)
        found.append([y, *torch.autograd.grad(y, leaves, dy)])
        assert type(layer._gradients["default"][1]) is gradient
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
