"""Triton's C launcher is found in every known layout of its arguments, and left alone in any other."""

import pytest
import torch

from axolotl_supertune.ops.launcher import aligned, direct_launch, split_addresses

FLAT = lambda grid, stream, args: (*grid, stream, "function", False, None, *args)  # noqa: E731
NESTED = lambda grid, stream, args: (*grid, stream, "function", False, "signature", args)  # noqa: E731
GRID_LATER = lambda grid, stream, args: (False, *grid, stream, "function", *args)  # noqa: E731


class Launcher:
    """As Triton's: called with the grid, the stream, the function and the arguments."""

    def __init__(self, layout, scratch=0):
        self.calls, self.layout, self.scratch = [], layout, scratch
        self.launch = self.record = lambda *args: self.calls.append(args)

    def __call__(self, grid, stream, args):
        if self.scratch:
            assert grid[0] * grid[1] * grid[2] * self.scratch
        self.launch(*self.layout(grid, stream, args))


class Compiled:
    def __init__(self, run):
        self.run, self.usual = run, 0

    def __getitem__(self, grid):
        def runner(*args, stream):
            self.usual += 1
            self.run(grid, stream, args)

        return runner


@pytest.mark.parametrize("layout", [FLAT, NESTED])
def test_known_layouts_are_launched_without_triton_in_between(layout):
    compiled = Compiled(Launcher(layout))
    launch = direct_launch(compiled, 3)
    assert compiled.run.calls == []  # nothing was launched to find out
    assert compiled.run.launch is compiled.run.record
    looked = compiled.usual
    launch((4, 5, 6), 77, (1, 2, 3))
    launch((7, 1, 1), 78, (4, 5, 6))
    assert compiled.run.calls == [layout((4, 5, 6), 77, (1, 2, 3)), layout((7, 1, 1), 78, (4, 5, 6))]
    assert compiled.usual == looked


@pytest.mark.parametrize("run", [Launcher(GRID_LATER), Launcher(FLAT, scratch=8)], ids=["grid later", "scratch"])
def test_anything_else_is_left_to_triton(run):
    compiled = Compiled(run)
    launch = direct_launch(compiled, 2)
    assert run.calls == []
    assert run.launch is run.record
    launch((4, 5, 6), 77, (1, 2))
    assert run.calls == [run.layout((4, 5, 6), 77, (1, 2))]
    assert compiled.usual


def test_a_launcher_without_a_launch_function_is_left_to_triton():
    calls = []
    compiled = Compiled(lambda grid, stream, args: calls.append((grid, stream, args)))
    direct_launch(compiled, 1)((1, 2, 3), 9, (5,))
    assert calls == [((1, 2, 3), 9, (5,))]


def test_addresses_are_consecutive():
    buffer = torch.empty(10, dtype=torch.bfloat16)
    start = buffer.data_ptr()
    assert split_addresses(buffer, [3, 0, 4]) == [start, start + 6, start + 6]


def test_aligned_copies_only_what_begins_in_between():
    x = torch.arange(16.0)
    assert aligned(x) is x
    assert aligned(x[4:]).data_ptr() == x[4:].data_ptr()
    moved = aligned(x[1:])
    assert moved.data_ptr() % 16 == 0
    assert torch.equal(moved, x[1:])
