"""What an adapter becomes for those who do not have this package."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from huggingface_hub import ModelCard
from nested import Nested
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from axolotl_supertune import SupraConfig
from axolotl_supertune.commands.export import export
from axolotl_supertune.tuner import SupraLayer
from axolotl_supertune.tuner.export import CannotExport, as_lora, export_adapter
from axolotl_supertune.tuner.model_card import note_training

IDS = torch.arange(1, 24).view(1, -1)

ELSEWHERE = """
import sys, torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, BitsAndBytesConfig
base, adapter, output, dtype = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(base, dtype=dtype)
model = PeftModel.from_pretrained(model, adapter).eval()
with torch.no_grad():
    torch.save(model(torch.arange(1, 24).view(1, -1)).logits, output)
assert not [name for name in sys.modules if name.startswith("axolotl_supertune")], "this package was imported"
"""


@pytest.fixture
def make(tiny_llama, tmp_path):
    """A function (dtype, **knobs) → (base folder, adapter folder, the adapted model)."""

    def make(dtype=torch.float32, **knobs):
        tiny_llama(dtype=dtype).save_pretrained(tmp_path / "base")
        base = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=dtype)
        defaults = {"r0": 4, "mask_score": "magnitude", "init_weights": False, "task_type": "CAUSAL_LM"}
        model = get_peft_model(base, SupraConfig(**{**defaults, **knobs})).eval()
        model.save_pretrained(tmp_path / "adapter")
        return tmp_path / "base", tmp_path / "adapter", model

    return make


def logits(model):
    with torch.no_grad():
        return model.eval()(IDS).logits


def elsewhere(folder, base, adapter, dtype="float32"):
    """Logits of stock PEFT in a process without this package."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    environment["AXOLOTL_SUPERTUNE_AUTOLOAD"] = "0"
    command = [sys.executable, "-c", ELSEWHERE, str(base), str(adapter), str(folder / "logits.pt"), dtype]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return torch.load(folder / "logits.pt")


@pytest.mark.parametrize("target_modules", [None, ["q_proj", "down_proj"]])
@pytest.mark.slow
def test_shira_gives_equal_logits_where_this_package_is_not(make, tmp_path, target_modules):
    base, adapter, model = make(supra_lambda=0, target_modules=target_modules)
    export_adapter(adapter, "shira", tmp_path / "out")
    expected = logits(model)
    assert torch.equal(elsewhere(tmp_path, base, tmp_path / "out"), expected)
    assert not torch.equal(expected, logits(AutoModelForCausalLM.from_pretrained(base)))
    tensors = load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert {name.rpartition(".")[2] for name in tensors} == {"shira_weight", "shira_indices"}


@pytest.mark.slow
def test_shira_of_a_bf16_base(make, tmp_path):
    base, adapter, model = make(torch.bfloat16, supra_lambda=0)
    export_adapter(adapter, "shira", tmp_path / "out")
    torch.testing.assert_close(elsewhere(tmp_path, base, tmp_path / "out", "bfloat16"), logits(model))


def test_shira_keeps_modules_to_save(make, tmp_path):
    base, adapter, model = make(supra_lambda=0, modules_to_save=["lm_head"])
    with torch.no_grad():
        model.base_model.model.lm_head.modules_to_save["default"].weight.mul_(2)
    model.save_pretrained(adapter)
    export_adapter(adapter, "shira", tmp_path / "out")
    loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), tmp_path / "out")
    assert torch.equal(logits(loaded), logits(model))


