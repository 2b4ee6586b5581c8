"""Extracts the answer, a number or a letter, from generated text, by two rules that are reported side by side.

`published_number` and `published_letter` are LLM-Adapters' rule with its faults, so that scores compare with the
paper's. `strict_number` and `strict_letter` read as a careful person would: text after the answer is cut off; an
explicit answer ("#### 5", "the answer is 5", \\boxed{5}) goes before any other number; without one the last number
counts, read as a number and not as a run of digits. An answer with several numbers ("3 cats and 4 dogs") or an unworked
sum ("10 - 4") is no answer. Every pattern takes time linear in the text.

The metrics: published → `acc`, strict → `acc_strict`.
"""

import math
import re
import unicodedata
from collections.abc import Callable, Iterator, Mapping
from typing import Literal, NamedTuple

TOLERANCE = 0.001

# --- The published rule ---------------------------------------------------------------------------------------------

_PUBLISHED_NUMBER = re.compile(r"-?\d+\.?\d*")
_PUBLISHED_LETTER = re.compile(r"[A-E]")

# --- The strict rule: where an answer stands ------------------------------------------------------------------------

# The model continues with an exercise of its own. A match at the very start is a header of the answer itself.
_NEXT_EXERCISE = re.compile(
    r"#{1,4}[ ]?(?:Instruction|Input|Response|Question|Problem|Exercise|User|Human)\b"
    r"|Below is an instruction|</s>|<\|(?:end|eot|im_)\w{0,12}\|>"
    r"|(?:^[ \t]{0,8}|(?<=[.!?])|(?<=[.!?][ ]))"
    r"(?:Question|Problem|Exercise|Instruction|Input|Human|User|Q)[ ]?\d{0,3}[ ]?:",
    re.MULTILINE,
)

# Start of an explicit answer; not "To answer this: …" and "Answer choices: …".
_ANSWER = re.compile(
    r"""\#{4}[ ]?(?=\W{0,3}(?:\d|[A-E]\b))
      | \\boxed[ ]?\{
      | (?<!to[ ])\b(?:ans|answers?(?:[ ](?:choice|option|letter))?|(?:correct|right|best)[ ](?:option|choice|one))\b
        (?:[ ]to[ ][^.\n:=?!\d]{1,60}? | ,?[ ](?:therefore|then|thus|here|now|finally),?)?[ \t"'_]{0,4}
        (?: (?:is|are|was|equals|(?:will|would|must|should|can[ ]only)[ ]be)\b[ ]?:? | [:=] | (?=\n|cannot\b) )""",
    re.IGNORECASE | re.VERBOSE,
)
_ANSWER_SPAN = 300  # characters looked at after the words that announce an answer
_MOST_ANSWERS = 50  # announcements looked at, from the end
_SENTENCE_END = re.compile(r"\n|(?<=[\d)%}\]])[.!?](?=\s|$)|[.!?](?=\s*(?:[A-Z]|$))")
_NEGATION = re.compile(r"\W{0,3}not\b(?! (?:enough|possible))", re.IGNORECASE)
_WORDS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"]
_WORD_ANSWER = re.compile(rf"\W{{0,3}}({'|'.join(_WORDS)})\b(?!-| (?:of|hundred|thousand|[mb]illion)\b)", re.IGNORECASE)
_NO_ANSWER = re.compile(
    r"\b(?:unknown|un(?:determined|defined)|indeterminate|impossible|infinite|cannot|can't|not (?:enough|possible))\b",
    re.IGNORECASE,
)

# --- The strict rule: what a number is ------------------------------------------------------------------------------


def _plain(match: re.Match[str]) -> str:
    return unicodedata.normalize("NFKC", match[0])


