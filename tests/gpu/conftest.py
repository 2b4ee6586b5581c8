"""Tests of this folder need a CUDA device; without one they are skipped, with that reason."""

import pytest
import torch


def pytest_collection_modifyitems(items):
    if not torch.cuda.is_available():
        for item in items:
            if "tests/gpu" in item.nodeid or item.path.parent.name == "gpu":
                item.add_marker(pytest.mark.skip(reason="no CUDA device on this machine"))
