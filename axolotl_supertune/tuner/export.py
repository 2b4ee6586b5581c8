"""Export of an adapter: as SHiRA, as a whole model, or as a base with a plain LoRA beside it."""

import contextlib
import functools
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..method.atomic_files import staged, umask

if TYPE_CHECKING:
    from . import SupraConfig


class CannotExport(ValueError):
    """What was asked for does not hold this adapter; the message says why, and what does."""


def export_adapter(adapter: Path, target: str, output: Path, *, base: str | None = None, dtype: str = "auto") -> None:
    """Write an adapter in another form; `output` is there when it is whole.

    Args:
        adapter: its folder.
        target: `shira`, `merged` or `lora+base`.
        output: a folder that does not exist, or is empty.
        base, dtype: the base model, where one is needed.

    Raises:
        CannotExport: the form cannot hold the adapter, or the adapter does not fit the base.
        ValueError: no Supra adapter is there, or its file is damaged.
        FileExistsError: `output` is not empty, or cannot become the product's name.
    """
    from . import read_adapter
    from .checkpoint import read_config
    from .model_card import method_name, write_product_card

    config = read_config(adapter)
    _check_output(output)
    tensors = read_adapter(adapter)
    trained_on = base or config.base_model_name_or_path
    card = functools.partial(write_product_card, adapter=adapter, config=config, tensors=tensors, trained_on=trained_on)
    if target == "shira":
        shira, plain = as_shira(config, tensors)
        with _whole_folder(output) as folder:
            _save_adapter(shira, plain, folder)
            card(
                folder,
                title="Super adapter in SHiRA's format",
                library="peft",
                base=trained_on,
                loading="`PeftModel.from_pretrained` of PEFT loads it, without axolotl-supertune.",
            )
        return
    ranks = {len(tensor) for name, tensor in tensors.items() if name.endswith(".supra_R")}
    if target == "lora+base" and len(ranks) != 1:
        raise CannotExport(
            "the adapter has no low-rank part (λ = 0): use --to merged."
            if not ranks
            else f"its low-rank parts have ranks {min(ranks)} to {max(ranks)} (density budget), and engines take LoRAs "
            "of one rank: use --to merged."
        )
    if config.task_type not in (None, "CAUSAL_LM"):
        raise CannotExport(
            f"task_type {config.task_type}: only causal language models are merged here; use merge_and_unload."
        )
    model = _load(adapter, config, base, dtype)
    lora = None
    if target == "lora+base":
        lora = as_lora(config, tensors, [name for name, _ in model.get_base_model().named_modules()])
        for module in _adapted_layers(model):
            module.invalidate_caches()
            module.supra_L.clear()
            module.supra_R.clear()
    merged = model.merge_and_unload(safe_merge=True)
    with _whole_folder(output) as folder:
        place = folder / "base" if lora else folder
        merged.save_pretrained(place)
        _save_tokenizer((adapter, trained_on), place)
        method = method_name(config)
        card(
            place,
            title=f"Base with the sparse part of a {method} adapter"
            if lora
            else f"Model with a {method} adapter merged",
            library="transformers",
            base=trained_on,
            loading="It is half of an adapter: the LoRA that was exported with it is the other."
            if lora
            else "It is a whole model and needs neither PEFT nor axolotl-supertune.",
        )
        if lora:
            lora[0].base_model_name_or_path = os.fspath((output / "base").absolute())
            _save_adapter(*lora, folder / "lora")
            card(
                folder / "lora",
                title=f"Low-rank part of a {method} adapter, a LoRA",
                library="peft",
                base=lora[0].base_model_name_or_path,
                loading="It belongs on the base that was exported with it, which holds the sparse part; on the "
                "original base it is another model.",
            )


def _check_output(output: Path) -> None:
    """Before all work: `output` is to be renamed to, which neither a link nor the current folder can be."""
    if output.is_symlink():
        raise FileExistsError(f"--output {output} is a link, to {os.readlink(output)}; name a new folder.")
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise FileExistsError(f"--output {output} exists already; name a new folder, or delete it.")
    if output.exists() and (output.samefile(Path.cwd()) or output.is_mount()):
        raise FileExistsError(f"--output {output} is the current folder, or a mount; name a new folder in it.")


