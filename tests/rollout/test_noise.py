"""Noise on the engine's logits, by vLLM: what is sampled and reported is the noisy policy, and nothing else is."""

import copy
import math

import pytest
import torch
from scipy import stats
from transformers import AutoModelForCausalLM

from dvp.core.safe_vocabulary import Entropy, EntropyScaled, FixedRho
from dvp.experiment.training import EngineConfig, Noise
from dvp.rollout.engine import Sampling
from dvp.rollout.vllm import VllmEngine, prove_safe_vocabulary
from rounding import TINY_LOG_PROB

pytestmark = pytest.mark.slow  # starts vllm

PROMPTS = [[5, 6, 7, 8], [40, 41], [100, 101, 102, 103, 104, 105]]
SEEDS = [100, 200, 300]  # vLLM adds the number of the response
ENTROPY = EntropyScaled(0.05, Entropy(rule="entropy", alpha=0.5, target_entropy=1.0, lowest=1e-4, highest=0.3))


@pytest.fixture(scope="module")
def engine(tiny_model):
    config = EngineConfig(dtype="float32", noise=Noise(sigma=0.7))
    return VllmEngine(tiny_model, config, max_model_len=128, max_num_seqs=32, seed=0, rules=[ENTROPY])


@pytest.fixture(scope="module")
def model(tiny_model):
    return AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)


def of(engine, **noise):
    """The same engine with another noise."""
    other = copy.copy(engine)
    other._config = engine._config.changed(noise=Noise(**noise))
    return other


def differences(model, engine, sampling, temperature=1.0):
    """Of all positions: what the engine reports of the whole vocabulary (T, V), and the model's own logits."""
    reported, own = [], []
    for prompt, group in zip(PROMPTS, engine.generate(PROMPTS, sampling, SEEDS), strict=True):
        for response in group:
            with torch.no_grad():
                logits_TV = model(torch.tensor([prompt + response.token_ids])).logits[0, len(prompt) - 1 : -1]
            own.append(logits_TV.double() / temperature)
            reported.append(response.vocabulary_log_probs_TV.double())
            chosen_T = reported[-1].gather(1, torch.tensor(response.token_ids)[:, None])[:, 0]
            assert chosen_T.tolist() == pytest.approx(response.log_probs, abs=TINY_LOG_PROB)
    return torch.cat(reported), torch.cat(own)


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_the_noise_is_normal_independent_and_of_its_size(model, engine, temperature):
    sampling = Sampling(max_tokens=24, n=4, temperature=temperature, whole_vocabulary=True)
    reported, own = differences(model, engine, sampling, temperature)
    assert reported.logsumexp(-1).abs().max() < 1e-4
    noise = temperature * (reported - own)
    noise = noise - noise.mean(dim=1, keepdim=True)  # the normaliser, the same for all entries of a position
    assert len(noise) > 100
    assert noise.std().item() == pytest.approx(0.7, rel=0.01)
    assert stats.kstest((noise / 0.7).flatten().numpy(), "norm").pvalue > 1e-3
    correlation = torch.corrcoef(noise)
    correlation.fill_diagonal_(0)
    assert correlation.abs().max() < 6 / math.sqrt(noise.shape[1])


def test_noise_in_the_tail_leaves_likely_entries_alone(model, engine):
    below = 0.3
    sampling = Sampling(max_tokens=16, n=3, whole_vocabulary=True)
    reported, own = differences(model, of(engine, sigma=2.0, below=below), sampling)
    gap = own - own.amax(dim=1, keepdim=True) - math.log(below)
    spread = []
    for noise, gap_V in zip(reported - own, gap, strict=True):
        likely, unlikely = noise[gap_V >= 1e-5], noise[gap_V < -1e-5]
        assert (likely - likely[0]).abs().max() < 1e-4
        spread.append(unlikely - likely[0])
    assert torch.cat(spread).std().item() == pytest.approx(2.0, rel=0.05)


def test_a_request_gives_the_same_response_whatever_else_is_in_the_batch(engine):
    together = engine.generate(PROMPTS, Sampling(max_tokens=20, n=3), SEEDS)
    for prompt, seed, group in zip(PROMPTS, SEEDS, together, strict=True):
        [alone] = engine.generate([prompt], Sampling(max_tokens=20, n=3), [seed])
        assert [one.token_ids for one in alone] == [one.token_ids for one in group]
        assert len({tuple(one.token_ids) for one in group}) == 3


@pytest.mark.parametrize("rule", [FixedRho(0.05), ENTROPY])
def test_the_safe_vocabulary_is_that_of_the_noisy_logits(engine, rule):
    prove_safe_vocabulary(engine, PROMPTS, rule)