# (pattern, replacement), in this order: LaTeX, markdown and typography become plain ASCII arithmetic.
_REWRITES: list[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]]] = [
    (re.compile(r"(?<=\d)[ ]?(?=\\[dt]?frac|[¼-¾⅐-⅞])"), " "),
    (re.compile(r"\\[dt]?frac[ ]?\{([^{}]*)\}[ ]?\{([^{}]*)\}"), r"\1/\2"),
    (re.compile(r"[¼-¾⅐-⅞]"), _plain),
    (re.compile(r"(?<=\d)[⁰¹²³⁴-⁹⁻]+"), lambda match: "^" + _plain(match)),
    (re.compile(r"\\(?:text|textbf|mathrm|mathbf|left|right)(?![A-Za-z])|\\(?=[$%])|\\[,!;: ]"), ""),
    (re.compile(r"\\(?:times|cdot)(?![A-Za-z])"), "×"),
    (re.compile(r"\\approx(?![A-Za-z])"), "≈"),
    (re.compile(r"\{,\}"), ","),
    (re.compile(r"(?<!\d)\*\*|\*\*(?!\d)|`"), ""),
    (re.compile(r"[−–]"), "-"),
    (re.compile(r"—"), " - "),
    (re.compile(r"⁄"), "/"),
    (re.compile(r"(?<=\d)[ ]and[ ]a[ ]half\b"), " 1/2"),
    (re.compile(r"\b(?:USD|EUR|GBP|CAD|AUD|INR|Rs|US)\.?[ ]?(?=[$\d.-])"), "$"),
    (re.compile(r"\bnegative[ ](?=[$\d])", re.IGNORECASE), "-"),
]
_ENUMERATOR = re.compile(r"^[ \t]{0,8}(?:[-*•]|(?:step[ ])?\d{1,2}[.):])[ \t]{1,4}(?=\S)", re.IGNORECASE | re.MULTILINE)

# 1,234 and 1,00,000 and 12 000 are one number; 1, 2, 3 and 1,2,3 are three.
_DECIMAL = (
    r"(?>(?:\d{1,3}(?:,\d{3}){1,9}(?!\d)|\d{1,2}(?:,\d{2}){1,5},\d{3}(?!\d)"
    r"|\d{1,3}(?:[ \u00a0\u2009\u202f]\d{3}){1,5}(?![\w-])|\d+)(?:\.\d+)?|\.\d+)"
)
# Not inside a word (m2, x_1), an exponent (km^2, s^{-1}) or another number.
_START = r"(?<![\w^])(?<!\^\{)(?<!\^-)(?<!\^\{-)(?<!\d\.)"
_NUMBER = re.compile(
    rf"""(?P<minus>-[ ]?)?(?:[$€£¥₹][ ]?)?(?P<inner_minus>-)?{_START}(?:
        (?P<whole>\d{{1,9}})[ ](?:and[ ])?(?P<top>\d{{1,9}})[ ]?/[ ]?(?P<bottom>\d{{1,9}})(?!\d|/\d)
      | (?P<hour>\d{{1,2}}):(?P<minute>[0-5]\d)(?![\d:])
      | (?P<numerator>{_DECIMAL})[ ]?/[ ]?[$€£]?(?P<denominator>{_DECIMAL})(?!/\d)
      | (?P<decimal>{_DECIMAL})(?:
            [eE](?P<exponent>[-+]?\d{{1,3}})(?!\w)
          | [ ]?[*x×·][ ]?10(?:\^|\*\*)\{{?(?P<ten_to>-?\d{{1,3}})\}}?
          | (?:\^|\*\*)\{{?(?P<power>-?\d{{1,3}})\}}?
          | [ ](?P<scale>hundred|thousand|million|billion|trillion)\b
        )?
    )""",
    re.VERBOSE | re.ASCII,
)
_SCALES = {"hundred": 1e2, "thousand": 1e3, "million": 1e6, "billion": 1e9, "trillion": 1e12}
_SPACED_SIGN = re.compile(r"(?:[=(≈]|\b(?:is|are|was|be|equals))[ ]?$")  # before "- 4": a sign, not a bullet
_ORDINAL_OR_FACTOR = re.compile(r"(?:st|nd|rd|th|[xyD])\b")  # after the digits of 3rd, 5x, 3D

