"""The report of a grid: its records of a grid as tables and figures, with what may be said of them."""

import json
import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...method.atomic_files import put, staged
from .statistics import CONFIDENCE, NO_DIFFERENCE, RESAMPLES

# All files that any report writes; those that this one does not are removed, so that none is left of an earlier one.
TABLES = (
    "summary",
    "validation",
    "differences",
    "differences_to_base",
    "accuracy_published",
    "accuracy_strict",
    "perplexity",
    "cost",
    "learning_rates",
)
FIGURES = ("differences", "cost", "learning_rates", "curves")


def write_report(
    runs_dir: Path, output: Path, *, reference: str | None = None, resamples: int = RESAMPLES, seed: int = 0
) -> list[str]:
    """Compare the runs of a grid and write their report.

    Args:
        runs_dir: the grid's output_dir.
        output: the folder to write.
        reference: the method that others are compared with; None: lora, where there is one.
        resamples, seed: of the bootstrap.

    Returns:
        What is missing from the records, or limits the numbers.

    Raises:
        ValueError: no records, no such reference, or a file that cannot be written.
        OSError: records that cannot be read.
    """
    from .findings import find

    found = find(runs_dir, reference or "lora", resamples, seed)
    names = sorted({run.key.method for run in found.runs})
    if reference is not None and reference not in names:
        raise ValueError(f"--reference: {reference} is none of the methods in {runs_dir}: {', '.join(names)}.")
    write(found, output)
    return list(found.notes)


