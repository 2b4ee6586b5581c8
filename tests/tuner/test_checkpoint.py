"""The file of an adapter: every version is read, saves are whole, damage is named."""

import contextlib
import importlib.util
import json
import shutil
from pathlib import Path

import peft.peft_model
import pytest
import torch
from peft import (
    LoraConfig,
    PeftConfig,
    PeftModel,
    get_peft_model,
    inject_adapter_in_model,
    set_peft_model_state_dict,
)
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from axolotl_supertune import SupraConfig
from axolotl_supertune.tuner import read_adapter
from axolotl_supertune.tuner.checkpoint import pack, unpack

FIXTURES = Path(__file__).parents[1] / "fixtures"
spec = importlib.util.spec_from_file_location("fixture_maker", FIXTURES / "make.py")
make = importlib.util.module_from_spec(spec)
spec.loader.exec_module(make)

WEIGHTS = "adapter_model.safetensors"
LAYER = "model.layers.1.mlp.up_proj"
VERSIONS = sorted(path.name for path in FIXTURES.glob("adapter_v*"))


def adapted(model, **knobs):
    defaults = {"r0": 4, "supra_lambda": 0.5, "mask_score": "magnitude", "init_weights": False}
    return get_peft_model(model, SupraConfig(**{**defaults, **knobs}))


def adapter(model, name="default"):
    found = {key: tensor for key, tensor in model.state_dict().items() if ".supra_" in key and key.endswith(f".{name}")}
    return {key.removesuffix(f".{name}"): tensor for key, tensor in found.items()}


def assert_same(one, two):
    assert one.keys() == two.keys()
    assert one
    for name in one:
        assert one[name].dtype == two[name].dtype, name
        assert torch.equal(one[name], two[name]), name


def files(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("low_cpu_mem_usage", [False, True])
@pytest.mark.parametrize("version", VERSIONS)
def test_every_version_is_read(version, low_cpu_mem_usage):
    loaded = PeftModel.from_pretrained(make.base(), FIXTURES / version, low_cpu_mem_usage=low_cpu_mem_usage)
    expected = make.contents(get_peft_model(make.base(), make.config()))
    assert_same(adapter(loaded), adapter(expected))
    assert_same(read_adapter(FIXTURES / version), {**read_adapter(FIXTURES / VERSIONS[-1])})
    x = torch.linspace(-1, 1, 1024)
    wide = loaded.base_model.model.wide.eval(), expected.base_model.model.wide.eval()
    assert torch.equal(wide[0](x), wide[1](x))
    assert not torch.equal(wide[0](x), make.base().wide(x))
    head = loaded.base_model.model.head.modules_to_save["default"]
    assert head.weight.flatten().tolist() == [i / 1024 for i in range(6)]


def test_the_newest_fixture_is_what_is_written(tmp_path):
    assert VERSIONS == ["adapter_v0", "adapter_v1"]
    make.contents(get_peft_model(make.base(), make.config())).save_pretrained(tmp_path)
    assert (tmp_path / WEIGHTS).read_bytes() == (FIXTURES / VERSIONS[-1] / WEIGHTS).read_bytes()


def test_a_file_holds_codes_and_a_model_indices(tiny_llama, tmp_path):
    model = adapted(tiny_llama())
    model.save_pretrained(tmp_path)
    names = {key.rpartition(".")[2] for key in load_file(tmp_path / WEIGHTS)}
    assert names == {"supra_values", "supra_codes", "supra_shape", "supra_L", "supra_R", "supra_checksum"}
    assert_same(read_adapter(tmp_path), adapter(model))
    with safe_open(tmp_path / WEIGHTS, framework="pt", device="cpu") as mapped:
        assert mapped.get_slice(f"base_model.model.{LAYER}.supra_codes").get_dtype() == "U16"
    assert_same(adapter(PeftModel.from_pretrained(tiny_llama(), tmp_path)), adapter(model))


@pytest.mark.parametrize("low_cpu_mem_usage", [False, True])
def test_bf16_values_are_loaded_in_fp32(tiny_llama, tmp_path, low_cpu_mem_usage):
    model = adapted(tiny_llama(), values_dtype="bf16")
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / WEIGHTS)
    trained = ("supra_values", "supra_L", "supra_R")
    assert {tensor.dtype for key, tensor in saved.items() if key.endswith(trained)} == {torch.bfloat16}
    loaded = adapter(PeftModel.from_pretrained(tiny_llama(), tmp_path, low_cpu_mem_usage=low_cpu_mem_usage))
    rounded = {
        key: tensor.bfloat16().float() if key.endswith(trained) else tensor for key, tensor in adapter(model).items()
    }
    assert_same(loaded, rounded)
    # Saved again, nothing more is lost.
    PeftModel.from_pretrained(tiny_llama(), tmp_path).save_pretrained(tmp_path / "again")
    assert files(tmp_path / "again")[Path(WEIGHTS)] == (tmp_path / WEIGHTS).read_bytes()


