import weakref
from itertools import product

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import axolotl_supertune.method.support
from axolotl_supertune.method import support
from axolotl_supertune.method.budget import hybrid_split
from axolotl_supertune.method.scores import magnitude_rows, magnitude_score, wanda_rows, wanda_score
from axolotl_supertune.method.support import (
    index_dtype,
    random_rows_support,
    random_support,
    row_counts,
    select_across,
    select_from_blocks,
    select_support,
    select_within_rows,
)

# The worked example of the paper's appendix: its scores are [[15, 2], [10, 4], [5, 6]].
W = torch.tensor([[3.0, -2.0], [-2.0, 4.0], [1.0, -6.0]])
X = torch.tensor([[4.0, 3.0], [0.0, 1.0]])


def reference(scores, count, direction, beta=0.5):
    """Slow and stable: Python's sort keeps the lower index first among equals."""
    flat = scores.double().reshape(-1).tolist()
    ascending = sorted(range(len(flat)), key=lambda index: flat[index])
    descending = sorted(range(len(flat)), key=lambda index: -flat[index])
    k_top = {"top": count, "bottom": 0, "hybrid": hybrid_split(count, beta)[0]}[direction]
    top = descending[:k_top]
    taken = set(top)
    rest = [index for index in ascending if index not in taken]
    return sorted(top + rest[: count - k_top])


def whole_tensor(scores, count, direction, beta=0.5):
    """The same by `kthvalue` and masks over the whole layer, fast enough for layers of many blocks."""

    def smallest(flat, count):
        if count == 0:
            return torch.zeros_like(flat, dtype=torch.bool)
        threshold = flat.kthvalue(count).values
        chosen = flat < threshold
        ties = (flat == threshold).nonzero().squeeze(1)
        chosen[ties[: count - int(chosen.sum())]] = True
        return chosen

    flat = scores.reshape(-1)
    k_top = {"top": count, "bottom": 0, "hybrid": hybrid_split(count, beta)[0]}[direction]
    chosen = smallest(-flat, k_top)
    chosen |= smallest(flat.masked_fill(chosen, torch.inf), count - k_top)
    return chosen.nonzero().squeeze(1)


@pytest.fixture(params=[(1, 1, 3), (7, 4, 11), (64, 1000, 5)], ids=str)
def small_blocks(request, monkeypatch):
    """Blocks and histograms as a huge layer has them, on a small one."""
    set_sizes(monkeypatch, *request.param)


def set_sizes(monkeypatch, block, few, digit):
    for name, value in (("_BLOCK", block), ("_BLOCK_CPU", block), ("_FEW", few), ("_DIGIT", digit)):
        monkeypatch.setattr(axolotl_supertune.method.support, name, value)


@pytest.mark.parametrize(
    ("count", "direction", "mask"),
    [
        (1, "top", [[1, 0], [0, 0], [0, 0]]),
        (2, "top", [[1, 0], [1, 0], [0, 0]]),
        (4, "top", [[1, 0], [1, 0], [1, 1]]),
        (2, "bottom", [[0, 1], [0, 1], [0, 0]]),
    ],
)
def test_masks_of_the_paper_example(count, direction, mask):
    support = select_support(wanda_score(W, X.norm(dim=1)), count, direction)
    chosen = torch.zeros(6, dtype=torch.int64)
    chosen[support] = 1
    assert chosen.view(3, 2).tolist() == mask


@pytest.mark.parametrize(
    ("direction", "expected"),
    [("bottom", [0, 1, 2, 3]), ("top", [0, 1, 2, 3]), ("hybrid", [0, 1, 2, 3])],
)
def test_equal_scores_take_the_lowest_indices(direction, expected):
    assert select_support(torch.ones(3, 4), 4, direction).tolist() == expected