@pytest.mark.parametrize(
    ("knobs", "target", "message"),
    [
        ({"supra_lambda": 0.5}, "shira", r"layers\.0\.\S+ has a low-rank part \(λ = 0\.5\).*--to lora\+base"),
        ({"supra_lambda": 1.0}, "shira", r"has a low-rank part"),
        (
            {"supra_lambda": 0, "sparse_density": 0.1, "r0": None},
            "shira",
            r"layers\.0\.\S+ has \d+ entries in a layer of \d+ × \d+; SHiRA has r·.*--to merged",
        ),
        ({"supra_lambda": 0}, "lora+base", r"no low-rank part \(λ = 0\): use --to merged"),
        ({"supra_lambda": 0.9, "sparse_density": 0.3, "r0": None}, "lora+base", r"ranks \d+ to \d+ \(density budget\)"),
        ({"supra_lambda": 0.5, "task_type": "SEQ_CLS"}, "merged", "task_type SEQ_CLS"),
    ],
)
def test_what_cannot_be_expressed_is_refused(make, tmp_path, knobs, target, message):
    _, adapter, _ = make(**{key: value for key, value in knobs.items() if key != "task_type"})
    if "task_type" in knobs:
        path = adapter / "adapter_config.json"
        path.write_text(path.read_text().replace("CAUSAL_LM", knobs["task_type"]))
    with pytest.raises(CannotExport, match=message):
        export_adapter(adapter, target, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_shira_of_a_quantized_base_is_refused(make, tmp_path):
    _, adapter, _ = make(supra_lambda=0)
    path = adapter / "adapter_config.json"
    quantized = '"base_quantization": {"load_in_4bit": true}'
    path.write_text(path.read_text().replace('"base_quantization": null', quantized))
    with pytest.raises(CannotExport, match="trained on a quantized base"):
        export_adapter(adapter, "shira", tmp_path / "out")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("supra_lambda", [0, 0.5, 1])
def test_merged_is_what_merging_gives(make, tmp_path, dtype, supra_lambda):
    _, adapter, model = make(dtype, supra_lambda=supra_lambda)
    export_adapter(adapter, "merged", tmp_path / "out")
    written = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto").state_dict()
    expected = model.merge_and_unload().state_dict()
    assert written.keys() == expected.keys()
    for name, tensor in expected.items():
        assert written[name].dtype == dtype
        assert torch.equal(written[name], tensor), name


@pytest.mark.parametrize("supra_lambda", [0.5, 1])
@pytest.mark.slow
def test_lora_and_base_together_are_the_adapter(make, tmp_path, supra_lambda):
    _, adapter, model = make(supra_lambda=supra_lambda, modules_to_save=["lm_head"])
    with torch.no_grad():
        model.base_model.model.lm_head.modules_to_save["default"].weight.mul_(2)
    model.save_pretrained(adapter)
    export_adapter(adapter, "lora+base", tmp_path / "out")
    found = elsewhere(tmp_path, tmp_path / "out/base", tmp_path / "out/lora")
    torch.testing.assert_close(found, logits(model), rtol=1e-4, atol=1e-5)
    lora = LoraConfig.from_pretrained(tmp_path / "out/lora")
    assert (lora.r, lora.lora_alpha, lora.rank_pattern) == (4 * supra_lambda, 16, {})
    assert lora.base_model_name_or_path == str(tmp_path / "out/base")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "out/base")
    for layer in (module for module in model.modules() if isinstance(module, SupraLayer)):
        expected = layer.base_weight().clone()
        if "default" in layer.supra_values:
            expected.view(-1)[layer.supra_indices["default"].long()] += layer.supra_values["default"]
        assert torch.equal(base.get_submodule(layer.layer_name).weight, expected)


