"""How much is trained: records for validation, epochs, the batch, steps, and the rate that goes with them."""

import math
from dataclasses import dataclass, replace

from ...method.selected_rates import FirstRate, first_rate

PAPER_BATCH = 16
# Steps of the paper's runs on Math17K with batches of 16: one epoch, three epochs.
STEPS_OF_ONE_EPOCH, STEPS_OF_THREE_EPOCHS = 1060, 3190
STEPS_OF_OURS = 438  # of the records in examples/paper/results
_BETWEEN = 1840  # the middle of the two on a log scale
_ENOUGH_STEPS = 200
_LARGE, _SMALL = 5000, 100
_MOST_VALIDATION = 200
_FEWEST_FOR_VALIDATION = 20
_CALIBRATION = 128
LAMBDA = 0.8


@dataclass(frozen=True)
class Schedule:
    """The course of a training.

    Attributes:
        training, validation: how many records are trained on, and how many are set apart.
        epochs: how often the records are passed.
        batch: records of a step.
        steps: steps of all epochs.
        warmup: steps in which the rate rises.
        calibration: training records that Wanda's norms are measured on.
    """

    training: int
    validation: int
    epochs: int
    batch: int
    steps: int
    warmup: int
    calibration: int


def make_schedule(usable: int) -> Schedule:
    """The course of a training on so many records that teach something: fewer get more passes and smaller batches."""
    validation = min(_MOST_VALIDATION, round(0.1 * usable)) if usable >= _FEWEST_FOR_VALIDATION else 0
    training = usable - validation
    epochs = 1 if training >= _LARGE else 3 if training >= _SMALL else 5
    batch = PAPER_BATCH
    while batch > 4 and -(-training // batch) * epochs < _ENOUGH_STEPS:
        batch //= 2
    batch = min(batch, training)
    if validation:  # whole batches in every epoch, so that the last evaluation is at the last step
        validation += training % batch
        training = usable - validation
    steps = -(-training * epochs // batch)  # as Axolotl counts them
    return Schedule(
        training, validation, epochs, batch, steps, min(100, max(1, steps // 10)), min(_CALIBRATION, training)
    )


@dataclass(frozen=True)
class Method:
    """The adapter and its first rate.

    Attributes:
        adapter: supra or super.
        score: mask_score.
        score_reason: why that one.
        rate: the first rate to try.
    """

    adapter: str
    score: str
    score_reason: str
    rate: FirstRate


def choose_method(adapter: str, parameters: int, steps: int) -> Method:
    """The score, and the first rate for a run of so many steps.

    The paper's rates are for one or three epochs of its data: the one with the number of steps that is nearer counts.
    """
    epochs = 1 if steps < _BETWEEN else 3
    share = LAMBDA if adapter == "supra" else 0.0
    by_wanda = _rate(parameters, epochs, share, "wanda")
    score, reason = "wanda", "|W|·‖X‖₂, from a calibration before training; magnitude needs none"
    if by_wanda.row.did_poorly:
        by_magnitude = _rate(parameters, epochs, share, "magnitude")
        if not by_magnitude.row.did_poorly:
            reason = (
                f"|W| alone, without calibration: its accuracy on {by_wanda.row.model} was "
                f"{by_magnitude.row.accuracy_text}, that of wanda {by_wanda.row.accuracy_text}"
            )
            return Method(adapter, "magnitude", reason, by_magnitude)
    return Method(adapter, score, reason, by_wanda)


def for_batch(rate: float, batch: int) -> float:
    """A rate that was selected with batches of 16, for smaller ones: by Adam's square-root rule, in two digits.

    SmolLM2-135M on 180 word problems in batches of 4 (Supra, λ = 0.8, one seed, on a CPU, 2026-11-29): training loss
    over steps 21 to 30 of 0.239 with 5e-3 and 1e-2, 0.143 with half of them.
    """
    return float(f"{rate * math.sqrt(batch / PAPER_BATCH):.2g}")


def _rate(parameters: int, epochs: int, share: float, score: str) -> FirstRate:
    rate = first_rate(parameters, epochs, supra_lambda=share, score=score)
    # Our records have one epoch only; what counts here is the number of steps, which the YAML gives.
    return replace(rate, cautions=tuple(text for text in rate.cautions if "epoch" not in text))
