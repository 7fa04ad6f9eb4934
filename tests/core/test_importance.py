import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from dvp.core.importance import PRESETS, ImportanceRule, importance_weights
from dvp.errors import DvpError

MIS = PRESETS["mis"]
BOUNDED = [
    ImportanceRule(level=level, action=action, lower=0.5 if action == "mask" else 0.0, upper=2.0)
    for level in ("token", "sequence", "geometric")
    for action in ("truncate", "mask")
]
RULES = [
    ImportanceRule(),
    *PRESETS.values(),
    ImportanceRule(veto=1e-4, k3_max=0.01, denominator="kept"),
    ImportanceRule(veto=1e-4, trust_region=1.3, denominator="kept"),
    ImportanceRule(level="sequence", trust_region=1.3, self_normalise=True),
    *(rule.changed(veto=1e-4) for rule in BOUNDED),
    *(rule.changed(k3_max=0.05, denominator="kept") for rule in BOUNDED),
    *(rule.changed(veto=1e-4, self_normalise=True) for rule in BOUNDED),
    *(rule.changed(veto=1e-4, self_normalise=True, denominator="kept") for rule in BOUNDED),
]


def batches(rows=4, columns=5):
    """Log-ratios near 0 (where Geo-RS keeps), around the bounds, and absurd ones; with masks, empty rows included."""
    elements = st.one_of(st.floats(-1e-3, 1e-3), st.floats(-0.4, 0.4), st.floats(-60, 60))
    return st.tuples(hnp.arrays(np.float64, (rows, columns), elements=elements), hnp.arrays(np.bool_, (rows, columns)))


def every_token(*shape):
    return torch.ones(shape, dtype=torch.bool)


def reference(log_ratio, mask, rule):
    """Token by token in plain Python, from docs/method.md's table and the rule's docstrings.

    log_ratio : −inf at tokens that the trainer cannot give.
    """
    weight = np.zeros(mask.shape)
    vetoed = np.zeros(len(mask), bool)
    untrusted = np.zeros(len(mask), bool)
    filtered = np.zeros(len(mask), bool)
    for i, row in enumerate(log_ratio):
        tokens = [t for t in range(mask.shape[1]) if mask[i, t]]
        if not tokens:
            continue
        ratios = [math.exp(row[t]) for t in tokens]
        vetoed[i] = rule.veto is not None and any(r < rule.veto for r in ratios)
        if rule.trust_region is not None:
            untrusted[i] = any(r == 0 or max(r, 1 / r) > rule.trust_region for r in ratios)
        k3 = sum(r - math.log(r) - 1 if r else math.inf for r in ratios) / len(tokens)
        filtered[i] = rule.k3_max is not None and k3 > rule.k3_max
        total = sum(row[t] for t in tokens)
        for t in tokens:
            log_r = {"none": 0.0, "token": row[t], "sequence": total, "geometric": total / len(tokens)}[rule.level]
            w = math.exp(min(max(log_r, -20), 20)) if log_r > -math.inf else 0.0
            if rule.action == "truncate":
                w = min(w, rule.upper)
            elif not rule.lower <= math.exp(log_r) <= rule.upper:
                w = 0.0
            weight[i, t] = 0.0 if vetoed[i] or untrusted[i] or filtered[i] else w
    kept = (weight > 0).any(axis=1)
    if rule.self_normalise and kept.any():
        counted = [i for i in range(len(mask)) if mask[i].any() and (kept[i] or rule.denominator == "all")]
        if rule.level == "token":
            units = [weight[i, t] for i in counted for t in range(mask.shape[1]) if mask[i, t]]
        else:
            units = [max(weight[i]) for i in counted]
        weight = weight / (sum(units) / len(units))
    return weight, kept, vetoed, untrusted, filtered


@settings(max_examples=30)
@given(batch=batches(), impossible=st.one_of(st.just(np.zeros((4, 5), bool)), hnp.arrays(np.bool_, (4, 5))))
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_every_rule_against_plain_python(rule, batch, impossible):
    log_ratio, mask = batch
    spoiled = np.where(mask, log_ratio, np.nan)  # padding is never looked at
    weights = importance_weights(torch.tensor(spoiled), torch.tensor(mask), rule, torch.tensor(impossible))
    expected, kept, vetoed, untrusted, filtered = reference(np.where(impossible, -np.inf, log_ratio), mask, rule)
    np.testing.assert_allclose(weights.weight_BT.numpy(), expected, rtol=1e-11)
    np.testing.assert_array_equal(weights.kept_B.numpy(), kept)
    for name, expected in {"veto": vetoed, "trust_region": untrusted, "k3": filtered}.items():
        np.testing.assert_array_equal(weights.dropped_B[name].numpy(), expected)
    assert weights.denominator == (kept.sum() if rule.denominator == "kept" else len(mask))