_ASIDE = re.compile(r"\([^()]*\)")
_EQUALS = re.compile(r"(?=[=≈])|(?=\bequals\b)")
_REASON = re.compile(r"[,;]?\s(?:because|since|as|so|which|where|but|if)\b")
_CLAUSE_END = re.compile(r"(?<=[.!?])\s|\n|[;,]\s|\b(?:so|then)\b|\.(?=[A-Z])")
# Between the first number and the second: these make the two a list, a range, a ratio or an unworked sum.
_JOINT = re.compile(r".*\b(?:and|or)\s(?:a |the |only |about )?|\s*(?:[-+*/×÷·x:,]|to)\s*\(?", re.DOTALL)
_REMARKS = re.compile(r"[^\w\n]{0,3}\n\s{0,4}[A-Za-z]")  # after a number alone on the first line
_UNKNOWN = re.compile(r"\s?[-+*×÷]\s?[a-z]\b")  # 18 + x
_TOTAL = re.compile(r"[^\d,.]{0,30}\b(?:in total|in all|altogether|total|combined)\b")

# --- The strict rule: what a letter is ------------------------------------------------------------------------------

# Not the article in "a man", a name's initial or a term of c + d.
_LETTER = r"([B-Eb-e]|[Aa](?!\s(?!(?:because|since|as|which|or)\b)[A-Za-z]))(?!\w|['’]\w|-\w|\s?[+*^])"
# (b), [b], B), option b, "B is correct".
_CLEAR_LETTER = re.compile(
    rf"""(?<![\w)])[(\[{{][ ]?([A-Ea-e])[ ]?[)\]}}]
      | \b(?:[Oo]ption|[Cc]hoice|[Aa]lternative|[Aa]nswer)[ ]?[:(\[]?[ ]?{_LETTER}
      | (?<![\w'’.(\[{{])([A-Ea-e])\)
      | (?<![\w'’.])([A-E])(?=[ ]is[ ](?:the[ ])?(?:correct|right|answer))""",
    re.VERBOSE,
)
# Just after the words that announce an answer, or alone in its sentence, a bare letter counts too.
_BARE_LETTER = re.compile(rf"[\s\"'“$({{\[:]{{0,4}}(?:(?:therefore|thus|then|clearly|letter)\s)?{_LETTER}")
_LONE_LETTER = re.compile(r"[\s,:\"'“$]{0,3}([A-Ea-e])(?:[\s.!\"'”$]{0,4}|[.)]\s.{0,40})")
_CONCLUSION = re.compile(rf"{_SENTENCE_END.pattern}|\b(?:[Ss]o|[Tt]herefore|[Tt]hus|[Hh]ence|it's|[Ii]t is)\b")
_OPTION_LINE = re.compile(r"^[ \t]{0,8}[(\[]?([A-Ea-e])[).:\]][ \t]*\S.*$", re.MULTILINE)
_OTHER_LETTER = re.compile(r"[)\]}]?\s?(?:or|and|/|,)\s?(?:option\s)?[(\[]?[A-Ea-e](?!\w)", re.IGNORECASE)


# --- Public functions -----------------------------------------------------------------------------------------------


def published_number(text: str) -> float | None:
    r"""The number by LLM-Adapters' rule: commas dropped, the last match of `-?\d+\.?\d*`; None if there is none."""
    numbers = _PUBLISHED_NUMBER.findall(text.replace(",", ""))
    return float(numbers[-1]) if numbers else None


def published_letter(text: str) -> str | None:
    """The letter by LLM-Adapters' rule: the first A to E anywhere, even the A of "Answer"; None if there is none."""
    match = _PUBLISHED_LETTER.search(text)
    return match[0] if match else None


