"""Sample from a running inference server in place of an engine: vLLM's or SGLang's, over HTTP.

Such a server gives log-probs of the sampled tokens but no whole distributions, so that the measurement is that of a
file of rollouts (dvp.measurement.rollouts). vLLM: POST /v1/completions with its own `return_token_ids`. SGLang: POST
/generate with `return_logprob`, whose meta_info.output_token_logprobs are [log-prob, token id, text]; this has not been
tried on an SGLang server.
"""

import json
import math
import os
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pandas as pd
import torch

from dvp.core.batch import Batch
from dvp.errors import DvpError
from dvp.measurement.problems import FixedProblems
from dvp.measurement.rollouts import is_log_prob
from dvp.progress import Progress
from dvp.rollout.seeds import derived_seed
from dvp.training.backend import Policy

PATIENCE = 600.0
"""Seconds to wait for an answer; a server may have to load or compile first."""
WHOLE = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
"""Sampling settings of the full distribution, whatever the model's defaults: log-probs are then the same before and
after the settings apply."""
TOKEN_ID = "token_id:"
"""Prefix of a token's id in vLLM's log-probs, of a server with --return-tokens-as-token-ids."""
KEY = "VLLM_API_KEY"
"""The environment variable of the server's key, which vLLM's own server takes from there, too."""


class Server:
    """A running server of one model."""

    def __init__(self, url: str):
        """Ask which model is served at `url`, such as http://localhost:8000, with or without /v1.

        Raises DvpError if nothing answers, or not with a list of models.
        """
        self.url = url.rstrip("/").removesuffix("/v1")
        if not self.url.startswith(("http://", "https://")) or "@" in self.url:
            raise DvpError("--server: expected http://HOST:PORT, without user and password")
        try:
            served = self._ask("/v1/models")["data"][0]
            self.model, self.sglang = served["id"], served.get("owned_by") == "sglang"
        except (AttributeError, IndexError, KeyError, TypeError):
            raise DvpError(
                f"--server: {self.url}/v1/models: expected a list of models, as vLLM and SGLang give it"
            ) from None

    def generate(self, prompt: list[int], n: int, longest: int, seed: int) -> list[tuple[list[int], list[float]]]:
        """Return token ids and log-probs (nats, NaN for null) of `n` responses of at most `longest` tokens.

        Raises DvpError for an answer without token ids or log-probs, or of another number of responses.
        """
        try:
            responses = self._responses(prompt, n, longest, seed)
        except (AttributeError, IndexError, KeyError, TypeError, ValueError):
            needed = "SGLang: return_logprob" if self.sglang else "vLLM: --return-tokens-as-token-ids"
            raise DvpError(
                f"--server: {self.url} returns text without token ids and log-probs; needed is {needed}"
            ) from None
        if len(responses) != n:
            raise DvpError(f"--server: {self.url} returns {len(responses)} responses where n is {n}")
        return responses

    def _responses(self, prompt: list[int], n: int, longest: int, seed: int) -> list[tuple[list, list]]:
        if self.sglang:
            sampling = WHOLE | {"n": n, "max_new_tokens": longest}  # with one seed its n responses may be the same
            asked = {"input_ids": prompt, "sampling_params": sampling, "return_logprob": True}
            answer = self._ask("/generate", asked)
            found = [
                one["meta_info"]["output_token_logprobs"] for one in (answer if isinstance(answer, list) else [answer])
            ]
            return [_whole([pair[1] for pair in pairs], [pair[0] for pair in pairs]) for pairs in found]
        asked = {"model": self.model, "prompt": prompt, "n": n, "max_tokens": longest, "seed": seed % 2**62}
        asked |= WHOLE | {"logprobs": 0, "return_token_ids": True, "return_tokens_as_token_ids": True}
        return [_of_vllm(one) for one in self._ask("/v1/completions", asked)["choices"]]

    def _ask(self, path: str, body: dict[str, Any] | None = None) -> Any:
        key = os.environ.get(KEY)
        request = Request(
            self.url + path,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {}),
        )
        try:
            with urlopen(request, timeout=PATIENCE) as answer:
                return json.load(answer)
        except HTTPError as error:
            said = " ".join(error.read().decode(errors="replace").split())[:300]
            asks = f"; expected its key in the environment variable {KEY}" if error.code in (401, 403) else ""
            raise DvpError(f"--server: {self.url}{path}: HTTP {error.code}: {said}{asks}") from None
        except (HTTPException, OSError, ValueError) as error:
            raise DvpError(f"--server: {self.url}{path}: no answer in JSON: {error}") from None


def _of_vllm(choice: dict[str, Any]) -> tuple[list[int], list[float]]:
    reported = choice["logprobs"]
    named = [int(name.removeprefix(TOKEN_ID)) for name in reported["tokens"] if name.startswith(TOKEN_ID)]
    return _whole(choice.get("token_ids") or named, reported["token_logprobs"])


def _whole(tokens: list, log_probs: list) -> tuple[list[int], list[float]]:
    """Return ids and log-probs, NaN for null; raises ValueError or TypeError unless each token has both."""
    if len(tokens) != len(log_probs) or not all(type(token) is int for token in tokens):
        raise ValueError
    return tokens, [math.nan if value is None else float(value) for value in log_probs]


def rollouts(server: Server, fixed: FixedProblems, responses: int, longest: int) -> pd.DataFrame:
    """Sample responses and score them by the trainer: one row per response, as `read_rollouts` reads them.

    Empty responses are left out. Raises DvpError as `Server.generate`, for a model that the trainer cannot score, for
    tokens outside its vocabulary, if no response has a token, and if no token of a problem has a log-prob.
    """
    network, rows = fixed.network().eval(), []
    policy, vocabulary = Policy(network), network.config.get_text_config().vocab_size
    policy.check(fixed.prompts)
    progress = Progress(f"mismatch {server.url}", len(fixed.ids))
    for index, (name, prompt) in enumerate(zip(fixed.ids, fixed.prompts, strict=True)):
        answers = server.generate(prompt, responses, longest, derived_seed(fixed.seed, 0, index))
        answers = [answer for answer in answers if answer[0]]  # a response may end before its first token
        if not answers:
            continue
        tokens, log_q = zip(*answers, strict=True)
        for token in (min(map(min, tokens)), max(map(max, tokens))):
            if not 0 <= token < vocabulary:
                raise DvpError(
                    f"--server: {server.url} samples token {token}, --model has {vocabulary}: is it the same model?"
                )
        if not is_log_prob(pd.Series([value for own in log_q for value in own])).any():
            raise DvpError(f"--server: {server.url} gives no log-prob of a token, but {log_q[0][0]:g}")
        batch = Batch.collate([prompt] * len(tokens), list(tokens), pad=0)
        with torch.no_grad():
            log_p_N = policy(batch, safe=None, temperature=1.0).log_prob
        log_p = [part.tolist() for part in log_p_N.split([len(own) for own in tokens])]
        columns = {"problem": name, "token_ids": tokens, "engine_logprobs": log_q, "trainer_logprobs": log_p}
        rows.append(pd.DataFrame(columns))
        progress.step(index + 1, f"{len(log_p_N)} tokens")
    if not rows:
        raise DvpError(f"--server: {server.url} returns no token to any problem")
    return pd.concat(rows, ignore_index=True)
