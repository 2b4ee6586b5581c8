"""`axolotl supertune plan`: the numbers are training's, the refusals too, and no weight is needed."""

import importlib.util
import json
import re
import shutil
import subprocess
import sys
import time

import pytest
import torch
from axolotl.utils.dict import DictDefault
from click.testing import CliRunner
from transformers import LlamaConfig

from axolotl_supertune import ActivationNorms, SupertunePlugin, calibrate
from axolotl_supertune.commands import cli
from axolotl_supertune.plugin.plan import plan
from axolotl_supertune.plugin.plan.from_yaml import engine_of
from axolotl_supertune.plugin.plan.memory import GIB
from axolotl_supertune.plugin.plan.report import as_json

LLAMA_70B = {
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
}
LLAMA_405B = {
    **LLAMA_70B,
    "hidden_size": 16384,
    "intermediate_size": 53248,
    "num_hidden_layers": 126,
    "num_attention_heads": 128,
}


@pytest.fixture
def run(write):
    """A function (mapping, *options) → the command's result."""

    def run(mapping, *options):
        return CliRunner().invoke(cli.supertune, ["plan", write(mapping), *map(str, options)])

    return run


@pytest.fixture
def large(settings, tmp_path):
    """A function (config of a Llama, **changes) → settings of a run in bf16 on a base that is a config.json alone."""

    def large(config, **changes):
        LlamaConfig(**config).save_pretrained(tmp_path / "large")
        changes = {"bf16": True, "fp16": None, "val_set_size": 0, "eval_steps": None, **changes}
        return settings(base_model=str(tmp_path / "large"), **changes)

    return large


@pytest.mark.parametrize("changes", [{}, {"adapter": "super", "lora_target_modules": ["q_proj", "down_proj"]}])
def test_the_table_is_the_one_that_training_logs(settings, train, run, monkeypatch, tmp_path, changes):
    mapping = settings(max_steps=1, eval_steps=None, **changes)
    planned = run(mapping, "--json", tmp_path / "plan.json")
    assert planned.exit_code == 0, planned.output
    logged = []
    with monkeypatch.context() as patch:
        patch.setattr("axolotl_supertune.plugin.plugin.LOG.info", lambda message, *args: logged.append(message % args))
        trainer = train(mapping)
    # Line by line: a console that is wider puts spaces behind the title.
    table = [line.rstrip() for line in planned.output.splitlines()]
    table = table[next(at for at, line in enumerate(table) if line.startswith("Sup")) :]
    table = table[: next(at for at, line in enumerate(table) if line.startswith("total")) + 1]
    assert 10 < max(map(len, table)) <= 80
    log = [line.rstrip() for line in "\n".join(logged).splitlines()]
    start = log.index(table[0])
    assert log[start : start + len(table)] == table
    written = json.loads((tmp_path / "plan.json").read_text())
    trained = sum(parameter.numel() for parameter in trainer.model.parameters() if parameter.requires_grad)
    assert written["total"]["parameters"] == trained == sum(row["parameters"] for row in written["layers"])


@pytest.mark.parametrize(("config", "parameters"), [(LLAMA_70B, 70.6e9), (LLAMA_405B, 405.9e9)], ids=["70B", "405B"])
def test_a_large_llama_plans_in_seconds(large, run, tmp_path, config, parameters):
    fsdp = {"fsdp_version": 2, "fsdp_config": {"reshard_after_forward": True}}
    start = time.perf_counter()
    planned = run(large(config, **fsdp), "--gpus", 8, "--gpu-memory", "80GiB", "--json", tmp_path / "plan.json")
    assert time.perf_counter() - start < 30
    written = json.loads((tmp_path / "plan.json").read_text())
    shape = written["memory"]["shape"]
    assert shape["linear"] + shape["embeddings"] + shape["other"] == pytest.approx(parameters, rel=0.01)
    assert {row["layers"] for row in written["layers"]} == {config["num_hidden_layers"]}
    assert written["memory"]["engine"]["name"] == "FSDP2"
    assert written["memory"]["parts_gib"]["base weights"] == pytest.approx(2 * parameters / 8 / GIB, rel=0.01)
    assert written["memory"]["fits"] is (parameters < 1e11)
    assert ("fits" if parameters < 1e11 else "does not fit") in planned.output


