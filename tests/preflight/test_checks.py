"""What engine noise may add to a rehearsal's mismatch, and which run is rehearsed."""

from pathlib import Path

import pytest
import torch

from dvp.core.safe_vocabulary import FixedRho
from dvp.experiment.grid import GridEntry
from dvp.experiment.loading import load_experiment
from dvp.experiment.training import EngineConfig, Noise
from dvp.preflight.checks import check_mismatch
from dvp.preflight.rehearsal import rehearsed_run, rules
from dvp.training.agreement import KL_LIMITS, Compared, kl_of_noise

ROOT = Path(__file__).parents[2]
NOISES = [Noise(sigma=0.1), Noise(sigma=1.0), Noise(sigma=2.5), Noise(sigma=2.5, below=0.01)]


def positions(noise: Noise | None, extra: float = 0.0) -> Compared:
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
    return logits_NV.log_softmax(-1), noisy_NV.log_softmax(-1)


def verdict(noise: Noise, engine: Compared):
    return check_mismatch(engine, positions(None), "exact", kl_of_noise(EngineConfig(dtype="float32", noise=noise)))


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


RHO_2 = {"engine": ["coarse"], "rho": ["1e-2"]}
RHO_3 = {"engine": ["coarse"], "rho": ["1e-3"]}


@pytest.mark.parametrize(
    ("name", "changes", "grid", "method", "proved"),
    [
        ("remedies", {}, None, "dvp_replay", [FixedRho(0.01)]),
        # min-p by vLLM itself at the other ρ is not what an engine that reports its sets does.
        ("remedies", {}, [{"method": ["dvp_replay"], **RHO_2}, {"method": ["dvp"], **RHO_3}], "dvp_replay", None),
        ("tiny", {}, None, "dvp", None),
        # Where sets are reported without a replay, of what samples from one.
        (
            "remedies",
            {"report_sets": True},
            [{"method": ["dvp_trainer_only"], **RHO_2}, {"method": ["dvp"], **RHO_3}],
            "dvp",
            [FixedRho(1e-3)],
        ),
        (
            "tiny",
            {},
            [{"method": ["rloo"], "engine": ["coarse"]}, {"method": ["dvp_trainer_only"], **RHO_2}],
            "dvp_trainer_only",
            [],
        ),
    ],
)
def test_which_run_is_rehearsed_and_what_is_proved(name, changes, grid, method, proved):
    """One that replays, and what its engine applies in the same way."""
    experiment = load_experiment(name, ROOT / "config")
    update = {"training": experiment.training.changed(**changes)} if changes else {}
    if grid is not None:
        update["grid"] = [GridEntry(**entry) for entry in grid]
    experiment = experiment.model_copy(update=update)
    assert rehearsed_run(experiment, "coarse").method == method
    if proved is not None:
        assert rules(experiment, "coarse") == proved
