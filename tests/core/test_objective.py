"""The losses and their gradients against the published formulas, one token at a time, in float64."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dvp.core.objective import LOSSES, Cispo, gradient_at_rollout, policy_loss

B, T = 4, 5
NAMES = ("log_prob", "old_log_prob", "weight", "advantage", "mask")
RULES = LOSSES | {"two-sided": Cispo(clip_low=0.1, clip_high=0.2)}


def random_case(seed, *, spread=0.4, one_a_sequence=False):
    """A random batch, of which some tokens are rejected and a response may be empty."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape):
        return torch.rand(shape, generator=generator, dtype=torch.float64)

    log_prob = -3 * random(B, T)
    columns = 1 if one_a_sequence else T
    return {
        "log_prob": log_prob,
        "old_log_prob": log_prob - spread * (2 * random(B, T) - 1),
        "weight": (2 * random(B, columns) * (random(B, columns) < 0.8)).expand(B, T),
        "advantage": (4 * random(B, columns) - 2).expand(B, T),
        "mask": random(B, T) < 0.7,
    }


def run(rule, case, denominator=3):
    """The loss, the gradient in log_prob and the clip flags of the code under test."""
    leaf = case["log_prob"].clone().requires_grad_()
    result = policy_loss(rule, leaf, *(case[name] for name in NAMES[1:]), denominator)
    result.loss.backward()
    return result.loss.item(), leaf.grad, result.clipped_BT


def published(rule, case, denominator=3):
    """The same by autograd over the formula; and where it says that the ratio is cut."""
    leaf = case["log_prob"].clone().requires_grad_()
    total, cut = 0.0 * leaf.sum(), torch.zeros(B, T, dtype=torch.bool)
    low, high = 1 - getattr(rule, "clip_low", 0), 1 + getattr(rule, "clip_high", 0)
    for i in range(B):
        active = [t for t in range(T) if case["mask"][i, t] and case["weight"][i, t] > 0]
        ratio = [(leaf[i, t] - case["old_log_prob"][i, t]).exp() for t in active]
        if rule.kind == "gspo" and active:
            # (π_θ(y)/π_old(y))^(1/|y|), from the probabilities of the whole sequences.
            whole = leaf[i, active].exp().prod() / case["old_log_prob"][i, active].exp().prod()
            ratio = [whole ** (1 / len(active))] * len(active)
        for t, r in zip(active, ratio, strict=True):
            a, w = case["advantage"][i, t], case["weight"][i, t]
            if rule.kind == "reinforce":
                term = a * leaf[i, t]
            elif rule.kind == "cispo":
                # The ratio is a constant: every token, cut or not, keeps the gradient of log π.
                term = r.detach().clamp(low, high) * a * leaf[i, t]
                cut[i, t] = not low <= r <= high
            else:
                term = torch.minimum(r * a, r.clamp(low, high) * a)
                cut[i, t] = bool((a > 0 and r > high) or (a < 0 and r < low))
            total = total + w * term / (len(active) if rule.kind == "gspo" else 1)
    (-total / denominator).backward()
    return -total.item() / denominator, leaf.grad, cut


@settings(max_examples=60)
@given(seed=st.integers(0, 10_000), wide=st.booleans())
@pytest.mark.parametrize("name", RULES)
def test_every_loss_is_its_published_formula(name, seed, wide):
    rule = RULES[name]
    spread = {"gspo": (2e-3, 0.5), "cispo": (0.4, 2.5)}.get(rule.kind, (0.0, 0.4))[wide]
    case = random_case(seed, spread=spread, one_a_sequence=rule.kind == "gspo")
    loss, gradient, clipped = run(rule, case)
    expected, expected_gradient, expected_clipped = published(rule, case)
    assert loss == pytest.approx(expected, abs=1e-12)
    torch.testing.assert_close(gradient, expected_gradient)
    assert torch.equal(clipped, expected_clipped)


@pytest.mark.parametrize("name", RULES)
def test_the_gradient_before_the_weights_move_is_known(name):
    case = random_case(3, spread=0.0, one_a_sequence=RULES[name].kind == "gspo")
    _, expected, _ = published(RULES[name], case)
    weight, advantage, mask = (case[part] for part in ("weight", "advantage", "mask"))
    torch.testing.assert_close(gradient_at_rollout(RULES[name], weight, advantage, mask, 3), expected)
    assert not gradient_at_rollout(RULES[name], 0 * weight, advantage, mask, 3).any()


def test_the_named_losses_have_the_published_clips():
    numbers = {name: tuple(rule.model_dump().values()) for name, rule in LOSSES.items()}
    assert numbers == {
        "reinforce": ("reinforce",),
        "ppo": ("ppo", 0.2, 0.2),
        "clip_higher": ("ppo", 0.2, 0.28),
        "gspo": ("gspo", 3e-4, 4e-4),
        "cispo": ("cispo", 1.0, 4.0),
    }


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, -50.0])
@pytest.mark.parametrize("name", LOSSES)
def test_rejected_tokens_and_padding_leave_no_trace(name, bad):
    """And only the log-probs get a gradient: of a batch of which nothing is left, zeros."""
    leaf = torch.tensor([[-1.0, bad, bad], [bad, bad, bad]], requires_grad=True)
    weight = torch.tensor([[1.0, 0.0, bad], [bad, bad, bad]])
    advantage = torch.tensor([[2.0, bad, bad], [bad, bad, bad]])
    old = torch.tensor([[-1.0, bad, bad], [bad, bad, bad]])
    mask = torch.tensor([[True, True, False], [False, False, False]])
    constants = [constant.requires_grad_() for constant in (old, weight, advantage)]
    result = policy_loss(LOSSES[name], leaf, *constants, mask, 1)
    # −A log π, or −A r.
    assert result.loss.item() == (2.0 if LOSSES[name].kind in {"reinforce", "cispo"} else -2.0)
    assert not result.clipped_BT.any()
    result.loss.backward()
    assert leaf.grad.tolist() == [[-2.0, 0.0, 0.0], [0.0, 0.0, 0.0]]
    assert all(constant.grad is None for constant in constants)
    nothing = policy_loss(LOSSES[name], leaf, *constants, torch.zeros(2, 3, dtype=torch.bool), 1)
    (gradient,) = torch.autograd.grad(nothing.loss, leaf)
    assert (nothing.loss.item(), gradient.any(), nothing.clipped_BT.any()) == (0, False, False)


@pytest.mark.parametrize("log_ratio", [500.0, -500.0])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("name", ["ppo", "clip_higher", "gspo", "cispo"])
def test_absurd_ratios_give_finite_losses_and_are_flagged(name, advantage, log_ratio):
    leaf = torch.full((1, 2), -600.0 if log_ratio < 0 else -1.0, requires_grad=True)
    ones = torch.ones(1, 2)
    result = policy_loss(LOSSES[name], leaf, leaf.detach() - log_ratio, ones, advantage * ones, ones.bool(), 1)
    result.loss.backward()
    assert result.loss.isfinite()
    assert leaf.grad.isfinite().all()
    assert result.clipped_BT.all()
