r"""No changed answer may be right, and every rewritten one must be: of MATH-500's and AMC23's that are no integers.

The changes are made so that none preserves the value; nothing here asks the verifier, or SymPy, whether one does.
"""

import json
import random
import re
from itertools import pairwise

import pytest

from dvp.data.verifier import grade

INTEGER = re.compile(r"-?[\d,]+(\.0+)?")
COMMAND = re.compile(r"\\(?:text|mbox|begin|end)\s*\{[^{}]*\}|\\[A-Za-z]+|\\.")
PAIR = re.compile(r"(?P<open>[(\[])(?P<first>[^()\[\],]+),(?P<second>[^()\[\],]+)(?P<close>[)\]])")
EXCHANGED = {
    r"\sqrt": ("", r"\sqrt[3]"),
    r"\pi": ("e", r"\theta", r"\pi^2"),
    r"\cot": (r"\tan", r"\cos", ""),
    r"\cup": (r"\cap", ","),
    r"\pm": ("+", "-", r"\cdot"),
    r"\infty": ("100", r"\pi"),
    **{r"\in": (r"\notin",), "cents": ("dollars",), "inches": ("feet",), "cm": ("mm",)},
}
SAMPLE = 2000


@pytest.fixture(scope="module")
def references(shared) -> list[str]:
    rows = [json.loads(line) for name in ("math500", "amc23") for line in (shared / f"{name}.jsonl").open()]
    answers = dict.fromkeys(str(row["answer"]) for row in rows)
    found = [answer for answer in answers if not INTEGER.fullmatch(re.sub(r"\\!|\s", "", answer))]
    assert len(found) == 169
    return found


def outside_commands(text: str) -> list[int]:
    """Places of characters that belong to no command and no text in words."""
    inside = {place for match in COMMAND.finditer(text) for place in range(*match.span())}
    return [place for place in range(len(text)) if place not in inside]


def put(text: str, place: int, new: str, length: int = 1) -> str:
    return text[:place] + new + text[place + length :]


def is_math(text: str) -> bool:
    return not re.fullmatch(r"\\text\{.*\}", text)


def is_scalar(text: str) -> bool:
    return is_math(text) and not re.search(r"[,=<>]|\\(in|cup|begin|mbox|text|pm)\b|_", text)


def terms(text: str) -> list[tuple[int, int]]:
    """Start and end of each term that a sign before it adds to others, outside of all brackets."""
    signs, depth = [], 0
    for place, character in enumerate(text):
        depth += (character in "({[") - (character in ")}]")
        if depth == 0 and character in "+-" and text[:place].strip() and text[:place].rstrip()[-1] not in "^=,":
            signs.append(place)
    return list(pairwise([*signs, len(text)]))


def mutations(text: str) -> set[str]:
    """The answer with one change of its value."""
    changed: set[str] = set()
    for place in outside_commands(text):
        character = text[place]
        if character.isdigit():
            changed |= {put(text, place, str((int(character) + step) % 10)) for step in (1, 2, 3, 5, 7)}
            changed |= {put(text, place, character + "1"), put(text, place, "1" + character)}
        elif character in "+-":
            changed.add(put(text, place, "-" if character == "+" else "+"))
        elif character.isalpha() and is_math(text):
            changed |= {put(text, place, other) for other in "zwH" if other != character}
            changed |= {put(text, place, character + "'"), put(text, place, character + "^{3}")}
        elif character == "=":
            changed |= {put(text, place, other) for other in ("<", r"\ge ", r"\ne ")}
        elif character == ".":
            changed |= {put(text, place, ""), text[:place] + text[place + 1 : place + 2] + "." + text[place + 2 :]}
    for match in PAIR.finditer(text):
        swapped = {"(": "[", "[": "(", ")": "]", "]": ")"}
        changed |= {put(text, match.start("open"), swapped[match["open"]])}
        changed |= {put(text, match.start("close"), swapped[match["close"]])}
        changed.add(text.replace(match[0], f"{match['open']}{match['second']},{match['first']}{match['close']}"))
        changed.add(text.replace(match[0], match["first"]))
        changed.add(text.replace(match[0], rf"\{{{match['first']},{match['second']}\}}"))
    for start, end in terms(text) if is_math(text) else []:
        changed.add(text[:start] + text[end:])
    for old, new in ((old, new) for old, others in EXCHANGED.items() for new in others):
        if re.search(re.escape(old) + r"(?![A-Za-z])", text):
            changed.add(re.sub(re.escape(old) + r"(?![A-Za-z])", lambda _, new=new: new + " ", text, count=1))
    rows = re.fullmatch(r"\\begin\{pmatrix\}(.*)\\end\{pmatrix\}", text)
    if rows:
        parts = [part.strip() for part in rows[1].split(r"\\")]
        for other in (parts[::-1], parts[:-1], [*parts, parts[0]], [" & ".join(parts)]):
            changed.add(r"\begin{pmatrix} " + r" \\ ".join(other) + r" \end{pmatrix}")
    if re.fullmatch(r"[^()\[\]{}]*,[^()\[\]{}]*", text) or re.fullmatch(r"\([^()]*,[^()]*,[^()]*\)", text):
        parts = text.strip("()").split(",")
        ends = ("(", ")") if text[0] == "(" else ("", "")
        for other in (parts[:-1], [*parts, parts[0]], *([parts[::-1]] if ends[0] else [])):
            changed.add(",".join(other).join(ends))
    word = re.fullmatch(r"\\text\{\(?(\w+)\)?\}", text)
    if word:
        old = word[1]
        others = {old[::-1], old[1:] or "D", old + "s", old[:-1] + "q", "xy", "no"} - {old}
        changed |= {rf"\text{{{other}}}" for other in others if other.lower() != old.lower()} | others | {"7"}
    else:
        changed |= {rf"{before} {text}" for before in (r"\ne", "<", r"\ge", r"\text{not }", r"\sin")}
        changed |= {
            rf"{text} {after}" for after in (r"\text{ is impossible}", r"\text{ or } 1234", r"\text{ thousand}", "+ z")
        }
        changed |= {rf"{text}, 1234", rf"1234, {text}", rf"\{{x \mid x > {text}\}}", rf"{text} = 1234"}
    if is_scalar(text):
        changed |= {form % text for form in ("-(%s)", "2(%s)", "(%s)+1", "(%s)^{2}", r"\sqrt{%s}", r"\frac{1}{%s}")}
        changed |= {
            form % text for form in (r"%s\cdot z", r"(%s)(1+\frac{1}{2^{70}})", r"%s+\frac{1}{30!}", "%s+0.0000001")
        }
        changed |= {form % text for form in (r"%s\mathbf{i}", r"%s + \mathrm{e}", "z + y = %s", "%s < z")}
    return {other for other in changed if normal(other) != normal(text)}


