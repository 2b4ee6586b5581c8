"""Layers for the Triton kernels, and the same layers in float64: shared by tests/interpreter and tests/gpu.

Importing this does not import Triton; what needs it imports it inside.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from axolotl_supertune.ops import LowRank, Sparse, effective_weight

SUPPORTS = ["spread", "rows", "two columns", "full row", "full column", "empty"]


def make_support(c, b, count, kind="spread", seed=0):
    """Sorted flat int32 indices of a support of a (c, b) layer, on the CPU.

    `spread`: anywhere; `rows`: only in every third row; `two columns`: both full to `count`, nothing else; `full row`
    and `full column`: that one whole, and a few entries elsewhere; `empty`: none.
    """
    random = torch.Generator().manual_seed(seed)
    mask = torch.zeros(c, b, dtype=torch.bool)
    if kind == "full row":
        mask[c // 2] = True
    elif kind == "full column":
        mask[:, b // 2] = True
    if kind in ("spread", "full row", "full column"):
        mask.view(-1)[torch.randperm(c * b, generator=random)[:count]] = True
    elif kind == "rows":
        rows = torch.arange(0, c, 3)
        places = torch.randperm(len(rows) * b, generator=random)[:count]
        mask[rows[places // b], places % b] = True
    elif kind == "two columns":
        places = torch.randperm(2 * c, generator=random)[:count]
        mask[places // 2, torch.tensor([0, b - 1])[places % 2]] = True
    else:
        assert kind in ("spread", "full row", "full column", "empty"), kind
    return mask.view(-1).nonzero().view(-1).int()


class Case(NamedTuple):
    """One adapted layer; `values` or L and R may be missing."""

    weight: Tensor
    bias: Tensor | None
    values: Tensor | None
    indices: Tensor | None
    L: Tensor | None
    R: Tensor | None
    scaling: float

    def trained(self):
        """By name, in the order of the fused functions' own."""
        named = {"U": self.values, "L": self.L, "R": self.R, "bias": self.bias}
        return {name: each for name, each in named.items() if each is not None}

    def sparse(self):
        return [] if self.values is None else [Sparse(self.values, self.indices)]

    def low_rank(self):
        return [] if self.L is None else [LowRank(self.L, self.R, self.scaling)]

    def double(self):
        """The same layer in float64, with leaves of its own; W + M⊙U stays what the layer's own dtype makes of it."""
        leaf = lambda each: None if each is None else each.detach().double().requires_grad_()  # noqa: E731
        values = leaf(self.values)
        weight = self.weight.double()
        if values is not None:
            # sparse_linear adds U again: W's own rounding is put into the weight it is added to.
            weight = effective_weight(self.weight, self.sparse()).double()
            weight.view(-1)[self.indices.long()] -= values.detach()
        return Case(weight, leaf(self.bias), values, self.indices, leaf(self.L), leaf(self.R), self.scaling)


def make_case(
    c, b, parts="sl", *, rank=3, count=None, kind="spread", bias=False, seed=0, dtype=torch.float32, device="cpu"
):
    """A layer with a sparse part if "s" is in `parts` and a low-rank part if "l" is."""
    random = torch.Generator().manual_seed(1000 + seed)
    draw = lambda *shape: (torch.randn(*shape, generator=random) * b**-0.5).to(device)  # noqa: E731
    weight = draw(c, b).to(dtype)
    values = indices = L = R = None
    if "s" in parts:
        indices = make_support(c, b, min(c * b, 2 * (c + b)) if count is None else count, kind, seed).to(device)
        values = draw(indices.numel()).requires_grad_()
    if "l" in parts:
        L, R = (draw(c, rank) * b**0.5).requires_grad_(), draw(rank, b).requires_grad_()
    return Case(weight, draw(c).to(dtype).requires_grad_() if bias else None, values, indices, L, R, 1.7)


def kernel_layer(case, *, dtype=None, dropout=0.0, writer=None):
    """The layer as `fused` takes it, written into a copy of its weight."""
    from axolotl_supertune.ops.fused import KernelLayer
    from axolotl_supertune.ops.inplace_weight import BatchedWriter, WeightSlot

    weight = case.weight.clone()
    writer = writer or BatchedWriter()
    slot = WeightSlot(weight, case.values, case.indices, case.L, case.R, case.scaling, dtype or weight.dtype)
    writer.write_for_forward(writer.add(slot))
    return KernelLayer(slot, case.bias, dropout)


def dense_linear(x, case, kept=None, probability=0.0):
    """One layer in plain autograd; `kept` is the mask of the low-rank part's input, scaled by 1 / (1 - probability)."""
    total = case.weight
    if case.values is not None:
        flat = torch.zeros(total.numel(), dtype=total.dtype, device=total.device)
        total = total + flat.index_put((case.indices.long(),), case.values).view(total.shape)
    y = F.linear(x, total, case.bias)
    if case.L is not None:
        dropped = x if kept is None else x * kept.to(x.dtype) / (1 - probability)
        y = y + F.linear(F.linear(dropped, case.R), case.L) * case.scaling
    return y


class MLP(nn.Module):
    """What a gated MLP looks like in most models."""

    def __init__(self, width, inner, **options):
        super().__init__()
        self.gate_proj = nn.Linear(width, inner, bias=False, **options)
        self.up_proj = nn.Linear(width, inner, bias=False, **options)
        self.down_proj = nn.Linear(inner, width, bias=False, **options)
        self.act_fn = nn.SiLU()

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """A group of three and a gated MLP; it can be pickled, and nothing in it synchronises."""

    def __init__(self, width=8, inner=12, **options):
        super().__init__()
        self.q_proj = nn.Linear(width, width, **options)
        self.k_proj, self.v_proj = (nn.Linear(width, 3 * width // 4, **options) for _ in range(2))
        self.mlp = MLP(width, inner, **options)

    def forward(self, x):
        return self.mlp(x) + self.q_proj(x), self.k_proj(x) * self.v_proj(x)


def met(probability):
    """The probability that the kernels' dropout meets instead: whole 65536ths."""
    return round(probability * 65536) / 65536


def gradients(outputs, x, cases, dys=None):
    """{"y0", …, "x", "U0", "L0", …} for fixed random output gradients, the same whatever the dtype and device."""
    outputs = list(outputs)
    random = torch.Generator().manual_seed(9)
    made = [torch.randn(y.shape, generator=random) for y in outputs] if dys is None else dys
    made = [dy.to(device=y.device, dtype=y.dtype) for dy, y in zip(made, outputs, strict=True)]
    leaves = {"x": x} if x.requires_grad else {}
    for at, case in enumerate(cases):
        leaves |= {f"{name}{at}": each for name, each in case.trained().items() if each.requires_grad}
    found = torch.autograd.grad(outputs, list(leaves.values()), made)
    results = {f"y{at}": y.detach() for at, y in enumerate(outputs)}
    return results | dict(zip(leaves, found, strict=True))


def relative_error(one, other):
    one, other = one.detach().double(), other.detach().double()
    if not other.numel():
        return 0.0
    return float((one - other).norm() / other.norm().clamp_min(1e-30))


def assert_close(found, expected, tolerance):
    """Of dicts: the same keys, shapes and nearly the same values; a NaN anywhere fails."""
    assert found.keys() == expected.keys()
    errors = {}
    for name, each in found.items():
        assert each.shape == expected[name].shape, name
        errors[name] = relative_error(each, expected[name].to(each.device))
    bad = {name: error for name, error in errors.items() if not error <= tolerance}
    assert not bad, bad
