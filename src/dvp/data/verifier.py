r"""Grade a response: does it state the right answer?

An answer has to be stated, as the last \boxed{…}, `Answer: …`, `The answer is …` or `#### …`. Numbers that
merely stand in the text count for nothing, so a response that was cut off before its answer scores 0.
If the last box is inside a larger formula, 2\boxed{35}, or is denied, the response states nothing, whatever came
before. An answer that the next sentence takes back does not count: "\boxed{18}. Wait, that is wrong." Boxes with
nothing but `and`, `or` or a comma between them state a list.
`Answer:` states whatever follows on its line. Below it, and after the other two, prose may follow that states nothing
("between 69 and 70", "#### Step 2"): there a number, a formula or one span of math counts, alone.
"""

import re

from dvp.answers import notation
from dvp.answers.comparison import LONGEST, equal, refusal
from dvp.data import puzzles
from dvp.errors import DvpError

LONGEST_JOINT = 60
"""Most characters between two boxes of one list."""

BLANK = " \t\r*_"
"""Characters that state nothing: a line of them is blank."""

_BRACES = re.compile(r"\\(?:boxed|fbox)\s{0,3}\{|\\.|[{}]", re.DOTALL)
_BARE_BOX = re.compile(r"\\(?:boxed|fbox)\s{1,3}([-+]?\d[\d.,/]{0,40}|[A-Za-z](?![A-Za-z]))")
_DISPLAY = re.compile(r"[ \t\r\n*_]{0,12}(\\\[|\$\$)")
_MARKERS = re.compile(
    # With a capital, as a final answer, or at the start of a line; "we check our answer:" states none.
    r"(?P<line>(?:\bAnswer|\b[Ff](?i:inal answer)|(?:^|(?<=\n))[ \t*_#>]{0,6}(?i:answer))[ \t*_]{0,6}[:：=]"
    r"|(?:^|(?<=\n))[#*]{1,6} ?(?i:final |)(?i:answer)\**(?=\n))"
    r"|(?P<sentence>\b(?i:answer[ \t]{1,3}is)\b[ \t]{0,3}[:：]?)"
    r"|(?:^|(?<=\n))[ \t]{0,3}(?P<hashes>####)(?!#)"
)
_MATH = (
    r"(?<!\\)\$\$(?P<a>(?:\\.|[^$\\])+)\$\$|(?<!\\)\$(?P<b>(?:\\.|[^$\\])+)\$"
    r"|\\\((?P<c>(?:\\[^()]|[^\\])+)\\\)|\\\[(?P<d>(?:\\[^\[\]]|[^\\])+)\\\]"
)
_SPAN = re.compile(_MATH)
_NUMBER = r"[-+−]?\\?\$?[-+−]?(?:\d[\d,]*)?\.?\d+(?:/\d+)?\\?%?"
_UNAMBIGUOUS = re.compile(rf"{_NUMBER}|{_MATH}|\\\S+")
_COMMAND = re.compile(r"\\(?:text\w*|mbox|mathrm|mathbf|operatorname|begin|end)\s*\{[^{}]*\}|\\[A-Za-z]+")
_NO_FORMULA = re.compile(
    # A word, a remark after a number, a list's item or heading, and what a sentence goes on after
    r"[^\W\d_]{2}|\d\s+\(|^[-+*]\s|^\(?\w{1,3}\)$|^\d+(?:\.\d+){2,}$|\?|^[=<>,;:/]|[-+*/=<>^_,;:!&|]$"
)
_NUMERIC = re.compile(r"[-+]?(?:\\?\$|\\\()?[-+.\\]?\d|\$|\\\(")
_WORD = re.compile(r"\(?[A-Z]\)?|[A-Z][a-z]+|yes|no|true|false|even|odd")
"""One word that is an answer after `the answer is`; others may go on with the sentence: `the answer is surprising`."""
_PROSE = re.compile(
    r"(?P<before>(?:[A-Za-z][a-z'’]+[ ,:-]+)(?:[A-Za-z'’]+[ ,:-]+)*(?:= *)?)(?P<number>[-+]?\\?\$?[-+]?\d.*)"
)
_SIGN_OF_FORMULA = re.compile(r"[\d\\]|\w\s*[-+=<>^*/,]\s*\w")
_GROUP = re.compile(r"\\.|[{}]")
_STYLED = re.compile(
    r"(?:\\(?:text\w*|math(?:bf|rm|it)|bm|boldsymbol|underline|boxed|fbox|(?:text)?color\s*\{\w*\})\s*"
    r"|(?<![\w)}\]^_\s])\s*)\{$|(?<![\w)}\]^_\s])\s*\($"
)
_LEADS = re.compile(
    r"\\(?:approx|equiv|in|[lL]?ong[rR]ightarrow|[rR]ightarrow|implies|iff|therefore|to|q?quad|displaystyle|[lL]arge|LARGE"
    r"|[hH]uge|bf|noindent|centering|newline|item)$"
)
"""Commands that may stand before a box; after any other one the box is part of a formula."""
_PART_AFTER = re.compile(
    r"[.,]?\d|\(|[A-Za-z](?![A-Za-z])|\s*(?!\^\s*\{?\s*\\circ)[-+/<>^_]\s*(?:[\d\\({]|[A-Za-z](?![A-Za-z]))|\s*\*\s*\d"
    r"|\s*\\(?:cdot|times|div|pm|mp|[dt]?frac|sqrt|pi|over|choose|b?mod|neq?|[lg]eq?|[lg]t|cup|cap|ast)(?![A-Za-z])"
)
_NOT = r"(?:\b(?:[Nn]ot|never|cannot)\b|n['’]t\b)"
_NOT_BEFORE = re.compile(
    rf"(?:{_NOT}(?: be| equal to| equal)?|\b(?:twice|half of|minus|plus|times))[\s$\\(\[{{}}*:=]*$"
)
_NOT_AFTER = re.compile(
    rf"[\s$\\)\]}}*,:]*(?:\?|wrong\b|(?:which|it|this|that)?\s*(?:(?:is|was)\s*{_NOT}|cannot|can['’]t"
    r"|(?:is|was) (?:wrong|incorrect|false|impossible|rejected|extraneous)))"
)
_TAKEN_BACK = re.compile(rf"(?:(?!\.\s)[^\n]){{0,60}}?{_NOT}(?:(?!\.\s)[^\n])*?[\d$\\]")
_JOINT = re.compile(
    r"\}?(?:[\s$*]|\\[()\[\]])*(?:[,;]?\s*(?:(?:\\text\s*\{\s*)?,?\s*\b(?P<word>and|or)\b\s*\}?|(?<=[,;])))"
    r"(?:[\s$*]|\\[()\[\]])*(?:[A-Za-z](?:_\{?\w+\}?)?\s*=[\s$]*)?"
)
"""Text between two boxes of one list: $\boxed{1}$ and $x=\boxed{2}$."""
_NAMED = re.compile(r"(?<![A-Za-z\\])([A-Za-z](?:_\{?\w+\}?)?)\s*=[\s$]*$")
_INTERJECTION = re.compile(
    r"(?i:wait|hmm+|hold on|hang on|no|oops|oh|sorry|actually|but|however|let me|let us|let's)\b[\s,.!—…-]*"
)
_SUBJECT = r"\b(?:that|this|it|(?:my|the|that|this)(?: \w+)? (?:answer|result|value|calculation|reasoning|solution))"
_RETRACTED = re.compile(
    rf"{_SUBJECT}(?:['’]s| is| was| seems| must be)(?: \w+ly)? (?:wrong|incorrect|mistaken|not (?:right|correct))\b"
    rf"|{_SUBJECT} (?:(?:is|was)n['’]t|cannot be|can['’]t be) (?:right|correct)\b"
    r"|\b(?:I|we)(?: have|['’]ve)?(?: just)? (?:made|make) (?:a|an|some)(?: \w+)? (?:mistake|error)s?\b"
    r"|\b(?:scratch|ignore|disregard) (?:that|this)\b|\bnever ?mind\b|\bI was wrong\b|\bI take (?:that|it) back\b",
    re.IGNORECASE,
)
_SENTENCE = re.compile(r"[\s$\\)\]}*_.,!:;—-]*(?P<words>[^\n]*?)(?:[.!?…](?=\s|$)|\n|$)")
_EMPHASIS = re.compile(r"(?<![^\s(:])(\*{1,3}|_{1,2})(?=[^\s*_])([^*\n]*[^\s*])\1(?=[\s.,;:!?)]|$)")
_EMPHASIS_END = re.compile(r"(?<=[\w$)}%])\*\*(?=[\s.,;:!?)]|$)")
_SENTENCE_END = re.compile(r"\.(?=\s)|,?\s(?:since|because)\s")
_GIVEN = "provided|available|found|specified|stated|supplied|included|recorded|required|applicable"
_PLACEHOLDER = re.compile(
    r"(?:the |an? )?(?:proof|proved|proven|q\.?e\.?d)"
    r"(?:(?: is)? (?:omitted|above|below|problem|question|needed|required|only|complete\w*|in the .*|left .*))?"
    r"|(?:hence|to|to be) (?:prove|proved|proven|determined|added|shown)"
    r"|(?:the )?(?:statement|claim|theorem|inequality|identity|result) (?:is|has been|was) (?:proved|proven)"
    r"|(?:please )?(?:see|refer to)(?: the)?(?: \w+)? (?:above|below|solution|proof|answer|explanation|analysis|details"
    r"|text|figure|image|picture|diagram|graph|table|attach\w*)(?: \w+){0,3}|see (?:above|below)"
    rf"|n[./]a|(?-i:NA)|nan|null|tb[ad]|todo"
    rf"|(?:the )?(?:final )?(?:answer |solution )?(?:is )?not ?(?:{_GIVEN})(?: .*)?"
    rf"|(?:no|missing|unknown)(?: final)? answer(?: is)?(?: (?:{_GIVEN}|given))?"
    rf"|(?:no solution|none|no proof) (?:{_GIVEN}|given)"
    r"|(?:the )?(?:answer|solution)s?(?: is| are)? (?:missing|omitted|unavailable|not given"
    r"|(?:given )?in (?:the )?(?:text|solution|proof|explanation|figure|comments?|book))"
    r"|answers? (?:may |will |can )?var(?:y|ies)|unavailable|missing|omitted|unanswered|placeholder"
    r"|(?:答案|证明|解答)?(?:见解析|见证明|见答案|略)|无答案",
    re.IGNORECASE,
)
"""References that say in words that there is no answer; `None`, `no solution`, `unknown` may be answers."""


