"""`axolotl train`, resume, merge-lora, evaluate and inference with a Supra adapter."""

import json
import math
import re
import shutil
import time
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard
from peft import PeftModel
from safetensors.torch import load_file
from trainings import StopAt, adapter_of, eval_losses, logits, losses
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

from axolotl_supertune import ActivationNorms, SupertunePlugin

# Two steps, a checkpoint of the second, and no evaluation.
SHORT = {"max_steps": 2, "save_steps": 2, "eval_steps": None}


def assert_equal_tensors(left, right):
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert torch.equal(tensor, right[name]), name


def test_training_lowers_the_eval_loss_and_saves_the_whole_adapter(trained, base):
    run = trained()
    mapping = run.mapping
    first, *_, last = run.eval_losses
    assert last < first
    loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), mapping["output_dir"])
    assert torch.equal(logits(loaded), run.logits)
    norms = ActivationNorms.load(Path(mapping["output_dir"]) / "activation_norms.safetensors")
    norms.check_model(AutoModelForCausalLM.from_pretrained(base))
    assert norms.provenance["samples"] == 4
    assert norms.provenance["sequence_len"] == 64
    assert norms.provenance["tokens"] == 256


def test_two_runs_from_one_seed_write_the_same_adapter(trained, settings, train, tmp_path):
    trained("one")
    two = settings(output_dir=str(tmp_path / "two"))
    torch.manual_seed(12345)  # what ran before must not matter
    train(two)
    for name in ("adapter_model.safetensors", "adapter_config.json", "activation_norms.safetensors"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes(), name


def test_the_finished_adapter_has_bf16_values_and_a_card(settings, train, tmp_path):
    mapping = settings(max_steps=2, save_steps=2, eval_steps=None, values_dtype="bf16")
    trainer = train(mapping)
    trained = {".supra_values", ".supra_L", ".supra_R"}

    def dtypes(folder):
        tensors = load_file(folder / "adapter_model.safetensors")
        return {tensor.dtype for name, tensor in tensors.items() if f".{name.rpartition('.')[2]}" in trained}

    assert dtypes(tmp_path / "adapter" / "checkpoint-2") == {torch.float32}
    assert dtypes(tmp_path / "adapter") == {torch.bfloat16}
    names = [name for name, parameter in trainer.model.named_parameters() if parameter.requires_grad]
    assert {trainer.model.get_parameter(name).dtype for name in names} == {torch.float32}
    for name in names:
        saved = adapter_of(mapping)[name.removesuffix(".default")]
        assert torch.equal(saved, trainer.model.get_parameter(name).detach().bfloat16().float())
    assert not list((tmp_path / "adapter").rglob(".saving*"))

    card = ModelCard.load(tmp_path / "adapter" / "README.md")
    assert card.data.base_model == mapping["base_model"]
    assert card.data.library_name == "peft"
    for line in (
        "- **Calibration:** 4 × 64 tokens of text.txt (seed 0)",
        "- **Training data:** problems.jsonl",
        "- **Training:** 2 steps, learning rate 0.005, adamw_torch, seed 0",
        f"- **Axolotl:** {version('axolotl')}",
    ):
        assert line in card.text.splitlines(), card.text


def test_another_seed_writes_another_adapter(trained, settings, train, tmp_path):
    one, two = trained("one").mapping, settings(output_dir=str(tmp_path / "two"), seed=1)
    train(two)
    assert any(not torch.equal(tensor, adapter_of(two)[name]) for name, tensor in adapter_of(one).items())


@pytest.mark.parametrize("adapter", ["super", "supra"])
def test_stop_and_resume_equals_not_stopping(trained, settings, train, tmp_path, monkeypatch, adapter):
    whole = trained("whole", adapter=adapter)
    stopped = settings(adapter=adapter, output_dir=str(tmp_path / "stopped"))

    with monkeypatch.context() as patch:
        original = SupertunePlugin.add_callbacks_post_trainer
        patch.setattr(
            SupertunePlugin,
            "add_callbacks_post_trainer",
            lambda self, cfg, trainer: [*original(self, cfg, trainer), StopAt(6)],
        )
        with pytest.raises(KeyboardInterrupt):
            train(stopped)
    assert not (tmp_path / "stopped" / "adapter_model.safetensors").exists()

    def no_calibration(*args, **kwargs):
        raise AssertionError("a resumed run calibrates again")

    monkeypatch.setattr("axolotl_supertune.plugin.calibrate.calibrate", no_calibration)
    monkeypatch.setattr("axolotl_supertune.plugin.calibrate.calibration_windows", no_calibration)
    resumed = train({**stopped, "auto_resume_from_checkpoints": True})
    assert_equal_tensors(adapter_of(whole.mapping), adapter_of(stopped))
    assert losses(resumed) == whole.losses


def test_a_resumed_run_must_keep_its_method(trained, train):
    mapping = trained().mapping
    checkpoint = str(Path(mapping["output_dir"]) / "checkpoint-4")
    for changes, message in [
        ({"supra_lambda": 0.3}, r"supra_lambda 0\.8 \(the YAML says 0\.3\)"),
        (
            {"lora_target_modules": ["q_proj"], "lora_target_linear": False},
            r"target_modules .*the YAML says \{'q_proj'\}",
        ),
        ({"lora_dropout": 0.5}, r"lora_dropout 0\.05 \(the YAML says 0\.5\)"),
        ({"lora_modules_to_save": ["embed_tokens"]}, r"modules_to_save None"),
    ]:
        with pytest.raises(ValueError, match=f"resume_from_checkpoint.*{message}"):
            train({**mapping, **changes, "resume_from_checkpoint": checkpoint})


@pytest.fixture
def other_base(base, tmp_path):
    """A base of the same shapes, names and tokenizer, with other weights."""
    folder = tmp_path / "other-base"
    shutil.copytree(base, folder)
    model = AutoModelForCausalLM.from_pretrained(base)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    model.save_pretrained(folder)
    return folder


def test_a_resumed_run_must_keep_its_base_calibration_and_rates(settings, train, base, other_base, problems, tmp_path):
    mapping = settings(sparse_lr=1e-2, save_steps=4)
    train(mapping)
    resumed = {**mapping, "resume_from_checkpoint": str(Path(mapping["output_dir"]) / "checkpoint-4")}
    text = tmp_path / "other.txt"
    shutil.copy(problems[1], text)
    for changes, message in [
        ({"base_model": str(other_base)}, f"base_model: {other_base} has other weights than {base}"),
        ({"calibration_dataset": str(text)}, rf"calibration_dataset {problems[1]} \(the YAML says {text}\)"),
        ({"calibration_samples": 3}, r"calibration_samples 4 \(the YAML says 3\)"),
        ({"calibration_seed": 5}, r"calibration_seed 0 \(the YAML says 5\)"),
        ({"calibration_sequence_len": 32}, r"calibration_sequence_len 64 \(the YAML says 32\)"),
        ({"sparse_lr": 1e-3}, r"sparse_lr: 0\.001, but the checkpoint .* was trained with 0\.01"),
        ({"sparse_lr": None}, r"sparse_lr: None, but the checkpoint .* was trained with 0\.01"),
    ]:
        with pytest.raises(ValueError, match=message):
            train({**resumed, **changes})
    copy = tmp_path / "copy"
    shutil.copytree(base, copy)
    train({**resumed, "base_model": str(copy), "sparse_lr": "1e-2"})


@pytest.mark.parametrize("lost", ["optimizer.pt", "scheduler.pt"])
def test_a_checkpoint_without_the_optimizers_state_is_not_resumed(trained, train, lost):
    """The Trainer would go on, and begin the schedule of the learning rate anew."""
    mapping = trained().mapping
    checkpoint = Path(mapping["output_dir"]) / "checkpoint-4"
    (checkpoint / lost).unlink()
    with pytest.raises(ValueError, match=f"{checkpoint} has no state of the optimizer .*lora_model_dir: {checkpoint}"):
        train({**mapping, "resume_from_checkpoint": str(checkpoint)})
    train({**mapping, "max_steps": 1, "lora_model_dir": str(checkpoint)})


def test_until_a_run_ends_the_finished_adapter_of_one_before_stays_what_it_was(trained, train, base, monkeypatch):
    """Axolotl writes the new one's config before training begins: it would be computed with another α."""
    mapping = trained(**SHORT).mapping

    def loaded():
        return PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), mapping["output_dir"])

    before = logits(loaded())
    config = Path(mapping["output_dir"], "adapter_config.json").read_bytes()
    again = {**mapping, "lora_alpha": 64, "sparse_direction": "top"}
    with monkeypatch.context() as patch:
        original = SupertunePlugin.add_callbacks_post_trainer
        patch.setattr(
            SupertunePlugin,
            "add_callbacks_post_trainer",
            lambda self, cfg, trainer: [*original(self, cfg, trainer), StopAt(1)],
        )
        with pytest.raises(KeyboardInterrupt):
            train(again)
    assert Path(mapping["output_dir"], "adapter_config.json").read_bytes() == config
    assert torch.equal(logits(loaded()), before)
    train(again)
    assert loaded().peft_config["default"].lora_alpha == 64


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("adapter_model.safetensors", None),
        ("adapter_model.safetensors", b"short"),
        ("adapter_config.json", None),
        ("adapter_config.json", b""),
        ("trainer_state.json", None),
    ],
)
def test_a_half_written_checkpoint_is_named(trained, train, name, content):
    mapping = trained(**SHORT).mapping
    part = Path(mapping["output_dir"]) / "checkpoint-2" / name
    part.unlink()
    if content is not None:
        part.write_bytes(content)
    with pytest.raises(ValueError, match=r"checkpoint-2.*(incomplete|damaged)"):
        train({**mapping, "max_steps": 4, "auto_resume_from_checkpoints": True})


