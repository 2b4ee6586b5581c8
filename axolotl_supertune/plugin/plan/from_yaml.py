"""Turns a YAML and its base model into the inputs of the memory estimate: shape, micro batch, engine, passes before."""

from collections.abc import Mapping, MutableMapping
from typing import TYPE_CHECKING, Any

from ... import engines
from ...engines.engine import Engine
from .workload import Attention, Base, Calibration, Checkpointing, GradientPass, Job, Layers, Loss, Mlp, Shape, Step

if TYPE_CHECKING:  # the command's help must not wait for torch
    from torch import nn

_VARLEN_TORCH = (2, 10)  # the first PyTorch with its own attention over packed sequences
_VARLEN_HEAD_DIM = 256
# Model types whose kept activations were compared with the estimate, block by block.
CHECKED = ("llama", "mistral", "qwen2", "qwen3", "gemma", "olmo")
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")


def job_of(cfg: Any, method: Any, model: Any, text: Any, engine: Engine, tokens: int | None, notes: list[str]) -> Job:
    """The arguments of `memory.estimate` for a config; adds to `notes` what is taken for granted.

    Args:
        cfg: the config as training would have it.
        method: the adapter's PEFT config.
        model: the base model, on the meta device.
        text: the config of its text model.
        engine: of `engine_of`.
        tokens: of the longest record; None: as many as `sequence_len`.
    """
    from ...method.scores import SCORES

    shape = shape_of(model, text, cfg.get("lora_modules_to_save") or [])
    calibration = None
    if method.needs_norms and not cfg.get("calibration_path"):
        calibration = _calibration_of(cfg, text)
    step = step_of(cfg, shape, engine, _hidden_act(text), tokens, notes)
    gradient = None
    if method.by_gradient and method.has_sparse_part:
        gradient = GradientPass(SCORES[method.mask_score].squares_gradients)
    return Job(shape, step, engine, calibration, gradient)


def engine_of(raw: MutableMapping[str, Any], gpus: int | None) -> Engine:
    """The engine that a YAML names, on `gpus` GPUs, else as many as it shards over, else as `WORLD_SIZE` says.

    Raises:
        ValueError: the settings of the engine cannot be read, or are of no known engine.
    """
    sharded = 1
    for key in ("dp_shard_size", "dp_replicate_size", "context_parallel_size"):
        sharded *= raw.get(key) or 1
    return engines.engine_of(raw, gpus or (sharded if sharded > 1 else None))


def unlike_llama(text: Any) -> str:
    """Why the activations of a model differ from Llama's, for a message; empty if they do not.

    Args:
        text: the config of the text model.
    """
    for key in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size"):
        if not isinstance(getattr(text, key, None), int):
            return f"the config of a {text.model_type} model has no {key} to tell its activations from."
    experts = [key for key in _EXPERTS if (getattr(text, key, None) or 0) > 1]
    return f"the activations of a mixture of experts ({experts[0]}) depend on what it routes." if experts else ""


def shape_of(model: "nn.Module", text: Any, saved_modules: list[str]) -> Shape:
    """The sizes of a model.

    Args:
        model: on the meta device.
        text: the config of its text model, of Llama's kind.
        saved_modules: lora_modules_to_save.
    """
    from torch import nn

    head = model.get_output_embeddings()  # type: ignore[operator] # of a PreTrainedModel
    embedding = model.get_input_embeddings()  # type: ignore[operator]
    linear = [module for module in model.modules() if isinstance(module, nn.Linear) and module is not head]
    in_linear = sum(layer.weight.numel() for layer in linear)
    tables = {id(table.weight): table.weight.numel() for table in (embedding, head) if table is not None}
    in_tables = sum(tables.values())
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
        linear_out_features=sum(layer.out_features for layer in linear),
        embeddings=in_tables,
        other=sum(parameter.numel() for parameter in model.parameters()) - in_linear - in_tables,
        widest=max(layer.weight.numel() for layer in linear),
        norms=(_count_norms(model) - 1) // text.num_hidden_layers,  # without the final one
        qk_norm=any(name.endswith("q_norm") for name, _ in model.named_modules()),
        saved_modules=sum(
            parameter.numel()
            for name, module in model.named_modules()
            if saved_modules and name.rpartition(".")[2] in saved_modules
            for parameter in module.parameters()
        ),
    )


def _count_norms(model: "nn.Module") -> int:
    """Norms on hidden states: not those of queries and keys."""
    return sum(
        type(module).__name__.endswith("Norm") and not name.endswith(("q_norm", "k_norm"))
        for name, module in model.named_modules()
    )


def step_of(cfg: Any, shape: Shape, engine: Engine, activation: str, tokens: int | None, notes: list[str]) -> Step:
    """The micro batch that a config trains on, full to its last token; adds to `notes` what is taken for granted.

    Args:
        cfg: the config as training would have it.
        shape: of the base model.
        engine: what trains.
        activation: the MLP's, as the model's config names it.
        tokens: of the longest record; None: as many as `sequence_len`.
    """
    from ..quantized_base import stored_format

    attention, sequences, length = _attention_of(cfg, shape, _length_of(cfg, tokens), notes)
    base = stored_format(cfg)
    optimizer = cfg.get("optimizer") or "adamw_torch_fused"
    return Step(
        sequences=sequences,
        length=length,
        width=_width_of(cfg),
        base=base,
        layers=_layers_of(base, engine, notes),
        mlp=_mlp_of(cfg, activation),
        dropout=bool(cfg.get("lora_dropout")),
        attention=attention,
        checkpointing=_checkpointing_of(cfg, engine),
        loss=_loss_of(cfg),
        thin_norms=bool(cfg.get("liger_rms_norm")),
        optimizer=str(getattr(optimizer, "value", optimizer)),
        accumulation=cfg.get("gradient_accumulation_steps") or 1,
        evaluated_sequences=_evaluated_sequences_of(cfg, sequences, length),
    )


