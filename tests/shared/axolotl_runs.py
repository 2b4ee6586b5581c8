"""Fixtures that run Axolotl in this process, as its commands run it, on a tiny random Llama with its own tokenizer.

The conftest.py of each folder that trains imports them.
"""

import json
import os

os.environ.setdefault("AXOLOTL_DO_NOT_TRACK", "1")
os.environ.setdefault("ACCELERATE_USE_CPU", "true")

import hashlib
import shutil

import pytest
import torch
import word_problems
import yaml
from filelock import FileLock
from tiny_llama import save_llama
from trainings import Finished, logits

# What a conftest.py imports from here.
__all__ = ["base", "fresh_plugins", "load", "problems", "session_folder", "settings", "train", "trained", "write"]


@pytest.fixture(scope="session")
def session_folder(tmp_path_factory):
    """One folder for all processes of pytest-xdist."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    (folder / "shared").mkdir(exist_ok=True)
    return folder / "shared"


def made_once(folder, make):
    """`folder`, which make(folder) fills in the first process that asks for it; the others wait."""
    with FileLock(f"{folder}.lock"):
        if not folder.exists():
            unfinished = folder.with_name(f"{folder.name}.unfinished")
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir()
            make(unfinished)
            unfinished.rename(folder)
    return folder


@pytest.fixture(scope="session")
def base(session_folder):
    """A folder with a tiny Llama in fp32 and a byte-level BPE tokenizer trained on the word problems."""

    def make(folder):
        save_llama(folder, word_problems.lines(), 400, max_position_embeddings=512, tie_word_embeddings=True)

    return made_once(session_folder / "base", make)


@pytest.fixture(scope="session")
def problems(session_folder):
    """A few word problems: (path of an Alpaca jsonl, path of a text to calibrate on)."""

    def make(folder):
        records = word_problems.records(seed=1, count=48)
        (folder / "problems.jsonl").write_text("".join(word_problems.lines(seed=1, count=48)))
        (folder / "text.txt").write_text("\n".join(f"{record['instruction']} {record['output']}" for record in records))

    folder = made_once(session_folder / "problems", make)
    return folder / "problems.jsonl", folder / "text.txt"


@pytest.fixture
def settings(base, problems, fresh_plugins, tmp_path):
    """A function (**changes) → the YAML mapping of a Supra run of 8 steps into tmp_path/adapter; None drops a key."""
    data, text = problems

    def make(**changes):
        mapping = {
            "base_model": str(base),
            "plugins": ["axolotl_supertune.SupertunePlugin"],
            "adapter": "supra",
            "calibration_dataset": str(text),
            "calibration_samples": 4,
            "calibration_sequence_len": 64,
            "datasets": [{"path": str(data), "type": "alpaca"}],
            "val_set_size": 0.1,
            "dataset_prepared_path": str(tmp_path / "prepared"),
            "dataset_num_proc": 1,
            "output_dir": str(tmp_path / "adapter"),
            "sequence_len": 256,
            "micro_batch_size": 2,
            "gradient_accumulation_steps": 1,
            "max_steps": 8,
            "eval_steps": 8,
            "save_steps": 4,
            "logging_steps": 1,
            "learning_rate": 5e-3,
            "lr_scheduler": "cosine",
            "warmup_steps": 2,
            "optimizer": "adamw_torch",
            "weight_decay": 0.0,
            "seed": 0,
            "bf16": False,
            "fp16": False,
            "tf32": False,
            "dataloader_pin_memory": False,
            "dataloader_num_workers": 0,
            "attn_implementation": "sdpa",
            **changes,
        }
        return {key: value for key, value in mapping.items() if value is not None}

    return make


@pytest.fixture
def write(tmp_path):
    """A function (mapping) → path of a YAML file of it."""

    def write(mapping, name="run.yml"):
        path = tmp_path / name
        path.write_text(yaml.safe_dump(mapping))
        return str(path)

    return write


@pytest.fixture
def load(write, fresh_plugins):
    """A function (mapping, **overrides) → the config as Axolotl's commands load it."""

    def load(mapping, **overrides):
        from axolotl.cli.config import load_cfg

        return load_cfg(write(mapping), **overrides)

    return load


@pytest.fixture
def train(load):
    """A function (mapping) → the trainer after `axolotl train`."""

    def train(mapping, **overrides):
        from axolotl.common.datasets import load_datasets
        from axolotl.train import train as axolotl_train

        cfg = load(mapping, **overrides)
        _, _, trainer = axolotl_train(cfg=cfg, dataset_meta=load_datasets(cfg=cfg))
        return trainer

    return train


@pytest.fixture
def trained(settings, train, session_folder, tmp_path):
    """A function (name="adapter", **changes) → the `Finished` training of settings(**changes).

    All tests of a session share one training of a YAML. Each gets a copy of its output folder, tmp_path/name.
    """

    def trained(name="adapter", **changes):
        mapping = settings(**{"output_dir": "", "dataset_prepared_path": "", **changes})
        key = hashlib.sha256(json.dumps(mapping, sort_keys=True).encode()).hexdigest()[:16]

        def make(folder):
            mapping["output_dir"], mapping["dataset_prepared_path"] = str(folder / "adapter"), str(folder / "prepared")
            trainer = train(mapping)
            torch.save(
                {"log_history": trainer.state.log_history, "logits": logits(trainer.model)}, folder / "finished.pt"
            )

        folder = made_once(session_folder / f"run-{key}", make)
        output = tmp_path / name
        shutil.copytree(folder / "adapter", output)
        return Finished(
            mapping=settings(**{**changes, "output_dir": str(output)}),
            **torch.load(folder / "finished.pt", weights_only=False),
        )

    return trained


@pytest.fixture
def fresh_plugins(monkeypatch):
    """No plugin is registered with Axolotl when the test starts, as in a new process."""
    from axolotl.integrations.base import PluginManager

    manager = PluginManager.get_instance()
    monkeypatch.setattr(manager, "plugins", type(manager.plugins)())
    yield
    monkeypatch.undo()
