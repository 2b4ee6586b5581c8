"""`axolotl train` with a support that the gradients of training batches choose: SIFT and RoSA."""

import json
import random
from pathlib import Path

import numpy
import pytest
import torch
from peft import PeftConfig
from trainings import StopAt, adapter_of, eval_losses, losses
from transformers import AutoModelForCausalLM, TrainerCallback

from axolotl_supertune import SupertunePlugin
from axolotl_supertune.method.support import select_support
from axolotl_supertune.plugin import gradient_callback as room
from axolotl_supertune.plugin.validation import prepare
from axolotl_supertune.tuner.gradient import sparse_layers

SIFT = {"adapter": "super", "mask_score": "gradient", "sparse_direction": "top", "gradient_batches": 2}
ROSA = {
    "supra_lambda": 0.5,
    "mask_score": "squared_gradient",
    "sparse_direction": "top",
    "gradient_batches": 2,
    "low_rank_warmup_steps": 3,
}


# Two steps, a checkpoint of the second, and no evaluation.
SHORT = {"max_steps": 2, "save_steps": 2, "eval_steps": None}


@pytest.fixture
def watched(monkeypatch):
    """What each step sees: a list that a callback of the function's fills."""

    def watch(**events):
        original = SupertunePlugin.add_callbacks_post_trainer
        callback = type("Watch", (TrainerCallback,), events)
        monkeypatch.setattr(
            SupertunePlugin,
            "add_callbacks_post_trainer",
            lambda self, cfg, trainer: [*original(self, cfg, trainer), callback()],
        )

    return watch


@pytest.mark.parametrize("more", [{}, {"gradient_checkpointing": True, "gradient_accumulation_steps": 2}])
def test_sift_trains_on_the_largest_gradients_of_training_batches(settings, train, base, monkeypatch, more):
    taken = []
    original = room.choose_supports

    def spy(model, batches, *args, **kwargs):
        taken.extend(batches)
        original(model, batches, *args, **kwargs)
        assert all(each.grad is None for each in model.parameters())

    monkeypatch.setattr(room, "choose_supports", spy)
    trainer = train(settings(**SIFT, **more, max_steps=4, eval_steps=4))
    assert [len(batch) for batch in taken] == [more.get("gradient_accumulation_steps", 1)] * 2
    model = AutoModelForCausalLM.from_pretrained(base)
    total = {}
    for batch in taken:
        count = sum(int((inputs["labels"][:, 1:] != -100).sum()) for inputs, _ in batch)
        for inputs, _ in batch:
            assert (inputs["labels"] == -100).any()  # the prompt is masked, as in training
            labels = inputs["labels"]
            logits = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits[:, :-1]
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")
            for name, weight in model.named_parameters():
                total[name] = total.get(name, 0) + torch.autograd.grad(loss / count, weight, retain_graph=True)[0]
    layers = sparse_layers(trainer.model)
    assert len(layers) == 14
    for layer in layers:
        expected = select_support(
            total[f"{layer.layer_name}.weight"].abs(), layer.supra_values["default"].numel(), "top"
        )
        chosen = layer.supra_indices["default"]
        assert len(set(chosen.tolist()) & set(expected.tolist())) >= 0.99 * len(expected)
        assert layer.supra_values["default"].count_nonzero() > 0.9 * len(expected)
    first, *_, last = eval_losses(trainer)
    assert last < first
    config = trainer.model.peft_config["default"]
    assert config.gradient == {
        "batches": 2,
        "step": 0,
        "rows": 4 * more.get("gradient_accumulation_steps", 1),
        "seed": 0,
    }


