"""The README.md beside an adapter."""

import dataclasses

import pytest
from huggingface_hub import ModelCard
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

from axolotl_supertune import SupraConfig, __version__
from axolotl_supertune.tuner.model_card import note_training


@pytest.fixture
def base(tiny_llama, tmp_path):
    tiny_llama().save_pretrained(tmp_path / "base")
    return AutoModelForCausalLM.from_pretrained(tmp_path / "base")


def test_the_card_says_what_the_adapter_is(base, norms, tmp_path):
    norms.provenance.update({"dataset": "allenai/c4", "seed": 7, "sequence_len": 11})
    config = SupraConfig(r0=4, supra_lambda=0.5, activation_norms=norms, task_type="CAUSAL_LM")
    model = get_peft_model(base, config)
    note_training(model, {"Training data": "openai/gsm8k", "Axolotl": "0.19.0"}, ["openai/gsm8k"])
    model.save_pretrained(tmp_path / "adapter")
    card = ModelCard.load(tmp_path / "adapter/README.md")
    assert card.data.base_model == str(tmp_path / "base")
    assert card.data.library_name == "peft"
    assert card.data.pipeline_tag == "text-generation"
    assert {"supra", "axolotl-supertune"} <= set(card.data.tags)
    assert card.data.datasets == ["openai/gsm8k"]
    lines = card.text.splitlines()
    for line in (
        "## Supra adapter",
        f"- **Base model:** {tmp_path / 'base'}",
        "- **Method:** Supra, λ = 0.5, α = 16, support wanda-bottom, of *Super-Tuning: From Activation-Aware Pruning "
        "to Sparse Fine-Tuning*",
        "- **Budget:** rank 4: as many parameters as a LoRA of rank 4",
        "- **Calibration:** 3 × 11 tokens of allenai/c4 (seed 7)",
        "- **Training data:** openai/gsm8k",
        "- **Axolotl:** 0.19.0",
        f"- **axolotl-supertune:** {__version__}",
    ):
        assert line in lines, line
    total, _ = model.get_nb_trainable_parameters()
    assert f"- **Trained:** {total:,} parameters in 14 layers, {total // 2:,} of them single weights" in lines


def test_a_second_save_replaces_the_section_and_keeps_the_rest(base, tmp_path):
    model = get_peft_model(base, SupraConfig(r0=4, supra_lambda=0, mask_score="magnitude"))
    model.save_pretrained(tmp_path / "adapter")
    path = tmp_path / "adapter/README.md"
    first = path.read_text()
    path.write_text(first.replace("## Uses", "My own words.\n\n## Uses").replace("density", "?").replace("rank 4", "?"))
    model.save_pretrained(tmp_path / "adapter")
    assert path.read_text() == first.replace("## Uses", "My own words.\n\n## Uses")
    assert path.read_text().count("## Super adapter") == 1
    assert "none: the scores need no activations" in first
    loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), tmp_path / "adapter")
    loaded.save_pretrained(tmp_path / "again")
    assert "## Super adapter" in (tmp_path / "again/README.md").read_text()


def test_a_card_without_headings_gets_the_section(base, tmp_path):
    model = get_peft_model(base, SupraConfig(sparse_density=0.1, mask_score="magnitude", sparse_direction="hybrid"))
    (tmp_path / "README.md").write_text("---\nlicense: mit\n---\nMine.\n")
    model.create_or_update_model_card(str(tmp_path))
    text = (tmp_path / "README.md").read_text()
    assert "license: mit" in text
    assert "Mine." in text
    assert "density 0.1 of every adapted layer" in text
    assert "magnitude-hybrid (β = 0.5)" in text


@pytest.mark.parametrize(
    ("knobs", "expected"),
    [
        ({"supra_lambda": 1}, "Supra, λ = 1, α = 16, no single weights, of"),
        ({"supra_lambda": 0, "sparse_direction": "random", "support_seed": 3}, "Super, support random (seed 3), of"),
        ({"supra_lambda": 1, "budget_scope": "density"}, "Supra, λ = 1, α = 16, support magnitude-bottom, of"),
    ],
)
def test_a_card_names_a_score_only_where_it_is_used(base, tmp_path, knobs, expected):
    get_peft_model(base, SupraConfig(mask_score="magnitude", **knobs)).save_pretrained(tmp_path / "adapter")
    assert f"- **Method:** {expected}" in (tmp_path / "adapter/README.md").read_text()


def test_the_card_of_a_sum_names_its_parts_and_that_of_a_selection_no_others(base, norms, tmp_path):
    norms.provenance.update({"dataset": "allenai/c4", "seed": 7, "sequence_len": 11})
    first = SupraConfig(r0=2, supra_lambda=0, activation_norms=norms, values_dtype="bf16", init_weights=False)
    model = get_peft_model(base, first, adapter_name="first")
    second = SupraConfig(r0=4, supra_lambda=0.5, mask_score="magnitude", sparse_direction="top", init_weights=False)
    model.add_adapter("second", second)
    model.add_weighted_adapter(["first", "second"], [0.7, 0.25], "both")
    model.add_weighted_adapter(["both"], [2], "twice")
    model.save_pretrained(tmp_path / "one", selected_adapters=["both"])
    text = (tmp_path / "one/README.md").read_text()
    assert text.count("- **Method:**") == 1
    for line in (
        "## Supra adapter `both`",
        "- **Method:** Supra, the sum (cat) of 0.7 × `first` (Super, support wanda-bottom), 0.25 × `second` (Supra, "
        "λ = 0.5, α = 16, support magnitude-top), of *Super-Tuning: From Activation-Aware Pruning to Sparse "
        "Fine-Tuning*",
        "- **Budget:** `first`: rank 2: as many parameters as a LoRA of rank 2; `second`: rank 4: as many parameters "
        "as a LoRA of rank 4",
        "- **Calibration:** `first`: 3 × 11 tokens of allenai/c4 (seed 7); `second`: none: the scores need no "
        "activations",
    ):
        assert line in text.splitlines(), line
    tags = ModelCard.load(tmp_path / "one/README.md").data.tags
    assert "supra" in tags
    assert "super" not in tags
    model.save_pretrained(tmp_path / "two", selected_adapters=["twice", "first"])
    text = (tmp_path / "two/README.md").read_text()
    assert "Supra, the sum (cat) of 2 × `both` (Supra, the sum (cat) of 0.7 × `first` (Super" in text
    assert "## Super adapter `first`" in text
    assert text.count("- **Method:**") == 2
    model.save_pretrained(tmp_path / "all")
    assert (tmp_path / "all/README.md").read_text().count("- **Method:**") == 4


def test_the_card_says_of_windows_without_a_name_what_is_known(base, norms, tmp_path):
    norms = dataclasses.replace(norms, provenance={"samples": 3, "tokens": 33})
    model = get_peft_model(base, SupraConfig(r0=4, supra_lambda=0, activation_norms=norms))
    model.save_pretrained(tmp_path / "adapter")
    text = (tmp_path / "adapter/README.md").read_text()
    assert "- **Calibration:** 3 windows, 33 tokens in all, of a text that was not named" in text.splitlines()


def test_cards_of_other_methods_are_pefts(base, tmp_path):
    get_peft_model(base, LoraConfig(target_modules=["q_proj"])).save_pretrained(tmp_path / "adapter")
    assert "supertune" not in (tmp_path / "adapter/README.md").read_text()
