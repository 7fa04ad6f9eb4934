"""Sets of token ids one after the other; the head that renormalises over them is in test_head.py."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dvp.core.batch import Batch, Rollout
from dvp.core.diagnostics import set_metrics
from dvp.core.kept_sets import KeptSets
from rounding import rounding

V = 41
SETS = st.lists(st.sets(st.integers(0, V - 1), min_size=1, max_size=12).map(sorted), max_size=8)


def kept(sets, log_mass=None):
    return KeptSets(
        torch.tensor([one for own in sets for one in own], dtype=torch.int32),
        torch.tensor([len(own) for own in sets], dtype=torch.long),
        torch.zeros(len(sets)) if log_mass is None else torch.tensor(log_mass),
    )


def plain(sets):
    return [own.tolist() for own in sets.ids_M.split(sets.sizes_N.tolist())] if len(sets) else []


@given(sets=SETS, data=st.data())
def test_states_sums_and_members_are_those_of_plain_lists(sets, data):
    ours = kept(sets, [-float(number) for number in range(len(sets))])
    rows = data.draw(st.lists(st.integers(0, len(sets) - 1), max_size=6)) if sets else []
    chosen = ours.states(torch.tensor(rows, dtype=torch.long))
    assert plain(chosen) == [sets[row] for row in rows]
    assert chosen.log_mass_N.tolist() == [-row for row in rows]
    assert ours.sums(ours.ids_M.double()).tolist() == [sum(own) for own in sets]
    tokens = data.draw(st.lists(st.integers(0, V - 1), min_size=len(sets), max_size=len(sets)))
    expected = [token in own for token, own in zip(tokens, sets, strict=True)]
    assert ours.contain(torch.tensor(tokens, dtype=torch.long)).tolist() == expected
    state_M, id_M = ours.entries
    assert list(zip(state_M.tolist(), id_M.tolist(), strict=True)) == [
        (state, one) for state, own in enumerate(sets) for one in own
    ]
    both = KeptSets.cat([ours, chosen])
    assert plain(both) == sets + [sets[row] for row in rows]
    for part, expected in zip(both.split([len(ours), len(chosen)]), (ours, chosen), strict=True):
        assert (plain(part), part.log_mass_N.tolist()) == (plain(expected), expected.log_mass_N.tolist())


def test_large_sets_are_added_up_without_loss():
    sizes = [100_000, 1, 30_000]
    values = torch.rand(sum(sizes), generator=torch.Generator().manual_seed(0)) * 1e-5 + 1e-6
    values[0] = 1.0  # beside which each of the others is small
    kept = KeptSets(torch.arange(sum(sizes), dtype=torch.int32), torch.tensor(sizes), torch.zeros(3))
    expected = [math.fsum(part.double().tolist()) for part in values.split(sizes)]
    assert kept.sums(values).tolist() == pytest.approx(expected, rel=rounding(1))


def test_batches_carry_the_sets_of_their_rows():
    sets = [kept([[1, 2], [3]]), kept([[4]]), kept([[5, 6, 7], [8], [9]])]
    batch = Batch.collate([[10], [10, 11], [10]], [[1, 3], [4], [5, 8, 9]], 0, kept=sets)
    rows = torch.tensor([2, 0])
    for part in (batch.rows(rows), batch.rows(rows).to(torch.device("cpu"))):
        assert [plain(own) for own in part.kept] == [[[5, 6, 7], [8], [9]], [[1, 2], [3]]]
    rollout = Rollout(batch, torch.zeros(batch.tokens_BT.shape), torch.zeros(3), torch.zeros(3, dtype=torch.bool))
    assert [plain(own) for own in rollout.rows(rows).batch.kept] == [[[5, 6, 7], [8], [9]], [[1, 2], [3]]]


def test_log_mass_gives_the_unpruned_ratio():
    sets = [kept([[1, 2], [3]], [math.log(0.5), 0.0]), kept([[4]], [math.log(0.25)])]
    batch = Batch.collate([[10], [10]], [[1, 3], [4]], 0, kept=sets)
    mask = batch.response_BT
    q_mp, p = torch.tensor([0.6, 1.0, 0.8]).double(), torch.tensor([0.45, 0.5, 0.2]).double()
    log_q, log_p, overlap = (torch.zeros(mask.shape).double() for _ in range(3))
    log_q[mask], log_p[mask], overlap[mask] = q_mp.log(), p.log(), torch.tensor([1.0, 0.5, 0.0]).double()
    rollout = Rollout(batch, log_q, torch.zeros(2), torch.zeros(2, dtype=torch.bool))
    metrics = set_metrics(rollout, {"log_prob": log_p, "set_overlap": overlap})
    ratios = [0.45 / 0.3, 0.5 / 1.0, 0.2 / 0.2]
    assert metrics["unpruned_k3"] == pytest.approx(sum(r - 1 - math.log(r) for r in ratios) / 3)
    weights = [ratios[0] * ratios[1], ratios[2]]
    assert metrics["unpruned_ess"] == pytest.approx(sum(weights) ** 2 / sum(w * w for w in weights) / 2)
    assert metrics["engine_pruned_mass_mean"] == pytest.approx((0.5 + 0 + 0.75) / 3)
    assert metrics["set_overlap_mean"] == pytest.approx(0.5)
    assert metrics["sets_bytes"] == 4 * 4
