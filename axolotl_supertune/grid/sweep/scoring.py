"""Scores one model on the benchmarks: `python -m axolotl_supertune.grid.sweep.scoring REQUEST`.

A process of its own, so that nothing of one model is left when the next is scored.
"""

import json
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from ..config import Score
from ..run_files import BenchmarkScores, RunKey, Scores, Setup

# Keys of `score` that affect the scores; sizes of batches and the folder of the data do not.
SCORING_KEYS = ("task", "max_gen_toks", "limit")
PPL = "supertune_math_ppl"

Samples = dict[str, list[dict[str, Any]]]
"""The harness's records of each item, by task, in the order of the items."""


class Request(BaseModel):
    """What to score; the command line's argument as JSON.

    key: of the run; None: the base model.
    settings: the run's YAML.
    trained: the run's output_dir; None: the base model.
    contamination: path of the report on the training data.
    output: path of the scores.json.
    """

    model_config = ConfigDict(extra="forbid")

    key: RunKey | None
    settings: dict[str, Any]
    trained: str | None
    score: Score
    contamination: str
    output: str
    jobs_per_gpu: int = 1


def score_model(request: Request) -> Scores:
    """Generate answers to all benchmarks and measure the NLL of their gold targets.

    Raises:
        ValueError, OSError: a benchmark file or the contamination report is damaged; names it.
    """
    from ...tasks.benchmarks import BENCHMARKS
    from ..record import device_name, installed

    started, score = time.perf_counter(), request.score
    model, ask = _load_model(request)
    tokens = f"max_gen_toks={score.max_gen_toks}" if score.max_gen_toks else None
    answers = ask(score.task, limit=score.limit, gen_kwargs=tokens)
    model.batch_size_per_gpu = score.nll_batch_size
    golds = ask(PPL, samples=_first_golds(score.limit, score.data_dir))[PPL]
    nlls: dict[str, list[tuple[float, int]]] = defaultdict(list)  # (nats, tokens) by benchmark
    for sample in golds:
        loglikelihood, count = sample["ppl"]
        nlls[sample["doc"]["benchmark"]].append((-loglikelihood, count))
    task_suffix = score.task.removeprefix("supertune_math")
    return Scores(
        key=request.key,
        benchmarks={
            name: _benchmark_scores(answers[f"supertune_{benchmark.suffix}{task_suffix}"], nlls[name])
            for name, benchmark in BENCHMARKS.items()
        },
        limit=score.limit,
        asked=score.model_dump(include=set(SCORING_KEYS)),
        base_model=Setup.of(request.settings).base_model,
        files=files_of_report(Path(request.contamination)),
        seconds=time.perf_counter() - started,
        jobs_per_gpu=request.jobs_per_gpu,
        device=device_name(),
        versions=installed(),
    )


def _load_model(request: Request) -> tuple[Any, Callable[..., Samples]]:
    """The harness's model, and a function (task, **options of simple_evaluate) → samples."""
    import torch
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    from ... import tuner  # noqa: F401 (registers SUPRA, also where the start-up hook is off)
    from ...tasks import TASK_FOLDER
    from ...tasks.evaluation import model_arguments, task_metadata

    score = request.score
    arguments = model_arguments(request.settings, request.trained)
    metadata = task_metadata(arguments, score.data_dir, request.contamination)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = HFLM(**arguments, device=device, batch_size=score.batch_size)
    # Indexing the harness's thousands of own tasks would take longer than a small model takes to answer.
    manager = TaskManager(include_path=str(TASK_FOLDER), include_defaults=False, metadata=metadata)

    def ask(task: str, **options: Any) -> Samples:
        results = simple_evaluate(
            model=model,
            tasks=[task],
            task_manager=manager,
            metadata=metadata,
            log_samples=True,
            bootstrap_iters=0,
            **options,
        )
        by_task: Samples = results["samples"]
        return {name: sorted(samples, key=lambda sample: sample["doc_id"]) for name, samples in by_task.items()}

    return model, ask


def _benchmark_scores(samples: list[dict[str, Any]], nlls: list[tuple[float, int]]) -> BenchmarkScores:
    return BenchmarkScores(
        correct=_bits(sample["acc"] for sample in samples),
        correct_strict=_bits(sample["acc_strict"] for sample in samples),
        clean=_bits(sample["doc"]["clean"] for sample in samples),
        gold_nll=[nats for nats, _ in nlls],
        gold_tokens=[tokens for _, tokens in nlls],
    )


def files_of_report(report: Path) -> dict[str, str]:
    """sha256 of the local files that a contamination report is about, by path.

    Raises:
        ValueError: the file is not such a report; names it.
    """
    try:
        sources = json.loads(report.read_text(encoding="utf-8"))["train"]
        return {source["path"]: source["sha256"] for source in sources if "sha256" in source}
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{report} is not a contamination report ({error!r}); remove it to have it made anew."
        ) from error


def _bits(values: Iterable[float]) -> str:
    """A text of the characters 0 and 1."""
    return "".join(str(int(value)) for value in values)


def _first_golds(limit: float | None, data_dir: str | None) -> dict[str, list[int]] | None:
    """The first gold targets of each benchmark, as the harness's `samples`; None without a limit.

    The task of gold targets holds all benchmarks one after the other, so that its own limit would cut off most.
    """
    if limit is None:
        return None
    from ...tasks.benchmarks import BENCHMARKS
    from ...tasks.perplexity import gold_records

    positions: list[int] = []
    start = 0
    for name in BENCHMARKS:
        count = len(gold_records(name, data_dir))
        positions += range(start, start + max(1, min(count, int(limit if limit >= 1 else limit * count))))
        start += count
    return {PPL: positions}


if __name__ == "__main__":
    request = Request.model_validate_json(sys.argv[1])
    score_model(request).write(Path(request.output))
