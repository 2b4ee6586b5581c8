"""Measures methods one after another, each in a process of its own, and writes bench.json and bench.png."""

import contextlib
import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, replace
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from ..engines import SELECTING_KEYS
from ..method.atomic_files import whole_file
from .measurement import METHODS, PEFT_CLASSES, SHAPES, Measurement, parameter_count
from .report import add_ratios, draw, markdown

PACKAGES = ("axolotl-supertune", "torch", "peft", "transformers", "triton", "bitsandbytes")
# Keys of an Axolotl YAML → the fields of a Measurement that they set.
_READ = {
    "lora_r": "r0",
    "supra_lambda": "supra_lambda",
    "lora_dropout": "lora_dropout",
    "micro_batch_size": "batch_size",
    "sequence_len": "sequence_len",
    "attn_implementation": "attn_implementation",
    "gradient_checkpointing": "gradient_checkpointing",
}
# Keys that change the cost of a step and that the benchmark does not read.
_COSTLY = {
    "sample_packing",
    "torch_compile",
    "load_in_4bit",
    "load_in_8bit",
    "lora_target_modules",
    "lora_modules_to_save",
    "sparse_direction",
    "sparse_density",
    "optimizer",
    "gradient_accumulation_steps",
    *SELECTING_KEYS,
    "cut_cross_entropy",
    "chunked_cross_entropy",
    "lora_mlp_kernel",
    "lora_qkv_kernel",
    "lora_o_kernel",
    "activation_offloading",
    "unfrozen_parameters",
}
_PARTIAL = "bench.partial.json"
# A step of a larger model takes minutes on a CPU, and says nothing about a GPU.
_CPU_PARAMETERS = 200_000_000
_CPU_CALIBRATION: dict[str, Any] = {"calibration_samples": 8, "calibration_sequence_len": 64}


def read_result(path: Path) -> dict[str, Any]:
    """The content of a bench.json, or of a bench.partial.json.

    Raises:
        ValueError: it is not one.
    """
    try:
        result: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        markdown(result)  # fails where a row lacks what the table shows
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"--from {path}: not a bench.json ({error!r}).") from error
    return result


def notes_on(measurement: Measurement, model: str | None) -> list[str]:
    """Remarks for the terminal about what the numbers of a measurement do not tell.

    Args:
        model: `--model` as typed, or None.
    """
    notes = []
    if measurement.device == "cpu":
        notes.append("No GPU is used: these are CPU numbers of a small shape, and not the claim.")
    if model is not None and model not in SHAPES:
        notes.append(f"{model}: shape and settings are read, the weights are random.")
        if unread := _unread(model):
            notes.append(f"{model}: not read, though a training's step depends on them: {', '.join(unread)}.")
    return notes


def write_profile(measurement: Measurement, method: str, output: Path) -> Path:
    """Profile three steps of a method.

    Returns:
        The file with the profiler's table.

    Raises:
        ValueError: the installed PEFT does not have the method, or its process failed.
    """
    import peft

    if method in PEFT_CLASSES and not hasattr(peft, PEFT_CLASSES[method]):
        raise ValueError(f"--profile {method}: PEFT {peft.__version__} has no {PEFT_CLASSES[method]}.")
    row = _measure(replace(measurement, method=method, profile=True))
    if row["status"] != "ok":
        raise ValueError(f"{method}: {row['note']}")
    path = output / f"profile_{method}.txt"
    with whole_file(path) as temporary:
        temporary.write_text(row["profile"], encoding="utf-8")
    return path


def measure_methods(
    measurement: Measurement, names: list[str], output: Path, *, model: str, command: str
) -> dict[str, Any]:
    """Measure methods; the rows so far are in bench.partial.json, which stays until `write_result`.

    Args:
        names: keys of METHODS, the floor first.
        output: an existing folder.
        model, command: recorded in bench.json.

    Returns:
        The content of bench.json, which `write_result` writes.
    """
    about = {"model": model, "command": command, "methods": names}
    # Written after every row, next to an earlier run's bench.json: a stopped run loses neither.
    for result in run(measurement, names):
        with contextlib.suppress(OSError):  # a disk that is full now: `write_result` says so after the table is shown
            _write_json(output / _PARTIAL, result | about)
    return result | about


def write_result(result: dict[str, Any], output: Path) -> None:
    """Write bench.json and bench.png, and remove bench.partial.json.

    Raises:
        OSError: a file cannot be written.
    """
    _write_json(output / "bench.json", result)
    (output / _PARTIAL).unlink(missing_ok=True)
    with whole_file(output / "bench.png") as temporary:
        draw(result, temporary)


def run(measurement: Measurement, names: list[str]) -> Iterator[dict[str, Any]]:
    """Measure the methods one after another, the floor first and last.

    Yields:
        After each method the content of bench.json so far, without the model's name and the command.
    """
    import peft
    import torch

    cpu = measurement.device == "cpu"
    shared = {
        key: value for key, value in asdict(measurement).items() if key not in ("method", "model", "device", "profile")
    }
    rows: list[dict[str, Any]] = []
    result = {
        "device": "CPU" if cpu else torch.cuda.get_device_name(),
        "cpu": cpu,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {name: _version(name) for name in PACKAGES},
        "job": {**shared, "dtype": "fp32" if cpu else "bf16"},
        "rows": rows,
    }
    for name in names:
        needed = PEFT_CLASSES.get(name)
        if needed and not hasattr(peft, needed):
            note = f"PEFT {peft.__version__} has no {needed}"
            rows.append({"method": name, "status": "not installed", "note": note})
        else:
            rows.append(_measure(replace(measurement, method=name)))
        add_ratios(rows)
        yield result
    rows.append(_measure(replace(measurement, method="floor")) | {"again": True})
    add_ratios(rows)
    yield result


