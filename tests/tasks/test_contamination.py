"""Which test questions occur in training data: hand-made cases, two real training sets, and recounts of both levels."""

import functools
import gzip
import hashlib
import json
import os
import random
import re
import shutil
import unicodedata

import pytest
from benchmark_files import DATA, GSM8K, MATH
from click.testing import CliRunner

from axolotl_supertune.commands.contamination import contamination
from axolotl_supertune.tasks.benchmarks import BENCHMARKS, load_benchmark
from axolotl_supertune.tasks.contamination import (
    clean_indices,
    contamination_report,
    load_report,
    read_training,
    write_report,
)
from axolotl_supertune.tasks.contamination.comparison import question_of, words


@pytest.fixture(autouse=True)
def data_dir(monkeypatch):
    monkeypatch.setenv("SUPERTUNE_DATA_DIR", str(DATA))


@pytest.fixture(scope="module")
def reports():
    """A function path → report, each made once."""
    made = {}

    def report(path):
        if path not in made:
            made[path] = contamination_report([path], data_dir=DATA)
        return made[path]

    return report


def question(name, index):
    return load_benchmark(name, DATA)[index]["instruction"]


def levels(tmp_path, rows, names=("AddSub", "SVAMP"), **options):
    """For each level, the (benchmark, index) that training on `rows` hits."""
    path = tmp_path / "train.jsonl"
    rows = [{"question": row} if isinstance(row, str) else row for row in rows]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    found = contamination_report([path], names, **options)["benchmarks"].items()
    return {
        "exact": {(name, index) for name, entry in found for index in entry["exact"]},
        "near": {(name, each["index"]) for name, entry in found for each in entry["near"]},
        "template": {(name, each["index"]) for name, entry in found for each in entry["template"]},
    }


# What is compared


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("There are 7  crayons ,\n in THE drawer .", "there are 7 crayons in the drawer"),
        ("$1,023.65 (or 1,234,567)", "1023.65 or 1234567"),
        ("the points (2,3) and 1,2345", "the points 2 3 and 1 2345"),
        ("6.8 is not 68", "6.8 is not 68"),
        ("Ends with 3. Then 4", "ends with 3 then 4"),
        ("Tom's and Tom 's and Tom’s", "tom s and tom s and tom s"),
        ("the ﬁrst 5m² ＡＢＣ ３", "the first 5 m 2 abc 3"),
        ("Straße a_b", "strasse a b"),
        ("2/3 of 50%", "2 3 of 50"),
        ("...", ""),
    ],
)
def test_words(text, expected):
    assert " ".join(words(text)) == expected


def test_every_question_has_enough_words():
    for name, benchmark in BENCHMARKS.items():
        for index, record in enumerate(load_benchmark(name)):
            assert len(question_of(benchmark, index, record["instruction"]).words) >= 8


def test_case_space_and_punctuation_do_not_hide_a_question(tmp_path):
    text = question("AddSub", 0)
    assert text.startswith("There are 7 crayons in the drawer .")
    changed = text.upper().replace(" .", "!").replace(" ", "  \n")
    assert levels(tmp_path, [changed])["exact"] == {("AddSub", 0)}


def test_another_question_is_no_match(tmp_path):
    assert levels(tmp_path, ["How many legs do 7 spiders have, if each of them has 8 legs?"]) == {
        "exact": set(),
        "near": set(),
        "template": set(),
    }


