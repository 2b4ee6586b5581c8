"""Processes that are forked from one that has imported everything: the imports take ten to twenty seconds."""

import faulthandler
import gc
import multiprocessing
import os
import runpy
import sys
import traceback

from torch.multiprocessing.spawn import ProcessException, start_processes

multiprocessing.set_forkserver_preload(
    ["torch.distributed.fsdp", "axolotl.cli.train", "axolotl_supertune.plugin.plugin"]
)


def start(enter, arguments, world, *, join=True):
    """Processes that call enter(rank, *arguments), with the test's environment as it is now; see `start_processes`.

    Triton decides at its import whether it interprets, so processes that are to do so import all anew.
    """
    method = "spawn" if "TRITON_INTERPRET" in os.environ else "forkserver"
    return start_processes(_enter, (enter, dict(os.environ), *arguments), world, join=join, start_method=method)


def run_script(script, arguments, world, environment, output):
    """Run a script as the launcher of several processes would, on one machine; one that fails ends all.

    Returns:
        (exit status, what all printed); `output` is the file that holds it.
    """
    output.touch()
    running = start(_run, (script, arguments, world, environment, output), world, join=False)
    try:
        while not running.join(grace_period=60):
            pass
    except ProcessException:
        return 1, output.read_text()
    return 0, output.read_text()


def _enter(rank, enter, environment, *arguments):
    faulthandler.enable()
    gc.freeze()  # the imports' objects need no collection
    os.environ.clear()
    os.environ.update(environment)
    enter(rank, *arguments)


def _run(rank, script, arguments, world, environment, output):
    file = os.open(output, os.O_WRONLY | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    os.environ.update(environment, **{name: str(value) for name, value in ranks.items()})
    sys.argv = [str(script), *arguments]
    try:
        runpy.run_path(str(script), run_name="__main__")
    except Exception:
        traceback.print_exc()
        raise
