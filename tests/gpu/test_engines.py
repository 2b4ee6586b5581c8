"""`axolotl train` on several GPUs, under every engine that is not refused: what one GPU gives with that global batch.

Each run is a process of its own, as a user starts it. Dropout is off, whose masks depend on the process, and every
answer has one length, since Axolotl averages the mean losses of the processes.

With SUPERTUNE_ONE_GPU=1 the processes share one GPU, and talk by gloo (ZeRO-3 ran so; FSDP2 has not yet).
"""

import json
import os
import socket
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import axolotl_runs
import pytest
import torch
from packaging.version import Version

PACKAGE = Path(__file__).parents[2]
FIXTURES = ("base", "fresh_plugins", "problems", "session_folder", "settings", "write")
base, fresh_plugins, problems, session_folder, settings, write = (getattr(axolotl_runs, name) for name in FIXTURES)

FSDP2 = {
    "fsdp_version": 2,
    "fsdp_config": {
        "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "transformer_layer_cls_to_wrap": "LlamaDecoderLayer",
        "reshard_after_forward": True,
        "state_dict_type": "FULL_STATE_DICT",
    },
}
ZERO = {stage: json.loads((PACKAGE / f"examples/deepspeed_zero{stage}.json").read_text()) for stage in (1, 2, 3)}
ENGINES = {
    "ddp": {},
    "fsdp2": {**FSDP2, "fsdp_config": {**FSDP2["fsdp_config"], "cpu_ram_efficient_loading": False}},
    "fsdp2-efficient": {**FSDP2, "fsdp_config": {**FSDP2["fsdp_config"], "cpu_ram_efficient_loading": True}},
    "zero1": {"deepspeed": ZERO[1]},
    "zero2": {"deepspeed": ZERO[2]},
    "zero3": {"deepspeed": ZERO[3]},
}
GLOBAL_BATCH = 8
WORLDS = [2, 4]
ONE_GPU = os.environ.get("SUPERTUNE_ONE_GPU") == "1"


def needs(engine, processes):
    gpus = 1 if ONE_GPU else processes
    if torch.cuda.device_count() < gpus:
        pytest.skip(f"{gpus} GPUs are needed, this machine has {torch.cuda.device_count()}")
    if engine.startswith("fsdp2") and Version(version("axolotl")) < Version("0.21"):
        pytest.skip("FSDP2 is refused before Axolotl 0.21")
    if engine.startswith("zero"):
        pytest.importorskip("deepspeed", reason="DeepSpeed is not installed (the extra `deepspeed`)")


@pytest.fixture(scope="module")
def even(problems, tmp_path_factory):
    """The word problems, with one answer."""
    data = tmp_path_factory.mktemp("even") / "even.jsonl"
    records = [json.loads(line) for line in problems[0].read_text().splitlines()]
    data.write_text("".join(json.dumps({**record, "output": "The answer is seven."}) + "\n" for record in records))
    return data


@pytest.fixture
def make(settings, even, tmp_path):
    """A function (name, engine, processes, **changes) → the YAML mapping of a run into tmp_path/name."""

    def make(name, engine, processes, **changes):
        return settings(
            datasets=[{"path": str(even), "type": "alpaca"}],
            output_dir=str(tmp_path / name),
            micro_batch_size=GLOBAL_BATCH // processes,
            calibration_batch_size=1,
            val_set_size=0,
            eval_steps=None,
            lora_dropout=0.0,
            **ENGINES[engine],
            **changes,
        )

    return make


TRAIN = """
import os, runpy, signal
if {one_gpu}:
    import gloo_on_one_gpu
from transformers import TrainerCallback
from axolotl_supertune import SupertunePlugin

class Kill(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == {kill_at} and os.environ.get("RANK") == "1":
            os.kill(os.getpid(), signal.SIGKILL)

add = SupertunePlugin.add_callbacks_post_trainer
SupertunePlugin.add_callbacks_post_trainer = lambda *args: [*add(*args), Kill()]
runpy.run_module("axolotl.cli.train", run_name="__main__", alter_sys=True)
"""


