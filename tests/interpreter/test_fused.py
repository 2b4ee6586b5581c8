"""`ops.fused` and `ops.inplace_weight` against `sparse_linear` and plain autograd in float64."""

import pytest

pytest.importorskip("triton")

import torch
import torch.nn.functional as F
from kernel_cases import (
    assert_close,
    dense_linear,
    gradients,
    kernel_layer,
    make_case,
    make_support,
    met,
    relative_error,
)

from axolotl_supertune.method import sizes
from axolotl_supertune.ops import effective_weight, fused, kernels, sparse_linear
from axolotl_supertune.ops.fused import GatedMLP, Group, gated_mlp, linear_group
from axolotl_supertune.ops.inplace_weight import BatchedWriter, WeightSlot
from axolotl_supertune.ops.operands import mask_seed

B = 10
# Output sizes on both sides of B: the sampled product is taken by row and by column.
GROUPS = {
    "s": [(12, "s")],
    "l": [(7, "l")],
    "sl": [(7, "sl")],
    "sl wide": [(12, "sl")],
    "s s": [(12, "s"), (5, "s")],
    "sl sl sl": [(12, "sl"), (5, "sl"), (10, "sl")],
    "l l l": [(12, "l"), (5, "l"), (130, "l")],
    "s l sl": [(12, "s"), (5, "l"), (7, "sl")],
    "sl s": [(5, "sl"), (7, "s")],
    "l s s": [(5, "l"), (7, "s"), (3, "s")],
}
TOLERANCE = 1e-5


def draw(*shape, seed=7):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def group_cases(kind, bias="none", count=6):
    """`bias`: none, all, or that of every second layer."""
    with_bias = {"none": [False] * 3, "all": [True] * 3, "some": [False, True, False]}[bias]
    return [
        make_case(c, B, parts, rank=1 + at, seed=at, bias=with_bias[at], count=count)
        for at, (c, parts) in enumerate(GROUPS[kind])
    ]


def run_group(cases, x, **options):
    group = Group([kernel_layer(case, **options) for case in cases])
    return gradients(linear_group(x, group), x, cases)


def reference(cases, x):
    """The same by `sparse_linear` in float64."""
    x, cases = x.detach().double().requires_grad_(), [case.double() for case in cases]
    outputs = [sparse_linear(x, case.weight, case.bias, case.sparse(), case.low_rank()) for case in cases]
    return gradients(outputs, x, cases)


# Groups of linear layers


@pytest.mark.parametrize("bias", ["none", "all", "some"])
@pytest.mark.parametrize("kind", GROUPS)
def test_group_equals_the_reference(kind, bias):
    cases, x = group_cases(kind, bias), draw(9, B).requires_grad_()
    assert_close(run_group(cases, x), reference(cases, x), TOLERANCE)


@pytest.mark.parametrize("kind", ["s", "sl sl sl"])
def test_group_equals_the_reference_in_float32_too(kind):
    cases, x = group_cases(kind, "all"), draw(9, B).requires_grad_()
    outputs = [sparse_linear(x, case.weight, case.bias, case.sparse(), case.low_rank()) for case in cases]
    assert_close(run_group(cases, x), gradients(outputs, x, cases), TOLERANCE)


@pytest.mark.parametrize("shape", [(B,), (1, B), (2, 3, B), (2, 1, 3, B), (65, B)])
@pytest.mark.parametrize("kind", ["sl", "s l sl"])
def test_input_of_any_number_of_dimensions(kind, shape):
    cases, x = group_cases(kind), draw(*shape).requires_grad_()
    assert_close(run_group(cases, x), reference(cases, x), TOLERANCE)


@pytest.mark.parametrize("view", ["transposed", "strided", "shifted", "expanded"])
def test_input_that_is_not_contiguous_or_not_aligned(view):
    leaf = draw(200)
    x = {
        "transposed": leaf[: 9 * B].view(B, 9).t(),
        "strided": leaf[: 18 * B].view(9, 2 * B)[:, ::2],
        "shifted": leaf[1 : 1 + 9 * B].view(9, B),
        "expanded": leaf[:B].expand(9, B),
    }[view].requires_grad_()
    cases = group_cases("sl s")
    assert_close(run_group(cases, x), reference(cases, x), TOLERANCE)