@pytest.mark.parametrize(
    ("name", "ratios", "expected"),
    [
        # Each token's ratio above 2 is cut; one below is left alone, however small.
        ("tis", [0.01, 1.5, 3.0], [0.01, 1.5, 2.0]),
        # Products: 3 is cut to 2, 0.06 left alone.
        ("seq_tis", [1.5, 2.0, 1.0], [2.0, 2.0, 2.0]),
        ("seq_tis", [0.1, 2.0, 0.3], [0.06, 0.06, 0.06]),
        # Products, kept between 1/2 and 2 and then the weight itself.
        ("mis", [0.25, 6.0, 1.0], [1.5, 1.5, 1.5]),
        ("mis", [1.3, 1.3, 1.3], [0.0, 0.0, 0.0]),
        ("mis", [0.7, 0.7, 1.0], [0.0, 0.0, 0.0]),
        ("icepop", [0.49, 0.51, 4.99], [0.0, 0.51, 4.99]),
        ("icepop", [5.01, 1.0, 1.0], [0.0, 1.0, 1.0]),
        # Cube roots: 1.0027^(1/3) ≈ 1.0009, 1.0033^(1/3) ≈ 1.0011.
        ("geo_rs", [1.0027, 1.0, 1.0], [1.0027 ** (1 / 3)] * 3),
        ("geo_rs", [1.0033, 1.0, 1.0], [0.0, 0.0, 0.0]),
        ("geo_rs", [0.9967, 1.0, 1.0], [0.0, 0.0, 0.0]),
        # r − log r − 1 of 1.27 is 0.030983, of 1.26 is 0.028888; the threshold is a sum of 0.03 over three tokens.
        ("k3", [1.26, 1.0, 1.0], [1.0, 1.0, 1.0]),
        ("k3", [1.27, 1.0, 1.0], [0.0, 0.0, 0.0]),
        ("veto", [1.01e-4, 1.0, 1.0], [1.0, 1.0, 1.0]),
        ("veto", [0.99e-4, 1.0, 1.0], [0.0, 0.0, 0.0]),
        # The worst token decides, on either side; products do not matter, and the weight stays 1.
        ("trm", [1.99, 0.51, 1.99], [1.0, 1.0, 1.0]),
        ("trm", [2.01, 0.51, 1.0], [0.0, 0.0, 0.0]),
        ("trm", [1.0, 0.49, 1.99], [0.0, 0.0, 0.0]),
    ],
)
def test_each_preset_has_the_numbers_of_the_method(name, ratios, expected):
    log_ratio = torch.tensor([ratios], dtype=torch.float64).log()
    weights = importance_weights(log_ratio, every_token(1, 3), PRESETS[name])
    torch.testing.assert_close(weights.weight_BT, torch.tensor([expected], dtype=torch.float64))


def test_narrow_bounds_hold_over_thousands_of_fp32_tokens():
    """Geo-RS is on the mean, the sum of 8192 fp32 log-ratios of ±5 that cancel but for a mean of 9e-4 or 1.1e-3."""
    noise = torch.tensor([5.0, -5.0]).repeat(4096)
    log_ratio = torch.stack([noise + 9e-4, noise + 1.1e-3])
    weights = importance_weights(log_ratio, every_token(2, 8192), PRESETS["geo_rs"])
    assert weights.kept_B.tolist() == [True, False]
    assert weights.weight_BT.dtype == torch.float32


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("rule", [ImportanceRule(), MIS, PRESETS["veto"]], ids=str)
def test_a_log_ratio_that_is_no_number_is_an_error_that_names_its_place(rule, value):
    log_ratio = torch.tensor([[0.0, 0.0], [0.0, value]])
    with pytest.raises(DvpError, match=f"response 1, position 1: expected a finite number, got {value}"):
        importance_weights(log_ratio, every_token(2, 2), rule)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_weights_have_no_gradient_and_the_log_ratios_type(dtype):
    for rule in RULES:
        weight_BT = importance_weights(
            torch.zeros(1, 2, dtype=dtype).requires_grad_(), every_token(1, 2), rule
        ).weight_BT
        assert not weight_BT.requires_grad
        assert weight_BT.dtype == dtype


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"level": "token", "action": "mask", "lower": 3.0, "upper": 2.0}, "must not exceed"),
        ({"level": "token", "action": "truncate", "lower": 0.5}, "truncate has no lower bound"),
        ({"level": "none", "upper": 2.0}, "none has no ratio"),
        ({"level": "none", "self_normalise": True}, "self_normalise"),
    ],
)
def test_impossible_rules(arguments, message):
    with pytest.raises(ValueError, match=message):
        ImportanceRule(**arguments)
