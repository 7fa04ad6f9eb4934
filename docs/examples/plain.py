"""transformers as the engine: slow, and the trainer's own arithmetic."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from dvp.core.safe_vocabulary import SafeVocabulary, safe_mask
from dvp.experiment.training import EngineConfig
from dvp.rollout.engine import Completion, Sampling


class PlainEngine:
    """An Engine (see engine.py) that computes each token from the whole text before it."""

    ranks = 1

    def __init__(self, model: Path, config: EngineConfig, *, max_model_len: int, seed: int, **unused: Any):
        self.max_model_len = max_model_len
        self._model = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, config.dtype))
        self._tokenizer = AutoTokenizer.from_pretrained(model)

    def generate(self, prompts: list[list[int]], sampling: Sampling, seeds: list[int]) -> list[list[Completion]]:
        """See Engine.generate."""
        return [
            [self._response(prompt, sampling, seed + number) for number in range(sampling.n)]
            for prompt, seed in zip(prompts, seeds, strict=True)
        ]

    def _response(self, prompt: list[int], sampling: Sampling, seed: int) -> Completion:
        generator, end = torch.Generator().manual_seed(seed % 2**62), self._tokenizer.eos_token_id
        tokens: list[int] = []
        log_probs: list[float] = []
        while len(tokens) < sampling.max_tokens and end not in tokens:
            log_prob_V = self._log_probs(prompt + tokens, sampling.safe_vocabulary, sampling.temperature)
            tokens.append(int(torch.multinomial(log_prob_V.exp(), 1, generator=generator)))
            log_probs.append(log_prob_V[tokens[-1]].item())
        text = self._tokenizer.decode(tokens, skip_special_tokens=True)
        return Completion(tokens, log_probs, text, "stop" if end in tokens else "length")

    @torch.no_grad()
    def _log_probs(self, tokens: list[int], rule: SafeVocabulary | None, temperature: float = 1.0) -> torch.Tensor:
        logits_V = self._model(torch.tensor([tokens])).logits[0, -1].float() / temperature
        if rule is not None:
            logits_V = logits_V.masked_fill(~safe_mask(logits_V[None], rule)[0], -torch.inf)
        return logits_V.log_softmax(dim=0)

    def log_probs(self, prompt: list[int], rule: SafeVocabulary | None) -> torch.Tensor:
        """See Engine.log_probs."""
        return self._log_probs(prompt, rule)

    def sleep(self, *, keep_weights: bool) -> None:
        """See Engine.sleep: there is nothing to free."""

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """See Engine.load_weights."""
        self._model.load_state_dict(dict(weights), strict=False)
