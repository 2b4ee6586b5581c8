"""The tables of a report: what each shows, as text cells and as flat records of numbers."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from ..run_files import Run, Scores
from .comparisons import Comparison, Result
from .findings import BUDGET_TOLERANCE, GridFindings
from .formatting import short_rate
from .metrics import accuracies, gold_nlls
from .statistics import CONFIDENCE, Spread, spread

Cells = dict[str, str]
Record = dict[str, Any]

BASE = "base (before training)"
NONE = "–"
# Number of seeds behind the scores' ±, where not all trained seeds were scored.
SEEDS_SCORED = "seeds scored"
# Significant digits of recorded numbers: further ones depend on the order of a machine's sums.
DIGITS = 8
_RULES = {"published": "correct", "strict": "correct_strict"}


@dataclass(frozen=True)
class Table:
    """One table.

    name: stem of its files, NAME.csv and NAME.tex.
    cells: the text of the rows, a column per heading.
    records: what the rows show and more, as numbers; None where there is no number. All have the same keys.
    """

    name: str
    title: str
    cells: pd.DataFrame
    records: list[Record]


def make_tables(findings: GridFindings) -> list[Table]:
    """All tables for which there is data, in the report's order."""
    tables = [summary(findings)]
    if findings.seed_differences:
        tables.append(validation(findings))
    if findings.comparisons:
        tables.append(differences(findings))
    if findings.against_base:
        tables.append(differences_to_base(findings))
    if findings.benchmarks:
        tables += [accuracy(findings, "published"), accuracy(findings, "strict")]
        if any(gold_nlls(list(result.scores.values())) for result in findings.results):
            tables.append(perplexity(findings))
    return [*tables, cost(findings), learning_rates(findings)]


def summary(findings: GridFindings) -> Table:
    """A row per method: validation NLL, mean accuracies, gold NLL and perplexity."""
    rows, records = [], []
    for line in _lines(findings, always_base=findings.base_validation_nll is not None):
        nll = line.validation_nll
        cells = line.cells | {"seeds": str(line.seeds or NONE), "validation NLL": _text(nll, "{:.4f}")}
        record = line.record | {"seeds": line.seeds} | _numbers("validation_nll", nll)
        if findings.benchmarks:
            cells |= line.scored_cells
            record |= line.scored_record
            for rule, heading in (("published", "mean accuracy, %"), ("strict", "strict rule, %")):
                mean, clean_mean = (spread(_accuracies(line, rule, clean).get("mean", ())) for clean in (False, True))
                cells[heading] = _percentages(mean, clean_mean)
                record |= _numbers(f"accuracy_{rule}_all", mean) | _numbers(f"accuracy_{rule}_clean", clean_mean)
            nlls = gold_nlls(line.scores).get("pooled", np.array(()))
            gold, perplexity = spread(nlls), spread(np.exp(nlls))
            cells |= {"gold NLL": _text(gold, "{:.4f}"), "perplexity": _text(perplexity, "{:.3f}")}
            record |= _numbers("gold_nll", gold) | _numbers("perplexity", perplexity)
        rows.append(cells)
        records.append(record)
    title = "Methods at the rate of their lowest validation NLL, mean ± standard deviation over seeds"
    if findings.benchmarks:
        title += "; accuracies unweighted over the benchmarks, all / clean items"
    return Table("summary", title, pd.DataFrame(rows), records)


def validation(findings: GridFindings) -> Table:
    """A row per method: validation NLL less the reference's, over and by seed."""
    rows, records = [], []
    for difference in findings.seed_differences:
        result, interval = difference.result, difference.interval
        mean = spread(list(difference.by_seed.values()))
        rows.append(
            {
                "method": result.method,
                "epochs": f"{result.epochs:g}",
                "difference": f"{mean.mean:+.4f}" if mean else NONE,
                _INTERVAL: f"[{interval.low:+.4f}, {interval.high:+.4f}]" if interval else NONE,
                "p (Holm)": f"{difference.holm:.2g}" if interval else NONE,
                "verdict": difference.verdict_text,
                "by seed": _by_seed_text(difference.by_seed, 4),
            }
        )
        records.append(
            {
                "method": result.method,
                "epochs": result.epochs,
                "reference": difference.reference.method,
                "difference": mean and mean.mean,
                "low": interval and interval.low,
                "high": interval and interval.high,
                "p": interval and interval.p,
                "p_holm": difference.holm,
                "verdict": difference.verdict,
                "doubts": ", ".join(difference.doubts),
                "by_seed": _by_seed_record(difference.by_seed),
            }
        )
    title = f"Validation NLL less {findings.reference}'s, with Student's interval over the seeds ({CONFIDENCE:.0%})"
    return Table("validation", title, pd.DataFrame(rows), records)


