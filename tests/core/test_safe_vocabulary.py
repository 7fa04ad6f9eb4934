import math

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import dvp.core.safe_vocabulary
from dvp.core.safe_vocabulary import (
    EngineOnly,
    Entropy,
    EntropyScaled,
    Feedback,
    FeedbackRho,
    FixedRho,
    MassBudget,
    TopK,
    TopNSigma,
    TopPRule,
    TrainerOnly,
    safe_mask,
    with_margin,
)
from dvp.errors import DvpError

# Quarters are exact in fp32, and so is adding a power of two to them; many are equal.
LOGITS = hnp.arrays(np.float32, (3, 37), elements=st.integers(-80, 40).map(lambda k: k / 4))
# Anything: near ties, tails far below, rows that differ only in the last bits of a large number.
ROUGH = st.builds(
    lambda values, scale, shift: (values * np.float32(scale) + np.float32(shift)).astype(np.float32),
    hnp.arrays(np.float32, (3, 23), elements=st.floats(-8, 8, width=32)),
    st.sampled_from([1e-6, 1e-2, 1.0, 4.0, 60.0]),
    st.sampled_from([0.0, 1.0, -300.0, 3e4]),
)
BUDGETS = st.one_of(st.sampled_from([0.0, 1e-9, 1e-6, 1e-3, 0.03, 0.3, 0.97]), st.floats(0.0, 0.999))
RHO = math.exp(-13)
DEFAULT = FixedRho(RHO)


def entropy_scaled(rho, alpha, target_entropy, lowest, highest):
    settings = {"rule": "entropy", "alpha": alpha, "target_entropy": target_entropy}
    return EntropyScaled(rho, Entropy(**settings, lowest=lowest, highest=highest))


def softmax(row):
    weights = np.exp(row.astype(np.float64) - row.astype(np.float64).max())
    return weights / weights.sum()


# A fixed ρ


@settings(max_examples=50)
@given(LOGITS, st.sampled_from([0.5, 1e-2, 2e-6]))
def test_it_is_the_min_p_rule(logits, rho):
    # No log ρ here is a multiple of 1/4: at a tie the ratio of probabilities rounds either way.
    expected = np.array([[p >= rho * max(row) for p in row] for row in map(softmax, logits)])
    assert (safe_mask(torch.tensor(logits), FixedRho(rho)).numpy() == expected).all()


@pytest.mark.parametrize("rule", [DEFAULT, MassBudget(0.01), entropy_scaled(1e-2, 1.0, 1.0, 1e-6, 0.5)])
@settings(max_examples=50)
@given(logits=LOGITS, shift=st.sampled_from([-64.0, 32.0, 128.0]))
def test_no_rule_sees_a_shift(rule, logits, shift):
    logits = torch.tensor(logits)
    assert torch.equal(safe_mask(logits, rule), safe_mask(logits + shift, rule))


@settings(max_examples=25)
@given(LOGITS)
def test_a_smaller_rho_keeps_more(logits):
    logits = torch.tensor(logits)
    assert not (safe_mask(logits, FixedRho(1e-2)) & ~safe_mask(logits, FixedRho(1e-3))).any()


def test_ties_at_the_threshold_are_kept():
    threshold = torch.tensor(math.log(0.1))
    below = torch.nextafter(threshold, torch.tensor(-math.inf))
    logits = torch.stack([torch.tensor(0.0), threshold, threshold, below])[None]
    assert safe_mask(logits, FixedRho(0.1)).tolist() == [[True, True, True, False]]


def test_the_default_rho_keeps_a_tie_at_13():
    """bf16 logits are multiples of 1/16 or coarser above 8, so differences of exactly 13 do occur."""
    assert safe_mask(torch.tensor([[9.75, -3.25, -3.5]]), DEFAULT).tolist() == [[True, True, False]]


