"""Theorems on the log-ratio between trainer and engine (docs/method.md, "Theory", items 2 and 3), in float64.

Item 2 is exact. Item 3 is exact for the most likely noise; for the distribution of d it is a simulation with fixed
seeds, held against second-order predictions.
"""

import itertools
import math

import numpy as np
import pytest
import torch
from decision_process import log_policy
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from dvp.measurement.vocabulary_mismatch import literal_bound, sharp_bounds

LOGITS = hnp.arrays(np.float64, 5, elements=st.floats(-12, 12))
EPSILON_MAX = st.floats(1e-3, 3)
ROUNDING = 1e-12


def log_ratios(logits_V: torch.Tensor, epsilon_NV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """log p − log q, p and q of every token under each perturbation."""
    log_p_V = logits_V.log_softmax(dim=-1)
    log_q_NV = (logits_V + epsilon_NV).log_softmax(dim=-1)
    return log_p_V - log_q_NV, log_p_V.exp().expand_as(log_q_NV), log_q_NV.exp()


def corners(vocabulary: int, epsilon_max: float) -> torch.Tensor:
    """All perturbations of ±ε_max, (2^V, V)."""
    return epsilon_max * torch.tensor(list(itertools.product([-1.0, 1.0], repeat=vocabulary)), dtype=torch.float64)


def perturbations(epsilon_max: float, seed: int) -> torch.Tensor:
    """All corners of the box |ε| ≤ ε_max for five tokens, and points inside it."""
    generator = torch.Generator().manual_seed(seed)
    inside_NV = epsilon_max * (2.0 * torch.rand(30, 5, generator=generator, dtype=torch.float64) - 1.0)
    return torch.cat([corners(5, epsilon_max), inside_NV])


# Proposition 4.2: bounds on the log-ratio.


@settings(max_examples=80)
@given(LOGITS, EPSILON_MAX, st.integers(0, 1000))
def test_the_sharp_pair_holds_and_is_attained_by_the_extremal_perturbation(logits, epsilon_max, seed):
    """log_ratio_a falls in ε_a and rises in every other ε_k, so its extremes over |ε| ≤ ε_max are at the two corners in
    which ε_a stands against all the others, and the pair is what they give. All 2^V corners and random points obey."""
    logits_V = torch.tensor(logits)
    log_ratio_NV, p_NV, _ = log_ratios(logits_V, perturbations(epsilon_max, seed))
    lower_V, upper_V = sharp_bounds(p_NV[0], epsilon_max)
    assert (log_ratio_NV >= lower_V - ROUNDING).all()
    assert (log_ratio_NV <= upper_V + ROUNDING).all()
    against_VV = epsilon_max * (2.0 * torch.eye(5, dtype=torch.float64) - 1.0)
    for extremal_VV, bound_V in ((against_VV, lower_V), (-against_VV, upper_V)):
        torch.testing.assert_close(
            log_ratios(logits_V, extremal_VV)[0].diagonal(), bound_V, atol=ROUNDING, rtol=ROUNDING
        )


@settings(max_examples=80)
@given(LOGITS, EPSILON_MAX, st.integers(0, 1000))
def test_the_papers_bound_holds_where_the_engine_overrates(logits, epsilon_max, seed):
    """|log_ratio_a| ≤ 2 ε_max (1 − p_a) where q_a > p_a: Jensen's inequality on the lower member of the sharp pair.

    And so by symmetry |log_ratio_a| ≤ 2 ε_max (1 − min(p_a, q_a)) everywhere.
    """
    log_ratio_NV, p_NV, q_NV = log_ratios(torch.tensor(logits), perturbations(epsilon_max, seed))
    assert (q_NV > p_NV).any()
    assert (log_ratio_NV.abs() <= literal_bound(torch.minimum(p_NV, q_NV), epsilon_max) + ROUNDING).all()


@pytest.mark.parametrize("p", [0.01, 0.5, 0.99])
def test_the_papers_bound_fails_at_second_order(p):
    """The excess of the attained maximum over 2 ε (1 − p) is 2 ε² p (1 − p) + O(ε³), for every p in (0, 1)."""
    logits_V = torch.tensor([p, 1.0 - p], dtype=torch.float64).log()
    for epsilon in (1e-2, 1e-3, 1e-4):
        log_ratio_NV, p_NV, _ = log_ratios(logits_V, epsilon * torch.tensor([[-1.0, 1.0]], dtype=torch.float64))
        excess = (log_ratio_NV - literal_bound(p_NV, epsilon))[0, 0].item()
        assert excess / epsilon**2 == pytest.approx(2.0 * p * (1.0 - p), abs=2.0 * epsilon)


def test_pruning_both_sides_obeys_the_bounds_where_the_safe_sets_are_equal_and_only_there():
    """A token that one side alone prunes rescales all the others: their ratio jumps by −log of its mass, however small
    the perturbation. Here ε_max = 0.01 and half of the mass is at the threshold."""
    logits_V = torch.tensor([0.0, -0.5, -0.5, -3.0], dtype=torch.float64)
    epsilon_NV = corners(4, 0.01)
    equal_V = torch.tensor([True, True, True, False])
    log_p_V = log_policy(logits_V, equal_V)
    log_q_NV = log_policy(logits_V + epsilon_NV, equal_V.expand(16, 4))
    lower_V, upper_V = sharp_bounds(log_p_V.exp(), 0.01)
    log_ratio_NV = (log_p_V - log_q_NV)[:, :3]
    assert (log_ratio_NV >= lower_V[:3] - ROUNDING).all()
    assert (log_ratio_NV <= upper_V[:3] + ROUNDING).all()

    alone_V = torch.tensor([True, False, False, False])
    pruned_mass = 1.0 - log_p_V[0].exp()
    jump = log_p_V[0] - log_policy(logits_V, alone_V)[0]
    assert jump.item() == pytest.approx(math.log1p(-pruned_mass))
    assert jump < 10 * lower_V[0]


# Proposition 4.3: tokens that the engine samples are those that it overrates.


def squared_distance(p_V, token):
    """‖e_a − p‖² = 1 − 2 p_a + Σ p²."""
    return 1.0 - 2.0 * p_V[token] + (p_V**2).sum()


@settings(max_examples=60)
@given(hnp.arrays(np.float64, 30, elements=st.floats(-8, 8)), st.floats(0.01, 0.5), st.integers(0, 29))
def test_proposition_4_3_under_the_most_likely_noise_the_engine_overrates_what_it_sampled(logits, sigma, token):
    """Exact. Given that a was sampled from q, the density of the noise is ∝ exp(−‖ε‖²/2σ²) q_a(ε), log-concave; its
    mode solves ε = σ² (e_a − q(ε)), a contraction for σ² < 2. There d ≥ ‖ε‖²/2σ² > 0 (compare with ε = 0), and
    d = σ² (1 − 2 p_a + Σ p²) + O(σ⁴): docs/method.md's d*."""
    p_V = np.exp(logits - logits.max())
    p_V /= p_V.sum()
    noise_V = np.zeros(30)
    for _ in range(60):
        q_V = p_V * np.exp(noise_V)
        q_V /= q_V.sum()
        noise_V = sigma**2 * ((np.arange(30) == token) - q_V)
    d = noise_V[token] - math.log((p_V * np.exp(noise_V)).sum())
    assert d >= (noise_V**2).sum() / (2.0 * sigma**2) - 1e-15
    assert d > 0 or p_V[token] > 1.0 - 1e-6
    assert d / sigma**2 == pytest.approx(squared_distance(p_V, token), abs=2.0 * sigma**2)


VOCABULARY, CHUNK, SIGMA = 400, 4000, 0.3
HEAD, SECOND, TAIL = 0, 1, 2
P_V = np.array([0.5, 0.1, *[0.4 / (VOCABULARY - 2)] * (VOCABULARY - 2)])
"""A head, a token of a fifth of the rest, and 398 equal ones: their d are alike and can be pooled."""


def simulate(count: int, *, sampled_from: str, noisy_trainer: bool, seed: int) -> list[np.ndarray]:
    """d = log q − log p of sampled tokens: of the head, of the second, and of the tail.

    Noise N(0, σ²) on the engine's logits, and independently on the trainer's if asked; one token a draw, by float64
    inverse CDF (fp32 sampling distorts the tail).
    """
    rng = np.random.default_rng(seed)
    tokens, ds, rows = [], [], np.arange(CHUNK)
    for _ in range(count // CHUNK):
        engine_NV = rng.standard_normal((CHUNK, VOCABULARY)) * SIGMA
        trainer_NV = rng.standard_normal((CHUNK, VOCABULARY)) * SIGMA * noisy_trainer
        q_NV, p_NV = (P_V * np.exp(noise_NV) for noise_NV in (engine_NV, trainer_NV))
        cdf_NV = np.cumsum(q_NV if sampled_from == "engine" else p_NV, axis=1)
        token_N = (cdf_NV < rng.random((CHUNK, 1)) * cdf_NV[:, -1:]).sum(axis=1)
        log_q_N, log_p_N = (np.log(w_NV[rows, token_N] / w_NV.sum(axis=1)) for w_NV in (q_NV, p_NV))
        tokens.append(np.minimum(token_N, TAIL))
        ds.append(log_q_N - log_p_N)
    return [np.concatenate(ds)[np.concatenate(tokens) == token] for token in (HEAD, SECOND, TAIL)]


def mode(d_N: np.ndarray) -> tuple[float, float]:
    """Maximum of a cubic through the logarithm of a histogram within ±1.5 deviations, with its standard error."""
    centre, deviation = d_N.mean(), d_N.std()
    counts, edges = np.histogram((d_N - centre) / deviation, bins=40, range=(-1.5, 1.5))
    # A bin's log-count has a variance of 1/count.
    coefficients, covariance = np.polyfit(
        (edges[1:] + edges[:-1]) / 2, np.log(counts), 3, w=np.sqrt(counts), cov="unscaled"
    )
    slope = np.polyder(coefficients)
    roots = np.roots(slope)
    x = roots[np.argmin(np.abs(roots))].real
    gradient = np.array([3.0 * x**2, 2.0 * x, 1.0, 0.0]) / np.polyval(np.polyder(slope), x)
    return centre + deviation * x, deviation * math.sqrt(gradient @ covariance @ gradient)


def assert_near(value: float, error: float, predicted: float) -> None:
    """Within 6 standard errors (by chance: 2e-9) and the terms of order σ⁴ that the expansion leaves out."""
    assert abs(value - predicted) <= 6.0 * error + SIGMA**4, (value, error, predicted)


@pytest.mark.slow
@pytest.mark.parametrize("sampled_from", ["engine", "trainer"])
def test_proposition_4_3_selection_shifts_d_by_sigma_squared_times_the_squared_distance(sampled_from):
    """A statistical check. E[d_a] = −½ σ² (1 − Σ p²) for every token, as log Σ p e^ε is convex in the noise. Sampling
    from q weights the distribution of d_a by e^{d_a}, which moves its mean by its variance, σ² (1 − 2 p_a + Σ p²).
    Sampling from p does not weight it: the dependence on the token vanishes."""
    without = -0.5 * SIGMA**2 * (1.0 - (P_V**2).sum())
    for token, d_N in enumerate(simulate(200_000, sampled_from=sampled_from, noisy_trainer=False, seed=1)):
        shift = SIGMA**2 * squared_distance(P_V, token) if sampled_from == "engine" else 0.0
        assert_near(d_N.mean(), d_N.std() / math.sqrt(len(d_N)), without + shift)


@pytest.mark.slow
@pytest.mark.parametrize(("sampled_from", "sign"), [("engine", 1.0), ("trainer", -1.0)])
def test_proposition_4_3_with_noise_on_both_sides_the_mode_flips_with_the_sampler(sampled_from, sign):
    """A statistical check. The two normalisers' shifts and skews cancel, so the histogram's mode is ± d* =
    ± σ² (1 − 2 p_a + Σ p²), for tokens sampled from the engine and from the trainer."""
    found = simulate(100_000, sampled_from=sampled_from, noisy_trainer=True, seed=5)
    for token in (HEAD, TAIL):
        value, error = mode(found[token])
        assert sign * value > 6.0 * error
        assert_near(value, error, sign * SIGMA**2 * squared_distance(P_V, token))
