"""What switching between two loaded adapters costs on a model of random weights: ours beside LoRA and SHiRA.

    python tests/gpu/measure_switching.py --output switching.json              # Llama-3-8B's shape, on a GPU
    python tests/gpu/measure_switching.py --model tiny --device cpu --rounds 3

Per method, medians in milliseconds, the device waited for before and after:

- `set_adapter`: `model.set_adapter(other)` alone;
- `forward`: a forward of some tokens with the adapter that was active before;
- `first forward`: the same right after a switch, where SUPRA's kernels put the base's bits back and write the others;
- `switch` = `set_adapter` + `first forward` - `forward`: what a request with another adapter waits longer;
- `off and on`: `disable_adapter_layers()`, a forward, `enable_adapter_layers()`, a forward, less two forwards;
- `hot-swap`: an adapter's file into the tensors of a loaded one, first forward included (SUPRA and LoRA have it).
- `merge and unmerge`: `merge_adapter()` and `unmerge_adapter()`, the other way to serve an adapter;
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import torch
from peft import LoraConfig, ShiraConfig, get_peft_model
from peft.utils.hotswap import hotswap_adapter as peft_hotswap_adapter

from axolotl_supertune import SupraConfig, hotswap_adapter
from axolotl_supertune.bench.measurement import SHAPES, Measurement
from axolotl_supertune.bench.worker import build_model
from axolotl_supertune.method.calibration import default_layers
from axolotl_supertune.method.cuda_memory import PeakMemory

METHODS = ("super", "supra", "lora", "shira")
NAMES = ("first", "second")


def config(method, direction, targets):
    """The config of one of two adapters of a rank-8 LoRA's size, drawn at random, so that both do something."""
    common = {"target_modules": targets, "task_type": "CAUSAL_LM"}
    if method in ("super", "supra"):
        return SupraConfig(
            r0=8,
            supra_lambda=0.0 if method == "super" else 0.8,
            mask_score="magnitude",
            sparse_direction=direction,
            init_weights=False,
            **common,
        )
    if method == "lora":
        return LoraConfig(r=8, lora_alpha=16, init_lora_weights=False, **common)
    shira = ShiraConfig(r=8, init_weights=False, **common)
    shira.mask_fn = random_mask  # PEFT's own takes minutes on a GPU at this size
    return shira


def random_mask(base_layer, r, **_):
    """SHiRA's mask: as many random entries as a rank-r LoRA has parameters."""
    weight = base_layer.weight
    mask = torch.zeros_like(weight).view(-1)
    count = r * sum(weight.shape)
    while (missing := count - int(mask.count_nonzero())) > 0:
        mask[torch.randint(mask.numel(), (missing,), device=mask.device)] = 1
    return mask.view_as(weight)


def seconds(action, device):
    """Wall time of an action, the device idle at both ends."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    action()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def measure(method, args):
    device = torch.device(args.device)
    memory = PeakMemory(device)
    model = build_model(Measurement(method="floor", model=args.model, device=args.device)).eval().requires_grad_(False)
    targets = sorted({name.rpartition(".")[2] for name in default_layers(model)})
    model = get_peft_model(model, config(method, "bottom", targets), adapter_name=NAMES[0])
    model.add_adapter(NAMES[1], config(method, "top", targets))
    model.eval()
    ids = torch.randint(0, model.config.vocab_size, (1, args.tokens), device=device)
    row = {"method": method, "device": str(device)}

    @torch.no_grad()
    def forward():
        return model(ids).logits

    def median(action, rounds=args.rounds):
        return statistics.median(seconds(lambda at=at: action(at), device) * 1e3 for at in range(rounds))

    outputs = []
    for name in NAMES * 2:  # compiles the kernels, and shows that switching does something and can be undone
        model.set_adapter(name)
        outputs.append(forward())
    assert torch.equal(outputs[0], outputs[2])
    assert torch.equal(outputs[1], outputs[3])
    assert not torch.equal(outputs[0], outputs[1])

    row["forward"] = median(lambda at: forward())
    switches, firsts = [], []
    for at in range(args.rounds):
        switches.append(seconds(lambda name=NAMES[at % 2]: model.set_adapter(name), device) * 1e3)
        firsts.append(seconds(forward, device) * 1e3)
        forward()
    row["set_adapter"], row["first forward"] = statistics.median(switches), statistics.median(firsts)
    row["switch"] = row["set_adapter"] + row["first forward"] - row["forward"]

    def off_and_on(at):
        model.base_model.disable_adapter_layers()
        forward()
        model.base_model.enable_adapter_layers()
        forward()

    row["off and on"] = median(off_and_on) - 2 * row["forward"]

    swap = {"super": hotswap_adapter, "supra": hotswap_adapter, "lora": peft_hotswap_adapter}.get(method)
    if swap is not None:
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder, selected_adapters=[NAMES[1]])
            path = Path(folder) / NAMES[1]
            model.set_adapter(NAMES[0])

            def hot_swap(at):
                swap(model, str(path), NAMES[0], torch_device=str(device))
                forward()

            row["hot-swap"] = median(hot_swap, min(5, args.rounds)) - row["forward"]
            assert torch.equal(forward(), outputs[1])

    def merge_and_unmerge(at):
        model.merge_adapter()
        model.unmerge_adapter()

    row["merge and unmerge"] = median(merge_and_unmerge, min(5, args.rounds))  # last: LoRA does not come back exactly
    if device.type == "cuda":
        row["card"] = torch.cuda.get_device_name()
        row["peak, GiB"] = memory.read() / 2**30
    return row


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=list(SHAPES), default="llama3-8b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--tokens", type=int, default=16, help="of a forward")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--output", type=Path, help="JSON file for the numbers")
    args = parser.parse_args(arguments)
    rows = []
    for method in args.methods.split(","):
        rows.append(measure(method, args))
        if args.device == "cuda":
            torch.cuda.empty_cache()
        print(json.dumps(rows[-1], ensure_ascii=False), flush=True)
        if args.output:
            args.output.write_text(
                json.dumps({**vars(args), "output": str(args.output), "rows": rows}, indent=2) + "\n"
            )
    columns = [name for name in rows[0] if name not in ("method", "device", "card")]
    print("| ms | " + " | ".join(columns) + " |\n|---|" + "---:|" * len(columns))
    for row in rows:
        print(
            f"| {row['method']} | " + " | ".join(f"{row[name]:.2f}" if name in row else "–" for name in columns) + " |"
        )
    return rows


if __name__ == "__main__":
    main()
