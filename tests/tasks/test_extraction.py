"""The two extraction rules: on texts made for the purpose, on arbitrary texts, and on the benchmarks' own outputs.

`extraction_cases.json` holds texts with what each rule must read in them. `disagreements.json` holds what a person
who read the benchmarks' `output` texts took each to answer, by benchmark and index: all 81 records on which the two
rules disagree, and 19 drawn at random (`random.Random(20260101)`, three a benchmark, four of gsm8k) from the others.
"""

import json
import math
import re
import time
from functools import cache
from pathlib import Path

import pytest
from benchmark_files import DATA
from hypothesis import given, settings
from hypothesis import strategies as st

from axolotl_supertune.tasks.extraction import (
    is_correct_number,
    published_letter,
    published_number,
    score,
    strict_letter,
    strict_number,
)

HERE = Path(__file__).parent
CASES = json.loads((HERE / "extraction_cases.json").read_text(encoding="utf-8"))
READINGS = json.loads((HERE / "disagreements.json").read_text(encoding="utf-8"))

# Correct by the published rule, records.
PUBLISHED = {
    "AddSub": (370, 395),
    "MultiArith": (560, 600),
    "SingleEq": (484, 508),
    "gsm8k": (771, 1319),
    "SVAMP": (803, 1000),
    "AQuA": (109, 254),
}

# Where the strict rule reads an answer that a person does not find. Both texts break off before any conclusion, on a
# fraction that relates two amounts ("4/3 times as many as …"); by its form that is an ordinary last number.
NOT_UNFINISHED = {("gsm8k", 17), ("gsm8k", 687)}


@cache
def records(benchmark):
    path = DATA / f"{benchmark}.json"
    if not path.is_file():
        pytest.fail(f"{path} is missing: set SUPERTUNE_DATA_DIR to the folder with LLM-Adapters' six test files.")
    return json.loads(path.read_text(encoding="utf-8"))


def kind(benchmark):
    return "letter" if benchmark == "AQuA" else "number"


def same(answer, other):
    if isinstance(answer, float | int) and isinstance(other, float | int):
        return math.isclose(answer, other, rel_tol=1e-9)
    return answer == other


def case_ids(cases):
    return [f"{number}-{case['about']}" for number, case in enumerate(cases)]


@pytest.mark.parametrize("case", CASES["number"], ids=case_ids(CASES["number"]))
def test_number(case):
    assert same(published_number(case["text"]), case["published"])
    assert same(strict_number(case["text"]), case["strict"])


@pytest.mark.parametrize("case", CASES["letter"], ids=case_ids(CASES["letter"]))
def test_letter(case):
    assert published_letter(case["text"]) == case["published"]
    assert strict_letter(case["text"], case.get("choices")) == case["strict"]


def test_there_are_enough_cases():
    texts = {(sort, case["text"]) for sort, cases in CASES.items() for case in cases if case["text"]}
    assert len(texts) >= 80


@pytest.mark.parametrize(
    ("prediction", "gold", "correct"),
    [
        (5.0, 5.0, True),
        (0.6666666666666666, 0.667, True),
        (5.0005, 5.0, True),
        (5.002, 5.0, False),
        (None, 0.0, False),
        (0.0, None, False),
        (math.nan, math.nan, False),
        (math.inf, math.inf, False),
        (1e308, -1e308, False),
    ],
)
def test_tolerance(prediction, gold, correct):
    assert is_correct_number(prediction, gold) is correct


@pytest.mark.parametrize(
    ("text", "gold", "kind", "acc", "acc_strict"),
    [
        ("The answer is 2/3.", "0.6666666666666666", "number", 0, 1),
        ("The answer is 7.", "7.0", "number", 1, 1),
        ("", "0", "number", 0, 0),
        ("Answer: c", "C", "letter", 0, 1),
        ("Answer: c", "A", "letter", 1, 0),
        ("", "A", "letter", 0, 0),
    ],
)
def test_score(text, gold, kind, acc, acc_strict):
    assert score(text, gold, kind) == {"acc": acc, "acc_strict": acc_strict}


def test_score_refuses_what_it_cannot_score():
    with pytest.raises(ValueError, match="'word'"):
        score("5", "5", "word")
    with pytest.raises(ValueError, match="twelve"):
        score("5", "twelve", "number")


