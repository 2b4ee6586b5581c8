"""The plan of a training: what a YAML would train, how much memory it takes, and what would be refused.

No weight is loaded: the model is made of its config on the meta device.
"""

import contextlib
import copy
import os
import re
from collections.abc import Iterator, MutableMapping
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ...engines.single import ONE_PROCESS
from ...method.budget import BudgetRow, budget_rows
from . import memory
from .from_yaml import CHECKED, engine_of, job_of, unlike_llama
from .memory import GIB, Estimate
from .workload import Job

if TYPE_CHECKING:  # the command's help shall not wait for torch
    from ...tuner import SupraConfig
    from .data_checks import Said

# A mode or a file that training refuses leaves the rest of the config worth planning; a wrong budget does not.
_REMOVABLE = re.compile(r"(?P<key>\w+)(\[\d+\][\w.]*)?: ")


@dataclass
class Plan:
    """What a config trains, what it takes, and what is refused.

    Attributes:
        cfg: the config as training would have it, without what is refused.
        method: the adapter's PEFT config.
        rows: budgets, per kind of layer.
        refusals: the errors that training would give, in the order in which they come up.
        job: what is estimated; None where the model is none whose memory can be told: `unknown` says why.
        notes: what the estimate takes for granted.
        unchecked: what training might refuse, and only a download or the weights would tell.
        gpu_memory: bytes of one GPU, if given.
    """

    cfg: MutableMapping[str, Any]
    method: "SupraConfig"
    rows: list[BudgetRow]
    refusals: list[str]
    job: "Job | None" = None
    estimate: Estimate | None = None
    unknown: str = ""
    notes: list[str] = field(default_factory=list)
    unchecked: list[str] = field(default_factory=list)
    gpu_memory: float | None = None

    @property
    def fits(self) -> bool | None:
        """Whether one GPU has enough; None if nobody said how much it has, or nobody knows how much it takes."""
        if self.gpu_memory is None or self.estimate is None:
            return None
        return self.estimate.needed <= self.gpu_memory

    def as_json(self) -> dict[str, Any]:
        """Everything, for a file."""
        sparse = sum(row.layers * row.budget.sparse_count for row in self.rows)
        size = sum(row.layers * row.budget.out_features * row.budget.in_features for row in self.rows)
        made: dict[str, Any] = {
            "base_model": self.cfg["base_model"],
            "adapter": self.cfg["adapter"],
            "method": self._method(),
            "layers": [
                {"kind": row.kind, "layers": row.layers}
                | asdict(row.budget)
                | {"density": float(row.budget.density), "parameters": row.total}
                for row in self.rows
            ],
            "total": {
                "parameters": sum(row.total for row in self.rows),
                "sparse_count": sparse,
                "density": sparse / size,
            },
            "refused": self.refusals,
            "unchecked": self.unchecked,
        }
        if self.estimate is None or self.job is None:
            return made | {"memory": None, "memory_unknown": self.unknown}
        gib = {name: bytes_ / GIB for name, bytes_ in self.estimate.parts.items()}
        return made | {
            "memory": {
                **asdict(replace(self.job, engine=ONE_PROCESS)),
                "engine": self.job.engine.planned(self.job.shape.hidden),
                "moment": self.estimate.moment,
                "parts_gib": gib,
                "moments_gib": {name: bytes_ / GIB for name, bytes_ in self.estimate.moments.items()},
                "training_peak_gib": self.estimate.training / GIB,
                "calibration_peak_gib": self.estimate.calibration / GIB,
                "needed_gib": self.estimate.needed / GIB,
                "gpu_memory_gib": None if self.gpu_memory is None else self.gpu_memory / GIB,
                "fits": self.fits,
                "notes": self.notes,
            }
        }

    def _method(self) -> dict[str, Any]:
        """Its knobs; None for those that choose nothing here."""
        unused: set[str] = set()
        if not self.method.has_sparse_part:
            unused = {"mask_score", "sparse_direction", "support_scope", "gradient_batches"}
        elif self.method.sparse_direction == "random":
            unused = {"mask_score"}
        return {
            key: None if key in unused else getattr(self.method, key)
            for key in (
                "supra_lambda",
                "r0",
                "sparse_density",
                "mask_score",
                "sparse_direction",
                "hybrid_beta",
                "support_scope",
                "budget_scope",
                "gradient_batches",
                "low_rank_warmup_steps",
            )
        }

    def show(self) -> None:
        """Print tables and lines; into a file as wide as they need to be."""
        from rich.console import Console
        from rich.table import Table

        from ..run_summary import layer_table

        console = Console(highlight=False)
        if not console.is_terminal:
            console = Console(highlight=False, width=140)
        console.print(layer_table(self.rows, self.method))
        say = lambda line: console.print(line, markup=False, soft_wrap=True)  # noqa: E731
        found, job = self.estimate, self.job
        if found is None or job is None:
            say(f"Memory: not estimated: {self.unknown}")
        else:
            step, engine = job.step, job.engine
            place = engine.name if engine.processes == 1 else f"{engine.name} on {engine.processes} GPUs"
            say(f"Memory of one GPU, {place}: {step.rows} × {step.length} tokens")
            table = Table()
            table.add_column("at the peak: " + found.moment)
            table.add_column("GiB", justify="right")
            for name, size in found.parts.items():
                table.add_row(name, f"{size / GIB:.2f}")
            table.add_section()
            table.add_row("training", f"{found.training / GIB:.2f}")
            if found.calibration:
                table.add_row("calibration, before it", f"{found.calibration / GIB:.2f}")
            console.print(table)
            say(
                f"A card needs {found.needed / GIB:.1f} GiB: the peak, {memory.FRAGMENTATION:.0%} that the allocator "
                f"cannot use, {memory.CONTEXT / GIB} GiB of CUDA's own."
            )
            if self.gpu_memory is not None:
                left = (self.gpu_memory - found.needed) / GIB
                fits = f"fits, {left:.1f} GiB are left" if left >= 0 else f"does not fit, {-left:.1f} GiB are missing"
                say(f"{self.gpu_memory / GIB:.1f} GiB: {fits}.")
            for note in self.notes:
                say(f"Taken for granted: {note}.")
        for refusal in self.refusals:
            say(f"Refused: {refusal}")
        for each in self.unchecked:
            say(f"Unchecked: {each}.")
        if not self.refusals:
            say("Nothing in this config is refused" + (" by what could be checked." if self.unchecked else "."))


