"""The keys of the YAML in their order, each with its reason."""

import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ...method.budget import DEFAULT_R0
from ...method.selected_rates import rate_text
from .base import Base, Tokens
from .data_format import Completion, Data, Pairs
from .lengths import LIMIT, Lengths
from .placement import Placement
from .schedule import (
    LAMBDA,
    PAPER_BATCH,
    STEPS_OF_ONE_EPOCH,
    STEPS_OF_OURS,
    STEPS_OF_THREE_EPOCHS,
    Method,
    Schedule,
    for_batch,
)
from .yaml_text import Comment, Key

_GIB = 2**30


@dataclass(frozen=True)
class Draft:
    """Everything that the YAML says.

    Attributes:
        base, data, tokens, lengths, schedule, method, place: what was read and chosen.
        output: the name of the YAML.
        memory_was_seen: whether the GPU, or that there is none, was looked up here rather than given.
    """

    base: Base
    data: Data
    output: Path
    tokens: Tokens
    lengths: Lengths
    schedule: Schedule
    method: Method
    place: Placement
    memory_was_seen: bool

    @property
    def output_dir(self) -> str:
        return f"outputs/{self.output.stem}"


def all_keys(draft: Draft) -> Iterator[Key | Comment | None]:
    """The YAML of a draft, for `yaml_text`."""
    yield from _head(draft)
    yield None
    yield from _method(draft)
    yield None
    yield from _data(draft)
    yield None
    yield from _course(draft)
    yield None
    yield from _step(draft)
    yield None
    yield from _machine(draft)


def _head(draft: Draft) -> Iterator[Key | Comment | None]:
    output = shlex.quote(str(draft.output))
    yield Comment(
        f"{draft.method.adapter.capitalize()} on {draft.base.name} ({draft.base.parameters / 1e6:,.0f}M parameters), "
        "written by `axolotl supertune init`. Paths are relative to the folder that you run axolotl in.\n\n"
        f"  axolotl supertune plan {output}      # what it trains, and the memory that takes\n"
        f"  axolotl train {output}\n"
        f"  axolotl merge-lora {output}          # the whole model, in {draft.output_dir}/merged"
    )
    yield Key("base_model", draft.base.name)
    special = {name: token for name, token, _ in draft.tokens.special}
    if special:
        yield Key("special_tokens", special, "; ".join(f"{name}: {why}" for name, _, why in draft.tokens.special) + ".")
    for warning in draft.tokens.warnings:
        yield Comment(f"Look at this: {warning}")
    if draft.base.tokenizer is None:
        yield Comment(
            f"The tokenizer could not be loaded ({draft.base.tokenizer_error}). Not decided for that reason: "
            "special_tokens (a pad_token, if it has none). sequence_len below is told from characters."
        )


def _method(draft: Draft) -> Iterator[Key | Comment | None]:
    method = draft.method
    yield Key("plugins", ["axolotl_supertune.SupertunePlugin"])
    yield Key(
        "adapter",
        method.adapter,
        "single weights and a low-rank part" * (method.adapter == "supra") or "single weights",
    )
    yield Key("lora_r", DEFAULT_R0, "the budget: in every layer as many parameters as a rank-8 LoRA has")
    if method.adapter == "supra":
        yield Key(
            "supra_lambda",
            LAMBDA,
            "low-rank share of the budget, rounded down to 6 ranks of 8; at the bottom the paper's runs with it never "
            "collapsed, those with 0.3 did",
        )
    yield Key("mask_score", method.score, method.score_reason)
    yield Key("sparse_direction", "bottom", "trains the weights with the smallest scores")
    if method.score == "wanda":
        yield Key(
            "calibration_dataset",
            "training_set",
            "Measures ‖X‖₂ on training records, which needs no download; in our runs other text gave the same loss. "
            "Others: the paper's C4 (allenai/c4, from the hub; drop both keys), or a local .txt, .jsonl or .parquet.",
        )
        yield Key("calibration_samples", draft.schedule.calibration, "records that it is measured on")


def _data(draft: Draft) -> Iterator[Key | Comment | None]:
    data, schedule = draft.data, draft.schedule
    about = f"{data.count:,} records, {data.format.label}: {', '.join(data.format.columns)}."
    if data.read_too:
        about += f" Axolotl reads too: {', '.join(data.read_too)}."
    if data.unused:
        about += f" Not used: {', '.join(data.unused)}."
    if data.empty_count:
        about += f" {data.empty_count} have nothing to learn ({', '.join(data.empty)}, …): remove them."
    if isinstance(data.format, Pairs) and getattr(draft.base.tokenizer, "chat_template", None):
        about += (
            "\nThe base has a chat template, which these records do not use: they are trained with Alpaca's prompt. "
            "Ask with it (--prompter AlpacaPrompter). To keep the base's own chat template, write them as messages "
            "with role and content."
        )
    yield Comment(about)
    yield Key("datasets", [{"path": str(data.path), **data.format.dataset()}])
    if draft.tokens.chat_template:
        yield Key("chat_template", draft.tokens.chat_template, draft.tokens.chat_reason)
    if draft.tokens.turn_end:
        yield Key("eot_tokens", [draft.tokens.turn_end], "Ends an answer in this template, and is learnt with it.")
    if schedule.validation:
        yield Key(
            "val_set_size", schedule.validation, "records that are not trained on: their loss says whether it learns"
        )
    else:
        yield Key(
            "val_set_size",
            0,
            f"{data.usable} records are too few to set some apart: the loss will not show over-fitting",
        )
    yield Key(
        "dataset_prepared_path",
        f"{draft.output_dir}/prepared",
        "the records, tokenized: delete it if you change the file",
    )
    yield Key("output_dir", draft.output_dir)
    yield Key("sequence_len", draft.lengths.sequence_len, _length_reason(draft))
    if not isinstance(data.format, Completion):
        yield Key("excess_length_strategy", "truncate", "cuts longer records; drop would leave them out")
        yield Key("train_on_inputs", False, "learns the answers only")


