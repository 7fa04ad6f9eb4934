"""Responses in which a tool wrote some tokens: their loss, in float64, is that of the model's own tokens alone."""

import math

import pytest
import torch

from dvp.core.advantages import ADVANTAGES
from dvp.core.batch import Batch, Rollout
from dvp.core.diagnostics import mismatch_metrics
from dvp.core.importance import PRESETS, ImportanceRule
from dvp.core.objective import LOSSES, policy_loss
from dvp.core.update import make_update

V, H, GROUP = 11, 6, 4
# Tokens of the first turn, of the tool's answer, of the second turn; the prompt has 2.
SHAPES = [(2, 3, 2), (1, 2, 4), (3, 0, 0), (2, 1, 1), (1, 4, 1), (2, 2, 2), (4, 0, 0), (1, 1, 5)]
REWARDS = torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0, 1.0, 0.0, 0.0], dtype=torch.float64)
GEOMETRIC = ImportanceRule(level="geometric", action="mask", lower=0.9, upper=1.2)
RULES = {"none": ImportanceRule(), "tis": PRESETS["tis"], "mis": PRESETS["mis"], "geometric": GEOMETRIC}


class Policy:
    """Logits from the running mean of embeddings, so that every earlier token counts, whoever wrote it."""

    def __init__(self):
        generator = torch.Generator().manual_seed(0)
        self.embedding_VH, self.head_HV = (
            torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in ((V, H), (H, V))
        )

    def log_p(self, tokens):
        """log p (V,) of what follows `tokens`."""
        return (self.embedding_VH[torch.tensor(tokens)].mean(dim=0) @ self.head_HV).log_softmax(dim=0)

    def gradients(self, loss):
        return torch.autograd.grad(loss, (self.embedding_VH, self.head_HV))


@pytest.fixture(scope="module")
def made():
    """Prompts, responses, who wrote their tokens, and the engine's log q of the model's."""
    generator = torch.Generator().manual_seed(1)

    def tokens(count):
        return torch.randint(0, V, (count,), generator=generator).tolist()

    prompts, responses, written = [], [], []
    for first, answer, second in SHAPES:
        prompts.append(tokens(2))
        responses.append(tokens(first + answer + second))
        written.append([True] * first + [False] * answer + [True] * second)
    noise = [0.4 * torch.randn(len(own), generator=generator, dtype=torch.float64) for own in written]
    return prompts, responses, written, noise


def own_tokens(policy, made):
    """For each response, of each token that the model wrote: log p with gradient, log q, and OTB's w."""
    every = []
    for prompt, response, written, noise in zip(*made, strict=True):
        rows = []
        for position, (token, own) in enumerate(zip(response, written, strict=True)):
            if own:
                log_p_V = policy.log_p(prompt + response[:position])
                p_V = log_p_V.detach().exp()
                proxy = ((torch.eye(V, dtype=torch.float64)[token] - p_V) ** 2).sum().item()
                rows.append((log_p_V[token], log_p_V[token].item() - noise[position].item(), proxy))
        every.append(rows)
    return every


def expected_weights(rows, rule):
    ratios = [math.exp(log_p.item() - log_q) for log_p, log_q, _ in rows]
    if rule == "none":
        return [1.0] * len(rows)
    if rule == "tis":
        return [min(ratio, 2.0) for ratio in ratios]
    whole = math.prod(ratios) if rule == "mis" else math.prod(ratios) ** (1 / len(ratios))
    low, high = (0.5, 2.0) if rule == "mis" else (0.9, 1.2)
    return [whole if low <= whole <= high else 0.0] * len(rows)