def test_nothing_is_overwritten_and_nothing_half_written(make, tmp_path, monkeypatch):
    _, adapter, _ = make(supra_lambda=0.5)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("x")
    with pytest.raises(FileExistsError, match="exists already"):
        export_adapter(adapter, "merged", tmp_path / "out")
    monkeypatch.setattr("axolotl_supertune.tuner.export._save_adapter", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        export_adapter(adapter, "lora+base", tmp_path / "other")
    assert {path.name for path in tmp_path.iterdir()} == {"base", "adapter", "out"}


def test_the_command(make, tmp_path):
    _, adapter, _ = make(supra_lambda=0)
    run = lambda *arguments: CliRunner().invoke(export, [str(argument) for argument in arguments])  # noqa: E731
    result = run(adapter, "--to", "shira", "--output", tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert f"wrote {tmp_path / 'out'}" in result.output
    result = run(adapter, "--to", "lora+base", "--output", tmp_path / "second")
    assert result.exit_code == 1
    assert "Error: the adapter has no low-rank part" in result.output
    result = run(tmp_path / "base", "--to", "merged", "--output", tmp_path / "second")
    assert "holds no adapter_config.json" in result.output
    result = run(adapter, "--to", "merged", "--output", tmp_path / "second", "--base", tmp_path / "nowhere")
    assert "the base model" in result.output
    assert "--base names another place" in result.output


def unfit(kind, adapter, base, tiny_llama):
    config, weights = adapter / "adapter_config.json", base / "model.safetensors"
    if kind == "another base":
        tiny_llama(num_hidden_layers=3).save_pretrained(base)
    elif kind == "a smaller base":
        tiny_llama(num_hidden_layers=1).save_pretrained(base)
    elif kind == "another width":
        tiny_llama(intermediate_size=128).save_pretrained(base)
    elif kind == "a damaged base":
        weights.write_bytes(weights.read_bytes()[:-100])
    elif kind == "a damaged config":
        config.write_text("{")
    elif kind == "a setting of a newer version":
        config.write_text(re.sub(r'"mask_score": "\w+"', '"mask_score": "fisher"', config.read_text()))
    else:
        r0 = 6 if kind == "another budget" else -6
        config.write_text(config.read_text().replace('"r0": 4', f'"r0": {r0}'))


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("another base", r"adapter does not fit the base model .*--base. \(It holds nothing for model\.layers\.2\."),
        ("a smaller base", r"adapter does not fit the base model .*--base. \(model\.layers\.1\."),
        ("another width", r"adapter does not fit the base model .*--base. \(model\.layers\.0\.mlp"),
        ("another budget", r"adapter does not fit the base model .*another budget.* than its adapter_config.json says"),
        ("a damaged base", r"the base model .*base cannot be loaded, its files are damaged"),
        ("a damaged config", r"adapter/adapter_config\.json is damaged"),
        ("a config that says nonsense", r"adapter/adapter_config\.json: .*r0"),
        ("a setting of a newer version", r"adapter/adapter_config\.json: .*fisher"),
    ],
)
def test_what_does_not_fit_is_an_error_with_a_remedy_and_no_traceback(make, tiny_llama, tmp_path, kind, message):
    base, adapter, _ = make(supra_lambda=0.5, target_modules=["q_proj", "up_proj"])
    unfit(kind, adapter, base, tiny_llama)
    result = CliRunner().invoke(export, [str(adapter), "--to", "merged", "--output", str(tmp_path / "out")])
    assert result.exit_code == 1
    assert isinstance(result.exception, SystemExit), result.exception
    assert re.search(message, result.output), result.output
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", ["the current folder", "a link to nothing", "a link to a folder"])
def test_an_output_that_no_folder_can_be_renamed_to_is_refused_before_all_work(make, tmp_path, monkeypatch, kind):
    _, adapter, _ = make(supra_lambda=0)
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    output = Path(".") if kind == "the current folder" else tmp_path / "link"
    if "link" in kind:
        output.symlink_to("empty" if "folder" in kind else "nowhere")
    monkeypatch.setattr("axolotl_supertune.tuner.export.read_adapter", lambda folder: pytest.fail("work was done"))
    with pytest.raises(FileExistsError, match=r"--output .* is (a link|the current folder).*; name a new folder"):
        export_adapter(adapter, "shira", output)


def test_shira_adapts_no_layer_of_a_longer_name(tmp_path):
    config = SupraConfig(r0=4, supra_lambda=0, mask_score="magnitude", target_modules="^lin$", init_weights=False)
    adapted = get_peft_model(Nested(), config).eval()
    adapted.save_pretrained(tmp_path / "adapter")
    export_adapter(tmp_path / "adapter", "shira", tmp_path / "out")
    loaded = PeftModel.from_pretrained(Nested(), tmp_path / "out").eval()
    x = torch.arange(64).view(2, 32) / 64
    assert torch.equal(loaded(x), adapted(x))


def test_a_lora_adapts_no_layer_of_a_longer_name():
    model = get_peft_model(Nested(), SupraConfig(r0=4, supra_lambda=1, mask_score="magnitude", target_modules="^lin$"))
    tensors = {name.removesuffix(".default"): tensor for name, tensor in model.state_dict().items() if "supra_" in name}
    lora, _ = as_lora(model.peft_config["default"], tensors, [name for name, _ in Nested().named_modules()])
    adapted = [name for name, module in get_peft_model(Nested(), lora).named_modules() if hasattr(module, "lora_A")]
    assert adapted == ["base_model.model.lin"]


def test_a_sum_is_refused_by_shira_as_what_it_is(make, tmp_path):
    _, _, model = make(supra_lambda=0)
    low_rank = SupraConfig(r0=4, supra_lambda=0.5, mask_score="magnitude", task_type="CAUSAL_LM", init_weights=False)
    model.add_adapter("low", low_rank)
    model.add_weighted_adapter(["default", "low"], [1, 1], "sum")
    model.save_pretrained(tmp_path / "saved", selected_adapters=["sum"])
    with pytest.raises(CannotExport, match=r"low-rank part \(the adapter is a sum of others\)"):
        export_adapter(tmp_path / "saved" / "sum", "shira", tmp_path / "out")


def test_a_damaged_adapter_is_not_exported(make, tmp_path):
    _, adapter, _ = make(supra_lambda=0)
    path = adapter / "adapter_model.safetensors"
    tensors = load_file(path)
    name = next(name for name in tensors if name.endswith("supra_values"))
    tensors[name][0] += 1
    save_file(tensors, path)
    with pytest.raises(ValueError, match="checksum does not match"):
        export_adapter(adapter, "shira", tmp_path / "out")


