"""What a run of a grid leaves behind, and where: `sweep` writes it, `report` reads it and nothing else.

RUNS_DIR/grid.json                    the grid, resolved: what is to be run, and with which YAML
RUNS_DIR/prepared/DIGEST/             data sets as Axolotl tokenizes them, shared by the runs of the same files
RUNS_DIR/calibration/                 activation norms, shared by the runs that calibrate alike
RUNS_DIR/contamination.json           which test items the training data holds
RUNS_DIR/base/scores.json             the model before training
RUNS_DIR/METHOD/lr…-ep…-seed…/        one run:
    config.yml                        the YAML that `axolotl train` was given
    log.txt                           what it printed
    run.json                          a `Run`, written last: without it the run is not finished
    scores.json                       `Scores`, where the run was scored; written last as well
    adapter/                          Axolotl's output_dir
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, StringConstraints, model_validator

from ..method.atomic_files import whole_file

GRID_FILE = "grid.json"
RUN_FILE = "run.json"
CONFIG_FILE = "config.yml"
SCORES_FILE = "scores.json"


class _Record(BaseModel):
    # A loss that diverged is NaN, which JSON has no word for and pydantic would write as null.
    model_config = ConfigDict(extra="forbid", ser_json_inf_nan="strings")

    def write(self, path: Path) -> None:
        with whole_file(path) as temporary:
            temporary.write_text(self.model_dump_json(indent=1, exclude_none=True) + "\n", encoding="utf-8")


class RunKey(BaseModel):
    """What tells a run of a grid from all others."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    method: str
    learning_rate: float
    epochs: float
    seed: int

    @property
    def folder(self) -> Path:
        """Relative to RUNS_DIR."""
        return Path(self.method) / f"lr{self.learning_rate:g}-ep{self.epochs:g}-seed{self.seed}"


class Setup(BaseModel):
    """What of a run's YAML says what is compared, beside the method: a report names it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    base_model: str
    datasets: tuple[str, ...] = ()
    test_datasets: tuple[str, ...] = ()
    """Of the validation NLL."""
    budget: str | None = None
    """The key that sets it, with its value; None: full fine-tuning, or the YAML leaves it to a default."""
    files: dict[str, str] | None = None
    """sha256 of the local data and calibration text, by the path that the YAML names. None: not recorded."""

    @classmethod
    def of(cls, settings: Mapping[str, Any], files: dict[str, str] | None = None) -> Self:
        """Read it from a YAML's mapping, beside what the files held that it names."""
        revision = settings.get("revision_of_model")
        density = settings.get("sparse_density")
        budget = None if density is None else f"sparse_density {density}"
        if budget is None and settings.get("adapter") and settings.get("lora_r") is not None:
            budget = f"lora_r {settings['lora_r']}"
        return cls(
            base_model=settings["base_model"] + (f" (revision {revision})" if revision else ""),
            datasets=_names(settings.get("datasets")),
            test_datasets=_names(settings.get("test_datasets")),
            budget=budget,
            files=files,
        )


def _names(datasets: Any) -> tuple[str, ...]:
    return tuple(f"{each['path']} ({each['name']})" if each.get("name") else each["path"] for each in datasets or ())


class Run(_Record):
    """One run that ended, well or not. Times in seconds, memory in GiB, losses in nats a target token."""

    format: Literal[1] = 1
    key: RunKey
    status: Literal["done", "failed"]
    error: str | None = None
    """The last lines of the log of a run that failed."""
    config_sha256: str
    """Of config.yml."""
    setup: Setup | None = None
    """None: recorded before there was such, and config.yml tells it."""
    started: str
    """ISO 8601, UTC."""
    seconds: float
    """Of the whole process, the last one of a run that went on from a checkpoint."""
    train_seconds: float | None = None
    """Axolotl's train_runtime; None of a run that went on from a checkpoint, which took longer than that says."""
    steps: int | None = None
    trainable_parameters: int | None = None
    budget_parameters: int | None = None
    """What the method's budget allows: Σ r(c + b) over its layers. None: the method has no budget (full)."""
    peak_memory_gib: float | None = None
    """None on a CPU."""
    losses: list[tuple[int, float]] = []
    """(step, mean training loss)."""
    eval_losses: list[tuple[int, float]] = []
    """(step, validation NLL); step 0 is the model before training."""
    jobs_per_gpu: int = 1
    """Runs that shared the device: times are comparable only where it is 1."""
    device: str | None = None
    versions: dict[str, str] = {}

    @property
    def validation_nll(self) -> float | None:
        """Of the model that the run ended with, which is the one that is scored; None where it was not evaluated."""
        return self.eval_losses[-1][1] if self.eval_losses else None


