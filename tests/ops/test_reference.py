"""`sparse_linear` and merged weights against autograd on the dense effective weight."""

import gc

import pytest
import torch
import torch.nn.functional as F

from axolotl_supertune.ops import LowRank, Sparse, effective_weight, merged_weight, sparse_linear

SHAPES = [(1, 1), (3, 5), (7, 2), (16, 9)]


def make_sparse(c, b, count, seed=0, dtype=torch.float64):
    random = torch.Generator().manual_seed(seed)
    indices = torch.randperm(c * b, generator=random)[:count].sort().values.to(torch.int32)
    return Sparse(torch.randn(count, generator=random, dtype=dtype).requires_grad_(), indices)


def make_low_rank(c, b, rank, seed=0, dtype=torch.float64, scaling=1.7, dropout=0.0):
    random = torch.Generator().manual_seed(100 + seed)
    L = torch.randn(c, rank, generator=random, dtype=dtype).requires_grad_()
    R = torch.randn(rank, b, generator=random, dtype=dtype).requires_grad_()
    return LowRank(L, R, scaling, dropout)


def make_dense(shape, seed=1, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def scatter(sparse, weight):
    """M⊙U as a dense matrix that autograd can differentiate."""
    flat = torch.zeros(weight.numel(), dtype=sparse.values.dtype)
    return flat.index_put((sparse.indices.long(),), sparse.values).view(weight.shape)


def dense_linear(x, weight, bias, sparse, low_rank):
    """The same layer in plain autograd, low-rank part as LoRA applies it."""
    total = weight
    for part in sparse:
        total = total + scatter(part, weight)
    y = F.linear(x, total, bias)
    for L, R, scaling, dropout in low_rank:
        y = y + scaling * F.linear(F.linear(F.dropout(x, dropout), R), L)
    return y


def outputs(function, x, weight, bias, sparse, low_rank, between=None):
    """y and the gradients of everything that wants one, for one fixed random dy."""
    wanted = [tensor for part in (*sparse, *low_rank) for tensor in part[:2] if getattr(tensor, "requires_grad", False)]
    wanted += [tensor for tensor in (x, bias) if tensor is not None and tensor.requires_grad]
    y = function(x, weight, bias, sparse, low_rank)
    if between:
        between()
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64).to(y.dtype)
    return [y, *torch.autograd.grad(y, wanted, dy)]


def relative_error(one, other):
    one, other = one.detach().double(), other.detach().double()
    return float((one - other).norm() / other.norm())


def assert_same(x, weight, bias, sparse, low_rank, **tolerance):
    ours = outputs(sparse_linear, x, weight, bias, sparse, low_rank)
    dense = outputs(dense_linear, x, weight, bias, sparse, low_rank)
    assert len(ours) == len(dense)
    for one, other in zip(ours, dense, strict=True):
        assert one.dtype == other.dtype
        torch.testing.assert_close(one, other, **tolerance)


