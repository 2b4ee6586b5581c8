"""Stands in for `python -m axolotl_supertune.tasks contamination FILES --output REPORT`."""

import json
import os
import sys
from pathlib import Path

plan = json.loads(Path(os.environ["FAKE_PLAN"]).read_text())
with Path(plan["calls"]).open("a") as calls:
    calls.write(json.dumps({"contamination": sys.argv[1 : sys.argv.index("--output")]}) + "\n")
if plan.get("contamination_fails"):
    sys.exit(1)
Path(sys.argv[sys.argv.index("--output") + 1]).write_text('{"report": true}')
