"""Per-token statistics of the language-model head, full and pruned vocabulary in one pass.

Implements log p(a) = z_a − logsumexp(z) and log p^mp(a) = z_a − logsumexp_{V_S}(z) (METHOD.md, "Dynamic
vocabulary pruning") with the read-outs that OTB and the diagnostics need. The logits of N tokens over
V ≈ 150,000 entries do not fit in memory at once, so rows go through in chunks and each chunk is recomputed
in the backward pass.

Shape suffixes: B responses, T tokens, N flattened tokens, V vocabulary, H hidden, G group.
"""

from dataclasses import dataclass, fields

import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from dvp.core.safe_vocabulary import safe_mask
from dvp.errors import DvpError

# The paper's mask value, taken relative to max z: as an absolute logit it would not be shift-invariant.
MASK_LOGIT = -50.0


@dataclass(frozen=True, eq=False)
class TokenStatistics:
    """Statistics of N tokens, each (N,) float32 but for `target_in_safe`; log-probs and entropy in nats.

    Only `log_prob` and `pruned_log_prob` carry gradients.
    """

    log_prob: torch.Tensor
    """log p(y), over the full vocabulary."""
    pruned_log_prob: torch.Tensor
    """log p^mp(y), over V_S; see `token_statistics` for a target outside V_S."""
    entropy: torch.Tensor
    """−Σ_a p(a) log p(a), over the full vocabulary."""
    sum_p_squared: torch.Tensor
    """Σ_a p(a)², over the full vocabulary (OTB's proxy)."""
    retained_mass: torch.Tensor
    """Z = Σ_{a∈V_S} p(a), in (0, 1], exactly 1 where nothing is pruned."""
    safe_size: torch.Tensor
    """|V_S|, a count."""
    target_in_safe: torch.Tensor
    """y ∈ V_S, bool."""
    max_logit: torch.Tensor
    """max_a z_a, after temperature."""


def token_statistics(
    hidden_NH: torch.Tensor,
    weight_VH: torch.Tensor,
    targets_N: torch.Tensor,
    *,
    rho: float | None,
    temperature: float = 1.0,
    chunk_size: int = 1024,
) -> TokenStatistics:
    """Compute the statistics of the targets under the head z = hidden · weightᵀ / temperature.

    The product is taken in the inputs' type, then everything is fp32. At most `chunk_size` rows of logits
    are alive at any time, forward or backward. V_S is constant under the gradient.

    A target outside V_S has pruned_log_prob = (max z − 50) − logsumexp_{V_S}(z), finite, where (max z − 50)
    is a mask value and not a function of any logit. Its gradient with respect to z is therefore −p^mp: it
    moves every safe logit, but neither the target's own nor any other pruned one, and sums to −1, not to 0.
    Such tokens must not reach the loss: see `dvp.core.objective.zero_outside_safe`.

    Args:
        hidden_NH: last hidden states, one row a target; N = 0 is legal and keeps the graph.
        weight_VH: the head's weight.
        targets_N: int64 token ids in [0, V).
        rho: min-p ratio ρ of V_S; None prunes nothing and builds no mask: pruned_log_prob is log_prob.
        temperature: sampling temperature, > 0.
        chunk_size: rows of logits held at once, ≥ 1.

    Raises:
        DvpError: shapes that do not match, or ρ, temperature or chunk size out of range.
    """
    if hidden_NH.shape[:1] != targets_N.shape:
        raise DvpError(
            f"targets_N: expected one target for each of {len(hidden_NH)} rows, got {tuple(targets_N.shape)}"
        )
    if not temperature > 0.0:
        raise DvpError(f"temperature: expected a number above 0, got {temperature}")
    if chunk_size < 1:
        raise DvpError(f"chunk_size: expected at least 1 row, got {chunk_size}")

    # There is nothing random to replay in the recomputation, and saving the generators' state costs a sync.
    chunks = [
        checkpoint(
            _chunk_statistics,
            hidden_chunk_NH,
            weight_VH,
            targets_chunk_N,
            rho,
            temperature,
            use_reentrant=False,
            preserve_rng_state=False,
        )
        for hidden_chunk_NH, targets_chunk_N in zip(
            hidden_NH.split(chunk_size), targets_N.split(chunk_size), strict=True
        )
    ]
    return TokenStatistics(
        **{field.name: torch.cat([getattr(chunk, field.name) for chunk in chunks]) for field in fields(TokenStatistics)}
    )


def _chunk_statistics(
    hidden_NH: torch.Tensor,
    weight_VH: torch.Tensor,
    targets_N: torch.Tensor,
    rho: float | None,
    temperature: float,
) -> TokenStatistics:
    """`token_statistics` of one chunk; the differentiable part first, where the recomputation stops."""
    logits_NV = functional.linear(hidden_NH, weight_VH).float() / temperature
    max_logit_N1 = logits_NV.detach().amax(dim=-1, keepdim=True)
    # Everything below is shift-invariant, and fp32 keeps more of a log-prob near 0 than near max z.
    shifted_NV = logits_NV - max_logit_N1
    shifted_target_N = shifted_NV.gather(1, targets_N[:, None]).squeeze(1)
    log_prob_N = shifted_target_N - shifted_NV.logsumexp(dim=-1)
    if rho is None:
        pruned_log_prob_N = log_prob_N
    else:
        safe_NV = safe_mask(logits_NV, rho)
        target_in_safe_N = safe_NV.gather(1, targets_N[:, None]).squeeze(1)
        # −inf is exact omission here: logsumexp turns it into a weight of 0, and V_S is never empty.
        pruned_lse_N = shifted_NV.masked_fill(~safe_NV, -torch.inf).logsumexp(dim=-1)
        pruned_log_prob_N = torch.where(target_in_safe_N, shifted_target_N, MASK_LOGIT) - pruned_lse_N

    with torch.no_grad():
        p_NV = shifted_NV.softmax(dim=-1)
        entropy_N = torch.special.entr(p_NV).sum(dim=-1)
        sum_p_squared_N = p_NV.square().sum(dim=-1)
        if rho is None:
            retained_mass_N = torch.ones_like(entropy_N)
            safe_size_N = torch.full_like(entropy_N, weight_VH.shape[0])
            target_in_safe_N = torch.ones_like(targets_N, dtype=torch.bool)
        else:
            # From the pruned side: 1 − Z is the small number that is reported, and Z cannot round above 1.
            retained_mass_N = 1.0 - p_NV.masked_fill(safe_NV, 0.0).sum(dim=-1)
            safe_size_N = safe_NV.sum(dim=-1).float()
    return TokenStatistics(
        log_prob=log_prob_N,
        pruned_log_prob=pruned_log_prob_N,
        entropy=entropy_N,
        sum_p_squared=sum_p_squared_N,
        retained_mass=retained_mass_N,
        safe_size=safe_size_N,
        target_in_safe=target_in_safe_N,
        max_logit=max_logit_N1.squeeze(1),
    )