@pytest.mark.parametrize("rule", [FixedRho(0.999), MassBudget(0.999), entropy_scaled(0.9, -5.0, 0.0, 0.1, 0.999)])
def test_equal_logits_are_all_safe(rule):
    assert safe_mask(torch.full((2, 37), -7.5), rule).all()


@pytest.mark.parametrize("rule", [TopK(3), TopK(9), MassBudget(0.0), MassBudget(0.3), TopNSigma(2.0), FixedRho(0.1)])
def test_no_rule_keeps_entries_that_cannot_be_sampled(rule):
    never = -torch.inf
    assert safe_mask(torch.tensor([[1.0, 0.5, never, never, never]]), rule).tolist() == [[True, True, *[False] * 3]]


@pytest.mark.parametrize("scale", [1e30, 1e-30])
def test_extreme_logits(scale):
    logits = torch.tensor([[1.0, -1.0, 0.0]]) * scale
    expected = [True, False, False] if scale > 1 else [True, True, True]
    assert safe_mask(logits, DEFAULT).tolist() == [expected]


@pytest.mark.parametrize("rule", [FixedRho(0.6), MassBudget(0.3), entropy_scaled(0.6, 0.1, 0.6, 0.1, 0.7)])
def test_the_comparison_is_in_fp32_and_outside_the_graph(rule):
    # Half a nat apart; a threshold at 100 + log(0.6) would round up to 99.5 in bf16, one at 100 + log(0.9) to 100.
    logits = torch.tensor([[100.0, 99.5]], dtype=torch.bfloat16, requires_grad=True)
    mask = safe_mask(logits, rule)
    assert mask.all()
    assert not mask.requires_grad
    log_rho = rule.log_rho(logits)
    assert log_rho.dtype == torch.float32
    assert not log_rho.requires_grad


@pytest.mark.parametrize("rule", [DEFAULT, MassBudget(0.1), entropy_scaled(1e-2, 1.0, 1.0, 1e-6, 0.5)])
def test_no_states_have_no_rho(rule):
    assert rule.log_rho(torch.zeros(0, 5)).shape == (0,)
    assert safe_mask(torch.zeros(0, 5), rule).shape == (0, 5)


@pytest.mark.parametrize("rule", [DEFAULT, MassBudget(0.0), entropy_scaled(1e-2, 1.0, 1.0, 1e-6, 0.5)])
def test_an_entry_that_cannot_be_sampled_is_not_safe(rule):
    assert safe_mask(torch.tensor([[0.0, -math.inf, -1.0]]), rule).tolist() == [[True, False, True]]


@pytest.mark.parametrize("rho", [0.0, 1.0, -0.1, 2.0, math.nan])
def test_rho_outside_its_range(rho):
    with pytest.raises(DvpError, match="rho"):
        FixedRho(rho)


# A budget of mass


def mass_budget_by_trying(row, budget):
    """The smallest set {gap ≥ t} whose complement has at most `budget` of the mass, over all thresholds t."""
    gaps = row - row.max()  # fp32, as the rule defines them
    weights = np.exp(gaps.astype(np.float64))
    best = None
    for threshold in sorted(set(gaps)):
        pruned = math.fsum(weights[gaps < threshold]) / math.fsum(weights)
        # Neither answer is wrong where the sums' own rounding decides.
        assume(pruned == 0 or abs(pruned - budget) > 1e-13)
        if pruned <= budget:
            best = gaps >= threshold
    return best


@settings(max_examples=100)
@given(st.one_of(LOGITS, ROUGH), BUDGETS)
def test_a_mass_budget_prunes_as_much_as_it_may(logits, budget):
    expected = [mass_budget_by_trying(row, budget) for row in logits]
    assert (safe_mask(torch.tensor(logits), MassBudget(budget)).numpy() == expected).all()


