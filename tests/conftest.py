"""A tiny random Llama, token ids for it and its activation norms, shared by all tests."""

import gc
import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from axolotl_supertune import calibrate

# Two threads that wait for each other over tensors this small make the tests ten times slower on a busy machine.
torch.set_num_threads(1)


def pytest_collection_finish():
    """Let the collections that Axolotl asks for pass over what imports made: they were half of a training's time."""
    gc.collect()
    gc.freeze()


TINY = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}


def make_llama(seed=0, dtype=torch.float32, **changes):
    torch.manual_seed(seed)
    config = LlamaConfig(**{**TINY, **changes})
    return LlamaForCausalLM(config).to(dtype).eval()


@pytest.fixture(scope="session")
def tiny_llama():
    """A function (seed, dtype, **changes of the config) → LlamaForCausalLM: one seed, one set of weights."""
    return make_llama


@pytest.fixture
def llama():
    return make_llama()


@pytest.fixture(scope="session")
def ids():
    return torch.randint(0, TINY["vocab_size"], (3, 11), generator=torch.Generator().manual_seed(7))


@pytest.fixture(scope="session")
def norms(ids):
    """Activation norms of `llama`."""
    return calibrate(make_llama(), [ids], progress=False)