@pytest.fixture
def run(write, tmp_path):
    """A function (mapping, processes, kill_at) → (exit status, output) of `axolotl train`.

    The second process is killed after step `kill_at`.
    """

    def run(mapping, processes, kill_at=-1):
        script = tmp_path / "train.py"
        script.write_text(TRAIN.format(kill_at=kill_at, one_gpu=ONE_GPU and processes > 1))
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
        command = [sys.executable, *(launcher if processes > 1 else []), str(script), write(mapping)]
        clean = {key: value for key, value in os.environ.items() if key != "ACCELERATE_USE_CPU"}
        own = {
            "PYTHONPATH": f"{PACKAGE}:{PACKAGE / 'tests/gpu'}:{os.environ.get('PYTHONPATH', '')}",
            "CUDA_VISIBLE_DEVICES": "0" if ONE_GPU else ",".join(map(str, range(processes))),
            "AXOLOTL_NCCL_TIMEOUT": "120",
        }
        ran = subprocess.run(
            command,
            env={**clean, **own},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=400,
        )
        return ran.returncode, ran.stdout

    return run


@pytest.fixture
def finish(run):
    """A function (mapping, processes) → losses of the run, which ended well."""

    def finish(mapping, processes):
        status, output = run(mapping, processes)
        assert status == 0, output[-8000:]
        state = json.loads((Path(mapping["output_dir"]) / "checkpoint-8/trainer_state.json").read_text())
        return torch.tensor([entry["loss"] for entry in state["log_history"] if "loss" in entry])

    return finish


@pytest.fixture(scope="module")
def finished():
    """What `whole` has trained: several tests look at the same run."""
    return {}


@pytest.fixture
def whole(make, finish, finished, tmp_path_factory):
    """A function (engine, processes, bf16) → (mapping, losses) of a run that nothing disturbed."""

    def whole(engine, processes, bf16=False):
        key = (engine if processes > 1 else "ddp", processes, bf16)
        if key not in finished:
            mapping = make("whole", key[0], processes, bf16=bf16)
            mapping["output_dir"] = str(tmp_path_factory.mktemp("whole") / "adapter")
            finished[key] = mapping, finish(mapping, processes)
        return finished[key]

    return whole


def adapter_of(mapping, checkpoint=""):
    from axolotl_supertune.tuner import read_adapter

    return read_adapter(Path(mapping["output_dir"]) / checkpoint)


def assert_same_adapter(one, two, atol):
    assert one.keys() == two.keys()
    assert max(tensor.abs().max() for name, tensor in one.items() if "supra_values" in name) > 0.01
    for name, tensor in one.items():
        if tensor.is_floating_point():
            assert tensor.dtype == two[name].dtype == torch.float32
            torch.testing.assert_close(two[name], tensor, rtol=0, atol=atol)
        else:
            assert torch.equal(two[name], tensor), name


# Losses are near 6. In fp32 the sums alone differ in their order; in bf16 the rounding of every activation does.
TOLERANCES = {False: {"rtol": 1e-4, "atol": 5e-3}, True: {"rtol": 5e-3, "atol": 3e-2}}


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("processes", WORLDS)
@pytest.mark.parametrize("engine", ENGINES)
def test_an_engine_trains_as_one_gpu_does(whole, engine, processes, bf16):
    needs(engine, processes)
    (one, expected), (several, found) = whole("ddp", 1, bf16), whole(engine, processes, bf16)
    torch.testing.assert_close(found, expected, rtol=TOLERANCES[bf16]["rtol"], atol=0)
    assert found[-1] < found[0]
    assert_same_adapter(adapter_of(one), adapter_of(several), TOLERANCES[bf16]["atol"])
    final, last = adapter_of(several), adapter_of(several, "checkpoint-8")
    assert final.keys() == last.keys()
    assert all(torch.equal(tensor, last[name]) for name, tensor in final.items())


