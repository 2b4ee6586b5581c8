"""The benchmark on a CPU: rows, files, refusals, and the paper's layer against `sparse_linear`."""

import errno
import json
from dataclasses import replace

import peft
import pytest
import torch
from click.testing import CliRunner
from torch import nn

from axolotl_supertune.bench import measurement, report, run, worker
from axolotl_supertune.bench.methods import PaperLinear
from axolotl_supertune.commands.bench import bench
from axolotl_supertune.ops import Sparse, sparse_linear

TINY = measurement.Measurement(
    "floor",
    "tiny",
    "cpu",
    batch_size=2,
    sequence_len=8,
    steps=3,
    warmup=1,
    calibration_samples=8,
    calibration_sequence_len=16,
)
# Σ 8·(out + in) over both blocks of the tiny shape
BUDGET = 2 * 8 * (2 * (64 + 64) + 2 * (32 + 64) + 3 * (64 + 160))
SMALL = ["--device", "cpu", "--batch-size", "2", "--sequence-len", "8", "--steps", "3", "--warmup", "1"]


def methods():
    return [name for name in measurement.METHODS if hasattr(peft, measurement.PEFT_CLASSES.get(name, "LoraConfig"))]


@pytest.fixture(scope="module")
def rows():
    """A function method → row, each measured once, in this process."""
    made = {}

    def row(method):
        if method not in made:
            made[method] = worker.measure(replace(TINY, method=method))
        return made[method]

    return row


@pytest.fixture
def measured(monkeypatch, rows):
    """The command with measurements of this process: what is tested is what it makes of them."""
    monkeypatch.setattr(run, "_measure", lambda wanted: dict(rows(wanted.method)))


def invoke(*arguments):
    return CliRunner().invoke(bench, [str(each) for each in arguments])


@pytest.mark.parametrize("method", methods())
def test_a_row_has_every_field(rows, method):
    row = rows(method)
    assert row["method"] == method
    assert row["status"] == "ok"
    assert json.loads(json.dumps(row)) == row
    assert {"trainable", "checkpoint_bytes", "peak_gib", "adam_mib", "index_mib", "step_ms_min"} <= set(row)
    assert 0 < row["step_ms_min"] <= row["step_ms"]
    assert row["steps_per_s"] == pytest.approx(1000 / row["step_ms"])
    assert row["tokens_per_s"] == pytest.approx(16 * row["steps_per_s"])
    assert row["peak_gib"] is None  # nobody counts it on a CPU


@pytest.mark.parametrize("method", [name for name in methods() if name not in ("floor", "full")])
def test_all_adapters_have_one_budget(rows, method):
    row = rows(method)
    # PEFT's supertuning rounds its count down in each of the 14 layers.
    assert BUDGET - 14 * (method == "peft-supertuning") <= row["trainable"] <= BUDGET
    # AdamW keeps two fp32 moments, and a step count for each tensor.
    assert row["adam_mib"] * 2**20 == pytest.approx(8 * row["trainable"], rel=0.01)
    assert row["checkpoint_bytes"] > 4 * row["trainable"]


def test_floor_and_full_are_the_two_ends(rows):
    assert (rows("floor")["trainable"], rows("floor")["adam_mib"], rows("floor")["checkpoint_bytes"]) == (0, 0, 0)
    full = sum(parameter.numel() for parameter in worker.build_model(TINY).parameters())
    assert rows("full")["trainable"] == full == measurement.parameter_count("tiny")
    assert rows("full")["checkpoint_bytes"] == 4 * full


def test_index_storage_counts_the_support_alone(rows):
    assert rows("paper")["index_mib"] * 2**20 == 4 * BUDGET
    assert rows("super")["index_mib"] * 2**20 >= 4 * BUDGET
    assert rows("lora")["index_mib"] == 0


def test_the_shapes_are_the_published_models():
    sizes = {"llama3-8b": 8_030_261_248, "llama3.2-1b": 1_235_814_400, "smollm2-135m": 134_515_008}
    assert {name: measurement.parameter_count(name) for name in sizes} == sizes


def test_calibration_is_timed_beside_the_bare_forward(rows):
    row = rows("super-wanda")
    assert row["calibration_seconds"] > 0
    assert row["calibration_forward_seconds"] > 0
    assert "calibration_seconds" not in rows("super")


