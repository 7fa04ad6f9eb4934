"""Compare two answers as mathematics: parse LaTeX or plain notation into SymPy's objects and compare these.

dvp.answers.equality runs this file as a process of its own. A text must be understood to its end to be an expression: a
parser that skips text grades wrong answers as right. Numbers are compared exactly and never rounded to floats;
expressions with variables at random rational points; sets, tuples, intervals and relations by kind and by their parts.
"""

import contextlib
import json
import re
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import product
from random import Random
from typing import Any

import sympy
from sympy import Rational, Symbol, oo
from sympy.core.evalf import evalf

CPU_SECONDS = 3.0
MEMORY_BYTES = 8 << 30
LARGEST_BITS = 1 << 18
"""A power or a factorial of more bits, some 80,000 digits, is refused before it is computed."""
EQUAL, UNEQUAL, UNPARSED = "equal", "unequal", "unparsed"

DIGITS = 6
"""Significant digits with which a decimal may stand for a number without a finite decimal: 0.333333 is 1/3."""
NOISE = 15
"""Significant digits to which a longer decimal is rounded: those of a 64-bit float as programs print it."""

TRIGONOMETRY: dict[str, Callable] = {name: getattr(sympy, name) for name in ("sin", "cos", "tan", "cot", "sec", "csc")}
INVERSE = {name: getattr(sympy, "a" + name) for name in TRIGONOMETRY}
TRIGONOMETRY["cis"] = lambda angle: sympy.exp(sympy.I * angle)
FUNCTIONS = TRIGONOMETRY | {"arc" + name: function for name, function in INVERSE.items()}
FUNCTIONS |= {name: getattr(sympy, name) for name in ("sinh", "cosh", "tanh", "exp")} | dict.fromkeys(
    ("ln", "log"), sympy.log
)
GREEK = (
    r"alpha beta gamma delta epsilon varepsilon zeta eta theta vartheta iota kappa lambda mu nu xi rho sigma tau "
    r"upsilon phi varphi chi psi omega Gamma Delta Theta Lambda Xi Sigma Phi Psi Omega ell"
)
ACCENTS = "text mathbf boldsymbol bm mathit mathcal mathbb vec bar overline hat widehat tilde angle triangle"
GREEK, ACCENTS = (set(re.findall(r"\w+", names)) for names in (GREEK, ACCENTS))
STARTS = {"frac", "binom", "sqrt", "pi", "infty", "begin", *GREEK, *ACCENTS}
"""Commands that may begin a factor without a multiplication sign before them."""
RELATIONS = {"\\in": "=", "\\approx": "≈", "\\equiv": "=", "\\le": "≤", "\\ge": "≥", "\\ne": "≠"}
RELATIONS |= {sign: sign for sign in "=<>"}
BRACKETS = {"(": ")]", "[": ")]", "\\{": ("\\}",), "\\langle": ("\\rangle",)}
BARS = ("|", "\\vert")
AROUND: dict[str, tuple[str, Callable]] = {
    "{": ("}", lambda value: value),
    "\\lfloor": ("\\rfloor", sympy.floor),
    "\\lceil": ("\\rceil", sympy.ceiling),
    "\\lvert": ("\\rvert", sympy.Abs),
    **{bar: (bar, sympy.Abs) for bar in BARS},
}
SIGNS = ("+", "-", "\\pm", "\\mp")
_TOKEN = re.compile(
    r"\s*(?:(?P<repeating>\d*\.\d*\\(?:overline|bar)\s*\{\d+\})"
    r"|(?P<number>(?:(?:1|\d*\.\d+)[eE][-+]?\d+|\d+(?:[eE]|E[-+])\d+)(?![\w.^])|\d+(?:\.\d+)?|\.\d+)"
    rf"|(?P<word>(?<![A-Za-z\\])(?:{'|'.join(FUNCTIONS)}|sqrt|pi)(?![A-Za-z])|(?<![A-Za-z\\])oo(?![A-Za-z]))"
    r"|(?P<sign>\\[A-Za-z]+|\\?\S))"
)

