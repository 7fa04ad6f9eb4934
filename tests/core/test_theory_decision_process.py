"""Theorems on the gradient and on the KL estimators, proved by enumeration of a small decision process.

docs/method.md, "Theory", items 1 and 4, and the estimators of "Diagnostics". Everything is exact (float64, no sampling)
unless a docstring says that it is a statistical check.
"""

import pytest
import torch
from decision_process import DecisionProcess, Instance, log_policy, random_instance
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from dvp.core.diagnostics import mismatch_metrics
from dvp.core.head import token_statistics
from dvp.core.importance import ImportanceRule, importance_weights
from dvp.core.objective import LOSSES, policy_loss, zero_outside_safe
from dvp.core.safe_vocabulary import FixedRho, safe_mask, with_margin

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
@pytest.mark.parametrize("size", [(4, 3), (5, 3), (3, 4)])
@pytest.mark.parametrize("epsilon", [0.01, 0.3, 2.0])
@pytest.mark.parametrize("seed", range(4))
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


@settings(max_examples=40)
@given(SEEDS, st.booleans(), st.sampled_from(["equal sets", "a wider engine", "an engine that does not prune"]))
def test_theorem_5_3_the_weighted_gradient_is_unbiased_where_the_engine_covers_the_safe_set(seed, shared, case):
    instance = random_instance(seed, epsilon=EPSILON, shared=shared)
    safe_SV, wider_SV = safe_sets(instance, FixedRho(RHO), FixedRho(RHO / 4))
    assume(not safe_SV.all())
    engine_safe_SV = {"equal sets": safe_SV, "a wider engine": wider_SV}.get(case)
    estimate, exact, missing = estimated_and_exact(instance, safe_SV, engine_safe_SV)
    assert not missing.any()
    close(estimate, exact)


@settings(max_examples=40)
@given(SEEDS, st.booleans())
def test_theorem_5_3_without_nesting_the_bias_is_minus_the_missing_responses(seed, shared):
    """E[ĝ] = ∇J_mp − Σ_{y ∈ supp p^mp ∖ supp q^mp} R(y) ∇p^mp(y), V_S held constant."""
    instance = random_instance(seed, epsilon=EPSILON, shared=shared)
    estimate, exact, missing = estimated_and_exact(instance, *safe_sets(instance, FixedRho(RHO), FixedRho(2 * RHO)))
    assume(missing.abs().max() > 1e-3)
    close(estimate, exact - missing)


@settings(max_examples=60)
@given(SEEDS)
def test_a_margin_on_the_trainers_side_keeps_every_sampled_token_safe_but_leaves_the_bias(seed):
    """ρ_train = ρ e^{−2ε̂} gives V'_S ⊆ V_S: no ratio is 0. But Theorem 5.3 asks for the other inclusion."""
    instance = random_instance(seed, epsilon=EPSILON)
    safe_SV, engine_safe_SV = safe_sets(instance, with_margin(RHO, EPSILON), FixedRho(RHO))
    assert not (engine_safe_SV & ~safe_SV).any()
    estimate, exact, missing = estimated_and_exact(instance, safe_SV, engine_safe_SV)
    close(estimate, exact - missing)


@settings(max_examples=60)
@given(SEEDS)
def test_a_margin_on_the_engines_side_restores_nesting_and_unbiasedness(seed):
    """ρ_infer = ρ_train e^{−2ε̂} gives V_S ⊆ V'_S: sampled tokens outside V_S occur, with a ratio of exactly 0."""
    instance = random_instance(seed, epsilon=EPSILON)
    safe_SV, engine_safe_SV = safe_sets(instance, FixedRho(RHO), with_margin(RHO, EPSILON))
    assert not (safe_SV & ~engine_safe_SV).any()
    estimate, exact, _ = estimated_and_exact(instance, safe_SV, engine_safe_SV)
    close(estimate, exact)


@pytest.mark.parametrize("seed", [11, 15, 72, 81, 90])
def test_theorem_5_3_through_the_projects_own_head_weights_and_loss(seed):
    """In fp32 and, at these seeds, with both kinds of disagreement between V_S and V'_S. Sampled tokens outside V_S
    have a finite log-ratio here and a weight of e^−20; zero_outside_safe removes their own part as well."""
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
    assert q_Y.sum().item() == pytest.approx(1.0, abs=1e-5)

    assert (q_Y * (process.mask_YT & ~p_in_safe_YT).any(dim=1)).sum() > 1e-2
    weights = importance_weights(log_p_YT - log_q_YT, mask_YT, ImportanceRule(level="sequence"))
    weight_YT = zero_outside_safe(weights.weight_BT, p_in_safe_YT)
    # The exact expectation: each response enters with its probability under q^mp in place of a count.
    advantage_YT = (instance.reward_Y * q_Y).float()[:, None].expand(-1, 3)
    loss = policy_loss(LOSSES["reinforce"], log_p_YT, log_p_YT, weight_YT, advantage_YT, mask_YT, 1).loss
    close(-instance.gradient(loss), exact - missing, 1e-6)