@settings(max_examples=100)
@given(st.one_of(LOGITS, ROUGH), BUDGETS)
def test_the_budget_holds_and_the_next_larger_threshold_breaks_it(logits, budget):
    mask = safe_mask(torch.tensor(logits), MassBudget(budget)).numpy()
    for row, kept in zip(logits, mask, strict=True):
        p = softmax(row)
        pruned = math.fsum(p[~kept])
        # The gaps that the rule compares are rounded to fp32: a relative 1e-7 of each nat below the maximum.
        slack = 1 + 1e-12 + 2e-7 * float(row.max() - row.min())
        assert pruned <= budget * slack
        gaps = row - row.max()
        least = kept & (gaps == gaps[kept].min())
        if not (gaps[least] == 0).all():
            assert (pruned + math.fsum(p[least])) * slack >= budget


@settings(max_examples=100)
@given(st.one_of(LOGITS, ROUGH), st.one_of(BUDGETS.map(MassBudget), st.integers(1, 50).map(TopK)))
def test_the_threshold_gives_back_exactly_the_set_and_lies_half_way_to_the_next_entry(logits, rule):
    """No rounding may flip an entry between the rule and whoever applies its log ρ, shifted or not."""
    logits = torch.tensor(logits)
    gaps = logits - logits.amax(dim=1, keepdim=True)
    log_rho = rule.log_rho(logits)
    mask = safe_mask(logits, rule)
    for row, own, threshold in zip(gaps.tolist(), mask.tolist(), log_rho.tolist(), strict=True):
        least = min(gap for gap, kept in zip(row, own, strict=True) if kept)
        pruned = [gap for gap, kept in zip(row, own, strict=True) if not kept]
        if pruned:
            # To the rounding of fp32, and on the right side of the two even where that has nothing between them.
            assert threshold == pytest.approx((least + max(pruned)) / 2, rel=1.2e-7)
            assert max(pruned) < threshold <= least
        else:
            assert threshold < 2 * least - 1e6
    assert torch.equal(gaps >= log_rho[:, None], mask)
    # Of shifted logits the maximum is 0, and adding it rounds nothing: the textbook form is the same set.
    assert torch.equal(gaps >= gaps.amax(dim=1, keepdim=True) + log_rho[:, None], mask)
    assert torch.equal(safe_mask(gaps, rule), mask)


@settings(max_examples=50)
@given(st.one_of(LOGITS, ROUGH), BUDGETS, BUDGETS)
def test_a_larger_budget_keeps_less(logits, one, other):
    logits = torch.tensor(logits)
    low, high = sorted([one, other])
    assert not (safe_mask(logits, MassBudget(high)) & ~safe_mask(logits, MassBudget(low))).any()


@pytest.mark.parametrize(("budget", "kept"), [(0.26, 2), (0.24, 4), (0.12, 4), (0.51, 1), (0.99, 1)])
def test_equal_entries_stand_or_fall_together(budget, kept):
    logits = torch.tensor([[0.5, 0.25, 0.125, 0.125]]).log()
    assert safe_mask(logits, MassBudget(budget)).sum() == kept


def test_a_budget_of_zero_keeps_what_float64_cannot_hold():
    logits = torch.tensor([[0.0, -2000.0, -2000.5, -1.0]])
    assert safe_mask(logits, MassBudget(0.0)).all()
    assert safe_mask(logits, MassBudget(1e-300)).tolist() == [[True, False, False, True]]


def test_tiny_masses_add_up_at_the_size_of_a_real_vocabulary():
    """In fp32, or from the largest down, 150,000 masses of 1e-9 would be lost against 1."""
    logits = torch.full((2, 150_001), -20.0) + torch.randn(2, 150_001, generator=torch.Generator().manual_seed(0))
    logits[:, 7] = 0.0
    p = logits.double().softmax(dim=1)
    budget = 1e-4
    mask = safe_mask(logits, MassBudget(budget))
    pruned = p.masked_fill(mask, 0.0).sum(dim=1)
    least = p.masked_fill(~mask, math.inf).amin(dim=1)
    assert (pruned <= budget * (1 + 1e-9)).all()
    assert (pruned + least > budget * (1 - 1e-9)).all()
    assert (mask.sum(dim=1) > 1000).all()


