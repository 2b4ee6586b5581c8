"""Calibration of any base that the tuner adapts: plain, quantized or sharded."""

from collections.abc import Iterable
from typing import Any

from torch import nn

from ..method import calibration
from ..method.activation_norms import ActivationNorms
from ..method.calibration import Batch
from .base_model import read_parameter
from .quantization import bnb


def calibrate(model: nn.Module, batches: Iterable[Batch], **options: Any) -> ActivationNorms:
    """`method.calibration.calibrate`, for quantized and sharded bases too; the arguments are the same."""
    bnb.keep_exact(model)
    return calibration.calibrate(model, batches, read=read_parameter, **options)