def stated_answer(response: str, *, truncated: bool, thinking: str | None = None) -> str | None:
    r"""Return the answer of the response's last statement, or None.

    Args:
        truncated: the response ended because it reached its length limit. A last statement that touches its very end is
            then not closed (`Answer: 1` may have become 123), and there is no answer; a closed \boxed{…} counts.
        thinking: None if all of the response counts. If only what follows the last </think> counts, the text before the
            response in its turn: a <think> that the prompt ends with, or "" (dvp.data.prompts). An unclosed <think>
            states nothing.
    """
    if thinking is not None:
        _, closed, rest = (thinking + response).rpartition("</think>")
        if not closed and "<think>" in rest:
            return None
        response = rest
    found = [(start, "boxed", span) for start, span in _boxes(response)]
    found += [(m.start(), "boxed", m.span(1)) for m in _BARE_BOX.finditer(response)]
    found += [(m.start(), m.lastgroup, (m.end(), None)) for m in _MARKERS.finditer(response)]
    statements, boxed_until = [], 0
    for statement in sorted(found, key=lambda statement: statement[0]):
        begin, kind, (_, end) = statement
        if kind == "boxed":
            boxed_until = max(boxed_until, end or 0)
        elif begin < boxed_until:
            continue  # \boxed{\text{Answer: }42}: the box states it.
        statements.append(statement)
    last_newline = response.rfind("\n")
    for place in range(len(statements) - 1, -1, -1):
        _, kind, (start, end) = statements[place]
        if kind == "boxed":
            if end is not None and not (truncated and end == len(response)):
                answer = _boxed(response, statements[: place + 1])
                return None if answer is None or _retracted(response, end, answer) else answer
            if truncated:
                return None
            continue
        answer, closed, end = _rest_of_line(response, start, kind, last_newline)
        if answer is None:
            if _TAKEN_BACK.match(response, start, start + 100):
                return None
            continue
        return answer if (closed or not truncated) and not _retracted(response, end, answer) else None
    return None


