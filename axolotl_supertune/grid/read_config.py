"""Reads a GRID file with the files that it names, and refuses what would make its runs incomparable."""

import difflib
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from ..engines import SELECTING_KEYS
from .config import Chosen, Grid, GridError, Method, Score

# Keys that the grid sets for every run; a base YAML may hold them without effect, a method may not.
GRID_KEYS = ("learning_rate", "num_epochs", "seed", "output_dir")
# Keys of a YAML that make runs incomparable, with the reason and the remedy.
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
    **dict.fromkeys(SELECTING_KEYS, "a run of a grid is one process on one GPU; drop it"),
}


def read_grid(path: str | os.PathLike[str]) -> Grid:
    """Read a GRID file with the base YAML and the methods that it names.

    Raises:
        GridError: a file has an error; names the file, the key, the value and the remedy.
        FileNotFoundError: a named file does not exist.
    """
    path = Path(path)
    raw = read_mapping(path)
    if isinstance(raw.get("methods_from"), str) and "methods" in raw:
        library = read_mapping(_beside(path, "methods_from", raw["methods_from"]))
        raw["methods"] = _merge_library(library, raw, path)
    try:
        grid = Grid.model_validate(raw)
    except ValidationError as error:
        raise GridError("\n".join(_describe(path, details) for details in error.errors())) from error
    grid.base_settings = read_mapping(_beside(path, "base", grid.base))
    _check_settings(path, grid)
    return grid


class _Loader(yaml.SafeLoader):
    """Refuses duplicate keys, of which YAML silently takes the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if key.tag == "tag:yaml.org,2002:merge" or not isinstance(key, yaml.ScalarNode):
                continue
            if key.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key.value} is given twice; drop one", key.start_mark
                )
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def read_mapping(path: Path) -> dict[str, Any]:
    """Read a YAML mapping without duplicate keys.

    Raises:
        GridError: the file is not one; names it.
    """
    try:
        loaded = yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except yaml.YAMLError as error:
        raise GridError(f"{path} is not valid YAML: {error}") from error
    if not isinstance(loaded, dict):
        raise GridError(f"{path} holds {type(loaded).__name__}, not a mapping of keys to values.")
    return loaded


def _beside(path: Path, key: str, name: str) -> Path:
    """The path of a file that a GRID file names."""
    named = path.parent / name
    if not named.is_file():
        raise FileNotFoundError(f"{path}: {key}: there is no file {named}; it is looked for beside the grid.")
    return named


def _merge_library(library: Mapping[str, Any], raw: Mapping[str, Any], path: Path) -> Any:
    """The grid's `methods` with the library's keys under their own; as they are where they are malformed."""
    asked = raw.get("methods")
    methods = dict.fromkeys(asked) if isinstance(asked, list) and len(set(map(str, asked))) == len(asked) else asked
    if not isinstance(methods, dict):
        return asked  # the schema reports the error
    merged = {}
    for name, keys in methods.items():
        if keys is not None and not isinstance(keys, dict):
            merged[name] = keys  # the schema reports the error
            continue
        section, own = _split(keys or {})
        if name not in library and not own:
            near = difflib.get_close_matches(str(name), library, n=1)
            hint = f"did you mean {near[0]}?" if near else f"it has {', '.join(library)}."
            raise GridError(f"{path}: methods: {name} has no keys and is not in {raw['methods_from']}; {hint}")
        settings = {**(library.get(name) or {}), **own} if isinstance(own, dict) else own
        merged[name] = {**section, "settings": settings}
    return merged


def _split(keys: dict[str, Any]) -> tuple[dict[str, Any], Any]:
    """Part a method into its fields other than settings (learning_rates) and its settings."""
    if "settings" in keys:
        return {name: value for name, value in keys.items() if name != "settings"}, keys["settings"] or {}
    if set(keys) == {"learning_rates"}:
        return keys, {}
    return {}, keys


def _describe(path: Path, error: Any) -> str:
    """One of pydantic's errors, with the file, the key, the value and a hint."""
    key = ".".join(str(part) for part in error["loc"])
    if error["type"] == "extra_forbidden":
        section: Any = Grid
        for part in error["loc"][:-1]:
            section = {"chosen": Chosen, "score": Score, "methods": Method}.get(part, section)
        known = [name for name in section.model_fields if name != "base_settings"]
        near = difflib.get_close_matches(str(error["loc"][-1]), known, n=1)
        hint = f"did you mean {near[0]}?" if near else f"the keys here are {', '.join(known)}."
        return f"{path}: {key}: {error['input']!r} is not a key; {hint}"
    if error["type"] == "missing":
        return f"{path}: {key}: the key is missing; a grid names base, output_dir, methods and learning_rates."
    value = "" if error["type"] == "value_error" else f"{error['input']!r}: "
    return f"{path}: {key + ': ' if key else ''}{value}{error['msg'].removeprefix('Value error, ')}."


