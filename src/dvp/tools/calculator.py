"""A calculator: exact arithmetic on one short expression.

The grammar knows numbers and operators and nothing else, and a value is computed as soon as its operator is read, so no
call can run code, nest too deeply, or take long: powers are refused before they are computed if they would be large.
"""

from collections.abc import Callable, Sequence
from decimal import Decimal, localcontext
from fractions import Fraction

from lark import Lark, LarkError, Transformer, v_args

from dvp.tools.tool import Answer

LONGEST = 200  # characters of an expression
LARGEST_BITS = 4096  # of a numerator or a denominator
DIGITS = 12  # of a result that is no integer
GRAMMAR = r"""
?sum: product | sum "+" product -> add | sum ("-" | "−") product -> subtract
?product: signed | product ("*" | "×" | "·") signed -> multiply | product ("/" | "÷") signed -> divide
?signed: power | ("-" | "−") signed -> negative | "+" signed
?power: atom | atom ("^" | "**") signed -> power
?atom: NUMBER -> number | "(" sum ")"
NUMBER: /[0-9]+(\.[0-9]+)?|\.[0-9]+/
%ignore /[ \t\r\n]+/
"""


class _RefusedError(Exception):
    """The expression cannot be computed; the message says why."""


def _bounded(function: Callable[..., Fraction]) -> Callable[..., Fraction]:
    def bounded(self: Transformer, *values: Fraction) -> Fraction:
        result = function(self, *values)
        if max(result.numerator.bit_length(), result.denominator.bit_length()) > LARGEST_BITS:
            raise _RefusedError("the number is too large")
        return result

    return bounded


@v_args(inline=True)
class _Compute(Transformer):
    def number(self, digits: str) -> Fraction:
        return Fraction(digits)

    def negative(self, value: Fraction) -> Fraction:
        return -value

    @_bounded
    def add(self, left: Fraction, right: Fraction) -> Fraction:
        return left + right

    @_bounded
    def subtract(self, left: Fraction, right: Fraction) -> Fraction:
        return left - right

    @_bounded
    def multiply(self, left: Fraction, right: Fraction) -> Fraction:
        return left * right

    @_bounded
    def divide(self, left: Fraction, right: Fraction) -> Fraction:
        if not right:
            raise _RefusedError("division by zero")
        return left / right

    @_bounded
    def power(self, base: Fraction, exponent: Fraction) -> Fraction:
        if exponent.denominator != 1:
            raise _RefusedError("an exponent must be an integer")
        if not base and exponent < 0:
            raise _RefusedError("division by zero")
        bits = max(abs(base.numerator), base.denominator).bit_length() - 1
        if bits * abs(exponent) > LARGEST_BITS:
            raise _RefusedError("the number is too large")
        return base ** int(exponent)


class CalculatorTool:
    """A Tool; see the module."""

    name = "calculator"

    def __init__(self) -> None:
        # With LALR the transformer computes while the text is read: no tree, hence no recursion through one.
        self._parser = Lark(GRAMMAR, start="sum", parser="lalr", transformer=_Compute())

    def answers(self, calls: Sequence[str]) -> list[Answer]:
        """See Tool.answers."""
        return [self._answer(call) for call in calls]

    def _answer(self, call: str) -> Answer:
        if len(call) > LONGEST:
            return Answer(f"error: the expression has more than {LONGEST} characters", failed=True)
        try:
            value = self._parser.parse(call)
        except _RefusedError as error:
            return Answer(f"error: {error}", failed=True)
        except LarkError:
            return Answer("error: expected numbers, + - * / ^ and parentheses", failed=True)
        return Answer(_text(value))


def _text(value: Fraction) -> str:
    """An integer exactly, anything else to so many digits."""
    if value.denominator == 1:
        return str(value.numerator)
    with localcontext(prec=DIGITS):
        return f"{(Decimal(value.numerator) / Decimal(value.denominator)).normalize()}"
