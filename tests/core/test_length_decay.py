"""The share of the learning rate, step by step."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from dvp.core.length_decay import LearningRateShare, LengthDecay

SETTINGS = LengthDecay(growth=0.25, patience=2, factor=0.5, every=3, lowest=0.2)


def shares(lengths, settings=SETTINGS):
    rate, seen = LearningRateShare(settings), []
    for length in lengths:
        rate.observe({"response_tokens_mean": length})
        seen.append(rate.value)
    return seen


def test_it_halves_at_the_surge_and_every_three_steps_down_to_the_lowest():
    #          means of two: 100  90   90   110 (1.22 of 90), 125 (1.39): the surge
    lengths = [100.0, 100.0, 80.0, 100.0, 120.0, 130.0, 20.0, 20.0, 20.0, 20.0, 20.0, 20.0, 20.0]
    assert shares(lengths) == [1.0] * 5 + [0.5] * 3 + [0.25] * 3 + [0.2] * 2


@given(st.lists(st.integers(1, 60).map(float), max_size=40))
def test_the_rate_falls_from_the_first_surge_on_and_never_rises(lengths):
    whole = shares(lengths)
    assert all(later <= earlier for earlier, later in pairwise(whole))
    assert all(share == 1 or 0.2 <= share <= 0.5 for share in whole)
    means = [(one + other) / 2 for one, other in pairwise(lengths)]
    surges = [step for step, mean in enumerate(means) if step and mean > 1.25 * min(means[:step])]
    fallen = [step for step, share in enumerate(whole) if share < 1]
    assert fallen[:1] == [step + 1 for step in surges[:1]]


def test_a_lowest_share_above_the_factor_is_refused():
    with pytest.raises(ValidationError, match="must not exceed factor"):
        SETTINGS.changed(lowest=0.6)