def test_output_gradient_that_is_not_contiguous():
    cases, x = group_cases("sl s"), draw(2, 3, B).requires_grad_()
    outputs = linear_group(x, Group([kernel_layer(case) for case in cases]))
    found = torch.autograd.grad([y.sum() for y in outputs], [x, cases[0].L])
    exact, doubles = x.detach().double().requires_grad_(), [case.double() for case in cases]
    expected = [dense_linear(exact, case).sum() for case in doubles]
    for one, other in zip(found, torch.autograd.grad(expected, [exact, doubles[0].L]), strict=True):
        assert relative_error(one, other) <= TOLERANCE


def test_output_that_nobody_used():
    cases, x = group_cases("sl sl sl", "all"), draw(9, B).requires_grad_()
    y = linear_group(x, Group([kernel_layer(case) for case in cases]))[1]
    y.square().sum().backward()
    assert relative_error(cases[1].values.grad, reference_square(cases[1], x)) <= TOLERANCE
    assert not cases[0].values.grad.any()
    assert not cases[2].L.grad.any()


def reference_square(case, x):
    case = case.double()
    return torch.autograd.grad(dense_linear(x.detach().double(), case).square().sum(), case.values)[0]


@pytest.mark.parametrize("kind", ["spread", "rows", "two columns", "full row", "full column", "empty"])
@pytest.mark.parametrize("c", [7, 12])
def test_group_of_any_support(kind, c):
    cases = [make_case(c, B, "sl", seed=1, kind=kind, count=8), make_case(c, B, "s", seed=2, count=5)]
    x = draw(5, B).requires_grad_()
    assert_close(run_group(cases, x), reference(cases, x), TOLERANCE)


def test_group_of_empty_supports_alone():
    cases, x = [make_case(7, B, "s", seed=at, kind="empty") for at in range(2)], draw(5, B).requires_grad_()
    assert_close(run_group(cases, x), reference(cases, x), TOLERANCE)


@pytest.mark.parametrize("kind", ["s", "sl sl sl", "s l sl"])
def test_long_inputs_are_taken_a_piece_at_a_time(monkeypatch, kind):
    cases, x = group_cases(kind), draw(150, B).requires_grad_()
    expected = reference(cases, x)
    assert_close(run_group(cases, x), expected, TOLERANCE)
    monkeypatch.setattr(sizes, "TOKENS_PER_TRANSPOSE", 64)
    assert_close(run_group(cases, x), expected, TOLERANCE)


def test_two_forwards_before_one_backward():
    cases = group_cases("sl s", "all")
    group = Group([kernel_layer(case) for case in cases])
    x, other = draw(9, B).requires_grad_(), draw(5, B, seed=8)
    first, second = linear_group(x, group), linear_group(other, group)
    exact, doubles = x.detach().double().requires_grad_(), [case.double() for case in cases]
    expected = [dense_linear(each, case) for each in (exact, other.double()) for case in doubles]
    assert_close(gradients([*first, *second], x, cases), gradients(expected, exact, doubles), TOLERANCE)


@pytest.mark.parametrize("wanted", ["x", "U", "L", "R", "bias"])
def test_only_what_wants_a_gradient_gets_one(wanted):
    case, x = make_case(7, B, "sl", bias=True, count=6), draw(9, B)
    leaves = {**case.trained(), "x": x}
    for name, leaf in leaves.items():
        leaf.requires_grad_(name == wanted)
    (y,) = linear_group(x, Group([kernel_layer(case)]))
    y.backward(draw(9, 7))
    expected_x, expected_case = x.detach().double().requires_grad_(), case.double()
    dense_linear(expected_x, expected_case).backward(draw(9, 7).double())
    expected = {**expected_case.trained(), "x": expected_x}
    for name, leaf in leaves.items():
        if name == wanted:
            assert relative_error(leaf.grad, expected[name].grad) <= TOLERANCE
        else:
            assert leaf.grad is None


