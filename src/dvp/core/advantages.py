"""Advantages of outcome rewards (docs/method.md, "Advantages").

Every advantage is a function of `Responses` and returns one value per token, so that the loss treats all alike. All but
the optimal token baselines (OTB [O], arXiv 2602.07078) are constant over a response.

Shape suffixes: B responses, T token positions, P prompts, G responses to one prompt, K model tokens (the k-th token
that the model itself wrote, whatever its position).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from dvp.core.lazy import no_grad, torch

ADVANTAGES: dict[str, Callable[[Responses], torch.Tensor]] = {}
"""Advantages by name. Each returns (B, T) in the rewards' type and units (none if divided by a std), 0 where mask_BT
is False."""
BY_TOKEN: set[str] = set()
"""Names of the advantages whose values differ between the tokens of a response."""
NEED_A_GROUP: set[str] = set()
"""Names of the advantages that are 0 if a prompt has a single response."""

# Published constants: STD_EPSILON is added to GRPO's standard deviation, ENERGY_EPSILON to OTB's Σ W.
STD_EPSILON = 1e-6
ENERGY_EPSILON = 1e-8


def by_response(advantage: Callable[[Responses], torch.Tensor]) -> Callable[[Responses], torch.Tensor]:
    """Register an advantage that is constant over a response, under its function's name."""
    ADVANTAGES[advantage.__name__] = advantage
    return advantage


def by_token(advantage: Callable[[Responses], torch.Tensor]) -> Callable[[Responses], torch.Tensor]:
    """Register an advantage whose value differs between the tokens of a response."""
    BY_TOKEN.add(advantage.__name__)
    return by_response(advantage)


def compares(advantage: Callable[[Responses], torch.Tensor]) -> Callable[[Responses], torch.Tensor]:
    """Mark an advantage that is 0 for a single response per prompt, so that experiments refuse it with group_size 1."""
    NEED_A_GROUP.add(advantage.__name__)
    return advantage


@dataclass(frozen=True, eq=False)
class Responses:
    """B graded responses; the G responses to a prompt are consecutive rows."""

    rewards_B: torch.Tensor
    """One float reward per response; NaN if it was not graded. Such a response does not count as a member of its group:
    the others get the advantages of a group without it."""
    mask_BT: torch.Tensor
    """bool, True at the tokens that the model wrote: False at prompt and padding, and in a multi-turn response also
    where the environment wrote. Cleared for a response that was not graded."""
    group_size: int
    """G ≥ 1."""
    proxy_BT: torch.Tensor
    """w_t of `optimal_token_proxy`, or the true squared gradient norm that it approximates. Any value, NaN included,
    where mask_BT is False."""
    ratio_BT: torch.Tensor
    """The importance weights r_t that the loss applies, which enter W squared; ones without a correction. Any value,
    NaN included, where mask_BT is False."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "mask_BT", self.mask_BT & ~self.rewards_B.isnan()[:, None])


@no_grad
def optimal_token_proxy(log_prob_BT: torch.Tensor, sum_p_squared_BT: torch.Tensor) -> torch.Tensor:
    """Return OTB's proxy w_t = 1 − 2p_t(y_t) + Σ_v p_t(v)² of the squared norm of a token's gradient.

    It is the squared norm in logit space: ∇_z log p(y) = e_y − p, and ‖e_y − p‖² = (1 − p_y)² + Σ_{v≠y} p_v². The
    second form is computed, with its sum held between 0 and (1 − p_y)², its largest possible value: the first form
    cancels where p_y → 1, and in float32 gives negative "norms" that can make OTB divide by nothing.

    Given log p of the sampled tokens (nats) and Σ_v p(v)² of the same distribution, full or pruned. Returns w in [0, 2)
    of the same shape, without gradient; garbage in padding gives garbage there.
    """
    rest_BT = -torch.expm1(log_prob_BT)  # 1 − p_y
    others_BT = (sum_p_squared_BT - log_prob_BT.exp().square()).clamp(min=0.0)
    return rest_BT.square() + torch.minimum(others_BT, rest_BT.square())


@by_response
def rloo(responses: Responses) -> torch.Tensor:
    """Leave-one-out: A_i = R_i − mean_{j≠i} R_j = G/(G−1) · (R_i − R̄); for G = 1, A = R. Unbiased."""
    size_P1 = _graded(responses).sum(dim=1, keepdim=True).to(responses.rewards_B.dtype)
    leave_one_out_PG = size_P1 / (size_P1 - 1).clamp(min=1) * _centred(responses)
    return _constant(responses, torch.where(size_P1 > 1, leave_one_out_PG, _grouped_rewards(responses)))


@compares
@by_response
def grpo(responses: Responses) -> torch.Tensor:
    """A_i = (R_i − R̄) / (std + 1e-6), std of the group with divisor G − 1; for G = 1, A = 0."""
    return _constant(responses, _over_std(responses, dim=1))


@compares
@by_response
def dr_grpo(responses: Responses) -> torch.Tensor:
    """A_i = R_i − R̄, which is (G−1)/G times RLOO's; for G = 1, A = 0."""
    return _constant(responses, _centred(responses))


