"""The calculator against Python's own integers, and what it refuses."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dvp.experiment.tools import Calculator
from dvp.tools import make_tool

CALCULATOR = make_tool(Calculator(kind="calculator"))


@given(st.integers(0, 10**30), st.integers(1, 10**30), st.integers(0, 40), st.sampled_from(["+", "-", "*"]))
def test_integers_are_exact(left, right, exponent, sign):
    value = {"+": left + right, "-": left - right, "*": left * right}[sign]
    assert CALCULATOR.answers([f"{left} {sign} {right}"])[0].text == str(value)
    assert CALCULATOR.answers([f"-({left})^{exponent}"])[0].text == str(-(left**exponent))
    quotient = CALCULATOR.answers([f"{left}/{right}"])[0].text
    assert math.isclose(float(quotient), left / right, rel_tol=1e-11)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        ("12×34 − 8", "400"),
        ("(2 + 3) * 4", "20"),
        ("64 / 4 / 2", "8"),
        ("-2^2", "-4"),
        ("2^-1", "0.5"),
        ("2**3**2", "512"),
        ("1/3", "0.333333333333"),
        ("0.1 + 0.2", "0.3"),
        (".5 * 4", "2"),
        ("1^99999999999999", "1"),
        ("\n5 -\t−3 ", "8"),
        (f"{'(' * 90}1{')' * 90}", "1"),
    ],
)
def test_it_reads_as_one_does(call, text):
    (answer,) = CALCULATOR.answers([call])
    assert (answer.text, answer.failed) == (text, False)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        ("1 / 0", "division by zero"),
        ("0^-1", "division by zero"),
        ("9^9^9^9", "too large"),
        ("*".join(["9^999"] * 20), "too large"),
        ("2^0.5", "exponent must be an integer"),
        ("1" * 201, "more than 200 characters"),
        ("", "expected numbers"),
        ("(" * 200, "expected numbers"),
        ("__import__('os').system('true')", "expected numbers"),
        ("1e9", "expected numbers"),
        ("٣ + 1", "expected numbers"),
    ],
)
def test_a_mistake_has_an_answer(call, says):
    (answer,) = CALCULATOR.answers([call])
    assert answer.failed
    assert answer.text.startswith("error: ")
    assert says in answer.text


@given(st.text(alphabet="0123456789+-*/^(). ", max_size=60))
def test_no_call_raises_or_takes_long(call):
    (answer,) = CALCULATOR.answers([call])
    assert len(answer.text) < 1300