def test_a_question_inside_a_larger_text_is_exact(tmp_path):
    text = question("SVAMP", 0)
    for row in (
        {"text": f"Below is an instruction.\n\n### Instruction:\n{text}\n\n### Response:\nEach ate 8. 4 * 8 = 32."},
        {"instruction": "Solve the problem.", "input": text, "output": "8"},
        {"question": "Which question is this?", "answer": f"It is: {text}"},
        {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": f"Hi! {text} Thanks."}]},
        {"question": "Look:", "extra": {"context": [text]}},
    ):
        assert levels(tmp_path, [row])["exact"] == {("SVAMP", 0)}


def test_a_question_across_two_columns_is_exact(tmp_path):
    body, _, ask = question("SVAMP", 0).partition(" How ")
    assert ask
    assert levels(tmp_path, [{"Body": body, "Question": f"How {ask}"}])["exact"] == {("SVAMP", 0)}


def test_a_changed_word_is_near_and_other_numbers_are_a_template(tmp_path):
    text = question("AddSub", 0)  # 7 crayons, 3 taken
    near = levels(tmp_path, [text.replace("took", "has taken")])
    assert near == {"exact": set(), "near": {("AddSub", 0)}, "template": near["template"]}
    assert ("AddSub", 0) in levels(tmp_path, [text.replace("7", "9").replace("3", "5")])["template"]
    assert ("AddSub", 0) in levels(tmp_path, [text.replace("7", "3")])["template"]  # 3 and 3 are not 7 and 3


def test_the_numbers_of_a_solution_in_the_same_text_do_not_count(tmp_path):
    text = question("AddSub", 0)
    other = text.replace("7", "12").replace("3", "5")
    solution = "She took some of the crayons that were in it, and what is left are the others, of course: 12 - 5 = 7. "
    row = {"text": f"{other}\n### Response: {solution * 2} 7 is more than 3."}
    assert ("AddSub", 0) in levels(tmp_path, [row])["template"]


def test_a_question_has_one_level_the_first_that_holds(tmp_path):
    text = question("AddSub", 0)
    rows = [text.replace("7", "9"), text.replace("took", "has taken"), text]
    hits = [{level for level, found in levels(tmp_path, rows[:k]).items() if ("AddSub", 0) in found} for k in (1, 2, 3)]
    assert hits == [{"template"}, {"near"}, {"exact"}]


def test_an_equation_of_numbers_is_no_template_of_another(tmp_path):
    assert question("AQuA", 38).startswith("[(272 - 32)")
    row = {"question": "What is 1 + 2 - 3 x 4 x 5 + 6 - 7 x 8 - 9 + 10 / 11 * 12 x 13 - 14?"}
    assert not any(levels(tmp_path, [row], ["AQuA"]).values())


def test_aqua_is_compared_without_its_choices(tmp_path):
    stem = question("AQuA", 1).split("Answer Choices:")[0]
    row = {"question": stem, "options": ["A)10", "B)20"], "correct": "A"}
    assert levels(tmp_path, [row], ["AQuA"])["exact"] == {("AQuA", 1)}


def test_the_threshold(tmp_path):
    cut = " ".join(question("AddSub", 1).split()[:-8])  # "A bucket contains 3 gallons … will there be in all ?"
    share = len(words(cut)) / len(words(question("AddSub", 1)))
    assert levels(tmp_path, [cut], threshold=share - 0.001)["near"] == {("AddSub", 1)}
    assert levels(tmp_path, [cut], threshold=share + 0.001)["near"] == set()
    for wrong in (0, -1, 1.01):
        with pytest.raises(ValueError, match=rf"threshold {wrong} is not in \(0, 1\]"):
            levels(tmp_path, [cut], threshold=wrong)


# The report


def test_the_report(tmp_path):
    (tmp_path / "a.json").write_text(json.dumps([{"prompt": "Nothing to see here."}]))
    rows = [{"q": "-"}, {"q": question("AddSub", 5)}, {"q": question("AddSub", 0).replace("took", "has taken")}]
    (tmp_path / "b.json").write_text(json.dumps({"data": [{"instruction": row["q"]} for row in rows]}))
    report = contamination_report([tmp_path / "a.json", str(tmp_path / "b.json")], ["AddSub"])
    assert report["format"] == "supertune_contamination"
    assert report["version"] == 1
    assert report["rule"] == {"ngram": 5, "threshold": 0.65}
    assert report["train"] == [
        {
            "path": str(tmp_path / name),
            "sha256": hashlib.sha256((tmp_path / name).read_bytes()).hexdigest(),
            "records": count,
            "field": field,
        }
        for name, count, field in (("a.json", 1, "prompt"), ("b.json", 3, "instruction"))
    ]
    entry = report["benchmarks"]["AddSub"]
    template = entry.pop("template")
    assert 0 not in [each["index"] for each in template]
    assert entry == {
        "n": 395,
        "sha256": BENCHMARKS["AddSub"].sha256,
        "exact": [5],
        "exact_train": [[1, 1]],
        "near": [{"index": 0, "train": [1, 2], "overlap": entry["near"][0]["overlap"]}],
        "clean": 393,
    }
    assert 0.65 <= entry["near"][0]["overlap"] < 1

    write_report(report, tmp_path / "new/report.json")
    again = load_report(tmp_path / "new/report.json")
    assert again == report
    assert clean_indices(again, "AddSub") == [index for index in range(395) if index not in (0, 5)]
    assert clean_indices(again, "addsub") == clean_indices(again, "AddSub")
    with pytest.raises(ValueError, match="leaves out SVAMP; it covers AddSub"):
        clean_indices(again, "SVAMP")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda report: report.pop("format"), r"is not a contamination report: it does not say format"),
        (lambda report: report.update(format="other"), r"it does not say format: supertune_contamination"),
        (lambda report: report.update(version=2), r"of version 2, not 1: make it again"),
        (lambda report: report.update(benchmarks=None), r"is damaged: it has no benchmarks"),
        (lambda report: report.update(benchmarks={"mathqa": {}}), r"mathqa is not a benchmark"),
        (lambda report: report["benchmarks"]["AddSub"].update(sha256="0" * 64), r"another AddSub test .*sha256 0000"),
        (lambda report: report["benchmarks"]["AddSub"].update(n=394), r"about another AddSub test file"),
        (lambda report: report["benchmarks"]["AddSub"].update(clean=1), r"entry for AddSub is damaged"),
        (lambda report: report["benchmarks"]["AddSub"].update(exact=[395], clean=394), r"entry for AddSub is damaged"),
        (lambda report: report["benchmarks"]["AddSub"].pop("near"), r"entry for AddSub is damaged"),
        (lambda report: report["benchmarks"]["AddSub"].update(near=[1]), r"entry for AddSub is damaged"),
    ],
)
def test_a_wrong_report_is_refused(tmp_path, change, message):
    (tmp_path / "train.json").write_text(json.dumps([{"prompt": "Nothing to see here."}]))
    report = contamination_report([tmp_path / "train.json"], ["AddSub"])
    change(report)
    path = tmp_path / "report.json"
    path.write_text(json.dumps(report))
    with pytest.raises(ValueError, match=message) as caught:
        load_report(path)
    assert str(path) in str(caught.value)


