"""Findings as tables: cells for Markdown and LaTeX, and flat records for CSV and JSON."""

import csv
import io
import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..records import Scores
from .comparisons import Comparison, Result, accuracies, gold_nlls
from .findings import BUDGET_TOLERANCE, Findings, short_rate
from .statistics import CONFIDENCE, Spread, spread

Record = dict[str, Any]

BASE = "base (before training)"
# Numbers of records keep this many digits: more would differ from one machine's sums to another's.
_DIGITS = 8
_RULES = {"published": "correct", "strict": "correct_strict"}


@dataclass(frozen=True)
class Table:
    """
    name: of its files, NAME.csv and NAME.tex.
    headings, rows: text; cells that hold a rate (5e-4) or a sign are set by `latex` in its own way.
    records: what the rows show and more, a number each.
    """

    name: str
    title: str
    headings: list[str]
    rows: list[list[str]]
    records: list[Record]


def tables(found: Findings) -> list[Table]:
    """All tables that the findings allow."""
    made = [summary(found)]
    if found.seed_differences:
        made.append(validation(found))
    if found.comparisons:
        made.append(differences(found))
    if found.against_base:
        made.append(differences_to_base(found))
    if found.benchmarks:
        made += [accuracy(found, "published"), accuracy(found, "strict")]
        if any(gold_nlls(list(result.scores.values())) for result in found.results):
            made.append(perplexity(found))
    return [*made, cost(found), learning_rates(found)]


def summary(found: Findings) -> Table:
    """One line a method."""
    headings = [*_HEAD, "seeds", "validation NLL"]
    if found.benchmarks:
        headings += [_SCORED, "mean accuracy, %", "strict rule, %", "gold NLL", "perplexity"]
    rows, records = [], []
    for line in _lines(found, always_base=found.base_validation_nll is not None):
        nll = line.validation_nll
        cells = [*line.cells, str(line.seeds) if line.seeds else "–", _shown(nll, "{:.4f}")]
        record = line.record | {"seeds": line.seeds} | _spread("validation_nll", nll)
        if found.benchmarks:
            cells.append(line.scored)
            record |= line.scored_record
            for rule in _RULES:
                both = [spread(_shares(line.scores, rule, clean).get("mean", ())) for clean in (False, True)]
                cells.append(_both(*both))
                for items, each in zip(("all", "clean"), both, strict=True):
                    record |= _spread(f"accuracy_{rule}_{items}", each)
            gold = gold_nlls(line.scores).get("pooled", np.array(()))
            cells += [_shown(spread(gold), "{:.4f}"), _shown(spread(np.exp(gold)), "{:.3f}")]
            record |= _spread("gold_nll", spread(gold)) | _spread("perplexity", spread(np.exp(gold)))
        rows.append(cells)
        records.append(record)
    title = "Methods at the rate of their lowest validation NLL, mean ± standard deviation over seeds"
    if found.benchmarks:
        title += "; accuracies unweighted over the benchmarks, all / clean items"
    return Table("summary", title, headings, rows, records)


def validation(found: Findings) -> Table:
    """Validation NLL against the reference's, seed by seed; one line a method."""
    rows, records = [], []
    for each in found.seed_differences:
        interval = each.interval
        mean = spread(list(each.by_seed.values()))
        cells = ["–", "–", "–"] if mean is None else [f"{mean.mean:+.4f}", "–", "–"]
        if interval is not None:
            cells[1:] = [f"[{interval.low:+.4f}, {interval.high:+.4f}]", f"{each.holm:.2g}"]
        seeds = ", ".join(f"{seed}: {value:+.4f}" for seed, value in each.by_seed.items())
        rows.append([each.result.method, f"{each.result.epochs:g}", *cells, each.said, seeds or "–"])
        records.append(
            {
                "method": each.result.method,
                "epochs": each.result.epochs,
                "reference": each.reference.method,
                "difference": mean and mean.mean,
                "low": interval and interval.low,
                "high": interval and interval.high,
                "p": interval and interval.p,
                "p_holm": each.holm,
                "verdict": each.verdict,
                "doubts": ", ".join(each.doubts),
                "by_seed": " ".join(f"{seed}:{_rounded(value)}" for seed, value in each.by_seed.items()),
            }
        )
    title = f"Validation NLL less {found.reference}'s, with Student's interval over the seeds ({CONFIDENCE:.0%})"
    headings = ["method", "epochs", "difference", f"{CONFIDENCE:.0%} interval", "p (Holm)", "verdict", "by seed"]
    return Table("validation", title, headings, rows, records)