def test_memory_is_said_in_sentences_and_adds_up(large, run, tmp_path):
    planned = run(large(LLAMA_70B, micro_batch_size=2), "--json", tmp_path / "plan.json")
    memory = json.loads((tmp_path / "plan.json").read_text())["memory"]
    needed = f"{memory['needed_gib']:.1f}"
    assert (
        f"The GPU needs about {needed} GiB of memory, for micro batches of 2 sequences of 256 tokens" in planned.output
    )
    _, _, table = planned.output.partition("The GPU needs")
    rows = dict(re.findall(r"^(\w.*?)  +([\d.]+) *$", table, re.MULTILINE))
    sizes = {name: float(size) for name, size in rows.items()}
    *parts, training, calibration, unusable, cuda, _ = sizes.values()
    assert sum(parts) == pytest.approx(training, abs=0.1)
    assert training + unusable + cuda == pytest.approx(memory["needed_gib"], abs=0.1)
    assert calibration == pytest.approx(memory["calibration_peak_gib"], abs=0.01)
    assert "INFO" not in planned.output  # what Axolotl logs of its progress

    sharded = {"fsdp_version": 2, "fsdp_config": {"reshard_after_forward": True}}
    planned = run(large(LLAMA_70B, **sharded, micro_batch_size=1), "--gpus", 8)
    assert re.search(
        r"Each of the 8 GPUs \(FSDP2\) needs about [\d.]+ GiB.* of 1 sequence of 256 tokens", planned.output
    )


@pytest.mark.parametrize(
    ("changes", "memory", "remedy"),
    [
        (
            {},
            "80GiB",
            "The base model alone is too large: quantize it, shard it over more GPUs, or take a smaller one.",
        ),
        (
            {"micro_batch_size": 8, "gradient_checkpointing": None},
            "160GiB",
            "Less is needed with gradient_checkpointing: true, a lower micro_batch_size, a lower sequence_len.",
        ),
        (
            {"micro_batch_size": 1, "sequence_len": 65536, "gradient_checkpointing": True},
            "160GiB",
            "Less is needed with a lower sequence_len.",
        ),
        (
            {"calibration_sequence_len": 8192, "calibration_batch_size": 8, "calibration_samples": 8},
            "150GiB",
            "The calibration needs most: lower calibration_batch_size.",
        ),
    ],
)
def test_a_plan_that_does_not_fit_says_what_would_lower_it(large, run, changes, memory, remedy):
    planned = run(large(LLAMA_70B, **changes), "--gpu-memory", memory)
    assert planned.exit_code == 1
    said = next(line for line in planned.output.splitlines() if line.startswith("It does not fit into the"))
    assert said.endswith(f"GiB are missing. {remedy}")


