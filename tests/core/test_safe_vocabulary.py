"""Which entries are safe, by every rule, against the rule's definition in float64; and ρ that feedback moves."""

import math

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from pydantic import TypeAdapter

import dvp.core.safe_vocabulary
from dvp.core.safe_vocabulary import (
    EngineSets,
    Entropy,
    EntropyScaled,
    FixedRho,
    MassBudget,
    Rule,
    TopK,
    TopNSigma,
    safe_mask,
    settled,
    with_margin,
)
from dvp.errors import DvpError
from rounding import rounding

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
NEVER = -math.inf
ENTROPY = {"rule": "entropy", "alpha": 1.0, "target_entropy": 1.0, "lowest": 1e-6, "highest": 0.5}
FEEDBACK = {"rule": "feedback", "signal": "k3", "low": 0.1, "high": 0.4, "factor": 2.0, "patience": 3}
FEEDBACK |= {"lowest": 1e-5, "highest": 0.1}


def entropy_scaled(rho, **changes):
    return EntropyScaled(rho, Entropy(**ENTROPY | changes))


def top_k(k):
    return TopK(rule="top_k", k=k)


def top_n_sigma(n):
    return TopNSigma(rule="top_n_sigma", n=n)


def sides(rho=None, **rule):
    """The safe vocabularies of a run with responses of 40 tokens."""
    return TypeAdapter(Rule).validate_python(rule).sides(rho, 40)


EVERY = [FixedRho(RHO), MassBudget(0.01), top_k(3), top_n_sigma(1.5), entropy_scaled(1e-2)]
every_rule = pytest.mark.parametrize("rule", EVERY, ids=lambda rule: type(rule).__name__)


def softmax(row):
    weights = np.exp(row.astype(np.float64) - row.astype(np.float64).max())
    return weights / weights.sum()


# What all rules have in common


@every_rule
@settings(max_examples=50)
@given(logits=LOGITS, shift=st.sampled_from([-64.0, 32.0, 128.0]))
def test_no_rule_sees_a_shift(rule, logits, shift):
    logits = torch.tensor(logits)
    assert torch.equal(safe_mask(logits, rule), safe_mask(logits + shift, rule))
    assert safe_mask(logits[:0], rule).shape == (0, 37)


@pytest.mark.parametrize("rule", [FixedRho(0.999), MassBudget(0.999), top_k(1), entropy_scaled(0.5, alpha=-5.0)])
def test_equal_logits_are_all_safe(rule):
    assert safe_mask(torch.full((2, 37), -7.5), rule).all()


@pytest.mark.parametrize("rule", [*EVERY, top_k(9), MassBudget(0.0), top_n_sigma(9.0)])
def test_what_cannot_be_sampled_is_never_safe(rule):
    logits = torch.tensor([[1.0, 0.5, NEVER, NEVER, NEVER]])
    assert not safe_mask(logits, rule)[0, 2:].any()
    if not isinstance(rule, TopK):  # as though it were not there
        assert torch.equal(safe_mask(logits, rule)[:, :2], safe_mask(logits[:, :2], rule))


@pytest.mark.parametrize("rule", [FixedRho(0.6), MassBudget(0.3), top_n_sigma(3.0), entropy_scaled(0.5, alpha=0.1)])
def test_the_comparison_is_in_fp32_and_outside_the_graph(rule):
    # Half a nat apart; a threshold at 100 + log(0.6) would round up to 99.5 in bf16.
    logits = torch.tensor([[100.0, 99.5]], dtype=torch.bfloat16, requires_grad=True)
    mask, log_rho = safe_mask(logits, rule), rule.log_rho(logits)
    assert mask.all()
    assert log_rho.dtype == torch.float32
    assert not mask.requires_grad
    assert not log_rho.requires_grad


@settings(max_examples=50)
@given(LOGITS, hnp.arrays(np.float32, (3, 37), elements=st.sampled_from([-1.0, 1.0, 0.0])), st.floats(1e-3, 0.5))
@pytest.mark.parametrize(
    "rule",
    [
        *(FixedRho(0.02), MassBudget(0.1), top_k(1), top_k(5), top_n_sigma(0.7), top_n_sigma(3.0)),
        *(entropy_scaled(1e-3, alpha=alpha, lowest=1e-30, highest=0.99) for alpha in (1.0, -2.0)),
    ],
)
def test_no_small_perturbation_changes_what_is_settled(rule, logits, signs, nats):
    """As an engine is proved: by trials with twice what the logits are off by."""
    for row, sign in zip(torch.tensor(logits), torch.tensor(signs), strict=True):
        inside, outside = settled(row, rule, 2 * nats)
        kept = safe_mask((row + nats * sign)[None], rule)[0]
        assert kept[inside].all()
        assert not kept[outside].any()
        assert not (inside & outside).any()