def test_no_report(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"there is no contamination report .*nowhere\.json"):
        load_report(tmp_path / "nowhere.json")
    (tmp_path / "list.json").write_text("[]")
    with pytest.raises(ValueError, match=r"list\.json is not a contamination report: it does not say format"):
        load_report(tmp_path / "list.json")
    (tmp_path / "cut.json").write_text('{"format": "supertune_cont')
    with pytest.raises(ValueError, match=r"cut\.json is not a contamination report: it is not valid JSON"):
        load_report(tmp_path / "cut.json")


# Reading

ROWS = [{"question": "What is 1 + 1?", "answer": "2"}, {"question": "A line\u2028break and ½?", "answer": "0"}]
LINES = "\n".join(json.dumps(row, ensure_ascii=False) for row in ROWS)


def write_parquet(path):
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), path)


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("a.json", lambda path: path.write_text(json.dumps(ROWS))),
        ("data.json", lambda path: path.write_text(json.dumps({"version": 1, "data": ROWS}))),
        ("lines.json", lambda path: path.write_text(LINES)),
        ("a.jsonl", lambda path: path.write_text(LINES + "\n\n")),
        ("bom.jsonl", lambda path: path.write_text(LINES, encoding="utf-8-sig")),
        ("crlf.jsonl", lambda path: path.write_bytes(LINES.replace("\n", "\r\n").encode())),
        ("a.json.gz", lambda path: path.write_bytes(gzip.compress(json.dumps(ROWS).encode()))),
        ("a.jsonl.gz", lambda path: path.write_bytes(gzip.compress(LINES.encode()))),
        ("a.parquet", write_parquet),
    ],
)
def test_formats(tmp_path, name, write):
    path = tmp_path / name
    write(path)
    training = read_training(path)
    assert training.field == "question"
    assert training.identity == {"sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
    assert [record.question for record in training.records] == [row["question"] for row in ROWS]
    assert [record.texts for record in training.records] == [tuple(row.values()) for row in ROWS]


def test_a_text_that_looks_like_a_date_stays_a_text(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"question": "2024-01-31"}\n')
    assert read_training(tmp_path / "a.jsonl").records[0].texts == ("2024-01-31",)


def test_a_dataset_that_the_hub_s_library_reads(tmp_path, monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "owner").mkdir()
    (tmp_path / "owner/train.jsonl").write_text(LINES)
    training = read_training(tmp_path / "owner")
    assert [record.question for record in training.records] == [row["question"] for row in ROWS]
    assert training.identity.keys() == {"revision"}
    assert training.identity["revision"]


def test_a_hub_id_and_its_config(monkeypatch):
    import datasets

    asked = []

    class Builder:
        hash = "0123abcd"

        def download_and_prepare(self):
            pass

        def as_dataset(self, split):
            asked.append(split)
            return datasets.Dataset.from_list(ROWS)

    def builder(path, config):
        asked.append((path, config))
        return Builder()

    monkeypatch.setattr(datasets, "load_dataset_builder", builder)
    training = read_training("openai/gsm8k:main")
    assert asked == [("openai/gsm8k", "main"), "train"]
    assert training.path == "openai/gsm8k:main"
    assert training.identity == {"revision": "0123abcd"}
    assert len(training.records) == 2


@pytest.mark.parametrize(
    ("row", "field", "text"),
    [
        ({"question": "q", "answer": "a"}, "question", "q"),
        ({"answer": "a", "input": "", "instruction": "i"}, "instruction", "i"),
        ({"instruction": "", "question": "q"}, "question", "q"),
        ({"prompt": "p", "text": "t"}, "prompt", "p"),
        ({"problem": "p", "solution": "s"}, "problem", "p"),
        ({"query": "q", "response": "r"}, "query", "q"),
        ({"Body": "b", "Question": "q"}, "Question", "q"),
        ({"text": "t"}, "text", "t"),
        (
            {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]},
            "messages",
            "u",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "u"}]}]}, "messages", "text"),
        ({"conversations": [{"from": "human", "value": "h"}, {"from": "gpt", "value": "g"}]}, "conversations", "h"),
    ],
)
def test_the_question_column_is_found(tmp_path, row, field, text):
    (tmp_path / "train.json").write_text(json.dumps([row]))
    training = read_training(tmp_path / "train.json")
    assert (training.field, training.records[0].question) == (field, text)