@pytest.mark.parametrize(
    "changes",
    [
        {"rl": "dpo"},
        {"relora": True},
        {"optimizer": "muon"},
        {"fsdp_config": {"fsdp_version": 1}},
        {"deepspeed": {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}}},
        {"peft_use_dora": True},
        {"calibration_path": "nowhere.safetensors"},
        {"resume_from_checkpoint": "nowhere"},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_a_refusal_is_the_error_of_training(settings, load, run, changes):
    with pytest.raises((ValueError, FileNotFoundError)) as error:
        load(settings(**changes))
    planned = run(settings(**changes))
    assert planned.exit_code == 1
    assert f"Refused: {error.value}" in planned.output
    assert "total" in planned.output


@pytest.fixture
def norms_file(base, tmp_path):
    """A function (change: norms → norms) → a file of norms of the tiny Llama, changed."""
    from transformers import AutoModelForCausalLM

    def make(change):
        model = AutoModelForCausalLM.from_pretrained(base)
        norms = calibrate(model, [torch.arange(3, 40)[None]], progress=False)
        ActivationNorms(change(norms.norms), norms.fingerprint, norms.provenance).save(tmp_path / "norms.safetensors")
        return str(tmp_path / "norms.safetensors")

    return make


NO_TEXT = dict.fromkeys(("calibration_dataset", "calibration_samples", "calibration_sequence_len"))
GRADIENT = {"mask_score": "gradient", "sparse_direction": "top", "calibration_dataset": None}
WARMUP = {**GRADIENT, "low_rank_warmup_steps": 22, "max_steps": None, "eval_steps": None, "num_epochs": 1}


@pytest.mark.parametrize(
    ("changes", "at_most"),
    [
        ({"calibration_samples": 1000}, None),
        ({"calibration_sequence_len": 512, "calibration_samples": 9}, None),
        ({"calibration_dataset": "training_set", "calibration_samples": 44}, None),
        ({**GRADIENT, "gradient_batches": 12, "gradient_accumulation_steps": 2}, "micro batches"),
        (WARMUP, "steps"),
    ],
    ids=["few windows", "short text", "few records", "few batches", "few steps"],
)
def test_too_little_data_is_refused_in_the_words_of_training(settings, train, run, changes, at_most):
    """48 records, 5 of them for validation."""
    with pytest.raises(ValueError) as error:  # noqa: PT011 (compared below)
        train(settings(**changes))
    planned = run(settings(**changes))
    assert planned.exit_code == 1
    said = planned.output.replace(" (at most)", "").replace(" at most", "")
    assert f"Refused: {error.value}" in said
    assert (" at most" in planned.output or "(at most)" in planned.output) == (at_most is not None)


def test_just_enough_data_is_not_refused(settings, run):
    for changes in (
        {"calibration_dataset": "training_set", "calibration_samples": 43},
        {**GRADIENT, "gradient_batches": 11, "gradient_accumulation_steps": 2},
        {**WARMUP, "low_rank_warmup_steps": 21},
    ):
        planned = run(settings(**changes))
        assert planned.exit_code == 0, planned.output
        assert "Refused" not in planned.output


@pytest.mark.parametrize(
    "change",
    [
        lambda norms: {name: torch.ones(len(norm) + 1) for name, norm in norms.items()},
        lambda norms: {name.replace("layers.1", "layers.7"): norm for name, norm in norms.items()},
        lambda norms: {name: norm for name, norm in norms.items() if "down_proj" not in name},
        lambda norms: {name: norm * float("nan") for name, norm in norms.items()},
    ],
    ids=["shapes", "layers", "too few", "NaN"],
)
def test_norms_of_other_layers_are_refused_in_the_words_of_training(settings, train, run, norms_file, change):
    mapping = settings(calibration_path=norms_file(change), **NO_TEXT)
    with pytest.raises(ValueError) as error:  # noqa: PT011 (compared below)
        train(mapping)
    planned = run(mapping)
    assert planned.exit_code == 1
    assert f"Refused: {error.value}" in planned.output


def test_norms_of_this_model_are_checked_but_for_its_weights(settings, run, norms_file):
    planned = run(settings(calibration_path=norms_file(dict), **NO_TEXT))
    assert planned.exit_code == 0, planned.output
    assert "Not checked: calibration_path: whether its norms were measured on these weights" in planned.output
    assert "Nothing in this config is refused, but for what is not checked above." in planned.output


@pytest.mark.parametrize("key", ["datasets", "test_datasets"])
@pytest.mark.parametrize("path", ["gone.jsonl", "./gone", "/gone/at/all", "data/of/mine", ""])
def test_a_data_set_that_is_missing_or_empty_is_refused(settings, run, tmp_path, key, path):
    (tmp_path / "empty.jsonl").touch()
    changes = {key: [{"path": path or str(tmp_path / "empty.jsonl"), "type": "alpaca"}]}
    planned = run(settings(val_set_size=None if key == "test_datasets" else 0.1, **changes))
    assert planned.exit_code == 1
    assert f"{key}[0].path: " in planned.output.partition("Refused: ")[2]
    assert ("is empty" if not path else f"there is no file or folder {path}.") in planned.output


def test_what_was_prepared_needs_no_file(settings, run, tmp_path):
    (tmp_path / "prepared" / "0123").mkdir(parents=True)
    planned = run(settings(datasets=[{"path": "gone.jsonl", "type": "alpaca"}]))
    assert planned.exit_code == 0, planned.output
    assert "Not checked: datasets[0].path: there is no file or folder gone.jsonl, so training needs" in planned.output


@pytest.mark.parametrize(
    ("changes", "unchecked"),
    [
        ({"calibration_dataset": None}, "calibration_dataset: allenai/c4 is no local file, and plan downloads nothing"),
        ({"datasets": [{"path": "openai/gsm8k", "type": "alpaca"}]}, "datasets[0].path: openai/gsm8k is no local file"),
        (
            {"tokenizer_config": "nobody/no-tokenizer"},
            "count them: the tokenizer of nobody/no-tokenizer is not on this machine",
        ),
        ({"calibration_dataset": "training_set"}, "calibration_samples: training needs 4 records after tokenizing"),
        (
            {**GRADIENT, "datasets": [{"path": "openai/gsm8k", "type": "alpaca"}]},
            "gradient_batches: whether there are 8 batches",
        ),
        ({"added_tokens_overrides": {5: "<new>"}}, "added_tokens_overrides makes another tokenizer"),
    ],
)
def test_what_only_a_download_would_tell_is_unchecked(settings, run, tmp_path, changes, unchecked):
    planned = run(settings(**changes), "--json", tmp_path / "plan.json")
    assert planned.exit_code == 0, planned.output
    said = json.loads((tmp_path / "plan.json").read_text())["unchecked"]
    assert any(unchecked in each for each in said)
    assert all(f"Not checked: {each}." in planned.output for each in said)


@pytest.mark.parametrize(
    ("changes", "title", "unused"),
    [
        ({}, "Supra, λ = 0.8: wanda-bottom, the budget of a LoRA of rank 8", set()),
        (
            {"supra_lambda": 1.0},
            "Supra, λ = 1.0: no single weights, the budget of a LoRA of rank 8",
            {"mask_score", "sparse_direction"},
        ),
        (
            {"adapter": "super", "sparse_direction": "random"},
            "Super: random (seed 0), the budget of a LoRA of rank 8",
            {"mask_score"},
        ),
        (
            {"supra_lambda": 1.0, "lora_r": None, "sparse_density": 0.3, "mask_score": "magnitude"},
            "Supra, λ = 1.0: magnitude-bottom, density 0.3",
            set(),
        ),
        (
            {"sparse_direction": "hybrid", "support_scope": "row"},
            "wanda-hybrid (β = 0.5), by row, the budget of a LoRA of rank 8",
            set(),
        ),
    ],
)
def test_a_score_is_named_only_where_it_is_used(settings, run, tmp_path, changes, title, unused):
    planned = run(settings(**changes), "--json", tmp_path / "plan.json")
    assert title in planned.output
    method = json.loads((tmp_path / "plan.json").read_text())["method"]
    assert {key for key in ("mask_score", "sparse_direction") if method[key] is None} == unused


@pytest.mark.parametrize("content", ["other norms", "no norms"])
def test_a_calibration_file_that_training_refuses_is_refused(settings, run, tmp_path, content):
    path = tmp_path / "norms.safetensors"
    if content == "other norms":
        ActivationNorms({"layer": torch.ones(3)}, "of a model", {"samples": 16}).save(path)
    else:
        path.write_text("hello")
    planned = run(settings(calibration_path=str(path), calibration_samples=99))
    assert planned.exit_code == 1
    expected = f"beside calibration_path: {path}" if content == "other norms" else str(path)
    assert expected in planned.output.partition("Refused: ")[2]


def test_a_base_that_another_library_quantized_is_refused(settings, run, base, tmp_path):
    folder = tmp_path / "gptq"
    shutil.copytree(base, folder)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4}
    (folder / "config.json").write_text(json.dumps(config))
    planned = run(settings(base_model=str(folder)))
    assert planned.exit_code == 1, planned.output
    assert f"base_model: {folder} is quantized by gptq" in " ".join(planned.output.split())


