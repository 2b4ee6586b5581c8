"""Settings of a training that a checkpoint's own files do not tell, as JSON in each checkpoint.

A resumed run compares them with its YAML. They belong to the run and not to the adapter, so they are in a file of
their own: an adapter that is copied from a checkpoint is whole without it.
"""

import json
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from ..engines.processes import Processes
from ..method.atomic_files import whole_file

FILE = "supertune_training.json"


class WriteTrainingRecord(TrainerCallback):
    """Writes the record into every checkpoint, in process 0.

    Args:
        processes: of the run.
        sparse_lr: the YAML's, or None.
    """

    def __init__(self, processes: Processes, sparse_lr: float | None) -> None:
        self._processes = processes
        self._record = {"sparse_lr": None if sparse_lr is None else float(sparse_lr)}

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        with self._processes.synchronized("writing into a checkpoint"):
            if self._processes.is_first:
                path = Path(args.output_dir) / f"checkpoint-{state.global_step}" / FILE
                with whole_file(path) as temporary:
                    temporary.write_text(json.dumps(self._record, indent=2) + "\n", encoding="utf-8")


def read_training_record(checkpoint: Path) -> dict[str, Any] | None:
    """The record in a checkpoint; None if it has none, as those written before this file existed.

    Raises:
        ValueError: the file is damaged.
    """
    path = checkpoint / FILE
    if not path.is_file():
        return None
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is damaged ({error}): delete it to resume without it.") from error
    if not isinstance(record, dict) or "sparse_lr" not in record:
        raise ValueError(f"{path} is damaged: it has no sparse_lr. Delete it to resume without it.")
    return record
