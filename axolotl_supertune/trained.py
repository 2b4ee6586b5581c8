"""Adapters that exist: which one a command means, whether it is whole and the same in all processes, whether the YAML
agrees with it."""

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors
import torch
from axolotl.utils.logging import get_logger
from peft import PeftConfig, PeftModel
from peft.utils import ModulesToSaveWrapper
from safetensors.torch import load_file
from torch import Tensor

from .bases import same_weights
from .processes import Processes, digest_of
from .sharded import is_whole, shape_of, whole
from .tuner import SupraConfig, SupraLayer
from .tuner.checkpoint import unpack

LOG = get_logger(__name__)

# What decides which weights an adapter trains and how; a run that goes on must agree with its checkpoint on all of it.
RUN_FIELDS = (
    "r0",
    "sparse_density",
    "supra_lambda",
    "lora_alpha",
    "lora_dropout",
    "mask_score",
    "sparse_direction",
    "hybrid_beta",
    "support_seed",
    "support_scope",
    "budget_scope",
    "gradient_batches",
    "low_rank_warmup_steps",
    "target_modules",
    "exclude_modules",
    "layers_to_transform",
    "layers_pattern",
    "modules_to_save",
)
CHECKPOINT_FILES = ("adapter_config.json", "adapter_model.safetensors", "trainer_state.json")


def holds_adapter(folder: Path) -> bool:
    """Whether a finished save is there; Axolotl writes adapter_config.json before training has begun."""
    return (folder / "adapter_model.safetensors").is_file()


def what_to_name(output_dir: Path) -> str:
    """The remedy where no trained adapter is named: output_dir, its newest checkpoint, or training."""
    if holds_adapter(output_dir):
        return f"Name the trained one: --lora-model-dir={output_dir} (lora_model_dir in the YAML)."
    checkpoints = [path for path in output_dir.glob("checkpoint-*") if holds_adapter(path)]
    if checkpoints:
        newest = max(checkpoints, key=lambda path: path.stat().st_mtime)
        return f"A run that did not finish left {newest}: pass --lora-model-dir={newest}."
    return "Train first, or pass --lora-model-dir."


def untrained(output_dir: str) -> str:
    """Why evaluating is refused."""
    return f"this would evaluate a new, untrained adapter, which is the base model. {what_to_name(Path(output_dir))}"


def check_not_the_start(cfg: Any, output_dir: Path) -> None:
    """Refuse to merge, or talk to, the adapter that a finished run started from."""
    start = cfg.get("lora_model_dir")
    if not start or not holds_adapter(output_dir):
        return
    if output_dir.resolve() not in (Path(start).resolve(), *Path(start).resolve().parents):
        raise ValueError(
            f"lora_model_dir: {start} is the adapter that this run started from; the trained one is in output_dir. "
            f"Pass --lora-model-dir={output_dir}, or name another output_dir to use the start."
        )


def _read_config(folder: str, key: str, adapter: str) -> SupraConfig:
    if os.path.exists(folder) and not holds_adapter(Path(folder)):
        raise ValueError(f"{key}: {folder} holds no trained adapter. {what_to_name(Path(folder))}")
    if os.path.exists(folder) and not (Path(folder) / "adapter_config.json").is_file():
        raise ValueError(f"{key}: {folder} holds no adapter_config.json, so it is no adapter.")
    try:
        saved = PeftConfig.from_pretrained(folder)
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(f"{key}: {folder}/adapter_config.json is damaged ({error!r}).") from error
    if not isinstance(saved, SupraConfig):
        raise ValueError(f"{key}: {folder} holds a {saved.peft_type} adapter, not one of adapter: {adapter}.")
    return saved


def _differences(saved: SupraConfig, asked: SupraConfig, other: str, fields: tuple[str, ...] = RUN_FIELDS) -> str:
    seeded = asked.sparse_direction == "random"
    return ", ".join(
        f"{name} {getattr(saved, name)} ({other} {getattr(asked, name)})"
        for name in fields
        if getattr(saved, name) != getattr(asked, name) and (name != "support_seed" or seeded)
    )


