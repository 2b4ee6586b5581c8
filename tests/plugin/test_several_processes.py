"""`axolotl train` in two processes on the CPU, DDP, FSDP2, ZeRO: what one process gives with the same global batch."""

import json
import os
import socket
import subprocess
import sys
import uuid
from importlib.metadata import version
from pathlib import Path

import forked
import pytest
import torch
from axolotl.utils.dict import DictDefault
from axolotl_runs import made_once
from packaging.version import Version
from peft import PeftConfig
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from axolotl_supertune import ActivationNorms, SupraConfig
from axolotl_supertune.engines import engine_of
from axolotl_supertune.engines.processes import Processes
from axolotl_supertune.plugin.resume import check_resume
from axolotl_supertune.plugin.verify import adapter_tensors, check_same_everywhere, check_saved
from axolotl_supertune.tuner import read_adapter

PACKAGE = Path(__file__).parents[2]


# Where several processes train on CPUs the Trainer loads an optimizer onto "cpu:0", and torch knows "cpu" alone; and
# Axolotl asks for the GPUs' peer access wherever torch was built for CUDA.
TRAIN = """
import os, runpy, sys, torch
import axolotl.utils.trainer
axolotl.utils.trainer.check_cuda_p2p_ib_support = lambda: True
put = lambda storage, location: storage if location.startswith("cpu:") else None
torch.serialization.register_package(0, lambda storage: None, put)
{more}
runpy.run_module("axolotl.cli.train", run_name="__main__", alter_sys=True)
"""


