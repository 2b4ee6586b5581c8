"""The record of a trained run, and sweeps with Axolotl's own commands."""

import json
import math
from pathlib import Path

import pytest
import torch
import yaml
from click.testing import CliRunner
from peft import PeftModel
from rich.console import Console
from trainings import StopAt
from transformers import AutoModelForCausalLM, AutoTokenizer

from axolotl_supertune import ActivationNorms
from axolotl_supertune.commands.cli import supertune
from axolotl_supertune.grid.config import RECORD, SUPERTUNE
from axolotl_supertune.grid.record import VARIABLE
from axolotl_supertune.grid.run_files import RunKey, read_run
from axolotl_supertune.grid.sweep.devices import Devices
from axolotl_supertune.grid.sweep.prepare import prepare_data
from axolotl_supertune.grid.sweep.sweep import Sweep
from axolotl_supertune.plugin.plan import data_checks
from axolotl_supertune.tasks.prompt import alpaca_prompt

KEY = RunKey(method="mine", learning_rate=5e-3, epochs=1, seed=0)
KNOWN = {"key": KEY.model_dump(), "config_sha256": "0" * 64, "jobs_per_gpu": 3}


@pytest.fixture
def data(problems, tmp_path):
    """Word problems as (training, validation), the last 11 for validation."""
    lines = problems[0].read_text().splitlines(keepends=True)
    for name, part in (("train", lines[:-11]), ("valid", lines[-11:])):
        (tmp_path / f"{name}.jsonl").write_text("".join(part))
    return tmp_path / "train.jsonl", tmp_path / "valid.jsonl"


@pytest.fixture
def recorded(settings, data, monkeypatch, tmp_path):
    """A function (**changes) → the YAML mapping of a run that a sweep started; 37 records in batches of 4: 10 steps."""
    monkeypatch.setenv(VARIABLE, json.dumps(KNOWN))

    def make(**changes):
        return settings(
            plugins=[SUPERTUNE, RECORD],
            datasets=[{"path": str(data[0]), "type": "alpaca"}],
            test_datasets=[{"path": str(data[1]), "type": "alpaca", "split": "train"}],
            val_set_size=None,
            max_steps=None,
            num_epochs=1,
            micro_batch_size=4,
            eval_batch_size=4,
            eval_steps=4,
            save_steps=6,
            output_dir=str(tmp_path / "run" / "adapter"),
            **changes,
        )

    return make