def differences(findings: GridFindings) -> Table:
    """A row per comparison with the reference."""
    return _differences("differences", findings.reference, findings.comparisons)


def differences_to_base(findings: GridFindings) -> Table:
    """A row per comparison with the model before training."""
    return _differences("differences_to_base", "the model before training", findings.against_base)


def _differences(name: str, reference: str, comparisons: Sequence[Comparison]) -> Table:
    family_sizes = Counter(comparison.metric.name for comparison in comparisons)
    rows, records = [], []
    for comparison in comparisons:
        metric, result, interval = comparison.metric, comparison.result, comparison.interval
        difference, low, high = (metric.unit * x for x in (interval.difference, interval.low, interval.high))
        by_seed = {seed: metric.unit * value for seed, value in comparison.by_seed.items()}
        digits = 2 if metric.unit == 100 else 4
        rows.append(
            {
                "of": metric.title,
                "method": result.method,
                "epochs": f"{result.epochs:g}",
                "difference": f"{difference:+.{digits}f}",
                _INTERVAL: f"[{low:+.{digits}f}, {high:+.{digits}f}]",
                "p (Holm)": f"{comparison.holm:.2g}",
                "verdict": comparison.verdict_text,
                "by seed": _by_seed_text(by_seed, digits),
            }
        )
        records.append(
            {
                "metric": metric.name,
                "method": result.method,
                "epochs": result.epochs,
                "reference": comparison.reference.method if comparison.reference else "base",
                "unit": "points" if metric.unit == 100 else "nats a token",
                "difference": difference,
                "low": low,
                "high": high,
                "p": interval.p,
                "p_holm": comparison.holm,
                "comparisons": family_sizes[metric.name],
                "verdict": comparison.verdict,
                "doubts": ", ".join(comparison.doubts),
                "items": comparison.items,
                "seeds": _scored_seeds(result),
                "reference_seeds": _scored_seeds(comparison.reference) if comparison.reference else None,
                "by_seed": _by_seed_record(by_seed),
            }
        )
    title = f"Differences to {reference}, with paired bootstrap intervals ({CONFIDENCE:.0%})"
    return Table(name, title, pd.DataFrame(rows), records)


def accuracy(findings: GridFindings, rule: str) -> Table:
    """A row per method, a column per benchmark: accuracy on all and on the clean items.

    Args:
        rule: `published` or `strict`.
    """
    headings = {
        name: f"{name} ({count} / {NONE if clean is None else clean})"
        for name, (count, clean) in findings.benchmarks.items()
    }
    headings["mean"] = "mean"
    rows, records = [], []
    for line in _lines(findings):
        shares = {"all": _accuracies(line, rule, False), "clean": _accuracies(line, rule, True)}
        cells = line.cells | line.scored_cells
        for name, heading in headings.items():
            spreads = {items: spread(by_benchmark.get(name, ())) for items, by_benchmark in shares.items()}
            cells[heading] = _percentages(spreads["all"], spreads["clean"])
            counts = dict(zip(("all", "clean"), findings.benchmarks.get(name, (None, None)), strict=True))
            records += [
                line.record
                | {"benchmark": name, "rule": rule, "items": items, "n": counts[items]}
                | line.scored_record
                | _numbers("accuracy", of_items)
                for items, of_items in spreads.items()
                if of_items is not None
            ]
        rows.append(cells)
    rule_name = {"published": "the published rule", "strict": "the corrected (strict) rule"}[rule]
    title = f"Accuracy by {rule_name}, %, all / clean items (their number at the head)"
    return Table(f"accuracy_{rule}", title, pd.DataFrame(rows), records)


