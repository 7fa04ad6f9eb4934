import math
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dvp.core.collapse import CollapseDetector
from dvp.errors import DvpError


def row(**metrics):
    return {"k3": 1e-4, "gradient_norm": 0.2, "entropy": 1.0, "reward": 0.5} | metrics


def spiking(**options):
    return CollapseDetector(**{"sigmas": 6.0} | options)


def fed(detector, rows):
    for step, one in enumerate(rows, start=1):
        detector.observe(step, one)
    return detector


def noise(count, seed=0, mean=0.2, spread=0.02):
    generator = random.Random(seed)
    return [generator.gauss(mean, spread) for _ in range(count)]


def test_the_first_spike_is_remembered():
    values = [*noise(60), 0.5, *noise(30), 99.0]
    detector = fed(spiking(), [row(gradient_norm=value) for value in values])
    assert detector.collapsed_at == 61
    assert detector.reason.startswith("gradient_norm 0.5 is ")


def test_ordinary_variation_is_no_collapse():
    rows = [row(k3=k3, gradient_norm=norm) for k3, norm in zip(noise(2000, 1), noise(2000, 2), strict=True)]
    detector = fed(spiking(), rows)
    assert detector.collapsed_at is None
    assert detector.reason is None


@settings(max_examples=100)
@given(
    st.lists(st.sampled_from([0.0, 0.1, 0.11, 0.12, 0.5, 0.9]), min_size=1, max_size=40),
    st.integers(2, 6),
    st.integers(0, 6),
    st.sampled_from([1.53, 2.97]),  # no value lies just at the bound, where rounding decides
)
def test_spikes_against_numpy(values, warmup, more, sigmas):
    window = warmup + more
    expected = None
    for index, value in enumerate(values):
        last = np.array(values[max(0, index - window) : index])
        if len(last) >= warmup and value > last.mean() + sigmas * max(last.std(), 1e-6 * last.mean(), 1e-8):
            expected = index + 1
            break
    detector = spiking(monitored=("k3",), window=window, warmup=warmup, sigmas=sigmas)
    assert fed(detector, [row(k3=value) for value in values]).collapsed_at == expected


def test_only_the_last_steps_are_the_measure():
    """Wild at first, quiet since: judged by the quiet part."""
    values = [*noise(50, spread=5.0), *noise(128), 1.0]
    assert fed(spiking(), [row(k3=value) for value in values]).collapsed_at == len(values)
    assert fed(spiking(window=200), [row(k3=value) for value in values]).collapsed_at is None


@pytest.mark.parametrize("constant", [0.0, 1.0, 0.1, -3.0, 1e9, 1e-4])
def test_a_constant_metric_does_not_collapse_by_rounding(constant):
    values = [constant] * 100 + [math.nextafter(constant, math.inf), float(np.float32(constant)), constant + 1e-9]
    assert fed(spiking(), [row(k3=value) for value in values]).collapsed_at is None


def test_a_constant_metric_that_jumps_does():
    assert fed(spiking(), [row()] * 100 + [row(k3=2e-4)]).collapsed_at == 101


def test_nothing_spikes_before_the_warm_up_is_over():
    values = [*noise(31), 50.0, *noise(10)]
    assert fed(spiking(warmup=32), [row(k3=value) for value in values]).collapsed_at is None
    assert fed(spiking(warmup=31), [row(k3=value) for value in values]).collapsed_at == 32


def test_a_fall_is_no_spike():
    assert fed(spiking(), [row(k3=value) for value in [*noise(60), -50.0]]).collapsed_at is None


def test_steps_without_a_value_do_not_count():
    """A skipped step has no gradient norm."""
    values = [0.2, None, math.nan] * 20 + [5.0]
    rows = [row(gradient_norm=value) for value in values]
    assert fed(spiking(warmup=20), rows).collapsed_at == 61
    assert fed(spiking(warmup=21), rows).collapsed_at is None


@pytest.mark.parametrize(("huge", "step"), [(1e304, 6), (math.inf, 1)])
def test_values_that_overflow_are_survived(huge, step):
    """A k3 may be as large as e^700, whose square is not a float."""
    values = [huge, huge, huge, 1.0, huge, 1e308]
    assert fed(spiking(warmup=3), [row(k3=value) for value in values]).collapsed_at == step


