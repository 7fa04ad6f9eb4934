import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from dvp.core.importance import ImportanceRule, importance_weights
from dvp.errors import DvpError

MIS = ImportanceRule("sequence", "mask", 0.5, 2.0, None)
RULES = [
    ImportanceRule(level, action, 0.5, 2.0, veto)
    for level in ("none", "token", "sequence")
    for action in ("truncate", "mask")
    for veto in (None, 1e-4)
]


def reference(log_ratio, mask, rule):
    """Token by token in plain Python, from METHOD.md's table."""
    weight = np.zeros(mask.shape)
    vetoed = np.zeros(len(mask), bool)
    for i, row in enumerate(log_ratio):
        tokens = [t for t in range(mask.shape[1]) if mask[i, t]]
        vetoed[i] = rule.veto is not None and any(math.exp(row[t]) < rule.veto for t in tokens)
        total = sum(row[t] for t in tokens)
        for t in tokens:
            log_r = row[t] if rule.level == "token" else total
            r = math.exp(min(max(log_r, -20), 20))
            if rule.level == "none":
                w = 1.0
            elif rule.action == "truncate":
                w = min(r, rule.upper)
            else:
                w = r if rule.lower <= r <= rule.upper else 0.0
            weight[i, t] = 0.0 if vetoed[i] else w
    return weight, vetoed


@settings(deadline=None, max_examples=60)
@given(
    log_ratio=hnp.arrays(np.float64, (4, 5), elements=st.one_of(st.floats(-0.4, 0.4), st.floats(-60, 60))),
    mask=hnp.arrays(np.bool_, (4, 5)),
)
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_every_rule_against_plain_python(rule, log_ratio, mask):
    weights = importance_weights(torch.tensor(log_ratio), torch.tensor(mask), rule)
    expected, vetoed = reference(log_ratio, mask, rule)
    np.testing.assert_allclose(weights.weight_BT.numpy(), expected, rtol=1e-12)
    assert (weights.vetoed_B.numpy() == vetoed).all()
    assert (weights.kept_B.numpy() == (expected > 0).any(axis=1)).all()


def test_sequence_importance_sampling_identity():
    """E_q[w f] = E_p[f], every sequence of two tokens over three enumerated, history-dependent softmax."""
    rng = np.random.default_rng(0)
    first, second = torch.tensor(rng.normal(size=(2, 3))), torch.tensor(rng.normal(size=(2, 3, 3)))
    (log_p0, log_q0), (log_p1, log_q1) = first.log_softmax(-1), second.log_softmax(-1)
    paths = list(itertools.product(range(3), repeat=2))
    log_p = torch.stack([torch.stack([log_p0[a], log_p1[a, b]]) for a, b in paths])
    log_q = torch.stack([torch.stack([log_q0[a], log_q1[a, b]]) for a, b in paths])
    f = torch.tensor(rng.normal(size=len(paths)))

    rule = ImportanceRule("sequence", "truncate", 0.0, math.inf, None)
    weight = importance_weights(log_p - log_q, torch.ones(len(paths), 2, dtype=torch.bool), rule).weight_BT
    assert torch.equal(weight[:, 0], weight[:, 1])
    under_q = (log_q.sum(1).exp() * weight[:, 0] * f).sum()
    under_p = (log_p.sum(1).exp() * f).sum()
    torch.testing.assert_close(under_q, under_p, atol=1e-12, rtol=0)


def test_mis_drops_exactly_the_sequences_out_of_bounds():
    ratios = torch.tensor([0.49, 0.5, 1.0, 2.0, 2.01], dtype=torch.float64)
    # Split into tokens that are themselves out of bounds: only the product counts.
    log_ratio = torch.stack([ratios.log() - 3.0, torch.full((5,), 3.0, dtype=torch.float64)], dim=1)
    weights = importance_weights(log_ratio, torch.ones(5, 2, dtype=torch.bool), MIS)
    # The two at the bound itself are left out: exp(log x) need not round back to x.
    assert weights.kept_B[[0, 2, 4]].tolist() == [False, True, False]
    nudged = ImportanceRule("sequence", "mask", 0.5 - 1e-12, 2.0 + 1e-12, None)
    weights = importance_weights(log_ratio, torch.ones(5, 2, dtype=torch.bool), nudged)
    assert weights.kept_B.tolist() == [False, True, True, True, False]
    torch.testing.assert_close(weights.weight_BT[1:4, 1], ratios[1:4])


