"""The YAML of every run of a grid, with the tokenized data and activation norms that runs share.

Shared files are named by a digest of everything that their content depends on: the keys of the YAML and the files that
it names. A changed file or key so gets a new name, and nothing outdated is used.
"""

import copy
from pathlib import Path
from typing import Any

from ...plugin import axolotl_compat, validation
from ...plugin.args import SupertuneArgs
from ..config import CALIBRATION_FOLDER, PREPARED_FOLDER, RECORD, SUPERTUNE, Grid, GridError
from ..read_config import GRID_KEYS, check_keys
from ..run_files import RunKey
from .file_digests import FileDigests, calibration_paths, data_paths, digest
from .prepare import DATA_SEED

# Keys on which activation norms do not depend; of any other key, known or not, they are taken to depend.
_NOT_OF_NORMS = {
    *GRID_KEYS,
    *(key for key in SupertuneArgs.model_fields if not key.startswith("calibration_")),
    *("adapter", "lora_r", "lora_alpha", "lora_dropout", "dataset_prepared_path"),
    "lr_groups",  # set by validation.prepare from sparse_lr
} - {"lora_exclude_modules"}

# Keys on which tokenized data and its order do not depend. Axolotl's own name for tokenized data leaves out some keys
# on which they do.
_NOT_OF_DATA = _NOT_OF_NORMS | {*SupertuneArgs.model_fields}


class RunSettings:
    """The YAMLs of a grid's runs.

    Args:
        path: the GRID file.

    Raises:
        GridError: Axolotl or the plugin would refuse a run's YAML, or a plugin cannot be loaded.
    """

    def __init__(self, grid: Grid, path: Path) -> None:
        self.grid, self._path, self._runs_dir = grid, path, Path(grid.output_dir)
        self._known_keys = _known_keys(grid)
        check_keys(grid, path, self._known_keys)
        self._digests = FileDigests()
        self._norms: dict[RunKey, Path | None] = {}
        self._paths: dict[RunKey, list[str]] = {}
        for key in grid.keys:
            self.norms(key)

    def of(self, key: RunKey) -> dict[str, Any]:
        """A run's YAML, with the paths of the data and the norms that it shares."""
        settings = self.uncalibrated(key)
        if norms := self.norms(key):
            settings.pop("calibration_batch_size", None)
            settings["calibration_path"] = norms.as_posix()
        return settings

    def uncalibrated(self, key: RunKey) -> dict[str, Any]:
        """A run's YAML with the path of the data that it shares, for a run that calibrates itself."""
        settings = self.grid.settings(key)
        if prepared := self.prepared(key):
            settings["dataset_prepared_path"] = prepared.as_posix()
        return settings

    def prepared(self, key: RunKey) -> Path | None:
        """The folder of tokenized data that a run shares with all that tokenize alike; None: Axolotl chooses one.

        Axolotl knows prepared data by its folder's name and would not notice that a file has changed.
        """
        settings, default = self.grid.settings(key), self._runs_dir / PREPARED_FOLDER
        folder = Path(settings.get("dataset_prepared_path") or default)
        files = self._digests.of(data_paths(settings))
        if settings.get("skip_prepare_dataset") or not (files or folder == default):
            return None
        depends_on = {
            name: value
            for name, value in settings.items()
            if name not in _NOT_OF_DATA and not name.startswith(("lora_", "peft_"))
        }
        return folder / digest({**depends_on, "files": files, "seed": DATA_SEED})

    def norms(self, key: RunKey) -> Path | None:
        """The file of activation norms that a run shares with all that calibrate alike; None: it needs no shared one.

        Raises:
            GridError: the plugin refuses the run's YAML; names the method.
        """
        if key not in self._norms:
            self._norms[key] = self._find_norms(key)
        return self._norms[key]

    def _find_norms(self, key: RunKey) -> Path | None:
        """`norms`, which also notes the files that the run reads."""
        settings = copy.deepcopy(self.grid.settings(key))
        own_norms = settings.get("calibration_path")
        try:
            validation.prepare(settings, self._known_keys)
        except (ValueError, FileNotFoundError) as error:
            raise GridError(f"{self._path}: methods.{key.method}: {error}") from error
        needs_norms = settings.get("adapter") in validation.ADAPTERS and validation.method_config(settings).needs_norms
        calibration = ([own_norms] if own_norms else calibration_paths(settings)) if needs_norms else []
        self._paths[key] = [*data_paths(settings), *calibration]
        if own_norms or not needs_norms:
            return None
        depends_on = {name: value for name, value in sorted(settings.items()) if name not in _NOT_OF_NORMS}
        if files := self._digests.of(calibration):
            depends_on["files"] = files
        return self._runs_dir / CALIBRATION_FOLDER / f"{digest(depends_on)}.safetensors"

    def paths(self, key: RunKey) -> list[str]:
        """The files, folders and datasets on the hub that a run reads, as its YAML names them."""
        self.norms(key)
        return self._paths[key]

    def files(self, key: RunKey) -> dict[str, str]:
        """sha256 of the local files that a run reads and that exist, by path."""
        return self._digests.of(self.paths(key))

    def training_files(self) -> dict[str, str]:
        """sha256 of the local files of the whole grid's training data, by path."""
        return self._digests.of(
            path for settings in self.grid.all_settings for path in data_paths(settings, ("datasets",))
        )


def _known_keys(grid: Grid) -> set[str]:
    """The keys of Axolotl and of the plugins that the grid names.

    Raises:
        GridError: a plugin cannot be loaded.
    """
    arguments = [f"{SupertuneArgs.__module__}.{SupertuneArgs.__name__}"]
    for name in dict.fromkeys(name for settings in grid.all_settings for name in settings.get("plugins") or []):
        if name in (SUPERTUNE, RECORD):
            continue
        try:
            argument_class = axolotl_compat.argument_class_of(name)
            if argument_class:
                axolotl_compat.config_keys([argument_class])  # raises here, where the plugin can be named
                arguments.append(argument_class)
        except (ImportError, AttributeError, ValueError) as error:
            raise GridError(f"plugins: {name} cannot be loaded: {error}; install it, or remove it.") from error
    return axolotl_compat.config_keys(arguments)
