"""SupraConfig: all settings of Super and Supra."""

import copy
import math
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal, Union

from peft.config import PeftConfig

from ..method.activation_norms import ActivationNorms
from ..method.budget import BUDGET_SCOPES, DEFAULT_BETA, DEFAULT_R0, check_beta, check_density, check_lambda, check_r0
from ..method.scores import SCORES, MaskScore, describe_scores
from ..method.support import SPARSE_DIRECTIONS, SUPPORT_SCOPES
from .file_format import VALUES_DTYPES
from .peft_compat import peft_type

# 8 batches of 16 records, the paper's batch size, are as many records as calibration has windows (128).
DEFAULT_GRADIENT_BATCHES = 8
# Settings of an adapter that a weighted sum stores of each of its parts.
_PART_FIELDS = (
    "supra_lambda",
    "lora_alpha",
    "r0",
    "sparse_density",
    "mask_score",
    "sparse_direction",
    "hybrid_beta",
    "support_seed",
    "support_scope",
    "budget_scope",
    "calibration",
)


def exact_targets(names: Iterable[str], modules: Iterable[str] | None) -> str | list[str]:
    """A `target_modules` that matches exactly these layers: in PEFT a listed name also matches as a suffix.

    Args:
        names: of the layers.
        modules: names of all modules of the model, or None if unknown.

    Returns:
        The names; or a regex, if a name would (or, for unknown modules, might) match another module as well.
    """
    exact = list(names)
    suffixes = {f".{name}" for name in exact}
    others = None if modules is None else set(modules).difference(exact)
    if others is not None and not any(other[dot:] in suffixes for other in others for dot in _dots(other)):
        return exact
    return "|".join(map(re.escape, exact))


def _dots(name: str) -> list[int]:
    """Positions of the dots of a module name."""
    return [index for index, character in enumerate(name) if character == "."]


