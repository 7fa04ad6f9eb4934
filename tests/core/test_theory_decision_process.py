"""Theorems on the gradient and on the KL estimators, proved by enumeration of a small decision process.

docs/method.md, "Theory", items 1 and 4, and the estimators of "Diagnostics". Everything is exact (float64, no sampling)
unless a docstring says that it is a statistical check.
"""

import pytest
import torch
from decision_process import DecisionProcess, Instance, log_policy, random_instance
from hypothesis import given, settings
from hypothesis import strategies as st

from dvp.core.diagnostics import mismatch_metrics
from dvp.core.head import token_statistics
from dvp.core.importance import ImportanceRule, importance_weights
from dvp.core.objective import LOSSES, policy_loss
from dvp.core.safe_vocabulary import FixedRho, safe_mask, with_margin
from rounding import rounding

SEEDS = st.integers(0, 100_000)
# With logits of standard deviation 1.5 this prunes one or two of four tokens in a state.
RHO = 0.15
EPSILON = 0.3


def close(actual, expected, tolerance=1e-12):
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=0)


@pytest.mark.parametrize("pruned", [False, True])
@pytest.mark.parametrize("shared", [False, True])
def test_the_process_itself_probabilities_sum_to_one_and_gradients_are_finite_differences(shared, pruned):
    """The pruned J is differenced with V_S chosen anew at each θ: holding it constant is exact away from thresholds."""
    instance = random_instance(0, epsilon=EPSILON, shared=shared)

    def objective(theta_P):
        logits_SV = instance.trainer_logits(theta_P)
        policy_SV = log_policy(logits_SV, safe_mask(logits_SV, FixedRho(RHO)) if pruned else None)
        close(instance.process.response_log_prob(policy_SV).exp().sum().item(), 1.0)
        return instance.process.objective(policy_SV, instance.reward_Y)

    step = 1e-5 * torch.eye(len(instance.theta_P), dtype=torch.float64)
    theta_P = instance.theta_P.detach()
    differences = [(objective(theta_P + e_P) - objective(theta_P - e_P)) / 2e-5 for e_P in step]
    close(instance.gradient(objective(instance.theta_P)), torch.stack(differences), 1e-9)


# Theorem 4.1: the bias of the uncorrected gradient.


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("size", [(4, 3), (3, 4)])
@pytest.mark.parametrize("epsilon", [0.01, 0.3, 2.0])
@pytest.mark.parametrize("seed", range(3))
def test_theorem_4_1_the_bias_is_the_difference_of_the_exact_expectations(seed, epsilon, size, shared):
    """E_q[∇log p R] − ∇J = E_p[(e^{−Δ} − 1) ∇log p R], Δ = Σ_t log_ratio_t."""
    vocabulary, horizon = size
    instance = random_instance(seed, epsilon=epsilon, shared=shared, vocabulary=vocabulary, horizon=horizon)
    process, reward_Y = instance.process, instance.reward_Y
    log_p_SV, log_q_SV = log_policy(instance.trainer_logits()), log_policy(instance.engine_logits())

    q_Y = process.response_log_prob(log_q_SV).exp()
    naive = instance.gradient((q_Y * reward_Y * process.response_log_prob(log_p_SV)).sum())
    difference = naive - instance.gradient(process.objective(log_p_SV, reward_Y))

    p_Y = process.response_log_prob(log_p_SV).exp().detach()
    delta_Y = process.of_tokens(log_p_SV - log_q_SV).sum(dim=1).detach()
    theorem = (p_Y * torch.expm1(-delta_Y) * reward_Y) @ instance.scores()
    close(theorem, difference)
    assert difference.abs().max() > 1e-4 * epsilon


@settings(max_examples=25)
@given(SEEDS)
def test_theorem_4_1_with_a_constant_reward_the_bias_is_the_gradient_of_minus_kl(seed):
    """∇J = 0, and E_q[∇log p] = −∇KL(q‖p): the bias alone pulls the trainer's policy towards the engine's."""
    instance = random_instance(seed, epsilon=1.0, shared=True)
    process = instance.process
    log_p_Y = process.response_log_prob(log_policy(instance.trainer_logits()))
    log_q_Y = process.response_log_prob(log_policy(instance.engine_logits()))
    theorem = (log_p_Y.exp().detach() * torch.expm1(log_q_Y - log_p_Y.detach())) @ instance.scores()
    close(theorem, -instance.gradient((log_q_Y.exp() * (log_q_Y - log_p_Y)).sum()))


