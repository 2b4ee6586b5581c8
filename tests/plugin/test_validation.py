"""A YAML that would train the wrong thing is refused, with the key, the value and the remedy, before a model loads."""

import gzip
import importlib.util
import json

import pytest
from pydantic import BaseModel

from axolotl_supertune import SupertunePlugin
from axolotl_supertune.engines.processes import check_processes_know_each_other, on_cpus
from axolotl_supertune.plugin.plugin import planning
from axolotl_supertune.plugin.validation import OWN_KEYS, SHARED_KEYS, method_config, missing_evaluations, prepare


class OtherArgs(BaseModel):
    """Another plugin's keys."""

    sparse_attn_block: int | None = None


KNOWN = {"adapter", "base_model", "output_dir", "seed", "lora_r", "lora_alpha", "lora_dropout", "learning_rate"}


@pytest.fixture(autouse=True)
def no_model_loads(monkeypatch):
    def fail(*args, **kwargs):
        raise AssertionError("a model was loaded before the config was refused")

    monkeypatch.setattr("axolotl.loaders.model.ModelLoader._build_model", fail)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"supra_lamda": 0.5}, r"supra_lamda: 0\.5 is not a key; did you mean supra_lambda\?"),
        ({"supra-lambda": 0.5}, r"did you mean supra_lambda\?"),
        ({"Mask_Score": "wanda"}, r"did you mean mask_score\?"),
        ({"sparse_dir": "top"}, r"sparse_dir: top is not a key"),
        ({"calibration_samplse": 3}, r"did you mean calibration_samples\?"),
        ({"r0": 2}, r"r0: 2 is not a key; did you mean lora_r\?"),
        ({"density": 0.1}, r"did you mean sparse_density\?"),
        ({"direction": "top"}, r"did you mean sparse_direction\?"),
        ({"optimizer": "muon"}, r"optimizer: muon updates matrices only"),
        ({"peft_autocast_adapter_dtype": False}, r"peft_autocast_adapter_dtype: False"),
        ({"reward_model": True}, r"reward_model: True"),
        ({"supra_lambda": 1, "sparse_lr": 0.1}, r"sparse_lr: 0\.1 has no effect with supra_lambda: 1"),
        (
            {"sparse_lr": 0.1, "lr_groups": [{"name": "supra_values", "modules": ["x"], "lr": 1}]},
            r"lr_groups: the name",
        ),
        ({"sparse_lr": [0.1]}, r"sparse_lr: \[0\.1\] is not a positive number"),
        ({"sparse_lr": True}, r"sparse_lr: True is not a positive number"),
        ({"sparse_lr": float("inf")}, r"sparse_lr: inf is not a positive number"),
        ({"sparse_lr": 0.1, "lr_groups": {"name": "x"}}, r"lr_groups: .*is not a list of groups"),
        ({"sparsity": 0.1}, r"did you mean sparse_density\?"),
        ({"lambd": 0.1}, r"did you mean supra_lambda\?"),
        ({"mask": "wanda"}, r"did you mean mask_score\?"),
        ({"supra_lambda": 1, "calibration_path": "x"}, r"calibration_path: x has no effect"),
        ({"supra_lambda": 1.5}, r"supra_lambda=1\.5 is not in \[0, 1\]"),
        ({"supra_lambda": -0.1}, r"supra_lambda=-0\.1"),
        ({"supra_lambda": "much"}, r"supra_lambda: much is not a number"),
        ({"supra_lambda": float("nan")}, r"supra_lambda=nan"),
        ({"mask_score": "wnada"}, r"mask_score='wnada' is not one of wanda, magnitude"),
        ({"sparse_direction": "up"}, r"sparse_direction='up' is not one of bottom, top, hybrid, random"),
        ({"hybrid_beta": 0.5}, r"hybrid_beta=0\.5 has no effect with sparse_direction: bottom"),
        ({"sparse_direction": "hybrid", "hybrid_beta": 2}, r"hybrid_beta=2 is not in \[0, 1\]"),
        ({"lora_r": 8, "sparse_density": 0.1}, r"two budgets, r0=8 and sparse_density=0\.1"),
        ({"sparse_density": 0}, r"sparse_density=0 is not in \(0, 1\]"),
        ({"lora_r": 0}, r"r0=0 \(lora_r in a YAML\)"),
        ({"lora_dropout": 1}, r"lora_dropout=1 is not in"),
        ({"adapter": "super", "supra_lambda": 0.5}, r"supra_lambda: 0\.5 contradicts adapter: super"),
        ({"adapter": "lora", "supra_lambda": 0.5}, r"supra_lambda: 0\.5 has no effect with adapter: lora"),
        ({"adapter": None, "mask_score": "wanda"}, r"mask_score: wanda has no effect with adapter: None"),
        ({"lora_target_linear": False}, r"lora_target_linear: false without lora_target_modules"),
        ({"rl": "dpo"}, r"rl: dpo does not work with adapter: supra"),
        ({"fsdp": ["full_shard"]}, r"FSDP1"),
        ({"fsdp_config": {"fsdp_version": 1}}, r"fsdp_version: 1 is FSDP1"),
        ({"deepspeed": "nowhere.json"}, r"deepspeed: nowhere\.json cannot be read"),
        ({"load_in_4bit": True, "load_in_8bit": True}, r"load_in_4bit: true and load_in_8bit: true"),
        (
            {"bnb_config_kwargs": {"bnb_4bit_quant_type": "fp4"}},
            r"bnb_config_kwargs: .*fp4.* is read only with load_in_4bit",
        ),
        ({"load_in_8bit": True, "bnb_config_kwargs": {"llm_int8_threshold": 0}}, r"is read only with load_in_4bit"),
        ({"load_in_4bit": True, "bnb_config_kwargs": {"blocksize": 64}}, r"bnb_config_kwargs\.blocksize: 64 is no"),
        ({"load_in_4bit": True, "bnb_config_kwargs": {"load_in_8bit": 1}}, r"bnb_config_kwargs\.load_in_8bit: 1"),
        (
            {"load_in_4bit": True, "overrides_of_model_kwargs": {"quantization_config": {"load_in_8bit": True}}},
            r"load_in_4bit: true and overrides_of_model_kwargs\.quantization_config both say",
        ),
        ({"load_in_4bit": True, "nf4_backend": "torchao"}, r"nf4_backend: torchao"),
        ({"gptq": True}, r"gptq: True .*load_in_4bit or load_in_8bit"),
        ({"model_quantization_config": "Mxfp4Config"}, r"model_quantization_config: Mxfp4Config .*load_in_4bit"),
        ({"peft_use_dora": True}, r"peft_use_dora: True"),
        ({"loraplus_lr_ratio": 16}, r"loraplus_lr_ratio: 16"),
        ({"unfrozen_parameters": ["norm"]}, r"unfrozen_parameters.*lora_modules_to_save"),
        ({"lora_mlp_kernel": True}, r"lora_mlp_kernel: True"),
        ({"tensor_parallel_size": 2}, r"tensor_parallel_size: 2"),
        ({"calibration_path": "nowhere.safetensors"}, r"calibration_path: there is no file nowhere\.safetensors"),
        ({"mask_score": "magnitude", "calibration_path": "x"}, r"calibration_path: x has no effect"),
        ({"calibration_dataset": "nowhere.jsonl"}, r"calibration_dataset: there is no file nowhere\.jsonl"),
        ({"base_model": "/nowhere/llama"}, r"base_model: there is no folder /nowhere/llama\. Name .*OWNER/NAME"),
        ({"base_model": "./llama"}, r"base_model: there is no folder \./llama\."),
        ({"base_model": "~/llama"}, r"base_model: there is no folder ~/llama \(~ is not expanded\)"),
        ({"resume_from_checkpoint": "nowhere"}, r"resume_from_checkpoint: there is no folder nowhere"),
        ({"sparse_lr": -1}, r"sparse_lr: -1 is not a positive number"),
        ({"calibration_samples": 0}, r"calibration_samples"),
        ({"calibration_batch_size": -2}, r"calibration_batch_size"),
    ],
    ids=lambda value: "-".join(map(str, value.items())) if isinstance(value, dict) else "",
)
def test_a_bad_key_is_refused(settings, load, changes, message):
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        load(settings(**changes))