def test_the_question_column_can_be_named(tmp_path):
    (tmp_path / "train.json").write_text(json.dumps([{"prompt": "p"}, {"prompt": "p", "exercise": "e"}]))
    training = read_training(tmp_path / "train.json", "exercise")
    assert (training.field, [record.question for record in training.records]) == ("exercise", ["", "e"])
    with pytest.raises(ValueError, match=r"no record has text in task; the columns are prompt, exercise"):
        read_training(tmp_path / "train.json", "task")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b"", r"a\.jsonl cannot be read as training data: the file is empty"),
        ("a.jsonl", b"\n\n", r"a\.jsonl holds no training record"),
        ("a.json", b"[]", r"a\.json holds no training record"),
        ("a.json", b'[{"question": "q"}', r"a\.json cannot be read as training data: Expecting ',' delimiter"),
        ("a.json", b"3", r"it holds one int, neither a list nor lines"),
        ("a.json", b'["q"]', r"a\.json: record 0 is a str, not an object"),
        ("a.jsonl", b'{"question": "q"}\n{"questi', r"a\.jsonl cannot be read as training data: line 2: Unterminated"),
        ("a.jsonl", b'{"question": "\xff"}', r"a\.jsonl cannot be read .*utf-8"),
        ("a.jsonl.gz", b"not gzip", r"a\.jsonl\.gz cannot be read as training data: .*gzip"),
        ("a.parquet", b"not parquet", r"a\.parquet cannot be read as training data"),
        ("a.csv", b"question\nq\n", r"its name ends in none of \.json, \.jsonl"),
        ("a.json", b'[{"q": "q", "a": 1}]', r"a\.json: no question column; the columns are q, a, .*--field"),
        ("a.json", b'[{"input_ids": [1, 2]}]', r"no question column; the columns are input_ids"),
    ],
)
def test_a_file_that_cannot_serve_is_refused(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_training(tmp_path / name)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"there is no training file .*nowhere\.jsonl"):
        read_training(tmp_path / "nowhere.jsonl")
    with pytest.raises(
        ValueError, match=r"there is no training file nobody/nothing, and as a hub dataset .*OWNER/NAME"
    ):
        read_training("nobody/nothing")


# The command