# Texts dense in what the patterns look for.
PIECES = [
    *["The answer is ", "answer: ", "#### ", "\\boxed{", "}", "\\frac{", "}{", "**", "### Instruction", "Question:"],
    *[
        "1",
        "23",
        "456",
        "0",
        ",",
        ".",
        "-",
        "−",
        " ",
        "\n",
        "/",
        "^",
        "e",
        "×10^",
        "%",
        "$",
        "(",
        ")",
        "=",
        "½",
        "³",
        ":",
    ],
    *["A", "b", "E", "(c)", "option ", " and ", " or ", " so ", "not ", "x", "th", " million", "٣", "é", "\u2028"],
]
texts = st.one_of(st.text(max_size=200), st.lists(st.sampled_from(PIECES), max_size=60).map("".join))


@settings(max_examples=200, deadline=None)
@given(texts)
@pytest.mark.slow
def test_published_rule_is_the_reference(text):
    numbers = re.findall(r"-?\d+\.?\d*", text.replace(",", ""))
    assert published_number(text) == (float(numbers[-1]) if numbers else None)
    assert published_letter(text) == next((character for character in text if character in "ABCDE"), None)


@settings(max_examples=300, deadline=None)
@given(texts)
def test_strict_rule_reads_any_text(text):
    number = strict_number(text)
    assert number is None or math.isfinite(number)
    assert strict_letter(text) in {None, "A", "B", "C", "D", "E"}
    assert strict_letter(text, {"A": "1", "B": text}) in {None, "A", "B"}


@settings(max_examples=200, deadline=None)
@given(
    st.integers(-(10**12), 10**12),
    st.sampled_from(["{:d}", "{:,d}", "{:d}.", "{:,d} km^2", "{:d} (not 3)", "**{:d}**"]),
)
def test_an_integer_is_read_however_it_is_written(number, form):
    assert strict_number("The answer is " + form.format(number)) == number
    assert strict_number("Then 2 + 2 = 4.\n#### " + form.format(number) + "\n### Instruction:\n99") == number


# One for each repetition in a pattern: a scan that starts anew at every unit would be quadratic.
@pytest.mark.parametrize(
    "unit",
    ["9", "1,", "11,", "1 234 ", "1/", "(1", "- ", ". ", "\n ", "answer to ", "answer is 5 and ", "\\frac{1}{", "(a) "],
)
def test_time_is_linear_in_the_text(unit):
    text = "the answer is " + (unit * 100_000)[:100_000]
    began = time.process_time()
    strict_number(text)
    strict_letter(text)
    published_number(text)
    published_letter(text)
    assert time.process_time() - began < 5  # about 0.5 s; a quadratic pattern takes minutes


@pytest.mark.parametrize("benchmark", PUBLISHED)
def test_published_rule_scores_the_outputs_as_published(benchmark):
    scores = [score(record["output"], record["answer"], kind(benchmark))["acc"] for record in records(benchmark)]
    assert (sum(scores), len(scores)) == PUBLISHED[benchmark]


def readings_by_id():
    return {(reading["benchmark"], reading["index"]): reading["answer"] for reading in READINGS}


def test_every_disagreement_of_the_two_rules_was_read():
    disagreements = set()
    for benchmark in PUBLISHED:
        published, strict = {
            "number": (published_number, strict_number),
            "letter": (published_letter, strict_letter),
        }[kind(benchmark)]
        for index, record in enumerate(records(benchmark)):
            if not same(published(record["output"]), strict(record["output"])):
                disagreements.add((benchmark, index))
    assert len(disagreements) == 81
    assert disagreements <= readings_by_id().keys()


def test_strict_rule_agrees_with_a_reader():
    readings = readings_by_id()
    assert len(readings) == len(READINGS) == 100
    strict = {"number": strict_number, "letter": strict_letter}
    differ = {
        (benchmark, index)
        for (benchmark, index), answer in readings.items()
        if not same(strict[kind(benchmark)](records(benchmark)[index]["output"]), answer)
    }
    assert differ == NOT_UNFINISHED
    assert len(readings) - len(differ) >= 97