def strict_number(text: str) -> float | None:
    """The number that `text` states as its answer, by the strict rule; None if it states none, or several.

    The last announcement that states a number counts. Without one it is a number alone on the first line, else the
    right-hand side of an equation in the last clause that has a number, else that clause's last number. Percent,
    currency and units are dropped ("25%" is 25, "5 m^2" is 5), fractions and powers of ten are worked out.
    """
    text = _prepare(text)
    for answer, start in _explicit_answers(text):
        stated = _stated_numbers(answer)
        if stated or _NO_ANSWER.search(answer):
            return stated[0] if len(stated) == 1 else None
        word = _WORD_ANSWER.match(answer, start)
        if word:
            return float(_WORDS.index(word[1].lower()))
    opening = _NUMBER.match(text)
    if opening and _REMARKS.match(text, opening.end()):
        return next((number.value for number in _numbers(opening[0])), None)
    running = _ENUMERATOR.sub("", text)
    # First without asides, then with them, then with list numbers and weak numbers (3rd, 5x).
    for source, firm in ((_ASIDE.sub(" ", running), True), (running, True), (text, False)):
        for clause in reversed(_CLAUSE_END.split(source)):
            numbers = [number.value for number in _numbers(clause) if number.firm or not firm]
            if numbers and _EQUALS.search(clause):
                stated = _stated_numbers(clause)
                return stated[0] if len(stated) == 1 else None
            if numbers:
                return numbers[-1]
    return None


def strict_letter(text: str, choices: Mapping[str, str] | None = None) -> str | None:
    """The option, "A" to "E", that `text` names, by the strict rule; None if it names none, or several.

    The last announcement that names a letter counts, in upper or lower case; without one a letter in brackets, after
    "option" or alone in its sentence does, the last such sentence.

    Args:
        text: what the model wrote.
        choices: letter → the option's text. Letters outside it do not count, and a text that names no letter but
            whose number is that of exactly one option names that option.
    """
    text = _prepare(text)
    letter = _named_letter(text)
    if choices is None:
        return letter
    if letter is None:
        number = strict_number(text)
        same = [key for key, option in choices.items() if is_correct_number(number, strict_number(option))]
        return same[0] if len(same) == 1 else None
    return letter if letter in choices else None


def is_correct_number(prediction: float | None, gold: float | None) -> bool:
    """Whether |gold − prediction| ≤ 0.001, the published tolerance; None, NaN and infinities are wrong."""
    if prediction is None or gold is None or not (math.isfinite(prediction) and math.isfinite(gold)):
        return False
    return abs(gold - prediction) <= TOLERANCE


def answers(
    text: str, kind: Literal["number", "letter"], choices: Mapping[str, str] | None = None
) -> dict[str, float | str | None]:
    """The answers that the two rules extract from a text: {"published": …, "strict": …}.

    Raises:
        ValueError: an unknown kind.
    """
    if kind == "number":
        return {"published": published_number(text), "strict": strict_number(text)}
    if kind == "letter":
        return {"published": published_letter(text), "strict": strict_letter(text, choices)}
    raise ValueError(f"kind={kind!r} is neither 'number' nor 'letter'.")


def is_correct(answer: float | str | None, gold: str, kind: Literal["number", "letter"]) -> bool:
    """Whether an extracted answer is the record's.

    Raises:
        ValueError: kind is number and gold is no number.
    """
    if kind == "letter":
        return answer == gold.strip()
    return is_correct_number(answer if isinstance(answer, float) else None, float(gold))


def score(
    text: str, gold: str, kind: Literal["number", "letter"], choices: Mapping[str, str] | None = None
) -> dict[str, int]:
    """The metrics of a text: {"acc": 0 or 1, "acc_strict": 0 or 1}.

    Args:
        text: what the model wrote.
        gold: the record's answer, a decimal number or a letter.
        kind: which of the two.
        choices: passed on to `strict_letter`.

    Raises:
        ValueError: an unknown kind, or kind is number and gold is no number.
    """
    extracted = answers(text, kind, choices)
    return {
        "acc": int(is_correct(extracted["published"], gold, kind)),
        "acc_strict": int(is_correct(extracted["strict"], gold, kind)),
    }


# --- Parsing --------------------------------------------------------------------------------------------------------


class _Number(NamedTuple):
    """A number in a text, at text[start:end]."""

    value: float
    firm: bool  # False for 3rd, 5x, GPT-4: taken only if the text has no other number
    start: int
    end: int


def _prepare(text: str) -> str:
    """The text up to the next exercise, in plain characters."""
    text = text.strip()
    cut = next((match.start() for match in _NEXT_EXERCISE.finditer(text) if match.start() > 0), len(text))
    text = text[:cut].strip()
    for pattern, replacement in _REWRITES:
        text = pattern.sub(replacement, text)
    return text


