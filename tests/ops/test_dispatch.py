"""The choice between the Triton kernels and the reference, on a machine without a GPU."""

import warnings

import pytest
import torch
from torch import nn

from axolotl_supertune.ops import LowRank, Sparse, compute_dtype, dispatch, takes_kernels


@pytest.fixture(autouse=True)
def no_memory(monkeypatch):
    """No answer from another test, and no interpreter."""
    dispatch._unsupported_device_reason.cache_clear()
    monkeypatch.setattr(dispatch, "_warned", set())
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.delenv("SUPERTUNE_KERNELS", raising=False)


def ask(x=None, weight=None, sparse=1, low_rank=0, rank=2):
    weight = nn.Parameter(torch.zeros(3, 4), requires_grad=False) if weight is None else weight
    x = torch.zeros(2, 4) if x is None else x
    parts = [Sparse(torch.zeros(1), torch.zeros(1, dtype=torch.int32))] * sparse
    low = [LowRank(torch.zeros(3, rank), torch.zeros(rank, 4), 1.0)] * low_rank
    return takes_kernels(x, weight, parts, low, layer="model.q_proj")


@pytest.mark.parametrize("asked", ["auto", "triton", "reference"])
def test_what_is_asked_for(monkeypatch, asked):
    monkeypatch.setenv("SUPERTUNE_KERNELS", asked)
    assert dispatch.requested() == asked


def test_default_is_auto(monkeypatch):
    assert dispatch.requested() == "auto"
    monkeypatch.setenv("SUPERTUNE_KERNELS", "")
    assert dispatch.requested() == "auto"


@pytest.mark.parametrize("asked", ["cuda", "Triton", "1", " triton"])
def test_wrong_value_is_named(monkeypatch, asked):
    monkeypatch.setenv("SUPERTUNE_KERNELS", asked)
    with pytest.raises(ValueError, match=rf"SUPERTUNE_KERNELS={asked} is not one of auto, triton, reference"):
        ask()


@pytest.mark.parametrize("asked", ["auto", "reference"])
def test_cpu_takes_the_reference_without_a_word(monkeypatch, asked):
    monkeypatch.setenv("SUPERTUNE_KERNELS", asked)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not ask()
        assert not ask(low_rank=2)


@pytest.mark.parametrize("interpret", [None, "0"])
def test_triton_on_the_cpu_says_why_not(monkeypatch, interpret):
    pytest.importorskip("triton")
    monkeypatch.setenv("SUPERTUNE_KERNELS", "triton")
    if interpret:
        monkeypatch.setenv("TRITON_INTERPRET", interpret)
    with pytest.raises(RuntimeError, match=r"^model.q_proj: SUPERTUNE_KERNELS=triton.*CUDA devices, not on cpu\.$"):
        ask()


def test_the_interpreter_must_be_asked_for_by_both_variables(monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert not ask()
    monkeypatch.setenv("SUPERTUNE_KERNELS", "triton")
    assert ask()
    monkeypatch.setenv("SUPERTUNE_KERNELS", "reference")
    assert not ask()


def test_without_triton_it_says_so(monkeypatch):
    monkeypatch.setenv("SUPERTUNE_KERNELS", "triton")
    monkeypatch.setattr(dispatch.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RuntimeError, match="triton is not installed"):
        ask()


frozen = lambda *shape, **options: nn.Parameter(torch.zeros(*shape, **options), requires_grad=False)  # noqa: E731
OBSTACLES = {
    "several adapters": {"sparse": 2},
    "several adapters are active": {"low_rank": 2},
    "rank 129 is above 128": {"low_rank": 1, "rank": 129},
    "weight is trainable": {"weight": nn.Parameter(torch.zeros(3, 4))},
    "no plain contiguous tensor": {"weight": nn.Parameter(torch.zeros(4, 3).t(), requires_grad=False)},
    r"no plain contiguous tensor \(Quantized\)": {
        "weight": torch.zeros(3, 4).as_subclass(type("Quantized", (torch.Tensor,), {}))
    },
    "weight is torch.float64": {"weight": frozen(3, 4, dtype=torch.float64)},
    r"shape \(1, 4\)": {"weight": frozen(1, 4)},
    r"shape \(4, 1\)": {"weight": frozen(4, 1), "x": torch.zeros(2, 1)},
    "input is empty": {"x": torch.zeros(0, 4)},
    "input is on meta and the weight on cpu": {"x": torch.zeros(2, 4, device="meta")},
}


@pytest.mark.parametrize("reason", OBSTACLES)
def test_obstacles_are_named(monkeypatch, reason):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setenv("SUPERTUNE_KERNELS", "triton")
    with pytest.raises(RuntimeError, match=f"cannot compute this layer: .*{reason}"):
        ask(**OBSTACLES[reason])


def test_rank_128_is_taken(monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setenv("SUPERTUNE_KERNELS", "triton")
    assert ask(low_rank=1, rank=128)


def test_products_are_in_autocasts_dtype_or_the_weights():
    x, weight = torch.zeros(2, 4), torch.zeros(3, 4, dtype=torch.float16)
    assert compute_dtype(x, weight) == torch.float16
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert compute_dtype(x, weight) == torch.bfloat16


def test_an_adapted_model_on_the_cpu_is_left_as_it_is(llama, ids):
    """By the default choice nothing is written into a weight, and no warning is given."""
    from peft import get_peft_model

    from axolotl_supertune import SupraConfig

    before = {name: each.clone() for name, each in llama.state_dict().items()}
    model = get_peft_model(llama, SupraConfig(mask_score="magnitude", init_weights=False, task_type="CAUSAL_LM"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(ids, labels=ids).loss.backward()
    layer = model.base_model.model.model.layers[0].mlp.up_proj
    assert torch.equal(layer.base_layer.weight, before["model.layers.0.mlp.up_proj.weight"])
    assert not layer._slots