@pytest.mark.parametrize(
    ("key", "value"),
    [("sequence_len", "long"), ("micro_batch_size", "many"), ("num_epochs", "x"), ("evals_per_epoch", 0.5)],
)
def test_a_value_of_a_wrong_type_is_named_and_the_rest_planned(settings, run, key, value):
    planned = run(settings(**{"eval_steps": None, key: value}))
    assert planned.exit_code == 1, planned.exception
    assert f"Refused: {key}: {value}: Input should be a valid" in planned.output
    assert "GiB" in planned.output


def test_every_refusal_is_named_and_the_rest_planned(settings, run, tmp_path):
    changes = {"rl": "dpo", "relora": True, "calibration_path": "nowhere.safetensors", "datasets": None}
    planned = run(settings(**changes), "--json", tmp_path / "plan.json")
    refused = json.loads((tmp_path / "plan.json").read_text())["refused"]
    for start in ("rl: dpo", "relora: True", "calibration_path: there is no file"):
        assert any(line.startswith(start) for line in refused), start
    assert any("datasets" in line for line in refused), "what Axolotl itself refuses is left out"
    assert planned.exit_code == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"adapter": "lora"}, "adapter: lora: only supra and super are planned"),
        ({"lora_r": 5000}, "use r0 ≤"),
        ({"supra_lambda": 1.5}, r"supra_lambda=1.5 is not in"),
        ({"supra_lamda": 0.5}, "did you mean supra_lambda?"),
        ({"lora_target_modules": ["q_proj", "nowhere"]}, "lora_target_modules: nowhere matches no layer"),
        ({"lora_exclude_modules": ["nowhere"]}, "lora_exclude_modules: nowhere matches no module"),
        ({"base_model": "/nowhere/at/all"}, "base_model: there is no folder /nowhere/at/all. Name the folder"),
        (
            {"adapter": None, "methods": {"a": {}}},
            "only supra and super are planned. This is a file of a grid: `axolotl supertune ",
        ),
        ({"base_model": "nowhere/at-all"}, "base_model: the config of nowhere/at-all cannot be read"),
        ({"deepspeed": "nowhere.json"}, "deepspeed: nowhere.json cannot be read as a DeepSpeed config"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_cannot_be_planned_is_an_error(settings, run, changes, message):
    planned = run(settings(**changes))
    assert planned.exit_code == 1
    assert message in planned.output


@pytest.mark.parametrize(("text", "message"), [("- a\n", "not a YAML of keys"), ("a: [", "not a YAML file")])
def test_a_file_that_is_no_config(tmp_path, text, message):
    (tmp_path / "some.yml").write_text(text)
    planned = CliRunner().invoke(cli.supertune, ["plan", str(tmp_path / "some.yml")])
    assert planned.exit_code == 1
    assert message in planned.output


def test_the_size_of_a_gpu(settings, run):
    mapping = settings()
    assert "GiB are left" in run(mapping, "--gpu-memory", "24 GB").output
    small = run(mapping, "--gpu-memory", "100MiB")
    assert small.exit_code == 1
    assert "does not fit" in small.output
    assert "is no size" in run(mapping, "--gpu-memory", "much").output


def test_the_libraries_of_an_engine_need_not_be_installed_to_plan(settings, run, monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name == "deepspeed" else found(name))
    mapping = settings(deepspeed={"zero_optimization": {"stage": 2}})
    planned = run(mapping, "--gpus", 2)
    assert "not installed" not in planned.output, planned.output
    with pytest.raises(ValueError, match="deepspeed: DeepSpeed is not installed"):
        SupertunePlugin().register(mapping)


def test_a_mixture_of_experts_has_budgets_and_no_estimate(large, run, tmp_path):
    from transformers import MixtralConfig

    mapping = large(LLAMA_70B, lora_target_modules=["q_proj", "v_proj"])
    MixtralConfig(num_hidden_layers=2, num_local_experts=4).save_pretrained(mapping["base_model"])
    planned = run(mapping, "--json", tmp_path / "plan.json")
    assert "Memory is not estimated: the activations of a mixture of experts" in planned.output
    assert json.loads((tmp_path / "plan.json").read_text())["memory"] is None


@pytest.mark.parametrize(
    ("changes", "gpus", "expected"),
    [
        ({}, None, ("one GPU", 1)),
        ({}, 4, ("DDP", 4)),
        ({"fsdp_config": {"offload_params": True}}, 2, ("FSDP2", 2)),
        ({"dp_shard_size": 8, "fsdp_config": {"reshard_after_forward": False}}, None, ("FSDP2", 8)),
        ({"deepspeed": {"zero_optimization": {"stage": 0}}}, 2, ("DDP", 2)),
        ({"deepspeed": {"zero_optimization": {"stage": 1}}}, 2, ("ZeRO-1", 2)),
        ({"deepspeed": {"zero_optimization": {"stage": 2}}}, 2, ("ZeRO-2", 2)),
        ({"deepspeed": {"zero_optimization": {"stage": 3}}}, 2, ("ZeRO-3", 2)),
    ],
)
def test_the_engine_of_a_config(changes, gpus, expected):
    engine = engine_of(changes, gpus)
    assert (engine.name, engine.processes) == expected


def test_the_details_of_an_engine(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert engine_of({}, None).processes == 3
    path = tmp_path / "zero.json"
    zero = {"stage": 2, "reduce_bucket_size": 1e6, "overlap_comm": True, "offload_optimizer": {"device": "cpu"}}
    path.write_text(json.dumps({"zero_optimization": zero}))
    engine = engine_of({"deepspeed": str(path)}, 2)
    assert (engine.bucket(8), engine.overlaps, engine.offloads_optimizer, engine.offloads_weights) == (
        10**6,
        True,
        True,
        False,
    )
    assert engine_of({"fsdp_config": {"fsdp_offload_params": True}}, 2).offloads_weights
    assert engine_of({"fsdp_config": {"reshard_after_forward": False}}, 2).keeps_gathered
    with pytest.raises(ValueError, match=r"stage: 7 is none of 0 to 3"):
        engine_of({"deepspeed": {"zero_optimization": {"stage": 7}}}, 2)


def planned_step(mapping, **options):
    made = plan.make(mapping, **options)
    assert made.job is not None
    return made.job.step


@pytest.mark.slow
def test_the_step_of_a_config(large, monkeypatch):
    step = planned_step(large(LLAMA_70B, micro_batch_size=4, sequence_len=512))
    assert (step.sequences, step.length, step.attention, step.width) == (4, 512, "masked", 2)
    assert (step.base, step.checkpointing, step.loss, step.layers) == ("plain", "none", "transformers", "kernels")
    assert step.evaluated_sequences == 0
    assert planned_step(large(LLAMA_70B, sequence_len=512), tokens=100).length == 128
    assert planned_step(large(LLAMA_70B, sequence_len=512, pad_to_sequence_len=False), tokens=100).length == 100
    assert planned_step(large(LLAMA_70B, sequence_len=500, pad_to_sequence_len=True), tokens=100).length == 512
    assert planned_step(large(LLAMA_70B, sequence_len=500, pad_to_multiple_of=48)).length == 528
    evaluates = {"val_set_size": 0.1, "micro_batch_size": 2}
    assert planned_step(large(LLAMA_70B, **evaluates)).evaluated_sequences == 2
    assert planned_step(large(LLAMA_70B, **evaluates, eval_batch_size=8)).evaluated_sequences == 8
    packed = {"sample_packing": True, "micro_batch_size": 2, "sequence_len": 512, "eval_sample_packing": False}
    step = planned_step(large(LLAMA_70B, **packed), tokens=100)
    assert (step.sequences, step.length, step.attention) == (2, 512, "repeated")
    step = planned_step(large(LLAMA_70B, **packed, attn_implementation="flex_attention"))
    assert (step.sequences, step.length, step.attention) == (1, 1024, "flash")
    assert planned_step(large(LLAMA_70B, gradient_checkpointing=True)).checkpointing == "blocks"
    step = planned_step(large(LLAMA_70B, load_in_4bit=True))
    assert (step.base, step.layers) == ("nf4-double", "recomputed")  # refused or not
    sharded = plan.make(large(LLAMA_70B, fsdp_version=2, fsdp_config={"reshard_after_forward": True}), gpus=8)
    assert (sharded.job.step.base, sharded.job.step.layers) == ("plain", "gathered")
    with monkeypatch.context() as patch:
        patch.setenv("SUPERTUNE_KERNELS", "reference")
        sharded = plan.make(large(LLAMA_70B, fsdp_version=2, fsdp_config={"reshard_after_forward": True}), gpus=8)
        assert sharded.job.step.layers == "reference"
        assert not any("of the kernels only" in note for note in sharded.notes)
    assert planned_step(large(LLAMA_70B, load_in_8bit=True)).base == "int8"
    assert planned_step(large(LLAMA_70B, chunked_cross_entropy=True)).loss == "chunked"
    liger = {"plugins": ["axolotl_supertune.SupertunePlugin", "axolotl.integrations.liger.LigerPlugin"]}
    keys = {"liger_fused_linear_cross_entropy": True, "liger_rms_norm": True, "liger_glu_activation": True}
    step = planned_step(large(LLAMA_70B, **liger, **keys))
    assert (step.loss, step.thin_norms, step.mlp) == ("fused", True, "liger")
    assert planned_step(large(LLAMA_70B, bf16=False, fp16=False)).width == 4


def test_the_examples_plan(in_a_folder_of_examples, run):
    for name in ("quickstart.yml", "llama3-8b-supra.yml"):
        raw, planned = in_a_folder_of_examples(name)
        assert planned.exit_code == 0, planned.output
        assert raw["adapter"] == "supra"


@pytest.fixture
def in_a_folder_of_examples(tmp_path, monkeypatch, run):
    """A function (name of an example) → its mapping and plan, with a base model's config in place of the hub's."""
    from test_examples import EXAMPLES, LLAMA, yaml

    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(EXAMPLES)
    (tmp_path / "outputs/quickstart").mkdir(parents=True)
    (tmp_path / "outputs/quickstart/calibration.txt").write_text("text")

    def planned(name):
        raw = yaml.safe_load((EXAMPLES / name).read_text())
        LLAMA[raw["base_model"]].save_pretrained(tmp_path / "config")
        return raw, run({**raw, "base_model": str(tmp_path / "config")})

    return planned


def test_the_config_is_left_as_it_is(settings):
    mapping = settings(rl="dpo")
    before = DictDefault(json.loads(json.dumps(mapping)))
    plan.make(mapping)
    assert mapping == before


def test_help_waits_for_no_torch():
    heavy = "{'torch', 'axolotl', 'transformers'}"
    modules = "axolotl_supertune.commands.cli, axolotl_supertune.plugin.plan.plan"
    code = f"import sys, {modules}; sys.exit(bool({heavy} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_keys_of_the_json_are_those_that_programs_read(large):
    made = plan.make(large(LLAMA_70B, micro_batch_size=4, sequence_len=512, mask_score="wanda"))
    memory = as_json(made)["memory"]
    assert memory["step"]["rows"] == 4
    assert memory["step"]["evaluated_rows"] == 0
    assert memory["shape"]["linear_rows"] == made.job.shape.linear_out_features
    assert memory["calibration"]["rows"] == made.job.calibration.sequences


def test_a_choice_by_gradient_is_planned(large):
    rosa = {"mask_score": "squared_gradient", "sparse_direction": "top", "low_rank_warmup_steps": 5}
    made = plan.make(large(LLAMA_70B, **rosa))
    moment = "choice of the support by gradient"
    assert made.job.calibration is None
    assert moment in made.estimate.moments
    method = as_json(made)["method"]
    assert {key: method[key] for key in rosa} == rosa
    assert method["gradient_batches"] == 8
    assert as_json(made)["memory"]["gradient"] == {"squared": True}
    # Of RandK and of plain LoRA there is no gradient to take.
    for changes in ({"sparse_direction": "random"}, {"supra_lambda": 1.0}):
        other = plan.make(large(LLAMA_70B, **{"mask_score": "gradient", "sparse_direction": "top", **changes}))
        assert moment not in other.estimate.moments
    assert not made.refusals
    refused = plan.make(large(LLAMA_70B, **{**rosa, "fp16": True, "bf16": None}))
    assert any(
        each.startswith("fp16: True does not work with mask_score: squared_gradient") for each in refused.refusals
    )


def test_budgets_over_all_layers_are_planned(large):
    budgets = {
        scope: plan.make(large(LLAMA_70B, adapter="super", budget_scope=scope)) for scope in ("layer", "density")
    }
    totals = {scope: as_json(made)["total"]["parameters"] for scope, made in budgets.items()}
    assert 0 <= totals["layer"] - totals["density"] < 560
    densities = {layer["density"] for layer in as_json(budgets["density"])["layers"]}
    assert max(densities) - min(densities) < 1e-6
    together = plan.make(large(LLAMA_70B, adapter="super", budget_scope="global"))
    assert as_json(together)["total"]["parameters"] == totals["layer"]
    assert any("budget_scope: global moves them between layers" in note for note in together.notes)


def test_a_calibration_on_the_training_set_is_planned(large):
    none = {"calibration_sequence_len": None, "calibration_samples": None}
    text = plan.make(large(LLAMA_70B, **none))
    records = plan.make(large(LLAMA_70B, **none, calibration_dataset="training_set"))
    assert text.job.calibration.length == 2048
    assert records.job.calibration.length == 256  # sequence_len: no record is longer


def test_an_adapter_to_start_from_is_looked_at(settings, train, run, tmp_path):
    """Training refuses what is none, and keeps the settings of one that has others."""
    start = settings(max_steps=1, eval_steps=None, adapter="super")
    train(start)
    other = {"adapter": "supra", "supra_lambda": 0.5, "output_dir": str(tmp_path / "other")}
    planned = run(settings(**other, lora_model_dir=start["output_dir"]))
    assert "lora_model_dir: training keeps the settings of the adapter in" in planned.output
    assert "supra_lambda 0.0 (the YAML says 0.5)" in planned.output
    # Nothing is calibrated, so the text may be too short.
    goes_on = {**start, "calibration_samples": 1000, "output_dir": str(tmp_path / "on")}
    assert run(goes_on).exit_code == 1
    assert run({**goes_on, "lora_model_dir": start["output_dir"]}).exit_code == 0

    (tmp_path / "empty").mkdir()
    planned = run(settings(**other, lora_model_dir=str(tmp_path / "empty")))
    assert planned.exit_code == 1
    assert "Refused: lora_model_dir" in planned.output
    assert "holds no trained adapter" in planned.output

    planned = run(settings(**other, lora_model_dir=str(tmp_path / "gone")))
    assert "Not checked: lora_model_dir: there is no folder" in planned.output


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"load_in_4bit": True, "bnb_config_kwargs": {"bits": 3}}, "bnb_config_kwargs.bits: 3 is no setting"),
        (
            {"deepspeed": {"zero_optimization": {"stage": 3}}, "mask_score": "gradient"},
            "deepspeed: it does not work with mask_score: gradient",
        ),
    ],
    ids=["a key in a key", "a key whose value is not in the message"],
)
def test_the_key_at_fault_is_left_out_wherever_the_message_names_it(large, changes, message):
    made = plan.make(large(LLAMA_70B, **changes))
    assert made.refusals[0].startswith(message)
    assert made.estimate is not None
