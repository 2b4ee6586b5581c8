"""Two gloo processes on the CPU."""

from pathlib import Path

import gloo
import pytest
import torch
from adapted_llama import WORLD, enter

HERE = Path(__file__).parent


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Mark the tests that start processes."""
    for item in items:
        if item.path.parent == HERE and "run" in item.fixturenames:
            item.add_marker("slow")


@pytest.fixture
def run(tmp_path):
    """A function (body, *arguments) → what body(rank, folder, *arguments) returned in each process."""

    def run(body, *arguments):
        gloo.start(enter, (tmp_path, body, arguments), WORLD)
        outcomes = [torch.load(tmp_path / f"{rank}.pt", weights_only=False) for rank in range(WORLD)]
        for outcome in outcomes:
            assert not isinstance(outcome, str), outcome
        return outcomes

    return run
