"""Sufficient statistics of the mismatch over the whole vocabulary (docs/method.md, Theory 2 and 3, "Diagnostics").

Tail tokens are rarely sampled, so that only the positions are sampled here: every (position, token) pair counts,
unweighted, weighted by π_infer ("infer", as if the engine sampled it) or by π_train ("train", the control for the
selection effect). All sums are over bins and add up over responses; entries named `max…` combine by the maximum.

log p and log q are float64 and normalised (trainer, engine), d = log q − log p. Distributions determine logits up to a
constant, and the bounds hold for any: ε_max is taken for the constant that makes it smallest, and is then half the
range of d over the vocabulary.

Shape suffixes: N positions, V vocabulary, K bins, L lengths.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from dvp.core.importance import ImportanceRule, importance_weights
from dvp.core.vocabulary_mismatch import epsilon
from dvp.measurement.files import D_EDGES

TOLERANCE = 1e-12
"""Nats by which a bound has to be exceeded to count as violated: log p in float64 is accurate to about 1e-14."""

# All bins are (lower, upper], so that d = 0 counts as not positive, and p = 1 and a gap of 0 lie in the last one.
PROBABILITY_EDGES = (0.0, 1e-12, 1e-10, 1e-8, 1e-6, 1e-4, 1e-2, 0.1, 0.5, 0.9, 1.0)
"""Bin edges of p = π_train."""
GAP_EDGES = (-math.inf, *map(float, range(-30, 0)), -1e-9, 0.0)
"""Bin edges of log(p/p_max), nats. The last bin holds only the most likely token of each position."""
REST_EDGES = (0.0, *(10 ** (step / 10) for step in range(-100, 0)), 0.9, 0.99, 1.0)
"""Bin edges of 1 − p."""

POSITION_MEANS = (
    *("jaccard", "infer_in_train", "train_in_infer", "safe_size_train", "safe_size_infer"),
    *("pruned_mass", "pruned_mass_infer", "outside_train"),
)
"""The entries of `safe_sets` that are means over positions; the others are sums."""


@torch.no_grad()
def histogram(log_p_NV: torch.Tensor, log_q_NV: torch.Tensor) -> dict[str, np.ndarray]:
    """Sum over pairs in bins of (p, d); each array is (bins of p, bins of d).

    Returns:
        `pairs` and `abs_d` = Σ|d| count every pair once; for each weighting w, named as in `infer`: `infer` = Σw,
        `infer_squared` = Σw² (what a kernel's bandwidth needs), `infer_d` = Σw·d, `infer_abs_d` = Σw·|d|.
    """
    d_NV = log_q_NV - log_p_NV
    shape = (len(PROBABILITY_EDGES) - 1, len(D_EDGES) - 1)
    index_NV = _bin(log_p_NV.exp(), PROBABILITY_EDGES) * shape[1] + _bin(d_NV, D_EDGES)
    values = {"pairs": torch.ones_like(d_NV), "abs_d": d_NV.abs()}
    for name, log_weight_NV in (("infer", log_q_NV), ("train", log_p_NV)):
        weight_NV = log_weight_NV.exp()
        values |= {
            name: weight_NV,
            f"{name}_squared": weight_NV.square(),
            f"{name}_d": weight_NV * d_NV,
            f"{name}_abs_d": weight_NV * d_NV.abs(),
        }
    return _binned(index_NV, shape, values)


@torch.no_grad()
def by_gap(log_p_NV: torch.Tensor, log_q_NV: torch.Tensor) -> dict[str, np.ndarray]:
    """Sum over pairs in bins of log(p/p_max); each array is (bins,), named as in `histogram`, and `max_abs_d`."""
    abs_NV, p_NV, q_NV = (log_q_NV - log_p_NV).abs(), log_p_NV.exp(), log_q_NV.exp()
    index_NV = _bin(log_p_NV - log_p_NV.amax(dim=-1, keepdim=True), GAP_EDGES)
    values = {
        "pairs": torch.ones_like(abs_NV),
        "abs_d": abs_NV,
        "infer": q_NV,
        "infer_abs_d": q_NV * abs_NV,
        "train": p_NV,
        "train_abs_d": p_NV * abs_NV,
        "max_abs_d": abs_NV,
    }
    return _binned(index_NV, (len(GAP_EDGES) - 1,), values)


def sharp_bounds(probability: torch.Tensor, epsilon_max: torch.Tensor | float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the range of log_ratio for logits at most ε_max apart (docs/method.md, Theory 2, the sharp pair).

    log(p + (1 − p) e^{−2ε_max}) ≤ log_ratio ≤ log(p + (1 − p) e^{+2ε_max}), and both are attained: (lower, upper),
    float64, in the shape of the probabilities p = π_train. ε_max in nats, at most 350.
    """
    rest, range_ = 1.0 - probability.double(), 2.0 * torch.as_tensor(epsilon_max, dtype=torch.float64)
    return torch.log1p(rest * torch.expm1(-range_)), torch.log1p(rest * torch.expm1(range_))


def literal_bound(probability: torch.Tensor, epsilon_max: torch.Tensor | float) -> torch.Tensor:
    """Return 2 ε_max (1 − p), the paper's bound on |log_ratio| (Prop. 4.2).

    It holds where q > p; see docs/method.md, Theory 2.
    """
    return 2.0 * epsilon_max * (1.0 - probability.double())


@torch.no_grad()
def bounds(log_p_NV: torch.Tensor, log_q_NV: torch.Tensor) -> dict[str, np.ndarray]:
    """Compare every pair with the literal and the sharp bound of Prop. 4.2 (docs/method.md, Theory 2), by 1 − p.

    Returns:
        Each (bins,): `pairs`; `scaled` = Σ |d| / (2 ε_max); `literal_violations` and `sharp_violations`, pairs that
        exceed the bound of their position by more than TOLERANCE; `max_abs_d`; `max_scaled_above` and
        `max_scaled_below`, the largest |d| / (2 ε_max) where d > 0 and where d < 0; `max_over_literal`, the largest
        |d| / (2 ε_max (1 − p)) of the pairs that violate the literal bound, 0 without one.
    """
    d_NV = log_q_NV - log_p_NV
    epsilon_N1, p_NV = epsilon(log_p_NV, log_q_NV)[0][:, None], log_p_NV.exp()
    lower_NV, upper_NV = sharp_bounds(p_NV, epsilon_N1)
    sharp_NV = torch.maximum(lower_NV + d_NV, -d_NV - upper_NV)  # log_ratio = −d
    literal_NV, abs_NV = literal_bound(p_NV, epsilon_N1), d_NV.abs()
    violates_NV = abs_NV > literal_NV + TOLERANCE
    scaled_NV = abs_NV / (2 * epsilon_N1.clamp(min=torch.finfo(torch.float64).tiny))
    values = {
        "pairs": torch.ones_like(d_NV),
        "scaled": scaled_NV,
        "literal_violations": violates_NV.double(),
        "sharp_violations": (sharp_NV > TOLERANCE).double(),
        "max_abs_d": abs_NV,
        "max_scaled_above": torch.where(d_NV > 0, scaled_NV, 0.0),
        "max_scaled_below": torch.where(d_NV < 0, scaled_NV, 0.0),
        "max_over_literal": torch.where(violates_NV, abs_NV / literal_NV.clamp(min=TOLERANCE), 0.0),
    }
    return _binned(_bin(1 - p_NV, REST_EDGES), (len(REST_EDGES) - 1,), values)


@torch.no_grad()
def prefixes(
    log_ratio_N: torch.Tensor, kl_N: torch.Tensor, lengths: Sequence[int], rule: ImportanceRule
) -> list[dict[str, float]]:
    """Add up the mismatch of a response over its first tokens, for several lengths.

    Args:
        log_ratio_N: log p − log q of its tokens, sampled from the full q.
        kl_N: KL(q‖p) at its positions, nats.
        lengths: numbers of first tokens; one that exceeds the response's length takes all of them.
        rule: decides whether a response that ends there is kept.

    Returns:
        Per length: `length`; `kl` = Σ_t KL_t, nats, whose mean over responses is the KL divergence of the prefixes'
        distributions, given the noise of an engine that has some; `log_ratio` = Σ_t (log p − log q) of the tokens;
        `kept`, 1 or 0.
    """
    mask_LN = torch.arange(len(log_ratio_N)) < torch.tensor(lengths)[:, None]
    weights = importance_weights(log_ratio_N.expand_as(mask_LN), mask_LN, rule)
    return [
        {"length": length, "kl": kl_N[:length].sum().item(), "log_ratio": log_ratio_N[:length].sum().item()}
        | {"kept": float(kept)}
        for length, kept in zip(lengths, weights.kept_B, strict=True)
    ]


@torch.no_grad()
def safe_sets(
    log_p_NV: torch.Tensor,
    log_q_NV: torch.Tensor,
    safe_train_NV: torch.Tensor,
    safe_infer_NV: torch.Tensor,
    tokens_N: torch.Tensor,
) -> dict[str, float]:
    """Compare the two safe sets at one response's positions, and measure what pruning does to the response.

    `safe_train_NV` and `safe_infer_NV` are V_S and V'_S, bool; the tokens are sampled from the full q.

    Returns:
        jaccard, infer_in_train, train_in_infer: means over the positions of |V_S ∩ V'_S| over the union, over |V'_S|
            (the containment that the trainer's margin is for), over |V_S| (on which the support of q^mp depends).
        safe_size_train, safe_size_infer: means of |V_S|, |V'_S|.
        pruned_mass, pruned_mass_infer: mean of 1 − Z over the positions, of p outside V_S and of q outside V'_S.
        pruned_mass_sum: Σ_t (1 − Z_t), the trainer's side.
        outside_train: mean over the positions of Σ_a q^mp(a)[a ∉ V_S]: the tokens that a pruned engine would sample and
            the trainer prunes.
        tokens_inside_infer, tokens_outside_train: tokens of the response that are in V'_S; of these, not in V_S.
        pruned_log_prob: log p^mp of the response, −inf if a token is outside V_S.
    """
    p_NV, q_NV = log_p_NV.exp(), log_q_NV.exp()
    pruned_N = torch.where(safe_train_NV, 0.0, p_NV).sum(dim=-1)
    kept_NV = torch.where(safe_infer_NV, q_NV, 0.0)
    outside_N = torch.where(safe_train_NV, 0.0, kept_NV).sum(dim=-1) / kept_NV.sum(dim=-1)
    inside_train_N, inside_infer_N = (
        mask_NV.gather(1, tokens_N[:, None]).squeeze(1) for mask_NV in (safe_train_NV, safe_infer_NV)
    )
    log_p_N = log_p_NV.gather(1, tokens_N[:, None]).squeeze(1)
    pruned_log_prob_N = torch.where(inside_train_N, log_p_N - torch.log1p(-pruned_N), -math.inf)
    train_N, infer_N = safe_train_NV.sum(dim=1).double(), safe_infer_NV.sum(dim=1).double()
    both_N = (safe_train_NV & safe_infer_NV).sum(dim=1).double()
    return {
        "jaccard": (both_N / (train_N + infer_N - both_N)).mean().item(),
        "infer_in_train": (both_N / infer_N).mean().item(),
        "train_in_infer": (both_N / train_N).mean().item(),
        "safe_size_train": train_N.mean().item(),
        "safe_size_infer": infer_N.mean().item(),
        "pruned_mass": pruned_N.mean().item(),
        "pruned_mass_infer": torch.where(safe_infer_NV, 0.0, q_NV).sum(dim=-1).mean().item(),
        "pruned_mass_sum": pruned_N.sum().item(),
        "outside_train": outside_N.mean().item(),
        "tokens_inside_infer": inside_infer_N.sum().item(),
        "tokens_outside_train": (inside_infer_N & ~inside_train_N).sum().item(),
        "pruned_log_prob": pruned_log_prob_N.sum().item(),
    }


def add(sums: dict[str, Any], more: Mapping[str, Any]) -> None:
    """Add numbers or arrays to the entries of `sums`, empty at first; entries named `max…` take the larger instead."""
    for name, value in more.items():
        combine = np.maximum if name.startswith("max") else np.add
        sums[name] = combine(sums[name], value) if name in sums else value


def _bin(values: torch.Tensor, edges: tuple[float, ...]) -> torch.Tensor:
    """Return the index of each value's bin (lower, upper]; a value at or below the lowest edge is in the first one."""
    return torch.bucketize(values, torch.tensor(edges[1:-1], dtype=torch.float64, device=values.device))


def _binned(index_NV: torch.Tensor, shape: tuple[int, ...], values: dict[str, torch.Tensor]) -> dict[str, np.ndarray]:
    """Return the sum of each kind of value in every bin, in `shape`; its maximum if the name begins with `max`."""
    index, count = index_NV.flatten(), math.prod(shape)
    nothing = torch.zeros(count, dtype=torch.float64, device=index.device)
    return {
        name: (
            nothing.scatter_reduce(0, index, value_NV.flatten(), "amax")
            if name.startswith("max")
            else torch.bincount(index, value_NV.flatten(), minlength=count)
        )
        .view(shape)
        .cpu()
        .numpy()
        for name, value_NV in values.items()
    }