def as_shira(config: "SupraConfig", tensors: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The config and tensors of an equal SHiRA adapter.

    Args:
        config, tensors: as `read_config` and `read_adapter` give them.

    Raises:
        CannotExport: a low-rank part, a quantized base, or other numbers of entries than SHiRA's r·(in + out).
    """
    import torch
    from peft import ShiraConfig

    from .config import exact_targets

    if config.base_quantization:
        raise CannotExport(
            "the adapter was trained on a quantized base; on an unquantized one it would be another model: use --to "
            "merged."
        )
    plain = {name: tensor for name, tensor in tensors.items() if ".supra_" not in name}
    ranks: dict[str, float] = {}
    for layer in adapted(tensors):
        name = layer.removeprefix("base_model.model.")
        if f"{layer}.supra_L" in tensors:
            share = "the adapter is a sum of others" if config.combination else f"λ = {config.supra_lambda}"
            raise CannotExport(
                f"{name} has a low-rank part ({share}), and SHiRA has sparse entries alone: use "
                "--to lora+base or --to merged."
            )
        rows, width = tensors[f"{layer}.supra_shape"].tolist()
        count = len(tensors.get(f"{layer}.supra_indices", ()))
        ranks[name] = count / (rows + width)
        if not count or count % (rows + width) or ranks[name] != next(iter(ranks.values())):
            raise CannotExport(
                f"{name} has {count:,} entries in a layer of {rows} × {width}; SHiRA has r·({rows} + {width}), with "
                "one r for all layers, as the rank budget gives it (lora_r, without sparse_density): use --to merged."
            )
        where = tensors[f"{layer}.supra_indices"].long()
        plain[f"{layer}.shira_weight"] = tensors[f"{layer}.supra_values"]
        plain[f"{layer}.shira_indices"] = torch.stack([where // width, where % width]).to(torch.int32)
    return (
        ShiraConfig(
            r=int(next(iter(ranks.values()))),
            target_modules=exact_targets(ranks, None),
            modules_to_save=config.modules_to_save,
            base_model_name_or_path=config.base_model_name_or_path,
            revision=config.revision,
            task_type=config.task_type,
            inference_mode=True,
        ),
        plain,
    )


def as_lora(config: "SupraConfig", tensors: dict[str, Any], modules: list[str]) -> tuple[Any, dict[str, Any]]:
    """The config and tensors of a LoRA that is the low-rank part; layers of rank 0 are left out.

    Args:
        config, tensors: as `read_config` and `read_adapter` give them.
        modules: names of all modules of the base.
    """
    from peft import LoraConfig

    from .config import exact_targets

    layers = [layer for layer in adapted(tensors) if f"{layer}.supra_L" in tensors]
    plain = {}
    for layer in layers:
        plain[f"{layer}.lora_A.weight"] = tensors[f"{layer}.supra_R"]
        plain[f"{layer}.lora_B.weight"] = tensors[f"{layer}.supra_L"]
    return (
        LoraConfig(
            r=len(tensors[f"{layers[0]}.supra_R"]),
            lora_alpha=config.lora_alpha,
            lora_dropout=config.lora_dropout,
            target_modules=exact_targets([layer.removeprefix("base_model.model.") for layer in layers], modules),
            task_type=config.task_type,
            inference_mode=True,
        ),
        plain,
    )


def adapted(tensors: dict[str, Any]) -> list[str]:
    """The adapted layers of a file, by their names in it, in the file's order of layers."""
    import re

    layers = [name.removesuffix(".supra_shape") for name in tensors if name.endswith(".supra_shape")]
    return sorted(layers, key=lambda name: [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)])


def _adapted_layers(model: Any) -> list[Any]:
    from . import SupraLayer

    return [module for module in model.modules() if isinstance(module, SupraLayer)]


def _load(adapter: Path, config: "SupraConfig", base: str | None, dtype: str) -> Any:
    from peft import PeftModel
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    name = base or config.base_model_name_or_path
    if not name:
        raise ValueError(f"{adapter}/adapter_config.json names no base model: give one with --base.")
    quantization = {}
    if config.base_quantization:
        quantization["quantization_config"] = BitsAndBytesConfig(**config.base_quantization)
    try:
        model = AutoModelForCausalLM.from_pretrained(
            name, dtype=dtype, revision=None if base else config.revision, **quantization
        )
    except OSError as error:
        raise OSError(f"the base model {name} cannot be loaded; --base names another place. ({error})") from error
    except (RuntimeError, SafetensorError) as error:
        raise ValueError(
            f"the base model {name} cannot be loaded, its files are damaged or not those of its config.json: copy them "
            f"anew, or name another place with --base. ({error})"
        ) from error
    unfit = f"{adapter} does not fit the base model {name}; name the one that it was trained on with --base."
    try:
        model = PeftModel.from_pretrained(model, os.fspath(adapter))
    except (ValueError, TypeError, RuntimeError) as error:
        raise CannotExport(f"{unfit} ({error})") from error
    missing = [layer.supra_layer for layer in _adapted_layers(model) if layer.pending_adapters]
    if missing:
        raise CannotExport(f"{unfit} (It holds nothing for {missing[0]}, which this base has.)")
    return model


def _save_adapter(config: Any, tensors: dict[str, Any], folder: Path) -> None:
    from safetensors.torch import save_file

    folder.mkdir(exist_ok=True)
    whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(whole, os.fspath(folder / "adapter_model.safetensors"), {"format": "pt"})
    if not isinstance(config.target_modules, str):
        config.target_modules = sorted(config.target_modules)  # a set's order is nobody's
    config.save_pretrained(os.fspath(folder))


def _save_tokenizer(places: tuple[Any, ...], folder: Path) -> None:
    """Of the first place that has one: Axolotl saves the tokenizer beside the adapter."""
    from transformers import AutoTokenizer

    for place in places:
        try:
            AutoTokenizer.from_pretrained(place).save_pretrained(folder)
        except (OSError, ValueError, KeyError):
            continue
        return
    print(f"no tokenizer in {' or '.join(str(place) for place in places)}: none was written", file=sys.stderr)


@contextlib.contextmanager
def _whole_folder(target: Path) -> Iterator[Path]:
    """A folder beside `target` that takes its name when everything is in it, and is removed on any error."""
    with staged(target.parent) as parent:
        folder = parent / target.name
        folder.mkdir()
        yield folder
        for path in folder.rglob("*"):
            if path.is_file():
                path.chmod(0o666 & ~umask())  # safetensors writes for its owner alone
        folder.replace(target)