def test_the_gradient_of_a_quantized_base_is_that_of_its_dequantized_weight(trained):
    quantized = adapter_of(trained("quantized", **SIFT, **SHORT, load_in_4bit=True).mapping)
    plain = adapter_of(trained("plain", **SIFT, **SHORT).mapping)
    assert quantized.keys() == plain.keys()
    shares = []
    for name, tensor in quantized.items():
        if name.endswith("indices"):
            chosen, dense = set(tensor.tolist()), set(plain[name].tolist())
            shares.append(len(chosen & dense) / len(chosen))
        elif name.endswith("values"):
            assert tensor.any()
    assert len(shares) == 14
    assert min(shares) > 0.6  # of 4 bits; at random it would be a quarter


def test_choosing_draws_nothing_from_what_training_draws(settings, train, watched):
    seen = []
    watched(
        on_train_begin=lambda self, *args, **kwargs: seen.append(drawn()),
        on_step_begin=lambda self, *args, **kwargs: seen.append(drawn()),
    )
    train(settings(**SIFT, max_steps=1, eval_steps=None))
    # The Trainer's own loader draws its seed in between: only torch's generator moves, and by that alone.
    assert seen[0][1:] == seen[1][1:]


def drawn():
    return torch.get_rng_state().tolist(), random.getstate(), numpy.random.get_state()[1].tolist()


def test_rosa_warms_the_low_rank_part_up_before_the_sparse_part_begins(settings, train, watched):
    seen = {}

    def look(self, args, state, control, **kwargs):
        layers = sparse_layers(kwargs["model"])
        seen[state.global_step] = (
            [layer.supra_indices["default"].clone() for layer in layers],
            [bool(layer.supra_values["default"].any()) for layer in layers],
            all(layer.supra_L["default"].any() for layer in layers),
        )

    watched(on_step_end=look)
    trainer = train(settings(**ROSA, warmup_steps=0))
    for step in (1, 2, 3):
        assert not any(seen[step][1]), step
        assert seen[step][2]
    for step in (4, 8):
        assert all(seen[step][1]), step
    for before, after, last in zip(seen[3][0], seen[4][0], seen[8][0], strict=True):
        assert torch.equal(after, last)
        assert torch.equal(before, torch.arange(len(before)))
        assert not torch.equal(before, after)
    assert trainer.model.peft_config["default"].gradient["step"] == 3
    # Adam's first step of U is as large as a first step is.
    state = trainer.optimizer.state
    steps = {int(state[layer.supra_values["default"]]["step"]) for layer in sparse_layers(trainer.model)}
    assert steps == {5}


@pytest.mark.parametrize(("method", "stop", "chooses"), [(SIFT, 3, False), (ROSA, 3, True), (ROSA, 6, False)])
def test_a_resumed_run_is_the_one_that_did_not_stop(
    trained, settings, train, tmp_path, monkeypatch, method, stop, chooses
):
    """RoSA stops once within its warm-up, and once after it."""
    changes = {**method, "save_steps": 2, "eval_steps": None}
    whole = trained("whole", **changes)
    stopped = settings(**changes, output_dir=str(tmp_path / "stopped"))
    with monkeypatch.context() as patch:
        original = SupertunePlugin.add_callbacks_post_trainer
        patch.setattr(
            SupertunePlugin,
            "add_callbacks_post_trainer",
            lambda self, cfg, trainer: [*original(self, cfg, trainer), StopAt(stop)],
        )
        with pytest.raises(KeyboardInterrupt):
            train(stopped)
    newest = max((tmp_path / "stopped").glob("checkpoint-*"), key=lambda path: int(path.name.rpartition("-")[2]))
    assert (PeftConfig.from_pretrained(newest).gradient is None) is chooses
    chosen = []
    original = room.choose_supports
    monkeypatch.setattr(room, "choose_supports", lambda *args, **kwargs: (chosen.append(1), original(*args, **kwargs)))
    resumed = train({**stopped, "auto_resume_from_checkpoints": True})
    assert bool(chosen) is chooses
    assert losses(resumed) == whole.losses
    one, other = adapter_of(whole.mapping), adapter_of(stopped)
    assert one.keys() == other.keys()
    assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gradient_batches": 100}, r"gradient_batches: 100 batches of 1 micro batches .* lower it to 2\d"),
        ({"low_rank_warmup_steps": 8, "adapter": "supra"}, r"low_rank_warmup_steps: 8 leaves none of max_steps: 8"),
        (
            {"low_rank_warmup_steps": 2, "adapter": "supra", "load_best_model_at_end": True},
            r"load_best_model_at_end: true does not work with low_rank_warmup_steps: 2",
        ),
    ],
)
def test_too_few_records_or_steps_are_told(settings, train, changes, message):
    with pytest.raises(ValueError, match=message):
        train(settings(**{**SIFT, **changes}))


