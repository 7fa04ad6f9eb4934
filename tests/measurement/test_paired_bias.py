"""The paired bias of gradient estimators, where every sequence can be enumerated, in float64; and its coverage."""

import math
from itertools import product

import pytest
import torch
from decision_process import log_policy, random_instance

from dvp.core.advantages import rloo
from dvp.core.batch import Batch, Rollout
from dvp.core.importance import ImportanceRule
from dvp.core.update import make_update
from dvp.measurement.paired_bias import exact_coefficients, sequence_log_ratio, weight_diagnostics

GROUP = 2


class Enumerated:
    """Every group of two responses, with and without a safe vocabulary."""

    def __init__(self, seed: int, epsilon: float, rho: float | None = None):
        self.instance = random_instance(seed, epsilon=epsilon, vocabulary=3, horizon=2)
        self.process = self.instance.process
        trainer_SV, engine_SV = self.instance.trainer_logits(), self.instance.engine_logits()
        self.safe_SV = engine_safe_SV = None
        if rho is not None:
            self.safe_SV, engine_safe_SV = (
                logits_SV >= logits_SV.amax(dim=1, keepdim=True) + math.log(rho)
                for logits_SV in (trainer_SV.detach(), engine_SV)
            )
        self.train_SV = log_policy(trainer_SV, self.safe_SV)
        infer_SV = log_policy(engine_SV, engine_safe_SV)
        self.infer_Y = self.process.response_log_prob(infer_SV).exp()
        pairs = list(product(range(len(self.process.responses)), repeat=GROUP))
        self.rows_B = torch.tensor(pairs).flatten()
        self.probability_P = self.infer_Y[self.rows_B].view(-1, GROUP).prod(dim=1)
        self.infer_YT = self.process.of_tokens(infer_SV)

    def rollout(self) -> tuple[Rollout, dict[str, torch.Tensor]]:
        """Every group, its responses in consecutive rows; and the trainer's statistics of them."""
        log_prob_YT = self.process.of_tokens(self.train_SV.detach())
        in_safe_YT = log_prob_YT.isfinite()
        statistics = {
            "pruned_log_prob": torch.where(in_safe_YT, log_prob_YT, -50.0),
            "pruned_sum_p_squared": self.process.of_states(self.train_SV.detach().exp().square().sum(dim=1)),
            "target_in_safe": in_safe_YT,
        }
        rows_B = self.rows_B
        batch = Batch(self.process.tokens_YT[rows_B], self.process.mask_YT[rows_B])
        infer_BT = self.infer_YT[rows_B].nan_to_num(neginf=0.0)
        rollout = Rollout(batch, infer_BT, self.instance.reward_Y[rows_B], torch.zeros(len(rows_B)).bool())
        return rollout, {name: value[rows_B] for name, value in statistics.items()}

    def estimates(self, rule: ImportanceRule) -> tuple[torch.Tensor, torch.Tensor]:
        """x of RLOO with a correction and h, of each group, (groups, P)."""
        rollout, statistics = self.rollout()
        update = make_update(rollout, statistics, importance=rule, advantage=rloo, group_size=GROUP)
        scores_BTP, own = self.instance.token_scores(self.safe_SV)[self.rows_B], len(self.rows_B) / GROUP
        x_BP = (update.coefficients()[:, :, None] * scores_BTP).sum(dim=1)
        exact_BT = exact_coefficients(rollout, sequence_log_ratio(rollout, statistics), GROUP)
        h_BP = (exact_BT[:, :, None].double() * scores_BTP).sum(dim=1)
        return tuple(own * z_BP.view(-1, GROUP, z_BP.shape[1]).sum(dim=1) for z_BP in (x_BP, h_BP))

    def expected(self, value_PP: torch.Tensor) -> torch.Tensor:
        return self.probability_P @ value_PP

    def gradient(self) -> torch.Tensor:
        """∇J of the trainer's policy, or ∇J_mp."""
        return self.instance.gradient(self.process.objective(self.train_SV, self.instance.reward_Y))


@pytest.mark.parametrize("rho", [None, 0.05])
def test_the_mean_of_the_paired_difference_is_the_estimators_bias(rho):
    """As h has the exact gradient as its mean, ∇J_mp where both sides reach the same responses at ρ."""
    enumerated = Enumerated(3, epsilon=0.02 if rho else 1.0, rho=rho)
    assert rho is None or not enumerated.safe_SV.all()
    x_PP, h_PP = enumerated.estimates(ImportanceRule())
    assert enumerated.probability_P.sum().item() == pytest.approx(1)
    # Hence x − h has the bias as its mean, whatever the correction and the baseline of x.
    torch.testing.assert_close(enumerated.expected(h_PP), enumerated.gradient(), rtol=1e-6, atol=1e-7)
    bias_P = enumerated.expected(x_PP) - enumerated.gradient()
    assert bias_P.norm() > (1e-4 if rho else 0.05) * enumerated.gradient().norm()
    torch.testing.assert_close(enumerated.estimates(ImportanceRule(level="sequence"))[0], h_PP, rtol=1e-5, atol=1e-7)


def test_diagnostics_of_the_weights_by_hand():
    weights = torch.tensor([1.0, 0.5, 2.0, 0.0], dtype=torch.float64)
    found = weight_diagnostics(weights.log())
    assert found["weight_ess"] == pytest.approx(3.5**2 / (4 * 5.25))
    assert found["weight_largest_share"] == pytest.approx(2 / 3.5)
    assert found["weight_mean"] == pytest.approx(3.5 / 4)
    huge = weight_diagnostics(torch.tensor([500.0, 0.0, 0.0, 0.0], dtype=torch.float64))
    assert huge["weight_ess"] == pytest.approx(0.25)
    nothing = weight_diagnostics(torch.full((4,), -torch.inf, dtype=torch.float64))
    assert nothing == {"weight_ess": 0.0, "weight_largest_share": 1.0, "weight_mean": 0.0}