@pytest.fixture
def launch(write, tmp_path):
    """A function (mapping, code to run first, environment) → (exit status, output) of `axolotl train` in two
    processes; `launcher` is torch's own, in processes of its making."""

    def launch(mapping, more="", launcher=False, **changes):
        script = tmp_path / "train.py"
        script.write_text(TRAIN.format(more=more))
        path = f"{PACKAGE}:{os.environ.get('PYTHONPATH', '')}"
        environment = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "AXOLOTL_NCCL_TIMEOUT": "100", **changes}
        written = write(mapping, "several.yml")
        if not launcher:
            environment |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port())}
            return forked.run_script(script, [written], 2, environment, tmp_path / f"{uuid.uuid4()}.log")
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", str(script)]
        ran = subprocess.run(
            [*command, written],
            env={**os.environ, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=300,
        )
        return ran.returncode, ran.stdout

    return launch


def free_port():
    with socket.socket() as taken:
        taken.bind(("localhost", 0))
        return taken.getsockname()[1]


@pytest.fixture
def even_settings(settings, even_problems, tmp_path):
    """`settings` for runs that are to be equal: Axolotl averages the processes' mean losses, so every answer is of one
    length; no dropout, whose masks depend on the process; the smallest batches."""

    def make(processes, name, **changes):
        return settings(output_dir=str(tmp_path / name), **even(even_problems, processes, **changes))

    return make


@pytest.fixture(scope="session")
def even_problems(problems, session_folder):
    """The path of the word problems, each with one answer."""

    def make(folder):
        records = [json.loads(line) for line in problems[0].read_text().splitlines()]
        even = [json.dumps({**record, "output": "The answer is seven."}) + "\n" for record in records]
        (folder / "even.jsonl").write_text("".join(even))

    return made_once(session_folder / "even", make) / "even.jsonl"


def even(data, processes, **changes):
    return {
        "datasets": [{"path": str(data), "type": "alpaca"}],
        "micro_batch_size": 2 // processes,
        "calibration_batch_size": 1,
        "lora_dropout": 0.0,
        "max_memory": {"cpu": "8GiB"},
        "val_set_size": 0,
        "eval_steps": None,
        **changes,
    }


@pytest.fixture
def in_one_process(trained, even_problems):
    """A function (**changes) → the mapping of a run of `even_settings` that one process has trained."""
    return lambda **changes: trained("one", **even(even_problems, 1, **changes)).mapping


def logged_in(mapping, key):
    """What a run of 8 steps logged under a key, and something at all."""
    state = json.loads((Path(mapping["output_dir"]) / "checkpoint-8/trainer_state.json").read_text())
    found = [entry[key] for entry in state["log_history"] if key in entry]
    assert found, key
    return found


def losses_in(mapping):
    return torch.tensor(logged_in(mapping, "loss"))


def assert_equal_runs(here, there):
    """Losses within 1e-5, supports and shapes equal, U, L and R within 2e-3 of values that reach 0.03."""
    torch.testing.assert_close(losses_in(here), losses_in(there), rtol=1e-5, atol=0)
    one, two = (read_adapter(each["output_dir"]) for each in (here, there))
    assert one.keys() == two.keys()
    assert max(tensor.abs().max() for name, tensor in one.items() if "supra_values" in name) > 0.01
    for name, tensor in one.items():
        if tensor.is_floating_point():
            torch.testing.assert_close(two[name], tensor, rtol=0, atol=2e-3)
        else:
            assert torch.equal(two[name], tensor), name


def test_two_processes_train_as_one_and_resume_each_other(even_settings, in_one_process, train, launch, base):
    one, two = in_one_process(), even_settings(2, "two")
    status, output = launch(two, launcher=True)
    assert status == 0, output
    assert_equal_runs(one, two)
    norms = [ActivationNorms.load(Path(each["output_dir"]) / "activation_norms.safetensors") for each in (one, two)]
    assert norms[0].provenance == norms[1].provenance
    assert all(torch.equal(norm, norms[1][layer]) for layer, norm in norms[0].norms.items())
    assert "s in 2 processes" in output

    # The kernels' plans and a broadcast per step would show here: the supports in the checkpoints are the first ones.
    for step in (4, 8):
        at = read_adapter(Path(two["output_dir"]) / f"checkpoint-{step}")
        final = read_adapter(two["output_dir"])
        assert at.keys() == final.keys()
        assert all(torch.equal(at[name], final[name]) for name in at if "indices" in name)

    from_one = even_settings(2, "from_one", resume_from_checkpoint=str(Path(one["output_dir"]) / "checkpoint-4"))
    status, output = launch(from_one)
    assert status == 0, output
    assert "Calibrating" not in output
    assert_equal_runs(one, from_one)
    from_two = even_settings(1, "from_two", resume_from_checkpoint=str(Path(two["output_dir"]) / "checkpoint-4"))
    train(from_two)
    assert_equal_runs(one, from_two)


def test_two_processes_train_a_4_bit_base_as_one(even_settings, train, launch):
    one, two = even_settings(1, "one", load_in_4bit=True), even_settings(2, "two", load_in_4bit=True)
    train(one)
    status, output = launch(two)
    assert status == 0, output
    assert_equal_runs(one, two)


FSDP2 = {
    "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    "transformer_layer_cls_to_wrap": "LlamaDecoderLayer",
    "reshard_after_forward": True,
    "state_dict_type": "FULL_STATE_DICT",
}


@pytest.mark.skipif(Version(version("axolotl")) < Version("0.21"), reason="FSDP2 is refused before Axolotl 0.21")
def test_fsdp2_trains_as_one_process_and_resumes(even_settings, in_one_process, launch):
    """With `cpu_ram_efficient_loading` the second process holds no weight until the first gives it its shards."""
    one = in_one_process()
    for name, efficient, more in (("two", False, {}), ("efficient", True, {}), ("resumed", True, {"resume": "two"})):
        asked = {"fsdp_version": 2, "fsdp_config": {**FSDP2, "cpu_ram_efficient_loading": efficient}}
        if more:
            asked["resume_from_checkpoint"] = str(Path(even_settings(2, more["resume"])["output_dir"]) / "checkpoint-4")
        two = even_settings(2, name, **asked)
        status, output = launch(two, f"sys.path.insert(0, {str(Path(__file__).parent)!r}); import fsdp2_on_cpus")
        assert status == 0, output
        assert ("Calibrating" in output) == (not more)
        assert_equal_runs(one, two)


def test_two_processes_choose_by_the_gradient_that_one_has(even_settings, train, launch):
    """RoSA: U is held while the low-rank part warms up, then all choose from the sum of their gradients."""
    rosa = {"mask_score": "squared_gradient", "sparse_direction": "top", "supra_lambda": 0.5}
    rosa |= {"gradient_batches": 2, "low_rank_warmup_steps": 2}
    one, two = even_settings(1, "one", **rosa), even_settings(2, "two", **rosa)
    train(one)
    status, output = launch(two)
    assert status == 0, output
    torch.testing.assert_close(losses_in(one), losses_in(two), rtol=1e-4, atol=0)
    here, there = (read_adapter(each["output_dir"]) for each in (one, two))
    for name in here:
        if name.endswith("indices"):
            same = len(set(here[name].tolist()) & set(there[name].tolist()))
            assert same >= 0.99 * len(here[name]), name  # sums of another order may swap neighbours at the threshold
    configs = [PeftConfig.from_pretrained(each["output_dir"]) for each in (one, two)]
    assert configs[0].gradient == configs[1].gradient == {"batches": 2, "step": 2, "rows": 4, "seed": 0}


# Accelerate takes CPUs for no place for DeepSpeed, and transformers for none for bf16; and what DeepSpeed gathers into
# requires a gradient, which gloo's own gathering into one tensor cannot write to. The operator that is left out is
# compiled first, for a minute.
ON_CPUS = """
import importlib
import accelerate.state, deepspeed.comm, transformers.training_args
importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None  # as an attribute, it is torch itself
gloo = "gloo", accelerate.state.DistributedType.MULTI_GPU
accelerate.state.PartialState._prepare_backend = lambda self, *args, **kwargs: gloo
deepspeed.comm.has_all_gather_into_tensor = lambda: False
transformers.training_args.is_torch_bf16_gpu_available = lambda: True
"""


@pytest.fixture
def launch_deepspeed(launch):
    """`launch` with DeepSpeed on the CPU."""
    pytest.importorskip("deepspeed", reason="DeepSpeed is not installed (the extra `deepspeed`)")
    places = {"ACCELERATE_USE_CPU": "false", "ACCELERATE_TORCH_DEVICE": "cpu", "DS_ACCELERATOR": "cpu"}
    return lambda mapping, more="": launch(mapping, ON_CPUS + more, **places)


def zero(stage):
    return json.loads((PACKAGE / f"examples/deepspeed_zero{stage}.json").read_text())


def stages_in(checkpoint):
    """Of ZeRO, as each process's part of the optimizer in a checkpoint says."""
    parts = [torch.load(path, weights_only=False) for path in checkpoint.glob("global_step*/*optim_states.pt")]
    return [part["optimizer_state_dict"]["zero_stage"] for part in parts]


def test_zero_2_trains_as_one_process_and_resumes(even_settings, in_one_process, launch_deepspeed):
    one, two = in_one_process(), even_settings(2, "two", deepspeed=zero(2))
    status, output = launch_deepspeed(two)
    assert status == 0, output
    assert_equal_runs(one, two)
    checkpoint = Path(two["output_dir"]) / "checkpoint-4"
    assert stages_in(checkpoint) == [2, 2]

    resumed = even_settings(2, "resumed", deepspeed=zero(2), resume_from_checkpoint=str(checkpoint))
    status, output = launch_deepspeed(resumed)
    assert status == 0, output
    assert "Calibrating" not in output
    assert_equal_runs(two, resumed)


def test_zero_3_trains_as_one_process_resumes_and_merges(even_settings, train, launch_deepspeed, write):
    """No process holds a weight: calibration, the choice and every pass gather what they need."""
    from axolotl.cli.merge_lora import do_cli

    # Of three calibration batches the second process has one, and helps to gather for the third.
    one = even_settings(1, "one", calibration_samples=3)
    two = even_settings(2, "two", calibration_samples=3, deepspeed=zero(3))
    train(one)
    status, output = launch_deepspeed(two)
    assert status == 0, output
    assert "s in 2 processes" in output
    assert "; DeepSpeed gathers the weights in every pass" in output
    assert_equal_runs(one, two)
    norms = [ActivationNorms.load(Path(each["output_dir"]) / "activation_norms.safetensors") for each in (one, two)]
    assert norms[0].fingerprint == norms[1].fingerprint
    assert norms[0].provenance == norms[1].provenance
    assert all(torch.equal(norm, norms[1][layer]) for layer, norm in norms[0].norms.items())
    checkpoint = Path(two["output_dir"]) / "checkpoint-4"
    assert stages_in(checkpoint) == [3, 3]
    assert logged_in(one, "supertune/trainable_parameters") == logged_in(two, "supertune/trainable_parameters")
    assert logged_in(one, "supertune/adapter_mib") == logged_in(two, "supertune/adapter_mib")

    checkpointed = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}
    resumed = even_settings(
        2, "resumed", calibration_samples=3, deepspeed=zero(3), resume_from_checkpoint=str(checkpoint), **checkpointed
    )
    status, output = launch_deepspeed(resumed)
    assert status == 0, output
    assert "Calibrating" not in output
    assert_equal_runs(two, resumed)

    do_cli(config=write(two, "two.yml"))
    merged, plain = (
        AutoModelForCausalLM.from_pretrained(each) for each in (f"{two['output_dir']}/merged", one["base_model"])
    )
    changed = [name for name, each in merged.named_parameters() if not each.equal(plain.get_parameter(name))]
    assert len(changed) == 14, "every adapted layer, and nothing else, changes"


