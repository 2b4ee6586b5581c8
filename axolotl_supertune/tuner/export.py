"""Export of a saved adapter to a form that needs no axolotl-supertune: SHiRA, a whole model, or a base and a LoRA."""

import contextlib
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, ShiraConfig
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from ..method.adapter_files import WEIGHTS
from ..method.atomic_files import staged, umask
from .checkpoint import read_adapter, read_config
from .config import SupraConfig, exact_targets
from .layer import SupraLayer
from .layer_names import adapted_layers, base_name
from .model_card import method_name, write_product_card
from .quantization.settings import load_options


class CannotExport(ValueError):
    """The requested form cannot hold this adapter; the message says why, and which form can."""


@dataclass(frozen=True)
class _Source:
    """The adapter that is exported.

    Attributes:
        folder, config, tensors: where it is, and what `read_config` and `read_adapter` read there.
        trained_on: name or folder of its base model, if known.
    """

    folder: Path
    config: SupraConfig
    tensors: Mapping[str, Tensor]
    trained_on: str | None

    def write_card(self, folder: Path, *, title: str, library: str, base: str | None, loading: str) -> None:
        """Write the README.md of a product; arguments as in `write_product_card`."""
        write_product_card(
            folder,
            self.folder,
            self.config,
            self.tensors,
            title=title,
            library=library,
            base=base,
            trained_on=self.trained_on,
            loading=loading,
        )


def export_adapter(adapter: Path, target: str, output: Path, *, base: str | None = None, dtype: str = "auto") -> None:
    """Write an adapter in another form; `output` appears when it is complete.

    Args:
        adapter: its folder.
        target: `shira`, `merged` or `lora+base`.
        output: a folder that does not exist, or is empty.
        base: name or folder of the base model; None: the one that the adapter names. Not read for `shira`.
        dtype: torch's name of the base model's dtype; `auto`: that of its files.

    Raises:
        CannotExport: the form cannot hold the adapter, or the adapter does not fit the base.
        ValueError: there is no Supra adapter, or its file or the base model's is damaged.
        OSError: the base model cannot be loaded.
        FileExistsError: `output` is not empty, or no folder can be renamed to it.
    """
    config = read_config(adapter)
    _check_output(output)
    source = _Source(adapter, config, read_adapter(adapter), base or config.base_model_name_or_path)
    if target == "shira":
        _export_shira(source, output)
        return
    _check_mergeable(source, target)
    model = _load(source, base, dtype)
    if target == "merged":
        _export_merged(source, model, output)
    else:
        _export_lora_and_base(source, model, output)


def _check_output(output: Path) -> None:
    """Refuse an `output` that the finished folder could not be renamed to, before any work is done."""
    if output.is_symlink():
        raise FileExistsError(f"--output {output} is a link, to {os.readlink(output)}; name a new folder.")
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise FileExistsError(f"--output {output} exists already; name a new folder, or delete it.")
    if output.exists() and (output.samefile(Path.cwd()) or output.is_mount()):
        raise FileExistsError(f"--output {output} is the current folder, or a mount; name a new folder in it.")


def _check_mergeable(source: _Source, target: str) -> None:
    """Refuse what is not exported to `merged` or `lora+base`."""
    ranks = {len(tensor) for name, tensor in source.tensors.items() if name.endswith(".supra_R")}
    if target == "lora+base" and not ranks:
        raise CannotExport("the adapter has no low-rank part (λ = 0): use --to merged.")
    if target == "lora+base" and len(ranks) > 1:
        raise CannotExport(
            f"its low-rank parts have ranks {min(ranks)} to {max(ranks)} (density budget), and engines take LoRAs of "
            "one rank: use --to merged."
        )
    if source.config.task_type not in (None, "CAUSAL_LM"):
        raise CannotExport(
            f"task_type {source.config.task_type}: only causal language models are merged here; use merge_and_unload."
        )


def _export_shira(source: _Source, output: Path) -> None:
    shira, tensors = as_shira(source.config, source.tensors)
    with _complete_folder(output) as folder:
        _save_adapter(shira, tensors, folder)
        source.write_card(
            folder,
            title="Super adapter in SHiRA's format",
            library="peft",
            base=source.trained_on,
            loading="`PeftModel.from_pretrained` of PEFT loads it, without axolotl-supertune.",
        )


