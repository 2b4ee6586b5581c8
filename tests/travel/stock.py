"""Exports in an environment without this package: stock PEFT, or transformers alone, must give the adapter's logits.

    python tests/travel/stock.py PYTHON STOCK_PYTHON
    python tests/travel/stock.py PYTHON --make FOLDER [--install REQUIREMENT ...]

PYTHON: of an environment with this package. STOCK_PYTHON: of one with torch, transformers and peft and without it;
`--make` makes one in FOLDER (default requirements: torch, transformers, peft). Adapters of a tiny fp32 Llama are made
and exported by `axolotl supertune export` in the first and loaded in the second, which is searched for this package
beforehand. Prints the differences of the logits; exit code 0 if SHiRA's is 0 and the others are at most TOLERANCE.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
# Of logits up to 3: a merged low-rank part is added to the weight, no longer to the layer's output.
TOLERANCE = 2e-5

# Adapter, form, what is loaded as the model, what is put on it.
PRODUCTS = (
    ("super", "shira", "base", "super-shira"),
    ("supra", "lora+base", "supra-lora+base/base", "supra-lora+base/lora"),
    ("super", "merged", "super-merged", ""),
    ("supra", "merged", "supra-merged", ""),
)

LOAD = """
import importlib.metadata, importlib.util, pathlib, sys, torch
if importlib.util.find_spec("axolotl_supertune") or importlib.util.find_spec("axolotl"):
    sys.exit("axolotl_supertune or axolotl can be imported here: this is no environment without them")
from peft import PeftModel
from transformers import AutoModelForCausalLM
folder = pathlib.Path(sys.argv[1])
ids = torch.arange(3, 27).view(1, -1) * 7 % 397
for product in sys.argv[2:]:
    adapter, base, plugged = product.split(":")
    expected = torch.load(folder / f"{adapter}.pt")
    model = AutoModelForCausalLM.from_pretrained(folder / base, dtype=torch.float32).eval()
    with torch.no_grad():
        plain = model(ids).logits[0]
        found = PeftModel.from_pretrained(model, folder / plugged).eval()(ids).logits[0] if plugged else plain
    print(float((found - expected).abs().max()), float((plain - expected).abs().max()), float(expected.abs().max()))
"""

VERSIONS = """
import importlib.metadata, importlib.util, sys
names = [name for name in ("axolotl", "peft", "transformers", "torch") if importlib.util.find_spec(name)]
print("Python", sys.version.split()[0], *(f"{name} {importlib.metadata.version(name)}" for name in names))
"""


def make(folder):
    """In `folder`: the base, a Super and a Supra adapter of it, their logits, and the exports."""
    import torch
    from base import logits, make_base
    from peft import get_peft_model

    from axolotl_supertune import SupraConfig
    from axolotl_supertune.commands.cli import supertune

    make_base().save_pretrained(folder / "base")
    for name, supra_lambda in (("super", 0.0), ("supra", 0.5)):
        torch.manual_seed(1)
        config = SupraConfig(
            r0=4, supra_lambda=supra_lambda, mask_score="magnitude", init_weights=False, task_type="CAUSAL_LM"
        )
        model = get_peft_model(make_base(), config)
        model.save_pretrained(folder / name)
        torch.save(logits(model), folder / f"{name}.pt")
    for adapter, form, _, _ in PRODUCTS:
        export = ["export", folder / adapter, "--to", form, "--output", folder / f"{adapter}-{form}"]
        supertune([str(each) for each in (*export, "--base", folder / "base")], standalone_mode=False)


def run(python, *arguments, path):
    """What a command prints that must not fail; `path` is all that it can import beside its environment."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": path}
    command = [python, *map(str, arguments)]
    done = subprocess.run(command, env=environment, cwd="/", capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{(done.stdout + done.stderr)[-6000:]}")
    return done.stdout.strip()


def make_stock(folder, requirements):
    """The interpreter of a new environment, of the package index alone."""
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    python = Path(folder).absolute() / "bin/python"
    subprocess.run([python, "-m", "pip", "install", "-q", *requirements], check=True)
    return os.fspath(python)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("python")
    parser.add_argument("stock", nargs="?")
    parser.add_argument("--make", metavar="FOLDER")
    parser.add_argument("--install", nargs="+", default=["torch", "transformers", "peft"], metavar="REQUIREMENT")
    arguments = parser.parse_args()
    if bool(arguments.stock) == bool(arguments.make):
        parser.error("give STOCK_PYTHON or --make FOLDER")
    stock = arguments.stock or make_stock(arguments.make, arguments.install)
    ours = f"{ROOT}{os.pathsep}{HERE}"
    with tempfile.TemporaryDirectory() as folder:
        print(f"written by {run(arguments.python, '-c', VERSIONS, path=ours)}")
        print(f"read by    {run(stock, '-c', VERSIONS, path='')}", flush=True)
        run(
            arguments.python,
            "-c",
            "import pathlib, stock, sys; stock.make(pathlib.Path(sys.argv[1]))",
            folder,
            path=ours,
        )
        products = [f"{adapter}:{base}:{plugged}" for adapter, _, base, plugged in PRODUCTS]
        lines = run(stock, "-c", LOAD, folder, *products, path="").splitlines()[-len(PRODUCTS) :]
    agrees = True
    for (adapter, form, _, plugged), line in zip(PRODUCTS, lines, strict=True):
        difference, plain, largest = map(float, line.split())
        most = 0.0 if form == "shira" else TOLERANCE
        ok = difference <= most and (not plugged or plain > 0.1)
        agrees &= ok
        without = f", {plain:.2f} away without it" if plugged else ""
        verdict = "≤" if ok else "ABOVE"
        print(f"  {form:9} of {adapter}: {difference:.1e} {verdict} {most:.0e} (up to {largest:.2f}{without})")
    return 0 if agrees else 1


if __name__ == "__main__":
    sys.exit(main())