def test_bounds_are_inclusive():
    rule = ImportanceRule("token", "mask", 1.0, 1.0, None)
    weights = importance_weights(torch.zeros(1, 2), torch.ones(1, 2, dtype=torch.bool), rule)
    assert weights.weight_BT.tolist() == [[1.0, 1.0]]


def test_veto_sees_the_unclamped_ratio_and_only_valid_tokens():
    log_ratio = torch.tensor([[-25.0, 0.0], [0.0, -25.0], [-21.0, 0.0]])
    mask = torch.tensor([[True, True], [True, False], [True, True]])
    rule = ImportanceRule("none", "truncate", 0.0, 2.0, math.exp(-22))
    weights = importance_weights(log_ratio, mask, rule)
    assert weights.vetoed_B.tolist() == [True, False, False]
    assert weights.weight_BT.tolist() == [[0, 0], [1, 0], [1, 1]]


def test_clamping_keeps_ratios_finite():
    rule = ImportanceRule("sequence", "truncate", 0.0, math.inf, None)
    log_ratio = torch.tensor([[300.0, 300.0], [-300.0, -300.0], [300.0, -300.0]])
    weight = importance_weights(log_ratio, torch.ones(3, 2, dtype=torch.bool), rule).weight_BT
    # The sum is clamped, not its terms.
    torch.testing.assert_close(weight[:, 0], torch.tensor([math.exp(20), math.exp(-20), 1.0]))


@pytest.mark.parametrize("padding", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_padding_is_never_looked_at(rule, padding):
    mask = torch.tensor([[True, False], [False, False]])
    weights = importance_weights(torch.tensor([[0.0, padding]]).expand(2, 2), mask, rule)
    assert weights.weight_BT.tolist() == [[1, 0], [0, 0]]
    assert weights.kept_B.tolist() == [True, False]
    assert weights.vetoed_B.tolist() == [False, False]


def test_everything_rejected_is_a_result():
    weights = importance_weights(torch.full((2, 3), 4.0), torch.ones(2, 3, dtype=torch.bool), MIS)
    assert not weights.weight_BT.any()
    assert not weights.kept_B.any()
    assert not weights.vetoed_B.any()


def test_no_gradient_flows():
    log_ratio = torch.zeros(1, 2, requires_grad=True)
    assert not importance_weights(log_ratio, torch.ones(1, 2, dtype=torch.bool), MIS).weight_BT.requires_grad


@pytest.mark.parametrize("shape", [(0, 3), (2, 0)])
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_empty_batches(rule, shape):
    weights = importance_weights(torch.zeros(shape), torch.zeros(shape, dtype=torch.bool), rule)
    assert weights.weight_BT.shape == shape
    assert weights.kept_B.tolist() == weights.vetoed_B.tolist() == [False] * shape[0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("geometric", "mask", 0.5, 2.0, None), "level"),
        (("token", "clip", 0.5, 2.0, None), "action"),
        (("token", "mask", -0.5, 2.0, None), "bounds"),
        (("token", "mask", 3.0, 2.0, None), "bounds"),
        (("token", "mask", 0.0, 0.0, None), "bounds"),
        (("token", "mask", 0.5, math.nan, None), "bounds"),
        (("token", "mask", 0.5, 2.0, 0.0), "veto"),
        (("token", "mask", 0.5, 2.0, 1.0), "veto"),
    ],
)
def test_impossible_rules(arguments, message):
    with pytest.raises(DvpError, match=message):
        ImportanceRule(*arguments)
