"""What the runs of a grid show: rates, results, differences to the reference, and everything that is missing."""

import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel

from ...tasks.benchmarks import BENCHMARKS, find_benchmark
from ..rate_selection import Choice, Trial, choose_rates
from ..records import (
    CONFIG_FILE,
    GRID_FILE,
    SCORES_FILE,
    BenchmarkScores,
    Run,
    RunKey,
    Scores,
    last_words,
    read_runs,
    read_scores,
)
from .comparisons import Comparison, Result, SeedDifference, compare, compare_with_base, seed_differences
from .statistics import RESAMPLES

# Keys of a config.yml in which runs of one method at one rate may differ: the seed, and where things lie.
_OF_ONE_RUN = {"seed", "output_dir", "dataset_prepared_path", "calibration_path"}
# A trained count that is further from its budget is pointed out.
BUDGET_TOLERANCE = 0.005
_EDGES = {
    "lowest": "At the lowest rate that was tried, so that a better one may lie below",
    "highest": "At the highest rate that was tried, so that a better one may lie above",
    "only": "Only one rate was tried, so that none was chosen",
}


# What methods can only be compared at if it is the same.
_SHARED = {"base_models": "their base models", "datasets": "their data", "test_datasets": "their validation data"}


@dataclass(frozen=True)
class Findings:
    """
    runs: all of the grid that ended, by method, rate, epochs and seed.
    left_out: runs that ended, and that the grid no longer has.
    results: by epochs, the reference first, then by validation NLL.
    seed_differences: of all results but the reference's, in their order; empty without the reference.
    base: scores of the model before training.
    benchmarks: items and clean items (None without a contamination report) by benchmark; empty without any scores.
    comparisons, against_base: with the reference, and with the model before training; empty without scores of it.
    notes: what failed, is missing, or limits what the numbers say.
    """

    runs: list[Run]
    left_out: list[Run]
    choices: dict[tuple[str, float], Choice | None]
    results: list[Result]
    base: Scores | None
    benchmarks: dict[str, tuple[int, int | None]]
    comparisons: list[Comparison]
    against_base: list[Comparison]
    seed_differences: list[SeedDifference]
    reference: str
    resamples: int
    seed: int
    notes: list[str]

    def name(self, method: str, epochs: float) -> str:
        """The method, with its epochs where the grid has several numbers of them."""
        several = len({epochs for _, epochs in self.choices}) > 1
        return f"{method} ({epochs:g} epochs)" if several else method

    @property
    def base_validation_nll(self) -> float | None:
        """Of the model before training, where a run evaluated it."""
        first = [run.eval_losses[0] for run in self.runs if run.eval_losses and run.eval_losses[0][0] == 0]
        return first[0][1] if first else None

    @property
    def where(self) -> dict[str, list[Any]]:
        """What the runs have in common, or should: of each kind every value that occurs, sorted.

        base_models, datasets, test_datasets, budgets: as their YAMLs name them.
        budget_parameters: numbers.
        devices, versions: "cpu" or the GPU's name; "package version".
        """
        setups = [run.setup for run in self.runs if run.setup is not None]
        found: dict[str, set[Any]] = {
            "base_models": {setup.base_model for setup in setups},
            "datasets": {", ".join(setup.datasets) for setup in setups},
            "test_datasets": {", ".join(setup.test_datasets) for setup in setups},
            "budgets": {setup.budget for setup in setups},
            "budget_parameters": {run.budget_parameters for run in self.runs},
            "devices": {run.device for run in self.runs},
            "versions": {f"{name} {version}" for run in self.runs for name, version in run.versions.items()},
        }
        return {kind: sorted(value for value in values if value) for kind, values in found.items()}


class _Seeds(BaseModel):
    seeds: list[int] = []


class _GridOfRecord(_Seeds):
    chosen: _Seeds


class _FirstStageRun(BaseModel):
    key: RunKey


