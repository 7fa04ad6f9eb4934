"""What ranks tell each other, and how much of it is held at once."""

import pytest
import torch
import torch.distributed as dist

from dvp.core.batch import Batch
from dvp.core.kept_sets import KeptSets
from dvp.errors import DvpError
from dvp.training import ranks
from dvp.training.rollouts import _check_sets


@pytest.mark.parametrize(("backend", "group"), [("nccl", "over gloo"), ("gloo", None)])
def test_pickled_objects_never_go_over_nccl(monkeypatch, backend, group):
    """It would hold those of all ranks in each GPU's memory; the group is made once."""
    made, used = [], []
    ranks._over_hosts.cache_clear()
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "get_backend", lambda: backend)
    monkeypatch.setattr(dist, "new_group", lambda *, backend: made.append(backend) or f"over {backend}")
    monkeypatch.setattr(dist, "all_gather_object", lambda values, value, group: used.append(group))
    for _ in range(2):
        ranks.gather("sets")
    ranks._over_hosts.cache_clear()
    assert used == [group, group]
    assert made == ([] if group is None else ["gloo"])


def test_sets_are_checked_one_response_at_a_time(monkeypatch):
    """All of them at once would take a hundred times their own memory; the rank checks its share."""
    generator = torch.Generator().manual_seed(0)
    responses = [[5, 6, 7], [8], [9, 10, 11, 12], [13, 14]]
    kept = []
    for response in responses:
        safe_TV = torch.rand(len(response), 20, generator=generator) < 0.3
        safe_TV[range(len(response)), response] = True
        kept.append(KeptSets(safe_TV.nonzero()[:, 1].int(), safe_TV.sum(dim=1), torch.zeros(len(response))))
    checked, contain = [], KeptSets.contain
    monkeypatch.setattr(
        KeptSets, "contain", lambda self, tokens_N: checked.append(len(self)) or contain(self, tokens_N)
    )
    _check_sets(Batch.collate([[1, 2]] * 4, responses, 0, None, kept))
    assert checked == [3, 1, 4, 2]
    checked.clear()
    kept[::2] = [sets.without_ids() for sets in kept[::2]]  # the other rank has them
    monkeypatch.setattr(ranks, "gather", lambda value: [value, 3])  # the other rank found three
    with pytest.raises(DvpError, match=r"^3 of 10 tokens are not in the sets"):
        _check_sets(Batch.collate([[1, 2]] * 4, responses, 0, None, kept))
    assert checked == [1, 2]
    with pytest.raises(DvpError, match="reported the sets of 9 tokens, and sampled 10"):
        _check_sets(Batch.collate([[1, 2]] * 4, responses, 0, None, [kept[1], kept[1], *kept[2:], kept[1]]))
