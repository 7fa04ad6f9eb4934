"""vLLM's processor by itself: requests that come, go, change rows and are put off; vLLM of another version."""

from contextlib import nullcontext

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dvp.core.safe_vocabulary import FixedRho, safe_mask
from dvp.errors import DvpError

pytestmark = pytest.mark.slow  # imports vllm


def request(rule, seed=None, output=(), number=None):
    from vllm import SamplingParams

    from dvp.rollout.private import REPORTED, RULE

    asked = {RULE: rule} if rule is not None else {}
    return SamplingParams(seed=seed, extra_args=asked | ({} if number is None else {REPORTED: number})), [1], output


class WaitsForNothing(TorchDispatchMode):
    """Refuses what makes a GPU's host wait: values read from tensors, sizes that depend on them, tensors of numbers."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        assert name not in ("_local_scalar_dense", "nonzero", "masked_select", "lift_fresh", "unique"), name
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("held", [2**28, 1])
def test_sets_are_reported_by_response_whatever_row_it_is_in_and_when_it_is_put_off(monkeypatch, held):
    """Nothing waits for the device but what copies masks from it, where they are too many to be held."""
    from dvp.rollout import private

    monkeypatch.setattr(private, "MASKS_HELD", held)
    from vllm.v1.sample.logits_processor import BatchUpdate, MoveDirectionality

    from dvp.rollout.private import SafeVocabularyProcessor

    processor = SafeVocabularyProcessor(None, torch.device("cpu"), False)
    generator, rule = torch.Generator().manual_seed(0), FixedRho(0.1)

    def step(outputs):
        """Every row one token further; the sets that they were sampled from."""
        logits = 2 * torch.randn(len(outputs), 30, generator=generator)
        applied = logits.clone()
        with WaitsForNothing() if held > 1 else nullcontext():
            processor.apply(applied)
        for row, output in enumerate(outputs):
            outside_V = ~safe_mask(logits, rule)[row] if output is not other else torch.zeros(30, dtype=torch.bool)
            assert torch.equal(applied[row], logits[row].masked_fill(outside_V, -torch.inf))
        for output in outputs:
            output.append(0)
        return [row.nonzero()[:, 0].tolist() for row in safe_mask(logits, rule)]

    first, second, other = [], [], []
    added = [(0, *request(rule, 5, first, 0)), (1, *request(None, None, other)), (2, *request(rule, 6, second, 0))]
    processor.update_state(BatchUpdate(3, [], added, []))
    expected = {(0, 5): [], (0, 6): []}
    for _ in range(2):
        sets = step([first, other, second])
        expected[0, 5].append(sets[0])
        expected[0, 6].append(sets[2])
    # The first response is put off; the last row takes its place.
    processor.update_state(BatchUpdate(2, [0], [], [(2, 0, MoveDirectionality.UNIDIRECTIONAL)]))
    expected[0, 6].append(step([second, other])[0])
    # It comes back with a list of its own, and one position of it is sampled anew.
    again = first[:1]
    processor.update_state(BatchUpdate(3, [], [(2, *request(rule, 5, again, 0))], []))
    sets = step([second, other, again])
    expected[0, 5][1] = sets[2]
    expected[0, 6].append(sets[0])
    taken = {
        response: [part.tolist() for part in kept.ids_M.split(kept.sizes_N.tolist())]
        for response, kept in processor.take_sets().items()
    }
    assert taken == expected
    assert processor.take_sets() == {}


def test_a_vllm_of_another_version_is_refused(monkeypatch):
    from dvp.rollout.private import check_version

    check_version()
    monkeypatch.setattr("vllm.__version__", "0.33.1")
    with pytest.raises(DvpError, match=r"^vLLM is 0\.33\.1; expected 0\.32\.x"):
        check_version()