def test_nothing_wants_a_gradient():
    case = make_case(7, B, "sl", count=6)
    for leaf in case.trained().values():
        leaf.requires_grad_(False)
    (y,) = linear_group(draw(9, B), Group([kernel_layer(case)]))
    assert not y.requires_grad
    with torch.no_grad():
        assert torch.equal(linear_group(draw(9, B), Group([kernel_layer(case)]))[0], y)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bit_layers_train_float32_values(dtype):
    """Low-rank parts only in fp16: the interpreter's bf16 matrix product is wrong."""
    cases = [make_case(c, B, "s", seed=c, count=6, dtype=dtype, bias=True) for c in (7, 12)]
    if dtype == torch.float16:
        cases.append(make_case(5, B, "sl", seed=5, count=6, dtype=dtype))
    x = draw(9, B).to(dtype).requires_grad_()
    found = run_group(cases, x)
    assert all(each.dtype == (torch.float32 if name[0] in "ULR" else dtype) for name, each in found.items())
    assert_close(found, reference(cases, x), 3 * torch.finfo(dtype).eps)


def test_operands_in_another_dtype_than_the_products():
    """Weights and input fp32, products fp16: what autocast makes of a layer."""
    cases, x = group_cases("sl s", "all"), draw(9, B).requires_grad_()
    found = run_group(cases, x, dtype=torch.float16)
    assert found["y0"].dtype == torch.float16
    assert all(each.dtype == torch.float32 for name, each in found.items() if name[0] != "y")
    assert_close(found, reference(cases, x), 2e-3)


def test_16_bit_trained_values_get_16_bit_gradients():
    case = make_case(7, B, "sl", count=6)
    for leaf in case.trained().values():
        leaf.data = leaf.data.half()
    x = draw(9, B).requires_grad_()
    found = run_group([case], x)
    assert [found[name].dtype for name in ("U0", "L0", "R0", "x")] == [torch.float16] * 3 + [torch.float32]
    assert_close(found, reference([case], x), 1e-3)


def test_layers_that_do_not_fit_together():
    fits = lambda *layers: fused.can_group(layers)  # noqa: E731
    plain, ranked = kernel_layer(make_case(7, B, "s")), kernel_layer(make_case(7, B, "sl", rank=3))
    assert fits(plain, ranked)
    assert fits(ranked, kernel_layer(make_case(7, B, "sl", rank=16)))
    assert not fits(ranked, kernel_layer(make_case(7, B, "sl", rank=17)))
    assert not fits(ranked, kernel_layer(make_case(7, B, "sl"), dropout=0.1))
    assert fits(plain, kernel_layer(make_case(7, B, "sl"), dropout=0.1))
    assert not fits(plain, kernel_layer(make_case(7, B, "s"), dtype=torch.float16))


@pytest.mark.parametrize("dims", [2, 3])
def test_outputs_may_be_changed_in_place(dims):
    """Models clamp or scale their projections in place; so they may with the reference."""
    cases, x = group_cases("sl s"), draw(*[2, 3][: dims - 1], B).requires_grad_()
    outputs = [y.clamp_(-0.5, 0.5) for y in linear_group(x, Group([kernel_layer(case) for case in cases]))]
    exact, doubles = x.detach().double().requires_grad_(), [case.double() for case in cases]
    expected = [dense_linear(exact, case).clamp(-0.5, 0.5) for case in doubles]
    assert_close(gradients(outputs, x, cases), gradients(expected, exact, doubles), TOLERANCE)


# Gated MLPs

MLPS = {
    "sl": ["sl", "sl", "sl"],
    "s": ["s", "s", "s"],
    "l": ["l", "l", "l"],
    "down has no support": ["s", "sl", "l"],
    "only down has a support": ["l", "l", "sl"],
    "gate has no support": ["l", "s", "s"],
}
INNER = 13


