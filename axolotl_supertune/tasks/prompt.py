"""The one prompt of the training examples and the benchmarks: the Alpaca template without an input."""

ALPACA_NO_INPUT = (
    "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Response:\n"
)


def alpaca_prompt(instruction: str) -> str:
    """The text that precedes the response, its last newline included."""
    return ALPACA_NO_INPUT.format(instruction=instruction)
