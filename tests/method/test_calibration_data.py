import gzip
import json
import random
from pathlib import Path

import pytest
import torch

from axolotl_supertune import calibration_windows
from axolotl_supertune.method.calibration_data import batches_of, training_windows

WIKITEXT = Path(__file__).parents[3] / "shared" / "data" / "calibration" / "wikitext2_valid.txt"
SUFFIXES = [".jsonl", ".json", ".json.gz", ".jsonl.gz", ".parquet"]


def tokenizer(text, **kwargs):
    """One token per word; the same word always gets the same id."""
    return {"input_ids": [hash_word(word) for word in text.split()]}


def hash_word(word):
    return int.from_bytes(word.encode()[:6].ljust(6, b"\0"), "little")


@pytest.fixture(scope="module")
def documents():
    """60 texts of 0 to 177 words."""
    if WIKITEXT.is_file():
        words = WIKITEXT.read_text(encoding="utf-8").split()[:20_000]
    else:
        draw = random.Random(0)
        words = ["".join(draw.choices("abcdefghij", k=4)) for _ in range(20_000)]
    return [" ".join(words[300 * index : 300 * index + 3 * index]) for index in range(60)]


@pytest.fixture
def write(tmp_path):
    """Write rows in C4's shape to a file with the given suffix."""

    def write_rows(documents, suffix, field="text"):
        path = tmp_path / f"corpus{suffix}"
        rows = [{field: text, "timestamp": "2019-04-25T12:57:54Z", "url": "http://a.b"} for text in documents]
        lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
        if suffix == ".parquet":
            import pyarrow
            from pyarrow import parquet

            parquet.write_table(pyarrow.Table.from_pylist(rows), path)
        elif suffix.endswith(".gz"):
            path.write_bytes(gzip.compress(lines))
        elif suffix == ".txt":
            path.write_text("\n".join(documents), encoding="utf-8")
        else:
            path.write_bytes(lines)
        return str(path)

    return write_rows


def occurs(window, ids):
    return any(ids[start : start + len(window)] == window for start in range(len(ids) - len(window) + 1))


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_every_window_is_a_piece_of_one_long_enough_document(write, documents, suffix):
    windows = calibration_windows(tokenizer, write(documents, suffix), samples=12, sequence_len=100)
    assert windows.shape == (12, 100)
    assert windows.dtype == torch.int64
    tokenized = [tokenizer(text)["input_ids"] for text in documents]
    homes = [[index for index, ids in enumerate(tokenized) if occurs(window, ids)] for window in windows.tolist()]
    assert all(homes)
    assert len({home[0] for home in homes}) == 12, "no document is drawn twice while others are left"


def test_all_formats_of_one_corpus_give_the_same_windows(write, documents):
    drawn = [
        calibration_windows(tokenizer, write(documents, suffix), samples=5, sequence_len=50) for suffix in SUFFIXES
    ]
    assert all(torch.equal(windows, drawn[0]) for windows in drawn)


@pytest.mark.parametrize("suffix", [".txt", ".jsonl"])
def test_windows_depend_on_the_seed_alone(write, documents, suffix):
    source = write(documents, suffix)

    def draw(seed):
        return calibration_windows(tokenizer, source, samples=6, sequence_len=60, seed=seed)

    first = draw(0)
    torch.manual_seed(3)
    assert torch.equal(first, draw(0))
    assert not torch.equal(first, draw(1))


def test_documents_are_drawn_by_the_seed(write):
    """Every document is one window long: only the order of the documents is left to chance."""
    source = write([f"a{index} b{index}" for index in range(50)], ".jsonl")
    drawn = [calibration_windows(tokenizer, source, samples=10, sequence_len=2, seed=seed) for seed in (0, 1)]
    assert set(drawn[0][:, 0].tolist()) != set(drawn[1][:, 0].tolist())
    assert len(set(drawn[0][:, 0].tolist())) == 10


def test_text_file_gives_disjoint_windows_at_a_seeded_offset(write):
    source = write([" ".join(f"w{index}" for index in range(105))], ".txt")
    windows = calibration_windows(tokenizer, source, samples=10, sequence_len=10)
    ids = windows.reshape(-1).tolist()
    assert len(set(ids)) == 100
    position = {hash_word(f"w{index}"): index for index in range(105)}
    starts = [position[window[0]] for window in windows.tolist()]
    assert starts == list(range(starts[0], starts[0] + 100, 10))
    assert {
        position[calibration_windows(tokenizer, source, samples=10, sequence_len=10, seed=seed)[0, 0].item()]
        for seed in range(30)
    } == set(range(6))


def test_small_source_gives_several_disjoint_windows_of_a_document(write):
    source = write([" ".join(f"{name}{index}" for index in range(40)) for name in "ab"], ".jsonl")
    windows = calibration_windows(tokenizer, source, samples=7, sequence_len=10)
    assert windows.shape == (7, 10)
    assert len(set(windows.reshape(-1).tolist())) == 70


def test_document_of_exactly_one_window_counts(write):
    source = write(["a b c d"], ".jsonl")
    windows = calibration_windows(tokenizer, source, samples=1, sequence_len=4)
    assert windows.tolist() == [tokenizer("a b c d")["input_ids"]]


def test_other_text_column_is_read(write, documents):
    source = write(documents, ".jsonl", field="body")
    assert calibration_windows(tokenizer, source, samples=2, sequence_len=50, text_field="body").shape == (2, 50)


