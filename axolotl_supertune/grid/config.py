"""The GRID file: what it may say, and the runs and whole Axolotl YAMLs that it stands for.

Axolotl's own sweeps (`axolotl train --sweep`) multiply lists too, but name no method, know no seed, remove no key
and shuffle: a grid is resolved here.
"""

import difflib
import os
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from ..plugin.validation import ADAPTERS, OWN_KEYS
from .records import GRID_FILE, RunKey

SUPERTUNE = "axolotl_supertune.SupertunePlugin"
RECORD = "axolotl_supertune.grid.record.RecordPlugin"
PREPARED_FOLDER = "prepared"
CALIBRATION_FOLDER = "calibration"
CONTAMINATION_FILE = "contamination.json"
# What lies in RUNS_DIR beside the methods' folders; `report` writes into the last one.
RESERVED = ("base", PREPARED_FOLDER, CALIBRATION_FOLDER, GRID_FILE, CONTAMINATION_FILE, "contamination.log", "report")

# What the grid says of every run; a base YAML or a method may not.
OF_THE_GRID = ("learning_rate", "num_epochs", "seed", "output_dir")
# Keys of a YAML with which its runs could not be compared, and why.
_REFUSED = {
    "max_steps": "every run would end there, whatever its epochs; drop it",
    "val_set_size": "it cuts off the end of the data as some run's seed shuffled it; name a file of its own in "
    "test_datasets",
    "streaming": "its runs would need max_steps; drop it",
    "load_best_model_at_end": "a run is judged, and scored, by the model that it ends with; drop it",
    "early_stopping_patience": "runs that stop at different steps are not compared on equal terms; drop it",
    "resume_from_checkpoint": "a run that was stopped finds its own checkpoint; drop it",
    "lora_model_dir": "all runs would go on from one adapter; drop it",
    "hub_model_id": "every run would be pushed to one place; drop it",
    "deepspeed": "a run of a grid is one process on one GPU; drop it",
    "fsdp_config": "a run of a grid is one process on one GPU; drop it",
}


