"""vLLM's processor by itself: rules as plain data, and requests that come, go and change rows."""

import dataclasses
import json
import math

import pytest
import torch

from dvp.core.safe_vocabulary import (
    EngineSets,
    Entropy,
    EntropyScaled,
    FixedRho,
    MassBudget,
    TopK,
    TopNSigma,
    safe_mask,
)
from dvp.errors import DvpError

pytestmark = pytest.mark.slow  # imports vllm

BUDGET = MassBudget(0.01)
SETTINGS = Entropy(rule="entropy", alpha=0.5, target_entropy=1.0, lowest=1e-4, highest=0.3)
ENTROPY = EntropyScaled(1e-2, SETTINGS)


@pytest.mark.parametrize("rule", [BUDGET, ENTROPY, MassBudget(0), TopK(3), TopNSigma(1.5)])
def test_a_rule_survives_being_made_plain(rule):
    from dvp.rollout.safe_vocabulary import from_args, to_args

    plain = to_args(rule)
    assert from_args(json.loads(json.dumps(plain))) == rule
    assert plain["rule"] == type(rule).__name__


@dataclasses.dataclass(frozen=True)
class Own(MassBudget):
    """A rule that the processor does not know, however much it looks like one."""


def test_only_known_rules_are_sent():
    from dvp.rollout.safe_vocabulary import to_args

    with pytest.raises(DvpError, match="no processor for Own"):
        to_args(Own(0.1))


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ("mass_budget", "'rule' to be one of"),
        ([], "'rule' to be one of"),
        ({}, "'rule' to be one of"),
        ({"rule": "EngineSets"}, "'rule' to be one of"),
        ({"rule": ["MassBudget"], "budget": 0.1}, "'rule' to be one of"),
        ({"rule": "MassBudget"}, "expected exactly budget, rule"),
        ({"rule": "MassBudget", "budget": 0.1, "rho": 0.1}, "expected exactly budget, rule"),
        ({"rule": "MassBudget", "budget": "0.1"}, "budget: expected a number, got '0.1'"),
        ({"rule": "MassBudget", "budget": True}, "budget: expected a number, got True"),
        ({"rule": "MassBudget", "budget": 1.0}, r"budget: expected a probability in \[0, 1\)"),
        ({"rule": "MassBudget", "budget": math.nan}, "budget"),
        ({"rule": "TopK", "k": 0}, "k: expected a whole number of at least 1, got 0"),
        ({"rule": "TopK", "k": 2.5}, "k: expected a whole number of at least 1, got 2.5"),
        ({"rule": "TopNSigma", "n": 0.0}, "n: expected a finite number above 0"),
        (
            {"rule": "EntropyScaled", "rho": 0.01, "settings": SETTINGS.model_dump() | {"alpha": math.inf}},
            "settings.alpha",
        ),
        ({"rule": "EntropyScaled", "rho": 0.01, "settings": SETTINGS.model_dump() | {"beta": 1.0}}, "settings.beta"),
        ({"rule": "EntropyScaled", "rho": 0.5, "settings": SETTINGS.model_dump()}, "lowest ≤ rho ≤ highest"),
    ],
)
def test_anything_else_is_refused(args, message):
    from vllm import SamplingParams

    from dvp.rollout.safe_vocabulary import ARGUMENT, SafeVocabularyProcessor, from_args

    with pytest.raises(DvpError, match=message):
        from_args(args)
    # vLLM asks the processor when a request arrives and wants a ValueError.
    with pytest.raises(ValueError, match=message):
        SafeVocabularyProcessor.validate_params(SamplingParams(extra_args={ARGUMENT: args}))


def test_a_fixed_rho_is_vllms_own_min_p():
    from dvp.rollout.safe_vocabulary import sampling_arguments, to_args

    assert sampling_arguments(FixedRho(0.02)) == {"min_p": 0.02}
    assert sampling_arguments(None) == {}
    assert sampling_arguments(BUDGET) == {"extra_args": {"safe_vocabulary": to_args(BUDGET)}}
    assert sampling_arguments(FixedRho(0.02), by_processor=True) == {
        "extra_args": {"safe_vocabulary": {"rule": "FixedRho", "rho": 0.02}}
    }
    with pytest.raises(DvpError, match="no processor for EngineSets"):
        to_args(EngineSets(FixedRho(0.02)))