_MIXED = re.compile(r"\d+\\frac(?:\{\d+\}|\d)(?:\{\d+\}|\d)")


class Unparsed(Exception):  # noqa: N818
    """Raised for a text that is not an expression."""


@dataclass(frozen=True)
class Items:
    """A list ("", ""), a list of alternatives ("∨"), a set ("{", "}"), a tuple, point or interval (its brackets), a
    union of them ("∪"), or a ratio of three or more (":")."""

    opening: str
    items: tuple
    closing: str


class Interval(Items):
    """The interval of an inequality, which cannot be a point."""


@dataclass(frozen=True)
class Chain:
    """Sides with relations between them: x = 5, 1 < x ≤ 2."""

    sides: tuple
    relations: tuple[str, ...]


class Parser:
    """A recursive-descent parser of one text.

    `decimals` maps the numbers that the text writes with a point to the value of their last place.
    """

    def __init__(self, text: str) -> None:
        self.tokens = []
        for match in _TOKEN.finditer(text.rstrip()):
            self.tokens.append("\\" + match["word"] if match["word"] else match[match.lastgroup])
        self.place = 0
        self.decimals: dict[sympy.Expr, Rational] = {}
        self.plus_minus, self.sign = False, 1
        self.degrees, self.in_bars = False, False
        self.words = 0
        self.joined: set[str] = set()

    def answer(self) -> Any:
        """Parse the whole text. Raises Unparsed."""
        try:
            items = self._items(splits=True)
            if self.place < len(self.tokens) or {"\\land", "\\lor"} <= self.joined:
                raise Unparsed
            intersection = _intersection(items) if "\\land" in self.joined else None
        except (TypeError, ValueError, AttributeError, sympy.SympifyError) as error:
            raise Unparsed from error
        kind = "∨" if "\\lor" in self.joined else ""
        return intersection or (items[0] if len(items) == 1 else Items(kind, items, kind))

    @property
    def _next(self) -> str:
        return self.tokens[self.place] if self.place < len(self.tokens) else ""

    def _pop(self) -> str:
        self.place += 1
        return self.tokens[self.place - 1] if self.place <= len(self.tokens) else ""

    def _take(self, *tokens: str) -> str:
        return self._pop() if self._next and self._next in tokens else ""

    def _expect(self, *tokens: str) -> str:
        return self._take(*tokens) or _refuse()

    def _items(self, *, splits: bool) -> tuple:
        """Parse a list of items; with `splits`, 1 ± √2 gives two of them."""
        items: list = []
        outside, signs = self.plus_minus, 0
        while True:
            start = self.place
            self.plus_minus = False
            items.append(self._chain())
            signs += self.plus_minus
            if splits and self.plus_minus:
                self.place, self.sign = start, -1
                items.append(self._chain())
                self.sign = 1
            separator = self._take(",", ";", *(("\\land", "\\lor") if splits else ()))
            if not separator:
                self.plus_minus = not splits and (outside or signs > 0)
                return tuple(items) if splits or signs < 2 else _refuse()  # in (±1, ±2) the signs are independent
            self.joined.add(separator)

    def _chain(self) -> Any:
        sides, signs = [self._side()], []
        while self._next in RELATIONS:
            signs.append(self._pop())
            sides.append(self._side())
        if set(signs) == {"="} and _is_name(sides[-1]) and not _is_name(sides[0]):
            sides.reverse()  # 70 = n
        return Chain(tuple(sides), tuple(RELATIONS[sign] for sign in signs)) if signs else sides[0]

    def _side(self) -> Any:
        words = self.words
        side = self._union()
        if words != self.words and isinstance(side, sympy.Basic) and not isinstance(side, Symbol):
            raise Unparsed  # 0 \text{ is impossible}
        return side

    def _union(self) -> Any:
        parts = [self._sum()]
        while self._take("\\cup"):
            parts.append(self._sum())
        if len(parts) == 1:
            return parts[0]
        return Items("∪", tuple(parts), "∪") if all(isinstance(part, Items) for part in parts) else _refuse()

    def _sum(self) -> Any:
        value = None
        while value is None or self._next in SIGNS:
            sign = 1
            while self._next in SIGNS:
                token = self._pop()
                self.plus_minus |= token in ("\\pm", "\\mp")
                sign *= {"+": 1, "-": -1, "\\pm": self.sign, "\\mp": -self.sign}[token]
            term = self._ratio() if sign == 1 else -self._ratio()
            value = term if value is None else value + term
        if isinstance(value, sympy.Expr) and value.has(sympy.nan, sympy.zoo):
            raise Unparsed
        return value

    def _ratio(self) -> Any:
        terms = [self._product()]
        while self._take(":"):
            terms.append(self._product())
        return Items(":", tuple(terms), ":") if len(terms) > 2 else terms[0] / terms[1] if terms[1:] else terms[0]

    def _product(self) -> Any:
        value = self._factors()
        while operator := self._take("*", "\\cdot", "\\times", "/", "\\div"):
            factor = self._signed(self._factors)
            value = value * factor if operator in ("*", "\\cdot", "\\times") else value / factor
        return value

    def _factors(self, *, of_argument: bool = False) -> Any:
        """Parse factors side by side; with `of_argument` they end before a function, as sin 2x does in sin 2x cos x."""
        start = self.place
        value = self._power()
        mixed = _MIXED.match("".join(self.tokens[start : start + 8]))
        if mixed and self.place == start + 1:
            fraction = self._power()
            value = value + fraction if 0 < fraction < 1 else _refuse()
        while self._starts_factor(of_argument):
            value = value * self._power()
        return value

    def _signed(self, parse: Callable[[], Any]) -> Any:
        return (-1 if self._take("-") else 1) * parse()

    def _starts_factor(self, of_argument: bool) -> bool:
        token = self._next
        name = token[1:] if token[:1] == "\\" else ""
        if token in BARS:
            return not self.in_bars
        if token[:1].isdigit() or token[:1] == ".":
            raise Unparsed  # 7 0, x2
        if name in FUNCTIONS:
            return not of_argument
        return token.isalpha() or name in STARTS or (token in BRACKETS) or (token in AROUND)

    def _power(self) -> Any:
        base = self._atom()
        while self._next in ("!", "^", "\\degree"):
            token = self._pop()
            if token == "!":
                base = sympy.factorial(_bounded(base, base)) if self._next != "!" else _refuse()
            elif token == "\\degree":
                base = base * sympy.pi / 180 if self.degrees else base * 1
            else:
                base = base ** self._signed(lambda base=base: _bounded(self._argument(digits=True), base))
                if self._next == "^":
                    raise Unparsed
        return base

    def _argument(self, *, digits: bool = False) -> Any:
        r"""Parse a group in braces or one token; of a number one digit only, as in \frac12, unless `digits` is set."""
        token = self._next
        if not digits and token.isdecimal() and len(token) > 1:
            self.tokens[self.place : self.place + 1] = [token[0], token[1:]]
        return self._atom()

    def _atom(self) -> Any:
        token = self._pop()
        name = token[1:]
        if token[:1].isdigit() or token[:1] == ".":
            return self._number(token)
        if token.isalpha():
            return self._name(token)
        if token in BRACKETS:
            return self._group(token)
        if token in AROUND:
            closing, function = AROUND[token]
            value = self._within(self._sum, bars=token in BARS)
            self._expect(closing)
            return function(value)
        if name == "frac":
            return self._argument() / self._argument()
        if name == "binom":
            return sympy.binomial(self._argument(), self._argument())
        if name == "sqrt":
            degree = sympy.Integer(2)
            if self._take("["):
                degree = self._within(self._sum)
                self._expect("]")
            value = self._argument(digits=True)
            negative = value.is_negative and degree.is_odd  # take the real root
            return -sympy.root(-value, degree) if negative else sympy.root(value, degree)
        if name in FUNCTIONS:
            return self._function(name)
        if name == "begin":
            return self._matrix()
        if name in ACCENTS:
            return self._accented(name)
        if name in GREEK:
            return self._name(token)
        constants = {"\\pi": sympy.pi, "\\infty": oo, "\\oo": oo, "\\emptyset": Items("{", (), "}")}
        return constants.get(token) or _refuse()

    def _number(self, token: str) -> sympy.Expr:
        if self._take("_"):
            return sympy.Integer(int(token, int(self._raw())))  # a base
        if re.search(r"[eE][-+]?0*[1-9]\d{5}", token):
            raise Unparsed  # too large to be computed
        whole, repeated = (*re.split(r"\\\w+\s*\{", token.rstrip("}")), "")[:2]
        value = Rational(whole + "0" if whole.endswith(".") else whole)
        if repeated:
            places = len(whole.partition(".")[2])
            return value + Rational(int(repeated), (10 ** len(repeated) - 1) * 10**places)
        if "." in token:
            digits = re.sub(r"[eE].*|\.", "", token).lstrip("0")
            value = Rational(f"{float(token):.{NOISE - 1}e}") if len(digits) > NOISE + 1 else value
            step = Rational(1, 10 ** len(whole.partition(".")[2]))
            self.decimals |= {value: step, -value: step}
        return value

    def _name(self, letter: str) -> sympy.Expr:
        suffix = ""
        while True:
            if self._take("'"):
                suffix += "'"
            elif self._take("_"):
                suffix += "_" + self._raw()
            else:
                break
        if not suffix and letter in "ei":
            return sympy.E if letter == "e" else sympy.I
        if self._next == "(" and (letter in "fghFGHPQ" or "'" in suffix):
            suffix += f"({self._group(self._pop())})"
        return Symbol(letter + suffix, real=True)

    def _raw(self) -> str:
        """Return the tokens of a group in braces, or one token, as text."""
        if not self._take("{"):
            return self._pop() or _refuse()
        depth, text = 1, ""
        while depth:
            token = self._pop() or _refuse()
            depth += (token == "{") - (token == "}")
            text += token if depth else ""
        return text

    def _accented(self, name: str) -> sympy.Expr:
        if name in ("angle", "triangle"):
            text = self._raw()
            while self._next.isalpha() and self._next.isupper():
                text += self._pop()
            return Symbol(f"{name} {text}", real=True)
        start = self.place
        text = self._raw()
        if name == "text" or (name in ("mathbf", "boldsymbol", "bm") and (text not in ("i", "j", "k"))):
            if len(text) == 1 and text.isalpha():
                return self._name(text)
            if name != "text":
                self.place = start
                return self._argument()
            self.words += 1
        return self._name(f"{name} {text}")

    def _function(self, name: str) -> sympy.Expr:
        exponent = base = None
        while self._next in ("^", "_"):
            if self._pop() == "_":
                base = self._argument() if name == "log" else _refuse()
            else:
                exponent = self._signed(lambda: self._argument(digits=True))
        degrees, self.degrees = self.degrees, self.degrees or name in TRIGONOMETRY
        value = self._group(self._pop()) if self._next == "(" else self._signed(lambda: self._factors(of_argument=True))
        self.degrees = degrees
        if exponent == -1:
            return INVERSE[name](value) if name in INVERSE else _refuse()
        value = sympy.log(value, base or 10) if name == "log" else FUNCTIONS[name](value)
        value = value.rewrite((sympy.sinh, sympy.cosh, sympy.tanh), sympy.exp)  # whose size _is_zero knows
        return value if exponent is None else value**exponent

    def _group(self, opening: str) -> Any:
        if opening == "\\{" and self._take("\\}"):
            return Items("{", (), "}")
        items = self._within(lambda: self._items(splits=opening == "\\{"))
        closing = self._expect(*BRACKETS[opening]).removeprefix("\\")
        opening = opening.removeprefix("\\")
        if opening == "langle":
            opening, closing = "(", ")"
        if len(items) == 1 and opening + closing in ("()", "[]"):
            return items[0]
        if opening + closing in ("(]", "[)") and len(items) != 2:
            raise Unparsed
        return Items(opening, items, closing)

    def _within(self, parse: Callable[[], Any], *, bars: bool = False) -> Any:
        outside, self.in_bars = self.in_bars, bars
        value = parse()
        self.in_bars = outside
        return value

    def _matrix(self) -> sympy.Expr:
        name = self._raw()
        if name not in ("matrix", "pmatrix", "bmatrix", "smallmatrix", "vmatrix", "array"):
            raise Unparsed
        if name == "array":
            self._raw()  # {cc}
        rows: list[list] = [[]]
        while True:
            rows[-1].append(self._within(self._sum))
            token = self._expect("&", "\\\\", "\\end")
            if token == "\\end" or (token == "\\\\" and self._take("\\end")):
                matrix = sympy.ImmutableMatrix(rows)
                return (matrix.det() if name == "vmatrix" else matrix) if self._raw() == name else _refuse()
            rows += [[]] if token == "\\\\" else []


