"""Methods, model shapes and the settings of one measurement. Shapes are built in, so no model hub is needed."""

from dataclasses import dataclass
from typing import Any

# Method → its description; the order is that of the table.
METHODS = {
    "floor": "all weights frozen, gradient to the embeddings' output: what any adapter has to pay",
    "super": "SUPRA, λ = 0, magnitude-bottom: an evenly spread support",
    "super-wanda": "SUPRA, λ = 0, wanda-bottom with uneven activation norms: a skewed support",
    "supra": "SUPRA with a low-rank part and dropout (λ 0.8 and 0.05 unless set), magnitude-bottom",
    "lora": "PEFT LoRA of rank r0 with the same dropout, fp32 adapter (PEFT's default)",
    "lora-bf16": "PEFT LoRA of rank r0, no dropout, adapter in the base's dtype",
    "peft-supertuning": "PEFT's own SupertuningConfig, sparse only, as many parameters in all",
    "peft-shira": "PEFT SHiRA of r0",
    "paper": "the paper's design: dense effective weight, dense gradient, gather",
    "qsuper": "super on a 4-bit base (nf4, double quantization)",
    "qsupra": "supra on a 4-bit base",
    "qlora": "lora on a 4-bit base",
    "full": "full fine-tuning in the model's dtype",
}
OWN_METHODS = ("super", "super-wanda", "supra", "qsuper", "qsupra")
ON_4_BITS = ("qsuper", "qsupra", "qlora")
# Methods that some PEFT versions lack, and the class of PEFT that they need.
PEFT_CLASSES = {"peft-supertuning": "SupertuningConfig", "peft-shira": "ShiraConfig"}

_COMMON = {"head_dim": 64, "max_position_embeddings": 8192, "tie_word_embeddings": True}
_LLAMA3 = {**_COMMON, "vocab_size": 128256, "num_attention_heads": 32, "num_key_value_heads": 8, "rope_theta": 5e5}
_8B = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "head_dim": 128}
_1B = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16}
_135M = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "rope_theta": 1e5}
_135M_HEADS = {"num_attention_heads": 9, "num_key_value_heads": 3}
_TINY = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2, "head_dim": 16}
_TINY_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
SHAPES: dict[str, dict[str, Any]] = {
    "llama3-8b": {**_LLAMA3, **_8B, "tie_word_embeddings": False},
    "llama3.2-1b": {**_LLAMA3, **_1B},
    "smollm2-135m": {**_COMMON, **_135M, **_135M_HEADS, "vocab_size": 49152},
    "tiny": {**_COMMON, **_TINY, **_TINY_HEADS, "vocab_size": 256, "tie_word_embeddings": False},
}


@dataclass(frozen=True)
class Measurement:
    """Settings of the measurement of one method's training step.

    Attributes:
        method: a key of METHODS.
        model: a key of SHAPES, or the path of a model's folder or config.json; only the config is read.
        device: `cuda` (the model is in bf16) or `cpu` (fp32).
        batch_size, sequence_len: sequences of a step, and tokens of a sequence.
        steps, warmup: timed steps, and steps before them that are not timed.
        r0: reference rank of the budget, and LoRA's rank.
        supra_lambda: λ of `supra` and `qsupra`.
        lora_dropout: dropout of `supra`, `qsupra`, `lora` and `qlora`.
        attn_implementation: transformers' setting.
        gradient_checkpointing: compute the activations of each block again in backward.
        memory_limit: GiB of GPU memory that the process may allocate, as on a smaller card; None for all.
        autocast: run forward under bf16 autocast, as a trainer with `bf16: true` does.
        calibration_samples, calibration_sequence_len: sequences and their tokens for `super-wanda`; fewer on a CPU.
        profile: run three steps under torch.profiler, and report its table instead of timings.
    """

    method: str
    model: str
    device: str
    batch_size: int = 16
    sequence_len: int = 196
    steps: int = 20
    warmup: int = 5
    r0: int = 8
    supra_lambda: float = 0.8
    lora_dropout: float = 0.05
    attn_implementation: str = "sdpa"
    gradient_checkpointing: bool = False
    memory_limit: float | None = None
    autocast: bool = False
    calibration_samples: int = 128
    calibration_sequence_len: int = 2048
    profile: bool = False


def model_config(model: str) -> Any:
    """The transformers config of a shape, or of a local model folder or config.json."""
    from transformers import AutoConfig, LlamaConfig

    return LlamaConfig(**SHAPES[model]) if model in SHAPES else AutoConfig.from_pretrained(model)


def parameter_count(model: str) -> int:
    """Number of parameters of the model, which is built on the meta device."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return sum(
            parameter.numel() for parameter in AutoModelForCausalLM.from_config(model_config(model)).parameters()
        )
