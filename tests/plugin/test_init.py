"""`axolotl supertune init`: what it tells of data and base, the YAML that it writes, and trainings of that YAML."""

import csv
import json
import re
from pathlib import Path

import pandas
import pyarrow
import pytest
import yaml
from click.testing import CliRunner
from datasets import load_dataset
from pandas._libs.parsers import STR_NA_VALUES
from pyarrow.parquet import write_table
from tiny_llama import save_llama
from trainings import eval_losses
from transformers import AutoTokenizer, LlamaConfig

from axolotl_supertune.commands.cli import supertune
from axolotl_supertune.method.selected_rates import selected_rates
from axolotl_supertune.plugin.init.base import choose_tokens, read_base
from axolotl_supertune.plugin.init.csv_columns import NOTHING, CsvColumns
from axolotl_supertune.plugin.init.data_format import read_data
from axolotl_supertune.plugin.init.init import init
from axolotl_supertune.plugin.init.lengths import measure
from axolotl_supertune.plugin.init.placement import on_cpu
from axolotl_supertune.plugin.init.schedule import STEPS_OF_OURS, choose_method, for_batch, make_schedule
from axolotl_supertune.plugin.init.yaml_text import Comment, Key, yaml_text
from axolotl_supertune.plugin.plan.plan import make

