"""Scoring a grid's models on the benchmarks, item by item."""

import hashlib
import json
import math
import shutil
import subprocess
import sys

import pytest
import torch
from benchmark_models import data_dir  # noqa: F401 (a fixture for all tests here)
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

import axolotl_supertune.tuner  # noqa: F401 (makes PEFT know SUPRA)
from axolotl_supertune.grid.config import Score
from axolotl_supertune.grid.run_files import RunKey, read_scores
from axolotl_supertune.grid.sweep.scoring import Request, score_model
from axolotl_supertune.tasks.benchmarks import BENCHMARKS
from axolotl_supertune.tasks.contamination import contamination_report, write_report
from axolotl_supertune.tasks.evaluation import model_arguments
from axolotl_supertune.tasks.perplexity import gold_records
from axolotl_supertune.tasks.prompt import alpaca_prompt
from axolotl_supertune.tasks.scoring import load

KEY = RunKey(method="supra", learning_rate=1e-3, epochs=1, seed=2)


@pytest.fixture
def report(tmp_path):
    """A contamination report of training data with the second question of SVAMP in it."""
    training = tmp_path / "train.jsonl"
    training.write_text(json.dumps({"instruction": load("SVAMP")["test"][1]["instruction"], "output": "x"}) + "\n")
    write_report(contamination_report([str(training)]), tmp_path / "report.json")
    return tmp_path / "report.json"


@pytest.fixture
def request_for(tiny_base, report, tmp_path):
    """A function (trained, **score) → a Request for three items of each benchmark."""

    def make(trained, key=KEY, **score):
        score = {"limit": 3, "max_gen_toks": 4, "batch_size": 4, "nll_batch_size": 3, **score}
        return Request(
            key=key,
            settings={"base_model": str(tiny_base), "bf16": False},
            trained=trained and str(trained),
            score=Score(**score),
            contamination=str(report),
            output=str(tmp_path / "scored" / "scores.json"),
            jobs_per_gpu=2,
        )

    return make


def golds(model, tokenizer, benchmark, count):
    found = []
    for record in gold_records(benchmark)[:count]:
        prompt = tokenizer(alpaca_prompt(record["instruction"]), add_special_tokens=False)["input_ids"]
        target = tokenizer(record["target"] + tokenizer.eos_token, add_special_tokens=False)["input_ids"]
        with torch.no_grad():
            logits = model.eval()(torch.tensor([prompt + target])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        found.append((-logits.gather(1, torch.tensor(target)[:, None]).sum().item(), len(target)))
    return found


@pytest.mark.slow
def test_an_adapter_is_asked_every_benchmark_item_by_item(request_for, tiny_base, tiny_adapter, tmp_path):
    scores = score_model(request_for(tiny_adapter))
    assert scores.key == KEY
    assert scores.limit == 3
    assert scores.jobs_per_gpu == 2
    assert scores.asked == {"task": "supertune_math", "max_gen_toks": 4, "limit": 3.0}
    assert scores.base_model == str(tiny_base)
    training = tmp_path / "train.jsonl"
    assert scores.files == {str(training): hashlib.sha256(training.read_bytes()).hexdigest()}
    assert list(scores.benchmarks) == list(BENCHMARKS)
    tokenizer = AutoTokenizer.from_pretrained(tiny_base)
    plain = AutoModelForCausalLM.from_pretrained(tiny_base)
    # So does the harness under an adapter, in case tokens were added; the model is asked over these tokens alone.
    plain.resize_token_embeddings(len(tokenizer))
    model = PeftModel.from_pretrained(plain, tiny_adapter)
    for name, found in scores.benchmarks.items():
        assert len(found.correct) == len(found.correct_strict) == 3
        assert found.clean == ("101" if name == "SVAMP" else "111")
        expected = golds(model, tokenizer, name, 3)
        assert found.gold_tokens == [tokens for _, tokens in expected]
        assert found.gold_nll == pytest.approx([nats for nats, _ in expected], rel=1e-4)


@pytest.mark.slow
def test_what_is_right_is_1(request_for, tiny_base, monkeypatch):
    """The model always answers with the first item's gold answer: that item is correct by both rules."""
    from lm_eval.models.huggingface import HFLM

    answer = load("gsm8k")["test"][0]["answer"]
    monkeypatch.setattr(
        HFLM, "generate_until", lambda self, requests, **_: [f"It is {answer}. So {answer}"] * len(requests)
    )
    scores = score_model(request_for(None, key=None))
    assert scores.key is None
    expected = "".join(
        str(int(math.isclose(float(item["answer"]), float(answer)))) for item in load("gsm8k")["test"].select(range(3))
    )
    assert scores.benchmarks["gsm8k"].correct == scores.benchmarks["gsm8k"].correct_strict == expected
    assert expected[0] == "1"
    assert scores.benchmarks["AQuA"].correct_strict == "000", "a number is no letter"


@pytest.mark.slow
def test_a_whole_model_and_a_process_of_its_own(request_for, tiny_base, tmp_path):
    whole = tmp_path / "whole"
    shutil.copytree(tiny_base, whole)
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_pretrained(whole)
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight.normal_(std=0.2)
    model.save_pretrained(whole)
    request = request_for(whole, limit=1, task="supertune_math_beam4")
    command = [sys.executable, "-m", "axolotl_supertune.grid.sweep.scoring", request.model_dump_json()]
    ran = subprocess.run(command, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-3000:]
    scores = read_scores(tmp_path / "scored" / "scores.json")
    expected = golds(model, AutoTokenizer.from_pretrained(whole), "SVAMP", 1)
    assert scores.benchmarks["SVAMP"].gold_nll == pytest.approx([expected[0][0]], rel=1e-4)
    assert scores.asked["task"] == "supertune_math_beam4"


def test_which_model_the_harness_is_given(tmp_path):
    settings = {"base_model": "owner/base", "revision_of_model": "v1", "tokenizer_config": "owner/tok", "bf16": True}
    base = {"pretrained": "owner/base", "revision": "v1", "tokenizer": "owner/tok", "dtype": "bfloat16"}
    assert model_arguments(settings, None) == base
    (tmp_path / "adapter").mkdir()
    whole = {"pretrained": str(tmp_path / "adapter"), "tokenizer": "owner/tok", "dtype": "bfloat16"}
    assert model_arguments(settings, str(tmp_path / "adapter")) == whole
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    assert model_arguments(settings, str(tmp_path / "adapter")) == {**base, "peft": str(tmp_path / "adapter")}
    assert model_arguments({"base_model": "b", "bf16": False}, None) == {"pretrained": "b"}


def test_no_limit_asks_all_gold_targets():
    from axolotl_supertune.grid.sweep.scoring import _first_golds

    assert _first_golds(None, None) is None
    counts = [len(gold_records(name)) for name in BENCHMARKS]
    [indices] = _first_golds(0.5, None).values()
    assert len(indices) == sum(count // 2 for count in counts)
    assert indices[counts[0] // 2] == counts[0]
    [indices] = _first_golds(0.001, None).values()
    assert len(indices) == 6