# Theorem 5.3: the constrained, importance-weighted gradient.


def estimated_and_exact(instance: Instance, safe_SV: torch.Tensor, engine_safe_SV: torch.Tensor | None):
    """E_{q^mp}[(p^mp/q^mp) R ∇log p^mp], ∇J_mp, and the part of ∇J_mp due to responses that q^mp never draws."""
    process, reward_Y = instance.process, instance.reward_Y
    log_p_SV = log_policy(instance.trainer_logits(), safe_SV)
    p_Y = process.response_log_prob(log_p_SV).exp().detach()
    q_Y = process.response_log_prob(log_policy(instance.engine_logits(), engine_safe_SV)).exp()
    ratio_Y = torch.where(q_Y > 0, p_Y / q_Y, 0.0)
    scores_YP = instance.scores(safe_SV)
    estimate = (q_Y * ratio_Y * reward_Y) @ scores_YP
    missing = torch.where(q_Y > 0, 0.0, p_Y * reward_Y) @ scores_YP
    return estimate, instance.gradient(process.objective(log_p_SV, reward_Y)), missing


def safe_sets(instance: Instance, trainer: FixedRho, engine: FixedRho) -> tuple[torch.Tensor, torch.Tensor]:
    return safe_mask(instance.trainer_logits(), trainer), safe_mask(instance.engine_logits(), engine)


SIDES = {
    "the same rule": (FixedRho(RHO), FixedRho(RHO)),
    "a narrower engine": (FixedRho(RHO), FixedRho(2 * RHO)),
    # V'_S ⊆ V_S, so that no ratio is 0; but Theorem 5.3 asks for the other inclusion.
    "a margin on the trainer's side": (with_margin(RHO, EPSILON), FixedRho(RHO)),
    "a margin on the engine's side": (FixedRho(RHO), with_margin(RHO, EPSILON)),
    "a wider engine": (FixedRho(RHO), FixedRho(RHO / 4)),
}
COVERING = {"a margin on the engine's side", "a wider engine", "equal sets", "an engine that does not prune"}


@settings(max_examples=40)
@given(seed=SEEDS, shared=st.booleans())
@pytest.mark.parametrize("case", [*SIDES, "equal sets", "an engine that does not prune"])
def test_theorem_5_3_the_bias_is_minus_the_responses_that_the_engine_misses(case, seed, shared):
    """E[ĝ] = ∇J_mp − Σ_{y ∈ supp p^mp ∖ supp q^mp} R(y) ∇p^mp(y), V_S held constant: unbiased where V_S ⊆ V'_S.

    The expected ratio is 1 less the missing responses' mass.
    """
    instance = random_instance(seed, epsilon=EPSILON, shared=shared)
    safe_SV, engine_safe_SV = safe_sets(instance, *SIDES.get(case, SIDES["the same rule"]))
    if case == "equal sets":
        engine_safe_SV = safe_SV
    elif case == "an engine that does not prune":
        engine_safe_SV = torch.ones_like(safe_SV)
    estimate, exact, missing = estimated_and_exact(instance, safe_SV, engine_safe_SV)
    close(estimate, exact - missing)
    p_Y = instance.process.response_log_prob(log_policy(instance.trainer_logits(), safe_SV)).exp().detach()
    q_Y = instance.process.response_log_prob(log_policy(instance.engine_logits(), engine_safe_SV)).exp()
    ratio = (q_Y * torch.where(q_Y > 0, p_Y / q_Y, 0.0)).sum()
    close(ratio, 1.0 - p_Y[q_Y == 0].sum())
    if case in COVERING:
        assert not (safe_SV & ~engine_safe_SV).any()
        assert not missing.any()
    if case == "a margin on the trainer's side":
        assert not (engine_safe_SV & ~safe_SV).any()