@pytest.mark.parametrize("rule", [FixedRho(0.02), MassBudget(0.05), top_k(3), top_n_sigma(1.0), entropy_scaled(1e-2)])
def test_almost_everything_is_settled(rule):
    """Or a proof would say nothing. Entries within a few thousandths of a nat of the threshold are not."""
    logits = 3 * torch.randn(2000, generator=torch.Generator().manual_seed(0))
    inside, outside = settled(logits, rule, 1e-3)
    assert (inside | outside).float().mean() > 0.99
    assert inside.any()
    assert outside.any()


# A fixed ρ


@settings(max_examples=50)
@given(LOGITS, st.sampled_from([0.5, 1e-2, 2e-6]))
def test_it_is_the_min_p_rule(logits, rho):
    # No log ρ here is a multiple of 1/4: at a tie the ratio of probabilities rounds either way.
    expected = np.array([[p >= rho * max(row) for p in row] for row in map(softmax, logits)])
    assert (safe_mask(torch.tensor(logits), FixedRho(rho)).numpy() == expected).all()


def test_ties_at_the_threshold_are_kept():
    threshold = torch.tensor(math.log(0.1))
    below = torch.nextafter(threshold, torch.tensor(-math.inf))
    logits = torch.stack([torch.tensor(0.0), threshold, threshold, below])[None]
    assert safe_mask(logits, FixedRho(0.1)).tolist() == [[True, True, True, False]]
    # bf16 logits are multiples of 1/16 or coarser above 8, so differences of exactly 13 do occur.
    assert safe_mask(torch.tensor([[9.75, -3.25, -3.5]]), FixedRho(RHO)).tolist() == [[True, True, False]]


# Sets that are chosen by counting: a mass, a number of entries


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


@settings(max_examples=50)
@given(LOGITS, st.integers(1, 50))
def test_top_k_keeps_the_k_most_likely_and_what_is_as_likely(logits, k):
    kept = safe_mask(torch.tensor(logits), top_k(k))
    for row, own in zip(logits, kept.tolist(), strict=True):
        last = sorted(row, reverse=True)[:k][-1]
        assert own == [value >= last for value in row]


@settings(max_examples=100)
@given(st.one_of(LOGITS, ROUGH), st.one_of(BUDGETS.map(MassBudget), st.integers(1, 50).map(top_k)))
def test_their_threshold_lies_half_way_to_the_next_entry(logits, rule):
    """No rounding may flip an entry between the rule and whoever applies its log ρ, shifted or not."""
    logits = torch.tensor(logits)
    gaps = logits - logits.amax(dim=1, keepdim=True)
    log_rho, mask = rule.log_rho(logits), safe_mask(logits, rule)
    for row, own, threshold in zip(gaps.tolist(), mask.tolist(), log_rho.tolist(), strict=True):
        least = min(gap for gap, kept in zip(row, own, strict=True) if kept)
        pruned = [gap for gap, kept in zip(row, own, strict=True) if not kept]
        if pruned:
            # To the rounding of fp32, and on the right side of the two even where that has nothing between them.
            assert threshold == pytest.approx((least + max(pruned)) / 2, rel=rounding(1))
            assert max(pruned) < threshold <= least
        else:
            assert threshold < 2 * least - 1e6
    assert torch.equal(gaps >= log_rho[:, None], mask)
    assert torch.equal(safe_mask(gaps, rule), mask)


def test_a_budget_of_zero_keeps_what_float64_cannot_hold():
    logits = torch.tensor([[0.0, -2000.0, -2000.5, -1.0]])
    assert safe_mask(logits, MassBudget(0.0)).all()
    assert safe_mask(logits, MassBudget(1e-300)).tolist() == [[True, False, False, True]]


def test_tiny_masses_add_up_at_the_size_of_a_real_vocabulary():
    """In fp32, or from the largest down, 150,000 masses of 1e-9 would be lost against 1."""
    logits = torch.full((2, 150_001), -20.0) + torch.randn(2, 150_001, generator=torch.Generator().manual_seed(0))
    logits[:, 7] = 0.0
    p, budget = logits.double().softmax(dim=1), 1e-4
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


# ρ by a formula of the state


@settings(max_examples=50)
@given(LOGITS, st.floats(0.1, 5), st.floats(-3, 3), st.floats(0, 4))
def test_rho_follows_the_spread_or_the_entropy(logits, n, alpha, target):
    gap = (logits - logits.max(axis=1, keepdims=True)).astype(np.float64)
    log_rho = top_n_sigma(n).log_rho(torch.tensor(logits))
    terms, largest = gap.shape[1] + 3, -gap.min()
    assert log_rho.tolist() == pytest.approx(list(-n * gap.std(axis=1)), abs=rounding(terms, n * largest))
    expected = []
    for p in map(softmax, logits):
        entropy = -sum(x * math.log(x) for x in p if x > 0)
        expected.append(min(max(math.log(1e-3) + alpha * (target - entropy), math.log(1e-5)), math.log(0.2)))
    rule = entropy_scaled(1e-3, alpha=alpha, target_entropy=target, lowest=1e-5, highest=0.2)
    assert rule.log_rho(torch.tensor(logits)).tolist() == pytest.approx(expected, abs=rounding(terms, 3 * largest + 12))


