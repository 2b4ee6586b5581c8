"""Per-weight scores that order a layer's weights (paper, section 3.2): tensor in, tensor out, always fp32.

W has shape (c, b) = (out_features, in_features); a score has the shape of W.
"""

from collections.abc import Callable

import torch
from torch import Tensor

# Scores of training batches (`gradients.gradient_scores`), which no weight alone can tell.
GRADIENT_SCORES = ("gradient", "squared_gradient")
# Scores that need activation norms.
NORM_SCORES = ("wanda", "activation")
MASK_SCORES = ("wanda", "magnitude", "activation", *GRADIENT_SCORES)


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
    return score_rows(weight, layer=layer)(0, len(weight))


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
    return score_rows(weight, activation_norm, layer=layer)(0, len(weight))


def activation_score(weight: Tensor, activation_norm: Tensor, *, layer: str = "layer") -> Tensor:
    """‖X_j‖₂ in every row: the wanda score without the weight, so that a support is made of columns.

    Args, returns and raises: as `wanda_score`.
    """
    return activation_rows(weight, activation_norm, layer=layer)(0, len(weight)).contiguous()


def activation_rows(weight: Tensor, activation_norm: Tensor, *, layer: str = "layer") -> Callable[[int, int], Tensor]:
    """`activation_score`, a block of rows at a time, as `score_rows`; the weight is only checked."""
    norm = _norm(weight, activation_norm, layer)
    check_weight(weight, layer=layer)
    return lambda start, stop: norm.expand(stop - start, -1)


def score_rows(
    weight: Tensor, activation_norm: Tensor | None = None, *, layer: str = "layer"
) -> Callable[[int, int], Tensor]:
    """The score of a layer, a block of rows at a time: `wanda_score` given norms, else `magnitude_score`.

    Everything is checked here, once; no tensor of the weight's size is made, here or by the function returned.

    Args:
        weight: (c, b), any floating dtype; read at every call of the function.
        activation_norm: (b,), ‖X_j‖₂ per input feature, or None.
        layer: the layer's name, for error messages.

    Returns:
        A function (start, stop) → the scores of these rows, (stop − start, b) fp32.

    Raises:
        ValueError: as `wanda_score` and `magnitude_score`.
    """
    weight = weight.detach()
    norm: Tensor | None = None
    if activation_norm is not None:
        norm = _norm(weight, activation_norm, layer)

    def rows(start: int, stop: int) -> Tensor:
        score = weight[start:stop].to(torch.float32, copy=True).abs_()
        return score if norm is None else score.mul_(norm)

    largest = check_weight(weight, layer=layer)
    if norm is not None and norm.numel() and not bool(torch.isfinite(largest * norm.abs().max())):
        # No product is larger than that one, but the two factors may not meet: look at the scores themselves.
        remedy = "the products overflow fp32: check the base model and the norms"
        _check_finite(rows(0, len(weight)), layer, "its scores |W|·‖X‖", remedy)
    return rows


def _norm(weight: Tensor, activation_norm: Tensor, layer: str) -> Tensor:
    """The norms beside the weight, fp32, found to fit it and finite."""
    if tuple(activation_norm.shape) != (weight.shape[1],):
        raise ValueError(
            f"{layer}: activation norms of shape {tuple(activation_norm.shape)} do not fit a weight of shape "
            f"{tuple(weight.shape)}; they were made for another model, calibrate this one."
        )
    norm = activation_norm.to(device=weight.device, dtype=torch.float32)
    _check_finite(norm, layer, "its activation norms", "calibrate again with a model and text that give finite values")
    return norm


def check_weight(weight: Tensor, *, layer: str) -> Tensor:
    """The largest |W_ij|, a 0-dim fp32 tensor; ValueError if a weight is NaN or infinite, or is so in fp32."""
    return _check_finite(weight.detach(), layer, "its weight", "repair or re-download the base model")


def _check_finite(tensor: Tensor, layer: str, what: str, remedy: str) -> Tensor:
    if not tensor.numel():
        return torch.zeros((), device=tensor.device)
    # NaN and infinity survive in the extremes, which take one read of the tensor and no temporary of its size.
    largest = torch.stack(torch.aminmax(tensor)).to(torch.float32).abs().max()
    if not bool(torch.isfinite(largest)):
        bad = tensor.numel() - int(torch.isfinite(tensor.to(torch.float32)).sum())
        raise ValueError(f"{layer}: {what} hold {bad:,} NaN or infinite values of {tensor.numel():,}; {remedy}.")
    return largest
