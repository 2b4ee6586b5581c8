"""A tiny random Llama, token ids for it and its activation norms, shared by all tests."""

import gc
import os
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch
from tiny_llama import TINY, make_llama

from axolotl_supertune import calibrate

TESTS = Path(__file__).parent

# Two threads that wait for each other over tensors this small make the tests ten times slower on a busy machine.
torch.set_num_threads(1)


FOLDERS = {"gpu": "gpu", "interpreter": "interpreter"}
# The fixtures through which tests run Axolotl, or start processes that train.
TRAINING_FIXTURES = {"train", "trained", "launch", "launch_deepspeed"}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Mark tests by their folder and their fixtures; `-m` is applied after this."""
    for item in items:
        folder = item.path.relative_to(TESTS).parts[0] if item.path.is_relative_to(TESTS) else ""
        if folder in FOLDERS:
            item.add_marker(FOLDERS[folder])
        if TRAINING_FIXTURES.intersection(getattr(item, "fixturenames", ())):
            item.add_marker("train")


def pytest_collection_finish():
    """Let the collections that Axolotl asks for pass over what imports made: they were half of a training's time."""
    gc.collect()
    gc.freeze()


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
