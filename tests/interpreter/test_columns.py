"""Groups whose supports touch few input features save only those for backward; gradients are unchanged."""

import pytest
import torch
import torch.nn.functional as F

from axolotl_supertune.ops.fused import GatedMLP, Group, KernelLayer, gated_mlp, linear_group
from axolotl_supertune.ops.inplace_weight import BatchedWriter, WeightSlot
from axolotl_supertune.ops.sampling_plan import few_columns, make_sampling_plan


def make_slot(c, b, columns, seed):
    random = torch.Generator().manual_seed(seed)
    rows = torch.randint(c, (25,), generator=random)
    places = torch.tensor(columns)[torch.randint(len(columns), (25,), generator=random)]
    indices = (rows * b + places).unique().int()
    weight = torch.randn(c, b, generator=random) * b**-0.5
    values = torch.randn(len(indices), generator=random).requires_grad_()
    slot = WeightSlot(weight, values, indices, None, None, 1.0, torch.float32)
    writer = BatchedWriter()
    writer.add(slot)
    writer.write_for_forward(slot)
    return slot


def on_support(gradient, slot):
    return gradient.flatten()[slot.indices.long()]


@pytest.mark.parametrize("tokens", [1, 9])
def test_a_group_keeps_the_columns_of_all_its_supports(tokens):
    slots = [make_slot(c, 40, columns, c) for c, columns in ((48, [3, 7]), (16, [7, 39]), (70, [0, 3]))]
    group = Group([KernelLayer(slot) for slot in slots])
    assert group.support_gradient.columns.tolist() == [0, 3, 7, 39]
    x = torch.randn(2, tokens, 40, requires_grad=True)
    outputs = linear_group(x, group)
    kept = [tensor for tensor in outputs[0].grad_fn.saved_tensors if tensor is not None]
    assert [tuple(tensor.shape) for tensor in kept] == [(2 * tokens, 4)]
    gradients = [torch.randn_like(y) for y in outputs]
    torch.autograd.backward(outputs, gradients)

    plain = x.detach().clone().requires_grad_()
    for slot, dy in zip(slots, gradients, strict=True):
        weight = slot.weight.clone().requires_grad_()
        F.linear(plain, weight).backward(dy)
        torch.testing.assert_close(slot.values.grad, on_support(weight.grad, slot))
    torch.testing.assert_close(x.grad, plain.grad)


def test_a_gated_mlp_with_few_columns():
    gate, up, down = make_slot(32, 40, [1, 2], 0), make_slot(32, 40, [2, 9], 1), make_slot(40, 32, [0, 5], 2)
    mlp = GatedMLP(KernelLayer(gate), KernelLayer(up), KernelLayer(down))
    assert mlp.gate_up.support_gradient.columns.tolist() == [1, 2, 9]
    x = torch.randn(2, 9, 40, requires_grad=True)
    y = gated_mlp(x, mlp)
    dy = torch.randn_like(y)
    y.backward(dy)

    plain = x.detach().clone().requires_grad_()
    weights = [slot.weight.clone().requires_grad_() for slot in (gate, up, down)]
    expected = F.linear(F.silu(F.linear(plain, weights[0])) * F.linear(plain, weights[1]), weights[2])
    expected.backward(dy)
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(x.grad, plain.grad)
    for slot, weight in zip((gate, up, down), weights, strict=True):
        torch.testing.assert_close(slot.values.grad, on_support(weight.grad, slot), rtol=1e-4, atol=1e-5)


def test_a_spread_support_keeps_the_input():
    plan = make_sampling_plan(torch.arange(0, 400, 7).int(), (20, 20))
    columns, plans = few_columns([plan])
    assert columns is None
    assert plans == [plan]
