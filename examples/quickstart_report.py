"""Print what quickstart.sh achieved: evaluation losses, and the merged model's answers to three new problems.

    python examples/quickstart_report.py outputs/quickstart

Fails if the evaluation loss did not fall.
"""

import argparse
import json
import pathlib
import runpy
import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from axolotl_supertune.tasks.prompt import alpaca_prompt


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=pathlib.Path)
    folder = parser.parse_args().folder
    checkpoints = sorted(folder.glob("adapter/checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))
    history = json.loads((checkpoints[-1] / "trainer_state.json").read_text())["log_history"]
    losses = [(entry["step"], entry["eval_loss"]) for entry in history if "eval_loss" in entry]
    (first_step, before), (last_step, after) = losses[0], losses[-1]
    print(f"\nevaluation loss: {before:.3f} before (step {first_step}), {after:.3f} after (step {last_step})")

    tokenizer = AutoTokenizer.from_pretrained(folder / "adapter/merged")
    model = AutoModelForCausalLM.from_pretrained(folder / "adapter/merged").eval()
    make = runpy.run_path(str(pathlib.Path(__file__).with_name("make_word_problems.py")))["records"]
    for record in make(seed=1, count=3):  # another seed than the training data's
        inputs = tokenizer(alpaca_prompt(record["instruction"]), return_tensors="pt")
        with torch.no_grad():
            output = model.generate(**inputs, max_new_tokens=80, do_sample=False)
        answer = tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        print(f"\nQ: {record['instruction']}\nA: {answer.strip()}\n   (expected: {record['output'].splitlines()[-1]})")
    if after >= before:
        sys.exit("the evaluation loss did not fall")


if __name__ == "__main__":
    main()