GIB = 2**30
ALPACA = {"instruction": "Add 1 and 2.", "input": "", "output": "3"}
CHAT = {"messages": [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Good day"}]}
SHAREGPT = {"conversations": [{"from": "human", "value": "Hello"}, {"from": "gpt", "value": "Good day"}], "id": 1}
PAIR = {"question": "What is 1 + 2?", "answer": "It is 3."}


@pytest.fixture
def file(tmp_path):
    """A function (records, name) → a file of them; a text is a line as it is."""

    def make(records, name="data.jsonl"):
        path = tmp_path / name
        if name.endswith(".json"):
            path.write_text(json.dumps(records))
        elif name.endswith(".parquet"):
            write_table(pyarrow.Table.from_pylist(records), path)
        elif name.endswith(".csv"):
            with path.open("w", newline="") as target:
                writer = csv.DictWriter(target, list(records[0]))
                writer.writeheader()
                writer.writerows(records)
        else:
            lines = (record if isinstance(record, str) else json.dumps(record) for record in records)
            path.write_text("\n".join(lines))
        return path

    return make


@pytest.fixture
def records(problems):
    """The word problems, as Alpaca records."""
    return [json.loads(line) for line in problems[0].read_text().splitlines()]


# --- The data ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".parquet", ".csv"])
def test_records_are_read_from_every_kind_of_file(file, suffix):
    data = read_data(file([PAIR, PAIR | {"question": "Again?"}], f"data{suffix}"))
    assert (data.count, data.usable, data.format.label) == (2, 2, "question/answer")


@pytest.mark.parametrize(
    ("record", "label", "dataset"),
    [
        (ALPACA, "alpaca", {"type": "alpaca"}),
        ({"instruction": "a", "output": "b", "text": "a b"}, "alpaca", {"type": "alpaca"}),
        (CHAT, "chat", {"type": "chat_template"}),
        (
            SHAREGPT,
            "chat",
            {
                "type": "chat_template",
                "field_messages": "conversations",
                "message_property_mappings": {"role": "from", "content": "value"},
            },
        ),
        ({"text": "Once"}, "completion", {"type": "completion"}),
        ({"story": "Once"}, "completion", {"type": "completion", "field": "story"}),
    ],
)
def test_a_format_is_told_by_its_columns(file, record, label, dataset):
    found = read_data(file([record])).format
    assert (found.label, found.dataset()) == (label, dataset)


@pytest.mark.parametrize(
    ("record", "fields"),
    [
        (PAIR, {"field_instruction": "question", "field_output": "answer"}),
        ({"prompt": "a", "response": "b"}, {"field_instruction": "prompt", "field_output": "response"}),
        (
            {"instruction": "a", "context": "c", "response": "b"},
            {"field_instruction": "instruction", "field_output": "response", "field_input": "context"},
        ),
        # Axolotl reads a column `input` beside the prompt unless it is told another one.
        (
            {"input": "a", "output": "b"},
            {"field_instruction": "input", "field_output": "output", "field_input": "no column"},
        ),
    ],
)
def test_pairs_of_columns_are_mapped(file, record, fields):
    kind = read_data(file([record])).format.dataset()["type"]
    assert {key: value for key, value in kind.items() if key.startswith("field_")} == fields
    assert ("{input}" in kind.get("format", "")) == (fields.get("field_input") == "context")
    assert kind["no_input_format"].endswith("### Instruction:\n{instruction}\n\n### Response:\n")


def test_a_column_that_only_later_records_have_is_read_and_measured(base, file):
    """Axolotl reads `input` wherever it is there; the first record alone does not say."""
    alpaca = {"instruction": "Add 1 and 2.", "output": "3"}
    data = read_data(file([alpaca, alpaca, alpaca | {"input": 40 * "many words "}]))
    assert (data.format.label, data.format.columns, data.unused) == ("alpaca", ("instruction", "input", "output"), ())
    short = read_data(file([alpaca, alpaca], "short.jsonl"))
    found = read_base(str(base))
    assert measure(data, found, None).longest > measure(short, found, None).longest + 40

    data = read_data(file([PAIR, PAIR | {"context": "c", "input": "stray"}]))
    kind = data.format.dataset()["type"]
    assert (kind["field_input"], "{input}" in kind["format"], data.unused) == ("context", True, ("input",))
    data = read_data(file([PAIR, PAIR | {"input": "c"}]))
    assert (data.format.dataset()["type"]["field_input"], data.unused) == ("input", ())


@pytest.mark.parametrize("first", ["context", "input"])
def test_further_input_in_two_columns_is_an_error(file, first):
    other = {"context": "input", "input": "context"}[first]
    with pytest.raises(ValueError, match=f"line 3: its further input is in {other}, that of other records in {first}"):
        read_data(file([PAIR, PAIR | {first: "c"}, PAIR | {other: "c"}]))


def test_a_system_prompt_that_axolotl_reads_is_measured(base, file):
    found = read_base(str(base))
    data = read_data(file([PAIR | {"system": 40 * "many words "}]))
    assert measure(data, found, None).longest > measure(read_data(file([PAIR])), found, None).longest + 40


def test_other_names_of_roles_are_mapped(file):
    record = {"messages": [{"role": "human", "content": "Hello"}, {"role": "bot", "content": "Good day"}]}
    roles = read_data(file([record])).format.dataset()["roles"]
    assert roles["assistant"] == ["assistant", "gpt", "bot"]
    assert roles["user"] == ["user", "human"]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "the file is empty; it needs at least one record"),
        (["", " "], "there is no record in it"),
        ([ALPACA, '{"instruction": '], "line 2 is no JSON"),
        ([ALPACA, "[1]"], "line 2 is list, not an object with columns"),
        ([{"a": 1, "b": "x", "c": None}], r"Columns of line 1: a \(a number\), b \(text\), c \(empty\). Known"),
        ([{"prompt": "a", "chosen": "b", "rejected": "c"}], "chosen and rejected .* not supported"),
        ([CHAT | {"chosen": CHAT["messages"], "rejected": []}], "chosen and rejected .* not supported"),
        ([ALPACA, {"instruction": "a"}], r"1 of 2 records do not fit .* alpaca .*line 2: output is missing"),
        ([ALPACA, ALPACA | {"output": 3}], "line 2: output is a number, not text"),
        ([ALPACA, ALPACA | {"output": None}], "line 2: output is missing"),
        ([ALPACA, CHAT], r"line 2: looks like chat \(messages\)"),
        ([ALPACA | {"output": ""}], "no record has an answer or a text to learn; output is empty"),
        ([CHAT, {"messages": []}], "line 2: messages is no list of messages"),
        ([CHAT, {"messages": [{"role": "user", "content": "a"}]}], "line 2: no message is the assistant's"),
        ([CHAT, {"messages": [{"role": "judge", "content": "a"}]}], "message 1: the role 'judge' is unknown"),
        ([CHAT, {"messages": [{"role": "user", "content": ["a"]}]}], "message 1: content is a list, not text"),
        ([CHAT, {"messages": [{"content": "a"}]}], "message 1 has no role"),
        ([CHAT] + 5 * [{"messages": None}], "5 of 6 records .*line 2.*line 3.*line 4: messages is missing; and 2 more"),
        ([{"text": "a"}, {"text": None}], "line 2: text is missing"),
        ([ALPACA | {"instruction": None}, ALPACA], "1 of 2 .* alpaca .*line 1: instruction is missing"),
        ([{"messages": json.dumps(CHAT["messages"])}], "messages of line 1 is text and not a list of messages"),
        ([ALPACA, '{"instruction": "\\ud800", "output": "b"}'], "line 2 holds .* half of a character"),
    ],
)  # fmt: skip
def test_data_that_would_not_train_is_an_error(file, lines, message):
    path = file(lines)
    if not lines:
        path.write_text("")
    with pytest.raises(ValueError, match=message) as caught:
        read_data(path)
    assert str(caught.value).startswith(f"--data {path}: ")


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("data.txt", "Once", "its name ends in none of .jsonl, .json, .parquet, .csv"),
        ("data.json", '[{"text": "a"}, ', "no JSON"),
        ("data.csv", "question,answer\na,b,c\n", "record 1, which ends in line 2, has not as many fields"),
        ("data.csv", "question,answer\na,3\nb,4\n", "the column answer holds only numbers"),
        ("data.csv", "question,answer\na,b\nb,\n", "1 records have a field .* record 2: an empty answer"),
        ("data.csv", 'question,answer\na,b\nb,NA\nc,"None"\n', "record 2: answer is 'NA'; record 3: answer is 'None'"),
        ("data.csv", "question,answer\na,b\nnull,b\n", "record 2: question is 'null'"),
        ("data.csv", "text\n" + 9 * "nan\n" + "a\n", "9 records .* record 3: text is 'nan'; and 6 more"),
        ("data.csv", "question,answer\na,True\nb,false\n", "the column answer holds only true and false"),
        ("data.csv", "question,answer\na,inf\nb,nan\n", "the column answer holds only numbers"),
        ("data.csv", "question,input,answer\na,1.5,x\nb,,y\n", "the column input holds only numbers"),
        ("data.csv", "instruction;output\na;b\n", "one column, 'instruction;output'. .* commas .*not ';'"),
        ("data.json", '\ufeff[{"text": "a"}]', "byte order mark. Save it as UTF-8 without one"),
        ("data[0].jsonl", "{}", r"\[, \], \* and \? in a path for a pattern .*data\[0\].jsonl"),
        ("data.parquet", "question", "no Parquet file"),
    ],
)
def test_files_that_cannot_be_read_are_an_error(tmp_path, name, text, message):
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=message):
        read_data(tmp_path / name)


