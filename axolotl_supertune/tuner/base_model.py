"""The dtype that a base model was loaded in, and reading its parameters whether sharded, quantized or neither."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ..engines import sharding
from .quantization import identifying_tensors

FLOAT_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def loaded_dtype(model: nn.Module) -> torch.dtype:
    """The dtype that a model was loaded in, before it was quantized: 8-bit weights are dequantized to it."""
    dtype = getattr(getattr(model, "config", None), "dtype", None)
    if isinstance(dtype, torch.dtype):
        return dtype
    dtypes = (each.dtype for each in model.parameters() if each.dtype in FLOAT_DTYPES and type(each) is nn.Parameter)
    return next(dtypes, torch.float16)  # what LLM.int8 computes in


def read_parameter(parameter: Tensor) -> tuple[Sequence[Tensor], torch.Size]:
    """`ReadParameter` of any base: gathers sharded parameters, and gives the packed values of quantized ones."""
    return identifying_tensors(sharding.whole(parameter)), sharding.shape_of(parameter)
