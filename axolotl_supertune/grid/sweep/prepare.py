"""Makes what runs of a grid share: `python -m axolotl_supertune.grid.sweep.prepare KIND CONFIG OUT`.

KIND `data` tokenizes the data sets of the YAML CONFIG into the folder OUT; `norms` measures its activation norms and
writes them to the file OUT.
"""

import shutil
import sys
from pathlib import Path
from typing import Any

DATA_SEED = 0


def prepare_data(config: Path, target: Path) -> None:
    """Have Axolotl tokenize the data of a YAML into `target`, a dataset_prepared_path that is whole or absent.

    Axolotl shuffles tokenized data by `seed`. Here the seed is always DATA_SEED, so that the order does not depend on
    which run needs the data first.

    Raises:
        ValueError: no record of `datasets` or of `test_datasets` is left.
        FileNotFoundError: Axolotl left no folder.
    """
    from axolotl.cli.config import load_cfg
    from axolotl.common.datasets import load_datasets

    unfinished = target.with_name(f".{target.name}.making")
    shutil.rmtree(unfinished, ignore_errors=True)
    cfg: Any = load_cfg(str(config), dataset_prepared_path=str(unfinished), seed=DATA_SEED)
    target.parent.mkdir(parents=True, exist_ok=True)
    loaded = load_datasets(cfg=cfg)
    for key, records in (("datasets", loaded.train_dataset), ("test_datasets", loaded.eval_dataset)):
        if records is not None and hasattr(records, "__len__") and len(records) == 0:
            shutil.rmtree(unfinished, ignore_errors=True)
            raise ValueError(
                f"{key}: of {', '.join(dataset['path'] for dataset in cfg[key])} no record is left when they are "
                f"tokenized (sequence_len: {cfg.sequence_len}; longer ones are dropped unless excess_length_strategy: "
                "truncate): raise sequence_len, or check the files and their type."
            )
    if not unfinished.is_dir():
        raise FileNotFoundError(f"dataset_prepared_path: Axolotl prepared nothing in {unfinished}.")
    unfinished.rename(target)


def prepare_norms(config: Path, target: Path) -> None:
    """Write the activation norms of a YAML to the file `target`."""
    from ...plugin.calibrate_base import calibrate_base

    calibrate_base(config, target)


if __name__ == "__main__":
    {"data": prepare_data, "norms": prepare_norms}[sys.argv[1]](Path(sys.argv[2]), Path(sys.argv[3]))
