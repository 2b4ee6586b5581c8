"""Random sequences of adapter operations on the reference path."""

import pytest
import torch
from adapter_sequences import AdapterSequences
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

SETTINGS = settings(
    max_examples=80,
    stateful_step_count=25,
    deadline=None,
    derandomize=True,
    phases=[Phase.generate],  # shrinking a sequence takes minutes; the one that fails is short enough to read
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TINY = {"num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 24}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_any_sequence_computes_as_recomputed_and_leaves_the_bits_of_the_base(tiny_llama, dtype):
    machine = type("Sequences", (AdapterSequences,), {"dtype": dtype})
    machine.make_base = staticmethod(lambda dtype: tiny_llama(dtype=dtype, **TINY))
    run_state_machine_as_test(machine, settings=SETTINGS)