def check_resume(
    cfg: Any, checkpoint: str, asked: SupraConfig, processes: int = 1, zero: Mapping[str, Any] | None = None
) -> None:
    """Refuse a checkpoint that is incomplete, whose run was another one than the YAML describes, or whose optimizer
    state this run cannot load.

    Args:
        cfg: the YAML.
        checkpoint: the folder that is resumed.
        asked: the adapter that the YAML describes.
        processes: how many train.
        zero: the `zero_optimization` of DeepSpeed's config, if that trains.

    Raises:
        ValueError: names the file or the key, and the remedy.
    """
    folder = Path(checkpoint)
    missing = [name for name in CHECKPOINT_FILES if not (folder / name).is_file()]
    if not missing:
        try:
            safetensors.safe_open(os.fspath(folder / "adapter_model.safetensors"), framework="pt").keys()
        except safetensors.SafetensorError as error:
            missing = [f"readable adapter_model.safetensors ({error})"]
    if missing:
        raise ValueError(
            f"resume_from_checkpoint: {checkpoint} is incomplete, it has no {missing[0]}; the run probably stopped "
            "while writing it. Delete it to resume from the one before."
        )
    _check_optimizer(zero, folder, processes)
    _check_sparse_lr(cfg, folder)
    saved = _read_config(checkpoint, "resume_from_checkpoint", cfg.adapter)
    differs = _differences(saved, asked, "the YAML says", (*RUN_FIELDS, "base_quantization"))
    if not differs:
        _check_base(cfg, checkpoint, saved)
        differs = _calibrated_otherwise(cfg, saved, asked)
    if not differs and cfg.lora_model_dir:
        start = _read_config(cfg.lora_model_dir, "lora_model_dir", cfg.adapter)
        differs = _differences(saved, start, f"lora_model_dir {cfg.lora_model_dir} has")
    if differs:
        raise ValueError(
            f"resume_from_checkpoint: the checkpoint {checkpoint} was trained with {differs}. Set it back to resume, "
            "or use another output_dir to start anew."
        )


def _check_base(cfg: Any, checkpoint: str, saved: SupraConfig) -> None:
    """The supports, and all that was trained, are of the weights of one base; another name may be that of a copy."""
    had, has = saved.base_model_name_or_path, cfg.base_model
    if not had or had == has or os.path.realpath(had) == os.path.realpath(has):
        return
    same = same_weights((had, saved.revision), (has, cfg.revision_of_model))
    if same is None:
        LOG.warning(
            "base_model: %s, but the checkpoint %s was trained on %s; whether they are the same weights could not be "
            "checked, as not all of their files are here.",
            has,
            checkpoint,
            had,
        )
    elif not same:
        raise ValueError(
            f"base_model: {has} has other weights than {had}, which the checkpoint {checkpoint} was trained on. Set it "
            f"back to resume, or use another output_dir to start anew."
        )


def _calibrated_otherwise(cfg: Any, saved: SupraConfig, asked: SupraConfig) -> str:
    """In which keys the support was calibrated otherwise than the YAML says."""
    made = saved.calibration or {}
    if cfg.calibration_path or not (asked.needs_norms and asked.has_sparse_part):
        return ""
    found = []
    for name in ("dataset", "split", "text_field", "seed", "samples", "sequence_len"):
        key = f"calibration_{name}"
        # A window is no longer than the model takes, whatever the YAML says.
        shortened = name == "sequence_len" and name in made and made[name] < cfg[key]
        if name in made and cfg[key] is not None and made[name] != cfg[key] and not shortened:
            found.append(f"{key} {made[name]} (the YAML says {cfg[key]})")
    return ", ".join(found)


def _check_optimizer(zero: Mapping[str, Any] | None, folder: Path, processes: int) -> None:
    """The Trainer itself goes on without the optimizer's and the scheduler's state where it finds one of them missing,
    at the first step's learning rate, and DeepSpeed says little of what it cannot load."""
    ranks = {int(path.name.split("_")[3]): path for path in folder.glob("global_step*/*zero_pp_rank_*_optim_states.pt")}
    if zero and not ranks:
        raise ValueError(
            f"resume_from_checkpoint: {folder} has no optimizer state of DeepSpeed, so it was written without it. "
            "Remove deepspeed to resume it."
        )
    anew = f"start anew from its adapter: lora_model_dir: {folder}"
    if ranks and not zero:
        raise ValueError(
            f"resume_from_checkpoint: the optimizer state in {folder} is DeepSpeed's. Set deepspeed as in that run "
            f"and start {len(ranks)} processes to resume it, or {anew}."
        )
    if not zero and not (list(folder.glob("optimizer*")) and (folder / "scheduler.pt").is_file()):
        raise ValueError(
            f"resume_from_checkpoint: {folder} has no state of the optimizer and of its schedule, which "
            f"save_only_model: true leaves out; going on would begin the schedule anew. To do that, {anew}."
        )
    if ranks and zero:
        _check_deepspeed_parts(zero, folder, ranks, processes, anew)


