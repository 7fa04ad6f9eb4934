"""Which prompts are short enough to train on."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dvp.data.prompts import short_enough
from dvp.errors import DvpError


@given(st.lists(st.lists(st.integers(), max_size=9), min_size=1, max_size=20), st.none() | st.integers(9, 12))
def test_without_a_prompt_that_is_too_long_all_are_kept(prompts, limit):
    assert short_enough(prompts, limit) == list(range(len(prompts)))


def test_a_prompt_of_the_limit_is_kept_and_a_longer_one_is_not():
    assert short_enough([[1] * 5, [1] * 6, [1] * 7, [1]], 6) == [0, 1, 3]


def test_prompts_that_are_all_too_long_are_refused():
    with pytest.raises(
        DvpError, match=r"^training\.max_prompt_tokens: all 2 prompts have more than 3 tokens; .* has 4$"
    ):
        short_enough([[1] * 5, [1] * 4], 3)