def grade(response: str, reference: str, *, truncated: bool = False, thinking: str | None = None) -> bool:
    """Return whether the response states an answer that equals the reference, or that solves it if it is a puzzle."""
    answer = stated_answer(response, truncated=truncated, thinking=thinking)
    if answer is None:
        return False
    if puzzles.is_puzzle(reference):
        return puzzles.read(reference).solved_by(answer)
    return equal(reference, answer)


def check_reference(answer: str) -> None:
    r"""Raise DvpError unless `answer` can be a reference: a word, an expression that equals itself, or a puzzle.

    A percentage, 50\% or 10%, is one; so are `None` and `no solution`, but not `proof` or `N/A`. See dvp.data.puzzles.
    """
    if puzzles.is_puzzle(answer):
        puzzles.check(answer)
    elif _PLACEHOLDER.fullmatch(answer.strip("*_`'\" ()[]<>{}.!").removeprefix("\\text{")):
        raise DvpError(f"the answer {answer[:60]!r} is a placeholder, which says that no answer is given")
    elif problem := refusal(answer):
        raise DvpError(problem)


def unboxed(answer: str) -> str:
    r"""Return `204` for `\boxed{204}` or `$\boxed{204}$`; other texts as they are."""
    text = _clean(answer)
    boxes = _boxes(text)
    if boxes and boxes[-1][0] == 0 and boxes[-1][1][1] == len(text) - 1:
        return text[slice(*boxes[-1][1])].strip()
    return answer


