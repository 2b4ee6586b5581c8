"""The notes of a report: sentences on what failed, is missing, or limits what the numbers say.

Each note names the runs or methods that it is about.
"""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from ..rate_selection import Trial
from ..run_files import CONFIG_FILE, GRID_FILE, last_words
from .comparisons import Result
from .findings import BUDGET_TOLERANCE, GridFindings
from .formatting import join_numbers, name_runs

# Keys of a config.yml in which runs of one method at one rate may differ: the seed, and where files are.
_KEYS_OF_ONE_RUN = {"seed", "output_dir", "dataset_prepared_path", "calibration_path"}
_EDGES = {
    "lowest": "At the lowest rate that was tried, so that a better one may lie below",
    "highest": "At the highest rate that was tried, so that a better one may lie above",
    "only": "Only one rate was tried, so that none was chosen",
}
# Conditions that must be equal for methods to be comparable.
_MUST_BE_EQUAL = {
    "base_models": "their base models",
    "datasets": "their data",
    "test_datasets": "their validation data",
}


def make_notes(findings: GridFindings, runs_dir: Path) -> list[str]:
    """All notes, in the order of the report.

    Raises:
        ValueError: a config.yml is no YAML mapping; names the file.
    """
    return [
        *_notes_on_runs(findings, runs_dir),
        *_notes_on_choices(findings),
        *(note for result in findings.results for note in _notes_on_result(result, findings, runs_dir)),
        *_notes_on_scores(findings, runs_dir),
        *_notes_on_setup(findings),
    ]


def _notes_on_runs(findings: GridFindings, runs_dir: Path) -> Iterator[str]:
    """Runs that are left out, failed, diverged, were not evaluated or have not finished."""
    if findings.left_out:
        yield f"Left out, for {GRID_FILE} has them no longer: {name_runs(findings.left_out)}."
    for run in findings.runs:
        name = run.key.folder.as_posix()
        if run.status == "failed":
            yield f"Failed: {name}: {last_words(run.error or '') or 'no error was recorded'}"
        elif run.validation_nll is None:
            yield f"Without a validation NLL, and so never chosen: {name}."
        elif not Trial.of(run).usable:
            yield f"Diverged: {name}: validation NLL {run.validation_nll}."
    ended = {runs_dir / run.key.folder for run in findings.runs}
    unfinished = {path.parent for path in runs_dir.glob(f"*/*/{CONFIG_FILE}")} - ended
    for path in sorted(unfinished):
        yield f"Not finished: {path.relative_to(runs_dir).as_posix()}."


def _notes_on_choices(findings: GridFindings) -> Iterator[str]:
    """Methods without a chosen rate, and chosen rates at the edge of those tried."""
    for (method, epochs), choice in findings.choices.items():
        if choice is None:
            yield f"No rate could be chosen for {findings.label(method, epochs)}: none of its runs can be used."
    for edge, text in _EDGES.items():
        at_edge = [result.choice for result in findings.results if result.choice.edge == edge]
        if at_edge:
            rates = (f"{findings.label(choice.method, choice.epochs)} ({choice.learning_rate:g})" for choice in at_edge)
            yield f"{text}: {', '.join(rates)}."


def _notes_on_result(result: Result, findings: GridFindings, runs_dir: Path) -> Iterator[str]:
    """Missing seeds and scores, differing settings and missed budgets of one method."""
    choice, name = result.choice, findings.label(result.method, result.epochs)
    trained_seeds = {
        run.key.seed for run in findings.runs if (run.key.method, run.key.epochs) == (choice.method, choice.epochs)
    }
    if missing := sorted(trained_seeds - result.runs.keys()):
        yield f"Missing seeds: {name}: {join_numbers(missing)} at {choice.learning_rate:g}."
    if findings.benchmarks and (unscored := sorted(result.runs.keys() - result.scores.keys())):
        yield f"Not scored: {name}: seed {join_numbers(unscored)}."
    if differing := _differing_settings(result, runs_dir):
        yield (
            f"Runs of {name} at {choice.learning_rate:g} differ in their settings ({differing}), so that its means mix "
            "them."
        )
    for run in result.runs.values():
        trained, budget = run.trainable_parameters, run.budget_parameters
        if trained is not None and budget and abs(trained / budget - 1) > BUDGET_TOLERANCE:
            yield (
                f"Off its budget by more than {BUDGET_TOLERANCE:.1%}: {name}, seed {run.key.seed}: {trained:,} "
                f"parameters trained, {budget:,} allowed ({trained / budget:.2%})."
            )


def _differing_settings(result: Result, runs_dir: Path) -> str:
    """Keys in which the config.yml of the result's runs differ, with their values and seeds; "" for none."""
    files = {seed: runs_dir / run.key.folder / CONFIG_FILE for seed, run in result.runs.items()}
    settings_by_seed = {seed: _read_settings(path) for seed, path in files.items() if path.is_file()}
    differing = []
    for key in sorted({key for settings in settings_by_seed.values() for key in settings} - _KEYS_OF_ONE_RUN):
        seeds_by_value: dict[str, list[int]] = {}
        for seed, settings in settings_by_seed.items():
            value = json.dumps(settings[key], ensure_ascii=False, default=str) if key in settings else "absent"
            seeds_by_value.setdefault(value, []).append(seed)
        if len(seeds_by_value) > 1:
            values = (f"{value} (seed {join_numbers(seeds)})" for value, seeds in seeds_by_value.items())
            differing.append(f"{key}: {', '.join(values)}")
    return "; ".join(differing)