def _measure(measurement: Measurement) -> dict[str, Any]:
    """The row of one method, measured by a worker process; a worker that dies gives a row with status `failed`."""
    print(f"{measurement.method}: {METHODS[measurement.method]} …", file=sys.stderr)
    command = [sys.executable, "-m", "axolotl_supertune.bench.worker", json.dumps(asdict(measurement))]
    worker = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        output, errors = worker.communicate()
    finally:  # also if this process is interrupted: the worker holds a GPU
        worker.kill()
        worker.wait()
    try:
        row: dict[str, Any] = json.loads(output.strip().rpartition("\n")[2])
    except ValueError:  # the worker was killed or could not start
        code = worker.returncode
        last = errors.strip().rpartition("\n")[2][:300]
        killed = f"the process was killed by {signal.Signals(-code).name if code < 0 else code} (out of host memory?)"
        note = killed if code < 0 else f"the process ended with code {code}: {last}"
        row = {"method": measurement.method, "status": "failed", "note": note}
    if row["status"] != "ok":
        print(errors[-4000:], file=sys.stderr)
    return row


def _write_json(path: Path, result: dict[str, Any]) -> None:
    """Write a result, replacing the file as a whole."""
    with whole_file(path) as temporary:
        temporary.write_text(json.dumps(result, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def check_environment(output: Path) -> None:
    """Check before the first measurement that results can be written, and have SIGTERM stop the worker too.

    Raises:
        ValueError: SUPERTUNE_KERNELS has an unknown value, or nothing can be written to the folder.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    from ..ops.dispatch import requested

    try:
        requested()
        output.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=output):
            pass
    except (OSError, ValueError) as error:
        raise ValueError(f"--output {output}: {error}" if isinstance(error, OSError) else str(error)) from error


def measurement_for(model: str | None, device: str | None, settings: dict[str, Any]) -> Measurement:
    """The settings of a measurement, but for its method.

    Settings of the command line take precedence over those of the YAML.

    Raises:
        ValueError: no such device, shape or model, or a model that is too large for a CPU.
    """
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: torch sees no GPU here; leave --device out to run tiny on the CPU.")
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    model = model or ("tiny" if device == "cpu" else "llama3-8b")
    given: dict[str, Any] = {"model": model} if model in SHAPES else _yaml_settings(model)
    measurement = Measurement(**{"method": "floor", "device": device, **given, **settings})
    if device == "cpu":
        if measurement.memory_limit is not None:
            raise ValueError(f"--memory-limit {measurement.memory_limit}: it limits a GPU, and none is used here.")
        if measurement.model != "tiny" and parameter_count(measurement.model) > _CPU_PARAMETERS:
            raise ValueError(
                f"--model {model}: more than {_CPU_PARAMETERS // 10**6} M parameters and no GPU; run it on a machine "
                "with one, or take --model tiny or smollm2-135m, whose numbers are not the claim."
            )
        measurement = replace(measurement, **_CPU_CALIBRATION)
    return measurement


def _yaml_settings(path: str) -> dict[str, Any]:
    """Fields of a Measurement that an Axolotl YAML sets.

    Raises:
        ValueError: no YAML, or its base_model is no local folder.
    """
    import yaml

    if not path.endswith((".yml", ".yaml")) or not Path(path).is_file():
        raise ValueError(f"--model {path}: neither one of {', '.join(SHAPES)} nor a YAML file.")
    try:
        config = yaml.safe_load(Path(path).read_text(encoding="utf-8")) or {}
        base = config.get("base_model")
    except (yaml.YAMLError, AttributeError) as error:
        raise ValueError(f"--model {path}: not a YAML of keys ({error}).") from error
    if not base or not Path(base).exists():
        raise ValueError(
            f"base_model: {base!r} in {path} is no local folder; put the model's config.json into a folder and name "
            f"that, or bench a shape: --model {', '.join(SHAPES)}."
        )
    settings = {field: config[key] for key, field in _READ.items() if config.get(key) is not None}
    if "gradient_checkpointing" in settings:
        settings["gradient_checkpointing"] = bool(settings["gradient_checkpointing"])
    return {"model": base} | settings


def _unread(path: str) -> list[str]:
    """Keys set in a YAML that change the cost of a step and are not read."""
    import yaml

    config = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    return sorted(key for key, value in config.items() if value and (key in _COSTLY or key.startswith("liger_")))


def _version(package: str) -> str | None:
    """The installed version of a package, or None."""
    try:
        return version(package)
    except PackageNotFoundError:
        # this package, imported from a checkout that is not installed
        return sys.modules[__name__.partition(".")[0]].__version__ if package == PACKAGES[0] else None
