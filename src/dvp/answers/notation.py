r"""Bring answers to one notation, and decide what their text alone decides.

- A percentage is its number: 50\% is 50 and not 0.5. Data sets write 50\% and 50 for the same answer.
- A unit may be left out or added, but not exchanged for another: 18 dollars is 18, and not 18 cents. A word that
  changes the value is no unit: 18 thousand, 18 is impossible. Letters outside of \text that make no full word are
  variables, 3 m n, except for a few after a plain number: 3 cm, 3 lbs, 3 red cars.
- \textbf{(A)}\ 12 is a choice with its value. It equals the letter, the value, and a choice in which both agree.
- A number with a base as subscript, 52_8, has that base: it equals neither 52_9 nor 52. Digits with no base do answer a
  reference that has one: such problems say the base, and some data sets leave it out.
- 12:30 is a time and no quotient. 5:12 may be a ratio, so its quotient answers it.
- Words are not products of their letters: CBA is not ABC, and on is not no. A few letters that make no word, as in xy,
  are a product.
"""

import math
import re
import unicodedata


def _words(text: str) -> list[str]:
    return text.split()


FUNCTIONS = _words(
    "arcsin arccos arctan arccot arcsec arccsc sinh cosh tanh sin cos tan cot sec csc cis exp ln log sqrt pi oo infty "
    "infinity"
)
_FUNCTION = re.compile(rf"(?:{'|'.join(FUNCTIONS)})[a-z]?")
_SUBSCRIPT = r"\\text\s*\{[^{}]*\}|\{(?:[^{}]|\{[^{}]*\})*\}|[0-9]+|[a-z]"
_DIGITS = r"[0-9A-Z]*[0-9](?:[0-9A-Z.]|,(?=[0-9A-Z]{3}(?![0-9A-Z])))*"
_BASED = re.compile(
    rf"(?<![\w\\.}}^])(?:\((?P<wrapped>{_DIGITS})\)|(?P<digits>{_DIGITS}))\s*_\s*(?P<base>{_SUBSCRIPT})"
)
_TEXT = re.compile(r"\\(?:text|mathbf|mathrm)(?![A-Za-z])")
_LAYOUT = re.compile(r"[\s{}$]")
_TIME = re.compile(r"(?<!\d)(\d{1,2}):([0-5]\d)(?::([0-5]\d))?([ap]m)?(?!\d)")
_EQUALS = re.compile(r"(?<![<>!:=])=(?!=)")
_NUMERALS = _words(
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen twenty"
)

