"""What the optimal token baseline does to the gradient, with no sampling error.

A small decision process has few enough responses that every group of G of them can be listed: means and variances over
groups are then sums, exact to rounding. Its parameters are shared between states, as a network's are, so the proxy is
not the true norm of the gradients.
"""

from dataclasses import dataclass

import pytest
import torch
from decision_process import log_policy, random_instance

from dvp.core.advantages import ADVANTAGES, Responses, optimal_token_proxy, otb_variance_readouts

SEEDS = range(4)


@dataclass
class Policy:
    """All S responses of a policy over V tokens of at most T, with D parameters."""

    probability: torch.Tensor
    proxy_ST: torch.Tensor
    score_STD: torch.Tensor
    """∇ log p of each token, 0 past the end."""
    mask_ST: torch.Tensor
    rewards_S: torch.Tensor
    gradient: torch.Tensor
    """∇J, J = Σ_S p R."""


def policy(seed, **shape):
    instance = random_instance(seed, epsilon=0.0, shared=True, vocabulary=3, lowest_reward=0.0, **shape)
    process, log_p_SV = instance.process, log_policy(instance.trainer_logits())
    squares_YT = process.of_states(log_p_SV.exp().square().sum(dim=1)).detach()
    return Policy(
        probability=process.response_log_prob(log_p_SV).exp().detach(),
        proxy_ST=optimal_token_proxy(process.of_tokens(log_p_SV).detach(), squares_YT),
        score_STD=instance.token_scores(),
        mask_ST=process.mask_YT,
        rewards_S=instance.reward_Y,
        gradient=instance.gradient(process.objective(log_p_SV, instance.reward_Y)),
    )


@dataclass
class Moments:
    mean_D: torch.Tensor
    variance: float
    """The trace."""

    @property
    def relative(self) -> float:
        """Variance over squared signal, which a scaled gradient leaves as it is."""
        return self.variance / self.mean_D.square().sum().item()


def moments(target, name, group_size, behaviour=None):
    """Of the estimator (1/G) Σ_i Σ_t A r ∇log p over every group sampled from `behaviour` (default: the target)."""
    groups_MG = torch.cartesian_prod(*[torch.arange(len(target.rewards_S))] * group_size).reshape(-1, group_size)
    sampled_S = target.probability if behaviour is None else behaviour.probability
    weight_M = sampled_S[groups_MG].prod(dim=1)
    ratio_ST = (target.probability / sampled_S)[:, None].expand(target.mask_ST.shape)
    rows_B = groups_MG.flatten()
    responses = Responses(
        rewards_B=target.rewards_S[rows_B],
        mask_BT=target.mask_ST[rows_B],
        group_size=group_size,
        proxy_BT=target.proxy_ST[rows_B],
        ratio_BT=ratio_ST[rows_B],
    )
    coefficient_MGT = (ADVANTAGES[name](responses) * responses.ratio_BT).view(*groups_MG.shape, -1)
    gradient_MD = sum(
        torch.einsum("mt,mtd->md", coefficient_MGT[:, i], target.score_STD[groups_MG[:, i]]) / group_size
        for i in range(group_size)
    )
    mean_D = weight_M @ gradient_MD
    return Moments(mean_D, (weight_M @ (gradient_MD - mean_D).square().sum(dim=1)).item())


def equal_lengths(seed):
    return policy(seed, horizon=3, ends=False)


def uneven_lengths(seed):
    return policy(seed, horizon=4)


LENGTHS = pytest.mark.parametrize("make", [equal_lengths, uneven_lengths])


@LENGTHS
@pytest.mark.parametrize("group_size", [1, 2, 3])
@pytest.mark.parametrize("off_policy", [False, True])
@pytest.mark.parametrize("name", ["rloo", "otb_leave_one_out"])
def test_a_baseline_that_leaves_the_response_out_is_unbiased(make, group_size, off_policy, name):
    target = make(0)
    behaviour = make(1) if off_policy else None
    estimated = moments(target, name, group_size, behaviour)
    torch.testing.assert_close(estimated.mean_D, target.gradient, rtol=1e-9, atol=1e-12)