def make(
    raw: MutableMapping[str, Any],
    *,
    gpus: int | None = None,
    tokens: int | None = None,
    texts_read: "dict[str, Said] | None" = None,
) -> Plan:
    """The plan of a YAML's mapping, which is left as it is.

    Args:
        raw: the mapping.
        gpus: one process each; None: as the YAML or the environment says.
        tokens: of the longest record, if shorter than sequence_len.
        texts_read: what was said of calibration texts by plans before, which are not read again; is added to.

    Raises:
        ValueError: the adapter is another one, its budgets cannot be, or the base model's config cannot be
            read.
    """
    engine = engine_of(raw, gpus)
    cfg, refusals, refused = _checked(raw, engine.processes)
    model, model_config = _meta_model(cfg)
    from ...tuner.model import layer_budgets
    from ..create import adapter_config, check_all_matched
    from .data_checks import look_at_calibration, look_at_data, look_at_gradient, look_at_start

    try:
        method = adapter_config(model, cfg)
        budgets = layer_budgets(model, method)
        check_all_matched(cfg, model, budgets)
    except (ValueError, TypeError) as error:
        raise ValueError(str(error)) from error
    found = Plan(cfg, method, budget_rows(budgets), refusals)
    sparse = [name for name, budget in budgets.items() if budget.sparse_count]
    said = [look_at_data(cfg), look_at_start(cfg, method)]
    if not any(key.startswith("calibration_") for key in refused):
        said.append(look_at_calibration(cfg, model, model_config, sparse, texts_read))
    if method.gradient_batches and sparse:
        said.append(look_at_gradient(cfg, method.gradient_batches, engine.processes))
    for each in said:
        found.refusals += each.refusals
        found.unchecked += each.unchecked
    if method.compares_layers:
        found.notes.append(
            "every layer has as many sparse entries as its budget alone; budget_scope: global moves them between layers"
        )
    text = model_config.get_text_config()
    found.unknown = unlike_llama(text)
    if not found.unknown:
        if text.model_type not in CHECKED:
            found.notes.append(f"the blocks of {text.model_type} keep what Llama's keep, which was not checked")
        found.job = job_of({**cfg, **refused}, method, model, text, engine, tokens, found.notes)
        try:
            found.estimate = memory.estimate(
                found.job.shape,
                found.rows,
                found.job.step,
                found.job.engine,
                found.job.calibration,
                found.job.gradient,
            )
        except ValueError as error:
            found.unknown = str(error)
    return found