CHARACTERS = str.maketrans(
    {
        **{chr(code): chr(code - 0xFEE0) for code in range(0xFF01, 0xFF5F)},  # full width
        **dict.fromkeys("−–—‒‐﹣", "-"),
        **dict.fromkeys("\u00a0\u2009\u202f\u2002\u2003\u3000", " "),
        **{"√": r"\sqrt", "∞": r"\infty ", "×": r"\times ", "÷": r"\div "},
        **{"℃": r"^\circ C", "℉": r"^\circ F"},
        **dict.fromkeys("·⋅∙", r"\cdot ") | dict.fromkeys("°º˚", r"^\circ ") | dict.fromkeys("\u200b\u2060\ufeff", ""),
        **{"≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "≈": r"\approx ", "±": r"\pm ", "∪": r"\cup ", "∅": r"\emptyset "},
        **{"∈": r"\in ", "′": "'", "’": "'", "⁄": "/", "½": r"\frac12 ", "¼": r"\frac14 ", "¾": r"\frac34 "},
        **{"⁻": "^-"},
        **{power: f"^{digit}" for digit, power in enumerate("⁰¹²³⁴⁵⁶⁷⁸⁹")},
    }
)
_SAME = {"lbrace": r"\{", "rbrace": r"\}", "lbrack": "[", "rbrack": "]", "lt": "<", "gt": ">", "ast": "*"}
_SAME |= {"varnothing": r"\emptyset ", "infinity": r"\infty ", "bigcup": r"\cup "}
_MEASURED = "[cdkm]?m|ft|in|yd|mi|s|[a-z]{4,}"  # units that have squares and cubes, and full words
_PAIR = r"[(\[][^()\[\],]+,[^()\[\],]+[)\]]"
_ORDERED, _ORDINAL = r"(?<![\d.,])(\d{1,3}(?:,\d{3})+|\d+)\s*", r"\s*(st|nd|rd|th)\s*"
_STYLE = "mathbf|boldsymbol|bm|mathrm|mathit|mathsf|mathnormal|mathtt|pmb|underline|text|boxed|fbox|ensuremath|emph"
_REWRITTEN = [
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\\(?:(?:text|math)?color|colorbox)\s*(?:\[\w*\])?\{[^{}]*\}", ""),
        (r"\\(?:(?:display|text|script)style|(?:bf|it|rm|sf|tt)(?=\s*\{?[-\d(\\])|(?i:large|huge))(?![A-Za-z])", ""),
        (r"(?<!\\)\\(?:left|right|middle|[bB]igg?[lrm]?)(?![A-Za-z])\s*\.?", ""),
        (r"(?<!\\)\\(?:[()\[\]])|(?<!\\)\$", ""),
        (r"(?<=\d)(?:\{,\}|,?\s?\\!\s?,?\s*)(?=\d)", ","),
        (r"(?<!\\)\\!", ""),
        (r"(?<!\\)(?:\\[,;:> ]|~|\\q?quad(?![A-Za-z])|\\h?space\*?\{[^{}]*\})", " "),
        (r"\\[dtc](frac|binom)(?![A-Za-z])", r"\\\1"),
        (r"(\.\d*)\\(?:dot|bar|overline)\s*(?:\{(\d)\}|(\d))(?!\d|\s*\\dot)", r"\1\\overline{\2\3}"),
        (r"(?<=\^-)\^(?=\d)", ""),
        (r"(?<![\d.]) *(\d+) +(\d+)/(\d+)(?!\d)", r"\1\\frac{\2}{\3}"),
        (
            r"\\(?:text(?:rm|normal|up|bf|it|sf|tt|super\w+)|[mh]box|mathrm|operatorname\*?|rm)(?![A-Za-z])",
            r"\\text",
        ),
        (rf"([\d)}}\]!]\s*\\text\s*\{{\s*(?:[a-z]+/)?(?:{_MEASURED}))\s*\^\s*\{{?([23])\}}?\s*\}}", r"\1}^\2"),
        (rf"\\text\s*\{{\s*({'|'.join(FUNCTIONS)})\s*\}}(?=\s*\S)", r"\\\1 "),
        (r"\\leq?(?:slant)?(?![A-Za-z])|<=", r"\\le "),
        (r"\\geq?(?:slant)?(?![A-Za-z])|>=", r"\\ge "),
        (r"\\neq?(?![A-Za-z])|\\not\s*=|!=", r"\\ne "),
        (rf"\\({'|'.join(_SAME)})(?![A-Za-z])", lambda match: _SAME[match[1]]),
        (r"\*\*", "^"),
        (r"\^\s*\{\s*((?:\\prime\s*)+)\}|\^\s*(\\prime)(?![A-Za-z])", lambda match: "'" * match[0].count("prime")),
        (r"\^\s*(?:\{\s*\\circ\s*\}|\\circ(?![A-Za-z]))", r"\\degree "),
        (r"(?<=\d)\s*\\degree\s*(?:\\text\s*\{\s*([CF])\s*\}|([CF]))$", r"\\text{ degree \1\2}"),
        (
            rf"{_ORDERED}\^?\s*\{{\s*\\text\s*\{{{_ORDINAL}\}}\s*\}}",
            lambda match: _cardinal(*match.groups()) or match[0],
        ),
        (rf"{_ORDERED}\^?\s*\\text\s*\{{{_ORDINAL}\}}", lambda match: _cardinal(*match.groups()) or match[0]),
        (rf"({_PAIR})\s*(?:U|\\text\s*\{{\s*U\s*\}})\s*(?={_PAIR})", r"\1\\cup "),
        (r"(?<![A-Za-z\\])infinity(?![A-Za-z])", r"\\infty "),
        (r"(?<![A-Za-z\\])\\?sqrt\s*\(([^()]*)\)", r"\\sqrt{\1}"),
        (r"\\sqrt(?=[A-Za-z])", r"\\sqrt "),
        (r"(?<![A-Za-z])per cent(?![A-Za-z])", "percent"),
    )
]
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_INFIX = re.compile(r"\\(over|choose)(?![A-Za-z])")
_WRAPPED = re.compile(rf"(?:\\(?:{_STYLE})\s*|\\(?:bf|it)\s*)?\{{")
_THOUSANDS = re.compile(r"(?<![\d.,(\[])(?<!\\\{)[1-9]\d{0,2}(?:,\d{3})+(?![\d,])")
_SPACED = re.compile(r"[-+]?\d{1,3}(?: \d{3})+(?![\d ])")
_JOINED = re.compile(
    r",?\s*(?:\\text\s*\{\s*,?\s*(?P<text>and|or)\s*\}|(?<![A-Za-z\\])(?P<word>and|or)(?![A-Za-z])),?\s*"
)

