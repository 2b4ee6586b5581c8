"""Applies a method to a model: freezes it and adds the adapters that the method trains."""

from typing import Any

import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from ..method.activation_norms import ActivationNorms
from ..method.budget import layer_budget
from ..method.calibration import default_layers
from ..method.scores import magnitude_score
from ..method.support import select_support
from ..tuner import SupraConfig
from .measurement import Measurement


class PaperLinear(nn.Module):
    """The paper's sparse layer in plain autograd, as a baseline of its cost.

    W + M⊙U is a second dense weight, kept until backward, which forms its dense gradient and reads it on the support.

    Shape: x (..., b) → (..., c). `values` (s,) is fp32 (fp64 for an fp64 base), `indices` (s,) are flat.
    """

    indices: Tensor

    def __init__(self, base: nn.Linear, indices: Tensor) -> None:
        super().__init__()
        self.base = base
        dtype = torch.promote_types(base.weight.dtype, torch.float32)
        self.values = nn.Parameter(torch.zeros(indices.numel(), dtype=dtype, device=indices.device))
        self.register_buffer("indices", indices)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.base.weight
        flat = weight.flatten().index_add(0, self.indices, self.values.to(weight.dtype))
        return F.linear(x, flat.view_as(weight), self.base.bias)


def apply_method(model: nn.Module, measurement: Measurement, norms: ActivationNorms | None = None) -> nn.Module:
    """Freeze `model` in place and add the adapters of `measurement.method` to all linear layers except the head.

    Args:
        norms: activation norms, for `super-wanda`.

    Returns:
        The model to train, which may be a wrapper.

    Raises:
        ImportError: the installed PEFT lacks the method.
        ValueError: unknown method, or r0 gives a layer more parameters than it has weights.
    """
    targets = sorted({name.rpartition(".")[2] for name in default_layers(model)})
    common: dict[str, Any] = {"target_modules": targets, "task_type": "CAUSAL_LM"}
    if measurement.method == "full":
        return model.requires_grad_(True)
    model.requires_grad_(False)
    match measurement.method:
        case "floor":
            embeddings: Any = model.get_input_embeddings()  # type: ignore[operator] # a transformers model has it
            embeddings.register_forward_hook(lambda module, args, output: output.requires_grad_())
            return model
        case "paper":
            _use_paper_layers(model, measurement.r0)
            return model
        case "super" | "super-wanda" | "supra" | "qsuper" | "qsupra":
            config: Any = SupraConfig(
                r0=measurement.r0,
                supra_lambda=measurement.supra_lambda if measurement.method in ("supra", "qsupra") else 0.0,
                mask_score="wanda" if measurement.method == "super-wanda" else "magnitude",
                activation_norms=norms,
                lora_dropout=measurement.lora_dropout,
                **common,
            )
            return get_peft_model(model, config)
        case "lora" | "qlora":
            config = LoraConfig(r=measurement.r0, lora_alpha=16, lora_dropout=measurement.lora_dropout, **common)
            return get_peft_model(model, config)
        case "lora-bf16":
            config = LoraConfig(r=measurement.r0, lora_alpha=16, lora_dropout=0.0, **common)
            return get_peft_model(model, config, autocast_adapter_dtype=False)
        case "peft-supertuning":
            from peft import SupertuningConfig

            # PEFT takes one density for all layers: that of the budget of all layers together.
            layers: list[Any] = [model.get_submodule(name) for name in default_layers(model)]
            budget = sum(measurement.r0 * (layer.out_features + layer.in_features) for layer in layers)
            density = budget / sum(layer.weight.numel() for layer in layers)
            return get_peft_model(model, SupertuningConfig(sparsity=1 - density, select_top=False, **common))
        case "peft-shira":
            from peft import ShiraConfig

            return get_peft_model(model, ShiraConfig(r=measurement.r0, random_seed=0, **common))
    raise ValueError(f"method {measurement.method!r} is unknown.")


def _use_paper_layers(model: nn.Module, r0: int) -> None:
    """Replace all linear layers except the head by `PaperLinear`."""
    for name in default_layers(model):
        base: Any = model.get_submodule(name)
        budget = layer_budget(base.out_features, base.in_features, supra_lambda=0.0, r0=r0, layer=name)
        indices = select_support(magnitude_score(base.weight, layer=name), budget.sparse_count, "bottom")
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, PaperLinear(base, indices))