def _calibration_of(cfg: Any, text: Any) -> Calibration:
    from ...method.calibration_data import TRAINING_SET

    length = min(cfg["calibration_sequence_len"], getattr(text, "max_position_embeddings", None) or 2**31)
    if cfg["calibration_dataset"] == TRAINING_SET:
        length = min(length, cfg.get("sequence_len") or length)  # no record is longer
    return Calibration(min(cfg["calibration_batch_size"], cfg["calibration_samples"]), length)


def _width_of(cfg: Mapping[str, Any]) -> int:
    """Bytes of a weight; without either key Axolotl trains in 16 bits."""
    bf16, fp16 = cfg.get("bf16"), cfg.get("fp16")
    return 2 if bf16 in (True, "auto", "full") or fp16 or (bf16 is None and fp16 is None) else 4


def _sequence_len(cfg: Mapping[str, Any]) -> int:
    return cfg.get("sequence_len") or 2048


def _length_of(cfg: Mapping[str, Any], tokens: int | None) -> int:
    """Tokens of the longest row, padded as Axolotl's collator does."""
    length = _sequence_len(cfg)
    if tokens is not None and not cfg.get("sample_packing") and not cfg.get("pad_to_sequence_len"):
        length = min(length, tokens)
    if cfg.get("pad_to_sequence_len") is not False:
        multiple = cfg.get("pad_to_multiple_of") or 64
        length = -(-length // multiple) * multiple
    return length


def _attention_of(cfg: Mapping[str, Any], shape: Shape, length: int, notes: list[str]) -> tuple[Attention, int, int]:
    """What attention keeps, and the sequences and tokens that it is given.

    Some kernels take a packed batch as one sequence.
    """
    sequences = cfg.get("micro_batch_size") or 1
    implementation, packs = str(cfg.get("attn_implementation") or "sdpa"), bool(cfg.get("sample_packing"))
    if implementation == "eager":
        return "eager", sequences, length
    if implementation == "sdpa" and packs:
        return ("repeated" if _varlen(cfg, shape) else "masked"), sequences, length
    if implementation == "sdpa" and sequences > 1:
        notes.append(f"the {sequences} sequences of a batch differ in length, so sdpa attention has a mask")
        return "masked", sequences, length
    if implementation != "sdpa" and packs and not cfg.get("multipack_real_batches"):
        return "flash", 1, sequences * length
    return "flash", sequences, length


def _varlen(cfg: Mapping[str, Any], shape: Shape) -> bool:
    """Whether Axolotl gives packed rows to PyTorch's attention over sequences, which needs no mask."""
    import torch

    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    allowed = cfg.get("sdpa_varlen") is not False
    return allowed and version >= _VARLEN_TORCH and shape.head_dim <= _VARLEN_HEAD_DIM


def _layers_of(base: Base, engine: Engine, notes: list[str]) -> Layers:
    from ...ops.dispatch import requested

    if requested() == "reference":
        notes.append("the adapted layers are computed in plain PyTorch, not by the Triton kernels (SUPERTUNE_KERNELS)")
        return "reference"
    if base != "plain":
        return "recomputed"
    return "gathered" if engine.shards_weights else "kernels"


def _mlp_of(cfg: Mapping[str, Any], activation: str) -> Mlp:
    if cfg.get("liger_glu_activation"):
        return "liger"
    return "plain" if activation == "silu" else "other"


def _checkpointing_of(cfg: Mapping[str, Any], engine: Engine) -> Checkpointing:
    asked = cfg.get("gradient_checkpointing")
    if asked in ("offload", "offload_disk") or cfg.get("activation_offloading"):
        return "offloaded"
    return "blocks" if asked or engine.checkpoints_activations else "none"


def _loss_of(cfg: Mapping[str, Any]) -> Loss:
    if cfg.get("cut_cross_entropy") or cfg.get("liger_fused_linear_cross_entropy"):
        return "fused"
    if cfg.get("chunked_cross_entropy"):
        return "chunked"
    return "liger" if cfg.get("liger_cross_entropy") else "transformers"


def _evaluated_sequences_of(cfg: Mapping[str, Any], sequences: int, length: int) -> int:
    """Sequences of `length` tokens in a batch of an evaluation; 0 without one."""
    if not (cfg.get("val_set_size") or cfg.get("test_datasets")):
        return 0
    evaluated = cfg.get("eval_batch_size") or cfg.get("micro_batch_size") or 1
    if sequences == 1 and cfg.get("sample_packing"):
        return -(-evaluated * _sequence_len(cfg) // length)  # one sequence too
    return evaluated


def _hidden_act(text: Any) -> str:
    return str(getattr(text, "hidden_act", None) or getattr(text, "hidden_activation", None))
