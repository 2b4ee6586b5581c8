"""One model on the benchmarks, in a process of its own: `python -m axolotl_supertune.grid.sweep.scoring REQUEST`."""

import json
import sys
import time
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from ..config import Score
from ..records import BenchmarkScores, RunKey, Scores, Setup

# What of `score` changes the scores; the sizes of batches and where the files lie do not.
ASKED = ("task", "max_gen_toks", "limit")
PPL = "supertune_math_ppl"


class Request(BaseModel):
    """What to score.

    key: of the run; None: the base model.
    settings: the run's YAML.
    trained: its output_dir; None: the base model.
    contamination: the report on the training data.
    output: the scores.json.
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
    """Ask the model everything.

    Raises:
        ValueError, OSError: a benchmark file or the report is not what it should be; the message names it.
    """
    import torch
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    from ... import tuner  # noqa: F401 (registers SUPRA, also where the start-up hook is off)
    from ...tasks import TASK_FOLDER
    from ...tasks.benchmarks import BENCHMARKS
    from ...tasks.evaluation import model_arguments, task_metadata
    from ..record import device_name, installed

    started, score = time.perf_counter(), request.score
    arguments = model_arguments(request.settings, request.trained)
    metadata = task_metadata(arguments, score.data_dir, request.contamination)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = HFLM(**arguments, device=device, batch_size=score.batch_size)

    # The harness's thousands of own tasks would take longer to index than a small model takes to answer.
    manager = TaskManager(include_path=str(TASK_FOLDER), include_defaults=False, metadata=metadata)

    def ask(task: str, **more: Any) -> dict[str, list[dict[str, Any]]]:
        results = simple_evaluate(
            model=model,
            tasks=[task],
            task_manager=manager,
            metadata=metadata,
            log_samples=True,
            bootstrap_iters=0,
            **more,
        )
        found: dict[str, list[dict[str, Any]]] = results["samples"]
        return {name: sorted(samples, key=lambda sample: sample["doc_id"]) for name, samples in found.items()}

    tokens = f"max_gen_toks={score.max_gen_toks}" if score.max_gen_toks else None
    answers = ask(score.task, limit=score.limit, gen_kwargs=tokens)
    model.batch_size_per_gpu = score.nll_batch_size
    golds = ask(PPL, samples=_first_golds(score.limit, score.data_dir))[PPL]
    nll: dict[str, list[tuple[float, int]]] = defaultdict(list)
    for sample in golds:
        loglikelihood, count = sample["ppl"]
        nll[sample["doc"]["benchmark"]].append((-loglikelihood, count))
    suffix = score.task.removeprefix("supertune_math")
    return Scores(
        key=request.key,
        benchmarks={
            name: BenchmarkScores(
                correct=_digits(sample["acc"] for sample in answers[f"supertune_{benchmark.suffix}{suffix}"]),
                correct_strict=_digits(
                    sample["acc_strict"] for sample in answers[f"supertune_{benchmark.suffix}{suffix}"]
                ),
                clean=_digits(sample["doc"]["clean"] for sample in answers[f"supertune_{benchmark.suffix}{suffix}"]),
                gold_nll=[value for value, _ in nll[name]],
                gold_tokens=[count for _, count in nll[name]],
            )
            for name, benchmark in BENCHMARKS.items()
        },
        limit=score.limit,
        asked=score.model_dump(include=set(ASKED)),
        base_model=Setup.of(request.settings).base_model,
        files=trained_on(Path(request.contamination)),
        seconds=time.perf_counter() - started,
        jobs_per_gpu=request.jobs_per_gpu,
        device=device_name(),
        versions=installed(),
    )


def trained_on(report: Path) -> dict[str, str]:
    """sha256 of the local files that a contamination report is about, by path.

    Raises:
        ValueError: it is no such report.
    """
    try:
        train = json.loads(report.read_text(encoding="utf-8"))["train"]
        return {each["path"]: each["sha256"] for each in train if "sha256" in each}
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{report} is no contamination report ({error!r}); remove it to have it made anew.") from error


def _digits(values: Iterable[float]) -> str:
    return "".join(str(int(value)) for value in values)


def _first_golds(limit: float | None, data_dir: str | None) -> dict[str, list[int]] | None:
    """With a limit, the first gold targets of each benchmark: the task holds all benchmarks, one after the other."""
    if limit is None:
        return None
    from ...tasks.benchmarks import BENCHMARKS
    from ...tasks.perplexity import gold_records

    chosen: list[int] = []
    start = 0
    for name in BENCHMARKS:
        count = len(gold_records(name, data_dir))
        chosen += range(start, start + max(1, min(count, int(limit if limit >= 1 else limit * count))))
        start += count
    return {PPL: chosen}


if __name__ == "__main__":
    request = Request.model_validate_json(sys.argv[1])
    score_model(request).write(Path(request.output))