@pytest.mark.parametrize(
    ("direction", "expected"),
    [("bottom", [1, 3, 4]), ("top", [0, 2, 7]), ("hybrid", [0, 1, 2])],
)
def test_lower_index_wins_a_tie_at_the_threshold(direction, expected):
    scores = torch.tensor([9.0, 1, 9, 1, 1, 1, 1, 9, 9, 9])
    assert select_support(scores, 3, direction).tolist() == expected


@pytest.mark.parametrize("direction", ["bottom", "top", "hybrid"])
def test_bf16_weights_with_hundreds_of_ties_match_a_stable_sort(direction):
    weight = torch.randn(512, 512, generator=torch.Generator().manual_seed(0)) * 0.02
    scores = magnitude_score(weight.to(torch.bfloat16))
    count = 30_000
    flat = scores.reshape(-1)
    for threshold in (flat.kthvalue(count).values, flat.kthvalue(flat.numel() - count).values):
        assert int((flat == threshold).sum()) > 100, "this test wants ties"
    support = select_support(scores, count, direction)
    assert support.tolist() == reference(scores, count, direction)


def test_a_threshold_shared_by_hundreds_matches_a_stable_sort():
    scores = torch.randint(0, 4, (40, 40), generator=torch.Generator().manual_seed(1)).float()
    for direction in ("bottom", "top", "hybrid"):
        assert select_support(scores, 613, direction).tolist() == reference(scores, 613, direction)


@given(
    values=st.lists(st.integers(0, 4), min_size=1, max_size=60),
    direction=st.sampled_from(["bottom", "top", "hybrid"]),
    tenths=st.integers(0, 10),
    data=st.data(),
)
def test_any_tied_scores_match_a_stable_sort(values, direction, tenths, data):
    scores = torch.tensor(values, dtype=torch.float32)
    count = data.draw(st.integers(0, len(values)))
    support = select_support(scores, count, direction, hybrid_beta=tenths / 10)
    assert support.tolist() == reference(scores, count, direction, tenths / 10)


FINITE = {
    torch.float32: st.floats(0, width=32, allow_infinity=False),
    torch.float64: st.floats(0, width=64, allow_infinity=False),
    torch.bfloat16: st.sampled_from([0.0, -0.0, 2.0**-133, 0.5, 0.50390625, 1.0, 3.0e38]),
}


@given(
    dtype=st.sampled_from(list(FINITE)),
    direction=st.sampled_from(["bottom", "top", "hybrid"]),
    tenths=st.integers(0, 10),
    sizes=st.sampled_from([(1, 1, 3), (5, 2, 11), (64, 1, 11), (2**20, 2**18, 11)]),
    width=st.integers(1, 7),
    data=st.data(),
)
def test_any_scores_in_any_blocks_match_a_stable_sort(dtype, direction, tenths, sizes, width, data):
    few_values = data.draw(st.lists(FINITE[dtype], min_size=1, max_size=4))
    element = st.sampled_from([*few_values, 0.0, -0.0]) | FINITE[dtype]
    values = data.draw(st.lists(element, min_size=width, max_size=60))
    values = values[: len(values) // width * width]
    scores = torch.tensor(values, dtype=dtype).view(-1, width)
    count = data.draw(st.integers(0, len(values)))
    with pytest.MonkeyPatch.context() as patch:
        set_sizes(patch, *sizes)
        support = select_support(scores, count, direction, hybrid_beta=tenths / 10)
    assert support.dtype == torch.int32
    assert support.tolist() == reference(scores, count, direction, tenths / 10)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["bf16", "fp32", "equal", "zeros", "two values", "close", "fp64"])
