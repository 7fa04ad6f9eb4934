r"""The reward: did the response state the right answer?

An answer has to be stated, as the last \boxed{…}, `Answer: …`, `The answer is …` or `#### …`. Numbers that
merely stand in the text count for nothing, so a response that was cut off before its answer scores 0.
"""

import re

from dvp.data import equality, puzzles
from dvp.errors import DvpError

LONGEST = 400
"""Characters of an answer that are looked at; longer ones are compared as text."""
DEEPEST = 20
"""Nesting of braces and brackets, likewise."""

BLANK = " \t\r*_"
"""Characters of a line that states nothing."""

_BRACES = re.compile(r"\\(?:boxed|fbox)\s{0,3}\{|\\.|[{}]", re.DOTALL)
_MARKERS = re.compile(
    # With a capital, as a final answer, or at the start of a line; "we check our answer:" states none.
    r"(?P<line>(?:\bAnswer|\b[Ff](?i:inal answer)|(?:^|(?<=\n))[ \t*_#>]{0,6}(?i:answer))[ \t*_]{0,6}:)"
    r"|(?P<sentence>\b(?i:answer[ \t]{1,3}is)\b[ \t]{0,3}:?)"
    r"|(?:^|(?<=\n))[ \t]{0,3}(?P<hashes>####)(?!#)"
)
_MATH = r"\$\$(?P<a>[^$]+)\$\$|\$(?P<b>[^$]+)\$|\\\((?P<c>.+?)\\\)|\\\[(?P<d>.+?)\\\]"
_SPAN = re.compile(_MATH)
_NUMBER = r"[-+−]?\\?\$?[-+−]?(?:\d[\d,]*)?\.?\d+(?:/\d+)?\\?%?"
_UNAMBIGUOUS = re.compile(rf"{_NUMBER}|{_MATH}|\\\S+")
_SENTENCE_END = re.compile(r"\.(?=\s)")
_THIN_SPACE = re.compile(r"\\[!,]\s*")
_INTEGER = re.compile(r"([-+]?)([0-9]+|[0-9]{1,3}(?:,[0-9]{3})+)(?:\.0*)?")


def stated_answer(response: str, *, truncated: bool) -> str | None:
    r"""The answer of the response's last statement, or None.

    `truncated`: the response ended because it reached its length limit. A last statement that touches its
    very end is then not closed (`Answer: 1` may have become 123), and there is no answer; a closed \boxed{…}
    counts.
    """
    statements = [(start, "boxed", span) for start, span in _boxes(response)]
    statements += [(m.start(), m.lastgroup, (m.end(), None)) for m in _MARKERS.finditer(response)]
    last_newline = response.rfind("\n")
    for _, kind, (start, end) in sorted(statements, reverse=True, key=lambda statement: statement[0]):
        if kind == "boxed":
            if end is not None:
                return response[start:end].strip()
            if truncated:
                return None
            continue
        answer, closed = _rest_of_line(response, start, kind, last_newline)
        if answer is None:
            continue
        return answer if closed or not truncated else None
    return None


def grade(response: str, reference: str, *, truncated: bool = False) -> bool:
    """Whether the response states an answer equal to the reference, or one that solves it if that is a puzzle's."""
    answer = stated_answer(response, truncated=truncated)
    if answer is None:
        return False
    if puzzles.is_puzzle(reference):
        return puzzles.read(reference).solved_by(answer)
    return equal(reference, answer)


def equal(reference: str, answer: str) -> bool:
    """Whether two answers are mathematically equal."""
    if not answer:
        return False
    expected, stated = _integer(reference), _integer(answer)
    if expected is not None and stated is not None:
        return expected == stated
    if reference.strip() == answer.strip():
        return True
    if _unwieldy(answer) or _unwieldy(reference):
        return False
    return equality.compare(reference, answer) == equality.EQUAL


def check_reference(answer: str) -> None:
    """Raise DvpError unless `answer` can be a reference: a mathematical expression that equals itself, or a puzzle.

    See dvp.data.puzzles.
    """
    if puzzles.is_puzzle(answer):
        puzzles.check(answer)
        return
    if _integer(answer) is not None:
        return
    if not answer.strip():
        raise DvpError("the answer is empty")
    short = answer if len(answer) <= 60 else answer[:60] + "…"
    if _unwieldy(answer):
        raise DvpError(f"the answer {short!r} is too long or too deeply nested to be compared")
    if equality.compare(answer, answer) != equality.EQUAL:
        raise DvpError(f"the answer {short!r} is not a mathematical expression that math-verify can compare")


