"""TODO-DOC plugin.verify."""

from pathlib import Path
from typing import Any

from peft.utils import ModulesToSaveWrapper
from safetensors.torch import load_file
from torch import Tensor

from ..engines.processes import Processes, digest_of
from ..engines.sharding import is_whole, shape_of, whole
from ..tuner import SupraLayer
from ..tuner.checkpoint import unpack


def adapter_tensors(model: Any) -> dict[str, Tensor]:
    """Every tensor of the adapter `default`, by its name in a file of it; of a sharded one, the whole is meant.

    Wrappers of DDP, torch.compile and activation checkpointing leave no trace in the names.
    """
    found: dict[str, Tensor] = {}
    for name, module in model.named_modules():
        plain = _plain(name)
        if isinstance(module, SupraLayer):
            for tensor in module.tensor_names("default"):
                store = tensor.removesuffix(".default")
                found[f"{plain}.{store}"] = getattr(module, store)["default"]
        elif isinstance(module, ModulesToSaveWrapper) and "default" in module.modules_to_save:
            copy = module.modules_to_save["default"]
            held = (*copy.named_parameters(), *copy.named_buffers())
            found.update({f"{plain}.{_plain(tensor)}": value for tensor, value in held})
    return found


_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module")


def _plain(name: str) -> str:
    return ".".join(part for part in name.removeprefix("module.").split(".") if part not in _WRAPPERS)


def check_saved(model: Any, folder: Path, *, values: bool = False, reads: bool = True) -> None:
    """Raise RuntimeError unless the adapter file in `folder` is the model's adapter: every tensor, whole.

    What shards a model has lost parts of adapters before, without a word.

    Args:
        model: the adapted model, sharded or not.
        folder: a saved adapter.
        values: compare U, L and R too; of a sharded model they are gathered, so every process must call this.
        reads: whether this process reads the file; the others help to gather.
    """
    expected = adapter_tensors(model)
    if values:
        expected = {name: whole(tensor) for name, tensor in expected.items()}
    if not reads:
        return
    path = folder / "adapter_model.safetensors"
    if not path.is_file():
        raise RuntimeError(f"{folder} was saved without {path.name}: the adapter is not in it.")
    saved = load_file(path)
    damaged = unpack(saved)
    problems = []
    for name, tensor in expected.items():
        if name not in saved:
            if name.removesuffix(".supra_indices") not in damaged:
                problems.append(f"{name} is missing")
        elif saved[name].shape != shape_of(tensor):
            problems.append(f"{name} has shape {tuple(saved[name].shape)}, the model's {tuple(shape_of(tensor))}")
        elif (values or name.endswith(".supra_indices")) and not _equal(saved[name], tensor):
            problems.append(f"{name} has other values")
    problems += [f"{layer}: {problem}" for layer, problem in damaged.items()]
    packed = {f"{layer}.supra_{name}" for layer in damaged for name in ("codes", "checksum")}
    embeddings = _embeddings(model)
    for name in sorted(saved.keys() - expected.keys() - packed):
        if name not in embeddings:
            problems.append(f"{name} is not the model's")
        elif is_whole(embeddings[name]) and not _equal(saved[name], embeddings[name]):
            problems.append(f"{name} has other values")
    if problems:
        raise RuntimeError(
            f"{path} is not the adapter that the model has: {problems[0]}"
            + (f" ({len(problems)} tensors are wrong)" if len(problems) > 1 else "")
            + ". Do not go on from it; please report this, with the versions of axolotl, accelerate and peft."
        )


def _embeddings(model: Any) -> dict[str, Tensor]:
    """The embeddings and the output layer, by their names in a file: the base's, and beside them trained copies.

    PEFT saves them with an adapter where one of them is adapted, or where the vocabulary is another than the base's.
    """
    owner = next((module for module in model.modules() if hasattr(module, "get_output_embeddings")), None)
    if owner is None:
        return {}
    ends = (owner.get_input_embeddings(), owner.get_output_embeddings())
    bases = [getattr(module, "base_layer", module) for module in ends if module is not None]
    return {
        f"{_plain(name)}.{tensor}".replace(".modules_to_save.default.", ".modules_to_save."): value
        for name, module in model.named_modules()
        if any(module is base for base in bases)
        for tensor, value in module.named_parameters(remove_duplicate=False)
    }


def _equal(saved: Tensor, tensor: Tensor) -> bool:
    return saved.equal(tensor.detach().to("cpu", saved.dtype))


def check_same_everywhere(model: Any, processes: Processes) -> None:
    """Raise ValueError, naming the layer, unless every process has the same adapter: supports and start values."""
    if processes.world == 1:
        return
    digests = {
        name: {store: _digest(getattr(module, store)["default"]) for store in _stores(module)}
        for name, module in model.named_modules()
        if isinstance(module, SupraLayer)
    }
    everywhere = processes.gather(digests)
    for name, here in everywhere[0].items():
        for rank, there in enumerate(everywhere):
            others = there.get(name, {})
            differs = [store for store in here if others.get(store, "none") not in (here[store], None)]
            if differs:
                raise ValueError(
                    f"{name}: {differs[0]} of process {rank} is not that of process 0: the processes started from "
                    "different base models, calibration texts or adapters. Give all of them the same files."
                )


def _digest(tensor: Tensor) -> str | None:
    """None for a tensor that is still to come from process 0."""
    return None if tensor.is_meta else digest_of(tensor)


def _stores(layer: SupraLayer) -> list[str]:
    return [name.removesuffix(".default") for name in layer.tensor_names("default")]
