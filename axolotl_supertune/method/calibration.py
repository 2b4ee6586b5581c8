"""Calibration: activation norms ‖X_j‖₂ of a frozen model's layers (paper, algorithm super_mask_generation, step 2).

The model runs once over the calibration batches. A forward pre-hook per layer adds up the squares of its input in fp32,
without a copy of the input; the sums of the batches are added in fp64, so that neither the order of the batches nor
their distribution over processes changes the fp32 norms, except rarely in the last bit. Logits are only computed if the
output layer is calibrated. The host waits for the device once, at the end (and in a batch whose mask is on the device).
"""

import contextlib
import json
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from tqdm import tqdm

from .activation_norms import ActivationNorms, ReadParameter, model_fingerprint, plain_parameter
from .messages import listed
from .transfers import to_cpu

# Tokens whose squares are added in one run, then the sums of the runs. On a CPU tokens are added one by one in fp32,
# and over tens of thousands of them rounding would affect the fifth digit.
_TOKENS_PER_SUM = 512

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
    """Run the frozen model over `batches` once and return ‖X_j‖₂ of the input of each layer.

    The model runs in eval mode under no_grad; its modes are restored afterwards.

    Args:
        model: a transformers model or any module, not yet wrapped by PEFT.
        batches: token ids (batch, length); or mappings with `input_ids` and optionally `attention_mask` (positions with
            mask 0 do not count); or, for other modules, what their forward takes. Moved to the model's device.
        layers: names of the layers to observe; default all `nn.Linear` except the output layer.
        provenance: recorded with the norms (dataset, seed, …), beside the model's name, samples and tokens.
        uncounted: batches run only to take part in gathering; their inputs are not measured. Processes that share a
            model (`layerwise.gathered_in_turn`) must all run the same number of batches.
        total_tokens: number of tokens in `batches` if known, for the progress bar.
        progress: show a progress bar with tokens per second.
        sum_processes: sums a CPU fp64 vector (n,) over all processes, where each has a part of the batches (possibly
            none). Every process then returns the norms over all batches.
        read: reads the model's parameters for the fingerprint, see `ReadParameter`.

    Raises:
        ValueError: no batch, an unknown layer, a layer that saw no token, or a sum that is NaN or infinite.
        TypeError: `layers` is a string, or `batches` a single tensor.
    """
    if any(hasattr(module, "base_layer") for module in model.modules()):
        raise ValueError("calibrate takes the base model, before get_peft_model: this one already holds adapters.")
    if isinstance(layers, str) or isinstance(batches, Tensor):
        raise TypeError("layers is a list of names, and batches an iterable of batches: windows.split(8), not windows.")
    observed = _observed_layers(model, layers)
    sums = _SquareSums()
    hooks = [layer.register_forward_pre_hook(sums.hook(name), with_kwargs=True) for name, layer in observed.items()]
    try:
        with tqdm(desc="Calibrating", total=total_tokens, unit="tok", unit_scale=True, disable=not progress) as bar:
            samples, tokens = _run_batches(model, list(observed), batches, uncounted, sums, hooks, bar)
    finally:
        for hook in hooks:
            hook.remove()
    totals = sums.totals({name: layer.in_features for name, layer in observed.items()})
    if sum_processes is not None:
        totals = totals.summed(sum_processes)
        counts = sum_processes(torch.tensor([samples, tokens], dtype=torch.float64))
        samples, tokens = (int(count) for count in counts)
    if tokens == 0:
        raise ValueError("no calibration token was given: calibrate needs at least one batch that is not all padding.")

    norms = totals.norms()
    fingerprint = model_fingerprint(model, read)
    if fingerprint is None:
        raise ValueError("the model's weights are on the meta device: calibration needs real weights.")
    record = {"model": _model_name(model), "samples": samples, "tokens": tokens, **(provenance or {})}
    return ActivationNorms(norms, fingerprint, json.loads(json.dumps(record, default=str)))


def default_layers(model: nn.Module) -> list[str]:
    """Names of all `nn.Linear` of the model except its output layer."""
    get_head: Any = getattr(model, "get_output_embeddings", None)
    head = get_head() if get_head is not None else None
    return [
        name for name, module in model.named_modules() if isinstance(module, nn.Linear) and name and module is not head
    ]


def _model_name(model: nn.Module) -> str:
    """Name or path that a model was loaded from, or its class."""
    return getattr(getattr(model, "config", None), "_name_or_path", "") or type(model).__name__


def _observed_layers(model: nn.Module, names: Sequence[str] | None) -> dict[str, nn.Linear]:
    """The layers of these names; ValueError if there is none, or one is unknown or not an `nn.Linear`."""
    modules = dict(model.named_modules())
    names = default_layers(model) if names is None else list(dict.fromkeys(names))
    unknown = [name for name in names if not isinstance(modules.get(name), nn.Linear)]
    if not names or unknown:
        raise ValueError(f"no layer to calibrate: {listed(unknown) if unknown else 'the model has no nn.Linear'}.")
    return {name: modules[name] for name in names}


def _run_batches(
    model: nn.Module,
    names: Sequence[str],
    batches: Iterable[Batch],
    uncounted: Iterable[Batch],
    sums: "_SquareSums",
    hooks: Sequence[RemovableHandle],
    bar: Any,
) -> tuple[int, int]:
    """Run all batches, the uncounted ones without hooks. Returns the samples and tokens that were counted."""
    runner = _without_head(model, names)
    device = next(model.parameters()).device
    samples = tokens = 0
    with _eval_mode(model), torch.inference_mode(False), torch.no_grad():
        for batch in batches:
            inputs = _to_device(batch, device)
            ids = _ids(inputs)
            real_tokens = sums.start(batch, ids)
            _run(runner, inputs)
            samples += len(ids)
            tokens += real_tokens
            bar.update(real_tokens)
        for hook in hooks:
            hook.remove()
        for batch in uncounted:
            _run(runner, _to_device(batch, device))
    return samples, tokens


