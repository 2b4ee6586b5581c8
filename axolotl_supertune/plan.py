"""`axolotl supertune plan`: what a YAML would train, how much memory it takes, and what would be refused.

No weight is loaded: the model is made of its config on the meta device.
"""

import contextlib
import copy
import json
import os
import re
from collections.abc import Iterator, MutableMapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from . import memory
from .budget import BudgetRow, budget_rows
from .files import whole_file
from .job import Attention, Base, Calibration, Checkpointing, Engine, GradientPass, Job, Layers, Loss, Shape, Step
from .memory import GIB, Estimate

if TYPE_CHECKING:  # the command's help shall not wait for torch
    from .data_checks import Said
    from .tuner import SupraConfig

_UNITS = {"": 1, "MIB": 2**20, "GIB": 2**30, "MB": 10**6, "GB": 10**9}
# A mode or a file that training refuses leaves the rest of the config worth planning; a wrong budget does not.
_REMOVABLE = re.compile(r"(?P<key>\w+)(\[\d+\][\w.]*)?: ")
# As a machine to train on has them, where this one may have no GPU: Axolotl's validation asks.
_CAPABILITIES = {"bf16": True, "fp8": True, "tf32": True, "compute_capability": "sm_90"}
_VARLEN = (2, 10)  # PyTorch's own attention over packed sequences
_AUTO = -1  # filled in when the model is known
# Whose activations were compared, block by block, with the estimate's.
CHECKED = ("llama", "mistral", "qwen2", "qwen3", "gemma", "olmo")
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")


class _Memory(click.ParamType):
    """`80GiB`, `24 GB` or a number of bytes → bytes."""

    name = "memory"

    def convert(self, value: Any, parameter: click.Parameter | None, context: click.Context | None) -> float:
        if isinstance(value, (int, float)):
            return float(value)
        match = re.fullmatch(r"\s*([\d.]+)\s*([A-Za-z]*)\s*", value)
        try:
            if match is None:
                raise ValueError
            size = float(match[1]) * _UNITS[match[2].upper()]
        except (KeyError, ValueError):
            self.fail(f"{value!r} is no size: write 80GiB or 24GB.", parameter, context)
        return size