ZERO2 = {"zero_optimization": {"stage": 2}}


def zero3(**more):
    return {"zero_optimization": {"stage": 3, **more}}


@pytest.mark.parametrize(
    ("config", "changes", "message"),
    [
        ({"zero_optimization": {"stage": 0}}, {}, r"deepspeed: zero_optimization\.stage: 0 shards nothing"),
        ({"gradient_clipping": 1.0}, {}, r"deepspeed: zero_optimization\.stage: None shards nothing"),
        ({**ZERO2, "bf16": {"enabled": True}}, {}, r'deepspeed: bf16\.enabled: True .*cast U, L and R.*"auto"'),
        ({**ZERO2, "fp16": {"enabled": True}}, {}, r"deepspeed: fp16\.enabled: True .*cast U, L and R"),
        ({**ZERO2, "amp": {"enabled": True}}, {}, r"deepspeed: amp\.enabled: True"),
        ({**ZERO2, "torch_autocast": {"enabled": False}}, {}, r"deepspeed: torch_autocast: .* Remove it"),
        (
            {**ZERO2, "optimizer": {"type": "AdamW"}},
            {},
            r"deepspeed: optimizer: .*the YAML's optimizer, and of sparse_lr",
        ),
        ({**ZERO2, "scheduler": {"type": "WarmupLR"}}, {}, r"deepspeed: scheduler: .*the YAML's lr_scheduler"),
        (
            {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}},
            {},
            r"deepspeed: zero_optimization\.offload_optimizer: .*not tested, .* Remove it",
        ),
        ({"zero_optimization": {"stage": 1, "zero_quantized_gradients": True}}, {}, r"zero_quantized_gradients: True"),
        (zero3(offload_param={"device": "cpu"}), {}, r"deepspeed: zero_optimization\.offload_param: .*not tested"),
        (zero3(cpu_offload_param=True), {}, r"zero_optimization\.cpu_offload_param: True .*not tested"),
        (zero3(zero_quantized_weights=True), {}, r"zero_quantized_weights: True .*rounds what is trained"),
        (zero3(zero_quantized_nontrainable_weights=True), {}, r"nontrainable_weights: True .*rounds the base"),
        (zero3(zero_hpz_partition_size=2), {}, r"zero_hpz_partition_size: 2 .*not tested"),
        (zero3(mics_shard_size=2), {}, r"mics_shard_size: 2 .*not tested"),
        (zero3(stage3_module_granularity_threshold=9), {}, r"granularity_threshold: 9 .*before they are there"),
        (zero3(leaf_module={"classes": ["LlamaMLP"]}), {}, r"leaf_module: .*before they are there"),
        (zero3(stage3_use_all_reduce_for_fetch_params=True), {}, r"fetch_params: True .*of one dtype"),
        (zero3(module_granularity_threshold=9), {}, r"\.module_granularity_threshold: 9 .*before they are there"),
        (zero3(use_all_reduce_for_fetch_params=True), {}, r"\.use_all_reduce_for_fetch_params: True .*of one dtype"),
        ({**ZERO2, "bfloat16": {"enabled": True}}, {}, r"deepspeed: bfloat16\.enabled: True .*cast U, L and R"),
        (
            zero3(),
            {"mask_score": "gradient", "sparse_direction": "top"},
            r"^deepspeed: it does not work with mask_score: gradient: it was not tested",
        ),
        ({**ZERO2, "communication_data_type": "bf16"}, {}, r"communication_data_type: bf16 .*rounds the gradients"),
        ({**ZERO2, "data_types": {"grad_accum_dtype": "bf16"}}, {}, r"data_types\.grad_accum_dtype: bf16 .*rounds"),
        (ZERO2, {"fp16": True}, r"fp16: True .*DeepSpeed would cast U, L and R to fp16; use bf16: true"),
        (ZERO2, {"torch_compile": True}, r"torch_compile: True does not work with deepspeed"),
        (ZERO2, {"load_in_4bit": True}, r"load_in_4bit: True does not work with deepspeed.*DDP"),
        (ZERO2, {"lora_modules_to_save": ["lm_head"]}, r"lora_modules_to_save: .* does not work with deepspeed"),
    ],
    ids=str,
)
def test_what_deepspeed_would_round_or_take_over_is_refused(config, changes, message):
    with pytest.raises(ValueError, match=message):
        prepare(
            {"adapter": "supra", "mask_score": "magnitude", "deepspeed": config, **changes}, {"deepspeed", *changes}
        )