def test_what_a_csv_loses_is_what_pandas_loses(tmp_path):
    assert NOTHING == STR_NA_VALUES
    columns = ["1,2", "1.,.5", " 3 ,-1e5", "inf,-Infinity", " inf,2", "1.2.3,2.0", "1_0,2", "True,FALSE", "tRue,True"]
    columns += [" True,False", "1,True", "1e,2", "e5,1", ".,1", "0x1F,2", "2020-01-01,2", "1,a", "true,NA", "1,NaN"]
    path = tmp_path / "data.csv"
    for fields in columns:
        path.write_text("text\n" + "".join(f"{field}\n" for field in fields.split(",")))
        found = CsvColumns(path)
        for field in fields.split(","):
            found.add("record", {"text": field}, ["text"], "text")
        if pandas.api.types.is_string_dtype(pandas.read_csv(path)["text"].dropna()):
            found.check()
        else:
            with pytest.raises(ValueError, match="the column text holds only"):
                found.check()


def test_further_input_in_a_csv_may_be_empty(file):
    assert read_data(file([PAIR | {"input": "x"}, PAIR | {"input": ""}, PAIR | {"input": "NA"}], "d.csv")).count == 3


@pytest.mark.parametrize(("name", "text"), [("a.csv", "text,id\nx,1\n"), ("a.jsonl", '{"text": "x"}\n')])
def test_a_byte_order_mark_is_read_where_axolotl_reads_it(tmp_path, name, text):
    (tmp_path / name).write_text("\ufeff" + text, encoding="utf-8")
    assert read_data(tmp_path / name).format.columns == ("text",)
    loaded = load_dataset(name[2:].replace("jsonl", "json"), data_files=str(tmp_path / name), cache_dir=str(tmp_path))
    assert loaded["train"].column_names[0] == "text"