def write(found: Any, output: Path) -> None:
    """Write the files of a report, all or none.

    Args:
        found: Findings.
        output: the folder; files of an earlier report there are replaced, or removed where this one has none.

    Raises:
        ValueError: they cannot be written; names the file or folder and the remedy. An earlier report is as it was.
    """
    from .figures.figures import FORMATS, figures, render
    from .tables import csv_text, json_records, latex, markdown, tables

    made = {table.name: table for table in tables(found)}
    drawn = figures(found)
    files: dict[str, bytes | None] = {}
    for name in TABLES:
        table = made.get(name)
        files[f"{name}.csv"] = csv_text(table).encode() if table else None
        files[f"{name}.tex"] = latex(table).encode() if table else None
    for name in FIGURES:
        for kind in FORMATS:
            files[f"{name}.{kind}"] = render(drawn[name], name, kind) if name in drawn else None
    contents = {
        "format": 1,
        "reference": found.reference,
        "confidence": CONFIDENCE,
        "resamples": found.resamples,
        "bootstrap_seed": found.seed,
        "where": found.where,
        "notes": found.notes,
        "tables": {name: json_records(table) for name, table in made.items()},
    }
    files["report.json"] = (json.dumps(contents, indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode()
    pictures = [f"![{name}]({name}.png)" for name in FIGURES if name in drawn]
    texts = {name: markdown(table) for name, table in made.items()}
    files["report.md"] = _page(found, texts, pictures).encode()
    _replace(files, output)


def _replace(files: Mapping[str, bytes | None], output: Path) -> None:
    """Write all files beside their names before the first one gets its name; None: there is to be none."""
    at = output
    try:
        with staged(output) as folder:
            for name, content in files.items():
                at = output / name
                if at.is_dir():
                    raise ValueError(
                        f"{at} is a folder, and a file of the report belongs there; move it away, or name another "
                        "output with --output."
                    )
                if content is not None:
                    with (folder / name).open("wb") as file:
                        file.write(content)
                        file.flush()
                        os.fsync(file.fileno())  # a full disk may say so only here
            for name, content in files.items():
                at = output / name
                if content is None:
                    at.unlink(missing_ok=True)
                else:
                    put(folder / name, at)
    except OSError as error:
        raise ValueError(
            f"{at} cannot be written: {error.strerror or error}. Make room, make its folder writable, or name another "
            "one with --output."
        ) from error


def _page(found: Any, texts: dict[str, str], pictures: list[str]) -> str:
    parts = [
        f"# {len(found.results)} methods, {len(found.runs)} runs",
        "Each method stands at the learning rate of its lowest validation NLL; test scores had no say in that. Methods "
        f"are ordered by validation NLL, {found.reference} first.",
        _where(found),
    ]
    said = [*_said_of_validation(found), *_said(found)]
    if said or found.against_base:
        heading = "## What may be said" + (f", against {found.reference}" if said else "")
        parts += [heading, "\n".join([*said, *_said_of_base(found)]), _method(found)]
    if found.notes:
        parts += ["## What is missing, or limits the numbers", "\n".join(f"- {_escaped(note)}" for note in found.notes)]
    parts += ["## Tables", _legend(), *texts.values(), "## Figures", *pictures]
    return "\n\n".join(part.rstrip("\n") for part in parts) + "\n"


def _where(found: Any) -> str:
    """Base model, data, budget, devices and versions; more than one of a kind shows in what limits the numbers."""
    where = found.where

    def named(kind: str) -> str:
        return _escaped("; ".join(where[kind])) or "not recorded"

    counts = where["budget_parameters"]
    ends = dict.fromkeys((counts[0], counts[-1])) if counts else ()
    budget = " to ".join(f"{count:,}" for count in ends) or "no number of"
    versions: dict[str, list[str]] = {}
    for each in where["versions"]:
        name, _, version = each.rpartition(" ")
        versions.setdefault(name, []).append(version)
    listed = ", ".join(f"{name} {' and '.join(each)}" for name, each in versions.items())
    lines = {
        "Base model": named("base_models"),
        "Trained on": named("datasets"),
        "Validated on": named("test_datasets"),
        "Budget": f"{budget} parameters" + (f" ({named('budgets')})" if where["budgets"] else ""),
        "Devices": named("devices"),
        "Versions": listed or "not recorded",
    }
    return "\n".join(f"- {name}: {value}" for name, value in lines.items())


def _legend() -> str:
    return (
        "Accuracy is by the published rule (the last number of the answer, or its first letter A–E), “strict” by one "
        "that does not take numbers behind the answer. “Clean” are the items that the contamination report of the "
        "training data did not find there. “Gold” is the NLL, in nats a token, of correct worked answers of the "
        "benchmarks. ± is the standard deviation over seeds (n − 1). “–”: there is none: no budget for full "
        "fine-tuning, no peak memory on a CPU, no training time for a run that was stopped and went on."
    )


def _said_of_validation(found: Any) -> list[str]:
    decided = [each for each in found.seed_differences if each.interval is not None]
    return [_verdicts(found, "validation NLL (nats a token), over seeds", decided)] if decided else []


def _said(found: Any) -> list[str]:
    titles = dict.fromkeys(each.metric.title for each in found.comparisons)
    return [_verdicts(found, title, [c for c in found.comparisons if c.metric.title == title]) for title in titles]


def _said_of_base(found: Any) -> list[str]:
    """Of each metric how many are better or worse than no training, with their doubts, and which unless all are."""
    lines = []
    for title in dict.fromkeys(each.metric.title for each in found.against_base):
        comparisons = [each for each in found.against_base if each.metric.title == title]
        verdicts = []
        for verdict in ("better", "worse", NO_DIFFERENCE):
            of = [each for each in comparisons if each.verdict == verdict]
            doubts = Counter(doubt for each in of for doubt in each.doubts)
            said = ", ".join(f"{doubt}: {count}" for doubt, count in doubts.items())
            names = ", ".join(found.name(each.result.method, each.result.epochs) for each in of)
            every = len(of) == len(comparisons)
            count = f"all {len(of)}" if every else f"{len(of)} of {len(comparisons)}"
            count += f" ({said})" if said else ""
            verdicts += [f"**{verdict}**: {count}" + ("" if every else f": {names}")] if of else []
        lines.append(f"- {title}, against no training: {'; '.join(verdicts)}.")
    return lines


def _verdicts(found: Any, title: str, comparisons: list[Any]) -> str:
    from .comparisons import with_doubts

    verdicts: dict[str, list[str]] = {"better": [], "worse": [], NO_DIFFERENCE: []}
    for each in comparisons:
        verdicts[each.verdict].append(with_doubts(found.name(each.result.method, each.result.epochs), each.doubts))
    said = "; ".join(f"**{verdict}**: {', '.join(names)}" for verdict, names in verdicts.items() if names)
    return f"- {title}: {said}."


def _method(found: Any) -> str:
    seeds = [each for each in found.seed_differences if each.interval is not None]
    parts = []
    if seeds:
        parts.append(
            f"Of the validation NLL the interval is Student's over the seeds ({CONFIDENCE:.0%}) of the paired "
            "differences, of methods that have at least two seeds in common with the reference: it says how a "
            "difference depends on the seed, and takes the normal distribution for granted. The rates were chosen on "
            f"the same records, some of the seeds included. p (Holm) is adjusted for their number, {len(seeds)}."
        )
    if found.comparisons or found.against_base:
        parts.append(_method_of_scores(found))
    return "\n\n".join(parts)


def _method_of_scores(found: Any) -> str:
    counts = {each.metric.title: sum(c.metric is each.metric for c in found.comparisons) for each in found.comparisons}
    of_base = Counter(each.metric.title for each in found.against_base)
    families = [f"{title}: {count}" for title, count in counts.items()]
    families += [f"against no training: {', '.join(map(str, of_base.values()))}"] if of_base else []
    family = "; ".join(families)
    from .comparisons import FEW_ITEMS

    return (
        f"“Better” and “worse” stand only where the {CONFIDENCE:.0%} interval of the difference excludes 0. Those of "
        f"test scores are percentiles of {found.resamples:,} paired bootstrap resamples (seed {found.seed}): the "
        "questions of each benchmark are drawn with replacement, the same ones for both methods, and each question's "
        "value is averaged over a method's seeds. They cover which questions were asked, not which seeds were trained "
        "with: for that see the standard deviations and the differences seed by seed.\n\n"
        f"With this many comparisons ({family}) some intervals exclude 0 by chance, about one in twenty where nothing "
        "differs; p (Holm) is the bootstrap's two-sided p, adjusted for the number of comparisons of that metric with "
        "that reference. In brackets stands what a verdict does not withstand: “not after Holm” that adjustment; “few "
        f"items”: with fewer than {FEW_ITEMS} items such intervals are too narrow; “not in every seed”: of a seed "
        "that both were scored with, maybe the only one, the difference has the other sign, or is none; “one seed”: no "
        "more than one was scored with both."
    )


def _escaped(note: str) -> str:
    return note.replace("*", r"\*").replace("_", r"\_").replace("<", "&lt;")
