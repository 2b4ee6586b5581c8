"""Write `word_problems.jsonl` (312 records to train on) and `word_problems_test.jsonl` (30 held-out ones).

    python examples/make_word_problems.py [FOLDER]

Arithmetic word problems of two steps with worked answers, in the Alpaca format; an answer ends with `#### N`. They are
made from templates by a seed: the files in this folder were written so, and the same seed writes the same bytes. No
held-out problem has the three numbers of a training problem, in whatever order.
"""

import argparse
import json
import pathlib
import random

SEED = 0
TRAINING, HELD_OUT = 312, 30
LARGEST = 7  # number in a question
NAMES = ["Ada", "Ben", "Chloe", "Dev", "Elif", "Femi", "Greta", "Hugo", "Ines", "Jonas", "Kira", "Leo", "Mina", "Noor"]
THINGS = ["apples", "books", "cards", "eggs", "keys", "lamps", "marbles", "pencils", "plates", "shells", "stamps"]


Problem = tuple[str, list[str], int, tuple[int, int, int]]  # question, steps, answer, the three numbers


def gets_and_gives(rng: random.Random, name: str, friend: str, thing: str) -> Problem:
    start, more = rng.randint(2, LARGEST), rng.randint(2, LARGEST)
    given = rng.randint(1, min(LARGEST, start + more - 1))
    total, left = start + more, start + more - given
    return (
        f"{name} has {start} {thing}, gets {more} more and then gives {given} to {friend}. How many {thing} are left?",
        [f"{start} + {more} = {total}", f"{total} - {given} = {left}"],
        left,
        (start, more, given),
    )


def buys_and_gets(rng: random.Random, name: str, friend: str, thing: str) -> Problem:
    start, bought, more = rng.randint(2, LARGEST), rng.randint(2, LARGEST), rng.randint(1, LARGEST)
    total = start + bought
    return (
        f"{name} has {start} {thing}, buys {bought} and gets {more} more from {friend}. "
        f"How many {thing} does {name} have in all?",
        [f"{start} + {bought} = {total}", f"{total} + {more} = {total + more}"],
        total + more,
        (start, bought, more),
    )


def loses_and_buys(rng: random.Random, name: str, friend: str, thing: str) -> Problem:
    start, bought = rng.randint(2, LARGEST), rng.randint(2, LARGEST)
    lost = rng.randint(1, start - 1)
    left = start - lost
    return (
        f"{name} has {start} {thing}, loses {lost} and then buys {bought}. How many {thing} does {name} have now?",
        [f"{start} - {lost} = {left}", f"{left} + {bought} = {left + bought}"],
        left + bought,
        (start, lost, bought),
    )


def records(seed: int = SEED) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """The training records and the held-out ones, all distinct: `instruction`, `input` (empty) and `output`."""
    rng = random.Random(seed)
    training: dict[str, dict[str, str]] = {}
    held_out: dict[tuple[int, ...], dict[str, str]] = {}
    while len(training) < TRAINING:
        template = rng.choice([gets_and_gives, buys_and_gets, loses_and_buys])
        question, steps, answer, numbers = template(rng, *rng.sample(NAMES, 2), rng.choice(THINGS))
        record = {"instruction": question, "input": "", "output": "\n".join([*steps, f"#### {answer}"])}
        key = tuple(sorted(numbers))
        if len(held_out) < HELD_OUT:  # the first problems are held out, one for each set of numbers
            held_out.setdefault(key, record)
        elif key not in held_out:
            training[question] = record
    return list(training.values()), list(held_out.values())


def main() -> None:
    here = pathlib.Path(__file__).parent
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=pathlib.Path, default=here, help="default: the folder of this script")
    folder = parser.parse_args().folder
    for name, problems in zip(("word_problems.jsonl", "word_problems_test.jsonl"), records(), strict=True):
        (folder / name).write_text("".join(json.dumps(record) + "\n" for record in problems), encoding="utf-8")


if __name__ == "__main__":
    main()