def test_a_missing_file_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError, match="there is no file"):
        read_data(tmp_path / "none.jsonl")
    with pytest.raises(ValueError, match="a folder"):
        read_data(tmp_path)


def test_records_that_teach_nothing_are_named(file):
    data = read_data(file([ALPACA, ALPACA | {"output": " "}, ALPACA | {"source": "me"}]))
    assert (data.count, data.usable, data.empty, data.unused) == (3, 2, ["line 2"], ("source",))


def test_columns_that_axolotl_reads_unasked_are_told(file):
    data = read_data(file([PAIR | {"system": "Be brief.", "id": 1}]))
    assert (data.read_too, data.unused) == (("system",), ("id",))
    data = read_data(file([CHAT | {"tools": [], "id": 1}]))
    assert (data.read_too, data.unused) == (("tools",), ("id",))


# --- The base ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def tokenizer_of(tmp_path, base):
    """A function (**changes) → a base whose tokenizer is the tests' with these changes."""

    def make(tokens=(), **changes):
        tokenizer = AutoTokenizer.from_pretrained(base)
        tokenizer.add_tokens(list(tokens), special_tokens=True)
        for name, value in changes.items():
            setattr(tokenizer, name, value)
        folder = tmp_path / "base"
        tokenizer.save_pretrained(folder)
        (folder / "config.json").write_text((base / "config.json").read_text())
        return read_base(str(folder))

    return make


def test_a_base_with_a_template_keeps_it(tokenizer_of):
    template = "{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
    found = choose_tokens(tokenizer_of(chat_template=template), is_chat=True)
    assert (found.chat_template, found.special, found.warnings) == ("tokenizer_default", [], [])
    assert not found.turn_end
    found = choose_tokens(tokenizer_of(chat_template=template.replace("{{ eos_token }}", "")), is_chat=True)
    assert "writes no token after an answer" in found.warnings[0]


def test_another_token_that_ends_an_answer_is_learnt(tokenizer_of, file, tmp_path):
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}<|end|>{% endfor %}"
    found = tokenizer_of(tokens=["<|end|>", "<|other|>"], chat_template=template)
    assert choose_tokens(found, is_chat=True).turn_end == "<|end|>"
    written = init(found.name, file(30 * [CHAT]), tmp_path / "run.yml")
    assert yaml.safe_load(written.text)["eot_tokens"] == ["<|end|>"]
    assert not make(yaml.safe_load(written.text)).refusals


def test_a_base_with_the_tokens_of_chatml_gets_it(tokenizer_of):
    found = choose_tokens(tokenizer_of(tokens=["<|im_start|>", "<|im_end|>"]), is_chat=True)
    assert (found.chat_template, [each[:2] for each in found.special]) == ("chatml", [("eos_token", "<|im_end|>")])


def test_any_other_base_gets_a_template_of_plain_text(tokenizer_of):
    found = choose_tokens(tokenizer_of(), is_chat=True)
    assert found.chat_template == "alpaca"
    assert "chatml needs <|im_start|> and <|im_end|>" in found.chat_reason
    assert not choose_tokens(tokenizer_of(), is_chat=False).chat_template