def test_the_wanda_support_is_skewed():
    counts = {}
    for method in ("super", "super-wanda"):
        model, row = worker.build_model(TINY), {}
        norms = worker._skewed_norms(model, TINY, row) if method == "super-wanda" else None
        adapted = worker.apply_method(model, replace(TINY, method=method), norms)
        layer = adapted.base_model.model.model.layers[1].self_attn.o_proj
        counts[method] = torch.bincount(layer.supra_indices["default"].long() % 64, minlength=64).double()
    assert counts["super-wanda"].std() > 2 * counts["super"].std()


def test_the_papers_layer_computes_what_ours_does():
    torch.manual_seed(0)
    base = nn.Linear(13, 7, dtype=torch.float64).requires_grad_(False)
    indices = torch.randperm(91)[:17].sort().values.to(torch.int32)
    values = torch.randn(17, dtype=torch.float64)
    x, weight = torch.randn(3, 5, 13, dtype=torch.float64), torch.randn(3, 5, 7, dtype=torch.float64)
    results = []
    for ours in (False, True):
        inputs = x.clone().requires_grad_()
        layer = PaperLinear(base, indices)
        layer.values.data.copy_(values)
        y = sparse_linear(inputs, base.weight, base.bias, [Sparse(layer.values, indices)]) if ours else layer(inputs)
        (y * weight).sum().backward()
        results.append((y.detach(), inputs.grad, layer.values.grad))
    for plain, own in zip(*results, strict=True):
        torch.testing.assert_close(plain, own, rtol=1e-12, atol=1e-12)


@pytest.mark.usefixtures("measured")
def test_the_command_leaves_a_table_and_two_files(tmp_path, monkeypatch):
    monkeypatch.setenv("SUPERTUNE_KERNELS", "reference")
    result = invoke("--methods", "super", *SMALL, "--output", tmp_path)
    assert result.exit_code == 0, result.output
    assert "not the claim" in result.output
    saved = json.loads((tmp_path / "bench.json").read_text())
    assert [row["method"] for row in saved["rows"]] == ["floor", "super", "floor"]
    assert [bool(row.get("again")) for row in saved["rows"]] == [False, False, True]
    assert {"device", "date", "versions", "command", "model", "job", "cpu"} <= set(saved)
    assert saved["command"].startswith(
        "SUPERTUNE_KERNELS=reference axolotl supertune bench --methods super --batch-size 2"
    )
    floors = [row["step_ms"] for row in saved["rows"] if row["method"] == "floor"]
    assert saved["rows"][1]["step_times_floor"] == pytest.approx(saved["rows"][1]["step_ms"] / (sum(floors) / 2))
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")


def test_a_full_disk_does_not_hide_the_table(tmp_path, monkeypatch):
    def full(path, result):
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    row = {"status": "ok", "step_ms": 1.0}
    monkeypatch.setattr(run, "run", lambda *_: iter([{"rows": [row]}]))
    monkeypatch.setattr(run, "_write_json", full)
    monkeypatch.setattr("axolotl_supertune.bench.report.print_table", lambda result: print("the table"))
    result = invoke("--methods", "super", *SMALL, "--output", tmp_path)
    assert result.exit_code == 1
    assert "the table" in result.output
    assert "bench.json: No space left on device" in " ".join(result.output.split())


@pytest.mark.slow
def test_each_method_has_a_process_and_one_that_fails_is_a_row_and_an_exit_code(tmp_path):
    # r0 = 30 is more than the 32×64 k_proj has weights for.
    result = invoke("--methods", "super", *SMALL, "--r0", "30", "--output", tmp_path)
    assert result.exit_code == 1
    saved = json.loads((tmp_path / "bench.json").read_text())
    assert [row["status"] for row in saved["rows"]] == ["ok", "failed", "ok"]
    assert "BudgetError" in saved["rows"][1]["note"]
    assert "k_proj" in result.output
    assert saved["rows"][0]["warnings"] == []
    assert (tmp_path / "bench.png").is_file()


def test_a_worker_that_dies_is_a_row(monkeypatch):
    monkeypatch.setattr(run.sys, "executable", "false")
    row = run._measure(TINY)
    assert (row["method"], row["status"]) == ("floor", "failed")
    assert "code 1" in row["note"]