def _sections(path: Path, grid: Grid) -> Iterator[tuple[str, dict[str, Any]]]:
    """The base and each method: how messages name it, and its keys."""
    yield f"{path.parent / grid.base}", grid.base_settings
    for name, method in grid.methods.items():
        yield f"{path}: methods.{name}", method.settings


def _check_settings(path: Path, grid: Grid) -> None:
    """Refuse a base or a method whose runs could not be compared with the others."""
    for name, method in grid.methods.items():
        _check_grid_keys(path, name, method)
    for section, settings in _sections(path, grid):
        _check_comparable(section, settings, is_scored=grid.score.runs != "none")
    for name, method in grid.methods.items():
        if "adapter" not in method.settings and "adapter" not in grid.base_settings:
            raise GridError(
                f"{path}: methods.{name}: adapter: the key is missing; name one, or write adapter: null, which is full "
                "fine-tuning."
            )
    base = path.parent / grid.base
    for key in ("base_model", "datasets"):
        if not grid.base_settings.get(key):
            raise GridError(f"{base}: {key}: the key is missing, and all runs share it.")
    if not grid.base_settings.get("test_datasets"):
        raise GridError(
            f"{base}: test_datasets: the key is missing; rates are chosen by the loss on validation data, which must "
            "be the same for all runs: name a file."
        )


def _check_grid_keys(path: Path, name: str, method: Method) -> None:
    """Refuse keys in a method that the grid sets."""
    if "learning_rates" in method.settings:
        own = dict(method.settings)
        rates = own.pop("learning_rates")
        raise GridError(
            f"{path}: methods.{name}: learning_rates: {rates} stands among keys of a YAML; a method with rates of its "
            f"own is written as {name}: {{settings: {own}, learning_rates: {rates}}}."
        )
    for key in GRID_KEYS:
        if key in method.settings:
            raise GridError(
                f"{path}: methods.{name}: {key}: {method.settings[key]} is set by the grid (learning_rates, epochs, "
                "seeds, output_dir); drop it. A method's own rates are written as "
                f"{name}: {{settings: {{…}}, learning_rates: […]}}."
            )


def _check_comparable(section: str, settings: Mapping[str, Any], *, is_scored: bool) -> None:
    for key, reason in _REFUSED.items():
        if settings.get(key):
            raise GridError(f"{section}: {key}: {settings[key]} cannot be used in a grid: {reason}.")
    for key in ("load_in_4bit", "load_in_8bit"):
        if settings.get(key) and is_scored:
            raise GridError(
                f"{section}: {key}: {settings[key]} cannot be scored: the harness loads bases unquantized, and would "
                "ask another model. Drop the key, or say score: {runs: none}."
            )


def check_keys(grid: Grid, path: Path, known: Iterable[str]) -> None:
    """Refuse keys of the base and the methods that Axolotl would drop without a message.

    Args:
        known: the keys of Axolotl and of all plugins.

    Raises:
        GridError: names the file, the key, the value and the nearest known key.
    """
    known = set(known)
    for section, settings in _sections(path, grid):
        for key in settings:
            if key not in known:
                near = difflib.get_close_matches(str(key), known, n=1)
                raise GridError(
                    f"{section}: {key}: {settings[key]!r} is not a key of Axolotl or this plugin and would be dropped"
                    + (f"; did you mean {near[0]}?" if near else "; remove it.")
                )
