import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dvp.core.head import token_statistics
from dvp.core.importance import ImportanceRule, importance_weights
from dvp.core.objective import reinforce_loss, zero_outside_safe
from dvp.errors import DvpError


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 10_000))
def test_loss_and_gradient_against_a_loop(seed):
    generator = torch.Generator().manual_seed(seed)
    log_prob = -torch.rand(3, 4, generator=generator, dtype=torch.float64).requires_grad_()
    weight = torch.rand(3, 4, generator=generator, dtype=torch.float64).requires_grad_()
    advantage = torch.randn(3, generator=generator, dtype=torch.float64)
    mask = torch.rand(3, 4, generator=generator) < 0.7
    leaf = log_prob.detach().requires_grad_()
    loss = reinforce_loss(leaf, weight, advantage, mask, 5.0)

    expected = 0.0
    gradient = torch.zeros(3, 4, dtype=torch.float64)
    for i, t in itertools.product(range(3), range(4)):
        if mask[i, t]:
            gradient[i, t] = -weight[i, t].item() * advantage[i].item() / 5.0
            expected += gradient[i, t].item() * leaf[i, t].item()
    assert loss.item() == pytest.approx(expected, abs=1e-12)
    loss.backward()
    torch.testing.assert_close(leaf.grad, gradient)
    assert weight.grad is None


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, -50.0])
def test_rejected_tokens_leave_no_trace(bad):
    log_prob = torch.tensor([[-1.0, bad, bad]], requires_grad=True)
    weight = torch.tensor([[1.0, 0.0, 1.0]])
    mask = torch.tensor([[True, True, False]])
    loss = reinforce_loss(log_prob, weight, torch.tensor([2.0]), mask, 1.0)
    assert loss.item() == 2.0
    loss.backward()
    assert log_prob.grad.tolist() == [[-2.0, 0.0, 0.0]]


@pytest.mark.parametrize("bad", [math.nan, -math.inf, -50.0])
def test_everything_rejected_is_a_loss_of_zero(bad):
    log_prob = torch.full((2, 3), bad, requires_grad=True)
    mask = torch.ones(2, 3, dtype=torch.bool)
    rule = ImportanceRule("sequence", "mask", 0.5, 2.0, 1e-4)
    weights = importance_weights(torch.full((2, 3), -30.0), mask, rule)
    assert weights.vetoed_B.all()
    loss = reinforce_loss(log_prob, weights.weight_BT, torch.tensor([1.0, -1.0]), mask, 2.0)
    assert loss.item() == 0
    loss.backward()
    assert torch.equal(log_prob.grad, torch.zeros(2, 3))


@pytest.mark.parametrize("denominator", [0.0, -1.0, math.nan])
def test_impossible_denominator(denominator):
    with pytest.raises(DvpError, match="denominator"):
        reinforce_loss(
            torch.zeros(1, 1),
            torch.ones(1, 1),
            torch.ones(1),
            torch.ones(1, 1, dtype=torch.bool),
            denominator,
        )


def test_a_token_outside_the_safe_set_pushes_all_safe_logits_until_it_is_zeroed():
    logits = torch.tensor([[2.0, 1.0, -9.0], [2.0, 1.0, -9.0]], requires_grad=True)
    statistics = token_statistics(logits, torch.eye(3), torch.tensor([2, 1]), rho=0.05)
    in_safe = statistics.target_in_safe[None]
    assert in_safe.tolist() == [[False, True]]
    mask = torch.ones(1, 2, dtype=torch.bool)

    def gradient(weight):
        loss = reinforce_loss(statistics.pruned_log_prob[None], weight, torch.ones(1), mask, 1.0)
        return torch.autograd.grad(loss, logits, retain_graph=True)[0]

    unweighted = torch.ones(1, 2)
    assert (gradient(unweighted)[0, :2] != 0).all()
    zeroed = zero_outside_safe(unweighted, in_safe)
    assert zeroed.tolist() == [[0.0, 1.0]]
    assert not gradient(zeroed)[0].any()
    assert torch.equal(gradient(zeroed)[1], gradient(unweighted)[1])


def test_the_weighted_gradient_is_that_of_the_pruned_objective():
    """METHOD.md item 4: E_{q^mp}[w R ∇log p^mp] = ∇J_mp, two-token sequences over four tokens enumerated."""
    vocabulary, rho = 4, 0.1
    generator = torch.Generator().manual_seed(3)
    # One state at the start and one after each first token; the last token is far out of every safe set.
    train = torch.randn(1 + vocabulary, vocabulary, generator=generator)
    train[:, -1] = -20.0
    infer = train + 0.1 * torch.randn(1 + vocabulary, vocabulary, generator=generator)
    paths = torch.tensor(list(itertools.product(range(vocabulary), repeat=2)))
    states = torch.stack([torch.zeros(len(paths), dtype=torch.long), 1 + paths[:, 0]], dim=1)
    reward = torch.randn(len(paths), generator=generator)

    def statistics(logits):
        rows = token_statistics(logits[states.flatten()], torch.eye(vocabulary), paths.flatten(), rho=rho)
        return rows.pruned_log_prob.view(-1, 2), rows.target_in_safe.view(-1, 2)

    train.requires_grad_()
    log_p, p_in_safe = statistics(train)
    log_q, q_in_safe = statistics(infer)
    assert torch.equal(p_in_safe, q_in_safe)  # equal supports, as the theorem asks
    sampled = q_in_safe.all(dim=1)
    assert 0 < sampled.sum() < len(paths)
    probability_q = torch.where(sampled, log_q.sum(dim=1).exp(), 0.0)
    assert probability_q.sum().item() == pytest.approx(1.0, abs=1e-6)

    rule = ImportanceRule("sequence", "truncate", 0.0, math.inf, None)
    mask = sampled[:, None].expand(-1, 2)
    weight = importance_weights(log_p - log_q, mask, rule).weight_BT
    # The exact expectation: each sequence enters with its probability under q in place of a count.
    loss = reinforce_loss(log_p, weight, reward * probability_q, mask, 1.0)
    (estimate,) = torch.autograd.grad(loss, train, retain_graph=True)
    objective = torch.where(sampled, log_p.sum(dim=1).exp() * reward, 0.0).sum()
    (exact,) = torch.autograd.grad(objective, train)
    assert exact.abs().max() > 1e-2
    torch.testing.assert_close(-estimate, exact, atol=1e-6, rtol=0)