def test_the_processor_follows_requests_from_row_to_row():
    from vllm import SamplingParams
    from vllm.v1.sample.logits_processor import BatchUpdate, MoveDirectionality

    from dvp.rollout.safe_vocabulary import SafeVocabularyProcessor, sampling_arguments

    processor = SafeVocabularyProcessor(None, torch.device("cpu"), False)
    assert processor.is_argmax_invariant()
    logits = 3 * torch.randn(4, 50, generator=torch.Generator().manual_seed(0))

    def check(rules):
        expected = logits[: len(rules)].clone()
        for row, rule in enumerate(rules):
            if rule is not None:
                expected[row, ~safe_mask(logits[row : row + 1], rule)[0]] = -math.inf
        assert torch.equal(processor.apply(logits[: len(rules)].clone()), expected)

    def update(size, *, added=(), removed=(), moved=()):
        new = [(row, SamplingParams(**sampling_arguments(rule)), [1], []) for row, rule in added]
        processor.update_state(BatchUpdate(size, removed, new, moved))

    check([None] * 4)
    update(4, added=[(0, BUDGET), (1, None), (2, ENTROPY), (3, MassBudget(0.2))])
    check([BUDGET, None, ENTROPY, MassBudget(0.2)])
    processor.update_state(None)
    check([BUDGET, None, ENTROPY, MassBudget(0.2)])
    update(4, moved=[(0, 2, MoveDirectionality.SWAP)])
    check([ENTROPY, None, BUDGET, MassBudget(0.2)])
    # Request 1 ends, the last row takes its place.
    update(3, removed=[1], moved=[(3, 1, MoveDirectionality.UNIDIRECTIONAL)])
    check([ENTROPY, MassBudget(0.2), BUDGET])
    # A request without a rule in the row of one with a rule; two that share a rule.
    update(3, added=[(0, None), (1, BUDGET)])
    check([None, BUDGET, BUDGET])
    update(0, removed=[0, 1, 2])
    check([None] * 3)


def test_sets_are_reported_by_response_whatever_row_it_is_in_and_when_it_is_put_off():
    from vllm import SamplingParams
    from vllm.v1.sample.logits_processor import BatchUpdate, MoveDirectionality

    from dvp.rollout.safe_vocabulary import REPORTED, SafeVocabularyProcessor, sampling_arguments

    processor = SafeVocabularyProcessor(None, torch.device("cpu"), False)
    generator = torch.Generator().manual_seed(0)
    rule = FixedRho(0.1)

    def request(number, seed, output):
        arguments = sampling_arguments(rule, by_processor=True)["extra_args"] | {REPORTED: number}
        return SamplingParams(seed=seed, extra_args=arguments), [1], output

    def step(outputs):
        """Every row one token further; the sets that they were sampled from."""
        logits = 2 * torch.randn(len(outputs), 30, generator=generator)
        processor.apply(logits.clone())
        for output in outputs:
            output.append(0)
        return [row.nonzero()[:, 0].tolist() for row in safe_mask(logits, rule)]

    first, second, other = [], [], []
    processor.update_state(
        BatchUpdate(
            3, [], [(0, *request(0, 5, first)), (1, SamplingParams(), [1], other), (2, *request(0, 6, second))], []
        )
    )
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
    processor.update_state(BatchUpdate(3, [], [(2, *request(0, 5, again))], []))
    sets = step([second, other, again])
    expected[0, 5][1] = sets[2]
    expected[0, 6].append(sets[0])
    taken = {
        response: [part.tolist() for part in kept.ids_M.split(kept.sizes_N.tolist())]
        for response, kept in processor.take_sets().items()
    }
    assert taken == expected
    assert processor.take_sets() == {}