def mlp_cases(kind, bias=False, b=B):
    sizes = [(INNER, b), (INNER, b), (b, INNER)]
    return [
        make_case(c, n, parts, rank=1 + at, seed=at, bias=bias, count=6)
        for at, ((c, n), parts) in enumerate(zip(sizes, MLPS[kind], strict=True))
    ]


def run_mlp(cases, x, dropout=0.0):
    mlp = GatedMLP(*(kernel_layer(case, dropout=dropout) for case in cases))
    return gradients([gated_mlp(x, mlp)], x, cases)


def dense_mlp(x, cases, kept=(None, None, None), probability=0.0):
    gate, up, down = cases
    h = F.silu(dense_linear(x, gate, kept[0], probability)) * dense_linear(x, up, kept[1], probability)
    return dense_linear(h, down, kept[2], probability)


def exact_mlp(cases, x, **options):
    x, cases = x.detach().double().requires_grad_(), [case.double() for case in cases]
    return gradients([dense_mlp(x, cases, **options)], x, cases)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kind", MLPS)
def test_gated_mlp_equals_plain_autograd(kind, bias):
    cases, x = mlp_cases(kind, bias), draw(9, B).requires_grad_()
    assert_close(run_mlp(cases, x), exact_mlp(cases, x), TOLERANCE)


@pytest.mark.parametrize("shape", [(B,), (1, B), (2, 3, B), (2, 1, 3, B), (65, B)])
def test_gated_mlp_of_any_number_of_dimensions(shape):
    cases, x = mlp_cases("sl"), draw(*shape).requires_grad_()
    assert_close(run_mlp(cases, x), exact_mlp(cases, x), TOLERANCE)


def test_gated_mlp_of_an_input_that_is_not_contiguous():
    cases, x = mlp_cases("sl"), draw(B, 9).t().requires_grad_()
    assert_close(run_mlp(cases, x), exact_mlp(cases, x), TOLERANCE)


def test_gated_mlp_wider_than_its_intermediate():
    cases, x = mlp_cases("sl", b=INNER + 4), draw(9, INNER + 4).requires_grad_()
    assert_close(run_mlp(cases, x), exact_mlp(cases, x), TOLERANCE)


@pytest.mark.parametrize("kind", ["sl", "s", "gate has no support"])
def test_gated_mlp_of_a_long_input(monkeypatch, kind):
    cases, x = mlp_cases(kind), draw(150, B).requires_grad_()
    monkeypatch.setattr(sizes, "TOKENS_PER_TRANSPOSE", 64)
    assert_close(run_mlp(cases, x), exact_mlp(cases, x), TOLERANCE)


def test_gated_mlp_with_two_forwards_before_one_backward():
    cases, x, other = mlp_cases("sl"), draw(9, B).requires_grad_(), draw(5, B, seed=8)
    mlp = GatedMLP(*(kernel_layer(case) for case in cases))
    exact, doubles = x.detach().double().requires_grad_(), [case.double() for case in cases]
    found = gradients([gated_mlp(x, mlp), gated_mlp(other, mlp)], x, cases)
    expected = gradients([dense_mlp(exact, doubles), dense_mlp(other.double(), doubles)], exact, doubles)
    assert_close(found, expected, TOLERANCE)


@pytest.mark.parametrize("kind", ["sl", "s"])
def test_frozen_gated_mlp_passes_the_gradient_on(kind):
    cases, x = mlp_cases(kind), draw(9, B).requires_grad_()
    expected = exact_mlp(cases, x)
    for case in cases:
        for leaf in case.trained().values():
            leaf.requires_grad_(False)
    found = run_mlp(cases, x)
    assert_close(found, {name: expected[name] for name in ("y0", "x")}, TOLERANCE)


def test_gated_mlp_of_an_input_without_gradient():
    cases, x = mlp_cases("sl"), draw(9, B)
    found = run_mlp(cases, x)
    expected = exact_mlp(cases, x)
    del expected["x"]
    assert_close(found, expected, TOLERANCE)


# Dropout