def test_every_name_that_deepspeed_knows_a_refused_key_by_is_refused():
    """Its config classes take a field by its alias and by its own name, and old fields set new ones."""
    pytest.importorskip("deepspeed", reason="DeepSpeed is not installed (the extra `deepspeed`)")
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    def is_refused(name):
        cfg = {"adapter": "supra", "mask_score": "magnitude", "deepspeed": zero3(**{name: 7})}
        try:
            prepare(cfg, {"deepspeed"})
        except ValueError as error:
            return f"deepspeed: zero_optimization.{name}: 7 does not work with" in str(error)
        return False

    refused = 0
    for name, field in DeepSpeedZeroConfig.model_fields.items():
        more = field.json_schema_extra or {}
        sets = more.get("new_param") if more.get("deprecated") and more.get("set_new_param", True) else None
        names = {each for each in (name, field.alias, sets) if each and each != "stage"}
        assert len({is_refused(each) for each in names}) <= 1, names
        refused += bool(names) and is_refused(name)
    assert refused >= 11


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto", "loss_scale": 0}, "communication_data_type": "fp32"},
        {"bf16": {"enabled": False}, "zero_optimization": {"stage": 1, "offload_optimizer": {"device": "none"}}},
        zero3(zero_hpz_partition_size=1, mics_shard_size=-1, offload_param={"device": "none"}),
    ],
    ids=str,
)
def test_a_deepspeed_config_that_rounds_nothing_passes(tmp_path, more):
    path = tmp_path / "zero.json"
    path.write_text(json.dumps({**ZERO2, **more}))
    cfg = {"adapter": "supra", "mask_score": "magnitude", "deepspeed": str(path)}
    prepare(cfg, {"deepspeed"})
    assert cfg["deepspeed"] == str(path)