def _boxes(text: str) -> list[tuple[int, tuple[int, int | None]]]:
    r"""Return (start, (start, end) of the content) of each \boxed{…}; end is None for one never closed."""
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


def _boxed(text: str, statements: list[tuple]) -> str | None:
    """Return the answer of the last of these boxes, with those before it if they form a list; None if one is void.

    A box is void if `_is_part` says so.
    """
    contents, names, joints = [], [], []
    last, after = statements[-1][0], len(text)
    for begin, kind, (start, end) in reversed(statements):
        if contents:
            near = kind == "boxed" and end is not None and last - LONGEST < end < after < end + LONGEST_JOINT
            joint = near and _JOINT.fullmatch(text, end, after)
            if not joint:
                break
            joints.insert(0, rf"\text{{ {joint['word']} }}" if joint["word"] else ", ")
        if _is_part(text, begin, end):
            return None
        contents.insert(0, _without_marker(text[start:end].strip()))
        named = _NAMED.search(text, max(0, begin - 20), begin)
        names.insert(0, named[1] + "=" if named else "")
        after = begin
    if len(contents) == 1 or all(equal(content, contents[-1]) for content in contents[:-1]):
        return contents[-1]
    parts = [name + content if all(names) else content for name, content in zip(names, contents, strict=True)]
    return "".join(part + joint for part, joint in zip(parts, [*joints, ""], strict=True))