@click.command()
@click.argument("config", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--gpus", type=click.IntRange(min=1), help="One process each. Default: the YAML's, WORLD_SIZE, or 1.")
@click.option("--gpu-memory", type=_Memory(), help="Of one GPU, as 80GiB: says whether it fits.")
@click.option("--tokens", type=click.IntRange(min=1), help="Longest record, if shorter than sequence_len.")
@click.option("--json", "target", type=click.Path(dir_okay=False, path_type=Path), help="Write the plan here too.")
@click.pass_context
def plan(
    context: click.Context,
    config: Path,
    gpus: int | None,
    gpu_memory: float | None,
    tokens: int | None,
    target: Path | None,
) -> None:
    """Say what CONFIG would train and how much memory of a GPU that takes, without loading weights.

    Ranks, sparse entries and totals are the ones that training uses. Memory is what PyTorch allocates at the peak, for
    a full micro batch. Exit code 1 if training would be refused, or does not fit into --gpu-memory.
    """
    import yaml

    try:
        raw = yaml.safe_load(config.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise click.ClickException(f"{config}: not a YAML file: {error}") from error
    if not isinstance(raw, dict):
        raise click.ClickException(f"{config}: not a YAML of keys.")
    result = make(raw, gpus=gpus, tokens=tokens)
    if gpu_memory is not None and result.estimate is not None:
        result.gpu_memory = gpu_memory
    result.show()
    if target is not None:
        with whole_file(target) as temporary:
            temporary.write_text(json.dumps(result.as_json(), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        click.echo(f"wrote {target}")
    if result.refusals or result.fits is False:
        context.exit(1)


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
                **asdict(self.job),
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

        from .table import layer_table

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
            place = engine.name if engine.gpus == 1 else f"{engine.name} on {engine.gpus} GPUs"
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
        click.ClickException: the adapter is another one, its budgets cannot be, or the base model's config cannot be
            read.
    """
    engine = engine_of(raw, gpus)
    cfg, refusals, refused = _checked(raw, engine.gpus)
    model, model_config = _meta_model(cfg)
    from .data_checks import look_at_calibration, look_at_data, look_at_gradient
    from .plugin import _check_all_matched, adapter_config
    from .tuner.model import layer_budgets

    try:
        method = adapter_config(model, cfg)
        budgets = layer_budgets(model, method)
        _check_all_matched(cfg, budgets)
    except (ValueError, TypeError) as error:
        raise click.ClickException(str(error)) from error
    found = Plan(cfg, method, budget_rows(budgets), refusals)
    sparse = [name for name, budget in budgets.items() if budget.sparse_count]
    said = [look_at_data(cfg)]
    if not any(key.startswith("calibration_") for key in refused):
        said.append(look_at_calibration(cfg, model, model_config, sparse, texts_read))
    if method.gradient_batches and sparse:
        said.append(look_at_gradient(cfg, method.gradient_batches, engine.gpus))
    for each in said:
        found.refusals += each.refusals
        found.unchecked += each.unchecked
    if method.compares_layers:
        found.notes.append(
            "every layer has as many sparse entries as its budget alone; budget_scope: global moves them between layers"
        )
    text = model_config.get_text_config()
    found.unknown = _unlike_llama(text)
    if not found.unknown:
        if text.model_type not in CHECKED:
            found.notes.append(f"the blocks of {text.model_type} keep what Llama's keep, which was not checked")
        found.job = _job({**cfg, **refused}, method, model, text, engine, tokens, found.notes)
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


def _job(cfg: Any, method: Any, model: Any, text: Any, engine: Engine, tokens: int | None, notes: list[str]) -> Job:
    from .checks import has_sparse_part, may_need_norms
    from .corpus import TRAINING_SET

    shape = shape_of(model, text, cfg.get("lora_modules_to_save") or [])
    calibration = None
    if may_need_norms(cfg) and not cfg.get("calibration_path"):
        length = min(cfg["calibration_sequence_len"], getattr(text, "max_position_embeddings", None) or 2**31)
        if cfg["calibration_dataset"] == TRAINING_SET:
            length = min(length, cfg.get("sequence_len") or length)  # no record is longer
        calibration = Calibration(min(cfg["calibration_batch_size"], cfg["calibration_samples"]), length)
    # DeepSpeed's `auto`, as transformers fills it in.
    if engine.bucket == _AUTO:
        engine = replace(engine, bucket=shape.hidden**2)
    step = step_of(cfg, shape, engine, _hidden_act(text), tokens, notes)
    gradient = (
        GradientPass(method.mask_score == "squared_gradient") if method.by_gradient and has_sparse_part(cfg) else None
    )
    return Job(shape, step, engine, calibration, gradient)


def engine_of(raw: MutableMapping[str, Any], gpus: int | None) -> Engine:
    """The engine that a YAML names, on as many GPUs as are asked for, as it shards over, or as this process is one of.

    Raises:
        click.ClickException: a DeepSpeed config that cannot be read.
    """
    sizes = [raw.get(key) or 1 for key in ("dp_shard_size", "dp_replicate_size", "context_parallel_size")]
    named = sizes[0] * sizes[1] * sizes[2]
    count = gpus or (named if named > 1 else int(os.environ.get("WORLD_SIZE") or 1))
    if raw.get("deepspeed"):
        return _deepspeed(raw["deepspeed"], count)
    fsdp = raw.get("fsdp_config") or {}
    if raw.get("fsdp") or fsdp:
        plain = {str(key).removeprefix("fsdp_"): value for key, value in fsdp.items()}
        offloads = bool(plain.get("offload_params"))
        kept = plain.get("reshard_after_forward") is False
        return Engine(
            "FSDP2", count, offloads_weights=offloads, offloads_optimizer=offloads, keeps_gathered=kept and not offloads
        )
    return Engine("DDP" if count > 1 else "one GPU", count)


def _deepspeed(named: Any, gpus: int) -> Engine:
    from .engine_checks import deepspeed_config

    try:
        settings = deepspeed_config(named)
    except ValueError as error:
        raise click.ClickException(str(error)) from error
    zero = settings.get("zero_optimization") or {}
    stage = zero.get("stage", 0)
    if stage not in (0, 1, 2, 3):
        raise click.ClickException(
            f"deepspeed: {named} has zero_optimization.stage {stage!r}, which is none of 0 to 3."
        )
    if stage == 0:
        return Engine("DDP", gpus)

    def offloads(what: str) -> bool:
        return (zero.get(f"offload_{what}") or {}).get("device", "none") != "none"

    def number(key: str, default: int) -> int:
        value = zero.get(key, default)
        return _AUTO if value == "auto" else int(value)

    return Engine(
        {1: "ZeRO-1", 2: "ZeRO-2", 3: "ZeRO-3"}[stage],  # type: ignore[arg-type]
        gpus,
        offloads_weights=offloads("param"),
        offloads_optimizer=offloads("optimizer"),
        overlaps=bool(zero.get("overlap_comm")) and stage < 3,
        bucket=number("reduce_bucket_size", Engine.bucket),
        live=number("stage3_max_live_parameters", Engine.live),
    )


def _checked(raw: MutableMapping[str, Any], gpus: int) -> tuple[Any, list[str], dict[str, Any]]:
    """The config as training would have it, every error that training would give on the way, and the keys at fault.

    What is refused is taken out and the rest asked again, so that all refusals are named and the rest is planned.

    Raises:
        click.ClickException: what cannot be taken out, because the budgets hang on it.
    """
    from axolotl.integrations.base import PluginManager
    from axolotl.utils.config import prepare_plugins, validate_config
    from axolotl.utils.dict import DictDefault

    from . import checks
    from .args import SupertuneArgs
    from .plugin import SupertunePlugin, _known_keys

    if raw.get("adapter") not in checks.ADAPTERS:
        raise click.ClickException(f"adapter: {raw.get('adapter')}: only supra and super are planned.")
    if not raw.get("base_model"):
        raise click.ClickException("base_model: the config names none.")
    manager = PluginManager.get_instance()
    for name in raw.get("plugins") or []:
        if name not in manager.plugins:
            manager.register(name)
    for plugin in manager.plugins.values():
        if isinstance(plugin, SupertunePlugin):
            plugin.plans_only = True
    known = _known_keys()
    budget_keys = {*SupertuneArgs.model_fields, *checks.SHARED_KEYS, "adapter", "base_model"}
    refusals: list[str] = []
    left = copy.deepcopy(dict(raw))
    while True:
        cfg = DictDefault(copy.deepcopy(left))
        try:
            with _world(gpus):
                checks.prepare(cfg, known)
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
                raise click.ClickException(message) from error
    try:
        with _world(1):  # the number of processes was asked above
            prepare_plugins(cfg)
            cfg = validate_config(
                cfg, capabilities={**_CAPABILITIES, "n_gpu": gpus}, env_capabilities={"torch_version": "2.11.0"}
            )
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
    from axolotl.loaders.utils import load_model_config
    from transformers import AutoModelForCausalLM

    try:
        config = load_model_config(cfg)
    except (OSError, ValueError) as error:
        raise click.ClickException(f"base_model: the config of {cfg['base_model']} cannot be read: {error}") from error
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(
                config, attn_implementation="eager", trust_remote_code=bool(cfg.get("trust_remote_code"))
            )
    except (ValueError, ImportError, AttributeError) as error:
        raise click.ClickException(f"base_model: {cfg['base_model']} is no causal language model: {error}") from error
    return model, config


def _unlike_llama(text: Any) -> str:
    """Why the activations of a model are not those of Llama, or nothing."""
    for key in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size"):
        if not isinstance(getattr(text, key, None), int):
            return f"the config of a {text.model_type} model has no {key} to tell its activations from."
    experts = [key for key in _EXPERTS if (getattr(text, key, None) or 0) > 1]
    return f"the activations of a mixture of experts ({experts[0]}) depend on what it routes." if experts else ""


def shape_of(model: Any, text: Any, saved_modules: list[str]) -> Shape:
    """Counts of a model (on the meta device) with a config of Llama's kind.

    Args:
        saved_modules: lora_modules_to_save.
    """
    from torch import nn

    head = model.get_output_embeddings()
    embedding = model.get_input_embeddings()
    linear = [each for each in model.modules() if isinstance(each, nn.Linear) and each is not head]
    in_linear = sum(each.weight.numel() for each in linear)
    tables = {id(each.weight): each.weight.numel() for each in (embedding, head) if each is not None}
    whole = sum(parameter.numel() for parameter in model.parameters())
    names = tuple(saved_modules)
    saved = [each for name, each in model.named_modules() if names and name.rpartition(".")[2] in names]
    norms = [
        name
        for name, each in model.named_modules()
        if type(each).__name__.endswith("Norm") and not name.endswith(("q_norm", "k_norm"))
    ]
    heads = text.num_attention_heads
    return Shape(
        hidden=text.hidden_size,
        intermediate=text.intermediate_size,
        blocks=text.num_hidden_layers,
        heads=heads,
        kv_heads=getattr(text, "num_key_value_heads", None) or heads,
        head_dim=getattr(text, "head_dim", None) or text.hidden_size // heads,
        vocabulary=text.vocab_size,
        linear=in_linear,
        linear_rows=sum(each.out_features for each in linear),
        embeddings=sum(tables.values()),
        other=whole - in_linear - sum(tables.values()),
        widest=max(each.weight.numel() for each in linear),
        norms=(len(norms) - 1) // text.num_hidden_layers,  # one is the last of all
        qk_norm=any(name.endswith("q_norm") for name, _ in model.named_modules()),
        saved_modules=sum(parameter.numel() for each in saved for parameter in each.parameters()),
    )


def step_of(cfg: Any, shape: Shape, engine: Engine, activation: str, tokens: int | None, notes: list[str]) -> Step:
    """The micro batch that a config trains on, full to its last token; adds to `notes` what it takes for granted.

    Args:
        activation: the MLP's, as the model's config names it.
        tokens: of the longest record.
    """
    from .ops.choice import requested

    rows, sequence_len = cfg.get("micro_batch_size") or 1, cfg.get("sequence_len") or 2048
    length = sequence_len
    bf16, fp16 = cfg.get("bf16"), cfg.get("fp16")
    half = bf16 in (True, "auto", "full") or bool(fp16) or (bf16 is None and fp16 is None)
    attention = str(cfg.get("attn_implementation") or "sdpa")
    packs = bool(cfg.get("sample_packing"))
    if tokens is not None and not packs and not cfg.get("pad_to_sequence_len"):
        length = min(length, tokens)
    if cfg.get("pad_to_sequence_len") is not False:  # as Axolotl's collator rounds up
        multiple = cfg.get("pad_to_multiple_of") or 64
        length = -(-length // multiple) * multiple
    kept: Attention = "flash"
    if attention == "eager":
        kept = "eager"
    elif attention == "sdpa" and packs:
        kept = "repeated" if _varlen(cfg, shape) else "masked"
    elif attention == "sdpa" and rows > 1:
        kept = "masked"
        notes.append(f"{rows} rows of different lengths, which sdpa computes with a mask and repeated keys")
    elif attention != "sdpa" and packs and not cfg.get("multipack_real_batches"):
        rows, length = 1, rows * length
    base: Base = "plain"
    if cfg.get("load_in_8bit"):
        base = "int8"
    elif cfg.get("load_in_4bit"):
        double = (cfg.get("bnb_config_kwargs") or {}).get("bnb_4bit_use_double_quant", True)
        base = "nf4-double" if double else "nf4"
    checkpointing: Checkpointing = "none"
    fsdp = cfg.get("fsdp_config") or {}
    asked = cfg.get("gradient_checkpointing")
    if asked in ("offload", "offload_disk") or cfg.get("activation_offloading"):
        checkpointing = "offloaded"
    elif asked or fsdp.get("activation_checkpointing"):
        checkpointing = "blocks"
    loss: Loss = "transformers"
    if cfg.get("cut_cross_entropy") or cfg.get("liger_fused_linear_cross_entropy"):
        loss = "fused"
    elif cfg.get("chunked_cross_entropy"):
        loss = "chunked"
    elif cfg.get("liger_cross_entropy"):
        loss = "liger"
    layers: Layers = "kernels" if base == "plain" else "transient"
    if requested() == "reference":
        layers = "reference"
        notes.append("the adapted layers are computed by the reference, not by the Triton kernels")
    elif engine.shards_weights:
        layers = "transient"
        notes.append("weights are gathered for every use, so of the kernels only the gradient of U is there")
    evaluates = cfg.get("val_set_size") or cfg.get("test_datasets")
    evaluated = (cfg.get("eval_batch_size") or cfg.get("micro_batch_size") or 1) if evaluates else 0
    if rows == 1 and packs and evaluated:
        evaluated = -(-evaluated * sequence_len // length)  # in one row as well
    optimizer = cfg.get("optimizer") or "adamw_torch_fused"
    return Step(
        rows=rows,
        length=length,
        width=2 if half else 4,
        base=base,
        layers=layers,
        mlp="liger" if cfg.get("liger_glu_activation") else "plain" if activation == "silu" else "other",
        dropout=bool(cfg.get("lora_dropout")),
        attention=kept,
        checkpointing=checkpointing,
        loss=loss,
        thin_norms=bool(cfg.get("liger_rms_norm")),
        optimizer=str(getattr(optimizer, "value", optimizer)),
        accumulation=cfg.get("gradient_accumulation_steps") or 1,
        evaluated_rows=evaluated,
    )


def _hidden_act(text: Any) -> str:
    return str(getattr(text, "hidden_act", None) or getattr(text, "hidden_activation", None))


def _varlen(cfg: Any, shape: Shape) -> bool:
    """Whether Axolotl gives packed rows to PyTorch's attention over sequences, which needs no mask."""
    import torch

    asked = cfg.get("sdpa_varlen")
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    return asked is not False and version >= _VARLEN and shape.head_dim <= 256
