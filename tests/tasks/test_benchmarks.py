"""The six test files: the published bytes or an error that says which file, what was expected and what to do."""

import http.server
import json
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from benchmark_files import DATA
from huggingface_hub import constants

from axolotl_supertune.tasks import benchmarks
from axolotl_supertune.tasks.benchmarks import BENCHMARKS, find_benchmark, load_benchmark


@pytest.fixture(autouse=True)
def no_data_dir(monkeypatch):
    monkeypatch.delenv("SUPERTUNE_DATA_DIR", raising=False)


@pytest.fixture
def folder(tmp_path):
    """A copy of the six files that a test may damage."""
    target = tmp_path / "data"
    target.mkdir()
    for benchmark in BENCHMARKS.values():
        shutil.copyfile(DATA / benchmark.file, target / benchmark.file)
    return target


class Host:
    """A file host on this machine: `requests` counts what was asked for, `answer` changes what it gives."""

    def __init__(self):
        self.requests = []
        self.answer = lambda content: (200, content, len(content))
        host = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                host.requests.append(self.path)
                name = self.path.split("/")[-2]
                status, content, length = host.answer((DATA / f"{name}.json").read_bytes())
                self.send_response(status)
                self.send_header("Content-Length", str(length))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *args):
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/{benchmarks.COMMIT}/dataset"