def _refuse() -> Any:
    raise Unparsed


def _bounded(exponent: Any, base: Any) -> Any:
    """Return an exponent, or the argument of a factorial, if the result has few enough bits. Raises Unparsed."""
    numbers = base.atoms(Rational, Symbol) if isinstance(exponent, Rational) else ()
    bits = [20 if number.is_Symbol else max(abs(number.p), number.q).bit_length() - 1 for number in numbers]
    return exponent if not bits or abs(exponent) * max(bits) <= LARGEST_BITS else _refuse()


class Comparison:
    """A comparison of two parsed answers; for `decimals` see Parser."""

    def __init__(self, decimals: dict[sympy.Expr, Rational]) -> None:
        self.decimals = decimals

    def same(self, expected: Any, stated: Any) -> bool:
        """Return whether an answer says what is expected. Either may name its value (x = 5), but not differently."""
        if isinstance(expected, Chain) and isinstance(stated, Chain) and self._same_relations(expected, stated):
            return True
        return any(
            self._same_value(right, left)
            for name, right in self._readings(expected)
            for other, left in self._readings(stated)
            if not name or not other or set(name) <= set(other)
        )

    def _readings(self, node: Any) -> Iterator[tuple[Iterable, Any]]:
        """Yield (names, value) for each reading of a side: 5 for x = 5, 7 for a true 3 + 4 = 7, (2, oo) for x > 2."""
        if not isinstance(node, Chain):
            yield (), node
        elif _is_equation(node):
            sides = node.sides
            named = next((place for place, side in enumerate(sides[:-1]) if not _is_name(side)), len(sides) - 1)
            if all(self._consistent(sides[named], side) for side in sides[named + 1 :]):
                yield from (_by_name(sides[:named], side) for side in sides[named:])
        elif interval := _interval(node):
            yield [interval[0]], interval[1]

    def _consistent(self, first: Any, other: Any) -> bool:
        """Return whether two numbers are equal, up to the rounding of `other` if it is written with a decimal point."""
        if not all(isinstance(side, sympy.Expr) and not side.free_symbols for side in (first, other)):
            return False
        if self._same_value(first, other):
            return True
        return other in self.decimals and bool(abs(first - other) < self.decimals[other])

    def _same_relations(self, expected: Chain, stated: Chain) -> bool:
        """Return whether two relations are the same up to a constant factor: 2x + 2y < 6 is x + y < 3."""
        if any(
            "≈" in chain.relations or not all(isinstance(side, sympy.Expr) for side in chain.sides)
            for chain in (expected, stated)
        ):
            return False
        steps, others = ([(a - b, relation) for a, b, relation in _ordered(chain)] for chain in (expected, stated))
        return _matched(steps, others, self._same_step)

    def _same_step(self, step: tuple, other: tuple) -> bool:
        (f, relation), (g, other_relation) = step, other
        if relation != other_relation or f.free_symbols != g.free_symbols or not f.free_symbols:
            return False
        for point in _points(f.free_symbols):
            at_f, at_g = f.subs(point), g.subs(point)
            if at_f.is_finite and at_g.is_finite and not _is_zero(at_f) and not _is_zero(at_g):
                positive = relation in "=≠" or (at_f / at_g).is_positive
                return bool(positive) and _identical(f * at_g, g * at_f)
        return False

    def _same_value(self, expected: Any, stated: Any) -> bool:
        if isinstance(expected, Chain) or isinstance(stated, Chain):
            return False
        for one, other in ((expected, stated), (stated, expected)):
            if _is_set(one) and len(one.items) == 1 and not _is_set(other):
                return self.same(one.items[0], other)
        if isinstance(expected, Items) or isinstance(stated, Items):
            return isinstance(expected, Items) and isinstance(stated, Items) and self._same_items(expected, stated)
        if isinstance(expected, sympy.MatrixBase) or isinstance(stated, sympy.MatrixBase):
            matrices = isinstance(expected, sympy.MatrixBase) and isinstance(stated, sympy.MatrixBase)
            return matrices and expected.shape == stated.shape and all(map(_identical, expected, stated))
        return _identical(expected, stated) or self._rounded(expected, stated)

    def _same_items(self, expected: Items, stated: Items) -> bool:
        kinds = {expected.opening, stated.opening}
        if kinds == {"{"}:
            return all(
                any(self._same_item(one, other) for other in others.items)
                for ones, others in ((expected, stated), (stated, expected))
                for one in ones.items
            )
        if kinds == {":"}:
            first, other = expected.items[0], stated.items[0]
            pairs = zip(expected.items, stated.items, strict=True)
            return len(expected.items) == len(stated.items) and all(_identical(first * b, other * a) for a, b in pairs)
        if kinds == {"", "∨"} and any(
            isinstance(item, Chain) and not _is_equation(item) for item in (*expected.items, *stated.items)
        ):
            return False
        fewer, more = sorted(
            len({item.sides[0] for item in node.items if _is_equation(item)}) for node in (expected, stated)
        )
        if kinds <= {"∨", "∪"} or (kinds <= {"", "{", "∨"} and (fewer or more < 2)):
            return _matched(expected.items, stated.items, self._same_item)
        if "" in kinds and Interval in (type(expected), type(stated)):
            return False  # 1 < x < 2 is not 1, 2; x = 1, y = 2 is 1, 2 and not 2, 1
        brackets = {(node.opening, node.closing) for node in (expected, stated)} - {("", "")}
        if kinds & {"{", "∪", "∨", ":"} or len(expected.items) != len(stated.items):
            return False
        if brackets and brackets != {("(", ")")} and ("" in kinds or (len(brackets) > 1 and len(expected.items) < 3)):
            return False
        return all(map(self.same, expected.items, stated.items))

    def _same_item(self, expected: Any, stated: Any) -> bool:
        """Return whether two items are the same; in a set, {1} is not 1."""
        return _is_set(expected) == _is_set(stated) and self.same(expected, stated)

    def _rounded(self, expected: sympy.Expr, stated: sympy.Expr) -> bool:
        """Return whether one is a decimal that rounds the other, a number without a finite decimal."""
        for decimal, exact in ((stated, expected), (expected, stated)):
            if decimal in self.decimals and exact.is_real and not exact.free_symbols and not _terminates(exact):
                places = max(sympy.multiplicity(prime, decimal.q) for prime in (2, 5))
                digits = len(str(abs(decimal) * 10**places))
                return digits >= DIGITS and bool(abs(decimal - exact) * 10**DIGITS <= abs(exact))
        return False


