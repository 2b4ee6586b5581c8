"""How long the records are in tokens, and the `sequence_len` that follows from it."""

from dataclasses import dataclass
from typing import Any

from .base import Base
from .data_format import Chat, Data, Pairs

LIMIT = 4096  # longer records are cut unless the user says otherwise: memory grows with the longest one
_MULTIPLE = 64  # Axolotl pads to multiples of it
_CHARACTERS_PER_TOKEN = 3  # of English text some four; more of code and of other languages
_TOKENS_PER_MESSAGE = 8  # what a chat template puts around a message


@dataclass(frozen=True)
class Lengths:
    """Tokens of the records and the sequence length.

    Attributes:
        sequence_len: the longest record, rounded up, as far as the base and `LIMIT` allow.
        longest: tokens of the longest record.
        longer: how many records are longer than sequence_len.
        estimated: whether tokens were told from characters, for want of a tokenizer.
        measured: how many records were measured.
    """

    sequence_len: int
    longest: int
    longer: int
    estimated: bool
    measured: int


def measure(data: Data, base: Base, template: str | None) -> Lengths:
    """Measure the records as Axolotl will tokenize them.

    Args:
        data: the records.
        base: its tokenizer counts; without one, characters do.
        template: Jinja text of the chat template, for chats.

    Raises:
        ValueError: the chat template refuses a record; names it.
    """
    lengths = [_length(data, where, record, base, template) for where, record in data.kept]
    longest = max(lengths)
    allowed = min(LIMIT, base.longest_input or LIMIT)
    rounded = -(-longest // _MULTIPLE) * _MULTIPLE
    sequence_len = min(rounded, allowed)
    longer = sum(length > sequence_len for length in lengths)
    return Lengths(sequence_len, longest, longer, base.tokenizer is None, len(lengths))


def _length(data: Data, where: str, record: dict[str, Any], base: Base, template: str | None) -> int:
    if isinstance(data.format, Chat):
        return _length_of_chat(data, where, data.format.messages(record), base, template)
    text = data.format.texts(record) if isinstance(data.format, Pairs) else record[data.format.column]
    return _count(base, text) + 1  # and the token that ends it


def _length_of_chat(data: Data, where: str, messages: list[dict[str, str]], base: Base, template: str | None) -> int:
    if base.tokenizer is None or template is None:
        return sum(_count(base, message["content"]) + _TOKENS_PER_MESSAGE for message in messages)
    try:
        text = base.tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False)
    except Exception as error:  # whatever the template raises
        raise ValueError(
            f"--data {data.path}: the base's chat template refuses {where}: {error}. Mend the record (roles must take "
            "turns, for most templates), or name another chat_template in the YAML of another file."
        ) from error
    return len(base.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def _count(base: Base, text: str) -> int:
    if base.tokenizer is None:
        return -(-len(text) // _CHARACTERS_PER_TOKEN)
    return len(base.tokenizer(text, verbose=False)["input_ids"])
