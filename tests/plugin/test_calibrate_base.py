"""`axolotl supertune calibrate`: the norms of a training, without one, and `calibration_path` beside other keys."""

from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from axolotl_supertune import ActivationNorms, calibrate
from axolotl_supertune.commands.cli import supertune
from axolotl_supertune.method.layerwise import streamed
from axolotl_supertune.plugin import calibrate_base


@pytest.fixture
def run():
    """A function (*arguments) → the result of `axolotl supertune calibrate`."""
    return lambda *arguments: CliRunner().invoke(supertune, ["calibrate", *map(str, arguments)])


def test_the_command_writes_what_a_training_measures(trained, settings, train, write, run, tmp_path):
    mapping = trained().mapping
    measured = Path(mapping["output_dir"]) / "activation_norms.safetensors"
    # The same YAML, for a training that shards: how it does is no matter here, nor is a checkpoint that lies there.
    sharded = {**mapping, "fsdp_version": 2, "fsdp_config": {"reshard_after_forward": True}}
    config = write({**sharded, "auto_resume_from_checkpoints": True})
    for options in ([], ["--stream"]):
        result = run(config, "--output", tmp_path / "norms.safetensors", "--overwrite", *options)
        assert result.exit_code == 0, result.output
        assert (tmp_path / "norms.safetensors").read_bytes() == measured.read_bytes()
    assert not list(tmp_path.glob(".norms*")), "a temporary file was left"

    # calibration_path is where it writes, and a training with the same YAML then reads it.
    again = settings(
        output_dir=str(tmp_path / "again"),
        calibration_path=str(tmp_path / "a/b.safetensors"),
        max_steps=1,
        eval_steps=None,
    )
    result = run(write(again))
    assert result.exit_code == 0, result.output
    assert (tmp_path / "a/b.safetensors").read_bytes() == measured.read_bytes()
    train(again)
    assert not (tmp_path / "again/activation_norms.safetensors").exists()


def test_ddp_in_the_yaml_does_not_move_a_streamed_model_as_a_whole(settings, write, run, monkeypatch):
    seen = []

    class Loader(calibrate_base.ModelLoader):
        def __init__(self, cfg, *args, **kwargs):
            seen.append(cfg.ddp)
            super().__init__(cfg, *args, **kwargs)

    monkeypatch.setattr(calibrate_base, "ModelLoader", Loader)
    result = run(write(settings(ddp=True)), "--stream")
    assert result.exit_code == 0, result.output
    assert seen == [False]  # with True, Axolotl's loader moves the model to the GPU


def test_norms_that_are_there_are_not_replaced_unasked(settings, write, run, tmp_path):
    there = tmp_path / "norms.safetensors"
    there.write_bytes(b"of hours")
    result = run(write(settings()), "--output", there)
    assert result.exit_code == 1
    assert "is there already: --overwrite replaces it" in result.output
    assert there.read_bytes() == b"of hours"


def test_without_a_path_it_writes_into_output_dir(settings, write, run):
    mapping = settings()
    result = run(write(mapping))
    assert result.exit_code == 0, result.output
    norms = ActivationNorms.load(Path(mapping["output_dir"]) / "activation_norms.safetensors")
    assert len(norms.norms) == 14


UNSET = dict.fromkeys(("calibration_dataset", "calibration_samples", "calibration_sequence_len"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mask_score": "magnitude"}, "need no activation norms"),
        ({"supra_lambda": 1}, "need no activation norms"),
        ({"calibration_samples": 500}, "too short: 500 windows"),
        ({"calibration_dataset": "nowhere.txt"}, "there is no file nowhere.txt"),
        (
            {
                "adapter": "lora",
                **dict.fromkeys(("calibration_dataset", "calibration_samples", "calibration_sequence_len")),
            },
            "adapter: lora needs no calibration",
        ),
    ],
)
def test_what_it_refuses(settings, write, run, changes, message, tmp_path):
    result = run(write(settings(**changes)), "--output", tmp_path / "norms.safetensors")
    assert result.exit_code == 1
    assert message in result.output
    assert not (tmp_path / "norms.safetensors").exists()


