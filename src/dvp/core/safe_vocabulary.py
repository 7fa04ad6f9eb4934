"""The safe vocabulary V_S(s) = { a : z_a ≥ max_k z_k + log ρ } (METHOD.md, "Dynamic vocabulary pruning").

Equivalently p_a ≥ ρ · p_max: the min-p rule, so an engine that samples with min_p = ρ draws its V'_S from
the same formula on its own logits. The two sides compute their sets independently; no mask is replayed.

Shape suffixes: B responses, T tokens, N flattened tokens, V vocabulary, H hidden, G group.
"""

import math

import torch

from dvp.errors import DvpError


@torch.no_grad()
def safe_mask(logits_NV: torch.Tensor, rho: float) -> torch.Tensor:
    """Say which vocabulary entries are safe in each state.

    Args:
        logits_NV: logits after division by the sampling temperature (nats), any float type; the comparison is
            made in fp32, because in bf16 the steps between logits are coarser than the margins that matter.
        rho: min-p ratio ρ, strictly between 0 and 1; an entry exactly at the threshold is safe.

    Returns:
        bool (N, V). The most likely entry is always safe, so no row is empty. The mask is constant under the
        gradient (METHOD.md item 4).

    Raises:
        DvpError: ρ outside (0, 1).
    """
    if not 0.0 < rho < 1.0:
        raise DvpError(f"rho: expected a number strictly between 0 and 1, got {rho}")
    logits_NV = logits_NV.float()
    return logits_NV >= logits_NV.amax(dim=-1, keepdim=True) + math.log(rho)
