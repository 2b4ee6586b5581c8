"""Size and time of an adapter's file at the shapes of Llama-3-8B; no weight of a base is made.

python tests/tuner/measure_checkpoint.py [fp32|bf16] [λ] [rounds]

Each round saves, reads and loads once, on a model made anew; printed are the fastest, the median and the slowest of the
rounds, in wall-clock seconds, after one round that is not counted. Give the processor to it alone for numbers to keep.
"""

import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
from peft import PeftModel, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from axolotl_supertune import SupraConfig
from axolotl_supertune.method.support import random_support
from axolotl_supertune.tuner import SupraLayer, read_adapter

SHAPES = {
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "tie_word_embeddings": False,
}


def base():
    with torch.device("meta"):
        return LlamaForCausalLM(LlamaConfig(**SHAPES)).to(torch.bfloat16)


def measured(values_dtype, supra_lambda, folder):
    config = SupraConfig(supra_lambda=supra_lambda, mask_score="magnitude", support="saved", values_dtype=values_dtype)
    model = get_peft_model(base(), config)
    drawn = {}
    for module in model.modules():
        if not isinstance(module, SupraLayer):
            continue
        size = module.out_features * module.in_features
        module.supra_shape["default"] = torch.tensor([module.out_features, module.in_features], dtype=torch.int32)
        kind = module.layer_name.rpartition(".")[2]
        for store in (module.supra_values, module.supra_L, module.supra_R):
            if "default" in store:
                store["default"] = torch.nn.Parameter(torch.randn(store["default"].shape))
        if "default" in module.supra_indices:
            if kind not in drawn:
                drawn[kind] = random_support(size, len(module.supra_indices["default"]), seed=0, layer=kind)
            module.supra_indices["default"] = drawn[kind].clone()
    start = time.perf_counter()
    model.save_pretrained(folder)
    saved = time.perf_counter()
    read_adapter(folder)
    read = time.perf_counter()
    fresh = base()
    injecting = time.perf_counter()
    loaded = PeftModel.from_pretrained(fresh, folder, low_cpu_mem_usage=True)
    done = time.perf_counter()
    there = dict(loaded.named_buffers())
    assert all(torch.equal(there[name], tensor) for name, tensor in model.named_buffers() if "supra_indices" in name)
    size = (Path(folder) / "adapter_model.safetensors").stat().st_size / 2**20
    return size, saved - start, read - saved, done - injecting


if __name__ == "__main__":
    values_dtype = sys.argv[1] if len(sys.argv) > 1 else "fp32"
    supra_lambda = float(sys.argv[2]) if len(sys.argv) > 2 else 0.0
    rounds = int(sys.argv[3]) if len(sys.argv) > 3 else 5
    with tempfile.TemporaryDirectory() as folder:
        found = [measured(values_dtype, supra_lambda, folder) for _ in range(rounds + 1)][1:]
    load = os.getloadavg()[0]
    print(
        f"{values_dtype}, λ = {supra_lambda}: {found[0][0]:.2f} MiB; torch {torch.__version__}, {os.cpu_count()} CPUs, "
        f"load {load:.1f}, {rounds} rounds"
    )
    for at, what in enumerate(("save_pretrained", "reading and checking the file", "PeftModel.from_pretrained"), 1):
        seconds = sorted(each[at] for each in found)
        print(f"  {what:30} {seconds[0]:.2f} / {statistics.median(seconds):.2f} / {seconds[-1]:.2f} s")