def _retracted(text: str, place: int, answer: str) -> bool:
    """Return whether the sentence after an answer takes it back, or one of the next few if each begins like `Wait,`."""
    # `No. This is wrong` may be about the question.
    is_word = bool(re.fullmatch(r"(?:\\text\w*\{)?[^\W\d_]{2}[^\d\\=^]*", answer))
    for _ in range(4):
        sentence = _SENTENCE.match(text, place, place + LONGEST)
        words, place = sentence["words"], sentence.end()
        begins = re.match(rf"(?:{_INTERJECTION.pattern})+", words)
        found = _RETRACTED.search(words)
        if found and (begins or (not found.start() and not is_word)):
            return True
        if not begins:
            return False
    return False


def _is_part(text: str, begin: int, end: int) -> bool:
    r"""Return whether a box is part of a formula, 2\boxed{70}, or denied by words beside it, not \boxed{70}."""
    before = text[max(0, begin - LONGEST) : begin].rpartition("\n")[2]
    after = text[end : end + LONGEST].removeprefix("}").partition("\n")[0]
    before, after = (re.sub(r"\\[,;:! ]|~|\\q?quad(?![A-Za-z])", " ", side) for side in (before, after))
    while opening := _STYLED.search(before):
        before, after = before[: opening.start()], re.sub(r"^\s*[})]", "", after)
    in_math = (before.count("$") - before.count("\\$")) % 2 or re.search(r"\\[(\[](?!.*\\[)\]])", before)
    if in_math and (re.match(r"\s*(?:!|[A-Za-z](?![A-Za-z])|,\s*\d)", after) or re.search(r"\d,\s*$", before)):
        return True
    if _NOT_BEFORE.search(before) or _NOT_AFTER.match(after) or _PART_AFTER.match(after):
        return True
    if re.fullmatch(r"\s*(?:[-+*>]\s+)+", before):
        return bool(in_math)  # an item of a list
    before = re.sub(r"\\(?:text\w*|mbox|mathrm)\s*\{[^{}]*\}|</?\w+>", ":", before)
    near = before.rstrip()
    if re.search(r"\\[A-Za-z]+$", near) and not _LEADS.search(near):
        return True
    if re.search(r"(?<![-=])>$|[-+/^_<≠±×·−≤≥{]$|[\d)}]\s*\*$|[\w)}\]](?:\\left)?\($", near):
        return True
    return bool(re.search(r"[\d)}\]|]$|(?<![A-Za-z\\])[A-Za-z]$", near if in_math else before))


def _without_marker(content: str) -> str:
    r"""Return `42` for a box's `\text{Answer: }42`; other contents as they are."""
    if len(content) > LONGEST:
        return content
    answer = content
    for marker in _MARKERS.finditer(content):
        answer = _rest_of_line(content, marker.end(), marker.lastgroup, content.rfind("\n"))[0] or answer
    return answer


def _rest_of_line(text: str, start: int, kind: str | None, last_newline: int) -> tuple[str | None, bool, int]:
    """Return what a marker's line states, or None, whether the line is closed, and where it ends.

    If nothing follows `Answer:`, the next line is taken.
    """
    display = _DISPLAY.match(text, start)
    if display:
        closing = text.find({"\\[": "\\]", "$$": "$$"}[display[1]], display.end(), display.end() + LONGEST)
        if "\n" in text[display.end() : max(closing, 0)]:
            return text[display.end() : closing].strip(), True, closing
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
    end = end if closed else start + LONGEST + 1
    value = text[start:end]
    if kind != "hashes":
        sentence = _SENTENCE_END.search(value)
        if sentence:
            value, closed, end = value[: sentence.start()], True, start + sentence.start()
    plain = _without_emphasis(_within_group(value))
    if plain.endswith("$") and not plain.endswith("\\$") and (plain.count("$") - plain.count("\\$")) % 2:
        plain = plain[:-1]  # closes a $ before the marker: $\text{Answer: }42$
    plain = plain.translate(notation.CHARACTERS)
    word = kind == "sentence" and _WORD.fullmatch(plain)
    if not (anything or word or _UNAMBIGUOUS.fullmatch(plain) or _is_formula(plain) or _is_quantity(plain)):
        return None, closed, end
    value = _clean(plain)
    if not any(character.isalnum() or character == "\\" for character in value):
        return None, closed, end
    return _without_prose(value), closed, end


