"""The table of examples/bench/README.md shows what its records hold."""

import json
import re
from pathlib import Path
from statistics import mean

FOLDER = Path(__file__).parents[2] / "examples/bench"
# How a row of the table begins → its method.
METHODS = {
    "floor": "floor",
    "**Super**, evenly": "super",
    "**Super**, support crowded": "super-wanda",
    "**Supra**": "supra",
    "the paper's layer": "paper",
    "PEFT `supertuning`": "peft-supertuning",
    "PEFT SHiRA": "peft-shira",
    "PEFT LoRA r 8, dropout": "lora",
    "PEFT LoRA r 8, no dropout": "lora-bf16",
    "full": "full",
}


def recorded(model):
    """Method → step time in ms, its fastest, × floor, peak in GiB, × floor; two rows of the floor become one."""
    rows = {}
    for row in json.loads((FOLDER / f"{model}.json").read_text())["rows"]:
        assert row["status"] == "ok"
        rows.setdefault(row["method"], []).append(row)
    keys = {"step_ms": mean, "step_ms_min": min, "step_times_floor": mean, "peak_gib": mean, "peak_times_floor": mean}
    return {name: [of(row[key] for row in same) for key, of in keys.items()] for name, same in rows.items()}


def test_the_page_shows_the_records():
    large, small = recorded("llama3-8b"), recorded("llama3.2-1b")
    section = (FOLDER / "README.md").read_text(encoding="utf-8").split("\n## One training step\n")[1].split("\n## ")[0]
    shown = [re.split(r" *\| *", line)[1:-1] for line in section.splitlines() if line.startswith("| ")][1:]
    methods = [next(method for start, method in METHODS.items() if row[0].startswith(start)) for row in shown]
    assert set(methods) == set(large) | set(small)
    for method, (_, *cells) in zip(methods, shown, strict=True):
        expected = ["–"] * 4
        if method in large:
            step, _, times, peak, peak_times = large[method]
            expected = [f"{step:.0f}", f"{times:.2f}", f"{peak:.1f}", f"{peak_times:.2f}"]
        step, fastest, times, peak, _ = small[method]
        assert cells == [*expected, f"{step:.1f} ({fastest:.1f})", f"{times:.2f}", f"{peak:.1f}"], method
