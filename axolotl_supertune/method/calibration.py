"""Activation norms ‖X_j‖₂ of the layers of a frozen model (paper, algorithm super_mask_generation, step 2).

One forward pass with a pre-hook per layer; each hook sums the squares of its input in fp32 and makes no copy of the
input. No logits are computed unless the output layer itself is asked for. The device is waited for at the end alone
(and in a batch whose attention mask lies on it). The batches' sums are added up in fp64: in which order, and in which
of several processes, shows in none of the fp32 norms but by a rare last bit.
"""

import contextlib
import json
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from .activation_norms import (
    ActivationNorms,
    ReadParameter,
    _model_name,
    _some,
    _to_host,
    model_fingerprint,
    plain_parameter,
)

_RUN = 512  # tokens whose squares are summed in one go

Batch = Tensor | Mapping[str, Any]


def calibrate(
    model: nn.Module,
    batches: Iterable[Batch],
    *,
    layers: Sequence[str] | None = None,
    provenance: Mapping[str, Any] | None = None,
    uncounted: Iterable[Batch] = (),
    total_tokens: int | None = None,
    progress: bool = True,
    sum_processes: Callable[[Tensor], Tensor] | None = None,
    read: ReadParameter = plain_parameter,
) -> ActivationNorms:
    """Run the frozen model over `batches` once and return ‖X_j‖₂ of every layer's input.

    The model is run in eval mode under no_grad and left in the mode it was in.

    Args:
        model: a transformers model or any module; not yet wrapped by PEFT.
        batches: token ids (batch, length), or mappings with `input_ids` and optionally `attention_mask`
            (positions with mask 0 are left out), or whatever a non-transformers module's forward takes.
            Batches are moved to the model's device.
        layers: names of the layers to observe; default all `nn.Linear` but the output embedding.
        provenance: what to record beside the norms (dataset, seed, …); model name, samples and tokens are added.
        uncounted: batches that are run and not looked at: processes that hold a model together
            (`layer_by_layer.gathered_in_turn`) must all run as many.
        total_tokens: how many tokens the batches hold, if known, for the bar.
        progress: show a bar with tokens per second.
        sum_processes: where several processes take a part of the batches each (one may get none): gives the sum over
            all of them of a CPU vector (n,) fp64. Every process then returns the norms of all batches.
        read: how the model's parameters are read, see `ReadParameter`.

    Raises:
        ValueError: no batch, an unknown layer, a layer that saw no token, or a sum that is NaN or infinite.
    """
    if any(hasattr(module, "base_layer") for module in model.modules()):
        raise ValueError("calibrate takes the base model, before get_peft_model: this one already holds adapters.")
    if isinstance(layers, str) or isinstance(batches, Tensor):
        raise TypeError("layers is a list of names, and batches an iterable of batches: windows.split(8), not windows.")
    modules = dict(model.named_modules())
    names = default_layers(model) if layers is None else list(dict.fromkeys(layers))
    unknown = [name for name in names if not isinstance(modules.get(name), nn.Linear)]
    if not names or unknown:
        raise ValueError(f"no layer to calibrate: {_some(unknown) if unknown else 'the model has no nn.Linear'}.")

    sums = _SquareSums()
    runner = _without_head(model, names)
    device = next(model.parameters()).device
    samples = tokens = 0
    hooks = [modules[name].register_forward_pre_hook(sums.hook(name), with_kwargs=True) for name in names]
    try:
        with (
            _eval_mode(model),
            torch.inference_mode(False),
            torch.no_grad(),
            tqdm(desc="Calibrating", total=total_tokens, unit="tok", unit_scale=True, disable=not progress) as bar,
        ):
            for batch in batches:
                inputs = _to_device(batch, device)
                shape = _ids(inputs).shape
                real_tokens = sums.start(batch, shape)
                _run(runner, inputs)
                samples += shape[0]
                tokens += real_tokens
                bar.update(real_tokens)
            for hook in hooks:
                hook.remove()
            for batch in uncounted:
                _run(runner, _to_device(batch, device))
    finally:
        for hook in hooks:
            hook.remove()
    totals = sums.totals({name: modules[name].in_features for name in names})
    if sum_processes is not None:
        totals = totals.summed(sum_processes)
        samples, tokens = (int(each) for each in sum_processes(torch.tensor([samples, tokens], dtype=torch.float64)))
    if tokens == 0:
        raise ValueError("no calibration token was given: calibrate needs at least one batch that is not all padding.")

    norms = totals.norms()
    fingerprint = model_fingerprint(model, read)
    if fingerprint is None:
        raise ValueError("the model's weights are on the meta device: calibration needs real weights.")
    record = {"model": _model_name(model), "samples": samples, "tokens": tokens, **(provenance or {})}
    return ActivationNorms(norms, fingerprint, json.loads(json.dumps(record, default=str)))


