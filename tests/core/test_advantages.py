import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dvp.core.advantages import ADVANTAGES, NEED_A_GROUP, Responses, optimal_token_proxy, otb_variance_readouts

NAMES = list(ADVANTAGES)
PER_RESPONSE = ["rloo", "grpo", "dr_grpo", "opo", "reinforce_pp"]
TOKEN_BASELINES = ["otb", "otb_leave_one_out"]


@st.composite
def batches(draw, min_group=1, full=False, rejecting=False):
    """Responses of uneven length, with holes and with empty ones.

    full : every position is a model token.
    rejecting : some responses, and some tokens of others, have no weight.
    """
    group_size = draw(st.integers(min_group, 4))
    responses, tokens = group_size * draw(st.integers(1, 3)), draw(st.integers(1, 6))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    rewards = rng.integers(0, 2, responses).astype(float) if draw(st.booleans()) else rng.normal(size=responses)
    mask = np.ones((responses, tokens), bool) if full else rng.random((responses, tokens)) < rng.random((responses, 1))
    ratio = np.exp(rng.normal(0, 0.5, mask.shape))
    if rejecting:
        ratio *= (rng.random((responses, 1)) < 0.6) & (rng.random(mask.shape) < 0.8)
    return build(rewards, mask, group_size, rng.uniform(0.01, 1.9, mask.shape), ratio)


def build(rewards, mask, group_size, proxy=None, ratio=None):
    mask = torch.tensor(np.asarray(mask))
    ones = torch.ones(mask.shape, dtype=torch.float64)
    return Responses(
        rewards_B=torch.tensor(np.asarray(rewards, dtype=float)),
        mask_BT=mask,
        group_size=group_size,
        proxy_BT=ones if proxy is None else torch.tensor(np.asarray(proxy, dtype=float)),
        ratio_BT=ones if ratio is None else torch.tensor(np.asarray(ratio, dtype=float)),
    )


def replaced(responses, **changes):
    return Responses(**{**vars(responses), **changes})


def reference(name, responses):
    """docs/method.md's table, one number at a time."""
    rewards, mask = responses.rewards_B.tolist(), responses.mask_BT.numpy()
    step = (responses.proxy_BT * responses.ratio_BT**2).numpy()
    size = responses.group_size
    groups = [range(first, first + size) for first in range(0, len(rewards), size)]
    group_of = {i: group for group in groups for i in group}
    mean = {i: math.fsum(rewards[j] for j in group_of[i]) / size for i in group_of}
    lengths = mask.sum(axis=1)
    # W[i][k]: summed over the response's first k + 1 model tokens
    energy = [[math.fsum(step[i][mask[i]][: k + 1]) for k in range(lengths[i])] for i in range(len(rewards))]
    batch_std = math.sqrt(sum((rewards[i] - mean[i]) ** 2 for i in mean) / max(len(rewards) - 1, 1))

    def advantage(i, k):
        group = group_of[i]
        match name:
            case "rloo":
                others = [rewards[j] for j in group if j != i]
                return rewards[i] - (sum(others) / len(others) if others else 0.0)
            case "grpo":
                std = np.std([rewards[j] for j in group], ddof=1) if size > 1 else 0.0
                return (rewards[i] - mean[i]) / (std + 1e-6)
            case "dr_grpo":
                return rewards[i] - mean[i]
            case "opo":
                kept = [j for j in group if any(responses.ratio_BT[j][mask[j]])]
                return rewards[i] - sum(lengths[j] * rewards[j] for j in kept) / max(sum(lengths[j] for j in kept), 1)
            case "reinforce_pp":
                return (rewards[i] - mean[i]) / (batch_std + 1e-6)
            case "otb":
                alive = [j for j in group if lengths[j] > k and any(responses.ratio_BT[j][mask[j]])]
                if len(alive) < 2:
                    return rewards[i]
                total = sum(energy[j][k] for j in alive) + 1e-8
                return rewards[i] - sum(rewards[j] * energy[j][k] for j in alive) / total
            case "otb_leave_one_out":
                others = [j for j in group if lengths[j] > k and j != i]
                if not others:
                    return rewards[i]
                total = sum(energy[j][k] for j in others)
                return rewards[i] - (sum(rewards[j] * energy[j][k] for j in others) / total if total else 0.0)

    expected = np.zeros(mask.shape)
    for i in range(len(rewards)):
        for k, t in enumerate(np.flatnonzero(mask[i])):
            expected[i, t] = advantage(i, k)
    return expected


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=60)
@given(responses=batches() | batches(rejecting=True))
def test_every_advantage_is_its_formula_and_zero_outside_the_mask(name, responses):
    np.testing.assert_allclose(ADVANTAGES[name](responses), reference(name, responses), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=30)
@given(responses=batches(min_group=2))
def test_what_stands_outside_the_mask_is_immaterial(name, responses):
    garbage = torch.tensor(math.nan, dtype=torch.float64)
    spoiled = replaced(
        responses,
        proxy_BT=torch.where(responses.mask_BT, responses.proxy_BT, garbage),
        ratio_BT=torch.where(responses.mask_BT, responses.ratio_BT, garbage),
    )
    advantage_BT = ADVANTAGES[name](responses)
    assert torch.equal(ADVANTAGES[name](spoiled), advantage_BT)
    readouts = [otb_variance_readouts(advantage_BT, one.ratio_BT, one, 1.0) for one in (responses, spoiled)]
    assert readouts[0] == readouts[1]


