"""selected_rates.csv is what the paper and the records say, and the rule takes the rows that one would take by hand."""

import csv
import re
from dataclasses import fields
from itertools import pairwise

import pytest
from make_selected_rates import COLUMNS, PAPER, TARGET, more_rate_rows, paper_rows, record_rows

from axolotl_supertune.method.selected_rates import (
    SelectedRate,
    first_rate,
    markdown_table,
    rate_text,
    selected_rates,
)

M135, B1, B8 = 134_515_008, 1_235_814_400, 8_030_261_248
OURS = ("records: ", "more-rates: ")
SQUARED = {"supra_lambda": 0.5, "score": "squared_gradient", "direction": "top"}


def written(of_ours):
    with TARGET.open(encoding="utf-8", newline="") as file:
        return [row for row in csv.DictReader(file) if row["source"].startswith(OURS) == of_ours]


@pytest.mark.skipif(not PAPER.is_file(), reason=f"{PAPER.name} is not here")
def test_the_papers_rows_are_those_of_its_tables():
    tex = PAPER.read_text(encoding="utf-8")
    assert written(of_ours=False) == paper_rows(tex)
    # Counted another way: lines with a rate and seven numbers in the appendix's tables of accuracies.
    accuracies = "".join(re.split(r"\\caption\{Test perplexity", part)[0] for part in tex_tables(tex))
    assert len(paper_rows(tex)) == len(re.findall(r"10\^\{-\d\}\$(?: & [\\\w{}.]+){7}", accuracies))


def tex_tables(tex):
    return tex.partition(r"\appendix")[2].split(r"\begin{table}")


def test_our_rows_are_those_of_the_records():
    assert written(of_ours=True) == record_rows() + more_rate_rows()


def test_a_run_that_was_not_scored_is_there_because_it_beat_the_scored_one():
    unscored = [row for row in selected_rates() if not row.is_scored]
    assert [(row.name, row.rates_text, row.scored.rates_text) for row in unscored] == [
        ("LoRA", "3e-3", "5e-3"),
        ("Supra (bottom, λ = 0.3)", "2e-3 + 1e-2", "1e-3 + 1e-2"),
        ("Supra (bottom, λ = 0.5)", "2e-3 + 1e-2", "1e-3 + 1e-2"),
        ("Supra (bottom, λ = 0.8)", "2e-3 + 1e-2", "5e-3 + 1e-2"),
    ]
    for row in unscored:
        assert row.validation_nll < row.scored.validation_nll, "else first_rate would take the scored one"
        assert (row.is_ours, row.did_poorly, row.best_adapter.name) == (True, False, "Super (random)")
        assert row in row.scored.table


def test_a_run_that_was_not_scored_says_so():
    assert first_rate(M135, 1, supra_lambda=0.8).explanation() == (
        "our runs: Supra (bottom, λ = 0.8) on SmolLM2-135M, 1 epoch of gsm8k: validation NLL 0.811 (before training "
        "1.360, LoRA 0.811), one seed, not scored; with 5e-3 + 1e-2 accuracy 8.4 % (before 6.1 %, LoRA 7.8 %)."
    )
    assert first_rate(M135, 1, supra_lambda=0).explanation() == (
        "our runs: Super (bottom) on SmolLM2-135M, 1 epoch of gsm8k: validation NLL 0.803 (before training 1.360, "
        "LoRA 0.812), accuracy 8.9 % (before 6.1 %, LoRA 7.8 %)."
    )


def test_the_file_is_read_into_its_types():
    assert tuple(each.name for each in fields(SelectedRate)) == COLUMNS
    rows = selected_rates()
    assert len(rows) == len(written(True)) + len(written(False))
    supra = next(row for row in rows if row.source == "records: supra-0.3-two-rates")
    assert (supra.parameters, supra.epochs, supra.supra_lambda, supra.seeds) == (M135, 1.0, 0.3, 3)
    assert (supra.learning_rate, supra.sparse_lr, supra.validation_nll) == (1e-3, 1e-2, 0.8053)
    assert (supra.name, supra.is_ours) == ("Supra (bottom, λ = 0.3)", True)
    full = next(row for row in rows if row.method == "Full fine-tuning" and not row.is_ours)
    assert (full.supra_lambda, full.direction, full.score, full.sparse_lr, full.seeds) == (None, "", "", None, None)