def _is_set(value: Any) -> bool:
    return isinstance(value, Items) and value.opening == "{"


def _terminates(number: sympy.Expr) -> bool:
    return number.is_Rational and pow(10, number.q.bit_length(), number.q) == 0


def _is_name(side: Any) -> bool:
    r"""Return whether a side is a name: x, f(3), \text{Area}, AB or |AB|; (x, y) too."""
    if isinstance(side, Items):
        return side.opening == "(" and all(map(_is_name, side.items))
    if isinstance(side, sympy.Abs):
        side = side.args[0]
    if side == sympy.E:
        return True
    parts = side.args if isinstance(side, sympy.Mul) else (side,)
    return all(isinstance(part, Symbol) and (len(parts) == 1 or part.name.isupper()) for part in parts)


def _by_name(names: tuple, value: Any) -> tuple[tuple, Any]:
    """Return (names, value), but x = 1, y = 2 without names for (x, y) = (1, 2)."""
    tuples = [side.items for side in (*names, value) if isinstance(side, Items) and side.opening + side.closing == "()"]
    if len(tuples) == 2 == 1 + len(names) and len(tuples[0]) == len(tuples[1]):
        return (), Items("", tuple(Chain(pair, ("=",)) for pair in zip(*tuples, strict=True)), "")
    return names, value