@pytest.mark.usefixtures("measured")
def test_what_is_not_installed_is_listed(tmp_path, monkeypatch):
    monkeypatch.delattr(peft, "SupertuningConfig", raising=False)
    result = invoke("--methods", "peft-supertuning,lora", *SMALL, "--output", tmp_path)
    assert result.exit_code == 0, result.output
    row = json.loads((tmp_path / "bench.json").read_text())["rows"][1]
    assert row["status"] == "not installed"
    assert f"PEFT {peft.__version__} has no SupertuningConfig" in result.output


@pytest.mark.usefixtures("measured")
def test_markdown_from_an_earlier_run(tmp_path):
    assert invoke("--methods", "super,paper", *SMALL, "--output", tmp_path).exit_code == 0
    result = invoke("--from", tmp_path / "bench.json", "--markdown")
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert [line.split(" | ")[0] for line in lines[2:6]] == ["| floor", "| super", "| paper", "| floor (again)"]
    assert len({line.count("|") for line in lines[:6]}) == 1
    assert len(lines[0].split("|")) == len(report.COLUMNS) + 2
    table = invoke("--from", tmp_path / "bench.json")
    assert f"{BUDGET:,}" in table.output


@pytest.mark.usefixtures("measured")
def test_a_yaml_gives_shape_and_settings(tmp_path):
    measurement.model_config("tiny").save_pretrained(tmp_path / "base")
    path = tmp_path / "run.yml"
    path.write_text(
        f"base_model: {tmp_path / 'base'}\nlora_r: 4\nsupra_lambda: 0.5\nlora_dropout: 0\nmicro_batch_size: 3\n"
        "sequence_len: 11\nattn_implementation: eager\ngradient_checkpointing: true\nsample_packing: true\n"
        "torch_compile: false\nliger_rms_norm: true\n"
    )
    made = run.measurement_for(str(path), "cpu", {"batch_size": 2})
    assert (made.r0, made.supra_lambda, made.lora_dropout, made.sequence_len) == (4, 0.5, 0, 11)
    assert (made.batch_size, made.attn_implementation, made.warmup) == (2, "eager", 5)
    assert made.gradient_checkpointing is True
    assert worker.measure(replace(made, method="supra", steps=1, warmup=1))["trainable"] == BUDGET // 2
    result = invoke("--model", path, "--methods", "floor", *SMALL, "--output", tmp_path / "out")
    assert "weights are random" in result.output
    assert "a training's step depends on them: liger_rms_norm, sample_packing." in " ".join(result.output.split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--device", "cpu", "--model", "llama3.2-1b"], "take --model tiny or smollm2-135m"),
        (["--model", "llama4"], "neither one of llama3-8b"),
        (["--methods", "super,lola"], "'lola' is not one of floor"),
    ],
)
def test_refusals_name_the_remedy(arguments, message):
    result = invoke(*arguments)
    assert result.exit_code != 0
    assert message in " ".join(result.output.split())


def test_a_yaml_whose_base_model_is_on_the_hub_is_refused(tmp_path):
    (tmp_path / "run.yml").write_text("base_model: meta-llama/Llama-3.2-1B\n")
    result = invoke("--device", "cpu", "--model", tmp_path / "run.yml")
    assert "is no local folder" in result.output


def test_a_profile_is_a_table_of_operators(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "_measure", worker.measure)
    result = invoke("--profile", "paper", *SMALL, "--output", tmp_path)
    assert result.exit_code == 0, result.output
    assert "aten::index_add" in (tmp_path / "profile_paper.txt").read_text()
    assert not (tmp_path / "bench.json").exists()


def test_methods_on_4_bits_are_quantized_and_hold_no_other_copy(rows):
    for method in measurement.ON_4_BITS:
        model = worker.build_model(replace(TINY, method=method))
        layers = [module for module in model.modules() if type(module).__name__ == "Linear4bit"]
        assert len(layers) == 14
        assert {(layer.weight.quant_state.quant_type, layer.weight.quant_state.nested) for layer in layers} == {
            ("nf4", True)
        }
        assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
        assert rows(method)["trainable"] == BUDGET
    checkpointed = worker.measure(replace(TINY, method="qsupra", gradient_checkpointing=True))
    assert checkpointed["trainable"] == BUDGET


def test_a_limit_of_memory_needs_a_gpu(measured, tmp_path):
    result = invoke(*SMALL, "--memory-limit", 24, "--output", tmp_path)
    assert result.exit_code == 1
    assert "--memory-limit 24.0: it limits a GPU" in result.output
