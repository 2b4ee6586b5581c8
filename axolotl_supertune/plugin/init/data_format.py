"""Tells of training records which format they have, what Axolotl must be told of it, and which records do not fit."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

from .csv_columns import CsvColumns
from .records import read_records

ALPACA_PROMPT = (
    "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Response:\n"
)
ALPACA_PROMPT_WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further context. Write a "
    "response that appropriately completes the request.\n\n### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n"
    "### Response:\n"
)
KNOWN = (
    "alpaca (instruction, output and perhaps input), chat (messages with role and content, or conversations with from "
    "and value), completion (text), or a pair of columns such as question and answer, prompt and response"
)

# Columns with the two sides of a pair, the usual names first.
_QUESTIONS = ("instruction", "question", "prompt", "query", "problem", "input", "source")
_ANSWERS = ("output", "answer", "response", "completion", "solution", "target", "reply")
_CONTEXTS = ("context", "input")
_ROLE_KEYS, _CONTENT_KEYS = ("role", "from", "speaker"), ("content", "value", "text")
_ROLES = {
    "user": ("user", "human", "prompter"),
    "assistant": ("assistant", "gpt", "bot", "model", "chatbot"),
    "system": ("system",),
    "tool": ("tool",),
}
_AXOLOTLS_ROLES = ("user", "human", "assistant", "gpt", "system", "tool")
_KEPT = 20_000
_SHOWN = 3


# Every format has: `label`, its name for a message; `columns` that are trained on; `also_read`, columns that Axolotl
# reads with it unasked; `dataset()`, the keys of an entry of Axolotl's `datasets` without `path`; `problem(record)`,
# what keeps Axolotl from training on a record, empty if nothing does; `teaches(record)`, whether there is something
# in it to learn.


@dataclass(frozen=True)
class Pairs:
    """A prompt and an answer in columns of their own; Alpaca's columns are a case of it.

    Attributes:
        question, answer: the columns.
        context: the column with further input; empty if there is none.
        stray_input: whether there is another column `input`, which Axolotl would put into the prompt.
    """

    question: str
    answer: str
    context: str = ""
    stray_input: bool = False

    @property
    def is_alpaca(self) -> bool:
        return (self.question, self.answer) == ("instruction", "output") and self.context in ("", "input")

    @property
    def label(self) -> str:
        return "alpaca" if self.is_alpaca else f"{self.question}/{self.answer}"

    @property
    def also_read(self) -> tuple[str, ...]:
        return () if self.is_alpaca else ("system",)

    @property
    def columns(self) -> tuple[str, ...]:
        return tuple(name for name in (self.question, self.context, self.answer) if name)

    def dataset(self) -> dict[str, Any]:
        if self.is_alpaca:
            return {"type": "alpaca"}
        fields = {"field_instruction": self.question, "field_output": self.answer}
        if self.context:
            fields["field_input"] = self.context
        elif self.stray_input:
            fields["field_input"] = "no column"  # without the key Axolotl would read the column `input`
        with_input = {"format": ALPACA_PROMPT_WITH_INPUT} if self.context else {}
        return {"type": {"system_prompt": "", **fields, **with_input, "no_input_format": ALPACA_PROMPT}}

    def widened(self, record: Mapping[str, Any]) -> "Pairs":
        """This format with the column of further input that a record has and those before it did not have."""
        context = self.context or _context_of(record, self.question)
        stray = self.stray_input or "input" in record
        return replace(self, context=context, stray_input=stray and context != "input")

    def problem(self, record: Mapping[str, Any]) -> str:
        for name in (self.question, self.answer):
            if record.get(name) is None:
                return f"{name} is missing"
        others = (name for name in _CONTEXTS if name not in self.columns and record.get(name))
        if self.context and not record.get(self.context) and (other := next(others, "")):
            return f"its further input is in {other}, that of other records in {self.context}"
        return next(
            (f"{name} is {_kind(record[name])}, not text" for name in self.columns if _is_no_text(record, name)), ""
        )

    def teaches(self, record: Mapping[str, Any]) -> bool:
        return bool(record[self.answer].strip())

    def texts(self, record: Mapping[str, Any]) -> str:
        """The prompt and the answer, as Axolotl joins them."""
        context = record.get(self.context) if self.context else ""
        prompt = ALPACA_PROMPT_WITH_INPUT if context else ALPACA_PROMPT
        prompt = prompt.replace("{instruction}", record[self.question]).replace("{input}", context or "")
        system = "" if self.is_alpaca else record.get("system")
        return f"{system}\n" * bool(system) + prompt + record[self.answer]


@dataclass(frozen=True)
class Completion:
    """Texts that are trained on as they are, in one column."""

    column: str
    label: ClassVar[str] = "completion"
    also_read: ClassVar[tuple[str, ...]] = ()

    @property
    def columns(self) -> tuple[str, ...]:
        return (self.column,)

    def dataset(self) -> dict[str, Any]:
        return {"type": "completion"} | ({} if self.column == "text" else {"field": self.column})

    def problem(self, record: Mapping[str, Any]) -> str:
        if record.get(self.column) is None:
            return f"{self.column} is missing"
        return f"{self.column} is {_kind(record[self.column])}, not text" if _is_no_text(record, self.column) else ""

    def teaches(self, record: Mapping[str, Any]) -> bool:
        return bool(record[self.column].strip())


@dataclass(frozen=True)
class Chat:
    """Conversations: a column with a list of messages, each with a role and its content.

    Attributes:
        column: the list of messages.
        role, content: keys of a message.
        roles: the roles that occur, as the file names them.
    """

    column: str
    role: str
    content: str
    roles: frozenset[str] = frozenset()
    label: ClassVar[str] = "chat"
    also_read: ClassVar[tuple[str, ...]] = ("tools",)

    @property
    def columns(self) -> tuple[str, ...]:
        return (self.column,)

    def dataset(self) -> dict[str, Any]:
        keys: dict[str, Any] = {"type": "chat_template"}
        if self.column != "messages":
            keys["field_messages"] = self.column
        if (self.role, self.content) != ("role", "content"):
            keys["message_property_mappings"] = {"role": self.role, "content": self.content}
        if not self.roles <= set(_AXOLOTLS_ROLES):
            keys["roles"] = {
                role: [name for name in names if name in self.roles or name in _AXOLOTLS_ROLES]
                for role, names in _ROLES.items()
            }
        return keys

    def problem(self, record: Mapping[str, Any]) -> str:
        messages = record.get(self.column)
        if not isinstance(messages, list) or not messages:
            return f"{self.column} is {'missing' if messages is None else 'no list of messages'}"
        for number, message in enumerate(messages, 1):
            if not isinstance(message, Mapping) or message.get(self.role) is None:
                return f"message {number} has no {self.role}"
            if not isinstance(message.get(self.content), str):
                return f"message {number}: {self.content} is {_kind(message.get(self.content))}, not text"
            if message[self.role] not in (name for names in _ROLES.values() for name in names):
                return f"message {number}: the {self.role} {message[self.role]!r} is unknown"
        if not any(message[self.role] in _ROLES["assistant"] for message in messages):
            return "no message is the assistant's"
        return ""

    def teaches(self, record: Mapping[str, Any]) -> bool:
        return any(
            message[self.content].strip()
            for message in record[self.column]
            if message[self.role] in _ROLES["assistant"]
        )

    def messages(self, record: Mapping[str, Any]) -> list[dict[str, str]]:
        """The messages with the keys and the roles that chat templates know."""
        names = {name: role for role, names in _ROLES.items() for name in names}
        return [
            {"role": names[message[self.role]], "content": message[self.content]} for message in record[self.column]
        ]


@dataclass
class Data:
    """A file of training records.

    Attributes:
        path: the file.
        format: the format of all its records.
        count: how many records there are.
        empty: places of the records that teach nothing, at most three, and how many there are.
        read_too: further columns that Axolotl reads with this format, where they are there.
        unused: columns that are not trained on.
        kept: the records whose length is measured: all, or of a large file the first and the longest.
    """

    path: Path
    format: Pairs | Completion | Chat
    count: int = 0
    empty: list[str] = field(default_factory=list)
    empty_count: int = 0
    read_too: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    kept: list[tuple[str, dict[str, Any]]] = field(default_factory=list)

    @property
    def usable(self) -> int:
        """Records that teach something."""
        return self.count - self.empty_count


def read_data(path: Path) -> Data:
    """Read a file of training records, tell their format and check every one of them.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: no known format, more than one, or records that Axolotl could not train on; names the columns or the
            records, and the remedy.
    """
    data: Data | None = None
    misfits: list[tuple[str, str]] = []
    columns: dict[str, None] = {}
    roles: set[str] = set()
    fields = CsvColumns(path) if path.suffix.lower() == ".csv" else None
    longest = 0
    for where, record in read_records(path):
        if data is None:
            data = Data(path, _format_of(path, where, record))
        data.count += 1
        columns.update(dict.fromkeys(record))
        if isinstance(data.format, Pairs):
            data.format = data.format.widened(record)
        problem = data.format.problem(record)
        if problem:
            misfits.append((where, _misfit(data.format, record, problem)))
            continue
        if fields:
            fields.add(where, record, data.format.columns, getattr(data.format, "context", ""))
        if not data.format.teaches(record):
            data.empty_count += 1
            data.empty = [*data.empty, where][:_SHOWN]
        if isinstance(data.format, Chat):
            roles.update(message[data.format.role] for message in record[data.format.column])
        length = sum(len(str(record.get(name))) for name in data.format.columns)
        if len(data.kept) < _KEPT or length > longest:
            data.kept.append((where, record))
        longest = max(longest, length)
    if data is None:
        raise ValueError(f"--data {path}: there is no record in it.")
    if misfits:
        raise ValueError(_misfits_text(data, misfits))
    if fields:
        fields.check()
    if not data.usable:
        raise ValueError(
            f"--data {path}: no record has an answer or a text to learn; {data.format.columns[-1]} is empty."
        )
    if isinstance(data.format, Chat):
        data.format = Chat(data.format.column, data.format.role, data.format.content, frozenset(roles))
    data.read_too = tuple(name for name in data.format.also_read if name in columns)
    data.unused = tuple(name for name in columns if name not in (*data.format.columns, *data.read_too))
    return data


def _format_of(path: Path, where: str, record: Mapping[str, Any]) -> Pairs | Completion | Chat:
    columns = ", ".join(f"{name} ({_kind(value)})" for name, value in record.items()) or "none"
    if {"chosen", "rejected"} <= set(record):
        raise ValueError(
            f"--data {path}: {where} has chosen and rejected answers (columns: {columns}), and training on preferences "
            "is not supported. Keep the chosen ones, as prompt and response or as messages."
        )
    packed = next((name for name in ("messages", "conversations") if str(record.get(name)).lstrip()[:1] == "["), "")
    if isinstance(record.get(packed), str):
        raise ValueError(
            f"--data {path}: {packed} of {where} is text and not a list of messages: {record[packed][:60]!r}. Write "
            "the list itself (json.loads makes it of the text), as .jsonl."
        )
    found = _known_format(record)
    if found is None:
        raise ValueError(
            f"--data {path}: the format is not known. Columns of {where}: {columns}. Known are {KNOWN}. Rename the "
            "columns, or write the YAML's datasets by hand: https://docs.axolotl.ai/docs/dataset-formats/."
        )
    return found


def _known_format(record: Mapping[str, Any]) -> Pairs | Completion | Chat | None:
    for column, value in sorted(record.items(), key=lambda item: item[0] not in ("messages", "conversations")):
        if isinstance(value, list) and value and isinstance(value[0], Mapping):
            role = next((key for key in _ROLE_KEYS if key in value[0]), None)
            content = next((key for key in _CONTENT_KEYS if key in value[0]), None)
            if role and content:
                return Chat(column, role, content)
    texts = [name for name, value in record.items() if isinstance(value, str)]
    # A column that is empty in this record has its name all the same.
    questions = [name for name in _QUESTIONS if name in record and (record[name] is None or name in texts)]
    answers = [name for name in _ANSWERS if name in record and not isinstance(record[name], list)]
    if questions and answers:
        question = questions[0]
        return Pairs(question, answers[0]).widened(record)
    if "text" in texts:
        return Completion("text")
    return Completion(texts[0]) if len(texts) == len(record) == 1 else None


def _context_of(record: Mapping[str, Any], question: str) -> str:
    return next((name for name in _CONTEXTS if name in record and name != question), "")


def _misfit(expected: Pairs | Completion | Chat, record: Mapping[str, Any], problem: str) -> str:
    other = _known_format(record)
    if other is not None and other.label != expected.label and not set(other.columns) <= set(expected.columns):
        return f"looks like {other.label} ({', '.join(record)})"
    return problem


def _misfits_text(data: Data, misfits: list[tuple[str, str]]) -> str:
    shown = "; ".join(f"{where}: {problem}" for where, problem in misfits[:_SHOWN])
    more = f"; and {len(misfits) - _SHOWN} more" if len(misfits) > _SHOWN else ""
    return (
        f"--data {data.path}: {len(misfits)} of {data.count} records do not fit the format, "
        f"{data.format.label} ({', '.join(data.format.columns)}). {shown}{more}. Mend or remove them; records of two "
        "formats belong into two files."
    )


def _is_no_text(record: Mapping[str, Any], name: str) -> bool:
    return record.get(name) is not None and not isinstance(record[name], str)


def _kind(value: Any) -> str:
    names: Iterable[tuple[type, str]] = (
        (str, "text"),
        (bool, "true or false"),
        (int, "a number"),
        (float, "a number"),
        (list, "a list"),
        (dict, "an object"),
    )
    return "empty" if value is None else next((name for kind, name in names if isinstance(value, kind)), "no text")