@pytest.mark.parametrize("command", [{"merge_lora": True}, {"inference": True, "lora_model_dir": "adapter"}], ids=str)
def test_one_process_that_merges_or_talks_starts_no_deepspeed(tmp_path, monkeypatch, command):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name == "deepspeed" else found(name))
    monkeypatch.setattr("axolotl_supertune.plugin.plugin.quantized_base.load_as_trained", lambda *args: None)
    cfg = {"adapter": "supra", "mask_score": "magnitude", "deepspeed": zero3(), "output_dir": str(tmp_path), **command}
    SupertunePlugin().register(cfg)
    assert cfg["deepspeed"] is None


def test_the_first_look_of_merge_lora_at_the_yaml_starts_no_deepspeed(monkeypatch):
    from axolotl.cli import merge_lora

    class Seen(Exception):
        pass

    def load_cfg(config, **changes):
        cfg = {"adapter": "supra", "mask_score": "magnitude", "deepspeed": zero3()}
        SupertunePlugin().register(cfg)
        raise Seen(cfg["deepspeed"])

    monkeypatch.setattr(merge_lora, "load_cfg", load_cfg)
    with pytest.raises(Seen) as seen:
        merge_lora.do_cli(config="run.yml")
    assert seen.value.args == (None,)


def test_deepspeed_that_is_not_installed_names_the_extra(monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name == "deepspeed" else found(name))
    cfg = {"adapter": "supra", "mask_score": "magnitude", "deepspeed": ZERO2}
    with pytest.raises(ValueError, match=r"deepspeed: DeepSpeed is not installed\. .*axolotl-supertune\[deepspeed\]"):
        SupertunePlugin().register(cfg)
    with planning():
        SupertunePlugin().register(cfg)
    cfg.pop("deepspeed")
    SupertunePlugin().register(cfg)


FSDP2 = {"reshard_after_forward": True, "transformer_layer_cls_to_wrap": "LlamaDecoderLayer"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"fsdp_config": {**FSDP2, "state_dict_type": "SHARDED_STATE_DICT"}}, r"fsdp_config\.state_dict_type: SHARDED"),
        ({"fsdp_config": {**FSDP2, "final_state_dict_type": "SHARDED_STATE_DICT"}}, r"final_state_dict_type: SHARDED"),
        ({"fsdp_config": {**FSDP2, "offload_params": True}}, r"fsdp_config\.offload_params: true keeps supports"),
        ({"fsdp_config": {**FSDP2, "fsdp_offload_params": True}}, r"fsdp_config\.offload_params: true keeps supports"),
        ({"fsdp_config": FSDP2, "torch_compile": True}, r"torch_compile: true was not tested with FSDP2"),
        ({"fsdp_config": FSDP2, "dp_replicate_size": 2}, r"dp_replicate_size: 2 was not tested"),
        ({"fsdp_config": FSDP2, "load_in_4bit": True}, r"load_in_4bit: true was not tested with FSDP2"),
        ({"fsdp_config": FSDP2, "load_in_8bit": True}, r"load_in_8bit: true was not tested with FSDP2"),
        ({"fsdp": ["full_shard"], "fsdp_config": FSDP2}, r"fsdp: \['full_shard'\] is how FSDP1 was configured"),
        ({"fsdp": ["full_shard"]}, r"is how FSDP1 was configured"),
    ],
    ids=str,
)
def test_what_fsdp2_cannot_do_is_refused(monkeypatch, changes, message):
    monkeypatch.setattr("axolotl_supertune.plugin.axolotl_compat.axolotl_version", lambda: "0.21.0")
    with pytest.raises(ValueError, match=message):
        prepare(
            {"adapter": "supra", "supra_lambda": 1, "fsdp_version": 2, **changes}, KNOWN | {"torch_compile", "fsdp"}
        )


