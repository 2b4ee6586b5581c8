"""Fake of `axolotl train CONFIG`: does what the JSON file FAKE_PLAN says, and leaves the files of a run."""

import json
import os
import signal
import socket
import sys
from pathlib import Path

folder = Path(sys.argv[1]).parent
known = json.loads(os.environ["SUPERTUNE_RUN"])
plan = json.loads(Path(os.environ["FAKE_PLAN"]).read_text())
key = known["key"]
name = f"{key['method']} {key['learning_rate']:g} {key['seed']}"
adapter = folder / "adapter"
found = sorted(int(each.name.rpartition("-")[2]) for each in adapter.glob("checkpoint-*"))
seen = {
    "run": name,
    "checkpoints": found,
    "gpu": os.environ["CUDA_VISIBLE_DEVICES"],
    "omp": os.environ["OMP_NUM_THREADS"],
}
with Path(plan["calls"]).open("a") as calls:
    calls.write(json.dumps(seen) + "\n")
behaviour = plan.get("behaviour", {}).get(name, "done")
print(f"training {name}", flush=True)
if behaviour == "fail":
    print("".join(f"line {number}\n" for number in range(100)) + "ValueError: lora_r: 0 is no rank", flush=True)
    sys.exit(7)
if behaviour == "exit":
    sys.exit(0)
for path in plan.get("edits", []):
    Path(path).write_text("edited")
adapter.mkdir(parents=True, exist_ok=True)
if behaviour in ("block", "stop the sweep"):
    for step in (2, 4):
        (adapter / f"checkpoint-{step}").mkdir(exist_ok=True)
        for state in plan.get("states", ("optimizer.pt", "scheduler.pt")):
            (adapter / f"checkpoint-{step}" / state).touch()
        # The later one was being written.
        (adapter / f"checkpoint-{step}" / "trainer_state.json").write_text(
            '{"global_step": 2}' if step == 2 else '{"glo'
        )
    if behaviour == "stop the sweep":
        os.kill(os.getppid(), signal.SIGTERM)
    if "fifo" in plan:
        # Stays open: whoever reads it sees its end when this process is gone.
        fifo = os.open(plan["fifo"], os.O_WRONLY)
        os.write(fifo, b"blocked\n")
    signal.pause()
if behaviour == "meet":
    with socket.create_connection(("127.0.0.1", plan["port"])) as meeting:
        meeting.recv(1)
(adapter / "adapter_model.safetensors").write_text(name)
(adapter / "checkpoint-9").mkdir()
nll = plan.get("nll", {}).get(name, 1.0)
record = {
    **known,
    "status": "done",
    "started": "2026-01-01T00:00:00+00:00",
    "seconds": plan.get("seconds", 1.0),
    "eval_losses": [[0, 2.0], [4, nll]],
}
(folder / "run.json").write_text(json.dumps(record))