def perplexity(findings: GridFindings) -> Table:
    """A row per method, a column per benchmark: NLL and perplexity of the gold targets."""
    rows, records = [], []
    for line in _lines(findings):
        nlls = gold_nlls(line.scores)
        cells = line.cells | line.scored_cells
        for name in [*findings.benchmarks, "pooled"]:
            of_name = nlls.get(name, np.array(()))
            nll, perplexity = spread(of_name), spread(np.exp(of_name))
            cells[name] = f"{_text(nll, '{:.4f}')} ({_text(perplexity, '{:.3f}')})"
            if nll is not None:
                record = line.record | {"benchmark": name} | line.scored_record
                records.append(record | _numbers("gold_nll", nll) | _numbers("perplexity", perplexity))
        rows.append(cells)
    title = "NLL of the gold targets, nats a token (perplexity); pooled over all targets, weighted by tokens"
    return Table("perplexity", title, pd.DataFrame(rows), records)


def cost(findings: GridFindings) -> Table:
    """A row per method: trained parameters, training time in seconds and peak memory in GiB."""
    rows, records = [], []
    for result in findings.results:
        line, runs = _Line.of(result), list(result.runs.values())
        trained = _largest(run.trainable_parameters for run in runs)
        budget = _largest(run.budget_parameters for run in runs)
        share = trained / budget if trained and budget else None
        off_budget = share is not None and abs(share - 1) > BUDGET_TOLERANCE
        jobs = max(run.jobs_per_gpu for run in runs)
        seconds = result.over_seeds(lambda run: run.train_seconds)
        memory = result.over_seeds(lambda run: run.peak_memory_gib)
        cells = {
            "trained parameters": f"{trained:,}" if trained else NONE,
            "of the budget": NONE if share is None else f"{share:.2%}" + (" (off)" if off_budget else ""),
            "training, s": _text(seconds, "{:.0f}") + ("‡" if seconds and jobs > 1 else ""),
            "peak, GiB": _text(memory, "{:.2f}"),
            "runs on the device": str(jobs),
        }
        rows.append(line.cells | cells)
        records.append(
            line.record
            | {"seeds": len(runs), "trainable_parameters": trained, "budget_parameters": budget}
            | {"share_of_budget": share, "off_budget": off_budget}
            | _numbers("train_seconds", seconds)
            | {"times_comparable": jobs == 1}
            | _numbers("peak_memory_gib", memory)
            | {"jobs_per_gpu": jobs, "device": ", ".join(sorted({run.device or "unknown" for run in runs}))}
        )
    title = (
        "Trained parameters, training time and peak memory of the process (‡: the device was shared, not comparable)"
    )
    return Table("cost", title, pd.DataFrame(rows), records)


def learning_rates(findings: GridFindings) -> Table:
    """A row per method, a column per rate: validation NLL, the chosen rate in brackets. A record per run."""
    rates = sorted({run.key.learning_rate for run in findings.runs})
    rows = []
    for (method, epochs), choice in findings.choices.items():
        cells = {"method": method, "epochs": f"{epochs:g}"}
        for rate in rates:
            key = method, epochs, rate
            runs = [r for r in findings.runs if (r.key.method, r.key.epochs, r.key.learning_rate) == key]
            if choice is not None:  # rates were compared on these seeds
                runs = [run for run in runs if run.key.seed in choice.seeds] or runs
            text = _validation_text(runs)
            cells[short_rate(rate)] = f"[{text}]" if choice is not None and choice.learning_rate == rate else text
        rows.append(cells)
    records = []
    for run in findings.runs:
        choice = findings.choices[run.key.method, run.key.epochs]
        is_chosen = choice is not None and choice.learning_rate == run.key.learning_rate
        records.append(
            {
                "method": run.key.method,
                "epochs": run.key.epochs,
                "learning_rate": run.key.learning_rate,
                "seed": run.key.seed,
                "status": run.status,
                "validation_nll": run.validation_nll,
                "chosen": is_chosen,
                "edge": choice.edge if choice is not None and is_chosen else None,
            }
        )
    title = "Validation NLL by learning rate, the chosen one in brackets, on the seeds that all of them ran with"
    return Table("learning_rates", title, pd.DataFrame(rows), records)