def test_a_warm_up_longer_than_the_epochs_is_told(settings, train):
    with pytest.raises(ValueError, match=r"low_rank_warmup_steps: 500 leaves none of this run's 22 steps"):
        train(settings(**{**ROSA, "low_rank_warmup_steps": 500}, max_steps=None, num_epochs=1))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"fp16": True, "bf16": None}, r"fp16: True does not work with mask_score: gradient.*bf16: true"),
        ({"torch_compile": True}, r"torch_compile: True does not work with mask_score: gradient"),
        ({"streaming": True}, r"streaming: True does not work with mask_score: gradient"),
        ({"mask_score": "magnitude"}, r"gradient_batches=2 has no effect with mask_score: magnitude"),
        ({"low_rank_warmup_steps": 2}, r"low_rank_warmup_steps=2 needs a low-rank part"),
        ({"gradient_batchs": 2}, r"gradient_batchs: 2 is not a key; did you mean gradient_batches"),
        ({"low_rank_warm_up": 2}, r"low_rank_warm_up: 2 is not a key"),
    ],
)
def test_what_does_not_go_with_a_gradient_is_refused(settings, load, changes, message):
    with pytest.raises(ValueError, match=message):
        load(settings(**{**SIFT, **changes}))


def test_plain_lora_takes_no_gradient(settings, train, load):
    lora = {"supra_lambda": 1.0, "mask_score": "gradient", "sparse_direction": "top"}
    trainer = train(settings(**lora, max_steps=1, eval_steps=None))
    assert trainer.model.peft_config["default"].gradient is None
    prepare(
        {"adapter": "supra", **lora, "torch_compile": True}, {"torch_compile"}
    )  # Axolotl's own load sets it for good
    with pytest.raises(ValueError, match="low_rank_warmup_steps: 2 has no effect with supra_lambda: 1"):
        load(settings(**lora, low_rank_warmup_steps=2))


def test_inspect_says_that_a_support_is_still_to_come(settings, train):
    from click.testing import CliRunner

    from axolotl_supertune.commands.cli import supertune

    mapping = settings(**{**ROSA, "low_rank_warmup_steps": 1}, max_steps=2, save_steps=1, eval_steps=None)
    train(mapping)
    said = [
        CliRunner().invoke(supertune, ["inspect", f"{mapping['output_dir']}/{folder}"])
        for folder in ("checkpoint-1", "checkpoint-2")
    ]
    assert [each.exit_code for each in said] == [0, 0]
    assert ["not chosen yet: training chooses it by squared_gradient" in each.output for each in said] == [True, False]


def test_deepspeed_is_refused(settings, load):
    config = {"zero_optimization": {"stage": 2}}
    with pytest.raises(ValueError, match=r"^deepspeed: it does not work with mask_score: gradient"):
        load(settings(**SIFT, deepspeed=config))


def test_the_card_says_where_the_support_came_from(trained):
    mapping = trained(**SIFT, **SHORT).mapping
    card = (Path(mapping["output_dir"]) / "README.md").read_text()
    assert "- **Gradient:** of 2 batches (4 rows, seed 0), before step 1" in card.splitlines()
    config = json.loads((Path(mapping["output_dir"]) / "adapter_config.json").read_text())
    assert config["gradient"] == {"batches": 2, "step": 0, "rows": 4, "seed": 0}
