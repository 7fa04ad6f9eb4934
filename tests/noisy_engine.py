"""Engine that is the trainer's own model with Gaussian noise of a known size on the logits, as the theory assumes."""

import torch

from dvp.core.kept_sets import KeptSets
from dvp.core.safe_vocabulary import safe_mask
from dvp.rollout.engine import Completion, Sampling


class NoisyEngine:
    """Engine that samples from softmax(z + σ ε), ε drawn at every position; pruned and reported as a request asks."""

    max_model_len = 512
    ranks = 1

    def __init__(self, model, tokenizer, sigma: float, answers: bool = False):
        """Wrap a model. With `answers`, every response states 7 or 8, as the sum of its tokens is even or odd."""
        self._model, self._tokenizer, self._sigma, self._answers = model, tokenizer, sigma, answers

    @torch.no_grad()
    def generate(self, prompts: list[list[int]], sampling: Sampling, seeds: list[int]) -> list[list[Completion]]:
        """Sample `sampling.n` responses to each prompt, as Engine.generate does."""
        assert sampling.temperature == sampling.top_p == 1.0
        return [
            [self._response(prompt, sampling, seed + index) for index in range(sampling.n)]
            for prompt, seed in zip(prompts, seeds, strict=True)
        ]

    def sleep(self, *, keep_weights: bool) -> None:
        """Do nothing: there is no memory to free."""

    def load_weights(self, weights) -> None:
        """Load weights into the model, as Engine.load_weights does."""
        self._model.load_state_dict(dict(weights), strict=False)

    def _response(self, prompt: list[int], sampling: Sampling, seed: int) -> Completion:
        generator = torch.Generator().manual_seed(seed % 2**62)
        tokens, rows, sets = [], [], []
        end = None if sampling.to_the_end else self._tokenizer.eos_token_id
        while len(tokens) < sampling.max_tokens and end not in tokens:
            logits = self._model(torch.tensor([prompt + tokens])).logits[0, -1].double()
            noise = self._sigma * torch.randn(logits.shape, generator=generator, dtype=torch.float64)
            noisy = logits + noise
            if sampling.safe_vocabulary is not None:
                full = noisy
                noisy = noisy.masked_fill(~safe_mask(noisy[None], sampling.safe_vocabulary)[0], -torch.inf)
                ids = noisy.isfinite().nonzero()[:, 0].int()
                log_mass = (noisy.logsumexp(0) - full.logsumexp(0)).float()
                sets.append(KeptSets(ids, torch.tensor([len(ids)]), log_mass[None]))
            rows.append(noisy.log_softmax(0).float())
            tokens.append(int(torch.multinomial(rows[-1].double().exp(), 1, generator=generator)))
        ended = tokens[-1] == self._tokenizer.eos_token_id or self._answers
        text = f"Answer: {7 + sum(tokens) % 2 * self._answers}" if ended else ""
        return Completion(
            token_ids=tokens,
            log_probs=[row[token].item() for row, token in zip(rows, tokens, strict=True)],
            text=text,
            finish_reason="stop" if ended else "length",
            vocabulary_log_probs_TV=torch.stack(rows) if sampling.whole_vocabulary else None,
            kept=KeptSets.cat(sets) if sampling.report_sets else None,
        )