def _validation_text(runs: Sequence[Run]) -> str:
    values = [run.validation_nll for run in runs if run.status == "done" and run.validation_nll is not None]
    mean = spread(values)
    return NONE if not runs else "failed" if mean is None else f"{mean.mean:.4f}"


_INTERVAL = f"{CONFIDENCE:.0%} interval"


@dataclass(frozen=True)
class _Line:
    """What all tables say of a method or of the model before training, for which `seeds` is None."""

    cells: Cells
    record: Record
    seeds: int | None
    validation_nll: Spread | None
    scores: list[Scores]

    @property
    def scored_cells(self) -> Cells:
        return {SEEDS_SCORED: str(len(self.scores)) if self.seeds else NONE}

    @property
    def scored_record(self) -> Record:
        return {"scored_seeds": len(self.scores) if self.seeds else None}

    @classmethod
    def of(cls, result: Result) -> "_Line":
        choice = result.choice
        cells = _head(choice.method, f"{choice.epochs:g}", short_rate(choice.learning_rate))
        record = {"method": choice.method, "epochs": choice.epochs, "learning_rate": choice.learning_rate}
        nll = result.over_seeds(lambda run: run.validation_nll)
        return cls(cells, record, len(result.runs), nll, list(result.scores.values()))


def _lines(findings: GridFindings, always_base: bool = False) -> list[_Line]:
    """The model before training, if it was scored or `always_base`, and the results."""
    lines = [_Line.of(result) for result in findings.results]
    if findings.base is not None or always_base:
        nll = spread([findings.base_validation_nll] if findings.base_validation_nll is not None else [])
        record = {"method": "base", "epochs": None, "learning_rate": None}
        base_scores = [findings.base] if findings.base else []
        lines.insert(0, _Line(_head(BASE, NONE, NONE), record, None, nll, base_scores))
    return lines


def _head(method: str, epochs: str, learning_rate: str) -> Cells:
    return {"method": method, "epochs": epochs, "learning rate": learning_rate}


def _accuracies(line: _Line, rule: str, clean: bool) -> dict[str, Any]:
    return accuracies(line.scores, _RULES[rule], clean)


def _scored_seeds(result: Result) -> str:
    return " ".join(map(str, sorted(result.scores)))


def _largest(values: Iterable[int | None]) -> int | None:
    """The number on which all runs agree; the largest where they do not."""
    return max((value for value in values if value is not None), default=None)


def _text(value: Spread | None, pattern: str) -> str:
    """Mean ± standard deviation."""
    if value is None:
        return NONE
    deviation = "" if value.deviation is None else f" ± {pattern.format(value.deviation)}"
    return pattern.format(value.mean) + deviation


def _percentages(everything: Spread | None, clean: Spread | None) -> str:
    """Shares of all and of clean items in percent."""

    def scaled(share: Spread | None) -> Spread | None:
        if share is None:
            return None
        return Spread(100 * share.mean, None if share.deviation is None else 100 * share.deviation, share.count)

    return f"{_text(scaled(everything), '{:.2f}')} / {_text(scaled(clean), '{:.2f}')}"


def _by_seed_text(by_seed: dict[int, float], digits: int) -> str:
    return ", ".join(f"{seed}: {value:+.{digits}f}" for seed, value in by_seed.items()) or NONE


def _by_seed_record(by_seed: dict[int, float]) -> str:
    return " ".join(f"{seed}:{rounded(value)}" for seed, value in by_seed.items())


def _numbers(name: str, value: Spread | None) -> Record:
    """Mean and standard deviation as columns NAME and NAME_sd."""
    return {name: value and value.mean, f"{name}_sd": value and value.deviation}


def rounded(value: Any) -> Any:
    """Round a float to DIGITS significant digits; other values as they are."""
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value