@pytest.fixture
def train(tmp_path):
    path = tmp_path / "train.jsonl"
    rows = [question("AddSub", 5), question("AddSub", 0).replace("took", "has taken"), "Nothing to see here."]
    path.write_text("".join(json.dumps({"question": row}) + "\n" for row in rows))
    return path


def invoke(*arguments):
    return CliRunner().invoke(contamination, [str(each) for each in arguments])


def test_the_command_prints_a_table_and_writes_a_report(train, tmp_path):
    result = invoke(train, "--output", tmp_path / "report.json")
    assert result.exit_code == 0, result.output
    assert f"{train}: 3 records, questions in question" in result.output
    table = [line.split() for line in result.output.splitlines()]
    assert next(line for line in table if line[:1] == ["AddSub"])[:6] == ["AddSub", "395", "1", "1", "393", "99.5"]
    assert next(line for line in table if line[:1] == ["all"])[:3] == ["all", "4076", "2"]  # SingleEq repeats AddSub 5
    assert load_report(tmp_path / "report.json") == contamination_report([train])
    assert "test:" not in result.output


def test_the_command_lists(train):
    listing = invoke(train, "--list", "near", "--list", "exact")
    assert listing.exit_code == 0
    assert f"exact AddSub 5 = {train} 0, overlap 1.00" in listing.output
    assert f"near AddSub 0 = {train} 1, overlap 0." in listing.output
    assert " ".join(question("AddSub", 0).split()) in listing.output
    assert "train: There are 7 crayons in the drawer . Mary has taken 3 " in listing.output
    assert "template " not in listing.output.split("overlap", 1)[1]


