"""Activation norms ‖X_j‖₂ per layer: the file that stores them, and the check that they belong to a model.

`calibration` computes them.
"""

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import safetensors
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from .atomic_files import whole_file
from .messages import listed
from .transfers import to_cpu

FORMAT = "activation_norms"
FORMAT_VERSION = 1
_FINGERPRINT_SAMPLES = 64

ReadParameter = Callable[[Tensor], tuple[Sequence[Tensor], torch.Size]]
"""Parameter → 1-D tensors that identify its values, and its unsharded shape. For sharded and quantized parameters pass
`tuner.base_model.read_parameter`."""


def plain_parameter(parameter: Tensor) -> tuple[Sequence[Tensor], torch.Size]:
    """`ReadParameter` for parameters that are neither sharded nor quantized.

    Raises:
        TypeError: the parameter is sharded or quantized.
    """
    # Engines that shard by another type are told by it, those that empty the parameter by its shape.
    if type(parameter) not in (Tensor, nn.Parameter) or parameter.shape == (0,):
        raise TypeError(
            f"a {type(parameter).__name__} is sharded or quantized: pass read=axolotl_supertune.tuner.base_model."
            "read_parameter."
        )
    return [parameter.detach().reshape(-1)], parameter.shape


@dataclass
class ActivationNorms:
    """‖X_j‖₂ per layer, with the identity of the model and how they were computed.

    Attributes:
        norms: layer name (as in `model.named_modules()`) → (in_features,) fp32 on the CPU.
        fingerprint: identifies the model's weights, see `model_fingerprint`.
        provenance: how they were computed: model, dataset, seed, samples, sequence length, tokens.
    """

    norms: dict[str, Tensor]
    fingerprint: str
    provenance: dict[str, Any] = field(default_factory=dict)

    def __getitem__(self, layer: str) -> Tensor:
        try:
            return self.norms[layer]
        except KeyError:
            raise ValueError(
                f"{layer}: no activation norms for this layer; calibration covered {len(self.norms)} layers, "
                f"{listed(self.norms)}. Calibrate again with the target modules that you train."
            ) from None

    def check_model(
        self, model: nn.Module, source: str = "these activation norms", *, read: ReadParameter = plain_parameter
    ) -> None:
        """Raise ValueError unless the norms were computed on this model's weights.

        Args:
            model: the base model, adapted or not.
            source: subject of the error message.
            read: reads the model's parameters, see `ReadParameter`.
        """
        modules = dict(model.named_modules())
        missing = [layer for layer in self.norms if layer not in modules]
        if missing:
            raise ValueError(
                f"{source} were made for another model: this one has no layer {listed(missing)} "
                f"(made for {self.provenance.get('model', 'an unnamed model')}). Calibrate this model."
            )
        for layer, norm in self.norms.items():
            width = getattr(_base(modules[layer]), "in_features", None)
            if tuple(norm.shape) != (width,):
                raise ValueError(
                    f"{source} were made for another model: {layer} has {width} input features here, "
                    f"{norm.numel()} in the norms. Calibrate this model."
                )
            if not bool(torch.isfinite(norm).all()) or bool((norm < 0).any()) or not bool(norm.any()):
                raise ValueError(f"{source} are damaged: those of {layer} are not finite, negative or all zero.")
        fingerprint = model_fingerprint(model, read)
        if fingerprint is not None and fingerprint != self.fingerprint:
            raise ValueError(
                f"{source} were made for another model: its layers have the same shapes but other weights "
                f"(made for {self.provenance.get('model', 'an unnamed model')}; an fp16 copy is another one too). "
                "Calibrate this model."
            )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write one safetensors file, atomically."""
        header = {"version": FORMAT_VERSION, "fingerprint": self.fingerprint, "provenance": self.provenance}
        # A single metadata entry: safetensors writes several in no fixed order, but equal norms must give equal files.
        metadata = {FORMAT: json.dumps(header, sort_keys=True)}
        with whole_file(path) as temporary:
            save_file({name: norm.contiguous() for name, norm in self.norms.items()}, temporary, metadata)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "ActivationNorms":
        """Read a file that `save` wrote.

        Raises:
            FileNotFoundError: no such file.
            ValueError: not a safetensors file, truncated, or not a file of activation norms.
        """
        if not Path(path).is_file():
            raise FileNotFoundError(f"no file of activation norms at {path} (calibration_path).")
        try:
            with safetensors.safe_open(os.fspath(path), framework="pt") as opened:
                metadata = opened.metadata() or {}
                norms = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 (not a dict)
        except safetensors.SafetensorError as error:
            raise ValueError(
                f"{path} is not a readable safetensors file ({error}); delete it and calibrate again."
            ) from error
        if FORMAT not in metadata:
            raise ValueError(f"{path} is a safetensors file but holds no activation norms; calibration_path wants one.")
        try:
            header = json.loads(metadata[FORMAT])
            version, fingerprint, provenance = (header[key] for key in ("version", "fingerprint", "provenance"))
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f"{path} has a damaged header ({error!r}); delete it and calibrate again.") from error
        if version != FORMAT_VERSION:
            raise ValueError(
                f"{path} has version {version} of its format, this package reads {FORMAT_VERSION}; "
                "update axolotl-supertune or calibrate again."
            )
        return cls(norms, fingerprint, dict(provenance))


def model_fingerprint(model: nn.Module, read: ReadParameter = plain_parameter) -> str | None:
    """sha256 over the name, shape and 64 evenly spaced entries, rounded to bf16, of every base parameter.

    All parameters are included, since all influence the activations. The rounding gives a checkpoint the same
    fingerprint in fp32 and in bf16. Adapters on the model are ignored. `read` gathers sharded parameters one at a time;
    then every process must call this.

    Returns:
        The hex digest, or None if a weight is on the meta device.
    """
    wrapped = tuple(f"{name}." for name, module in model.named_modules() if hasattr(module, "base_layer"))
    labels, samples = [], []
    for name, parameter in sorted(model.named_parameters()):
        if ".modules_to_save." in name or (name.startswith(wrapped) and ".base_layer." not in name):
            continue
        if parameter.is_meta:
            return None
        plain = name.replace(".base_layer.", ".").replace(".original_module.", ".")
        values, shape = read(parameter)
        for flat in values:
            step = max(1, flat.numel() // _FINGERPRINT_SAMPLES)
            # A copy: a view would keep the whole gathered parameter in memory.
            samples.append(flat[::step][:_FINGERPRINT_SAMPLES].to(torch.bfloat16, copy=True))
            labels.append(f"{plain}{tuple(shape)}")
    digest = hashlib.sha256()
    for label, sample in zip(labels, to_cpu(samples), strict=True):
        digest.update(label.encode())
        digest.update(sample.view(torch.int16).numpy().tobytes())
    return digest.hexdigest()


def _base(module: nn.Module) -> Any:
    """The layer itself, without an adapter around it."""
    return getattr(module, "base_layer", module)