def test_a_missing_pad_or_end_token_is_filled_in(tokenizer_of):
    found = choose_tokens(tokenizer_of(pad_token=None), is_chat=False)
    assert [each[:2] for each in found.special] == [("pad_token", "</s>")]
    found = choose_tokens(tokenizer_of(pad_token=None, eos_token=None), is_chat=False)
    assert [each[:2] for each in found.special] == [("eos_token", "</s>"), ("pad_token", "</s>")]


def test_another_end_token_than_the_models_is_told(tokenizer_of):
    found = choose_tokens(tokenizer_of(eos_token="<s>"), is_chat=False)
    assert found.warnings[0].startswith("the tokenizer ends a text with <s>, the model's config with </s>")


def test_a_base_without_a_tokenizer_is_planned_with_a_comment(tmp_path, file):
    LlamaConfig(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4).save_pretrained(
        tmp_path / "base"
    )
    written = init(str(tmp_path / "base"), file(30 * [CHAT]), tmp_path / "run.yml")
    assert "# The tokenizer could not be loaded" in written.text
    assert yaml.safe_load(written.text)["chat_template"] == "tokenizer_default_fallback_alpaca"
    assert "the longest record has about" in written.text


def test_a_base_that_is_not_here_is_an_error(file, tmp_path):
    with pytest.raises(FileNotFoundError, match="there is no folder"):
        init(str(tmp_path / "none"), file([ALPACA]), Path("run.yml"))
    with pytest.raises(ValueError, match=r"--base owner/none: .* cannot be read.*hf download owner/none"):
        init("owner/none", file([ALPACA]), Path("run.yml"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"quantization_config": {"quant_method": "gptq", "bits": 4}},
            "is quantized by gptq. SUPRA adapts unquantized",
        ),
        ({"hidden_size": "many"}, "its config.json cannot be used: .*hidden_size.*many"),
        (None, "is not a valid JSON file"),
    ],
)
def test_a_base_that_cannot_be_trained_is_one_line(base, file, tmp_path, changes, message):
    folder = tmp_path / "base"
    folder.mkdir()
    config = "{" if changes is None else json.dumps(json.loads((base / "config.json").read_text()) | changes)
    (folder / "config.json").write_text(config)
    with pytest.raises(ValueError, match=message) as caught:
        read_base(str(folder))
    assert str(caught.value).startswith(f"--base {folder}: ")
    assert "\n" not in str(caught.value)
    assert "hf download" not in str(caught.value)
    assert "without the hub" not in str(caught.value)


@pytest.mark.parametrize("name", ["", __file__])
def test_a_base_is_a_folder_or_a_name(name):
    with pytest.raises(ValueError, match=f"--base '{name}': .*Name the folder of a model, or a model on the hub"):
        read_base(name)


@pytest.mark.parametrize(
    ("text", "remedy"),
    [
        ('{"base_model_name_or_path": "owner/base"}', "Name its base: --base owner/base"),
        ("[]", "Name the model that it was trained on"),
    ],
)
def test_an_adapter_is_no_base(tmp_path, text, remedy):
    (tmp_path / "adapter_config.json").write_text(text)
    with pytest.raises(ValueError, match=f"an adapter and no model. {remedy}, or merge"):
        read_base(str(tmp_path))


# --- Lengths, schedule, memory ----------------------------------------------------------------------------------------


def test_the_sequence_length_is_that_of_the_longest_record(base, file):
    found = read_base(str(base))
    short = measure(read_data(file([ALPACA])), found, None)
    assert (short.sequence_len % 64, short.longer) == (0, 0)
    assert short.sequence_len - 64 < short.longest <= short.sequence_len
    long = measure(read_data(file([ALPACA, ALPACA | {"output": 400 * "many words "}])), found, None)
    assert (long.sequence_len, long.longer) == (512, 1), "as much as the base takes"


def test_a_record_that_the_chat_template_refuses_is_named(tokenizer_of, file):
    refusing = tokenizer_of(chat_template="{{ raise_exception('roles must alternate') }}")
    with pytest.raises(ValueError, match="chat template refuses line 1: roles must alternate"):
        measure(read_data(file([CHAT])), refusing, choose_tokens(refusing, is_chat=True).template)