def test_rows_sorted_a_few_at_a_time_give_the_same(monkeypatch):
    logits = torch.randn(10, 37, generator=torch.Generator().manual_seed(0)) * 4
    whole = MassBudget(0.02).log_rho(logits)
    for limit in (1, 80, 370):
        monkeypatch.setattr(dvp.core.safe_vocabulary, "SORTED_AT_ONCE", limit)
        assert torch.equal(MassBudget(0.02).log_rho(logits), whole)


@pytest.mark.parametrize("budget", [-1e-9, 1.0, math.nan, math.inf])
def test_budget_outside_its_range(budget):
    with pytest.raises(DvpError, match="budget"):
        MassBudget(budget)


# Other sets


@settings(max_examples=50)
@given(LOGITS, st.integers(1, 50))
def test_top_k_keeps_the_k_most_likely_and_what_is_as_likely(logits, k):
    kept = safe_mask(torch.tensor(logits), TopK(k))
    for row, own in zip(logits, kept.tolist(), strict=True):
        last = sorted(row, reverse=True)[:k][-1]
        assert own == [value >= last for value in row]


@settings(max_examples=50)
@given(LOGITS, st.floats(0.1, 5))
def test_top_n_sigma_keeps_what_lies_within_n_standard_deviations(logits, n):
    gap = (logits - logits.max(axis=1, keepdims=True)).astype(np.float64)
    spread = gap.std(axis=1)
    log_rho = TopNSigma(n).log_rho(torch.tensor(logits))
    assert log_rho.tolist() == pytest.approx(list(-n * spread), rel=1e-5, abs=1e-6)
    kept = safe_mask(torch.tensor(logits), TopNSigma(n)).numpy()
    clear = np.abs(gap + n * spread[:, None]) > 1e-3
    assert (kept == (gap >= -n * spread[:, None]))[clear].all()


@pytest.mark.parametrize("rule", [TopK(2), TopK(3), TopK(4), MassBudget(0.002), MassBudget(0.001)])
def test_ties_do_not_hide_the_next_lower_entry(rule):
    """Three share the second place, and three the next."""
    logits = torch.tensor([[-8.0, 0.0, -6.0, -8.0, -6.0, -6.0, -8.0, -math.inf]])
    assert rule.log_rho(logits).tolist() == [-7.0]
    assert safe_mask(logits, rule).tolist() == [[False, True, True, False, True, True, False, False]]


@pytest.mark.parametrize("rule", [TopK(5), TopK(7), MassBudget(0.0003), MassBudget(0.0)])
def test_where_nothing_is_pruned_no_rounding_prunes_anything_and_what_cannot_be_sampled_stays_out(rule):
    logits = torch.tensor([[-8.0, 0.0, -6.0, -8.0, -6.0, -6.0, -8.0, -math.inf]])
    assert -math.inf < rule.log_rho(logits).item() < -1e6
    assert safe_mask(logits, rule).tolist() == [[True] * 7 + [False]]


def test_top_n_sigma_does_not_see_what_cannot_be_sampled():
    row = torch.tensor([[3.0, 1.0, 0.0, -math.inf]])
    assert torch.equal(TopNSigma(1.0).log_rho(row), TopNSigma(1.0).log_rho(row[:, :3]))
    assert safe_mask(row, TopNSigma(1.0)).tolist() == [[True, False, False, False]]


@settings(max_examples=50)
@given(ROUGH, st.floats(0.05, 0.999))
def test_top_p_is_the_fewest_most_likely_that_hold_p(logits, p):
    sides = TopPRule(rule="top_p", p=p).sides(None, 40)
    assert sides.trainer == sides.engine
    kept = safe_mask(torch.tensor(logits), sides.trainer).numpy()
    for row, own in zip(logits, kept, strict=True):
        weights = softmax(row)
        assert weights[own].sum() >= p - 1e-9
        # Without the least likely ones that are kept, equal in fp32, it would be less.
        gap = row - row.max()
        assert weights[own & (gap > gap[own].min())].sum() <= p + 1e-6


