"""Perplexity of correct worked answers (paper, section 4.1): prompt masked, end of text included, token-weighted.

A record's `output` is a model's reasoning and often wrong: only records whose own answer is right by the published rule
count, the first 120 of each benchmark.

The harness scores strings, so a document becomes two choices, w + target and w, where w is the prompt's trailing
whitespace (which the harness moves into the scored part): log p(target | prompt) is their difference.
"""

import math
from collections.abc import Sequence
from typing import Any

from datasets import Dataset

from .benchmarks import BENCHMARKS, load_benchmark
from .extraction import is_correct, published_letter, published_number
from .prompt import alpaca_prompt

MAX_RECORDS = 120


def gold_records(benchmark: str, data_dir: str | None = None) -> list[dict[str, str]]:
    """The benchmark's first 120 records whose own output states the right answer."""
    kind = BENCHMARKS[benchmark].kind
    published = published_letter if kind == "letter" else published_number
    chosen = []
    for record in load_benchmark(benchmark, data_dir=data_dir):
        if is_correct(published(record["output"]), str(record["answer"]), kind):
            chosen.append({"instruction": record["instruction"], "target": record["output"].strip()})
    return chosen[:MAX_RECORDS]


def load_perplexity(
    supertune_data_dir: str | None = None, tokenizer: str | None = None, pretrained: str | None = None, **_: Any
) -> dict[str, Dataset]:
    """Documents of the perplexity task: the gold targets of all benchmarks, with their numbers of tokens.

    Args:
        supertune_data_dir: folder of the six files, from `--metadata`.
        tokenizer, pretrained: from `--model_args`; name the tokenizer, which tells the end-of-text token and counts.

    Raises:
        ValueError: the harness passed neither.
    """
    from transformers import AutoTokenizer

    name = tokenizer or pretrained
    if not name:
        raise ValueError(
            "supertune_math_ppl counts target tokens and found no tokenizer: give --model_args pretrained=… (or "
            "tokenizer=…)."
        )
    counter = AutoTokenizer.from_pretrained(name)
    if not counter.eos_token:
        raise ValueError(f"supertune_math_ppl scores the end of the text, and the tokenizer {name} has no eos token.")
    rows = []
    for benchmark in BENCHMARKS:
        for record in gold_records(benchmark, supertune_data_dir):
            context = alpaca_prompt(record["instruction"])
            bare = context.rstrip()
            target = record["target"] + counter.eos_token
            rows.append(
                {
                    "benchmark": benchmark,
                    "context": bare,
                    "choices": [context[len(bare) :] + target, context[len(bare) :]],
                    "tokens": len(counter(target, add_special_tokens=False)["input_ids"]),
                }
            )
    return {"test": Dataset.from_list(rows)}


def score_perplexity(doc: dict[str, Any], results: Sequence[tuple[float, bool]]) -> dict[str, tuple[float, int]]:
    """(log-likelihood in nats, tokens) of one target, under the pooled key and the benchmark's own.

    Args:
        results: (log-likelihood, is greedy) of the document's two choices.
    """
    (with_target, _), (whitespace, _) = results[:2]
    target = (with_target - whitespace, doc["tokens"])
    return {"ppl": target, f"ppl_{BENCHMARKS[doc['benchmark']].suffix}": target}


def pooled_perplexity(items: Sequence[tuple[float, int]]) -> float:
    """exp(−Σ log p / Σ tokens)."""
    return math.exp(-sum(loglikelihood for loglikelihood, _ in items) / sum(tokens for _, tokens in items))