def test_an_unknown_values_dtype_is_refused():
    with pytest.raises(ValueError, match="values_dtype='fp16' is not one of fp32, bf16"):
        SupraConfig(values_dtype="fp16")


@pytest.mark.parametrize("part", ["values", "codes", "shape", "L", "R"])
def test_a_flipped_bit_names_the_layer_and_changes_nothing(tiny_llama, tmp_path, part):
    live = adapted(tiny_llama())
    live.save_pretrained(tmp_path)
    before = {name: tensor.clone() for name, tensor in live.state_dict().items()}
    tensors = load_file(tmp_path / WEIGHTS)
    tensors[f"base_model.model.{LAYER}.supra_{part}"].view(torch.uint8).view(-1)[3] ^= 4
    save_file(tensors, tmp_path / WEIGHTS, {"format": "pt"})
    with pytest.raises(ValueError, match=rf"{LAYER}: the checksum does not match"):
        live.load_adapter(tmp_path, "default")
    assert_same(live.state_dict(), before)
    with pytest.raises(ValueError, match=rf"{WEIGHTS}: {LAYER}: the checksum does not match"):
        read_adapter(tmp_path)


@pytest.mark.parametrize("damage", [lambda content: content[:-100], lambda content: b"\xff" * 16 + content[16:]])
def test_a_truncated_file_and_a_damaged_header_are_named(tiny_llama, tmp_path, damage):
    live = adapted(tiny_llama())
    live.save_pretrained(tmp_path)
    (tmp_path / WEIGHTS).write_bytes(damage((tmp_path / WEIGHTS).read_bytes()))
    named = rf"{tmp_path / WEIGHTS}: .*The file is damaged"
    with pytest.raises(ValueError, match=named):
        read_adapter(tmp_path)
    with pytest.raises(ValueError, match=named):
        PeftModel.from_pretrained(tiny_llama(), tmp_path)
    with pytest.raises(ValueError, match=named):
        live.load_adapter(tmp_path, "default")


def test_damaged_files_of_other_methods_are_pefts(tiny_llama, tmp_path):
    get_peft_model(tiny_llama(), LoraConfig(target_modules=["q_proj"])).save_pretrained(tmp_path)
    (tmp_path / WEIGHTS).write_bytes(b"\xff" * 64)
    with pytest.raises(SafetensorError):
        PeftModel.from_pretrained(tiny_llama(), tmp_path)


@pytest.mark.parametrize("when", ["weights", "config"])
def test_a_save_that_fails_leaves_the_one_before(tiny_llama, tmp_path, monkeypatch, when):
    model = adapted(tiny_llama())
    model.save_pretrained(tmp_path)
    before = files(tmp_path)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "supra_values" in name:
                parameter.add_(1)

    def half(tensors, path, metadata=None):
        Path(path).write_bytes(b"half of it")
        raise OSError("no space left")

    def no_config(*args, **kwargs):
        raise OSError("no space left")

    with monkeypatch.context() as patch:
        if when == "weights":
            patch.setattr(peft.peft_model, "safe_save_file", half)
        else:
            patch.setattr(SupraConfig, "save_pretrained", no_config)
        with pytest.raises(OSError, match="no space"):
            model.save_pretrained(tmp_path)
    assert files(tmp_path) == before
    model.save_pretrained(tmp_path)
    assert_same(read_adapter(tmp_path), adapter(model))


