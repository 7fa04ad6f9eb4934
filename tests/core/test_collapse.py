import math
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dvp.core import collapse
from dvp.core.collapse import CollapseDetector


def row(**metrics):
    return {"k3": 1e-4, "gradient_norm": 0.2, "entropy": 1.0, "reward": 0.5} | metrics


def fed(detector, rows):
    for step, one in enumerate(rows, start=1):
        detector.observe(step, one)
    return detector


@pytest.mark.parametrize("name", ["k3", "gradient_norm"])
def test_an_infinite_metric_is_a_collapse_at_once(name):
    """A large one is none, and a skipped step has no gradient norm."""
    detector = fed(CollapseDetector(), [row(**{name: value}) for value in (1e304, None, math.nan, math.inf, 1.0)])
    assert (detector.collapsed_at, detector.reason) == (4, f"{name} is inf")


@given(st.integers(0, 30))
def test_replayed_rows_give_the_same_verdict(split):
    rows = [row(reward=value) for value in [0.6] * 12 + [0.1] * 18]
    whole = fed(CollapseDetector(), rows)
    resumed = fed(CollapseDetector(), rows[:split])
    for step, one in enumerate(rows[split:], start=split + 1):
        resumed.observe(step, one)
    assert (whole.collapsed_at, whole.reason) == (resumed.collapsed_at, resumed.reason)
    # Of eight steps, five at 0.1 and three at 0.6 have a mean of 0.2875, the first below 0.3.
    assert whole.collapsed_at == 17
    assert whole.reason == "the mean reward of 8 steps is 0.287, and was 0.6"


def rewards(values):
    return fed(CollapseDetector(), [row(reward=value) for value in values])


@settings(max_examples=100)
@given(
    st.lists(st.sampled_from([0.0, 0.125, 0.3125, 0.5625, 1.0, math.nan]), max_size=30),
    st.integers(1, 5),
    st.sampled_from([0.31, 0.77]),
)
def test_falls_against_numpy(values, patience, share):
    """Steps without a reward are left out of the means."""
    expected, highest, seen = None, -math.inf, []
    for step, value in enumerate(values, start=1):
        if math.isnan(value):
            continue
        seen.append(value)
        if len(seen) >= patience:
            mean = np.mean(seen[-patience:])
            if mean < share * highest:
                expected = step
                break
            highest = max(highest, mean)
    with patch.multiple(collapse, PATIENCE=patience, FALL=share):
        assert rewards(values).collapsed_at == expected