def test_blocks_of_a_layer_give_what_the_whole_layer_gives(small_blocks, kind):
    generator = torch.Generator().manual_seed(2)
    scores = {
        "bf16": lambda x: x.bfloat16().float(),
        "fp32": lambda x: x,
        "equal": torch.ones_like,
        "zeros": torch.zeros_like,
        "two values": lambda x: (x > 0.01).float(),
        "close": lambda x: 1 + x * 1e-6,  # one leading digit for all
        "fp64": lambda x: 1 + x.double() * 1e-13,
    }[kind](torch.randn(37, 23, generator=generator).abs() * 0.02)
    for direction, count in product(("bottom", "top", "hybrid"), (1, 2, 300, 850, 851)):
        support = select_support(scores, count, direction, hybrid_beta=0.3)
        assert torch.equal(support.long(), whole_tensor(scores, count, direction, 0.3)), (direction, count)


@pytest.mark.parametrize("direction", ["bottom", "top", "hybrid"])
@pytest.mark.parametrize("share", [0.002, 0.4])
@pytest.mark.parametrize("wanda", [False, True], ids=["magnitude", "wanda"])
def test_a_layer_of_several_blocks_is_selected_from_blocks(direction, share, wanda):
    generator = torch.Generator().manual_seed(3)
    weight = (torch.randn(1511, 1409, generator=generator) * 0.02).bfloat16()
    norm = torch.rand(1409, generator=generator) if wanda else None
    count = int(weight.numel() * share)
    rows = magnitude_rows(weight) if norm is None else wanda_rows(weight, norm)
    support = select_from_blocks(rows, weight.shape, count, direction, hybrid_beta=0.3)
    scores = magnitude_score(weight) if norm is None else wanda_score(weight, norm)
    assert torch.equal(support.long(), whole_tensor(scores, count, direction, 0.3))


@pytest.mark.parametrize("direction", ["bottom", "top", "hybrid"])
def test_no_scores_of_a_whole_layer_are_asked_for(direction, monkeypatch):
    set_sizes(monkeypatch, 2**12, 2**8, 11)
    scores, asked = torch.rand(1000, 64), []

    def rows(start, stop):
        asked.append(stop - start)
        return scores[start:stop]

    select_from_blocks(rows, scores.shape, 3000, direction)
    assert max(asked) == 64


@pytest.mark.parametrize("direction", ["bottom", "top", "hybrid"])
def test_support_is_flat_sorted_int32(direction):
    support = select_support(torch.rand(9, 13), 50, direction)
    assert support.dtype == torch.int32
    assert support.shape == (50,)
    assert bool((support[1:] > support[:-1]).all())


def test_indices_are_row_major_even_for_a_transposed_weight():
    scores = torch.tensor([[5.0, 0.0], [1.0, 9.0], [7.0, 8.0]])
    assert select_support(scores.t(), 1, "bottom").tolist() == [3]


@pytest.mark.parametrize(
    ("size", "dtype"),
    [(1, torch.int32), (2**31 - 1, torch.int32), (2**31, torch.int32), (2**31 + 1, torch.int64)],
)
def test_index_dtype_is_int32_while_every_index_fits(size, dtype):
    assert index_dtype(size) == dtype


def test_random_support_of_a_huge_layer_is_int64():
    support = random_support(2**31 + 10, 5, seed=0, layer="huge")
    assert support.dtype == torch.int64
    assert len(support) == 5


@pytest.mark.parametrize("direction", ["bottom", "top", "hybrid"])
def test_empty_and_full_support(direction):
    scores = torch.rand(4, 5)
    empty = select_support(scores, 0, direction)
    assert empty.shape == (0,)
    assert empty.dtype == torch.int32
    assert select_support(scores, 20, direction).tolist() == list(range(20))


@pytest.mark.parametrize("count", [-1, 21])
def test_count_outside_the_layer_is_refused(count):
    with pytest.raises(ValueError, match="does not fit 20 weights"):
        select_support(torch.rand(4, 5), count, "top")
    with pytest.raises(ValueError, match="does not fit 20 weights"):
        random_support(20, count, seed=0, layer="layer")


