"""SUPRA in the lists of PEFT's tests: a pytest plugin, loaded in the process that runs them.

PEFT's tests are parametrized by lists of (name, model, config class, arguments). The marks hold the lists themselves,
so that their content is replaced in place, before collection. Of what is collected then only the tests that were
parametrized with our config are kept, and those of `in_peft.py`.
"""

import importlib
import json
import os
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from axolotl_supertune import ActivationNorms, SupraConfig

MODULES = ("test_custom_models", "test_decoder_models", "test_quantization")


@dataclass
class PlainSupraConfig(SupraConfig):
    """SUPRA with defaults that need no calibration and fit PEFT's tiny layers, for tests that give targets alone."""

    mask_score: str = "magnitude"
    sparse_density: float | None = 0.5


class NormsOfAnyModel(ActivationNorms):
    """Norms that fit by shape: PEFT's tests build fp16 and differently seeded copies of one model."""

    def check_model(self, model, source="", *, read=None):
        pass


def _norms():
    generator = torch.Generator().manual_seed(0)
    widths = {"lin0": 10, "lin1": 20}
    norms = {name: torch.rand(width, generator=generator) + 0.1 for name, width in widths.items()}
    return NormsOfAnyModel(norms, fingerprint="", provenance={"model": "MLP"})


def _magnitude(**arguments):
    return {"mask_score": "magnitude", **arguments}


# name, model, arguments. MLP: lin0 (20, 10) and lin1 (2, 20), both with a bias.
CUSTOM = [
    ("λ 0", "MLP", _magnitude(target_modules="lin0", supra_lambda=0, r0=4)),
    ("λ 0.5", "MLP", _magnitude(target_modules=["lin0"], supra_lambda=0.5, r0=4)),
    ("λ 1", "MLP", _magnitude(target_modules=["lin0"], supra_lambda=1, r0=4)),
    ("λ 0, last layer", "MLP", _magnitude(target_modules=["lin1"], supra_lambda=0, r0=1)),
    ("λ 1, two layers", "MLP", _magnitude(target_modules=["lin0", "lin1"], supra_lambda=1, r0=1)),
    ("top", "MLP", _magnitude(target_modules=["lin0", "lin1"], supra_lambda=0, r0=1, sparse_direction="top")),
    ("hybrid", "MLP", _magnitude(target_modules=["lin0"], r0=3, sparse_direction="hybrid", hybrid_beta=0.25)),
    ("random", "MLP", _magnitude(target_modules=["lin0"], r0=3, sparse_direction="random", support_seed=3)),
    ("wanda", "MLP", {"target_modules": ["lin0", "lin1"], "supra_lambda": 0, "r0": 1, "activation_norms": _norms()}),
    ("density", "MLP", _magnitude(target_modules=["lin0", "lin1"], supra_lambda=0, sparse_density=0.3)),
    ("density, λ 0.8", "MLP", _magnitude(target_modules=["lin0", "lin1"], sparse_density=0.5)),
    ("whole matrix", "MLP", _magnitude(target_modules=["lin0"], supra_lambda=0, sparse_density=1)),
    ("modules_to_save", "MLP", _magnitude(target_modules=["lin0"], r0=2, modules_to_save=["lin1"])),
    ("exclude", "MLP", _magnitude(target_modules=["lin0", "lin1"], exclude_modules=["lin1"], r0=2)),
    ("dropout", "MLP", _magnitude(target_modules=["lin0"], supra_lambda=0.5, r0=4, lora_dropout=0.3, lora_alpha=4)),
    ("no bias", "MLP without bias", _magnitude(target_modules=["lin0", "lin1"], supra_lambda=0.5, r0=1)),
    ("norm", "MLP_LayerNorm", _magnitude(target_modules=["lin0"], supra_lambda=0.5, r0=2)),
    ("beside embedding", "EmbConv1D", _magnitude(target_modules=["lin0"], r0=1, supra_lambda=0)),
    ("beside Conv2d", "Conv2d", _magnitude(target_modules=["lin0"], r0=1, supra_lambda=0.5)),
]

_LIN0 = _magnitude(target_modules=["lin0"], r0=4, init_weights=False)
_LIN1 = _magnitude(target_modules=["lin1"], r0=1, init_weights=False)
# name, first arguments, second arguments; on MLP.
SEVERAL = [
    ("λ 0, same support", {**_LIN0, "supra_lambda": 0}, {**_LIN0, "supra_lambda": 0}),
    (
        "λ 0, supports overlap",
        {**_LIN0, "supra_lambda": 0},
        {**_LIN0, "supra_lambda": 0, "sparse_direction": "random"},
    ),
    (
        "λ 0, other supports",
        {**_LIN0, "supra_lambda": 0, "r0": 2},
        {**_LIN0, "supra_lambda": 0, "r0": 2, "sparse_direction": "top"},
    ),
    ("λ 0.5", {**_LIN0, "supra_lambda": 0.5}, {**_LIN0, "supra_lambda": 0.5}),
    ("λ 1", {**_LIN0, "supra_lambda": 1}, {**_LIN0, "supra_lambda": 1, "r0": 2}),
    ("λ 0 and 1", {**_LIN0, "supra_lambda": 0}, {**_LIN0, "supra_lambda": 1}),
    ("other layers", {**_LIN0, "supra_lambda": 0.5}, {**_LIN1, "supra_lambda": 0}),
    (
        "one layer in both",
        {**_LIN0, "target_modules": ["lin0", "lin1"], "r0": 1, "supra_lambda": 0},
        {**_LIN1, "supra_lambda": 1},
    ),
]