@pytest.mark.parametrize("name", PER_RESPONSE)
def test_a_group_that_agrees_teaches_nothing_even_in_floats(name):
    """In float32 the mean of seven 0.7 is not 0.7, and GRPO would divide the difference by 1e-6."""
    ones = torch.ones(14, 2)
    rewards = torch.tensor([0.7] * 7 + [0.0] * 3 + [1.0] * 4)
    advantage_BT = ADVANTAGES[name](Responses(rewards, ones.bool(), 7, ones, ones))
    assert torch.equal(advantage_BT[:7], torch.zeros(7, 2))  # in the rewards' type
    assert advantage_BT[7:].all()


@pytest.mark.parametrize("name", TOKEN_BASELINES)
@settings(max_examples=80)
@given(responses=batches(min_group=2) | batches(min_group=2, rejecting=True), seed=st.integers(0, 10_000))
def test_a_rejected_response_changes_nothing_for_the_others(name, responses, seed):
    """Not by its reward, its length or its proxies: the others' advantages are those of a group without it."""
    rng, size = np.random.default_rng(seed), responses.group_size
    rejected_B = torch.tensor(rng.random(len(responses.rewards_B)) < 0.5)
    spoiled = replaced(
        responses,
        rewards_B=torch.where(rejected_B, torch.tensor(rng.normal(size=len(rejected_B))), responses.rewards_B),
        mask_BT=torch.where(
            rejected_B[:, None], torch.tensor(rng.random(responses.mask_BT.shape) < 0.7), responses.mask_BT
        ),
        proxy_BT=torch.where(
            rejected_B[:, None], torch.tensor(rng.uniform(0, 2, responses.mask_BT.shape)), responses.proxy_BT
        ),
        ratio_BT=torch.where(rejected_B[:, None], 0.0, responses.ratio_BT),
    )
    advantage_BT = ADVANTAGES[name](spoiled)
    for first in range(0, len(rejected_B), size):
        members = [row for row in range(first, first + size) if not rejected_B[row]]
        if members:
            tensors = {key: value[members] for key, value in vars(spoiled).items() if key != "group_size"}
            alone = Responses(**tensors, group_size=len(members))
            torch.testing.assert_close(advantage_BT[members], ADVANTAGES[name](alone), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=30)
@given(responses=batches(min_group=2), seed=st.integers(0, 10_000))
def test_an_ungraded_response_is_no_member_of_its_group(name, responses, seed):
    """Its own advantages are 0, the others' those of a batch without it, one response of each group being such."""
    size = responses.group_size
    left_out = np.random.default_rng(seed).integers(0, size, len(responses.rewards_B) // size)
    ungraded_B = torch.tensor(np.arange(size) == left_out[:, None]).flatten()
    rewards_B = responses.rewards_B.masked_fill(ungraded_B, math.nan)
    advantage_BT = ADVANTAGES[name](replaced(responses, rewards_B=rewards_B))
    tensors = {key: value[~ungraded_B] for key, value in vars(responses).items() if key != "group_size"}
    others_BT = ADVANTAGES[name](Responses(**tensors, group_size=size - 1))
    torch.testing.assert_close(advantage_BT[~ungraded_B], others_BT, rtol=1e-12, atol=1e-12)
    assert not advantage_BT[ungraded_B].any()


@pytest.mark.parametrize("name", NAMES)
def test_the_graded_that_agree_teach_nothing(name):
    """In float64, where OTB's 1e-8 is what is left."""
    responses = build([1.0, math.nan, 1.0, 1.0], np.ones((4, 2), bool), 4)
    assert ADVANTAGES[name](responses).abs().max() < 1e-7


@settings(max_examples=60)
@given(st.integers(0, 10_000), st.integers(2, 8), st.floats(0.1, 20))
def test_the_proxy_is_the_squared_norm_of_the_gradient_over_the_logits(seed, vocabulary, scale):
    generator = torch.Generator().manual_seed(seed)
    logits = (scale * torch.randn(vocabulary, generator=generator, dtype=torch.float64)).requires_grad_()
    log_p = logits.log_softmax(dim=0)
    for token in range(vocabulary):
        (gradient,) = torch.autograd.grad(log_p[token], logits, retain_graph=True)
        sum_p_squared = (logits.mul(2).logsumexp(0) - 2 * logits.logsumexp(0)).exp()
        proxy = optimal_token_proxy(log_p[token], sum_p_squared)
        assert not proxy.requires_grad
        assert proxy.item() == pytest.approx(gradient.square().sum().item(), rel=1e-6, abs=1e-12)
        p = log_p[token].exp()
        assert proxy.item() == pytest.approx((1 - 2 * p + sum_p_squared).item(), abs=1e-14)


@pytest.mark.parametrize("margin", [4.0, 8.0, 12.0, 14.0])
def test_the_proxy_of_a_nearly_certain_token_keeps_its_size_in_float32(margin):
    """1 − 2p + Σp² cancels there: at margin 12 float32 leaves no digit of it."""
    logits = torch.cat([torch.tensor([margin]), torch.linspace(-1.0, 1.0, 50)])
    exact_p = logits.double().softmax(dim=0)
    exact = ((1 - exact_p[0]) ** 2 + exact_p[1:].square().sum()).item()
    log_p = logits.log_softmax(dim=0)[0]
    for rounding in [-2e-6, 0.0, 2e-6]:  # of p², in float32
        proxy = optimal_token_proxy(log_p, exact_p.square().sum().float() + rounding).item()
        assert 0.4 * exact < proxy < 2.1 * exact


def test_those_that_compare_responses_are_0_for_one_alone_and_no_others():
    alone = build([1.0, 0.0], [[True, True], [True, False]], group_size=1)
    assert {name for name, advantage in ADVANTAGES.items() if not advantage(alone).any()} == NEED_A_GROUP
