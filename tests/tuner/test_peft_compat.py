"""What importing the tuner changes in PEFT: nothing for other methods."""

import time

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model

from axolotl_supertune import SupraConfig
from axolotl_supertune.tuner import peft_compat, rollback

EXTENDED = ("save_pretrained", "load_adapter", "create_or_update_model_card")


@pytest.fixture
def snapshots(monkeypatch):
    """The models of which a `ModelSnapshot` was made."""
    made = []
    original = rollback.ModelSnapshot.__init__

    def init(self, model):
        made.append(model)
        original(self, model)

    monkeypatch.setattr(rollback.ModelSnapshot, "__init__", init)
    return made


def lora(model):
    return get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"))


def supra(model):
    return get_peft_model(model, SupraConfig(mask_score="magnitude", task_type="CAUSAL_LM"))


def test_no_snapshot_is_made_for_another_method(tiny_llama, tmp_path, snapshots):
    lora(tiny_llama()).save_pretrained(tmp_path)
    model = PeftModel.from_pretrained(tiny_llama(), tmp_path)
    model.load_adapter(tmp_path, "second")
    model.save_pretrained(tmp_path / "again")
    assert snapshots == []


def test_another_methods_errors_pass_unchanged(tiny_llama, tmp_path, snapshots):
    lora(tiny_llama()).save_pretrained(tmp_path)
    (tmp_path / "adapter_model.safetensors").write_bytes(b"damaged")
    with pytest.raises(Exception, match=r"(?i)header"):
        PeftModel.from_pretrained(tiny_llama(), tmp_path)
    assert snapshots == []


def test_a_snapshot_is_made_when_supra_adapts_the_model(tiny_llama, tmp_path, snapshots):
    supra(tiny_llama()).save_pretrained(tmp_path)
    base = tiny_llama()
    PeftModel.from_pretrained(base, tmp_path)
    assert snapshots[0] is base


@pytest.mark.parametrize("name", EXTENDED)
def test_methods_of_other_models_are_called_at_once(tiny_llama, monkeypatch, name):
    """The extended method only looks at the configs before it calls PEFT's."""
    called = []
    extended = getattr(PeftModel, name)
    assert extended.extended_for_supra
    original = extended.__wrapped__
    assert original.__module__.startswith("peft.")
    monkeypatch.setattr(PeftModel, name, lambda *args, **kwargs: called.append(args[1:]))
    peft_compat.extend(name, lambda *args, **kwargs: pytest.fail("called for LoRA"))
    getattr(lora(tiny_llama()), name)("argument")
    assert called == [("argument",)]


def test_extending_twice_changes_nothing():
    before = {name: getattr(PeftModel, name) for name in EXTENDED}
    for name in EXTENDED:
        peft_compat.extend(name, lambda *args: None)
    assert {name: getattr(PeftModel, name) for name in EXTENDED} == before


def test_the_extensions_cost_another_method_microseconds(tiny_llama):
    """Two looks at a dictionary and one context: less than a tenth of a millisecond for a call."""
    model = lora(tiny_llama())
    start = time.perf_counter()
    for _ in range(1000):
        assert not peft_compat.has_supra_adapter(model)
        with rollback.rollback_once_adapted(model):
            pass
    assert time.perf_counter() - start < 0.1


def test_a_failed_load_leaves_the_base_as_it_was(tiny_llama, tmp_path):
    supra(tiny_llama()).save_pretrained(tmp_path)
    (tmp_path / "adapter_model.safetensors").write_bytes(b"damaged")
    base = tiny_llama()
    names = [name for name, _ in base.named_modules()]
    state = {name: tensor.clone() for name, tensor in base.state_dict().items()}
    with pytest.raises(Exception, match=r"adapter_model\.safetensors|header"):
        PeftModel.from_pretrained(base, tmp_path)
    assert [name for name, _ in base.named_modules()] == names
    assert all(torch.equal(tensor, state[name]) for name, tensor in base.state_dict().items())