@LENGTHS
@pytest.mark.parametrize("group_size", [2, 3])
def test_the_group_mean_is_rloo_shrunken_and_nothing_else(make, group_size):
    """Including oneself scales the estimate by (G−1)/G: less variance, the same variance over squared signal."""
    target = make(0)
    leave_one_out, group_mean = (moments(target, name, group_size) for name in ("rloo", "dr_grpo"))
    shrinkage = (group_size - 1) / group_size
    torch.testing.assert_close(group_mean.mean_D, shrinkage * target.gradient, rtol=1e-9, atol=1e-12)
    assert group_mean.variance == pytest.approx(shrinkage**2 * leave_one_out.variance, rel=1e-9)
    assert group_mean.relative == pytest.approx(leave_one_out.relative, rel=1e-9)


@LENGTHS
@pytest.mark.parametrize("seed", SEEDS)
def test_published_otb_shrinks_the_gradient_and_turns_it(make, seed):
    """It includes itself with a weight that depends on the response, so its bias is not a factor alone. Measured."""
    target = make(seed)
    mean_D, true_D = moments(target, "otb", 3).mean_D, target.gradient
    along = (mean_D @ true_D / true_D.square().sum()).item()
    across = (mean_D - along * true_D).norm() / true_D.norm()
    assert 0.2 < along < 0.95
    assert across > 5e-3


@pytest.mark.parametrize("seed", SEEDS)
def test_otbs_lower_variance_is_mostly_its_shrinkage(seed):
    """Why a self-inclusive baseline's raw variance must not be held against RLOO's. Measured, for G = 3 and over 24
    policies: .13 to .46 raw (median .35), .53 to 1.24 over squared signal (.90), .96 to 1.4 left out (1.09)."""
    target = equal_lengths(seed)
    rloo, otb, leave_one_out = (moments(target, name, 3) for name in ("rloo", "otb", "otb_leave_one_out"))
    assert otb.variance < 0.5 * rloo.variance
    assert otb.relative > 0.5 * rloo.relative
    assert leave_one_out.variance > 0.9 * rloo.variance


@pytest.mark.parametrize("name", list(ADVANTAGES))
@pytest.mark.parametrize("ratio", [1.0, 0.5])
@pytest.mark.parametrize("masked", [False, True])
def test_where_logits_are_the_parameters_the_readouts_are_the_sample_variance_itself(name, ratio, masked):
    """One softmax a position, one token a position: Σ_t A² r² w is ‖ĝ_i‖² there, with no Jacobian between."""
    generator = torch.Generator().manual_seed(0)
    count, tokens, vocabulary = 8, 4, 5
    logits_TV = torch.randn(tokens, vocabulary, generator=generator, dtype=torch.float64, requires_grad=True)
    drawn_BT = torch.multinomial(logits_TV.detach().softmax(dim=1), count, replacement=True, generator=generator).T
    log_p_TV = logits_TV.log_softmax(dim=1)
    log_prob_BT = log_p_TV[torch.arange(tokens), drawn_BT]
    sum_p_squared_BT = log_p_TV.exp().square().sum(dim=1).expand(count, tokens)
    mask_BT = torch.arange(tokens) < torch.tensor([4, 2, 3, 4, 1, 4, 2, 3])[:, None]
    responses = Responses(
        rewards_B=torch.rand(count, generator=generator, dtype=torch.float64),
        mask_BT=mask_BT,
        group_size=4,
        proxy_BT=optimal_token_proxy(log_prob_BT, sum_p_squared_BT),
        ratio_BT=torch.full((count, tokens), ratio, dtype=torch.float64),
    )
    advantage_BT, weight_BT = ADVANTAGES[name](responses), responses.ratio_BT
    if masked:  # as by a mask of the method, which advantages do not see
        weight_BT = torch.where(torch.rand(count, tokens, generator=generator) < 0.5, weight_BT, 0.0)
    each_B = (advantage_BT * weight_BT * log_prob_BT * mask_BT).sum(dim=1)
    gradient_BD = torch.stack([torch.autograd.grad(one, logits_TV, retain_graph=True)[0].flatten() for one in each_B])
    mean_D = gradient_BD.mean(dim=0)

    readouts = otb_variance_readouts(advantage_BT, weight_BT, responses, mean_D.norm().item())
    assert readouts["otb_signal"] == pytest.approx(mean_D.square().sum().item())
    assert readouts["otb_power"] == pytest.approx(gradient_BD.square().sum(dim=1).mean().item())
    assert readouts["otb_noise"] == pytest.approx(gradient_BD.var(dim=0).sum().item() / count)
