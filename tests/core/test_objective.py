import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from dvp.core.head import token_statistics
from dvp.core.importance import PRESETS, ImportanceRule, importance_weights
from dvp.core.objective import LOSSES, Cispo, Gspo, Loss, Ppo, policy_loss, zero_outside_safe
from dvp.core.safe_vocabulary import FixedRho
from dvp.errors import DvpError

REINFORCE = LOSSES["reinforce"]
SEEDS = st.integers(0, 10_000)
NAMES = ("log_prob", "old_log_prob", "weight", "advantage", "mask")


class Case:
    """A random batch: B = 4 responses of up to T = 5 tokens, of which some are rejected and one may be empty."""

    def __init__(self, seed, *, spread=0.4, one_a_sequence=False, dtype=torch.float64):
        generator = torch.Generator().manual_seed(seed)

        def random(*shape):
            return torch.rand(shape, generator=generator, dtype=torch.float64)

        self.log_prob = (-3 * random(4, 5)).to(dtype)
        self.old_log_prob = (self.log_prob - spread * (2 * random(4, 5) - 1)).to(dtype)
        columns = 1 if one_a_sequence else 5
        self.advantage = (4 * random(4, columns) - 2).expand(4, 5).to(dtype)
        self.weight = (2 * random(4, columns) * (random(4, columns) < 0.8)).expand(4, 5).to(dtype)
        self.mask = random(4, 5) < 0.7
        self.denominator = 3

    def run(self, rule, **changes):
        """The loss, the gradient in log_prob and the clip flags of the code under test."""
        arguments = {
            name: changes.get(name, getattr(self, name))
            for name in ("old_log_prob", "weight", "advantage", "mask", "denominator")
        }
        leaf = changes.get("log_prob", self.log_prob).clone().requires_grad_()
        result = policy_loss(rule, leaf, *arguments.values())
        result.loss.backward()
        return result.loss.item(), leaf.grad, result.clipped_BT

    def active(self):
        return [(i, t) for i, t in itertools.product(range(4), range(5)) if self.mask[i, t] and self.weight[i, t] > 0]


def dense(case, term):
    """Loss and gradient of −Σ term / denominator by autograd; `term(case, log_prob)` is written from a formula."""
    leaf = case.log_prob.clone().requires_grad_()
    loss = -term(case, leaf) / case.denominator + 0.0 * leaf.sum()
    loss.backward()
    return loss.item(), leaf.grad


@settings(max_examples=40)
@given(SEEDS)
def test_reinforce_and_its_gradient_against_a_loop(seed):
    case = Case(seed)
    loss, gradient, clipped = case.run(REINFORCE)
    expected, expected_gradient = 0.0, np.zeros((4, 5))
    for i, t in itertools.product(range(4), range(5)):
        if case.mask[i, t]:
            expected_gradient[i, t] = -case.weight[i, t].item() * case.advantage[i, t].item() / 3
            expected += expected_gradient[i, t] * case.log_prob[i, t].item()
    assert loss == pytest.approx(expected, abs=1e-12)
    np.testing.assert_allclose(gradient.numpy(), expected_gradient, atol=1e-14)
    assert not clipped.any()


def test_reinforce_does_not_look_at_the_old_policy():
    case = Case(0)
    loss, gradient, _ = case.run(REINFORCE, old_log_prob=torch.full((4, 5), math.nan))
    expected_loss, expected_gradient, _ = case.run(REINFORCE)
    assert loss == expected_loss
    assert torch.equal(gradient, expected_gradient)


