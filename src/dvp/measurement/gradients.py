"""Estimators of the policy gradient as training makes them, and exact gradients at a fixed policy.

Estimators that give a response one weight are sums Σ_b c_b ∇log p(response b): the gradients of a batch's responses,
made once, serve all of them. Gradients longer than BUCKETS are count-sketched (dvp.core.count_sketch).

Shape suffixes: B responses of a batch, T tokens, E estimators, D coordinates.
"""

from dataclasses import fields

import torch

from dvp.core.advantages import ADVANTAGES, BY_TOKEN
from dvp.core.batch import Batch, Rollout, unflatten_parts
from dvp.core.count_sketch import CountSketch
from dvp.core.head import TokenStatistics
from dvp.core.safe_vocabulary import SafeVocabulary
from dvp.core.update import Update, make_update
from dvp.experiment.config import Experiment
from dvp.experiment.grid import parse_rho
from dvp.rollout.seeds import derived_seed
from dvp.training.backend import Policy

BUCKETS = 2**20
SEQUENCES = 16  # gradients of responses at once


class Estimator:
    """One estimator: a method, at a ρ if it takes one."""

    def __init__(self, experiment: Experiment, method: str, rho: str | None):
        settings = experiment.methods[method]
        self.method, self.rho, self.label = method, rho, settings.label
        self.importance = settings.importance
        self.safe = settings.sides(None if rho is None else parse_rho(rho), experiment.training.max_response_tokens)
        self._advantage = ADVANTAGES[settings.advantage]
        self._group_size = experiment.training.group_size
        self.by_token = self.importance.by_token or settings.advantage in BY_TOKEN
        """Whether the tokens of a response may have different coefficients."""

    def update(self, rollout: Rollout, statistics: dict[str, torch.Tensor]) -> Update:
        """As training has it: its coefficients are what multiplies each token's ∇log p."""
        return make_update(
            rollout,
            statistics,
            importance=self.importance,
            advantage=self._advantage,
            group_size=self._group_size,
        )


class Gradients:
    """Exact fp32 gradients of Σ_t c_t log p(y_t) over a model's parameters, sketched if they are long."""

    def __init__(self, policy: Policy, temperature: float, tokens: int, seed: int):
        """`tokens` are in a pass at most, unless a response has more."""
        torch.set_float32_matmul_precision("highest")
        self._policy, self._temperature, self._tokens = policy, temperature, tokens
        self._parameters = list(policy.parameters())
        self.sketch = CountSketch([parameter.numel() for parameter in self._parameters], BUCKETS, derived_seed(seed))
        self._device = self._parameters[0].device

    @torch.no_grad()
    def score(self, batch: Batch, safe: SafeVocabulary | None) -> dict[str, torch.Tensor]:
        """The head's statistics of every response token, each (B, T), 0 elsewhere."""
        parts = batch.micro_batches(self._tokens)
        scored = [self._statistics(batch.rows(rows), safe) for rows in parts]
        names = [field.name for field in fields(TokenStatistics)]
        return {
            name: unflatten_parts(parts, [getattr(part, name).cpu() for part in scored], batch.response_BT)
            for name in names
        }

    def of_batch(self, batch: Batch, coefficient_BT: torch.Tensor, safe: SafeVocabulary | None) -> torch.Tensor:
        """∇ Σ_b Σ_t c_bt log p^mp(y_bt), (D,); with V_S constant, and no term where c is 0."""
        total_D = torch.zeros(self.sketch.length)
        useful = (coefficient_BT != 0).any(dim=1).nonzero()[:, 0]
        for rows in batch.micro_batches(self._tokens, useful):
            part = batch.rows(rows)
            coefficient_N = coefficient_BT[rows, : part.tokens_BT.shape[1]][part.response_BT].to(self._device)
            total_D += self._gradient(self._statistics(part, safe).pruned_log_prob, coefficient_N)
        return total_D

    def of_responses(self, batch: Batch, coefficient_BE: torch.Tensor, safe: SafeVocabulary | None) -> torch.Tensor:
        """Σ_b c_be ∇ Σ_t log p^mp(y_bt) over the tokens in V_S, (E, D): one backward pass a response serves all."""
        total_ED = torch.zeros(coefficient_BE.shape[1], self.sketch.length)
        useful = (coefficient_BE != 0).any(dim=1).nonzero()[:, 0]
        for rows in useful.split(SEQUENCES) if len(useful) else ():
            gradient_bD = torch.stack([self._of_response(batch.rows(row[None]), safe) for row in rows])
            total_ED.addmm_(coefficient_BE[rows].T, gradient_bD)
        return total_ED

    def _of_response(self, batch: Batch, safe: SafeVocabulary | None) -> torch.Tensor:
        statistics = self._statistics(batch, safe)
        return self._gradient(statistics.pruned_log_prob, statistics.target_in_safe.float())

    def _gradient(self, log_prob_N: torch.Tensor, coefficient_N: torch.Tensor) -> torch.Tensor:
        parts = torch.autograd.grad(
            log_prob_N, self._parameters, coefficient_N, allow_unused=True, materialize_grads=True
        )
        return self.sketch(parts).cpu()

    def _statistics(self, batch: Batch, safe: SafeVocabulary | None) -> TokenStatistics:
        return self._policy(batch.to(self._device), safe=safe, temperature=self._temperature)