def normal(text: str) -> str:
    return re.sub(r"\s|(?<=[({,])\+", "", text)


def rewritings(text: str) -> set[str]:
    """The answer in other notation, with its value."""
    changed = {rf"\{style}{{{text}}}" for style in ("mathbf", "boldsymbol", "bm", "underline", "text", "mathrm")}
    changed |= {f"${text}$", rf"\({text}\)", f"{{{text}}}", f"{text}.", f" {text} ", f"~{text}", rf"\,{text}\;"}
    changed |= {rf"\color{{red}}{text}", rf"\displaystyle {text}", rf"\textcolor{{blue}}{{{text}}}"}
    changed.add(rf"\boldsymbol{{${text}$}}.")
    for size in (("", ""), (r"\left", r"\right"), (r"\bigl", r"\bigr"), (r"\Big", r"\Big")):
        bare = text.replace(r"\left", "").replace(r"\right", "")
        changed.add(sized(bare, *size))
    for kind in ("dfrac", "tfrac", "cfrac"):
        changed.add(re.sub(r"\\d?frac", lambda _, kind=kind: rf"\{kind}", text))
    parts = r"\\d?frac\s*(?:(\d)|\{([^{}]*)\})\s*(?:(\d)|\{([^{}]*)\})"
    changed.add(re.sub(parts, lambda m: rf"\frac{{{m[1] or m[2]}}}{{{m[3] or m[4]}}}", text))
    changed.add(text.replace(",", ",\\ ") if r",\!" not in text else text)
    changed.add(re.sub(r"(?<=[\w}])\s*([-+=])\s*(?=[\w\\])", r" \\, \1 \\, ", text) if is_math(text) else text)
    changed.add(re.sub(r"\\sqrt\{?(\d+)\}?", r"√\1", text))
    changed |= {text.replace(r"\pi", "π"), text.replace(r"\infty", "∞"), text.replace("-", "−"), text.replace("-", "–")}
    changed.add(text.translate(str.maketrans("0123456789", "０１２３４５６７８９")))
    changed.add(re.sub(r"\\(text|mbox)", r"\\mathrm", text))
    if text.endswith(r"^\circ"):
        number = text.removesuffix(r"^\circ")
        changed |= {number, number + "°", number + r"\text{ degrees}", number + " degrees", number + r"^{\circ}"}
    elif is_scalar(text) and re.search(r"[\d}]$", text) and "$" not in text:
        units = (r"\text{ cm}", r"\ \mathrm{cm}", r"\text{ units}", r"\text{ square units}", r"\mbox{ m}")
        changed |= {text + unit for unit in units}
    if re.search(r"\di$", text):
        changed |= {text[:-1] + other for other in (r"\mathrm{i}", r"\text{i}", r"\cdot i", r"\,i")}
    if word := re.fullmatch(r"\\text\{\(?(\w+)\)?\}", text):
        changed |= {word[1], rf"\text{{{word[1]}}}", rf"\mathrm{{{word[1]}}}"}
        changed.add(word[1].upper() if len(word[1]) > 1 else f"({word[1]})")
    return changed


def sized(text: str, left: str, right: str) -> str:
    return re.sub(
        r"(?<!\\)[(\[]|\\\{", lambda m: left + m[0], re.sub(r"(?<!\\)[)\]]|\\\}", lambda m: right + m[0], text)
    )


def graded_right(pairs: list[tuple[str, str]]) -> list[tuple[str, str]]:
    return [(reference, answer) for reference, answer in pairs if grade(rf"\boxed{{{answer}}}", reference)]


def test_no_changed_answer_is_right(references):
    pairs = [(reference, other) for reference in references for other in sorted(mutations(reference))]
    assert len(pairs) > 5800
    assert graded_right(random.Random(0).sample(pairs, SAMPLE)) == []


def test_every_rewritten_answer_is_right(references):
    pairs = [(reference, other) for reference in references for other in sorted(rewritings(reference))]
    assert len(pairs) > 4000
    assert sorted(set(pairs) - set(graded_right(pairs))) == []


def test_no_reference_answers_another(references):
    """Two are there in two notations: 1/4 and 2√5."""
    kinds = {reference: reference.replace(" ", "").replace("{1}{4}", "14") for reference in references}
    pairs = [(one, other) for one in references for other in references if kinds[one] != kinds[other]]
    assert graded_right(random.Random(0).sample(pairs, SAMPLE)) == []
