"""From hidden states to loss and gradient, as an optimiser step has it."""

import math

import pytest
import torch

from dvp.core.advantages import ADVANTAGES
from dvp.core.batch import Batch, Rollout, unflatten
from dvp.core.head import OF_TOKENS, token_statistics
from dvp.core.importance import PRESETS, ImportanceRule
from dvp.core.objective import Reinforce, policy_loss
from dvp.core.safe_vocabulary import FixedRho
from dvp.core.update import make_update

V, H, T, GROUP, RESPONSES = 500, 16, 7, 4, 8


def step(scale: float, rho: float | None, importance: ImportanceRule, advantage: str):
    """The head's statistics, the loss and the gradients of hidden states and weight."""
    generator = torch.Generator().manual_seed(0)
    hidden_NH = torch.randn(RESPONSES * T, H, generator=generator).requires_grad_()
    weight_VH = (scale * torch.randn(V, H, generator=generator)).requires_grad_()
    # What a policy samples is mostly likely.
    targets_N = (hidden_NH @ weight_VH.T + torch.randn(RESPONSES * T, V, generator=generator)).argmax(dim=1)
    safe = None if rho is None else FixedRho(rho)
    found = token_statistics(hidden_NH, weight_VH, targets_N, safe=safe, chunk_size=2)
    mask_BT = torch.ones(RESPONSES, T, dtype=torch.bool)
    statistics = {
        name: unflatten(value, mask_BT) for name, value in vars(found).items() if isinstance(value, torch.Tensor)
    }
    infer_BT = statistics["log_prob"].detach() + 0.1 * torch.randn(RESPONSES, T, generator=generator)
    rewards_B = torch.randint(2, (RESPONSES,), generator=generator).float()
    rollout = Rollout(Batch(targets_N.view(RESPONSES, T), mask_BT), infer_BT, rewards_B, ~mask_BT.any(dim=1))
    constants = {name: value.detach() for name, value in statistics.items()}
    update = make_update(rollout, constants, importance=importance, advantage=ADVANTAGES[advantage], group_size=GROUP)
    log_prob_BT = statistics["pruned_log_prob"]
    loss = policy_loss(
        Reinforce(), log_prob_BT, log_prob_BT.detach(), update.weight_BT, update.advantage_BT, mask_BT, RESPONSES
    ).loss
    loss.backward()
    return found, loss, hidden_NH.grad, weight_VH.grad


@pytest.mark.parametrize(
    ("importance", "advantage"),
    [(ImportanceRule(), "rloo"), (PRESETS["mis"], "rloo"), (PRESETS["tis"], "otb")],
    ids=["naive", "mis", "otb_tis"],
)
@pytest.mark.parametrize("scale", [0.5, 14.0])
def test_a_rho_that_prunes_nothing_is_no_pruning_at_all_to_the_last_bit(scale, importance, advantage):
    """Also where logits lie so far apart that most probabilities, and with them their gradients, are 0 in float32."""
    rho = 1e-300
    assert math.log(rho) < -600
    plain, pruned = (step(scale, value, importance, advantage) for value in (None, rho))
    assert (pruned[0].safe_size == V).all()
    assert not pruned[0].pruned_mass.any()
    assert torch.equal(plain[0].pruned_log_prob, plain[0].log_prob)
    for name in OF_TOKENS:
        assert torch.equal(getattr(pruned[0], name), getattr(plain[0], name)), name
    assert plain[1] != 0.0
    for of_plain, of_pruned in zip(plain[1:], pruned[1:], strict=True):
        assert of_plain.any()
        assert torch.equal(of_pruned, of_plain)


def of_two(importance: ImportanceRule, advantage: str):
    """A group of two: one with a reward as the engine sees it, one that is longer and has a token outside V_S."""
    mask_BT = torch.tensor([[True, True, True, False], [True, True, True, True]])
    in_safe_BT = torch.tensor([[True, True, True, False], [True, False, True, True]])
    infer_BT = torch.full((2, 4), 0.5).log()
    statistics = {
        "pruned_log_prob": torch.where(in_safe_BT, infer_BT, -50.0),
        "pruned_sum_p_squared": torch.full((2, 4), 0.5),
        "target_in_safe": in_safe_BT,
    }
    batch = Batch(torch.zeros_like(infer_BT).long(), mask_BT)
    rollout = Rollout(batch, infer_BT, torch.tensor([1.0, 0.0]), ~mask_BT.any(dim=1))
    return make_update(rollout, statistics, importance=importance, advantage=ADVANTAGES[advantage], group_size=2)


@pytest.mark.parametrize(
    "importance",
    [
        *(ImportanceRule(level="sequence"), PRESETS["seq_tis"], PRESETS["mis"]),
        ImportanceRule(level="sequence", action="mask", upper=2.0),
        *(ImportanceRule(level="geometric"), PRESETS["geo_rs"], PRESETS["k3"], PRESETS["veto"]),
        *(ImportanceRule(level="geometric", action="mask", lower=0.5, upper=2.0), ImportanceRule(k3_max=100.0)),
    ],
)
def test_a_response_with_a_token_outside_v_s_has_the_ratio_0_and_is_no_member_of_its_group(importance):
    """e^−20 at its other tokens would let the one response that is left be its own baseline."""
    update = of_two(importance, "otb")
    assert update.weight_BT.tolist() == [[1, 1, 1, 0], [0, 0, 0, 0]]
    assert update.advantage_BT[0].tolist() == [1, 1, 1, 0]
    assert of_two(importance, "otb_leave_one_out").advantage_BT[0].tolist() == [1, 1, 1, 0]


@pytest.mark.parametrize("importance", [ImportanceRule(), PRESETS["tis"]])
def test_without_a_ratio_of_the_sequence_a_token_outside_v_s_is_left_out_alone(importance):
    update = of_two(importance, "otb")
    assert update.weight_BT.tolist() == [[1, 1, 1, 0], [1, 0, 1, 1]]
    # W is 1/2 a token, but for the one that is left out.
    assert update.advantage_BT[0].tolist() == pytest.approx([1 - 1 / 2, 1 - 2 / 3, 1 - 3 / 5, 0])