def _no_truth(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError(f"{value}: is no number; give one")
    return value


Positive = Annotated[float, Field(gt=0, allow_inf_nan=False), BeforeValidator(_no_truth)]
Count = Annotated[int, Field(ge=1), BeforeValidator(_no_truth)]
Seed = Annotated[int, Field(ge=0, strict=True)]


def _distinct(values: list[float]) -> list[float]:
    shown = [f"{value:g}" for value in values]
    if doubled := [value for at, value in enumerate(shown) if value in shown[:at]]:
        raise ValueError(f"{doubled[0]} is there twice (six digits tell two runs apart); drop one")
    return values


def _each_once(values: list[int]) -> list[int]:
    if doubled := [value for at, value in enumerate(values) if value in values[:at]]:
        raise ValueError(f"{doubled[0]} is there twice; drop one")
    return values


def _share_or_count(value: float) -> float:
    if value > 1 and not value.is_integer():
        raise ValueError(f"{value:g}: is no number of items; give a whole one, or below 1 a share")
    return value


Rates = Annotated[list[Positive], Field(min_length=1), AfterValidator(_distinct)]
Seeds = Annotated[list[Seed], Field(min_length=1), AfterValidator(_each_once)]


class GridError(ValueError):
    """A grid that cannot be run; the message names the file, the key, the value and the remedy."""


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Method(_Section):
    """One row of the table: keys laid over the base, and rates of its own if it has any."""

    settings: dict[str, Any]
    learning_rates: Rates | None = None


class Chosen(_Section):
    """The second stage, at each method's best rate by validation NLL."""

    seeds: Annotated[list[Seed], AfterValidator(_each_once)] = []
    methods: list[str] = []
    """These always get the other seeds."""
    leading: Annotated[int, Field(ge=0), BeforeValidator(_no_truth)] = 0
    """And as many besides, those with the lowest validation NLL."""


class Score(_Section):
    """The third stage: the benchmarks, for the base model and the runs."""

    runs: Literal["all", "chosen", "none"] = "chosen"
    """chosen: of each method those at its best rate, with all their seeds."""
    task: Literal["supertune_math", "supertune_math_beam4"] = "supertune_math"
    batch_size: Count = 64
    nll_batch_size: Count = 8
    """Of the gold targets' NLL, which holds the logits of whole texts."""
    max_gen_toks: Count | None = None
    """Default: the task's 256."""
    limit: Annotated[Positive, AfterValidator(_share_or_count)] | None = None
    """Items a benchmark, or below 1 a share: to try the grid out."""
    data_dir: str | None = None
    """Folder of the six benchmark files. Default: SUPERTUNE_DATA_DIR, else they are downloaded."""


class Grid(_Section):
    """A GRID file. `base` and `methods_from` are relative to it, all other paths to the current folder."""

    base: str
    output_dir: str
    methods_from: str | None = None
    """A YAML of methods, name → keys: `methods` names some of them, and may lay keys of its own over theirs."""
    methods: Annotated[dict[str, Method], Field(min_length=1)]
    learning_rates: Rates | None = None
    """Of the methods that have none of their own."""
    epochs: Rates = [1.0]
    seeds: Seeds = [0]
    chosen: Chosen = Chosen()
    score: Score = Score()
    keep: Literal["all", "chosen"] = "chosen"
    """Whose weights stay. chosen: those at the best rates; others go when no stage needs them, and checkpoints."""
    base_settings: dict[str, Any] = Field(default={}, exclude=True)

    @field_validator("methods", mode="before")
    @classmethod
    def _fill_methods(cls, value: Any) -> Any:
        """A list of names, or name → keys (or {settings, learning_rates}), as name → Method."""
        if isinstance(value, list):
            if doubled := {str(name) for name in value if value.count(name) > 1}:
                raise ValueError(f"{sorted(doubled)[0]} is there twice; drop one")
            value = dict.fromkeys(map(str, value))
        if not isinstance(value, Mapping):
            raise ValueError("a list of names of methods_from, or a mapping of names to keys of a YAML")
        return {
            str(name): keys if isinstance(keys, Mapping) and "settings" in keys else {"settings": keys or {}}
            for name, keys in value.items()
        }

    @model_validator(mode="after")
    def _check_names(self) -> "Grid":
        for name in self.methods:
            if (
                name in RESERVED
                or not name.replace("-", "").replace(".", "").replace("_", "").isalnum()
                or name[0] == "."
            ):
                raise ValueError(
                    f"methods: {name!r} cannot be the name of a folder of runs; use letters, digits, '-', '_' and '.', "
                    f"and none of {', '.join(RESERVED)}"
                )
        for name, method in self.methods.items():
            if self.learning_rates is None and method.learning_rates is None:
                raise ValueError(
                    f"learning_rates: the key is missing, and methods.{name} has none of its own; a grid names base, "
                    "output_dir, methods and learning_rates"
                )
        for name in self.chosen.methods:
            if name not in self.methods:
                raise ValueError(f"chosen.methods: {name} is none of methods ({', '.join(self.methods)}); add it there")
        return self

    @cached_property
    def keys(self) -> list[RunKey]:
        """The first stage, in its order."""
        return [
            RunKey(method=name, learning_rate=rate, epochs=epochs, seed=seed)
            for epochs in self.epochs
            for seed in self.seeds
            for name, method in self.methods.items()
            for rate in method.learning_rates or self.learning_rates or ()
        ]

    def settings(self, key: RunKey) -> dict[str, Any]:
        """The whole YAML of a run, but for what the sweep prepares for all (calibration_path).

        What the base says of super and supra alone does not reach methods that are neither.
        """
        folder, own = Path(self.output_dir), self.methods[key.method].settings
        ours = {**self.base_settings, **own}.get("adapter") in ADAPTERS
        merged = {
            "dataset_prepared_path": (folder / PREPARED_FOLDER).as_posix(),
            "auto_resume_from_checkpoints": True,
            **{name: value for name, value in self.base_settings.items() if ours or name not in OWN_KEYS},
            **own,
            "learning_rate": key.learning_rate,
            "num_epochs": int(key.epochs) if key.epochs.is_integer() else key.epochs,
            "seed": key.seed,
            "output_dir": (folder / key.folder / "adapter").as_posix(),
        }
        plugins = [each for each in merged.get("plugins") or [] if each != RECORD]
        plugins += [each for each in (SUPERTUNE, RECORD) if each not in plugins]
        return {name: value for name, value in {**merged, "plugins": plugins}.items() if value is not None}


def read_grid(path: str | os.PathLike[str]) -> Grid:
    """Read a GRID file with the files that it names.

    Raises:
        GridError: it is not one; names the file, the key, the value and the remedy.
        FileNotFoundError: a file that it names is not there.
    """
    path = Path(path)
    raw = read_mapping(path)
    library: dict[str, Any] = {}
    if isinstance(raw.get("methods_from"), str):
        library = read_mapping(_beside(path, "methods_from", raw["methods_from"]))
        _take_from(library, raw, path)
    try:
        grid = Grid.model_validate(raw)
    except ValidationError as error:
        raise GridError("\n".join(_explained(path, each) for each in error.errors())) from error
    grid.base_settings = read_mapping(_beside(path, "base", grid.base))
    _check_settings(path, grid)
    return grid


class _Loader(yaml.SafeLoader):
    """Of two keys of one name YAML keeps the last one without a word."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if key.tag == "tag:yaml.org,2002:merge" or not isinstance(key, yaml.ScalarNode):
                continue
            if key.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key.value} is there twice; drop one", key.start_mark
                )
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def read_mapping(path: Path) -> dict[str, Any]:
    """Raises GridError, which names the file, unless it is a YAML mapping."""
    try:
        loaded = yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except yaml.YAMLError as error:
        raise GridError(f"{path} is no YAML: {error}") from error
    if not isinstance(loaded, dict):
        raise GridError(f"{path} holds {type(loaded).__name__}, not keys with values.")
    return loaded


def _beside(path: Path, key: str, name: str) -> Path:
    found = path.parent / name
    if not found.is_file():
        raise FileNotFoundError(f"{path}: {key}: there is no file {found}; it is looked for beside the grid.")
    return found


def _take_from(library: Mapping[str, Any], raw: dict[str, Any], path: Path) -> None:
    """Lay what `methods` says of a name over the library's keys of that name."""
    asked = raw.get("methods")
    named = dict.fromkeys(asked) if isinstance(asked, list) and len(set(map(str, asked))) == len(asked) else asked
    if not isinstance(named, dict):
        return  # the schema says what is wrong
    filled = {}
    for name, keys in named.items():
        if keys is not None and not isinstance(keys, dict):
            filled[name] = keys  # as above
            continue
        section, own = _parted(keys or {})
        if name not in library and not own:
            near = difflib.get_close_matches(str(name), library, n=1)
            hint = f"did you mean {near[0]}?" if near else f"it has {', '.join(library)}."
            raise GridError(f"{path}: methods: {name} has no keys and is not in {raw['methods_from']}; {hint}")
        whole = isinstance(own, dict)
        filled[name] = {**section, "settings": {**(library.get(name) or {}), **own} if whole else own}
    raw["methods"] = filled


def _parted(keys: dict[str, Any]) -> tuple[dict[str, Any], Any]:
    """What is said of a method beside its settings, and those: `{settings, learning_rates}`, or the settings' keys."""
    if "settings" in keys:
        return {name: value for name, value in keys.items() if name != "settings"}, keys["settings"] or {}
    if set(keys) == {"learning_rates"}:
        return keys, {}
    return {}, keys


def _explained(path: Path, error: Any) -> str:
    where = ".".join(str(part) for part in error["loc"])
    if error["type"] == "extra_forbidden":
        section: Any = Grid
        for part in error["loc"][:-1]:
            section = {"chosen": Chosen, "score": Score, "methods": Method}.get(part, section)
        known = [name for name in section.model_fields if name != "base_settings"]
        near = difflib.get_close_matches(str(error["loc"][-1]), known, n=1)
        hint = f"did you mean {near[0]}?" if near else f"the keys here are {', '.join(known)}."
        return f"{path}: {where}: {error['input']!r} is not a key; {hint}"
    if error["type"] == "missing":
        return f"{path}: {where}: the key is missing; a grid names base, output_dir, methods and learning_rates."
    value = "" if error["type"] == "value_error" else f"{error['input']!r}: "
    return f"{path}: {where + ': ' if where else ''}{value}{error['msg'].removeprefix('Value error, ')}."


def _check_settings(path: Path, grid: Grid) -> None:
    """Refuse in base and methods what would make the runs incomparable."""
    base = path.parent / grid.base
    for name, method in grid.methods.items():
        if "learning_rates" in method.settings:
            own = dict(method.settings)
            rates = own.pop("learning_rates")
            raise GridError(
                f"{path}: methods.{name}: learning_rates: {rates} stands among keys of a YAML; a method with rates of "
                f"its own is written as {name}: {{settings: {own}, learning_rates: {rates}}}."
            )
        for key in OF_THE_GRID:
            if key in method.settings:
                raise GridError(
                    f"{path}: methods.{name}: {key}: {method.settings[key]} is the grid's to say (learning_rates, "
                    "epochs, seeds, output_dir); drop it. A method's own rates are written as "
                    f"{name}: {{settings: {{…}}, learning_rates: […]}}."
                )
    for where, settings in [(f"{base}", grid.base_settings)] + [
        (f"{path}: methods.{name}", method.settings) for name, method in grid.methods.items()
    ]:
        for key, why in _REFUSED.items():
            if settings.get(key):
                raise GridError(f"{where}: {key}: {settings[key]} does not go with a grid: {why}.")
        for key in ("load_in_4bit", "load_in_8bit"):
            if settings.get(key) and grid.score.runs != "none":
                raise GridError(
                    f"{where}: {key}: {settings[key]} cannot be scored: the harness loads bases unquantized, and would "
                    "ask another model. Drop the key, or say score: {runs: none}."
                )
    for name, method in grid.methods.items():
        if "adapter" not in method.settings and "adapter" not in grid.base_settings:
            raise GridError(
                f"{path}: methods.{name}: adapter: the key is missing; name one, or write adapter: null, which is full "
                "fine-tuning."
            )
    for key in ("base_model", "datasets"):
        if not grid.base_settings.get(key):
            raise GridError(f"{base}: {key}: the key is missing, and all runs share it.")
    if not grid.base_settings.get("test_datasets"):
        raise GridError(
            f"{base}: test_datasets: the key is missing; rates are chosen by the loss on validation data, which must "
            "be the same for all runs: name a file."
        )


def check_keys(grid: Grid, path: Path, known: Iterable[str]) -> None:
    """Refuse keys of the base and the methods that Axolotl would drop without a word.

    Args:
        known: Axolotl's keys, and those of all plugins.
    """
    known = set(known)
    for where, settings in [(path.parent / grid.base, grid.base_settings)] + [
        (f"{path}: methods.{name}", method.settings) for name, method in grid.methods.items()
    ]:
        for key in settings:
            if key not in known:
                near = difflib.get_close_matches(str(key), known, n=1)
                raise GridError(
                    f"{where}: {key}: {settings[key]!r} is no key of Axolotl's or this plugin's and would be dropped"
                    + (f"; did you mean {near[0]}?" if near else "; remove it.")
                )