def _explicit_answers(text: str) -> Iterator[tuple[str, int]]:
    """The sentences that announce an answer, last first: (sentence from the announcement on, end of the announcement).

    "The answer is not …" is left out.
    """
    for match in reversed(list(_ANSWER.finditer(text))[-_MOST_ANSWERS:]):
        rest = text[match.end() : match.end() + _ANSWER_SPAN].lstrip()
        end = _SENTENCE_END.search(rest)
        if not _NEGATION.match(rest):
            yield f"{match[0]} {rest[: end.start()] if end else rest}", len(match[0]) + 1


def _numbers(text: str) -> list[_Number]:
    """The numbers in `text`, in order, without infinite ones and divisions by zero."""
    numbers = []
    for match in _NUMBER.finditer(text):
        value, start = _magnitude(match), match.start()
        before = text[max(0, start - 8) : start]
        glued = before[-1:].isalpha()
        minus = match["minus"] or ""
        negative = bool(match["inner_minus"])
        if minus == "- ":
            negative |= bool(_SPACED_SIGN.search(before))
        elif minus:  # a minus between two terms subtracts: 10-4, 10 -4, (3) -1
            negative |= not (glued or re.search(r"[\d)\]}%] ?$", before))
        if math.isfinite(value):
            weak = (glued and minus == "-") or _ORDINAL_OR_FACTOR.match(text, match.end())
            start += 0 if negative else len(minus)
            numbers.append(_Number(-value if negative else value, not weak, start, match.end()))
    return numbers


def _magnitude(match: re.Match[str]) -> float:
    """The unsigned value of a match of `_NUMBER`; NaN if it has none."""

    def read(group: str, exponent: str = "") -> float:
        return float(re.sub(r"[,\s]", "", match[group]) + exponent)

    try:
        if match["whole"]:
            part = read("top") / read("bottom")
            return read("whole") + part if part < 1 else part
        if match["hour"]:
            return read("hour") + read("minute") / 60
        if match["numerator"]:
            return read("numerator") / read("denominator")
        if match["power"]:
            return read("decimal") ** read("power")
        return read("decimal", f"e{match['exponent'] or match['ten_to'] or 0}") * _SCALES.get(match["scale"], 1.0)
    except (ZeroDivisionError, OverflowError):
        return math.nan


def _stated_numbers(answer: str) -> list[float]:
    """The numbers that a sentence states as its answer: none, one, or those of a list, a range or an unworked sum."""
    claim = _REASON.split(answer, maxsplit=1)[0]
    for part in (_EQUALS.split(_ASIDE.sub(" ", claim))[-1], _EQUALS.split(claim)[-1], answer):
        numbers = _numbers(part)
        if numbers:
            break
    else:
        return []
    values = [numbers[0].value]
    if _UNKNOWN.match(part, numbers[0].end):
        values.append(math.nan)
    if len(numbers) > 1 and _JOINT.fullmatch(part, numbers[0].end, numbers[1].start):
        totals = [number.value for number in numbers if _TOTAL.match(part, number.end)]
        values = totals if len(totals) == 1 else [number.value for number in numbers]
    return values


def _named_letter(text: str) -> str | None:
    """The option that a prepared text names, in upper case; None if it names none, or several."""
    for answer, start in _explicit_answers(text):
        match = _BARE_LETTER.match(answer, start) or _CLEAR_LETTER.search(answer)
        if match:
            return None if _OTHER_LETTER.match(answer, match.end()) else _letter(match)
    if len({match[1].upper() for match in _OPTION_LINE.finditer(text)}) > 1:
        text = _OPTION_LINE.sub("", text)  # the model repeats the options
    for sentence in reversed(_CONCLUSION.split(text)):
        lone = _LONE_LETTER.fullmatch(sentence.strip())
        letters = {_letter(match) for match in ([lone] if lone else _CLEAR_LETTER.finditer(sentence))}
        if letters:
            return letters.pop() if len(letters) == 1 else None
    return None


def _letter(match: re.Match[str]) -> str:
    return next(group for group in match.groups() if group).upper()