def test_an_excluded_module_is_not_adapted(settings, train):
    trainer = train(settings(lora_exclude_modules=["q_proj"], max_steps=1, eval_steps=None))
    adapted = {name.split(".supra_")[0].rpartition(".")[2] for name in trainer.model.state_dict() if ".supra_" in name}
    assert adapted == {"k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lora_target_modules": ["q_proj", "v_porj"]}, "lora_target_modules: v_porj matches no layer"),
        ({"lora_exclude_modules": ["q_proj", "v_porj"]}, "lora_exclude_modules: v_porj matches no module"),
        ({"lora_exclude_modules": ".*v_porj"}, r"lora_exclude_modules: \.\*v_porj matches no module"),
        ({"lora_modules_to_save": ["embed_tokens", "lm_haed"]}, "lora_modules_to_save: lm_haed matches no module"),
        ({"lora_modules_to_save": ["lm_haed"]}, "lora_modules_to_save: lm_haed matches no module"),
        ({"peft_layers_to_transform": [0, 2]}, "peft_layers_to_transform: 2 is the number of no block"),
    ],
)
def test_what_matches_nothing_is_refused(settings, train, changes, message):
    """The rest of a list would be trained, left alone or saved without it."""
    with pytest.raises(ValueError, match=message):
        train(settings(**changes))


