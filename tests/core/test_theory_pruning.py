"""Theorems on what pruning changes: the objective (docs/method.md, Theory 5) and the masked softmax ("Dynamic
vocabulary pruning"). Exact, in float64; the objective by enumeration of a small decision process.
"""

import math

import pytest
import torch
from decision_process import DecisionProcess, log_policy, random_instance
from hypothesis import given, settings
from hypothesis import strategies as st

from dvp.core.head import token_statistics
from dvp.core.importance import PRESETS, ImportanceRule, importance_weights
from dvp.core.objective import LOSSES, policy_loss
from dvp.core.safe_vocabulary import FixedRho, MassBudget, safe_mask
from rounding import rounding

SEEDS = st.integers(0, 100_000)
RHO = 0.05


def close(actual, expected, tolerance=1e-12):
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=0)


# Proposition 5.5: the bias of the pruned objective.


class PrunedObjective:
    """J and J_mp of given logits and any V_S, and the terms of their bounds."""

    def __init__(self, process: DecisionProcess, logits_SV: torch.Tensor, safe_SV: torch.Tensor):
        self.process = process
        log_p_SV = logits_SV.log_softmax(dim=-1)
        self.pruned_mass_S = torch.where(safe_SV, 0.0, log_p_SV.exp()).sum(dim=1)
        self.p_Y = process.response_log_prob(log_p_SV).exp()
        self.p_mp_Y = process.response_log_prob(log_policy(logits_SV, safe_SV)).exp()
        self.safe_Y = self.p_mp_Y > 0
        # Of each response: the sum of 1 − Z over its states, and the product of Z.
        self.sum_Y = process.of_states(self.pruned_mass_S).sum(dim=1)
        self.product_Y = (1.0 - process.of_states(self.pruned_mass_S)).prod(dim=1)

    def bias(self, reward_Y: torch.Tensor) -> float:
        return ((self.p_mp_Y - self.p_Y) * reward_Y).sum().item()

    @property
    def worst_state_bound(self) -> float:
        """T (1 − Z_min)."""
        return self.process.horizon * self.pruned_mass_S.max().item()


def random_pruned_objective(seed: int) -> PrunedObjective:
    instance = random_instance(seed, epsilon=0.0)
    logits_SV = instance.trainer_logits().detach()
    rho = 10 ** (-2.0 * torch.rand(1, generator=torch.Generator().manual_seed(seed)).item())
    return PrunedObjective(instance.process, logits_SV, safe_mask(logits_SV, FixedRho(0.999 * rho)))


@settings(max_examples=100)
@given(SEEDS)
def test_proposition_5_5_the_largest_bias_over_all_rewards_is_one_minus_the_product_of_retained_masses(seed):
    """sup_R |J_mp − J| over R ∈ [0, 1] is the total variation 1 − E_{p^mp}[Π_t Z_t] = P_p(a token is pruned), attained
    by rewarding what survives; over [−1, 1] it is twice that. Hence the refinement, true in both expectations:
    total variation ≤ E_{p^mp}[Σ_t (1 − Z_t)] ≤ T (1 − Z_min) and ≤ E_p[Σ_t (1 − Z_t)] ≤ T (1 − Z_min)."""
    pruned = random_pruned_objective(seed)
    survives_Y = pruned.safe_Y.double()
    variation = 1.0 - (pruned.p_mp_Y * pruned.product_Y).sum().item()
    assert 0.5 * (pruned.p_mp_Y - pruned.p_Y).abs().sum().item() == pytest.approx(variation, abs=1e-12)
    assert pruned.p_Y[~pruned.safe_Y].sum().item() == pytest.approx(variation, abs=1e-12)
    assert pruned.bias(survives_Y) == pytest.approx(variation, abs=1e-12)
    assert pruned.bias(2.0 * survives_Y - 1.0) == pytest.approx(2.0 * variation, abs=1e-12)
    for policy_Y in (pruned.p_mp_Y, pruned.p_Y):
        per_response = (policy_Y * pruned.sum_Y).sum().item()
        assert variation <= per_response + 1e-12
        assert per_response <= pruned.worst_state_bound + 1e-12


