"""Every row of the paper's table is a YAML that trains, and trains as many parameters as its budget says."""

from pathlib import Path

import pytest
import yaml

METHODS = yaml.safe_load((Path(__file__).parents[2] / "examples/paper/methods.yml").read_text())
SUPERTUNE = ("super", "supra")
ROWS = {
    "full",
    "lora",
    "sift-top",
    "sift-rand",
    "rosa",
    "super-top",
    "super-bottom",
    "super-random",
    "super-hybrid-0.3",
    "super-hybrid-0.5",
    "super-hybrid-0.8",
    "magnitude-top",
    "magnitude-bottom",
    *(f"supra{kind}-{share}" for kind in ("", "-top", "-mag") for share in (0.3, 0.5, 0.8)),
}
RELATED = {"rosa-squared"}
# Beyond the paper, beside keys of one of its rows.
BEYOND = {
    "rosa-warmed-up": METHODS["rosa-squared"] | {"low_rank_warmup_steps": 1},
    "two-rates": METHODS["supra-0.5"] | {"sparse_lr": 1e-2},
    "activation": METHODS["super-top"] | {"mask_score": "activation"},
    "by-row": METHODS["supra-0.5"] | {"support_scope": "row"},
    "gradient-by-row": METHODS["sift-top"] | {"support_scope": "row"},
    "one-density": METHODS["supra-0.5"] | {"budget_scope": "density"},
    "compared": METHODS["super-bottom"] | {"budget_scope": "global"},
}
# r0(c + b) over the layers of the tiny model.
BUDGET = 8 * 2 * (2 * (64 + 64) + 2 * (64 + 32) + 3 * (64 + 96))


def test_the_file_names_the_papers_rows():
    assert METHODS.keys() == ROWS | RELATED


@pytest.mark.parametrize("name", [*METHODS, *BEYOND])
def test_a_method_trains_within_its_budget(name, settings, train, tmp_path):
    keys = METHODS.get(name) or BEYOND[name]
    data = str(tmp_path.parent / "prepared")  # of all methods
    changes = {"adapter": None, "max_steps": 2, "eval_steps": 2, "save_steps": 2, "warmup_steps": 0}
    changes |= {"dataset_prepared_path": data, "gradient_batches": None, **keys}
    if keys["adapter"] not in SUPERTUNE:
        changes |= {f"calibration_{key}": None for key in ("dataset", "samples", "sequence_len")}
        changes |= {f"lora_{key}_kernel": False for key in ("mlp", "qkv", "o")} if keys["adapter"] else {}
    trainer = train(settings(**changes))
    trained = {name: each for name, each in trainer.model.named_parameters() if each.requires_grad}
    count = sum(each.numel() for each in trained.values())
    if name == "full":
        assert count == sum(each.numel() for each in trainer.model.parameters())
    elif keys["adapter"] == "lora":
        assert count == BUDGET
    else:
        assert abs(count - BUDGET) <= 0.005 * BUDGET
    moved = [name for name, each in trained.items() if ".supra_values." in name and not each.any()]
    moved += [name for name, each in trained.items() if (".supra_L." in name or "lora_B" in name) and not each.any()]
    assert not moved, "these were not trained"
    assert trainer.state.log_history[-1]["step"] == 2