def test_a_checkpoint_of_another_engine_is_refused(tmp_path):
    """The Trainer itself would go on with a new optimizer."""
    checkpoint = tmp_path / "checkpoint-4"
    SupraConfig(mask_score="magnitude").save_pretrained(checkpoint)
    save_file({"U": torch.ones(1)}, checkpoint / "adapter_model.safetensors")
    for name in ("trainer_state.json", "optimizer.pt", "scheduler.pt"):
        (checkpoint / name).write_text("{}")
    asked = PeftConfig.from_pretrained(str(checkpoint))

    def resume(processes, stage=None, **more):
        engine = {"deepspeed": {"zero_optimization": {"stage": stage, **more}}} if stage else {}
        check_resume(DictDefault({"adapter": "supra"}), str(checkpoint), asked, engine_of(engine, processes))

    resume(2)
    with pytest.raises(ValueError, match=r"checkpoint-4 has no optimizer state of DeepSpeed.* Remove deepspeed"):
        resume(2, stage=2)
    parts = checkpoint / "global_step4"
    parts.mkdir()
    for rank in range(2):
        state = {"ds_config": {"zero_optimization": {"stage": 3, "sub_group_size": 1e9}}}
        torch.save(state, parts / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
        (checkpoint / f"rng_state_{rank}.pth").touch()
    (parts / "mp_rank_00_model_states.pt").touch()
    (checkpoint / "latest").write_text("global_step4")
    resume(2, stage=1)
    resume(2, stage=2)
    with pytest.raises(ValueError, match=r"in 2 parts, one a process, .*these are 4\. Start 2"):
        resume(4, stage=2)
    with pytest.raises(ValueError, match=r"the optimizer state in .*checkpoint-4 is DeepSpeed's\. Set deepspeed"):
        resume(2)
    with pytest.raises(ValueError, match=r"under ZeRO-1 or ZeRO-2, and .*stage: 3, .* to 1 or 2 .*: lora_model_dir: /"):
        resume(2, stage=3)
    (parts / "mp_rank_00_model_states.pt").unlink()
    with pytest.raises(ValueError, match=r"has no global_step4/mp_rank_00_model_states\.pt, .* Delete it"):
        resume(2, stage=2)
    for rank in range(2):
        (parts / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt").touch()
    resume(2, stage=3)
    resume(2, stage=3, sub_group_size=1000000000)
    with pytest.raises(ValueError, match=r"sub_group_size: 1000000000.0, and deepspeed says 100\. Set it back"):
        resume(2, stage=3, sub_group_size=100)
    for stage in (1, 2):
        with pytest.raises(ValueError, match=rf"was written under ZeRO-3, and .*stage: {stage}, .* Set it to 3 to"):
            resume(2, stage=stage)
    for lost in (parts / "zero_pp_rank_1_mp_rank_00_model_states.pt", checkpoint / "latest", *sorted(parts.iterdir())):
        kept = lost.read_bytes()
        lost.unlink()
        with pytest.raises(ValueError, match=rf"incomplete, it has no {lost.relative_to(checkpoint)}, .* Delete it to"):
            resume(2, stage=3)
        lost.write_bytes(kept)
    resume(2, stage=3)


@pytest.mark.parametrize(("had", "has"), [(None, 1e-4), (1e-4, None)])
def test_a_checkpoint_of_other_groups_of_parameters_is_refused(settings, train, had, has):
    """torch knows how many groups there are, and not which key makes one."""
    train(settings(max_steps=2, save_steps=2, eval_steps=None, mask_score="magnitude", sparse_lr=had))
    resumed = settings(max_steps=4, save_steps=2, eval_steps=None, mask_score="magnitude", sparse_lr=has)
    told = rf"sparse_lr: {has}, but the checkpoint .* was trained with {had or 'none'}: .* Set it back"
    with pytest.raises(ValueError, match=told):
        train({**resumed, "auto_resume_from_checkpoints": True})


SHOWS_DTYPES = """
import functools, transformers
forward = transformers.LlamaForCausalLM.forward
@functools.wraps(forward)
def shown(self, *args, **kwargs):
    out = forward(self, *args, **kwargs)
    layer = self.model.layers[0].mlp.up_proj
    kept = [layer.base_layer.weight, layer.supra_values["default"]]
    print("DTYPES", out.logits.dtype, *(getattr(each, "ds_tensor", each).dtype for each in kept))
    print("AT ONCE", [getattr(block, "_z3_leaf", False) for block in self.model.layers])
    return out
transformers.LlamaForCausalLM.forward = shown
"""


@pytest.mark.parametrize("stage", [1, 3])
def test_zero_computes_in_bf16_and_keeps_the_adapter_in_fp32(even_settings, launch_deepspeed, stage):
    # sparse_lr: the groups of the YAML's optimizer are DeepSpeed's too.
    more = {"sparse_lr": 1e-4}
    if stage == 3:
        more |= {"gradient_accumulation_steps": 2, "mask_score": "magnitude", "val_set_size": 0.1, "eval_steps": 8}
        more |= {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}
    mapping = even_settings(2, "two", bf16=True, deepspeed=zero(stage), **more)
    status, output = launch_deepspeed(mapping, SHOWS_DTYPES)
    assert status == 0, output
    assert stages_in(Path(mapping["output_dir"]) / "checkpoint-8") == [stage, stage]
    assert "DTYPES torch.bfloat16 torch.bfloat16 torch.float32" in output
    assert f"AT ONCE [False, {stage == 3}]" in output
    assert ("'eval_loss'" in output) == (stage == 3)
    saved = load_file(Path(mapping["output_dir"]) / "adapter_model.safetensors")
    largest = {kind: max(each.abs().max() for name, each in saved.items() if kind in name) for kind in ("values", "_L")}
    assert largest["values"] < 1e-3
    assert largest["_L"] > 1e-2
    values = torch.cat([each for name, each in saved.items() if "values" in name])
    assert values.dtype == torch.float32
    assert not values.equal(values.bfloat16().float()), "they were rounded"
    losses = losses_in(mapping)
    assert losses[-1] < losses[0]


def test_zero_3_in_bf16_calibrates_and_trains_as_one_process(even_settings, train, launch_deepspeed, monkeypatch):
    """zero.Init has rounded RoPE's frequencies to bf16: another base, at all but the first positions."""
    monkeypatch.setattr("transformers.training_args.is_torch_bf16_gpu_available", lambda: True)
    asked = {"bf16": True, "calibration_sequence_len": 64, "learning_rate": 1e-3}
    one, two = even_settings(1, "one", **asked), even_settings(2, "two", deepspeed=zero(3), **asked)
    train(one)
    status, output = launch_deepspeed(two)
    assert status == 0, output
    norms = [ActivationNorms.load(Path(each["output_dir"]) / "activation_norms.safetensors") for each in (one, two)]
    for layer, norm in norms[0].norms.items():
        torch.testing.assert_close(norms[1][layer], norm, rtol=1e-6, atol=0)
    here, there = losses_in(one), losses_in(two)
    torch.testing.assert_close(there[0], here[0], rtol=1e-5, atol=0)
    torch.testing.assert_close(there, here, rtol=2e-3, atol=0)  # as ZeRO-2's are


CASTS = """
from axolotl_supertune.engines.deepspeed import DeepSpeed
DeepSpeed.prepare_trainer = lambda self, trainer: None
"""


def test_an_adapter_that_deepspeed_has_cast_stops_the_run(even_settings, launch_deepspeed):
    status, output = launch_deepspeed(even_settings(2, "two", bf16=True, deepspeed=zero(2)), CASTS)
    assert status != 0
    assert "q_proj.supra_values has become torch.bfloat16: U, L and R are trained in fp32" in output


FAILS = """
import axolotl_supertune.plugin.calibrate as calibrate
def fail(*args, **kwargs): raise MemoryError("no memory on this card")
if os.environ["RANK"] == "1": calibrate.calibrate = fail
"""


def test_one_process_that_fails_ends_all_with_its_error(settings, launch):
    mapping = settings(max_memory={"cpu": "8GiB"}, val_set_size=0, eval_steps=None)
    status, output = launch(mapping, more=FAILS, launcher=True)
    assert status != 0
    assert "MemoryError: no memory on this card" in output
    assert "process 1 of 2 failed while loading the adapter: MemoryError: no memory on this card" in output
    assert not (Path(mapping["output_dir"]) / "activation_norms.safetensors").exists()


DAMAGED = """
from axolotl_supertune import ActivationNorms
def damaged(path):
    raise ValueError(f"{path} is not a readable safetensors file (damaged)")
if os.environ["RANK"] == "1": ActivationNorms.load = damaged
"""


@pytest.mark.parametrize("engine", ["DDP", "ZeRO-3"])
def test_norms_that_one_process_cannot_read_end_all(even_settings, launch, launch_deepspeed, tmp_path, engine):
    """Before the base is loaded, which the processes of ZeRO-3 do together."""
    path = tmp_path / "norms.safetensors"
    ActivationNorms({"layer": torch.ones(1)}, "", {}).save(path)
    mapping = {key: value for key, value in even_settings(2, "two").items() if not key.startswith("calibration_")}
    mapping["calibration_path"] = str(path)
    if engine == "ZeRO-3":
        status, output = launch_deepspeed({**mapping, "deepspeed": zero(3)}, DAMAGED)
    else:
        status, output = launch(mapping, DAMAGED)
    assert status != 0
    told = f"{path} is not a readable safetensors file (damaged)"
    assert f"process 1 of 2 failed while reading calibration_path: ValueError: {told}" in output


class Alike(Processes):
    """Two processes of which this is one and `other` is what the other one would say."""

    def __init__(self, other):
        super().__init__(1.0, "")
        self.world, self._other = 2, other

    def gather(self, value):
        return [value, self._other(value)]


def test_unequal_supports_are_an_error_that_names_the_layer(adapted):
    check_same_everywhere(adapted, Alike(lambda digests: digests))
    layer = "base_model.model.model.layers.1.self_attn.v_proj"
    other = lambda digests: {**digests, layer: {**digests[layer], "supra_indices": ""}}  # noqa: E731
    with pytest.raises(ValueError, match=rf"{layer}: supra_indices of process 1 is not that of process 0"):
        check_same_everywhere(adapted, Alike(other))


@pytest.mark.parametrize(
    ("device", "weights", "chosen_on"),
    [("cuda:1", "cpu", "cuda:1"), ("cuda:1", "meta", None), ("cpu", "cpu", None), ("mps", "cpu", None)],
)
def test_supports_of_a_model_on_the_cpu_are_chosen_on_the_process_s_gpu(base, monkeypatch, device, weights, chosen_on):
    from axolotl.utils.dict import DictDefault

    from axolotl_supertune.plugin import create
    from axolotl_supertune.plugin.validation import prepare

    class Seen(Exception):
        pass

    def get_peft_model(model, config):
        raise Seen(config.support_device)

    monkeypatch.setattr(create, "get_peft_model", get_peft_model)
    cfg = DictDefault({"adapter": "supra", "mask_score": "magnitude", "seed": 0, "lora_target_linear": True})
    prepare(cfg, cfg.keys())
    cfg.device = device
    model = AutoModelForCausalLM.from_pretrained(base).to(weights)
    with pytest.raises(Seen) as seen:
        create.make_adapter(model, cfg, Processes(1.0, ""), pytest.fail)
    assert seen.value.args == (chosen_on,)


@pytest.fixture
def adapted(base):
    from peft import get_peft_model

    config = SupraConfig(mask_score="magnitude", task_type="CAUSAL_LM", modules_to_save=["embed_tokens"])
    return get_peft_model(AutoModelForCausalLM.from_pretrained(base), config)


@pytest.mark.parametrize("wrapper", ["plain", "DDP", "checkpointed"])
def test_a_whole_save_passes(adapted, tmp_path, wrapper):
    adapted.save_pretrained(tmp_path)
    model = adapted
    if wrapper == "DDP":
        model = torch.nn.Module()
        model.module = adapted
    if wrapper == "checkpointed":
        from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

        layers = adapted.base_model.model.model.layers
        layers[0] = checkpoint_wrapper(layers[0])
    assert adapter_tensors(model).keys() == read_adapter(tmp_path).keys()
    check_saved(model, tmp_path)


KEY = "base_model.model.model.layers.1.mlp.up_proj.supra_"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda saved: saved.pop(f"{KEY}L"), r"up_proj\.supra_L is missing\."),
        (lambda saved: saved.update({f"{KEY}R": saved[f"{KEY}R"][:1]}), r"supra_R has shape \(1, 64\), the model's"),
        (lambda saved: saved.update({f"{KEY}values": saved[f"{KEY}values"][:5]}), r"supra_values has shape \(5,\)"),
        (lambda saved: saved[f"{KEY}indices"].add_(1), r"supra_indices has other values"),
        (lambda saved: saved.update({"lora_A": torch.ones(1)}), r"lora_A is not the model's"),
        (
            lambda saved: [saved.pop(name) for name in list(saved) if ".layers.0." in name],
            r"is missing \(\d\d tensors are wrong\)",
        ),
    ],
)
def test_a_lost_shard_is_an_error(adapted, tmp_path, damage, message):
    adapted.save_pretrained(tmp_path)
    path = tmp_path / "adapter_model.safetensors"
    saved = read_adapter(tmp_path)
    damage(saved)
    save_file(saved, path)
    with pytest.raises(RuntimeError, match=message):
        check_saved(adapted, tmp_path)


