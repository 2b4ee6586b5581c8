"""Fake of `python -m axolotl_supertune.grid.sweep.prepare KIND CONFIG TARGET`."""

import json
import os
import sys
from pathlib import Path

kind, config, target = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
plan = json.loads(Path(os.environ["FAKE_PLAN"]).read_text())
with Path(plan["calls"]).open("a") as calls:
    calls.write(json.dumps({"prepare": kind, "yaml": config.read_text()}) + "\n")
if kind in plan.get("prepare_fails", []):
    print(f"no text for {kind}")
    sys.exit(1)
if kind == "data":
    target.mkdir(parents=True)
else:
    target.write_text("norms")