@pytest.mark.parametrize("seed", [11, 15, 72, 81, 90])
def test_theorem_5_3_through_the_projects_own_head_weights_and_loss(seed):
    """In fp32 and, at these seeds, with both kinds of disagreement between V_S and V'_S. Sampled tokens outside V_S
    have a finite log-ratio here and a weight of e^−20; zeroing them, as make_update does, removes their own part."""
    instance = random_instance(seed, epsilon=EPSILON)
    process, rule = instance.process, FixedRho(RHO)
    safe_SV, engine_safe_SV = safe_sets(instance, rule, rule)
    _, exact, missing = estimated_and_exact(instance, safe_SV, engine_safe_SV)
    assert missing.abs().max() > 1e-3

    def statistics(logits_SV):
        rows = token_statistics(
            logits_SV.float()[process.states_YT.flatten()], torch.eye(4), process.tokens_YT.flatten(), safe=rule
        )
        return rows.pruned_log_prob.view(-1, 3), rows.target_in_safe.view(-1, 3)

    log_p_YT, p_in_safe_YT = statistics(instance.trainer_logits())
    log_q_YT, q_in_safe_YT = statistics(instance.engine_logits())
    mask_YT = process.mask_YT & (q_in_safe_YT | ~process.mask_YT).all(dim=1, keepdim=True)
    q_Y = torch.where(mask_YT, log_q_YT, 0.0).sum(dim=1).exp() * mask_YT.any(dim=1)
    assert q_Y.sum().item() == pytest.approx(1.0, abs=rounding(len(q_Y)))

    assert (q_Y * (process.mask_YT & ~p_in_safe_YT).any(dim=1)).sum() > 1e-2
    weights = importance_weights(log_p_YT - log_q_YT, mask_YT, ImportanceRule(level="sequence"))
    weight_YT = torch.where(p_in_safe_YT, weights.weight_BT, 0.0)
    # The exact expectation: each response enters with its probability under q^mp in place of a count.
    advantage_YT = (instance.reward_Y * q_Y).float()[:, None].expand(-1, 3)
    loss = policy_loss(LOSSES["reinforce"], log_p_YT, log_p_YT, weight_YT, advantage_YT, mask_YT, 1).loss
    close(-instance.gradient(loss), exact - missing, 1e-6)


# The KL estimators k1 and k3.


def expected_metrics(process: DecisionProcess, log_p_SV: torch.Tensor, log_q_SV: torch.Tensor) -> dict[str, float]:
    """E_q of Σ_t k1 and Σ_t k3, each response measured alone and weighted by its exact probability."""
    log_ratio_YT = process.of_tokens(log_p_SV - log_q_SV)
    q_Y = process.response_log_prob(log_q_SV).exp()
    expected = {"k1": 0.0, "k3": 0.0}
    for y in q_Y.nonzero().flatten().tolist():
        metrics = mismatch_metrics(log_ratio_YT[y : y + 1], process.mask_YT[y : y + 1])
        for name in expected:
            expected[name] += q_Y[y].item() * metrics[name] * len(process.responses[y])
    return expected


@settings(max_examples=10)
@given(seed=SEEDS, epsilon=st.sampled_from([0.01, 0.3, 2.0]))
@pytest.mark.parametrize("case", ["unpruned", "equal sets", "a margin on the trainer's side"])
def test_k1_has_the_exact_kl_of_the_responses_as_its_expectation_and_k3_what_is_left_of_it(case, seed, epsilon):
    """Summed over the tokens, as KL of the sequences is the sum of the tokens' (chain rule).

    Where only the trainer keeps some mass (V'_S ⊆ V_S), E_q[r_t] = 1 − p^mp(V_S ∖ V'_S), and k3 is short by it.
    """
    instance = random_instance(seed, epsilon=epsilon)
    process, logits_SV = instance.process, instance.trainer_logits().detach()
    safe_SV = engine_safe_SV = None
    if case != "unpruned":
        sides = (with_margin(RHO, epsilon), FixedRho(RHO))
        safe_SV, engine_safe_SV = safe_sets(instance, *sides)
        safe_SV = engine_safe_SV if case == "equal sets" else safe_SV
    log_p_SV, log_q_SV = log_policy(logits_SV, safe_SV), log_policy(instance.engine_logits(), engine_safe_SV)
    log_p_Y, log_q_Y = (process.response_log_prob(policy_SV) for policy_SV in (log_p_SV, log_q_SV))
    kl = torch.where(log_q_Y > -torch.inf, log_q_Y.exp() * (log_q_Y - log_p_Y), 0.0).sum().item()
    missing_S = torch.where(log_q_SV > -torch.inf, 0.0, log_p_SV.exp()).sum(dim=1)
    short = (log_q_Y.exp() * process.of_states(missing_S).sum(dim=1)).sum().item()
    assert expected_metrics(process, log_p_SV, log_q_SV) == pytest.approx({"k1": kl, "k3": kl - short}, abs=1e-12)