def _ordered(chain: Chain) -> list[tuple]:
    """Return (left, right, relation) of each step, with the smaller side on the left."""
    steps = zip(chain.sides, chain.sides[1:], chain.relations, strict=False)
    return [(b, a, {">": "<", "≥": "≤"}[r]) if r in ">≥" else (a, b, r) for a, b, r in steps]


def _is_equation(node: Any) -> bool:
    return isinstance(node, Chain) and set(node.relations) <= {"=", "≈"}


def _intersection(chains: tuple) -> Chain | None:
    """Return 1 < x < 3 for x > 1 and x < 3; None unless all are inequalities of one variable."""
    intervals = [_interval(chain) if isinstance(chain, Chain) else None for chain in chains]
    if None in intervals or len({name for name, _ in intervals}) > 1:
        return None
    name = intervals[0][0]
    lower, below = max(((i.items[0], i.opening == "(") for _, i in intervals))
    upper, above = min(((i.items[1], i.closing == "]") for _, i in intervals))
    return Chain((lower, name, upper), ("<" if below else "≤", "≤" if above else "<"))


def _interval(chain: Chain) -> tuple[Symbol, Items] | None:
    """Return the variable of an inequality and the interval that it is in; None for other relations."""
    names = [side for side in chain.sides if isinstance(side, Symbol)]
    ends = {"lower": (-oo, "<"), "upper": (oo, "<")}
    for small, large, relation in _ordered(chain):
        bound = small if large in names else large
        if len(names) != 1 or relation not in "<≤" or not isinstance(bound, sympy.Expr) or bound.free_symbols:
            return None
        end = "lower" if large in names else "upper"
        if ends[end][0].is_finite:
            return None
        ends[end] = (bound, relation)
    (lower, below), (upper, above) = ends["lower"], ends["upper"]
    return names[0], Interval("[" if below == "≤" else "(", (lower, upper), "]" if above == "≤" else ")")