def test_the_refinement_is_no_bound_under_the_engines_samples_unless_they_are_reweighted():
    """What a run logs is E_{q^mp}[Σ_t (1 − Z_t)]. An engine that avoids the states in which much is pruned makes that
    as small as one likes, whatever the bias; importance weights p^mp/q^mp bring the bound back (Theorem 5.3)."""
    process = DecisionProcess(3, 2)
    start, first, second = (process.state[prefix] for prefix in [(), (1,), (2,)])
    p_SV = torch.empty(3, 3, dtype=torch.float64)
    p_SV[start] = torch.tensor([0.02, 0.96, 0.02])
    p_SV[first] = torch.tensor([0.3, 0.3, 0.4])
    p_SV[second] = torch.tensor([0.4, 0.3, 0.3])
    safe_SV = torch.ones(3, 3, dtype=torch.bool)
    safe_SV[first, 2] = False
    pruned = PrunedObjective(process, p_SV.log(), safe_SV)
    q_SV = p_SV.clone()
    q_SV[start] = torch.tensor([0.02, 0.02, 0.96])

    q_mp_Y = process.response_log_prob(log_policy(q_SV.log(), safe_SV)).exp()
    ratio_Y = torch.where(q_mp_Y > 0, pruned.p_mp_Y / q_mp_Y, 0.0)
    bias = pruned.bias(pruned.safe_Y.double())
    assert bias == pytest.approx(0.96 * 0.4)
    assert (q_mp_Y * pruned.sum_Y).sum().item() == pytest.approx(0.02 * 0.4)
    assert (q_mp_Y * ratio_Y * pruned.sum_Y).sum().item() >= bias - 1e-12


@settings(max_examples=60)
@given(SEEDS, st.sampled_from([0.5, 0.1, 0.01]))
def test_a_mass_budget_makes_proposition_5_5_a_guarantee(seed, delta):
    """1 − Z(s) ≤ δ/T in every state, so |J_mp − J| ≤ δ for R ∈ [0, 1] and 2δ for [−1, 1] before anything is sampled."""
    instance = random_instance(seed, epsilon=0.0)
    logits_SV = instance.trainer_logits().detach()
    pruned = PrunedObjective(instance.process, logits_SV, safe_mask(logits_SV, MassBudget(delta / 3)))
    allowed = delta * (1.0 + 1e-5)  # the rule sees the logits in fp32
    assert pruned.worst_state_bound <= allowed
    worst_Y = pruned.safe_Y.double()
    assert pruned.bias(worst_Y) <= allowed
    assert pruned.bias(2.0 * worst_Y - 1.0) <= 2.0 * allowed


# The mask of −50.


def masked_log_policy(logits_NV: torch.Tensor, safe_NV: torch.Tensor, mask_value) -> torch.Tensor:
    return torch.where(safe_NV, logits_NV, mask_value).log_softmax(dim=-1)


@settings(max_examples=40)
@given(SEEDS, st.floats(-500, 500))
def test_the_mask_at_max_minus_50_and_exact_omission_agree_in_value_and_gradient(seed, shift):
    """The masked entries together weigh at most V e^−50 ≈ 7e-21 of the largest one."""
    generator = torch.Generator().manual_seed(seed)
    logits_NV = (4.0 * torch.randn(6, 37, generator=generator, dtype=torch.float64) + shift).requires_grad_()
    safe_NV = safe_mask(logits_NV, FixedRho(1e-3))
    maximum_N1 = logits_NV.detach().amax(dim=1, keepdim=True)
    omitted_NV = log_policy(logits_NV, safe_NV)
    masked_NV = masked_log_policy(logits_NV, safe_NV, maximum_N1 - 50.0)
    coefficients_NV = torch.linspace(-1, 1, 37, dtype=torch.float64) * safe_NV
    close(masked_NV[safe_NV], omitted_NV[safe_NV])
    gradients = [
        torch.autograd.grad((coefficients_NV * torch.where(safe_NV, policy_NV, 0.0)).sum(), logits_NV)[0]
        for policy_NV in (masked_NV, omitted_NV)
    ]
    assert gradients[0].abs().max() > 1e-4
    assert not gradients[0][~safe_NV].any()
    close(*gradients)


