"""Tokens a second of `axolotl train` on 1, 2, 4, … GPUs, for each engine, Supra and Super beside LoRA.

    python tests/gpu/measure_scaling.py --gpus 1,2,4 --output scaling.json      # exit code 1 if a run failed
    python tests/gpu/measure_scaling.py --gpus 1 --each-on-one                  # what each engine costs on one

Weights and tokens are random; every record is as long as it may be, and every GPU has the same micro batch, so that
efficiency is tokens a second over GPUs × what one GPU does. What is read is Axolotl's `tokens/train_per_sec_per_gpu`,
which all methods log, from the steps after the warm-up; a run's number is the median over its logs. Of our methods the
peak memory of a GPU stands beside what `axolotl supertune plan` says of it.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from measure_plan import make_base, planned

FSDP2 = {
    "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    "transformer_layer_cls_to_wrap": "LlamaDecoderLayer",
    "reshard_after_forward": True,
    "state_dict_type": "FULL_STATE_DICT",
}
# How the keys of an engine differ from those of one GPU.
EXAMPLES = Path(__file__).parents[2] / "examples"
ALONE = "one GPU"
ENGINES = {
    "ddp": {},
    "fsdp2": {"fsdp_version": 2, "fsdp_config": FSDP2},
    "zero2": {"deepspeed": json.loads((EXAMPLES / "deepspeed_zero2.json").read_text())},
    "zero3": {"deepspeed": json.loads((EXAMPLES / "deepspeed_zero3.json").read_text())},
}
ADAPTER = {"lora_r": 8, "lora_alpha": 16, "lora_dropout": 0.05}
METHODS = {
    # Hardly more than a model that trains nothing: one layer's adapter, the gradient through all others.
    "floor": {
        "adapter": "lora",
        "lora_r": 1,
        "lora_alpha": 16,
        "lora_target_modules": r"model\.layers\.0\.self_attn\.q_proj",
        **dict.fromkeys(("lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel"), False),
    },
    "lora": {**ADAPTER, "adapter": "lora", "lora_target_linear": True},
    "supra": {**ADAPTER, "adapter": "supra", "supra_lambda": 0.8, "mask_score": "magnitude"},
    "super": {"lora_r": 8, "adapter": "super", "mask_score": "magnitude"},
}
PLUGIN = "axolotl_supertune.SupertunePlugin"
EVERY, LOGS, WARM_UP = 5, 8, 3
STEPS = EVERY * LOGS


def make_records(path, length, vocabulary, count):
    draw = random.Random(0)
    with path.open("w") as file:
        for _ in range(count):
            ids = [draw.randrange(3, vocabulary) for _ in range(length)]
            file.write(json.dumps({"input_ids": ids, "attention_mask": [1] * length, "labels": ids}) + "\n")


def mapping_of(method, engine, base, data, folder, arguments):
    """The YAML's mapping of a run."""
    return {
        "base_model": str(base),
        **({} if METHODS[method]["adapter"] == "lora" else {"plugins": [PLUGIN]}),
        **METHODS[method],
        **ENGINES.get(engine, {}),
        "datasets": [{"path": str(data), "ds_type": "json"}],
        "dataset_prepared_path": str(folder / "prepared"),
        "output_dir": str(folder / "adapter"),
        "val_set_size": 0,
        "micro_batch_size": arguments.micro_batch_size,
        "gradient_accumulation_steps": 1,
        "sequence_len": arguments.sequence_len,
        "gradient_checkpointing": arguments.gradient_checkpointing,
        "max_steps": STEPS,
        "save_steps": STEPS,
        "logging_steps": EVERY,
        "learning_rate": 1e-4,
        "lr_scheduler": "constant",
        "optimizer": "adamw_torch_fused",
        "seed": 0,
        # On CPUs the script can be tried; the numbers say nothing.
        **({"bf16": True} if torch.cuda.is_available() else _on_cpus(method)),
        "attn_implementation": "sdpa",
    }


