"""SupraLayer: the adapters of one linear layer, exact merging and unmerging, and checks of checkpoints."""

import math
import warnings
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer, check_adapters_to_merge
from torch import Tensor, nn

from ..engines.sharding import is_whole, shape_of
from ..method.budget import LayerBudget
from ..method.support import index_dtype
from ..ops import LowRank, Sparse, merged_weight
from .peft_compat import BufferDict
from .weighted_sum import Combined

# An invalid index, in place of a support that a checkpoint will bring.
_NO_SUPPORT = -1


class SupraLayer(BaseTunerLayer):
    """State of all SUPRA adapters of one linear layer of shape (c, b).

    Per adapter: `supra_values` U on the support (s,) fp32, `supra_L` (c, r) fp32, `supra_R` (r, b) fp32, and the
    buffers `supra_indices` (s,) int32 or int64 and `supra_shape` [c, b] int32. A part without parameters has no entry.
    """

    adapter_layer_names: tuple[str, ...] = ("supra_values", "supra_L", "supra_R")
    other_param_names: tuple[str, ...] = (
        "supra_indices",
        "supra_shape",
        "supra_budget",
        "supra_scaling",
        "supra_dropout",
        "pending_adapters",
    )

    def __init__(self, base_layer: nn.Linear, layer_name: str) -> None:
        self.base_layer = base_layer
        self.layer_name = layer_name
        self.out_features, self.in_features = base_layer.out_features, base_layer.in_features
        self.supra_values = nn.ParameterDict()
        self.supra_L = nn.ParameterDict()
        self.supra_R = nn.ParameterDict()
        self.supra_indices = BufferDict({}, persistent=True)
        self.supra_shape = BufferDict({}, persistent=True)
        self.supra_budget: dict[str, LayerBudget] = {}
        self.supra_scaling: dict[str, float] = {}
        self.supra_dropout: dict[str, float] = {}
        # Adapters whose tensors or support are yet to come (from a checkpoint, or chosen by gradient): they may be
        # neither run nor merged.
        self.pending_adapters: dict[str, bool] = {}
        self._disable_adapters = False
        self.merged_adapters: list[str] = []
        self._weight_before_merge: Tensor | None = None

    def update_layer(
        self,
        adapter_name: str,
        budget: LayerBudget,
        support: Tensor | None,
        *,
        awaits_checkpoint: bool = False,
        awaits_gradient: bool = False,
        lora_alpha: float,
        lora_dropout: float,
        init_weights: bool = True,
        inference_mode: bool = False,
    ) -> None:
        """Add an adapter, replacing one of the same name.

        Args:
            adapter_name: its name.
            budget: of this layer.
            support: (s,) sorted flat indices, or None if they are yet to come.
            awaits_checkpoint: a checkpoint will bring all tensors; until then the adapter is pending.
            awaits_gradient: `support` is a placeholder for one that will be chosen by gradient; until then the adapter
                is pending.
            lora_alpha, lora_dropout: α and the dropout of the low-rank part.
            init_weights: True: U and L start at zero. False: at random, for tests that need a non-zero change.
            inference_mode: the adapter will not be trained.
        """
        count, rank = budget.sparse_count, budget.rank
        if adapter_name in self.supra_budget:
            self.invalidate_caches()
            for store in (*self.adapter_layer_names, *self.other_param_names):
                if adapter_name in getattr(self, store):
                    del getattr(self, store)[adapter_name]
        self.supra_budget[adapter_name] = budget
        self.supra_shape[adapter_name] = torch.tensor([self.out_features, self.in_features], dtype=torch.int32)
        if awaits_checkpoint or (count and (awaits_gradient or support is None)):
            self.pending_adapters[adapter_name] = True
        if count:
            if support is None:
                support = torch.full((count,), _NO_SUPPORT, dtype=index_dtype(self.out_features * self.in_features))
            start = torch.zeros(count) if init_weights else torch.randn(count) * 0.1
            self.supra_values[adapter_name] = nn.Parameter(start)
            self.supra_indices[adapter_name] = support
        if rank:
            # Drawn in the order and with the calls of PEFT's LoRA, so that equal seeds give equal starts.
            R = nn.Linear(self.in_features, rank, bias=False).weight
            L = nn.Linear(rank, self.out_features, bias=False).weight
            nn.init.kaiming_uniform_(R, a=math.sqrt(5))
            if init_weights:
                nn.init.zeros_(L)
            self.supra_L[adapter_name], self.supra_R[adapter_name] = L, R
            self.supra_scaling[adapter_name] = lora_alpha / rank
            self.supra_dropout[adapter_name] = lora_dropout
        self._move_adapter_to_device_of_base_layer(adapter_name)
        self.set_adapter(self.active_adapters, inference_mode=inference_mode)

    def set_support(self, adapter_name: str, support: Tensor) -> None:
        """Replace the support of an adapter; U, L and R are kept.

        Args:
            adapter_name: the adapter.
            support: (s,) sorted flat indices, as many as before.
        """
        self.supra_indices[adapter_name] = support
        self.invalidate_caches()

    def _move_adapter_to_device_of_base_layer(self, adapter_name: str, device: torch.device | None = None) -> None:
        """Move one adapter to the device of the base weight, without a change of dtype.

        PEFT's version casts to the base's dtype, which would turn int32 indices into bf16 and round U, L and R.
        """
        target = device or self.get_base_layer().weight.device
        if target.type == "meta":
            # A base without memory: counting the parameters of its adapters needs none either.
            for parameters in (self.supra_values, self.supra_L, self.supra_R):
                if adapter_name in parameters:
                    parameters[adapter_name] = nn.Parameter(parameters[adapter_name].to(target))
            return
        for name in (*self.adapter_layer_names, "supra_indices", "supra_shape"):
            tensors = getattr(self, name)
            if adapter_name in tensors and not tensors[adapter_name].is_meta:
                tensors[adapter_name] = tensors[adapter_name].to(target)

    def set_tensors(self, adapter_name: str, combined: Combined) -> None:
        """Set the tensors of a combined adapter, which has the sizes of `combined`; L is divided by the layer's γ."""
        parts = {"values": combined.values, "L": combined.L, "R": combined.R}
        if combined.L is not None:
            parts["L"] = combined.L / self.supra_scaling[adapter_name]
        for part, tensor in parts.items():
            if tensor is not None:
                getattr(self, f"supra_{part}")[adapter_name].data.copy_(tensor)
        if combined.indices is not None:
            self.supra_indices[adapter_name] = combined.indices
        self.pending_adapters.pop(adapter_name, None)

    @abstractmethod
    def restore(self) -> None:
        """Undo the writing of U into the base weight, bit for bit; the next forward writes it again."""

    @abstractmethod
    def invalidate_caches(self) -> None:
        """`restore`, and drop caches that refer to tensors; before these are moved, replaced or removed."""

    def get_base_layer(self) -> Any:
        """The base layer, with its restored weight."""
        self.restore()
        return super().get_base_layer()

    def set_adapter(self, *args: Any, **kwargs: Any) -> None:
        """Make adapters active, as PEFT does, after `restore`."""
        self.restore()
        super().set_adapter(*args, **kwargs)

    def enable_adapters(self, enabled: bool) -> None:
        """Enable or disable adapters, as PEFT does, after `restore`."""
        self.restore()
        super().enable_adapters(enabled)

    def delete_adapter(self, adapter_name: str) -> None:
        """Remove an adapter, as PEFT does, after `invalidate_caches`."""
        self.invalidate_caches()
        super().delete_adapter(adapter_name)

    def sparse_parts(self, adapter_names: Sequence[str]) -> list[Sparse]:
        """M⊙U of those of the adapters that have a sparse part in this layer."""
        return [
            Sparse(self.supra_values[name], self.supra_indices[name])
            for name in adapter_names
            if name in self.supra_values
        ]

    def low_rank_parts(self, adapter_names: Sequence[str], *, training: bool = False) -> list[LowRank]:
        """γ·L·R of those of the adapters that have a low-rank part in this layer; dropout only if `training`."""
        return [
            LowRank(
                self.supra_L[name],
                self.supra_R[name],
                self.supra_scaling[name],
                self.supra_dropout[name] if training else 0.0,
            )
            for name in adapter_names
            if name in self.supra_L
        ]

    def get_delta_weight(self, adapter: str) -> Tensor:
        """M⊙U + γ·L·R as a dense (c, b) fp32 tensor."""
        shape, device = (self.out_features, self.in_features), self.get_base_layer().weight.device
        zero = torch.zeros(shape, dtype=torch.float32, device=device)
        return merged_weight(zero, self.sparse_parts([adapter]), self.low_rank_parts([adapter]))

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Write Ŵ into the base layer, rounded once; for λ = 0 it is bit for bit the weight used in training.

        For a layer with merged adapters, Ŵ is recomputed from the original weight with all of them.

        Args:
            safe_merge: check that the merged weight is finite.
            adapter_names: default the active adapters.

        Raises:
            ValueError: with `safe_merge`, if the merged weight would be NaN or infinite; nothing is written.
            RuntimeError: an adapter is pending.
        """
        names = check_adapters_to_merge(self, adapter_names)
        names = [name for name in names if name in self._available()]
        if not names:
            return
        self.check_loaded(names)
        merged = self.weight_with([*self.merged_adapters, *names])
        if safe_merge:
            self._check_merged(merged, names)
        base, before = self.get_base_layer(), self.base_weight()
        self._weight_before_merge = before
        base.weight.data = merged
        self.merged_adapters.extend(names)

    def check_merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Raise the error that `merge` with these arguments would raise; change nothing."""
        names = self.names_to_merge(adapter_names)
        self.check_loaded(names)
        if names and safe_merge:
            self._check_merged(self.weight_with([*self.merged_adapters, *names]), names)

    def names_to_merge(self, adapter_names: list[str] | None = None) -> list[str]:
        """Those of the given (default the active) adapters that this layer has and that are not merged yet."""
        names: Any = self.active_adapters if adapter_names is None else adapter_names
        return [name for name in names if name in self._available() and name not in self.merged_adapters]

    def base_weight(self) -> Tensor:
        """The original weight (c, b), without merged adapters, in the device and dtype of the present one."""
        weight: Tensor = self.get_base_layer().weight.data
        before = self._weight_before_merge
        return weight if before is None else before.to(device=weight.device, dtype=weight.dtype)

    def weight_with(self, adapter_names: list[str]) -> Tensor:
        """Ŵ (c, b) with these adapters, rounded once to the dtype of the base weight."""
        return merged_weight(self.base_weight(), self.sparse_parts(adapter_names), self.low_rank_parts(adapter_names))

    def _check_merged(self, merged: Tensor, adapter_names: list[str]) -> None:
        """Raise ValueError, in PEFT's words, if a merged weight is not finite."""
        if not bool(torch.isfinite(merged).all()):
            raise ValueError(
                f"{self.layer_name}: NaNs detected in the merged weights. The adapter {', '.join(adapter_names)} "
                "seems to be broken; nothing was merged."
            )

    def unmerge(self) -> None:
        """Restore the weight from before the first merge, bit for bit."""
        if not self.merged:
            warnings.warn("Already unmerged. Nothing to do.", stacklevel=2)
            return
        before = self._weight_before_merge
        assert before is not None, "a merged layer keeps its weight"
        weight = self.get_base_layer().weight
        weight.data = before.to(device=weight.device, dtype=weight.dtype)
        self._weight_before_merge = None
        self.merged_adapters.clear()

    def _available(self) -> set[str]:
        """Adapters with a sparse or a low-rank part in this layer."""
        return set(self.supra_values) | set(self.supra_L)

    def check_loaded(self, adapter_names: list[str]) -> None:
        """Raise RuntimeError if one of the adapters is pending."""
        missing = [name for name in adapter_names if self.pending_adapters.get(name)]
        if missing:
            raise RuntimeError(
                f"{self.layer_name}: adapter {missing[0]!r} is not loaded: no checkpoint has brought its tensors. "
                "Load it (PeftModel.from_pretrained), or make a new one, on real weights, with support='select'; where "
                "its support is chosen by gradient, call tuner.gradient.choose_supports first."
            )

    def check_checkpoint(self, state_dict: Mapping[str, Tensor], prefix: str) -> list[str]:
        """Names of the adapters that `state_dict` contains completely, after a check of all their tensors.

        Args:
            state_dict: of a checkpoint, with layers in format 0 (unpacked, see file_format.py).
            prefix: of this layer's keys.

        Raises:
            ValueError: an incomplete adapter; another layer shape or budget; a support that is not a strictly
                increasing sequence of indices inside the layer; the layer is merged and the checkpoint holds its weight
                or a merged adapter.
        """
        complete = []
        # Loading would leave the merged weight as it is, and a later unmerge would bring back the old one.
        merged = [f"supra_shape.{name}" for name in self.merged_adapters]
        if self.merged_adapters and any(prefix + key in state_dict for key in ("base_layer.weight", *merged)):
            raise ValueError(
                f"{self.layer_name}: adapter {', '.join(self.merged_adapters)} is merged here: call unmerge_adapter() "
                "before its tensors or the layer's weight are loaded."
            )
        for adapter in self.supra_shape:
            names = self.tensor_names(adapter)
            lost = [name for name in names if prefix + name not in state_dict]
            if len(lost) == len(names):
                continue
            if lost:
                raise ValueError(
                    f"{self.layer_name}: the checkpoint holds a part of adapter {adapter!r} but not its "
                    f"{lost[0].partition('.')[0]}: it is damaged, or was saved with another budget or supra_lambda."
                )
            shape = state_dict[f"{prefix}supra_shape.{adapter}"].tolist()
            if shape != [self.out_features, self.in_features]:
                raise ValueError(
                    f"{self.layer_name}: the adapter was made for a layer of shape {tuple(shape)}, this one is "
                    f"{(self.out_features, self.in_features)}: load it on the base model it was trained on."
                )
            for name in names:
                self._check_size(adapter, name, state_dict[prefix + name])
            if adapter in self.supra_indices:
                self._check_support(state_dict[f"{prefix}supra_indices.{adapter}"])
            complete.append(adapter)
        return complete

    def tensor_names(self, adapter_name: str) -> list[str]:
        """Names, relative to this layer, of all tensors of an adapter in a checkpoint."""
        stores = (*self.adapter_layer_names, "supra_indices", "supra_shape")
        return [f"{store}.{adapter_name}" for store in stores if adapter_name in getattr(self, store)]

    def _check_size(self, adapter: str, name: str, tensor: Tensor) -> None:
        """Raise ValueError unless a tensor of a checkpoint has the shape of the adapter's own."""
        store = name.partition(".")[0]
        own = getattr(self, store)[adapter]
        here, there = tuple(shape_of(own)), tuple(shape_of(tensor))
        # An engine that loads its shards itself passes emptied parameters here.
        if here != there and (is_whole(own) or there != (0,)):
            raise ValueError(
                f"{self.layer_name}: {store} has shape {there} in the checkpoint and {here} in adapter {adapter!r}: "
                "it was saved with another budget, supra_lambda or sparse_counts than its adapter_config.json says, or "
                "than the adapter that is to be replaced has."
            )

    def _check_support(self, indices: Tensor) -> None:
        """Raise ValueError unless indices are integers, strictly increasing, and inside the layer."""
        if indices.is_meta or not indices.numel():
            return
        size = self.out_features * self.in_features
        integers = not (indices.is_floating_point() or indices.is_complex())
        ordered = integers and bool((indices[1:] > indices[:-1]).all())
        if not ordered or int(indices[0]) < 0 or int(indices[-1]) >= size:
            raise ValueError(
                f"{self.layer_name}: the adapter's support is not a sorted set of indices below {size:,} "
                f"({indices.dtype}, from {indices.min().item()} to {indices.max().item()}): the checkpoint is damaged."
            )