def seed_of_next_call(group):
    """The masks' seed that the next call takes from the generator, which is left as it was."""
    state = torch.get_rng_state()
    seed = mask_seed(torch.empty(1), group.threshold)
    torch.set_rng_state(state)
    return seed


@pytest.mark.parametrize("kind", ["sl", "sl sl sl", "s l sl"])
def test_group_drops_out_by_one_mask_a_layer(kind):
    probability, x = met(0.3), draw(9, B).requires_grad_()
    cases = group_cases(kind)
    group = Group([kernel_layer(case, dropout=0.3) for case in cases])
    seed = seed_of_next_call(group)
    found = gradients(linear_group(x, group), x, cases)
    streams = iter(range(3))
    kept = [
        None if case.L is None else kernels.dropout_mask(seed, (9, B), 0.3, x.device, next(streams)) for case in cases
    ]
    exact, doubles = x.detach().double().requires_grad_(), [case.double() for case in cases]
    outputs = [dense_linear(exact, case, mask, probability) for case, mask in zip(doubles, kept, strict=True)]
    assert_close(found, gradients(outputs, exact, doubles), TOLERANCE)


@pytest.mark.parametrize("kind", ["sl", "l"])
def test_gated_mlp_drops_out_by_three_masks(kind):
    cases, x = mlp_cases(kind), draw(9, B).requires_grad_()
    mlp = GatedMLP(*(kernel_layer(case, dropout=0.3) for case in cases))
    seed = seed_of_next_call(mlp.gate_up)
    found = gradients([gated_mlp(x, mlp)], x, cases)
    shapes = [(9, B), (9, B), (9, INNER)]
    kept = [kernels.dropout_mask(seed, shape, 0.3, x.device, stream) for stream, shape in enumerate(shapes)]
    assert not torch.equal(kept[0], kept[1])
    assert_close(found, exact_mlp(cases, x, kept=kept, probability=met(0.3)), TOLERANCE)


def test_backward_drops_by_the_mask_of_its_own_forward():
    """Whatever was drawn in between, by this layer too; and it leaves the generator alone."""
    cases, x = [make_case(7, B, "l")], draw(9, B).requires_grad_()
    group = Group([kernel_layer(case, dropout=0.5) for case in cases])
    torch.manual_seed(1)
    alone = gradients(linear_group(x, group), x, cases)
    torch.manual_seed(1)
    outputs = linear_group(x, group)
    assert not torch.equal(linear_group(x, group)[0], outputs[0])
    state = torch.get_rng_state()
    again = gradients(outputs, x, cases)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(alone[name], again[name]) for name in alone)


def test_a_layer_without_dropout_draws_nothing():
    cases, x = group_cases("sl s"), draw(9, B)
    state = torch.get_rng_state()
    linear_group(x, Group([kernel_layer(case) for case in cases]))
    assert torch.equal(torch.get_rng_state(), state)


# The same bits twice


@pytest.mark.parametrize("run", [run_group, run_mlp])
def test_the_same_step_gives_the_same_bits(run):
    cases = group_cases("sl sl sl", "all") if run is run_group else mlp_cases("sl", bias=True)
    x = draw(70, B).requires_grad_()
    results = []
    for _ in range(2):
        torch.manual_seed(3)
        results.append(run(cases, x, dropout=0.2))
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])


# What is written into the weight


def in_place(case, writer=None, dtype=None):
    layer = kernel_layer(case, writer=writer, dtype=dtype)
    return layer.slot


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("kind", ["spread", "full row", "two columns", "empty"])
def test_entry_writes_what_a_merge_would_and_restores_the_very_bits(kind, dtype):
    case = make_case(7, B, "sl", kind=kind, count=8, dtype=dtype)
    slot = in_place(case)
    assert torch.equal(slot.weight, effective_weight(case.weight, case.sparse()))
    for _ in range(2):
        slot.restore()
        assert torch.equal(slot.weight, case.weight)
    slot.ensure_written()
    assert torch.equal(slot.weight, effective_weight(case.weight, case.sparse()))


