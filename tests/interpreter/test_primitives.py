"""Each kernel of `ops.kernels` and `ops.write_kernels` against float64 PyTorch."""

import pytest

pytest.importorskip("triton")

import torch
import torch.nn.functional as F
from kernel_cases import SUPPORTS, make_support, relative_error

from axolotl_supertune.method.sizes import padded_rank
from axolotl_supertune.ops import Sparse, effective_weight, kernels, write_kernels
from axolotl_supertune.ops.sampling_plan import make_sampling_plan

CPU = torch.device("cpu")
# One token; more than the padding; more than one span of a sum.
TOKENS = [1, 65, 200]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SEED = 2**62 + 12345


def draw(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def transposed(x):
    """(T, n) → (n, T rounded up to 64), zeros behind T."""
    return F.pad(x.t(), (0, -x.shape[0] % 64)).contiguous()


def rounded(x, dtype):
    """x in `dtype` as the interpreter casts it: to bf16 it cuts off where a GPU rounds."""
    return (
        (x.float().view(torch.int32) & -65536).view(torch.float32).to(dtype) if dtype == torch.bfloat16 else x.to(dtype)
    )


def assert_close(found, expected, tolerance=1e-6):
    assert found.shape == expected.shape
    assert relative_error(found, expected) <= tolerance


# Transposed copies


@pytest.mark.parametrize("tokens", [1, 63, 64, 65])
@pytest.mark.parametrize("widths", [[5], [3, 70], [64, 1, 65], [2, 66, 3, 9]])
def test_transpose_pads_with_zeros(tokens, widths):
    xs = [draw(tokens, width, seed=at) for at, width in enumerate(widths)]
    buffer, found = kernels.Transpose(widths, torch.float32, CPU)(*xs)
    assert len(found) == len(xs)
    assert sum(one.numel() for one in found) == buffer.numel()
    for one, x in zip(found, xs, strict=True):
        assert torch.equal(one.view(x.shape[1], -1), transposed(x))


# Sampled products


@pytest.mark.parametrize("shape", [(9, 5), (5, 9), (6, 6)])
@pytest.mark.parametrize("kind", SUPPORTS)
def test_plan_visits_every_entry_once_in_chunks_of_one_feature(shape, kind):
    c, b = shape
    indices = make_support(c, b, 12, kind)
    plan = make_sampling_plan(indices, shape)
    assert plan.by_row == (c >= b)
    order = torch.arange(len(indices)) if plan.order is None else plan.order.long()
    assert torch.equal(order.sort().values, torch.arange(len(indices)))
    start = plan.start.tolist()
    assert start[0] == 0 or not len(indices)
    assert start[-1] == len(indices)
    features = (indices // b if c >= b else indices % b)[order]
    for owner, begin, end in zip(plan.owner.tolist(), start[:-1], start[1:], strict=True):
        assert 1 <= end - begin <= 4
        assert (features[begin:end] == owner).all()


def sampled(plans, pairs, outs=None, **options):
    products = kernels.SampledProducts(plans, pairs[0][0].dtype)
    outs = products.new() if outs is None else outs
    products([(transposed(dy), transposed(x)) for dy, x in pairs], pairs[0][0].shape[0], outs, **options)
    return outs


def exact_sampled(indices, dy, x):
    return (dy.double().t() @ x.double()).view(-1)[indices.long()]


@pytest.mark.parametrize("kind", SUPPORTS)
@pytest.mark.parametrize("shape", [(7, 5), (5, 7)])
def test_sampled_product_of_any_support(kind, shape):
    indices = make_support(*shape, 6, kind)
    dy, x = draw(65, shape[0]), draw(65, shape[1], seed=1)
    (found,) = sampled([make_sampling_plan(indices, shape)], [(dy, x)])
    assert found.dtype == torch.float32
    assert_close(found, exact_sampled(indices, dy, x))


@pytest.mark.parametrize("tokens", [1, 64, 256, 300])
@pytest.mark.parametrize("shape", [(4, 3), (3, 4)])
def test_sampled_product_of_any_number_of_tokens(tokens, shape):
    indices = make_support(*shape, 6)
    dy, x = draw(tokens, shape[0]), draw(tokens, shape[1], seed=1)
    (found,) = sampled([make_sampling_plan(indices, shape)], [(dy, x)])
    assert_close(found, exact_sampled(indices, dy, x))


@pytest.mark.parametrize("dtype", DTYPES)
def test_sampled_product_sums_16_bit_operands_in_fp32(dtype):
    indices = make_support(4, 3, 6)
    dy, x = draw(65, 4, dtype=dtype), draw(65, 3, seed=1, dtype=dtype)
    (found,) = sampled([make_sampling_plan(indices, (4, 3))], [(dy, x)])
    assert found.dtype == torch.float32
    assert_close(found, exact_sampled(indices, dy, x))


def test_sampled_product_of_int64_indices():
    indices = make_support(4, 3, 6).long()
    dy, x = draw(3, 4), draw(3, 3, seed=1)
    (found,) = sampled([make_sampling_plan(indices, (4, 3))], [(dy, x)])
    assert_close(found, exact_sampled(indices, dy, x))


# Both orientations, and parts of nothing at every place.
PARTS = {
    "one": [((5, 4), 7)],
    "two": [((5, 4), 7), ((3, 4), 5)],
    "three": [((5, 4), 7), ((2, 4), 3), ((4, 4), 6)],
    "first empty": [((5, 4), 0), ((2, 4), 3), ((4, 4), 6)],
    "middle empty": [((5, 4), 7), ((2, 4), 0), ((4, 4), 6)],
    "last empty": [((5, 4), 7), ((2, 4), 3), ((4, 4), 0)],
    "one empty": [((5, 4), 0)],
    "all empty": [((5, 4), 0), ((2, 4), 0), ((4, 4), 0)],
    "one entry": [((5, 4), 1), ((2, 4), 1)],
}


@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize("add", [False, True])
def test_sampled_products_of_one_to_three_parts(parts, add):
    shapes, counts = zip(*PARTS[parts], strict=True)
    supports = [make_support(*shape, count, seed=at) for at, (shape, count) in enumerate(PARTS[parts])]
    x = draw(5, 4, seed=9)
    pairs = [(draw(5, shape[0], seed=at), x) for at, shape in enumerate(shapes)]
    plans = [make_sampling_plan(indices, shape) for indices, shape in zip(supports, shapes, strict=True)]
    outs = kernels.SampledProducts(plans, torch.float32).new()
    assert [out.numel() for out in outs] == list(counts)
    before = [draw(count, seed=20 + at) for at, count in enumerate(counts)]
    if add:
        for out, value in zip(outs, before, strict=True):
            out.copy_(value)
    sampled(plans, pairs, outs, add=add)
    for out, indices, (dy, _), value in zip(outs, supports, pairs, before, strict=True):
        assert_close(out, exact_sampled(indices, dy, x) + (value.double() if add else 0))


# Thin products

# Shapes of one to three layers of one input: not multiples of any block, and wider than one.
WIDTHS = [[5], [5, 131], [3, 70, 20]]
RANKS = [3, 1, 16]


def packed(rank, width, seed, dtype=torch.float32):
    """(r', n): F below the rank, zeros above."""
    padded = padded_rank(rank)
    return F.pad(draw(rank, width, seed=seed), (0, 0, 0, padded - rank)).to(dtype)


def masks(probability, shape, count, stream):
    """Kept or not, already divided by what is kept on average, in float64."""
    if not probability:
        return [1.0] * count
    threshold = kernels.dropout_threshold(probability)
    kept = [kernels.dropout_mask(SEED, shape, probability, CPU, stream + at) for at in range(count)]
    return [mask.double() * 65536 / (65536 - threshold) for mask in kept]


@pytest.mark.parametrize("tokens", [1, 17])
@pytest.mark.parametrize("width", [5, 131])
@pytest.mark.parametrize("parts", [1, 2, 3])
@pytest.mark.parametrize("probability", [0, 0.3])
def test_narrow(tokens, width, parts, probability):
    x, factors = draw(tokens, width), [packed(RANKS[at], width, at) for at in range(parts)]
    found = kernels.Narrow(factors, kernels.dropout_threshold(probability), 5)(x, SEED)
    kept = masks(probability, x.shape, parts, 5)
    expected = [x.double() * mask @ factor.double().t() for mask, factor in zip(kept, factors, strict=True)]
    assert_close(found, torch.cat(expected, 1))


@pytest.mark.parametrize("tokens", [1, 33])
@pytest.mark.parametrize("widths", WIDTHS)
def test_narrow_each(tokens, widths):
    dys = [draw(tokens, width, seed=at) for at, width in enumerate(widths)]
    factors = [packed(RANKS[at], width, 10 + at) for at, width in enumerate(widths)]
    expected = [dy.double() @ factor.double().t() for dy, factor in zip(dys, factors, strict=True)]
    assert_close(kernels.NarrowEach(factors)(dys), torch.cat(expected, 1))


@pytest.mark.parametrize("tokens", [1, 65])
@pytest.mark.parametrize("widths", WIDTHS)
def test_widen(tokens, widths):
    inner = draw(tokens, 16 * len(widths))
    factors = [packed(RANKS[at], width, at) for at, width in enumerate(widths)]
    found = kernels.Widen(factors)(inner, inner.shape[:1])
    for at, factor in enumerate(factors):
        assert_close(found[at], inner[:, 16 * at : 16 * at + 16].double() @ factor.double())


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("widths", [[5], [3, 70, 20]])
@pytest.mark.parametrize(("probability", "through"), [(0, True), (0.3, True), (0.3, False)])
def test_thin_gradients(tokens, widths, probability, through):
    b, parts = 67, len(widths)
    ranks, scales = RANKS[:parts], [0.5, 2.0, 3.0][:parts]
    x, inner, d_inner = draw(tokens, b), draw(tokens, 16 * parts, seed=1), draw(tokens, 16 * parts, seed=2)
    dys = [draw(tokens, width, seed=10 + at) for at, width in enumerate(widths)]
    rights = [packed(rank, b, 20 + at) for at, rank in enumerate(ranks)]
    threshold = kernels.dropout_threshold(probability)
    thin = kernels.ThinGradients(rights, widths, ranks, scales, threshold, 5, torch.float32)
    d_left, d_right, passed = thin(x, dys, inner, d_inner, SEED, through=through)

    kept, total = masks(probability, x.shape, parts, 5), 0
    for at, rank in enumerate(ranks):
        mine = slice(16 * at, 16 * at + 16)
        expected = scales[at] * dys[at].double().t() @ inner[:, mine].double()
        assert_close(d_left[at], expected[:, :rank])
        expected = d_inner[:, mine].double().t() @ (x.double() * kept[at])
        assert_close(d_right[at], expected[:rank])
        total = total + d_inner[:, mine].double() @ rights[at].double() * kept[at]
    if through:
        assert_close(passed, total)
        assert torch.equal(thin.through(x, d_inner, SEED), passed)
    else:
        assert passed is None


@pytest.mark.parametrize("tokens", [1, 64, 127, 128, 129, 1000, 3136, 20000, 32768])
@pytest.mark.parametrize("blocks", [1, 7, 64, 224, 600])
def test_spans_cover_every_token_and_none_is_empty(tokens, blocks):
    splits, span = kernels._splits(tokens, blocks)
    assert span % 64 == 0
    assert (splits - 1) * span < tokens <= splits * span


def test_thin_products_of_16_bit_operands():
    """fp16; in bf16 the interpreter's matrix product is wrong."""
    dtype, step = torch.float16, torch.finfo(torch.float16).eps
    x, factor = draw(17, 131, dtype=dtype), packed(3, 131, 1, dtype)
    found = kernels.Narrow([factor], 0, 0)(x, 0)
    assert found.dtype == dtype
    assert not found[:, 3:].any()
    assert_close(found, x.double() @ factor.double().t(), step)
    inner = draw(17, 16, dtype=dtype)
    (wide,) = kernels.Widen([factor])(inner, inner.shape[:1])
    assert wide.dtype == dtype
    assert_close(wide, inner.double() @ factor.double(), step)
    thin = kernels.ThinGradients([factor], [5], [3], [0.5], 0, 0, torch.float32)
    dy = draw(17, 5, dtype=dtype)
    (d_left,), (d_right,), passed = thin(x, [dy], found, inner, 0, through=True)
    assert d_left.dtype == d_right.dtype == torch.float32
    assert_close(d_left, (0.5 * dy.double().t() @ found.double())[:, :3])
    assert_close(d_right, (inner.double().t() @ x.double())[:3])
    assert passed.dtype == dtype
    assert_close(passed, inner.double() @ factor.double(), step)


# Dropout


def test_dropout_mask_depends_on_seed_stream_and_place_alone():
    mask = kernels.dropout_mask(SEED, (20, 40), 0.5, CPU, 3)
    assert torch.equal(kernels.dropout_mask(SEED, (33, 130), 0.5, CPU, 3)[:20, :40], mask)
    others = [kernels.dropout_mask(SEED + 1, (20, 40), 0.5, CPU, 3), kernels.dropout_mask(SEED, (20, 40), 0.5, CPU, 4)]
    for other in others:
        assert 0.4 < (other == mask).float().mean() < 0.6


@pytest.mark.parametrize("probability", [0.05, 0.5, 0.9])
def test_dropout_mask_meets_its_probability(probability):
    mask = kernels.dropout_mask(SEED, (200, 256), probability, CPU).float()
    assert abs(float(mask.mean()) - (1 - probability)) < 0.01
    # No feature of an octet and no token stands out: the eight draws of one Philox call are all used.
    for share in (mask.view(200, 32, 8).mean((0, 1)), mask.view(25, 8, 256).mean((0, 2))):
        assert (share - (1 - probability)).abs().max() < 0.03
    # Neighbours, which share a Philox call, are independent.
    centred = mask - mask.mean()
    assert abs(float((centred[:, 1:] * centred[:, :-1]).mean())) < 0.01


@pytest.mark.parametrize(("probability", "threshold"), [(0, 0), (0.5, 32768), (0.05, 3277), (1e-6, 0), (1.0, 65535)])
def test_dropout_threshold(probability, threshold):
    assert kernels.dropout_threshold(probability) == threshold


@pytest.mark.parametrize(("rank", "padded"), [(1, 16), (15, 16), (16, 16), (17, 32), (33, 64), (128, 128)])
def test_padded_rank(rank, padded):
    assert padded_rank(rank) == padded


# SwiGLU


@pytest.mark.parametrize("tokens", [1, 65])
@pytest.mark.parametrize("width", [5, 70])
@pytest.mark.parametrize("transposed_too", [False, True])
def test_swiglu(tokens, width, transposed_too):
    gate, up = (
        draw(tokens, width, seed=1).double().requires_grad_(),
        draw(tokens, width, seed=2).double().requires_grad_(),
    )
    dh = draw(tokens, width, seed=3)
    expected = F.silu(gate) * up
    d_gate, d_up = torch.autograd.grad(expected, (gate, up), dh.double())
    swiglu = kernels.Swiglu(width, torch.float32, CPU)
    gate, up = gate.detach().float(), up.detach().float()
    assert_close(swiglu(gate, up), expected)
    *found, buffer, copies = swiglu.backward(dh, gate, up, transposed=transposed_too)
    assert_close(found[0], d_gate)
    assert_close(found[1], d_up)
    assert (buffer is not None) == transposed_too
    if transposed_too:
        gate_t, up_t, product_t = (each.view(width, -1) for each in copies)
        assert torch.equal(gate_t, transposed(found[0]))
        assert torch.equal(up_t, transposed(found[1]))
        assert_close(product_t, transposed(expected))
        assert not product_t[:, tokens:].any()


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
def test_swiglu_of_large_activations_is_finite():
    gate = torch.tensor([[-1e4, -200.0, -90.0, 90.0, 200.0, 1e4]])
    up, dh = torch.full_like(gate, 2.0), torch.ones_like(gate)
    swiglu = kernels.Swiglu(6, torch.float32, CPU)
    assert_close(swiglu(gate, up), F.silu(gate) * up)
    d_gate, d_up, *_ = swiglu.backward(dh, gate, up, transposed=False)
    torch.testing.assert_close(d_gate, torch.tensor([[0.0, 0.0, 0.0, 2.0, 2.0, 2.0]]))
    torch.testing.assert_close(d_up, F.silu(gate))


def test_swiglu_rounds_as_the_two_eager_operations_do():
    gate, up, dh = (draw(9, 40, seed=at, dtype=torch.float16) for at in range(3))
    leaves = [gate.clone().requires_grad_(), up.clone().requires_grad_()]
    expected = F.silu(leaves[0]) * leaves[1]
    gradients = torch.autograd.grad(expected, leaves, dh)
    swiglu = kernels.Swiglu(40, torch.float16, CPU)
    # The same bits, but where a rounding turns on the last bit of exp.
    assert (swiglu(gate, up) == expected).float().mean() > 0.98
    for found, one in zip(swiglu.backward(dh, gate, up, transposed=False)[:2], gradients, strict=True):
        assert_close(found, one, 5e-4)


# Writing supports and copying factors


@pytest.mark.parametrize("dtype", DTYPES)
def test_write_table_rounds_every_layer_once_and_touches_only_supports(dtype):
    """Three layers in one launch: of more than one block of entries, of none, of a few."""
    shapes, counts = [(60, 50), (4, 3), (7, 5)], [2100, 0, 6]
    weights = [draw(*shape, seed=at, dtype=dtype) for at, shape in enumerate(shapes)]
    supports = [
        make_support(*shape, count, seed=at) for at, (shape, count) in enumerate(zip(shapes, counts, strict=True))
    ]
    values = [draw(count, seed=10 + at) * 0.1 for at, count in enumerate(counts)]
    expected = [
        rounded(effective_weight(weight.float(), [Sparse(value, indices)]), dtype)
        for weight, value, indices in zip(weights, values, supports, strict=True)
    ]
    saved = [weight.view(-1)[indices.long()] for weight, indices in zip(weights, supports, strict=True)]
    table = write_kernels.write_table(list(zip(weights, supports, values, saved, strict=True)))
    for _ in range(2):  # from `saved`, not from what is there: twice is once
        write_kernels.write_supports(table)
        for weight, one in zip(weights, expected, strict=True):
            assert torch.equal(weight, one)
    for value in values:
        value.zero_()
    write_kernels.write_supports(table)
    for at, weight in enumerate(weights):
        assert torch.equal(weight, draw(*shapes[at], seed=at, dtype=dtype))


def test_write_table_of_nothing():
    weight = draw(4, 3)
    nothing = torch.empty(0)
    write_kernels.write_supports(write_kernels.write_table([(weight, nothing.int(), nothing, nothing)]))
    assert torch.equal(weight, draw(4, 3))


@pytest.mark.parametrize("dtype", DTYPES)
def test_pack_table_scales_transposes_and_fills_up_with_zeros(dtype):
    L, R, other = draw(300, 3), draw(3, 7, seed=1), draw(16, 5, seed=2)
    factors = [(L.t(), 2.5, (16, 300)), (R, 1.0, (16, 7)), (other, -1.0, (16, 5))]
    factors = [(factor, scale, torch.empty(shape, dtype=dtype)) for factor, scale, shape in factors]
    write_kernels.pack_factors(write_kernels.pack_table(factors))
    for factor, scale, copy in factors:
        rank = factor.shape[0]
        assert torch.equal(copy[:rank], rounded((factor * scale).contiguous(), dtype))
        assert not copy[rank:].any()