@dataclass
class SupraConfig(PeftConfig):
    """Configuration of a SUPRA adapter: Ŵ = W + M⊙U + γ·L·R in every target layer.

    Args:
        r0: reference rank of the budget T = r0(c+b) per layer: what a rank-r0 LoRA would train there. Default 8,
            unless `sparse_density` is given.
        sparse_density: the density budget T = ⌊p·c·b⌋ instead.
        supra_lambda: λ in [0, 1], the low-rank share of the budget. 0 is Super, 1 is LoRA.
        lora_alpha: α; γ = α/r with the layer's own rank r.
        lora_dropout: dropout on the input of the low-rank part.
        mask_score: the score that orders the weights, see `method.scores.SCORES`: `wanda` or `activation` (both need
            `activation_norms`), `magnitude`, or `gradient` or `squared_gradient` of training batches: then
            `tuner.gradient.choose_supports` must be called before the sparse part is trained.
        gradient_batches: number of batches of a gradient score; default 8.
        low_rank_warmup_steps: steps in which only the low-rank part is trained, before a gradient score chooses the
            support. Default 0.
        sparse_direction: which scores the support consists of: `bottom`, `top`, `hybrid` or `random` (needs no score).
        hybrid_beta: β, share of the largest scores in `hybrid`; default 0.5.
        support_seed: seed of `random`.
        support_scope: `layer` compares the scores within a layer; `row` within each row, with the count spread evenly
            over the rows.
        budget_scope: `layer` gives each layer its own T; `density` gives all layers one density
            ρ = Σ r0(c+b) / Σ c·b, as in the authors' code; `global` gives each layer the rank of `layer`, and
            distributes the sparse entries of all layers by comparing scores across layers.
        activation_norms: an `ActivationNorms` or the path of a saved one; not saved with the adapter.
        support_device: device on which supports are chosen, one layer at a time; it does not affect the choice.
            Default the weight's device; not saved with the adapter.
        target_modules: as in LoRA; `None` is every linear layer but the output layer.
        exclude_modules, layers_to_transform, layers_pattern, modules_to_save: as in LoRA.
        support: `select` chooses the support now; `saved` expects it from a checkpoint. The config of a saved adapter
            says `saved`: its support is never chosen again.
        calibration: filled in: provenance of the activation norms.
        gradient: filled in: step and batches of the gradient that chose the support; None until then.
        sparse_counts: filled in with `budget_scope: global`: number of sparse entries per layer.
        base_quantization: filled in: how the base was quantized, as `quantization_config` takes it; None for an
            unquantized base.
        values_dtype: `fp32` or `bf16`, of U, L and R in the adapter's file. They are trained and loaded in fp32.
        init_weights: False draws U and L at random instead of 0; for tests.
        combination: filled in by `add_weighted_adapter`: the adapters' weights and settings (`parts`), the type of the
            sum, and rank and sparse count of every layer, since these follow from no budget. γ is α/r as ever. The
            settings of the method above have no meaning then.

    Raises:
        ValueError: a setting out of range, or two that contradict; the message names both and the remedy.
    """

    r0: int | None = field(default=None, metadata={"help": "Reference rank of the budget T = r0(c+b). Default 8."})
    sparse_density: float | None = field(default=None, metadata={"help": "Density budget T = ⌊p·c·b⌋ instead of r0."})
    supra_lambda: float = field(default=0.8, metadata={"help": "λ: low-rank share of the budget. 0 Super, 1 LoRA."})
    lora_alpha: float = field(default=16, metadata={"help": "α: the low-rank part is scaled by α/r."})
    lora_dropout: float = field(default=0.05, metadata={"help": "Dropout on the input of the low-rank part."})
    mask_score: MaskScore = field(
        default="wanda", metadata={"help": f"Score that orders the weights. {describe_scores()}."}
    )
    gradient_batches: int | None = field(
        default=None, metadata={"help": "Batches that a gradient score is taken on. Default 8."}
    )
    low_rank_warmup_steps: int = field(
        default=0, metadata={"help": "Steps of the low-rank part alone, before the support is chosen by gradient."}
    )
    sparse_direction: Literal["bottom", "top", "hybrid", "random"] = field(
        default="bottom", metadata={"help": "Which scores the support takes."}
    )
    hybrid_beta: float | None = field(default=None, metadata={"help": "β: share of the largest scores, for hybrid."})
    support_seed: int = field(default=0, metadata={"help": "Seed of the random support."})
    support_scope: Literal["layer", "row"] = field(
        default="layer", metadata={"help": "Whether a layer's scores are compared with each other, or a row's."}
    )
    budget_scope: Literal["layer", "density", "global"] = field(
        default="layer", metadata={"help": "Whether each layer has a budget, all have a density, or scores decide."}
    )
    activation_norms: Any = field(
        default=None, repr=False, metadata={"help": "ActivationNorms, or the path of a saved one."}
    )
    support_device: Any = field(
        default=None, repr=False, metadata={"help": "Device that supports are chosen on, a layer at a time."}
    )
    target_modules: Union[list[str], set[str], str, None] = field(  # noqa: UP007 (PEFT reads Union by name)
        default=None, metadata={"help": "Names or regex of the layers to adapt; default: all linear but the head."}
    )
    exclude_modules: Union[list[str], set[str], str, None] = field(  # noqa: UP007
        default=None, metadata={"help": "Names or regex of layers to leave alone."}
    )
    layers_to_transform: Union[list[int], int, None] = field(  # noqa: UP007
        default=None, metadata={"help": "Indices of the blocks to adapt."}
    )
    layers_pattern: Union[list[str], str, None] = field(  # noqa: UP007
        default=None, metadata={"help": "Name of the list of blocks, for layers_to_transform."}
    )
    modules_to_save: list[str] | None = field(
        default=None, metadata={"help": "Modules trained in full and saved beside the adapter."}
    )
    support: Literal["select", "saved"] = field(
        default="select", metadata={"help": "Choose the support now, or take the one a checkpoint brings."}
    )
    calibration: dict[str, Any] | None = field(
        default=None, metadata={"help": "Filled in: where the activation norms came from."}
    )
    gradient: dict[str, Any] | None = field(
        default=None, metadata={"help": "Filled in: when and on what the gradient was taken."}
    )
    sparse_counts: dict[str, int] | None = field(
        default=None, metadata={"help": "Filled in with budget_scope global: sparse entries of each layer."}
    )
    base_quantization: dict[str, Any] | None = field(
        default=None, metadata={"help": "Filled in: how the base was quantized."}
    )
    values_dtype: Literal["fp32", "bf16"] = field(
        default="fp32", metadata={"help": "Of U, L and R in the adapter's file; trained in fp32 either way."}
    )
    init_weights: bool = field(default=True, metadata={"help": "False draws U and L at random, for tests."})
    combination: dict[str, Any] | None = field(
        default=None, metadata={"help": "Filled in by add_weighted_adapter: what was combined, sizes per layer."}
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.peft_type = peft_type()
        self._check_method()
        if self.target_modules is None:
            self.target_modules = "all-linear"
        if isinstance(self.target_modules, list):
            self.target_modules = set(self.target_modules)
        if isinstance(self.exclude_modules, list):
            self.exclude_modules = set(self.exclude_modules)
        if isinstance(self.target_modules, str) and self.layers_to_transform is not None:
            raise ValueError(
                f"layers_to_transform={self.layers_to_transform} has no effect with target_modules="
                f"{self.target_modules!r}: list the layer names, for example ['q_proj', 'down_proj']."
            )
        if self.layers_pattern and self.layers_to_transform is None:
            raise ValueError(f"layers_pattern={self.layers_pattern!r} needs layers_to_transform.")

    def _check_method(self) -> None:
        """Fill in defaults that depend on other settings; ValueError as for the class."""
        check_lambda(self.supra_lambda)
        self._check_budget()
        self._check_choices()
        self._check_gradient()
        self._check_scopes()
        self._check_numbers()

    def _check_budget(self) -> None:
        if self.sparse_density is not None:
            check_density(self.sparse_density)
            if self.r0 is not None:
                raise ValueError(
                    f"two budgets, r0={self.r0} and sparse_density={self.sparse_density}: give one of them."
                )
        else:
            self.r0 = DEFAULT_R0 if self.r0 is None else self.r0
            check_r0(self.r0)

    def _check_choices(self) -> None:
        for key, allowed in (
            ("mask_score", tuple(SCORES)),
            ("sparse_direction", SPARSE_DIRECTIONS),
            ("support_scope", SUPPORT_SCOPES),
            ("budget_scope", BUDGET_SCOPES),
            ("values_dtype", VALUES_DTYPES),
            ("support", ("select", "saved")),
        ):
            if getattr(self, key) not in allowed:
                raise ValueError(f"{key}={getattr(self, key)!r} is not one of {', '.join(allowed)}.")
        if self.sparse_direction != "hybrid" and self.hybrid_beta is not None:
            raise ValueError(
                f"hybrid_beta={self.hybrid_beta} has no effect with sparse_direction: {self.sparse_direction}; "
                "drop it, or set sparse_direction: hybrid."
            )
        if self.sparse_direction == "hybrid":
            self.hybrid_beta = DEFAULT_BETA if self.hybrid_beta is None else self.hybrid_beta
            check_beta(self.hybrid_beta)

    def _check_numbers(self) -> None:
        if not (isinstance(self.lora_dropout, (int, float)) and 0 <= self.lora_dropout < 1):
            raise ValueError(f"lora_dropout={self.lora_dropout!r} is not in [0, 1).")
        if not (isinstance(self.lora_alpha, (int, float)) and math.isfinite(self.lora_alpha)):
            raise ValueError(f"lora_alpha={self.lora_alpha!r} is not a finite number.")
        if self.lora_alpha == 0 and self.supra_lambda != 0:
            raise ValueError("lora_alpha=0 scales the low-rank part to nothing: L and R would stay untrained.")
        if isinstance(self.support_seed, bool) or not isinstance(self.support_seed, int) or self.support_seed < 0:
            raise ValueError(f"support_seed={self.support_seed!r} is not an integer ≥ 0.")

    def _check_gradient(self) -> None:
        for key, least in (("gradient_batches", 1), ("low_rank_warmup_steps", 0)):
            value = getattr(self, key)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"{key}={value!r} is not an integer ≥ {least}.")
            if value and not self.by_gradient:
                raise ValueError(
                    f"{key}={value} has no effect with mask_score: {self.mask_score}, sparse_direction: "
                    f"{self.sparse_direction}: no gradient is taken; drop it."
                )
        if self.by_gradient and self.gradient_batches is None:
            self.gradient_batches = DEFAULT_GRADIENT_BATCHES
        if self.low_rank_warmup_steps and self.supra_lambda == 0:
            raise ValueError(
                f"low_rank_warmup_steps={self.low_rank_warmup_steps} needs a low-rank part to train: set supra_lambda "
                f"above {self.supra_lambda}, or drop it."
            )

    def _check_scopes(self) -> None:
        if self.budget_scope == "density" and self.sparse_density is not None:
            raise ValueError(
                f"budget_scope='density' has no effect with sparse_density={self.sparse_density}, which is one density "
                "for all layers already: drop one of them."
            )
        if self.budget_scope != "global":
            return
        conflicts = {
            f"sparse_direction={self.sparse_direction!r}": self.sparse_direction == "random" and "compares no scores",
            f"mask_score={self.mask_score!r}": self.by_gradient
            and "would need the dense gradients of all layers at once",
            f"support_scope={self.support_scope!r}": self.support_scope == "row" and "compares scores within a row",
            f"supra_lambda={self.supra_lambda}": self.supra_lambda == 1
            and self.sparse_density is None
            and "has no sparse part to share out",
        }
        for key, reason in conflicts.items():
            if reason:
                raise ValueError(f"budget_scope='global' does not go with {key}, which {reason}: change one of them.")

    @property
    def compares_layers(self) -> bool:
        """Whether scores are compared across layers."""
        return self.budget_scope == "global" and self.combination is None

    @property
    def has_sparse_part(self) -> bool:
        """Whether any layer may have a sparse part: False only for λ = 1 with a rank budget per layer."""
        return self.supra_lambda != 1 or self.sparse_density is not None or self.budget_scope == "density"

    @property
    def choice_of_support(self) -> str:
        """How the support is chosen, in a few words; a random support has no score."""
        if not self.has_sparse_part:
            return "no single weights"
        rows = ", by row" if self.support_scope == "row" else ""
        if self.sparse_direction == "random":
            return f"random (seed {self.support_seed}){rows}"
        hybrid = f" (β = {self.hybrid_beta})" if self.sparse_direction == "hybrid" else ""
        return f"{self.mask_score}-{self.sparse_direction}{hybrid}{rows}"

    @property
    def by_gradient(self) -> bool:
        """Whether a gradient score chooses the support."""
        return SCORES[self.mask_score].needs == "gradients" and self.sparse_direction != "random"

    @property
    def awaits_gradient(self) -> bool:
        """Whether the support is yet to be chosen by gradient; until then it is a placeholder."""
        return self.by_gradient and self.gradient is None and self.combination is None

    @property
    def needs_norms(self) -> bool:
        """Whether choosing the support needs activation norms."""
        return (
            self.support == "select"
            and SCORES[self.mask_score].needs == "norms"
            and self.sparse_direction != "random"
            and self.has_sparse_part
        )

    def loaded_norms(self) -> ActivationNorms | None:
        """The activation norms, read from their file if a path was given.

        Raises:
            ValueError: `activation_norms` is neither; or as `ActivationNorms.load`.
        """
        if isinstance(self.activation_norms, (str, os.PathLike)):
            self.activation_norms = ActivationNorms.load(self.activation_norms)
        if self.activation_norms is not None and not isinstance(self.activation_norms, ActivationNorms):
            raise ValueError(
                f"activation_norms is a {type(self.activation_norms).__name__}: give what calibrate() returned, or "
                "the path of a saved one."
            )
        return self.activation_norms

    def to_dict(self) -> dict[str, Any]:
        """The fields that an adapter stores: without `activation_norms` and `support_device`, and without empty
        optional ones."""
        plain = copy.copy(self)
        plain.activation_norms = plain.support_device = None
        fields = super(SupraConfig, plain).to_dict()
        del fields["activation_norms"], fields["support_device"]
        for key in ("combination", "gradient", "gradient_batches", "sparse_counts"):
            if fields[key] is None:
                del fields[key]
        return fields

    def as_part(self) -> dict[str, Any]:
        """The settings that a weighted sum of adapters stores of this one: those of the method, without layer sizes."""
        fields = {key: value for key in _PART_FIELDS if (value := getattr(self, key)) is not None}
        if self.combination is not None:
            fields["combination"] = {key: value for key, value in self.combination.items() if key != "layers"}
        return fields

    def parts(self) -> dict[str, "SupraConfig"]:
        """For a weighted sum of adapters, their configs by name; empty for older files, which do not store them."""
        return {name: SupraConfig(**fields) for name, fields in (self.combination or {}).get("parts", {}).items()}

    def save_pretrained(self, save_directory: str, **kwargs: Any) -> None:
        """Write adapter_config.json, with `support: saved`."""
        saved = copy.copy(self)
        saved.support = "saved"
        for key in ("target_modules", "exclude_modules"):  # sorted, so that equal runs write equal files
            if isinstance(getattr(saved, key), set):
                setattr(saved, key, sorted(getattr(saved, key)))
        super(SupraConfig, saved).save_pretrained(save_directory, **kwargs)
