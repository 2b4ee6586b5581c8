"""SupraLinear: a linear layer with Ŵ = W + M⊙U + γ·L·R, and what computes it: kernels, compiler or reference."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..engines.sharding import gathered_weight, is_gathered, is_sharded, is_whole
from ..ops import LowRank, Sparse, compute_dtype, sparse_linear, takes_kernels
from ..ops.dispatch import requested, takes_sampled_products, tensor_obstacle
from ..ops.recomputed_weight import BlockGradient, SampledGradient, SupportGradient, transient_linear
from ..ops.reference import check_frozen
from .checkpoint import unpack_whole
from .custom_op import number_of
from .guards import Known
from .layer import SupraLayer

if TYPE_CHECKING:  # Triton may be absent
    from ..ops.fused import Group
    from ..ops.fused import Layer as KernelLayer
    from ..ops.gathered_weight import Gathered
    from ..ops.inplace_weight import Entry, Sweep
    from .shared_input import SharedInput


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
        # How the gradient of U is computed where the weight is not kept, by adapter, and the support it is made for.
        self._gradients: dict[str, tuple[Tensor, SupportGradient]] = {}
        # The fast path: what is written into the base weight, how its gradient is computed, who reads the same input.
        # By active adapters and dtype; one at a time is written.
        self._entries: dict[Any, Entry] = {}
        # One for training and one for evaluation: their dropouts differ.
        self._known: dict[bool, Known] = {}
        self._alone: dict[tuple[bool, bool], Group] = {}
        # What was found with adapters that were active before, and will be again; also of the groups it comes first in.
        self.kept: dict[Any, Any] = {}
        self.sweep: Sweep | None = None
        self.shared_input: SharedInput | None = None
        self.shared_place = 0
        # What was found of the gated MLP that this layer is the gate of, as `_known`.
        self.known_mlps: dict[bool, Known] = {}
        # The module that it was put into, and its name there.
        self.home: tuple[nn.Module, str] | None = None
        # Its name among the operators of torch.compile; none before `share_work`.
        self.number = -1
        self.compiled_groups: dict[int, Group] = {}
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

    def kernel_layer(self, x: Tensor) -> "KernelLayer | None":
        """This layer with its active adapter for the Triton kernels, U written into its weight.

        None where something else computes it: adapters are off, merged or still to be loaded, or the reference path.
        """
        layer = self.known_layer(x)
        if layer is not None and layer.entry.stays:
            assert self.sweep is not None
            self.sweep.refresh(layer.entry)  # type: ignore[arg-type] # one that stays is an Entry
        return layer

    def known_layer(self, x: Tensor) -> "KernelLayer | None":
        """`kernel_layer` before anything is written."""
        known = self._known.get(self.training)
        if known is None or not known.holds(x):
            if self._disable_adapters or self.merged_adapters or self.supra_unloaded:
                return None
            key = self.key("layer", x)
            known = self.kept.get(key)
            if known is None or not known.holds(x):
                layer = self._new_kernel_layer(x)
                if layer is None:
                    return None
                known = self.kept[key] = Known([self], x, layer)
            self._known[self.training] = known
        found: KernelLayer = known.found
        return found

    def key(self, kind: str, x: Tensor) -> tuple[Any, ...]:
        """Of something in `kept` that was found with the adapters that are active now."""
        names: Any = self.active_adapters
        return kind, self.training, tuple(names), compute_dtype(x, self.base_layer.weight)

    def own_group(self, x: Tensor, *, whole_input: bool = False) -> "Group | None":
        """`kernel_layer`, as the group of one that the fused functions take; `whole_input` keeps x as it is."""
        layer = self.kernel_layer(x)
        if layer is None:
            return None
        group = self._alone.get((self.training, whole_input))
        if group is None or group.layers[0] is not layer:
            key = self.key(f"alone {whole_input}", x)
            group = self.kept.get(key)
            if group is None or group.layers[0] is not layer:
                from ..ops.fused import Group

                group = self.kept[key] = Group([layer], whole_input=whole_input)
            self._alone[self.training, whole_input] = group
        return group

    def thin_width(self) -> int:
        """Columns of what the low-rank part leaves for its backward: the padded rank, or 0."""
        from ..ops.kernels import padded_rank

        names: Any = self.active_adapters
        name = names[0]
        return padded_rank(self.supra_R[name].shape[0]) if name in self.supra_R else 0

    def _trained(self) -> list[Tensor]:
        names: Any = self.active_adapters
        name = names[0]
        return [getattr(self, store)[name] for store in self.adapter_layer_names if name in getattr(self, store)]

    def _compilable(self, x: Tensor) -> bool:
        """Whether torch.compile may take this layer for one operator: where the kernels compute it, and it is plain."""
        if self.number < 0 or self.disable_adapters or self.merged or self.supra_unloaded:
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
        if tensor_obstacle(x, weight, *parts) is not None:
            return False
        return x.device.type == "cuda" or requested() == "triton"

    def _is_sharded(self) -> bool:
        """Whether its weight or its adapters are here only while something gathers them: FSDP may ignore either."""
        return any(is_sharded(each) for each in (self.base_layer, self.supra_values, self.supra_L, self.supra_R))

    def _new_kernel_layer(self, x: Tensor) -> "KernelLayer | None":
        base = self.base_layer
        sharded = self._is_sharded()
        if sharded:
            # In a forward it looks like any weight, but what is written into it is lost when it is freed.
            if any(entry.written for entry in self._entries.values()):
                raise RuntimeError(
                    f"{self.supra_layer}: the model was sharded while the adapter's values were written into its "
                    "weights, and the shards hold them now. Call model.state_dict() before fully_shard, or "
                    "deepspeed.initialize: it puts the weights back."
                )
            if not is_gathered(base):
                return None
        names: list[str] = self.active_adapters  # type: ignore[assignment] # PEFT's own property
        sparse, low_rank = self.sparse_parts(names), self.low_rank_parts(names, training=self.training)
        if not all(is_whole(each) for each in (*(part.values for part in sparse), *(part.L for part in low_rank))):
            return None
        if not sparse and not low_rank:
            return None
        if not takes_kernels(x, base.weight, sparse, low_rank, layer=self.supra_layer):
            return None
        from ..ops.fused import Layer

        indices = sparse[0].indices if sparse else None
        dtype = compute_dtype(x, base.weight)
        L, R, scaling, dropout = low_rank[0] if low_rank else (None, None, 1.0, 0.0)
        if sharded:
            from ..ops.gathered_weight import GatheredEntry

            return Layer(
                GatheredEntry(partial(self._gathered, tuple(names)), indices, scaling, dtype), base.bias, dropout
            )
        from ..ops.inplace_weight import Entry, Sweep

        operands = (base.weight, sparse[0].values if sparse else None, indices, L, R, scaling, dtype)
        if self.sweep is None:
            self.sweep = Sweep()
        entry = self._entries.get((*names, dtype))
        if entry is None or not entry.is_of(*operands):
            self.restore()
            if entry is not None:
                self.sweep.drop(entry)
            entry = self._entries[*names, dtype] = self.sweep.add(Entry(*operands))
            entry.is_called = self._is_at_home
        return Layer(entry, base.bias, dropout)

    def _is_at_home(self) -> bool:
        return self.home is None or self.home[0]._modules.get(self.home[1]) is self

    def _gathered(self, names: Sequence[str]) -> "Gathered":
        """What the kernels compute with of these adapters, where weights are sharded: looked up anew, as it moves."""
        from ..ops.gathered_weight import Gathered

        weight = gathered_weight(self.base_layer, self.supra_layer)
        sparse, low_rank = self.sparse_parts(names), self.low_rank_parts(names)
        L, R = low_rank[0][:2] if low_rank else (None, None)
        return Gathered(weight, sparse[0].values if sparse else None, L, R)

    def get_base_layer(self) -> Any:
        """The base layer, with its own weight, which no other layer's forward writes into until this one's has."""
        if self.sweep is not None:
            self.sweep.forget()
        return super().get_base_layer()

    def restore(self) -> None:
        for entry in self._entries.values():
            if entry.written:
                entry.restore()
        if self.sweep is not None:
            self.sweep.restore_others(self.base_layer.weight)

    def forget(self) -> None:
        self.restore()
        if self.sweep is not None:
            self.sweep.drop(*self._entries.values())
        if self.shared_input is not None:
            self.shared_input.forget()
        for made in (self._entries, self._gradients, self._known, self._alone, self.kept, self.known_mlps):
            made.clear()

    def delete_adapter(self, adapter_name: str) -> None:
        super().delete_adapter(adapter_name)
        here = {id(tensor) for store in self.adapter_layer_names for tensor in getattr(self, store).values()}
        for number, group in list(self.compiled_groups.items()):
            if any(id(tensor) not in here for tensor in group.trained):
                del self.compiled_groups[number]

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        self.forget()
        return super()._apply(fn, recurse)

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles: the base's own bits, and nothing that can be made again."""
        self.restore()
        made = ("_entries", "_known", "_alone", "kept", "known_mlps", "compiled_groups", "_gradients")
        return {**self.__dict__, **{name: {} for name in made}, "home": None}

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
