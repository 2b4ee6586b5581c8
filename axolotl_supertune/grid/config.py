"""The GRID file as data: its keys, the runs that it stands for, and each run's whole Axolotl YAML.

Axolotl's own sweeps (`axolotl train --sweep`) also multiply lists of values, but have no methods and no seeds, cannot
remove a key, and shuffle the runs.
"""

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator

from ..plugin.validation import ADAPTERS, OWN_KEYS
from .run_files import GRID_FILE, RunKey

SUPERTUNE = "axolotl_supertune.SupertunePlugin"
RECORD = "axolotl_supertune.grid.record.RecordPlugin"
PREPARED_FOLDER = "prepared"
CALIBRATION_FOLDER = "calibration"
CONTAMINATION_FILE = "contamination.json"
# Names in RUNS_DIR that no method may have; `report` writes into the last one.
RESERVED = ("base", PREPARED_FOLDER, CALIBRATION_FOLDER, GRID_FILE, CONTAMINATION_FILE, "contamination.log", "report")


class GridError(ValueError):
    """A grid that cannot be run; the message names the file, the key, the value and the remedy."""


def _not_bool(value: Any) -> Any:
    """Refuse true and false, which pydantic would take as 1 and 0."""
    if isinstance(value, bool):
        raise ValueError(f"{value}: is not a number; give one")
    return value


Positive = Annotated[float, Field(gt=0, allow_inf_nan=False), BeforeValidator(_not_bool)]
Count = Annotated[int, Field(ge=1), BeforeValidator(_not_bool)]
Seed = Annotated[int, Field(ge=0, strict=True)]


def _unique_rates(values: list[float]) -> list[float]:
    """Refuse values that are equal to six digits, which is what names of folders show."""
    shown = [f"{value:g}" for value in values]
    if doubled := [value for at, value in enumerate(shown) if value in shown[:at]]:
        raise ValueError(f"{doubled[0]} is given twice (compared to six digits); drop one")
    return values


def _unique_seeds(values: list[int]) -> list[int]:
    if doubled := [value for at, value in enumerate(values) if value in values[:at]]:
        raise ValueError(f"{doubled[0]} is given twice; drop one")
    return values


def _share_or_count(value: float) -> float:
    if value > 1 and not value.is_integer():
        raise ValueError(f"{value:g}: is not a number of items; give a whole number, or a share below 1")
    return value


Rates = Annotated[list[Positive], Field(min_length=1), AfterValidator(_unique_rates)]
Seeds = Annotated[list[Seed], Field(min_length=1), AfterValidator(_unique_seeds)]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Method(_Section):
    """One row of the results: keys that are laid over the base YAML."""

    settings: dict[str, Any]
    learning_rates: Rates | None = None
    """None: the grid's."""


class Chosen(_Section):
    """The second stage: further seeds at a method's best rate by validation NLL."""

    seeds: Annotated[list[Seed], AfterValidator(_unique_seeds)] = []
    methods: list[str] = []
    """Methods that always get these seeds."""
    leading: Annotated[int, Field(ge=0), BeforeValidator(_not_bool)] = 0
    """How many other methods get them too: those with the lowest validation NLL."""


class Score(_Section):
    """The third stage: the benchmarks, for the base model and the runs."""

    runs: Literal["all", "chosen", "none"] = "chosen"
    """chosen: each method's runs at its best rate, of all seeds."""
    task: Literal["supertune_math", "supertune_math_beam4"] = "supertune_math"
    batch_size: Count = 64
    nll_batch_size: Count = 8
    """For the gold targets' NLL, which needs the logits of whole texts."""
    max_gen_toks: Count | None = None
    """None: the task's 256."""
    limit: Annotated[Positive, AfterValidator(_share_or_count)] | None = None
    """Items of each benchmark, or a share below 1; for trying a grid out. None: all."""
    data_dir: str | None = None
    """Folder of the six benchmark files. None: SUPERTUNE_DATA_DIR, or they are downloaded."""


