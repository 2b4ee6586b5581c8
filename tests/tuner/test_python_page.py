"""The Python on the room's page runs as it stands there, on a tiny model in place of the one from the hub."""

import json
import re
import shutil
from pathlib import Path

import torch
from peft import PeftModel
from tiny_llama import save_llama
from transformers import AutoModelForCausalLM

from axolotl_supertune import tuner

PAGE = Path(tuner.__file__).with_name("README.md")
TEXT = "Sixteen apples and three pears are nineteen pieces of fruit, which is one less than twenty. " * 8
SMALLER = {"meta-llama/Llama-3.2-1B": "base", "samples=128, sequence_len=2048": "samples=8, sequence_len=32"}


def train(model):
    """Move what is trained, as a training would."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)))


def logits(model):
    with torch.no_grad():
        return model.eval()(torch.arange(3, 27).view(1, -1)).logits.float()


def test_the_python_of_the_page_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_llama("base", [TEXT], vocab_size=300)
    Path("my_text.jsonl").write_text("\n".join(json.dumps({"text": TEXT}) for _ in range(8)))
    page = PAGE.read_text(encoding="utf-8")
    for text, smaller in SMALLER.items():
        assert text in page
        page = page.replace(text, smaller)
    training, loading, several = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert "...  # train" in training
    names = {"train": train}
    exec(training.replace("...  # train", "train(model)  # train"), names)
    base = AutoModelForCausalLM.from_pretrained("base", dtype="bfloat16")
    untrained, trained = logits(base), logits(names["model"])
    exec(loading, names)
    assert type(names["merged"]) is type(base)
    assert (trained - untrained).abs().max() > 0.5
    torch.testing.assert_close(logits(names["merged"]), trained, atol=2e-2, rtol=2e-2)  # roundings of bf16

    shutil.copytree("adapter", "other_adapter")
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained("base"), "adapter", adapter_name="math")
    model.load_adapter("adapter", "code")
    names["model"] = model
    exec(several, names)
    assert set(model.peft_config) == {"math", "code", "both"}
    assert any(getattr(module, "merged_adapters", None) == ["math"] for module in model.modules())
