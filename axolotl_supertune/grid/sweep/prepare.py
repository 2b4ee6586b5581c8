"""What runs of a grid share, made once: `python -m axolotl_supertune.grid.sweep.prepare KIND CONFIG OUT`.

`data` tokenizes the data sets of CONFIG into the folder OUT; `norms` calibrates into the file OUT.
"""

import shutil
import sys
from pathlib import Path
from typing import Any

DATA_SEED = 0


def prepare_data(config: Path, target: Path) -> None:
    """Have Axolotl tokenize the data of a YAML into `target`, a dataset_prepared_path that is whole or absent.

    Axolotl shuffles what it tokenizes by `seed`. Here that is DATA_SEED, whatever the YAML's: by the seed of whichever
    run needs the data first, a run that is trained again would see the records in another order than before.

    Raises:
        ValueError: nothing is left of `datasets` or of `test_datasets`.
        FileNotFoundError: Axolotl left no folder.
    """
    from axolotl.cli.config import load_cfg
    from axolotl.common.datasets import load_datasets

    making = target.with_name(f".{target.name}.making")
    shutil.rmtree(making, ignore_errors=True)
    cfg: Any = load_cfg(str(config), dataset_prepared_path=str(making), seed=DATA_SEED)
    target.parent.mkdir(parents=True, exist_ok=True)
    made = load_datasets(cfg=cfg)
    for key, records in (("datasets", made.train_dataset), ("test_datasets", made.eval_dataset)):
        if records is not None and hasattr(records, "__len__") and len(records) == 0:
            shutil.rmtree(making, ignore_errors=True)
            raise ValueError(
                f"{key}: of {', '.join(each['path'] for each in cfg[key])} no record is left when they are tokenized "
                f"(sequence_len: {cfg.sequence_len}; longer ones are dropped unless excess_length_strategy: truncate): "
                "raise sequence_len, or check the files and their type."
            )
    if not making.is_dir():
        raise FileNotFoundError(f"dataset_prepared_path: Axolotl prepared nothing in {making}.")
    making.rename(target)


def prepare_norms(config: Path, target: Path) -> None:
    """Write the activation norms that a YAML describes."""
    from ...plugin.calibrate_base import calibrate_base

    calibrate_base(config, target)


if __name__ == "__main__":
    {"data": prepare_data, "norms": prepare_norms}[sys.argv[1]](Path(sys.argv[2]), Path(sys.argv[3]))
