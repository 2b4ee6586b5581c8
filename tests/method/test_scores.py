from pathlib import Path

import pytest
import torch

from axolotl_supertune.method.scores import (
    SCORES,
    activation_rows,
    activation_score,
    check_weight,
    magnitude_rows,
    magnitude_score,
    wanda_rows,
    wanda_score,
)

# The worked example of the paper's appendix: W (3, 2), X (2 features, 2 tokens).
W = torch.tensor([[3.0, -2.0], [-2.0, 4.0], [1.0, -6.0]])
X = torch.tensor([[4.0, 3.0], [0.0, 1.0]])


def test_wanda_score_of_the_paper_example():
    assert wanda_score(W, X.norm(dim=1)).tolist() == [[15, 2], [10, 4], [5, 6]]


def test_magnitude_score_is_the_absolute_weight():
    assert magnitude_score(W).tolist() == [[3, 2], [2, 4], [1, 6]]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_scores_are_fp32_products_of_the_stored_weight(dtype):
    torch.manual_seed(0)
    weight, norm = torch.randn(5, 7, dtype=dtype), torch.rand(7)
    expected = weight.float().abs() * norm
    score = wanda_score(weight, norm)
    assert score.dtype == torch.float32
    assert torch.equal(score, expected)
    assert torch.equal(magnitude_score(weight), weight.float().abs())


def test_scores_leave_the_weight_alone():
    weight, before = W.clone(), W.clone()
    magnitude_score(weight)
    wanda_score(weight, torch.ones(2))
    assert torch.equal(weight, before)


def test_scores_carry_no_gradient():
    weight = torch.nn.Parameter(W.clone())
    assert not wanda_score(weight, torch.ones(2)).requires_grad


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_bad_weight_names_the_layer(bad):
    weight = W.clone()
    weight[1, 1] = bad
    with pytest.raises(ValueError, match=r"model\.q_proj: its weight hold 1 NaN or infinite"):
        magnitude_score(weight, layer="model.q_proj")
    with pytest.raises(ValueError, match=r"model\.q_proj: its weight"):
        wanda_score(weight, torch.ones(2), layer="model.q_proj")


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_bad_norm_names_the_layer(bad):
    with pytest.raises(ValueError, match=r"model\.q_proj: its activation norms hold 1 NaN or infinite"):
        wanda_score(W, torch.tensor([1.0, bad]), layer="model.q_proj")


@pytest.mark.parametrize("shape", [(3,), (1,), (2, 1), (1, 2)])
def test_norms_of_another_width_are_refused_not_broadcast(shape):
    with pytest.raises(ValueError, match=r"model\.q_proj: activation norms of shape"):
        wanda_score(W, torch.ones(shape), layer="model.q_proj")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_scores_by_rows_are_the_rows_of_the_scores(dtype):
    torch.manual_seed(1)
    weight, norm = torch.randn(9, 5, dtype=dtype), torch.rand(5)
    for by_rows, whole in (
        (wanda_rows(weight, norm), wanda_score(weight, norm)),
        (magnitude_rows(weight), magnitude_score(weight)),
    ):
        assert torch.equal(torch.cat([by_rows(0, 4), by_rows(4, 5), by_rows(5, 9)]), whole)
        assert by_rows(0, 0).shape == (0, 5)


def test_scores_by_rows_are_checked_before_the_first_row_is_asked_for():
    weight = W.clone()
    weight[2, 0] = float("inf")
    with pytest.raises(ValueError, match="its weight hold 1 NaN or infinite values of 6"):
        magnitude_rows(weight)
    with pytest.raises(ValueError, match="its weight hold 1 NaN or infinite values of 6"):
        wanda_rows(weight, torch.ones(2))


def test_a_product_that_overflows_is_refused_and_one_that_could_is_not():
    weight, norm = torch.tensor([[1e30, 1.0], [2.0, 3.0]]), torch.tensor([1.0, 1e30])
    assert bool(torch.isfinite(wanda_score(weight, norm)).all())
    with pytest.raises(ValueError, match=r"layer: its scores .* hold 1 NaN or infinite values of 4"):
        wanda_score(weight, norm.flip(0))


def test_the_largest_weight_is_what_the_check_returns():
    assert check_weight(W, layer="layer").item() == 6
    assert check_weight(torch.empty(0, 4), layer="layer").item() == 0


def test_the_activation_score_is_wandas_without_the_weight():
    draw = torch.Generator().manual_seed(2)
    weight, x = torch.randn(6, 5, generator=draw), torch.randn(40, 5, generator=draw)
    norm = x.double().square().sum(0).sqrt()
    score = activation_score(weight, norm.float())
    torch.testing.assert_close(score.double(), norm.expand(6, 5), rtol=1e-6, atol=0)
    torch.testing.assert_close(score * weight.abs(), wanda_score(weight, norm.float()))
    assert torch.equal(activation_rows(weight, norm.float())(2, 5), score[2:5])
    for bad, message in ((norm[:4], "do not fit"), (norm * float("nan"), "its activation norms hold 5 NaN")):
        with pytest.raises(ValueError, match=message):
            activation_score(weight, bad.float(), layer="q")
    with pytest.raises(ValueError, match="q: its weight hold"):
        activation_score(weight * float("inf"), norm.float(), layer="q")


def test_the_registry_has_the_scores_of_the_paper():
    norm = X.norm(dim=1)
    expected = {
        "wanda": wanda_score(W, norm),
        "magnitude": magnitude_score(W),
        "activation": activation_score(W, norm),
    }
    for name, score in expected.items():
        given = norm if SCORES[name].needs == "norms" else None
        assert torch.equal(SCORES[name].rows(W, given, layer="up_proj")(1, 3), score[1:3])
    assert {name for name, score in SCORES.items() if score.needs == "norms"} == {"wanda", "activation"}
    of_gradients = {name: score.squares_gradients for name, score in SCORES.items() if score.needs == "gradients"}
    assert of_gradients == {"gradient": False, "squared_gradient": True}
    assert {*expected, *of_gradients} == set(SCORES)


def test_every_score_is_documented():
    """The help of the YAML key and of the PEFT config names each score; so do the pages."""
    from axolotl_supertune.plugin.args import SupertuneArgs
    from axolotl_supertune.tuner import SupraConfig

    root = Path(__file__).parents[2]
    texts = {
        "args": SupertuneArgs.model_fields["mask_score"].description,
        "config": SupraConfig.__dataclass_fields__["mask_score"].metadata["help"],
        "docstring": SupraConfig.__doc__,
        "plugin/README.md": (root / "axolotl_supertune/plugin/README.md").read_text(encoding="utf-8"),
        "method/README.md": (root / "axolotl_supertune/method/README.md").read_text(encoding="utf-8"),
    }
    for place, text in texts.items():
        assert not [name for name in SCORES if name not in text], place