# What an experiment asks for


def test_which_side_is_pruned_by_what():
    plain = FixedRho(0.01)
    expected = {
        "fixed": (plain, plain),
        "engine_only": (None, plain),
        "trainer_only": (plain, None),
        "replay": (EngineSets(plain), plain),
    }
    for rule, pair in expected.items():
        made = sides(0.01, rule=rule)
        assert (made.trainer, made.engine) == pair
        assert made.replayed == (rule == "replay")
    for side in ("trainer", "engine"):
        made = sides(0.01, rule="margin", epsilon=0.5, side=side)
        assert getattr(made, side) == with_margin(0.01, 0.5)
        assert {made.trainer, made.engine} == {with_margin(0.01, 0.5), plain}
    assert sides(rule="mass_budget", delta=0.4).engine == MassBudget(0.01)
    assert sides(rule="top_p", p=0.75).trainer == MassBudget(0.25)
    assert sides(rule="top_k", k=4).trainer == top_k(4)
    assert sides(rule="top_n_sigma", n=2.0).trainer == top_n_sigma(2.0)
    assert sides(0.01, **ENTROPY).engine == entropy_scaled(0.01)


@pytest.mark.parametrize(
    ("rho", "rule", "message"),
    [
        (None, {"rule": "mass_budget", "delta": 40.0}, "delta: expected less than max_response_tokens, 40"),
        (0.01, {"rule": "margin", "epsilon": 1e4}, "epsilon: expected a margin with which something is pruned"),
        (0.6, ENTROPY, "lowest ≤ rho ≤ highest"),
        (1e-6, FEEDBACK, "lowest ≤ rho ≤ highest"),
        (0.01, ENTROPY | {"lowest": 0.6}, "lowest .* must not exceed highest"),
        (0.01, ENTROPY | {"alpha": math.nan}, "alpha"),
        (0.01, FEEDBACK | {"low": 0.4}, "low < high"),
        (0.01, {"rule": "top_k", "k": 0}, "k"),
        (0.01, {"rule": "best"}, "rule"),
    ],
)
def test_impossible_settings_and_a_rho_that_does_not_fit_them(rho, rule, message):
    with pytest.raises((DvpError, ValueError), match=message):
        sides(rho, **rule)


# The margin


@settings(max_examples=200)
@given(
    logits=ROUGH,
    signs=hnp.arrays(np.int8, (3, 23), elements=st.sampled_from([-1, 0, 1])),
    epsilon=st.floats(1e-3, 4.0),
    rho=st.sampled_from([0.5, 1e-2, RHO]),
)
def test_no_perturbation_takes_an_entry_out_of_the_set_with_margin(logits, signs, epsilon, rho):
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


# Feedback


def fed(made, values):
    """ρ after each step."""
    history = []
    for value in values:
        made.observe({"k3": value})
        assert made.trainer == made.engine
        history.append(made.rho)
    return history


VALUES = st.sampled_from([None, math.nan, 0.0, 0.05, 0.1, 0.2, 0.4, 0.41, 7.0, math.inf])


@given(st.lists(VALUES, max_size=60), st.integers(1, 4))
def test_feedback_against_counting_runs(values, patience):
    """A step between the bounds, or without a value, breaks a run."""
    rho, expected = 1e-3, []
    run, previous = 0, None
    for value in values:
        side = None if value is None else "above" if value > 0.4 else "below" if value < 0.1 else None
        run = run + 1 if side == previous else 1
        previous = side
        if side is not None and run % patience == 0:
            rho = min(rho * 2, 0.1) if side == "above" else max(rho / 2, 1e-5)
        expected.append(rho)
    made, resumed = (sides(1e-3, **FEEDBACK | {"patience": patience}) for _ in range(2))
    history = fed(made, values)
    assert history == pytest.approx(expected, rel=1e-12)
    # A resumed run replays its rows.
    fed(resumed, values[: len(values) // 2])
    assert history[len(values) // 2 :] == fed(resumed, values[len(values) // 2 :])


def test_a_rule_of_one_name_need_not_be_told_it():
    rule = TopK(k=2)
    assert safe_mask(torch.tensor([[1.0, 3.0, 2.0]]), rule).tolist() == [[False, True, True]]
    assert rule.model_dump(exclude_defaults=True) == {"rule": "top_k", "k": 2}  # of which config hashes are made