def train(mapping, gpus, folder, *, launched):
    """(tokens a second of all GPUs together, GiB at the peak of one GPU or None); `launched` is by torch's launcher.

    Raises:
        RuntimeError: the training failed; the message ends with its last lines.
    """
    path = folder / "run.yml"
    path.write_text(json.dumps(mapping))  # JSON is YAML
    visible = ",".join(map(str, range(gpus)))
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": visible, "AXOLOTL_DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1"}
    if not mapping["bf16"]:
        environment["ACCELERATE_USE_CPU"] = "true"
    several = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(gpus)] if launched else []
    command = [sys.executable, *several, "-m", "axolotl.cli.train", str(path)]
    ran = subprocess.run(command, env=environment, text=True, capture_output=True, check=False)
    if ran.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {ran.returncode}: {(ran.stdout + ran.stderr)[-3000:]}")
    state = json.loads((Path(mapping["output_dir"]) / f"checkpoint-{STEPS}/trainer_state.json").read_text())
    rates = [float(entry[key]) for entry in state["log_history"] if (key := "tokens/train_per_sec_per_gpu") in entry]
    peaks = [entry[key] for entry in state["log_history"] if (key := "supertune/peak_memory_gib") in entry]
    return gpus * statistics.median(rates[WARM_UP:]), max(peaks, default=None)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", default="1,2", help="numbers of GPUs, with commas; the first is what others go by")
    parser.add_argument("--engines", default=",".join(ENGINES))
    parser.add_argument("--each-on-one", action="store_true", help="on one GPU, too, each engine, after none")
    parser.add_argument("--methods", default="lora,supra")
    parser.add_argument("--shape", default="llama3.2-1b", help="of axolotl_supertune.bench.measurement.SHAPES")
    parser.add_argument("--micro-batch-size", type=int, default=8)
    parser.add_argument("--sequence-len", type=int, default=512)
    parser.add_argument("--gradient-checkpointing", action="store_true")
    parser.add_argument("--output", type=Path, help="write the rows as JSON")
    arguments = parser.parse_args()
    counts = [int(count) for count in arguments.gpus.split(",")]
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        vocabulary = make_base(folder / "base", arguments.shape)
        data = folder / "data.jsonl"
        make_records(data, arguments.sequence_len, vocabulary, arguments.micro_batch_size * max(counts) * (STEPS + 1))
        for method in arguments.methods.split(","):
            one = None
            runs = [(engine, gpus) for gpus in counts for engine in _engines(arguments, gpus)]
            for engine, gpus in runs:
                place = folder / f"{method}-{engine}-{gpus}".replace(" ", "_")
                place.mkdir()
                mapping = mapping_of(method, engine, folder / "base", data, place, arguments)
                row = {"method": method, "engine": engine, "gpus": gpus, "tokens_per_second": None, "error": None}
                try:
                    row["tokens_per_second"], row["peak_gib"] = train(mapping, gpus, place, launched=engine != ALONE)
                    if row["peak_gib"]:
                        row["planned_gib"] = planned(mapping, gpus)
                except (RuntimeError, ValueError) as error:
                    row["error"] = str(error)
                rate = row["tokens_per_second"]
                one = one or (rate and rate / gpus)
                row["efficiency"] = rate and one and rate / gpus / one
                rows.append(row)
                said = f"{rate:,.0f} tokens/s, efficiency {row['efficiency']:.2f}" if rate else row["error"][-2000:]
                if row.get("planned_gib"):
                    said += f", peak {row['peak_gib']:.2f} GiB, planned {row['planned_gib']:.2f}"
                print(f"{method} | {engine} | {gpus}: {said}", flush=True)
                if arguments.output:
                    arguments.output.write_text(json.dumps(rows, indent=2) + "\n")
    return 0 if all(row["tokens_per_second"] for row in rows) else 1


def _on_cpus(method):
    kernels = ("lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel") if method == "lora" else ()
    return dict.fromkeys(("bf16", "fp16", "tf32", *kernels), False)


def _engines(arguments, gpus):
    engines = arguments.engines.split(",")
    return engines if gpus > 1 else [ALONE, *(engines if arguments.each_on_one else [])]


if __name__ == "__main__":
    sys.exit(main())