def nll(model, tokenizer, path):
    """Nats per target token, evaluated one record at a time."""
    nats = tokens = 0
    for record in map(json.loads, path.read_text().splitlines()):
        prompt = tokenizer(alpaca_prompt(record["instruction"]))["input_ids"]
        target = tokenizer(record["output"] + tokenizer.eos_token, add_special_tokens=False)["input_ids"]
        with torch.no_grad():
            logits = model.eval()(torch.tensor([prompt + target])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        nats -= logits.gather(1, torch.tensor(target)[:, None]).sum().item()
        tokens += len(target)
    return nats / tokens


def test_a_run_records_what_it_measured(recorded, train, base, data, tmp_path):
    mapping = recorded(lora_r=2)
    trainer = train(mapping)
    run = read_run(tmp_path / "run" / "run.json")
    assert run.key == KEY
    assert run.config_sha256 == KNOWN["config_sha256"]
    assert run.jobs_per_gpu == 3
    assert run.status == "done"
    history = trainer.state.log_history
    assert run.losses == [(entry["step"], float(entry["loss"])) for entry in history if "loss" in entry]
    assert [step for step, _ in run.losses] == list(range(1, 11))
    assert run.steps == 10
    assert [step for step, _ in run.eval_losses] == [0, 4, 8, 10], "the last step is no multiple of eval_steps"
    assert run.trainable_parameters == sum(p.numel() for p in trainer.model.parameters() if p.requires_grad)
    assert run.budget_parameters == run.trainable_parameters
    assert run.train_seconds == pytest.approx(float(next(e["train_runtime"] for e in history if "train_runtime" in e)))
    assert run.seconds > run.train_seconds
    assert run.peak_memory_gib is None
    assert run.device == "cpu"
    assert {"axolotl-supertune", "axolotl", "peft", "transformers", "torch"} <= run.versions.keys()

    # 11 records of different lengths in batches of 4, 4 and 3: a mean of batches would be another number.
    tokenizer = AutoTokenizer.from_pretrained(base)
    plain = AutoModelForCausalLM.from_pretrained(base)
    assert math.isclose(run.eval_losses[0][1], nll(plain, tokenizer, data[1]), rel_tol=1e-5)
    trained = PeftModel.from_pretrained(plain, mapping["output_dir"])
    assert math.isclose(run.validation_nll, nll(trained, tokenizer, data[1]), rel_tol=1e-5)
    means = [float(entry["eval_loss"]) for entry in history if "eval_loss" in entry]
    assert not math.isclose(run.validation_nll, means[-1], rel_tol=1e-5)


LORA = {
    **{"adapter": "lora", "lora_r": 2, "lora_alpha": 16, "lora_target_linear": True},
    **{f"lora_{kernel}_kernel": False for kernel in ("mlp", "qkv", "o")},
    **dict.fromkeys(("calibration_dataset", "calibration_samples", "calibration_sequence_len")),
}


def test_runs_of_lora_follow_from_their_seed(recorded, train, tmp_path):
    """Axolotl 0.19 draws LoRA's start before it seeds anything."""
    found = []
    for seed, state in ((0, 1), (0, 2), (3, 1)):
        mapping = recorded(seed=seed, **LORA)
        mapping["output_dir"] = str(tmp_path / f"run-{seed}-{state}" / "adapter")
        torch.manual_seed(state)
        train(mapping)
        found.append(read_run(tmp_path / f"run-{seed}-{state}" / "run.json").losses)
    assert found[0] == found[1] != found[2]


@pytest.mark.parametrize("adapter", [None, "lora"])
def test_a_run_that_goes_on_records_all_of_it(recorded, train, tmp_path, monkeypatch, adapter):
    lora = {"lora_r": 2, "lora_alpha": 16, "lora_target_linear": True} if adapter else {}
    kernels = {f"lora_{kernel}_kernel": False for kernel in ("mlp", "qkv", "o")}
    calibration = dict.fromkeys(("calibration_dataset", "calibration_samples", "calibration_sequence_len"))
    mapping = recorded(adapter=adapter, auto_resume_from_checkpoints=True, **lora, **kernels, **calibration)
    with monkeypatch.context() as patched:
        from axolotl_supertune.grid.record import RecordPlugin

        record = RecordPlugin.add_callbacks_post_trainer
        patched.setattr(
            RecordPlugin,
            "add_callbacks_post_trainer",
            lambda self, cfg, trainer: [*record(self, cfg, trainer), StopAt(7)],
        )
        with pytest.raises(KeyboardInterrupt):
            train(mapping)
    assert not (tmp_path / "run" / "run.json").exists()
    trainer = train(mapping)
    run = read_run(tmp_path / "run" / "run.json")
    assert [step for step, _ in run.losses] == list(range(1, 11))
    assert {0, 4, 8, 10} <= {step for step, _ in run.eval_losses}
    assert run.train_seconds is None
    assert run.trainable_parameters == sum(p.numel() for p in trainer.model.parameters() if p.requires_grad)
    assert run.budget_parameters == (run.trainable_parameters if adapter else None)


def test_the_plugin_says_what_it_is_for(recorded, train, monkeypatch):
    monkeypatch.delenv(VARIABLE)
    with pytest.raises(ValueError, match=f"{VARIABLE} is not set: to train this YAML alone, drop the plugin"):
        train(recorded(mask_score="magnitude"))


@pytest.fixture
def write_grid(settings, data, tmp_path, monkeypatch):
    """A function (methods) → path of a GRID file with one rate in the working folder."""
    monkeypatch.chdir(tmp_path)

    def write(methods, **changes):
        shared = settings(
            adapter=None,
            plugins=None,
            datasets=[{"path": "train.jsonl", "type": "alpaca"}],
            test_datasets=[{"path": "valid.jsonl", "type": "alpaca", "split": "train"}],
            dataset_prepared_path=None,
            eval_steps=5,
            output_dir=None,
            **dict.fromkeys(("val_set_size", "max_steps", "learning_rate", "seed", "save_steps")),
            **changes,
        )
        (tmp_path / "base.yml").write_text(yaml.safe_dump({**shared, "save_strategy": "no"}))
        grid = {"base": "base.yml", "output_dir": "runs", "methods": methods, "learning_rates": [5e-3]}
        (tmp_path / "grid.yml").write_text(yaml.safe_dump(grid))
        return tmp_path / "grid.yml"

    return write


def test_a_dry_run_says_what_runs_would_be_refused_for(write_grid, problems):
    """With the messages of `plan` and of training, each once with its methods; a text is read once."""
    wanda = {"adapter": "super"}
    methods = {
        "lora": {"adapter": "lora", "lora_r": 2, "lora_target_linear": True},
        "bottom": wanda,
        "top": {**wanda, "sparse_direction": "top"},
        "short": {**wanda, "calibration_sequence_len": 32, "calibration_samples": 3},
        "large": {**wanda, "mask_score": "magnitude", "lora_r": 5000},
        "sift": {**wanda, "mask_score": "gradient", "gradient_batches": 30},
    }
    read = []
    grid = write_grid(methods, calibration_samples=900)
    with pytest.MonkeyPatch.context() as patched:
        original = data_checks.windows_of_text
        patched.setattr(data_checks, "windows_of_text", lambda cfg, *args: (read.append(cfg), original(cfg, *args)))
        result = CliRunner().invoke(supertune, ["sweep", str(grid), "--dry-run"])
    assert result.exit_code == 1, result.output
    assert [cfg["calibration_samples"] for cfg in read] == [900, 3]
    refused = [line for line in result.output.splitlines() if line.startswith("Refused: ")]
    assert len(refused) == 3, refused
    assert refused[0].startswith(
        f"Refused: bottom, top: calibration_dataset {problems[1]} is too short: 900 windows of 64"
    )
    assert refused[1].startswith("Refused: large: ")
    assert "use r0 ≤" in refused[1]
    assert refused[2].startswith("Refused: sift: gradient_batches: 30 batches of 1 micro batches")
    assert "Not checked" not in result.output
    assert not Path("runs").exists()
    good = CliRunner().invoke(supertune, ["sweep", str(write_grid({"wanda": wanda})), "--dry-run"])
    assert good.exit_code == 0, good.output
    assert "Refused" not in good.output


def test_a_sweep_runs_axolotls_own_commands(write_grid, tmp_path, monkeypatch):
    for name in ("OMP_NUM_THREADS", "PYTHONPATH"):
        monkeypatch.setenv(name, {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}[name])
    write_grid({"wanda": {"adapter": "super", "sparse_direction": "top", "lora_r": 2}})
    sweep = Sweep(tmp_path / "grid.yml", Devices(()), Console(width=200))
    assert sweep.sweep("choose"), "\n".join(path.read_text()[-2000:] for path in (tmp_path / "runs").rglob("*.log"))
    folder = tmp_path / "runs/wanda/lr0.005-ep1-seed0"
    run = read_run(folder / "run.json")
    assert run.steps == 19
    assert [step for step, _ in run.eval_losses] == [0, 5, 10, 15, 19]
    assert run.validation_nll < run.eval_losses[0][1]
    assert run.seconds > 1
    assert (folder / "adapter/adapter_model.safetensors").is_file()
    [norms] = (tmp_path / "runs/calibration").glob("*.safetensors")
    assert ActivationNorms.load(norms).provenance["samples"] == 4
    assert not (folder / "adapter/activation_norms.safetensors").exists(), "it calibrated once more"
    log = (folder / "log.txt").read_text()
    assert "Loading prepared dataset from disk" in log, "it tokenized once more"
    [prepared] = (tmp_path / "runs/prepared").iterdir()
    assert len(list(prepared.iterdir())) >= 2

    sweep = Sweep(tmp_path / "grid.yml", Devices(()), Console(width=200))
    before = (folder / "run.json").stat()
    assert sweep.sweep("choose")
    assert (folder / "run.json").stat().st_mtime_ns == before.st_mtime_ns


@pytest.mark.parametrize("key", ["datasets", "test_datasets"])
def test_tokenizing_to_no_record_at_all_is_a_failure(write_grid, data, tmp_path, key):
    write_grid({"lora": {"adapter": "lora"}})
    config = yaml.safe_load((tmp_path / "base.yml").read_text())
    config |= {"adapter": "super", "output_dir": "out", "learning_rate": 1e-3, "num_epochs": 1, "plugins": [SUPERTUNE]}
    record = {"instruction": "How many? " * 2000, "input": "", "output": "1"}
    (data[0] if key == "datasets" else data[1]).write_text(json.dumps(record) + "\n")
    (tmp_path / "config.yml").write_text(yaml.safe_dump({name: each for name, each in config.items() if each}))
    with pytest.raises(ValueError, match=rf"^{key}: of \w+.jsonl no record is left .*sequence_len: [0-9]+"):
        prepare_data(tmp_path / "config.yml", tmp_path / "prepared" / "here")
    assert not list((tmp_path / "prepared").iterdir())


def test_tokenized_data_does_not_depend_on_the_run_that_needs_it_first(write_grid, tmp_path):
    """A run that is trained again after the others sees the records in the same order as the first time."""
    from datasets import load_from_disk

    write_grid({"lora": {"adapter": "lora"}})
    config = yaml.safe_load((tmp_path / "base.yml").read_text())
    config |= {"adapter": "super", "output_dir": "out", "num_epochs": 1, "plugins": [SUPERTUNE]}
    prepared = {}
    for seed, rate in ((None, 1e-3), (0, 1e-3), (1, 1e-2)):
        own = {"learning_rate": rate, "seed": seed}
        (tmp_path / "config.yml").write_text(
            yaml.safe_dump({k: v for k, v in {**config, **own}.items() if v is not None})
        )
        target = tmp_path / "prepared" / f"{seed}"
        prepare_data(tmp_path / "config.yml", target)
        prepared[seed] = {path.name: load_from_disk(str(path)).to_dict() for path in target.iterdir() if path.is_dir()}
    assert len(prepared[None]) == 2
    assert prepared[None] == prepared[0] == prepared[1]
