"""tests/gpu/measure_switching.py runs on a tiny model on the CPU: every method switches, hot-swaps and restores."""

import importlib.util
import json
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "gpu" / "measure_switching.py"


@pytest.mark.slow
def test_every_method_is_measured(tmp_path):
    spec = importlib.util.spec_from_file_location("measure_switching", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    path = tmp_path / "switching.json"
    rows = module.main(["--model", "tiny", "--device", "cpu", "--rounds", "2", "--output", str(path)])
    assert [row["method"] for row in rows] == list(module.METHODS)
    for row in rows:
        assert all(row[name] > 0 for name in ("forward", "set_adapter", "first forward", "merge and unmerge"))
        assert ("hot-swap" in row) == (row["method"] != "shira")
    assert json.loads(path.read_text())["rows"] == rows
