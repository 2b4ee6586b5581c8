"""Learning rates to begin with: those that the paper's runs and ours selected, and how well these runs did.

`selected_rates.csv` holds them: one row for each row of the paper's appendix tables, the rates that the records in
examples/paper/results select, and those of more runs there (`more-rates`) that had a lower validation loss with the
same seed but were not scored. Every rate was chosen by validation loss. To print the table of README.md:

    python -m axolotl_supertune.method.selected_rates
"""

import csv
import math
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from functools import cache
from importlib import resources

_RECORDS, _MORE_RATES = "records: ", "more-rates: "
_LORA, _FULL = "LoRA", "Full fine-tuning"
# The paper's names of what the keys `adapter`, `supra_lambda` and `mask_score` say.
_SPARSE = {"wanda": "Super", "magnitude": "Magnitude", "gradient": "SIFT", "squared_gradient": "SIFT"}
_HYBRID = {"wanda": "Supra", "magnitude": "Supra-Mag", "gradient": "RoSA", "squared_gradient": "RoSA"}
# Of the gain over the untrained base that the best adapter of the same table had: a run that gained less did poorly.
_POOR = 0.75
# A base is far from the rows if it is this factor away from the nearest one, or so far beyond the smallest or largest.
_FAR, _BEYOND = 2.0, 1.1
_GRID = (5e-5, 1e-4, 5e-4, 1e-3, 5e-3, 1e-2, 5e-2, 1e-1)  # the rates that the paper compares


@dataclass(frozen=True)
class SelectedRate:
    """A row of selected_rates.csv: a method on a base model, and the rate that its validation loss selected.

    Attributes:
        model, parameters: the base model, and how many weights it has.
        dataset, epochs: what it was trained on.
        method: as the paper names it: Full fine-tuning, LoRA, SIFT, RoSA, Super, Magnitude, Supra, Supra-Mag.
        supra_lambda: low-rank share of the budget; None where the paper's table names none.
        direction: top, bottom, random or hybrid; empty without a sparse part.
        hybrid_beta: share of the largest scores; None but for hybrid.
        score: wanda, magnitude, gradient, squared_gradient; empty for random entries and without a sparse part.
        calibration: what Wanda's norms were measured on; empty for other scores.
        learning_rate: of all that is trained, or of the low-rank part where there is a sparse_lr.
        sparse_lr: of the sparse part, where it had a rate of its own.
        accuracy, accuracy_before: % of the answers of six sets of word problems that are right, after and before;
            accuracy is None where the run was not scored.
        validation_nll, validation_nll_before: nats a token; None where the source gives none.
        seeds: runs that the two are means of; None where the source does not say.
        source: label of the paper's table; for a method in examples/paper/results `records: METHOD`, or
            `more-rates: METHOD` for a run that was not scored.
    """

    model: str
    parameters: int
    dataset: str
    epochs: float
    method: str
    supra_lambda: float | None
    direction: str
    hybrid_beta: float | None
    score: str
    calibration: str
    learning_rate: float
    sparse_lr: float | None
    accuracy: float | None
    accuracy_before: float
    validation_nll: float | None
    validation_nll_before: float | None
    seeds: int | None
    source: str

    @property
    def is_ours(self) -> bool:
        return self.source.startswith((_RECORDS, _MORE_RATES))

    @property
    def is_scored(self) -> bool:
        return self.accuracy is not None

    @property
    def scored(self) -> "SelectedRate":
        """This row, or for a run that was not scored the same method's row in our records, which was."""
        if self.is_scored:
            return self
        source = self.source.replace(_MORE_RATES, _RECORDS)
        return next(row for row in self.table if row.source == source)

    @property
    def accuracy_text(self) -> str:
        """The accuracy for a message: `78.3 %`."""
        return "not measured" if self.accuracy is None else f"{self.accuracy:.1f} %"

    @property
    def rates_text(self) -> str:
        """`5e-4`, or with two rates `low-rank + sparse`."""
        return " + ".join(rate_text(rate) for rate in (self.learning_rate, self.sparse_lr) if rate is not None)

    @property
    def name(self) -> str:
        """The method with its settings, as `Supra (bottom, λ = 0.8)`."""
        settings = [self.direction] if self.direction else []
        if self.hybrid_beta is not None:
            settings.append(f"β = {self.hybrid_beta:g}")
        if self.supra_lambda is not None:
            settings.append(f"λ = {self.supra_lambda:g}")
        return f"{self.method} ({', '.join(settings)})" if settings else self.method

    @property
    def table(self) -> tuple["SelectedRate", ...]:
        """All rows of the runs that this one can be compared with: same base, data and epochs."""
        return tuple(row for row in selected_rates() if _setting(row) == _setting(self))

    @property
    def best_adapter(self) -> "SelectedRate":
        """The best scored adapter of the same table: by accuracy in the paper, by validation NLL in our records."""
        return max((row for row in self.table if row.method != _FULL and row.is_scored), key=lambda row: row._gain)

    @property
    def did_poorly(self) -> bool:
        """Whether it gained less than three quarters of what the best adapter of its table gained."""
        return self._gain < _POOR * self.best_adapter._gain

    @property
    def _gain(self) -> float:
        if self.validation_nll is not None and self.validation_nll_before is not None:
            return self.validation_nll_before - self.validation_nll
        if self.accuracy is None:
            raise ValueError(f"selected_rates.csv: {self.source} has neither an accuracy nor a validation NLL.")
        return self.accuracy - self.accuracy_before

    def outcome(self) -> str:
        """How well the run did beside others of its table, for a message: one line, without a full stop."""
        lora = next(row for row in self.table if row.method == _LORA and row.is_scored)
        before = f"{self.accuracy_before:.1f} %"
        if self.validation_nll is None:
            return (
                f"accuracy {self.accuracy_text} (before training {before}, LoRA {lora.accuracy_text}, "
                f"the best adapter {self.best_adapter.accuracy_text})"
            )
        # A run that was not scored has seed 0 only: it is compared with LoRA's best run of that seed.
        same = next((row for row in self.table if row.method == _LORA and row.is_scored == self.is_scored), lora)
        text = (
            f"validation NLL {self.validation_nll:.3f} (before training {self.validation_nll_before:.3f}, "
            f"LoRA {same.validation_nll:.3f}), "
        )
        if not self.is_scored:
            text += f"one seed, not scored; with {self.scored.rates_text} "
        return text + f"accuracy {self.scored.accuracy_text} (before {before}, LoRA {lora.accuracy_text})"