@pytest.mark.parametrize("k", [0, -1, 2.0])
def test_k_outside_its_range(k):
    with pytest.raises(DvpError, match="k: expected a whole number of at least 1"):
        TopK(k)


@pytest.mark.parametrize("n", [0.0, -1.0, math.inf, math.nan])
def test_n_outside_its_range(n):
    with pytest.raises(DvpError, match="n: expected a finite number above 0"):
        TopNSigma(n)


@settings(max_examples=50)
@given(LOGITS, hnp.arrays(np.float32, (3, 37), elements=st.sampled_from([-1.0, 1.0, 0.0])), st.floats(1e-3, 0.5))
@pytest.mark.parametrize(
    "rule",
    [
        *(FixedRho(0.02), MassBudget(0.1), TopK(1), TopK(5), TopNSigma(0.7), TopNSigma(3.0)),
        *(entropy_scaled(1e-3, alpha, 1.0, 1e-30, 0.99) for alpha in (1.0, -2.0)),
    ],
)
def test_no_perturbation_prunes_what_lies_above_the_range_or_keeps_what_lies_below_it(rule, logits, signs, nats):
    before = torch.tensor(logits)
    low, high = rule.log_rho_range(before, nats)
    after = before + nats * torch.tensor(signs)
    gaps, kept = after - after.amax(dim=1, keepdim=True), safe_mask(after, rule)
    assert kept[gaps >= high[:, None] + 1e-4].all()
    assert not kept[gaps < low[:, None] - 1e-4].any()


def test_the_range_of_an_entropy_holds_where_many_tokens_share_half_of_the_mass():
    """There the entropy moves by several times what the logits do; the range is not much wider than that."""
    vocabulary, nats = 50_000, 1e-3
    logits = torch.zeros(1, vocabulary, dtype=torch.float64)
    logits[0, 0] = math.log(vocabulary)
    rule = entropy_scaled(1e-3, 1.0, 1.0, 1e-30, 0.99)
    low, high = rule.log_rho_range(logits, nats)
    towards = torch.full_like(logits, nats)
    towards[0, 0] = -nats
    reached = []
    for sign in (1, -1):
        p_NV = (logits + sign * towards).softmax(dim=-1)
        reached.append(math.log(1e-3) + 1.0 + (p_NV * p_NV.log()).sum().item())
    assert low.item() < reached[0] < reached[1] < high.item()
    assert (high - low).item() < 1.2 * (reached[1] - reached[0])


def test_one_side_alone():
    for kind, pruned, full in ((EngineOnly, "engine", "trainer"), (TrainerOnly, "trainer", "engine")):
        sides = kind(rule=f"{pruned}_only").sides(0.01, 40)
        assert getattr(sides, pruned) == FixedRho(0.01)
        assert getattr(sides, full) is None


# ρ by entropy


@settings(max_examples=50)
@given(LOGITS, st.floats(-3, 3), st.floats(0, 4))
def test_entropy_moves_rho_between_its_limits(logits, alpha, target):
    rule = entropy_scaled(1e-3, alpha, target, 1e-5, 0.2)
    expected = []
    for p in map(softmax, logits):
        entropy = -sum(x * math.log(x) for x in p if x > 0)
        log_rho = math.log(1e-3) + alpha * (target - entropy)
        expected.append(min(max(log_rho, math.log(1e-5)), math.log(0.2)))
    log_rho = rule.log_rho(torch.tensor(logits))
    assert log_rho.tolist() == pytest.approx(expected, abs=2e-5)
    assert (log_rho >= torch.tensor(math.log(1e-5))).all()
    assert (log_rho <= torch.tensor(math.log(0.2))).all()


def test_an_uncertain_state_keeps_a_wider_vocabulary():
    sure, unsure = torch.tensor([[8.0, 0.0, 0.0, 0.0]]), torch.tensor([[1.0, 0.0, 0.0, 0.0]])
    rule = entropy_scaled(0.1, 1.0, 0.7, 1e-4, 0.9)
    assert rule.log_rho(sure) > math.log(0.1) > rule.log_rho(unsure)


