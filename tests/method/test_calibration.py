import hashlib
import json
import stat
import subprocess
import sys
import weakref

import pytest
import torch
from peft import get_peft_model
from safetensors.torch import save_file
from torch import nn

from axolotl_supertune import ActivationNorms, SupraConfig, calibrate
from axolotl_supertune.method.activation_norms import model_fingerprint, plain_parameter
from axolotl_supertune.method.atomic_files import whole_file
from axolotl_supertune.method.calibration import default_layers


def run(model, batches, **kwargs):
    return calibrate(model, batches, progress=False, **kwargs)


def captured_norms(model, batches):
    """Norms in fp64 of all inputs that the layers saw, without the package."""
    inputs = {}

    def capture(name):
        def hook(module, args):
            inputs.setdefault(name, []).append(args[0].detach().double().reshape(-1, args[0].shape[-1]))

        return hook

    layers = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    hooks = [module.register_forward_pre_hook(capture(name)) for name, module in layers]
    with torch.no_grad():
        for batch in batches:
            model(batch)
    for hook in hooks:
        hook.remove()
    return {name: torch.cat(rows).norm(dim=0) for name, rows in inputs.items()}


def assert_close(first, second, **tolerance):
    assert first.keys() == second.keys()
    for layer in first:
        torch.testing.assert_close(first[layer].double(), second[layer].double(), **tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_equal_those_of_the_captured_inputs(tiny_llama, ids, dtype):
    model = tiny_llama(dtype=dtype)
    expected = captured_norms(model, [ids])
    expected.pop("lm_head")
    norms = run(model, [ids]).norms
    assert {norm.dtype for norm in norms.values()} == {torch.float32}
    assert_close(norms, expected, rtol=1e-5, atol=1e-6)


def test_statistic_of_a_bf16_model_is_summed_in_fp32():
    """A sum kept in bf16 would stop growing at 256."""
    model = nn.Sequential(nn.Linear(1, 1)).to(torch.bfloat16)
    norms = run(model, [torch.ones(100, 1, dtype=torch.bfloat16)] * 50)
    assert norms["0"].square().item() == pytest.approx(5000, rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("tokens", [511, 512, 20_001])
@pytest.mark.parametrize("padded", [False, True])
def test_sums_over_many_tokens_keep_five_digits(dtype, tokens, padded):
    """One token added to the next in fp32 would be off by 1e-5 here."""
    x = (torch.randn(1, tokens, 8, generator=torch.Generator().manual_seed(0)) * 3 + 1).to(dtype)

    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(8, 1, dtype=dtype)

        def forward(self, x, attention_mask):
            return self.lin(x)

    mask = torch.ones(1, tokens, dtype=torch.int64)
    if padded:
        mask[:, ::3] = 0
    norm = run(Masked(), [{"x": x, "attention_mask": mask}]).norms["lin"]
    assert norm.dtype == torch.float32
    torch.testing.assert_close(norm.double(), x[mask.bool()].double().norm(dim=0), rtol=3e-6, atol=0)


def test_hooks_keep_no_input_alive():
    class Watch(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            inner = x * 2
            inner_ref = weakref.ref(inner)
            y = self.first(inner)
            del inner
            assert inner_ref() is None
            return self.second(y)

    run(Watch(), [torch.ones(2, 4)])


def test_the_fingerprint_is_that_of_earlier_files(llama):
    """Files of norms are accepted by it: its definition is fixed."""
    digest = hashlib.sha256()
    for name, parameter in sorted(llama.named_parameters()):
        flat = parameter.detach().reshape(-1)
        sample = flat[:: max(1, flat.numel() // 64)][:64].to(torch.bfloat16)
        digest.update(f"{name}{tuple(parameter.shape)}".encode() + sample.view(torch.int16).numpy().tobytes())
    assert model_fingerprint(llama) == digest.hexdigest()


def test_every_linear_layer_but_the_head_is_observed(llama, ids):
    layers = [name for name, module in llama.named_modules() if isinstance(module, nn.Linear) and name != "lm_head"]
    assert default_layers(llama) == layers
    assert list(run(llama, [ids]).norms) == layers
    assert len(layers) == 14


def test_batch_split_does_not_matter(llama, ids):
    whole, split = run(llama, [ids]).norms, run(llama, ids.split(1)).norms
    assert_close(whole, split, rtol=1e-5, atol=1e-6)


def test_batches_may_be_a_generator_of_mappings(llama, ids):
    norms = run(llama, ({"input_ids": row} for row in ids.split(2)))
    assert_close(norms.norms, run(llama, [ids]).norms, rtol=1e-5, atol=1e-6)
    assert norms.provenance["samples"] == 3
    assert norms.provenance["tokens"] == 33


@pytest.mark.parametrize(("shape", "tokens"), [((5, 4), 5), ((2, 3, 4), 6)])
def test_features_are_no_tokens(shape, tokens):
    provenance = run(nn.Sequential(nn.Linear(4, 4)), [torch.randn(shape)]).provenance
    assert (provenance["samples"], provenance["tokens"]) == (shape[0], tokens)


def test_a_parameter_that_an_engine_emptied_is_refused():
    with pytest.raises(TypeError, match="sharded or quantized: pass read="):
        plain_parameter(nn.Parameter(torch.empty(0)))


@pytest.mark.parametrize("filler", [0, 50])
def test_masked_positions_count_for_nothing(llama, ids, filler):
    padded, mask = ids.clone(), torch.ones_like(ids)
    padded[1, 6:], mask[1, 6:] = filler, 0
    norms = run(llama, [{"input_ids": padded, "attention_mask": mask}])
    assert_close(norms.norms, run(llama, [ids[:1], ids[1:2, :6], ids[2:]]).norms, rtol=1e-5, atol=1e-6)
    assert norms.provenance["tokens"] == 28


def test_padding_of_one_batch_is_forgotten_in_the_next(llama, ids):
    mask = torch.ones_like(ids)
    mask[:, 4:] = 0
    norms = run(llama, [{"input_ids": ids, "attention_mask": mask}, ids])
    assert_close(norms.norms, run(llama, [ids[:, :4], ids]).norms, rtol=1e-5, atol=1e-6)


def test_layers_that_share_an_input_have_equal_norms(llama, ids):
    norms = run(llama, [ids])
    attention = "model.layers.0.self_attn"
    assert torch.equal(norms[f"{attention}.q_proj"], norms[f"{attention}.k_proj"])
    assert torch.equal(norms[f"{attention}.q_proj"], norms[f"{attention}.v_proj"])
    assert not torch.equal(norms[f"{attention}.q_proj"], norms[f"{attention}.o_proj"])
    assert not torch.equal(norms[f"{attention}.q_proj"], norms["model.layers.1.self_attn.q_proj"])


def test_one_tensor_with_another_padding_is_another_input():
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(4, 4)

        def forward(self, x, attention_mask):
            return self.lin(x)

    x = torch.randn(2, 3, 4)
    masks = torch.tensor([[1, 1, 0], [1, 0, 0]]), torch.tensor([[1, 0, 0], [1, 1, 1]])
    norms = run(Masked(), [{"x": x, "attention_mask": mask} for mask in masks])
    expected = torch.cat([x[mask.bool()] for mask in masks]).norm(dim=0)
    torch.testing.assert_close(norms["lin"], expected)


class Fork(nn.Module):
    """Two layers fed one tensor object, with `change` applied to it in between."""

    def __init__(self, change):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.change = change

    def forward(self, x):
        x = x.clone()
        y = self.first(x)
        self.change(x)
        return y + self.second(x)


def test_shared_statistic_ends_where_the_input_is_changed_in_place():
    x = torch.randn(5, 4)
    norms = run(Fork(lambda x: x.mul_(3)), [x])
    torch.testing.assert_close(norms["first"], x.norm(dim=0))
    torch.testing.assert_close(norms["second"], 3 * x.norm(dim=0))


def test_shared_statistics_are_not_one_tensor(llama, ids):
    norms = run(llama, [ids, ids])
    expected = captured_norms(llama, [ids, ids])
    for name in ("q_proj", "k_proj", "v_proj"):
        layer = f"model.layers.0.self_attn.{name}"
        torch.testing.assert_close(norms[layer].double(), expected[layer], rtol=1e-5, atol=1e-6)


def test_a_layer_called_twice_sums_both_inputs():
    layer = nn.Linear(4, 4)
    model = nn.Sequential(layer, nn.ReLU(), layer)
    x = torch.randn(5, 4)
    second = layer(x).relu().detach()
    expected = (x.square().sum(0) + second.square().sum(0)).sqrt()
    torch.testing.assert_close(run(model, [x])["0"], expected)


def test_model_runs_in_eval_mode_without_gradients():
    seen = []

    class Probe(nn.Sequential):
        def forward(self, x):
            seen.append((self.training, torch.is_grad_enabled()))
            return super().forward(x)

    run(Probe(nn.Dropout(0.9), nn.Linear(4, 4)).train(), [torch.ones(2, 4)])
    assert seen == [(False, False)]


@pytest.mark.parametrize("fails", [False, True])
def test_training_flags_and_hooks_are_as_before(llama, ids, fails):
    llama.train()
    llama.model.layers[0].eval()
    flags = {name: module.training for name, module in llama.named_modules()}
    batches = [ids, torch.full((1, 3), 10_000)] if fails else [ids]
    if fails:
        with pytest.raises(IndexError):
            run(llama, batches)
    else:
        run(llama, batches)
    assert {name: module.training for name, module in llama.named_modules()} == flags
    assert not any(module._forward_pre_hooks for module in llama.modules())


def test_weights_are_untouched_and_get_no_gradient(llama, tiny_llama, ids):
    run(llama, [ids])
    for (name, one), other in zip(llama.named_parameters(), tiny_llama().parameters(), strict=True):
        assert torch.equal(one, other), name
        assert one.grad is None
        assert one.requires_grad


def test_no_logits_are_computed(llama, ids):
    calls = []
    llama.lm_head.register_forward_hook(lambda *args: calls.append(args))
    run(llama, [ids])
    assert not calls


def test_head_is_observed_where_it_is_asked_for(llama, ids):
    expected = captured_norms(llama, [ids])["lm_head"]
    norms = run(llama, [ids], layers=["lm_head"])
    assert list(norms.norms) == ["lm_head"]
    torch.testing.assert_close(norms["lm_head"].double(), expected, rtol=1e-5, atol=1e-6)


def test_provenance_records_model_counts_and_what_is_given(llama, ids):
    norms = run(llama, [ids], provenance={"dataset": "wikitext", "seed": 3})
    assert norms.provenance == {
        "model": "LlamaForCausalLM",
        "samples": 3,
        "tokens": 33,
        "dataset": "wikitext",
        "seed": 3,
    }


@pytest.mark.parametrize("batches", [[], iter(())], ids=["list", "iterator"])
def test_no_batch_is_refused(llama, batches):
    with pytest.raises(ValueError, match="no calibration token was given"):
        run(llama, batches)


def test_unknown_layer_is_refused(llama, ids):
    with pytest.raises(ValueError, match=r"no layer to calibrate: model\.layers\.9\.mlp"):
        run(llama, [ids], layers=["model.layers.9.mlp"])


def test_layer_that_sees_no_token_is_named():
    class Idle(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.idle = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            return self.used(x)

    with pytest.raises(ValueError, match="idle: no calibration token reached this layer"):
        run(Idle(), [torch.ones(2, 4)])


def test_nan_activations_name_the_first_layer_that_sees_them(llama, ids):
    with torch.no_grad():
        llama.model.layers[0].mlp.up_proj.weight[0, 0] = float("nan")
    with pytest.raises(ValueError, match=r"^model\.layers\.0\.mlp\.down_proj: the calibration activations are NaN"):
        run(llama, [ids])


def test_infinite_activations_name_the_layer():
    with pytest.raises(ValueError, match=r"^0: the calibration activations are NaN or infinite"):
        run(nn.Sequential(nn.Linear(2, 2)), [torch.tensor([[1.0, float("inf")]])])


def test_adapted_model_is_refused(llama, ids):
    model = get_peft_model(llama, SupraConfig(mask_score="magnitude", target_modules=["q_proj"]))
    with pytest.raises(ValueError, match="before get_peft_model"):
        run(model, [ids])


def test_layer_without_norms_is_named(norms):
    with pytest.raises(ValueError, match="lm_head: no activation norms for this layer; calibration covered 14 layers"):
        norms["lm_head"]


def test_save_and_load_keep_everything(norms, tmp_path):
    norms.save(tmp_path / "deep" / "norms.safetensors")
    loaded = ActivationNorms.load(str(tmp_path / "deep" / "norms.safetensors"))
    assert loaded.norms.keys() == norms.norms.keys()
    assert all(torch.equal(loaded[layer], norms[layer]) for layer in norms.norms)
    assert loaded.fingerprint == norms.fingerprint
    assert loaded.provenance == norms.provenance


def test_save_leaves_one_file_and_replaces_an_old_one(norms, tmp_path):
    path = tmp_path / "norms.safetensors"
    path.write_bytes(b"old")
    norms.save(path)
    assert [file.name for file in tmp_path.iterdir()] == ["norms.safetensors"]
    ActivationNorms.load(path)


def test_missing_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nowhere\.safetensors"):
        ActivationNorms.load(tmp_path / "nowhere.safetensors")


@pytest.mark.parametrize("kept", [0, 4, 100, -1])
def test_truncated_file_is_refused(norms, tmp_path, kept):
    path = tmp_path / "norms.safetensors"
    norms.save(path)
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(ValueError, match=r"norms\.safetensors is not a readable safetensors file"):
        ActivationNorms.load(path)


def test_file_that_is_not_safetensors_is_refused(tmp_path):
    path = tmp_path / "norms.json"
    path.write_text(json.dumps({"model.layers.0": [1.0] * 500}))
    with pytest.raises(ValueError, match=r"norms\.json is not a readable safetensors file"):
        ActivationNorms.load(path)


@pytest.mark.parametrize("metadata", [None, {"format": "pt"}])
def test_safetensors_of_something_else_is_refused(tmp_path, metadata):
    path = tmp_path / "model.safetensors"
    save_file({"weight": torch.ones(3)}, path, metadata)
    with pytest.raises(ValueError, match=r"model\.safetensors .*holds no activation norms"):
        ActivationNorms.load(path)


def test_file_of_a_later_version_is_refused(norms, tmp_path, monkeypatch):
    path = tmp_path / "norms.safetensors"
    with monkeypatch.context() as later:
        later.setattr("axolotl_supertune.method.activation_norms.FORMAT_VERSION", 99)
        norms.save(path)
    with pytest.raises(ValueError, match="has version 99 of its format"):
        ActivationNorms.load(path)


def test_equal_norms_are_equal_files(norms, tmp_path):
    written = set()
    for name in "abcd":
        norms.save(tmp_path / name)
        written.add((tmp_path / name).read_bytes())
    assert len(written) == 1


def test_saved_norms_can_be_read_by_whoever_reads_ordinary_files(norms, tmp_path):
    norms.save(tmp_path / "norms.safetensors")
    (tmp_path / "ordinary.bin").write_bytes(b"all")
    assert len({stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}) == 1


def test_same_weights_are_accepted(norms, tiny_llama):
    norms.check_model(tiny_llama())


@pytest.mark.parametrize(("made", "used"), [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)])
def test_same_weights_in_another_dtype_are_accepted(tiny_llama, ids, made, used):
    run(tiny_llama(dtype=made), [ids]).check_model(tiny_llama(dtype=used))


def test_adapted_model_with_the_same_base_is_accepted(norms, llama):
    model = get_peft_model(llama, SupraConfig(mask_score="magnitude", target_modules=["q_proj"]))
    norms.check_model(model.base_model.model)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seed": 1}, "same shapes but other weights"),
        ({"hidden_size": 32}, "has 32 input features here, 64 in the norms"),
        ({"intermediate_size": 80}, "has 80 input features here, 96 in the norms"),
        ({"num_hidden_layers": 1}, r"has no layer model\.layers\.1\.self_attn\.q_proj"),
        ({"num_key_value_heads": 4}, "Calibrate this model"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_norms_of_another_model_are_refused(norms, tiny_llama, changes, message):
    with pytest.raises(ValueError, match=rf"norms\.safetensors were made for another model.*{message}"):
        norms.check_model(tiny_llama(**changes), "norms.safetensors")


def test_norms_of_another_model_are_refused_by_the_tuner(norms, tiny_llama):
    model = tiny_llama(seed=1)
    with pytest.raises(ValueError, match="made for another model"):
        get_peft_model(model, SupraConfig(activation_norms=norms))


def test_whole_file_leaves_nothing_on_error(tmp_path):
    def fail():
        with whole_file(tmp_path / "new.bin") as temporary:
            temporary.write_bytes(b"half")
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        fail()
    assert list(tmp_path.iterdir()) == []


def test_whole_file_keeps_the_old_content_on_error(tmp_path):
    path = tmp_path / "old.bin"
    path.write_bytes(b"old")

    def fail():
        with whole_file(path) as temporary:
            temporary.write_bytes(b"half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert path.read_bytes() == b"old"
    assert [file.name for file in tmp_path.iterdir()] == ["old.bin"]


def test_whole_file_shows_the_name_only_when_it_is_complete(tmp_path):
    path = tmp_path / "folder" / "file.bin"
    with whole_file(path) as temporary:
        temporary.write_bytes(b"all")
        assert not path.exists()
        assert temporary.is_relative_to(path.parent)  # one file system
    assert path.read_bytes() == b"all"


def saves_for_ever(folder):
    """A process that writes a file there and is not done with it."""
    code = (
        "import sys, time; from axolotl_supertune.method.atomic_files import whole_file\n"
        "with whole_file(sys.argv[1]) as path: path.write_bytes(b'half'); print('ready', flush=True); time.sleep(600)"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(folder / "file")], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ready\n"
    return process


def test_what_a_killed_process_left_is_removed_and_what_a_live_one_writes_is_not(tmp_path):
    dead, live = saves_for_ever(tmp_path), saves_for_ever(tmp_path)
    try:
        assert len(list(tmp_path.glob(".saving.*"))) == 2
        dead.kill()
        dead.wait()
        (tmp_path / ".saving.mine").mkdir()  # none of ours
        with whole_file(tmp_path / "other") as path:
            path.write_bytes(b"all")
        left = [path for path in tmp_path.glob(".saving.*") if path.name != ".saving.mine"]
        assert [each.read_bytes() for folder in left for each in folder.glob("files/*")] == [b"half"]
    finally:
        live.kill()
        live.wait()
    with whole_file(tmp_path / "other") as path:
        path.write_bytes(b"all")
    assert {path.name for path in tmp_path.iterdir()} == {"other", ".saving.mine"}


def test_whole_file_has_the_permissions_of_an_ordinary_file(tmp_path):
    with whole_file(tmp_path / "file.bin") as temporary:
        temporary.write_bytes(b"all")
    (tmp_path / "ordinary.bin").write_bytes(b"all")
    modes = {stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
    assert len(modes) == 1
