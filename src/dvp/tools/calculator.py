"""Calculator: a tool that evaluates one short arithmetic expression exactly.

The grammar has only numbers and operators, and a value is computed as soon as its operator is read. No call can
therefore run code, nest too deeply or take long: a power that would be large is refused before it is computed.
"""

from collections.abc import Sequence
from decimal import Decimal, localcontext
from fractions import Fraction
from operator import add, mul, sub, truediv

from lark import Lark, LarkError, Transformer, v_args

from dvp.experiment.tools import Calculator
from dvp.tools.tool import Answer

LONGEST = 200  # characters of an expression
LARGEST_BITS = 4096  # bits of a numerator or a denominator
DIGITS = 12  # significant digits of a result that is not an integer
OPERATIONS = {"+": add, "*": mul, "×": mul, "·": mul, "/": truediv, "÷": truediv, "-": sub, "−": sub}
GRAMMAR = r"""
?sum: product | sum SIGN product -> binary
?product: signed | product TIMES signed -> binary
?signed: power | SIGN signed -> unary
?power: atom | atom POWER signed -> binary
?atom: NUMBER -> number | "(" sum ")"
SIGN: /[-−+]/
TIMES: /[*×·\/÷]/
POWER: /\^|\*\*/
NUMBER: /[0-9]+(\.[0-9]+)?|\.[0-9]+/
%ignore /[ \t\r\n]+/
"""


class _RefusedError(Exception):
    """Raised for an expression that is not computed; the message says why."""


@v_args(inline=True)
class _Compute(Transformer):
    def number(self, digits: str) -> Fraction:
        return Fraction(digits)

    def unary(self, sign: str, value: Fraction) -> Fraction:
        return value if sign == "+" else -value

    def binary(self, left: Fraction, sign: str, right: Fraction) -> Fraction:
        try:
            result = self._power(left, right) if sign in ("^", "**") else OPERATIONS[sign](left, right)
        except ZeroDivisionError:
            raise _RefusedError("division by zero") from None
        if max(result.numerator.bit_length(), result.denominator.bit_length()) > LARGEST_BITS:
            raise _RefusedError("the number is too large")
        return result

    def _power(self, base: Fraction, exponent: Fraction) -> Fraction:
        if exponent.denominator != 1:
            raise _RefusedError("an exponent must be an integer")
        bits = max(abs(base.numerator), base.denominator).bit_length() - 1
        if bits * abs(exponent) > LARGEST_BITS:
            raise _RefusedError("the number is too large")
        return base ** int(exponent)


class CalculatorTool:
    """Tool that answers each call with the value of its arithmetic expression, or with an error."""

    def __init__(self, settings: Calculator) -> None:
        """Build the parser. The settings only select this tool."""
        # With LALR the transformer computes while the text is read: there is no tree to recurse through.
        self._parser = Lark(GRAMMAR, start="sum", parser="lalr", transformer=_Compute())

    def answers(self, calls: Sequence[str]) -> list[Answer]:
        """Answer each call as Tool.answers does: an integer, or a decimal of DIGITS digits."""
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
        if value.denominator == 1:
            return Answer(str(value.numerator))
        with localcontext(prec=DIGITS):
            return Answer(f"{(Decimal(value.numerator) / Decimal(value.denominator)).normalize()}")