@settings(max_examples=60)
@given(SEEDS)
@pytest.mark.parametrize("name", ["ppo", "clip_higher"])
def test_ppo_against_the_published_minimum(name, seed):
    low, high = {"ppo": (0.2, 0.2), "clip_higher": (0.2, 0.28)}[name]
    case = Case(seed)

    def term(case, log_prob):
        total = 0.0
        for i, t in case.active():
            r, a = (log_prob[i, t] - case.old_log_prob[i, t]).exp(), case.advantage[i, t]
            total = total + case.weight[i, t] * torch.minimum(r * a, r.clamp(1 - low, 1 + high) * a)
        return total

    loss, gradient, clipped = case.run(LOSSES[name])
    expected, expected_gradient = dense(case, term)
    assert loss == pytest.approx(expected, abs=1e-12)
    torch.testing.assert_close(gradient, expected_gradient)
    # Where the clip is active no gradient is left, and nowhere else.
    for i, t in itertools.product(range(4), range(5)):
        assert clipped[i, t].item() == ((i, t) in case.active() and expected_gradient[i, t].item() == 0.0)


@settings(max_examples=60)
@given(SEEDS, st.sampled_from([2e-3, 0.5]))
def test_gspo_against_the_published_sequence_ratio(seed, spread):
    case = Case(seed, spread=spread, one_a_sequence=True)
    low, high = 3e-4, 4e-4
    clipped_rows = set()

    def term(case, log_prob):
        total = 0.0
        for i in range(4):
            tokens = [t for (row, t) in case.active() if row == i]
            if not tokens:
                continue
            log_p, log_old = log_prob[i, tokens], case.old_log_prob[i, tokens]
            # (π_θ(y)/π_old(y))^(1/|y|), from the probabilities of the whole sequences.
            s = (log_p.exp().prod() / log_old.exp().prod()) ** (1 / len(tokens))
            a = case.advantage[i, 0]
            if (a > 0 and s > 1 + high) or (a < 0 and s < 1 - low):
                clipped_rows.add(i)
            total = total + case.weight[i, 0] * torch.minimum(s * a, s.clamp(1 - low, 1 + high) * a)
        return total

    loss, gradient, clipped = case.run(LOSSES["gspo"])
    expected, expected_gradient = dense(case, term)
    assert loss == pytest.approx(expected, abs=1e-12)
    torch.testing.assert_close(gradient, expected_gradient)
    for i, t in itertools.product(range(4), range(5)):
        assert clipped[i, t].item() == ((i, t) in case.active() and i in clipped_rows)


@settings(max_examples=60)
@given(SEEDS)
@pytest.mark.parametrize("rule", [LOSSES["cispo"], Cispo(clip_low=0.1, clip_high=0.2)], ids=["published", "two-sided"])
def test_cispo_against_its_formula(rule, seed):
    case = Case(seed, spread=2.5)
    low, high = {LOSSES["cispo"]: (1.0, 4.0)}.get(rule, (0.1, 0.2))
    expected, expected_gradient = 0.0, np.zeros((4, 5))
    outside = np.zeros((4, 5), bool)
    for i, t in case.active():
        r = math.exp(case.log_prob[i, t].item() - case.old_log_prob[i, t].item())
        coefficient = min(max(r, 1 - low), 1 + high) * case.weight[i, t].item() * case.advantage[i, t].item()
        expected -= coefficient * case.log_prob[i, t].item() / 3
        # The ratio is a constant: every token, cut or not, keeps the gradient of log π.
        expected_gradient[i, t] = -coefficient / 3
        outside[i, t] = not 1 - low <= r <= 1 + high
    loss, gradient, clipped = case.run(rule)
    assert loss == pytest.approx(expected, abs=1e-12)
    np.testing.assert_allclose(gradient.numpy(), expected_gradient, rtol=1e-12)
    np.testing.assert_array_equal(clipped.numpy(), outside)


@settings(max_examples=30)
@given(SEEDS)
@pytest.mark.parametrize("name", ["ppo", "clip_higher", "cispo"])
def test_at_a_ratio_of_one_the_gradient_is_that_of_reinforce(name, seed):
    case = Case(seed)
    _, gradient, clipped = case.run(LOSSES[name], old_log_prob=case.log_prob)
    torch.testing.assert_close(gradient, case.run(REINFORCE)[1])
    assert not clipped.any()


