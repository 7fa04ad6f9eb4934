"""Sets of token ids one after the other, and the head that renormalises over them (mask replay)."""

import math
from dataclasses import fields

import pytest
import torch
from dense import assert_gradients, assert_statistics
from hypothesis import given
from hypothesis import strategies as st

from dvp.core.batch import Batch, Rollout
from dvp.core.diagnostics import set_metrics
from dvp.core.head import dense_log_prob, token_statistics
from dvp.core.kept_sets import KeptSets
from dvp.core.safe_vocabulary import FixedRho

N, V, H = 9, 41, 6
RULE = FixedRho(0.1)
SETS = st.lists(st.sets(st.integers(0, V - 1), min_size=1, max_size=12).map(sorted), max_size=8)


def kept(sets, log_mass=None):
    return KeptSets(
        torch.tensor([one for own in sets for one in own], dtype=torch.int32),
        torch.tensor([len(own) for own in sets], dtype=torch.long),
        torch.zeros(len(sets)) if log_mass is None else torch.tensor(log_mass),
    )


def of_mask(mask_NV):
    return kept([row.nonzero()[:, 0].tolist() for row in mask_NV])


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
    assert kept.sums(values).tolist() == pytest.approx(expected, rel=1e-7)


def problem(seed=0):
    """Hidden states, weight, and a random half of the vocabulary in each state with a target in it."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(N, H, generator=generator, requires_grad=True)
    weight = torch.randn(V, H, generator=generator, requires_grad=True)
    targets = torch.randint(V, (N,), generator=generator)
    mask = torch.rand(N, V, generator=generator) < torch.linspace(0.05, 0.9, N)[:, None]
    mask[torch.arange(N), targets] = True
    return hidden, weight, targets, mask


def overlap(hidden, weight, mask, temperature):
    z = hidden.double() @ weight.double().T / temperature
    own = z - z.amax(1, keepdim=True) >= math.log(RULE.rho)
    return (mask & own).sum(1) / (mask | own).sum(1)


@pytest.mark.parametrize(
    "which", [("pruned_log_prob",), ("pruned_entropy",), ("log_prob", "pruned_log_prob", "entropy")]
)
@pytest.mark.parametrize("chunk_size", [1, 4, None])
def test_statistics_and_gradients_over_the_sets_against_float64(which, chunk_size):
    hidden, weight, targets, mask = problem()
    options = {"safe": RULE, "kept": of_mask(mask), "temperature": 0.7}
    found = token_statistics(hidden, weight, targets, chunk_size=chunk_size, **options)
    assert_statistics(found, hidden, weight, targets, mask, 0.7)
    torch.testing.assert_close(found.set_overlap, overlap(hidden, weight, mask, 0.7))
    coefficients = dict.fromkeys(which, torch.linspace(-1, 1, N))  # one of them is 0
    assert_gradients(found, hidden, weight, targets, coefficients, mask, 0.7, atol=5e-6)
    dense = dense_log_prob(hidden, weight, targets, **options)
    torch.testing.assert_close(dense, found.pruned_log_prob, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("chunk_size", [1, 4, None])
def test_sets_that_are_compared_change_nothing_but_the_overlap(chunk_size):
    hidden, weight, targets, mask = problem(4)
    options = {"safe": RULE, "temperature": 0.7, "chunk_size": chunk_size}
    plain, compared = (token_statistics(hidden, weight, targets, **options, compared=c) for c in (None, of_mask(mask)))
    for field in fields(plain):
        if field.name != "set_overlap":
            assert torch.equal(getattr(plain, field.name), getattr(compared, field.name)), field.name
    assert (plain.set_overlap == 1).all()
    torch.testing.assert_close(compared.set_overlap, overlap(hidden, weight, mask, 0.7))
    one, other = (torch.autograd.grad(made.pruned_log_prob.sum(), [hidden, weight]) for made in (plain, compared))
    assert all(map(torch.equal, one, other))


def test_no_rows_keep_the_graph():
    hidden, weight, targets, mask = problem()
    nothing = token_statistics(hidden[:0], weight, targets[:0], safe=RULE, kept=of_mask(mask[:0]))
    [gradient] = torch.autograd.grad(nothing.pruned_log_prob.sum(), weight)
    assert (gradient == 0).all()


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
