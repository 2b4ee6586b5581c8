"""Download PEFT's source release for the installed version, run its tests with SUPRA in them, judge and count.

Writes counts to stdout as JSON, and to the file that `--json` names; exit code 1 unless every failure is expected and
every expected failure fails. What is downloaded lies in `.conformance/` (CONFORMANCE_CACHE names another folder).
"""

import argparse
import collections
import importlib.metadata
import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from expected import EXPECTED_FAILURES

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
FILES = ("test_custom_models.py", "test_decoder_models.py", "test_quantization.py", "in_peft.py")
CACHE = Path(os.environ.get("CONFORMANCE_CACHE") or ROOT / ".conformance").resolve()


def peft_source(version: str) -> Path:
    """The unpacked source release of PEFT, whose `tests` become a package."""
    folder = CACHE / f"peft-{version}"
    if not (folder / "tests" / "__init__.py").exists():
        with tempfile.TemporaryDirectory() as download:
            _pip("download", "--no-deps", "--no-binary", "peft", "--dest", download, f"peft=={version}")
            (archive,) = Path(download).glob("*.tar.gz")
            with tarfile.open(archive) as tar:
                tar.extractall(CACHE, filter="data")
        (folder / "tests" / "__init__.py").touch()  # last: it says that the rest is whole
    return folder


def overlay() -> Path:
    """A folder with what PEFT's tests need beside this environment."""
    folder = CACHE / f"packages-{sys.version_info.major}.{sys.version_info.minor}"
    done, wanted = folder / "requirements.txt", (HERE / "requirements.txt").read_text()
    if not done.exists() or done.read_text() != wanted:
        requirements = str(HERE / "requirements.txt")
        _pip("install", "-q", "--upgrade", "--no-deps", "--target", str(folder), "-r", requirements)
        done.write_text(wanted)
    return folder


def make_models() -> Path:
    """Tiny models in place of the hub's: two decoders, and one with as many layers as PEFT's quantized one."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, OPTConfig, OPTForCausalLM

    folder = CACHE / f"models-{importlib.metadata.version('transformers')}"
    sizes = {"vocab_size": 1024, "hidden_size": 16, "num_attention_heads": 4, "max_position_embeddings": 256}
    opt = {**sizes, "word_embed_proj_dim": 16, "ffn_dim": 24}
    models = {
        # "llama" in the name would have PEFT skip tests of biases.
        "decoder-rms": lambda: LlamaForCausalLM(
            LlamaConfig(**sizes, num_hidden_layers=2, intermediate_size=24, num_key_value_heads=2)
        ),
        "decoder-opt": lambda: OPTForCausalLM(OPTConfig(**opt, num_hidden_layers=2)),
        # bitsandbytes quantizes blocks of 64.
        "quantized-opt": lambda: OPTForCausalLM(
            OPTConfig(**{**opt, "hidden_size": 64, "word_embed_proj_dim": 64, "ffn_dim": 64}, num_hidden_layers=12)
        ),
    }
    for name, make in models.items():
        torch.manual_seed(0)
        make().save_pretrained(folder / name)
    return folder


def run_tests(version: str, arguments: list[str]) -> dict[str, list[str]]:
    """What became of every test, by name: [outcome, reason]."""
    source, packages, models = peft_source(version), overlay(), make_models()
    outcomes = CACHE / f"outcomes-{version}.json"
    outcomes.unlink(missing_ok=True)
    paths = [str(source), str(HERE), str(ROOT), str(packages), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "CONFORMANCE_MODELS": str(models),
        "CONFORMANCE_OUTCOMES": str(outcomes),
        "HF_HUB_OFFLINE": "1",
    }
    # Of files outside its rootdir pytest gives tests names without the file.
    root = os.path.commonpath([CACHE, HERE])
    command = [sys.executable, "-m", "pytest", "-c", str(HERE / "pytest.ini"), "--rootdir", root]
    command += ["-p", "cases", "--tb=short", "-n", "2", *arguments]
    command += [*(str(source / "tests" / file) for file in FILES[:-1]), str(HERE / FILES[-1])]
    code = subprocess.run(command, cwd=source, env=environment, check=False).returncode
    if code not in (0, 1) or not outcomes.exists():
        raise SystemExit(f"PEFT's tests did not run: pytest ended with {code}.")
    return {re.sub(r"^.*?(?=\w+\.py)", "", name): each for name, each in json.loads(outcomes.read_text()).items()}


def judge(version: str, outcomes: dict[str, list[str]]) -> list[str]:
    """What is wrong: failures that nobody expected, expectations that did not come true, a file that tested nothing."""
    wrong = []
    for name, (outcome, text) in sorted(outcomes.items()):
        reason = expected_failure(version, name)
        if outcome == "failed" and reason is None:
            wrong.append(f"failed: {name}\n{text}")
        if outcome == "passed" and reason is not None:
            wrong.append(f"passed although its failure is expected: {name}")
    return wrong


def judge_whole(version: str, outcomes: dict[str, list[str]]) -> list[str]:
    """What is wrong with a run of everything: an expectation that nothing met, a file of which nothing passed."""
    wrong = []
    for pattern, versions, _ in EXPECTED_FAILURES:
        if version.startswith(versions) and not any(re.search(pattern, name) for name in outcomes):
            wrong.append(f"expected to fail and not run: {pattern}")
    for file in FILES:
        if not any(name.startswith(file) and outcome == "passed" for name, (outcome, _) in outcomes.items()):
            wrong.append(f"nothing passed in {file}: are its lists still those that cases.py fills?")
    return wrong


def expected_failure(version: str, name: str) -> str | None:
    """The reason for which a test is expected to fail, or None."""
    for pattern, versions, reason in EXPECTED_FAILURES:
        if version.startswith(versions) and re.search(pattern, name):
            return reason
    return None


def _skip_reason(text: str) -> str:
    return re.sub(r"SupraConfig\(.*\)", "SupraConfig(…)", text)


def _pip(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", *arguments], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="also write the counts here")
    own, arguments = parser.parse_known_args()
    version = importlib.metadata.version("peft")
    CACHE.mkdir(parents=True, exist_ok=True)
    outcomes = run_tests(version, arguments)
    counts = collections.Counter(outcome for outcome, _ in outcomes.values())
    skips = collections.Counter(_skip_reason(reason) for outcome, reason in outcomes.values() if outcome == "skipped")
    failed = [name for name, (outcome, _) in outcomes.items() if outcome == "failed"]
    expected = [reason for name in failed if (reason := expected_failure(version, name))]
    packages = ("torch", "transformers", "bitsandbytes", "torchao")
    summary = {
        "peft": version,
        "python": ".".join(map(str, sys.version_info[:3])),
        **{package: importlib.metadata.version(package) for package in packages},
        **{outcome: counts[outcome] for outcome in ("passed", "failed", "skipped")},
        "failed as expected, by reason": collections.Counter(expected),
        "skipped, by reason": skips,
    }
    text = json.dumps(summary, indent=2, ensure_ascii=False)
    print(text)
    if own.json:
        own.json.write_text(text + "\n")
    wrong = judge(version, outcomes) + ([] if arguments else judge_whole(version, outcomes))
    print(*wrong, sep="\n")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
