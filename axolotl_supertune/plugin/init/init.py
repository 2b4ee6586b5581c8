"""Makes a commented YAML for a base model and a file of training records, and says what to run next."""

import logging
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from ..plan.plan import make as make_plan
from . import placement as placing
from .base import choose_tokens, read_base
from .data_format import Chat, Completion, Pairs, read_data
from .lengths import measure
from .schedule import choose_method, make_schedule
from .settings import Draft, all_keys
from .yaml_text import yaml_text


@dataclass(frozen=True)
class Written:
    """The result of `init`.

    Attributes:
        text: the YAML.
        summary: one line about what it trains.
        commands: (command, what it does), to run next.
        warnings: what the user should look at.
    """

    text: str
    summary: str
    commands: list[tuple[str, str]]
    warnings: list[str]


def init(
    base_model: str, data_file: Path, output: Path, *, adapter: str = "supra", gpu_memory: float | None = None
) -> Written:
    """Write the YAML of a first training.

    Args:
        base_model: a folder, or a model on the hub.
        data_file: .jsonl, .json, .parquet or .csv, of alpaca, chat, completion or question-and-answer records.
        output: the name of the YAML, which the commands and `output_dir` are named after; it is not written here.
        adapter: supra or super.
        gpu_memory: bytes of the GPU that will train; None: those of the one that is here, or none at all.

    Raises:
        FileNotFoundError: there is no such file or base.
        ValueError: the data or the base cannot be used; names the record, the columns or the reason, and the remedy.
    """
    data = read_data(data_file)
    with _quiet():
        base = read_base(base_model)
        tokens = choose_tokens(base, isinstance(data.format, Chat))
        lengths = measure(data, base, tokens.template)
        schedule = make_schedule(data.usable)
        method = choose_method(adapter, base.parameters, schedule.steps)
        place = placing.on_cpu(schedule.batch, lengths.sequence_len)
        draft = Draft(base, data, output, tokens, lengths, schedule, method, place, gpu_memory is None)
        memory = gpu_memory or _memory_of_the_gpu_here()
        if memory is not None:
            place = placing.on_gpu(schedule.batch, memory, lambda tried: _mapping(replace(draft, place=tried)))
            draft = replace(draft, place=place)
        text = yaml_text(all_keys(draft))
        plan = make_plan(_mapping(draft), gpus=1)
    warnings = [*tokens.warnings, *(f"The plan refuses: {refusal}" for refusal in plan.refusals)]
    if data.empty_count:
        warnings.append(f"{data.empty_count} records have nothing to learn ({', '.join(data.empty)}): remove them.")
    if not place.fits:
        warnings.append("Nothing fits into this GPU: see micro_batch_size in the YAML.")
    summary = (
        f"{data.count:,} {data.format.label} records, {adapter} on {base.name}, {schedule.steps} steps of "
        f"{schedule.batch} records ({schedule.epochs} epoch{'s' * (schedule.epochs > 1)})"
    )
    return Written(text, summary, _commands(draft), warnings)


def _mapping(draft: Draft) -> dict[str, Any]:
    """The keys of the YAML of a draft, as they are read from it."""
    loaded: dict[str, Any] = yaml.safe_load(yaml_text(all_keys(draft)))
    return loaded


def _memory_of_the_gpu_here() -> float | None:
    import torch

    return float(torch.cuda.get_device_properties(0).total_memory) if torch.cuda.is_available() else None


def _commands(draft: Draft) -> list[tuple[str, str]]:
    prompter = " --prompter AlpacaPrompter" if isinstance(draft.data.format, Pairs) else ""
    talk = "continue a text" if isinstance(draft.data.format, Completion) else "talk to it"
    output = shlex.quote(str(draft.output))
    return [
        (f"axolotl train {output}", f"writes the adapter into {draft.output_dir}"),
        (f"axolotl merge-lora {output}", f"writes the whole model into {draft.output_dir}/merged"),
        (f"axolotl inference {output}{prompter}", f"{talk}: end your text with Ctrl-D"),
    ]


@contextmanager
def _quiet() -> Iterator[None]:
    """Without Axolotl's log lines of a plan, which say nothing of the YAML."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)