_POWER = r"(?:\s*\^\s*\{?(?P<power>[23])\}?)?"
_NUMBER = r"[-+]?(?:[\d.,/]*\d|\d*\s*\\frac\s*(?:\{\d+\}|\d)\s*(?:\{\d+\}|\d))"
_ABBREVIATION = r"(?:(?:sq|cu)\.? )?(?:cm|km|kg|mm|ft)(?:/(?:h|hr|s|sec|min))?|mph|min|sec|lbs|oz|mL|pct"
_TIMES = "second|sec|minute|min|hour|hr|day|week|month|year"
_IN_WORDS = re.compile(rf"(?P<value>.*\S)\s*\\text\s*\{{(?P<words>[A-Za-z.\s/'-]*)\}}{_POWER}", re.DOTALL)
_ABBREVIATED = re.compile(rf"(?P<value>[-+]?[\d.,/]*\d)\s*(?P<words>{_ABBREVIATION}){_POWER}")
_RATE = re.compile(rf"(?P<value>{_NUMBER})(?P<words>\s*/\s*(?:{_TIMES})|\s+an?\s+(?:{_TIMES}))(?P<power>)")
_SHORT_WORDS = re.compile(rf"(?P<value>{_NUMBER})\s+(?P<words>[A-Za-z][A-Za-z.\s/'-]*){_POWER}")
_FULL_WORDS = re.compile(
    r"(?P<value>.*[\d)}\]!]|.*\\pi)(?:\s*(?=\\)|\s*(?=%)|\s+)(?P<power>)(?P<words>\\?%|\\degree|[A-Za-z]{4,}[A-Za-z.\s/'-]*)",
    re.DOTALL,
)
_UNITS = (_IN_WORDS, _ABBREVIATED, _RATE, _SHORT_WORDS, _FULL_WORDS)
"""A unit in \\text; after a plain number an abbreviation, a rate or SHORT words; a full word. Other letters outside of
\\text are variables."""
SHORT = set(
    _words(
        "lb lbs oz mi yd yds ft cm mm km kg kgs ml mL hr hrs yr yrs wk wks min mins sec secs gal qt tsp tbs pts pct "
        "mph MPH kph mpg wpm rpm USD EUR GBP KB MB GB TB kW kWh Hz dB rad mol amp cal day egg cup men man box car "
        "dog cat pig cow hen bee ant bat rat fox owl kid boy son bag jar jug pan pot hat tie pen pin key toy pie bar "
        "bun nut pea fig job lap bus cab van ton pet bed gem bug fly leg eye arm ear toe rug mat mug tub bin row way "
        "yen ad ads CD CDs TV TVs DVD logs"
    )
)
"""Abbreviations and words of up to three letters that begin a unit; others may be a product of variables."""
_ALONE = {"in", "am", "pm"}
"""Units only if no word follows: 5 in, but not 101 in binary."""
_BEFORE_OTHERS = set(_words("sq cu per red big new old hot ice wet dry"))
"""Beginnings of a unit only if a word follows: 3 red cars."""
_CURRENCIES = {"$": "dollar", "€": "euro", "£": "pound", "¥": "yen", "₹": "rupee", "¢": "cent"}
_PRICE = re.compile(r"(?P<sign>-?)\s*\\?(?P<currency>[$€£¥₹])\s*(?=[\d.])")
_PRICED = re.compile(r"(?P<value>[-+]?[\d.,/]*\d)\s*(?:\\text\s*\{\s*)?\\?(?P<currency>[$€£¥₹¢])\s*\}?")
_CHOICE = re.compile(r"^(?:\\text\s*\{\s*)?\(?([A-J])\)(?:\s+\}?|\s*\}\s+)(?:[\d.,/]+|\\frac\{\d+\}\{\d+\})$")
"""A choice and its value: (B) 12."""
_STYLED_CHOICE = re.compile(
    r"\\(?:text|mathbf|boldsymbol|bm)\s*\{\s*\(([A-J])\)\s*\}\s*"
    r"(?P<value>(?!.*\([A-J]\))(?!(?:\\text\s*\{\s*)?(?:and|or)\b)[^\s+*/=^_,;].*)",
    re.DOTALL,
)
"""A choice whose style distinguishes it from a factor, and its value, which names no other choice."""
_LETTER = re.compile(r"(?:\\text\s*\{\s*)?\(?([A-J])\)?\s*\}?")
_MODULUS = re.compile(r"\\pmod\s*(\{[^{}]*\}|\d+)$|\(\s*(?:\\text\s*\{\s*mod\s*\}|\\?mod)\s*(\d+)\s*\)$")
_CHANGES = {
    *_NUMERALS,
    *_words(
        "thirty forty fifty sixty seventy eighty ninety twice thrice again only too also if unless however "
        "hundred thousand million billion trillion dozen dozens score gross half halves third thirds quarter "
        "quarters fourth fourths fifth fifths sixth sixths seventh eighth eighths ninth tenth tenths hundredth "
        "hundredths thousandth thousandths squared cubed factorial root plus minus negative over under above "
        "below less fewer least most max maximum minimum mod modulo base choose divided and or nor not no "
        "none never is isn are was were be been but than except between through to from by impossible "
        "wrong incorrect false undefined invalid infinite infinitely maybe perhaps possibly probably because "
        "since so when where then which that about approximately around roughly alpha beta gamma theta delta "
        "lambda sigma omega phi epsilon zeta iota kappa upsilon"
    ),
}
_PARTICIPLE = re.compile(r"[a-z]{2,}[^e]ed")
"""A participle, as in doubled or rejected, says what was done to a value and is no unit of it."""
_STATES = re.compile(r"\b(?:is|are|equals)\s*:?\s*$")
_DENIES = {"not", "no", "never", "neither", "nor", "cannot", "t"}
_INTRODUCES = {
    *_words("a an the this that answer final correct total result value is are was be must will would should of"),
    *_words("equals equal to there about approximately around roughly exactly so thus hence therefore then"),
    *_words("we you i he she it they get have has find obtain"),
}
_UNIT_NAMES = dict(
    pair.split("=")
    for pair in _words(
        "in=inch inche=inch ft=foot feet=foot yd=yard yds=yard mi=mile m=meter metre=meter cm=centimeter mm=millimeter "
        "km=kilometer kg=kilogram kgs=kilogram g=gram lb=pound lbs=pound oz=ounce l=liter litre=liter ml=milliliter "
        "s=second sec=second secs=second mins=minute yr=year yrs=year wk=week wks=week gal=gallon qt=quart pts=point "
        "mph=mile_per_hour kph=kilometer_per_hour c=celsius celsius=celsius f=fahrenheit centigrade=celsius "
        "min=minute h=hour hr=hour hrs=hour deg=degree pct=percent "
        "percentage=percent sq=square cu=cubic usd=dollar eur=euro centimetre=centimeter"
    )
)
_BARE_ORDINAL = re.compile(rf"{_ORDERED}(?:\^\s*)?\{{?{_ORDINAL}\}}?")
_LETTERS = set("mgshlLKNJWVAC")
_VARIABLES = re.compile(r"[b-df-hj-np-tv-z]+|[a-dx-z]+")
"""Letters that make a product and no word: no vowel, or of the first and last of the alphabet."""