@pytest.mark.parametrize(
    ("records", "training", "validation", "epochs", "batch", "steps"),
    [
        (1, 1, 0, 5, 1, 5),
        (15, 15, 0, 5, 4, 19),
        (48, 40, 8, 5, 4, 50),
        (200, 180, 20, 3, 4, 135),
        (1000, 896, 104, 3, 8, 336),
        (3000, 2800, 200, 3, 16, 525),
        (17000, 16800, 200, 1, 16, 1050),
    ],
)
def test_a_small_file_gets_more_passes_and_smaller_batches(records, training, validation, epochs, batch, steps):
    found = make_schedule(records)
    assert (found.training, found.validation, found.epochs, found.batch, found.steps) == (
        training, validation, epochs, batch, steps,
    )  # fmt: skip
    assert 1 <= found.warmup <= 100
    assert found.calibration == min(128, training)


def test_the_rate_is_that_of_runs_with_as_many_steps():
    assert choose_method("supra", 8_000_000_000, 135).rate.learning_rate == 5e-4
    assert choose_method("supra", 8_000_000_000, 3000).rate.learning_rate == 1e-4
    assert choose_method("supra", 135_000_000, 135).rate.sparse_lr == 1e-2


def test_small_batches_get_lower_rates(base, file, tmp_path):
    assert [for_batch(1e-2, batch) for batch in (16, 8, 4, 1)] == [1e-2, 7.1e-3, 5e-3, 2.5e-3]
    text = init(str(base), file(60 * [ALPACA]), tmp_path / "run.yml").text
    assert (yaml.safe_load(text)["learning_rate"], yaml.safe_load(text)["sparse_lr"]) == (1e-3, 5e-3)
    assert "# Selected: 2e-3 and 1e-2; here times √(4/16)" in text


def test_a_score_that_did_poorly_is_not_chosen():
    poor = choose_method("super", 8_000_000_000, 1000)
    assert poor.score == "magnitude"
    assert "wanda 22.3 %" in poor.score_reason
    assert choose_method("super", 8_000_000_000, 3000).score == "wanda"


def test_what_the_yaml_says_of_lambda_is_so():
    rows = [row for row in selected_rates() if (row.method, row.direction) == ("Supra", "bottom") and row.did_poorly]
    assert [row.supra_lambda for row in rows] == [0.3, 0.3]


def test_what_the_yaml_says_of_our_run_is_so():
    results = Path(__file__).parents[2] / "examples/paper/results/smollm2-135m"
    for run in ("runs/super-bottom/lr0.01-ep1-seed0", "more-rates/supra-0.8-two-rates/lr0.002-ep1-seed0"):
        assert json.loads((results / run / "run.json").read_text())["steps"] == STEPS_OF_OURS


def test_a_cpu_gets_few_tokens_at_a_time():
    assert [(p.micro_batch, p.accumulation) for p in (on_cpu(16, 256), on_cpu(8, 1024), on_cpu(3, 4096))] == [
        (4, 4), (2, 4), (1, 3),
    ]  # fmt: skip


def test_what_fits_is_what_the_plan_says(tmp_path, file):
    llama = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32}
    LlamaConfig(**llama, num_key_value_heads=8, vocab_size=128256, max_position_embeddings=8192).save_pretrained(
        tmp_path / "base"
    )
    data = file(8000 * [PAIR | {"answer": 200 * "words "}])
    keys = ("micro_batch_size", "gradient_checkpointing", "load_in_4bit")
    chosen = {}
    for size in (120, 24, 12, 4):
        written = init(str(tmp_path / "base"), data, tmp_path / "run.yml", gpu_memory=size * GIB)
        mapping = yaml.safe_load(written.text)
        plan = make(mapping)
        plan.gpu_memory = size * GIB
        assert not plan.refusals
        assert plan.fits == (size > 4)
        assert mapping["micro_batch_size"] * mapping["gradient_accumulation_steps"] == 16
        assert f"Planned for a GPU of {size} GiB" in written.text.replace("\n# ", " ")
        chosen[size] = tuple(mapping.get(key) for key in keys)
    assert chosen[120][1:] == (None, None)
    assert chosen[24][1:] == (True, None)
    assert chosen[12][1:] == (True, True)
    assert chosen[4][0] == 1
    assert "it does not fit" in written.text.replace("\n# ", " ")
    assert written.warnings


