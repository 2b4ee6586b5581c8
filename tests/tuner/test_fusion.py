"""Which gated MLPs are fused, by the code of the installed transformers, and what is said of the others."""

import warnings
from importlib import import_module

import pytest
from peft import get_peft_model
from torch import nn

from axolotl_supertune import SupraConfig
from axolotl_supertune.tuner import fusion

pytest.importorskip("triton")

SIZES = {"vocab_size": 97, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
SIZES |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "pad_token_id": 0}
# The MLPs of the models that plugin/plan/README.md names. Gemma's code is Llama's, with another activation.
FUSED = ["Llama", "Mistral", "Qwen2", "Qwen3", "Olmo"]


@pytest.fixture(autouse=True)
def kernels_can_run(monkeypatch):
    """As on a GPU, and no class warned about by another test."""
    monkeypatch.setenv("SUPERTUNE_KERNELS", "triton")
    monkeypatch.setattr(fusion, "_warned", set())


def adapted(family, **changes):
    """The MLP of a tiny model of this family with adapters in all linear layers."""
    transformers = import_module("transformers")
    config = getattr(transformers, f"{family}Config")(**SIZES, **changes)
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    model = get_peft_model(model, SupraConfig(r0=1, mask_score="magnitude", target_modules="all-linear"))
    return model.base_model.model.model.layers[0].mlp


def warned(function, *args, **kwargs):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        function(*args, **kwargs)
    return [str(warning.message) for warning in caught if "fused MLP" in str(warning.message)]


@pytest.mark.parametrize("family", FUSED)
def test_transformers_mlps_are_recognised(family):
    """Fails where a release of transformers writes the forward in another way: then add it to `_MLP_SOURCES`."""
    mlp = adapted(family)
    assert vars(mlp)["forward"].func is fusion._mlp_forward


def test_nothing_is_said_of_an_mlp_that_is_fused():
    assert warned(adapted, "Llama") == []


def test_gemmas_forward_is_recognised_and_its_activation_named_once():
    (message,) = warned(adapted, "Gemma")
    assert "gemma.modeling_gemma.GemmaMLP is not computed by the fused MLP kernels: its activation is " in message
    assert "not SiLU" in message
    assert "saves up to two more activations" in message
    assert warned(adapted, "Gemma") == []


def test_a_forward_that_is_written_in_another_way_is_named(monkeypatch):
    from transformers.models.llama.modeling_llama import LlamaMLP

    def forward(self, hidden_states):
        return self.down_proj(self.act_fn(self.gate_proj(hidden_states)) * self.up_proj(hidden_states))

    monkeypatch.setattr(LlamaMLP, "forward", forward)
    (message,) = warned(adapted, "Llama")
    assert (
        "LlamaMLP is not computed by the fused MLP kernels: its forward is not written as that of LlamaMLP" in message
    )


def test_a_replaced_forward_and_one_without_source_are_named():
    mlp = adapted("Llama")
    fusion.unshare_work(mlp)
    assert fusion.unfused_reason(mlp) is None
    mlp.forward = lambda x: x
    assert fusion.unfused_reason(mlp) == "its forward was replaced"
    unreadable = type("Unreadable", (nn.Module,), {"forward": nn.functional.silu.__class__.__call__})
    assert fusion.unfused_reason(unreadable()) == "the source of its forward cannot be read"


def test_nothing_is_said_where_no_kernel_can_run(monkeypatch):
    monkeypatch.setattr(fusion.torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("SUPERTUNE_KERNELS", "auto")
    assert warned(adapted, "Gemma") == []


def test_a_second_adapter_leaves_a_fused_mlp_as_it_is():
    mlp = adapted("Llama")
    before = vars(mlp)["forward"]
    assert warned(fusion.share_work, mlp) == []
    assert vars(mlp)["forward"] is before
