"""SupraLinear: a linear layer with Ŵ = W + M⊙U + γ·L·R, and the choice of what computes it.

The modules of `ops` that compute y = x·Ŵᵀ + bias:

| W                    | with kernels                                                  | without             |
|----------------------|---------------------------------------------------------------|---------------------|
| plain                | `fused`, U written into W by `inplace_weight`                 | `reference`         |
| sharded and gathered | `fused`, U written into a copy of W by `gathered_weight`      | `recomputed_weight` |
| sharded otherwise    | `recomputed_weight`, a kernel for dU alone                    | `recomputed_weight` |
| quantized            | `recomputed_weight`, a kernel for dU alone                    | `recomputed_weight` |

`reference` makes W + M⊙U anew in each forward; `recomputed_weight` forms it in forward, drops it, and forms it again in
backward. `unwritten_kernel_layer` decides whether the kernels compute. Its answer is cached
behind a `Guard`, since it is asked in every forward.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from ..engines.sharding import SHARDING_CALLS, gathered_weight, is_gathered, is_sharded, is_whole
from ..method.sizes import padded_rank
from ..ops import LowRank, Sparse, compute_dtype, sparse_linear, takes_kernels
from ..ops.dispatch import requested, takes_sampled_products, unsupported_tensor_reason
from ..ops.recomputed_weight import BlockGradient, SampledGradient, SupportGradient, recomputed_weight_linear
from ..ops.reference import check_frozen
from .checkpoint import unpack_checked
from .custom_op import new_operator_number
from .guards import Guard
from .layer import SupraLayer

if TYPE_CHECKING:  # Triton may be absent
    from ..ops.fused import Group, KernelLayer
    from ..ops.gathered_weight import Gathered
    from ..ops.inplace_weight import BatchedWriter, WeightSlot

# Attributes that hold cached results: cleared by `invalidate_caches`, left out of copies and pickles.
_CACHES = ("_slots", "layer_guards", "_own_groups", "guard_cache", "mlp_guards", "_gradients")


class InputGroup(Protocol):
    """Sibling layers that read one input and are computed together (`shared_input.SharedInput`)."""

    def output(self, layer: "SupraLinear", x: Tensor) -> Tensor | None:
        """y of `layer`, or None if the layer must compute itself."""

    def invalidate_caches(self) -> None:
        """Drop outputs and cached results of all members."""


def mixed_batch(adapter_names: Any) -> str:
    """The error message for a batch in which rows use different adapters."""
    return (
        f"adapter_names={adapter_names}: SUPRA cannot mix adapters within a batch, W + M⊙U is one weight for all of it"
        ": switch with set_adapter."
    )


class SupraLinear(nn.Module, SupraLayer):
    """`nn.Linear` with SUPRA adapters.

    Args:
        base_layer: the linear layer with weight W (c, b).
        layer_name: its name in the base model, for error messages.
    """

    def __init__(self, base_layer: nn.Linear, layer_name: str) -> None:
        super().__init__()
        SupraLayer.__init__(self, base_layer, layer_name)
        # Adapter name → its support, and what computes dU on that support for a recomputed weight.
        self._gradients: dict[str, tuple[Tensor, SupportGradient]] = {}
        # (active adapters, dtype) → what is written into the base weight; at most one is written at a time.
        self._slots: dict[Any, WeightSlot] = {}
        # Kernel dispatch of the active adapters, by training mode: the dropouts differ.
        self.layer_guards: dict[bool, Guard] = {}
        self._own_groups: dict[tuple[bool, bool], Group] = {}
        # Results of adapters that were active before, so that switching back is cheap. The first member of a
        # `SharedInput` or a fused MLP also holds those of the whole group.
        self.guard_cache: dict[Any, Any] = {}
        # Shared by all layers of a model, which it writes together in a few launches.
        self.writer: BatchedWriter | None = None
        self.shared_input: InputGroup | None = None
        self.position_in_group = 0
        # Dispatch of the fused MLP of which this layer is the gate, by training mode.
        self.mlp_guards: dict[bool, Guard] = {}
        # The parent module and this layer's name there; None until `fusion.share_work` sets it.
        self.place_in_parent: tuple[nn.Module, str] | None = None
        # Identifies the layer to the torch.compile operator (`custom_op`); negative until `fusion.share_work` sets it.
        self.operator_number = -1
        self.compiled_groups: dict[int, Group] = {}
        self._adapters_being_loaded: list[str] = []
        self.register_load_state_dict_post_hook(_mark_loaded)
        self.register_state_dict_pre_hook(_restore_base)

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """x (..., b) → (..., c)."""
        if torch.compiler.is_compiling():
            if self._is_compilable(x):
                operator = torch.ops.axolotl_supertune.adapted_linear
                return operator(x, self._trained(), self.operator_number, self.out_features)[0]
            if not self.disable_adapters and not self.merged:
                return _uncompiled(self, x, *args, **kwargs)
        # The common case, before all other checks: `shared_input.output` checks itself that the kernels may compute.
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
        if self.pending_adapters:
            self.check_loaded(names)
        sparse, low_rank = self.sparse_parts(names), self.low_rank_parts(names, training=self.training)
        if not sparse and not low_rank:
            return self.base_layer(x, *args, **kwargs)
        return self.reference_output(x, sparse, low_rank)

    def reference_output(self, x: Tensor, sparse: list[Sparse], low_rank: list[LowRank]) -> Tensor:
        """y of these parts, without kernels."""
        base = self.base_layer
        if not is_sharded(base):
            return sparse_linear(x, base.weight, base.bias, sparse, low_rank)
        check_frozen(base.weight)
        return self.with_recomputed_weight(x, partial(gathered_weight, base, self.layer_name), sparse, low_rank)

    # A graph break for the compiler, which can trace neither the function that makes the weight nor per-layer caches.
    @torch.compiler.disable
    def with_recomputed_weight(
        self, x: Tensor, weight: Callable[[], Tensor], sparse: list[Sparse], low_rank: list[LowRank], **how: Any
    ) -> Tensor:
        """y of these parts of the active adapters with a weight that is formed anew in forward and in backward.

        Args:
            x: (..., b).
            weight: returns the base weight (c, b).
            sparse, low_rank: the parts.
            how: further arguments of `recomputed_weight_linear`.
        """
        active: Any = self.active_adapters
        names = [name for name in active if name in self.supra_values]
        gradients = [partial(self._support_gradient, name, self.supra_indices[name]) for name in names]
        return recomputed_weight_linear(x, weight, self.base_layer.bias, sparse, low_rank, gradients, **how)

    def _support_gradient(self, adapter_name: str, indices: Tensor, x: Tensor, dy: Tensor) -> Tensor:
        """dU (s,): the entries of dyᵀ·x on the support."""
        shape = (self.out_features, self.in_features)
        sampled = takes_sampled_products(x, x.dtype, shape, layer=self.layer_name)
        kind: Any = SampledGradient if sampled else BlockGradient
        cached = self._gradients.get(adapter_name)
        if cached is None or cached[0] is not indices or type(cached[1]) is not kind:
            cached = self._gradients[adapter_name] = (indices, kind(indices, shape))
        return cached[1](x, dy)

    def written_kernel_layer(self, x: Tensor) -> "KernelLayer | None":
        """The layer with its active adapter as the kernels take it, with U written into W.

        None where the kernels do not compute it: adapters are disabled, merged or not loaded, or x, the weight or the
        settings call for the reference.
        """
        layer = self.unwritten_kernel_layer(x)
        if layer is not None and layer.slot.persistent:
            assert self.writer is not None
            self.writer.write_for_forward(layer.slot)  # type: ignore[arg-type] # a persistent one is a WeightSlot
        return layer

    def unwritten_kernel_layer(self, x: Tensor) -> "KernelLayer | None":
        """The layer as the kernels take it, with U not yet written into W; from the cache while its guard is valid."""
        guard = self.layer_guards.get(self.training)
        if guard is None or not guard.is_valid(x):
            if self._disable_adapters or self.merged_adapters or self.pending_adapters:
                return None
            key = self.key("layer", x)
            guard = self.guard_cache.get(key)
            if guard is None or not guard.is_valid(x):
                layer = self._new_kernel_layer(x)
                if layer is None:
                    return None
                guard = self.guard_cache[key] = Guard([self], x, layer)
            self.layer_guards[self.training] = guard
        cached: KernelLayer = guard.result
        return cached

    def key(self, kind: str, x: Tensor) -> tuple[Any, ...]:
        """Key in `guard_cache` of a result of this kind for the active adapters."""
        names: Any = self.active_adapters
        return kind, self.training, tuple(names), compute_dtype(x, self.base_layer.weight)

    def own_group(self, x: Tensor, *, whole_input: bool = False) -> "Group | None":
        """`written_kernel_layer` as a group of one layer, which is what the fused functions take.

        Args:
            x: (..., b).
            whole_input: save all of x for backward, not only the columns that the support touches.
        """
        layer = self.written_kernel_layer(x)
        if layer is None:
            return None
        group = self._own_groups.get((self.training, whole_input))
        if group is None or group.layers[0] is not layer:
            key = self.key(f"alone {whole_input}", x)
            group = self.guard_cache.get(key)
            if group is None or group.layers[0] is not layer:
                from ..ops.fused import Group

                group = self.guard_cache[key] = Group([layer], whole_input=whole_input)
            self._own_groups[self.training, whole_input] = group
        return group

    def saved_low_rank_width(self) -> int:
        """Columns of the product x·Rᵀ that is saved for backward: the padded rank, or 0 without a low-rank part."""
        names: Any = self.active_adapters
        name = names[0]
        return padded_rank(self.supra_R[name].shape[0]) if name in self.supra_R else 0

    def _trained(self) -> list[Tensor]:
        """U, L and R of the active adapter, without those that it does not have."""
        names: Any = self.active_adapters
        name = names[0]
        return [getattr(self, store)[name] for store in self.adapter_layer_names if name in getattr(self, store)]

    def _is_compilable(self, x: Tensor) -> bool:
        """Whether torch.compile may treat this layer as one operator: the kernels compute it, with one adapter."""
        if self.operator_number < 0 or self.disable_adapters or self.merged or self.pending_adapters:
            return False
        if self._is_sharded():
            return False
        names: Any = self.active_adapters
        bias = self.base_layer.bias
        if len(names) != 1 or (bias is not None and bias.requires_grad):
            return False
        if names[0] not in self.supra_values and names[0] not in self.supra_L:
            return False
        weight = self.base_layer.weight
        parts = self.sparse_parts(names), self.low_rank_parts(names)
        if unsupported_tensor_reason(x, weight, *parts) is not None:
            return False
        return x.device.type == "cuda" or requested() == "triton"

    def _is_sharded(self) -> bool:
        """Whether the weight or an adapter of this layer is sharded; an engine can be told to leave out either."""
        return any(is_sharded(store) for store in (self.base_layer, self.supra_values, self.supra_L, self.supra_R))

    def _new_kernel_layer(self, x: Tensor) -> "KernelLayer | None":
        """The layer for the kernels, or None where they do not compute it; see `written_kernel_layer`."""
        base, sharded = self.base_layer, self._is_sharded()
        if sharded:
            self._check_written_before_sharding()
            if not is_gathered(base):
                return None
        names: list[str] = self.active_adapters  # type: ignore[assignment] # PEFT's own property
        sparse, low_rank = self.sparse_parts(names), self.low_rank_parts(names, training=self.training)
        if not sparse and not low_rank:
            return None
        if not all(is_whole(part.values) for part in sparse) or not all(is_whole(part.L) for part in low_rank):
            return None
        if not takes_kernels(x, base.weight, sparse, low_rank, layer=self.layer_name):
            return None
        from ..ops.fused import KernelLayer

        dtype = compute_dtype(x, base.weight)
        dropout = low_rank[0].dropout if low_rank else 0.0
        if not sharded:
            return KernelLayer(self._written_slot(names, sparse, low_rank, dtype), base.bias, dropout)
        from ..ops.gathered_weight import GatheredSlot

        indices = sparse[0].indices if sparse else None
        scaling = low_rank[0].scaling if low_rank else 1.0
        slot = GatheredSlot(partial(self._gathered, tuple(names)), indices, scaling, dtype)
        return KernelLayer(slot, base.bias, dropout)

    def _check_written_before_sharding(self) -> None:
        """Refuse a layer that was sharded with U in its weight: the shards cannot be restored."""
        if any(slot.written for slot in self._slots.values()):
            raise RuntimeError(
                f"{self.layer_name}: the model was sharded while the adapter's values were written into its "
                f"weights, and the shards hold them now. Call model.state_dict() before {SHARDING_CALLS}: it puts the "
                "weights back."
            )

    def _written_slot(
        self, names: Sequence[str], sparse: list[Sparse], low_rank: list[LowRank], dtype: torch.dtype
    ) -> "WeightSlot":
        """What is written into the base weight for these adapters; made anew where one of its tensors was replaced."""
        from ..ops.inplace_weight import BatchedWriter, WeightSlot

        values, indices = sparse[0] if sparse else (None, None)
        L, R, scaling = low_rank[0][:3] if low_rank else (None, None, 1.0)
        operands = (self.base_layer.weight, values, indices, L, R, scaling, dtype)
        if self.writer is None:
            self.writer = BatchedWriter()
        slot = self._slots.get((*names, dtype))
        if slot is None or not slot.is_made_of(*operands):
            self.restore()
            if slot is not None:
                self.writer.remove(slot)
            slot = self._slots[*names, dtype] = self.writer.add(WeightSlot(*operands))
            slot.is_called = self._is_in_its_place
        return slot

    def _is_in_its_place(self) -> bool:
        """Whether the layer is still where `fusion.share_work` found it in its parent."""
        return self.place_in_parent is None or self.place_in_parent[0]._modules.get(self.place_in_parent[1]) is self

    def _gathered(self, names: Sequence[str]) -> "Gathered":
        """The gathered weight and the tensors of these adapters, read at each use: sharding replaces the parameters."""
        from ..ops.gathered_weight import Gathered

        weight = gathered_weight(self.base_layer, self.layer_name)
        sparse, low_rank = self.sparse_parts(names), self.low_rank_parts(names)
        L, R = low_rank[0][:2] if low_rank else (None, None)
        return Gathered(weight, sparse[0].values if sparse else None, L, R)

    def get_base_layer(self) -> Any:
        """The base layer with W restored. It stays W until this layer's next forward."""
        if self.writer is not None:
            self.writer.forget_groups()
        return super().get_base_layer()

    def restore(self) -> None:
        for slot in self._slots.values():
            if slot.written:
                slot.restore()
        if self.writer is not None:
            self.writer.restore_others(self.base_layer.weight)

    def invalidate_caches(self) -> None:
        self.restore()
        if self.writer is not None:
            self.writer.remove(*self._slots.values())
        if self.shared_input is not None:
            self.shared_input.invalidate_caches()
        for cache in _CACHES:
            getattr(self, cache).clear()

    def delete_adapter(self, adapter_name: str) -> None:
        super().delete_adapter(adapter_name)
        remaining = {id(tensor) for store in self.adapter_layer_names for tensor in getattr(self, store).values()}
        for number, group in list(self.compiled_groups.items()):
            if any(id(tensor) not in remaining for tensor in group.trained):
                del self.compiled_groups[number]

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        self.invalidate_caches()
        return super()._apply(fn, recurse)

    def __getstate__(self) -> dict[str, Any]:
        """State for copies and pickles: the restored base weight, and no caches."""
        self.restore()
        return {**self.__dict__, **{name: {} for name in (*_CACHES, "compiled_groups")}, "place_in_parent": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if self.operator_number >= 0:
            self.operator_number = new_operator_number(self)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        unpack_checked(state_dict)  # SupraModel has done it already, unless the layer is loaded without one
        self._adapters_being_loaded = self.check_checkpoint(state_dict, prefix)
        self.invalidate_caches()
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def __repr__(self) -> str:
        return f"supra.{super().__repr__()}"


# A graph break for the compiler, which can trace neither kernel launches nor the reference's backward.
@torch.compiler.disable
def _uncompiled(layer: SupraLinear, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return layer.forward(x, *args, **kwargs)


def _restore_base(module: SupraLinear, prefix: str, keep_vars: bool) -> None:
    """State-dict pre-hook: the saved base weight must not contain U."""
    module.restore()


def _mark_loaded(module: SupraLinear, incompatible_keys: Any) -> None:
    """Load-state-dict post-hook: adapters whose tensors all came may be used."""
    for adapter in module._adapters_being_loaded:
        module.pending_adapters.pop(adapter, None)
    module._adapters_being_loaded = []