@pytest.mark.parametrize("engine", ENGINES)
def test_a_killed_run_goes_on(make, run, finish, whole, engine):
    needs(engine, 2)
    undisturbed, expected = whole(engine, 2)
    killed = make("killed", engine, 2, auto_resume_from_checkpoints=True)
    status, output = run(killed, 2, kill_at=6)
    assert status != 0, output[-4000:]
    assert not (Path(killed["output_dir"]) / "adapter_model.safetensors").exists()
    torch.testing.assert_close(finish(killed, 2), expected, rtol=1e-4, atol=0)
    assert_same_adapter(adapter_of(undisturbed), adapter_of(killed), 5e-3)


@pytest.mark.parametrize("processes", [1, 4])
@pytest.mark.parametrize("engine", ENGINES)
def test_a_run_goes_on_with_another_number_of_processes(make, finish, whole, engine, processes):
    needs(engine, max(2, processes))
    if processes == 1 and engine != "ddp":
        pytest.skip("one process does not shard")
    if engine.startswith("zero"):
        pytest.skip("refused: DeepSpeed loads an optimizer state in as many processes as wrote it")
    first, expected = whole(engine, 2)
    checkpoint = str(Path(first["output_dir"]) / "checkpoint-4")
    second = make("second", engine, processes, resume_from_checkpoint=checkpoint)
    torch.testing.assert_close(finish(second, processes), expected, rtol=1e-4, atol=0)
    assert_same_adapter(adapter_of(first), adapter_of(second), 5e-3)


@pytest.mark.parametrize("engine", ENGINES)
def test_what_an_engine_saved_merges_and_loads(whole, engine, write):
    needs(engine, 2)
    from transformers import AutoModelForCausalLM

    mapping, _ = whole(engine, 2)
    own = {"CUDA_VISIBLE_DEVICES": "0", "PYTHONPATH": f"{PACKAGE}:{os.environ.get('PYTHONPATH', '')}"}
    with socket.socket() as free:  # with `deepspeed:` in the YAML a merge listens, too; another one may run beside it
        free.bind(("127.0.0.1", 0))
        own["MASTER_PORT"] = str(free.getsockname()[1])
    merge = [sys.executable, "-m", "axolotl.cli.merge_lora", write(mapping, "several.yml")]
    subprocess.run(merge, env={**os.environ, **own}, check=True, timeout=300)
    merged = AutoModelForCausalLM.from_pretrained(Path(mapping["output_dir"]) / "merged")
    plain = AutoModelForCausalLM.from_pretrained(mapping["base_model"])
    changed = [name for name, each in merged.named_parameters() if not each.equal(plain.get_parameter(name))]
    assert len(changed) == 14, "every adapted layer, and nothing else, changes"


def test_streamed_calibration_has_one_layer_on_the_device(tiny_llama):
    from axolotl_supertune import calibrate
    from axolotl_supertune.method.cuda_memory import PeakMemory
    from axolotl_supertune.method.layerwise import streamed

    changes = {"num_hidden_layers": 16, "hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 4}
    model = tiny_llama(dtype=torch.bfloat16, **changes)
    layer = sum(each.nbytes for each in model.model.layers[0].parameters())
    rest = sum(each.nbytes for each in model.parameters()) - 16 * layer
    ids = torch.randint(0, 97, (2, 32), generator=torch.Generator().manual_seed(0))
    memory = PeakMemory(torch.device("cuda"))
    with streamed(model, "cuda"):
        norms = calibrate(model, [ids], progress=False)
    peak = memory.read() - memory.before
    assert peak < rest + 2 * layer + 32 * 2**20, "cuBLAS's workspace and the activations are the rest"
    assert all(each.device.type == "cpu" for each in model.parameters())
    whole = calibrate(model.cuda(), [ids], progress=False)
    assert norms.fingerprint == whole.fingerprint
    assert all(torch.equal(norm, whole[name]) for name, norm in norms.norms.items())