def test_an_optimizer_that_leaves_parameters_out_is_refused(settings, train, monkeypatch):
    from axolotl.core.trainers.base import AxolotlTrainer

    original = AxolotlTrainer.create_optimizer

    def without_vectors(self, *args, **kwargs):
        optimizer = original(self, *args, **kwargs)
        for group in optimizer.param_groups:
            group["params"] = [parameter for parameter in group["params"] if parameter.dim() == 2]
        return optimizer

    monkeypatch.setattr(AxolotlTrainer, "create_optimizer", without_vectors)
    with pytest.raises(ValueError, match=r"optimizer: .* does not hold .*supra_values"):
        train(settings())


def test_merging_the_start_of_a_finished_run_is_refused(trained, train, write, tmp_path):
    from axolotl.cli.merge_lora import do_cli

    first = trained(**SHORT).mapping
    second = {**first, "output_dir": str(tmp_path / "second"), "lora_model_dir": first["output_dir"]}
    train(second)
    with pytest.raises(ValueError, match=r"lora_model_dir: .* started from.*--lora-model-dir=\S+second"):
        do_cli(config=write(second))
    do_cli(config=write(second), lora_model_dir=second["output_dir"])
    assert (tmp_path / "second" / "merged" / "model.safetensors").is_file()


def test_an_adapter_of_a_larger_base_is_refused(trained, train, tmp_path):
    from transformers import LlamaForCausalLM

    mapping = trained(**SHORT).mapping
    smaller = tmp_path / "smaller"
    config = AutoModelForCausalLM.from_pretrained(mapping["base_model"]).config
    config.num_hidden_layers = 1
    LlamaForCausalLM(config).save_pretrained(smaller)
    AutoTokenizer.from_pretrained(mapping["base_model"]).save_pretrained(smaller)
    with pytest.raises(ValueError, match=r"layers\.1\.\S+: the checkpoint adapts this layer and the model does not"):
        train({**mapping, "base_model": str(smaller), "lora_model_dir": mapping["output_dir"]})


