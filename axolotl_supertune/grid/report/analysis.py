"""Works out the findings of a report from the records in RUNS_DIR."""

from dataclasses import replace
from pathlib import Path

from ...tasks.benchmarks import BENCHMARKS, find_benchmark
from ..rate_selection import Choice, Trial, choose_rates
from ..run_files import GRID_FILE, SCORES_FILE, BenchmarkScores, Run, Scores, read_runs, read_scores
from .comparisons import Result, ScoreComparer, seed_differences
from .findings import GridFindings
from .formatting import name_runs
from .grid_record import GridRecord, read_grid_record
from .notes import make_notes
from .score_checks import check_same_questions
from .statistics import RESAMPLES


def analyze(runs_dir: Path, reference: str = "lora", resamples: int = RESAMPLES, seed: int = 0) -> GridFindings:
    """Read the records of a grid and work out everything that a report says.

    Learning rates are chosen as the sweep chooses them, among the runs of grid.json's first stage; without a grid.json
    among all runs. Test scores take no part in the choice.

    Args:
        runs_dir: laid out as grid/run_files.py describes. Reads grid.json, every run.json, the scores.json of the
            base and of chosen runs, and their config.yml (others only if a run.json does not record its setup).
        reference: the method that all others are compared with.
        resamples, seed: of the bootstrap.

    Raises:
        ValueError: there is no finished run, a record is damaged, or scores are of different questions.
    """
    grid = read_grid_record(runs_dir)
    runs, left_out = _runs_of_grid(runs_dir, grid)
    choices = _choose(runs, grid)
    results, score_files = _results(runs_dir, runs, choices, reference)
    base = _read_base(runs_dir)
    if base is not None:
        score_files[runs_dir / "base" / SCORES_FILE] = base
    check_same_questions(score_files)
    benchmarks = _benchmark_sizes(next(iter(score_files.values())).benchmarks) if score_files else {}
    comparer = ScoreComparer(list(benchmarks), resamples, seed)
    findings = GridFindings(
        runs=runs,
        left_out=left_out,
        choices=choices,
        results=results,
        base=base,
        benchmarks=benchmarks,
        comparisons=comparer.with_reference(results, reference),
        against_base=comparer.with_base(results, base) if base is not None else [],
        seed_differences=seed_differences(results, reference),
        reference=reference,
        resamples=resamples,
        seed=seed,
        score_files=score_files,
    )
    return replace(findings, notes=make_notes(findings, runs_dir))


def _runs_of_grid(runs_dir: Path, grid: GridRecord | None) -> tuple[list[Run], list[Run]]:
    """The runs that the grid has, and those that it no longer has."""
    runs = read_runs(runs_dir)
    if not any(run.status == "done" for run in runs):
        raise ValueError(
            f"{runs_dir} holds no run that finished (METHOD/lr…-ep…-seed…/run.json): train the grid first."
        )
    left_out = [run for run in runs if grid is not None and not grid.has(run.key)]
    runs = [run for run in runs if grid is None or grid.has(run.key)]
    if not any(run.status == "done" for run in runs):
        raise ValueError(
            f"{runs_dir}: all finished runs belong to an earlier grid ({name_runs(left_out)}); {GRID_FILE} no longer "
            "lists them. Sweep the present grid first."
        )
    return runs, left_out


def _choose(runs: list[Run], grid: GridRecord | None) -> dict[tuple[str, float], Choice | None]:
    """Chosen rates by (method, epochs), sorted; None also for methods without a record of a first-stage run."""
    choices = choose_rates(Trial.of(run) for run in runs if grid is None or run.key in grid.first_stage_keys)
    unchosen = {(run.key.method, run.key.epochs): None for run in runs}
    return dict(sorted((unchosen | choices).items()))


def _results(
    runs_dir: Path, runs: list[Run], choices: dict[tuple[str, float], Choice | None], reference: str
) -> tuple[list[Result], dict[Path, Scores]]:
    """Results in the report's order, and their scores by path."""
    results = []
    score_files: dict[Path, Scores] = {}
    for choice in choices.values():
        if choice is None:
            continue
        at_rate = [run for run in runs if Trial.of(run).usable and _is_at(run, choice)]
        scores = {}
        for run in at_rate:
            path = runs_dir / run.key.folder / SCORES_FILE
            if path.is_file():
                scores[run.key.seed] = score_files[path] = read_scores(path)
                if scores[run.key.seed].key != run.key:
                    raise ValueError(f"{path} is not of the run beside it; score that run again.")
        results.append(Result(choice, {run.key.seed: run for run in at_rate}, scores))
    if not results:
        raise ValueError(
            f"{runs_dir}: no method has a run with a finite validation NLL, so that no rate can be chosen."
        )
    return sorted(results, key=lambda r: (r.epochs, r.method != reference, _mean_nll(r), r.method)), score_files


def _is_at(run: Run, choice: Choice) -> bool:
    key = run.key
    return (key.method, key.epochs, key.learning_rate) == (choice.method, choice.epochs, choice.learning_rate)


def _mean_nll(result: Result) -> float:
    nll = result.over_seeds(lambda run: run.validation_nll)
    assert nll is not None
    return nll.mean


def _read_base(runs_dir: Path) -> Scores | None:
    """Scores of the model before training; None if there are none."""
    path = runs_dir / "base" / SCORES_FILE
    if not path.is_file():
        return None
    base = read_scores(path)
    if base.key is not None:
        raise ValueError(
            f"{path} is of the run {base.key.folder}, not of the model before training; remove it and sweep again to "
            "have that scored."
        )
    return base


def _benchmark_sizes(benchmarks: dict[str, BenchmarkScores]) -> dict[str, tuple[int, int | None]]:
    """(items, clean items) by benchmark, in the order of `tasks.benchmarks`, others last."""
    return {
        name: (len(benchmarks[name].correct), None if (clean := benchmarks[name].clean) is None else clean.count("1"))
        for name in sorted(benchmarks, key=_benchmark_order)
    }


def _benchmark_order(name: str) -> tuple[int, str]:
    try:
        return list(BENCHMARKS).index(find_benchmark(name).name), name
    except ValueError:
        return len(BENCHMARKS), name
