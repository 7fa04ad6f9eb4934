"""Safe vocabularies for any vLLM server: --logits-processors dvp.integrations.vllm:ServedSafeVocabulary.

vLLM's model runner V1 takes it (VLLM_USE_V2_MODEL_RUNNER=0); V2, which would call it before temperature, refuses it.
A request asks for one in `vllm_xargs`, {"safe_vocabulary": TEXT}: JSON with the keys of a rule as in an experiment
(docs/keys.md) and, where the rule takes one, its rho. A fixed ρ needs none of this: it is vLLM's own min_p.
"""

import json
from typing import Any

from pydantic import TypeAdapter, ValidationError
from vllm import SamplingParams

from dvp.core.safe_vocabulary import Rule, SafeVocabulary
from dvp.errors import DvpError
from dvp.experiment.grid import parse_rho
from dvp.rollout.private import RULE, SafeVocabularyProcessor, check_version


class ServedSafeVocabulary(SafeVocabularyProcessor):
    """The engine's side of a rule, for requests that ask for it. Others are left as they are."""

    def __init__(self, *arguments: Any):
        """Raises DvpError for a vLLM whose insides may be others."""
        check_version()
        super().__init__(*arguments)

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Refuse a rule that cannot be read: vLLM answers such a request with status 400."""
        cls.rule(sampling_params)

    @staticmethod
    def rule(params: SamplingParams) -> SafeVocabulary | None:
        """The rule that a request asks for. Raises ValueError."""
        text = (params.extra_args or {}).get(RULE)
        if text is None:
            return None
        try:
            keys = json.loads(text)
            rho = keys.pop("rho", None)
            settings = TypeAdapter(Rule).validate_python(keys)
            if settings.takes_rho == (rho is None) or settings.needs_training:
                raise ValueError(f"{settings.rule} {'needs' if settings.takes_rho else 'takes no'} rho")
            rule = settings.sides(None if rho is None else parse_rho(str(rho)), params.max_tokens).engine
        except ValidationError as error:
            first = error.errors()[0]
            raise ValueError(f"{RULE}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None
        except (AttributeError, TypeError, ValueError, DvpError) as error:
            raise ValueError(f"{RULE}: {error}") from None
        if rule is None:
            raise ValueError(f"{RULE}: {settings.rule} restricts nothing in the engine")
        return rule