@pytest.mark.parametrize(("changes", "tolerance"), [({"adapter": "super"}, 0.0), ({"supra_lambda": 0.5}, 1e-5)])
def test_merge_lora_writes_the_adapted_model(trained, write, changes, tolerance):
    from axolotl.cli.merge_lora import do_cli

    run = trained(**changes)
    mapping, adapted = run.mapping, run.logits
    do_cli(config=write(mapping))
    merged = AutoModelForCausalLM.from_pretrained(Path(mapping["output_dir"]) / "merged")
    difference = (logits(merged) - adapted).abs().max().item()
    assert difference <= tolerance
    base_model = AutoModelForCausalLM.from_pretrained(mapping["base_model"])
    assert (logits(base_model) - adapted).abs().max().item() > 1e-3, "the adapter changed nothing"
    AutoTokenizer.from_pretrained(Path(mapping["output_dir"]) / "merged")


def test_evaluate_scores_the_trained_adapter_and_refuses_a_new_one(trained, load, monkeypatch):
    from axolotl.common.datasets import load_datasets
    from axolotl.evaluate import evaluate

    run = trained()
    mapping, expected = run.mapping, run.eval_losses[-1]
    norms = Path(mapping["output_dir"]) / "activation_norms.safetensors"
    written = norms.stat().st_mtime_ns
    cfg = load(mapping)
    with pytest.raises(ValueError, match=r"untrained adapter.*--lora-model-dir=\S+adapter "):
        evaluate(cfg=cfg, dataset_meta=load_datasets(cfg=cfg))
    assert norms.stat().st_mtime_ns == written, "a refused evaluation calibrated"
    with monkeypatch.context() as patch:
        patch.setattr("axolotl_supertune.plugin.axolotl_compat.is_evaluating", lambda: False)
        with pytest.raises(ValueError, match="untrained adapter"):  # the second line of defence
            evaluate(cfg=cfg, dataset_meta=load_datasets(cfg=cfg))
    cfg = load(mapping, lora_model_dir=mapping["output_dir"])
    metrics = evaluate(cfg=cfg, dataset_meta=load_datasets(cfg=cfg))
    assert math.isclose(metrics["eval_loss"], expected, rel_tol=1e-5)


def test_inference_finds_the_adapter_of_output_dir_or_refuses(trained, settings, load):
    from axolotl.cli.utils import load_model_and_tokenizer

    with pytest.raises(ValueError, match="holds no adapter"):
        load(settings(), inference=True)
    run = trained()
    mapping = run.mapping
    model, _, _ = load_model_and_tokenizer(cfg=load(mapping, inference=True), inference=True)
    assert torch.equal(logits(model), run.logits)
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_a_run_that_did_not_finish_is_named_by_its_checkpoint(trained, load, write):
    from axolotl.cli.merge_lora import do_cli

    mapping = trained(**SHORT).mapping
    (Path(mapping["output_dir"]) / "adapter_model.safetensors").unlink()
    for command in (lambda: load(mapping, inference=True), lambda: do_cli(config=write(mapping))):
        with pytest.raises(ValueError, match=r"--lora-model-dir=\S+checkpoint-2\."):
            command()