def _export_merged(source: _Source, model: PeftModel, output: Path) -> None:
    merged = model.merge_and_unload(safe_merge=True)
    with _complete_folder(output) as folder:
        _save_model(source, merged, folder)
        source.write_card(
            folder,
            title=f"Model with a {method_name(source.config)} adapter merged",
            library="transformers",
            base=source.trained_on,
            loading="It is a whole model and needs neither PEFT nor axolotl-supertune.",
        )


def _export_lora_and_base(source: _Source, model: PeftModel, output: Path) -> None:
    """Merge the sparse part into the base, and write the low-rank part as a LoRA of it."""
    lora, tensors = as_lora(source.config, source.tensors, [name for name, _ in model.get_base_model().named_modules()])
    for layer in _supra_layers(model):
        layer.invalidate_caches()
        layer.supra_L.clear()
        layer.supra_R.clear()
    merged = model.merge_and_unload(safe_merge=True)
    method = method_name(source.config)
    base = os.fspath((output / "base").absolute())
    with _complete_folder(output) as folder:
        _save_model(source, merged, folder / "base")
        source.write_card(
            folder / "base",
            title=f"Base with the sparse part of a {method} adapter",
            library="transformers",
            base=source.trained_on,
            loading="It is half of an adapter: the LoRA that was exported with it is the other.",
        )
        lora.base_model_name_or_path = base
        _save_adapter(lora, tensors, folder / "lora")
        source.write_card(
            folder / "lora",
            title=f"Low-rank part of a {method} adapter, a LoRA",
            library="peft",
            base=base,
            loading="It belongs on the base that was exported with it, which holds the sparse part; on the original "
            "base it is another model.",
        )


