import math
from unittest.mock import patch

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from dvp.core import collapse
from dvp.core.collapse import CollapseDetector


def fed(detector, rows):
    for step, one in enumerate(rows, start=1):
        detector.observe(step, one)
    return detector


@given(st.integers(0, 30))
def test_replayed_rows_give_the_same_verdict(split):
    rows = [{"reward": value} for value in [0.6] * 12 + [0.1] * 18]
    whole = fed(CollapseDetector(), rows)
    resumed = fed(CollapseDetector(), rows[:split])
    for step, one in enumerate(rows[split:], start=split + 1):
        resumed.observe(step, one)
    assert (whole.collapsed_at, whole.reason) == (resumed.collapsed_at, resumed.reason)
    # Of eight steps, five at 0.1 and three at 0.6 have a mean of 0.2875, the first below 0.3.
    assert whole.collapsed_at == 17
    assert whole.reason == "the mean reward of 8 steps is 0.287, and was 0.6"


def rewards(values):
    return fed(CollapseDetector(), [{"reward": value} for value in values])


@settings(max_examples=100)
@given(
    st.lists(st.sampled_from([0.0, 0.125, 0.3125, 0.5625, 1.0]), max_size=30),
    st.integers(1, 5),
    st.sampled_from([0.31, 0.77]),
)
def test_falls_against_numpy(values, patience, share):
    expected, highest, seen = None, -math.inf, []
    for step, value in enumerate(values, start=1):
        seen.append(value)
        if len(seen) >= patience:
            mean = np.mean(seen[-patience:])
            if mean < share * highest:
                expected = step
                break
            highest = max(highest, mean)
    with patch.multiple(collapse, PATIENCE=patience, FALL=share):
        assert rewards(values).collapsed_at == expected
