"""What `axolotl supertune inspect` says of an adapter."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import matplotlib.image
import pytest
import torch
from click.testing import CliRunner
from peft import PeftModel, get_peft_model

import axolotl_supertune
from axolotl_supertune import SupraConfig
from axolotl_supertune.tuner import SupraLayer, read_adapter
from axolotl_supertune.tuner.inspection import _where, inspect, layer_reports


@pytest.fixture
def make(tiny_llama, tmp_path):
    def make(**knobs):
        config = SupraConfig(**{"r0": 4, "mask_score": "magnitude", "init_weights": False, **knobs})
        model = get_peft_model(tiny_llama(), config)
        model.save_pretrained(tmp_path / "adapter")
        return tmp_path / "adapter", [module for module in model.modules() if isinstance(module, SupraLayer)]

    return make


def run(*arguments):
    return CliRunner().invoke(inspect, [str(argument) for argument in arguments], env={"COLUMNS": "200"})


@pytest.mark.parametrize("knobs", [{"supra_lambda": 0}, {"supra_lambda": 0.5}, {"supra_lambda": 1}])
def test_the_numbers_are_the_adapters(make, knobs):
    folder, layers = make(**knobs)
    reports = {report.layer: report for report in layer_reports(read_adapter(folder), 16)}
    assert [name.split(".")[2] for name in reports] == ["0"] * 7 + ["1"] * 7
    assert len(reports) == len(layers) == 14
    for layer in layers:
        report, budget = reports[layer.supra_layer], layer.supra_budget["default"]
        assert (report.rows, report.columns) == (layer.out_features, layer.in_features)
        assert (report.rank, report.entries) == (budget.rank, budget.sparse_count)
        assert report.parameters == 4 * (report.rows + report.columns)
        sparse = torch.zeros(report.rows * report.columns)
        if report.entries:
            sparse[layer.supra_indices["default"].long()] = layer.supra_values["default"].detach()
        dense = sparse.view(report.rows, report.columns)
        assert report.rows_touched == int(dense.bool().any(1).sum())
        assert report.columns_touched == int(dense.bool().any(0).sum())
        assert report.moved_max == pytest.approx(float(dense.abs().max()))
        assert report.sparse_norm == pytest.approx(float(dense.norm()), rel=1e-5)
        low_rank = layer.get_delta_weight("default").detach() - dense
        assert report.low_rank_norm == pytest.approx(float(low_rank.norm()), rel=1e-3, abs=1e-6)


def test_where_the_support_lies():
    """A 128 × 64 layer whose first row, and last entry, are trained."""
    indices = torch.cat([torch.arange(64), torch.tensor([128 * 64 - 1])]).int()
    tensors = {
        "base_model.model.lin.supra_shape": torch.tensor([128, 64], dtype=torch.int32),
        "base_model.model.lin.supra_indices": indices,
        "base_model.model.lin.supra_values": torch.full((65,), 2.0),
    }
    counts, moved, shape = _where(tensors, layer_reports(tensors, 16))
    assert shape == (128, 64)
    assert counts.shape == moved.shape == (64, 64)
    assert (counts[0] == 0.5).all()
    assert counts[-1, -1] == 0.5
    assert counts[1:, :-1].sum() == 0
    assert moved[0, 0] == pytest.approx(2 * 0.5**0.5)


def test_the_command_prints_and_draws(make, tmp_path):
    folder, _ = make(supra_lambda=0.5)
    result = run(folder, "--png", tmp_path / "where.png")
    assert result.exit_code == 0, result.output
    assert "model.layers.1.mlp.down_proj" in result.output
    assert "14 layers" in result.output
    image = matplotlib.image.imread(tmp_path / "where.png")
    assert image.shape[0] > 800
    assert image[..., :3].std() > 0.05


def test_json(make):
    folder, layers = make(supra_lambda=0.5, values_dtype="bf16")
    result = run(folder, "--json")
    assert result.exit_code == 0, result.output
    about = json.loads(result.output)
    assert (about["r0"], about["supra_lambda"], about["values_dtype"]) == (4, 0.5, "bf16")
    assert len(about["layers"]) == len(layers)
    assert about["bytes"] == (folder / "adapter_model.safetensors").stat().st_size


def test_json_has_no_bare_nan(make, tiny_llama):
    folder, _ = make(supra_lambda=0.5)
    model = PeftModel.from_pretrained(tiny_llama(), folder)
    with torch.no_grad():
        next(tensor for name, tensor in model.named_parameters() if "supra_values" in name)[0] = float("nan")
        next(tensor for name, tensor in model.named_parameters() if "supra_L" in name)[0, 0] = float("inf")
    model.save_pretrained(folder)
    result = run(folder, "--json")
    assert result.exit_code == 0, result.output
    layers = json.loads(result.output, parse_constant=lambda constant: pytest.fail(f"{constant} is no JSON"))["layers"]
    assert None in [layer["moved_rms"] for layer in layers]
    assert None in [layer["low_rank_norm"] for layer in layers]
    assert None not in [layer["entries"] for layer in layers]


# As the start of Python does it, with this checkout's hook and no other.
AXOLOTL = """
import importlib.util, sys
sys.meta_path[:] = [finder for finder in sys.meta_path if type(finder).__name__ != "_PostImport"]
spec = importlib.util.spec_from_file_location("hook_of_this_checkout", sys.argv.pop(1))
spec.loader.exec_module(importlib.util.module_from_spec(spec))
from axolotl.cli.main import main
main()
"""


@pytest.mark.parametrize("command", ["inspect", "overlap"])
def test_json_is_all_that_is_on_stdout(make, command):
    folder, _ = make(supra_lambda=0.5)
    hook = Path(axolotl_supertune.__file__).parent / "plugin" / "autoload" / "_axolotl_supertune_autoload.py"
    folders = [folder] if command == "inspect" else [folder, shutil.copytree(folder, folder.parent / "copy")]
    arguments = [hook, "supertune", command, *folders, "--json"]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}  # as in containers
    environment.pop("AXOLOTL_SUPERTUNE_AUTOLOAD", None)
    done = subprocess.run(
        [sys.executable, "-c", AXOLOTL, *map(str, arguments)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)
    assert "@@" in done.stderr  # the banner


def test_what_is_no_adapter_is_named(make, tmp_path):
    folder, _ = make(supra_lambda=0.5)
    (folder / "adapter_model.safetensors").write_bytes(b"short")
    result = run(folder)
    assert result.exit_code == 1
    assert "adapter_model.safetensors" in result.output
    (folder / "adapter_config.json").unlink()
    assert "holds no adapter_config.json" in run(folder).output
