"""Adapters that `axolotl train` of every supported Axolotl wrote load here: with their logits, merged, and saved again.

The files are made by tests/travel/travel.py, which also trains on from a checkpoint of the other version.
"""

import importlib.util
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file

import axolotl_supertune.tuner  # noqa: F401

WRITTEN = sorted((Path(__file__).parents[1] / "fixtures/travel").glob("axolotl-*"))
spec = importlib.util.spec_from_file_location("travel_base", Path(__file__).parents[1] / "travel/base.py")
travel_base = importlib.util.module_from_spec(spec)
spec.loader.exec_module(travel_base)


def test_both_versions_wrote_both_methods():
    assert {path.name.rpartition("-")[::2] for path in WRITTEN} == {
        (f"axolotl-{version}", method) for version in ("0.19.0", "0.21.0") for method in ("supra", "super")
    }


@pytest.mark.parametrize("written", WRITTEN, ids=lambda path: path.name)
def test_an_adapter_of_another_version_gives_its_logits(written, tmp_path):
    expected = load_file(written / "logits.safetensors")
    model = PeftModel.from_pretrained(travel_base.make_base(), written)
    # Other versions of torch may add products up in another order; logits are up to 3, the adapter moves them by 0.1.
    torch.testing.assert_close(travel_base.logits(model)[-1], expected["logits"], rtol=0, atol=1e-5)
    with model.disable_adapter():
        assert (travel_base.logits(model)[-1] - expected["logits"]).abs().max() > 1e-2
    model.save_pretrained(tmp_path)
    saved, there = (load_file(folder / "adapter_model.safetensors") for folder in (tmp_path, written))
    assert saved.keys() == there.keys()
    assert all(torch.equal(saved[name], tensor) for name, tensor in there.items())
    torch.testing.assert_close(travel_base.logits(model.merge_and_unload())[-1], expected["merged"], rtol=0, atol=1e-5)
