"""Runs a sweep of the GRID file in the first argument in a process that a test can kill."""

import sys
from pathlib import Path

from rich.console import Console

from axolotl_supertune.grid.sweep.devices import Devices
from axolotl_supertune.grid.sweep.run_jobs import Commands
from axolotl_supertune.grid.sweep.sweep import Sweep

here = Path(__file__).parent
fakes = {
    name: [sys.executable, "-S", str(here / f"{name}.py")] for name in ("train", "score", "prepare", "contamination")
}
Sweep(Path(sys.argv[1]), Devices(()), Console(), commands=Commands(**fakes)).sweep()