@pytest.mark.parametrize("suffix", [".txt", ".jsonl"])
def test_too_short_text_says_how_many_tokens_were_found(write, suffix):
    source = write(["one two three four"], suffix)
    with pytest.raises(ValueError, match=r"corpus\S+ is too short: 2 windows of 3 tokens .* 1 were found \(4 tokens"):
        calibration_windows(tokenizer, source, samples=2, sequence_len=3)


def test_too_short_documents_are_not_joined(write):
    source = write(["one two three"] * 400, ".jsonl")
    with pytest.raises(ValueError, match=r"0 were found \(1,200 tokens in 400 documents, the longest 3\)"):
        calibration_windows(tokenizer, source, samples=1, sequence_len=4)


@pytest.mark.parametrize("suffix", [".txt", *SUFFIXES])
def test_missing_file_is_named(tmp_path, suffix):
    with pytest.raises(FileNotFoundError, match=f"calibration_dataset.*nowhere{suffix}"):
        calibration_windows(tokenizer, str(tmp_path / f"nowhere{suffix}"), samples=1, sequence_len=4)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_missing_column_names_key_and_columns(write, documents, suffix):
    source = write(documents, suffix)
    with pytest.raises(ValueError, match=r"no column 'body' \(calibration_text_field\) among text, timestamp, url"):
        calibration_windows(tokenizer, source, samples=1, sequence_len=4, text_field="body")


@pytest.mark.parametrize("suffix", [".txt", *SUFFIXES])
def test_file_of_garbage_is_named(tmp_path, suffix):
    path = tmp_path / f"broken{suffix}"
    path.write_bytes(b"\x80\xfe this is none of them \xff" * 20)
    with pytest.raises(ValueError, match=rf"calibration_dataset \S*broken{suffix}"):
        calibration_windows(tokenizer, str(path), samples=1, sequence_len=4)


@pytest.mark.parametrize("suffix", [".json.gz", ".jsonl.gz", ".parquet"])
def test_truncated_file_is_named(write, documents, suffix):
    source = write(documents, suffix)
    whole = Path(source).read_bytes()
    Path(source).write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=rf"calibration_dataset \S*corpus{suffix}"):
        calibration_windows(tokenizer, source, samples=1, sequence_len=4)


@pytest.mark.parametrize("suffix", [".txt", *SUFFIXES])
def test_empty_source_is_refused_and_named(write, suffix):
    with pytest.raises(ValueError, match=rf"calibration_dataset \S*corpus{suffix}"):
        calibration_windows(tokenizer, write([""], suffix), samples=1, sequence_len=4)


@pytest.mark.parametrize("suffix", [".txt", ".jsonl", ".json.gz", ".parquet"])
def test_zero_byte_file_is_refused_and_named(tmp_path, suffix):
    (tmp_path / f"zero{suffix}").touch()
    with pytest.raises(ValueError, match=rf"calibration_dataset \S*zero{suffix}"):
        calibration_windows(tokenizer, str(tmp_path / f"zero{suffix}"), samples=1, sequence_len=4)


def test_local_file_of_another_format_says_what_is_read(tmp_path):
    (tmp_path / "corpus.csv").write_text("text\nhello\n")
    with pytest.raises(ValueError, match=r"corpus\.csv cannot be read: its name ends in none of \.txt, \.parquet"):
        calibration_windows(tokenizer, str(tmp_path / "corpus.csv"), samples=1, sequence_len=4)


def test_the_default_streams_the_first_shard_of_c4(monkeypatch):
    import datasets

    asked = {}

    def load_dataset(path, **settings):
        asked.update(settings, path=path)
        rows = [{"text": "word " * length, "timestamp": "", "url": ""} for length in range(1, 40)]
        return datasets.Dataset.from_list(rows).to_iterable_dataset()

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    windows = calibration_windows(
        lambda text, **_: {"input_ids": list(range(len(text.split())))}, samples=5, sequence_len=20
    )
    assert windows.shape == (5, 20)
    assert asked == {
        "path": "allenai/c4",
        "split": "train",
        "streaming": True,
        "data_files": {"train": "en/c4-train.00000-of-01024.json.gz"},
    }


def test_training_records_are_windows_of_their_own():
    records = [[at] * (1 + at % 7) for at in range(1, 30)]
    drawn = training_windows(records, samples=9, sequence_len=5, seed=3)
    ids, mask = drawn["input_ids"], drawn["attention_mask"]
    assert ids.shape == mask.shape == (9, 5)
    kept = [ids[row][mask[row].bool()].tolist() for row in range(9)]
    assert all(each == records[each[0] - 1][:5] for each in kept)
    assert len({each[0] for each in kept}) == 9
    assert not ids[mask == 0].any()
    same, other = (training_windows(records, samples=9, sequence_len=5, seed=seed)["input_ids"] for seed in (3, 4))
    assert torch.equal(same, ids)
    assert not torch.equal(other, ids)
    batches = batches_of(drawn, 4)
    assert [len(each["input_ids"]) for each in batches] == [4, 4, 1]
    for batch in batches:
        assert batch["attention_mask"][:, -1].any()
    assert sum(int(each["attention_mask"].sum()) for each in batches) == int(mask.sum())
    with pytest.raises(ValueError, match="calibration_samples: 30 records were asked for, and the training set has 29"):
        training_windows(records, samples=30, sequence_len=5)
