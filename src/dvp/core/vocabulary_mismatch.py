"""Measure how far trainer and engine are apart in the same states, over the whole vocabulary.

log p and log q are float64 and normalised (trainer, engine), d = log q − log p. Logits are known only up to a constant;
ε_max is taken with the constant that makes it smallest: half the range of d over the vocabulary.

Shape suffixes: N positions, V vocabulary.
"""

import math

import torch

from dvp.errors import DvpError


@torch.no_grad()
def normalised(logits_NV: torch.Tensor) -> torch.Tensor:
    """Return log-probabilities, float64, of logits or of log-probabilities that were rounded.

    Raises:
        DvpError: a value is not finite: the model's numbers are broken, or the vocabulary was pruned.
    """
    if not logits_NV.isfinite().all():
        raise DvpError(
            "expected finite log-probabilities of every token; is the model complete, and its precision high enough?"
        )
    return logits_NV.double().log_softmax(dim=-1)


@torch.no_grad()
def epsilon(log_p_NV: torch.Tensor, log_q_NV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the engine's perturbation of the logits without its constant part, (ε_max, σ(ε)), (N,) each."""
    d_NV = log_q_NV - log_p_NV
    return (d_NV.amax(dim=-1) - d_NV.amin(dim=-1)) / 2, d_NV.std(dim=-1, correction=0)


@torch.no_grad()
def kl(log_q_NV: torch.Tensor, log_p_NV: torch.Tensor) -> torch.Tensor:
    """Return KL(q‖p) at each position, (N,), nats, summed over the vocabulary."""
    return kl_terms(log_q_NV, log_p_NV).sum(dim=-1)


def kl_terms(log_q_NV: torch.Tensor, log_p_NV: torch.Tensor) -> torch.Tensor:
    """Return terms ≥ 0, (N, V), whose sum over the vocabulary is KL(q‖p), as Σ (p − q) = 0.

    Each is q (r − log r − 1) with r = p/q, and keeps the digits of a ratio near 1.
    """
    log_ratio_NV = log_p_NV - log_q_NV
    return log_q_NV.exp() * (log_ratio_NV.expm1() - log_ratio_NV)


@torch.no_grad()
def outside(log_p_NV: torch.Tensor, log_q_NV: torch.Tensor, safe_NV: torch.Tensor) -> dict[str, float]:
    """Measure how much of mismatch and gradient is outside a safe vocabulary (docs/method.md, "Diagnostics").

    `safe_NV` is the vocabulary S, bool; no row is empty. Returns sums over the positions:
        kl: KL(q‖p), nats.
        kl_outside: KL(q‖p) − q(S) KL(q_S‖p_S), with q_S and p_S restricted to S and renormalised. By the chain rule it
            is the KL divergence of whether a token is in S, and of which one if it is not; never negative.
        squared_score: Σ_a q(a) ‖∇_z log p(a)‖² = Σ_a q(a) (1 − 2 p(a) + Σ p²), the power of a sampled token's gradient
            with respect to the logits, before any advantage.
        squared_score_outside: its terms outside S.
    """
    q_NV, p_NV = log_q_NV.exp(), log_p_NV.exp()
    log_q_S, log_p_S = (log_NV.masked_fill(~safe_NV, -math.inf).log_softmax(dim=-1) for log_NV in (log_q_NV, log_p_NV))
    inside_N = q_NV.where(safe_NV, 0.0).sum(dim=-1) * kl_terms(log_q_S, log_p_S).where(safe_NV, 0.0).sum(dim=-1)
    kl_N = kl(log_q_NV, log_p_NV)
    score_NV = q_NV * (1 - 2 * p_NV + p_NV.square().sum(dim=-1, keepdim=True))
    return {
        "kl": kl_N.sum().item(),
        "kl_outside": (kl_N - inside_N).clamp(min=0.0).sum().item(),  # rounding may take it below
        "squared_score": score_NV.sum().item(),
        "squared_score_outside": score_NV[~safe_NV].sum().item(),
    }
