"""The page of a report, report.md: prepares what templates/report.md.jinja shows."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import jinja2

from .comparisons import FEW_ITEMS, Comparison, SeedDifference, with_doubts
from .findings import GridFindings
from .statistics import CONFIDENCE, NO_DIFFERENCE
from .table_formats import TEXT_COLUMNS
from .tables import Table

_VERDICTS = ("better", "worse", NO_DIFFERENCE)


@dataclass(frozen=True)
class VerdictLine:
    """What may be said of a metric: by verdict, the methods of which it is said, as text."""

    title: str
    methods: dict[str, str]


def render_page(findings: GridFindings, tables: Sequence[Table], figures: Sequence[str]) -> str:
    """The page as Markdown, with all tables and links to the figures NAME.png."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).with_name("templates")),
        undefined=jinja2.StrictUndefined,
        autoescape=False,  # Markdown, not HTML
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["escape_markdown"] = escape_markdown
    environment.filters["list_values"] = lambda values: escape_markdown("; ".join(values)) or "not recorded"
    with_interval = [difference for difference in findings.seed_differences if difference.interval is not None]
    return environment.get_template("report.md.jinja").render(
        findings=findings,
        setup=findings.setup,
        budget=_budget(findings.setup["budget_parameters"]),
        versions=_versions(findings.setup["versions"]),
        verdicts=_verdicts(findings, with_interval),
        base_verdicts=_base_verdicts(findings),
        seed_intervals=len(with_interval),
        comparison_counts=_comparison_counts(findings),
        confidence=f"{CONFIDENCE:.0%}",
        few_items=FEW_ITEMS,
        tables=tables,
        text_columns=TEXT_COLUMNS,
        figures=figures,
    )


def escape_markdown(text: str) -> str:
    """Escape emphasis and HTML tags."""
    return text.replace("*", r"\*").replace("_", r"\_").replace("<", "&lt;")


def _budget(counts: Sequence[int]) -> str:
    """The smallest and the largest budget, once if they are equal."""
    return " to ".join(f"{count:,}" for count in dict.fromkeys((counts[0], counts[-1]))) if counts else "no number of"


def _versions(names_and_versions: Sequence[str]) -> str:
    """Packages with all versions that occur."""
    versions: dict[str, list[str]] = {}
    for name_and_version in names_and_versions:
        name, _, version = name_and_version.rpartition(" ")
        versions.setdefault(name, []).append(version)
    return ", ".join(f"{name} {' and '.join(of_package)}" for name, of_package in versions.items())


def _verdicts(findings: GridFindings, with_interval: Sequence[SeedDifference]) -> list[VerdictLine]:
    """Differences to the reference: of the validation NLL, if any has an interval, and of each metric."""

    def names(of_verdict: Sequence[Comparison | SeedDifference]) -> str:
        return ", ".join(with_doubts(_label(findings, each), each.doubts) for each in of_verdict)

    lines = []
    if with_interval:
        lines.append(_verdict_line("validation NLL (nats a token), over seeds", with_interval, names))
    for title, comparisons in _by_metric(findings.comparisons).items():
        lines.append(_verdict_line(title, comparisons, names))
    return lines


def _base_verdicts(findings: GridFindings) -> list[VerdictLine]:
    """Differences to the model before training: how many methods, with their doubts, and which unless all."""
    lines = []
    for title, comparisons in _by_metric(findings.against_base).items():
        total = len(comparisons)

        def counts(of_verdict: Sequence[Comparison | SeedDifference], total: int = total) -> str:
            doubts = Counter(doubt for comparison in of_verdict for doubt in comparison.doubts)
            with_counts = [f"{doubt}: {count}" for doubt, count in doubts.items()]
            if len(of_verdict) == total:
                return with_doubts(f"all {total}", with_counts)
            names = ", ".join(_label(findings, comparison) for comparison in of_verdict)
            return f"{with_doubts(f'{len(of_verdict)} of {total}', with_counts)}: {names}"

        lines.append(_verdict_line(f"{title}, against no training", comparisons, counts))
    return lines


def _verdict_line(
    title: str,
    comparisons: Sequence[Comparison | SeedDifference],
    describe: Callable[[Sequence[Comparison | SeedDifference]], str],
) -> VerdictLine:
    by_verdict = {verdict: [each for each in comparisons if each.verdict == verdict] for verdict in _VERDICTS}
    return VerdictLine(title, {verdict: describe(each) for verdict, each in by_verdict.items() if each})


def _by_metric(comparisons: Sequence[Comparison]) -> dict[str, list[Comparison]]:
    """Comparisons by their metric's title."""
    by_title: dict[str, list[Comparison]] = {}
    for comparison in comparisons:
        by_title.setdefault(comparison.metric.title, []).append(comparison)
    return by_title


def _label(findings: GridFindings, compared: Comparison | SeedDifference) -> str:
    return findings.label(compared.result.method, compared.result.epochs)


def _comparison_counts(findings: GridFindings) -> str:
    """How many comparisons there are of each metric: the families for which p is adjusted."""
    counts = [f"{title}: {len(of_metric)}" for title, of_metric in _by_metric(findings.comparisons).items()]
    base_counts = [str(len(of_metric)) for of_metric in _by_metric(findings.against_base).values()]
    if base_counts:
        counts.append(f"against no training: {', '.join(base_counts)}")
    return "; ".join(counts)