_Bits = Annotated[str, StringConstraints(pattern="^[01]*$")]


class BenchmarkScores(_Record):
    """One benchmark, item by item, in the order of its file: item i of every run is the same question."""

    correct: _Bits
    """A character an item: 1 or 0, by the published rule."""
    correct_strict: _Bits
    """The same by the corrected rule."""
    clean: _Bits | None = None
    """1 where the training data does not hold the item; None: no contamination report was given."""
    gold_nll: list[float] = []
    """−log p of each gold target that `tasks.perplexity` scores, in nats."""
    gold_tokens: list[int] = []

    @model_validator(mode="after")
    def _one_item_each(self) -> Self:
        items = len(self.correct)
        if not items or len(self.correct_strict) != items or len(self.clean or self.correct) != items:
            raise ValueError(
                f"correct holds {items} items, and correct_strict and clean must hold as many, at least one"
            )
        if len(self.gold_nll) != len(self.gold_tokens):
            raise ValueError(f"gold_nll holds {len(self.gold_nll)} targets, gold_tokens {len(self.gold_tokens)}")
        return self


class Scores(_Record):
    """How one model answers the benchmarks."""

    format: Literal[1] = 1
    key: RunKey | None = None
    """None: the model before training."""
    benchmarks: dict[str, BenchmarkScores]
    limit: float | None = None
    """Items a benchmark (below 1: a share) where not all were asked."""
    asked: dict[str, Any] = {}
    """What the grid's `score` says of how they were asked."""
    base_model: str | None = None
    """As `Setup` has it; None: not recorded."""
    files: dict[str, str] | None = None
    """sha256 of the local training data that `clean` is about, by path; None: not recorded."""
    seconds: float
    jobs_per_gpu: int = 1
    device: str | None = None
    versions: dict[str, str] = {}


Record = TypeVar("Record", bound=_Record)


def read_runs(runs_dir: Path) -> list[Run]:
    """All finished runs, sorted by method, learning rate, epochs and seed; without a setup of their own with the one
    that config.yml tells, if it is there.

    Raises:
        ValueError: a run.json is not a `Run`, or lies in another run's folder, or a config.yml that was needed is no
            YAML of a run; names the file.
    """
    runs = []
    for path in runs_dir.glob(f"*/*/{RUN_FILE}"):
        run = read_run(path)
        if path.parent.relative_to(runs_dir) != run.key.folder:
            raise ValueError(f"{path} is of the run {run.key.folder}: move its folder back to that name, or remove it.")
        config = path.with_name(CONFIG_FILE)
        if run.setup is None and config.is_file():
            run = run.model_copy(update={"setup": _setup_in(config)})
        runs.append(run)
    return sorted(runs, key=lambda run: (run.key.method, run.key.learning_rate, run.key.epochs, run.key.seed))


def _setup_in(path: Path) -> Setup:
    try:
        return Setup.of(yaml.safe_load(path.read_text(encoding="utf-8")))
    except (yaml.YAMLError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{path} is no YAML of a run ({error!r}); put it back, or remove it.") from error


def read_run(path: Path) -> Run:
    """Raises ValueError, which names the file, if it holds no `Run`."""
    return _read(Run, path)


def read_scores(path: Path) -> Scores:
    """Raises ValueError, which names the file, if it holds no `Scores`."""
    return _read(Scores, path)


def _read(kind: type[Record], path: Path) -> Record:
    try:
        return kind.model_validate_json(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is no {kind.__name__} of a grid ({error}); remove it to run this again.") from error


def last_words(text: str) -> str:
    """The last line of a log that is neither empty nor a progress bar; "" where there is none."""
    lines = [line.rpartition("\r")[2].strip() for line in text.split("\n")]
    return next((line for line in reversed(lines) if line and "%|" not in line), "")
