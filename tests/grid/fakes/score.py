"""Fake of `python -m axolotl_supertune.grid.sweep.scoring REQUEST`."""

import json
import os
import sys
from pathlib import Path

request = json.loads(sys.argv[1])
plan = json.loads(Path(os.environ["FAKE_PLAN"]).read_text())
name = request["trained"] or "base"
with Path(plan["calls"]).open("a") as calls:
    calls.write(json.dumps({"score": name}) + "\n")
files = {each["path"]: each["sha256"] for each in json.loads(Path(request["contamination"]).read_text())["train"]}
if name.startswith(plan.get("score_fails", "\0")):
    print("CUDA out of memory")
    sys.exit(1)
assert request["trained"] is None or Path(request["trained"], "adapter_model.safetensors").is_file()
asked = {each: request["score"][each] for each in ("task", "max_gen_toks", "limit")}
items = {"correct": "10", "correct_strict": "10", "clean": "11"}
scores = {"key": request["key"], "benchmarks": {"AddSub": items}, "asked": asked, "seconds": 1.0, "files": files}
scores["base_model"] = request["settings"]["base_model"]
Path(request["output"]).parent.mkdir(parents=True, exist_ok=True)
Path(request["output"]).write_text(json.dumps(scores))
