"""The job that a YAML and its model describe: shape, micro batch and engine, as `memory` takes them."""

from collections.abc import MutableMapping
from typing import Any

from ... import engines
from ...engines.engine import Engine
from .workload import Attention, Base, Calibration, Checkpointing, GradientPass, Job, Layers, Loss, Shape, Step

_VARLEN = (2, 10)  # PyTorch's own attention over packed sequences
# Whose activations were compared, block by block, with the estimate's.
CHECKED = ("llama", "mistral", "qwen2", "qwen3", "gemma", "olmo")
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")


def job_of(cfg: Any, method: Any, model: Any, text: Any, engine: Engine, tokens: int | None, notes: list[str]) -> Job:
    """What is estimated for a config; adds to `notes` what it takes for granted.

    Args:
        cfg: the config as training would have it.
        method: the adapter's PEFT config.
        model: the base model, on the meta device.
        text: the config of its text model.
        engine: of `engine_of`.
        tokens: of the longest record.
    """
    from ...method.calibration_data import TRAINING_SET
    from ...method.scores import SCORES

    shape = shape_of(model, text, cfg.get("lora_modules_to_save") or [])
    calibration = None
    if method.needs_norms and not cfg.get("calibration_path"):
        length = min(cfg["calibration_sequence_len"], getattr(text, "max_position_embeddings", None) or 2**31)
        if cfg["calibration_dataset"] == TRAINING_SET:
            length = min(length, cfg.get("sequence_len") or length)  # no record is longer
        calibration = Calibration(min(cfg["calibration_batch_size"], cfg["calibration_samples"]), length)
    step = step_of(cfg, shape, engine, _hidden_act(text), tokens, notes)
    gradient = None
    if method.by_gradient and method.has_sparse_part:
        gradient = GradientPass(SCORES[method.mask_score].squares_gradients)
    return Job(shape, step, engine, calibration, gradient)


def engine_of(raw: MutableMapping[str, Any], gpus: int | None) -> Engine:
    """The engine that a YAML names, on as many GPUs as are asked for, as it shards over, or as this process is one of.

    Raises:
        ValueError: a DeepSpeed config that cannot be read, or with an unknown stage.
    """
    sizes = [raw.get(key) or 1 for key in ("dp_shard_size", "dp_replicate_size", "context_parallel_size")]
    named = sizes[0] * sizes[1] * sizes[2]
    return engines.engine_of(raw, gpus or (named if named > 1 else None))


def unlike_llama(text: Any) -> str:
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
    from ...ops.dispatch import requested

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
    layers: Layers = "kernels" if base == "plain" else "recomputed"
    if requested() == "reference":
        layers = "reference"
        notes.append("the adapted layers are computed by the reference, not by the Triton kernels")
    elif engine.shards_weights and base == "plain":
        layers = "gathered"
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