def test_the_gpu_that_is_here_is_planned_for(base, file, tmp_path, monkeypatch):
    monkeypatch.setattr("axolotl_supertune.plugin.init.init._memory_of_the_gpu_here", lambda: 24.0 * GIB)
    text = init(str(base), file(30 * [PAIR]), tmp_path / "run.yml").text
    assert "the GPU that was seen here (24 GiB)" in text.replace("\n# ", " ")
    assert yaml.safe_load(text)["bf16"] == "auto"


# --- The YAML ---------------------------------------------------------------------------------------------------------


def test_keys_are_written_as_yaml_reads_them():
    text = yaml_text(
        [Key("a", 5e-4, "why"), Key("b", 0.01), None, Comment("x " * 100), Key("c", {"d": "1\n2"}, "why " * 40)]
    )
    assert yaml.safe_load(text) == {"a": 5e-4, "b": 0.01, "c": {"d": "1\n2"}}
    assert max(map(len, text.splitlines())) <= 120
    assert 'd: "1\\n2"' in text


@pytest.mark.parametrize("adapter", ["supra", "super"])
@pytest.mark.parametrize(
    "record", [ALPACA, CHAT, SHAREGPT, PAIR, {"text": "Once"}], ids=lambda record: next(iter(record))
)
def test_the_yaml_is_planned_without_refusals(base, file, tmp_path, adapter, record):
    written = init(str(base), file(60 * [record]), tmp_path / "run.yml", adapter=adapter)
    mapping = yaml.safe_load(written.text)
    plan = make(mapping)
    assert not plan.refusals
    assert not written.warnings
    uncommented = [line for line in written.text.splitlines() if not line.startswith("#") and len(line) > 120]
    assert not [line for line in uncommented if "format" not in line]
    # On a CPU, and with a rate that says where it comes from.
    assert mapping["bf16"] is False
    assert re.search(r"# From our runs: Sup", written.text)
    with_gpu = yaml.safe_load(init(str(base), file(60 * [record]), tmp_path / "x.yml", gpu_memory=8 * GIB).text)
    assert (with_gpu["bf16"], with_gpu["output_dir"]) == ("auto", "outputs/x")


def as_chat(record):
    return {
        "conversations": [
            {"from": "human", "value": record["instruction"]},
            {"from": "gpt", "value": record["output"]},
        ]
    }


def as_text(record):
    return {"text": f"{record['instruction']} {record['output']}"}


def as_pair(record):
    return {"question": record["instruction"], "answer": record["output"]}


@pytest.mark.parametrize(("count", "epochs", "evaluations"), [(200, 3, 1), (6000, 1, 2)])
def test_every_yaml_evaluates(base, file, tmp_path, count, epochs, evaluations):
    """Axolotl evaluates nothing where evals_per_epoch · num_epochs is 1."""
    data = file([ALPACA | {"instruction": f"Add 1 and {number}."} for number in range(count)])
    mapping = yaml.safe_load(init(str(base), data, tmp_path / "run.yml").text)
    assert (mapping["num_epochs"], mapping["evals_per_epoch"]) == (epochs, evaluations)