@settings(max_examples=30)
@given(SEEDS)
def test_at_a_ratio_of_one_gspo_is_reinforce_over_the_length(seed):
    case = Case(seed, one_a_sequence=True)
    _, gradient, clipped = case.run(LOSSES["gspo"], old_log_prob=case.log_prob)
    length = (case.mask & (case.weight > 0)).sum(dim=1, keepdim=True).clamp(min=1)
    torch.testing.assert_close(gradient, case.run(REINFORCE)[1] / length)
    assert not clipped.any()


@settings(max_examples=40)
@given(SEEDS)
def test_clip_higher_differs_from_ppo_only_above_the_lower_of_their_upper_bounds(seed):
    case = Case(seed)
    _, ppo, ppo_clipped = case.run(LOSSES["ppo"])
    _, higher, higher_clipped = case.run(LOSSES["clip_higher"])
    ratio = (case.log_prob - case.old_log_prob).exp()
    between = (ratio > 1.2) & (ratio <= 1.28) & (case.advantage > 0) & case.mask & (case.weight > 0)
    assert torch.equal(ppo != higher, between)
    assert torch.equal(ppo_clipped != higher_clipped, between)
    assert torch.equal(ppo_clipped & ~higher_clipped, between)


def test_ppo_clips_only_in_the_direction_of_the_advantage():
    log_ratio = torch.tensor([[0.5, -0.5, 0.5, -0.5, 0.5, -0.5]])
    advantage = torch.tensor([[1.0, 1.0, -1.0, -1.0, 0.0, 0.0]])
    leaf = (log_ratio - 1.0).requires_grad_()
    ones = torch.ones(1, 6)
    result = policy_loss(LOSSES["ppo"], leaf, -ones, ones, advantage, ones.bool(), 1)
    assert result.clipped_BT.tolist() == [[True, False, False, True, False, False]]
    up, down = math.exp(0.5), math.exp(-0.5)
    assert result.loss.item() == pytest.approx(-(1.2 + down - up - 0.8))
    result.loss.backward()
    torch.testing.assert_close(leaf.grad, torch.tensor([[0.0, -down, up, 0.0, 0.0, 0.0]]))


def test_the_named_losses_have_the_published_clips():
    numbers = {name: tuple(rule.model_dump().values()) for name, rule in LOSSES.items()}
    assert numbers == {
        "reinforce": ("reinforce",),
        "ppo": ("ppo", 0.2, 0.2),
        "clip_higher": ("ppo", 0.2, 0.28),
        "gspo": ("gspo", 3e-4, 4e-4),
        "cispo": ("cispo", 1.0, 4.0),
    }


@pytest.mark.parametrize("kind", [Ppo, Gspo])
def test_without_bounds_nothing_is_clipped(kind):
    rule = kind(clip_low=1.0, clip_high=math.exp(21))  # beyond where a ratio is held
    case = Case(1, spread=5.0, one_a_sequence=True)
    _, gradient, clipped = case.run(rule)
    assert not clipped.any()
    assert all(gradient[i, t] != 0 for i, t in case.active())


def one_token_sequences(case):
    return {name: getattr(case, name).reshape(-1, 1) for name in NAMES}


@settings(max_examples=30)
@given(SEEDS)
@pytest.mark.parametrize("name", ["reinforce", "ppo", "clip_higher", "cispo"])
def test_losses_of_tokens_do_not_care_how_tokens_are_cut_into_sequences(name, seed):
    case = Case(seed)
    loss, gradient, clipped = case.run(LOSSES[name])
    cut_loss, cut_gradient, cut_clipped = case.run(LOSSES[name], **one_token_sequences(case))
    assert cut_loss == pytest.approx(loss, abs=1e-12)
    torch.testing.assert_close(cut_gradient, gradient.reshape(-1, 1))
    assert torch.equal(cut_clipped, clipped.reshape(-1, 1))