class _SquareSums:
    """Running Σ x² per input feature, one fp64 vector per layer, and the hooks that update it."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        # For a padded batch: the shape of its mask, and the flat positions that count, per device.
        self._mask_shape: torch.Size | None = None
        self._real: dict[torch.device, Tensor] = {}
        # The last input and its sum: q, k and v (gate and up) receive the identical tensor, so it is summed once. The
        # version detects changes in place; the weak reference does not keep the input alive.
        self._last: tuple[weakref.ref[Tensor], int, Tensor] | None = None

    def start(self, batch: Batch, ids: Tensor) -> int:
        """Begin a batch with these token ids. Returns how many positions are not padding."""
        self._last, self._mask_shape = None, None
        mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
        if mask is None:
            return _positions(ids)
        real = mask.reshape(-1).nonzero().squeeze(1)
        if len(real) < mask.numel():
            self._mask_shape, self._real = mask.shape, {real.device: real}
            return len(real)
        return _positions(ids)

    def hook(self, name: str) -> Any:
        """A forward pre-hook that adds the squares of a layer's input to the layer's sum."""

        def observe(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            x = args[0] if args else kwargs["input"]
            version = x._version
            if self._last is None or self._last[0]() is not x or self._last[1] != version:
                self._last = (weakref.ref(x), version, self._square_sum_without_padding(x.detach(), name))
            square_sum = self._last[2]
            # (Apple's GPUs have no fp64.)
            wide = square_sum if square_sum.device.type == "mps" else square_sum.double()
            self._sums[name] = self._sums[name] + wide if name in self._sums else wide

        return observe

    def _square_sum_without_padding(self, x: Tensor, name: str) -> Tensor:
        """Σ x² over the positions of x (…, features) that are not padding, (features,) fp32."""
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
        # In pieces: selecting all positions at once would copy the input.
        total = torch.zeros(x.shape[-1], dtype=torch.float32, device=x.device)
        for part in real.split(4 * _TOKENS_PER_SUM):
            total += _square_sum(tokens.index_select(0, part))
        return total

    def totals(self, widths: Mapping[str, int]) -> "_Totals":
        """The sums of the layers with these input widths, on the CPU."""
        reached = [name for name in widths if name in self._sums]
        sums = dict(zip(reached, to_cpu([self._sums[name].double() for name in reached]), strict=True))
        return _Totals({name: sums.get(name, torch.zeros(width).double()) for name, width in widths.items()}, reached)


@dataclass
class _Totals:
    """Σ x² per layer, (in_features,) fp64 on the CPU, and the names of the layers that saw a token."""

    sums: dict[str, Tensor]
    reached: list[str]

    def summed(self, sum_processes: Callable[[Tensor], Tensor]) -> "_Totals":
        """The totals over all processes."""
        is_reached = torch.tensor([name in self.reached for name in self.sums]).double()
        sizes = [len(self.sums), *(total.numel() for total in self.sums.values())]
        counts, *sums = sum_processes(torch.cat([is_reached, *self.sums.values()])).split(sizes)
        names = list(self.sums)
        reached = [name for name, count in zip(names, counts.tolist(), strict=True) if count]
        return _Totals(dict(zip(names, sums, strict=True)), reached)

    def norms(self) -> dict[str, Tensor]:
        """‖X_j‖₂ per layer, (in_features,) fp32.

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

    `vector_norm` accumulates bf16 in fp32 without an fp32 copy of its input (on a GPU).
    """
    dtype = torch.promote_types(tokens.dtype, torch.float32)
    whole = len(tokens) - len(tokens) % _TOKENS_PER_SUM
    parts = [tokens[:whole].unflatten(0, (-1, _TOKENS_PER_SUM)), tokens[whole:].unsqueeze(0)]
    squares = [torch.linalg.vector_norm(part, dim=1, dtype=dtype).square().sum(0) for part in parts if part.numel()]
    return sum(squares, start=torch.zeros(tokens.shape[1], dtype=dtype, device=tokens.device)).to(torch.float32)


def _run(runner: nn.Module, inputs: Batch) -> None:
    """One forward pass, without a key-value cache for transformers models."""
    no_cache = {"use_cache": False} if hasattr(runner, "config") else {}
    if isinstance(inputs, Mapping):
        runner(**{**inputs, **no_cache})
    elif no_cache:
        runner(input_ids=inputs, **no_cache)
    else:
        runner(inputs)


def _without_head(model: nn.Module, names: Sequence[str]) -> nn.Module:
    """The transformer without its output layer if all observed layers are inside it, else the model."""
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
    """The token ids, or for other modules the first tensor that they take."""
    if isinstance(inputs, Tensor):
        return inputs
    if "input_ids" in inputs:
        return inputs["input_ids"]
    return next(value for value in inputs.values() if isinstance(value, Tensor))


def _positions(ids: Tensor) -> int:
    """Number of tokens in token ids (batch, length) or in a floating input (batch, [length,] features)."""
    leading = ids.shape[:-1] if ids.is_floating_point() else ids.shape
    return leading[:2].numel()
