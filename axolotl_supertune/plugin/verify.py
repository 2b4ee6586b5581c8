"""Checks that a saved adapter is the model's, tensor by tensor, and that all processes have the same adapter."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from peft.utils import ModulesToSaveWrapper
from safetensors.torch import load_file
from torch import Tensor

from ..engines.processes import Processes, digest_of
from ..engines.sharding import is_whole, shape_of, whole
from ..method.adapter_files import WEIGHTS
from ..tuner import SupraLayer
from ..tuner.checkpoint import unpack

# Parts of module names that torch.compile and activation checkpointing insert.
_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module")


def adapter_tensors(model: Any) -> dict[str, Tensor]:
    """Every tensor of the adapter `default`, by the name that it has in a saved file.

    Wrappers of DDP, torch.compile and activation checkpointing leave no trace in the names. Tensors of a sharded model
    are returned as they are, sharded.
    """
    tensors: dict[str, Tensor] = {}
    for name, module in model.named_modules():
        plain = _without_wrappers(name)
        if isinstance(module, SupraLayer):
            for tensor in module.tensor_names("default"):
                store = tensor.removesuffix(".default")
                tensors[f"{plain}.{store}"] = getattr(module, store)["default"]
        elif isinstance(module, ModulesToSaveWrapper) and "default" in module.modules_to_save:
            copy = module.modules_to_save["default"]
            own = (*copy.named_parameters(), *copy.named_buffers())
            tensors.update({f"{plain}.{_without_wrappers(tensor)}": value for tensor, value in own})
    return tensors


def _without_wrappers(name: str) -> str:
    return ".".join(part for part in name.removeprefix("module.").split(".") if part not in _WRAPPERS)


def check_saved(model: Any, folder: Path, *, values: bool = False, reads: bool = True) -> None:
    """Check that the adapter file in a folder holds the model's adapter: every tensor, whole and nothing else.

    Libraries that shard a model have saved parts of adapters before, without an error.

    Args:
        model: the adapted model, sharded or not.
        folder: a saved adapter.
        values: also compare the values of U, L and R, not only shapes and supports. Sharded tensors are gathered for
            that, so every process must call this.
        reads: whether this process reads the file; the others only help to gather.

    Raises:
        RuntimeError: the file is missing or differs; names the file and the first tensor that is wrong.
    """
    expected = adapter_tensors(model)
    if values:
        expected = {name: whole(tensor) for name, tensor in expected.items()}
    if not reads:
        return
    path = folder / WEIGHTS
    if not path.is_file():
        raise RuntimeError(f"{folder} was saved without {path.name}: the adapter is not in it.")
    saved = load_file(path)
    damaged = unpack(saved)  # layer -> what is wrong with its stored support
    problems = [
        *_problems_of_adapter(expected, saved, damaged, values=values),
        *(f"{layer}: {problem}" for layer, problem in damaged.items()),
        *_problems_of_others(model, expected, saved, damaged),
    ]
    if problems:
        raise RuntimeError(
            f"{path} is not the adapter that the model has: {problems[0]}"
            + (f" ({len(problems)} tensors are wrong)" if len(problems) > 1 else "")
            + ". Do not go on from it; please report this, with the versions of axolotl, accelerate and peft."
        )


def _problems_of_adapter(
    expected: Mapping[str, Tensor], saved: Mapping[str, Tensor], damaged: Mapping[str, str], *, values: bool
) -> list[str]:
    """What is wrong with the saved tensors that belong to the adapter."""
    problems = []
    for name, tensor in expected.items():
        if name not in saved:
            if name.removesuffix(".supra_indices") not in damaged:  # else it is reported as damaged
                problems.append(f"{name} is missing")
        elif saved[name].shape != shape_of(tensor):
            problems.append(f"{name} has shape {tuple(saved[name].shape)}, the model's {tuple(shape_of(tensor))}")
        elif (values or name.endswith(".supra_indices")) and not _equal(saved[name], tensor):
            problems.append(f"{name} has other values")
    return problems


def _problems_of_others(
    model: Any, expected: Mapping[str, Tensor], saved: Mapping[str, Tensor], damaged: Mapping[str, str]
) -> list[str]:
    """What is wrong with further saved tensors; PEFT may save the embeddings and the output layer beside an adapter."""
    packed = {f"{layer}.supra_{name}" for layer in damaged for name in ("codes", "checksum")}
    embeddings = _embeddings(model)
    problems = []
    for name in sorted(saved.keys() - expected.keys() - packed):
        if name not in embeddings:
            problems.append(f"{name} is not the model's")
        elif is_whole(embeddings[name]) and not _equal(saved[name], embeddings[name]):
            problems.append(f"{name} has other values")
    return problems


def _embeddings(model: Any) -> dict[str, Tensor]:
    """Tensors of the embeddings and the output layer, of the base and of trained copies, by their names in a file.

    PEFT saves them with an adapter if one of them is adapted, or if the vocabulary is not the base's.
    """
    owner = next((module for module in model.modules() if hasattr(module, "get_output_embeddings")), None)
    if owner is None:
        return {}
    ends = (owner.get_input_embeddings(), owner.get_output_embeddings())
    bases = [getattr(module, "base_layer", module) for module in ends if module is not None]
    return {
        f"{_without_wrappers(name)}.{tensor}".replace(".modules_to_save.default.", ".modules_to_save."): value
        for name, module in model.named_modules()
        if any(module is base for base in bases)
        for tensor, value in module.named_parameters(remove_duplicate=False)
    }


def _equal(saved: Tensor, tensor: Tensor) -> bool:
    return saved.equal(tensor.detach().to("cpu", saved.dtype))


def check_same_everywhere(model: Any, processes: Processes) -> None:
    """Check that every process has the same adapter, supports and start values; called by all of them.

    Raises:
        ValueError: names the layer, the tensor and the process that differs.
    """
    if processes.world == 1:
        return
    digests = {
        name: {store: _digest(getattr(module, store)["default"]) for store in _stores(module)}
        for name, module in model.named_modules()
        if isinstance(module, SupraLayer)
    }
    by_rank = processes.gather(digests)
    for name, first in by_rank[0].items():
        for rank, layers in enumerate(by_rank):
            others = layers.get(name, {})
            # None stands for a tensor that is still to come from process 0.
            differs = [store for store in first if others.get(store, "none") not in (first[store], None)]
            if differs:
                raise ValueError(
                    f"{name}: {differs[0]} of process {rank} is not that of process 0: the processes started from "
                    "different base models, calibration texts or adapters. Give all of them the same files."
                )


def _digest(tensor: Tensor) -> str | None:
    return None if tensor.is_meta else digest_of(tensor)


def _stores(layer: SupraLayer) -> list[str]:
    """Names of the layer's attributes that hold tensors of the adapter."""
    return [name.removesuffix(".default") for name in layer.tensor_names("default")]
