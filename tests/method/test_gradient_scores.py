"""Gradient scores against autograd on dense weights in float64."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from axolotl_supertune.method import gradient_scores as gradients
from axolotl_supertune.method.gradient_scores import gradient_scores, passes


class Net(nn.Module):
    """Three layers, one of them called twice; the first reads an input that needs no gradient."""

    def __init__(self, reentrant=None):
        super().__init__()
        self.first, self.twice, self.last = nn.Linear(6, 5), nn.Linear(5, 5, bias=False), nn.Linear(5, 3)
        self.reentrant = reentrant

    def forward(self, x):
        h = torch.tanh(self.first(x))
        middle = lambda h: self.twice(torch.relu(self.twice(h)))  # noqa: E731
        if self.reentrant is not None:
            # As transformers does at the embeddings, for the reentrant kind.
            h = checkpoint(middle, h if h.requires_grad else h.requires_grad_(), use_reentrant=self.reentrant)
        else:
            h = middle(h)
        return self.last(h)


NAMES = ("first", "twice", "last")


@pytest.fixture
def batches():
    draw = torch.Generator().manual_seed(3)
    return [[torch.randn(2, 4, 6, generator=draw) for _ in range(2)] for _ in range(3)]


def make(reentrant=None):
    torch.manual_seed(0)
    return Net(reentrant).requires_grad_(False)


def share(model):
    return lambda x: model(x).square().mean() / 2


def expected(batches, squared):
    """By autograd, in float64, one batch after another."""
    model = make().double().requires_grad_(True)
    weights = [getattr(model, name).weight for name in NAMES]
    taken = [torch.autograd.grad(sum(share(model)(x.double()) for x in batch), weights) for batch in batches]
    stacked = [torch.stack(each) for each in zip(*taken, strict=True)]
    means = [each.square().mean(0) if squared else each.mean(0).abs() for each in stacked]
    return dict(zip(NAMES, means, strict=True))


@pytest.mark.parametrize("squared", [False, True])
@pytest.mark.parametrize("reentrant", [None, False, True])
@pytest.mark.parametrize("dense_bytes", [1, 4 * 60, 2**20])
def test_scores_are_those_of_autograd(batches, squared, reentrant, dense_bytes):
    model = make(reentrant)
    layers = {name: getattr(model, name) for name in NAMES}
    found = dict(gradient_scores(layers, batches, share(model), squared=squared, dense_bytes=dense_bytes))
    assert list(found) == list(NAMES)
    for name, score in expected(batches, squared).items():
        assert found[name].dtype == torch.float32
        torch.testing.assert_close(found[name].double(), score, rtol=1e-5, atol=1e-9)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any(layer._forward_hooks for layer in layers.values())


def test_the_grouping_changes_no_bit(batches):
    model = make()
    layers = {name: getattr(model, name) for name in NAMES}
    one = dict(gradient_scores(layers, batches, share(model), dense_bytes=1))
    whole = dict(gradient_scores(layers, batches, share(model)))
    assert all(torch.equal(one[name], whole[name]) for name in NAMES)
    assert (passes(layers, dense_bytes=1), passes(layers)) == (3, 1)


@pytest.mark.parametrize("squared", [False, True])
def test_no_more_than_one_group_is_held(batches, squared, monkeypatch):
    held, most = set(), []

    class Counted(gradients._Sums):
        def __init__(self, layers, *rest):
            super().__init__(layers, *rest)
            held.update(layers)
            most.append(sum(4 * gradients._size(layers[name]) for name in held) * (2 if squared else 1))

        def score(self, name, count):
            held.discard(name)
            return super().score(name, count)

    monkeypatch.setattr(gradients, "_Sums", Counted)
    model = make()
    layers = {name: getattr(model, name) for name in NAMES}
    list(gradient_scores(layers, batches, share(model), squared=squared, dense_bytes=440 if squared else 220))
    assert max(most) <= (440 if squared else 220)
    assert len(most) == 2


def test_a_part_of_every_batch_in_each_process_gives_the_same(batches):
    model = make()
    layers = {name: getattr(model, name) for name in NAMES}
    for squared in (False, True):
        parts = []
        # What the other process has, noted down in the order in which it is asked for.
        for rank in (0, 1):
            noted = []
            mine = [batch[rank::2] for batch in batches]
            other = parts[0] if rank else []
            add = lambda vector, noted=noted, other=other: (  # noqa: E731
                noted.append(vector.clone()) or (vector + other[len(noted) - 1] if other else vector)
            )
            found = dict(gradient_scores(layers, mine, share(model), squared=squared, sum_processes=add))
            parts.append(noted)
        for name, score in expected(batches, squared).items():
            torch.testing.assert_close(found[name].double(), score, rtol=1e-5, atol=1e-9)


def test_bf16_activations_are_multiplied_in_fp32(batches):
    model = make()
    layers = {"last": model.last}
    x = batches[0][0]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = lambda x: model(x).float().square().sum()  # noqa: E731
        (_, score), *_ = gradient_scores(layers, [[x]], loss)
        seen = {}
        hook = model.last.register_forward_hook(lambda module, args, y: seen.update(x=args[0].bfloat16()))
        y = model(x)
        hook.remove()
    wide = (2 * y.float()).bfloat16().double().reshape(-1, 3).T @ seen["x"].double().reshape(-1, 5)
    assert seen["x"].dtype == torch.bfloat16
    torch.testing.assert_close(score.double(), wide.abs(), rtol=1e-2, atol=1e-3)


def test_what_cannot_be_a_score_is_refused(batches):
    model = make()
    layers = {name: getattr(model, name) for name in NAMES}
    with pytest.raises(ValueError, match="last: its gradient is zero everywhere"):
        list(gradient_scores({"last": model.last}, batches, lambda x: (model(x) * 0).sum()))
    with pytest.raises(ValueError, match="first: its gradient is NaN or infinite"):
        list(gradient_scores(layers, batches, lambda x: model(x).sum() * float("nan")))
    with pytest.raises(ValueError, match="no batch"):
        list(gradient_scores(layers, [], share(model)))