@pytest.mark.parametrize("key", ["load_in_4bit", "load_in_8bit"])
def test_a_quantized_base_is_not_streamed(settings, write, run, key):
    result = run(write(settings(**{key: True})), "--stream")
    assert result.exit_code == 1
    assert "--stream moves layers between devices" in result.output


def test_several_processes_are_refused(settings, write, run, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    result = run(write(settings()))
    assert result.exit_code == 1
    assert "WORLD_SIZE=2: this command runs in one process" in result.output


@pytest.fixture
def saved_norms(base, tmp_path):
    """Norms with this provenance, of 4 windows of 64 tokens of text.txt, on disk."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base)
    provenance = {"dataset": "text.txt", "split": "train", "text_field": "text", "seed": 0, "sequence_len": 64}
    norms = calibrate(model, [torch.randint(0, 400, (4, 64))], provenance=provenance, progress=False)
    norms.save(tmp_path / "norms.safetensors")
    return str(tmp_path / "norms.safetensors")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"calibration_samples": 5}, r"calibration_samples: 5 beside calibration_path: .*made with 4\. Drop the key"),
        ({"calibration_sequence_len": 32}, r"calibration_sequence_len: 32 beside .*made with 64\."),
        ({"calibration_seed": 3}, r"calibration_seed: 3 beside .*made with 0\."),
        ({"calibration_dataset": "other.txt"}, r"calibration_dataset: other\.txt beside .*made with text\.txt\."),
        ({"calibration_split": "test"}, r"calibration_split: test beside .*made with train\."),
        ({"calibration_batch_size": 4}, r"calibration_batch_size: 4 has no effect with calibration_path"),
    ],
)
def test_a_key_that_the_norms_contradict_is_refused(settings, train, saved_norms, changes, message, monkeypatch):
    def fail(*args, **kwargs):
        raise AssertionError("a model was loaded before the config was refused")

    monkeypatch.setattr("axolotl.loaders.model.ModelLoader._build_model", fail)
    with pytest.raises(ValueError, match=message):
        train(settings(**{**UNSET, "calibration_path": saved_norms, **changes}))


def test_a_streamed_model_has_one_layer_on_the_device(llama):
    llama.lm_head.weight = llama.model.embed_tokens.weight  # tied, as it must stay
    before = {name: (tensor, tensor.data_ptr()) for name, tensor in llama.named_parameters()}
    here, seen = [], []

    def look(module, args):
        here.append([name for name, tensor in llama.named_parameters() if tensor.is_meta and ".layers." in name])
        seen.append(args[0].device.type)

    for layer in llama.model.layers:
        layer.mlp.down_proj.register_forward_pre_hook(look)
    with streamed(llama, "meta"):
        llama(torch.zeros(1, 3, dtype=torch.long, device="meta"))
        assert llama.model.embed_tokens.weight.is_meta
    assert seen == ["meta", "meta"]
    for at, names in enumerate(here):
        assert names
        assert all(f".layers.{at}." in name for name in names)
    after = dict(llama.named_parameters())
    assert all(after[name] is tensor and tensor.data_ptr() == place for name, (tensor, place) in before.items())
    assert llama.lm_head.weight is llama.model.embed_tokens.weight
    assert not llama.model.layers[0]._forward_pre_hooks


def test_a_streamed_model_is_put_back_after_an_error(llama):
    def stop(*args):
        raise RuntimeError("stop")

    def run():
        with streamed(llama, "meta"):
            llama(torch.zeros(1, 3, dtype=torch.long, device="meta"))

    llama.model.layers[1].mlp.register_forward_pre_hook(stop)
    with pytest.raises(RuntimeError, match="stop"):
        run()
    assert not any(tensor.is_meta for tensor in (*llama.parameters(), *llama.buffers()))


def test_a_model_without_named_layers_is_not_streamed():
    model = torch.nn.Linear(2, 2)
    with pytest.raises(ValueError, match="Linear does not name its decoder layers"):
        streamed(model, "cpu").__enter__()