def _is_quantity(text: str) -> bool:
    """Return whether a text is a number, or one span of math, with a unit: 18 dollars."""
    if len(text) > 80 or not _NUMERIC.match(text):
        return False
    value, unit = notation.quantity(notation.plain(text))
    return bool(unit) and bool(re.fullmatch(_NUMBER, value) or _SPAN.match(text))


def _without_prose(value: str) -> str:
    r"""Return `70` for `The total is 70`, `70\text{ miles}` for `$70$ miles`; words that take a number back stay."""
    spans = list(_SPAN.finditer(value))
    if not spans:
        value = re.sub(r"(?<!\\)\$", "", value)
        prose = _PROSE.fullmatch(value)
        if prose and notation.introduces(prose["before"]):
            number = prose["number"]
            value = number if re.fullmatch(_NUMBER, number) or _is_quantity(number) else value
        return re.sub(r"^([-+]?[\d.,]*\d) ([A-Za-z])$", r"\1\\text{ \2}", value.strip())  # 5 m
    before, after = value[: spans[0].start()], value[spans[0].end() :].strip()
    if len(spans) > 1 or re.search(r"\d", before + after) or not notation.introduces(before):
        return value
    if not re.fullmatch(r"[\w\s,.:='’*]*", before) or not re.fullmatch(r"\\?%|[A-Za-z\s.]*", after):
        return value
    inside = next(group for group in spans[0].groups() if group).strip()
    return inside + (after if after.endswith("%") else after and f"\\text{{ {after}}}")


def _line_end(text: str, start: int, last_newline: int) -> int:
    """Return where a line ends, or where more of it would not be looked at; −1 if no newline follows.

    Never looks further: a response of 100,000 markers would otherwise be read to its end for each of them.
    """
    if start > last_newline:
        return -1
    end = text.find("\n", start, start + LONGEST + 1)
    return end if end >= 0 else start + LONGEST + 1


def _within_group(value: str) -> str:
    r"""Return `42` for `}42` and `42}`: the part of a value inside the group that its marker stands in.

    Such are \text{Answer: }42 and \textbf{Answer: 42}, where the group begins before the marker.
    """
    start = depth = 0
    for match in _GROUP.finditer(value):
        if match[0] in ("{", "\\(", "\\["):
            depth += 1
        elif match[0] in ("}", "\\)", "\\]"):
            depth -= 1
            if depth < 0:
                if value[start : match.start()].strip(BLANK):
                    return value[start : match.start()]
                start, depth = match.end(), 0
    return value[start:]


def _is_formula(text: str) -> bool:
    r"""Return whether a text is mathematics alone, `3\sqrt{13}` or `x=5`.

    A sentence that a formula begins is not, nor is a heading.
    """
    outside = _COMMAND.sub(r"\\ ", text).strip()
    return not _NO_FORMULA.search(outside) and bool(_SIGN_OF_FORMULA.search(outside))


def _clean(value: str) -> str:
    """Strip Markdown emphasis, quotation marks, a final full stop, and math delimiters around the whole."""
    value = _without_emphasis(value)
    match = _SPAN.fullmatch(value)
    return next(group for group in match.groups() if group).strip() if match else value


def _without_emphasis(value: str) -> str:
    """Strip Markdown emphasis, quotation marks and a final full stop."""
    value = _EMPHASIS_END.sub("", _EMPHASIS.sub(r"\2", value), count=1)
    marks = '*_`"“”‘ \t\r'
    marks += "'’" if value.lstrip("*_ \t").startswith(("'", "‘", "’")) else ""  # in y' it is a prime
    return value.strip().strip(marks).removesuffix(".").rstrip(marks)
