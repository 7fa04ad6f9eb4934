"""The sums over the whole vocabulary against loops in plain float64, and what they mean."""

import math

import numpy as np
import pytest
import torch

from dvp.core import vocabulary_mismatch as apart
from dvp.core.importance import ImportanceRule
from dvp.core.safe_vocabulary import FixedRho, safe_mask
from dvp.core.vocabulary_mismatch import normalised
from dvp.errors import DvpError
from dvp.measurement import vocabulary_mismatch as mismatch

POSITIONS, VOCABULARY = 5, 40


def pair(noise=0.3, seed=0, spread=4.0, shape=(POSITIONS, VOCABULARY)):
    """(log p, log q) of a trainer and an engine whose logits are `noise` apart."""
    generator = torch.Generator().manual_seed(seed)
    logits = spread * torch.randn(shape, generator=generator, dtype=torch.float64)
    moved = logits + noise * torch.randn(logits.shape, generator=generator, dtype=torch.float64)
    return logits.log_softmax(-1), moved.log_softmax(-1)


def entries(log_p, log_q):
    """(position, p, q, d) of every pair, as floats."""
    return [
        (row, math.exp(log_p[row, a].item()), math.exp(log_q[row, a].item()), (log_q[row, a] - log_p[row, a]).item())
        for row in range(len(log_p))
        for a in range(log_p.shape[1])
    ]


def bin_of(value, edges):
    """The index of the bin (lower, upper] that holds it; the lowest edge belongs to the first one."""
    return next(index for index in range(len(edges) - 1) if value <= edges[index + 1])


@pytest.mark.parametrize("noise", [0.0, 1e-6, 0.3, 3.0])
def test_histogram_and_gaps_are_sums_over_all_pairs(noise):
    """A d of exactly 0 counts as not positive; the last gap holds the likeliest tokens alone."""
    log_p, log_q = pair(noise)
    for function in (mismatch.histogram, mismatch.by_gap):
        found = function(log_p, log_q)
        expected = {name: np.zeros_like(value) for name, value in found.items()}
        for row, p, q, d in entries(log_p, log_q):
            gap = min(math.log(p / log_p[row].exp().max().item()), 0.0)
            place = bin_of(gap, mismatch.GAP_EDGES)
            if function is mismatch.histogram:
                place = bin_of(p, mismatch.PROBABILITY_EDGES), bin_of(d, mismatch.D_EDGES)
            sums = {"pairs": 1, "abs_d": abs(d)}
            for name, weight in (("infer", q), ("train", p)):
                sums |= {name: weight, f"{name}_abs_d": weight * abs(d)}
                sums |= {f"{name}_squared": weight**2, f"{name}_d": weight * d}
            for name in found.keys() & sums.keys():
                expected[name][place] += sums[name]
            if "max_abs_d" in found:
                expected["max_abs_d"][place] = max(expected["max_abs_d"][place], abs(d))
        for name, value in expected.items():
            np.testing.assert_allclose(found[name], value, rtol=1e-9, atol=1e-15, err_msg=name)
        assert found["infer"].sum().item() == pytest.approx(POSITIONS)
    assert found["pairs"][-1] == POSITIONS


def test_the_bounds_are_held_against_every_pair():
    log_p, log_q = pair(1.5, spread=3.0, shape=(100, 6))
    found = mismatch.bounds(log_p, log_q)
    d = log_q - log_p
    literal = sharp = 0
    largest = 0.0
    for row, p, _, one in entries(log_p, log_q):
        spread = [d[row, a].item() for a in range(6)]
        epsilon = (max(spread) - min(spread)) / 2
        if abs(one) > 2 * epsilon * (1 - p) + mismatch.TOLERANCE:
            literal += 1
            largest = max(largest, abs(one) / (2 * epsilon * (1 - p)))
        ratio = -one
        lower, upper = (math.log(p + (1 - p) * math.exp(sign * 2 * epsilon)) for sign in (-1, 1))
        sharp += not lower - mismatch.TOLERANCE <= ratio <= upper + mismatch.TOLERANCE
    assert found["literal_violations"].sum() == literal > 0
    assert found["sharp_violations"].sum() == sharp == 0
    assert found["max_over_literal"].max().item() == pytest.approx(largest, rel=1e-9)
    assert found["max_abs_d"].max() == d.abs().max()
    assert found["pairs"].sum() == 600


def test_a_bound_that_is_broken_is_counted(monkeypatch):
    """With half of the true ε_max, as if the engine's logits were better than they are."""
    log_p, log_q = pair(1.0)
    halved = mismatch.epsilon
    monkeypatch.setattr(mismatch, "epsilon", lambda *pair: tuple(value / 2 for value in halved(*pair)))
    assert mismatch.bounds(log_p, log_q)["sharp_violations"].sum() > 0


def test_kl_is_the_sum_over_the_vocabulary_and_keeps_small_values():
    log_p, log_q = pair(0.5)
    for row in range(POSITIONS):
        q, p = log_q[row].exp(), log_p[row].exp()
        assert apart.kl(log_q, log_p)[row].item() == pytest.approx((q * (q / p).log()).sum().item(), rel=1e-9)
    log_p, log_q = pair(1e-9)
    d = log_q - log_p
    second_order = 0.5 * (log_p.exp() * d**2).sum(-1)
    assert torch.allclose(apart.kl(log_q, log_p), second_order, rtol=0.05, atol=0)


