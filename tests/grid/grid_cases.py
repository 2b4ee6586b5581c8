"""The base YAML and a method of the test grids, and their runs."""

from pathlib import Path

BASE = {
    "base_model": "base",
    "plugins": ["axolotl_supertune.SupertunePlugin"],
    "calibration_dataset": "text.txt",
    "datasets": [{"path": "train.jsonl", "type": "alpaca"}],
    "test_datasets": [{"path": "valid.jsonl", "type": "alpaca", "split": "train"}],
    "micro_batch_size": 4,
}
MAGNITUDE = {"adapter": "super", "mask_score": "magnitude"}

RUNS = Path("runs")
FIRST = ["lora 0.0001 0", "lora 0.001 0", "magnitude 0.0001 0", "magnitude 0.001 0"]
"""The first stage's runs of the grid that `write_grid` writes, as the fake processes name them."""


def folder(method, rate, seed=0, epochs=1):
    return RUNS / method / f"lr{rate:g}-ep{epochs:g}-seed{seed}"


def weights():
    """The runs whose weights exist."""
    return {path.read_text() for path in RUNS.glob("*/*/adapter/adapter_model.safetensors")}
