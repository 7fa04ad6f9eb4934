"""What a token outside V_S does to the coefficients of its response and of its group."""

import pytest
import torch

from dvp.core.advantages import ADVANTAGES
from dvp.core.batch import Batch, Rollout
from dvp.core.importance import PRESETS, ImportanceRule
from dvp.core.update import make_update


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