@settings(max_examples=30)
@given(SEEDS)
def test_gspo_is_ppo_on_sequences_of_one_token(seed):
    case = Case(seed)
    arguments = one_token_sequences(case)
    ppo_loss, ppo_gradient, ppo_clipped = case.run(Ppo(clip_low=0.1, clip_high=0.2), **arguments)
    loss, gradient, clipped = case.run(Gspo(clip_low=0.1, clip_high=0.2), **arguments)
    assert loss == pytest.approx(ppo_loss, abs=1e-12)
    torch.testing.assert_close(gradient, ppo_gradient)
    assert torch.equal(clipped, ppo_clipped)


@pytest.mark.parametrize("name", LOSSES)
def test_micro_batches_with_one_denominator_add_up_to_the_batch(name):
    case = Case(5, one_a_sequence=True)
    whole, gradient, clipped = case.run(LOSSES[name])
    parts = []
    for rows in ([0, 3], [1], [2]):
        part = case.run(LOSSES[name], **{n: getattr(case, n)[rows] for n in NAMES})
        torch.testing.assert_close(part[1], gradient[rows])
        assert torch.equal(part[2], clipped[rows])
        parts.append(part[0])
    assert sum(parts) == pytest.approx(whole)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, -50.0])
@pytest.mark.parametrize("name", LOSSES)
def test_rejected_tokens_and_padding_leave_no_trace(name, bad):
    leaf = torch.tensor([[-1.0, bad, bad], [bad, bad, bad]], requires_grad=True)
    weight = torch.tensor([[1.0, 0.0, bad], [bad, bad, bad]])
    other = torch.tensor([[2.0, bad, bad], [bad, bad, bad]])  # advantage
    old = torch.tensor([[-1.0, bad, bad], [bad, bad, bad]])
    mask = torch.tensor([[True, True, False], [False, False, False]])
    result = policy_loss(LOSSES[name], leaf, old, weight, other, mask, 1)
    # −A log π, or −A r.
    assert result.loss.item() == (2.0 if LOSSES[name].kind in {"reinforce", "cispo"} else -2.0)
    assert not result.clipped_BT.any()
    result.loss.backward()
    assert leaf.grad.tolist() == [[-2.0, 0.0, 0.0], [0.0, 0.0, 0.0]]


@pytest.mark.parametrize("bad", [math.nan, -math.inf, -50.0])
@pytest.mark.parametrize("name", LOSSES)
def test_everything_rejected_is_a_loss_of_zero(name, bad):
    leaf = torch.full((2, 3), bad, requires_grad=True)
    mask = torch.ones(2, 3, dtype=torch.bool)
    weights = importance_weights(
        torch.full((2, 3), -30.0),
        mask,
        ImportanceRule(level="sequence", action="mask", lower=0.5, upper=2.0, veto=1e-4),
    )
    assert weights.vetoed_B.all()
    advantage = torch.tensor([[1.0], [-1.0]]).expand(2, 3)
    result = policy_loss(LOSSES[name], leaf, leaf.detach(), weights.weight_BT, advantage, mask, weights.denominator)
    assert result.loss.item() == 0
    assert not result.clipped_BT.any()
    result.loss.backward()
    assert torch.equal(leaf.grad, torch.zeros(2, 3))


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("shape", [(0, 3), (2, 0)])
def test_batches_without_tokens(name, shape):
    leaf = torch.zeros(shape, requires_grad=True)
    zeros = torch.zeros(shape)
    result = policy_loss(LOSSES[name], leaf, zeros, zeros, zeros, zeros.bool(), 1)
    result.loss.backward()
    assert result.loss.item() == 0
    assert result.clipped_BT.shape == shape


@pytest.mark.parametrize("name", LOSSES)
def test_only_the_log_probs_get_a_gradient(name):
    leaf, old, weight, advantage = (torch.full((2, 3), v, requires_grad=True) for v in (-1.0, -1.0, 0.5, 2.0))
    policy_loss(LOSSES[name], leaf, old, weight, advantage, torch.ones(2, 3, dtype=torch.bool), 1).loss.backward()
    assert leaf.grad.all()
    assert old.grad is weight.grad is advantage.grad is None


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


