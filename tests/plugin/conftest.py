"""Axolotl run in this process, as its commands run it, on a tiny random Llama with a tokenizer of its own."""

import json
import os

os.environ.setdefault("AXOLOTL_DO_NOT_TRACK", "1")
os.environ.setdefault("ACCELERATE_USE_CPU", "true")

import runpy
from pathlib import Path

import pytest
import torch
import yaml
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="session")
def base(tmp_path_factory):
    """A folder with a tiny Llama in fp32 and a byte-level BPE tokenizer trained on the word problems."""
    from tokenizers import ByteLevelBPETokenizer

    folder = tmp_path_factory.mktemp("base")
    trained = ByteLevelBPETokenizer()
    trained.train([str(EXAMPLES / "word_problems.jsonl")], vocab_size=400, special_tokens=["<pad>", "<s>", "</s>"])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=trained._tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=400,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def problems(tmp_path_factory):
    """A few word problems: (path of an Alpaca jsonl, path of a text to calibrate on)."""
    folder = tmp_path_factory.mktemp("problems")
    make = runpy.run_path(str(EXAMPLES / "make_word_problems.py"))["records"]
    records = make(seed=1, count=48)
    data, text = folder / "problems.jsonl", folder / "text.txt"
    data.write_text("".join(json.dumps(record) + "\n" for record in records))
    text.write_text("\n".join(f"{record['instruction']} {record['output']}" for record in records))
    return data, text


@pytest.fixture
def settings(base, problems, tmp_path):
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
def load(write):
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


@pytest.fixture(autouse=True)
def fresh_plugins(monkeypatch):
    """Each test starts with no plugin registered, as a new process does."""
    from axolotl.integrations.base import PluginManager

    manager = PluginManager.get_instance()
    monkeypatch.setattr(manager, "plugins", type(manager.plugins)())
    yield
    monkeypatch.undo()
