r"""What math-verify does not know of how answers are written, decided on their text.

- A percentage is its number: 50\% is 50 and not 0.5. Data sets write either for one and the same answer.
- A number with a base as subscript, 52_8, has that base: it answers neither 52_9 nor 52. Digits with no base do answer
  a reference that has one: such problems say the base, and some data sets leave it out.
- 12:30 is a time and no quotient. 5:12 may be a ratio, so its quotient answers it.
- Words are not products of their letters: CBA is not ABC. Two or three bare small letters, ab, are a product.
- An equation of numbers alone states its right side only where it holds: not 3 + 5 = 7.
"""

import math
import re
from typing import NamedTuple

_PERCENT = re.compile(r"(?<=[\d}.)])(?:\s|~|\\[,;! ])*\\?%(\s*\$?)$")
_SUBSCRIPT = r"\\(?:text|textrm|mathrm|rm|mbox)\s*\{[^{}]*\}|\{(?:[^{}]|\{[^{}]*\})*\}|[0-9]+|[a-z]"
_DIGITS = r"[0-9A-Z]*[0-9](?:[0-9A-Z.]|,(?=[0-9A-Z]{3}(?![0-9A-Z]))|\{,\}|\\[,!]\s?)*"
_BASED = re.compile(
    rf"(?<![\w\\.}}^])(?:\((?P<wrapped>{_DIGITS})\)|(?P<digits>{_DIGITS}))\s*_\s*(?P<base>{_SUBSCRIPT})"
)
_TEXT = re.compile(r"\\(?:text(?:bf|it|rm)?|mathrm|mathbf|mbox|operatorname)(?![A-Za-z])")
_LAYOUT = re.compile(r"\\[,;:! ]|[\s~{}$]")
_TIME = re.compile(r"(?<!\d)(\d{1,2}):([0-5]\d)(?::([0-5]\d))?([ap]m)?(?!\d)")
_ARITHMETIC = re.compile(
    r"(?:[\d\s.+\-−*/×÷^(){}\[\]]|\\(?:[dt]?frac|sqrt|cdot|times|div|left|right)(?![A-Za-z])|\\,)+"
)
_PRODUCT = re.compile(r"[\d)}\]]\s*(?:\\left)?\s*\(|\*\*|\d\s+\d")
_UNIT = re.compile(r"\\(?:text|mbox|mathrm)\s*\{[^{}]*\}$")
_EQUALS = re.compile(r"(?<![<>!:=])=(?!=)")
_NUMERALS = re.findall(
    r"\w+", "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen"
)


class Based(NamedTuple):
    """A number written with its base."""

    digits: str
    base: str


def plain(text: str) -> str:
    r"""Without a final percent sign, and with 4210_{5} for 4210_5 or 4210_\text{five}."""
    return _BASED.sub(_canonical, _PERCENT.sub(r"\1", text.strip()))


def decided(reference: str, answer: str) -> bool | None:
    """Whether two plain texts are equal, where their text says so; None where mathematics has to say it."""
    for decide in (_same_base, _same_time, _same_word):
        verdict = decide(reference, answer)
        if verdict is not None:
            return verdict
    return None


def equated(reference: str, answer: str) -> tuple[str, list[str]]:
    """The right side of an equation of numbers alone, and its other sides; ("", []) if the answer states none.

    Sides that math-verify may misread (`3(4)`), or that may be rounded (`3.33`), are not among them.
    """
    if "=" in reference:
        return "", []
    *left, right = _EQUALS.split(answer)
    right = _UNIT.sub("", right.strip())
    if "." in right or not _is_arithmetic(right):
        return "", []
    return right, [side for side in left if _is_arithmetic(side)]


def _canonical(match: re.Match) -> str:
    based = _based(match)
    return f"{based.digits}_{{{based.base}}}" if based else match[0]


def _based(match: re.Match) -> Based | None:
    base = _reduced(match["base"]).strip("()").removeprefix("base").lower()
    if base in _NUMERALS:
        base = str(_NUMERALS.index(base))
    digits = re.sub(r"[{},!\\\s]", "", match["wrapped"] or match["digits"])
    # A letter is a digit of a base above ten; of a smaller one it is a name, as in 10C_5.
    if not base or (not digits.replace(".", "").isdecimal() and not (base.isdecimal() and int(base) > 10)):
        return None
    return Based(digits.lstrip("0") or "0", base)


def _all_based(text: str) -> list[Based]:
    return [based for match in _BASED.finditer(text) if (based := _based(match))]


def _same_base(reference: str, answer: str) -> bool | None:
    answer = _EQUALS.split(answer)[-1].strip() if "=" not in reference else answer  # 52_8 = 42 states 42
    expected, stated = _all_based(reference), _all_based(answer)
    if not stated:
        if len(expected) == 1 and _BASED.fullmatch(reference) and re.fullmatch(r"[0-9A-Z]+", bare := _reduced(answer)):
            return (bare.lstrip("0") or "0") == expected[0].digits
        return None
    if expected != stated:
        return False
    return True if _BASED.fullmatch(reference) and _BASED.fullmatch(answer) else None


def _same_time(reference: str, answer: str) -> bool | None:
    clock, other = (_reduced(text).replace(".", "").lower() for text in (reference, answer))
    expected = _TIME.fullmatch(clock)
    if not expected or int(expected[1]) > 24:
        return None
    # What stands beside the answer's time may be words, but no other number.
    stated = _TIME.search(other)
    if stated and not re.search(r"\d", other[: stated.start()] + other[stated.end() :]):
        halves = {expected[4], stated[4]} - {None}
        if int(stated[1]) == int(expected[1]) and stated.group(2, 3) == expected.group(2, 3):
            return len(halves) < 2
    hours, minutes = int(expected[1]), int(expected[2])
    may_be_ratio = math.gcd(hours, minutes) == 1 and minutes > 9 and not (expected[3] or expected[4])
    return None if may_be_ratio else False


def _same_word(reference: str, answer: str) -> bool | None:
    words = [_reduced(text).removesuffix(".") for text in (reference, answer)]
    if not all(re.fullmatch(r"[A-Za-z]{2,}", word) for word in words):
        return None
    if any(len(word) > 3 or _TEXT.search(text) for word, text in zip(words, (reference, answer), strict=True)):
        return words[0].casefold() == words[1].casefold()
    return None if all(word.islower() for word in words) else words[0] == words[1]


def _reduced(text: str) -> str:
    r"""Without \text and the like, braces, spaces and dollar signs."""
    return _LAYOUT.sub("", _TEXT.sub("", text))


def _is_arithmetic(side: str) -> bool:
    return bool(re.search(r"\d", side) and _ARITHMETIC.fullmatch(side) and not _PRODUCT.search(side))