def test_unknown_direction_is_refused():
    with pytest.raises(ValueError, match=r"direction='sideways' is not one of bottom, top, hybrid\."):
        select_support(torch.rand(2, 2), 1, "sideways")
    with pytest.raises(ValueError, match="direction='random' needs no scores: call random_support"):
        select_support(torch.rand(2, 2), 1, "random")


@pytest.mark.parametrize("scores", [torch.rand(8, 8), torch.ones(8, 8)], ids=["distinct", "all equal"])
@pytest.mark.parametrize("count", [1, 2, 33, 63, 64])
def test_hybrid_never_counts_an_entry_twice(scores, count):
    assert len(select_support(scores, count, "hybrid", hybrid_beta=0.7).unique()) == count


def test_hybrid_is_the_union_of_both_ends():
    scores = torch.rand(6, 7, generator=torch.Generator().manual_seed(3))
    hybrid = set(select_support(scores, 10, "hybrid", hybrid_beta=0.3).tolist())
    top, bottom = select_support(scores, 3, "top").tolist(), select_support(scores, 7, "bottom").tolist()
    assert hybrid == {*top, *bottom}


@pytest.mark.parametrize(("beta", "direction"), [(0, "bottom"), (1, "top")])
def test_hybrid_endpoints_are_the_pure_directions(beta, direction):
    scores = torch.randint(0, 5, (9, 9), generator=torch.Generator().manual_seed(4)).float()
    hybrid = select_support(scores, 25, "hybrid", hybrid_beta=beta)
    assert torch.equal(hybrid, select_support(scores, 25, direction))


def test_random_support_is_sorted_without_replacement_and_in_range():
    support = random_support(100, 60, seed=0, layer="layer")
    assert support.dtype == torch.int32
    assert len(support.unique()) == 60
    assert support.tolist() == sorted(support.tolist())
    assert int(support[0]) >= 0
    assert int(support[-1]) < 100


def test_random_support_depends_on_seed_and_layer():
    first = random_support(1000, 50, seed=0, layer="a").tolist()
    assert first != random_support(1000, 50, seed=1, layer="a").tolist()
    assert first != random_support(1000, 50, seed=0, layer="b").tolist()


def test_random_support_depends_on_nothing_else():
    first = random_support(1000, 50, seed=0, layer="a")
    torch.manual_seed(5)
    numpy.random.seed(5)
    random_support(1000, 50, seed=0, layer="b")
    assert torch.equal(first, random_support(1000, 50, seed=0, layer="a"))


def test_random_support_leaves_the_global_generators_alone():
    torch_state, numpy_state = torch.get_rng_state(), numpy.random.get_state()[1].copy()
    random_support(1000, 50, seed=0, layer="a")
    assert torch.equal(torch_state, torch.get_rng_state())
    assert numpy.array_equal(numpy_state, numpy.random.get_state()[1])


def test_random_support_reaches_every_index_about_equally_often():
    drawn = torch.zeros(20)
    for layer in range(200):
        drawn[random_support(20, 10, seed=0, layer=str(layer))] += 1
    assert float(drawn.min()) > 60  # expected 100, standard deviation 7
    assert float(drawn.max()) < 140


@pytest.mark.parametrize("count", [0, 20])
def test_random_support_empty_and_full(count):
    assert random_support(20, count, seed=0, layer="layer").tolist() == list(range(count))


def plain_rows(scores, count, direction, beta):
    """Each row by itself, on lists: (score, column) orders ties by the first column."""
    rows, width = scores.shape
    k_top = hybrid_split(count, beta)[0] if direction == "hybrid" else count * (direction == "top")
    chosen = []
    for row in range(rows):
        start, stop = row * count // rows, (row + 1) * count // rows
        tops = stop * k_top // count - start * k_top // count if count else 0
        values = scores[row].tolist()
        top = sorted(range(width), key=lambda at: (-values[at], at))[:tops]
        left = [at for at in sorted(range(width), key=lambda at: (values[at], at)) if at not in top]
        chosen += [row * width + at for at in top + left[: stop - start - tops]]
    return sorted(chosen)