def unboxed(answer: str) -> str:
    r"""`204` for `\boxed{204}` or `$\boxed{204}$`; other texts as they are."""
    text = _clean(answer)
    boxes = _boxes(text)
    if boxes and boxes[-1][0] == 0 and boxes[-1][1][1] == len(text) - 1:
        return text[slice(*boxes[-1][1])].strip()
    return answer


def _boxes(text: str) -> list[tuple[int, tuple[int, int | None]]]:
    r"""(start, (start, end) of the content) of each \boxed{…}; end is None for one never closed."""
    opened: list[tuple[int, int, bool]] = []
    boxes: list[tuple[int, tuple[int, int | None]]] = []
    for match in _BRACES.finditer(text):
        token = match[0]
        if token == "}":
            if opened:
                start, content, boxed = opened.pop()
                if boxed:
                    boxes.append((start, (content, match.start())))
        elif token[-1] == "{" and token != "\\{":
            opened.append((match.start(), match.end(), token != "{"))
    return boxes + [(start, (content, None)) for start, content, boxed in opened if boxed]


def _rest_of_line(text: str, start: int, kind: str | None, last_newline: int) -> tuple[str | None, bool]:
    """What a marker's line states (or the next one's, if nothing follows `Answer:`); whether it is closed."""
    end = _line_end(text, start, last_newline)
    anything = kind == "line"
    if kind == "line":
        # `**Answer:**` on a line of its own: what it states follows below.
        for _ in range(3):
            if end < 0 or text[start:end].strip(BLANK):
                break
            newline = text.find("\n", end)
            if text[end:newline].strip(BLANK):
                break
            start, end, anything = newline + 1, _line_end(text, newline + 1, last_newline), False
    closed = end >= 0
    value = text[start : end if closed else start + LONGEST + 1]
    if kind != "hashes":
        sentence = _SENTENCE_END.search(value)
        if sentence:
            value, closed = value[: sentence.start()], True
    value = _clean(value)
    if not anything and not _UNAMBIGUOUS.fullmatch(value):
        return None, closed
    if not any(character.isalnum() for character in value):
        return None, closed
    spans = [next(group for group in match.groups() if group) for match in _SPAN.finditer(value)]
    outside = _SPAN.sub("", value)
    if len(spans) == 1 and not re.search(r"\d|\bor\b|\band\b", outside):
        value = spans[0]
    elif not spans:
        value = value.replace("$", "")
    return value.strip(), closed


def _line_end(text: str, start: int, last_newline: int) -> int:
    """Where a line ends, or where more of it would not be looked at; −1 if no newline follows.

    Looks no further than that: a response of 100,000 markers would else be read to its end for each of them.
    """
    if start > last_newline:
        return -1
    end = text.find("\n", start, start + LONGEST + 1)
    return end if end >= 0 else start + LONGEST + 1


def _clean(value: str) -> str:
    """Without Markdown emphasis, quotation marks, a final full stop, and math delimiters around the whole."""
    value = value.strip().strip("*_`\"'“”‘’ \t\r")
    value = value.removesuffix(".").rstrip("*_`\"'“”‘’ \t\r")
    match = _SPAN.fullmatch(value)
    return next(group for group in match.groups() if group).strip() if match else value


def _integer(text: str) -> int | None:
    """The whole number that a text writes: 70, 070, 70.0, 1,234, 1{,}234 or 10,\\!080."""
    if len(text) > LONGEST:
        return None
    text = _THIN_SPACE.sub("", text).replace("{,}", ",").replace("−", "-").replace("\\$", "")
    match = _INTEGER.fullmatch(text.strip().strip("$").strip())
    return int(match[1] + match[2].replace(",", "")) if match else None


def _unwieldy(text: str) -> bool:
    """Whether a text is too long or too deeply nested for a parser."""
    depth = deepest = 0
    for character in text[:LONGEST]:
        depth += (character in "{[(") - (character in "}])")
        deepest = max(deepest, depth)
    return len(text) > LONGEST or deepest > DEEPEST