def plain(text: str) -> str:
    r"""Rewrite a text in one notation: \frac for \dfrac, (3,4) for \left(3,4\right) and \mathbf{(3,4)}."""
    text = text.translate(CHARACTERS)
    text = "".join(_greek(character) if "α" <= character <= "ω" else character for character in text)
    for pattern, replacement in _REWRITTEN:
        text = pattern.sub(replacement, text)
    while (inner := _unwrapped(text)) != text:
        text = inner
    text = _fractions(text)
    if _SPACED.match(text):
        text = _SPACED.sub(lambda match: match[0].replace(" ", ""), text, count=1)
    thousands = _THOUSANDS.sub(lambda match: match[0].replace(",", ""), text)
    if "," not in thousands or re.search(r"\d,\d{3},\d{3}(?!\d)", text):
        text = thousands
    return _BASED.sub(_canonical, text)


def quantity(text: str) -> tuple[str, str]:
    r"""Split a plain text into value and unit: ("15", "centimeter^2") for 15\text{ cm}^2; ("18", "dollar") for \$18."""
    if modulus := _MODULUS.search(text):
        return text[: modulus.start()].strip(), "mod " + (modulus[1] or modulus[2]).strip("{} ")
    text = re.sub(r"\(\s*([A-Za-z-]+)\s*\)$", lambda match: _unless_repeated(text, match), text).strip()
    if money := _PRICE.match(text):
        value, unit = quantity(money["sign"] + text[money.end() :])
        currency = _CURRENCIES[money["currency"]]
        return value, f"{currency} {unit}" if unit.startswith("per ") else unit or currency
    if money := _PRICED.fullmatch(text):
        return money["value"], _CURRENCIES[money["currency"]]
    for pattern in _UNITS:
        match = pattern.fullmatch(text)
        if match and match["words"] == "\\degree" and re.search("|".join(FUNCTIONS), match["value"]):
            continue  # \sin 30^\circ
        if match and pattern is _FULL_WORDS and not is_word(match["words"].split()[0]):
            continue
        if match and pattern is _SHORT_WORDS and not _begins_short(match["words"]):
            continue
        if match and (unit := _unit(match["words"], match["power"])):
            return match["value"].strip(), unit
    return text, ""


