"""The prompt of training and evaluation: the Alpaca template without an input."""

ALPACA_NO_INPUT = (
    "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Response:\n"
)


def alpaca_prompt(instruction: str) -> str:
    """The text before the response, up to and with its last newline."""
    return ALPACA_NO_INPUT.format(instruction=instruction)
