import math

import numpy as np
import pytest

from dvp.analysis import bootstrap


def test_interval_covers_sampling_noise_as_theory_says():
    rng = np.random.default_rng(0)
    correct = rng.random((400, 8)) < 0.5
    drawn = bootstrap.replicates({"a": [correct]}, 4000, 0)["a"]
    assert drawn.mean() == pytest.approx(correct.mean(), abs=2e-3)
    # Var of the problems' means over P, and once more the samples' own noise.
    rate = correct.mean(axis=1)
    expected = math.sqrt((rate.var() + (rate * (1 - rate)).mean() / 8) / 400)
    assert drawn.std() == pytest.approx(expected, rel=0.05)
    low, high = bootstrap.interval(drawn)
    assert low < correct.mean() < high
    assert high - low == pytest.approx(2 * 1.96 * expected, rel=0.08)


def test_problems_are_paired():
    """Where problems are all right or all wrong, the same for both arms, the difference has no noise."""
    correct = np.repeat(np.arange(30)[:, None] % 3 == 0, 4, axis=1)
    drawn = bootstrap.replicates({"a": [correct], "b": [correct, correct]}, 500, 0)
    assert drawn["a"].std() > 0.05
    np.testing.assert_array_equal(drawn["a"], drawn["b"])


def test_seeds_are_resampled_from_three_on():
    right, wrong = np.ones((5, 2), dtype=bool), np.zeros((5, 2), dtype=bool)
    two = bootstrap.replicates({"a": [right, wrong]}, 300, 0)["a"]
    three = bootstrap.replicates({"a": [right, wrong, wrong], "b": [right, wrong, wrong]}, 300, 0)
    assert (two == 0.5).all()
    assert set(np.round(three["a"] * 3)) == {0, 1, 2, 3}
    np.testing.assert_array_equal(three["a"], three["b"])
    assert not bootstrap.resamples_seeds([0, 1])
    assert bootstrap.resamples_seeds([0, 1, 2])


def test_an_arm_does_not_depend_on_the_others():
    rng = np.random.default_rng(1)
    a, b = rng.random((20, 4)) < 0.4, rng.random((20, 4)) < 0.6
    alone = bootstrap.replicates({"a": [a]}, 100, 3)["a"]
    np.testing.assert_array_equal(alone, bootstrap.replicates({"b": [b], "a": [a]}, 100, 3)["a"])
    assert (alone != bootstrap.replicates({"a": [a]}, 100, 4)["a"]).any()


def test_undefined_interval():
    assert all(map(math.isnan, bootstrap.interval(np.array([1.0, np.inf]))))