def test_entry_restores_bits_that_no_subtraction_would_give():
    """W + U where W is lost in the sum: what was there is kept, not computed."""
    weight = torch.tensor([[1e-8, 1.0], [-0.0, 3.0]])
    values, indices = torch.full((3,), 1e8), torch.tensor([0, 1, 2], dtype=torch.int32)
    slot = WeightSlot(weight.clone(), values, indices, None, None, 1.0, torch.float32)
    BatchedWriter().write_for_forward(slot)
    assert slot.weight[0, 1] == 1e8
    slot.restore()
    assert torch.equal(slot.weight, weight)
    assert torch.equal(slot.weight.signbit(), weight.signbit())


def test_sweep_sees_values_changed_behind_the_version_counters():
    writer = BatchedWriter()
    cases = [make_case(7, B, "sl", seed=at, count=6) for at in range(3)]
    slots = [in_place(case, writer) for case in cases]
    for step in range(2):
        for case in cases:
            for leaf in case.trained().values():
                leaf.data.add_(0.1)
        for case, slot in zip(cases, slots, strict=True):
            writer.write_for_forward(slot)
            assert torch.equal(slot.weight, effective_weight(case.weight, case.sparse())), step
            rank = case.R.shape[0]
            assert torch.equal(slot.packed[1][:rank], case.R)
            assert torch.equal(slot.packed[0][:rank], case.L.t() * case.scaling)


def test_sweep_writes_layers_of_different_kinds():
    writer = BatchedWriter()
    cases = [
        make_case(7, B, "s", count=6),
        make_case(12, B, "l", seed=1),
        make_case(7, B, "sl", seed=2, count=6, dtype=torch.float16),
        make_case(7, B, "sl", seed=3, rank=17, count=6),
    ]
    slots = [in_place(case, writer) for case in cases]
    for case in cases:
        for leaf in case.trained().values():
            leaf.data.mul_(2)
    for case, slot in zip(cases, slots, strict=True):
        writer.write_for_forward(slot)
        assert torch.equal(slot.weight, effective_weight(case.weight, case.sparse()))


def test_an_entry_that_is_gone_is_not_written_again():
    writer = BatchedWriter()
    keep = in_place(make_case(7, B, "s", count=6), writer)
    in_place(make_case(7, B, "s", seed=1, count=6), writer)
    writer.write_for_forward(keep)
    writer.write_for_forward(keep)
    assert len(writer._slots) == 1


def test_first_write_is_heard_by_whoever_kept_the_weight():
    case = make_case(7, B, "s", count=6)
    weight, x = case.weight, draw(9, B).requires_grad_()
    y = F.linear(x, weight)
    BatchedWriter().write_for_forward(WeightSlot(weight, case.values, case.indices, None, None, 1.0, torch.float32))
    with pytest.raises(RuntimeError, match="inplace operation"):
        y.sum().backward()


def test_a_weight_put_in_the_place_of_the_written_one_is_not_touched():
    case = make_case(7, B, "s", count=6)
    writer = BatchedWriter()
    slot = in_place(case, writer)
    other = draw(7, B, seed=30)
    slot.weight.data = other.clone()
    slot.restore()
    assert torch.equal(slot.weight, other)
    writer.write_for_forward(slot)
    assert torch.equal(slot.weight, effective_weight(other, case.sparse()))
    slot.restore()
    assert torch.equal(slot.weight, other)


def changed(case):
    with torch.no_grad():
        for leaf in case.trained().values():
            leaf.add_(1)


def test_values_changed_before_the_backward_are_noticed():
    case, x = make_case(7, B, "sl", count=6), draw(9, B).requires_grad_()
    (y,) = linear_group(x, Group([kernel_layer(case)]))
    changed(case)
    with pytest.raises(RuntimeError, match="call backward"):
        y.sum().backward()


