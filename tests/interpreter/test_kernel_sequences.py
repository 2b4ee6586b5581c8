"""Random sequences of adapter operations on the Triton kernels, which write U into the base weights."""

import pytest

pytest.importorskip("triton")

import torch
from adapter_sequences import AdapterSequences
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from axolotl_supertune.ops import write_kernels

SETTINGS = settings(
    max_examples=20,
    stateful_step_count=25,
    deadline=None,
    derandomize=True,
    phases=[Phase.generate],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TINY = {"num_hidden_layers": 1, "hidden_size": 8, "intermediate_size": 12, "num_attention_heads": 2}
TINY |= {"num_key_value_heads": 1}


# fp16, not bf16: the interpreter's bf16 matrix product is wrong.
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_any_sequence_computes_as_recomputed_and_leaves_the_bits_of_the_base(tiny_llama, monkeypatch, dtype):
    writes = []
    write = write_kernels.write_supports
    monkeypatch.setattr(write_kernels, "write_supports", lambda table: (writes.append(1), write(table)))
    machine = type("KernelSequences", (AdapterSequences,), {"dtype": dtype, "same_bits": False})
    machine.make_base = staticmethod(lambda dtype: tiny_llama(dtype=dtype, **TINY))
    run_state_machine_as_test(machine, settings=SETTINGS)
    assert len(writes) > 50  # the kernels did write into base weights
