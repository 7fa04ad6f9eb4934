"""What share of the responses' tokens a correction will keep, before a run has shown it.

Trainer and engine differ by Gaussian noise, independent from token to token: with a KL(q‖p) of κ nats per token, log p
− log q of a sampled token is N(−κ, 2κ), the only normal law under which the ratio has mean 1. The sum over T tokens is
N(−κT, 2κT), their mean N(−κ, 2κ/T). Tails of a real mismatch are heavier, so that a veto costs more than is said here.
"""

import math
from statistics import NormalDist

from dvp.core.importance import ImportanceRule

ASSUMED_KL = (1e-4, 4e-4, 1e-3)
"""Nats a token: from a careful bf16 engine to a rough one."""


def kept_share(rule: ImportanceRule, kl: float, tokens: float) -> float:
    """Expected share of the tokens of responses of length `tokens` with a weight above 0, in [0, 1].

    For a rule that rejects whole responses it is their share. Bounds, veto, trust region and K3 filter count as
    independent.

    kl : KL(q‖p), nats per token, above 0.
    """
    share = 1.0
    if rule.action == "mask":
        terms = {"token": 1.0, "sequence": tokens, "geometric": 1 / tokens}[rule.level]
        mean = kl if rule.level == "geometric" else kl * terms
        ratio = NormalDist(-mean, math.sqrt(2 * kl * terms))
        share *= _up_to(ratio, rule.upper) - _up_to(ratio, rule.lower)
    token = NormalDist(-kl, math.sqrt(2 * kl))
    if rule.veto is not None:
        share *= (1 - _up_to(token, rule.veto)) ** tokens
    if rule.trust_region is not None:
        share *= (_up_to(token, rule.trust_region) - _up_to(token, 1 / rule.trust_region)) ** tokens
    if rule.k3_max is not None:
        # r − log r − 1 ≈ (log r)² / 2, whose mean is κ χ² / T with T degrees of freedom; the cube root of χ² / T is
        # nearly normal (Wilson and Hilferty).
        variance = 2 / (9 * tokens)
        share *= NormalDist(1 - variance, math.sqrt(variance)).cdf((rule.k3_max / kl) ** (1 / 3))
    return share


def rejects(rule: ImportanceRule) -> bool:
    """Whether it gives any token the weight 0."""
    return rule.action == "mask" or any(bound is not None for bound in (rule.veto, rule.trust_region, rule.k3_max))


def _up_to(log_ratio: NormalDist, bound: float) -> float:
    """Probability of a ratio of at most `bound`."""
    return log_ratio.cdf(math.log(bound)) if 0 < bound < math.inf else float(bound > 0)