def default_layers(model: nn.Module) -> list[str]:
    """Names of all `nn.Linear` of the model but its output embedding."""
    find_head: Any = getattr(model, "get_output_embeddings", None)
    head = find_head() if find_head is not None else None
    return [
        name for name, module in model.named_modules() if isinstance(module, nn.Linear) and name and module is not head
    ]


class _SquareSums:
    """Running Σ x² per input feature, one fp64 vector a layer, and the hooks that feed it."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        # Where the batch is padded: the shape of its mask, and the positions that count, flattened, on the mask's
        # device and on those of the layers.
        self._mask_shape: torch.Size | None = None
        self._real: dict[torch.device, Tensor] = {}
        # q, k and v (gate and up) are called with one and the same tensor: its squares are summed once. The version
        # tells a tensor that was changed in place since; the weak reference lets the model free it when it would.
        self._last: tuple[weakref.ref[Tensor], int, Tensor] | None = None

    def start(self, batch: Batch, shape: torch.Size) -> int:
        """Note a new batch's padding; `shape` is that of its token ids. Returns how many of its positions count."""
        self._last, self._mask_shape = None, None
        mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
        if mask is None:
            return shape[:2].numel()
        real = mask.reshape(-1).nonzero().squeeze(1)
        if len(real) < mask.numel():
            self._mask_shape, self._real = mask.shape, {real.device: real}
            return len(real)
        return shape[:2].numel()

    def hook(self, name: str) -> Any:
        def observe(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            x = args[0] if args else kwargs["input"]
            version = x._version
            if self._last is None or self._last[0]() is not x or self._last[1] != version:
                self._last = (weakref.ref(x), version, self._square_sum(x.detach(), name))
            square_sum = self._last[2]
            # (Apple's GPUs have no fp64.)
            wide = square_sum if square_sum.device.type == "mps" else square_sum.double()
            self._sums[name] = self._sums[name] + wide if name in self._sums else wide

        return observe

    def _square_sum(self, x: Tensor, name: str) -> Tensor:
        tokens = x.reshape(-1, x.shape[-1])
        if self._mask_shape is None:
            return _square_sum(tokens)
        if x.shape[:-1] != self._mask_shape and (x.dim() != 2 or len(x) != self._mask_shape.numel()):
            raise ValueError(
                f"{name}: input of shape {tuple(x.shape)} cannot be matched to the padding of a batch of shape "
                f"{tuple(self._mask_shape)}; calibrate on windows of full length, without padding."
            )
        if x.device not in self._real:
            self._real[x.device] = next(iter(self._real.values())).to(x.device)
        real = self._real[x.device]
        # A few runs at a time: all at once would copy the input.
        total = torch.zeros(x.shape[-1], dtype=torch.float32, device=x.device)
        for part in real.split(4 * _RUN):
            total += _square_sum(tokens.index_select(0, part))
        return total

    def totals(self, widths: Mapping[str, int]) -> "_Totals":
        """What was summed for layers of these widths, on the CPU."""
        reached = [name for name in widths if name in self._sums]
        found = dict(zip(reached, _to_host([self._sums[name].double() for name in reached]), strict=True))
        return _Totals({name: found.get(name, torch.zeros(width).double()) for name, width in widths.items()}, reached)


@dataclass
class _Totals:
    """Σ x² per layer, (in_features,) fp64 on the CPU, and the layers that any token reached."""

    sums: dict[str, Tensor]
    reached: list[str]

    def summed(self, sum_processes: Callable[[Tensor], Tensor]) -> "_Totals":
        """The totals of all processes."""
        here = torch.tensor([name in self.reached for name in self.sums]).double()
        sizes = [len(self.sums), *(each.numel() for each in self.sums.values())]
        reached, *sums = sum_processes(torch.cat([here, *self.sums.values()])).split(sizes)
        names = list(self.sums)
        together = [name for name, count in zip(names, reached.tolist(), strict=True) if count]
        return _Totals(dict(zip(names, sums, strict=True)), together)

    def norms(self) -> dict[str, Tensor]:
        """‖X_j‖₂ of the layers, (in_features,) fp32.

        Raises:
            ValueError: a layer that saw no token, or a sum that is NaN or infinite.
        """
        for name, total in self.sums.items():
            if name not in self.reached:
                raise ValueError(
                    f"{name}: no calibration token reached this layer; leave it out of the target modules."
                )
            if not bool(torch.isfinite(total).all()):
                raise ValueError(
                    f"{name}: the calibration activations are NaN or infinite; check the base model and its dtype "
                    "(fp16 overflows where bf16 does not)."
                )
        return {name: total.sqrt().float() for name, total in self.sums.items()}


def _square_sum(tokens: Tensor) -> Tensor:
    """Σ x² over the rows of (tokens, features), (features,) fp32.

    `vector_norm` reads bf16 and adds up in fp32 without an fp32 copy of its input (on a GPU). A CPU adds one token to
    the next, and over tens of thousands of them the rounding would show in the fifth digit: so runs of 512 are summed
    first, and then the runs.
    """
    dtype = torch.promote_types(tokens.dtype, torch.float32)
    whole = len(tokens) - len(tokens) % _RUN
    parts = [tokens[:whole].unflatten(0, (-1, _RUN)), tokens[whole:].unsqueeze(0)]
    squares = [torch.linalg.vector_norm(part, dim=1, dtype=dtype).square().sum(0) for part in parts if part.numel()]
    return sum(squares, start=torch.zeros(tokens.shape[1], dtype=dtype, device=tokens.device)).to(torch.float32)


def _run(runner: nn.Module, inputs: Batch) -> None:
    cached = {"use_cache": False} if hasattr(runner, "config") else {}
    if isinstance(inputs, Mapping):
        runner(**{**inputs, **cached})
    elif cached:
        runner(input_ids=inputs, **cached)
    else:
        runner(inputs)


def _without_head(model: nn.Module, names: Sequence[str]) -> nn.Module:
    """The transformer without its output layer where every observed layer lies inside it, else the model."""
    prefix = getattr(model, "base_model_prefix", "")
    body = getattr(model, prefix, None) if prefix else None
    if isinstance(body, nn.Module) and all(name.startswith(f"{prefix}.") for name in names):
        return body
    return model


@contextlib.contextmanager
def _eval_mode(model: nn.Module) -> Iterator[None]:
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training


def _to_device(batch: Batch, device: torch.device) -> Batch:
    if isinstance(batch, Tensor):
        return batch.to(device)
    if not isinstance(batch, Mapping):
        raise TypeError(f"a calibration batch is a tensor of token ids or a mapping, not a {type(batch).__name__}.")
    return {name: value.to(device) if isinstance(value, Tensor) else value for name, value in batch.items()}


def _ids(inputs: Batch) -> Tensor:
    if isinstance(inputs, Tensor):
        return inputs
    if "input_ids" in inputs:
        return inputs["input_ids"]
    return next(value for value in inputs.values() if isinstance(value, Tensor))