@pytest.mark.parametrize("dropout", [0.0, 0.05])
def test_lambda_1_trains_as_lora_does_step_by_step(settings, train, tmp_path, monkeypatch, dropout):
    # Axolotl leaves LoRA's own start unseeded: seed it where the plugin seeds Supra's.
    import axolotl.loaders.adapter as axolotl_adapter

    original = axolotl_adapter.get_peft_model

    def seeded(model, config, **kwargs):
        torch.manual_seed(0)
        return original(model, config, **kwargs)

    monkeypatch.setattr(axolotl_adapter, "get_peft_model", seeded)
    shared = {"lora_r": 8, "lora_alpha": 16, "lora_dropout": dropout}
    supra = train(settings(supra_lambda=1, calibration_dataset=None, output_dir=str(tmp_path / "supra"), **shared))
    plain = {"calibration_dataset": None, "calibration_samples": None, "calibration_sequence_len": None}
    kernels = dict.fromkeys(("lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel"), False)
    lora = train(
        settings(
            adapter="lora",
            lora_target_linear=True,
            output_dir=str(tmp_path / "lora"),
            **plain,
            **kernels,
            **shared,
        )
    )
    torch.testing.assert_close(torch.tensor(losses(supra)), torch.tensor(losses(lora)), rtol=1e-5, atol=0)
    assert losses(supra)[-1] < losses(supra)[0]
    torch.testing.assert_close(logits(supra.model), logits(lora.model), rtol=0, atol=2e-5)


@pytest.mark.parametrize(
    "changes",
    [
        {"sample_packing": True, "eval_sample_packing": False, "pad_to_sequence_len": True},
        {"gradient_accumulation_steps": 2},
        {"gradient_checkpointing": True},
        {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
        {"sparse_density": 0.05},
        {"mask_score": "magnitude", "sparse_direction": "hybrid", "hybrid_beta": 0.3, "calibration_dataset": None},
        {"sparse_direction": "random", "calibration_dataset": None},
        {"lora_modules_to_save": ["embed_tokens"]},
        {"lora_target_modules": ["q_proj", "down_proj"], "peft_layers_to_transform": [1]},
    ],
    ids=lambda changes: "-".join(changes),
)
def test_it_trains_with(trained, base, changes):
    run = trained(**changes)
    assert all(math.isfinite(loss) for loss in run.losses)
    assert run.eval_losses[-1] < run.eval_losses[0]
    loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), run.mapping["output_dir"])
    assert torch.equal(logits(loaded), run.logits)


@pytest.mark.parametrize(
    ("changes", "beside"),
    [
        ({"special_tokens": {"pad_token": "<|new|>"}}, {"model.embed_tokens.weight", "lm_head.weight"}),
        ({"resize_token_embeddings_to_32x": True}, {"model.embed_tokens.weight", "lm_head.weight"}),
        ({"lora_target_modules": ["lm_head", "q_proj"], "lora_target_linear": None}, {"lm_head.base_layer.weight"}),
        (
            {"tokens": ["<|new|>"], "lora_modules_to_save": ["embed_tokens", "lm_head"]},
            {  # PEFT's own choice: the trained ones, and both once more
                f"{module}.{part}weight"
                for module in ("model.embed_tokens", "lm_head")
                for part in ("", "modules_to_save.", "original_module.")
            },
        ),
    ],
    ids=lambda changes: next(iter(changes)) if isinstance(changes, dict) else "",
)
def test_embeddings_that_peft_saves_with_an_adapter(settings, train, write, base, tmp_path, changes, beside):
    from axolotl.cli.merge_lora import do_cli
    from transformers import LlamaForCausalLM

    shared = {"max_steps": 4, "save_steps": 2, "eval_steps": None, "lora_dropout": 0.0, **changes}
    if not {"lora_target_modules", "lora_modules_to_save"}.isdisjoint(changes):  # a tied output layer is refused
        shared["base_model"] = str(tmp_path / "untied")
        config = AutoModelForCausalLM.from_pretrained(base).config
        config.tie_word_embeddings = False
        LlamaForCausalLM(config).save_pretrained(tmp_path / "untied")
        AutoTokenizer.from_pretrained(base).save_pretrained(tmp_path / "untied")
    whole = settings(output_dir=str(tmp_path / "whole"), **shared)
    adapted = logits(train(whole).model)
    saved = adapter_of(whole)
    assert {name.removeprefix("base_model.model.") for name in saved if "supra_" not in name} == beside
    resumed = settings(
        output_dir=str(tmp_path / "resumed"), resume_from_checkpoint=str(tmp_path / "whole/checkpoint-2"), **shared
    )
    train(resumed)
    assert_equal_tensors(saved, adapter_of(resumed))
    do_cli(config=write(whole))
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "whole/merged")
    assert logits(merged).shape == adapted.shape
    torch.testing.assert_close(logits(merged), adapted, rtol=0, atol=1e-5)


