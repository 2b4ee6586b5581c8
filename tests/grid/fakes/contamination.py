"""Fake of `python -m axolotl_supertune.tasks contamination FILES --output REPORT`."""

import hashlib
import json
import os
import sys
from pathlib import Path

plan = json.loads(Path(os.environ["FAKE_PLAN"]).read_text())
sources = sys.argv[1 : sys.argv.index("--output")]
with Path(plan["calls"]).open("a") as calls:
    calls.write(json.dumps({"contamination": sources}) + "\n")
if plan.get("contamination_fails"):
    sys.exit(1)
train = [{"path": path, "sha256": hashlib.sha256(Path(path).read_bytes()).hexdigest()} for path in sources]
Path(sys.argv[sys.argv.index("--output") + 1]).write_text(json.dumps({"train": train}))
