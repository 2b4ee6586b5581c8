"""The base YAML and a method of the test grids, and the folder of test data."""

from pathlib import Path

DATA = Path(__file__).parents[3] / "shared" / "data"
BASE = {
    "base_model": "base",
    "plugins": ["axolotl_supertune.SupertunePlugin"],
    "calibration_dataset": "text.txt",
    "datasets": [{"path": "train.jsonl", "type": "alpaca"}],
    "test_datasets": [{"path": "valid.jsonl", "type": "alpaca", "split": "train"}],
    "micro_batch_size": 4,
}
MAGNITUDE = {"adapter": "super", "mask_score": "magnitude"}
