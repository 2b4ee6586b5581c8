"""Progress bars: in sight where work takes long, and only there."""

import pytest
import torch

from axolotl_supertune.method import progress as module
from axolotl_supertune.method.progress import progress


def work(layers=3):
    with progress("Choosing supports", total=layers, unit="layer") as bar:
        for _ in range(layers):
            bar.update()


def test_short_work_shows_nothing(capsys):
    work()
    assert capsys.readouterr() == ("", "")


def test_long_work_shows_what_is_done_and_how_far(capsys, monkeypatch):
    monkeypatch.setattr(module, "_DELAY_SECONDS", 0)
    work()
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "Choosing supports" in shown.err
    assert "3/3" in shown.err


def test_a_file_gets_few_lines(capsys, monkeypatch):
    monkeypatch.setattr(module, "_DELAY_SECONDS", 0)
    work(layers=1000)
    assert capsys.readouterr().err.count("layer/s") <= 2


@pytest.mark.parametrize("rank", [0, 1])
def test_only_the_first_process_shows_it(capsys, monkeypatch, rank):
    monkeypatch.setattr(module, "_DELAY_SECONDS", 0)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: rank)
    work()
    assert bool(capsys.readouterr().err) is (rank == 0)
