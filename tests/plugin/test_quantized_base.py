"""`axolotl train`, resume and merge-lora with load_in_4bit and load_in_8bit."""

import json
from pathlib import Path
from types import SimpleNamespace

import bitsandbytes as bnb
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig

from axolotl_supertune.plugin.quantized_base import complete, quantization_config
from axolotl_supertune.plugin.validation import prepare
from axolotl_supertune.tasks.evaluation import check_adapter
from axolotl_supertune.tuner import read_adapter
from axolotl_supertune.tuner.export import CannotExport, export_adapter
from axolotl_supertune.tuner.quantization import BACKENDS
from axolotl_supertune.tuner.quantization.bitsandbytes import Bitsandbytes
from axolotl_supertune.tuner.quantization.linear import QuantizedSupraLinear

PROMPTS = torch.randint(3, 400, (2, 17), generator=torch.Generator().manual_seed(1))


def logits(model):
    with torch.no_grad():
        return model.eval()(PROMPTS).logits


def quantized_layers(model):
    return [module for module in model.modules() if isinstance(module, QuantizedSupraLinear)]


def eval_losses(trainer):
    return [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]


def merged_folder(mapping):
    return Path(mapping["output_dir"]) / "merged"


def merged_of(mapping, write):
    from axolotl.cli.merge_lora import do_cli

    do_cli(config=write(mapping))
    folder = merged_folder(mapping)
    assert "quantization_config" not in json.loads((folder / "config.json").read_text())
    return AutoModelForCausalLM.from_pretrained(folder)


def assert_merge_is_what_was_trained(mapping, adapted, write):
    """Equal to the trained model, and further from the unquantized base plus the adapter."""
    merged = logits(merged_of(mapping, write))
    plain = AutoModelForCausalLM.from_pretrained(mapping["base_model"])
    with pytest.warns(UserWarning, match="the adapter was trained on a base that was quantized"):
        other = logits(PeftModel.from_pretrained(plain, mapping["output_dir"]))
    difference = (merged - adapted).abs().max().item()
    assert difference < 1e-4
    assert (other - adapted).abs().max().item() > 20 * difference


def test_4_bits_train_and_merge(settings, train, write, tmp_path):
    mapping = settings(load_in_4bit=True, gradient_checkpointing=True)
    trainer = train(mapping)
    first, *_, last = eval_losses(trainer)
    assert last < first
    layers = quantized_layers(trainer.model)
    assert len(layers) == 14
    for layer in layers:
        weight = layer.base_layer.weight
        assert type(layer.base_layer) is bnb.nn.Linear4bit
        assert (weight.quant_state.quant_type, weight.quant_state.nested) == ("nf4", True)
        assert (weight.dtype, layer.base_layer.compute_dtype, layer.weight_dtype) == (
            torch.uint8,
            torch.float32,
            torch.float32,
        )
        assert layer.supra_values["default"].any()
    assert trainer.model.base_model.model.is_gradient_checkpointing
    saved = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert saved["base_quantization"] == {
        "bnb_4bit_compute_dtype": "float32",
        "bnb_4bit_quant_storage": "uint8",
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": True,
        "llm_int8_skip_modules": None,
        "load_in_4bit": True,
        "load_in_8bit": False,
    }
    assert saved["calibration"]["tokens"] == 256
    adapted = logits(trainer.model)
    settings_of_4_bits = BitsAndBytesConfig(**saved["base_quantization"])
    base = AutoModelForCausalLM.from_pretrained(mapping["base_model"], quantization_config=settings_of_4_bits)
    loaded = PeftModel.from_pretrained(base, mapping["output_dir"])
    torch.testing.assert_close(logits(loaded), adapted, rtol=1e-5, atol=1e-6)
    assert_merge_is_what_was_trained(mapping, adapted, write)
    export_adapter(Path(mapping["output_dir"]), "merged", tmp_path / "exported")
    exported, merged = (
        load_file(path / "model.safetensors") for path in (tmp_path / "exported", merged_folder(mapping))
    )
    assert exported.keys() == merged.keys()
    assert all(torch.equal(exported[name], tensor) for name, tensor in merged.items())
    with pytest.raises(CannotExport, match="trained on a quantized base"):
        export_adapter(Path(mapping["output_dir"]), "shira", tmp_path / "shira")
    with pytest.raises(ValueError, match=r"trained on a quantized base.*merge-lora"):
        check_adapter(Path(mapping["output_dir"]))


