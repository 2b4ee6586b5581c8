"""The rule that decides whether a test question occurs in a training record: exact, near-duplicate or template.

Text is compared as words: Unicode NFKC, casefold, then every run of letters and every number ("1,000" is 1000, "6.8" is
one word); punctuation and spaces are dropped. AQuA questions are compared without their answer choices.

- exact: all words of the test question follow one another in a training record: in its question, in another text of
  it, or across two of them (a context column, then a question column).
- near: in one text of one training record, at least `threshold` of the test question's words lie in shared runs of
  NGRAM words, where any two numbers count as equal (a run has at least two words that are no numbers); and all numbers
  of the test question stand around these runs.
- template: the same overlap, but other numbers. The exercise was seen, not this question: listed, and kept as clean.

Clean is what is neither exact nor near. A question has one level, the first that holds.

THRESHOLD was chosen by reading matches. In LLM-Adapters' math_data.json there are 33 near hits at 0.65; 32 are the same
question ("0.3 mile" for "0.3 of a mile", a word left out, a name or the order changed), the lowest at 0.72, and 1 is
another. Of the 6 from 0.5 to 0.57, 2 are the same question; below 0.5, none of the 8 down to 0.32. GSM8K's training
split has no near hit; its largest overlap with equal numbers is 0.42, another question. Of the template hits, none of
59 read at random is the same question. The usual rule, 80% of all runs of 8 words with numbers as they are, finds none
of the 33. Where question and solution share one text, more numbers are near: 36 instead of 33 hits. 100,000 records
take about 15 s.
"""

import dataclasses
import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

from ..benchmarks import Benchmark
from .training_files import TrainingSet

NGRAM = 5
THRESHOLD = 0.65
LEVELS = ("exact", "near", "template")

Words = tuple[str, ...]
# A training record: (number of the training set, number of the record in it), both from 0.
Place = tuple[int, int]

_NUMBER = "0"  # stands for any number, where numbers count as equal
_WORD = re.compile(r"\d+(?:,\d{3})+(?!\d)(?:\.\d+)?|\d+(?:\.\d+)?|[^\W\d_]+")
_CHOICES = re.compile(r"answer choices\s*:", re.IGNORECASE)
_SHORTEST_STEM = 8  # words; a shorter question is compared with its answer choices
_FEWEST_PLAIN_WORDS = 2  # of a run; with fewer it is a bare equation


@dataclasses.dataclass(frozen=True, eq=False)
class Question:
    """A test question as it is compared.

    Attributes:
        benchmark, index: where it is: the benchmark's name, and the number of the record from 0.
        words: its words.
        numbers: how often each number occurs among them.
    """

    benchmark: str
    index: int
    words: Words
    numbers: Counter[str]


@dataclasses.dataclass
class Matches:
    """The test questions that occur in training data, by level; a question is in one level at most.

    Attributes:
        exact: question → the first record that holds it.
        near, template: question → its largest overlap, and the first record with it.
    """

    exact: dict[Question, Place] = dataclasses.field(default_factory=dict)
    near: dict[Question, tuple[float, Place]] = dataclasses.field(default_factory=dict)
    template: dict[Question, tuple[float, Place]] = dataclasses.field(default_factory=dict)


def words(text: str) -> list[str]:
    """`text` as it is compared."""
    text = unicodedata.normalize("NFKC", text).casefold()
    return [word.replace(",", "") for word in _WORD.findall(text)]


def question_of(benchmark: Benchmark, index: int, instruction: str) -> Question:
    """The test question in a record's instruction, in a benchmark of letters without the answer choices."""
    compared = words(instruction)
    if benchmark.kind == "letter":
        stem = words(_CHOICES.split(instruction)[0])
        compared = stem if len(stem) >= _SHORTEST_STEM else compared
    return Question(benchmark.name, index, tuple(compared), Counter(filter(_is_number, compared)))


def find_matches(training: Sequence[TrainingSet], questions: Sequence[Question], threshold: float) -> Matches:
    """Compare every training record with every test question.

    Args:
        threshold: in (0, 1], the smallest overlap of a near-duplicate.
    """
    beginnings: dict[Words, list[Question]] = defaultdict(list)
    runs: dict[Words, list[tuple[Question, int]]] = defaultdict(list)
    for question in questions:
        beginnings[question.words[:NGRAM]].append(question)
        for start, run in enumerate(_runs(_masked(question.words))):
            if sum(word != _NUMBER for word in run) >= _FEWEST_PLAIN_WORDS:
                runs[run].append((question, start))

    matches = Matches()
    for place, texts in _records(training):
        for question in _contained([word for text in texts for word in text], beginnings):
            matches.exact.setdefault(question, place)
        for text in texts:
            for question, overlap, surrounding in _overlaps(text, runs, threshold):
                same_numbers = question.numbers <= Counter(filter(_is_number, surrounding))
                level = matches.near if same_numbers else matches.template
                if question not in level or overlap > level[question][0]:
                    level[question] = (overlap, place)
    for question in matches.exact:
        matches.near.pop(question, None)
        matches.template.pop(question, None)
    for question in matches.near:
        matches.template.pop(question, None)
    return matches


def _is_number(word: str) -> bool:
    return word[0].isdecimal()


def _masked(text: Iterable[str]) -> list[str]:
    return [_NUMBER if _is_number(word) else word for word in text]


def _runs(text: Sequence[str]) -> Iterator[Words]:
    """All runs of NGRAM words."""
    return zip(*(text[start:] for start in range(NGRAM)), strict=False)


def _records(training: Sequence[TrainingSet]) -> Iterator[tuple[Place, list[list[str]]]]:
    """Every training record, with the words of each of its texts."""
    for number, source in enumerate(training):
        for index, record in enumerate(source.records):
            yield (number, index), [words(text) for text in record.texts]


def _contained(text: Sequence[str], beginnings: Mapping[Words, Sequence[Question]]) -> Iterator[Question]:
    """The questions whose words all follow one another in `text`.

    Args:
        beginnings: questions by their first NGRAM words.
    """
    for start, run in enumerate(_runs(text)):
        for question in beginnings.get(run, ()):
            if tuple(text[start : start + len(question.words)]) == question.words:
                yield question


def _overlaps(
    text: Sequence[str], runs: Mapping[Words, Sequence[tuple[Question, int]]], threshold: float
) -> Iterator[tuple[Question, float, Sequence[str]]]:
    """The questions that share at least `threshold` of their words with `text`, in runs.

    Args:
        text: the words of one text of a training record.
        runs: masked run of words → the questions that hold it, and where in them.

    Yields:
        The question, the share of its words that lie in shared runs, and the part of `text` around these runs: from
        the first to the last, each at its first occurrence, with room on both sides for the words not shared. No more
        room than that: a solution after the question has numbers of its own.
    """
    first_at: dict[Words, int] = {}
    for start, run in enumerate(_runs(_masked(text))):
        if run in runs:
            first_at.setdefault(run, start)
    shared: dict[Question, list[tuple[int, int]]] = defaultdict(list)
    for run, in_text in first_at.items():
        for question, in_question in runs[run]:
            shared[question].append((in_question, in_text))
    for question, starts in shared.items():
        length = len(question.words)
        if len(starts) * NGRAM < threshold * length:
            continue
        covered = len({start + step for start, _ in starts for step in range(NGRAM)})
        if covered >= threshold * length:
            room = NGRAM + length - covered
            begin = min(in_text for _, in_text in starts) - room
            end = max(in_text for _, in_text in starts) + NGRAM + room
            yield question, covered / length, text[max(begin, 0) : end]