@pytest.mark.parametrize("between", ["restored", "another forward"])
def test_values_changed_before_the_backward_are_noticed_whatever_else_happened(between):
    case, x = make_case(7, B, "sl", count=6), draw(9, B).requires_grad_()
    writer = BatchedWriter()
    layer = kernel_layer(case, writer=writer)
    group = Group([layer])
    (y,) = linear_group(x, group)
    if between == "restored":
        layer.slot.restore()
    changed(case)
    if between == "another forward":
        writer.write_for_forward(layer.slot)
        linear_group(x, group)
    with pytest.raises(RuntimeError, match="call backward"):
        y.sum().backward()


def test_a_weight_restored_before_the_backward_is_written_again():
    case, x = make_case(7, B, "sl", count=6), draw(9, B).requires_grad_()
    layer = kernel_layer(case)
    outputs = linear_group(x, Group([layer]))
    layer.slot.restore()
    found = gradients(outputs, x, [case])
    assert_close(found, reference([case], x), TOLERANCE)
    layer.slot.restore()
    assert torch.equal(layer.slot.weight, case.weight)


# What is kept for backward


@pytest.mark.parametrize("kind", ["two columns", "one column", "half", "none"])
@pytest.mark.parametrize("shape", [(9, B), (2, 1, 3, B)])
def test_columns_that_supports_touch_are_enough(kind, shape):
    """Two layers whose supports touch 2, 1, 5 or no columns of 10; gradients are those of the whole input."""
    columns = {"two columns": [[1, 7], [7]], "one column": [[4], [4]], "half": [[0, 1, 2], [3, 9]], "none": [[], []]}
    cases = []
    for at, (c, touched) in enumerate(zip((12, 2), columns[kind], strict=True)):
        mask = torch.zeros(c, B, dtype=torch.bool)
        mask[:, touched] = True
        case = make_case(c, B, "s", seed=at, bias=True)
        indices = mask.view(-1).nonzero().view(-1).int()
        cases.append(case._replace(indices=indices, values=draw(len(indices), seed=at).requires_grad_()))
    x = draw(*shape).requires_grad_()
    group = Group([kernel_layer(case) for case in cases])
    saved, outputs = saved_by(lambda: linear_group(x, group))
    tokens, count = x.numel() // B, len({each for touched in columns[kind] for each in touched})
    assert sum(tensor.numel() for tensor in saved) == tokens * (count if 2 <= count <= B // 2 else B)
    assert_close(gradients(outputs, x, cases), reference(cases, x), TOLERANCE)


def test_gated_mlp_of_supports_that_touch_few_columns(monkeypatch):
    cases, x = mlp_cases("s"), draw(150, B).requires_grad_()
    for at in (0, 1):
        indices = make_support(INNER, B, 8, "two columns", at)
        cases[at] = cases[at]._replace(indices=indices, values=draw(len(indices), seed=at).requires_grad_())
    expected = exact_mlp(cases, x)
    mlp = GatedMLP(*(kernel_layer(case) for case in cases))
    saved, y = saved_by(lambda: gated_mlp(x, mlp))
    assert sum(tensor.numel() for tensor in saved) == 150 * (2 + 2 * INNER)
    assert_close(gradients([y], x, cases), expected, TOLERANCE)
    monkeypatch.setattr(sizes, "TOKENS_PER_TRANSPOSE", 64)
    assert_close(run_mlp(cases, x), expected, TOLERANCE)


def saved_by(function):
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        y = function()
    return saved, y


def test_only_the_input_and_thin_products_are_kept():
    cases, x = group_cases("sl sl sl"), draw(9, B).requires_grad_()
    group = Group([kernel_layer(case, dropout=0.5) for case in cases])
    saved, _ = saved_by(lambda: linear_group(x, group))
    assert sum(tensor.numel() for tensor in saved) <= x.numel() + 9 * 3 * 16


def test_gated_mlp_keeps_two_activations():
    cases, x = mlp_cases("s"), draw(9, B).requires_grad_()
    mlp = GatedMLP(*(kernel_layer(case) for case in cases))
    saved, _ = saved_by(lambda: gated_mlp(x, mlp))
    assert sum(tensor.numel() for tensor in saved) <= x.numel() + 2 * 9 * INNER