def test_gradient_checkpointing_changes_nothing(trained):
    plain, saving = trained("plain").mapping, trained("saving", gradient_checkpointing=True).mapping
    for name, tensor in adapter_of(plain).items():
        torch.testing.assert_close(adapter_of(saving)[name], tensor, rtol=1e-4, atol=1e-5)


def test_sparse_lr_reaches_the_sparse_values_alone(settings, train):
    trainer = train(settings(sparse_lr="1e-2", max_steps=1, eval_steps=None, warmup_steps=0, lr_scheduler="constant"))
    sparse = {id(p) for name, p in trainer.model.named_parameters() if "supra_values" in name}
    assert sparse
    rates = {id(p): group["lr"] for group in trainer.optimizer.param_groups for p in group["params"]}
    assert {rates[i] for i in sparse} == {1e-2}
    assert {rate for i, rate in rates.items() if i not in sparse} == {5e-3}


def test_saved_norms_are_used_again_and_refused_for_another_model(trained, settings, train, tmp_path, monkeypatch):
    first = trained("first").mapping
    path = str(tmp_path / "first" / "activation_norms.safetensors")
    monkeypatch.setattr("axolotl_supertune.plugin.calibrate.calibrate", None)
    again = settings(output_dir=str(tmp_path / "again"), calibration_dataset=None, calibration_path=path)
    train(again)
    assert_equal_tensors(adapter_of(first), adapter_of(again))

    other = tmp_path / "other"
    model = AutoModelForCausalLM.from_pretrained(first["base_model"])
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.mul_(1.5)
    model.save_pretrained(other)
    AutoTokenizer.from_pretrained(first["base_model"]).save_pretrained(other)
    with pytest.raises(ValueError, match=r"calibration_path.*another model"):
        train({**again, "base_model": str(other)})


def test_a_supra_run_does_not_continue_a_lora_adapter(settings, train, tmp_path):
    from peft import LoraConfig, get_peft_model

    mapping = settings()
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(mapping["base_model"]), LoraConfig())
    model.save_pretrained(tmp_path / "lora")
    with pytest.raises(ValueError, match=r"lora_model_dir.*LORA"):
        train({**mapping, "lora_model_dir": str(tmp_path / "lora")})


def test_training_goes_on_from_lora_model_dir(trained, settings, train, tmp_path):
    run = trained()
    first, before = run.mapping, run.eval_losses[-1]
    second = settings(output_dir=str(tmp_path / "second"), lora_model_dir=first["output_dir"])
    after = eval_losses(train(second))
    assert math.isclose(after[0], before, rel_tol=1e-5)
    assert after[-1] < before
    support = [name for name in adapter_of(first) if "indices" in name]
    assert support
    assert all(torch.equal(adapter_of(first)[name], adapter_of(second)[name]) for name in support)


