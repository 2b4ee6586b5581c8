"""SupraLinear: a linear layer with Ŵ = W + M⊙U + γ·L·R, any number of adapters, exact merge and unmerge."""

import math
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from peft.tuners._buffer_dict import BufferDict
from peft.tuners.tuners_utils import BaseTunerLayer, check_adapters_to_merge
from torch import Tensor, nn

from ..budget import LayerBudget
from ..ops import LowRank, Sparse, compute_dtype, merged_weight, sparse_linear, takes_kernels
from ..ops.choice import requested, takes_sampled_products, tensor_obstacle
from ..ops.reference import check_frozen
from ..ops.transient import BlockGradient, SampledGradient, SupportGradient, transient_linear
from ..sharded import gathered_weight, is_sharded, is_whole, shape_of
from ..support import index_dtype
from .checkpoint import unpack_whole
from .combine import Combined
from .compiled import number_of
from .known import Known

if TYPE_CHECKING:  # Triton may be absent
    from ..ops.fused import Group
    from ..ops.fused import Layer as KernelLayer
    from ..ops.inplace import Entry, Sweep
    from ..ops.kernels import Plan
    from .shared import SharedInput

# An index that no layer has: room for a support that a checkpoint is still to bring.
_NO_SUPPORT = -1


class SupraLayer(BaseTunerLayer):
    """State of all SUPRA adapters of one linear layer of shape (c, b).

    Per adapter: `supra_values` U on the support (s,) fp32, `supra_L` (c, r) fp32, `supra_R` (r, b) fp32, and the
    buffers `supra_indices` (s,) and `supra_shape` [c, b]. A part that the budget leaves empty has no entry.
    """

    adapter_layer_names: tuple[str, ...] = ("supra_values", "supra_L", "supra_R")
    other_param_names: tuple[str, ...] = (
        "supra_indices",
        "supra_shape",
        "supra_budget",
        "supra_scaling",
        "supra_dropout",
        "supra_unloaded",
    )

    def __init__(self, base_layer: nn.Linear, layer: str) -> None:
        self.base_layer = base_layer
        self.supra_layer = layer
        self.out_features, self.in_features = base_layer.out_features, base_layer.in_features
        self.supra_values = nn.ParameterDict()
        self.supra_L = nn.ParameterDict()
        self.supra_R = nn.ParameterDict()
        self.supra_indices = BufferDict({}, persistent=True)
        self.supra_shape = BufferDict({}, persistent=True)
        self.supra_budget: dict[str, LayerBudget] = {}
        self.supra_scaling: dict[str, float] = {}
        self.supra_dropout: dict[str, float] = {}
        # Adapters whose tensors a checkpoint is still to bring: they may be neither run nor merged.
        self.supra_unloaded: dict[str, bool] = {}
        self._disable_adapters = False
        self.merged_adapters: list[str] = []
        self._weight_before_merge: Tensor | None = None
        # How the gradient of U is computed where the weight is not kept, by adapter, and the support it is made for.
        self._gradients: dict[str, tuple[Tensor, SupportGradient]] = {}
        # The fast path: what is written into the base weight, how its gradient is computed, who reads the same input.
        self._entry: Entry | None = None
        # One for training and one for evaluation: their dropouts differ.
        self._known: dict[bool, Known] = {}
        self._alone: dict[tuple[bool, bool], Group] = {}
        self._plans: dict[str, Plan] = {}
        self.sweep: Sweep | None = None
        self.shared_input: SharedInput | None = None
        self.shared_place = 0
        # Its name among the operators of torch.compile; none before `share_work`.
        self.number = -1
        self.compiled_groups: dict[int, Group] = {}

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
        """Add one adapter.

        Args:
            budget: of this layer.
            support: (s,) sorted flat indices, or None if it cannot be chosen here.
            awaits_checkpoint: a checkpoint will bring all tensors; until then the adapter is refused.
            awaits_gradient: `support` holds the place of one that is still to be chosen; until then the same.
            lora_alpha, lora_dropout: α and the dropout of the low-rank part.
            init_weights: U and L start at zero; False draws them, so that tests see a delta.
            inference_mode: the adapter is not to be trained.
        """
        count, rank = budget.sparse_count, budget.rank
        self.supra_budget[adapter_name] = budget
        self.supra_shape[adapter_name] = torch.tensor([self.out_features, self.in_features], dtype=torch.int32)
        if awaits_checkpoint or (count and (awaits_gradient or support is None)):
            self.supra_unloaded[adapter_name] = True
        if count:
            if support is None:
                support = torch.full((count,), _NO_SUPPORT, dtype=index_dtype(self.out_features * self.in_features))
            start = torch.zeros(count) if init_weights else torch.randn(count) * 0.1
            self.supra_values[adapter_name] = nn.Parameter(start)
            self.supra_indices[adapter_name] = support
        if rank:
            # Drawn in the order and with the calls of PEFT's LoRA, so that one seed gives both the same start.
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

    def take_support(self, adapter_name: str, support: Tensor) -> None:
        """Use a support that another process chose, whose U, L and R are still to come or are what they are here."""
        self.supra_indices[adapter_name] = support
        self.forget()

    def _move_adapter_to_device_of_base_layer(self, adapter_name: str, device: torch.device | None = None) -> None:
        """Move one adapter beside the base weight, dtypes unchanged.

        PEFT's own version casts to the base's dtype: it would turn int32 indices into bf16 and round U, L and R.
        """
        target = device or self.get_base_layer().weight.device
        if target.type == "meta":
            # The base is only shapes: the parameters are too, so that counting costs nothing.
            for parameters in (self.supra_values, self.supra_L, self.supra_R):
                if adapter_name in parameters:
                    parameters[adapter_name] = nn.Parameter(parameters[adapter_name].to(target))
            return
        for name in (*self.adapter_layer_names, "supra_indices", "supra_shape"):
            tensors = getattr(self, name)
            if adapter_name in tensors and not tensors[adapter_name].is_meta:
                tensors[adapter_name] = tensors[adapter_name].to(target)

    def take(self, adapter_name: str, combined: Combined) -> None:
        """Give an adapter, made with the sizes of `combined`, its tensors; L is divided by the layer's own γ."""
        parts = {"values": combined.values, "L": combined.L, "R": combined.R}
        if combined.L is not None:
            parts["L"] = combined.L / self.supra_scaling[adapter_name]
        for part, tensor in parts.items():
            if tensor is not None:
                getattr(self, f"supra_{part}")[adapter_name].data.copy_(tensor)
        if combined.indices is not None:
            self.supra_indices[adapter_name] = combined.indices
        self.supra_unloaded.pop(adapter_name, None)

    def restore(self) -> None:
        """Give the base weight its own bits back, if a forward wrote W + M⊙U into it; the next forward writes again."""
        # Training and evaluation may each have an entry of their own, where one runs under autocast.
        for entry in (self._entry, *(known.found.entry for known in self._known.values())):
            if entry is not None and entry.written:
                entry.restore()

    def forget(self) -> None:
        """`restore`, and drop what is bound to tensors that are about to be moved, replaced or taken out."""
        self.restore()
        self._entry = None
        self._gradients.clear()
        self._plans.clear()
        self._known.clear()

    def get_base_layer(self) -> Any:
        """The base layer, with its own weight."""
        self.restore()
        return super().get_base_layer()

    def set_adapter(self, *args: Any, **kwargs: Any) -> None:
        """Make adapters active, as PEFT does, on the base layer's own weight."""
        self.restore()
        super().set_adapter(*args, **kwargs)

    def enable_adapters(self, enabled: bool) -> None:
        """Switch adapters on or off, as PEFT does, on the base layer's own weight."""
        self.restore()
        super().enable_adapters(enabled)

    def delete_adapter(self, adapter_name: str) -> None:
        """Remove an adapter, as PEFT does, from the base layer's own weight."""
        self.forget()
        super().delete_adapter(adapter_name)

    def kernel_layer(self, x: Tensor) -> "KernelLayer | None":
        """This layer with its active adapter for the Triton kernels, U written into its weight.

        None where something else computes it: adapters are off, merged or still to be loaded, or the reference path.
        """
        layer = self.known_layer(x)
        if layer is not None:
            assert self.sweep is not None
            self.sweep.refresh(layer.entry)
        return layer

    def known_layer(self, x: Tensor) -> "KernelLayer | None":
        """`kernel_layer` before anything is written."""
        known = self._known.get(self.training)
        if known is None or not known.holds(x):
            if self._disable_adapters or self.merged_adapters or self.supra_unloaded:
                return None
            layer = self._new_kernel_layer(x)
            if layer is None:
                return None
            known = self._known[self.training] = Known([self], x, layer)
        found: KernelLayer = known.found
        return found

    def own_group(self, x: Tensor, *, whole_input: bool = False) -> "Group | None":
        """`kernel_layer`, as the group of one that the fused functions take; `whole_input` keeps x as it is."""
        layer = self.kernel_layer(x)
        if layer is None:
            return None
        group = self._alone.get((self.training, whole_input))
        if group is None or group.layers[0] is not layer:
            from ..ops.fused import Group

            group = self._alone[self.training, whole_input] = Group([layer], whole_input=whole_input)
        return group

    def thin_width(self) -> int:
        """Columns of what the low-rank part leaves for its backward: the padded rank, or 0."""
        from ..ops.kernels import padded_rank

        name = self.active_adapters[0]
        return padded_rank(self.supra_R[name].shape[0]) if name in self.supra_R else 0

    def _trained(self) -> list[Tensor]:
        name = self.active_adapters[0]
        return [getattr(self, store)[name] for store in self.adapter_layer_names if name in getattr(self, store)]

    def _compilable(self, x: Tensor) -> bool:
        """Whether torch.compile may take this layer for one operator: where the kernels compute it, and it is plain."""
        if self.number < 0 or self.disable_adapters or self.merged or self.supra_unloaded:
            return False
        if is_sharded(self.base_layer):
            return False
        names: Any = self.active_adapters
        bias = self.base_layer.bias
        if len(names) != 1 or (bias is not None and bias.requires_grad):
            return False
        if names[0] not in self.supra_values and names[0] not in self.supra_L:
            return False
        weight = self.base_layer.weight
        parts = self.sparse_parts(names), self.low_rank_parts(names)
        if tensor_obstacle(x, weight, *parts) is not None:
            return False
        return x.device.type == "cuda" or requested() == "triton"

    def _new_kernel_layer(self, x: Tensor) -> "KernelLayer | None":
        base = self.base_layer
        if is_sharded(base):
            # In a forward it looks like any weight, but what is written into it is lost when it is freed.
            if self._entry is not None and self._entry.written:
                raise RuntimeError(
                    f"{self.supra_layer}: the model was sharded while the adapter's values were written into its "
                    "weights, and the shards hold them now. Call model.state_dict() before fully_shard, or "
                    "deepspeed.initialize: it puts the weights back."
                )
            return None
        names: list[str] = self.active_adapters
        sparse, low_rank = self.sparse_parts(names), self.low_rank_parts(names, training=self.training)
        if not sparse and not low_rank:
            return None
        if not takes_kernels(x, base.weight, sparse, low_rank, layer=self.supra_layer):
            return None
        from ..ops.fused import Layer
        from ..ops.inplace import Entry, Sweep

        values = plan = None
        if sparse:
            values = sparse[0].values
            plan = self._plan(next(name for name in names if name in self.supra_values))
        L, R, scaling, dropout = low_rank[0] if low_rank else (None, None, 1.0, 0.0)
        operands = (base.weight, values, plan, L, R, scaling, compute_dtype(x, base.weight))
        if self.sweep is None:
            self.sweep = Sweep()
        if self._entry is None or not self._entry.is_of(*operands):
            self.restore()
            self._entry = self.sweep.add(Entry(*operands))
        return Layer(self._entry, base.bias, dropout)

    def _plan(self, adapter_name: str) -> "Plan":
        indices = self.supra_indices[adapter_name]
        plan = self._plans.get(adapter_name)
        if plan is None or plan.indices is not indices:
            from ..ops.kernels import make_plan

            plan = self._plans[adapter_name] = make_plan(indices, (self.out_features, self.in_features))
        return plan

    def sparse_parts(self, adapter_names: list[str]) -> list[Sparse]:
        """M⊙U of the named adapters that have one here."""
        return [
            Sparse(self.supra_values[name], self.supra_indices[name])
            for name in adapter_names
            if name in self.supra_values
        ]

    def low_rank_parts(self, adapter_names: list[str], *, training: bool = False) -> list[LowRank]:
        """γ·L·R of the named adapters that have one here; dropout only in training."""
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
        """Write Ŵ into the base layer, rounded once; for λ = 0 these are the bits that training used.

        A layer that is already merged is computed anew from its untouched weight with all its merged adapters.

        Args:
            safe_merge: refuse to write a weight that is not finite.
            adapter_names: default the active adapters.

        Raises:
            ValueError: with `safe_merge`, a merged weight would be NaN or infinite; the weight is left as it was.
        """
        names = check_adapters_to_merge(self, adapter_names)
        names = [name for name in names if name in self._available()]
        if not names:
            return
        self._check_loaded(names)
        merged = self.weight_with([*self.merged_adapters, *names])
        if safe_merge:
            self._check_merged(merged, names)
        base, before = self.get_base_layer(), self.base_weight()
        self._weight_before_merge = before
        base.weight.data = merged
        self.merged_adapters.extend(names)

    def check_merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Raise what merging these adapters would raise; nothing is changed."""
        names = self.names_to_merge(adapter_names)
        self._check_loaded(names)
        if names and safe_merge:
            self._check_merged(self.weight_with([*self.merged_adapters, *names]), names)

    def names_to_merge(self, adapter_names: list[str] | None = None) -> list[str]:
        """Of the named or the active adapters those that this layer has and that are not merged yet."""
        names: Any = self.active_adapters if adapter_names is None else adapter_names
        return [name for name in names if name in self._available() and name not in self.merged_adapters]

    def base_weight(self) -> Tensor:
        """The weight (c, b) without any adapter, merged or not."""
        return self.get_base_layer().weight.data if self._weight_before_merge is None else self._weight_before_merge

    def weight_with(self, adapter_names: list[str]) -> Tensor:
        """Ŵ of these adapters together, (c, b), rounded once to the dtype of the base weight."""
        return merged_weight(self.base_weight(), self.sparse_parts(adapter_names), self.low_rank_parts(adapter_names))

    def _check_merged(self, merged: Tensor, adapter_names: list[str]) -> None:
        if not bool(torch.isfinite(merged).all()):
            raise ValueError(  # in PEFT's words
                f"{self.supra_layer}: NaNs detected in the merged weights. The adapter {', '.join(adapter_names)} "
                "seems to be broken; nothing was merged."
            )

    def unmerge(self) -> None:
        """Put the weight back that was there before the first merge, bit for bit."""
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
        return set(self.supra_values) | set(self.supra_L)

    def _check_loaded(self, adapter_names: list[str]) -> None:
        missing = [name for name in adapter_names if self.supra_unloaded.get(name)]
        if missing:
            raise RuntimeError(
                f"{self.supra_layer}: adapter {missing[0]!r} is not loaded: no checkpoint has brought its tensors. "
                "Load it (PeftModel.from_pretrained), or make a new one, on real weights, with support='select'; where "
                "its support is chosen by gradient, call tuner.gradient.choose_supports first."
            )

    def check_checkpoint(self, state_dict: Mapping[str, Tensor], prefix: str) -> list[str]:
        """The adapters that `state_dict` brings whole, of which the first copy is still to come.

        Raises:
            ValueError: it brings a part of one, one made for a layer of another shape or with another budget, or a
                support that is not a strictly increasing set of indices inside the layer.
        """
        arriving = []
        for adapter in self.supra_shape:
            names = self.tensor_names(adapter)
            lost = [name for name in names if prefix + name not in state_dict]
            if len(lost) == len(names):
                continue
            if lost:
                raise ValueError(
                    f"{self.supra_layer}: the checkpoint holds a part of adapter {adapter!r} but not its "
                    f"{lost[0].partition('.')[0]}: it is damaged, or was saved with another budget or supra_lambda."
                )
            shape = state_dict[f"{prefix}supra_shape.{adapter}"].tolist()
            if shape != [self.out_features, self.in_features]:
                raise ValueError(
                    f"{self.supra_layer}: the adapter was made for a layer of shape {tuple(shape)}, this one is "
                    f"{(self.out_features, self.in_features)}: load it on the base model it was trained on."
                )
            for name in names:
                self._check_size(adapter, name, state_dict[prefix + name])
            if adapter in self.supra_indices:
                self._check_support(state_dict[f"{prefix}supra_indices.{adapter}"])
            arriving.append(adapter)
        return arriving

    def tensor_names(self, adapter_name: str) -> list[str]:
        """Names, below this layer, of all tensors that a checkpoint holds of an adapter."""
        stores = (*self.adapter_layer_names, "supra_indices", "supra_shape")
        return [f"{store}.{adapter_name}" for store in stores if adapter_name in getattr(self, store)]

    def _check_size(self, adapter: str, name: str, tensor: Tensor) -> None:
        store = name.partition(".")[0]
        own = getattr(self, store)[adapter]
        here, there = tuple(shape_of(own)), tuple(shape_of(tensor))
        # Of its own checkpoints ZeRO-3 loads the parts elsewhere, and brings emptied parameters here.
        if here != there and (is_whole(own) or there != (0,)):
            raise ValueError(
                f"{self.supra_layer}: {store} has shape {there} in the checkpoint and {here} in adapter {adapter!r}: "
                "it was saved with another budget, supra_lambda or sparse_counts than its adapter_config.json says, or "
                "than the adapter that is to be replaced has."
            )

    def _check_support(self, indices: Tensor) -> None:
        if indices.is_meta or not indices.numel():
            return
        size = self.out_features * self.in_features
        integers = not (indices.is_floating_point() or indices.is_complex())
        ordered = integers and bool((indices[1:] > indices[:-1]).all())
        if not ordered or int(indices[0]) < 0 or int(indices[-1]) >= size:
            raise ValueError(
                f"{self.supra_layer}: the adapter's support is not a sorted set of indices below {size:,} "
                f"({indices.dtype}, from {indices.min().item()} to {indices.max().item()}): the checkpoint is damaged."
            )


def mixed_batch(adapter_names: Any) -> str:
    """Why a batch of several adapters is refused."""
    return (
        f"adapter_names={adapter_names}: SUPRA cannot mix adapters within a batch, W + M⊙U is one weight for all of it"
        ": switch with set_adapter."
    )


class SupraLinear(nn.Module, SupraLayer):
    """`nn.Linear` with SUPRA adapters."""

    def __init__(self, base_layer: nn.Linear, layer: str) -> None:
        super().__init__()
        SupraLayer.__init__(self, base_layer, layer)
        self._arriving: list[str] = []
        self.register_load_state_dict_post_hook(_accept_adapters)
        self.register_state_dict_pre_hook(_restore_base)

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """x (..., b) → (..., c)."""
        # The usual case first, without a look at anything else: it holds only where the kernels may compute.
        if torch.compiler.is_compiling():
            if self._compilable(x):
                return torch.ops.axolotl_supertune.adapted_linear(x, self._trained(), self.number, self.out_features)[0]
            if not self.disable_adapters and not self.merged:
                return _uncompiled(self, x, *args, **kwargs)
        if not kwargs and self.shared_input is not None:
            y = self.shared_input.output(self, x)
            if y is not None:
                return y
        names_in_batch = kwargs.pop("adapter_names", None)
        if names_in_batch is not None:
            raise ValueError(mixed_batch(names_in_batch))
        if self.disable_adapters:
            if self.merged:
                self.unmerge()
            self.restore()
            return self.base_layer(x, *args, **kwargs)
        if self.merged:
            return self.base_layer(x, *args, **kwargs)
        group = self.own_group(x)
        if group is not None:
            return group(x)[0]
        self.restore()
        names: list[str] = self.active_adapters  # type: ignore[assignment] # PEFT's own property
        if self.supra_unloaded:
            self._check_loaded(names)
        sparse, low_rank = self.sparse_parts(names), self.low_rank_parts(names, training=self.training)
        if not sparse and not low_rank:
            return self.base_layer(x, *args, **kwargs)
        return self.computed(x, sparse, low_rank)

    def computed(self, x: Tensor, sparse: list[Sparse], low_rank: list[LowRank]) -> Tensor:
        """y with these parts, where no kernel computes it."""
        base = self.base_layer
        if not is_sharded(base):
            return sparse_linear(x, base.weight, base.bias, sparse, low_rank)
        check_frozen(base.weight)
        return self.transient(x, partial(gathered_weight, base, self.supra_layer), sparse, low_rank)

    # The compiler breaks its graph here: it cannot look into what makes the weight, nor into what is made per layer.
    @torch.compiler.disable
    def transient(
        self, x: Tensor, weight: Callable[[], Tensor], sparse: list[Sparse], low_rank: list[LowRank], **how: Any
    ) -> Tensor:
        """y with these parts of the active adapters, as `transient_linear`, for a weight that is not kept."""
        active: Any = self.active_adapters
        names = [name for name in active if name in self.supra_values]
        gradients = [partial(self._support_gradient, name, self.supra_indices[name]) for name in names]
        return transient_linear(x, weight, self.base_layer.bias, sparse, low_rank, gradients, **how)

    def _support_gradient(self, adapter_name: str, indices: Tensor, x: Tensor, dy: Tensor) -> Tensor:
        shape = (self.out_features, self.in_features)
        sampled = takes_sampled_products(x, x.dtype, shape, layer=self.supra_layer)
        kind: Any = SampledGradient if sampled else BlockGradient
        known = self._gradients.get(adapter_name)
        if known is None or known[0] is not indices or type(known[1]) is not kind:
            known = self._gradients[adapter_name] = (indices, kind(indices, shape))
        return known[1](x, dy)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        self.forget()
        return super()._apply(fn, recurse)

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles: the base's own bits, and nothing that can be made again."""
        self.restore()
        made: dict[str, Any] = {"_known": {}, "_alone": {}, "compiled_groups": {}, "_plans": {}, "_gradients": {}}
        return {**self.__dict__, "_entry": None, **made}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if self.number >= 0:
            self.number = number_of(self)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        unpack_whole(state_dict)  # done by now, unless there is no SupraModel around this layer
        self._arriving = self.check_checkpoint(state_dict, prefix)
        self.forget()
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def __repr__(self) -> str:
        return f"supra.{super().__repr__()}"


# The compiler breaks its graph here: it must look neither into launches of kernels nor into the reference's backward.
@torch.compiler.disable
def _uncompiled(layer: SupraLinear, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return layer.forward(x, *args, **kwargs)


def _restore_base(module: SupraLinear, prefix: str, keep_vars: bool) -> None:
    """Before the tensors are read: what is saved of the base is the base."""
    module.restore()


def _accept_adapters(module: SupraLinear, incompatible_keys: Any) -> None:
    """After the tensors are in: what came whole may be used."""
    for adapter in module._arriving:
        module.supra_unloaded.pop(adapter, None)
    module._arriving = []