def _matched(ones: Iterable, others: Iterable, same: Callable[[Any, Any], bool]) -> bool:
    """Return whether each element has its partner among the others, in any order, and none is left over."""
    left = list(others)
    for one in ones:
        partner = next((place for place, other in enumerate(left) if same(one, other)), None)
        if partner is None:
            return False
        del left[partner]
    return not left


def _identical(a: sympy.Expr, b: sympy.Expr) -> bool:
    """Compare two expressions: as complex functions of real variables or, failing that, by `_extends`."""
    if a == b:
        return True
    if a.has(oo, -oo) or b.has(oo, -oo):
        return False
    symbols = a.free_symbols | b.free_symbols
    if not symbols:
        return _is_zero(a - b)
    if a.free_symbols != b.free_symbols:
        return False
    if (a - b).has(sympy.factorial) and sympy.combsimp(a - b) == 0:
        return True
    held = 0
    for point in _points(symbols, whole=a.has(sympy.floor, sympy.ceiling) or b.has(sympy.floor, sympy.ceiling)):
        left, right = a.subs(point), b.subs(point)
        if left.has(sympy.nan, sympy.zoo, oo) or right.has(sympy.nan, sympy.zoo, oo):
            continue
        if not _is_zero(left - right):
            return _extends(a, b)
        held += 1
    return held > 2


