"""Per-weight scores that order a layer's weights (paper, section 3.2): tensor in, tensor out, always fp32.

W has shape (c, b) = (out_features, in_features); a score has the shape of W.
"""

import torch
from torch import Tensor

MASK_SCORES = ("wanda", "magnitude")


def magnitude_score(weight: Tensor, *, layer: str = "layer") -> Tensor:
    """B_ij = |W_ij| (the PaFi-style rule).

    Args:
        weight: (c, b), any floating dtype.
        layer: the layer's name, for error messages.

    Returns:
        (c, b) fp32.

    Raises:
        ValueError: a weight is NaN or infinite.
    """
    score = weight.detach().to(torch.float32, copy=True).abs_()
    _check_finite(score, layer, "its weight", "repair or re-download the base model")
    return score


def wanda_score(weight: Tensor, activation_norm: Tensor, *, layer: str = "layer") -> Tensor:
    """A_ij = |W_ij|·‖X_j‖₂, where X_j holds feature j of the layer's input over all calibration tokens.

    Args:
        weight: (c, b), any floating dtype.
        activation_norm: (b,), ‖X_j‖₂ per input feature.
        layer: the layer's name, for error messages.

    Returns:
        (c, b) fp32.

    Raises:
        ValueError: a weight or a norm is NaN or infinite, or the norm's shape is not (b,).
    """
    if tuple(activation_norm.shape) != (weight.shape[1],):
        raise ValueError(
            f"{layer}: activation norms of shape {tuple(activation_norm.shape)} do not fit a weight of shape "
            f"{tuple(weight.shape)}; they were made for another model, calibrate this one."
        )
    norm = activation_norm.to(device=weight.device, dtype=torch.float32)
    _check_finite(norm, layer, "its activation norms", "calibrate again with a model and text that give finite values")
    score = magnitude_score(weight, layer=layer).mul_(norm)
    _check_finite(score, layer, "its scores |W|·‖X‖", "the products overflow fp32: check the base model and the norms")
    return score


def check_weight(weight: Tensor, *, layer: str) -> None:
    """Raise ValueError if a weight is NaN or infinite."""
    _check_finite(weight.detach(), layer, "its weight", "repair or re-download the base model")


def _check_finite(tensor: Tensor, layer: str, what: str, remedy: str) -> None:
    bad = tensor.numel() - int(torch.isfinite(tensor).sum())
    if bad:
        raise ValueError(f"{layer}: {what} hold {bad:,} NaN or infinite values of {tensor.numel():,}; {remedy}.")
