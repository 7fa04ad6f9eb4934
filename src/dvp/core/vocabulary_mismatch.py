"""How far two distributions over the whole vocabulary are apart: trainer and engine in the same states.

log p and log q are float64 and normalised (trainer, engine), d = log q − log p. Of two distributions the logits are
known up to a constant: ε_max is that of the constant which makes it smallest, half the range of d over the vocabulary.

Shape suffixes: N positions, V vocabulary.
"""

import torch

from dvp.errors import DvpError


@torch.no_grad()
def normalised(logits_NV: torch.Tensor) -> torch.Tensor:
    """Log-probabilities, float64, of logits or of log-probabilities that were rounded.

    Raises:
        DvpError: a value that is not finite: a model whose numbers are broken, or a vocabulary that was pruned.
    """
    if not logits_NV.isfinite().all():
        raise DvpError(
            "expected finite log-probabilities of every token; is the model complete, and its precision high enough?"
        )
    return logits_NV.double().log_softmax(dim=-1)


@torch.no_grad()
def epsilon(log_p_NV: torch.Tensor, log_q_NV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The engine's perturbation of the logits at each position, its constant part removed: (ε_max, σ(ε)), each (N,)."""
    d_NV = log_q_NV - log_p_NV
    return (d_NV.amax(dim=-1) - d_NV.amin(dim=-1)) / 2, d_NV.std(dim=-1, correction=0)


@torch.no_grad()
def kl(log_q_NV: torch.Tensor, log_p_NV: torch.Tensor) -> torch.Tensor:
    """KL(q‖p) at each position, (N,), nats, summed over the vocabulary."""
    return kl_terms(log_q_NV, log_p_NV).sum(dim=-1)


def kl_terms(log_q_NV: torch.Tensor, log_p_NV: torch.Tensor) -> torch.Tensor:
    """Σ over the vocabulary is KL(q‖p), as Σ (p − q) = 0; each term keeps the digits of a ratio near 1 and is ≥ 0."""
    log_ratio_NV = log_p_NV - log_q_NV
    return log_q_NV.exp() * (log_ratio_NV.expm1() - log_ratio_NV)