@pytest.mark.parametrize("target", ["shira", "merged", "lora+base"])
def test_every_product_has_a_card(make, tmp_path, target):
    supra_lambda = 0 if target == "shira" else 0.5
    base, adapter, model = make(supra_lambda=supra_lambda)
    note_training(model, {"Training data": "openai/gsm8k", "Axolotl": "0.19.0"}, ["openai/gsm8k"])
    model.save_pretrained(adapter)
    export_adapter(adapter, target, tmp_path / "out")
    total, _ = model.get_nb_trainable_parameters()
    for folder, library, of in {
        "shira": [("", "peft", base)],
        "merged": [("", "transformers", base)],
        "lora+base": [("base", "transformers", base), ("lora", "peft", tmp_path / "out/base")],
    }[target]:
        card = ModelCard.load(tmp_path / "out" / folder / "README.md")
        assert (card.data.library_name, card.data.base_model) == (library, str(of))
        assert (card.data.pipeline_tag, card.data.datasets) == ("text-generation", ["openai/gsm8k"])
        assert set(card.data.tags) == {"axolotl-supertune", "supra" if supra_lambda else "super"}
        lines = card.text.splitlines()
        assert f"- **Base model:** {base}" in lines
        assert "- **Training data:** openai/gsm8k" in lines
        sparse = total // 2 if supra_lambda else total
        assert f"- **Trained:** {total:,} parameters in 14 layers, {sparse:,} of them single weights" in lines
        assert "install axolotl-supertune" not in card.text
    if target == "lora+base":
        assert "on the original base it is another model" in card.text


def test_an_adapter_without_a_card_or_a_named_base_is_exported(make, tmp_path):
    _, adapter, _ = make(supra_lambda=0)
    (adapter / "README.md").unlink()
    path = adapter / "adapter_config.json"
    path.write_text(path.read_text().replace(f'"base_model_name_or_path": "{tmp_path / "base"}"', '"revision": null'))
    export_adapter(adapter, "shira", tmp_path / "out")
    card = ModelCard.load(tmp_path / "out/README.md")
    assert card.data.base_model is None
    assert "- **Base model:** not known" in card.text


def test_dtypes_are_spelt_as_in_the_yaml(make, tmp_path):
    _, adapter, _ = make(supra_lambda=0)
    arguments = [str(adapter), "--to", "merged", "--output", str(tmp_path / "out"), "--dtype", "bf16"]
    result = CliRunner().invoke(export, arguments)
    assert result.exit_code == 0, result.output
    assert {tensor.dtype for tensor in load_file(tmp_path / "out/model.safetensors").values()} == {torch.bfloat16}


@pytest.mark.parametrize(
    "quantization",
    [{"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}, {"load_in_8bit": True}],
    ids=["4bit", "8bit"],
)
def test_of_a_quantized_base_the_dequantized_one_is_written(tiny_llama, tmp_path, quantization):
    """The adapter was trained on it; what is written has no trace of bitsandbytes."""
    pytest.importorskip("bitsandbytes")
    tiny_llama().save_pretrained(tmp_path / "base")
    base = AutoModelForCausalLM.from_pretrained(
        tmp_path / "base", dtype=torch.float32, quantization_config=BitsAndBytesConfig(**quantization)
    )
    config = SupraConfig(r0=4, supra_lambda=0.5, mask_score="magnitude", init_weights=False, task_type="CAUSAL_LM")
    model = get_peft_model(base, config).eval()
    model.save_pretrained(tmp_path / "adapter")
    expected = logits(model)
    for target in ("merged", "lora+base"):
        export_adapter(tmp_path / "adapter", target, tmp_path / target)
    written = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype="auto")
    assert getattr(written.config, "quantization_config", None) is None
    merged = model.merge_and_unload().state_dict()
    assert written.state_dict().keys() == merged.keys()
    for name, tensor in written.state_dict().items():
        assert tensor.dtype == torch.float32
        assert torch.equal(tensor, merged[name]), name
    torch.testing.assert_close(logits(written), expected, rtol=1e-4, atol=1e-5)
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "lora+base/base", dtype="auto")
    assert getattr(base.config, "quantization_config", None) is None
    lora = PeftModel.from_pretrained(base, tmp_path / "lora+base/lora")
    torch.testing.assert_close(logits(lora), expected, rtol=1e-4, atol=1e-5)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    assert (logits(plain) - expected).abs().max() > 0.01
    bits = 4 if "load_in_4bit" in quantization else 8
    for card in ("merged", "lora+base/base", "lora+base/lora"):
        text = (tmp_path / card / "README.md").read_text()
        assert f"{tmp_path / 'base'}, quantized to {bits} bits by bitsandbytes" in text
