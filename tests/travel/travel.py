"""Adapters that travel: trained by `axolotl train` in one environment, loaded, merged and trained on in another.

    python tests/travel/travel.py PYTHON PYTHON [--fixtures]

Each PYTHON is the interpreter of an environment that can import this package and an Axolotl of its own. In both
directions a Supra adapter (λ = 0.5, wanda) and a Super one are trained for four steps on a tiny fp32 Llama, on the CPU,
and the other environment must find

- the same logits with the adapter and with it merged (absolute difference ≤ LOGITS), and the same adapter, bit for bit;
- the same final adapter (≤ RESUMED, of numbers that training moved by 1e-2) when it goes on from the second step.

Exit code 0 if all of this holds. `--fixtures` writes what was trained to tests/fixtures/travel, from where
tests/tuner/test_travel.py loads it in CI.
"""

import argparse
import json
import os
import runpy
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
LOGITS = 1e-5
RESUMED = 1e-5

METHODS = {
    "supra": {"adapter": "supra", "supra_lambda": 0.5, "mask_score": "wanda"},
    "super": {"adapter": "super", "mask_score": "wanda"},
}


def settings(folder, method, output):
    """The YAML of a run of four steps, with a checkpoint at the second."""
    return {
        **METHODS[method],
        "base_model": str(folder / "base"),
        "plugins": ["axolotl_supertune.SupertunePlugin"],
        "lora_r": 2,
        "lora_dropout": 0.05,
        "calibration_dataset": str(folder / "text.txt"),
        "calibration_samples": 4,
        "calibration_sequence_len": 64,
        "datasets": [{"path": str(folder / "problems.jsonl"), "type": "alpaca"}],
        "dataset_prepared_path": str(output) + ".prepared",
        "dataset_num_proc": 1,
        "output_dir": str(output),
        "sequence_len": 256,
        "micro_batch_size": 2,
        "gradient_accumulation_steps": 1,
        "max_steps": 4,
        "save_steps": 2,
        "logging_steps": 1,
        "learning_rate": 5e-3,
        "lr_scheduler": "constant",
        "warmup_steps": 0,
        "optimizer": "adamw_torch",
        "seed": 0,
        "bf16": False,
        "fp16": False,
        "tf32": False,
        "dataloader_pin_memory": False,
        "dataloader_num_workers": 0,
        "attn_implementation": "sdpa",
    }


