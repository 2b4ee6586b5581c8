"""Peak memory of short `axolotl train` runs on a GPU, beside what `axolotl supertune plan` says of the same YAML.

    python tests/gpu/measure_plan.py --output plan_measured.json        # exit code 1 if one is off by more than 10 %

Weights and tokens are random, at the shape of Llama-3.2-1B; nothing is downloaded. What is measured is the callback's
`supertune/peak_memory_gib`, `torch.cuda.max_memory_allocated` since training began.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path

CASES = {
    "supra": {"micro_batch_size": 16, "sequence_len": 256},
    "supra, gradient checkpointing": {"micro_batch_size": 16, "sequence_len": 256, "gradient_checkpointing": True},
    "super, packed to 4096": {
        "adapter": "super",
        "micro_batch_size": 2,
        "sequence_len": 4096,
        "sample_packing": True,
        "eval_sample_packing": False,
    },
    "supra on 4 bits": {
        "micro_batch_size": 16,
        "sequence_len": 256,
        "gradient_checkpointing": True,
        "load_in_4bit": True,
        "optimizer": "adamw_8bit",
    },
    # The logits are not made, so that what the blocks take is what decides.
    "supra, fused loss": {
        "micro_batch_size": 8,
        "sequence_len": 1024,
        "plugins": ["axolotl_supertune.SupertunePlugin", "axolotl.integrations.liger.LigerPlugin"],
        "liger_fused_linear_cross_entropy": True,
    },
}
STEPS = 8
TOLERANCE = 0.1


def make_base(folder, shape):
    """A Llama with random bf16 weights, and a small tokenizer that none of its data needs."""
    import torch
    from tokenizers import ByteLevelBPETokenizer
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    from axolotl_supertune.bench.measurement import SHAPES

    trained = ByteLevelBPETokenizer()
    trained.train_from_iterator(["what is not text"], vocab_size=259, special_tokens=["<pad>", "<s>", "</s>"])
    tokens = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
    PreTrainedTokenizerFast(tokenizer_object=trained._tokenizer, **tokens).save_pretrained(folder)
    config = LlamaConfig(**{**SHAPES[shape], "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0})
    config.vocab_size = max(config.vocab_size, 512)
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = LlamaForCausalLM._from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    return config.vocab_size


def make_data(path, length, vocabulary, *, packed):
    """Token ids: half of the records as long as they may be, or short ones to pack."""
    draw = random.Random(0)
    with path.open("w") as file:
        for at in range(1024):
            size = draw.randint(200, 900) if packed else length if at % 2 else draw.randint(length // 2, length)
            ids = [draw.randrange(3, vocabulary) for _ in range(size)]
            file.write(json.dumps({"input_ids": ids, "attention_mask": [1] * size, "labels": ids}) + "\n")


def settings_of(case, base, vocabulary, folder):
    """The YAML's mapping of a case, its data written into `folder`."""
    import torch

    changes = CASES[case]
    data = folder / "data.jsonl"
    make_data(data, changes["sequence_len"], vocabulary, packed=bool(changes.get("sample_packing")))
    return {
        "base_model": str(base),
        "plugins": ["axolotl_supertune.SupertunePlugin"],
        "adapter": "supra",
        "mask_score": "magnitude",
        "datasets": [{"path": str(data), "ds_type": "json"}],
        "dataset_prepared_path": str(folder / "prepared"),
        "dataset_num_proc": 1,
        "output_dir": str(folder / "adapter"),
        "val_set_size": 0,
        "gradient_accumulation_steps": 1,
        "max_steps": STEPS,
        "save_steps": STEPS,
        "logging_steps": 1,
        "learning_rate": 1e-4,
        "lr_scheduler": "constant",
        "optimizer": "adamw_torch_fused",
        "seed": 0,
        **({"bf16": True} if torch.cuda.is_available() else {"bf16": False, "fp16": False, "tf32": False}),
        "attn_implementation": "sdpa",
        **changes,
    }


def planned(mapping, gpus=1):
    """GiB at the peak of training of one GPU, as the command says."""
    from axolotl_supertune.plugin.plan.memory import GIB
    from axolotl_supertune.plugin.plan.plan import make

    found = make(mapping, gpus=gpus)
    if found.estimate is None:
        raise ValueError(found.unknown)
    return found.estimate.training / GIB


def measured(mapping, folder):
    """GiB at the peak of training; None on a CPU, where the script can be tried but nothing be measured.

    Raises:
        RuntimeError: the training failed; the message ends with its last lines.
    """
    path = folder / "run.yml"
    path.write_text(json.dumps(mapping))  # JSON is YAML
    environment = {"CUDA_VISIBLE_DEVICES": "0", "AXOLOTL_DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1", **os.environ}
    if not mapping["bf16"]:
        environment["ACCELERATE_USE_CPU"] = "true"
    command = [sys.executable, "-m", "axolotl.cli.train", str(path)]
    ran = subprocess.run(command, env=environment, text=True, capture_output=True, check=False)
    if ran.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {ran.returncode}: {(ran.stdout + ran.stderr)[-3000:]}")
    state = json.loads((Path(mapping["output_dir"]) / f"checkpoint-{STEPS}/trainer_state.json").read_text())
    peaks = [
        entry["supertune/peak_memory_gib"] for entry in state["log_history"] if "supertune/peak_memory_gib" in entry
    ]
    return max(peaks, default=None)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=list(CASES), action="append", help="one case; may be given again")
    parser.add_argument("--shape", default="llama3.2-1b", help="of axolotl_supertune.bench.measurement.SHAPES")
    parser.add_argument("--output", type=Path, help="write the rows as JSON")
    arguments = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        base = Path(temporary) / "base"
        vocabulary = make_base(base, arguments.shape)
        for number, case in enumerate(arguments.only or CASES):
            folder = Path(temporary) / str(number)
            folder.mkdir()
            mapping = settings_of(case, base, vocabulary, folder)
            row = {"case": case, "planned_gib": planned(mapping), "measured_gib": None, "error": None}
            try:
                row["measured_gib"] = measured(mapping, folder)
            except RuntimeError as error:
                row["error"] = str(error)
            rows.append(row)
            peak = row["measured_gib"]
            off = f"{row['planned_gib'] / peak - 1:+.1%}" if peak else (row["error"] or "no CUDA device")[-2000:]
            print(
                f"{case}: planned {row['planned_gib']:.2f} GiB, measured {peak and round(peak, 2)} GiB: {off}",
                flush=True,
            )
            if arguments.output:
                arguments.output.write_text(json.dumps(rows, indent=2) + "\n")
    good = [row["measured_gib"] and abs(row["planned_gib"] / row["measured_gib"] - 1) <= TOLERANCE for row in rows]
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