class _GridRecord(BaseModel):
    """What of a grid.json says which runs it has."""

    grid: _GridOfRecord
    runs: list[_FirstStageRun]

    @cached_property
    def first_stage(self) -> set[RunKey]:
        """Among which rates are chosen."""
        return {run.key for run in self.runs}

    @cached_property
    def _rates(self) -> set[tuple[str, float, float]]:
        return {(key.method, key.epochs, key.learning_rate) for key in self.first_stage}

    def has(self, key: RunKey) -> bool:
        """Whether it is of a stage of the grid, the first or a later one."""
        seeds = (*self.grid.seeds, *self.grid.chosen.seeds)
        return key.seed in seeds and (key.method, key.epochs, key.learning_rate) in self._rates


def _read_grid(path: Path) -> _GridRecord:
    try:
        return _GridRecord.model_validate_json(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(
            f"{path} is no grid of a sweep ({error}); sweep again to have it written anew, or remove it: then every "
            "run counts."
        ) from error


def find(runs_dir: Path, reference: str = "lora", resamples: int = RESAMPLES, seed: int = 0) -> Findings:
    """Read the records of a grid and work out everything that a report says.

    Args:
        runs_dir: as grid.runs describes it. Of it are read grid.json, run.json, the scores.json of the base and of
            chosen runs, and their config.yml (others only where a run.json does not say what was trained on what).
            Rates are chosen as the sweep chooses them, among the runs of grid.json's first stage; without a grid.json
            among all runs.
        reference: the method that all others are compared with.
        resamples, seed: of the bootstrap.

    Raises:
        ValueError: no finished run, a damaged record, or scores of different questions.
    """
    runs = read_runs(runs_dir)
    if not any(run.status == "done" for run in runs):
        raise ValueError(
            f"{runs_dir} holds no run that finished (METHOD/lr…-ep…-seed…/run.json): train the grid first."
        )
    grid = _read_grid(path) if (path := runs_dir / GRID_FILE).is_file() else None
    left_out = [run for run in runs if grid is not None and not grid.has(run.key)]
    runs = [run for run in runs if grid is None or grid.has(run.key)]
    if not any(run.status == "done" for run in runs):
        raise ValueError(
            f"{runs_dir}: no run that finished is of the grid in {GRID_FILE}, which has no longer: {_named(left_out)}. "
            "Sweep that grid first."
        )
    choices = choose_rates(Trial.of(run) for run in runs if grid is None or run.key in grid.first_stage)
    unchosen = {(run.key.method, run.key.epochs): None for run in runs}  # where no run of the first stage ended
    choices = dict(sorted((unchosen | choices).items()))
    results = []
    files: dict[Path, Scores] = {}
    for choice in choices.values():
        if choice is not None:
            at_rate = [run for run in runs if Trial.of(run).usable and _is_at(run, choice)]
            scores = {}
            for run in at_rate:
                path = runs_dir / run.key.folder / SCORES_FILE
                if path.is_file():
                    scores[run.key.seed] = files[path] = read_scores(path)
                    if scores[run.key.seed].key != run.key:
                        raise ValueError(f"{path} is not of the run beside it; score that run again.")
            results.append(Result(choice, {run.key.seed: run for run in at_rate}, scores))
    if not results:
        raise ValueError(
            f"{runs_dir}: no method has a run with a finite validation NLL, so that no rate can be chosen."
        )
    results.sort(key=lambda each: (each.epochs, each.method != reference, _nll(each), each.method))
    base = None
    if (path := runs_dir / "base" / SCORES_FILE).is_file():
        base = files[path] = read_scores(path)
        if base.key is not None:
            raise ValueError(
                f"{path} is of the run {base.key.folder}, not of the model before training; remove it and sweep again "
                "to have that scored."
            )
    _check_same_questions(files)
    benchmarks = _benchmarks(next(iter(files.values())).benchmarks) if files else {}
    comparisons = compare(results, reference, benchmarks, resamples, seed)
    against_base = compare_with_base(results, base, benchmarks, resamples, seed) if base is not None else []
    by_seed = seed_differences(results, reference)
    found = Findings(
        runs=runs,
        left_out=left_out,
        choices=choices,
        results=results,
        base=base,
        benchmarks=benchmarks,
        comparisons=comparisons,
        against_base=against_base,
        seed_differences=by_seed,
        reference=reference,
        resamples=resamples,
        seed=seed,
        notes=[],
    )
    found.notes.extend(_notes(found, runs_dir, files))
    return found


def short_rate(rate: float) -> str:
    """As 5e-4."""
    factor, _, power = f"{rate:.5e}".partition("e")
    return f"{float(factor):g}e{int(power)}"


def _is_at(run: Run, choice: Choice) -> bool:
    key = run.key
    return (key.method, key.epochs, key.learning_rate) == (choice.method, choice.epochs, choice.learning_rate)


def _nll(result: Result) -> float:
    found = result.over_seeds(lambda run: run.validation_nll)
    assert found is not None
    return found.mean


def _benchmark_order(name: str) -> tuple[int, str]:
    try:
        return list(BENCHMARKS).index(find_benchmark(name).name), name
    except ValueError:
        return len(BENCHMARKS), name


def _check_same_questions(files: dict[Path, Scores]) -> None:
    """Items are paired by position: a ValueError names every file that was not asked what most were, as they were."""
    asked = {path: (repr(sorted(scores.asked.items())), _questions(scores)) for path, scores in files.items()}
    if len(set(asked.values())) < 2:
        return
    usual = Counter(asked.values()).most_common(1)[0][0]
    differing = []
    for path, (how, questions) in asked.items():
        if (how, questions) != usual:
            otherwise = [f"asked with {how}, not {usual[0]}"] if how != usual[0] else []
            differing.append(f"{path}: {'; '.join([*otherwise, *_difference(usual[1], questions)])}")
    raise ValueError(
        "these scores are of other questions than the rest, so that nothing can be compared; remove them and score "
        "those runs again:\n" + "\n".join(differing)
    )


def _questions(scores: Scores) -> tuple[tuple[str, int, str | None, tuple[int, ...]], ...]:
    return tuple(
        (name, len(each.correct), each.clean, tuple(each.gold_tokens))
        for name, each in sorted(scores.benchmarks.items())
    )


def _difference(usual: tuple, found: tuple) -> list[str]:
    expected = {name: rest for name, *rest in usual}
    parts: list[str] = [f"no {name}" for name in expected.keys() - {name for name, *_ in found}]
    for name, items, clean, tokens in found:
        if name not in expected:
            parts.append(f"{name}, which the others lack")
            continue
        if items != expected[name][0]:
            parts.append(f"{name}: {items} items, not {expected[name][0]} (another limit?)")
        elif clean != expected[name][1]:
            parts.append(f"{name}: other clean items (another contamination report, or none)")
        if tokens != expected[name][2]:
            parts.append(f"{name}: {len(tokens)} gold targets, not {len(expected[name][2])}, or another tokenizer's")
    return sorted(parts)


def _benchmarks(first: dict[str, BenchmarkScores]) -> dict[str, tuple[int, int | None]]:
    return {
        name: (len(first[name].correct), None if (clean := first[name].clean) is None else clean.count("1"))
        for name in sorted(first, key=_benchmark_order)
    }


def _notes(found: Findings, runs_dir: Path, files: dict[Path, Scores]) -> list[str]:
    """In sentences, each with the runs or methods that it is about."""
    notes = []
    if found.left_out:
        notes.append(f"Left out, for {GRID_FILE} has them no longer: {_named(found.left_out)}.")
    for run in found.runs:
        name = run.key.folder.as_posix()
        if run.status == "failed":
            notes.append(f"Failed: {name}: {last_words(run.error or '') or 'no error was recorded'}")
        elif run.validation_nll is None:
            notes.append(f"Without a validation NLL, and so never chosen: {name}.")
        elif not Trial.of(run).usable:
            notes.append(f"Diverged: {name}: validation NLL {run.validation_nll}.")
    unfinished = {path.parent for path in runs_dir.glob(f"*/*/{CONFIG_FILE}")} - {
        runs_dir / r.key.folder for r in found.runs
    }
    notes += [f"Not finished: {path.relative_to(runs_dir).as_posix()}." for path in sorted(unfinished)]
    for (method, epochs), choice in found.choices.items():
        if choice is None:
            notes.append(f"No rate could be chosen for {found.name(method, epochs)}: none of its runs can be used.")
    for edge, text in _EDGES.items():
        at_edge = [each.choice for each in found.results if each.choice.edge == edge]
        if at_edge:
            rates = (f"{found.name(each.method, each.epochs)} ({each.learning_rate:g})" for each in at_edge)
            notes.append(f"{text}: {', '.join(rates)}.")
    for result in found.results:
        notes += _notes_on(result, found, runs_dir)
    notes += _notes_on_scores(found, runs_dir, files)
    if any(run.jobs_per_gpu > 1 for result in found.results for run in result.runs.values()):
        notes.append(
            "Times marked ‡ are of runs that shared their device with others: they are comparable with no others, each "
            "other's included."
        )
    for kind, what in _SHARED.items():
        if len(values := found.where[kind]) > 1:
            notes.append(f"Runs differ in {what} ({'; '.join(values)}): what differs between methods may be due to it.")
    counts = found.where["budget_parameters"]
    if counts and counts[-1] > (1 + BUDGET_TOLERANCE) * counts[0]:
        notes.append(f"Budgets differ between methods: from {counts[0]:,} to {counts[-1]:,} parameters.")
    devices = sorted({run.device or "unknown" for result in found.results for run in result.runs.values()})
    if len(devices) > 1:
        notes.append(
            f"Runs were made on different devices ({', '.join(devices)}): times and memory are not comparable."
        )
    return notes


def _notes_on(result: Result, found: Findings, runs_dir: Path) -> list[str]:
    choice, name = result.choice, found.name(result.method, result.epochs)
    notes = []
    started = {run.key.seed for run in found.runs if (run.key.method, run.key.epochs) == (choice.method, choice.epochs)}
    if missing := sorted(started - result.runs.keys()):
        notes.append(f"Missing seeds: {name}: {_listed(missing)} at {choice.learning_rate:g}.")
    if found.benchmarks and (unscored := sorted(result.runs.keys() - result.scores.keys())):
        notes.append(f"Not scored: {name}: seed {_listed(unscored)}.")
    if differing := _differing_settings(result, runs_dir):
        notes.append(
            f"Runs of {name} at {choice.learning_rate:g} differ in their settings ({differing}), so that its means mix "
            "them."
        )
    for run in result.runs.values():
        trained, budget = run.trainable_parameters, run.budget_parameters
        if trained is not None and budget and abs(trained / budget - 1) > BUDGET_TOLERANCE:
            notes.append(
                f"Off its budget by more than {BUDGET_TOLERANCE:.1%}: {name}, seed {run.key.seed}: {trained:,} "
                f"parameters trained, {budget:,} allowed ({trained / budget:.2%})."
            )
    return notes


def _differing_settings(result: Result, runs_dir: Path) -> str:
    """Keys of config.yml that are not alike in all its runs, with their values; "" where all are."""
    files = {seed: runs_dir / run.key.folder / CONFIG_FILE for seed, run in result.runs.items()}
    settings = {seed: _read_settings(path) for seed, path in files.items() if path.is_file()}
    differing = []
    for key in sorted({key for each in settings.values() for key in each} - _OF_ONE_RUN):
        seeds: dict[str, list[int]] = {}
        for seed, each in settings.items():
            value = json.dumps(each[key], ensure_ascii=False, default=str) if key in each else "absent"
            seeds.setdefault(value, []).append(seed)
        if len(seeds) > 1:
            differing.append(f"{key}: " + ", ".join(f"{value} (seed {_listed(of)})" for value, of in seeds.items()))
    return "; ".join(differing)


def _read_settings(path: Path) -> dict[str, Any]:
    try:
        loaded = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, ValueError) as error:
        raise ValueError(f"{path} is no YAML ({error}); put it back, or remove it.") from error
    if not isinstance(loaded, dict):
        raise ValueError(f"{path} holds {type(loaded).__name__}, not keys with values; put it back, or remove it.")
    return loaded