def test_the_command_s_options(train, tmp_path):
    assert json.loads(train.read_text().splitlines()[0]).keys() == {"question"}
    strict = invoke(train, "--threshold", "1", "--field", "question", "--data-dir", DATA, "--list", "near")
    assert strict.exit_code == 0
    assert "near AddSub 0" not in strict.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere.jsonl"], "Error: there is no training file nowhere.jsonl"),
        (["{train}", "--field", "task"], "no record has text in task"),
        (["{train}", "--data-dir", "nowhere"], "Error: AddSub: there is no folder nowhere"),
        (["{train}", "--threshold", "2"], "Error: threshold 2.0 is not in (0, 1]"),
        (["{train}", "{train}.bak"], "Error: there is no training file "),
    ],
)
def test_the_command_s_errors(train, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    result = invoke(*(each.format(train=train) for each in arguments), "--output", "report.json")
    assert result.exit_code == 1
    assert message in result.output
    assert "Traceback" not in result.output
    assert not (tmp_path / "report.json").exists()


def test_the_command_names_a_damaged_benchmark(train, tmp_path):
    shutil.copytree(DATA, tmp_path / "data")
    os.chmod(tmp_path / "data", 0o755)
    (tmp_path / "data/SVAMP.json").unlink()
    (tmp_path / "data/SVAMP.json").write_text("[]")
    result = invoke(train, "--data-dir", tmp_path / "data")
    assert result.exit_code == 1
    assert "SVAMP.json is not the published SVAMP test file: it holds 0 records, expected 1000" in result.output


# The real training sets, recounted


def squashed(text):
    """Another way to the same equality: letters, digits and decimal points alone, without any space."""
    text = unicodedata.normalize("NFKC", text).casefold()
    kept = []
    for at, letter in enumerate(text):
        inside = text[at - 1 : at].isdigit() and text[at + 1 : at + 2].isdigit()
        if letter.isalnum() or (letter == "." and inside):
            kept.append(letter)
    return "".join(kept)


@pytest.mark.parametrize(("path", "column"), [(MATH, "instruction"), (GSM8K, "question")], ids=["math", "gsm8k"])
@pytest.mark.slow
def test_exact_matches_recounted(reports, path, column):
    text = path.read_text(encoding="utf-8")
    rows = json.loads(text) if path.suffix == ".json" else [json.loads(line) for line in text.splitlines()]
    seen = {squashed(row[column].split("Answer Choices")[0]) for row in rows}
    for name, entry in reports(path)["benchmarks"].items():
        records = json.loads((DATA / f"{name}.json").read_text(encoding="utf-8"))
        again = [
            at for at, row in enumerate(records) if squashed(row["instruction"].split("Answer Choices")[0]) in seen
        ]
        assert again == entry["exact"], name
        for index, (number, at) in zip(entry["exact"], entry["exact_train"], strict=True):
            assert number == 0
            assert squashed(records[index]["instruction"].split("Answer Choices")[0]) in squashed(rows[at][column])


@pytest.mark.slow
def test_the_counts(reports):
    def counts(path):
        entries = reports(path)["benchmarks"].items()
        return {name: (len(entry["exact"]), len(entry["near"]), entry["clean"]) for name, entry in entries}

    assert counts(MATH) == {
        "AddSub": (334, 11, 50),
        "MultiArith": (491, 1, 108),
        "SingleEq": (428, 17, 63),
        "gsm8k": (1055, 0, 264),
        "AQuA": (203, 0, 51),
        "SVAMP": (800, 4, 196),
    }
    assert counts(GSM8K) == {name: (0, 0, benchmark.records) for name, benchmark in BENCHMARKS.items()}


@functools.cache
def plain_words(text):
    """The definition once more, letter by letter."""
    text = re.sub(r"(?<=\d),(?=\d\d\d(?:\D|$))", "", unicodedata.normalize("NFKC", text).casefold())
    spaced = ""
    for at, letter in enumerate(text):
        kind = "digit" if letter.isdecimal() else "letter" if letter.isalpha() else "other"
        if letter == "." and text[at - 1 : at].isdecimal() and text[at + 1 : at + 2].isdecimal():
            kind = "digit"
        before = spaced[-1:]
        if kind == "other" or (before.isalpha() and kind == "digit") or (before.isdecimal() and kind == "letter"):
            spaced += " "
        spaced += "" if kind == "other" else letter
    return spaced.split()


@functools.cache
def without_numbers(text):
    return [re.sub(r"^\d.*", "#", word) for word in plain_words(text)]


def brute_force(question, text):
    """The share of the question's words in shared runs of five, and whether its numbers are near these runs."""
    asked, given = plain_words(question), plain_words(text)
    pattern, hidden = without_numbers(question), without_numbers(text)
    covered, places = set(), []
    line = f" {' '.join(hidden)} "
    for at in range(len(asked) - 4):
        run = pattern[at : at + 5]
        if run.count("#") <= 3 and f" {' '.join(run)} " in line:
            covered |= set(range(at, at + 5))
            places.append(next(k for k in range(len(hidden)) if hidden[k : k + 5] == run))
    if not places:
        return 0.0, False
    room = 5 + len(asked) - len(covered)
    near_by = given[max(0, min(places) - room) : max(places) + 5 + room]
    numbers = [word for word in asked if word[0].isdecimal()]
    same = all(numbers.count(number) <= near_by.count(number) for number in numbers)
    return len(covered) / len(asked), same


@pytest.mark.slow
def test_near_duplicates_recounted(tmp_path):
    draw = random.Random(0)
    rows = draw.sample(json.loads(MATH.read_text()), 1000)
    path = tmp_path / "train.json"
    path.write_text(json.dumps([{"question": row["instruction"]} for row in rows]))
    report = contamination_report([path], ["AddSub", "SingleEq", "SVAMP"])
    compared = 0
    for name, entry in report["benchmarks"].items():
        records = json.loads((DATA / f"{name}.json").read_text())
        # All of what is hit, and as many others.
        hit = {each["index"] for level in ("near", "template") for each in entry[level]}
        rest = [index for index in range(len(records)) if index not in hit and index not in entry["exact"]]
        chosen = sorted({*draw.sample(sorted(hit), min(len(hit), 40)), *draw.sample(rest, 20)})
        near, template = {}, {}
        for index in chosen:
            for at, row in enumerate(rows):
                overlap, same = brute_force(records[index]["instruction"], row["instruction"])
                level = near if same else template
                if overlap >= 0.65 and overlap > level.get(index, (0.0, 0))[0]:
                    level[index] = (overlap, at)
            if index in near:
                template.pop(index, None)
        for level, again in (("near", near), ("template", template)):
            found = {each["index"]: (each["overlap"], each["train"][1]) for each in entry[level]}
            assert {index: found[index] for index in chosen if index in found} == {
                index: (round(overlap, 4), at) for index, (overlap, at) in again.items()
            }, (name, level)
            compared += len(again)
    assert compared > 30
