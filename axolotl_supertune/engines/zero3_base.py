"""A base that was loaded under DeepSpeed's `zero.Init`: what else it has become than by a plain load, put right.

`zero.Init` gives one dtype to every floating tensor that is made while a model is built, and not to its parameters
alone: RoPE's frequencies, which models compute in fp32, come out of a bf16 load rounded to bf16.
"""

import copy
import re
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.initialization import no_init_weights
from transformers.modeling_utils import local_torch_dtype, set_zero3_state

from ..method.layerwise import decoder_layers
from .sharding import by_zero3, dtype_of, shape_of

_REMEDY = "Use ZeRO-1 or ZeRO-2, FSDP2 or DDP for this model."


def put_right(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Give a model the buffers of a plain load, in dtype and value, if ZeRO-3 shards it.

    Args:
        model: as `from_pretrained` returned it.
        dtype: that it was loaded in.

    Raises:
        ValueError: names the parameter or buffer that is of another dtype than a plain load gives it, or of another
            shape, and cannot be computed anew because it comes out of the checkpoint.
    """
    if not by_zero3(model):
        return
    plain = _plain(model, dtype)
    kept = _kept_in_fp32(plain, dtype)
    expected = dict(plain.named_parameters(remove_duplicate=False))
    for name, parameter in model.named_parameters(remove_duplicate=False):
        _check(name, parameter, expected, kept)
    buffers = dict(plain.named_buffers(remove_duplicate=False))
    computed = {name for name, _ in plain.named_non_persistent_buffers(remove_duplicate=False)}
    found = dict(model.named_buffers(remove_duplicate=False))
    for name, buffer in found.items():
        if name not in computed:
            _check(name, buffer, buffers, kept)
            continue
        owner, _, own_name = name.rpartition(".")
        model.get_submodule(owner)._buffers[own_name] = buffers[name].to(buffer.device)
    if computed - found.keys():
        raise ValueError(f"{min(computed - found.keys())}: ZeRO-3 loads the base model without this buffer. {_REMEDY}")


def gather_at_once(model: nn.Module) -> None:
    """Have ZeRO-3 gather and free a decoder layer in one go, once for all that is in it; before `initialize`.

    DeepSpeed's hooks around every module inside take a good part of the host's time in a step. Of a list of
    decoder layers those up to the first that trains something stay as they are: where a layer's input needs no
    gradient DeepSpeed reduces its gradients before they are there. A layer that is gathered at once must be passed
    backward before it is passed forward again, but for checkpointing.
    """
    inside_list = {
        id(child): id(parent) for parent in model.modules() if isinstance(parent, nn.ModuleList) for child in parent
    }
    trained: set[int] = set()
    for block in decoder_layers(model)[0]:
        parent = inside_list.get(id(block))
        if parent is None:
            continue
        if parent in trained:
            from deepspeed.utils import set_z3_leaf_module

            set_z3_leaf_module(block, True)
        elif any(parameter.requires_grad for parameter in block.parameters()):
            trained.add(parent)


def _check(name: str, tensor: Tensor, expected: dict[str, Tensor], kept: Any) -> None:
    if name not in expected:
        raise ValueError(f"{name}: a plain load of the base model has no such tensor. {_REMEDY}")
    dtype = torch.float32 if kept(name) else expected[name].dtype
    if (dtype_of(tensor), shape_of(tensor)) != (dtype, expected[name].shape):
        raise ValueError(
            f"{name}: ZeRO-3 loads it as {dtype_of(tensor)} of shape {tuple(shape_of(tensor))}, a plain load as "
            f"{dtype} of shape {tuple(expected[name].shape)}: it would train on another base model. {_REMEDY}"
        )


def _plain(model: PreTrainedModel, dtype: torch.dtype) -> Any:
    """The model as a plain load builds it: buffers on the CPU, weights on the meta device."""
    # `set_zero3_state` keeps models inside this one from being built under zero.Init.
    with torch.random.fork_rng(devices=[]):
        with set_zero3_state(), local_torch_dtype(dtype), no_init_weights(), init_empty_weights(include_buffers=False):
            plain = type(model)(copy.deepcopy(model.config))
        # A plain load computes what is not in the checkpoint after it has read that, and outside of the model's dtype.
        for tensor in plain.state_dict(keep_vars=True).values():
            tensor._is_hf_initialized = True
        plain.initialize_weights()
    return plain


def _kept_in_fp32(plain: Any, dtype: torch.dtype) -> Any:
    """A function: name → whether transformers loads it in fp32 whatever the model's dtype."""
    patterns = [re.compile(glob.replace("*", ".*")) for glob in plain._get_dtype_plan(dtype)]
    return lambda name: any(pattern.search(name) for pattern in patterns)