def as_shira(config: SupraConfig, tensors: Mapping[str, Tensor]) -> tuple[ShiraConfig, dict[str, Tensor]]:
    """Convert an adapter without a low-rank part to an equal SHiRA adapter.

    Args:
        config, tensors: as `read_config` and `read_adapter` give them.

    Returns:
        Its config and its tensors: `shira_weight` (s,) and `shira_indices` (2, s), int32 rows and columns, of every
        layer; fully trained modules as they are.

    Raises:
        CannotExport: a low-rank part, a quantized base, or a number of entries other than SHiRA's r·(in + out).
    """
    if config.base_quantization:
        raise CannotExport(
            "the adapter was trained on a quantized base; on an unquantized one it would be another model: use --to "
            "merged."
        )
    converted = {name: tensor for name, tensor in tensors.items() if ".supra_" not in name}
    ranks: dict[str, float] = {}
    for layer in adapted_layers(tensors):
        name = base_name(layer)
        if f"{layer}.supra_L" in tensors:
            origin = "the adapter is a sum of others" if config.combination else f"λ = {config.supra_lambda}"
            raise CannotExport(
                f"{name} has a low-rank part ({origin}), and SHiRA has sparse entries alone: use "
                "--to lora+base or --to merged."
            )
        rows, columns = tensors[f"{layer}.supra_shape"].tolist()
        count = len(tensors.get(f"{layer}.supra_indices", ()))
        ranks[name] = count / (rows + columns)
        if not count or count % (rows + columns) or ranks[name] != next(iter(ranks.values())):
            raise CannotExport(
                f"{name} has {count:,} entries in a layer of {rows} × {columns}; SHiRA has r·({rows} + {columns}), "
                "with one r for all layers, as the rank budget gives it (lora_r, without sparse_density): use --to "
                "merged."
            )
        indices = tensors[f"{layer}.supra_indices"].long()
        converted[f"{layer}.shira_weight"] = tensors[f"{layer}.supra_values"]
        converted[f"{layer}.shira_indices"] = torch.stack([indices // columns, indices % columns]).to(torch.int32)
    shira = ShiraConfig(
        r=int(next(iter(ranks.values()))),
        target_modules=exact_targets(ranks, None),
        modules_to_save=config.modules_to_save,
        base_model_name_or_path=config.base_model_name_or_path,
        revision=config.revision,
        task_type=config.task_type,
        inference_mode=True,
    )
    return shira, converted


def as_lora(
    config: SupraConfig, tensors: Mapping[str, Tensor], modules: list[str]
) -> tuple[LoraConfig, dict[str, Tensor]]:
    """Convert the low-rank part of an adapter to a LoRA; layers of rank 0 are left out.

    Args:
        config, tensors: as `read_config` and `read_adapter` give them; all low-rank parts have one rank r.
        modules: names of all modules of the base.

    Returns:
        Its config and its tensors: `lora_A` (r, in_features) and `lora_B` (out_features, r) of each layer.
    """
    layers = [layer for layer in adapted_layers(tensors) if f"{layer}.supra_L" in tensors]
    converted = {}
    for layer in layers:
        converted[f"{layer}.lora_A.weight"] = tensors[f"{layer}.supra_R"]
        converted[f"{layer}.lora_B.weight"] = tensors[f"{layer}.supra_L"]
    lora = LoraConfig(
        r=len(tensors[f"{layers[0]}.supra_R"]),
        lora_alpha=config.lora_alpha,
        lora_dropout=config.lora_dropout,
        target_modules=exact_targets([base_name(layer) for layer in layers], modules),
        task_type=config.task_type,
        inference_mode=True,
    )
    return lora, converted


def _supra_layers(model: PeftModel) -> list[SupraLayer]:
    return [module for module in model.modules() if isinstance(module, SupraLayer)]


def _load(source: _Source, base: str | None, dtype: str) -> PeftModel:
    """Load the base model, quantized as in training, with the adapter on it.

    Raises:
        OSError, ValueError: the base model cannot be loaded.
        CannotExport: the adapter does not fit it.
    """
    from transformers import AutoModelForCausalLM

    config = source.config
    name = base or config.base_model_name_or_path
    if not name:
        raise ValueError(f"{source.folder}/adapter_config.json names no base model: give one with --base.")
    try:
        model = AutoModelForCausalLM.from_pretrained(
            name, dtype=dtype, revision=None if base else config.revision, **load_options(config.base_quantization)
        )
    except OSError as error:
        raise OSError(f"the base model {name} cannot be loaded; --base names another place. ({error})") from error
    except (RuntimeError, SafetensorError) as error:
        raise ValueError(
            f"the base model {name} cannot be loaded, its files are damaged or not those of its config.json: copy them "
            f"again, or name another place with --base. ({error})"
        ) from error
    misfit = f"{source.folder} does not fit the base model {name}; name the one that it was trained on with --base."
    try:
        model = PeftModel.from_pretrained(model, os.fspath(source.folder))
    except (ValueError, TypeError, RuntimeError) as error:
        raise CannotExport(f"{misfit} ({error})") from error
    missing = [layer.layer_name for layer in _supra_layers(model) if layer.pending_adapters]
    if missing:
        raise CannotExport(f"{misfit} (It holds nothing for {missing[0]}, which this base has.)")
    return model


def _save_adapter(config: Any, tensors: Mapping[str, Tensor], folder: Path) -> None:
    """Write an adapter's two files as PEFT does."""
    folder.mkdir(exist_ok=True)
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(contiguous, os.fspath(folder / WEIGHTS), {"format": "pt"})
    if not isinstance(config.target_modules, str):
        config.target_modules = sorted(config.target_modules)  # the order of a set varies from run to run
    config.save_pretrained(os.fspath(folder))


def _save_model(source: _Source, model: Any, folder: Path) -> None:
    """Write a whole model with its tokenizer: the one beside the adapter, where Axolotl saves it, else the base's."""
    from transformers import AutoTokenizer

    model.save_pretrained(folder)
    for place in (source.folder, source.trained_on):
        try:
            AutoTokenizer.from_pretrained(place).save_pretrained(folder)
        except (OSError, ValueError, KeyError):
            continue
        return
    print(f"no tokenizer in {source.folder} or {source.trained_on}: none was written", file=sys.stderr)


@contextlib.contextmanager
def _complete_folder(target: Path) -> Iterator[Path]:
    """A new folder beside `target` that is renamed to it at the end, or removed on an error."""
    with staged(target.parent) as parent:
        folder = parent / target.name
        folder.mkdir()
        yield folder
        for path in folder.rglob("*"):
            if path.is_file():
                path.chmod(0o666 & ~umask())  # safetensors lets only the owner read what it writes
        folder.replace(target)