@pytest.mark.parametrize(
    ("parameters", "epochs", "method", "rate", "sparse", "source"),
    [
        (B8, 1, {"supra_lambda": 0.8}, 5e-4, None, "tab:llama8b_math17k_1epoch_accuracy_r8"),
        (B8, 3, {"supra_lambda": 0.5}, 1e-3, None, "tab:llama8b_math17k_3epoch_accuracy_r8"),
        (B1, 3, {"supra_lambda": 0.8}, 5e-4, None, "tab:llama1b_math17k_3epoch_accuracy_r8"),
        (B1, 1, {"supra_lambda": 0.3, "score": "magnitude"}, 5e-4, None, "tab:llama1b_math17k_1epoch_accuracy_r8"),
        (B1, 1, {"supra_lambda": 0.8, "direction": "top"}, 5e-4, None, "tab:llama1b_math17k_1epoch_accuracy_r8"),
        (B1, 3, {"supra_lambda": 0, "direction": "hybrid", "hybrid_beta": 0.3}, 1e-4, None, "tab:llama1b_math17k_hy"),
        (B1, 3, {"supra_lambda": 1}, 5e-4, None, "tab:llama1b_math17k_3epoch_accuracy_r8"),
        # Math17K rather than Math7K; random entries are random by whichever name.
        (B1, 1, {"supra_lambda": 0, "direction": "random"}, 1e-3, None, "tab:llama1b_math17k_1epoch_accuracy_r8"),
        # Ours: by validation NLL two rates are better than one, at every λ.
        (M135, 1, {"supra_lambda": 0.3}, 2e-3, 1e-2, "more-rates: supra-0.3-two-rates"),
        (M135, 1, {"supra_lambda": 0.8}, 2e-3, 1e-2, "more-rates: supra-0.8-two-rates"),
        (M135, 1, {"supra_lambda": 1}, 3e-3, None, "more-rates: lora"),
        (M135, 1, {"supra_lambda": 0}, 1e-2, None, "records: super-bottom"),
        (M135, 1, SQUARED, 1e-3, None, "records: rosa-squared"),
        # The nearest on a log scale: 400M lies between 135M and 1.24B at 408M, 3.15B is the middle of 1.24B and 8.03B.
        (400_000_000, 1, {"supra_lambda": 0}, 1e-2, None, "records: super-bottom"),
        (420_000_000, 1, {"supra_lambda": 0}, 1e-3, None, "tab:llama1b_math17k_hybrid_super_accuracy_r8"),
        (3_100_000_000, 1, {"supra_lambda": 0.8}, 1e-3, None, "tab:llama1b_math17k_1epoch_accuracy_r8"),
        (3_200_000_000, 1, {"supra_lambda": 0.8}, 5e-4, None, "tab:llama8b_math17k_1epoch_accuracy_r8"),
        (B8, 1.7, {"supra_lambda": 0.8}, 5e-4, None, "tab:llama8b_math17k_1epoch_accuracy_r8"),
        (B8, 2, {"supra_lambda": 0.8}, 1e-4, None, "tab:llama8b_math17k_3epoch_accuracy_r8"),
    ],
)  # fmt: skip
def test_the_first_rate(parameters, epochs, method, rate, sparse, source):
    first = first_rate(parameters, epochs, **method)
    assert (first.learning_rate, first.sparse_lr) == (rate, sparse)
    assert first.row.source.startswith(source)
    assert rate_text(rate) not in ("", "0.0005")
    assert ("our runs" in first.explanation()) == source.startswith(OURS)


def test_what_is_near_needs_no_caution():
    first = first_rate(B8, 1, supra_lambda=0.8)
    assert not first.cautions
    assert first.explanation() == (
        "the paper: Supra (bottom, λ = 0.8) on Meta-Llama-3-8B, 1 epoch of Math17K: accuracy 78.3 % (before training "
        "23.1 %, LoRA 73.2 %, the best adapter 79.1 %)."
    )
    assert [row.dataset for row in first.rows] == ["Math17K", "Math7K"]


