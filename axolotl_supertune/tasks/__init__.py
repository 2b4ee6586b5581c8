"""The `supertune_math` evaluation: six arithmetic benchmarks for lm-evaluation-harness.

Importing this package loads neither torch, lm_eval nor axolotl.
"""

from pathlib import Path

TASK_FOLDER = Path(__file__).parent / "supertune_math"
