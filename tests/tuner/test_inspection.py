"""What `axolotl supertune inspect` says of an adapter."""

import json

import matplotlib.image
import pytest
import torch
from click.testing import CliRunner
from peft import PeftModel, get_peft_model

from axolotl_supertune import SupraConfig
from axolotl_supertune.commands.inspect import inspect
from axolotl_supertune.tuner import SupraLayer, read_adapter
from axolotl_supertune.tuner.inspection import kind_reports, layer_reports, summed, support_map


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
        report, budget = reports[layer.layer_name], layer.supra_budget["default"]
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
    counts, moved, shape = support_map(tensors, layer_reports(tensors, 16))
    assert shape == (128, 64)
    assert counts.shape == moved.shape == (64, 64)
    assert (counts[0] == 0.5).all()
    assert counts[-1, -1] == 0.5
    assert counts[1:, :-1].sum() == 0
    assert moved[0, 0] == pytest.approx(2 * 0.5**0.5)


def test_kinds_are_the_sums_of_their_layers():
    """Two q_proj of 2 × 4 and one odd layer, which comes first in the file and last in the report."""
    tensors = {
        "base_model.model.0.odd.supra_shape": torch.tensor([3, 5]),
        "base_model.model.0.odd.supra_L": torch.ones(3, 2),
        "base_model.model.0.odd.supra_R": torch.ones(2, 5),
    }
    for layer, indices, values in (("0.q_proj", [0, 1, 4], [1.0, 2.0, 2.0]), ("1.q_proj", [7], [-4.0])):
        tensors[f"base_model.model.{layer}.supra_shape"] = torch.tensor([2, 4])
        tensors[f"base_model.model.{layer}.supra_indices"] = torch.tensor(indices, dtype=torch.int32)
        tensors[f"base_model.model.{layer}.supra_values"] = torch.tensor(values)
        tensors[f"base_model.model.{layer}.supra_L"] = torch.ones(2, 1)
        tensors[f"base_model.model.{layer}.supra_R"] = torch.ones(1, 4)
    layers = layer_reports(tensors, 2)
    q_proj, odd = kind_reports(layers)
    assert (q_proj.kind, q_proj.layers, q_proj.shapes, q_proj.ranks) == ("q_proj", 2, [(2, 4)], [1])
    assert (q_proj.entries, q_proj.parameters, q_proj.density) == (4, 4 + 2 * 6, 4 / 16)
    assert (q_proj.rows_touched, q_proj.columns_touched) == (3 / 4, 3 / 8)
    assert q_proj.moved_rms == pytest.approx(2.5)  # √((1 + 4 + 4 + 16) / 4)
    assert q_proj.moved_max == 4
    assert q_proj.low_rank_rms == pytest.approx(2)  # γ = 2, L·R all ones
    assert (odd.kind, odd.entries, odd.moved_rms) == ("odd", 0, 0)
    assert odd.low_rank_rms == pytest.approx(2)  # γ = 1, L·R all twos
    total = summed("all", layers)
    assert (total.layers, total.ranks, total.entries, total.density) == (3, [1, 2], 4, 4 / 31)


def test_the_summary_comes_first_and_layers_on_request(make):
    folder, _ = make(supra_lambda=0.5)
    short, long = run(folder), run(folder, "--layers")
    assert [short.exit_code, long.exit_code] == [0, 0], short.output + long.output
    assert long.output.startswith(short.output)
    lines = [" ".join(line.split()) for line in short.output.splitlines()]
    assert lines[0] == f"Supra adapter {folder}"
    assert "Method: Supra, λ = 0.5, α = 16, support magnitude-bottom" in lines
    kinds = [line.partition(" ")[2].split()[1] for line in lines if line.startswith("2 × ")]
    assert kinds == ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    assert "model.layers.1.mlp.down_proj" not in short.output
    assert "model.layers.1.mlp.down_proj" in long.output
    table = short.output.partition("\n\n")[2]
    assert "γLR rms" in table
    assert max(map(len, table.splitlines())) <= 80


def test_an_adapter_without_a_part_says_so(make):
    folder, _ = make(supra_lambda=0)
    total = next(line for line in run(folder).output.splitlines() if line.strip().startswith("14 layers"))
    assert total.split()[2] == "0"  # the rank
    assert total.split()[-1] == "–"  # γ·L·R


@pytest.mark.slow
def test_the_command_prints_and_draws(make, tmp_path):
    folder, _ = make(supra_lambda=0.5)
    result = run(folder, "--png", tmp_path / "where.png")
    assert result.exit_code == 0, result.output
    assert "14 layers" in result.output
    image = matplotlib.image.imread(tmp_path / "where.png")
    assert image.shape[0] > 800
    assert image[..., :3].std() > 0.05


@pytest.mark.parametrize("option", ["--json", "--output"])
def test_json(make, tmp_path, option):
    folder, layers = make(supra_lambda=0.5, values_dtype="bf16")
    result = run(folder, option, tmp_path / "adapter.json")
    assert result.exit_code == 0, result.output
    assert "14 layers" in result.stdout
    about = json.loads((tmp_path / "adapter.json").read_text(encoding="utf-8"))
    assert (about["r0"], about["supra_lambda"], about["values_dtype"]) == (4, 0.5, "bf16")
    assert len(about["layers"]) == len(layers)
    assert sum(kind["layers"] for kind in about["kinds"]) == len(layers)
    assert about["bytes"] == (folder / "adapter_model.safetensors").stat().st_size


def test_json_has_no_bare_nan(make, tiny_llama, tmp_path):
    folder, _ = make(supra_lambda=0.5)
    model = PeftModel.from_pretrained(tiny_llama(), folder)
    with torch.no_grad():
        next(tensor for name, tensor in model.named_parameters() if "supra_values" in name)[0] = float("nan")
        next(tensor for name, tensor in model.named_parameters() if "supra_L" in name)[0, 0] = float("inf")
    model.save_pretrained(folder)
    result = run(folder, "--json", tmp_path / "adapter.json")
    assert result.exit_code == 0, result.output
    text = (tmp_path / "adapter.json").read_text(encoding="utf-8")
    layers = json.loads(text, parse_constant=lambda constant: pytest.fail(f"{constant} is no JSON"))["layers"]
    assert None in [layer["moved_rms"] for layer in layers]
    assert None in [layer["low_rank_norm"] for layer in layers]
    assert None not in [layer["entries"] for layer in layers]


def test_what_is_no_adapter_is_named(make, tmp_path):
    folder, _ = make(supra_lambda=0.5)
    (folder / "adapter_model.safetensors").write_bytes(b"short")
    result = run(folder)
    assert result.exit_code == 1
    assert "adapter_model.safetensors" in result.output
    (folder / "adapter_config.json").unlink()
    assert "holds no adapter_config.json" in run(folder).output