def test_no_alpha_is_a_fixed_rho():
    logits = torch.randn(5, 37, generator=torch.Generator().manual_seed(0)) * 5
    rule = entropy_scaled(0.01, 0.0, 1.0, 1e-4, 0.9)
    assert torch.equal(rule.log_rho(logits), FixedRho(0.01).log_rho(logits))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lowest": 0.0}, "lowest"),
        ({"highest": 1.0}, "highest"),
        ({"lowest": 0.3}, "lowest .* must not exceed highest"),
        ({"alpha": math.inf}, "alpha"),
        ({"alpha": math.nan}, "alpha"),
        ({"target_entropy": -0.1}, "target_entropy"),
        ({"target_entropy": math.nan}, "target_entropy"),
    ],
)
def test_entropy_settings_outside_their_ranges(change, message):
    rule = entropy_scaled(1e-3, 1.0, 1.0, 1e-5, 0.2)
    with pytest.raises(ValueError, match=message):
        rule.settings.changed(**change)


@pytest.mark.parametrize("rho", [1e-6, 0.5])
def test_a_rho_outside_the_range_of_the_settings(rho):
    with pytest.raises(DvpError, match="lowest ≤ rho ≤ highest"):
        entropy_scaled(rho, 1.0, 1.0, 1e-5, 0.2)
    with pytest.raises(DvpError, match="lowest ≤ rho ≤ highest"):
        controller(rho=rho, lowest=1e-5, highest=0.2)


# The trainer's margin


@settings(max_examples=200)
@given(
    logits=ROUGH,
    signs=hnp.arrays(np.int8, (3, 23), elements=st.sampled_from([-1, 0, 1])),
    epsilon=st.floats(1e-3, 4.0),
    rho=st.sampled_from([0.5, 1e-2, RHO]),
)
def test_no_perturbation_takes_an_engines_token_out_of_a_vocabulary_with_margin(logits, signs, epsilon, rho):
    infer = (logits + np.float32(epsilon) * signs).astype(np.float32)
    measured = float(np.abs(infer.astype(np.float64) - logits).max())
    # Thresholds round in fp32; a measured ε̂ is never good to this many digits.
    margin = measured + 1e-6 * (1 + measured - math.log(rho))
    train_safe = safe_mask(torch.tensor(logits), with_margin(rho, margin))
    assert not (safe_mask(torch.tensor(infer), FixedRho(rho)) & ~train_safe).any()


def test_the_margin_is_no_larger_than_the_worst_case_needs():
    rho, epsilon = 1e-2, 0.25
    train = torch.tensor([[0.0, math.log(rho) - 2 * epsilon + 1e-5]])
    infer = train + torch.tensor([[-epsilon, epsilon]])
    assert safe_mask(infer, FixedRho(rho)).all()
    assert safe_mask(train, with_margin(rho, epsilon)).all()
    assert not safe_mask(train, with_margin(rho, 0.99 * epsilon)).all()
    assert with_margin(rho, 0.0) == FixedRho(rho)


@pytest.mark.parametrize("epsilon", [-0.1, math.inf, math.nan, 1e4])
def test_epsilon_outside_its_range(epsilon):
    with pytest.raises(DvpError, match=r"epsilon|rho"):
        with_margin(1e-2, epsilon)


# Feedback


def controller(rho=1e-3, **changes):
    settings = {"signal": "k3", "low": 0.1, "high": 0.4, "factor": 2.0, "lowest": 1e-5, "highest": 0.1, "patience": 3}
    return FeedbackRho(rho, Feedback(**{"rule": "feedback"} | settings | changes))


def fed(feedback, values):
    """ρ after each step."""
    history = []
    for value in values:
        feedback.observe(dict.fromkeys(("k3", "vetoed_fraction", "tail_mismatch", "reward"), value))
        history.append(feedback.rho)
    return history