def _setting(row: SelectedRate) -> tuple[str, str, float]:
    return row.model, row.dataset, row.epochs


@dataclass(frozen=True)
class FirstRate:
    """The rate to try first, and why.

    Attributes:
        learning_rate: of all that is trained, or of the low-rank part where there is a sparse_lr.
        sparse_lr: for the YAML key `sparse_lr`; None if one rate is for both parts.
        rows: the row that it was taken from, then others of the same base, method and epochs that selected a rate.
        cautions: sentences about how far the row is from what was asked for, and whether its run did poorly.
    """

    learning_rate: float
    sparse_lr: float | None
    rows: tuple[SelectedRate, ...]
    cautions: tuple[str, ...] = field(default=())

    @property
    def row(self) -> SelectedRate:
        return self.rows[0]

    def explanation(self) -> str:
        """Where the rate comes from and how well that run did, in one sentence."""
        row = self.row
        whose = "our runs" if row.is_ours else "the paper"
        epochs = "1 epoch" if row.epochs == 1 else f"{row.epochs:g} epochs"
        return f"{whose}: {row.name} on {row.model}, {epochs} of {row.dataset}: {row.outcome()}."


@cache
def selected_rates() -> tuple[SelectedRate, ...]:
    """The rows of selected_rates.csv, in its order."""
    text = resources.files(__package__).joinpath("selected_rates.csv").read_text(encoding="utf-8")
    return tuple(_row(cells) for cells in csv.DictReader(text.splitlines()))


_NUMBERS = {"parameters": int, "seeds": int}
_TEXTS = ("model", "dataset", "method", "direction", "score", "calibration", "source")


def _row(cells: dict[str, str]) -> SelectedRate:
    def value(key: str) -> str | int | float | None:
        text = cells[key]
        if key in _TEXTS:
            return text
        return _NUMBERS.get(key, float)(text) if text else None

    return SelectedRate(**{each.name: value(each.name) for each in fields(SelectedRate)})  # type: ignore[arg-type]


def first_rate(
    parameters: int,
    epochs: float,
    *,
    supra_lambda: float,
    score: str = "wanda",
    direction: str = "bottom",
    hybrid_beta: float = 0.5,
) -> FirstRate:
    """The rate to try first for a method on a base of some size.

    The rule: of the rows of this method (for Supra the nearest λ), those of the base nearest in size on a log scale; of
    these, those with the nearest number of epochs on a log scale; of these the one with the lowest validation NLL, or,
    where the source gives none, the one on Math17K rather than Math7K. Of two that are equally near, the smaller base
    and the larger number of epochs, which selected a lower rate.

    The run with the lowest NLL may be one that was not scored (`SelectedRate.is_scored`). It has one seed, with which
    its NLL is lower than that of the scored run.

    Args:
        parameters: weights of the base model.
        epochs: how often the data is passed.
        supra_lambda: low-rank share of the budget: 0 for Super, 1 for LoRA.
        score, direction, hybrid_beta: as the YAML keys mask_score, sparse_direction and hybrid_beta.

    Raises:
        ValueError: parameters, epochs or supra_lambda are out of range.
    """
    if not (parameters > 0 and epochs > 0 and 0 <= supra_lambda <= 1):
        raise ValueError(
            f"parameters: {parameters}, epochs: {epochs}, supra_lambda: {supra_lambda}: the first two must be positive "
            "and the last from 0 to 1."
        )
    cautions: list[str] = []
    rows = _rows_of_method(supra_lambda, score, direction, hybrid_beta, cautions)
    return _first_rate(rows, parameters, epochs, cautions)