@pytest.mark.parametrize(
    ("parameters", "epochs", "method", "caution"),
    [
        (7e10, 1, {"supra_lambda": 0.8}, "The base has 70B parameters, and the nearest one with a selected rate has"),
        (7e10, 1, {"supra_lambda": 0.8}, "; most methods selected lower rates on larger bases."),
        (3e7, 1, {"supra_lambda": 0.8}, "has 135M; most methods selected higher rates on smaller bases."),
        (3e9, 1, {"supra_lambda": 0.8}, "The base has 3B parameters, and the nearest one with a selected rate has"),
        (M135, 3, {"supra_lambda": 0.8}, "The rate was selected for 1 epoch, not 3"),
        (B8, 2, {"supra_lambda": 0.8}, "The rate was selected for 3 epochs, not 2"),
        (B8, 1, {"supra_lambda": 0.6}, "The rate was selected for λ = 0.5, not 0.6."),
        (B1, 1, {"supra_lambda": 0, "direction": "hybrid", "hybrid_beta": 0.6}, "selected for β = 0.5, not 0.6."),
        (B8, 1, {"supra_lambda": 0, "score": "activation", "direction": "top"}, "wanda with sparse_direction: top"),
        (B8, 1, {"supra_lambda": 0.3, "direction": "random"}, "No rate is known for mask_score: wanda with sparse"),
        (B8, 1, {"supra_lambda": 0.8, "score": "magnitude", "direction": "top"}, "wanda with sparse_direction: top"),
        (B8, 1, {"supra_lambda": 0}, "That run did poorly: its accuracy was 22.3 %, that of Supra-Mag"),
        (B8, 1, {"supra_lambda": 0}, "Try 5e-4 too"),
        (B8, 1, {"supra_lambda": 0}, "Other runs with this rate did otherwise: 71.8 % (Super (bottom) on Math7K)."),
        (B8, 3, {"supra_lambda": 0.3, "score": "magnitude"}, "Try 2.5e-5 too"),
    ],
)  # fmt: skip
def test_what_is_far_or_did_poorly_is_told(parameters, epochs, method, caution):
    assert [text for text in first_rate(parameters, epochs, **method).cautions if caution in text]


def test_runs_that_did_poorly_are_those_that_one_would_call_so():
    poor = {(row.name, row.epochs) for row in selected_rates() if row.model == "Meta-Llama-3-8B" and row.did_poorly}
    assert {("Super (bottom)", 1.0), ("Super (random)", 1.0), ("Supra (top, λ = 0.8)", 3.0)} <= poor
    assert not {("LoRA", 1.0), ("LoRA", 3.0), ("Super (bottom)", 3.0), ("Supra (bottom, λ = 0.8)", 1.0)} & poor
    assert not [row for row in selected_rates() if row.is_ours and row.did_poorly]


def test_what_the_cautions_say_of_epochs_and_sizes():
    rates = {
        (row.name, row.parameters, row.epochs): row.learning_rate
        for row in selected_rates()
        if row.dataset != "Math7K" and row.sparse_lr is None and row.method != "Full fine-tuning"
    }

    def changes(one, other):
        """For each method with a rate at both (size, epochs): other's rate by one's."""
        both = [name for name, *at in rates if tuple(at) == one and (name, *other) in rates]
        return [rates[name, *other] / rates[name, *one] for name in both]

    of_epochs = changes((B1, 1.0), (B1, 3.0)) + changes((B8, 1.0), (B8, 3.0))
    assert sum(change > 1 for change in of_epochs) == 1, "Supra at λ = 0.5 on 8B"
    assert sum(change < 1 for change in of_epochs) > len(of_epochs) / 2
    for smaller, larger in pairwise((M135, B1, B8)):
        of_sizes = changes((smaller, 1.0), (larger, 1.0))
        assert sum(change < 1 for change in of_sizes) > len(of_sizes) / 2


@pytest.mark.parametrize(
    ("parameters", "epochs", "share"), [(0, 1, 0.8), (M135, 0, 0.8), (M135, 1, -0.1), (M135, 1, 1.1)]
)
def test_what_is_out_of_range_is_refused(parameters, epochs, share):
    with pytest.raises(ValueError, match=f"parameters: {parameters}, epochs: {epochs}, supra_lambda: {share}"):
        first_rate(parameters, epochs, supra_lambda=share)


def test_the_table_has_rates_with_accuracies():
    lines = markdown_table().splitlines()
    assert len(lines) == 13
    assert {line.count("|") for line in lines} == {7}
    assert "| Super, bottom | 1e-2 (8.9) | 1e-3 (37.0) | 5e-4 (55.5) | 1e-3 (22.3) | 1e-4 (72.7) |" in lines
    assert "| Super, random | 1e-2 (8.9) | 1e-3 (37.1 on Math7K) | – | 1e-3 (33.7) | 1e-4 (45.8) |" in lines
    assert "| LoRA | 3e-3 (5e-3: 7.8) | 1e-3 (57.6) | 5e-4 (61.1) | 5e-4 (73.2) | 1e-4 (71.3) |" in lines
    supra = "| Supra, λ = 0.8 | 2e-3 + 1e-2 (5e-3 + 1e-2: 8.4) | 1e-3 (58.8) | 5e-4 (62.2) | 5e-4 (78.3) | "
    assert f"{supra}1e-4 (63.7) |" in lines
