"""Writes tests/grid/golden anew, after a change that is meant to show in reports.

PYTHONPATH=.:tests/shared python tests/grid/make_golden.py
"""

import shutil
import tempfile
from pathlib import Path

from grid_records import grid, save_records
from reporting import run_report
from test_report import GOLDEN, GOLDEN_FILES

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        records, base = grid()
        runs_dir = save_records(Path(name), *records, base=base)
        result = run_report(runs_dir)
        assert result.exit_code == 0, result.output
        GOLDEN.mkdir(exist_ok=True)
        for file in GOLDEN_FILES:
            shutil.copy(runs_dir / "report" / file, GOLDEN / file)
