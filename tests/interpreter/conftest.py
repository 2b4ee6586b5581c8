"""The Triton kernels under Triton's interpreter, on the CPU.

Triton decides when it is first imported whether it interprets: these tests need a process of their own, with
TRITON_INTERPRET=1 and SUPERTUNE_KERNELS=triton from its start. `tests/run.sh` starts it; in any other they are skipped.
"""

import importlib.util
import os

import pytest
import torch

NEEDED = {"TRITON_INTERPRET": "1", "SUPERTUNE_KERNELS": "triton"}


def pytest_collection_modifyitems(items):
    reason = None
    if importlib.util.find_spec("triton") is None:
        reason = "triton is not installed"
    elif any(os.environ.get(name) != value for name, value in NEEDED.items()):
        wanted = " ".join(f"{name}={value}" for name, value in NEEDED.items())
        reason = f"the interpreter needs a process of its own: {wanted} python -m pytest tests/interpreter"
    if reason:
        for item in items:
            if item.path.parent.name == "interpreter":
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True)
def poisoned_memory():
    """Whatever is allocated and not written is NaN: a result that a kernel leaves out cannot pass for zero."""
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)
