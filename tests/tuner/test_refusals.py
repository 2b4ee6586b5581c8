"""What the tuner would compute, merge or load otherwise than it looks is refused, and nothing is changed by trying."""

import copy

import pytest
import torch
from peft import PeftModel, get_peft_model
from safetensors.torch import save_file
from torch import nn

from axolotl_supertune import SupraConfig, calibrate
from axolotl_supertune.tuner import read_adapter


class Doubled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


def two_layers(first):
    return nn.Sequential(first, nn.Linear(8, 8))


def magnitude(*targets, **more):
    return SupraConfig(r0=1, mask_score="magnitude", target_modules=list(targets), **more)


def replaced_forward():
    layer = nn.Linear(8, 8)
    layer.forward = lambda x: x
    return layer


def hooked():
    layer = nn.Linear(8, 8)
    layer.register_forward_hook(lambda module, args, output: output * 2)
    return layer


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (lambda: Doubled(8, 8), "computes something else"),
        (replaced_forward, "forward was replaced"),
        (hooked, "forward hooks"),
        (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)), "parametrized|computes something else"),
        (lambda: nn.Linear(8, 8).to(torch.float8_e4m3fn), "quantized"),
    ],
    ids=["subclass", "forward", "hook", "parametrized", "fp8"],
)
def test_a_layer_that_is_more_than_a_linear_is_refused(layer, reason):
    model = two_layers(layer())
    kinds = [type(module) for module in model.modules()]
    with pytest.raises(TypeError, match=rf"^0: .*({reason})"):
        get_peft_model(model, magnitude("0", "1"))
    assert [type(module) for module in model.modules()] == kinds


def test_the_projection_of_multihead_attention_is_refused():
    model = nn.TransformerEncoderLayer(8, 2, 8)
    with pytest.raises(TypeError, match=r"self_attn\.out_proj: .*never calls the layer"):
        get_peft_model(model, magnitude("out_proj", "linear1"))


def test_tied_and_shared_weights_are_refused(tiny_llama):
    tied = tiny_llama(tie_word_embeddings=True)
    with pytest.raises(ValueError, match=r"lm_head: its weight is also that of model\.embed_tokens"):
        get_peft_model(tied, magnitude("lm_head", "q_proj"))
    shared = nn.ModuleDict({"a": nn.Linear(8, 8)})
    shared["b"] = shared["a"]
    with pytest.raises(ValueError, match=r"a: its weight is also that of b"):
        get_peft_model(shared, magnitude("a", "b"))
    at_one_place = nn.ModuleDict({"a": nn.Linear(8, 8), "b": nn.Linear(8, 8)})
    at_one_place["b"].weight.data = at_one_place["a"].weight.data
    with pytest.raises(ValueError, match=r"a: its weight is also that of b"):
        get_peft_model(at_one_place, magnitude("a"))
    get_peft_model(tied, magnitude("q_proj"))


@pytest.mark.parametrize(
    "more", [{"sparse_direction": "random"}, {"supra_lambda": 1.0}, {}], ids=["random", "lora", "mag"]
)
def test_a_nan_weight_is_named_whatever_the_score(tiny_llama, more):
    model = tiny_llama()
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[0, 0] = float("nan")
    with pytest.raises(ValueError, match=r"model\.layers\.1\.mlp\.down_proj: its weight hold"):
        get_peft_model(model, SupraConfig(r0=1, mask_score="magnitude", **more))
    assert not any("supra" in name for name, _ in model.named_modules())


@pytest.fixture
def saved(tiny_llama, tmp_path):
    model = get_peft_model(tiny_llama(), SupraConfig(r0=4, mask_score="magnitude", init_weights=False))
    model.save_pretrained(tmp_path)
    return tmp_path


def edit(folder, change):
    path = folder / "adapter_model.safetensors"
    tensors = read_adapter(folder)
    change(tensors)
    save_file(tensors, path, {"format": "pt"})


@pytest.mark.parametrize("kind", ["order", "float", "layer"])
def test_a_damaged_checkpoint_leaves_a_live_adapter_as_it_was(tiny_llama, ids, saved, kind):
    live = PeftModel.from_pretrained(tiny_llama(), saved, is_trainable=True)
    with torch.no_grad():
        for name, parameter in live.named_parameters():
            if "supra_" in name:
                parameter.add_(0.01)
    before = copy.deepcopy(live.state_dict())

    def damage(tensors):
        last = [name for name in tensors if "supra_indices" in name][-1]
        if kind == "order":
            tensors[last] = tensors[last].flip(0).contiguous()
        elif kind == "float":
            tensors[last] = tensors[last].to(torch.float16)
        else:
            for name in [name for name in tensors if "layers.1" in name]:
                tensors[name.replace("layers.1", "layers.7")] = tensors[name].clone()

    edit(saved, damage)
    with pytest.raises(ValueError, match=r"damaged|does not"):
        live.load_adapter(saved, "default")
    after = live.state_dict()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


