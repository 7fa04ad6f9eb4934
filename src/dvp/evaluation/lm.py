"""Adapter that lets lm-eval sample from this project's engines."""

import sys
from typing import Any, NoReturn

from lm_eval.api.instance import Instance
from lm_eval.api.model import LM

from dvp.data.prompts import before_response, encode_prompt
from dvp.data.reward import Grader
from dvp.errors import DvpError
from dvp.experiment.data import DataConfig
from dvp.files import sha256_json
from dvp.rollout.engine import Completion, Engine, Sampling


class Response(str):
    """Text of a response, with attributes that grading and the table of samples need.

    It is a string because lm-eval passes responses on as strings.
    """

    completion: Completion
    seed: int
    grader: Grader
    correct: bool
    """Set by the lm-eval task when it grades the response."""

    def __new__(cls, text: str, **attributes: Any) -> "Response":
        response = super().__new__(cls, text)
        response.__dict__.update(attributes)
        return response

    @property
    def truncated(self) -> bool:
        """Check whether the response was cut off at its length limit."""
        return self.completion.finish_reason == "length"


class EngineLM(LM):
    """lm-eval's model interface over an Engine: generation only."""

    def __init__(self, engine: Engine, tokenizer: Any, sampling: Sampling, *, data: DataConfig, seed: int):
        """Wrap an engine and its tokenizer.

        sampling : how every response is sampled.
        data : how prompts are written, and which part of a response is graded.
        seed : seed of the evaluation, from which each sample's own is derived.
        """
        super().__init__()
        self._engine, self._tokenizer, self._sampling, self._seed = engine, tokenizer, sampling, seed
        self._chat, self._grader = data.chat, Grader(before_response(tokenizer, data), data.reward)

    def generate_until(self, requests: list[Instance]) -> list[Response]:
        """Sample a response to each request, all in one call of the engine.

        lm-eval repeats a document's request k times; its samples differ by their seed, which depends only on the seed
        of the evaluation, the task, the problem's id and the sample's number. The sampling parameters of the requests
        come from the task file and are ignored.
        Raises DvpError if a prompt does not fit the engine.
        """
        encoded: dict[str, list[int]] = {}
        prompts, seeds, samples = [], [], {}
        for request in requests:
            prompt, problem = request.args[0], request.doc["id"]
            if prompt not in encoded:
                encoded[prompt] = encode_prompt(self._tokenizer, prompt, self._chat)
            sample = samples.setdefault((request.task_name, problem), 0)
            samples[request.task_name, problem] += 1
            prompts.append(encoded[prompt])
            seeds.append(sample_seed(self._seed, request.task_name, problem, sample))
        label = ", ".join(sorted({request.task_name for request in requests}))
        print(f"sampling {len(requests)} responses to {label}", file=sys.stderr, flush=True)
        completions = self._engine.generate(prompts, self._sampling, seeds)
        return [
            Response(completion.text, completion=completion, seed=seed, grader=self._grader)
            for (completion,), seed in zip(completions, seeds, strict=True)
        ]

    def loglikelihood(self, requests: list[Instance]) -> NoReturn:
        """Raise DvpError: the engine only samples, and offers no log-likelihoods to lm-eval."""
        raise DvpError("this model generates responses; tasks that need log-likelihoods cannot be run with it")

    loglikelihood_rolling = loglikelihood


def sample_seed(seed: int, task: str, problem: str, sample: int) -> int:
    """Derive the seed (60 bits) of one sample from the evaluation's seed, the task, the problem and its number."""
    return int(sha256_json([seed, task, problem, sample])[:15], 16)
