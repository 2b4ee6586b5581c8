"""The peak reading without a GPU; on one, `tests/gpu` measures with it."""

import torch

from axolotl_supertune.method.cuda_memory import PeakMemory


def test_off_cuda_nothing_is_counted():
    memory = PeakMemory(torch.device("cpu"))
    torch.ones(1000)
    assert (memory.before, memory.read()) == (0, 0)


def test_earlier_readings_count_where_the_statistics_are_reset_in_between(monkeypatch):
    readings = iter([100, 700, 300])
    for name in ("synchronize", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda device: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 50)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: next(readings))
    memory = PeakMemory(torch.device("cuda"))
    assert memory.before == 50
    assert [memory.read() for _ in range(3)] == [100, 700, 700]
