"""Every example YAML is valid on this Axolotl, says the paper's settings, and prompts with the Alpaca template."""

import csv
import json
import re
import runpy
import subprocess
import sys
from importlib import resources
from pathlib import Path

import pytest
import yaml
from transformers import AutoTokenizer, LlamaConfig

import axolotl_supertune.method
from axolotl_supertune.tasks.prompt import alpaca_prompt

EXAMPLES = Path(__file__).parents[2] / "examples"
LLAMA = {
    "meta-llama/Meta-Llama-3-8B": LlamaConfig(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8
    ),
    "meta-llama/Meta-Llama-3-70B": LlamaConfig(
        hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64, num_key_value_heads=8
    ),
    "meta-llama/Llama-3.2-1B": LlamaConfig(
        hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32, num_key_value_heads=8
    ),
    "outputs/quickstart/base": LlamaConfig(hidden_size=576, num_attention_heads=9, num_key_value_heads=3),
}
YAMLS = sorted(EXAMPLES.glob("*.yml"))
PAPER = [path for path in YAMLS if path.name.startswith("llama3")]
PROCESSES = {"llama3-8b-supra-fsdp2.yml": 4, "llama3-8b-supra-zero2.yml": 4, "llama3-70b-supra-fsdp2.yml": 8}


@pytest.fixture
def in_a_new_folder(tmp_path, monkeypatch):
    """A working folder with the examples and the quickstart's text; makes a local config of a hub model."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(EXAMPLES)
    (tmp_path / "outputs/quickstart").mkdir(parents=True)
    (tmp_path / "outputs/quickstart/calibration.txt").write_text("text")
    (tmp_path / "outputs/llama3-70b-supra-fsdp2").mkdir()
    (tmp_path / "outputs/llama3-70b-supra-fsdp2/norms.safetensors").write_text("calibrated beforehand")
    # FSDP2 asks for this Axolotl.
    monkeypatch.setattr("axolotl_supertune.plugin.axolotl_compat.axolotl_version", lambda: "0.21.0")

    def config_folder(name):
        folder = tmp_path / "config"
        LLAMA[name].save_pretrained(folder)
        return str(folder)

    return config_folder


def test_there_are_examples():
    assert {path.name for path in YAMLS} >= {
        "quickstart.yml",
        "llama3-8b-supra.yml",
        "llama3-8b-super.yml",
        "llama3-8b-supra-magnitude.yml",
        "llama3.2-1b-supra.yml",
        "llama3-8b-qsupra.yml",
        *PROCESSES,
    }


@pytest.mark.parametrize("path", YAMLS, ids=lambda path: path.name)
def test_an_example_is_a_valid_config(path, in_a_new_folder, monkeypatch):
    from axolotl.cli.config import load_cfg, prepare_plugins
    from axolotl.utils.config import validate_config
    from axolotl.utils.dict import DictDefault

    from axolotl_supertune.engines.deepspeed import DeepSpeed

    # The YAML is looked at, not this machine.
    monkeypatch.setattr(DeepSpeed, "check_installed", lambda self: None)
    raw = yaml.safe_load(path.read_text())
    raw["base_model"] = in_a_new_folder(raw["base_model"])
    # As on a GPU with bf16: load_cfg itself would ask this machine.
    cfg = DictDefault(raw)
    prepare_plugins(cfg)
    gpu = {"bf16": True, "fp8": True, "tf32": True, "n_gpu": 1, "compute_capability": "sm_90"}
    checked = validate_config(cfg, capabilities=gpu, env_capabilities={"torch_version": "2.11.0"})
    assert checked.adapter in ("supra", "super")
    lost = [key for key in raw if checked.get(key) is None]
    assert not lost, f"Axolotl dropped {lost}"
    if path.name == "quickstart.yml":
        load_cfg(str(path), base_model=raw["base_model"])


@pytest.mark.parametrize("path", PAPER, ids=lambda path: path.name)
def test_the_llama_examples_have_the_papers_settings(path):
    raw = yaml.safe_load(path.read_text())
    expected = {"lora_r": 8, "sequence_len": 256, "warmup_steps": 100, "weight_decay": 0.0}
    assert {key: raw[key] for key in expected} == expected
    processes = PROCESSES.get(path.name, 1)
    assert raw["micro_batch_size"] * raw["gradient_accumulation_steps"] * processes == 16
    assert processes == 1 or f"--num_processes {processes}\n" in path.read_text()
    assert raw["optimizer"].startswith("adamw")
    assert raw["datasets"][0]["path"] == "openai/gsm8k"


@pytest.mark.parametrize("path", [path for path in PAPER if "70b" not in path.name], ids=lambda path: path.name)
def test_the_llama_examples_have_the_rates_that_the_paper_selected(path):
    raw = yaml.safe_load(path.read_text())
    low_rank = raw["adapter"] == "supra"
    method = {("supra", "wanda"): "Supra", ("supra", "magnitude"): "Supra-Mag", ("super", "magnitude"): "Magnitude"}
    with (resources.files(axolotl_supertune.method) / "selected_rates.csv").open(encoding="utf-8", newline="") as file:
        (selected,) = [
            row
            for row in csv.DictReader(file)
            if row["model"] == raw["base_model"].partition("/")[2]
            and (row["dataset"], row["epochs"]) == ("Math17K", str(raw["num_epochs"]))
            and row["method"] == method[raw["adapter"], raw["mask_score"]]
            and row["supra_lambda"] == (str(raw["supra_lambda"]) if low_rank else "")
            and row["direction"] == raw["sparse_direction"]
        ]
    assert float(selected["learning_rate"]) == raw["learning_rate"]
    # Nothing in the paper is quantized.
    assert "load_in_4bit" in raw or f"({float(selected['accuracy']):.1f} %)" in path.read_text()


@pytest.mark.parametrize(
    "path",
    [PAPER[0], *(pytest.param(path, marks=pytest.mark.slow) for path in PAPER[1:])],
    ids=lambda path: path.name,
)
def test_the_llama_examples_prompt_with_the_alpaca_template(path, base, settings, load, tmp_path):
    from axolotl.common.datasets import load_datasets

    data = tmp_path / "gsm8k.jsonl"
    data.write_text("".join(json.dumps({"question": f"How many? {n}", "answer": f"#### {n}"}) + "\n" for n in range(4)))
    raw = yaml.safe_load(path.read_text())
    dataset = {"path": str(data), "type": raw["datasets"][0]["type"]}
    cfg = load(settings(datasets=[dataset], val_set_size=0, eval_steps=None))
    record = load_datasets(cfg=cfg).train_dataset[0]
    tokenizer = AutoTokenizer.from_pretrained(base)
    text = tokenizer.decode(record["input_ids"], skip_special_tokens=True)
    number = text[-1]
    assert text == alpaca_prompt(f"How many? {number}") + f"#### {number}"
    learned = [token for token in record["labels"] if token != -100]
    assert tokenizer.decode(learned) == f"#### {number}</s>"


def committed_problems():
    """The quickstart's training and held-out records."""
    names = "word_problems.jsonl", "word_problems_test.jsonl"
    return tuple([json.loads(line) for line in (EXAMPLES / name).read_text().splitlines()] for name in names)


