"""What each importance correction does to the policy gradient, by exact enumeration of a small decision process.

Every expectation is a sum over all responses, so that nothing here is statistical. The references do not use the code's
weights and losses: they are docs/method.md's formulas, in loops.
"""

import itertools

import numpy as np
import pytest
import torch
from decision_process import log_policy, random_instance
from test_importance import reference

from dvp.core.importance import PRESETS, ImportanceRule, importance_weights
from dvp.core.objective import LOSSES, policy_loss

SEQUENCE_IS = ImportanceRule(level="sequence")
RULES = {
    "naive": ImportanceRule(),
    "seq_is": SEQUENCE_IS,
    "token_is": ImportanceRule(level="token"),
    **PRESETS,
    # Bounds and thresholds that this coarse process meets; its ratios are never as small as 1e-4.
    "geo_rs": PRESETS["geo_rs"].changed(lower=0.8, upper=1.25),
    "geo_tis": ImportanceRule(level="geometric", upper=1.2),
    "k3": ImportanceRule(k3_max=0.1),
    "veto": ImportanceRule(veto=0.6),
    "mis_veto": PRESETS["mis"].changed(veto=0.6),
    "tis_k3": PRESETS["tis"].changed(k3_max=0.4),
}


class Enumerated:
    """All responses of at most three tokens, of which token 0 ends one; their ratios, and ∇log p of each token."""

    def __init__(self, seed=0):
        self.instance = random_instance(seed, epsilon=1.5, vocabulary=3)
        self.process, self.reward_Y = self.instance.process, self.instance.reward_Y
        self.mask_YT = self.process.mask_YT
        self.log_p_SV = log_policy(self.instance.trainer_logits())
        log_q_SV = log_policy(self.instance.engine_logits())
        self.q_Y = self.process.response_log_prob(log_q_SV).exp()
        self.log_ratio_YT = self.process.of_tokens(self.log_p_SV.detach() - log_q_SV)
        self.scores_YTP = self.instance.token_scores()

    def by_the_book(self, rule):
        """docs/method.md's table, (Y, T)."""
        return torch.tensor(reference(self.log_ratio_YT.numpy(), self.mask_YT.numpy(), rule)[0])

    def exact_gradient(self):
        return self.instance.gradient(self.process.objective(self.log_p_SV, self.reward_Y))

    def expected_gradient(self, rule):
        """E_q[ĝ] of the code under test: each response enters with its probability under q in place of a count."""
        log_p_YT = self.process.of_tokens(self.log_p_SV)
        weights = importance_weights(self.log_ratio_YT, self.mask_YT, rule)
        advantage_YT = (self.q_Y * self.reward_Y)[:, None].expand_as(log_p_YT)
        loss = policy_loss(
            LOSSES["reinforce"], log_p_YT, log_p_YT.detach(), weights.weight_BT, advantage_YT, self.mask_YT, 1
        ).loss
        return -self.instance.gradient(loss)