def test_8_bits_in_fp16_with_super_train_resume_and_merge(settings, train, write, tmp_path):
    more = {"max_steps": 4, "eval_steps": 4, "mask_score": "magnitude"}
    mapping = settings(adapter="super", load_in_8bit=True, **more)
    trainer = train(mapping)
    first, *_, last = eval_losses(trainer)
    assert last < first
    layers = quantized_layers(trainer.model)
    assert len(layers) == 14
    assert {type(layer.base_layer) for layer in layers} == {bnb.nn.Linear8bitLt}
    # What Axolotl loads 8 bits in where it is not bf16, which transformers does not train in on a CPU.
    assert {layer.weight_dtype for layer in layers} == {torch.float16}
    support = layers[3].supra_indices["default"].clone()

    longer = {**mapping, "max_steps": 6, "auto_resume_from_checkpoints": True}
    trainer = train(longer)
    assert trainer.state.global_step == 6
    assert torch.equal(quantized_layers(trainer.model)[3].supra_indices["default"], support)
    tensors = read_adapter(tmp_path / "adapter")
    assert {tensor.dtype for name, tensor in tensors.items() if "supra_values" in name} == {torch.float32}

    # merge-lora turns load_in_8bit off, and then Axolotl loads in fp32: equal but for the rounding of W̃ to fp16.
    trained = [layer.weight_with(["default"]) for layer in quantized_layers(trainer.model)]
    names = [layer.layer_name for layer in quantized_layers(trainer.model)]
    merged = merged_of(mapping, write)
    for name, weight in zip(names, trained, strict=True):
        torch.testing.assert_close(merged.get_submodule(name).weight.half(), weight, rtol=1e-3, atol=5e-6)

    with pytest.raises(ValueError, match=r"resume_from_checkpoint: .* was trained with base_quantization"):
        train({**longer, "load_in_8bit": None, "load_in_4bit": True, "max_steps": 8})


def test_the_settings_of_4_bits_are_those_of_the_yaml(settings, load):
    from axolotl.loaders import ModelLoader, load_tokenizer

    changed = {"bnb_4bit_quant_type": "fp4", "bnb_4bit_use_double_quant": False, "llm_int8_skip_modules": ["q_proj"]}
    mapping = settings(load_in_4bit=True, bnb_config_kwargs=changed, mask_score="magnitude", bfloat16=True)
    cfg = load(mapping)
    model, _ = ModelLoader(cfg, load_tokenizer(cfg)).load()
    states = [layer.base_layer.weight.quant_state for layer in quantized_layers(model)]
    assert {(state.quant_type, state.nested, state.dtype) for state in states} == {("fp4", False, torch.bfloat16)}
    assert {layer.base_layer.compute_dtype for layer in quantized_layers(model)} == {torch.bfloat16}
    assert len(quantized_layers(model)) == 12
    # As Axolotl leaves a base for qlora: what is not quantized is in the run's dtype again.
    assert model.base_model.model.model.norm.weight.dtype == torch.bfloat16
    assert model.base_model.model.model.embed_tokens.weight.dtype == torch.bfloat16


