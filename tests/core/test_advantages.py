import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dvp.core.advantages import rloo
from dvp.errors import DvpError


@st.composite
def batches(draw):
    group_size = draw(st.integers(2, 5))
    rewards = draw(
        st.lists(st.lists(st.floats(-3, 3), min_size=group_size, max_size=group_size), min_size=1, max_size=4)
    )
    return np.array(rewards)


@settings(deadline=None, max_examples=60)
@given(batches())
def test_rloo_is_leave_one_out_and_sums_to_zero(rewards):
    prompts, group_size = rewards.shape
    advantages = rloo(torch.tensor(rewards).flatten(), group_size).view(prompts, group_size).numpy()
    for p in range(prompts):
        for i in range(group_size):
            others = [rewards[p, j] for j in range(group_size) if j != i]
            assert advantages[p, i] == pytest.approx(rewards[p, i] - sum(others) / len(others), abs=1e-12)
    np.testing.assert_allclose(advantages.sum(axis=1), 0, atol=1e-12)


def test_a_group_of_one_keeps_its_reward():
    rewards = torch.tensor([1.0, 0.0, -1.0])
    assert torch.equal(rloo(rewards, 1), rewards)


def test_a_group_that_agrees_teaches_nothing():
    assert torch.equal(rloo(torch.tensor([1.0, 1.0, 0.0, 0.0]), 2), torch.zeros(4))


def test_no_responses():
    assert rloo(torch.zeros(0), 4).shape == (0,)


@pytest.mark.parametrize("group_size", [0, -1, 2])
def test_groups_that_do_not_divide(group_size):
    with pytest.raises(DvpError, match="group_size"):
        rloo(torch.zeros(3), group_size)