def expected_advantages(name, every, weights):
    """Advantages of each token that the model wrote, by loops over a group's members and their k-th own tokens."""
    result = []
    for start in range(0, len(every), GROUP):
        group = range(start, start + GROUP)
        reward = {i: REWARDS[i].item() for i in group}
        for i in group:
            if name == "rloo":
                result.append([reward[i] - sum(reward[j] for j in group if j != i) / (GROUP - 1)] * len(every[i]))
            elif name == "opo":
                kept = {j: len(every[j]) for j in group if any(weights[j])}
                baseline = sum(kept[j] * reward[j] for j in kept) / max(sum(kept.values()), 1)
                result.append([reward[i] - baseline] * len(every[i]))
            else:
                row = []
                for k in range(len(every[i])):
                    members = [j for j in group if len(every[j]) > k and any(weights[j])]
                    energy = {j: sum(every[j][t][2] * weights[j][t] ** 2 for t in range(k + 1)) for j in members}
                    several = len(members) > 1
                    row.append(
                        reward[i]
                        - several * sum(reward[j] * energy[j] for j in members) / (sum(energy.values()) + 1e-8)
                    )
                result.append(row)
    return result


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("advantage", ["rloo", "opo", "otb"])
def test_the_loss_is_that_of_the_models_own_tokens(made, advantage, rule):
    policy = Policy()
    prompts, responses, written, noise = made
    batch = Batch.collate(prompts, responses, 0, written)
    mask_BT = batch.response_BT
    # At the tool's tokens, and at padding, everything holds something that would spoil the loss.
    log_prob_BT, infer_BT, squares_BT = (torch.full(mask_BT.shape, torch.nan, dtype=torch.float64) for _ in range(3))
    for row, (prompt, response, own) in enumerate(zip(prompts, responses, written, strict=True)):
        for position in range(len(response)):
            if own[position]:
                log_p_V = policy.log_p(batch.tokens_BT[row, : len(prompt) + position].tolist())
                at = row, len(prompt) + position
                log_prob_BT[at] = log_p_V[response[position]]
                infer_BT[at] = log_p_V[response[position]].detach() - noise[row][position]
                squares_BT[at] = log_p_V.detach().exp().square().sum()
    rollout = Rollout(batch, infer_BT, REWARDS, torch.zeros(len(SHAPES), dtype=torch.bool))
    statistics = {
        "pruned_log_prob": log_prob_BT.detach(),
        "pruned_sum_p_squared": squares_BT,
        "target_in_safe": torch.ones_like(mask_BT),
    }
    update = make_update(rollout, statistics, importance=RULES[rule], advantage=ADVANTAGES[advantage], group_size=GROUP)
    loss = policy_loss(
        LOSSES["reinforce"],
        log_prob_BT,
        statistics["pruned_log_prob"],
        update.weight_BT,
        update.advantage_BT,
        mask_BT,
        update.weights.denominator,
    ).loss

    every = own_tokens(policy, made)
    weights = [expected_weights(rows, rule) for rows in every]
    advantages = expected_advantages(advantage, every, weights)
    expected = -sum(
        weights[i][k] * advantages[i][k] * every[i][k][0] for i in range(len(every)) for k in range(len(every[i]))
    ) / len(every)
    assert loss.dtype == torch.float64
    assert loss.item() == pytest.approx(expected.item(), rel=1e-12, abs=1e-14)
    for ours, theirs in zip(policy.gradients(loss), policy.gradients(expected), strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-10, atol=1e-13)
    assert not update.weight_BT[~mask_BT].any()
    assert not update.advantage_BT[~mask_BT].any()
    assert expected.item() != 0.0
    assert (rule in ("none", "tis")) == all(any(row) for row in weights)  # the others reject some response
    # And what is measured is of these tokens only.
    ratios_N = torch.tensor([log_p.item() - log_q for rows in every for log_p, log_q, _ in rows])
    measured = mismatch_metrics(log_prob_BT.detach() - infer_BT, mask_BT)
    assert measured["k1"] == pytest.approx(-ratios_N.double().mean().item(), rel=1e-6)


def test_a_batch_with_answers_of_a_tool_keeps_them_as_context():
    batch = Batch.collate([[5, 6], [7]], [[1, 2, 3, 4], [8, 9]], 0, [[True, False, False, True], None])
    assert batch.tokens_BT.tolist() == [[5, 6, 1, 2, 3, 4], [7, 8, 9, 0, 0, 0]]
    assert batch.response_BT.int().tolist() == [[0, 0, 1, 0, 0, 1], [0, 1, 1, 0, 0, 0]]
    assert batch.lengths().tolist() == [6, 3]
    assert batch.rows(torch.tensor([0])).tokens_BT.tolist() == [[5, 6, 1, 2, 3, 4]]
    assert [part.tolist() for part in batch.micro_batches(6)] == [[0], [1]]