def _notes_on_scores(found: Findings, runs_dir: Path, files: dict[Path, Scores]) -> list[str]:
    if not found.benchmarks:
        return ["No scores yet: this is the training stage alone, without accuracies and comparisons of them."]
    notes = []
    if found.base is None:
        notes.append("The model before training was not scored (base/scores.json).")
    if limits := sorted({scores.limit for scores in files.values() if scores.limit is not None}):
        notes.append(f"NOT THE WHOLE TEST SETS: scored with a limit of {_listed(limits)} items (below 1: a share).")
    if any(clean is None for _, clean in found.benchmarks.values()):
        notes.append(
            "No contamination report: nobody looked whether the training data hold test items, and there are no scores "
            "on clean items."
        )
    elif empty := [name for name, (_, clean) in found.benchmarks.items() if clean == 0]:
        notes.append(f"No clean item in {', '.join(empty)}: there is no mean over clean items.")
    if not any(each.gold_tokens for scores in files.values() for each in scores.benchmarks.values()):
        notes.append("The gold targets were not scored (supertune_math_ppl).")
    for path, scores in sorted(files.items()):
        names = [name for name in found.benchmarks if not all(map(math.isfinite, scores.benchmarks[name].gold_nll))]
        if names:
            key, file = scores.key, path.relative_to(runs_dir).as_posix()
            whose = "the model before training" if key is None else found.name(key.method, key.epochs)
            notes.append(
                f"Not finite: gold NLL of {', '.join(names)} in {file}: the gold NLL of {whose} is left out, and "
                "compared with none."
            )
    for epochs in dict.fromkeys(each.epochs for each in found.results):
        against = next((r for r in found.results if (r.method, r.epochs) == (found.reference, epochs)), None)
        if against is None or not against.scores:
            what = _why_without(found, epochs) if against is None else "was not scored"
            notes.append(f"No differences: the reference {found.name(found.reference, epochs)} {what}.")
            continue
        others: dict[tuple[int, ...], list[str]] = {}
        for result in found.results:
            if result.epochs == epochs and result.scores and result.scores.keys() != against.scores.keys():
                name = found.name(result.method, epochs)
                others.setdefault(tuple(sorted(result.scores)), []).append(name)
        notes += [
            f"Compared with {found.reference}'s seeds {_listed(sorted(against.scores))}, though scored with "
            f"{_listed(seeds)}: {', '.join(methods)}."
            for seeds, methods in others.items()
        ]
    return notes


def _why_without(found: Findings, epochs: float) -> str:
    """Why there is no result of the reference."""
    wanted = found.reference, epochs
    if any((run.key.method, run.key.epochs) == wanted for run in found.runs):
        return "has no run that can be used: they failed, diverged or were not evaluated"
    if any((run.key.method, run.key.epochs) == wanted for run in found.left_out):
        return f"is no longer in {GRID_FILE}"
    return "was not trained"


def _named(runs: Sequence[Run]) -> str:
    """Runs by what they share but the seed."""
    seeds: dict[Path, list[int]] = {}
    for run in runs:
        folder = run.key.folder
        seeds.setdefault(folder.with_name(folder.name.rpartition("-seed")[0]), []).append(run.key.seed)
    return ", ".join(f"{folder.as_posix()} (seed {_listed(each)})" for folder, each in seeds.items())


def _listed(values: Sequence[float]) -> str:
    return ", ".join(f"{value:g}" for value in values)
