"""Refuses scores that were not asked the same questions: items are paired by position."""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from ..run_files import Scores

# Of each benchmark: name, number of items, clean items, tokens of the gold targets.
Questions = tuple[tuple[str, int, str | None, tuple[int, ...]], ...]


def check_same_questions(files: Mapping[Path, Scores]) -> None:
    """Compare what the scores were asked, and how, with what most of them were.

    Args:
        files: scores by the path of their scores.json.

    Raises:
        ValueError: some differ; names each of these files and what differs.
    """
    asked = {path: (repr(sorted(scores.asked.items())), _questions(scores)) for path, scores in files.items()}
    if len(set(asked.values())) < 2:
        return
    usual_settings, usual_questions = Counter(asked.values()).most_common(1)[0][0]
    lines = []
    for path, (settings, questions) in asked.items():
        reasons = [f"asked with {settings}, not {usual_settings}"] if settings != usual_settings else []
        if reasons := reasons + _differences(usual_questions, questions):
            lines.append(f"{path}: {'; '.join(reasons)}")
    raise ValueError(
        "these scores are of other questions than the rest, so that nothing can be compared; remove them and score "
        "those runs again:\n" + "\n".join(lines)
    )


def _questions(scores: Scores) -> Questions:
    return tuple(
        (name, len(benchmark.correct), benchmark.clean, tuple(benchmark.gold_tokens))
        for name, benchmark in sorted(scores.benchmarks.items())
    )


def _differences(usual: Questions, questions: Questions) -> list[str]:
    """How questions differ from the usual ones, one text per benchmark and reason, sorted."""
    expected = {name: rest for name, *rest in usual}
    reasons: list[str] = [f"no {name}" for name in expected.keys() - {name for name, *_ in questions}]
    for name, items, clean, tokens in questions:
        if name not in expected:
            reasons.append(f"{name}, which the others lack")
            continue
        usual_items, usual_clean, usual_tokens = expected[name]
        if items != usual_items:
            reasons.append(f"{name}: {items} items, not {usual_items} (another limit?)")
        elif clean != usual_clean:
            reasons.append(f"{name}: other clean items (another contamination report, or none)")
        if tokens != usual_tokens:
            assert isinstance(usual_tokens, tuple)
            reasons.append(f"{name}: {len(tokens)} gold targets, not {len(usual_tokens)}, or another tokenizer's")
    return sorted(reasons)
