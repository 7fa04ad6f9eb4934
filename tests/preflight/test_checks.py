"""What engine noise may add to a preflight's mismatch, and which run it trains."""

import math
from pathlib import Path
from statistics import NormalDist

import pytest
import torch

from dvp.analysis.mismatch_advice import percent
from dvp.core.safe_vocabulary import FixedRho
from dvp.core.vocabulary_mismatch import kl
from dvp.experiment.grid import GridEntry
from dvp.experiment.loading import load_experiment
from dvp.experiment.training import EngineConfig, Noise
from dvp.preflight.brief import chosen_run, rules
from dvp.preflight.checks import check_mismatch
from dvp.training.agreement import Compared

ROOT = Path(__file__).parents[2]
NOISES = [Noise(sigma=0.1), Noise(sigma=1.0), Noise(sigma=2.5), Noise(sigma=2.5, below=0.01)]


def beside(noise: Noise, extra: float = 0.0, said: Noise | None = None) -> Compared:
    """An engine with noise at 500 positions of 300 tokens, some flat and some sharp; `extra` on its likeliest token.

    said: the noise that its settings have, where that is another.
    """
    generator = torch.Generator().manual_seed(0)
    logits_NV = torch.linspace(0.1, 6, 500)[:, None] * torch.randn(500, 300, generator=generator)
    noise_NV = noise.sigma * torch.randn(500, 300, generator=generator)
    if noise.below is not None:
        noise_NV[logits_NV.softmax(-1) >= noise.below * logits_NV.softmax(-1).amax(-1, keepdim=True)] = 0
    noisy_NV = logits_NV + noise_NV
    noisy_NV[torch.arange(500), logits_NV.argmax(-1)] += extra
    apart = kl(noisy_NV.double().log_softmax(-1), logits_NV.double().log_softmax(-1)).mean().item()
    config = EngineConfig(dtype="float32", noise=said or noise)
    return Compared(apart, apart, 1e-13, 500, config, "Qwen3ForCausalLM", torch.zeros(1))


@pytest.mark.parametrize("noise", NOISES, ids=str)
def test_the_kl_of_noise_is_within_what_is_allowed(noise):
    compared = beside(noise)
    assert 0 < compared.error <= noise.sigma**2
    assert check_mismatch(compared, 100).passed


@pytest.mark.parametrize("noise", NOISES[:2], ids=str)
def test_what_is_off_by_more_than_its_noise_is_refused(noise):
    assert not check_mismatch(beside(noise, extra=12.0), 100).passed
    assert not check_mismatch(beside(Noise(sigma=3 * noise.sigma), said=noise), 100).passed


@pytest.mark.parametrize(("tokens", "few"), [(100, False), (2000, True)])
def test_what_mis_would_keep_at_the_runs_length_is_said(tokens, few):
    """Of independent normal log-ratios, from the normal distribution itself."""
    sigma, generator = 0.1, torch.Generator().manual_seed(0)
    law_N = sigma * torch.randn(100_000, generator=generator, dtype=torch.float64) - sigma**2 / 2
    compared = Compared(sigma**2 / 2, 0.0, 1e-3, 256, EngineConfig(dtype="bfloat16"), "Qwen3ForCausalLM", law_N)
    summed = NormalDist(-tokens * sigma**2 / 2, sigma * math.sqrt(tokens))
    expected = summed.cdf(math.log(2)) - summed.cdf(-math.log(2))
    verdict = check_mismatch(compared, tokens)
    assert verdict.figures["mis"] == pytest.approx(expected, abs=4 * math.sqrt(expected * (1 - expected) / 400))
    assert (expected < 0.05) == few == ("WARNING" in verdict.says)
    assert verdict.passed
    assert f"MIS would keep {percent(verdict.figures['mis'])} of responses of {tokens:,} tokens" in verdict.says


def test_an_engine_that_is_too_coarse_is_called_so():
    """And no fault of the architecture, which it computes as it is."""
    coarse = EngineConfig(dtype="bfloat16", weight_rounding="int4", kv_cache_dtype="fp8")

    def verdict(apart):
        return check_mismatch(Compared(apart, 1e-3, 1e-3, 256, coarse, "LlamaForCausalLM", torch.zeros(1)), 100)

    assert verdict(0.4).passed
    refused = verdict(1.1)
    assert not refused.passed
    assert refused.says == (
        "the engine (int4 + fp8-KV, one scale a row) is too coarse for this model: KL 1.1 nats per token from the "
        "trainer, 0.5 at most; take 8-bit weights, bfloat16 or float16"
    )


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
def test_which_run_is_trained_and_what_is_proved(name, changes, grid, method, proved):
    """One that replays, and what its engine applies in the same way."""
    experiment = load_experiment(name, ROOT / "config")
    update = {"training": experiment.training.changed(**changes)} if changes else {}
    if grid is not None:
        update["grid"] = [GridEntry(**entry) for entry in grid]
    experiment = experiment.model_copy(update=update)
    assert chosen_run(experiment, "coarse").method == method
    if proved is not None:
        assert rules(experiment, "coarse") == proved