def test_fsdp2_is_taken_from_axolotl_0_21_on(monkeypatch):
    cfg = {"adapter": "supra", "supra_lambda": 1, "fsdp_version": 2, "fsdp_config": dict(FSDP2)}
    monkeypatch.setattr("axolotl_supertune.plugin.axolotl_compat.axolotl_version", lambda: "0.19.0")
    with pytest.raises(ValueError, match=r"FSDP2 does not work with adapter: supra under Axolotl 0\.19\.0: "):
        prepare(cfg, KNOWN)
    monkeypatch.setattr("axolotl_supertune.plugin.axolotl_compat.axolotl_version", lambda: "0.21.0")
    prepare(cfg, KNOWN)
    prepare(cfg, KNOWN)
    assert cfg["fsdp_config"] == {**FSDP2, "state_dict_type": "FULL_STATE_DICT"}


def test_fsdp2_keeps_the_adapter_in_fp32():
    from types import SimpleNamespace

    import torch
    from axolotl.utils.dict import DictDefault
    from torch.distributed.fsdp import MixedPrecisionPolicy

    from axolotl_supertune import SupertunePlugin
    from axolotl_supertune.engines.processes import Processes

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    fsdp = SimpleNamespace(mixed_precision_policy=policy)
    trainer = SimpleNamespace(
        args=SimpleNamespace(n_gpu=1), accelerator=SimpleNamespace(state=SimpleNamespace(fsdp_plugin=fsdp))
    )
    plugin = SupertunePlugin()
    plugin._processes = Processes(1.0, "")
    plugin.add_callbacks_post_trainer(DictDefault(adapter="supra"), trainer)
    assert (fsdp.mixed_precision_policy.param_dtype, fsdp.mixed_precision_policy.reduce_dtype) == (None, torch.float32)


def test_supports_are_not_broadcast_at_every_step(settings, load, monkeypatch):
    assert load(settings()).ddp_broadcast_buffers is None
    assert load(settings(ddp_broadcast_buffers=False)).ddp_broadcast_buffers is False
    monkeypatch.setenv("WORLD_SIZE", "2")
    cfg = {"adapter": "supra", "supra_lambda": 1}
    prepare(cfg, KNOWN)
    assert cfg["ddp_broadcast_buffers"] is False
    with pytest.raises(ValueError, match=r"ddp_broadcast_buffers: true would send every support"):
        prepare({**cfg, "ddp_broadcast_buffers": True}, KNOWN)


def test_processes_that_do_not_know_of_each_other_are_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("ACCELERATE_USE_CPU")
    assert not on_cpus()
    check_processes_know_each_other(True)
    with pytest.raises(ValueError, match=r"WORLD_SIZE=2, but these processes do not know .*ACCELERATE_USE_CPU=true"):
        check_processes_know_each_other(False)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    assert on_cpus()
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert not on_cpus()
    check_processes_know_each_other(False)


def test_one_process_with_several_gpus_is_refused():
    from types import SimpleNamespace

    from axolotl_supertune import SupertunePlugin

    trainer = SimpleNamespace(args=SimpleNamespace(n_gpu=4))
    with pytest.raises(ValueError, match=r"sees 4 GPUs .*DataParallel.*--num_processes 4"):
        SupertunePlugin().add_callbacks_post_trainer(SimpleNamespace(adapter="supra"), trainer)


def test_text_too_short_is_refused_before_the_model_loads(settings, train):
    with pytest.raises(ValueError, match=r"calibration_dataset .*text\.txt is too short: 500 windows.*tokens in"):
        train(settings(calibration_samples=500))