def test_norms_of_a_model_with_other_embeddings_are_refused(tiny_llama, ids):
    norms = calibrate(tiny_llama(), [ids], progress=False)
    other = tiny_llama()
    with torch.no_grad():
        other.model.embed_tokens.weight.mul_(-1)
    with pytest.raises(ValueError, match="another model"):
        norms.check_model(other)


def test_norms_fit_a_model_that_carries_adapters_already(tiny_llama, ids):
    norms = calibrate(tiny_llama(), [ids], progress=False)
    model = get_peft_model(tiny_llama(), SupraConfig(mask_score="magnitude", modules_to_save=["lm_head"]))
    model.add_adapter("second", SupraConfig(activation_norms=norms, target_modules=["q_proj", "up_proj"]))
    assert model.peft_config["second"].calibration["samples"] == 3


@pytest.mark.parametrize("damage", ["negative", "zero", "infinite"])
def test_impossible_norms_are_refused(tiny_llama, ids, damage):
    norms = calibrate(tiny_llama(), [ids], progress=False)
    layer = "model.layers.0.mlp.up_proj"
    value = {"negative": -1.0, "zero": 0.0, "infinite": float("inf")}[damage]
    norms.norms[layer] = torch.full_like(norms[layer], value)
    with pytest.raises(ValueError, match=rf"damaged: those of {layer}"):
        norms.check_model(tiny_llama())


def test_an_all_padding_batch_is_no_calibration(tiny_llama, ids):
    with pytest.raises(ValueError, match="no calibration token"):
        calibrate(tiny_llama(), [{"input_ids": ids, "attention_mask": torch.zeros_like(ids)}], progress=False)


def test_windows_must_be_split_into_batches(tiny_llama, ids):
    with pytest.raises(TypeError, match=r"windows\.split"):
        calibrate(tiny_llama(), ids)


def test_a_layer_named_twice_counts_once(tiny_llama, ids):
    layer = "model.layers.0.mlp.up_proj"
    once = calibrate(tiny_llama(), [ids], layers=[layer], progress=False)
    twice = calibrate(tiny_llama(), [ids], layers=[layer, layer], progress=False)
    assert torch.equal(once[layer], twice[layer])


def test_provenance_of_any_kind_is_saved(tiny_llama, ids, tmp_path):
    norms = calibrate(tiny_llama(), [ids], provenance={"path": tmp_path}, progress=False)
    get_peft_model(tiny_llama(), SupraConfig(activation_norms=norms)).save_pretrained(tmp_path / "adapter")
    assert norms.provenance["path"] == str(tmp_path)


def test_a_weight_that_is_not_contiguous_merges():
    model = two_layers(nn.Linear(8, 8))
    model[0].weight = nn.Parameter(model[0].weight.data.t())
    assert not model[0].weight.is_contiguous()
    x = torch.randn(3, 8)
    adapted = get_peft_model(model, magnitude("0", init_weights=False))
    expected = adapted(x)
    torch.testing.assert_close(adapted.merge_and_unload()(x), expected)


def test_unmerge_after_a_cast_gives_a_layer_that_runs(tiny_llama, ids):
    model = get_peft_model(tiny_llama(), SupraConfig(mask_score="magnitude", init_weights=False))
    model.merge_adapter()
    model.to(torch.bfloat16)
    model.unmerge_adapter()
    assert model(ids).logits.dtype == torch.bfloat16


def test_a_merge_beside_one_from_before_a_cast_is_in_the_new_dtype(tiny_llama, ids):
    knobs = {"mask_score": "magnitude", "init_weights": False}
    configs = [SupraConfig(**knobs, sparse_direction=each) for each in ("top", "random")]
    model = get_peft_model(tiny_llama(), configs[0])
    model.add_adapter("other", configs[1])
    model.merge_adapter(["default"])
    model.to(torch.bfloat16)
    model.merge_adapter(["other"])
    merged = model(ids).logits
    model.unmerge_adapter()
    model.merge_adapter(["default", "other"])
    assert torch.equal(model(ids).logits, merged)
    assert merged.dtype == torch.bfloat16
