"""Forecasts of what a correction keeps, against the correction itself on drawn log-ratios and numbers by hand."""

import math

import pytest
import torch

from dvp.core.importance import PRESETS, ImportanceRule, importance_weights
from dvp.planning.kept import kept_share, rejects


@pytest.mark.parametrize(
    ("tokens", "kl", "percent"),
    [(2000, 1e-4, 70), (2000, 4e-4, 35), (2000, 1e-3, 17), (8192, 1e-4, 34), (8192, 4e-4, 10), (8192, 1e-3, 2)],
)
def test_mis_rejects_most_long_responses(tokens, kl, percent):
    """Φ of the bounds ±log 2, about a sum with mean −κT and variance 2κT."""
    spread = math.sqrt(2) * math.sqrt(2 * kl * tokens)
    by_hand = (math.erf((math.log(2) + kl * tokens) / spread) - math.erf((-math.log(2) + kl * tokens) / spread)) / 2
    share = kept_share(PRESETS["mis"], kl, tokens)
    assert share == pytest.approx(by_hand)
    assert round(100 * share) == percent


@pytest.mark.parametrize(
    ("rule", "tokens", "kl"),
    [
        (PRESETS["mis"], 60, 2e-3),
        (PRESETS["mis"].changed(veto=1e-4), 200, 1e-3),
        (PRESETS["icepop"], 40, 0.1),
        (PRESETS["geo_rs"], 400, 2e-4),
        (PRESETS["geo_rs"], 40, 1e-3),
        (PRESETS["k3"], 100, 0.0098),
        (PRESETS["k3"], 30, 0.012),
        (PRESETS["veto"].changed(veto=0.3), 50, 0.1),
        (PRESETS["trm"], 50, 0.03),
        (ImportanceRule(level="sequence", action="mask", upper=1.1), 100, 1e-3),
    ],
)
def test_the_forecast_is_what_the_correction_keeps(rule, tokens, kl):
    """20,000 responses with independent Gaussian log-ratios, through the correction that training uses."""
    count = 20_000
    generator = torch.Generator().manual_seed(0)
    noise_BT = torch.randn((count, tokens), generator=generator, dtype=torch.float64)
    mask_BT = torch.ones(count, tokens, dtype=torch.bool)
    weights = importance_weights(-kl + math.sqrt(2 * kl) * noise_BT, mask_BT, rule)
    assert kept_share(rule, kl, tokens) == pytest.approx((weights.weight_BT > 0).double().mean().item(), abs=0.015)


def test_what_only_truncates_keeps_everything():
    for name in ("tis", "seq_tis"):
        assert not rejects(PRESETS[name])
        assert kept_share(PRESETS[name], 1e-3, 8192) == 1
    assert all(rejects(PRESETS[name]) for name in ("mis", "icepop", "geo_rs", "k3", "veto", "trm"))
    assert not rejects(ImportanceRule())