@pytest.mark.parametrize("change", [dict, as_chat, as_text, as_pair], ids=["alpaca", "chat", "completion", "pair"])
def test_the_yaml_trains(base, records, file, train, tmp_path, monkeypatch, change):
    monkeypatch.chdir(tmp_path)
    data = file([change(record) for record in records])
    written = init(str(base), data, tmp_path / "run.yml")
    mapping = yaml.safe_load(written.text)
    assert mapping["sequence_len"] > 64
    trainer = train(mapping | {"dataset_num_proc": 1, "dataloader_num_workers": 0})
    steps = int(re.search(r"(\d+) steps", written.summary)[1])
    assert trainer.state.global_step == steps
    losses = eval_losses(trainer)
    assert len(losses) == 1 + mapping["num_epochs"], "before the first epoch, and after each"
    assert losses[-1] < losses[0]
    assert len(trainer.eval_dataset) == mapping["val_set_size"]
    assert (tmp_path / "outputs/run/adapter_model.safetensors").is_file()
    assert not [record for record in trainer.train_dataset if len(record["input_ids"]) > mapping["sequence_len"]]
    # What is learnt is the answer, and where it ends.
    record = trainer.train_dataset[0]
    learnt = trainer.processing_class.decode([token for token in record["labels"] if token != -100])
    assert learnt.rstrip().endswith("</s>")
    assert "####" in learnt
    assert "### Response" not in learnt


# --- The command ------------------------------------------------------------------------------------------------------


def test_the_command_writes_a_file_and_says_what_follows(base, file, tmp_path):
    output = tmp_path / "new" / "run.yml"
    words = ["init", "--base", str(base), "--data", str(file(30 * [ALPACA])), "--output", str(output)]
    done = CliRunner().invoke(supertune, words)
    assert done.exit_code == 0, done.output
    assert yaml.safe_load(output.read_text())["adapter"] == "supra"
    for command in ("train", "merge-lora", "inference"):
        assert f"  axolotl {command} {output}" in done.output
    again = CliRunner().invoke(supertune, words)
    assert again.exit_code == 1
    assert "the file is there. Name another one, or add --overwrite." in again.output
    assert CliRunner().invoke(supertune, [*words, "--overwrite", "--method", "super"]).exit_code == 0
    assert yaml.safe_load(output.read_text())["adapter"] == "super"


def test_commands_are_quoted_for_the_shell(base, file, tmp_path):
    output = tmp_path / "my run.yml"
    words = ["init", "--base", str(base), "--data", str(file(30 * [ALPACA])), "--output", str(output)]
    done = CliRunner().invoke(supertune, words)
    assert f"  axolotl train '{output}' " in done.output
    assert f"axolotl merge-lora '{output}'" in output.read_text()


def test_a_link_to_nothing_is_not_replaced(base, file, tmp_path):
    (tmp_path / "run.yml").symlink_to(tmp_path / "other.yml")
    words = ["init", "--base", str(base), "--data", str(file([ALPACA])), "--output", str(tmp_path / "run.yml")]
    done = CliRunner().invoke(supertune, words)
    assert (done.exit_code, (tmp_path / "run.yml").is_symlink()) == (1, True)
    assert "the file is there" in done.output


@pytest.mark.parametrize("size", ["0", "0GiB"])
def test_a_gpu_without_memory_is_refused(size):
    done = CliRunner().invoke(supertune, ["init", "--base", "b", "--data", "d", "--gpu-memory", size])
    assert done.exit_code == 2
    assert f"'{size}' is no size: write 80GiB or 24GB." in done.output


def test_an_error_is_one_line_and_leaves_no_file(base, file, tmp_path):
    output = tmp_path / "run.yml"
    words = ["init", "--base", str(base), "--data", str(file(["{"])), "--output", str(output)]
    done = CliRunner().invoke(supertune, words)
    assert done.exit_code == 1
    assert "Traceback" not in done.output
    assert done.output.splitlines()[-1].startswith("Error: --data ")
    assert not output.exists()


def test_a_chat_is_measured_as_its_template_writes_it(tmp_path, file):
    folder = tmp_path / "base"
    folder.mkdir()
    save_llama(folder, ["Hello, good day"], 300, max_position_embeddings=512)
    found = read_base(str(folder))
    template = choose_tokens(found, is_chat=True).template
    text = found.tokenizer.apply_chat_template(CHAT["messages"], chat_template=template, tokenize=False)
    assert measure(read_data(file([CHAT])), found, template).longest == len(
        found.tokenizer(text, add_special_tokens=False)["input_ids"]
    )
