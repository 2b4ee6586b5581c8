"""Records of grids, as `sweep` would leave them."""

import random

from axolotl_supertune.grid.run_files import RUN_FILE, SCORES_FILE, BenchmarkScores, Run, RunKey, Scores, Setup

SETUP = Setup(base_model="a/base", datasets=("train.jsonl",), test_datasets=("valid.jsonl",), budget="lora_r 8")


def make_run(method, rate, seed=0, epochs=1, nll=1.0, **changes):
    """A finished run whose validation NLL falls from 1.4 to `nll`; None: it failed."""
    failed = {"status": "failed", "error": "Traceback\nRuntimeError: boom"} if nll is None else {"status": "done"}
    ended = nll is not None
    values = {
        "key": RunKey(method=method, learning_rate=rate, epochs=epochs, seed=seed),
        "config_sha256": "0" * 64,
        "setup": SETUP,
        "started": "2026-01-01T00:00:00Z",
        "seconds": 60.0,
        "train_seconds": 40.0 + seed,
        "trainable_parameters": 1000,
        "budget_parameters": 1000,
        "peak_memory_gib": 1.5,
        "losses": [(step, 1.5 - step / 100) for step in range(10, 50, 10)] if ended else [],
        "eval_losses": [(0, 1.4), (20, (1.4 + nll) / 2), (40, nll)] if ended else [],
        "device": "One GPU",
        "versions": {"torch": "2.0", "peft": "1.0"},
    }
    return Run(**{**values, **failed, **changes})


def make_scores(key, share, items=(("AddSub", 60), ("AQuA", 40)), targets=20, clean=True, level=1.0, **changes):
    """Scores with about `share` right answers; the same key gives the same scores."""
    draw = random.Random(key.folder.as_posix() if key else "base")
    benchmarks = {}
    for name, count in items:
        bits = "".join(str(int(draw.random() < share)) for _ in range(count))
        tokens = [10 + at for at in range(targets)]
        benchmarks[name] = BenchmarkScores(
            correct=bits,
            correct_strict=bits[1:] + "0",
            clean="".join("0" if at % 4 == 0 else "1" for at in range(count)) if clean else None,
            gold_nll=[level * count * (1 + 0.1 * draw.random()) for count in tokens],
            gold_tokens=tokens,
        )
    return Scores(key=key, benchmarks=benchmarks, seconds=5.0, **changes)


def save_records(runs_dir, *records, base=None):
    """Write runs, each with its scores or None, into a RUNS_DIR; returns it."""
    for run, scores in records:
        run.write(runs_dir / run.key.folder / RUN_FILE)
        if scores is not None:
            scores.write(runs_dir / run.key.folder / SCORES_FILE)
    if base is not None:
        base.write(runs_dir / "base" / SCORES_FILE)
    return runs_dir


def grid():
    """Three methods and full fine-tuning, three rates; a second and a third seed at two methods' best."""
    records = []
    nlls = {
        "lora": (1.1, 0.98, 0.99),
        "super-bottom": (1.2, 1.05, 1.01),  # at the edge
        "supra-0.8": (1.05, 0.97, None),  # fails at the highest
        "full": (0.96, 1.0, 9.0),
    }
    for method, row in nlls.items():
        for rate, nll in zip((1e-4, 5e-4, 1e-3), row, strict=True):
            run = make_run(method, rate, nll=nll)
            best = nll is not None and nll == min(value for value in row if value is not None)
            share = {"lora": 0.4, "supra-0.8": 0.9, "full": 0.1}.get(method, 0.4)
            if method == "full":
                run = run.model_copy(update={"trainable_parameters": 90_000, "budget_parameters": None})
            records.append((run, make_scores(run.key, share, level=nll) if best else None))
    for seed in (1, 2):
        for method, rate, share in (("lora", 5e-4, 0.4), ("supra-0.8", 5e-4, 0.9)):
            run = make_run(method, rate, seed, nll=0.97 + 0.01 * seed)
            records.append((run, make_scores(run.key, share, level=run.validation_nll)))
    return records, make_scores(None, 0.05, level=1.4)