@compares
@by_response
def opo(responses: Responses) -> torch.Tensor:
    """A_i = R_i − Σ_j len_j R_j / Σ_j len_j, len in model tokens; for G = 1, A = 0.

    The sums leave out responses whose r are all 0, as OTB's do: they were rejected.
    """
    relative_PG = _relative(responses)
    length_PG = (responses.mask_BT.sum(dim=1) * ~_rejected(responses)).reshape(relative_PG.shape)
    total_P1 = length_PG.sum(dim=1, keepdim=True)
    baseline_P1 = (length_PG * relative_PG).sum(dim=1, keepdim=True) / total_P1.clamp(min=1)
    # If a whole group was rejected, A = R; the loss gives it weight 0 anyway.
    return _constant(responses, torch.where(total_P1 > 0, relative_PG - baseline_P1, _grouped_rewards(responses)))


@compares
@by_response
def reinforce_pp(responses: Responses) -> torch.Tensor:
    """REINFORCE++ with group baseline: R_i − R̄, whitened over the batch.

    That is, divided by its standard deviation over the B responses (divisor B − 1; plus 1e-6); its mean over them is 0
    already. Each response counts once, whatever its length: whitening over tokens would give responses a push
    even where their group agrees.
    """
    return _constant(responses, _over_std(responses, dim=(0, 1)))


@by_token
def otb(responses: Responses) -> torch.Tensor:
    """Optimal token baseline as published: A_{i,t} = R_i − B_t, t counting model tokens only.

    B_t = Σ_i R_i W_{i,t} / (Σ_i W_{i,t} + 1e-8) over the group's members still alive at t, with
    W_{i,t} = Σ_{j≤t} w_{i,j} r_{i,j}². It minimises Σ_i W_{i,t} (R_i − B)². B_t includes response i itself, and so
    shrinks the gradient, and not along its own direction only. A response whose r are all 0 was rejected and is no
    member: with it the only one that was kept would be its own baseline, and learn nothing.

    Past the second-longest response (one member alive) and for G = 1, B = 0 and A = R: there, and by the 1e-8 where
    Σ W is not far above it, a group whose rewards are all equal does not give 0.
    """
    energy_PGK, alive_PGK = _energy(responses)
    compared_PGK = alive_PGK & ~_rejected(responses).reshape(-1, responses.group_size, 1)
    rewards_PG1 = _grouped_rewards(responses)[:, :, None]
    weighted_P1K = (rewards_PG1 * energy_PGK).sum(dim=1, keepdim=True)
    baseline_P1K = weighted_P1K / (energy_PGK.sum(dim=1, keepdim=True) + ENERGY_EPSILON)
    several_P1K = compared_PGK.sum(dim=1, keepdim=True) > 1
    return _at_tokens(responses, rewards_PG1 - torch.where(several_P1K, baseline_P1K, 0.0), alive_PGK)


@by_token
def otb_leave_one_out(responses: Responses) -> torch.Tensor:
    """OTB without self-inclusion: B_{i,t} = Σ_{j≠i} R_j W_{j,t} / Σ_{j≠i} W_{j,t} over the others alive at t.

    Unbiased, since B does not depend on response i (not published; ours, to tell OTB's variance reduction from its
    shrinkage). B = 0, hence A = R, wherever the others have no weight: no other is alive, G = 1, or all their r are 0.
    """
    energy_PGK, alive_PGK = _energy(responses)
    rewards_PG1 = _grouped_rewards(responses)[:, :, None]
    # Not total − own: that cancels where one response holds nearly all the weight.
    others_GG = 1.0 - torch.eye(responses.group_size, dtype=energy_PGK.dtype, device=energy_PGK.device)
    total_PGK = others_GG @ energy_PGK
    baseline_PGK = others_GG @ (rewards_PG1 * energy_PGK) / torch.where(total_PGK > 0, total_PGK, 1.0)
    return _at_tokens(responses, rewards_PG1 - baseline_PGK, alive_PGK)


