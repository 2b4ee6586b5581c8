"""The YAMLs that README.md gives for one's own data train as they stand, but for the base, sizes and the device."""

import json
import re
from pathlib import Path

import pytest
import yaml
from trainings import eval_losses

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
SECTION = README.partition("\n## Your own data and model\n")[2].partition("\n## ")[0]
BLOCKS = [yaml.safe_load(block) for block in re.findall(r"^```yaml\n(.*?)^```", SECTION, re.MULTILINE | re.DOTALL)]
COMPLETE = next(block for block in BLOCKS if "adapter" in block)
# What a CPU needs, and what makes it a matter of seconds.
TINY = {"bf16": False, "fp16": False, "tf32": False, "dataloader_pin_memory": False, "optimizer": "adamw_torch"}
TINY |= {"sequence_len": 256, "micro_batch_size": 2, "calibration_samples": 8, "calibration_sequence_len": 64}


def records(kind, problems):
    for line in problems.read_text().splitlines():
        record = json.loads(line)
        question, answer = record["instruction"], record["output"]
        if kind == "alpaca":
            yield record
        elif kind == "completion":
            yield {"text": f"{question}\n{answer}"}
        else:
            turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
            yield {"messages": turns}


def test_there_is_a_yaml_for_each_format():
    assert sorted(block["datasets"][0]["type"] for block in BLOCKS) == ["alpaca", "chat_template", "completion"]


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block["datasets"][0]["type"])
def test_a_yaml_of_the_readme_trains(block, base, problems, train, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    mapping = {**COMPLETE, **block, **TINY, "base_model": str(base), "special_tokens": {"pad_token": "<pad>"}}
    if mapping.get("chat_template") == "tokenizer_default":  # the tiny base is none that chats
        mapping["chat_template"] = "alpaca"
    (dataset,) = mapping["datasets"]
    lines = [json.dumps(record) + "\n" for record in records(dataset["type"], problems[0])]
    Path(dataset["path"]).write_text("".join(lines))
    trainer = train(mapping)
    losses = eval_losses(trainer)
    assert losses[-1] < losses[0]
    assert (Path(mapping["output_dir"]) / "adapter_model.safetensors").is_file()
