"""vLLM's side of a safe vocabulary that vLLM has not: a logits processor that applies the core's rule.

That is one whose ρ depends on the state, or whose sets are to be reported. A fixed ρ alone needs none of this: it is
vLLM's own min_p. vLLM passes a request's arguments on as plain data, so a rule travels as {"rule": CLASS, its fields}.
Import this only after dvp.rollout.vllm.configure_environment.
"""

from dataclasses import fields
from typing import Any, get_type_hints

import torch
from pydantic import ValidationError
from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates

from dvp.core.kept_sets import KeptSets
from dvp.core.safe_vocabulary import FixedRho, SafeVocabulary, safe_mask
from dvp.errors import DvpError
from dvp.strict import Strict

ARGUMENT = "safe_vocabulary"  # the key in SamplingParams.extra_args
REPORTED = "report_sets_as"  # the key of the prompt's number, under which its sets are kept

Response = tuple[int, int]
"""The number of its prompt, and its seed."""


def needs_processor(rule: SafeVocabulary | None) -> bool:
    """Whether vLLM needs `SafeVocabularyProcessor` for it."""
    return rule is not None and not isinstance(rule, FixedRho)


def sampling_arguments(rule: SafeVocabulary | None, *, by_processor: bool = False) -> dict[str, Any]:
    """What SamplingParams needs in order to sample from the safe vocabulary; None is the full one.

    by_processor : not to leave a fixed ρ to vLLM's min_p.
    """
    if rule is None:
        return {}
    if by_processor or needs_processor(rule):
        return {"extra_args": {ARGUMENT: to_args(rule)}}
    return {"min_p": rule.rho}


def to_args(rule: SafeVocabulary) -> dict[str, Any]:
    """A rule as plain data.

    Raises:
        DvpError: not a rule of dvp.core.safe_vocabulary.
    """
    if type(rule) not in _rules().values():
        raise DvpError(f"safe_vocabulary: vLLM has no processor for {rule}; it knows {', '.join(_rules())}")
    values = {field.name: getattr(rule, field.name) for field in fields(rule)}
    plain = {name: value.model_dump() if isinstance(value, Strict) else value for name, value in values.items()}
    return {"rule": type(rule).__name__, **plain}


def from_args(args: Any) -> SafeVocabulary:
    """The rule that `to_args` made plain.

    Raises:
        DvpError: anything but exactly a known rule and all of its fields, each in its range.
    """
    if not isinstance(args, dict) or not isinstance(args.get("rule"), str) or args["rule"] not in _rules():
        raise DvpError(f"safe_vocabulary: expected 'rule' to be one of {', '.join(_rules())}, got {args!r}")
    kind = _rules()[args["rule"]]
    expected = {"rule"} | {field.name for field in fields(kind)}
    if args.keys() != expected:
        raise DvpError(f"safe_vocabulary: expected exactly {', '.join(sorted(expected))}, got {args!r}")
    types = get_type_hints(kind)
    values = {name: _value(name, types[name], value) for name, value in args.items() if name != "rule"}
    return kind(**values)


def _value(name: str, kind: type, value: Any) -> Any:
    """A field of a rule: a number or settings."""
    if issubclass(kind, Strict):
        try:
            return kind.model_validate(value)
        except ValidationError as error:
            problem = error.errors()[0]
            where = ".".join(map(str, (name, *problem["loc"])))
            raise DvpError(f"safe_vocabulary: {where}: {problem['msg']}, got {problem['input']!r}") from None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise DvpError(f"safe_vocabulary: {name}: expected a number, got {value!r}")
    return value


def _rules() -> dict[str, type[SafeVocabulary]]:
    """By the name of their class."""
    return {kind.__name__: kind for kind in SafeVocabulary.__subclasses__()}


class SafeVocabularyProcessor(LogitsProcessor):
    """Sets the logits of the entries outside a request's safe vocabulary to −inf, and remembers the sets if asked to.

    It needs vLLM's V1 model runner. There it comes after temperature, where min_p does, because it leaves the argmax
    alone.
    """

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool):
        self._rules: dict[int, SafeVocabulary] = {}
        # Of each row that is to be reported: the prompt's number and the response's seed, and its tokens so far, a list
        # that vLLM extends.
        self._reported: dict[int, tuple[Response, list[int]]] = {}
        # A step of the engine each: its responses with the position that they are at, and their sets.
        self._sets: list[tuple[list[tuple[Response, int]], KeptSets]] = []

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Refuse a request whose rule cannot be read. Raises ValueError, as vLLM wants it."""
        try:
            _requested(sampling_params)
        except DvpError as error:
            raise ValueError(str(error)) from error

    def is_argmax_invariant(self) -> bool:
        """The most likely entry is always safe."""
        return True

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Follow the requests as they enter, leave and change rows."""
        process_dict_updates(self._rules, batch_update, lambda params, prompt, output: _requested(params))
        process_dict_updates(self._reported, batch_update, lambda params, prompt, output: _response(params, output))

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Mask the rows (one a request) of the requests that have a rule, in place."""
        for rule in set(self._rules.values()):
            rows = torch.tensor([row for row, own in self._rules.items() if own == rule], device=logits.device)
            logits_NV = logits[rows]
            safe_NV = safe_mask(logits_NV, rule)
            pruned_NV = logits_NV.masked_fill(~safe_NV, -torch.inf)
            logits[rows] = pruned_NV
            if asked := [place for place, row in enumerate(rows.tolist()) if row in self._reported]:
                log_mass_N = pruned_NV.logsumexp(dim=1) - logits_NV.logsumexp(dim=1)
                self._remember(rows[asked].tolist(), safe_NV[asked], log_mass_N[asked])
        return logits

    def _remember(self, rows: list[int], safe_NV: torch.Tensor, log_mass_N: torch.Tensor) -> None:
        sizes_N, ids_M = safe_NV.sum(dim=1), safe_NV.nonzero()[:, 1].int()
        places = [(response, len(output)) for response, output in map(self._reported.__getitem__, rows)]
        self._sets.append((places, KeptSets(ids_M, sizes_N, log_mass_N.float()).to(torch.device("cpu"))))

    def take_sets(self) -> dict[Response, KeptSets]:
        """Of every response since the last call the sets of its positions, from the first one on."""
        every = KeptSets.cat([sets for _, sets in self._sets])
        # The last one counts: vLLM may come to a position again, when it goes on with a request that it had put off.
        states: dict[Response, dict[int, int]] = {}
        for state, (response, position) in enumerate(place for places, _ in self._sets for place in places):
            states.setdefault(response, {})[position] = state
        self._sets.clear()
        order = [of_response[position] for of_response in states.values() for position in sorted(of_response)]
        parts = every.states(torch.tensor(order, dtype=torch.long)).split([len(part) for part in states.values()])
        return dict(zip(states, parts, strict=True))


def take_sets(worker: Any) -> dict[Response, KeptSets]:
    """`SafeVocabularyProcessor.take_sets` of a worker of vLLM."""
    processors = worker.model_runner.input_batch.logitsprocs.all
    return next(one for one in processors if isinstance(one, SafeVocabularyProcessor)).take_sets()


def _response(params: SamplingParams, output: list[int]) -> tuple[Response, list[int]] | None:
    number = (params.extra_args or {}).get(REPORTED)
    return None if number is None else ((number, params.seed), output)


def _requested(params: SamplingParams) -> SafeVocabulary | None:
    args = (params.extra_args or {}).get(ARGUMENT)
    return None if args is None else from_args(args)
