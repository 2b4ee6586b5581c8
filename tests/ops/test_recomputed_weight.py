"""`recomputed_weight_linear` against autograd on the dense effective weight, and against the reference."""

import gc
import weakref

import pytest
import torch
from test_reference import assert_same as assert_reference_same
from test_reference import dense_linear, make_dense, make_low_rank, make_sparse, outputs, relative_error, scatter
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from axolotl_supertune.ops import LowRank, Sparse, dispatch, effective_weight, sparse_linear
from axolotl_supertune.ops.recomputed_weight import BlockGradient, recomputed_weight_linear

SHAPES = [(1, 1), (3, 5), (7, 2), (16, 9)]


def blocks(sparse, weight, **options):
    return [BlockGradient(part.indices, tuple(weight.shape), **options) for part in sparse]


def recomputed(x, weight, bias, sparse, low_rank, block=8, **options):
    gradients = blocks(sparse, weight, block=block)
    return recomputed_weight_linear(x, lambda: weight.clone(), bias, sparse, low_rank, gradients, **options)


def assert_same(x, weight, bias, sparse, low_rank, **options):
    ours = outputs(lambda *a: recomputed(*a, **options), x, weight, bias, sparse, low_rank)
    for one, other in zip(ours, outputs(dense_linear, x, weight, bias, sparse, low_rank), strict=True):
        assert one.dtype == other.dtype
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("tokens", [(), (4,), (2, 3), (0,)], ids=str)
@pytest.mark.parametrize(("c", "b"), SHAPES)
def test_matches_dense_autograd(c, b, tokens, in_place):
    x = make_dense((*tokens, b), seed=2).requires_grad_()
    bias = make_dense((c,), seed=3).requires_grad_()
    sparse, low_rank = [make_sparse(c, b, (c * b + 1) // 2)], [make_low_rank(c, b, 3)]
    assert_same(x, make_dense((c, b)), bias, sparse, low_rank, in_place=in_place)


@pytest.mark.parametrize("parts", [(0, 0), (1, 0), (0, 1), (2, 0), (2, 2)], ids=str)
def test_any_number_of_parts_whose_supports_overlap(parts):
    x = make_dense((4, 9), seed=2).requires_grad_()
    sparse = [make_sparse(16, 9, 40, seed=seed) for seed in range(parts[0])]
    low_rank = [make_low_rank(16, 9, 2, seed=seed) for seed in range(parts[1])]
    assert_same(x, make_dense((16, 9)), None, sparse, low_rank, in_place=True)


@pytest.mark.parametrize("wanted", ["x", "values", "L", "R", "bias"])
def test_only_what_is_wanted_is_computed(wanted):
    x, bias = make_dense((4, 9), seed=2), make_dense((16,), seed=3)
    sparse, low_rank = [make_sparse(16, 9, 40)], [make_low_rank(16, 9, 2)]
    leaves = {"x": x, "bias": bias, "values": sparse[0].values, "L": low_rank[0].L, "R": low_rank[0].R}
    for name, leaf in leaves.items():
        leaf.requires_grad_(name == wanted)
    assert_same(x, make_dense((16, 9)), bias, sparse, low_rank)


def test_gradcheck():
    weight = make_dense((5, 4))
    sparse, low_rank = [make_sparse(5, 4, 9)], [make_low_rank(5, 4, 2)]
    gradients = blocks(sparse, weight, block=4)

    def layer(x, bias, values, L, R):
        parts = [Sparse(values, sparse[0].indices)], [low_rank[0]._replace(L=L, R=R)]
        return recomputed_weight_linear(x, lambda: weight.clone(), bias, *parts, gradients, in_place=True)

    leaves = [make_dense((3, 4), seed=2), make_dense((5,), seed=3), sparse[0].values, low_rank[0].L, low_rank[0].R]
    assert torch.autograd.gradcheck(layer, [leaf.detach().clone().requires_grad_() for leaf in leaves])


@pytest.mark.parametrize("block", [1, 9, 30, 10**6])
@pytest.mark.parametrize("count", [0, 1, 60, 144])
def test_a_gradient_in_blocks_is_the_dense_one_on_the_support(block, count):
    x, dy = make_dense((7, 9), seed=2), make_dense((7, 16), seed=3)
    indices = make_sparse(16, 9, count).indices
    found = BlockGradient(indices, (16, 9), block=block)(x, dy)
    torch.testing.assert_close(found, (dy.t() @ x).view(-1)[indices])


def test_a_block_without_entries_is_left_out():
    indices = torch.tensor([2, 3, 12 * 9, 16 * 9 - 1], dtype=torch.int32)
    assert len(BlockGradient(indices, (16, 9), block=9)._blocks) == 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_w_plus_u_is_rounded_once_as_the_reference_does(dtype):
    x, weight = make_dense((4, 9), seed=2).to(dtype), make_dense((16, 9)).to(dtype)
    sparse = [make_sparse(16, 9, 60, dtype=torch.float32)]
    ours = recomputed(x, weight, None, sparse, [], in_place=True)
    assert torch.equal(ours, sparse_linear(x, weight, None, sparse))
    assert torch.equal(ours, torch.nn.functional.linear(x, effective_weight(weight, sparse)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_gradients_are_fp32_and_close_to_the_exact_ones(dtype):
    def parts(of_x, of_adapter):
        def leaf(tensor, kind):
            return tensor.detach().to(kind).requires_grad_()

        (values, indices), (L, R, *rest) = make_sparse(16, 9, 60), make_low_rank(16, 9, 2)
        values, L, R = (leaf(tensor.float(), of_adapter) for tensor in (values, L, R))
        x, weight = leaf(make_dense((6, 9), seed=2).to(dtype), of_x), (make_dense((16, 9)) * 0.3).to(dtype).to(of_x)
        return x, weight, None, [Sparse(values, indices)], [LowRank(L, R, *rest)]

    found = outputs(recomputed, *parts(dtype, torch.float32))
    exact = outputs(dense_linear, *parts(torch.float64, torch.float64))
    assert [each.dtype for each in found] == [dtype, torch.float32, torch.float32, torch.float32, dtype]
    for one, other in zip(found, exact, strict=True):
        assert relative_error(one, other) < 2e-2


@pytest.mark.parametrize("compute", [None, torch.bfloat16])
def test_the_result_has_the_dtype_of_x_where_the_layer_has_one_of_its_own(compute):
    x, weight = make_dense((4, 9), seed=2).float().requires_grad_(), make_dense((16, 9)).bfloat16()
    if compute is None:
        x = x.detach().bfloat16().requires_grad_()
    y = recomputed(x, weight, None, [make_sparse(16, 9, 60, dtype=torch.float32)], [], compute=compute)
    assert y.dtype == x.dtype
    expected = x.bfloat16() @ effective_weight(weight, [make_sparse(16, 9, 60, dtype=torch.float32)]).t()
    torch.testing.assert_close(y, expected.to(x.dtype))
    y.sum().backward()
    assert x.grad.dtype == x.dtype


def test_autocast_decides_where_the_layer_does_not():
    x, weight = make_dense((4, 9), seed=2).float().requires_grad_(), make_dense((16, 9)).float()
    sparse, low_rank = [make_sparse(16, 9, 60, dtype=torch.float32)], [make_low_rank(16, 9, 2, dtype=torch.float32)]

    def run(function):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return outputs(function, x, weight, None, sparse, low_rank)

    ours, reference = run(recomputed), run(sparse_linear)
    assert ours[0].dtype == torch.bfloat16
    for one, other in zip(ours, reference, strict=True):
        assert relative_error(one, other) < 1e-6


def test_dropout_of_backward_is_that_of_forward():
    x = make_dense((4, 9), seed=2).requires_grad_()
    parts = x, make_dense((16, 9)), None, [make_sparse(16, 9, 40)], [make_low_rank(16, 9, 2, dropout=0.5)]
    torch.manual_seed(3)
    ours = outputs(recomputed, *parts, between=lambda: torch.rand(100))
    torch.manual_seed(3)
    for one, other in zip(ours, outputs(dense_linear, *parts), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_changes_nothing(reentrant):
    x = make_dense((4, 9), seed=2).requires_grad_()
    parts = x, make_dense((16, 9)), None, [make_sparse(16, 9, 40)], [make_low_rank(16, 9, 2, dropout=0.3)]
    torch.manual_seed(3)
    plain = outputs(recomputed, *parts)
    torch.manual_seed(3)
    values, L, R = parts[3][0].values, parts[4][0].L, parts[4][0].R
    y = checkpoint(lambda x: recomputed(x, *parts[1:]), x, use_reentrant=reentrant)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    y.backward(dy)
    for one, other in zip([y, values.grad, L.grad, R.grad, x.grad], plain, strict=True):
        torch.testing.assert_close(one, other)


def test_the_weight_is_made_once_in_each_pass_and_kept_in_between_by_nobody():
    made = []

    def weight():
        tensor = make_dense((16, 9))
        made.append(weakref.ref(tensor))
        return tensor

    x, sparse = make_dense((4, 9), seed=2).requires_grad_(), [make_sparse(16, 9, 40)]
    y = recomputed_weight_linear(
        x, weight, None, sparse, [], [BlockGradient(sparse[0].indices, (16, 9))], in_place=True
    )
    gc.collect()
    assert [each() for each in made] == [None]
    y.sum().backward()
    gc.collect()
    assert [each() for each in made] == [None, None]


class Largest(TorchDispatchMode):
    """The largest tensor that any operation makes, in elements, views and inputs left out."""

    def __init__(self):
        super().__init__()
        self.size = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        inputs = {each.untyped_storage().data_ptr() for each in args if isinstance(each, torch.Tensor)}
        for each in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(each, torch.Tensor) and each.untyped_storage().data_ptr() not in inputs:
                self.size = max(self.size, each.numel())
        return out


def test_no_gradient_of_the_weight_is_ever_dense():
    c, b = 64, 48
    x, weight = make_dense((3, b), seed=2), make_dense((c, b))
    sparse = [make_sparse(c, b, 200)]
    y = recomputed(x, weight, None, sparse, [], block=4 * b)
    with Largest() as found:
        y.sum().backward()
    assert 4 * b <= found.size < c * b / 4
    with Largest() as reference:
        sparse_linear(x, weight, None, sparse).sum().backward()
    assert reference.size >= c * b


def test_a_weight_of_others_is_not_written_to():
    weight = make_dense((16, 9))
    before, sparse = weight.clone(), [make_sparse(16, 9, 40)]
    x = make_dense((4, 9), seed=2).requires_grad_()
    recomputed_weight_linear(x, lambda: weight, None, sparse, [], blocks(sparse, weight)).sum().backward()
    assert torch.equal(weight, before)
    assert scatter(sparse[0], weight).any()


def test_the_reference_itself_still_matches():
    x = make_dense((4, 9), seed=2).requires_grad_()
    assert_reference_same(
        x, make_dense((16, 9)), None, [make_sparse(16, 9, 40)], [make_low_rank(16, 9, 2), make_low_rank(16, 9, 3)]
    )


@pytest.fixture
def asked(monkeypatch):
    dispatch._unsupported_device_reason.cache_clear()
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)

    def ask(kind, x=None, shape=(4, 3)):
        monkeypatch.setenv("SUPERTUNE_KERNELS", kind)
        x = torch.zeros(2, 3) if x is None else x
        return dispatch.takes_sampled_products(x, torch.float32, shape, layer="model.q_proj")

    return ask


@pytest.mark.parametrize("kind", ["auto", "reference"])
def test_the_cpu_takes_no_kernel(asked, kind):
    assert not asked(kind)


@pytest.mark.parametrize(
    ("x", "shape", "reason"),
    [
        (None, (4, 3), "run on CUDA devices|triton is not installed"),
        (None, (1, 3), "shape (1, 3) is left to it"),
        (torch.zeros(0, 3), (4, 3), "input is empty"),
    ],
)
def test_a_kernel_that_was_asked_for_and_cannot_run_is_an_error(asked, x, shape, reason):
    reason = reason.replace("(", r"\(").replace(")", r"\)")
    with pytest.raises(RuntimeError, match=rf"model\.q_proj: SUPERTUNE_KERNELS=triton, .*({reason})"):
        asked("triton", x, shape)


def test_what_deepspeed_puts_in_the_place_of_linear_is_not_called(monkeypatch):
    x, weight = make_dense((4, 5), seed=1).requires_grad_(), make_dense((3, 5), seed=2)
    parts = [make_sparse(3, 5, 4, seed=3)], [make_low_rank(3, 5, 2, seed=4)]
    monkeypatch.setattr(torch.nn.functional, "linear", lambda *args, **kwargs: pytest.fail("DeepSpeed's was called"))
    for y in (sparse_linear(x, weight, None, *parts), recomputed(x, weight, None, *parts)):
        y.sum().backward()
