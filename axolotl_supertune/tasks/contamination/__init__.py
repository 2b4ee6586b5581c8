"""Which benchmark questions occur in training data: `contamination_report` compares, `load_report` reads it again.

`comparison` holds the rule, `training_files` reads training data, `report` is the JSON, `tables` prints it.
"""

from .comparison import LEVELS, THRESHOLD
from .report import clean_indices, compare, contamination_report, load_report, write_report
from .training_files import TrainingRecord, TrainingSet, read_training

__all__ = [
    "LEVELS",
    "THRESHOLD",
    "TrainingRecord",
    "TrainingSet",
    "clean_indices",
    "compare",
    "contamination_report",
    "load_report",
    "read_training",
    "write_report",
]