def differences(found: Findings) -> Table:
    """One line a comparison with the reference."""
    return _differences("differences", found.reference, found.comparisons)


def differences_to_base(found: Findings) -> Table:
    """One line a comparison with the model before training."""
    return _differences("differences_to_base", "the model before training", found.against_base)


def _differences(name: str, reference: str, comparisons: Sequence[Comparison]) -> Table:
    families = Counter(each.metric.name for each in comparisons)
    rows, records = [], []
    for each in comparisons:
        unit, interval = each.metric.unit, each.interval
        numbers = [unit * number for number in (interval.difference, interval.low, interval.high)]
        digits = 2 if unit == 100 else 4
        shown = [f"{number:+.{digits}f}" for number in numbers]
        seeds = ", ".join(f"{seed}: {unit * value:+.{digits}f}" for seed, value in each.by_seed.items())
        rows.append(
            [
                each.metric.title,
                each.result.method,
                f"{each.result.epochs:g}",
                shown[0],
                f"[{shown[1]}, {shown[2]}]",
                f"{each.holm:.2g}",
                each.said,
                seeds or "–",
            ]
        )
        records.append(
            {
                "metric": each.metric.name,
                "method": each.result.method,
                "epochs": each.result.epochs,
                "reference": each.reference.method if each.reference is not None else "base",
                "unit": "points" if unit == 100 else "nats a token",
                "difference": numbers[0],
                "low": numbers[1],
                "high": numbers[2],
                "p": interval.p,
                "p_holm": each.holm,
                "comparisons": families[each.metric.name],
                "verdict": each.verdict,
                "doubts": ", ".join(each.doubts),
                "items": each.items,
                "seeds": _seeds(each.result),
                "reference_seeds": _seeds(each.reference) if each.reference is not None else None,
                "by_seed": " ".join(f"{seed}:{_rounded(unit * value)}" for seed, value in each.by_seed.items()),
            }
        )
    title = f"Differences to {reference}, with paired bootstrap intervals ({CONFIDENCE:.0%})"
    headings = ["of", "method", "epochs", "difference", f"{CONFIDENCE:.0%} interval", "p (Holm)", "verdict", "by seed"]
    return Table(name, title, headings, rows, records)


def accuracy(found: Findings, rule: str) -> Table:
    """Per benchmark, on all items and on the clean ones."""
    names = [*found.benchmarks, "mean"]
    rows, records = [], []
    for line in _lines(found):
        both = [_shares(line.scores, rule, clean) for clean in (False, True)]
        rows.append(
            [*line.cells, line.scored, *(_both(*(spread(part.get(name, ())) for part in both)) for name in names)]
        )
        for name in names:
            counts = found.benchmarks.get(name, (None, None))
            for items, count, part in zip(("all", "clean"), counts, both, strict=True):
                if name in part:
                    record = line.record | {"benchmark": name, "rule": rule, "items": items, "n": count}
                    records.append(record | line.scored_record | _spread("accuracy", spread(part[name])))
    sizes = [
        f"{name} ({count} / {'–' if clean is None else clean})" for name, (count, clean) in found.benchmarks.items()
    ]
    which = {"published": "the published rule", "strict": "the corrected (strict) rule"}[rule]
    title = f"Accuracy by {which}, %, all / clean items (their number at the head)"
    return Table(f"accuracy_{rule}", title, [*_HEAD, _SCORED, *sizes, "mean"], rows, records)


def perplexity(found: Findings) -> Table:
    """Of the gold targets, per benchmark and pooled."""
    names = [*found.benchmarks, "pooled"]
    rows, records = [], []
    for line in _lines(found):
        nlls = gold_nlls(line.scores)
        cells = [
            f"{_shown(spread(nlls.get(n, ())), '{:.4f}')} ({_shown(_perplexity(nlls, n), '{:.3f}')})" for n in names
        ]
        rows.append([*line.cells, line.scored, *cells])
        for name in names:
            if name in nlls:
                record = (
                    line.record | {"benchmark": name} | line.scored_record | _spread("gold_nll", spread(nlls[name]))
                )
                records.append(record | _spread("perplexity", _perplexity(nlls, name)))
    title = "NLL of the gold targets, nats a token (perplexity); pooled over all targets, weighted by tokens"
    return Table("perplexity", title, [*_HEAD, _SCORED, *names], rows, records)