def test_named_adapters_and_other_files_keep_their_places(tiny_llama, tmp_path):
    model = adapted(tiny_llama())
    model.add_adapter("second", SupraConfig(r0=2, mask_score="magnitude", values_dtype="bf16", init_weights=False))
    (tmp_path / "README.md").write_text("---\nlicense: mit\n---\n# Mine\n")
    (tmp_path / "trainer_state.json").write_text("{}")
    model.save_pretrained(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {
        "README.md",
        "trainer_state.json",
        "adapter_config.json",
        WEIGHTS,
        "second",
    }
    assert_same(read_adapter(tmp_path), adapter(model))
    assert read_adapter(tmp_path / "second").keys() == adapter(model, "second").keys()
    card = (tmp_path / "README.md").read_text()
    assert "# Mine" in card
    assert "license: mit" in card
    shutil.rmtree(tmp_path / "second")
    model.save_pretrained(tmp_path, selected_adapters=["second"])
    assert json.loads((tmp_path / "second" / "adapter_config.json").read_text())["values_dtype"] == "bf16"
    loaded = PeftModel.from_pretrained(tiny_llama(), tmp_path)
    loaded.load_adapter(tmp_path / "second", "other")
    assert loaded.base_model.model.model.layers[0].mlp.up_proj.supra_indices["other"].dtype == torch.int32


@pytest.mark.parametrize("name", ["supra_math", "supra_L", "supra_values", "supra_checksum", "codes", "model"])
def test_adapters_of_any_name_are_packed_and_read(tiny_llama, tmp_path, name):
    knobs = {"r0": 4, "supra_lambda": 0.5, "mask_score": "magnitude", "init_weights": False, "values_dtype": "bf16"}
    model = get_peft_model(tiny_llama(), SupraConfig(**knobs), adapter_name=name)
    model.save_pretrained(tmp_path)
    names = {key.rpartition(".supra_")[2] for key in load_file(tmp_path / name / WEIGHTS)}
    assert names == {"codes", "shape", "values", "L", "R", "checksum"}
    expected = {
        key: tensor.bfloat16().to(tensor.dtype)
        for key, tensor in adapter(model, name).items()
        if tensor.is_floating_point()
    }
    for loaded in (
        PeftModel.from_pretrained(tiny_llama(), tmp_path / name, adapter_name=name),
        PeftModel.from_pretrained(tiny_llama(), tmp_path / name, adapter_name=name, low_cpu_mem_usage=True),
    ):
        found = adapter(loaded, name)
        assert_same({key: found[key] for key in expected}, expected)
        assert_same(
            {key: found[key] for key in found if key not in expected},
            {key: adapter(model, name)[key] for key in found if key not in expected},
        )


def test_a_process_that_writes_nothing_writes_nothing(tiny_llama, tmp_path):
    adapted(tiny_llama()).save_pretrained(tmp_path, is_main_process=False)
    assert files(tmp_path) == {}


def test_a_given_state_dict_is_what_is_saved(tiny_llama, tmp_path):
    model = adapted(tiny_llama())
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state[f"base_model.model.{LAYER}.supra_values.default"] += 1
    kept = dict(state)
    model.save_pretrained(tmp_path, state_dict=state)
    assert state.keys() == kept.keys()
    key = f"base_model.model.{LAYER}.supra_values"
    assert torch.equal(read_adapter(tmp_path)[key], state[f"{key}.default"])


def test_other_methods_are_saved_as_ever(tiny_llama, tmp_path):
    model = get_peft_model(tiny_llama(), LoraConfig(target_modules=["q_proj"]))
    model.save_pretrained(tmp_path)
    assert len(load_file(tmp_path / WEIGHTS)) == 4
    assert unpack(dict(load_file(tmp_path / WEIGHTS))) == {}


def test_what_is_loaded_without_a_peft_model(tiny_llama, tmp_path, ids):
    """Then there is no SupraModel around the layers."""
    model = adapted(tiny_llama())
    model.save_pretrained(tmp_path)
    plain = inject_adapter_in_model(PeftConfig.from_pretrained(tmp_path), tiny_llama())
    tensors = {key.removeprefix("base_model.model."): each for key, each in load_file(tmp_path / WEIGHTS).items()}
    plain.peft_config = {"default": PeftConfig.from_pretrained(tmp_path)}
    set_peft_model_state_dict(plain, tensors)
    with torch.no_grad():
        assert torch.equal(plain.eval()(ids).logits, model.eval()(ids).logits)


def test_packing_is_undone(tiny_llama):
    state = adapted(tiny_llama()).state_dict()
    packed = pack(state, {"default": "fp32"})
    assert packed.keys() != state.keys()
    assert pack(state, {"other": "fp32"}).keys() == state.keys()
    assert unpack(packed) == {}
    assert_same(packed, dict(state))


@pytest.mark.parametrize("moves", range(4))
def test_a_save_that_is_killed_leaves_no_weights_beside_another_config(tiny_llama, tmp_path, monkeypatch, moves):
    """Between two renames a process may die; what is there then is one of the two adapters, or none."""
    alphas = (16, 64)
    knobs = {"mask_score": "magnitude", "r0": 2, "supra_lambda": 0.5}
    models = [get_peft_model(tiny_llama(), SupraConfig(**knobs, lora_alpha=alpha)) for alpha in alphas]
    for model, alpha in zip(models, alphas, strict=True):
        for name, parameter in model.named_parameters():
            if "supra_" in name:
                parameter.data.fill_(alpha)
    models[0].save_pretrained(tmp_path)
    real, done = Path.replace, []

    def replace(self, target):
        if len(done) == moves:
            raise KeyboardInterrupt
        done.append(target)
        return real(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", replace)
        with contextlib.suppress(KeyboardInterrupt):
            models[1].save_pretrained(tmp_path)
    found = {float(tensor.flatten()[0]) for name, tensor in read_adapter(tmp_path).items() if name.endswith("supra_L")}
    if (tmp_path / "adapter_config.json").exists():
        assert found == {PeftConfig.from_pretrained(str(tmp_path)).lora_alpha}
    models[1].save_pretrained(tmp_path)
    assert PeftConfig.from_pretrained(str(tmp_path)).lora_alpha == alphas[1]
