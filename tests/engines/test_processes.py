"""What one process finds out all know; where one fails, dies or is late, all end with a message."""

import os
import traceback

import gloo
import pytest
import torch
import torch.distributed as dist

from axolotl_supertune.engines.processes import OtherProcessFailed, Processes


def _enter(rank, store, folder, body, timeout):
    try:
        outcome = ("result", body(Processes(timeout, "KNOB waits longer."), store))
    except Exception as error:
        outcome = (type(error).__name__, f"{error}\n{traceback.format_exc()}")
    torch.save(outcome, folder / f"{rank}.pt")
    store.set(f"done {rank}", "yes")
    store.wait([f"done {other}" for other in range(dist.get_world_size())])  # an early end would be noticed as a death


@pytest.fixture
def run(tmp_path):
    """A function (body, world) → what body(processes, store) returned in each process, or (error's name, message)."""

    def run(body, world=2, timeout=60.0):
        context = gloo.start(_enter, (tmp_path, body, timeout), world, join=False)
        while not context.join(timeout=120, grace_period=60):
            pass
        return [torch.load(tmp_path / f"{rank}.pt", weights_only=False) for rank in range(world)]

    return run


def everything(processes, store):
    with processes.synchronized("adding up"):
        total = processes.sum(torch.tensor([0.1, 1e16, -1.0], dtype=torch.float64) * (processes.rank + 1))
        ranks = processes.gather(processes.rank)
        calls = []
        made = processes.from_first(lambda: calls.append(1) or "made once")
        content = torch.full((3,), processes.rank, dtype=torch.int32)
        processes.broadcast([content])
    return total, ranks, made, len(calls), content, processes.is_first


def test_values_are_shared_and_sums_have_the_same_bits_everywhere(run):
    outcomes = run(everything, world=3)
    assert [kind for kind, _ in outcomes] == ["result"] * 3, outcomes
    for rank, (_, (total, ranks, made, calls, content, first)) in enumerate(outcomes):
        assert torch.equal(total, outcomes[0][1][0])
        torch.testing.assert_close(total, torch.tensor([0.6, 6e16, -6.0], dtype=torch.float64))
        assert ranks == [0, 1, 2]
        assert made == "made once"
        assert calls == (rank == 0)
        assert torch.equal(content, torch.zeros(3, dtype=torch.int32))
        assert first is (rank == 0)


def test_alone_it_is_one_process():
    total, ranks, made, calls, content, first = everything(Processes(1.0, ""), None)
    assert (ranks, made, calls, first) == ([0], "made once", 1, True)
    assert total.tolist() == [0.1, 1e16, -1.0]
    assert torch.equal(content, torch.zeros(3, dtype=torch.int32))
    with pytest.raises(KeyError), Processes(1.0, "").synchronized("alone"):
        raise KeyError("own error")


@pytest.mark.parametrize("failing", [0, 1])
def test_an_error_in_one_is_an_error_in_all(run, failing):
    outcomes = run(FAILING[failing], timeout=30.0)
    kind, text = outcomes[failing]
    assert kind == "ValueError"
    assert text.startswith("no memory")
    kind, text = outcomes[1 - failing]
    assert kind == OtherProcessFailed.__name__
    assert text.startswith(f"process {failing} of 2 failed while calibrating: ValueError: no memory")


def _failing(processes, failing):
    with processes.synchronized("calibrating"):
        if processes.rank == failing:
            raise ValueError("no memory")
        processes.sum(torch.ones(2).double())
        processes.from_first(lambda: 1)


def first_fails(processes, store):
    _failing(processes, 0)


def second_fails(processes, store):
    _failing(processes, 1)


FAILING = [first_fails, second_fails]


def second_is_elsewhere(processes, store):
    with processes.synchronized("calibrating" if processes.rank == 0 else "loading a checkpoint"):
        pass


def test_processes_at_different_places_are_an_error_in_all(run):
    for kind, text in run(second_is_elsewhere):
        assert kind == "RuntimeError"
        assert "is loading a checkpoint" in text
        assert "is calibrating" in text


def second_comes_too_late(processes, store):
    if processes.rank == 1:
        store.wait(["first gave up"])
    try:
        with processes.synchronized("calibrating"):
            pass
    finally:
        if processes.rank == 0:
            store.set("first gave up", "yes")


def test_a_process_that_does_not_answer_ends_the_wait_with_a_message(run):
    kind, text = run(second_comes_too_late, timeout=2.0)[0]
    assert kind == "RuntimeError"
    assert text.startswith("process 0 of 2, while calibrating: another process ended, or did not answer within 2 s")
    assert "KNOB waits longer." in text


def second_dies(processes, store):
    if processes.rank == 1:
        torch.save(("died", ""), os.environ["DEATH_NOTE"])
        store.set("done 1", "yes")
        os._exit(0)
    with processes.synchronized("calibrating"):
        processes.gather(0)


def test_a_process_that_died_is_noticed_at_once(run, tmp_path, monkeypatch):
    monkeypatch.setenv("DEATH_NOTE", str(tmp_path / "1.pt"))
    (kind, text), _ = run(second_dies, timeout=600.0)
    assert kind == "RuntimeError"
    assert "while calibrating: another process ended" in text