def cost(found: Findings) -> Table:
    """Parameters, time and memory."""
    rows, records = [], []
    for result in found.results:
        line = _Line.of(result)
        trained = _one({run.trainable_parameters for run in result.runs.values()})
        budget = _one({run.budget_parameters for run in result.runs.values()})
        share = trained / budget if trained and budget else None
        off = share is not None and abs(share - 1) > BUDGET_TOLERANCE
        jobs = max(run.jobs_per_gpu for run in result.runs.values())
        seconds = result.over_seeds(lambda run: run.train_seconds)
        memory = result.over_seeds(lambda run: run.peak_memory_gib)
        rows.append(
            [
                *line.cells,
                f"{trained:,}" if trained else "–",
                "–" if share is None else f"{share:.2%}" + (" (off)" if off else ""),
                _shown(seconds, "{:.0f}") + ("‡" if seconds and jobs > 1 else ""),
                _shown(memory, "{:.2f}"),
                str(jobs),
            ]
        )
        records.append(
            line.record
            | {"seeds": len(result.runs), "trainable_parameters": trained, "budget_parameters": budget}
            | {"share_of_budget": share, "off_budget": off}
            | _spread("train_seconds", seconds)
            | {"times_comparable": jobs == 1}
            | _spread("peak_memory_gib", memory)
            | {"jobs_per_gpu": jobs, "device": ", ".join(sorted({r.device or "unknown" for r in result.runs.values()}))}
        )
    title = (
        "Trained parameters, training time and peak memory of the process (‡: the device was shared, not comparable)"
    )
    headings = [*_HEAD, "trained parameters", "of the budget", "training, s", "peak, GiB", "runs on the device"]
    return Table("cost", title, headings, rows, records)


def learning_rates(found: Findings) -> Table:
    """Validation NLL of every rate that was tried, the chosen one in brackets; records of every run."""
    rates = sorted({run.key.learning_rate for run in found.runs})
    rows = []
    for (method, epochs), choice in found.choices.items():
        cells = []
        for rate in rates:
            key = method, epochs, rate
            tried = [run for run in found.runs if (run.key.method, run.key.epochs, run.key.learning_rate) == key]
            if choice is not None:  # on the seeds that the choice was made on
                tried = [run for run in tried if run.key.seed in choice.seeds] or tried
            values = [run.validation_nll for run in tried if run.status == "done" and run.validation_nll is not None]
            mean = spread(values)
            text = "–" if not tried else "failed" if mean is None else f"{mean.mean:.4f}"
            cells.append(f"[{text}]" if choice is not None and choice.learning_rate == rate else text)
        rows.append([method, f"{epochs:g}", *cells])
    records = [
        {
            "method": run.key.method,
            "epochs": run.key.epochs,
            "learning_rate": run.key.learning_rate,
            "seed": run.key.seed,
            "status": run.status,
            "validation_nll": run.validation_nll,
            "chosen": choice is not None and choice.learning_rate == run.key.learning_rate,
            "edge": choice.edge if choice is not None and choice.learning_rate == run.key.learning_rate else None,
        }
        for run in found.runs
        for choice in (found.choices[run.key.method, run.key.epochs],)
    ]
    title = "Validation NLL by learning rate, the chosen one in brackets, on the seeds that all of them ran with"
    return Table("learning_rates", title, ["method", "epochs", *map(short_rate, rates)], rows, records)


def markdown(table: Table) -> str:
    """A title and a pipe table."""
    lines = [
        f"**{table.title}**",
        "",
        "| " + " | ".join(table.headings) + " |",
        "|" + "".join("---|" if heading in _TEXT else "---:|" for heading in table.headings),
        *("| " + " | ".join(cell.replace("|", r"\|") for cell in row) + " |" for row in table.rows),
    ]
    return "\n".join(lines) + "\n"


def csv_text(table: Table) -> str:
    """The records, with a heading; an absent number is an empty cell."""
    headings = list(dict.fromkeys(key for record in table.records for key in record))
    file = io.StringIO()
    writer = csv.DictWriter(file, headings, lineterminator="\n")
    writer.writeheader()
    writer.writerows({key: _rounded(value) for key, value in record.items()} for record in table.records)
    return file.getvalue()


def json_records(table: Table) -> list[Record]:
    """The records, rounded, with None for what is no number."""
    return [{key: _finite(_rounded(value)) for key, value in record.items()} for record in table.records]


