"""Masks by the sign of the advantage, against loops in plain Python."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from dvp.core.advantages import ADVANTAGES
from dvp.core.batch import Batch, Rollout
from dvp.core.importance import PRESETS
from dvp.core.masks import DivergenceMask, OffPolicyMask, SpuriousMask
from dvp.core.update import make_update

B, T = 4, 5
OFF_POLICY = OffPolicyMask(kind="off_policy", delta=0.2)
DIVERGENCE = DivergenceMask(kind="divergence", delta=0.15)
SPURIOUS = SpuriousMask(kind="spurious", probability=0.3, entropy_quantile=0.4)
MASKS = {"off_policy": OFF_POLICY, "divergence": DIVERGENCE, "spurious": SPURIOUS}

arrays = st.tuples(
    hnp.arrays(np.float64, (B, T), elements=st.floats(-4, -0.01)),
    hnp.arrays(np.float64, (B, T), elements=st.floats(-4, -0.01)),
    hnp.arrays(np.float64, (B, T), elements=st.sampled_from([-1.0, -0.5, 0.0, 0.5, 1.0])),
    hnp.arrays(np.float64, (B, T), elements=st.floats(0, 3), unique=True),
    hnp.arrays(np.bool_, (B, T)),
)


def reference(kind, log_p, log_q, advantage, entropy, mask):
    """Which response tokens stay, from docs/method.md's table."""
    keeps = np.ones((B, T), bool)
    tokens = [(i, t) for i in range(B) for t in range(T) if mask[i, t]]
    lowest = sorted(entropy[i, t] for i, t in tokens)[: max(1, round(0.4 * len(tokens)))]
    for i, t in tokens:
        own = [k for j, k in tokens if j == i]
        p, q, a = math.exp(log_p[i, t]), math.exp(log_q[i, t]), advantage[i, t]
        if kind == "off_policy":
            k1 = sum(log_q[i, k] - log_p[i, k] for k in own) / len(own)
            keeps[i, t] = not (sum(advantage[i, k] for k in own) < 0 and k1 > 0.2)
        elif kind == "divergence":
            keeps[i, t] = not (abs(p - q) > 0.15 and ((a > 0 and p > q) or (a < 0 and p < q)))
        else:
            keeps[i, t] = not (a > 0 and p < 0.3 and entropy[i, t] in lowest)
    return keeps


@settings(max_examples=60)
@given(made=arrays)
@pytest.mark.parametrize("kind", MASKS)
def test_every_mask_against_plain_python(kind, made):
    log_p, log_q, advantage, entropy, mask = made
    mask[0, 0] = True  # a batch without any token has no quantile, and never comes
    # What stands where no response token is must not matter.
    absent = ~mask
    for values in (log_p, log_q, advantage, entropy):
        values[absent] = np.nan
    mask_BT = torch.tensor(mask)
    rollout = Rollout(Batch(torch.zeros(B, T, dtype=torch.long), mask_BT), torch.tensor(log_q), None, None)
    statistics = {"pruned_log_prob": torch.tensor(log_p), "pruned_entropy": torch.tensor(entropy)}
    keeps_BT = MASKS[kind].keeps(rollout, statistics, torch.tensor(advantage))
    expected = reference(kind, log_p, log_q, advantage, entropy, mask)
    assert keeps_BT.dtype == torch.bool
    np.testing.assert_array_equal(keeps_BT.numpy()[mask], expected[mask])


def eight_responses():
    """Two groups of four, and the trainer's statistics of their tokens."""
    generator = torch.Generator().manual_seed(0)
    log_p_BT, noise_BT = (torch.randn((8, T), generator=generator, dtype=torch.float64) for _ in range(2))
    statistics = {
        "pruned_log_prob": -log_p_BT.abs() - 0.1,
        "pruned_entropy": noise_BT.abs(),
        "pruned_sum_p_squared": torch.full((8, T), 0.4, dtype=torch.float64),
        "target_in_safe": torch.ones(8, T, dtype=torch.bool),
    }
    rewards_B = torch.tensor([1.0, 0, 1, 1, 0, 1, 0, 0], dtype=torch.float64)
    batch = Batch(torch.zeros(8, T, dtype=torch.long), torch.ones(8, T, dtype=torch.bool))
    return Rollout(batch, statistics["pruned_log_prob"] - 0.5 * noise_BT, rewards_B, torch.zeros(8).bool()), statistics


@pytest.mark.parametrize("mask", MASKS.values(), ids=list(MASKS))
@pytest.mark.parametrize("advantage", ["rloo", "otb"])
def test_a_mask_takes_tokens_out_and_changes_no_other_coefficient(advantage, mask):
    options = {"importance": PRESETS["tis"], "advantage": ADVANTAGES[advantage], "group_size": 4}
    plain, masked = (make_update(*eight_responses(), **options, mask=own) for own in (None, mask))
    torch.testing.assert_close(masked.advantage_BT, plain.advantage_BT, rtol=0, atol=0)
    gone_BT = (masked.weight_BT == 0) & (plain.weight_BT != 0)
    assert 0 < gone_BT.sum() < gone_BT.numel()
    expected_BT = torch.where(gone_BT, 0.0, plain.coefficients())
    torch.testing.assert_close(masked.coefficients(), expected_BT, rtol=0, atol=0)