def test_gspo_leaves_zeroed_tokens_out_of_the_sequence_ratio():
    """One sampled outside V_S: its log-prob is a convention, and its ratio must not drag the sequence's along."""
    case = Case(3, one_a_sequence=True)
    weight, mask = torch.ones(4, 5, dtype=torch.float64), torch.ones(4, 5, dtype=torch.bool)
    weight[:, 2] = 0.0
    log_prob = case.log_prob.clone()
    log_prob[:, 2] = -50.0
    loss, gradient, clipped = case.run(LOSSES["gspo"], log_prob=log_prob, weight=weight, mask=mask)
    columns = [0, 1, 3, 4]
    without = {n: getattr(case, n)[:, columns] for n in ("log_prob", "old_log_prob", "advantage")}
    shorter = case.run(LOSSES["gspo"], weight=weight[:, columns], mask=mask[:, columns], **without)
    assert loss == pytest.approx(shorter[0])
    torch.testing.assert_close(gradient[:, columns], shorter[1])
    assert not gradient[:, 2].any()
    assert not clipped[:, 2].any()


def test_gspo_takes_one_weight_and_one_advantage_a_sequence():
    case = Case(2, one_a_sequence=True)
    mask = torch.ones(4, 5, dtype=torch.bool)
    odd = torch.ones(4, 5, dtype=torch.float64)
    odd[1, 3] = 1.5
    with pytest.raises(DvpError, match=r"the weight of response 1 differs between its tokens \(1 to 1\.5\)"):
        case.run(LOSSES["gspo"], weight=odd, mask=mask)
    with pytest.raises(DvpError, match="the advantage of response 1 differs"):
        case.run(LOSSES["gspo"], weight=torch.ones_like(odd), advantage=odd, mask=mask)
    # At padding and at rejected tokens they may.
    mask[1, 3] = False
    case.run(LOSSES["gspo"], weight=odd, advantage=odd, mask=mask)


@pytest.mark.parametrize(
    ("name", "fits"),
    [
        ("seq_tis", True),
        ("mis", True),
        ("geo_rs", True),
        ("k3", True),
        ("veto", True),
        ("tis", False),
        ("icepop", False),
    ],
)
def test_gspo_goes_with_the_corrections_of_sequences(name, fits):
    case = Case(4, one_a_sequence=True)
    mask = torch.ones(4, 5, dtype=torch.bool)
    log_ratio = 1e-4 * torch.randn(4, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    weight = importance_weights(log_ratio, mask, PRESETS[name]).weight_BT
    assert weight.all()
    if fits:
        case.run(LOSSES["gspo"], weight=weight, mask=mask)
    else:
        with pytest.raises(DvpError, match="the weight of response 0 differs"):
            case.run(LOSSES["gspo"], weight=weight, mask=mask)


@pytest.mark.parametrize("denominator", [0, -1, math.nan])
def test_impossible_denominator(denominator):
    with pytest.raises(DvpError, match="denominator"):
        Case(0).run(REINFORCE, denominator=denominator)


@pytest.mark.parametrize("name", ["old_log_prob", "weight", "advantage", "mask"])
def test_shapes_must_match_even_where_they_would_broadcast(name):
    case = Case(0)
    with pytest.raises(DvpError, match=rf"{name}_BT: expected the shape \(4, 5\), got \(5,\)"):
        case.run(LOSSES["ppo"], **{name: getattr(case, name)[0]})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"kind": "trpo"}, "does not match any of the expected tags: 'reinforce', 'ppo', 'gspo', 'cispo'"),
        ({"kind": "reinforce", "clip_low": 0.2}, r"clip_low\n.*not permitted"),
        ({"kind": "reinforce", "clip_high": 0.2}, r"clip_high\n.*not permitted"),
        ({"kind": "gspo", "clip_low": -0.1}, "clip_low"),
        ({"kind": "cispo", "clip_low": 1.1}, "clip_low"),
        ({"kind": "ppo", "clip_low": math.nan}, "clip_low"),
        ({"kind": "ppo", "clip_high": -0.1}, "clip_high"),
        ({"kind": "ppo", "clip_high": math.nan}, "clip_high"),
        ({"kind": "ppo", "clip_high": math.inf}, "clip_high"),
    ],
)
def test_impossible_rules(arguments, message):
    with pytest.raises(ValueError, match=message):
        TypeAdapter(Loss).validate_python(arguments)