def _check_sparse_lr(cfg: Any, folder: Path) -> None:
    """The optimizer's groups of parameters; what loads them knows their number, and not why."""
    card = folder / "README.md"
    line = re.search(r"^- \*\*Training:\*\* .*$", card.read_text(encoding="utf-8"), re.M) if card.is_file() else None
    if line is None:
        return
    had = re.search(r", (\S+) of the single weights", line.group())
    # The rates in an optimizer's state replace those of the YAML.
    if (float(had.group(1)) if had else None) != (None if cfg.sparse_lr is None else float(cfg.sparse_lr)):
        raise ValueError(
            f"sparse_lr: {cfg.sparse_lr}, but the checkpoint {folder} was trained with "
            f"{had.group(1) if had else 'none'}: its optimizer state has the groups of parameters, and their rates, of "
            f"that. Set it back to resume, or start anew from its adapter: lora_model_dir: {folder}."
        )


def _check_deepspeed_parts(
    zero: Mapping[str, Any], folder: Path, ranks: dict[int, Path], processes: int, anew: str
) -> None:
    # How many parts there were a lost one does not say; but every process leaves its generators' state, too.
    parts = max(len(list(folder.glob("rng_state*.pth"))), max(ranks) + 1)
    if parts != processes:
        raise ValueError(
            f"resume_from_checkpoint: the optimizer state in {folder} is in {parts} parts, one a process, and "
            f"DeepSpeed loads it in as many only; these are {processes}. Start {parts}."
        )
    step = next(iter(ranks.values())).parent
    wanted = [folder / "latest", *(step / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in range(parts))]
    # ZeRO-1 and ZeRO-2 write, and read, one file for all processes.
    shared = step / "mp_rank_00_model_states.pt"
    of_ranks = [step / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt" for rank in range(parts)]
    by_zero3 = any(path.is_file() for path in of_ranks)
    wanted += of_ranks if by_zero3 else [shared]
    missing = [path for path in wanted if not path.is_file()]
    if missing:
        raise ValueError(
            f"resume_from_checkpoint: {folder} is incomplete, it has no {missing[0].relative_to(folder)}, a part of "
            f"DeepSpeed's state. Delete it to resume from the one before, or {anew}."
        )
    if by_zero3 != (zero["stage"] == 3):
        raise ValueError(
            f"resume_from_checkpoint: {folder} was written under {'ZeRO-3' if by_zero3 else 'ZeRO-1 or ZeRO-2'}, and "
            f"deepspeed says zero_optimization.stage: {zero['stage']}, which reads another layout. Set it to "
            f"{'3' if by_zero3 else '1 or 2'} to resume, or {anew}."
        )
    if by_zero3:
        # Mapped: of a file that holds tensors of any size the few bytes of its config are read.
        written = torch.load(wanted[1], map_location="cpu", weights_only=False, mmap=True)["ds_config"]
        key, none = "sub_group_size", 10**9
        was, asked = (each.get(key, none) for each in (written["zero_optimization"], zero))
        if "auto" not in (was, asked) and int(float(was)) != int(float(asked)):
            raise ValueError(
                f"resume_from_checkpoint: the optimizer state in {folder} is in groups of zero_optimization.{key}: "
                f"{was}, and deepspeed says {asked}. Set it back to resume, or {anew}."
            )


def kept_settings(cfg: Any, folder: str, asked: SupraConfig) -> str:
    """Say in which settings the adapter in `folder` is another than `asked`, the YAML's; "" where in none.

    Raises:
        ValueError: `folder` holds no adapter of this method, or a damaged one; names it.
    """
    return _differences(_read_config(folder, "lora_model_dir", cfg.adapter), asked, "the YAML says")


def load_trained(model: Any, cfg: Any, folder: str, asked: SupraConfig, trainable: bool) -> Any:
    differs = kept_settings(cfg, folder, asked)
    if differs:
        LOG.warning("The adapter in %s has its own settings and keeps them: %s.", folder, differs)
    if Path(folder).resolve() != Path(cfg.output_dir).resolve():
        LOG.info("Loading the adapter in %s, not one in output_dir (%s).", folder, cfg.output_dir)
    placement = {"max_memory": {"cpu": "256GiB"}, "device_map": {"": "cpu"}} if cfg.lora_on_cpu else {}
    return PeftModel.from_pretrained(model, folder, is_trainable=trainable, **placement)


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