def latex(table: Table) -> str:
    """A floating table that needs booktabs and graphicx, as wide as the text."""
    columns = "".join("l" if heading in _TEXT else "r" for heading in table.headings)
    lines = [
        r"\begin{table}[htbp]",
        r"\centering",
        r"\scriptsize",
        rf"\caption{{{_tex(table.title)}.}}",
        rf"\label{{tab:{table.name}}}",
        r"\resizebox{\textwidth}{!}{%",
        rf"\begin{{tabular}}{{{columns}}}",
        r"\toprule",
        " & ".join(rf"\textbf{{{_tex(heading)}}}" for heading in table.headings) + r" \\",
        r"\midrule",
        *(" & ".join(map(_tex, row)) + r" \\" for row in table.rows),
        r"\bottomrule",
        r"\end{tabular}",
        "}",
        r"\end{table}",
    ]
    return "\n".join(lines) + "\n"


_TEX = {
    "\\": r"\textbackslash{}",
    **{sign: f"\\{sign}" for sign in "&%$#_{}"},
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "–": "--",
    "±": r"$\pm$",
    "×": r"$\times$",
    "λ": r"$\lambda$",
    "β": r"$\beta$",
    "‡": r"$^\ddagger$",
    "<": r"$<$",
    ">": r"$>$",
}


def _tex(text: str) -> str:
    if rate := re.fullmatch(r"(\d(?:\.\d+)?)e(-?\d+)", text):
        factor, power = rate.groups()
        return f"$10^{{{power}}}$" if factor == "1" else rf"${factor}\cdot10^{{{power}}}$"
    # A row that starts with a bracket would be an argument of the \\ before it.
    return re.sub(r"^\[", "{[}", "".join(_TEX.get(sign, sign) for sign in text))


_HEAD = ["method", "epochs", "learning rate"]
# Over which the scores' ± is, where not all seeds that were trained were scored.
_SCORED = "seeds scored"
# Headings of columns that are set flush left.
_TEXT = {"method", "of", "verdict", "by seed"}


@dataclass(frozen=True)
class _Line:
    """A method, or the model before training."""

    cells: list[str]
    record: Record
    seeds: int | None
    validation_nll: Spread | None
    scores: list[Scores]

    @property
    def scored(self) -> str:
        return str(len(self.scores)) if self.seeds else "–"

    @property
    def scored_record(self) -> Record:
        return {"scored_seeds": len(self.scores) if self.seeds else None}

    @classmethod
    def of(cls, result: Result) -> "_Line":
        choice = result.choice
        cells = [choice.method, f"{choice.epochs:g}", short_rate(choice.learning_rate)]
        record = {"method": choice.method, "epochs": choice.epochs, "learning_rate": choice.learning_rate}
        nll = result.over_seeds(lambda run: run.validation_nll)
        return cls(cells, record, len(result.runs), nll, list(result.scores.values()))


def _lines(found: Findings, always_base: bool = False) -> list[_Line]:
    lines = [_Line.of(result) for result in found.results]
    if found.base is not None or always_base:
        nll = spread([found.base_validation_nll] if found.base_validation_nll is not None else [])
        record = {"method": "base", "epochs": None, "learning_rate": None}
        lines.insert(0, _Line([BASE, "–", "–"], record, None, nll, [found.base] if found.base else []))
    return lines


def _shares(scores: Sequence[Scores], rule: str, clean: bool) -> dict[str, Any]:
    return accuracies(scores, _RULES[rule], clean)


def _perplexity(nlls: dict[str, Any], name: str) -> Spread | None:
    return spread(np.exp(nlls[name])) if name in nlls else None


def _seeds(result: Result) -> str:
    return " ".join(map(str, sorted(result.scores)))


def _one(values: set[int | None]) -> int | None:
    """The number that all runs agree on; where they do not, the largest."""
    return max((value for value in values if value is not None), default=None)


def _shown(value: Spread | None, pattern: str) -> str:
    if value is None:
        return "–"
    deviation = "" if value.deviation is None else f" ± {pattern.format(value.deviation)}"
    return pattern.format(value.mean) + deviation


def _both(everything: Spread | None, clean: Spread | None) -> str:
    """Accuracies in percent."""
    parts = [
        _shown(None if each is None else Spread(100 * each.mean, _times(each.deviation, 100), each.count), "{:.2f}")
        for each in (everything, clean)
    ]
    return " / ".join(parts)


def _times(value: float | None, factor: float) -> float | None:
    return None if value is None else factor * value


def _spread(name: str, value: Spread | None) -> Record:
    mean, deviation = (value.mean, value.deviation) if value is not None else (None, None)
    return {name: mean, f"{name}_sd": deviation}


def _rounded(value: Any) -> Any:
    return float(f"{value:.{_DIGITS}g}") if isinstance(value, float) else value


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