class Grid(_Section):
    """A GRID file. `base` and `methods_from` are relative to the file, all other paths to the current folder."""

    base: str
    """The YAML that all runs share."""
    output_dir: str
    """RUNS_DIR."""
    methods_from: str | None = None
    """A YAML of methods, name → keys, from which `methods` names some; keys given in `methods` override its keys."""
    methods: Annotated[dict[str, Method], Field(min_length=1)]
    learning_rates: Rates | None = None
    """For the methods that have none of their own."""
    epochs: Rates = [1.0]
    seeds: Seeds = [0]
    chosen: Chosen = Chosen()
    score: Score = Score()
    keep: Literal["all", "chosen"] = "chosen"
    """Whose weights are kept. chosen: those at the best rates; others and all checkpoints are deleted once no stage
    needs them."""
    base_settings: dict[str, Any] = Field(default={}, exclude=True)
    """The content of `base`."""

    @field_validator("methods", mode="before")
    @classmethod
    def _fill_methods(cls, value: Any) -> Any:
        """Accept a list of names, or name → keys or {settings, learning_rates}; return name → Method's fields."""
        if isinstance(value, list):
            if doubled := {str(name) for name in value if value.count(name) > 1}:
                raise ValueError(f"{sorted(doubled)[0]} is given twice; drop one")
            value = dict.fromkeys(map(str, value))
        if not isinstance(value, Mapping):
            raise ValueError("a list of names of methods_from, or a mapping of names to keys of a YAML")
        return {
            str(name): keys if isinstance(keys, Mapping) and "settings" in keys else {"settings": keys or {}}
            for name, keys in value.items()
        }

    @model_validator(mode="after")
    def _check_names(self) -> "Grid":
        for name, method in self.methods.items():
            if name in RESERVED or not _is_folder_name(name):
                raise ValueError(
                    f"methods: {name!r} cannot be the name of a folder of runs; use letters, digits, '-', '_' and '.', "
                    f"and none of {', '.join(RESERVED)}"
                )
            if self.learning_rates is None and method.learning_rates is None:
                raise ValueError(
                    f"learning_rates: the key is missing, and methods.{name} has none of its own; a grid names base, "
                    "output_dir, methods and learning_rates"
                )
        for name in self.chosen.methods:
            if name not in self.methods:
                raise ValueError(
                    f"chosen.methods: {name} is not one of methods ({', '.join(self.methods)}); add it there"
                )
        return self

    @cached_property
    def keys(self) -> list[RunKey]:
        """The runs of the first stage, `train`, in the order in which they are trained."""
        return [
            RunKey(method=name, learning_rate=rate, epochs=epochs, seed=seed)
            for epochs in self.epochs
            for seed in self.seeds
            for name, method in self.methods.items()
            for rate in method.learning_rates or self.learning_rates or ()
        ]

    @property
    def all_settings(self) -> list[dict[str, Any]]:
        """The keys of the base and those of each method."""
        return [self.base_settings, *(method.settings for method in self.methods.values())]

    def settings(self, key: RunKey) -> dict[str, Any]:
        """The whole YAML of a run, without the calibration_path of norms that runs share.

        The base's keys of super and supra are left out for methods with another adapter.
        """
        folder, own = Path(self.output_dir), self.methods[key.method].settings
        is_sparse = {**self.base_settings, **own}.get("adapter") in ADAPTERS
        merged = {
            "dataset_prepared_path": (folder / PREPARED_FOLDER).as_posix(),
            "auto_resume_from_checkpoints": True,
            **{name: value for name, value in self.base_settings.items() if is_sparse or name not in OWN_KEYS},
            **own,
            "learning_rate": key.learning_rate,
            "num_epochs": int(key.epochs) if key.epochs.is_integer() else key.epochs,
            "seed": key.seed,
            "output_dir": (folder / key.folder / "adapter").as_posix(),
        }
        plugins = [plugin for plugin in merged.get("plugins") or [] if plugin != RECORD]
        plugins += [plugin for plugin in (SUPERTUNE, RECORD) if plugin not in plugins]
        return {name: value for name, value in {**merged, "plugins": plugins}.items() if value is not None}


def _is_folder_name(name: str) -> bool:
    return name[0] != "." and name.replace("-", "").replace(".", "").replace("_", "").isalnum()