def otb_variance_readouts(
    advantage_BT: torch.Tensor, weight_BT: torch.Tensor, responses: Responses, gradient_norm: float
) -> dict[str, float | None]:
    """Return OTB's variance read-outs of ḡ = (1/N) Σ_i ĝ_i, ĝ_i = Σ_t A r ∇log p (docs/method.md, "Advantages" [O]).

    Usable with every advantage. N = B: all responses count as independent, so differences between prompts' gradients
    count as noise, and what members of a group share through their baseline does not.

    Args:
        advantage_BT, weight_BT: A and r that the loss applied, with r 0 where a mask left a token out, unlike that of
            `responses`.
        gradient_norm: ‖ḡ‖ in the parameters, before clipping, of the sum over tokens averaged over the N responses; 0
            for a skipped step. It cannot come from the proxy: each response has logits of its own, so over logits ‖ḡ‖²
            is mean(A²W)/N whatever the gradients' directions.

    Returns:
        otb_signal: ‖ḡ‖².
        otb_power: mean(A²W) = mean_i Σ_t A² r² w, the proxy of mean ‖ĝ_i‖²; for a constant A it is A² W at the last
            token, and for a token-level A the sum stays exact in logit space (verl's metric averages A first).
        otb_noise: (power − signal)/(N − 1); None for N = 1. If power were mean ‖ĝ_i‖² itself, this would be the
            unbiased estimate of the trace of ḡ's variance. Signal is measured over parameters and power over logits, so
            they differ by the network's Jacobian: follow it over one run, do not read it as a variance. Not cut at 0: a
            negative value says that this scale is far from 1.
    """
    energy_BT = advantage_BT.double().square() * weight_BT.double().square() * responses.proxy_BT.double()
    count = len(responses.rewards_B)
    power = torch.where(responses.mask_BT, energy_BT, 0.0).sum().item() / count
    signal = gradient_norm**2
    return {
        "otb_signal": signal,
        "otb_power": power,
        "otb_noise": (power - signal) / (count - 1) if count > 1 else None,
    }


def _graded(responses: Responses) -> torch.Tensor:
    """Return which responses have a reward, bool (P, G)."""
    return ~responses.rewards_B.reshape(-1, responses.group_size).isnan()


def _grouped_rewards(responses: Responses) -> torch.Tensor:
    """Return the rewards by prompt, (P, G); 0 for ungraded responses."""
    return responses.rewards_B.reshape(-1, responses.group_size).where(_graded(responses), 0.0)


def _rejected(responses: Responses) -> torch.Tensor:
    """Return which responses have no token with r ≠ 0, bool (B,)."""
    return ~(responses.mask_BT & (responses.ratio_BT != 0)).any(dim=1)


def _relative(responses: Responses) -> torch.Tensor:
    """Subtract the group's first reward, (P, G): exactly 0 if all are equal, which R − R̄ in floats need not be."""
    rewards_PG, graded_PG = _grouped_rewards(responses), _graded(responses)
    first_P1 = rewards_PG.gather(1, graded_PG.long().argmax(dim=1, keepdim=True))
    return torch.where(graded_PG, rewards_PG - first_P1, 0.0)


def _centred(responses: Responses) -> torch.Tensor:
    """Return R_i − R̄, (P, G); 0 for ungraded responses."""
    relative_PG, graded_PG = _relative(responses), _graded(responses)
    mean_P1 = relative_PG.sum(dim=1, keepdim=True) / graded_PG.sum(dim=1, keepdim=True).clamp(min=1)
    return torch.where(graded_PG, relative_PG - mean_P1, 0.0)


def _over_std(responses: Responses, dim: int | tuple[int, ...]) -> torch.Tensor:
    """Return R_i − R̄ over its standard deviation along `dim`, (P, G); 0 if only one response is graded."""
    centred_PG = _centred(responses)
    sum_of_squares = centred_PG.square().sum(dim=dim, keepdim=True)
    count = _graded(responses).sum(dim=dim, keepdim=True)
    return centred_PG / ((sum_of_squares / (count - 1).clamp(min=1)).sqrt() + STD_EPSILON)


def _constant(responses: Responses, advantage_PG: torch.Tensor) -> torch.Tensor:
    """Spread one value per response over its model tokens, (B, T)."""
    return torch.where(responses.mask_BT, advantage_PG.reshape(-1, 1), 0.0)


def _energy(responses: Responses) -> tuple[torch.Tensor, torch.Tensor]:
    """Return W aligned on model tokens, 0 past a response's end, and which tokens exist (bool), both (P, G, K)."""
    mask_BT = responses.mask_BT
    length_B1 = mask_BT.sum(dim=1, keepdim=True)
    alive_BK = torch.arange(mask_BT.shape[1], device=mask_BT.device) < length_B1
    # Both masks have len_i True entries in row i, in order: row-major selection pairs them up.
    step_N = (responses.proxy_BT[mask_BT] * responses.ratio_BT[mask_BT].square()).to(responses.rewards_B.dtype)
    step_BK = torch.zeros(mask_BT.shape, dtype=step_N.dtype, device=step_N.device).masked_scatter(alive_BK, step_N)
    energy_BK = torch.where(alive_BK, step_BK.cumsum(dim=1), 0.0)
    groups = (len(mask_BT) // responses.group_size, responses.group_size, mask_BT.shape[1])
    return energy_BK.reshape(groups), alive_BK.reshape(groups)


def _at_tokens(responses: Responses, advantage_PGK: torch.Tensor, alive_PGK: torch.Tensor) -> torch.Tensor:
    """Put values aligned on model tokens back at their positions, (B, T)."""
    mask_BT = responses.mask_BT
    zeros_BT = torch.zeros(mask_BT.shape, dtype=advantage_PGK.dtype, device=mask_BT.device)
    return zeros_BT.masked_scatter(mask_BT, advantage_PGK[alive_PGK])
