"""The helper process that compares two expressions: its limits, and what follows when it is killed."""

import multiprocessing
import sys

import pytest

from dvp.answers import equality
from dvp.answers.comparison import equal
from dvp.errors import DvpError


@pytest.mark.slow
def test_what_is_too_hard_is_wrong_and_the_next_answer_is_graded():
    hard = r"\binom{10^8}{5000000}"
    assert equality.compare("70", hard) == equality.TOO_HARD
    assert not equal("70", hard)
    assert equal("70", r"\frac{140}{2}")
    # A helper that was killed by somebody else is started again.
    equality._helper.process.kill()
    assert equality.compare("70", r"\frac{210}{3}") == equality.EQUAL


@pytest.mark.parametrize(
    "answer", ["9^{9^{9^9}}", "10^7!", "(10^7)!", r"\sqrt{2}^{10^9}", "x^{10^8}", "(8!)!!", "1e99999999"]
)
def test_powers_and_factorials_too_large_are_no_expression(answer):
    assert equality.compare("70", answer) == equality.UNEQUAL
    assert equality.compare(answer, "70") == equality.UNPARSED


def test_a_forked_process_asks_its_own_helper():
    assert equality.compare("70", r"\frac{140}{2}") == equality.EQUAL
    with multiprocessing.get_context("fork").Pool(2) as pool:
        answers = [(str(number), rf"\frac{{{2 * number}}}{{2}}") for number in range(40)]
        assert pool.starmap(equality.compare, answers, chunksize=5) == [equality.EQUAL] * 40


def test_a_helper_that_does_not_start_is_an_error(monkeypatch):
    helper = equality._Helper()
    monkeypatch.setattr(helper, "command", (sys.executable, "-c", "raise ImportError"))
    with pytest.raises(DvpError, match="the helper that compares answers does not start"):
        helper.ask("1", "2")
