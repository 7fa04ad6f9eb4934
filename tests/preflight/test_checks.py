"""What an engine's own noise may add to the mismatch that a rehearsal allows."""

import pytest
import torch

from dvp.experiment.training import EngineConfig, Noise
from dvp.preflight.checks import KL_LIMITS, Positions, check_mismatch, kl_of_noise

NOISES = [Noise(sigma=0.1), Noise(sigma=1.0), Noise(sigma=2.5), Noise(sigma=2.5, below=0.01)]


def positions(noise: Noise | None, extra: float = 0.0) -> Positions:
    """500 positions of a vocabulary of 300, some flat and some sharp; `extra` on the engine's likeliest token."""
    generator = torch.Generator().manual_seed(0)
    spread = torch.linspace(0.1, 6, 500)[:, None]
    logits_NV = spread * torch.randn(500, 300, generator=generator)
    noisy_NV = logits_NV.clone()
    if noise is not None:
        noise_NV = noise.sigma * torch.randn(500, 300, generator=generator)
        if noise.below is not None:
            noise_NV[logits_NV.softmax(-1) >= noise.below * logits_NV.softmax(-1).amax(-1, keepdim=True)] = 0
        noisy_NV += noise_NV
    noisy_NV[torch.arange(500), logits_NV.argmax(-1)] += extra
    return Positions(logits_NV.log_softmax(-1), noisy_NV.log_softmax(-1))


def verdict(noise: Noise, engine: Positions):
    nothing = positions(None)
    allowed = kl_of_noise(EngineConfig(dtype="float32", noise=noise))
    return check_mismatch(engine, {"shape": nothing, "bf16": nothing}, "exact", allowed)


@pytest.mark.parametrize("noise", NOISES, ids=str)
def test_the_kl_of_noise_is_within_what_is_allowed(noise):
    passed = verdict(noise, positions(noise))
    assert passed.passed
    assert 0 < passed.figures["kl"] <= noise.sigma**2
    assert passed.figures["limit"] == noise.sigma**2 + KL_LIMITS["exact"]


@pytest.mark.parametrize("noise", NOISES[:2], ids=str)
def test_what_is_off_by_more_than_its_noise_is_refused(noise):
    assert not verdict(noise, positions(noise, extra=12.0)).passed
    assert not verdict(noise, positions(Noise(sigma=3 * noise.sigma))).passed


def test_an_engine_without_noise_is_allowed_nothing_more():
    assert kl_of_noise(EngineConfig(dtype="bfloat16")) == 0