def test_the_committed_word_problems_are_what_the_script_writes():
    training, held_out = runpy.run_path(str(EXAMPLES / "make_word_problems.py"))["records"]()
    assert committed_problems() == (training, held_out)
    for records in (training, held_out):
        assert len({record["instruction"] for record in records}) == len(records)
    assert len(held_out) >= 20


def test_no_held_out_problem_is_trained_on_nor_one_with_its_numbers():
    training, held_out = committed_problems()
    seen = {numbers_of(record) for record in training}
    assert not {record["instruction"] for record in held_out} & {record["instruction"] for record in training}
    assert not {numbers_of(record) for record in held_out} & seen


def numbers_of(record):
    """The numbers of a question, whatever their order."""
    return tuple(sorted(int(number) for number in re.findall(r"\d+", record["instruction"])))


def test_the_worked_answers_of_the_word_problems_are_right():
    for record in [record for records in committed_problems() for record in records]:
        *steps, stated = record["output"].splitlines()
        for step in steps:
            left, right = step.split(" = ")
            assert eval(left) == int(right), record  # digits and one operator: the files are ours
        assert stated == f"#### {right}"


@pytest.mark.slow
@pytest.mark.parametrize("script", sorted(EXAMPLES.rglob("*.py")), ids=lambda path: path.name)
def test_a_script_says_how_it_is_called_and_writes_nothing(script, tmp_path):
    asked = subprocess.run([sys.executable, script, "--help"], cwd=tmp_path, capture_output=True, text=True)
    assert asked.returncode == 0, asked.stderr
    assert asked.stdout.startswith("usage: ")
    assert not list(tmp_path.iterdir())