def _extends(expected: sympy.Expr, stated: sympy.Expr) -> bool:
    """Return whether `stated` is real and equal wherever `expected` is real, as sqrt(1/n) for 1/sqrt(n).

    So is ln(ab) for ln a + ln b. If two variables are negative it may be undefined, since sqrt(a) sqrt(b) is written
    for sqrt(ab). A reference that is real almost nowhere, or has i, is not compared like this.
    """
    if not any(part.has(sympy.log) or _roots(part) for part in (expected, stated)) or expected.has(sympy.I):
        return False
    held = 0
    for point in _points(expected.free_symbols, scales=(1, 9, 60, Rational(1, 5), Rational(1, 40))):
        right = _real(expected, point)
        if right is None:
            continue
        left = _real(stated, point)
        if left is None and sum(value.is_negative for value in point.values()) > 1:
            continue
        if left is None or not _is_zero(left - right):
            return False
        held += 1
    return held > 2


def _roots(node: sympy.Expr) -> set[sympy.Expr]:
    return {power for power in node.atoms(sympy.Pow) if not power.exp.is_Integer}


def _real(node: sympy.Expr, point: dict[Symbol, Rational]) -> sympy.Expr | None:
    """Return the value at a point in real arithmetic, with real cube roots of negative numbers; None if it has none."""
    if not node.args:
        node = point.get(node, node)
        return node if node.is_real and node.is_finite else None
    values = [_real(argument, point) for argument in node.args]
    if None in values:
        return None
    if node.is_Pow and values[0].is_negative and not values[1].is_integer:
        if not node.exp.is_Rational or node.exp.q % 2 == 0:
            return None
        values[0], sign = -values[0], (-1) ** node.exp.p
        return sign * node.func(*values)
    value = node.func(*values)
    return value if value.is_real and value.is_finite else None


