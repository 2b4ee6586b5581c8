"""The six arithmetic test sets of LLM-Adapters: found or downloaded, and checked against sha256 and record count.

A record is `{instruction, input, output, answer}`, all strings. `answer` is the gold answer: a number ("15.0") or, for
AQuA, a letter. `output` is a model's chain of thought and often wrong.

The files come from a folder that holds `<Name>.json` or `<Name>/test.json` (`data_dir`, else SUPERTUNE_DATA_DIR).
Without one they are downloaded from GitHub, once, into `HF_HOME/supertune`, with `requests`: it honours the proxies of
the environment, and unlike pooch it tries again when the host fails and not when the host gives another file.
"""

import dataclasses
import hashlib
import json
import os
from pathlib import Path
from typing import Any, Literal

from ..method.atomic_files import whole_file

DATA_DIR_VARIABLE = "SUPERTUNE_DATA_DIR"
DATA_DIR_KEY = "supertune_data_dir"
REPOSITORY = "AGI-Edgerunners/LLM-Adapters"
COMMIT = "816657208af4db747803f87ba40a4c71383fed7a"
BASE_URL = f"https://raw.githubusercontent.com/{REPOSITORY}/{COMMIT}/dataset"

_TIMEOUT = (10, 30)  # seconds: to connect, and between two pieces of a file; the largest file has 0.8 MB
_RETRIES = 2
_LOCK_TIMEOUT = 300  # seconds that another process may take to download the file


@dataclasses.dataclass(frozen=True)
class Benchmark:
    """One test set.

    Attributes:
        name: its folder in LLM-Adapters.
        suffix: of its lm-eval task, `supertune_<suffix>`.
        kind: whether an answer is a number or a letter A to E.
        records, sha256: of `dataset/<name>/test.json` at COMMIT.
    """

    name: str
    suffix: str
    kind: Literal["number", "letter"]
    records: int
    sha256: str

    @property
    def file(self) -> str:
        """The file's name in a data folder and in the cache."""
        return f"{self.name}.json"

    @property
    def url(self) -> str:
        """Where the file is downloaded."""
        return f"{BASE_URL}/{self.name}/test.json"


BENCHMARKS: dict[str, Benchmark] = {
    benchmark.name: benchmark
    for benchmark in (
        Benchmark(
            "AddSub", "addsub", "number", 395, "62a8662b1ad40879953c4df0e61883a749d03aa3fc5e71f1cdb842b816e139ff"
        ),
        Benchmark(
            "MultiArith",
            "multiarith",
            "number",
            600,
            "a40f426807c8a563802c2a5b66bda3bcd1eba9c099038fd1199f0dd57de5fd28",
        ),
        Benchmark(
            "SingleEq", "singleeq", "number", 508, "712b15edb851c97aab42a5de106d94008f94d917366c92537ed5400a8aacb207"
        ),
        Benchmark("gsm8k", "gsm8k", "number", 1319, "2cc616a1e0b23ea1df29370476365cde71c4e0aa823fb06cc194c5a8a9381abe"),
        Benchmark("AQuA", "aqua", "letter", 254, "de677f5f0139340009eb01f17c0db781b4161912cd1f4efa77292f2fcf3478ee"),
        Benchmark("SVAMP", "svamp", "number", 1000, "ffed015784f738f317c5603177861d044c4fc94e09211d78b25e96d46c656e2c"),
    )
}

_REMEDY = (
    f"Without a network, put the six files ({', '.join(known.file for known in BENCHMARKS.values())}) of {REPOSITORY} "
    f"at commit {COMMIT[:12]} in a folder and name it: {DATA_DIR_VARIABLE}=DIR, or "
    f'--metadata \'{{"{DATA_DIR_KEY}": "DIR"}}\'.'
)


def find_benchmark(name: str) -> Benchmark:
    """The benchmark with a name or a task suffix.

    Raises:
        ValueError: there is none.
    """
    for benchmark in BENCHMARKS.values():
        if name in (benchmark.name, benchmark.suffix):
            return benchmark
    raise ValueError(f"{name} is not a benchmark; there are {', '.join(BENCHMARKS)}.")


def load_benchmark(name: str, data_dir: str | os.PathLike[str] | None = None) -> list[dict[str, str]]:
    """The records of one benchmark, in the file's order.

    Args:
        name: a key of BENCHMARKS, or a task suffix.
        data_dir: the folder with the files; default SUPERTUNE_DATA_DIR, else the download cache.

    Raises:
        FileNotFoundError: the folder, or the file in it, is not there.
        ValueError: a file with another content than the published one, or an unknown name.
        ConnectionError: it is not in the cache and cannot be downloaded.
        OSError: a file or folder that cannot be read or written.
    """
    benchmark = find_benchmark(name)
    folder = data_dir or os.environ.get(DATA_DIR_VARIABLE)
    if folder:
        path = _find(benchmark, Path(folder).expanduser())
        return _checked(path.read_bytes(), benchmark, str(path), f"Replace it by {benchmark.url}")
    return _cached(benchmark)