def test_a_base_of_another_method_is_refused_before_it_is_loaded(settings, load, monkeypatch, base, tmp_path):
    from axolotl.loaders import ModelLoader, load_tokenizer

    other = tmp_path / "gptq"
    other.mkdir()
    for path in base.iterdir():
        (other / path.name).write_bytes(path.read_bytes())
    config = json.loads((other / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4}
    (other / "config.json").write_text(json.dumps(config))
    cfg = load(settings(base_model=str(other)))

    def fail(*args, **kwargs):
        raise AssertionError("the model was loaded")

    monkeypatch.setattr(ModelLoader, "_build_model", fail)
    with pytest.raises(ValueError, match=r"base_model: .*gptq is quantized by gptq\. .*load_in_4bit"):
        ModelLoader(cfg, load_tokenizer(cfg)).load()


def test_preparing_a_config_twice_changes_nothing():
    cfg = {"adapter": "supra", "load_in_4bit": True, "mask_score": "magnitude"}
    known = {*cfg, "bnb_config_kwargs", "overrides_of_model_kwargs"}
    prepare(cfg, known)
    once = json.dumps(cfg, sort_keys=True)
    prepare(cfg, {*known, *cfg})
    assert json.dumps(cfg, sort_keys=True) == once
    assert cfg["overrides_of_model_kwargs"] == {"quantization_config": {"load_in_4bit": True}}


def test_the_backend_that_is_supported_may_be_named():
    cfg = {"adapter": "supra", "load_in_4bit": True, "nf4_backend": "bitsandbytes", "mask_score": "magnitude"}
    prepare(cfg, {*cfg, "overrides_of_model_kwargs"})
    assert cfg["nf4_backend"] == "bitsandbytes"


@pytest.mark.parametrize("key", ["load_in_4bit", "load_in_8bit"])
def test_the_base_is_left_as_axolotl_leaves_it_for_lora(settings, load, key):
    from axolotl.loaders import ModelLoader, load_tokenizer

    def base_of(mapping):
        cfg = load(mapping)
        model, _ = ModelLoader(cfg, load_tokenizer(cfg)).load()
        base = model.base_model.model
        named = {
            name.replace(".base_layer.", "."): each for name, each in base.named_parameters() if "lora_" not in name
        }
        plain = {name: each for name, each in named.items() if "supra_" not in name}
        kinds = {name: (type(each).__name__, each.dtype, each.requires_grad) for name, each in plain.items()}
        assert base.is_gradient_checkpointing
        return kinds, base.config.quantization_config.to_dict()

    # A cast that norms and embeddings are brought back from would show in the dtypes.
    options = {"bfloat16": True, "gradient_checkpointing": True, key: True}
    if key == "load_in_4bit":
        options["bnb_config_kwargs"] = {"bnb_4bit_quant_storage": "bfloat16"}  # where we differ
    ours = base_of(settings(mask_score="magnitude", **options))
    off = dict.fromkeys(("lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel"), False)
    calibration = dict.fromkeys(("calibration_dataset", "calibration_samples", "calibration_sequence_len"))
    lora = "qlora" if key == "load_in_4bit" else "lora"
    assert ours == base_of(
        settings(adapter=lora, lora_r=4, lora_alpha=16, lora_target_linear=True, **calibration, **off, **options)
    )


@pytest.mark.parametrize("model_type", ["llama", "jamba", "falcon_h1", "qwen2_moe"])
@pytest.mark.parametrize(
    "keys",
    [
        {"load_in_8bit": True},
        {"load_in_4bit": True},
        {"load_in_4bit": True, "bnb_config_kwargs": {"bnb_4bit_quant_storage": "float32"}},
        {
            "load_in_4bit": True,
            "bnb_config_kwargs": {
                "bnb_4bit_quant_type": "fp4",
                "bnb_4bit_use_double_quant": False,
                "bnb_4bit_compute_dtype": "float32",
                "llm_int8_skip_modules": ["q_proj"],
            },
        },
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "saved", [None, {"quant_method": "bitsandbytes", "load_in_8bit": True}], ids=["plain", "saved"]
)
def test_the_settings_are_those_of_axolotls_loader(model_type, keys, saved):
    from axolotl.loaders import ModelLoader
    from axolotl.utils.dict import DictDefault

    lora = "qlora" if keys.get("load_in_4bit") else "lora"
    cfg = DictDefault({"adapter": lora, "torch_dtype": torch.bfloat16, "model_config_type": model_type, **keys})
    model_config = LlamaConfig()
    if saved:
        model_config.quantization_config = saved
    loader = SimpleNamespace(cfg=cfg, model_config=model_config, model_kwargs={}, is_fsdp_enabled=False)
    ModelLoader._set_quantization_config(loader)
    expected = loader.model_kwargs["quantization_config"].to_dict()
    if "bnb_4bit_quant_storage" not in (keys.get("bnb_config_kwargs") or {}):
        expected["bnb_4bit_quant_storage"] = "uint8"  # the one that differs, see quantization_config
    assert quantization_config(cfg, model_config).to_dict() == expected


def test_a_base_of_any_library_with_a_backend_is_taken(monkeypatch):
    class Other(Bitsandbytes):
        name = "other"

    cfg = SimpleNamespace(base_model="base", load_in_4bit=None, load_in_8bit=None)
    model_config = SimpleNamespace(quantization_config={"quant_method": "other"})
    with pytest.raises(ValueError, match="base_model: base is quantized by other"):
        complete(cfg, model_config)
    monkeypatch.setattr("axolotl_supertune.tuner.quantization.settings.BACKENDS", [*BACKENDS, Other()])
    complete(cfg, model_config)