def exchanged(unit: str, other: str) -> bool:
    """Return whether two units differ; either may be missing, and "per hour" stands for "dollar per hour"."""
    short, long = sorted((unit, other), key=len)
    return bool(short) and short != long and not (short.startswith("per ") and long.endswith(short))


def choice(text: str) -> tuple[str, str]:
    r"""Split a plain text into letter and value: ("A", "12") for \textbf{(A)}\ 12; ("", text) if it is no choice."""
    match = _STYLED_CHOICE.fullmatch(text)
    return (match[1], match["value"]) if match else ("", text)


def letter(text: str) -> str:
    r"""Return the letter of a plain text A, (A) or \text{(A)}; nothing for others."""
    match = _LETTER.fullmatch(text)
    return match[1] if match else ""


def cardinal(text: str) -> str:
    """Return 70 for 70th or 70^{th}; other plain texts as they are.

    A product may look like an ordinal, so call this only if a number is expected.
    """
    match = _BARE_ORDINAL.fullmatch(text)
    return (_cardinal(*match.groups()) if match else "") or text


def decided(reference: str, answer: str) -> bool | None:
    """Return whether two plain texts are equal if their text decides it; None if mathematics has to."""
    verdicts = (decide(reference, answer) for decide in (_same_base, _same_time, _same_word))
    return next((verdict for verdict in verdicts if verdict is not None), None)


def listed(text: str) -> str:
    r"""Replace `and` and `or` in a plain text by \land and \lor."""
    return _JOINED.sub(lambda match: {"and": r"\land ", "or": r"\lor "}[match["text"] or match["word"]], text)