@pytest.mark.parametrize("direction", ["bottom", "top", "hybrid"])
@pytest.mark.parametrize(
    ("rows", "width", "count"), [(1, 1, 1), (7, 5, 0), (7, 5, 3), (7, 5, 17), (7, 5, 35), (64, 33, 500)]
)
def test_each_row_has_its_share_of_the_support(direction, rows, width, count):
    draw = torch.Generator().manual_seed(count)
    scores = torch.randint(0, 9, (rows, width), generator=draw).float()  # most of them tie
    found = select_within_rows(lambda start, stop: scores[start:stop], scores.shape, count, direction, hybrid_beta=0.3)
    assert found.tolist() == plain_rows(scores, count, direction, 0.3)
    assert found.dtype == torch.int32
    here = found.div(width, rounding_mode="floor").bincount(minlength=rows)
    assert torch.equal(here, row_counts(count, rows))
    assert int(here.max() - here.min()) <= 1


def test_rows_are_chosen_a_block_at_a_time_as_all_at_once(monkeypatch):
    scores = torch.rand(50, 21, generator=torch.Generator().manual_seed(0))
    rows = lambda start, stop: scores[start:stop]  # noqa: E731
    whole = [select_within_rows(rows, scores.shape, 333, each) for each in ("top", "bottom", "hybrid")]
    monkeypatch.setattr(support, "_BLOCK_CPU", 50)
    for direction, expected in zip(("top", "bottom", "hybrid"), whole, strict=True):
        assert torch.equal(select_within_rows(rows, scores.shape, 333, direction), expected)


def test_a_random_support_can_be_spread_over_the_rows():
    found = random_rows_support((9, 40), 77, seed=1, layer="q")
    assert torch.equal(found, found.unique())
    assert torch.equal(found.div(40, rounding_mode="floor").bincount(minlength=9), row_counts(77, 9))
    assert torch.equal(found, random_rows_support((9, 40), 77, seed=1, layer="q"))
    assert not torch.equal(found, random_rows_support((9, 40), 77, seed=2, layer="q"))
    assert not len(random_rows_support((9, 40), 0, seed=2, layer="q"))


@pytest.mark.parametrize("direction", ["bottom", "top", "hybrid"])
@pytest.mark.parametrize("count", [0, 1, 40, 179, 244])
@pytest.mark.parametrize("block", [13, 2**20])
def test_scores_are_compared_across_layers(direction, count, block, monkeypatch):
    monkeypatch.setattr(support, "_BLOCK_CPU", block)
    draw = torch.Generator().manual_seed(5)
    shapes = [(5, 8), (6, 30), (4, 6)]
    tables = [torch.randint(0, 50, shape, generator=draw).float() * (at + 1) for at, shape in enumerate(shapes)]
    made = []

    def layer(table):
        return lambda: made.append(table) or (lambda start, stop: table[start:stop])

    found = select_across([(each.shape, layer(each)) for each in tables], count, direction, hybrid_beta=0.3)
    joined = select_support(torch.cat([each.flatten() for each in tables]), count, direction, hybrid_beta=0.3)
    offsets = [0, 40, 220]
    assert (
        torch.cat([each.long() + offset for each, offset in zip(found, offsets, strict=True)]).tolist()
        == joined.tolist()
    )
    assert {each.dtype for each in found} == {torch.int32}


def test_across_layers_one_is_made_at_a_time():
    alive = []

    def layer(seed):
        def make():
            table = torch.rand(20, 30, generator=torch.Generator().manual_seed(seed))
            alive.append(weakref.ref(table))
            rows = lambda start, stop: table[start:stop]  # noqa: E731
            assert sum(each() is not None for each in alive) == 1
            return rows

        return make

    found = select_across([((20, 30), layer(seed)) for seed in range(3)], 100, "hybrid")
    assert sum(len(each) for each in found) == 100