def test_the_mask_at_an_absolute_minus_50_is_not_shift_invariant():
    """The same policy with all logits lowered by 60: pruned entries then outweigh the safe ones by e^10."""
    logits_1V = torch.tensor([[0.0, -1.0, -20.0]], dtype=torch.float64)
    safe_1V = torch.tensor([[True, True, False]])
    exact = log_policy(logits_1V, safe_1V)[0, 0].item()
    assert exact == pytest.approx(-0.31326, abs=1e-5)
    assert masked_log_policy(logits_1V, safe_1V, -50.0)[0, 0].item() == pytest.approx(exact)
    lowered_1V = logits_1V - 60.0
    assert log_policy(lowered_1V, safe_1V)[0, 0].item() == pytest.approx(exact)
    assert masked_log_policy(lowered_1V, safe_1V, lowered_1V.max() - 50.0)[0, 0].item() == pytest.approx(exact)
    assert masked_log_policy(lowered_1V, safe_1V, -50.0)[0, 0].item() < -10.0
    head = token_statistics(lowered_1V.float(), torch.eye(3), torch.tensor([0]), safe=FixedRho(RHO))
    assert head.pruned_log_prob.item() == pytest.approx(exact, abs=rounding(3, 60))


# A sampled token outside V_S.


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_each_remedy_removes_the_push_of_a_token_outside(advantage):
    """Two responses of two tokens under one loss; the engine gave the first token of response 0 a probability of e^−3,
    the trainer prunes it. Without a correction it moves the safe logits of its state; each remedy stops that, and
    response 1 is never touched."""
    logits_NV = torch.tensor([[2.0, 1.0, -9.0]]).repeat(4, 1).requires_grad_()
    statistics = token_statistics(logits_NV, torch.eye(3), torch.tensor([2, 0, 1, 0]), safe=FixedRho(RHO))
    log_p_BT, in_safe_BT = statistics.pruned_log_prob.view(2, 2), statistics.target_in_safe.view(2, 2)
    log_q_BT = torch.where(in_safe_BT, log_p_BT.detach(), -3.0)
    mask_BT = torch.ones(2, 2, dtype=torch.bool)

    def gradient(weight_BT):
        advantage_BT = torch.full((2, 2), advantage)
        loss = policy_loss(LOSSES["reinforce"], log_p_BT, log_p_BT, weight_BT, advantage_BT, mask_BT, 2).loss
        return torch.autograd.grad(loss, logits_NV, retain_graph=True)[0]

    uncorrected_BT = torch.ones(2, 2)
    push_NV = gradient(uncorrected_BT)
    # Gradient descent lowers all safe logits of the state for a positive advantage, and raises them for a negative one.
    assert (push_NV[0, :2] * advantage > 0.1).all()
    assert push_NV[0, 2] == 0
    rules = {"seq_is": ImportanceRule(level="sequence")} | {name: PRESETS[name] for name in ("seq_tis", "mis", "veto")}
    remedies = {name: importance_weights(log_p_BT - log_q_BT, mask_BT, rule).weight_BT for name, rule in rules.items()}
    remedies["zeroed"] = torch.where(in_safe_BT, uncorrected_BT, 0.0)  # as by make_update
    for name, weight_BT in remedies.items():
        corrected_NV = gradient(weight_BT)
        assert corrected_NV[0].abs().max() <= math.exp(-20), name
        assert torch.equal(corrected_NV[2:], push_NV[2:]), name
    # Zeroing the token keeps its response's other tokens; the weights drop the whole response.
    assert torch.equal(gradient(remedies["zeroed"])[1], push_NV[1])
    assert gradient(remedies["mis"])[1].abs().max() == 0