def close(actual, expected):
    torch.testing.assert_close(actual, expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("seed", range(3))
def test_each_correction_is_biased_by_the_weights_that_it_changes(name, seed):
    """E_q[ĝ] − ∇J = E_q[Σ_t (w_t − ∏r) R ∇log p_t]: 0 for sequence importance sampling without bounds."""
    made, rule = Enumerated(seed), RULES[name]
    weight_YT = made.by_the_book(rule)
    if seed == 0:  # the process meets every bound and threshold
        for threshold in ("upper", "veto", "trust_region", "k3_max"):
            default = ImportanceRule.model_fields[threshold].default
            without = {threshold: default} | ({"action": "truncate", "lower": 0.0} if threshold == "upper" else {})
            met = not torch.equal(weight_YT, made.by_the_book(rule.changed(**without)))
            assert met == (getattr(rule, threshold) != default), threshold
    exact_P = made.exact_gradient()
    assert exact_P.abs().max() > 1e-2
    bias_P = made.expected_gradient(rule) - exact_P
    changed_YT = (weight_YT - made.log_ratio_YT.sum(dim=1, keepdim=True).exp()) * made.mask_YT
    predicted_P = torch.einsum("y,yt,ytp->p", made.q_Y * made.reward_Y, changed_YT, made.scores_YTP)
    assert (predicted_P.abs().max() > 1e-3) == (name != "seq_is")
    close(bias_P, predicted_P)


BATCH_RULES = {
    "mean over the kept": PRESETS["mis"].changed(denominator="kept"),
    "self-normalised sequences": SEQUENCE_IS.changed(self_normalise=True),
    "self-normalised, masked": PRESETS["mis"].changed(self_normalise=True),
    "self-normalised, masked, over the kept": PRESETS["mis"].changed(self_normalise=True, denominator="kept"),
    "self-normalised tokens": PRESETS["tis"].changed(self_normalise=True),
}


@pytest.mark.parametrize("name", BATCH_RULES)
def test_rules_that_look_at_the_batch_have_the_bias_of_their_ratio_of_sums(name):
    """Exact expectation over all ordered pairs of responses, a step with nothing kept contributing no gradient."""
    made, rule = Enumerated(), BATCH_RULES[name]
    plain = rule.changed(self_normalise=False)
    rows = [row[mask].tolist() for row, mask in zip(made.by_the_book(plain), made.mask_YT, strict=True)]
    actual_P, expected_P = torch.zeros_like(made.instance.theta_P), torch.zeros_like(made.instance.theta_P)
    for pair in itertools.product(range(len(rows)), repeat=2):
        chosen = list(pair)
        mass, mask_BT = made.q_Y[chosen].prod(), made.mask_YT[chosen]
        weights = importance_weights(made.log_ratio_YT[chosen], mask_BT, rule)
        if weights.denominator:
            leaf = torch.zeros(mask_BT.shape, dtype=torch.float64, requires_grad=True)
            advantage_BT = made.reward_Y[chosen][:, None].expand_as(leaf)
            policy_loss(
                LOSSES["reinforce"], leaf, leaf.detach(), weights.weight_BT, advantage_BT, mask_BT, weights.denominator
            ).loss.backward()
            actual_P -= mass * torch.einsum("bt,btp->p", leaf.grad, made.scores_YTP[chosen])

        total_P, normaliser = torch.zeros_like(actual_P), 0.0
        for y in chosen:
            total_P += made.reward_Y[y] * sum(w * made.scores_YTP[y, t] for t, w in enumerate(rows[y]))
            if not rule.self_normalise:
                normaliser += any(rows[y])
            elif rule.level == "token":
                # The mean weight of a token times the number of responses.
                normaliser += sum(rows[y]) * 2 / sum(len(rows[j]) for j in chosen)
            else:
                normaliser += rows[y][0]
        if normaliser:
            expected_P += mass * total_P / normaliser
    close(actual_P.detach(), expected_P.detach())
    assert (actual_P - made.exact_gradient()).abs().max() > 1e-3


def test_the_variance_of_sequence_importance_sampling_explodes_with_length():
    """Independent tokens, reward 1 (∇J = 0): with c = Σ p²/q, r = p²/(q c) and s the score of a token,

        E_q|ĝ|² = c^T (T E_r|s|² + T(T−1) |E_r s|²),

    enumerated by the code for T = 1..8; truncated or masked at 2, the same stays below 4 E_q|Σ_t s|² ≤ 4 T² max|s|².
    """
    rng = np.random.default_rng(1)
    logits = torch.tensor(rng.normal(size=3))
    p, q = logits.softmax(0), (logits + 0.7 * torch.tensor(rng.normal(size=3))).softmax(0)
    scores = torch.eye(3, dtype=torch.float64) - p
    c = (p**2 / q).sum()
    r = p**2 / q / c
    assert c > 1.1

    def second_moment(rule, length):
        tokens = torch.cartesian_prod(*[torch.arange(3)] * length).view(-1, length)
        weights = importance_weights((p / q).log()[tokens], torch.ones_like(tokens, dtype=torch.bool), rule)
        estimate = torch.einsum("it,itv->iv", weights.weight_BT, scores[tokens])
        return (q[tokens].prod(dim=1) @ estimate.square().sum(dim=1)).item()

    moments = []
    for length in range(1, 9):
        closed = length * (r @ scores.square().sum(1)) + length * (length - 1) * (r @ scores).square().sum()
        moments.append(second_moment(SEQUENCE_IS, length))
        assert moments[-1] == pytest.approx((c**length * closed).item(), rel=1e-10)
        for name in ("seq_tis", "mis"):
            bounded = second_moment(PRESETS[name], length)
            assert bounded <= 4 * length**2 * scores.square().sum(1).max()
            assert bounded <= moments[-1] * (1 + 1e-12)
    assert all(after > c * before for before, after in itertools.pairwise(moments))