def _length_reason(draft: Draft) -> str:
    lengths = draft.lengths
    text = f"tokens; the longest record has {'about ' if lengths.estimated else ''}{lengths.longest:,}"
    if lengths.measured < draft.data.count:
        text += f" ({lengths.measured:,} of {draft.data.count:,} records measured)"
    if not lengths.longer:
        return f"{text}: nothing is cut"
    what = "are cut into pieces" if isinstance(draft.data.format, Completion) else "lose their end"
    limit = (
        "the base takes no more" if lengths.sequence_len != LIMIT else "to keep it, raise this: it needs more memory"
    )
    return f"{text}: {lengths.longer:,} are longer than this and {what} ({limit})"


def _course(draft: Draft) -> Iterator[Key | Comment | None]:
    schedule, method = draft.schedule, draft.method
    rate = method.rate
    yield Key(
        "num_epochs",
        schedule.epochs,
        f"{schedule.training:,} records in batches of {schedule.batch}: {schedule.steps} steps in all",
    )
    lines = [
        "The rate to try first; then try a third and three times of it, and compare the validation loss.",
        f"From {rate.explanation()}",
        *rate.cautions,
    ]
    if rate.row.is_ours:
        ran = f"Our run had {STEPS_OF_OURS}"
    elif rate.row.epochs == 1:
        ran = f"The paper's one epoch had some {STEPS_OF_ONE_EPOCH:,}"
    else:
        ran = f"The paper's three epochs had some {STEPS_OF_THREE_EPOCHS:,}"
    lines.append(f"{ran} steps of {PAPER_BATCH} records; this run has {schedule.steps:,} of {schedule.batch}.")
    if schedule.batch != PAPER_BATCH:
        selected = [each for each in (rate.learning_rate, rate.sparse_lr) if each is not None]
        lines.append(
            f"Selected: {' and '.join(map(rate_text, selected))}; here times √({schedule.batch}/{PAPER_BATCH}), "
            "because smaller batches are noisier."
        )
    yield Comment("\n".join(lines))
    yield Key("learning_rate", for_batch(rate.learning_rate, schedule.batch))
    if rate.sparse_lr is not None:
        sparse_rate = for_batch(rate.sparse_lr, schedule.batch)
        yield Key(
            "sparse_lr", sparse_rate, "of the single weights, which train best at a higher rate than the low-rank part"
        )
    yield Key("lr_scheduler", "linear")
    yield Key("warmup_steps", schedule.warmup, "a tenth of the steps, at most the paper's 100")
    yield Key("optimizer", "adamw_torch" if draft.place.on_cpu else "adamw_torch_fused")
    yield Key("weight_decay", 0.0)
    yield Key("seed", 0)
    if schedule.validation:
        if schedule.epochs > 1:
            yield Key("evals_per_epoch", 1, "validation loss before training and after every epoch")
        else:  # with 1, Axolotl evaluates nothing in a run of one epoch
            yield Key("evals_per_epoch", 2, "validation loss before training, after half of it and at its end")
    yield Key("saves_per_epoch", 1)
    yield Key("logging_steps", max(1, min(10, schedule.steps // 10)))


def _step(draft: Draft) -> Iterator[Key | Comment | None]:
    place = draft.place
    yield Comment(_memory_text(draft))
    yield Key("micro_batch_size", place.micro_batch)
    yield Key("gradient_accumulation_steps", place.accumulation)
    if place.checkpointing:
        yield Key("gradient_checkpointing", True, "computes activations twice to keep fewer of them")
        yield Key("gradient_checkpointing_kwargs", {"use_reentrant": False})
    if place.four_bits:
        yield Key("load_in_4bit", True, "the base in nf4: it does not fit in 16 bits")


def _memory_text(draft: Draft) -> str:
    place, batch = draft.place, draft.schedule.batch
    step = f"A step takes {batch} records" + (
        ", as in the paper."
        if batch == PAPER_BATCH
        else f", in the paper {PAPER_BATCH}: that would leave too few steps."
    )
    if place.memory is None:
        return step
    size = f"{place.memory / _GIB:.0f} GiB"
    whose = f"the GPU that was seen here ({size})" if draft.memory_was_seen else f"a GPU of {size}"
    if place.needed is None:
        return f"{step} The memory on {whose} is unknown: {place.unknown} Raise micro_batch_size if there is room."
    needed = f"{place.needed / _GIB:.1f} GiB"
    if not place.fits:
        return (
            f"{step} Planned for {whose}, and it does not fit: one record at a time and a base in 4 bits still need "
            f"{needed}. Lower sequence_len, or take a larger GPU, or several."
        )
    return f"{step} Planned for {whose}: {needed} are needed."


def _machine(draft: Draft) -> Iterator[Key | Comment | None]:
    if draft.place.on_cpu:
        yield Comment(
            "For a CPU: no GPU was seen here, and --gpu-memory was not given. For a GPU run init again with "
            "--gpu-memory, as 24GiB."
        )
        for name in ("bf16", "fp16", "tf32", "dataloader_pin_memory"):
            yield Key(name, False)
    else:
        yield Key("bf16", "auto")
    yield Key("attn_implementation", "sdpa", "" if draft.place.on_cpu else "flash_attention_2 needs flash-attn")