# Ratios and the KL estimators k1 and k3.


@settings(max_examples=40)
@given(SEEDS)
def test_the_expected_ratio_is_one_where_supports_are_equal_and_short_by_the_missing_mass_else(seed):
    instance = random_instance(seed, epsilon=EPSILON)
    process = instance.process
    safe_SV, engine_safe_SV = safe_sets(instance, FixedRho(RHO), FixedRho(RHO))

    def expected_ratio(engine_safe_SV):
        p_Y = process.response_log_prob(log_policy(instance.trainer_logits(), safe_SV)).exp().detach()
        q_Y = process.response_log_prob(log_policy(instance.engine_logits(), engine_safe_SV)).exp()
        sampled_Y = q_Y > 0
        return (q_Y[sampled_Y] * (p_Y / q_Y)[sampled_Y]).sum().item(), p_Y[~sampled_Y].sum().item()

    assert expected_ratio(safe_SV) == pytest.approx((1.0, 0.0), abs=1e-12)
    assert expected_ratio(safe_SV | engine_safe_SV) == pytest.approx((1.0, 0.0), abs=1e-12)
    mean, missing_mass = expected_ratio(engine_safe_SV)
    assert mean == pytest.approx(1.0 - missing_mass, abs=1e-12)


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
@given(SEEDS, st.sampled_from([0.01, 0.3, 2.0]), st.booleans())
def test_k1_and_k3_have_the_exact_kl_of_the_responses_as_their_expectation(seed, epsilon, pruned):
    """Summed over the tokens, as KL of the sequences is the sum of the tokens' (chain rule). Equal supports."""
    instance = random_instance(seed, epsilon=epsilon)
    logits_SV = instance.trainer_logits().detach()
    safe_SV = safe_mask(logits_SV, FixedRho(RHO)) if pruned else None
    log_p_SV, log_q_SV = log_policy(logits_SV, safe_SV), log_policy(instance.engine_logits(), safe_SV)
    log_p_Y, log_q_Y = (instance.process.response_log_prob(policy_SV) for policy_SV in (log_p_SV, log_q_SV))
    kl = torch.where(log_q_Y > -torch.inf, log_q_Y.exp() * (log_q_Y - log_p_Y), 0.0).sum().item()
    assume(kl > 0)  # not if the only safe token of the start ends the response
    assert expected_metrics(instance.process, log_p_SV, log_q_SV) == pytest.approx({"k1": kl, "k3": kl}, abs=1e-12)


@settings(max_examples=10)
@given(SEEDS)
def test_k3_falls_short_of_the_kl_by_the_mass_that_only_the_trainer_keeps(seed):
    """V'_S ⊆ V_S: the KL is finite and k1 is unbiased, but E_q[r_t] = 1 − p^mp(V_S ∖ V'_S), which k3 inherits."""
    instance = random_instance(seed, epsilon=EPSILON)
    process, logits_SV = instance.process, instance.trainer_logits().detach()
    safe_SV, engine_safe_SV = safe_sets(instance, with_margin(RHO, EPSILON), FixedRho(RHO))
    log_p_SV, log_q_SV = log_policy(logits_SV, safe_SV), log_policy(instance.engine_logits(), engine_safe_SV)
    log_q_Y = process.response_log_prob(log_q_SV)
    sampled_Y = log_q_Y > -torch.inf
    q_Y = log_q_Y.exp()
    kl = (q_Y * (log_q_Y - process.response_log_prob(log_p_SV)))[sampled_Y].sum().item()
    missing_S = torch.where(engine_safe_SV, 0.0, log_p_SV.exp()).sum(dim=1)
    short = (q_Y * process.of_states(missing_S).sum(dim=1)).sum().item()
    expected = expected_metrics(process, log_p_SV, log_q_SV)
    assert expected == pytest.approx({"k1": kl, "k3": kl - short}, abs=1e-12)
