"""The pages of the plugin name every YAML key, with the default that a run gets, and every key that is refused."""

import re
from pathlib import Path

import pytest

from axolotl_supertune.engines import deepspeed, engine
from axolotl_supertune.method.budget import DEFAULT_BETA, DEFAULT_R0
from axolotl_supertune.plugin import refusals, validation
from axolotl_supertune.plugin.args import SupertuneArgs
from axolotl_supertune.tuner.config import DEFAULT_GRADIENT_BATCHES

PAGE = Path(validation.__file__).with_name("README.md")
DEFAULTS = {
    **validation._DEFAULTS,
    "lora_r": DEFAULT_R0,
    "hybrid_beta": DEFAULT_BETA,
    "gradient_batches": DEFAULT_GRADIENT_BATCHES,
    "low_rank_warmup_steps": 0,
    "sparse_lr": "`learning_rate`",
    "support_seed": "`seed`",
    "calibration_seed": "`seed`",
}


def keys():
    """Key → the default that the page's tables give."""
    section = PAGE.read_text(encoding="utf-8").split("\n## YAML keys\n")[1].split("\n## ")[0]
    found = {}
    for names, shown, _ in re.findall(r"^\| (`.*?) \| (.*?) ?\| (.*) \|$", section, re.MULTILINE):
        names = re.findall(r"`(\w+)`", names)
        defaults = shown.split(", ") if len(names) == len(shown.split(", ")) else [shown] * len(names)
        found |= dict(zip(names, defaults, strict=True))
    return found


def test_every_key_is_in_the_tables():
    assert {"adapter", *SupertuneArgs.model_fields, *validation.SHARED_KEYS} == set(keys())


@pytest.mark.parametrize("key", DEFAULTS)
def test_the_tables_give_the_defaults(key):
    assert keys()[key] == str(DEFAULTS[key])


def test_every_refused_key_is_on_its_page():
    text = PAGE.with_name("refused.md").read_text(encoding="utf-8")
    tables = (
        refusals.REFUSED,
        refusals.REFUSED_EVEN_IF_FALSE,
        refusals.REFUSED_UNLESS,
        refusals.REFUSED_BESIDE_TRAINING_SET,
        refusals.REFUSED_BESIDE_GRADIENT,
        dict.fromkeys(engine._REFUSED_ABOVE_ONE),
    )
    refused = {key for table in tables for key in table}
    beside_deepspeed = set(deepspeed._REFUSED_BESIDE) - {"fsdp_config"}  # two engines
    missing = {key for key in refused | beside_deepspeed if not re.search(rf"`{key}[`:]", text)}
    assert not missing