def _first_rate(rows: list[SelectedRate], parameters: int, epochs: float, cautions: list[str]) -> FirstRate:
    sizes = {row.parameters for row in rows}
    size = min(sizes, key=lambda size: (_apart(size, parameters), size))
    rows = [row for row in rows if row.parameters == size]
    beyond = parameters > _BEYOND * max(sizes) or parameters < min(sizes) / _BEYOND
    if beyond or _apart(size, parameters) > math.log(_FAR):
        cautions.append(
            f"The base has {_short(parameters)} parameters, and the nearest one with a selected rate has "
            f"{_short(size)}; most methods selected {'lower' if parameters > size else 'higher'} rates on "
            f"{'larger' if parameters > size else 'smaller'} bases."
        )
    passes = min({row.epochs for row in rows}, key=lambda passes: (_apart(passes, epochs), -passes))
    if passes != epochs:
        cautions.append(
            f"The rate was selected for {passes:g} epoch{'s' * (passes != 1)}, not {epochs:g}; most of the paper's "
            "methods selected a lower one for three epochs than for one."
        )
    rows = sorted((row for row in rows if row.epochs == passes), key=_preference)
    row = rows[0]
    if row.did_poorly:
        better = row.best_adapter
        lower = max((rate for rate in _GRID if rate < row.learning_rate), default=row.learning_rate / 2)
        cautions.append(
            f"That run did poorly: its accuracy was {row.accuracy_text}, that of {better.name} {better.accuracy_text}, "
            f"although no other rate had a lower validation loss. Try {rate_text(lower)} too, and compare answers as "
            "well as losses."
        )
        same = [other for other in rows[1:] if other.is_scored and other.learning_rate == row.learning_rate]
        if same:
            listed = ", ".join(f"{other.accuracy_text} ({other.name} on {other.dataset})" for other in same)
            cautions.append(f"Other runs with this rate did otherwise: {listed}.")
    return FirstRate(row.learning_rate, row.sparse_lr, tuple(rows), tuple(cautions))


def _preference(row: SelectedRate) -> tuple[float, bool, str]:
    nll = math.inf if row.validation_nll is None else row.validation_nll
    # Math17K before Math7K, whose runs the paper keeps out of its claims; its own name before SIFT's random entries.
    return nll, row.dataset == "Math7K", {"Super": ""}.get(row.method, row.method)


def _rows_of_method(
    supra_lambda: float, score: str, direction: str, hybrid_beta: float, cautions: list[str]
) -> list[SelectedRate]:
    """The rows of a method; where it has none, those of the nearest one, and a caution that says which."""
    if supra_lambda == 1:
        return [row for row in _unique() if row.method == _LORA]
    if direction == "random" and supra_lambda == 0:  # whatever the score: nothing is ranked
        return [row for row in _unique() if row.direction == "random"]
    names = _HYBRID if supra_lambda else _SPARSE
    rows: list[SelectedRate] = []
    for stand_in, toward in ((score, direction), ("wanda", direction), ("wanda", "bottom")):
        rows = rows or [
            row
            for row in _unique()
            if (row.method, row.direction) == (names.get(stand_in), toward) and _is_scored_so(row, stand_in)
        ]
    if not rows[0].score.startswith(score.removeprefix("squared_")) or rows[0].direction != direction:
        cautions.append(
            f"No rate is known for mask_score: {score} with sparse_direction: {direction}; this is that of "
            f"mask_score: {rows[0].score} with sparse_direction: {rows[0].direction}."
        )
    if names is _HYBRID and any(row.supra_lambda is not None for row in rows):
        nearest = min(
            (row.supra_lambda for row in rows if row.supra_lambda), key=lambda share: abs(share - supra_lambda)
        )
        if nearest != supra_lambda and names.get(score) != "RoSA":
            cautions.append(f"The rate was selected for λ = {nearest:g}, not {supra_lambda:g}.")
        rows = [row for row in rows if row.supra_lambda in (nearest, None)]
    if direction == "hybrid" and rows[0].hybrid_beta is not None:
        nearest = min((row.hybrid_beta for row in rows if row.hybrid_beta), key=lambda beta: abs(beta - hybrid_beta))
        if nearest != hybrid_beta:
            cautions.append(f"The rate was selected for β = {nearest:g}, not {hybrid_beta:g}.")
        rows = [row for row in rows if row.hybrid_beta == nearest]
    return rows


