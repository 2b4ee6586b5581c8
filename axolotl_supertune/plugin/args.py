"""The plugin's YAML keys and their descriptions. Axolotl adds the fields of this class to its own config.

The defaults are in the descriptions only. `validation.prepare` fills them in for `adapter: supra` and `super`, so that
the config of another adapter does not get them.
"""

from typing import Literal

from pydantic import BaseModel, Field

from ..method.scores import MaskScore, describe_scores


class SupertuneArgs(BaseModel):
    """The keys of Super and Supra, in addition to the `lora_*` and `peft_*` keys that they share with LoRA."""

    lora_exclude_modules: list[str] | str | None = Field(
        default=None, description="Names, or a regex, of layers that are not adapted, as PEFT's exclude_modules."
    )
    supra_lambda: float | None = Field(
        default=None,
        ge=0,
        le=1,
        description="λ, the low-rank share of the parameter budget: 0 is Super, 1 is LoRA. Default 0.8; `adapter: "
        "super` means 0.",
    )
    mask_score: MaskScore | None = Field(
        default=None,
        description=f"Score that orders a layer's weights: {describe_scores()}. Those of ‖X‖₂ need calibration. "
        "Default wanda.",
    )
    gradient_batches: int | None = Field(
        default=None,
        ge=1,
        description="Number of batches that a gradient score is computed on, each as large as a training step's. "
        "Default 8.",
    )
    low_rank_warmup_steps: int | None = Field(
        default=None,
        ge=0,
        description="Number of first steps that train only the low-rank part; then a gradient score chooses the "
        "support, as in RoSA. Default 0.",
    )
    sparse_direction: Literal["bottom", "top", "hybrid", "random"] | None = Field(
        default=None,
        description="Which weights are trained: those with the smallest scores (bottom), the largest (top), some of "
        "both (hybrid), or random ones, without a score. Default bottom.",
    )
    hybrid_beta: float | None = Field(
        default=None,
        ge=0,
        le=1,
        description="β, the share of the largest scores; only with sparse_direction: hybrid. Default 0.5.",
    )
    support_scope: Literal["layer", "row"] | None = Field(
        default=None,
        description="layer: the scores of a layer are compared with each other. row: those of each row, and every "
        "row gets the same number of sparse entries. Default layer.",
    )
    budget_scope: Literal["layer", "density", "global"] | None = Field(
        default=None,
        description="layer: every layer has its own budget. density: all layers have the same density, the total "
        "budget divided by the number of weights. global: the sparse entries of all layers together are chosen by "
        "comparing scores across layers. Default layer.",
    )
    sparse_density: float | None = Field(
        default=None,
        gt=0,
        le=1,
        description="p: a budget of ⌊p·out·in⌋ parameters per layer instead of lora_r·(out+in). Not together with "
        "lora_r.",
    )
    sparse_lr: float | None = Field(
        default=None, gt=0, description="Learning rate of the sparse values U. Default: learning_rate."
    )
    support_seed: int | None = Field(default=None, ge=0, description="Seed of a random support. Default: seed.")
    values_dtype: Literal["fp32", "bf16"] | None = Field(
        default=None,
        description="dtype of U, L and R in the file of the finished adapter. They are always trained in fp32 and "
        "saved in fp32 in checkpoints. Default fp32.",
    )
    calibration_dataset: str | None = Field(
        default=None,
        description="Calibration text: a local .txt, .json(l), .json(l).gz or .parquet file, or a dataset on the "
        "hub, which is streamed; or training_set, for records of the training set. Default allenai/c4: shard 0 of "
        "its English training split.",
    )
    calibration_split: str | None = Field(
        default=None, description="Split of a calibration dataset on the hub. Default train."
    )
    calibration_text_field: str | None = Field(
        default=None, description="Column with the calibration text. Default text."
    )
    calibration_samples: int | None = Field(
        default=None, ge=1, description="Number of calibration windows. Default 128."
    )
    calibration_sequence_len: int | None = Field(
        default=None, ge=1, description="Tokens per calibration window, at most the model's own maximum. Default 2048."
    )
    calibration_seed: int | None = Field(
        default=None, ge=0, description="Seed of the choice of calibration documents and windows. Default: seed."
    )
    calibration_batch_size: int | None = Field(
        default=None, ge=1, description="Calibration windows per forward pass. Default 8."
    )
    calibration_path: str | None = Field(
        default=None,
        description="File of activation norms that an earlier run saved (output_dir/activation_norms.safetensors), "
        "or that `axolotl supertune calibrate` wrote: nothing is calibrated. A file of another model is refused.",
    )
