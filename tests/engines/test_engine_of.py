"""The engine that a YAML names, and the DeepSpeed keys that are allowed."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from axolotl_supertune.engines import KEYS, engine_of
from axolotl_supertune.engines.deepspeed import TESTED_KEYS, check_keys
from axolotl_supertune.method.config_error import ConfigError

EXAMPLES = Path(__file__).parents[2] / "examples"
# As Axolotl ships them: zero1.json, zero2.json without its offloading, zero3.json.
SHIPPED = {
    "bf16": {"enabled": "auto"},
    "fp16": {"enabled": "auto", "auto_cast": False, "loss_scale": 0, "initial_scale_power": 32, "hysteresis": 2},
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "wall_clock_breakdown": False,
}
ZERO1 = {"stage": 1, "overlap_comm": True}
ZERO2 = {"stage": 2, "contiguous_gradients": True, "overlap_comm": True}
ZERO3 = {"stage": 3, "overlap_comm": True, "contiguous_gradients": True, "sub_group_size": 0}
ZERO3 |= {"reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto", "stage3_max_live_parameters": 0}
ZERO3 |= {"stage3_param_persistence_threshold": "auto", "max_live_parameters": 0, "stage3_max_reuse_distance": 0}
ZERO3 |= {"stage3_gather_16bit_weights_on_model_save": True, "gather_16bit_weights_on_model_save": True}


@pytest.mark.parametrize(
    ("keys", "processes", "name"),
    [
        ({}, 1, "one GPU"),
        ({}, 2, "DDP"),
        ({"fsdp_config": {"fsdp_version": 2}}, 2, "FSDP2"),
        ({"deepspeed": {"zero_optimization": ZERO1}}, 2, "ZeRO-1"),
        ({"deepspeed": {"zero_optimization": ZERO2}}, 2, "ZeRO-2"),
        ({"deepspeed": str(EXAMPLES / "deepspeed_zero3.json")}, 2, "ZeRO-3"),
    ],
)
def test_a_yaml_names_its_engine(keys, processes, name):
    engine = engine_of(keys, processes)
    assert (engine.name, engine.processes) == (name, processes)
    assert engine.key in (None, *KEYS)


@pytest.mark.parametrize("zero", [ZERO1, ZERO2, ZERO3], ids=lambda zero: str(zero["stage"]))
def test_the_deepspeed_configs_that_axolotl_ships_are_allowed(zero):
    check_keys({**SHIPPED, "zero_optimization": zero}, "supra")


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("deepspeed_*.json")), ids=lambda path: path.name)
def test_the_deepspeed_configs_of_the_examples_are_allowed(path):
    check_keys(json.loads(path.read_text()), "supra")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"autotuning": {"enabled": True}}, r"^deepspeed: autotuning: {'enabled': True} does not work with adapter"),
        (
            {"zero_optimization": {"parameter_alignment": True}},
            r"^deepspeed: zero_optimization\.parameter_alignment",
        ),
        ({"sparse_attention": {"mode": "fixed"}}, r"adapter: supra: it was not tested\. Remove it\.$"),
        ({"data_types": {"params": "bf16"}}, r"^deepspeed: data_types\.params: bf16 .* not tested"),
        ({"compile": {"deepcompile": True}}, r"^deepspeed: compile: .* not tested"),
    ],
    ids=str,
)
def test_a_deepspeed_key_that_was_not_tested_is_refused_by_name(config, message):
    with pytest.raises(ConfigError, match=message) as refused:
        check_keys(config, "supra")
    assert refused.value.key == "deepspeed"


def test_a_section_that_is_switched_off_is_allowed():
    check_keys({"autotuning": {"enabled": False}, "zero_optimization": {"offload_param": {"device": "none"}}}, "supra")


DEFAULTS = {"prescale_gradients": False, "memory_breakdown": False, "gradient_predivide_factor": 1.0}


def test_deepspeeds_own_defaults_are_allowed():
    check_keys(DEFAULTS, "supra")


@pytest.mark.parametrize("key", DEFAULTS)
def test_other_values_than_deepspeeds_defaults_are_refused(key):
    with pytest.raises(ConfigError, match=f"^deepspeed: {key}: .* not tested"):
        check_keys({key: 2.0}, "supra")


def test_the_list_names_keys_as_deepspeed_does():
    """A key that DeepSpeed does not know would be allowed here and refused there."""
    pytest.importorskip("deepspeed", reason="DeepSpeed is not installed (the extra `deepspeed`)")
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    known = {name.removeprefix("stage3_") for name in DeepSpeedZeroConfig.model_fields}
    known.add("mics_shard_size")  # read by MiCS, if that is imported
    listed = {key.partition(".")[2] for key in TESTED_KEYS if key.startswith("zero_optimization.")}
    assert listed <= known


def test_asking_for_the_keys_loads_no_torch():
    code = "import sys, axolotl_supertune.engines as e; e.engine_of({}, 2); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("prefix", ["", "fsdp_"])
def test_keys_of_fsdp_config_are_read_with_and_without_their_prefix(prefix):
    config = {f"{prefix}activation_checkpointing": True, f"{prefix}offload_params": True}
    engine = engine_of({"fsdp_config": config}, 2)
    assert engine.checkpoints_activations
    assert engine.offloads_weights
