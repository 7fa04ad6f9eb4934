"""Define the interface of an inference engine.

An engine samples responses and reports the log-probabilities with which it sampled them: after temperature, masking and
renormalising, because that is the distribution the importance ratios are about.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

import torch

from dvp.core.kept_sets import KeptSets
from dvp.core.safe_vocabulary import SafeVocabulary
from dvp.experiment.training import ENGINES, EngineConfig


@dataclass(frozen=True)
class Sampling:
    """Options for sampling.

    max_tokens : most tokens of a response.
    n : responses per prompt.
    safe_vocabulary : None for the full vocabulary.
    report_sets : every completion carries the sets that its tokens were sampled from; that needs a safe vocabulary, and
        an engine that was started for it.
    whole_vocabulary : every completion carries the log-probabilities of all tokens at each of its positions.
    to_the_end : a response continues after an end-of-sequence token, until it has `max_tokens`.
    stop : a response that writes this text ends with the token that completes it.
    limits : most tokens of a response for each prompt, where that is not `max_tokens` for all of them.
    """

    max_tokens: int
    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    safe_vocabulary: SafeVocabulary | None = None
    report_sets: bool = False
    whole_vocabulary: bool = False
    to_the_end: bool = False
    stop: str | None = None
    limits: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Completion:
    """One sampled response.

    token_ids : its tokens; the end-of-sequence token is the last one when `finish_reason` is "stop".
    log_probs : log q of each token that the model wrote, after temperature, masking and renormalising.
    text : the tokens decoded, special tokens left out. With a tool (dvp.rollout.turns): the text outside its calls,
        which is what the model states.
    finish_reason : "stop" (the model ended its response), "length" (cut off) or "string" (it wrote `Sampling.stop`).
    vocabulary_log_probs_TV : log q of every token at each position, float32, −inf where pruned; None if not asked for.
    kept : the set that each token which the model wrote was sampled from, with log Z'; None if not asked for.
    written : whether the model wrote each token; None if it wrote all of them.
    transcript : with a tool, all tokens decoded; else None.
    calls, failed_calls : calls of a tool that were answered, and those of them that were mistakes.
    """

    token_ids: list[int]
    log_probs: list[float]
    text: str
    finish_reason: str
    vocabulary_log_probs_TV: torch.Tensor | None = None
    kept: KeptSets | None = None
    written: list[bool] | None = None
    transcript: str | None = None
    calls: int = 0
    failed_calls: int = 0


def make_engine(model: Path, config: EngineConfig, **options: Any) -> "Engine":
    """Start an engine of the configuration's kind on a Hugging Face directory; `options` are VllmEngine's."""
    module, name = ENGINES[config.kind].split(":")
    return getattr(import_module(module), name)(model, config, **options)


class Engine(Protocol):
    """An inference engine; each has one file in dvp/rollout, such as vllm.py."""

    max_model_len: int
    """Prompt and response together have at most this many tokens."""
    ranks: int
    """Number of consecutive ranks that one engine spans; they all make the same calls."""

    def generate(self, prompts: list[list[int]], sampling: Sampling, seeds: list[int]) -> list[list[Completion]]:
        """Sample `sampling.n` responses for each prompt (token ids); the seed decides them, whatever shares the batch.

        Raises DvpError, naming the prompt's index, when prompt and response cannot fit into `max_model_len`.
        """

    def log_probs(self, prompt: list[int], rule: SafeVocabulary | None) -> torch.Tensor:
        """Return the log-probabilities, (V,) float32, of sampling each token after `prompt` at temperature 1.

        `rule` is the safe vocabulary, None for the full one; −inf where it masks. The logits behind two calls with the
        same prompt are bit-identical, whatever the rule.
        """

    def sleep(self, *, keep_weights: bool) -> None:
        """Free what memory it can for the trainer until the next call, and forget what was computed for prompts.

        Without `keep_weights` the next call must be `load_weights`.
        """

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Replace every weight of the live engine; names are those of the Hugging Face model."""