@pytest.fixture
def host(tmp_path, monkeypatch):
    host = Host()
    threading.Thread(target=host.server.serve_forever, args=(0.01,), daemon=True).start()
    monkeypatch.setattr(benchmarks, "BASE_URL", host.url)
    monkeypatch.setattr(constants, "HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    yield host
    host.server.shutdown()
    host.server.server_close()


@pytest.fixture
def cached(host, tmp_path):
    """Where AddSub is cached."""
    return tmp_path / "hf/supertune" / benchmarks.COMMIT / "AddSub.json"


def left_behind(cached):
    return sorted(path.name for path in cached.parent.glob("*") if path.suffix != ".lock")


# The files


@pytest.mark.parametrize("name", BENCHMARKS)
def test_every_file_has_its_hash_and_count(name):
    benchmark = BENCHMARKS[name]
    records = load_benchmark(name, DATA)
    assert len(records) == benchmark.records
    assert all(set(record) == {"instruction", "input", "output", "answer"} for record in records)
    assert all(isinstance(value, str) for record in records for value in record.values())
    for record in records:
        if benchmark.kind == "letter":
            assert record["answer"] in ("A", "B", "C", "D", "E")
        else:
            float(record["answer"])


def test_the_table():
    assert {benchmark.name: benchmark.records for benchmark in BENCHMARKS.values()} == {
        "AddSub": 395,
        "MultiArith": 600,
        "SingleEq": 508,
        "gsm8k": 1319,
        "AQuA": 254,
        "SVAMP": 1000,
    }
    assert [benchmark.suffix for benchmark in BENCHMARKS.values()] == [name.lower() for name in BENCHMARKS]
    assert [benchmark.name for benchmark in BENCHMARKS.values() if benchmark.kind == "letter"] == ["AQuA"]
    assert BENCHMARKS["gsm8k"].url == (
        "https://raw.githubusercontent.com/AGI-Edgerunners/LLM-Adapters/816657208af4db747803f87ba40a4c71383fed7a"
        "/dataset/gsm8k/test.json"
    )


def test_a_name_or_a_suffix():
    assert find_benchmark("AQuA") is find_benchmark("aqua")
    with pytest.raises(ValueError, match="mathqa is not a benchmark; there are AddSub, "):
        load_benchmark("mathqa")


# A local folder


def test_the_argument_goes_before_the_variable(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("SUPERTUNE_DATA_DIR", str(tmp_path / "nowhere"))
    assert len(load_benchmark("AQuA", folder)) == 254
    monkeypatch.setenv("SUPERTUNE_DATA_DIR", str(folder))
    assert len(load_benchmark("AQuA")) == 254


def test_the_repository_s_own_layout(tmp_path):
    (tmp_path / "SVAMP").mkdir()
    shutil.copyfile(DATA / "SVAMP.json", tmp_path / "SVAMP/test.json")
    assert len(load_benchmark("SVAMP", tmp_path)) == 1000


def test_a_home_folder(folder, monkeypatch):
    monkeypatch.setenv("HOME", str(folder.parent))
    assert len(load_benchmark("AQuA", "~/data")) == 254


def test_a_missing_folder_and_a_missing_file(folder, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"AddSub: there is no folder .*nowhere .*SUPERTUNE_DATA_DIR.*LLM-Adap"):
        load_benchmark("AddSub", tmp_path / "nowhere")
    (folder / "AddSub.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"AddSub: there is no file .*AddSub\.json \(nor .*AddSub.test\.json\)"):
        load_benchmark("AddSub", folder)


def drop_a_record(content):
    return json.dumps(json.loads(content)[:-1]).encode()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda content: b"", r"it is empty"),
        (lambda content: content[: len(content) // 2], r"it is not valid JSON \(.*84,?\d* bytes|it is not valid JSON"),
        (drop_a_record, r"it holds 394 records, expected 395"),
        (lambda content: content.replace(b"crayons", b"pencils", 1), r"it holds 395 records, but their text was chan"),
        (lambda content: content.replace(b"\n", b"\r\n"), r"it holds 395 records, but their text was changed"),
        (lambda content: b'{"data": []}', r"it is not a JSON list"),
        (lambda content: b"\xff\xfe" + content, r"it is not valid JSON"),
    ],
    ids=["empty", "cut", "short", "changed", "crlf", "object", "bytes"],
)
def test_another_content_is_refused(folder, damage, message):
    path = folder / "AddSub.json"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ValueError, match=message) as caught:
        load_benchmark("AddSub", folder)
    assert str(path) in str(caught.value)
    assert BENCHMARKS["AddSub"].sha256 in str(caught.value)
    assert BENCHMARKS["AddSub"].url in str(caught.value)
    assert path.is_file()  # a user's file is the user's
    assert len(load_benchmark("AQuA", folder)) == 254


def test_the_table_s_count_is_checked_too(monkeypatch):
    import dataclasses

    monkeypatch.setitem(BENCHMARKS, "AQuA", dataclasses.replace(BENCHMARKS["AQuA"], records=255))
    with pytest.raises(ValueError, match="it holds 254 records, expected 255"):
        load_benchmark("AQuA", DATA)


# The download


def test_a_file_is_fetched_once(host, cached):
    first = load_benchmark("AddSub")
    assert host.requests == [f"/{benchmarks.COMMIT}/dataset/AddSub/test.json"]
    assert cached.read_bytes() == (DATA / "AddSub.json").read_bytes()
    assert left_behind(cached) == ["AddSub.json"]
    first[0]["answer"] = "changed by a caller"
    assert load_benchmark("AddSub") == load_benchmark("AddSub", DATA)
    assert len(host.requests) == 1


def test_hf_home_is_honoured(host, cached):
    assert benchmarks.cache_folder() == cached.parent


def test_a_corrupt_cache_is_fetched_once_more(host, cached):
    load_benchmark("AddSub")
    cached.write_bytes(cached.read_bytes()[:1000])
    assert len(load_benchmark("AddSub")) == 395
    assert len(host.requests) == 2
    assert cached.read_bytes() == (DATA / "AddSub.json").read_bytes()


def test_a_host_that_gives_another_file(host, cached):
    host.answer = lambda content: (200, b"[]", 2)
    cached.parent.mkdir(parents=True)
    cached.write_bytes(b"corrupt")
    with pytest.raises(ValueError, match=r"what http.*AddSub/test.json gave .*0 records, expected 395.*SUPERTUNE_DATA"):
        load_benchmark("AddSub")
    assert len(host.requests) == 1
    assert left_behind(cached) == []


def test_an_interrupted_download_leaves_nothing(host, cached):
    host.answer = lambda content: (200, content[:5000], len(content))
    with pytest.raises(ConnectionError, match=r"AddSub: .* cannot be fetched: .*SUPERTUNE_DATA_DIR"):
        load_benchmark("AddSub")
    assert left_behind(cached) == []
    host.answer = lambda content: (200, content, len(content))
    assert len(load_benchmark("AddSub")) == 395


def test_a_write_that_fails_leaves_nothing(host, cached, monkeypatch):
    def full(self, content):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", full)
        with pytest.raises(OSError, match="No space left"):
            load_benchmark("AddSub")
    assert left_behind(cached) == []


def test_a_missing_page_and_no_host(host, cached):
    host.answer = lambda content: (404, b"", 0)
    with pytest.raises(ConnectionError, match=r"cannot be fetched: 404"):
        load_benchmark("AddSub")
    host.server.shutdown()
    host.server.server_close()
    with pytest.raises(
        ConnectionError, match=r'AddSub: http.*test.json cannot be fetched.*"supertune_data_dir": "DIR"'
    ):
        load_benchmark("AddSub")
    assert left_behind(cached) == []


def test_offline(host, cached, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ConnectionError, match=r"AddSub: HF_HUB_OFFLINE forbids .*not in the cache") as caught:
        load_benchmark("AddSub")
    assert "SUPERTUNE_DATA_DIR=DIR" in str(caught.value)
    assert '--metadata \'{"supertune_data_dir": "DIR"}\'' in str(caught.value)
    assert host.requests == []
    assert not cached.parent.exists()


def test_offline_with_a_cache(host, cached, monkeypatch):
    load_benchmark("AddSub")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert len(load_benchmark("AddSub")) == 395
    cached.write_bytes(b"corrupt")
    with pytest.raises(
        ConnectionError, match=r"HF_HUB_OFFLINE forbids .*AddSub\.json is not the published .*not valid"
    ):
        load_benchmark("AddSub")
    assert len(host.requests) == 1


def test_many_at_once_fetch_once(host, cached):
    def slow(content):
        time.sleep(0.2)
        return 200, content, len(content)

    host.answer = slow
    with ThreadPoolExecutor(4) as pool:
        counts = list(pool.map(lambda _: len(load_benchmark("AddSub")), range(4)))
    assert counts == [395] * 4
    assert len(host.requests) == 1


def test_a_lock_that_is_held(host, cached, monkeypatch):
    import filelock

    monkeypatch.setattr(benchmarks, "_LOCK_TIMEOUT", 0.1)
    cached.parent.mkdir(parents=True)
    with filelock.FileLock(f"{cached}.lock"), pytest.raises(ConnectionError, match=r"another process .*\.lock"):
        load_benchmark("AddSub")
