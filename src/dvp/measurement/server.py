"""A running inference server in the engine's place: vLLM's, and SGLang's, over HTTP.

Such a server gives the log-probs of the tokens that it sampled and no whole distributions, so what is measured is what
a file of rollouts shows (dvp.measurement.rollouts). vLLM: POST /v1/completions with its own `return_token_ids`.
SGLang: POST /generate with `return_logprob`, whose meta_info.output_token_logprobs are [log-prob, token id, text]; no
SGLang server has been seen yet.
"""

import json
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

import pandas as pd
import torch

from dvp.core.batch import Batch
from dvp.errors import DvpError
from dvp.measurement.problems import FixedProblems
from dvp.progress import Progress
from dvp.rollout.seeds import derived_seed
from dvp.training.backend import Policy

PATIENCE = 600.0
"""Seconds without an answer; a server may have to load or compile first."""
WHOLE = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
"""The full distribution, whatever defaults the model has: log-probs are then the same before and after sampling's
settings."""
TOKEN_ID = "token_id:"
"""Before a token's number, in vLLM's log-probs of a server with --return-tokens-as-token-ids."""


class Server:
    """A server of one model."""

    def __init__(self, url: str):
        """Raises DvpError if nothing answers at `url`, such as http://localhost:8000."""
        self.url = url.rstrip("/")
        if not self.url.startswith(("http://", "https://")):
            raise DvpError(f"--server: expected http://HOST:PORT, found {url}")
        served = self._ask("/v1/models").get("data") or [{}]
        self.model, self.sglang = served[0].get("id"), served[0].get("owned_by") == "sglang"

    def generate(self, prompt: list[int], n: int, longest: int, seed: int) -> list[tuple[list[int], list[float]]]:
        """Token ids and log-probs (nats) of n responses, of `longest` tokens at most.

        Raises DvpError for an answer without token ids or log-probs.
        """
        if self.sglang:
            sampling = WHOLE | {"n": n, "max_new_tokens": longest}  # with one seed its n responses may be the same
            asked = {"input_ids": prompt, "sampling_params": sampling, "return_logprob": True}
            answer = self._ask("/generate", asked)
            found = [one.get("meta_info") or {} for one in (answer if isinstance(answer, list) else [answer])]
            pairs = [one.get("output_token_logprobs") or [[None, None]] for one in found]
            responses = [([pair[1] for pair in own], [pair[0] for pair in own]) for own in pairs]
        else:
            asked = {"model": self.model, "prompt": prompt, "n": n, "max_tokens": longest, "seed": seed % 2**62}
            asked |= WHOLE | {"logprobs": 0, "return_token_ids": True, "return_tokens_as_token_ids": True}
            responses = [_of_vllm(one) for one in self._ask("/v1/completions", asked).get("choices", [])]
        for tokens, log_probs in responses:
            if not tokens or None in tokens or None in log_probs or len(tokens) != len(log_probs):
                needed = "SGLang: return_logprob" if self.sglang else "vLLM: --return-tokens-as-token-ids"
                raise DvpError(f"--server: {self.url} returns text without token ids and log-probs; needed is {needed}")
        return responses

    def _ask(self, path: str, body: dict[str, Any] | None = None) -> Any:
        request = Request(
            self.url + path,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        try:
            with urlopen(request, timeout=PATIENCE) as answer:
                return json.load(answer)
        except HTTPError as error:
            said = " ".join(error.read().decode(errors="replace").split())[:300]
            raise DvpError(f"--server: {self.url}{path}: HTTP {error.code}: {said}") from None
        except (URLError, TimeoutError, ConnectionError, ValueError) as error:
            raise DvpError(f"--server: {self.url}{path}: no answer in JSON: {error}") from None


def _of_vllm(choice: dict[str, Any]) -> tuple[list, list]:
    reported = choice.get("logprobs") or {}
    tokens = choice.get("token_ids") or [
        int(name.removeprefix(TOKEN_ID)) if name.startswith(TOKEN_ID) else None for name in reported.get("tokens") or []
    ]
    return tokens, reported.get("token_logprobs") or []


def rollouts(server: Server, fixed: FixedProblems, responses: int, longest: int) -> pd.DataFrame:
    """Responses of the server with its log-probs and the trainer's, a row each, as `read_rollouts` takes them.

    Raises DvpError as `Server.generate`, and for a model that the trainer cannot score.
    """
    policy, rows = Policy(fixed.network().eval()), []
    policy.check(fixed.prompts)
    progress = Progress(f"mismatch {server.url}", len(fixed.ids))
    for index, (name, prompt) in enumerate(zip(fixed.ids, fixed.prompts, strict=True)):
        answers = server.generate(prompt, responses, longest, derived_seed(fixed.seed, 0, index))
        tokens, log_q = zip(*answers, strict=True)
        batch = Batch.collate([prompt] * len(tokens), list(tokens), pad=0)
        with torch.no_grad():
            log_p_N = policy(batch, safe=None, temperature=1.0).log_prob
        log_p = [part.tolist() for part in log_p_N.split([len(own) for own in tokens])]
        columns = {"problem": name, "token_ids": tokens, "engine_logprobs": log_q, "trainer_logprobs": log_p}
        rows.append(pd.DataFrame(columns))
        progress.step(index + 1, f"{len(log_p_N)} tokens")
    return pd.concat(rows, ignore_index=True)