def make_inputs(folder):
    """The base with a tokenizer, training data and calibration text."""
    from base import make_base
    from tokenizers import ByteLevelBPETokenizer
    from transformers import PreTrainedTokenizerFast

    make_base().save_pretrained(folder / "base")
    trained = ByteLevelBPETokenizer()
    problems = runpy.run_path(str(ROOT / "tests/shared/word_problems.py"))
    trained.train_from_iterator(problems["lines"](), vocab_size=400, special_tokens=["<pad>", "<s>", "</s>"])
    PreTrainedTokenizerFast(
        tokenizer_object=trained._tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    ).save_pretrained(folder / "base")
    records = problems["records"](seed=1, count=48)
    (folder / "problems.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (folder / "text.txt").write_text("\n".join(f"{each['instruction']} {each['output']}" for each in records))


def look(adapters, output):
    """Of each adapter folder: its tensors as loaded, and the logits with it and with it merged, into `output`."""
    import torch
    from base import logits, make_base
    from peft import PeftModel, get_peft_model_state_dict

    import axolotl_supertune.tuner  # noqa: F401

    found = {}
    for adapter in adapters:
        model = PeftModel.from_pretrained(make_base(), adapter)
        found[str(adapter)] = {
            "tensors": get_peft_model_state_dict(model),
            "logits": logits(model),
            "merged": logits(model.merge_and_unload()),
        }
    torch.save(found, output)


def versions():
    from importlib.metadata import version

    print(", ".join(f"{name} {version(name)}" for name in ("axolotl", "peft", "transformers", "torch")))


def run(python, *arguments):
    """A command of an environment; its output is shown where it fails."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "HF_HUB_OFFLINE": "1",
        "AXOLOTL_DO_NOT_TRACK": "1",
        "ACCELERATE_USE_CPU": "true",
        "CUDA_VISIBLE_DEVICES": "",
        "TOKENIZERS_PARALLELISM": "false",
        "OMP_NUM_THREADS": "1",
    }
    command = [python, *map(str, arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{(done.stdout + done.stderr)[-6000:]}")
    return done.stdout


def train(python, config, path):
    import yaml

    path.write_text(yaml.safe_dump(config))
    run(python, "-m", "axolotl.cli.train", path)


def farthest(found, expected):
    """The largest difference of two dicts of tensors with equal keys, shapes and dtypes."""
    assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
    for name, tensor in expected.items():
        assert found[name].shape == tensor.shape, name
        assert found[name].dtype == tensor.dtype, name
    return max(float((found[name].double() - expected[name].double()).abs().max()) for name in expected)


def one_way(folder, writer, reader):
    """Train with `writer`, go on with `reader`, load with both. Returns whether everything agrees."""
    import torch

    folder.mkdir()
    for method in METHODS:
        whole, resumed = folder / method, folder / f"{method}-resumed"
        train(writer, settings(folder.parent, method, whole), folder / f"{method}.yml")
        shutil.copytree(whole / "checkpoint-2", resumed / "checkpoint-2")
        goes_on = {"resume_from_checkpoint": str(resumed / "checkpoint-2")}
        train(reader, {**settings(folder.parent, method, resumed), **goes_on}, folder / f"{method}-resumed.yml")
    kinds = ("", "-resumed", "-resumed/checkpoint-2")
    adapters = [folder / f"{method}{kind}" for method in METHODS for kind in kinds]
    for name, python in (("writer", writer), ("reader", reader)):
        run(python, __file__, "look", folder / f"{name}.pt", *adapters)
    there, here = (torch.load(folder / f"{name}.pt") for name in ("writer", "reader"))
    agrees = True
    for method in METHODS:
        expected, found = there[str(folder / method)], here[str(folder / method)]
        resumed = here[str(folder / f"{method}-resumed")]
        halfway = here[str(folder / f"{method}-resumed" / "checkpoint-2")]
        assert (folder / f"{method}-resumed" / "checkpoint-4").is_dir(), "the resumed run took no steps"
        assert farthest(halfway["tensors"], expected["tensors"]) > 1e-3, "the last two steps trained nothing"
        for what, difference, most in (
            ("loaded: tensors", farthest(found["tensors"], expected["tensors"]), 0.0),
            ("loaded: logits", float((found["logits"] - expected["logits"]).abs().max()), LOGITS),
            ("merged: logits", float((found["merged"] - expected["merged"]).abs().max()), LOGITS),
            ("resumed: tensors", farthest(resumed["tensors"], expected["tensors"]), RESUMED),
            ("resumed: logits", float((resumed["logits"] - expected["logits"]).abs().max()), LOGITS),
        ):
            agrees &= difference <= most
            print(f"  {method:6} {what:17} {difference:.1e} {'≤' if difference <= most else 'ABOVE'} {most:.0e}")
    return agrees


def keep(folder, method, name, there):
    """A trained adapter as a fixture, with the logits where it was trained."""
    from safetensors.torch import save_file

    place = ROOT / "tests/fixtures/travel" / name
    place.mkdir(parents=True, exist_ok=True)
    for file in ("adapter_config.json", "adapter_model.safetensors"):
        shutil.copy(folder / method / file, place)
    config = place / "adapter_config.json"
    text = config.read_text().replace(str(folder.parent / "base"), "base").replace(str(folder.parent) + "/", "")
    config.write_text(text)
    last = {key: there[str(folder / method)][key][-1].clone() for key in ("logits", "merged")}
    save_file(last, place / "logits.safetensors")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("python", nargs=2)
    parser.add_argument("--fixtures", action="store_true")
    arguments = parser.parse_args()
    agrees = True
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make = "import sys, pathlib, travel; travel.make_inputs(pathlib.Path(sys.argv[1]))"
        run(arguments.python[0], "-c", f"import sys; sys.path.insert(0, {str(HERE)!r}); {make}", folder)
        said = [run(python, __file__, "versions").strip() for python in arguments.python]
        for way, (writer, reader) in enumerate(((0, 1), (1, 0))):
            print(f"written by {said[writer]}\nread by    {said[reader]}", flush=True)
            place = folder / f"way{way}"
            agrees &= one_way(place, arguments.python[writer], arguments.python[reader])
            if arguments.fixtures:
                import torch

                axolotl = said[writer].split(",")[0].replace(" ", "-")
                for method in METHODS:
                    keep(place, method, f"{axolotl}-{method}", torch.load(place / "writer.pt"))
    return 0 if agrees else 1


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["versions"]:
            versions()
        case ["look", output, *adapters]:
            look([Path(adapter) for adapter in adapters], output)
        case _:
            sys.exit(main())
