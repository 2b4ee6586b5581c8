"""Per-weight scores by which a layer's weights are ranked (paper, section 3.2), and the registry of them, `SCORES`.

W has shape (c, b) = (out_features, in_features). A score is an fp32 tensor of the same shape; large means important.
Scores of weights and activation norms are computed here, those of training batches in `gradient_scores`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

RowScores = Callable[[int, int], Tensor]
"""(start, stop) → the scores of these rows, (stop − start, b) fp32."""


def wanda_score(weight: Tensor, activation_norm: Tensor, *, layer: str = "layer") -> Tensor:
    """A_ij = |W_ij|·‖X_j‖₂, where X_j holds feature j of the layer's input over all calibration tokens.

    `wanda_rows` computes it.

    Args:
        weight: (c, b), any floating dtype.
        activation_norm: (b,), ‖X_j‖₂ per input feature.
        layer: the layer's name, for error messages.

    Returns:
        (c, b) fp32.

    Raises:
        ValueError: a weight or a norm is NaN or infinite, or the norm's shape is not (b,).
    """
    return wanda_rows(weight, activation_norm, layer=layer)(0, len(weight))


def wanda_rows(weight: Tensor, activation_norm: Tensor, *, layer: str = "layer") -> RowScores:
    """`wanda_score`, a block of rows at a time: `mask_score: wanda`.

    All checks happen in this call. Neither it nor the function that it returns allocates a tensor of the weight's size.

    Args:
        weight: (c, b), any floating dtype; read at each call of the returned function.
        activation_norm: (b,), ‖X_j‖₂ per input feature.
        layer: the layer's name, for error messages.

    Returns:
        A function (start, stop) → the scores of these rows, (stop − start, b) fp32.

    Raises:
        ValueError: as `wanda_score`.
    """
    norm = _checked_norm(weight, activation_norm, layer)
    weight = weight.detach()

    def rows(start: int, stop: int) -> Tensor:
        return _magnitude(weight[start:stop]).mul_(norm)

    largest = check_weight(weight, layer=layer)
    if norm.numel() and not bool(torch.isfinite(largest * norm.abs().max())):
        # An upper bound of all products overflows; the two factors may belong to different features, so check them all.
        remedy = "the products overflow fp32: check the base model and the norms"
        _check_finite(rows(0, len(weight)), layer, "its scores |W|·‖X‖", remedy)
    return rows


def magnitude_score(weight: Tensor, *, layer: str = "layer") -> Tensor:
    """B_ij = |W_ij| (the PaFi-style rule).

    `magnitude_rows` computes it.

    Args:
        weight: (c, b), any floating dtype.
        layer: the layer's name, for error messages.

    Returns:
        (c, b) fp32.

    Raises:
        ValueError: a weight is NaN or infinite.
    """
    return magnitude_rows(weight, layer=layer)(0, len(weight))


def magnitude_rows(weight: Tensor, _: Tensor | None = None, *, layer: str = "layer") -> RowScores:
    """`magnitude_score`, a block of rows at a time: `mask_score: magnitude`. Takes no norms."""
    weight = weight.detach()
    check_weight(weight, layer=layer)
    return lambda start, stop: _magnitude(weight[start:stop])


def _magnitude(rows: Tensor) -> Tensor:
    """|W_ij| of some rows, a new fp32 tensor."""
    return rows.to(torch.float32, copy=True).abs_()


def activation_score(weight: Tensor, activation_norm: Tensor, *, layer: str = "layer") -> Tensor:
    """‖X_j‖₂ in every row: the Wanda score without the weight, whose supports are whole columns.

    Args, returns and raises: as `wanda_score`.
    """
    return activation_rows(weight, activation_norm, layer=layer)(0, len(weight)).contiguous()


def activation_rows(weight: Tensor, activation_norm: Tensor, *, layer: str = "layer") -> RowScores:
    """`activation_score`, a block of rows at a time: `mask_score: activation`. The weight is only checked."""
    norm = _checked_norm(weight, activation_norm, layer)
    check_weight(weight, layer=layer)
    return lambda start, stop: norm.expand(stop - start, -1)


def _checked_norm(weight: Tensor, activation_norm: Tensor, layer: str) -> Tensor:
    """The norms in fp32 on the weight's device; ValueError unless they are finite and of shape (b,)."""
    if tuple(activation_norm.shape) != (weight.shape[1],):
        raise ValueError(
            f"{layer}: activation norms of shape {tuple(activation_norm.shape)} do not fit a weight of shape "
            f"{tuple(weight.shape)}; they were made for another model, calibrate this one."
        )
    norm = activation_norm.to(device=weight.device, dtype=torch.float32)
    _check_finite(norm, layer, "its activation norms", "calibrate again with a model and text that give finite values")
    return norm


def check_weight(weight: Tensor, *, layer: str) -> Tensor:
    """The largest |W_ij|, a 0-dim fp32 tensor; ValueError if a weight is NaN or infinite, in its dtype or in fp32."""
    return _check_finite(weight.detach(), layer, "its weight", "repair or re-download the base model")


def _check_finite(tensor: Tensor, layer: str, what: str, remedy: str) -> Tensor:
    """The largest absolute value, 0-dim fp32; ValueError if any value is NaN or infinite."""
    if not tensor.numel():
        return torch.zeros((), device=tensor.device)
    # NaN and infinity show in the extremes, which take one read of the tensor and no temporary of its size.
    largest = torch.stack(torch.aminmax(tensor)).to(torch.float32).abs().max()
    if not bool(torch.isfinite(largest)):
        bad = tensor.numel() - int(torch.isfinite(tensor.to(torch.float32)).sum())
        raise ValueError(f"{layer}: {what} hold {bad:,} NaN or infinite values of {tensor.numel():,}; {remedy}.")
    return largest


@dataclass(frozen=True)
class Score:
    """A value of `mask_score`.

    Attributes:
        needs: what it is computed from: the weight alone, activation norms (so the model is calibrated), or gradients
            of training batches (so the support is chosen after the first batches are there).
        description: formula and origin, for help texts.
        rows: the function, for scores of weights and norms; it is passed None for norms that it does not need.
        squares_gradients: for scores of gradients: average (∂L/∂W)² over the batches, not ∂L/∂W.
    """

    needs: Literal["weight", "norms", "gradients"]
    description: str
    rows: Callable[..., RowScores] | None = None
    squares_gradients: bool = False


# The registry. A new score is an entry here and its test in tests/method/test_scores.py; the YAML key, the PEFT config,
# calibration, the choice of supports and the help texts read it.
SCORES: dict[str, Score] = {
    "wanda": Score("norms", "|W|·‖X‖₂", wanda_rows),
    "magnitude": Score("weight", "|W|", magnitude_rows),
    "activation": Score("norms", "‖X‖₂", activation_rows),
    "gradient": Score("gradients", "|∂L/∂W| of training batches (SIFT)"),
    "squared_gradient": Score("gradients", "(∂L/∂W)² of training batches (RoSA)", squares_gradients=True),
}
MASK_SCORES = tuple(SCORES)

# The type of `mask_score` in configs: one of the names above, which a type checker cannot read from a dict.
if TYPE_CHECKING:
    MaskScore = str
else:
    MaskScore = Literal[MASK_SCORES]


def describe_scores() -> str:
    """All scores with their formulas, in one line for help texts."""
    return ", ".join(f"{name}: {score.description}" for name, score in SCORES.items())