def test_a_checkpoint_that_another_adapter_came_out_of_stops_the_run(trained, train, monkeypatch):
    from axolotl.core.trainers.base import AxolotlTrainer

    mapping = trained(max_steps=2, save_steps=2, eval_steps=None).mapping

    def damaging(self, *args, **kwargs):
        original(self, *args, **kwargs)
        layer = self.model.base_model.model.model.layers[1].mlp.up_proj
        layer.supra_values["default"].data[0] += 1e-3

    original = AxolotlTrainer._load_from_checkpoint
    monkeypatch.setattr(AxolotlTrainer, "_load_from_checkpoint", damaging)
    with pytest.raises(RuntimeError, match=r"checkpoint-2/adapter_model\.safetensors is not .*up_proj\.supra_values "):
        train({**mapping, "max_steps": 4, "auto_resume_from_checkpoints": True})


@pytest.mark.parametrize("where", ["checkpoint-2", "adapter"])
def test_a_save_that_loses_a_shard_stops_the_run(settings, train, monkeypatch, where):
    from peft import PeftModel

    original = PeftModel.save_pretrained

    def lossy(self, folder, *args, **kwargs):
        original(self, folder, *args, **kwargs)
        if Path(folder).name == where:
            path = Path(folder) / "adapter_model.safetensors"
            saved = load_file(path)
            saved.pop(f"{KEY}R")
            save_file(saved, path)

    monkeypatch.setattr(PeftModel, "save_pretrained", lossy)
    with pytest.raises(
        RuntimeError, match=rf"{where}/adapter_model\.safetensors is not the adapter .*supra_R is missing"
    ):
        train(settings(max_steps=2, save_steps=2, eval_steps=None))
