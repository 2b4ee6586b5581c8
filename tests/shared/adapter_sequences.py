"""Random sequences of what can be done with adapters, against a plain recomputation; run on the reference path by
tests/tuner and on the Triton kernels, which write into base weights, by tests/interpreter.

Nothing looks at the base weights between the steps but steps that say so: what a forward has written into them is still
there when the next operation comes.
"""

import copy
import shutil
import tempfile
from pathlib import Path

import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from peft import get_peft_model
from torch.func import functional_call

from axolotl_supertune import SupraConfig, hotswap_adapter
from axolotl_supertune.tuner import SupraLayer

NAMES = ("a", "b", "c", "d")
IDS = torch.randint(0, 97, (2, 5), generator=torch.Generator().manual_seed(7))


class Truth:
    """What an adapter is, in tensors of its own: layer → [(indices, values) or None, (L, R, γ) or None]."""

    def __init__(self, model, name):
        self.layers = {}
        for layer in adapted(model):
            sparse = low_rank = None
            if name in layer.supra_values:
                sparse = layer.supra_indices[name].clone(), layer.supra_values[name].detach().clone()
            if name in layer.supra_L:
                L, R = layer.supra_L[name].detach().clone(), layer.supra_R[name].detach().clone()
                low_rank = L, R, layer.supra_scaling[name]
            self.layers[layer.layer_name] = sparse, low_rank

    def assert_is(self, other):
        assert self.layers.keys() == other.layers.keys()
        for name, parts in self.layers.items():
            for mine, theirs in zip(parts, other.layers[name], strict=True):
                assert (mine is None) == (theirs is None), name
                for one, two in zip(mine or (), theirs or (), strict=True):
                    assert one == two if isinstance(one, float) else torch.equal(one, two), name


def adapted(model):
    return [module for module in model.modules() if isinstance(module, SupraLayer)]