@pytest.mark.parametrize("tokens", [(), (4,), (2, 3), (2, 1, 3), (0,), (2, 0)], ids=str)
@pytest.mark.parametrize(("c", "b"), SHAPES)
def test_matches_dense_autograd(c, b, tokens):
    x = make_dense((*tokens, b), seed=2).requires_grad_()
    bias = make_dense((c,), seed=3).requires_grad_()
    assert_same(x, make_dense((c, b)), bias, [make_sparse(c, b, (c * b + 1) // 2)], [make_low_rank(c, b, 3)])


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("count", [0, 1, 7, 15])
def test_matches_dense_autograd_for_empty_part_and_full_support(count, rank, with_bias):
    x = make_dense((2, 4, 5), seed=2).requires_grad_()
    bias = make_dense((3,), seed=3).requires_grad_() if with_bias else None
    assert_same(x, make_dense((3, 5)), bias, [make_sparse(3, 5, count)], [make_low_rank(3, 5, rank)])


@pytest.mark.parametrize("parts", ["sparse", "low rank", "none"])
def test_matches_dense_autograd_with_one_kind_of_part_or_none(parts):
    x = make_dense((4, 5), seed=2).requires_grad_()
    sparse = [make_sparse(3, 5, 6)] if parts == "sparse" else []
    low_rank = [make_low_rank(3, 5, 2)] if parts == "low rank" else []
    assert_same(x, make_dense((3, 5)), None, sparse, low_rank)


def test_matches_dense_autograd_for_overlapping_adapters():
    x = make_dense((2, 4, 5), seed=2).requires_grad_()
    sparse = [make_sparse(3, 5, count, seed) for seed, count in enumerate((9, 12, 15))]
    low_rank = [make_low_rank(3, 5, rank, seed, scaling=seed - 0.5) for seed, rank in enumerate((1, 4))]
    assert_same(x, make_dense((3, 5)), make_dense((3,)), sparse, low_rank)


@pytest.mark.parametrize(("c", "b"), SHAPES)
@pytest.mark.parametrize("tokens", [(), (3,), (2, 2)], ids=str)
def test_gradcheck(c, b, tokens):
    weight = make_dense((c, b))
    sparse = [make_sparse(c, b, (c * b + 1) // 2), make_sparse(c, b, c * b, seed=1)]
    low_rank = make_low_rank(c, b, 2)
    x = make_dense((*tokens, b), seed=2).requires_grad_()
    bias = make_dense((c,), seed=3).requires_grad_()

    def layer(x, bias, first, second, L, R):
        parts = [Sparse(first, sparse[0].indices), Sparse(second, sparse[1].indices)]
        return sparse_linear(x, weight, bias, parts, [LowRank(L, R, 0.7)])

    inputs = (x, bias, sparse[0].values, sparse[1].values, low_rank.L, low_rank.R)
    assert torch.autograd.gradcheck(layer, inputs)


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x.transpose(0, 1),
        lambda x: x[:, ::2],
        lambda x: x[..., :1, :].expand(4, 6, 5),
        lambda x: x.flip(0).transpose(0, 1),
    ],
    ids=["transposed", "strided", "expanded", "flipped"],
)
def test_matches_dense_autograd_for_non_contiguous_input(view):
    leaf = make_dense((4, 6, 5), seed=2).requires_grad_()
    x = view(leaf)
    assert_same(x, make_dense((3, 5)), None, [make_sparse(3, 5, 6)], [make_low_rank(3, 5, 2)])


def test_matches_dense_autograd_for_a_non_contiguous_output_gradient():
    weight, sparse = make_dense((3, 5)), [make_sparse(3, 5, 6)]
    x = make_dense((2, 4, 5), seed=2).requires_grad_()

    def transposed(function):
        return lambda *args: function(*args).transpose(0, 2)

    ours = outputs(transposed(sparse_linear), x, weight, None, sparse, [make_low_rank(3, 5, 2)])
    dense = outputs(transposed(dense_linear), x, weight, None, sparse, [make_low_rank(3, 5, 2)])
    for one, other in zip(ours, dense, strict=True):
        torch.testing.assert_close(one, other)


def test_matches_dense_autograd_for_a_transposed_weight():
    weight = make_dense((5, 3)).t()
    x = make_dense((4, 5), seed=2).requires_grad_()
    assert_same(x, weight, None, [make_sparse(3, 5, 6)], [make_low_rank(3, 5, 2)])


def test_repeated_forward_before_one_backward_sums_gradients():
    weight, sparse, low_rank = make_dense((3, 5)), [make_sparse(3, 5, 6)], [make_low_rank(3, 5, 2)]
    x = make_dense((4, 5), seed=2).requires_grad_()

    def twice(function):
        def call(x, *rest):
            return function(x, *rest) * function(x[:1] * 3, *rest)

        return call

    ours = outputs(twice(sparse_linear), x, weight, None, sparse, low_rank)
    dense = outputs(twice(dense_linear), x, weight, None, sparse, low_rank)
    for one, other in zip(ours, dense, strict=True):
        torch.testing.assert_close(one, other)


def test_input_that_needs_no_gradient():
    x = make_dense((4, 5), seed=2)
    assert_same(x, make_dense((3, 5)), None, [make_sparse(3, 5, 6)], [make_low_rank(3, 5, 2)])


@pytest.mark.parametrize("trained", range(6))
def test_only_one_tensor_is_trained(trained):
    x, bias = make_dense((4, 5), seed=2), make_dense((3,), seed=3)
    sparse = [make_sparse(3, 5, 6), make_sparse(3, 5, 9, seed=1)]
    low_rank = [make_low_rank(3, 5, 2)]
    for at, tensor in enumerate((x, bias, sparse[0].values, sparse[1].values, low_rank[0].L, low_rank[0].R)):
        tensor.requires_grad_(at == trained)
    assert_same(x, make_dense((3, 5)), bias, sparse, low_rank)


def test_no_gradient_at_all_gives_a_plain_result():
    weight, sparse, low_rank = make_dense((3, 5)), [make_sparse(3, 5, 6)], [make_low_rank(3, 5, 2)]
    x = make_dense((4, 5), seed=2)
    with torch.no_grad():
        y = sparse_linear(x, weight, None, sparse, low_rank)
    assert not y.requires_grad
    torch.testing.assert_close(y, dense_linear(x, weight, None, sparse, low_rank).detach())


def test_second_derivatives_are_refused_not_wrong():
    sparse = [make_sparse(3, 5, 6)]
    x = make_dense((4, 5), seed=2).requires_grad_()
    (dx,) = torch.autograd.grad(sparse_linear(x, make_dense((3, 5)), None, sparse).pow(2).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.sum().backward()


@pytest.mark.parametrize("tokens", [(6,), (2, 3), ()], ids=str)
def test_dropout_equals_plain_autograd_from_the_same_seed(tokens):
    x = make_dense((*tokens, 40), seed=2).requires_grad_()
    weight, sparse, low_rank = make_dense((3, 40)), [make_sparse(3, 40, 6)], [make_low_rank(3, 40, 2, dropout=0.3)]
    torch.manual_seed(11)
    ours = outputs(sparse_linear, x, weight, None, sparse, low_rank, between=lambda: torch.rand(1000))
    torch.manual_seed(11)
    dense = outputs(dense_linear, x, weight, None, sparse, low_rank)
    for one, other in zip(ours, dense, strict=True):
        torch.testing.assert_close(one, other)


def test_dropout_of_several_adapters_and_forwards_equals_plain_autograd():
    weight, x = make_dense((3, 40)), make_dense((5, 40), seed=2).requires_grad_()
    low_rank = [make_low_rank(3, 40, 2, seed, dropout=dropout) for seed, dropout in enumerate((0.5, 0.0, 0.2))]

    def twice(function):
        return lambda *args: function(*args) * function(*args)

    torch.manual_seed(11)
    ours = outputs(twice(sparse_linear), x, weight, None, [], low_rank, between=lambda: torch.rand(1000))
    torch.manual_seed(11)
    dense = outputs(twice(dense_linear), x, weight, None, [], low_rank)
    for one, other in zip(ours, dense, strict=True):
        torch.testing.assert_close(one, other)


def test_dropout_of_a_non_contiguous_input_uses_one_mask_in_both_directions():
    leaf = make_dense((7, 4, 40), seed=2)
    x = leaf.transpose(0, 1).requires_grad_()
    low_rank = [make_low_rank(3, 40, 2, dropout=0.4)]
    torch.manual_seed(11)
    ours = outputs(sparse_linear, x, make_dense((3, 40)), None, [], low_rank)
    torch.manual_seed(11)
    dense = outputs(dense_linear, x.detach().contiguous().requires_grad_(), make_dense((3, 40)), None, [], low_rank)
    for one, other in zip(ours, dense, strict=True):
        torch.testing.assert_close(one, other)


def test_backward_leaves_the_generator_state_alone():
    x = make_dense((6, 40), seed=2).requires_grad_()
    y = sparse_linear(x, make_dense((3, 40)), None, [], [make_low_rank(3, 40, 2, dropout=0.3)])
    torch.rand(10)
    state = torch.get_rng_state()
    y.sum().backward()
    assert torch.equal(state, torch.get_rng_state())


def test_without_dropout_no_random_number_is_drawn():
    state = torch.get_rng_state()
    sparse_linear(make_dense((6, 5)), make_dense((3, 5)), None, [make_sparse(3, 5, 6)], [make_low_rank(3, 5, 2)])
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize("x_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16])
def test_autocast_bf16_matches_plain_autograd_under_autocast(weight_dtype, x_dtype):
    x = make_dense((6, 32), seed=2).to(x_dtype).requires_grad_()
    weight, bias = make_dense((24, 32)).to(weight_dtype), make_dense((24,)).to(weight_dtype).requires_grad_()
    sparse = [make_sparse(24, 32, 100, dtype=torch.float32)]
    low_rank = [make_low_rank(24, 32, 4, dtype=torch.float32)]

    def plain(x, weight, bias, sparse, low_rank):
        rounded = (weight + scatter(sparse[0], weight)).to(weight.dtype)  # a merge rounds to the dtype of W
        return dense_linear(x, rounded, bias, [], low_rank)

    def autocast(function):
        def call(*args):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return function(*args)

        return call

    ours = outputs(autocast(sparse_linear), x, weight, bias, sparse, low_rank)
    dense = outputs(autocast(plain), x, weight, bias, sparse, low_rank)
    assert ours[0].dtype == torch.bfloat16
    for one, other in zip(ours, dense, strict=True):
        assert one.dtype == other.dtype
        assert relative_error(one, other) < 0.01


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bit_base_gives_its_dtype_and_fp32_parameter_gradients(dtype):
    x = make_dense((6, 32), seed=2).to(dtype).requires_grad_()
    weight = make_dense((24, 32)).to(dtype)
    sparse = [make_sparse(24, 32, 100, dtype=torch.float32)]
    low_rank = [make_low_rank(24, 32, 4, dtype=torch.float32)]
    y, d_values, d_L, d_R, dx = outputs(sparse_linear, x, weight, None, sparse, low_rank)
    assert (y.dtype, dx.dtype) == (dtype, dtype)
    assert {d_values.dtype, d_L.dtype, d_R.dtype} == {torch.float32}

    exact = [Sparse(sparse[0].values.detach().double().requires_grad_(), sparse[0].indices)]
    exact_low = [LowRank(*(t.detach().double().requires_grad_() for t in low_rank[0][:2]), low_rank[0].scaling)]
    x64 = x.detach().double().requires_grad_()
    expected = outputs(dense_linear, x64, weight.double(), None, exact, exact_low)
    for one, other in zip((y, d_values, d_L, d_R, dx), expected, strict=True):
        assert relative_error(one, other) < 0.01


def test_gradient_of_values_over_a_bf16_base_is_not_rounded_to_bf16():
    x = make_dense((50, 32), seed=2).to(torch.bfloat16)
    sparse = [make_sparse(24, 32, 100, dtype=torch.float32)]
    y = sparse_linear(x, make_dense((24, 32)).to(torch.bfloat16), None, sparse)
    dy = make_dense(y.shape, seed=4).to(torch.bfloat16)
    (grad,) = torch.autograd.grad(y, sparse[0].values, dy)
    exact = (dy.double().t() @ x.double()).view(-1)[sparse[0].indices]
    torch.testing.assert_close(grad.double(), exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_effective_weight_is_rounded_once(dtype):
    weight = make_dense((24, 32)).to(dtype)
    sparse = make_sparse(24, 32, 300, dtype=torch.float32)
    expected = (weight.float() + scatter(sparse, weight)).to(dtype)
    assert torch.equal(effective_weight(weight, [sparse]), expected)


@pytest.mark.parametrize("count", [1, 2])
def test_overlapping_deltas_are_summed_before_the_one_rounding(count):
    """0.003 is below half a bf16 step at 1, twice 0.003 is above it: rounding each would lose both."""
    weight = torch.ones(1, 1, dtype=torch.bfloat16)
    part = Sparse(torch.tensor([0.003]), torch.tensor([0], dtype=torch.int32))
    expected = {1: 1.0, 2: 1.0078125}[count]
    assert effective_weight(weight, [part] * count).item() == expected
    assert merged_weight(weight, [part] * count, []).item() == expected


def test_merged_weight_sums_both_parts_before_the_one_rounding():
    weight = torch.ones(1, 1, dtype=torch.bfloat16)
    sparse = Sparse(torch.tensor([0.003]), torch.tensor([0], dtype=torch.int32))
    low_rank = LowRank(torch.tensor([[0.5]]), torch.tensor([[0.003]]), 2.0)
    assert merged_weight(weight, [], [low_rank]).item() == 1.0
    assert merged_weight(weight, [sparse], [low_rank]).item() == 1.0078125


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("parts", [0, 1, 2])
def test_merged_weight_without_low_rank_part_is_the_effective_weight(dtype, parts):
    weight = make_dense((24, 32)).to(dtype)
    sparse = [make_sparse(24, 32, 300, seed, dtype=torch.float32) for seed in range(parts)]
    assert torch.equal(merged_weight(weight, sparse, []), effective_weight(weight, sparse))


def test_merged_weight_adds_scaled_low_rank_parts():
    weight, sparse, low_rank = make_dense((7, 5)), [make_sparse(7, 5, 9)], [make_low_rank(7, 5, 2)]
    expected = weight + scatter(sparse[0], weight) + 1.7 * low_rank[0].L @ low_rank[0].R
    torch.testing.assert_close(merged_weight(weight, sparse, low_rank), expected.detach())


@pytest.mark.parametrize("build", [effective_weight, lambda weight, sparse: merged_weight(weight, sparse, [])])
@pytest.mark.parametrize("parts", [1, 2])
def test_building_a_weight_leaves_the_base_alone(build, parts):
    weight = make_dense((7, 5), dtype=torch.float32)
    before = weight.clone()
    built = build(weight, [make_sparse(7, 5, 9, seed, dtype=torch.float32) for seed in range(parts)])
    assert torch.equal(weight, before)
    assert built.data_ptr() != weight.data_ptr()
    assert not built.requires_grad


def test_nothing_to_add_gives_the_weight_itself():
    weight = make_dense((7, 5))
    assert effective_weight(weight, []) is weight


def saved_storages(x, weight, sparse, low_rank):
    """Addresses of all that autograd keeps for one call, and the result (which must stay alive)."""
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.data_ptr()) or t, lambda t: t):
        y = sparse_linear(x, weight, None, sparse, low_rank)
    return set(saved), y


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_only_input_and_parameters_are_kept_for_backward(dtype):
    x = make_dense((2, 64), seed=2).to(dtype).requires_grad_()
    weight = make_dense((48, 64)).to(dtype)
    sparse = [make_sparse(48, 64, 100, dtype=torch.float32)]
    low_rank = [make_low_rank(48, 64, 4, dtype=torch.float32, dropout=0.1)]
    gc.collect()
    before = {id(tensor) for tensor in gc.get_objects() if issubclass(type(tensor), torch.Tensor)}
    saved, y = saved_storages(x, weight, sparse, low_rank)
    parts = [*sparse[0], *low_rank[0][:2]]
    assert saved == {tensor.data_ptr() for tensor in (x, weight, *parts)}
    created = [t for t in gc.get_objects() if issubclass(type(t), torch.Tensor) and id(t) not in before and t is not y]
    assert not [tensor for tensor in created if tensor.numel() >= weight.numel() and tensor.is_floating_point()]


def test_frozen_parts_do_not_keep_the_input():
    x, weight = make_dense((2, 64), seed=2).requires_grad_(), make_dense((48, 64))
    sparse, low_rank = make_sparse(48, 64, 100), make_low_rank(48, 64, 4)
    for tensor in (sparse.values, low_rank.L, low_rank.R):
        tensor.requires_grad_(False)
    saved, _ = saved_storages(x, weight, [sparse], [low_rank])
    assert x.data_ptr() not in saved
    assert weight.data_ptr() in saved


def test_parameters_changed_between_forward_and_backward_are_noticed():
    sparse = make_sparse(3, 5, 6)
    y = sparse_linear(make_dense((4, 5)), make_dense((3, 5)), None, [sparse])
    with torch.no_grad():
        sparse.values.add_(1)
    with pytest.raises(RuntimeError, match="inplace operation"):
        y.sum().backward()


def test_trainable_weight_is_refused():
    weight = make_dense((3, 5)).requires_grad_()
    with pytest.raises(ValueError, match="freeze it"):
        sparse_linear(make_dense((4, 5)), weight, None, [make_sparse(3, 5, 6)])
    with torch.no_grad():
        sparse_linear(make_dense((4, 5)), weight, None, [make_sparse(3, 5, 6)])