def _points(
    symbols: set[Symbol], *, scales: Iterable[Rational] = (1, 9, 60), whole: bool = False
) -> Iterator[dict[Symbol, Rational]]:
    """Yield values of the variables: rational, small and large, of all signs, the same in every run.

    `whole`: also whole numbers, at which rounded quotients differ from others.
    """
    random = Random(0)
    for scale, signs in product(scales, ([1], [-1], [-1, 1])):
        yield {
            symbol: scale * random.choice(signs) * Rational(random.randint(30, 400), 101)
            for symbol in sorted(symbols, key=str)
        }
    first, *others = sorted(symbols, key=str)
    for number in (*range(13), *(random.randrange(10**6) for _ in range(12))) if whole else ():
        yield {first: number} | {symbol: random.randrange(13) for symbol in others}


def _is_zero(number: sympy.Expr) -> bool:
    """Return whether a number is zero, computed with more bits than the numbers in it have together."""
    if number.is_Rational:
        return number == 0
    bits = 200 + sum(part.p.bit_length() + part.q.bit_length() for part in number.atoms(Rational))
    # Add bits for the sizes of powers, so that e^-200 is not lost beside e^200.
    for power in number.atoms(sympy.Pow, sympy.exp):
        size = abs(power.exp.evalf(9) * sympy.log(power.base).evalf(9))
        bits += int(4 * size) if size.is_finite else 0
    real, imaginary, of_real, of_imaginary = evalf(number, 20, {"maxprec": bits})
    # Cancellation leaves no accurate bit of a zero, however many were computed.
    return not any(part and accuracy > 1 for part, accuracy in ((real, of_real), (imaginary, of_imaginary)))


def compare(reference: str, answer: str) -> str:
    """Return EQUAL or UNEQUAL; UNPARSED if the reference is no expression."""
    try:
        expected = Parser(reference)
        right = expected.answer()
    except Unparsed:
        return UNPARSED
    try:
        stated = Parser(answer)
        left = stated.answer()
        same = Comparison(expected.decimals | stated.decimals).same(right, left)
    except Exception:
        return UNEQUAL
    return EQUAL if same else UNEQUAL


def serve() -> None:
    """Answer one JSON line [reference, answer] with one word, until standard input ends."""
    import resource

    # The parent handles these signals; the helper ends when its pipe closes.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, resource.getrlimit(resource.RLIMIT_AS)[1]))
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
        try:
            word = compare(*json.loads(line))
        except Exception:
            word = UNEQUAL
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(word, flush=True)


if __name__ == "__main__":
    serve()