def test_kl_above_its_level_is_a_collapse_at_once():
    detector = fed(spiking(kl_above=0.1), [row(), row(k3=0.1), row(k3=0.11), row()])
    assert detector.collapsed_at == 3
    assert detector.reason == "k3 0.11 is above 0.1"


@pytest.mark.parametrize("name", ["entropy", "reward"])
def test_a_low_metric_needs_patience(name):
    values = [0.1, 0.1, 0.3, 0.1, None, 0.1, 0.1, 0.1, 0.1]
    detector = fed(spiking(patience=3, **{f"{name}_below": 0.3}), [row(**{name: value}) for value in values])
    assert detector.collapsed_at == 8
    assert detector.reason == f"{name} was below 0.3 for 3 steps"


def test_all_reasons_of_the_step_are_given():
    detector = fed(spiking(kl_above=0.1, reward_below=0.1, patience=1), [row(k3=1.0, reward=0.0)])
    assert detector.reason == "k3 1 is above 0.1; reward was below 0.1 for 1 steps"


@given(st.integers(0, 90), st.integers(0, 5))
def test_replayed_rows_give_the_same_verdict(split, seed):
    rows = [row(k3=value) for value in [*noise(80, seed, spread=0.1), 2.0, *noise(9)]]
    whole = fed(spiking(), rows)
    resumed = fed(spiking(), rows[:split])
    for step, one in enumerate(rows[split:], start=split + 1):
        resumed.observe(step, one)
    assert (whole.collapsed_at, whole.reason) == (resumed.collapsed_at, resumed.reason)
    assert whole.collapsed_at == 81


def test_a_row_without_a_watched_metric_is_named():
    with pytest.raises(DvpError, match="step 7 have no 'gradient_norm'"):
        spiking().observe(7, {"k3": 0.1})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"warmup": 1}, "warmup"),
        ({"warmup": 129}, "warmup"),
        ({"sigmas": 0.0}, "sigmas"),
        ({"sigmas": math.nan}, "sigmas"),
        ({"patience": 0}, "patience"),
    ],
)
def test_settings_outside_their_ranges(settings, message):
    with pytest.raises(DvpError, match=message):
        spiking(**settings)


# A fall of the reward


def rewards(values, **options):
    return fed(CollapseDetector(**options), [row(reward=value) for value in values])


def test_a_reward_that_falls_below_half_of_what_it_was_is_a_collapse_also_in_a_short_run():
    """Sixteen steps: before the warm-up of spikes."""
    detector = rewards([0.6] * 8 + [0.1] * 8)
    # Of eight steps, five at 0.1 and three at 0.6 have a mean of 0.2875, the first below 0.3.
    assert detector.collapsed_at == 13
    assert detector.reason == "the mean reward of 8 steps is 0.287, and was 0.6"


@pytest.mark.parametrize(
    "values",
    [
        [0.5] * 7,  # too few for a mean
        [0.0] * 40,  # nothing to fall from
        [0.9] * 8 + [0.46] * 30,  # worse, but more than half
        [0.8] * 8 + [0.0] * 4 + [0.8] * 30,  # a short dip
    ],
)
def test_what_is_no_fall(values):
    assert rewards(values).collapsed_at is None


def test_a_slow_fall_is_one_as_well():
    values = [0.8 * 0.97**step for step in range(60)]
    means = [np.mean(values[max(0, end - 8) : end]) for end in range(1, 61)]
    expected = next(end for end in range(9, 61) if means[end - 1] < 0.5 * means[7])
    assert rewards(values).collapsed_at == expected


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
    assert rewards(values, patience=patience, reward_fall=share).collapsed_at == expected


@pytest.mark.parametrize("share", [0.0, 1.0, -0.1, math.nan])
def test_a_share_outside_its_range(share):
    with pytest.raises(DvpError, match="reward_fall"):
        CollapseDetector(reward_fall=share)


def test_without_a_share_nothing_falls():
    assert rewards([0.9] * 20 + [0.0] * 40, reward_fall=None).collapsed_at is None


def test_a_spike_counts_only_where_it_is_asked_for():
    values = [*noise(60), 50.0, *noise(30)]
    assert fed(CollapseDetector(), [row(gradient_norm=value) for value in values]).collapsed_at is None
    assert fed(spiking(), [row(gradient_norm=value) for value in values]).collapsed_at == 61
