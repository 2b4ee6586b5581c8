"""Fixtures for tests that ask the harness: the folder of benchmark files, a tiny Llama with a tokenizer, an adapter."""

import pytest
from benchmark_files import DATA
from tiny_llama import NARROW, save_llama
from transformers import LlamaForCausalLM


@pytest.fixture(autouse=True)
def data_dir(monkeypatch):
    """The folder of the six files, also told to the package."""
    assert DATA.is_dir(), f"the benchmark files are not in {DATA}; name their folder: SUPERTUNE_DATA_DIR"
    monkeypatch.setenv("SUPERTUNE_DATA_DIR", str(DATA))
    return DATA


@pytest.fixture(scope="session")
def tiny_base(tmp_path_factory):
    """A folder with a random Llama and a tokenizer."""
    folder = tmp_path_factory.mktemp("base")
    text = ["Below is an instruction that describes a task. Answer with numbers 0 1 2 3 4 5 6 7 8 9."]
    save_llama(folder, text, 300, **NARROW, num_attention_heads=2, max_position_embeddings=2048)
    return folder


@pytest.fixture(scope="session")
def tiny_adapter(tiny_base, tmp_path_factory):
    """A folder with a Supra adapter of `tiny_base` that changes its logits."""
    from peft import get_peft_model

    from axolotl_supertune import SupraConfig

    folder = tmp_path_factory.mktemp("adapter")
    model = LlamaForCausalLM.from_pretrained(tiny_base)
    config = SupraConfig(r0=2, mask_score="magnitude", init_weights=False, task_type="CAUSAL_LM")
    get_peft_model(model, config).save_pretrained(folder)
    return folder