def _is_scored_so(row: SelectedRate, score: str) -> bool:
    return row.score == score or (row.score == "gradient" and score == "squared_gradient")


@cache
def _unique() -> tuple[SelectedRate, ...]:
    """The rows without those that the tables of hybrid supports repeat, and without calibrations of the ablations."""
    found: dict[tuple[object, ...], SelectedRate] = {}
    for row in selected_rates():
        if row.calibration in ("", "C4", "WikiText-2"):
            key = (
                *_setting(row),
                row.method,
                row.supra_lambda,
                row.direction,
                row.hybrid_beta,
                row.score,
                row.sparse_lr,
                row.is_scored,
            )
            found.setdefault(key, row)
    return tuple(found.values())


def _apart(one: float, other: float) -> float:
    return abs(math.log(one / other))


def _short(parameters: int) -> str:
    billions = parameters / 1e9
    return f"{billions:.3g}B" if billions >= 1 else f"{1e3 * billions:.3g}M"


# Rows and columns of the table in README.md: (heading, method, λ, direction), (heading, model, epochs).
_TABLE_ROWS = (
    ("Super, bottom", "Super", None, "bottom"),
    ("Super, bottom, by magnitude", "Magnitude", None, "bottom"),
    ("Super, random", "Super", None, "random"),
    ("Supra, λ = 0.3", "Supra", 0.3, "bottom"),
    ("Supra, λ = 0.5", "Supra", 0.5, "bottom"),
    ("Supra, λ = 0.8", "Supra", 0.8, "bottom"),
    ("Supra-Mag, λ = 0.3", "Supra-Mag", 0.3, "bottom"),
    ("Supra-Mag, λ = 0.8", "Supra-Mag", 0.8, "bottom"),
    ("LoRA", _LORA, None, ""),
    ("full fine-tuning", _FULL, None, ""),
)
_TABLE_COLUMNS = (
    ("135M, 1 epoch (ours)", "SmolLM2-135M", 1),
    ("1B, 1 epoch", "Llama-3.2-1B", 1),
    ("1B, 3 epochs", "Llama-3.2-1B", 3),
    ("8B, 1 epoch", "Meta-Llama-3-8B", 1),
    ("8B, 3 epochs", "Meta-Llama-3-8B", 3),
)


def markdown_table() -> str:
    """The table of first rates in README.md: each cell `rate (accuracy %)`, with two rates `low-rank + sparse`.

    Where the run with the first rate was not scored, the cell has the scored one too: `rate (scored rate: accuracy)`.
    A cell that no Math17K run fills takes a Math7K run, which it names: the two are not to be compared.
    """
    lines = [
        "| rate (accuracy, %) | " + " | ".join(heading for heading, *_ in _TABLE_COLUMNS) + " |",
        "|---" * (len(_TABLE_COLUMNS) + 1) + "|",
    ]
    before = []
    for _, model, epochs in _TABLE_COLUMNS:
        row = next(row for row in _unique() if (row.model, row.epochs) == (model, epochs))
        before.append(f"– ({row.accuracy_before:.1f})")
    lines.append(f"| before training | {' | '.join(before)} |")
    for heading, method, share, direction in _TABLE_ROWS:
        cells = []
        for _, model, epochs in _TABLE_COLUMNS:
            cells.append(
                _cell(
                    row
                    for row in _unique()
                    if (row.model, row.epochs, row.method, row.supra_lambda, row.direction)
                    == (model, epochs, method, share, direction)
                )
            )
        lines.append(f"| {heading} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _cell(rows: Iterable[SelectedRate]) -> str:
    row = min(rows, key=_preference, default=None)
    if row is None:
        return "–"
    scored = "" if row.is_scored else f"{row.scored.rates_text}: "
    return f"{row.rates_text} ({scored}{row.scored.accuracy:.1f}{' on Math7K' * (row.dataset == 'Math7K')})"


def rate_text(rate: float) -> str:
    """5e-4, not 0.0005 or 5e-04."""
    mantissa, exponent = f"{rate:.6e}".split("e")
    return f"{float(mantissa):g}e{int(exponent)}"


if __name__ == "__main__":
    print(markdown_table(), end="")
