"""Micro-batches by tokens, and values put back where they belong."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dvp.core.batch import Batch, unflatten, unflatten_parts
from dvp.core.kept_sets import KeptSets

SHAPES = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 12)), min_size=1, max_size=20)


def batch_of(shapes: list[tuple[int, int]]) -> Batch:
    return Batch.collate([[1] * prompt for prompt, _ in shapes], [[2] * response for _, response in shapes], pad=0)


@given(SHAPES, st.integers(1, 60))
def test_each_row_is_in_one_micro_batch_which_holds_its_tokens_unless_a_row_alone_is_longer(shapes, tokens):
    batch = batch_of(shapes)
    parts = batch.micro_batches(tokens)
    assert sorted(torch.cat(parts).tolist()) == list(range(len(shapes)))
    lengths = [sum(shape) for shape in shapes]
    assert batch.lengths().tolist() == lengths
    for part in parts:
        longest = max(lengths[row] for row in part.tolist())
        assert len(part) == 1 or len(part) * longest <= tokens
        assert batch.rows(part).tokens_BT.shape == (len(part), longest)
    in_order = [lengths[row] for part in parts for row in part.tolist()]
    assert in_order == sorted(lengths, reverse=True)


def test_only_rows_that_are_asked_for_are_there():
    parts = batch_of([(2, 3), (1, 1), (2, 6), (1, 2)]).micro_batches(10, torch.tensor([3, 0, 1]))
    assert [part.tolist() for part in parts] == [[0, 3], [1]]
    assert batch_of([(2, 3)]).micro_batches(10, torch.tensor([], dtype=torch.int64)) == []


@given(
    st.lists(st.tuples(st.integers(1, 9), st.lists(st.integers(1, 6), min_size=1, max_size=5)), min_size=1), st.data()
)
def test_rows_that_share_their_prompts_keep_to_the_tokens(groups, data):
    pairs = [([number + 3] * prompt, [2] * own) for number, (prompt, each) in enumerate(groups) for own in each]
    tokens = data.draw(st.integers(1, 40))
    batch = Batch.collate(*map(list, zip(*pairs, strict=True)), pad=0).sharing_prompts(10**6, tokens)
    chosen = data.draw(st.lists(st.sampled_from(range(len(pairs))), unique=True, min_size=1).map(sorted))
    asked = data.draw(st.sampled_from([1, tokens]))  # 1: each by itself
    parts = batch.micro_batches(asked, torch.tensor(chosen))
    assert sorted(torch.cat(parts).tolist()) == chosen
    for part in parts:
        units = batch.rows(part).units()
        assert len(part) == 1 or len(units) * max(length for length, _ in units) <= asked
        assert [row for _, rows in units for row in rows] == list(range(len(part)))
        assert all(len({tuple(pairs[part[row]][0]) for row in rows}) == 1 for _, rows in units)


@pytest.mark.parametrize(("response", "shared"), [(1, True), (20, True), (300, False)])
def test_long_responses_do_not_share_a_prompt(response, shared):
    """Each pair of tokens of a shared row costs: 8 responses of 300 tokens after 70, in a model of width 96."""
    batch = batch_of([(70, response)] * 8).sharing_prompts(width=96, tokens=4096)
    assert (batch.shared_B2 is not None) == shared


def test_a_batch_with_answers_of_a_tool_keeps_them_as_context():
    batch = Batch.collate([[5, 6], [7]], [[1, 2, 3, 4], [8, 9]], 0, [[True, False, False, True], None])
    assert batch.tokens_BT.tolist() == [[5, 6, 1, 2, 3, 4], [7, 8, 9, 0, 0, 0]]
    assert batch.response_BT.int().tolist() == [[0, 0, 1, 0, 0, 1], [0, 1, 1, 0, 0, 0]]
    assert batch.lengths().tolist() == [6, 3]
    # A tensor on `meta` meets one of the CPU as badly as one of a GPU does.
    assert batch.to(torch.device("meta")).lengths().device.type == "meta"


def test_tokens_that_are_left_out_take_their_sets_with_them():
    """And what is context stays context, whatever the mask says of it."""
    sets = [
        KeptSets(torch.arange(n, dtype=torch.int32), torch.ones(n, dtype=torch.int64), torch.zeros(n)) for n in (2, 1)
    ]
    batch = Batch.collate([[5], [6]], [[1, 2, 3], [4]], 0, [[True, False, True], None], sets)
    part = batch.only(torch.tensor([[True, False, True, True], [True, False, True, True]]))
    assert part.response_BT.int().tolist() == [[0, 0, 0, 1], [0, 0, 0, 0]]
    assert [one.ids_M.tolist() for one in part.kept] == [[1], []]
    assert batch_of([(1, 2)]).only(torch.tensor([[True, False, True]])).response_BT.tolist() == [[False, False, True]]


@given(SHAPES, st.integers(1, 60))
def test_values_made_in_parts_are_put_where_they_belong(shapes, tokens):
    batch = batch_of(shapes)
    values_N = torch.arange(1, int(batch.response_BT.sum()) + 1)
    expected_BT = unflatten(values_N, batch.response_BT)
    parts = batch.micro_batches(tokens)
    values = [expected_BT[rows][batch.response_BT[rows]] for rows in parts]
    assert torch.equal(unflatten_parts(parts, values, batch.response_BT), expected_BT)


def test_a_long_row_beside_shared_ones_needs_no_mask():
    """It has a pass of its own kind, in which attention is causal: else its mask alone would be its length squared."""
    pairs = [*[([3] * 9, [2, 2])] * 4, ([4] * 5, [2] * 30)]
    batch = Batch.collate(*map(list, zip(*pairs, strict=True)), pad=0).sharing_prompts(10**6, 40)
    parts = [batch.rows(part) for part in batch.micro_batches(1000)]
    assert [(len(part.tokens_BT), part.shared_B2 is None) for part in parts] == [(1, True), (4, False)]