def reinforce(log_prob, weight, advantage, mask):
    return policy_loss(REINFORCE, log_prob, log_prob.detach(), weight, advantage, mask, 1).loss


def test_a_token_outside_the_safe_set_pushes_all_safe_logits_until_it_is_zeroed():
    logits = torch.tensor([[2.0, 1.0, -9.0], [2.0, 1.0, -9.0]], requires_grad=True)
    statistics = token_statistics(logits, torch.eye(3), torch.tensor([2, 1]), safe=FixedRho(0.05))
    in_safe = statistics.target_in_safe[None]
    assert in_safe.tolist() == [[False, True]]
    mask = torch.ones(1, 2, dtype=torch.bool)

    def gradient(weight):
        loss = reinforce(statistics.pruned_log_prob[None], weight, torch.ones(1, 2), mask)
        return torch.autograd.grad(loss, logits, retain_graph=True)[0]

    unweighted = torch.ones(1, 2)
    assert (gradient(unweighted)[0, :2] != 0).all()
    zeroed = zero_outside_safe(unweighted, in_safe)
    assert zeroed.tolist() == [[0.0, 1.0]]
    assert not gradient(zeroed)[0].any()
    assert torch.equal(gradient(zeroed)[1], gradient(unweighted)[1])


def test_the_weighted_gradient_is_that_of_the_pruned_objective():
    """docs/method.md, Theory 4: E_{q^mp}[w R ∇log p^mp] = ∇J_mp, two-token sequences over four tokens enumerated."""
    vocabulary = 4
    generator = torch.Generator().manual_seed(3)
    # One state at the start and one after each first token; the last token is far out of every safe set.
    train = torch.randn(1 + vocabulary, vocabulary, generator=generator)
    train[:, -1] = -20.0
    infer = train + 0.1 * torch.randn(1 + vocabulary, vocabulary, generator=generator)
    paths = torch.tensor(list(itertools.product(range(vocabulary), repeat=2)))
    states = torch.stack([torch.zeros(len(paths), dtype=torch.long), 1 + paths[:, 0]], dim=1)
    reward = torch.randn(len(paths), generator=generator)

    def statistics(logits):
        rows = token_statistics(logits[states.flatten()], torch.eye(vocabulary), paths.flatten(), safe=FixedRho(0.1))
        return rows.pruned_log_prob.view(-1, 2), rows.target_in_safe.view(-1, 2)

    train.requires_grad_()
    log_p, p_in_safe = statistics(train)
    log_q, q_in_safe = statistics(infer)
    assert torch.equal(p_in_safe, q_in_safe)  # equal supports, as the theorem asks
    sampled = q_in_safe.all(dim=1)
    assert 0 < sampled.sum() < len(paths)
    probability_q = torch.where(sampled, log_q.sum(dim=1).exp(), 0.0)
    assert probability_q.sum().item() == pytest.approx(1.0, abs=1e-6)

    mask = sampled[:, None].expand(-1, 2)
    weight = importance_weights(log_p - log_q, mask, ImportanceRule(level="sequence")).weight_BT
    # The exact expectation: each sequence enters with its probability under q in place of a count.
    loss = reinforce(log_p, weight, (reward * probability_q)[:, None].expand(-1, 2), mask)
    (estimate,) = torch.autograd.grad(loss, train, retain_graph=True)
    objective = torch.where(sampled, log_p.sum(dim=1).exp() * reward, 0.0).sum()
    (exact,) = torch.autograd.grad(objective, train)
    assert exact.abs().max() > 1e-2
    torch.testing.assert_close(-estimate, exact, atol=1e-6, rtol=0)
