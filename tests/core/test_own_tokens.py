"""Responses in which a tool wrote some tokens: their loss, in float64, is that of the model's own tokens alone."""

import pytest
import torch

from dvp.core.advantages import ADVANTAGES
from dvp.core.batch import Batch, Rollout
from dvp.core.diagnostics import mismatch_metrics
from dvp.core.importance import PRESETS, ImportanceRule
from dvp.core.masks import DivergenceMask
from dvp.core.objective import LOSSES, policy_loss
from dvp.core.update import make_update

GROUP = 4
# Tokens of the first turn, of the tool's answer, of the second turn; the prompt has 2.
SHAPES = [(2, 3, 2), (1, 2, 4), (3, 0, 0), (2, 1, 1), (1, 4, 1), (2, 2, 2), (4, 0, 0), (1, 1, 5)]
REWARDS = torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0, 1.0, 0.0, 0.0], dtype=torch.float64)
GEOMETRIC = ImportanceRule(level="geometric", action="mask", lower=0.8, upper=1.25)
RULES = {"none": ImportanceRule(), "tis": PRESETS["tis"], "mis": PRESETS["mis"], "geometric": GEOMETRIC}


def loss_of(batch, log_prob_N, infer_N, squares_N, rule, advantage):
    """The loss of these values at the model's tokens, and what would spoil it at all others."""
    values = []
    for value_N in (log_prob_N, infer_N, squares_N):
        spoiled_BT = torch.full(batch.response_BT.shape, torch.nan, dtype=torch.float64)
        values.append(spoiled_BT.masked_scatter(batch.response_BT, value_N))
    log_prob_BT, infer_BT, squares_BT = values
    statistics = {
        "pruned_log_prob": log_prob_BT.detach(),
        "pruned_sum_p_squared": squares_BT,
        "target_in_safe": torch.ones_like(batch.response_BT),
    }
    rollout = Rollout(batch, infer_BT, REWARDS, torch.zeros(len(SHAPES), dtype=torch.bool))
    update = make_update(
        rollout,
        statistics,
        importance=RULES[rule],
        advantage=ADVANTAGES[advantage],
        group_size=GROUP,
        mask=DivergenceMask(kind="divergence", delta=0.4),
    )
    made = update.weight_BT, update.advantage_BT, batch.response_BT
    loss = policy_loss(LOSSES["reinforce"], log_prob_BT, log_prob_BT.detach(), *made, update.weights.denominator).loss
    assert not update.weight_BT[~batch.response_BT].any()
    assert not update.advantage_BT[~batch.response_BT].any()
    return loss, mismatch_metrics(log_prob_BT.detach() - infer_BT, batch.response_BT)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("advantage", ADVANTAGES)
def test_the_loss_is_that_of_the_same_batch_without_the_tools_tokens(advantage, rule):
    """That masks with holes are right in advantages and weights is shown against loops, in their own tests."""
    generator = torch.Generator().manual_seed(1)
    prompts = [[5, 6]] * len(SHAPES)
    written = [[True] * first + [False] * answer + [True] * second for first, answer, second in SHAPES]
    batch = Batch.collate(prompts, [[1] * len(own) for own in written], 0, written)
    alone = Batch.collate(prompts, [[1] * sum(own) for own in written], 0)
    count = int(batch.response_BT.sum())
    log_prob_N = -torch.rand(count, generator=generator, dtype=torch.float64).requires_grad_()
    infer_N = log_prob_N.detach() - 0.3 * torch.randn(count, generator=generator, dtype=torch.float64)
    squares_N = 0.5 + 0.5 * torch.rand(count, generator=generator, dtype=torch.float64)
    made = [loss_of(one, log_prob_N, infer_N, squares_N, rule, advantage) for one in (batch, alone)]
    assert made[0][0].item() == pytest.approx(made[1][0].item(), rel=1e-12) != 0.0
    gradients = [torch.autograd.grad(loss, log_prob_N)[0] for loss, _ in made]
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-14)
    assert made[0][1] == pytest.approx(made[1][1])