def test_a_damaged_calibration_file_is_named(settings, train, tmp_path):
    path = tmp_path / "c4.json.gz"
    whole = gzip.compress("".join(json.dumps({"text": "a b c " * 50}) + "\n" for _ in range(2000)).encode())
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"calibration_dataset .*c4\.json\.gz cannot be read"):
        train(settings(calibration_dataset=str(path), calibration_samples=5000))


def test_a_hub_dataset_out_of_reach_is_named_with_the_way_out(settings, train):
    with pytest.raises(ValueError, match=r"calibration_dataset allenai/c4 cannot be read.*mask_score: magnitude"):
        train(settings(calibration_dataset=None))


@pytest.mark.parametrize("how", ["missing", "empty"])
def test_training_data_that_is_missing_or_empty_is_an_error(settings, train, tmp_path, how):
    path = tmp_path / "data.jsonl"
    if how == "empty":
        path.write_text("")
    with pytest.raises(Exception, match=r"data\.jsonl"):
        train(settings(datasets=[{"path": str(path), "type": "alpaca"}]))


def test_defaults_are_the_documented_ones():
    cfg = {"adapter": "supra", "calibration_dataset": None}
    prepare(cfg, KNOWN)
    assert cfg == {
        "adapter": "supra",
        "supra_lambda": 0.8,
        "mask_score": "wanda",
        "sparse_direction": "bottom",
        "support_scope": "layer",
        "budget_scope": "layer",
        "lora_r": 8,
        "lora_alpha": 16,
        "lora_dropout": 0.05,
        "lora_target_linear": True,
        "support_seed": 42,
        "values_dtype": "fp32",
        "calibration_dataset": "allenai/c4",
        "calibration_split": "train",
        "calibration_text_field": "text",
        "calibration_samples": 128,
        "calibration_sequence_len": 2048,
        "calibration_seed": 42,
        "calibration_batch_size": 8,
        "merge_method": "legacy",
    }


def test_seeds_follow_seed():
    cfg = {"adapter": "supra", "seed": 7}
    prepare(cfg, KNOWN)
    assert (cfg["support_seed"], cfg["calibration_seed"]) == (7, 7)


@pytest.mark.parametrize("adapter", ["supra", "super"])
def test_preparing_twice_changes_nothing(adapter):
    cfg = {"adapter": adapter, "sparse_lr": "1e-2"}
    prepare(cfg, KNOWN)
    once = dict(cfg)
    prepare(cfg, KNOWN)
    assert cfg == once
    assert cfg["lr_groups"] == [{"name": "supra_values", "modules": ["supra_values"], "lr": 0.01}]


@pytest.mark.parametrize("written", [None, 0, 0.0, "0"])
def test_super_is_lambda_0(written):
    cfg = {"adapter": "super", "supra_lambda": written}
    prepare(cfg, KNOWN)
    assert cfg["supra_lambda"] == 0


def test_numbers_may_be_written_as_strings():
    cfg = {"adapter": "supra", "lora_r": "4", "supra_lambda": "0.5", "seed": "7"}
    prepare(cfg, KNOWN)
    assert (method_config(cfg).r0, method_config(cfg).supra_lambda, cfg["support_seed"]) == (4, 0.5, 7)


@pytest.mark.parametrize("words", [["--supra-lambda", "0.5"], ["--supra_lambda=0.5"], ["--mask-score", "magnitude"]])
def test_a_key_that_the_command_line_lost_is_refused(monkeypatch, words):
    monkeypatch.setattr("sys.argv", ["axolotl", "train", "x.yml", *words])
    with pytest.raises(ValueError, match=r"did not reach the config.*Write it in the YAML"):
        prepare({"adapter": "supra"}, KNOWN)
    prepare({"adapter": "supra", "supra_lambda": "0.5", "mask_score": "magnitude"}, KNOWN)


def test_lambda_1_needs_no_calibration_text():
    prepare({"adapter": "supra", "supra_lambda": 1, "calibration_dataset": "nowhere.jsonl"}, KNOWN)


def test_sparse_lr_comes_before_the_users_groups():
    cfg = {"adapter": "supra", "sparse_lr": 0.1, "lr_groups": [{"name": "q", "modules": ["q_proj"], "lr": 1e-5}]}
    prepare(cfg, KNOWN)
    assert [group["name"] for group in cfg["lr_groups"]] == ["supra_values", "q"]


