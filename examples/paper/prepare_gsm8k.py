"""GSM8K's training split as the paper's grids here take it: Alpaca records, no calculator marks, validation data apart.

    python examples/paper/prepare_gsm8k.py train.jsonl --output outputs/paper/gsm8k

train.jsonl is grade_school_math/data/train.jsonl of github.com/openai/grade-school-math (MIT): lines of
{question, answer}, with <<48/2=24>> marks, and "#### 24" at the end of an answer. What is written, train.jsonl and
valid.jsonl, has lines of {instruction, output}; the validation records are drawn with the seed, and the source's order
is kept.
"""

import argparse
import json
import random
import re
import sys
from pathlib import Path

_MARK = re.compile(r"<<[^<>]*>>")


def read(path: Path) -> list[dict[str, str]]:
    """The records as {instruction, output}.

    Raises:
        ValueError: a line that is no GSM8K record; names the file, the line and what is wrong.
    """
    records = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        where = f"{path}, line {number}"
        try:
            record = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{where}: no JSON ({error}).") from error
        if not isinstance(record, dict) or set(record) != {"question", "answer"}:
            keys = ", ".join(record) if isinstance(record, dict) else type(record).__name__
            raise ValueError(f"{where}: {keys} instead of question and answer; give GSM8K's own train.jsonl.")
        question, answer = record["question"], record["answer"]
        if not re.search(r"\n#### -?[\d,.]+$", answer):
            raise ValueError(f"{where}: the answer does not end with '#### ' and a number: {answer[-40:]!r}.")
        output = _MARK.sub("", answer)
        if "<<" in output or ">>" in output:
            raise ValueError(f"{where}: what is left of a calculator mark cannot be removed: {output!r}.")
        records.append({"instruction": question.strip(), "output": output})
    if len({record["instruction"] for record in records}) < len(records):
        raise ValueError(f"{path}: a question is there twice, and could be trained on and validated with.")
    return records


def split(
    records: list[dict[str, str]], validation: int, seed: int
) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """(training, validation) records.

    Raises:
        ValueError: not enough records.
    """
    if not 0 < validation < len(records):
        raise ValueError(f"--validation {validation} of {len(records)} records leaves one of the two files empty.")
    drawn = set(random.Random(seed).sample(range(len(records)), validation))
    return (
        [record for at, record in enumerate(records) if at not in drawn],
        [record for at, record in enumerate(records) if at in drawn],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument(
        "--validation", type=int, default=473, help="records held out (default 473: 7,000 are trained on)"
    )
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    try:
        files = dict(
            zip(("train", "valid"), split(read(arguments.source), arguments.validation, arguments.seed), strict=True)
        )
    except (OSError, ValueError) as error:
        sys.exit(f"prepare_gsm8k: {error}")
    arguments.output.mkdir(parents=True, exist_ok=True)
    for name, records in files.items():
        path = arguments.output / f"{name}.jsonl"
        path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
        print(f"{path}: {len(records)} records")


if __name__ == "__main__":
    main()