@pytest.mark.parametrize("signal", ["k3", "vetoed_fraction", "tail_mismatch", "reward"])
def test_rho_rises_after_as_many_high_steps_as_its_patience(signal):
    assert fed(controller(signal=signal), [0.5] * 7) == [1e-3, 1e-3, 2e-3, 2e-3, 2e-3, 4e-3, 4e-3]


def test_rho_falls_after_as_many_low_steps():
    assert fed(controller(), [0.05] * 6) == [1e-3, 1e-3, 5e-4, 5e-4, 5e-4, 2.5e-4]


def test_a_step_between_the_bounds_breaks_the_row():
    assert set(fed(controller(), [0.5, 0.5, 0.2] * 5 + [0.5, 0.5, 0.05, 0.05])) == {1e-3}


@pytest.mark.parametrize("value", [None, math.nan])
def test_a_step_without_a_value_breaks_the_row(value):
    assert set(fed(controller(), [0.5, 0.5, value, 0.5, 0.5])) == {1e-3}


@given(st.floats(0.1, 0.4), st.integers(1, 5))
def test_a_constant_signal_between_the_bounds_changes_nothing(value, patience):
    """The bounds themselves are between."""
    assert set(fed(controller(patience=patience), [value] * 20)) == {1e-3}


@given(st.lists(st.sampled_from([0.0, 0.05, 0.1, 0.2, 0.4, 0.41, 7.0, math.inf]), max_size=60), st.integers(1, 4))
def test_feedback_against_counting_runs(values, patience):
    rho, expected = 1e-3, []
    run, previous = 0, None
    for value in values:
        side = "above" if value > 0.4 else "below" if value < 0.1 else None
        run = run + 1 if side == previous else 1
        previous = side
        if side is not None and run % patience == 0:
            rho = min(rho * 2, 0.1) if side == "above" else max(rho / 2, 1e-5)
        expected.append(rho)
    history = fed(controller(patience=patience), values)
    assert history == pytest.approx(expected, rel=1e-12)
    # A resumed run replays its rows.
    resumed = controller(patience=patience)
    fed(resumed, values[: len(values) // 2])
    assert history[len(values) // 2 :] == fed(resumed, values[len(values) // 2 :])


@settings(max_examples=50)
@given(st.floats(1e-3, 1e3), st.integers(1, 3))
def test_a_loop_whose_change_is_smaller_than_the_band_comes_to_rest(strength, patience):
    """One change of ρ moves this signal by √2; the bounds are a factor of 4 apart."""
    feedback = controller(patience=patience, lowest=1e-9, highest=0.999, rho=0.01)
    history = []
    for _ in range(200):
        feedback.observe({"k3": strength * math.sqrt(1e-3) / math.sqrt(feedback.rho)})
        history.append(feedback.rho)
    assert len(set(history[100:])) == 1
    # Never there and back: every change goes the same way.
    assert history in (sorted(history), sorted(history, reverse=True))


def test_rho_stays_in_its_range():
    assert fed(controller(patience=1), [9.0] * 30)[-1] == 0.1
    assert fed(controller(patience=1), [0.0] * 30)[-1] == 1e-5


def test_a_row_without_the_signal_is_named():
    with pytest.raises(DvpError, match="tail_mismatch"):
        controller(signal="tail_mismatch").observe({"k3": 0.1})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lowest": 0.0}, "lowest"),
        ({"lowest": 0.3}, "lowest .* must not exceed highest"),
        ({"signal": "entropy"}, "signal"),
        ({"low": 0.4}, "low < high"),
        ({"low": -0.1}, "low"),
        ({"high": math.inf}, "high"),
        ({"factor": 1.0}, "factor"),
        ({"factor": math.nan}, "factor"),
        ({"patience": 0}, "patience"),
    ],
)
def test_feedback_settings_outside_their_ranges(change, message):
    with pytest.raises(ValueError, match=message):
        controller(**change)