def test_safe_sets_and_what_pruning_does_to_a_response():
    log_p, log_q = pair(1.0, spread=1.5)
    safe_train, safe_infer = safe_mask(log_p, FixedRho(0.1)), safe_mask(log_q, FixedRho(0.05))
    tokens = log_q.argmax(-1)
    tokens[1] = (safe_infer[1] & ~safe_train[1]).long().argmax()  # sampled by a pruned engine, pruned by the trainer
    assert safe_infer[1, tokens[1]]
    assert not safe_train[1, tokens[1]]
    found = mismatch.safe_sets(log_p, log_q, safe_train, safe_infer, tokens)
    pruned, outside = [], []
    for row in range(POSITIONS):
        p, q = log_p[row].exp(), log_q[row].exp()
        pruned.append(sum(p[a].item() for a in range(VOCABULARY) if not safe_train[row, a]))
        kept = sum(q[a].item() for a in range(VOCABULARY) if safe_infer[row, a])
        lost = sum(q[a].item() for a in range(VOCABULARY) if safe_infer[row, a] and not safe_train[row, a])
        outside.append(lost / kept)
    sizes = [
        (set(a.nonzero()[:, 0].tolist()), set(b.nonzero()[:, 0].tolist()))
        for a, b in zip(safe_train, safe_infer, strict=True)
    ]
    overlap = {
        "jaccard": [len(a & b) / len(a | b) for a, b in sizes],
        "infer_in_train": [len(a & b) / len(b) for a, b in sizes],
        "train_in_infer": [len(a & b) / len(a) for a, b in sizes],
        "safe_size_train": [len(a) for a, _ in sizes],
        "safe_size_infer": [len(b) for _, b in sizes],
    }
    for name, values in overlap.items():
        assert found[name] == pytest.approx(sum(values) / POSITIONS), name
    assert found["pruned_mass"] == pytest.approx(sum(pruned) / POSITIONS)
    assert found["pruned_mass_sum"] == pytest.approx(sum(pruned))
    assert found["outside_train"] == pytest.approx(sum(outside) / POSITIONS)
    assert found["tokens_inside_infer"] == POSITIONS
    assert found["tokens_outside_train"] == 1
    assert found["pruned_log_prob"] == -math.inf
    tokens[1] = log_p[1].argmax()
    inside = mismatch.safe_sets(log_p, log_q, safe_train, safe_infer, tokens)
    expected = sum(log_p[row, tokens[row]].item() - math.log(1 - pruned[row]) for row in range(POSITIONS))
    assert inside["pruned_log_prob"] == pytest.approx(expected)


def test_what_is_outside_a_safe_vocabulary_against_plain_python():
    log_p, log_q = pair(1.0, spread=1.5)
    safe = safe_mask(log_p, FixedRho(0.1))
    expected = dict.fromkeys(("kl", "kl_outside", "squared_score", "squared_score_outside"), 0.0)
    for row in range(POSITIONS):
        p, q = ([math.exp(one) for one in log_x[row].tolist()] for log_x in (log_p, log_q))
        outside = [a for a in range(VOCABULARY) if not safe[row, a]]
        whole = sum(b * math.log(b / a) for a, b in zip(p, q, strict=True))
        # Whether a token is inside, and which one where it is not.
        p_out, q_out = (sum(x[a] for a in outside) for x in (p, q))
        which = sum(q[a] * math.log(q[a] / p[a]) for a in outside)
        expected["kl"] += whole
        expected["kl_outside"] += (1 - q_out) * math.log((1 - q_out) / (1 - p_out)) + which
        for a in range(VOCABULARY):
            score = q[a] * sum(((a == b) - p[b]) ** 2 for b in range(VOCABULARY))
            expected["squared_score"] += score
            expected["squared_score_outside"] += score if a in outside else 0.0
    assert apart.outside(log_p, log_q, safe) == pytest.approx(expected)


def test_the_mismatch_of_a_responses_beginnings():
    log_p, log_q = pair(0.3)
    tokens = torch.tensor([3, 1, 4, 1, 5])
    lengths = [1, 2, 4, 9]
    bounds = {"lower": 0.5, "upper": 2.0}
    log_ratio, kl = (log_p - log_q).gather(1, tokens[:, None])[:, 0], apart.kl(log_q, log_p)
    rule = ImportanceRule(level="sequence", action="mask", veto=0.3, **bounds)
    rows = mismatch.prefixes(log_ratio, kl, lengths, rule)
    assert [row["length"] for row in rows] == lengths
    for row in rows:
        ratios = [
            math.exp((log_p[t, tokens[t]] - log_q[t, tokens[t]]).item()) for t in range(min(row["length"], len(tokens)))
        ]
        assert row["log_ratio"] == pytest.approx(sum(map(math.log, ratios)))
        assert row["kl"] == pytest.approx(apart.kl(log_q, log_p)[: row["length"]].sum().item())
        assert row["kept"] == float(0.5 <= math.prod(ratios) <= 2.0 and min(ratios) >= 0.3)
    assert {row["kept"] for row in rows} == {0.0, 1.0}
    two, eight = mismatch.prefixes(log_ratio[:1].expand(8), kl[:1].expand(8), [2, 8], ImportanceRule())
    assert eight["kl"] == pytest.approx(4 * two["kl"])


def test_sums_of_several_responses_add_up_and_maxima_do_not():
    log_p, log_q = pair(0.8)
    whole = mismatch.by_gap(log_p, log_q)
    parts = {}
    for part in (slice(2), slice(2, None)):
        mismatch.add(parts, mismatch.by_gap(log_p[part], log_q[part]))
    for name, value in whole.items():
        np.testing.assert_allclose(parts[name], value, err_msg=name)


@pytest.mark.parametrize("broken", [math.nan, -math.inf])
def test_log_probabilities_that_are_not_finite_are_refused(broken):
    log_p, _ = pair()
    log_p[1, 3] = broken
    with pytest.raises(DvpError, match="finite log-probabilities of every token"):
        normalised(log_p)