def has_words(text: str) -> bool:
    r"""Return whether words, which are no mathematics, stand outside of \text."""
    outside = re.sub(r"\\text\s*\{[^{}]*\}|\\(?:begin|end)\s*\{\w+\}|\\[A-Za-z]+", " ", text)
    return any(is_word(run) for run in re.findall(r"[A-Za-z]{3,}", outside) if run not in FUNCTIONS)


def is_word(run: str) -> bool:
    """Return whether letters form a word and not a product of variables."""
    return not (_VARIABLES.fullmatch(run.lower()) and len(run) < 6) and not run.isupper()


def introduces(words: str) -> bool:
    """Return whether words before a number only lead to it: the number of ways is, x =.

    Words that change it do not: twice, up to.
    """
    words = re.sub(r"\b[A-Za-z]\s*=", "", words).lower()
    found = set(re.findall(r"[^\W\d_]+", words))
    return found <= _INTRODUCES or (bool(_STATES.search(words)) and not found & _DENIES)


def _greek(character: str) -> str:
    return "\\" + unicodedata.name(character).split()[-1].lower() + " "


def _unwrapped(text: str) -> str:
    r"""Strip a full stop, quotation marks, and braces or a style around the whole: 70 for \boldsymbol{70}."""
    text = text.strip().strip('`"“”‘').strip()
    text = text.removesuffix("\\\\").removesuffix(".").rstrip() if not text.endswith("..") else text
    opening = _WRAPPED.match(text)
    if not opening or not text.endswith("}"):
        return text
    depth = 1
    for place in range(opening.end(), len(text)):
        if text[place - 1] != "\\":
            depth += (text[place] == "{") - (text[place] == "}")
        if not depth:
            return text[opening.end() : place] if place == len(text) - 1 else text
    return text


def _unless_repeated(text: str, match: re.Match) -> str:
    """Return nothing for the (five) of 5 (five), other matches as they are."""
    word = match[1].lower()
    return "" if word in _NUMERALS and text[: match.start()].strip() == str(_NUMERALS.index(word)) else match[0]


def _cardinal(number: str, ending: str) -> str:
    """Return the number of an ordinal with the right ending; nothing for a wrong one."""
    right = "th" if number[-2:-1] == "1" else {"1": "st", "2": "nd", "3": "rd"}.get(number[-1], "th")
    return number if ending == right else ""


def _fractions(text: str) -> str:
    r"""Replace \over by \frac and \choose by \binom, with all that is in their braces or in the whole text."""
    while match := _INFIX.search(text):
        start, end = _group(text, match.start())
        name = {"over": "frac", "choose": "binom"}[match[1]]
        inside = rf"\{name}{{{text[start : match.start()]}}}{{{text[match.end() : end]}}}"
        text = text[:start] + inside + text[end:]
    return text


def _group(text: str, place: int) -> tuple[int, int]:
    """Return start and end of the content of the braces around a place, or of the whole text."""
    starts, depth = [0], 0
    for brace in _BRACE.finditer(text, 0, place):
        if brace[0] == "{":
            starts.append(brace.end())
        elif brace[0] == "}":
            starts = starts[:-1] or [0]
    for brace in _BRACE.finditer(text, place):
        depth += (brace[0] == "{") - (brace[0] == "}")
        if depth < 0:
            return starts[-1], brace.start()
    return starts[-1], len(text)


def _begins_short(words: str) -> bool:
    """Return whether words after a plain number begin with a SHORT one and are no product of variables."""
    first, *others = re.findall(r"[A-Za-z]+", words.replace(".", ""))
    first = first if first in SHORT else first[0].lower() + first[1:]
    if first in _ALONE:
        return not others
    if first not in SHORT and not (first in _BEFORE_OTHERS and others):
        return False
    return all(word in SHORT or (len(word) > 1 and is_word(word)) for word in others)


def _is_no_unit(word: str) -> bool:
    return bool(word in _CHANGES or (_FUNCTION.fullmatch(word) and word not in SHORT) or _PARTICIPLE.fullmatch(word))


