"""Safe vocabularies for any vLLM server: --logits-processors dvp.integrations.vllm:ServedSafeVocabulary.

It works with vLLM's model runner V1 (VLLM_USE_V2_MODEL_RUNNER=0); V2, which would call it before temperature, refuses
it. A request asks for a rule in `vllm_xargs`, {"safe_vocabulary": TEXT}: JSON with the keys of a rule as in an
experiment (docs/keys.md) and, if the rule takes one, its rho. A fixed ρ does not need this: it is vLLM's own min_p.
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
    """Logits processor that restricts a request to the safe vocabulary it asks for; other requests are unchanged."""

    def __init__(self, *arguments: Any):
        """Take vLLM's arguments. Raises DvpError for a version of vLLM whose private code may differ."""
        check_version()
        super().__init__(*arguments)

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Raise ValueError for a rule that cannot be read: vLLM answers such a request with status 400."""
        cls.rule(sampling_params)

    @staticmethod
    def rule(params: SamplingParams) -> SafeVocabulary | None:
        """Read the rule that a request asks for, None without one. Raises ValueError if it is not valid."""
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
