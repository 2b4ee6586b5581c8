"""Train and score what quickstart.yml describes; quickstart.sh runs it in an environment of its own.

    python examples/quickstart.py outputs/quickstart

Makes the base model, trains it (`axolotl train`), and counts how many of the 30 problems of word_problems_test.jsonl
it answers without the adapter and with it. What the libraries print is in FOLDER/log.txt.
"""

import argparse
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import time

HERE = pathlib.Path(__file__).parent
CONFIG = "examples/quickstart.yml"
TEST = HERE / "word_problems_test.jsonl"
PASSES = 0.8  # of the held-out problems right after training; less is reported as a failure

STARTED = float(os.environ.get("QUICKSTART_STARTED", time.time()))  # quickstart.sh says when it began
LOSS = re.compile(r"\{'loss': '?([\d.]+)")
EVAL_LOSS = re.compile(r"\{'eval_loss': '?([\d.]+)")
STEPS = re.compile(r"Maximum number of steps set at (\d+)")
OURS = re.compile(r"\[INFO\] \[axolotl_supertune[^]]*\](?: \[PID:\d+\])? (.*)")


class Quickstart:
    """The steps, with the terminal and the log file kept apart.

    Libraries print to file descriptors 1 and 2 while they are imported and used: these lead into the log, and `say`
    writes to the terminal.
    """

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.log_path = folder / "log.txt"
        self.terminal = os.fdopen(os.dup(1), "w")
        log = os.open(self.log_path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)

    def say(self, text: str = "") -> None:
        print(text, file=self.terminal, flush=True)

    def step(self, text: str) -> None:
        seconds = int(time.time() - STARTED)
        self.say(f"{text}   [{seconds // 60}:{seconds % 60:02d}]")

    def prepare(self) -> None:
        """Make the base model and the calibration text, unless an earlier run did."""
        if not (self.folder / "calibration.txt").is_file():  # the last file that is written
            subprocess.run([sys.executable, HERE / "prepare_base.py", self.folder], check=True)

    def axolotl(self, *arguments: str) -> None:
        """Run an axolotl command; its losses and the plugin's own lines go to the terminal, all of it to the log.

        Raises:
            subprocess.CalledProcessError: it failed.
        """
        command = [str(pathlib.Path(sys.executable).with_name("axolotl")), *arguments]
        steps, of_all = 0, ""
        unbuffered = {**os.environ, "PYTHONUNBUFFERED": "1"}
        with subprocess.Popen(
            command, env=unbuffered, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as process:
            assert process.stdout is not None
            for line in process.stdout:
                print(line, end="", flush=True)
                if found := LOSS.search(line):
                    steps += 5  # logging_steps of quickstart.yml
                    self.say(f"      step {steps:2d}{of_all}   loss {float(found[1]):.3f}")
                elif found := STEPS.search(line):
                    of_all = f" of {found[1]}"
                elif found := EVAL_LOSS.search(line):
                    self.say(f"      validation loss {float(found[1]):.3f}")
                elif (found := OURS.search(line)) and found[1].strip():
                    self.say(f"      {found[1]}")
        if process.returncode:
            raise subprocess.CalledProcessError(process.returncode, command)

    def answers(self) -> tuple[list[str], list[str]]:
        """What the base model answers to the held-out problems, greedily, and what it answers with the adapter."""
        import torch
        from peft import PeftModel
        from transformers import AutoModelForCausalLM, AutoTokenizer

        from axolotl_supertune.tasks.prompt import alpaca_prompt

        tokenizer = AutoTokenizer.from_pretrained(self.folder / "base", padding_side="left")
        base = AutoModelForCausalLM.from_pretrained(self.folder / "base")
        model = PeftModel.from_pretrained(base, self.folder / "adapter").eval()
        prompts = [alpaca_prompt(problem["instruction"]) for problem in problems()]
        inputs = tokenizer(prompts, return_tensors="pt", padding=True)

        def generate() -> list[str]:
            with torch.inference_mode():
                output = model.generate(**inputs, max_new_tokens=48, do_sample=False)
            return tokenizer.batch_decode(output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)

        with model.disable_adapter():
            before = generate()
        return before, generate()


def problems() -> list[dict[str, str]]:
    return [json.loads(line) for line in TEST.read_text(encoding="utf-8").splitlines()]


def right(answers: list[str]) -> list[bool]:
    """For each held-out problem whether the number that an answer states is the right one."""
    from axolotl_supertune.tasks.extraction import is_correct_number, strict_number

    gold = [float(problem["output"].rpartition("####")[2]) for problem in problems()]
    return [is_correct_number(strict_number(text), number) for text, number in zip(answers, gold, strict=True)]


def run(quickstart: Quickstart) -> bool:
    say, step, folder = quickstart.say, quickstart.step, quickstart.folder
    step("2/4 base model: SmolLM2-135M")
    quickstart.prepare()

    step(f"3/4 axolotl train {CONFIG}")
    for name in ("adapter", "prepared"):
        shutil.rmtree(folder / name, ignore_errors=True)
    quickstart.axolotl("train", CONFIG, "--launcher", "python")

    step("4/4 score: 30 problems of which none was in the training data, nor one with the same numbers")
    answers_before, answers = quickstart.answers()
    before, after = right(answers_before), right(answers)
    for problem, answer, correct in list(zip(problems(), answers, after, strict=True))[:5]:
        say(f"\n  {problem['instruction']}")
        for line in answer.strip().splitlines():
            say(f"    {line}")
        say("    right" if correct else f"    wrong: {problem['output'].splitlines()[-1]} was expected")
    step(f"\nright before training: {sum(before)} of {len(before)}, after: {sum(after)} of {len(after)}")
    return sum(after) >= PASSES * len(after) and sum(after) > sum(before)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=pathlib.Path)
    os.environ.update(HF_HUB_OFFLINE="1", AXOLOTL_DO_NOT_TRACK="1", TOKENIZERS_PARALLELISM="false")
    folder = parser.parse_args().folder
    try:
        quickstart = Quickstart(folder)
    except OSError as error:
        sys.exit(f"quickstart: {folder} cannot be written: {error}. Name another folder.")
    try:
        passed = run(quickstart)
    except BaseException as error:
        lines = quickstart.log_path.read_text(errors="replace").splitlines()[-20:]
        quickstart.say("\n".join(lines))
        quickstart.say(f"\nquickstart: {error or type(error).__name__}; the whole log is {quickstart.log_path}")
        raise
    if not passed:
        quickstart.say(f"quickstart: fewer than {PASSES:.0%} are right; the log is {quickstart.log_path}")
        sys.exit(1)
    commands = pathlib.Path(sys.executable).parent
    quickstart.say(
        f"""
The adapter is in {quickstart.folder}/adapter, the log in {quickstart.log_path}. Your own data, after
`source {commands}/activate`:
  axolotl supertune init --base MODEL --data records.jsonl --output run.yml   # a commented YAML for both
  axolotl train run.yml
  axolotl merge-lora run.yml                                                  # a plain model"""
    )


if __name__ == "__main__":
    main()