def _unit(text: str, power: str | None) -> str:
    """Return the unit in one spelling; nothing if the words are not a unit."""
    words = re.findall("[A-Za-z]+", re.sub(r"/|(?<=\s)an?(?=\s)", " per ", text.replace(".", "")))
    if text.endswith("%") or text == "\\degree":
        return "percent" if text.endswith("%") else "degree"
    if not 0 < len(words) < 5 or any(_is_no_unit(word.lower()) for word in words):
        return ""
    if len(words) == 1 and len(words[0]) == 1 and words[0] not in _LETTERS:
        return ""
    names = [word if word in _UNIT_NAMES or len(word) < 4 else word.removesuffix("s") for word in map(str.lower, words)]
    unit = " ".join(_UNIT_NAMES.get(name, name) for name in names).replace("_", " ")
    unit = unit.removeprefix("degree ")  # Celsius
    for word, exponent in (("square ", "2"), ("cubic ", "3")):
        unit, power = unit.replace(word, ""), power or (exponent if word in unit else None)
    return unit + (f"^{power}" if power else "")


def _canonical(match: re.Match) -> str:
    """Rewrite a number with its base as 52_{8}."""
    base = _reduced(match["base"]).strip("()").removeprefix("base").lower()
    if base in _NUMERALS:
        base = str(_NUMERALS.index(base))
    digits = re.sub(r"[,\s]", "", match["wrapped"] or match["digits"])
    # In a base above ten a letter is a digit; in a smaller one it is a name, as in 10C_5.
    if not base or (not digits.replace(".", "").isdecimal() and not (base.isdecimal() and int(base) > 10)):
        return match[0]
    return f"{digits.lstrip('0') or '0'}_{{{base}}}"


def _same_base(reference: str, answer: str) -> bool | None:
    answer = _EQUALS.split(answer)[-1].strip() if "=" not in reference else answer  # 52_8 = 42 states 42
    expected, stated = (
        [number for match in _BASED.finditer(text) if (number := _canonical(match)) == match[0]]
        for text in (reference, answer)
    )
    if not stated:
        if expected == [reference]:
            return (_reduced(answer).lstrip("0") or "0") == reference.partition("_")[0]
        return None
    if expected != stated:
        return False
    return True if [reference] == expected and [answer] == stated else None


def _same_time(reference: str, answer: str) -> bool | None:
    clock, other = (_reduced(text).replace(".", "").lower() for text in (reference, answer))
    expected = _TIME.fullmatch(clock)
    if not expected or int(expected[1]) > 24:
        return None
    stated = _TIME.fullmatch(other.removeprefix("at"))
    if stated and int(stated[1]) == int(expected[1]) and stated.group(2, 3) == expected.group(2, 3):
        return len({expected[4], stated[4]} - {None}) < 2
    hours, minutes = int(expected[1]), int(expected[2])
    may_be_ratio = math.gcd(hours, minutes) == 1 and minutes > 9 and not (expected[3] or expected[4])
    return None if may_be_ratio else False


def _same_word(reference: str, answer: str) -> bool | None:
    """Compare texts as words in any case, or as choices if one is (B); None if that does not decide.

    Letters that may be variables are compared as they stand.
    """
    words = [_reduced(_CHOICE.sub(r"(\1)", text)) for text in (reference, answer)]
    bare = [word.strip("()") for word in words]
    if words != bare and all(re.fullmatch("[A-Za-z]", word) for word in bare):
        return bare[0].upper() == bare[1].upper()
    if not all(re.fullmatch(r"[^\W\d_][^\W\d_'’-]*", word) and len(word) > 1 and "\\" not in word for word in words):
        return None
    if any(is_word(word) for word in words):
        return words[0].casefold() == words[1].casefold()
    return words[0] == words[1] or (None if all(word.islower() for word in words) else False)


def _reduced(text: str) -> str:
    r"""Remove \text and the like, braces, spaces and dollar signs."""
    return _LAYOUT.sub("", _TEXT.sub("", text))