def test_the_table_at_start_has_the_exact_total(settings, train, monkeypatch):
    logged = []
    for module in ("plugin", "create"):
        monkeypatch.setattr(
            f"axolotl_supertune.plugin.{module}.LOG.info", lambda message, *args: logged.append(message % args)
        )
    trainer = train(settings(max_steps=1, eval_steps=None))
    trained = sum(p.numel() for p in trainer.model.parameters() if p.requires_grad)
    # What may take long says that it has begun.
    reading, norms_saved, choosing, table = logged
    assert re.fullmatch(r"Reading the calibration text, \S+text\.txt\.", reading)
    assert norms_saved.startswith("Activation norms saved")
    assert choosing == "Choosing the supports of 14 layers: wanda-bottom."
    assert f"{trained:,}" in table
    assert "2 × q_proj" in table
    assert "wanda-bottom" in table
    assert re.search(r"Calibration: 4 × 64 tokens of \S+text\.txt \(seed 0\), model \S+: \d+\.\d s", table)


@pytest.mark.parametrize("packed", [False, True])
def test_the_logs_say_what_the_run_costs(settings, train, monkeypatch, packed):
    from axolotl.core.trainers.base import AxolotlTrainer

    steps = []  # (tokens that are no padding, seconds) of each

    def training_step(self, model, inputs, *args, **kwargs):
        start = time.perf_counter()
        mask = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"]))
        result = original(self, model, inputs, *args, **kwargs)
        steps.append((int((mask != 0).sum()), time.perf_counter() - start))
        return result

    original = AxolotlTrainer.training_step
    monkeypatch.setattr(AxolotlTrainer, "training_step", training_step)
    packing = {"sample_packing": True, "eval_sample_packing": False, "pad_to_sequence_len": True} if packed else {}
    # An evaluation and a slow save after every step, a log after every second one, four micro-batches, and the last.
    changes = {"logging_steps": 2, "eval_steps": 1, "save_steps": 1, "gradient_accumulation_steps": 2, "max_steps": 5}
    mapping = settings(**changes, **packing)

    slept = []

    class SlowSave(TrainerCallback):
        def on_save(self, *args, **kwargs):
            slept.append(time.sleep(0.5))

    with monkeypatch.context() as patch:
        add = SupertunePlugin.add_callbacks_post_trainer
        patch.setattr(SupertunePlugin, "add_callbacks_post_trainer", lambda *args: [SlowSave(), *add(*args)])
        trainer = train(mapping)
    assert len(slept) == 5

    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert [entry["step"] for entry in logs] == [2, 4, 5]
    for at, entry in enumerate(logs):
        tokens, seconds = (sum(column) for column in zip(*steps[4 * at : 4 * at + 4], strict=True))
        rate = entry["supertune/tokens_per_second"]
        assert 0 < rate < tokens / seconds * 1.0001
        if at:  # the first steps may load code
            assert rate > tokens / (seconds + 0.5), "a save counted as training"
        assert "supertune/peak_memory_gib" not in entry, "there is no CUDA memory here"
    saved = adapter_of(mapping)
    first, second, _ = logs
    assert first["supertune/adapter_mib"] == pytest.approx(sum(t.nbytes for t in saved.values()) / 2**20, rel=1e-4)
    trained = sum(p.numel() for p in trainer.model.parameters() if p.requires_grad)
    assert first["supertune/trainable_parameters"] == trained
    assert not {"supertune/adapter_mib", "supertune/trainable_parameters"} & set(second)


def test_the_adapter_config_says_what_was_done(trained):
    mapping = trained().mapping
    saved = json.loads((Path(mapping["output_dir"]) / "adapter_config.json").read_text())
    assert saved["peft_type"] == "SUPRA"
    assert saved["support"] == "saved"
    assert saved["calibration"]["dataset"] == mapping["calibration_dataset"]
    assert "r" not in saved, "Axolotl's fast merge would take the file for a LoRA and write the base model"


def test_axolotl_evaluates_nothing_once_an_epoch_in_one_epoch(settings, train, caplog):
    """What the warning says; a version of Axolotl that mends it needs no warning."""
    keys = {"eval_steps": None, "max_steps": 2, "save_steps": 2, "num_epochs": 1, "evals_per_epoch": 1}
    trainer = train(settings(**keys))
    assert not [entry for entry in trainer.state.log_history if "eval_loss" in entry]
    assert "evals_per_epoch: 1 with num_epochs: 1" in caplog.text