def cache_folder() -> Path:
    """The folder of downloaded files: `HF_HOME/supertune/<commit>`."""
    from huggingface_hub import constants

    return Path(constants.HF_HOME) / "supertune" / COMMIT


def _find(benchmark: Benchmark, folder: Path) -> Path:
    """The benchmark's file in a user's folder."""
    candidates = (folder / benchmark.file, folder / benchmark.name / "test.json")
    for path in candidates:
        if path.is_file():
            return path
    missing = f"there is no folder {folder}" if not folder.is_dir() else f"there is no file {candidates[0]}"
    raise FileNotFoundError(
        f"{benchmark.name}: {missing} (nor {candidates[1]}). {DATA_DIR_VARIABLE} or {DATA_DIR_KEY} must name a folder "
        f"with the test files of {REPOSITORY} at commit {COMMIT[:12]}; without either they are downloaded."
    )


def _checked(content: bytes, benchmark: Benchmark, source: str, remedy: str) -> list[dict[str, str]]:
    """The records in a file's content.

    Args:
        source, remedy: of the content, for the error.

    Raises:
        ValueError: it is not the published file.
    """
    digest = hashlib.sha256(content).hexdigest()
    if digest == benchmark.sha256:
        records: list[dict[str, str]] = json.loads(content)
        if len(records) == benchmark.records:
            return records
    raise ValueError(
        f"{source} is not the published {benchmark.name} test file: {_difference(content, benchmark)}; sha256 "
        f"{digest}, expected {benchmark.sha256}. {remedy}"
    )


def _difference(content: bytes, benchmark: Benchmark) -> str:
    """How a file differs from the published one."""
    if not content:
        return "it is empty"
    try:
        records = json.loads(content)
    except ValueError as error:  # also a UnicodeDecodeError
        return f"it is not valid JSON ({error}; {len(content):,} bytes)"
    if not isinstance(records, list):
        return "it is not a JSON list"
    if len(records) != benchmark.records:
        return f"it holds {len(records)} records, expected {benchmark.records}"
    return f"it holds {len(records)} records, but their text was changed"


def _cached(benchmark: Benchmark) -> list[dict[str, str]]:
    """The records of the cached file, which is downloaded if it is missing or damaged."""
    path = cache_folder() / benchmark.file
    records, problem = _try_cached(path, benchmark)  # before the lock is taken: the cache may be read-only
    if records is not None:
        return records
    _refuse_if_offline(benchmark, problem)

    import filelock

    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with filelock.FileLock(f"{path}.lock", timeout=_LOCK_TIMEOUT):
            records, _ = _try_cached(path, benchmark)  # another process may have downloaded it meanwhile
            if records is not None:
                return records
            path.unlink(missing_ok=True)
            return _download(benchmark, path)
    except filelock.Timeout:
        raise ConnectionError(
            f"{benchmark.name}: another process has held {path}.lock for {_LOCK_TIMEOUT} s while it fetches the file; "
            "end it, or remove the lock file if there is none."
        ) from None


def _try_cached(path: Path, benchmark: Benchmark) -> tuple[list[dict[str, str]] | None, str]:
    """The records of a cached file and "", or None and why it cannot be used."""
    try:
        return _checked(path.read_bytes(), benchmark, str(path), "Online, it is downloaded again"), ""
    except FileNotFoundError:
        return None, f"it is not in the cache ({path})"
    except ValueError as error:
        return None, str(error)


def _refuse_if_offline(benchmark: Benchmark, problem: str) -> None:
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        raise ConnectionError(
            f"{benchmark.name}: HF_HUB_OFFLINE forbids to fetch {benchmark.url}, and {problem}. {_REMEDY}"
        )


def _download(benchmark: Benchmark, path: Path) -> list[dict[str, str]]:
    """Download and check the file, and put it at `path`."""
    import requests

    with whole_file(path) as temporary:
        try:
            with _session() as session, session.get(benchmark.url, timeout=_TIMEOUT) as response:
                response.raise_for_status()
                content = response.content
        except requests.RequestException as error:
            raise ConnectionError(f"{benchmark.name}: {benchmark.url} cannot be fetched: {error}. {_REMEDY}") from error
        records = _checked(content, benchmark, f"what {benchmark.url} gave", _REMEDY)
        temporary.write_bytes(content)
    return records


def _session() -> Any:
    """A requests session that tries again when the host fails."""
    import requests
    from requests.adapters import HTTPAdapter
    from urllib3.util import Retry

    session = requests.Session()
    retry = Retry(_RETRIES, backoff_factor=0.5, status_forcelist=(429, 500, 502, 503, 504), raise_on_status=False)
    session.mount("https://", HTTPAdapter(max_retries=retry))
    return session
