"""Calibration of any base that the tuner adapts: plain, quantized or sharded."""

from collections.abc import Iterable
from typing import Any

from torch import nn

from ..method import calibration
from ..method.activation_norms import ActivationNorms
from ..method.calibration import Batch
from . import quantization
from .base_model import read_parameter


def calibrate(model: nn.Module, batches: Iterable[Batch], **options: Any) -> ActivationNorms:
    """`method.calibration.calibrate`, for quantized and sharded bases too; the arguments are the same."""
    quantization.prepare(model)
    return calibration.calibrate(model, batches, read=read_parameter, **options)