def test_data_sets_may_be_plain_names():
    prepare({"adapter": "supra", "supra_lambda": 1, "datasets": ["a.jsonl"]}, KNOWN)


def test_every_shared_key_reaches_the_config(settings, load):
    values = {
        "lora_r": 4,
        "lora_alpha": 8,
        "lora_dropout": 0.1,
        "lora_target_modules": ["q_proj", "k_proj"],
        "lora_exclude_modules": ["k_proj"],
        "peft_layers_to_transform": [0],
        "peft_layers_pattern": ["layers"],
        "lora_modules_to_save": ["embed_tokens"],
        "lora_model_dir": "somewhere",
        "lora_target_linear": True,
    }
    cfg = load(settings(**values))
    assert {key: cfg[key] for key in values} == values
    assert set(values) == set(SHARED_KEYS)


def test_another_plugins_keys_are_its_own(settings, load, monkeypatch):
    from axolotl.integrations.base import PluginManager

    monkeypatch.setattr(
        PluginManager,
        "get_input_args",
        lambda self: ["axolotl_supertune.plugin.args.SupertuneArgs", f"{__name__}.OtherArgs"],
    )
    cfg = load(settings(sparse_attn_block=3))
    assert cfg.sparse_attn_block == 3


def test_another_adapters_config_is_left_alone():
    cfg = {"adapter": "lora", "lora_r": 16}
    prepare(cfg, KNOWN)
    assert cfg == {"adapter": "lora", "lora_r": 16}


def test_a_density_budget_gets_no_rank():
    cfg = {"adapter": "supra", "sparse_density": 0.01}
    prepare(cfg, KNOWN)
    assert "lora_r" not in cfg


def test_every_key_reaches_the_config(settings, load):
    values = {
        "supra_lambda": 0.5,
        "mask_score": "wanda",
        "sparse_direction": "hybrid",
        "hybrid_beta": 0.3,
        "support_scope": "row",
        "budget_scope": "density",
        "sparse_lr": 0.01,
        "support_seed": 3,
        "values_dtype": "bf16",
        "calibration_split": "validation",
        "calibration_text_field": "content",
        "calibration_samples": 9,
        "calibration_sequence_len": 32,
        "calibration_seed": 4,
        "calibration_batch_size": 2,
    }
    by_gradient = {"mask_score": "gradient", "gradient_batches": 3, "low_rank_warmup_steps": 2}
    for each in (by_gradient, values):
        cfg = load(settings(**each))
        assert {key: cfg[key] for key in each} == each
    assert set(values) | set(by_gradient) | {"sparse_density", "calibration_dataset", "calibration_path"} == set(
        OWN_KEYS
    )
    assert cfg.merge_method == "legacy"


def test_a_command_line_without_arguments(monkeypatch):
    monkeypatch.setattr("sys.argv", ["python"])
    prepare({"adapter": "supra", "mask_score": "magnitude"}, KNOWN)


@pytest.mark.parametrize(
    ("keys", "evaluates"),
    [
        ({"val_set_size": 0.1, "evals_per_epoch": 1, "num_epochs": 1}, False),
        ({"val_set_size": 0.1, "evals_per_epoch": 1}, False),
        ({"test_datasets": [{"path": "valid.jsonl"}], "evals_per_epoch": 1, "num_epochs": 1.0}, False),
        ({"val_set_size": 0.1, "evals_per_epoch": 2, "num_epochs": 1}, True),
        ({"val_set_size": 0.1, "evals_per_epoch": 1, "num_epochs": 3}, True),
        ({"val_set_size": 0.1, "eval_steps": 5, "num_epochs": 1}, True),
        ({"val_set_size": 0, "evals_per_epoch": 1, "num_epochs": 1}, True),
    ],
)
def test_a_yaml_that_asks_for_evaluations_and_gets_none_is_told(keys, evaluates):
    problem = missing_evaluations(keys)
    assert problem is None if evaluates else "evals_per_epoch: 1 with num_epochs: 1" in problem


def test_an_adapter_is_no_base_model(settings, load, tmp_path):
    folder = tmp_path / "an_adapter"
    folder.mkdir()
    (folder / "adapter_config.json").write_text("{}")
    (folder / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"base_model: .*an_adapter holds an adapter and no model"):
        load(settings(base_model=str(folder)))
