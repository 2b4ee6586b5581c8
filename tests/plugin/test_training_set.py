"""`calibration_dataset: training_set`: activation norms of the records that are trained on."""

import json
from pathlib import Path

import numpy
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from axolotl_supertune import ActivationNorms, calibrate

ON_RECORDS = {"calibration_dataset": "training_set", "calibration_samples": 6, "calibration_sequence_len": None}


def test_the_norms_are_those_of_training_records(settings, train, base, problems, tmp_path):
    mapping = settings(**ON_RECORDS, max_steps=1, save_steps=1, eval_steps=None, calibration_batch_size=4)
    trainer = train(mapping)
    found = ActivationNorms.load(Path(mapping["output_dir"]) / "activation_norms.safetensors")
    made = found.provenance
    assert (made["dataset"], made["samples"], made["sequence_len"]) == ("training_set", 6, 512)
    assert made["training_data"] == problems[0].name

    # Which records they were: of all that are trained on, six whose tokens add up; each by itself, without padding.
    records = [torch.tensor([each["input_ids"]]) for each in trainer.train_dataset]
    chosen = numpy.sort(numpy.random.default_rng(0).choice(len(records), size=6, replace=False))
    batches = [records[at] for at in chosen]
    assert made["tokens"] == sum(each.numel() for each in batches)
    text = AutoTokenizer.from_pretrained(base).decode(batches[0][0])
    assert "### Response:" in text
    model = AutoModelForCausalLM.from_pretrained(base)
    expected = calibrate(model, batches, layers=list(found.norms), progress=False)
    for name, norm in expected.norms.items():
        torch.testing.assert_close(found[name], norm, rtol=1e-5, atol=1e-6)

    card = (Path(mapping["output_dir"]) / "README.md").read_text()
    assert f"- **Calibration:** 6 training records of {problems[0].name} (seed 0)" in card.splitlines()
    config = json.loads((Path(mapping["output_dir"]) / "adapter_config.json").read_text())
    assert config["calibration"]["tokens"] == made["tokens"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"calibration_split": "train"},
            "calibration_split: train has no effect with calibration_dataset: training_set",
        ),
        ({"calibration_text_field": "text"}, "calibration_text_field: text has no effect"),
        ({"streaming": True}, "streaming: True does not work with calibration_dataset: training_set"),
    ],
)
def test_what_no_record_has_is_refused(settings, load, changes, message):
    with pytest.raises(ValueError, match=message):
        load(settings(**ON_RECORDS, **changes))


def test_too_few_records_are_told(settings, train):
    with pytest.raises(
        ValueError, match=r"calibration_samples: 128 records were asked for, and the training set has 4\d"
    ):
        train(settings(**{**ON_RECORDS, "calibration_samples": None}))
