"""The plugin's YAML keys. Axolotl mixes this class into its own config.

Defaults are filled in by `checks.prepare` when `adapter` is `supra` or `super`, so that another adapter's config stays
free of them; the descriptions state them.
"""

from typing import Literal

from pydantic import BaseModel, Field

from ..method.scores import MaskScore, describe_scores


class SupertuneArgs(BaseModel):
    """Keys of Super and Supra, beside the `lora_*` and `peft_*` keys that they share with LoRA."""

    lora_exclude_modules: list[str] | str | None = Field(
        default=None, description="Names or regex of layers to leave alone, as PEFT's exclude_modules."
    )
    supra_lambda: float | None = Field(
        default=None,
        ge=0,
        le=1,
        description="λ, the low-rank share of the parameter budget: 0 is Super, 1 is LoRA. Default 0.8; "
        "`adapter: super` means 0.",
    )
    mask_score: MaskScore | None = Field(
        default=None,
        description=f"Score that orders a layer's weights: {describe_scores()}. Those of ‖X‖₂ need calibration. "
        "Default wanda.",
    )
    gradient_batches: int | None = Field(
        default=None,
        ge=1,
        description="Batches that a gradient score is taken on, each as large as an optimizer step's. Default 8.",
    )
    low_rank_warmup_steps: int | None = Field(
        default=None,
        ge=0,
        description="Steps in which the low-rank part is trained alone before a gradient score chooses the support, as "
        "RoSA may. Default 0.",
    )
    sparse_direction: Literal["bottom", "top", "hybrid", "random"] | None = Field(
        default=None,
        description="Which scores the trained support takes: the smallest, the largest, both, or none (random). "
        "Default bottom.",
    )
    hybrid_beta: float | None = Field(
        default=None,
        ge=0,
        le=1,
        description="β, share of the largest scores; only with sparse_direction: hybrid. Default 0.5.",
    )
    support_scope: Literal["layer", "row"] | None = Field(
        default=None,
        description="Whether scores are compared within a layer, or within each row, over which the layer's sparse "
        "entries are then spread evenly. Default layer.",
    )
    budget_scope: Literal["layer", "density", "global"] | None = Field(
        default=None,
        description="layer: every layer has its own budget. density: all layers have one density, the whole budget in "
        "the whole weights. global: the sparse entries of all layers go where the scores, compared across "
        "layers, say. Default layer.",
    )
    sparse_density: float | None = Field(
        default=None,
        gt=0,
        le=1,
        description="p: budget ⌊p·out·in⌋ per layer instead of lora_r·(out+in). Not together with lora_r.",
    )
    sparse_lr: float | None = Field(
        default=None, gt=0, description="Learning rate of the sparse values U. Default: learning_rate."
    )
    support_seed: int | None = Field(default=None, ge=0, description="Seed of a random support. Default: seed.")
    values_dtype: Literal["fp32", "bf16"] | None = Field(
        default=None,
        description="dtype of U, L and R in the finished adapter's file. They are trained in fp32, and checkpoints "
        "hold fp32 whatever is said here. Default fp32.",
    )
    calibration_dataset: str | None = Field(
        default=None,
        description="Calibration text: a local .txt, .json(l), .json(l).gz or .parquet file, or a hub dataset, "
        "which is streamed; or training_set: records of the training set. Default allenai/c4, shard 0 of its English "
        "training split.",
    )
    calibration_split: str | None = Field(
        default=None, description="Split of a hub calibration dataset. Default train."
    )
    calibration_text_field: str | None = Field(
        default=None, description="Column that holds the calibration text. Default text."
    )
    calibration_samples: int | None = Field(default=None, ge=1, description="Number of windows. Default 128.")
    calibration_sequence_len: int | None = Field(
        default=None, ge=1, description="Tokens per window, at most the model's own maximum. Default 2048."
    )
    calibration_seed: int | None = Field(
        default=None, ge=0, description="Seed of the choice of documents and windows. Default: seed."
    )
    calibration_batch_size: int | None = Field(default=None, ge=1, description="Windows per forward pass. Default 8.")
    calibration_path: str | None = Field(
        default=None,
        description="Activation norms saved by an earlier run (output_dir/activation_norms.safetensors): no "
        "calibration is run. A file made for another model is refused.",
    )
