"""Where the benchmark and training files are; a test that needs them fails without them."""

import os
from pathlib import Path

DATA = Path(os.environ.get("SUPERTUNE_DATA_DIR") or Path(__file__).parents[2].parent / "shared/data/benchmarks")
TRAIN = DATA.parent / "train"
MATH, GSM8K = TRAIN / "math_data.json", TRAIN / "gsm8k_train.jsonl"