# None is all linear layers, whose names PEFT's layers_to_transform does not reach; the second names its layers.
DECODER = [
    _magnitude(task_type="CAUSAL_LM", target_modules=None, supra_lambda=0, r0=2),
    _magnitude(task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj"], supra_lambda=0.5, r0=2),
    _magnitude(task_type="CAUSAL_LM", target_modules=None, supra_lambda=1, r0=2),
]

# A support that does not depend on the weights: PEFT compares with the unquantized model, whose scores are others.
QUANTIZED = [
    _magnitude(target_modules=["q_proj", "v_proj"], r0=4, supra_lambda=supra_lambda, sparse_direction="random")
    for supra_lambda in (0, 0.5, 1)
]


def pytest_configure(config):
    config.pluginmanager.register(Outcomes(config), "outcomes")


def pytest_sessionstart(session):
    """Before collection, after pytest's assertions are in place."""
    custom, decoder, quantization = (importlib.import_module(f"tests.{name}") for name in MODULES)
    custom.TEST_CASES[:] = [(f"{name} SUPRA", model, SupraConfig, kwargs) for name, model, kwargs in CUSTOM]
    custom.MULTIPLE_ACTIVE_ADAPTERS_TEST_CASES[:] = [
        (f"{name} SUPRA", "supra", SupraConfig, first, second) for name, first, second in SEVERAL
    ]
    custom.ALL_PEFT_CONFIG_CLASSES[:] = [PlainSupraConfig]
    for name in ("test_multiple_adapters_mixed_modules_to_save", "_order_switched"):
        name = name if name.startswith("test_") else f"test_multiple_adapters_mixed_modules_to_save{name}"
        (mark,) = getattr(custom.TestPeftCustomModel, name).pytestmark
        mark.args[1][:] = [PlainSupraConfig]
    _add_model_without_bias(custom)
    decoder.ALL_CONFIGS[:] = [(SupraConfig, kwargs) for kwargs in DECODER]
    decoder.PEFT_DECODER_MODELS_TO_TEST[:] = sorted(str(path) for path in _models().glob("decoder-*"))
    quantization.TEST_CASES[:] = [(SupraConfig, kwargs) for kwargs in QUANTIZED]
    for backend in quantization.QUANTIZATION_BACKENDS:
        backend.model_id = str(_models() / "quantized-opt")


def _models():
    return Path(os.environ["CONFORMANCE_MODELS"])


def _add_model_without_bias(custom):
    plain = custom.MockTransformerWrapper.from_pretrained.__func__

    def from_pretrained(cls, model_id, dtype=None):
        if model_id != "MLP without bias":
            return plain(cls, model_id, dtype)
        torch.manual_seed(0)
        return custom.MLP(bias=False).to(torch.float32 if dtype is None else dtype)

    custom.MockTransformerWrapper.from_pretrained = classmethod(from_pretrained)


def pytest_collection_modifyitems(config, items):
    kept = [item for item in items if _is_ours(item)]
    config.hook.pytest_deselected(items=[item for item in items if not _is_ours(item)])
    items[:] = kept


def _is_ours(item):
    if item.path.name == "in_peft.py":
        return True
    values = item.callspec.params.values() if hasattr(item, "callspec") else ()
    return any(isinstance(value, type) and issubclass(value, SupraConfig) for value in values)


class Outcomes:
    """Writes what became of every test to $CONFORMANCE_OUTCOMES: {node: [outcome, reason]}."""

    def __init__(self, config):
        self.writes = not hasattr(config, "workerinput")
        self.found = {}

    @pytest.hookimpl
    def pytest_runtest_logreport(self, report):
        # A test may pass and its teardown fail: the worst of the three counts.
        worst = {"passed": 0, "skipped": 1, "failed": 2}
        old = self.found.get(report.nodeid, ("passed", ""))
        if worst[report.outcome] >= worst[old[0]]:
            self.found[report.nodeid] = (report.outcome, _reason(report))

    def pytest_collectreport(self, report):
        if report.failed:
            self.found[report.nodeid] = ("failed", _reason(report))

    def pytest_sessionfinish(self):
        if self.writes:
            Path(os.environ["CONFORMANCE_OUTCOMES"]).write_text(json.dumps(self.found))


def _reason(report):
    if report.outcome == "skipped" and isinstance(report.longrepr, tuple):
        return report.longrepr[2].removeprefix("Skipped: ")
    return "" if report.passed else report.longreprtext[-1500:]