def _read_settings(path: Path) -> dict[str, Any]:
    try:
        loaded = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, ValueError) as error:
        raise ValueError(f"{path} is no YAML ({error}); put it back, or remove it.") from error
    if not isinstance(loaded, dict):
        raise ValueError(f"{path} holds {type(loaded).__name__}, not keys with values; put it back, or remove it.")
    return loaded


def _notes_on_scores(findings: GridFindings, runs_dir: Path) -> Iterator[str]:
    """What was not scored, or on part of the items, and what is not finite."""
    if not findings.benchmarks:
        yield "No scores yet: this is the training stage alone, without accuracies and comparisons of them."
        return
    all_scores = findings.score_files.values()
    if findings.base is None:
        yield "The model before training was not scored (base/scores.json)."
    if limits := sorted({scores.limit for scores in all_scores if scores.limit is not None}):
        yield f"NOT THE WHOLE TEST SETS: scored with a limit of {join_numbers(limits)} items (below 1: a share)."
    if any(clean is None for _, clean in findings.benchmarks.values()):
        yield (
            "No contamination report: nobody looked whether the training data hold test items, and there are no scores "
            "on clean items."
        )
    elif empty := [name for name, (_, clean) in findings.benchmarks.items() if clean == 0]:
        yield f"No clean item in {', '.join(empty)}: there is no mean over clean items."
    if not any(benchmark.gold_tokens for scores in all_scores for benchmark in scores.benchmarks.values()):
        yield "The gold targets were not scored (supertune_math_ppl)."
    yield from _notes_on_infinite_nlls(findings, runs_dir)
    for epochs in dict.fromkeys(result.epochs for result in findings.results):
        yield from _notes_on_reference(findings, epochs)


def _notes_on_infinite_nlls(findings: GridFindings, runs_dir: Path) -> Iterator[str]:
    for path, scores in sorted(findings.score_files.items()):
        names = [name for name in findings.benchmarks if not all(map(math.isfinite, scores.benchmarks[name].gold_nll))]
        if names:
            key, file = scores.key, path.relative_to(runs_dir).as_posix()
            whose = "the model before training" if key is None else findings.label(key.method, key.epochs)
            yield (
                f"Not finite: gold NLL of {', '.join(names)} in {file}: the gold NLL of {whose} is left out, and "
                "compared with none."
            )


def _notes_on_reference(findings: GridFindings, epochs: float) -> Iterator[str]:
    """Whether scores can be compared with the reference of a number of epochs, and on which seeds."""
    name = findings.label(findings.reference, epochs)
    reference = next((r for r in findings.results if (r.method, r.epochs) == (findings.reference, epochs)), None)
    if reference is None:
        yield f"No differences: the reference {name} {_why_no_result(findings, epochs)}."
        return
    if not reference.scores:
        yield f"No differences: the reference {name} was not scored."
        return
    methods_by_seeds: dict[tuple[int, ...], list[str]] = {}
    for result in findings.results:
        if result.epochs == epochs and result.scores and result.scores.keys() != reference.scores.keys():
            label = findings.label(result.method, epochs)
            methods_by_seeds.setdefault(tuple(sorted(result.scores)), []).append(label)
    for seeds, methods in methods_by_seeds.items():
        yield (
            f"Compared with {findings.reference}'s seeds {join_numbers(sorted(reference.scores))}, though scored with "
            f"{join_numbers(seeds)}: {', '.join(methods)}."
        )


def _why_no_result(findings: GridFindings, epochs: float) -> str:
    """Why the reference has no result."""
    reference = findings.reference, epochs
    if any((run.key.method, run.key.epochs) == reference for run in findings.runs):
        return "has no run that can be used: they failed, diverged or were not evaluated"
    if any((run.key.method, run.key.epochs) == reference for run in findings.left_out):
        return f"is no longer in {GRID_FILE}"
    return "was not trained"


def _notes_on_setup(findings: GridFindings) -> Iterator[str]:
    """Conditions in which runs differ: sharing of devices, models, data, budgets, devices."""
    runs = [run for result in findings.results for run in result.runs.values()]
    if any(run.jobs_per_gpu > 1 for run in runs):
        yield (
            "Times marked ‡ are of runs that shared their device with others: they are comparable with no others, each "
            "other's included."
        )
    setup = findings.setup
    for kind, what in _MUST_BE_EQUAL.items():
        if len(values := setup[kind]) > 1:
            yield f"Runs differ in {what} ({'; '.join(values)}): what differs between methods may be due to it."
    counts = setup["budget_parameters"]
    if counts and counts[-1] > (1 + BUDGET_TOLERANCE) * counts[0]:
        yield f"Budgets differ between methods: from {counts[0]:,} to {counts[-1]:,} parameters."
    devices = sorted({run.device or "unknown" for run in runs})
    if len(devices) > 1:
        yield f"Runs were made on different devices ({', '.join(devices)}): times and memory are not comparable."
