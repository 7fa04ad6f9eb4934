"""Compare a stated answer with a reference: by their notation if it decides, else as mathematics."""

import re

from dvp.answers import equality, notation

LONGEST = 400
"""Most characters of an answer that is compared as mathematics; longer ones are compared as text."""
DEEPEST = 20
"""Deepest nesting of braces and brackets of an answer that is compared as mathematics."""

_THIN_SPACE = re.compile(r"\\[!,]\s*")
_INTEGER = re.compile(r"([-+]?)([0-9]+|[1-9][0-9]{0,2}(?:,[0-9]{3})+)(?:\.0*)?")


def equal(reference: str, answer: str) -> bool:
    """Compare two answers as mathematics; `dvp.answers.notation` says how they may be written."""
    if not answer:
        return False
    if reference.strip() == answer.strip():
        return True
    if _unwieldy(answer) or _unwieldy(reference):
        return False
    expected, stated = integer(reference), integer(answer)
    if expected is not None and stated is not None:
        return expected == stated
    reference, answer = notation.plain(reference), notation.plain(answer)
    if expected is not None:
        answer = notation.cardinal(answer)
    (letter, value), (other, stated_value) = notation.choice(reference), notation.choice(answer)
    if letter and other:
        return letter == other and equal(value, stated_value)
    if letter:
        return notation.letter(answer) == letter or equal(value, answer)
    if other:
        named = notation.letter(reference)
        return named == other if named else equal(reference, stated_value)
    verdict = notation.decided(reference, answer)
    if verdict is not None:
        return verdict
    (reference, unit), (answer, other) = notation.quantity(reference), notation.quantity(answer)
    if notation.exchanged(unit, other) or (unit != other and "\\equiv" in reference):
        return False
    expected, stated = integer(reference), integer(answer)
    if expected is not None and stated is not None:
        return expected == stated
    return _compare(reference, answer) == equality.EQUAL


def refusal(reference: str) -> str:
    """Return why a text cannot be a reference; nothing if it is a word or an expression that equals itself."""
    if integer(reference) is not None:
        return ""
    if not reference.strip():
        return "the answer is empty"
    short = reference if len(reference) <= 60 else reference[:60] + "…"
    if _unwieldy(reference):
        return f"the answer {short!r} is too long or too deeply nested to be compared"
    plain = notation.choice(notation.plain(reference))[1]
    value = notation.quantity(plain)[0]
    if notation.decided(plain, plain) is None and _compare(value, value) != equality.EQUAL:
        return f"the answer {short!r} is not a mathematical expression, nor a word"
    return ""


def integer(text: str) -> int | None:
    r"""Return the whole number that a text writes as 70, 070, 70.0, 1,234, 1{,}234 or 10,\!080; None for others."""
    if len(text) > LONGEST:
        return None
    text = _THIN_SPACE.sub("", text).replace("{,}", ",").replace("−", "-").replace("\\$", "")
    match = _INTEGER.fullmatch(text.strip().strip("$").strip())
    return int(match[1] + match[2].replace(",", "")) if match else None


def _compare(reference: str, answer: str) -> str:
    reference, answer = notation.listed(reference), notation.listed(answer)
    if notation.has_words(reference):
        return equality.UNPARSED
    return equality.UNEQUAL if notation.has_words(answer) else equality.compare(reference, answer)


def _unwieldy(text: str) -> bool:
    """Return whether a text is too long or too deeply nested for a parser."""
    depth = deepest = 0
    for character in text[:LONGEST]:
        depth += (character in "{[(") - (character in "}])")
        deepest = max(deepest, depth)
    return len(text) > LONGEST or deepest > DEEPEST
