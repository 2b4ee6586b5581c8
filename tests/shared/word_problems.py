"""Arithmetic word problems with worked answers, made up from templates by a seed: what tiny models are trained on.

The tokenizer of the tests' tiny Llama is trained on them too, and recorded adapters were. Do not change them.
"""

import json
import random

SEED = 0
COUNT = 400
NAMES = ["Ada", "Ben", "Chloe", "Dev", "Elif", "Femi", "Greta", "Hugo", "Ines", "Jonas", "Kira", "Leo", "Mina", "Noor"]
THINGS = ["apples", "books", "cards", "eggs", "keys", "lamps", "marbles", "pencils", "plates", "shells", "stamps"]


def buy(rng: random.Random) -> tuple[str, list[str], int]:
    name, thing = rng.choice(NAMES), rng.choice(THINGS)
    count, price = rng.randint(3, 12), rng.randint(2, 9)
    cost = count * price
    paid = cost + rng.randint(1, 30)
    return (
        f"{name} buys {count} {thing} at {price} dollars each and pays with {paid} dollars. "
        "How many dollars does the seller give back?",
        [f"The {thing} cost {count} * {price} = {cost} dollars.", f"The change is {paid} - {cost} = {paid - cost}."],
        paid - cost,
    )


def share(rng: random.Random) -> tuple[str, list[str], int]:
    name, thing = rng.choice(NAMES), rng.choice(THINGS)
    friends, each, left = rng.randint(3, 9), rng.randint(2, 12), rng.randint(1, 8)
    total = friends * each + left
    return (
        f"{name} has {total} {thing}, keeps {left} and shares the rest equally among {friends} friends. "
        f"How many {thing} does each friend get?",
        [f"{total} - {left} = {total - left} {thing} are shared.", f"Each gets {total - left} / {friends} = {each}."],
        each,
    )


def collect(rng: random.Random) -> tuple[str, list[str], int]:
    first, second = rng.sample(NAMES, 2)
    thing = rng.choice(THINGS)
    start, times, lost = rng.randint(4, 20), rng.randint(2, 5), rng.randint(1, 9)
    more = start * times
    return (
        f"{first} has {start} {thing} and {second} has {times} times as many. {second} loses {lost} of them. "
        f"How many {thing} do they have together now?",
        [
            f"{second} had {start} * {times} = {more} {thing} and now has {more} - {lost} = {more - lost}.",
            f"Together they have {start} + {more - lost} = {start + more - lost}.",
        ],
        start + more - lost,
    )


def week(rng: random.Random) -> tuple[str, list[str], int]:
    name, thing = rng.choice(NAMES), rng.choice(THINGS)
    daily, days, extra = rng.randint(2, 15), rng.randint(3, 7), rng.randint(5, 40)
    made = daily * days
    return (
        f"{name} sells {daily} {thing} a day for {days} days and then {extra} more at a market. "
        f"How many {thing} did {name} sell?",
        [
            f"In {days} days that is {daily} * {days} = {made} {thing}.",
            f"In all it is {made} + {extra} = {made + extra}.",
        ],
        made + extra,
    )


def records(seed: int = SEED, count: int = COUNT) -> list[dict[str, str]]:
    """`count` distinct problems in the Alpaca format; the answer closes with `#### N`."""
    rng = random.Random(seed)
    problems: dict[str, dict[str, str]] = {}
    while len(problems) < count:
        question, steps, answer = rng.choice([buy, share, collect, week])(rng)
        problems[question] = {"instruction": question, "input": "", "output": "\n".join([*steps, f"#### {answer}"])}
    return list(problems.values())


def lines(seed: int = SEED, count: int = COUNT) -> list[str]:
    """The same records as lines of a jsonl file."""
    return [json.dumps(record) + "\n" for record in records(seed, count)]
