"""The files that a grid's runs leave in RUNS_DIR: `sweep` writes them, `report` reads nothing else.

RUNS_DIR/grid.json                    the grid with every run's YAML
RUNS_DIR/prepared/DIGEST/             tokenized data sets, shared by runs that tokenize the same files alike
RUNS_DIR/calibration/                 activation norms, shared by runs that calibrate alike
RUNS_DIR/contamination.json           which test items the training data contains
RUNS_DIR/base/scores.json             scores of the model before training
RUNS_DIR/METHOD/lr…-ep…-seed…/        one run:
    config.yml                        the YAML that `axolotl train` was given
    log.txt                           its output
    run.json                          a `Run`, written last: without it the run is not finished
    scores.json                       `Scores`, if the run was scored
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
    # A loss that diverged is NaN, which pydantic would otherwise write as null.
    model_config = ConfigDict(extra="forbid", ser_json_inf_nan="strings")

    def write(self, path: Path) -> None:
        """Write the record as JSON; the file is whole or absent."""
        with whole_file(path) as temporary:
            temporary.write_text(self.model_dump_json(indent=1, exclude_none=True) + "\n", encoding="utf-8")


class RunKey(BaseModel):
    """Identifies a run within its grid."""

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
    """The conditions of a run that its method should share with the others, as a report shows them."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    base_model: str
    datasets: tuple[str, ...] = ()
    test_datasets: tuple[str, ...] = ()
    """The data of the validation NLL."""
    budget: str | None = None
    """The key that sets the budget, with its value; None for full fine-tuning, or if the YAML does not set it."""
    files: dict[str, str] | None = None
    """sha256 of the local data and calibration text by the path in the YAML; None: not recorded (old records)."""

    @classmethod
    def of(cls, settings: Mapping[str, Any], files: dict[str, str] | None = None) -> Self:
        """Read the setup from a run's YAML, with the digests of its files."""
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
    """A run that finished or failed. Times in seconds, memory in GiB, losses in nats a target token."""

    format: Literal[1] = 1
    key: RunKey
    status: Literal["done", "failed"]
    error: str | None = None
    """The last lines of a failed run's log."""
    config_sha256: str
    """Of config.yml."""
    setup: Setup | None = None
    """None in old records; `read_runs` then reads it from config.yml."""
    started: str
    """ISO 8601, UTC."""
    seconds: float
    """Of the whole process; of a resumed run, its last process."""
    train_seconds: float | None = None
    """Axolotl's train_runtime; None for a resumed run, of which it covers only the last part."""
    steps: int | None = None
    trainable_parameters: int | None = None
    budget_parameters: int | None = None
    """Parameters that the budget allows, Σ r(out_features + in_features) over the layers; None without a budget."""
    peak_memory_gib: float | None = None
    """None on a CPU."""
    losses: list[tuple[int, float]] = []
    """(step, mean training loss)."""
    eval_losses: list[tuple[int, float]] = []
    """(step, validation NLL), ascending; step 0 is the model before training."""
    jobs_per_gpu: int = 1
    """Runs that shared the device; times are comparable only if it is 1."""
    device: str | None = None
    versions: dict[str, str] = {}

    @property
    def validation_nll(self) -> float | None:
        """Validation NLL of the final model, which is the one that is scored; None if it was not evaluated."""
        return self.eval_losses[-1][1] if self.eval_losses else None


_Bits = Annotated[str, StringConstraints(pattern="^[01]*$")]


class BenchmarkScores(_Record):
    """One benchmark, item by item in the order of its file: item i of every run is the same question."""

    correct: _Bits
    """One character per item, 1 if the answer is correct by the published rule, else 0."""
    correct_strict: _Bits
    """As `correct`, by the corrected rule."""
    clean: _Bits | None = None
    """1 for items that the training data does not contain; None without a contamination report."""
    gold_nll: list[float] = []
    """−log p of each gold target of `tasks.perplexity`, in nats."""
    gold_tokens: list[int] = []
    """Tokens of each gold target."""

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
    """One model's answers to the benchmarks."""

    format: Literal[1] = 1
    key: RunKey | None = None
    """None: the model before training."""
    benchmarks: dict[str, BenchmarkScores]
    limit: float | None = None
    """Items of each benchmark, or a share below 1; None: all."""
    asked: dict[str, Any] = {}
    """The keys of the grid's `score` that affect the scores."""
    base_model: str | None = None
    """As in `Setup`; None: not recorded (old records)."""
    files: dict[str, str] | None = None
    """sha256 of the local training data that `clean` refers to, by path; None: not recorded (old records)."""
    seconds: float
    jobs_per_gpu: int = 1
    device: str | None = None
    versions: dict[str, str] = {}


Record = TypeVar("Record", bound=_Record)


def read_runs(runs_dir: Path) -> list[Run]:
    """Read all ended runs, sorted by method, learning rate, epochs and seed.

    A run without a recorded setup gets that of its config.yml, if there is one.

    Raises:
        ValueError: a run.json is not a `Run` or is in another run's folder, or a needed config.yml is not a run's YAML;
            names the file.
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
        raise ValueError(f"{path} is not the YAML of a run ({error!r}); put it back, or remove it.") from error


def read_run(path: Path) -> Run:
    """Read a run.json.

    Raises:
        ValueError: it is not a `Run`; names the file.
    """
    return _read(Run, path)


def read_scores(path: Path) -> Scores:
    """Read a scores.json.

    Raises:
        ValueError: it is not `Scores`; names the file.
    """
    return _read(Scores, path)


def _read(kind: type[Record], path: Path) -> Record:
    try:
        return kind.model_validate_json(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(
            f"{path} is not a {kind.__name__} record of a grid ({error}); remove it to run this again."
        ) from error


def last_words(text: str) -> str:
    """The last line of a log that is neither empty nor a progress bar; "" without one."""
    lines = [line.rpartition("\r")[2].strip() for line in text.split("\n")]
    return next((line for line in reversed(lines) if line and "%|" not in line), "")