class AdapterSequences(RuleBasedStateMachine):
    """Subclasses set `dtype` and `make_base`, a function (dtype) → the base model."""

    dtype = torch.float32
    make_base = None
    # Whether an adapter without low-rank part computes, unmerged, the bits of a plain model with its weights.
    same_bits = True

    def __init__(self):
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.saves = {}
        self.counter = 0

    def teardown(self):
        if hasattr(self, "model"):
            self.look_at_the_base()
            self.same(self.model.unload().state_dict(), {**self.base, **self.weights(self.merged)})
        shutil.rmtree(self.folder)

    @initialize(direction=st.sampled_from(["bottom", "top"]), supra_lambda=st.sampled_from([0, 0.5]))
    def begin(self, direction, supra_lambda):
        plain = type(self).make_base(self.dtype)
        self.plain = plain
        self.base = {name: tensor.clone() for name, tensor in plain.state_dict().items()}
        model = copy.deepcopy(plain)
        self.model = get_peft_model(model, self.config(direction, supra_lambda, None), adapter_name="a").eval()
        self.shrink("a")
        self.truths = {"a": Truth(self.model, "a")}
        self.active, self.merged, self.disabled = ["a"], [], False

    # Operations

    @precondition(lambda self: not self.merged and self.unused())
    @rule(
        data=st.data(),
        direction=st.sampled_from(["bottom", "top", "random"]),
        supra_lambda=st.sampled_from([0, 0.5, 1]),
        only=st.sampled_from([None, ["q_proj", "k_proj", "v_proj"]]),
    )
    def add(self, data, direction, supra_lambda, only):
        name = data.draw(st.sampled_from(self.unused()))
        self.model.add_adapter(name, self.config(direction, supra_lambda, only))
        self.shrink(name)
        self.truths[name] = Truth(self.model, name)

    @rule(data=st.data())
    def activate(self, data):
        names = data.draw(st.lists(st.sampled_from(sorted(self.truths)), min_size=1, max_size=2, unique=True))
        self.model.base_model.set_adapter(names)
        self.active, self.merged = names, []  # PEFT unmerges first

    @rule()
    def disable(self):
        self.model.base_model.disable_adapter_layers()
        self.disabled = True

    @rule()
    def enable(self):
        self.model.base_model.enable_adapter_layers()
        self.disabled = False

    @precondition(lambda self: len(self.truths) > 1)
    @rule(data=st.data())
    def delete(self, data):
        # Of the only active adapter every layer would choose a successor among those that it has itself.
        inactive = sorted(set(self.truths) - set(self.active))
        names = [*inactive, *(self.active if len(self.active) > 1 else [])]
        names = [name for name in names if name not in self.merged]
        if not names:
            return
        name = data.draw(st.sampled_from(names))
        self.model.delete_adapter(name)
        del self.truths[name]
        self.active = [each for each in self.active if each != name]

    @rule(data=st.data(), safe=st.booleans())
    def merge(self, data, safe):
        names = data.draw(st.lists(st.sampled_from(sorted(self.truths)), min_size=1, max_size=2, unique=True))
        self.model.merge_adapter(names, safe_merge=safe)
        self.merged += [name for name in names if name not in self.merged]

    @precondition(lambda self: self.merged)
    @rule()
    def unmerge(self):
        self.model.unmerge_adapter()
        self.merged = []

    @precondition(lambda self: not self.merged and not self.disabled)
    @rule(twice=st.booleans())
    def train(self, twice):
        for _ in range(1 + twice):
            self.model.train()
            self.model(IDS, labels=IDS).loss.backward()
            self.model.eval()
            with torch.no_grad():
                for name, parameter in self.model.named_parameters():
                    if parameter.grad is not None:
                        assert parameter.requires_grad
                        assert name.rpartition(".")[2] in self.active, name
                        parameter -= 0.1 * parameter.grad
                        parameter.grad = None
        for name in self.active:
            self.truths[name] = Truth(self.model, name)

    @rule(data=st.data())
    def save(self, data):
        name = data.draw(st.sampled_from(sorted(self.truths)))
        self.counter += 1
        folder = self.folder / str(self.counter)
        self.model.save_pretrained(folder, selected_adapters=[name])
        self.saves[folder / name] = copy.deepcopy(self.truths[name])

    @precondition(lambda self: self.saves and not self.merged)
    @rule(data=st.data(), name=st.sampled_from(NAMES))
    def load(self, data, name):
        folder = data.draw(st.sampled_from(sorted(self.saves)))
        if name in self.truths:
            sizes, found = (self.sizes(each) for each in (self.truths[name], self.saves[folder]))
            if sizes != found:
                return
            hotswap_adapter(self.model, folder, name)
        else:
            self.model.load_adapter(folder, name)
        self.truths[name] = copy.deepcopy(self.saves[folder])

    @precondition(lambda self: not self.merged and len(self.truths) > 1 and self.unused())
    @rule(data=st.data(), weight=st.sampled_from([1.0, -0.5]))
    def weigh(self, data, weight):
        first, second = data.draw(st.permutations(sorted(self.truths)))[:2]
        new = data.draw(st.sampled_from(self.unused()))
        self.model.add_weighted_adapter([first, second], [1.0, weight], new, combination_type="cat")
        self.truths[new] = Truth(self.model, new)
        for name, weights in self.weights([first, second], scales=[1.0, weight], rounded=False).items():
            combined = self.weights([new], rounded=False)[name]
            torch.testing.assert_close(combined, weights, rtol=0, atol=1e-6)

    @rule()
    def duplicate(self):
        self.model = copy.deepcopy(self.model)

    # Looks

    @rule()
    def compute(self):
        """The model computes what a plain one with its weights does."""
        if self.disabled:
            self.merged = []  # PEFT's layers unmerge when they run disabled
        weights = self.weights(self.merged or ([] if self.disabled else self.active))
        with torch.no_grad():
            found = self.model(IDS).logits
            expected = functional_call(self.plain, weights, (IDS,)).logits
        low_rank = any(part for name in self.active for _, part in self.truths[name].layers.values())
        written = not self.disabled and not self.merged
        if written and (low_rank or not self.same_bits):
            tolerance = 1e-5 if self.dtype is torch.float32 else 0.05
            torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
        else:
            assert torch.equal(found, expected)

    @rule()
    def look_at_the_base(self):
        """The base weights have the base's bits, or those of a plain merge; adapters are what was put into them."""
        merged = self.weights(self.merged)
        for layer in adapted(self.model):
            name = f"{layer.layer_name}.weight"
            assert torch.equal(layer.get_base_layer().weight, merged.get(name, self.base[name])), name
            assert torch.equal(layer.base_weight(), self.base[name]), name
        for name, truth in self.truths.items():
            truth.assert_is(Truth(self.model, name))
        assert set(self.model.peft_config) == set(self.truths)

    @rule()
    def look_at_a_state_dict(self):
        """What is saved of the base is the base."""
        merged = self.weights(self.merged)
        state = self.model.get_base_model().state_dict()
        found = {name.replace(".base_layer.", "."): tensor for name, tensor in state.items() if ".supra_" not in name}
        self.same(found, {**self.base, **merged})

    # Means

    def unused(self):
        return [name for name in NAMES if name not in self.truths]

    def config(self, direction, supra_lambda, targets):
        return SupraConfig(
            mask_score="magnitude",
            sparse_direction=direction,
            supra_lambda=supra_lambda,
            target_modules=targets,
            r0=2,
            lora_dropout=0.0,
            init_weights=False,
            task_type="CAUSAL_LM",
        )

    def shrink(self, name):
        """Random U, L and R of a trained adapter's size."""
        with torch.no_grad():
            for layer in adapted(self.model):
                for store in (layer.supra_values, layer.supra_L):
                    if name in store:
                        store[name].mul_(0.3)

    def weights(self, names, scales=None, rounded=True):
        """Plain weights, by name, with these adapters added in this order in fp32 and rounded once."""
        found = {}
        for layer in self.truths[next(iter(self.truths))].layers:
            total = self.base[f"{layer}.weight"].float().clone()
            adapters = [self.truths[name].layers[layer] for name in names]
            factors = scales or [1.0] * len(names)
            for factor, (sparse, _) in zip(factors, adapters, strict=True):
                if sparse:
                    total.view(-1)[sparse[0].long()] += factor * sparse[1]
            for factor, (_, low_rank) in zip(factors, adapters, strict=True):
                if low_rank:
                    L, R, scaling = low_rank
                    total += factor * (scaling * (L @ R))
            if any(any(parts) for parts in adapters):
                found[f"{layer}.weight"] = total.to(self.dtype) if rounded else total
        return found

    @staticmethod
    def sizes(truth):
        return {
            name: tuple(None if part is None else tuple(part[0].shape) for part in parts)
            for name, parts in truth.layers.items()
        }

    @staticmethod
    def same(found, expected):
        assert found.keys() == expected.keys()
        for name in expected:
            assert torch.equal(found[name], expected[name]), name