def _checked(raw: MutableMapping[str, Any], gpus: int) -> tuple[Any, list[str], dict[str, Any]]:
    """The config as training would have it, every error that training would give on the way, and the keys at fault.

    What is refused is taken out and the rest asked again, so that all refusals are named and the rest is planned.

    Raises:
        ValueError: what cannot be taken out, because the budgets hang on it.
    """
    from axolotl.utils.dict import DictDefault

    from .. import axolotl_compat, validation
    from ..args import SupertuneArgs
    from ..plugin import SupertunePlugin

    if raw.get("adapter") not in validation.ADAPTERS:
        grid = isinstance(raw.get("methods"), dict)
        remedy = (
            " This is a file of a grid: `axolotl supertune sweep GRID --dry-run` checks the YAMLs of its runs."
            if grid
            else ""
        )
        raise ValueError(f"adapter: {raw.get('adapter')}: only supra and super are planned.{remedy}")
    if not raw.get("base_model"):
        raise ValueError("base_model: the config names none.")
    axolotl_compat.register_plugins(raw.get("plugins") or [])
    for plugin in axolotl_compat.registered_plugins():
        if isinstance(plugin, SupertunePlugin):
            plugin.plans_only = True
    known = axolotl_compat.config_keys(axolotl_compat.registered_argument_classes())
    budget_keys = {*SupertuneArgs.model_fields, *validation.SHARED_KEYS, "adapter", "base_model"}
    refusals: list[str] = []
    left = copy.deepcopy(dict(raw))
    while True:
        cfg = DictDefault(copy.deepcopy(left))
        try:
            with _world(gpus):
                validation.prepare(cfg, known)
            break
        except (ValueError, FileNotFoundError) as error:
            message = str(error)
            refusals.append(message)
            named = _REMOVABLE.match(message)
            key = named["key"] if named else ""
            if key.startswith("fsdp"):
                left = {name: value for name, value in left.items() if not name.startswith("fsdp")}
            elif key in left and (key not in budget_keys or key.startswith("calibration_")):
                del left[key]
            else:
                raise ValueError(message) from error
    try:
        with _world(1):  # the number of processes was asked above
            cfg = axolotl_compat.validated(cfg, gpus)
    except (ValueError, ImportError) as error:
        refusals.append(str(error))
    return cfg, refusals, {key: value for key, value in raw.items() if key not in left}


@contextlib.contextmanager
def _world(size: int) -> Iterator[None]:
    """As one of so many processes."""
    before = os.environ.get("WORLD_SIZE")
    os.environ["WORLD_SIZE"] = str(size)
    try:
        yield
    finally:
        if before is None:
            del os.environ["WORLD_SIZE"]
        else:
            os.environ["WORLD_SIZE"] = before


def _meta_model(cfg: Any) -> tuple[Any, Any]:
    """The base model without weights, and its config."""
    import torch
    from transformers import AutoModelForCausalLM

    from ..axolotl_compat import load_model_config

    try:
        config = load_model_config(cfg)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"base_model: the config of {cfg['base_model']} cannot be read; without the hub, name a folder "
            f"that holds the model's config.json: {error}"
        ) from error
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(
                config, attn_implementation="eager", trust_remote_code=bool(cfg.get("trust_remote_code"))
            )
    except (ValueError, ImportError, AttributeError) as error:
        raise ValueError(f"base_model: {cfg['base_model']} is no causal language model: {error}") from error
    return model, config
