"""The GPUs, cores and processes that a sweep uses at once."""

import os
import socket
import threading

import pytest
from grid_cases import RUNS

from axolotl_supertune.grid.run_files import read_runs
from axolotl_supertune.grid.sweep.devices import Devices, visible_gpus


def test_each_gpu_has_as_many_runs_at_once_as_is_said(stage, write_grid):
    grid = write_grid(learning_rates=[1, 2, 3], score={"runs": "none"})
    stage.plan["behaviour"] = {f"{method} {rate} 0": "meet" for method in ("lora", "magnitude") for rate in (1, 2, 3)}
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(60)
        stage.plan["port"] = server.getsockname()[1]

        def meet():
            # Four must be there before the first one may go; then one place is free at a time.
            there = [server.accept()[0] for _ in range(4)]
            for _ in range(2):
                there.pop(0).send(b"!")
                there.append(server.accept()[0])
            for each in there:
                each.send(b"!")

        thread = threading.Thread(target=meet)
        thread.start()
        assert stage.sweep(grid, Devices(("3", "GPU-7"), 2))
        thread.join()
    gpus = [call["gpu"] for call in stage.calls() if "run" in call]
    assert sorted(gpus[:4]) == ["3", "3", "GPU-7", "GPU-7"]
    assert len(gpus) == 6
    assert {run.jobs_per_gpu for run in read_runs(RUNS)} == {2}


def test_places_share_the_cores(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(16))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert Devices(("0", "1"), 3).environment("1")["OMP_NUM_THREADS"] == "2"
    assert Devices(("0",), 32).environment("0")["OMP_NUM_THREADS"] == "1"
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert Devices(("0", "1"), 3).environment("1")["OMP_NUM_THREADS"] == "5"


def test_gpus_are_numbered_among_the_visible_ones(monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 3)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert visible_gpus(None) == ("0", "1", "2")
    assert visible_gpus("0,2") == ("0", "2")
    assert visible_gpus("none") == visible_gpus("") == ()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,GPU-9, 7")
    assert visible_gpus(None) == ("4", "GPU-9", "7")
    assert visible_gpus("1,2") == ("GPU-9", "7")
    for asked in ("3", "0,0", "x", "0,"):
        with pytest.raises(ValueError, match=rf"--gpus {asked}: .* is not one of the 3 GPUs"):
            visible_gpus(asked)
