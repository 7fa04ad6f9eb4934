"""Estimators of the policy gradient as in training, and their gradients at a fixed policy.

Estimators that give a response one weight are sums Σ_b c_b ∇log p(response b): the gradients of a batch's responses
are computed once for all of them. Gradients longer than BUCKETS are sketched.

A gradient is returned in parts that sum to it, one for the tokens of each bin of positions.

Shape suffixes: B responses of a batch, T tokens, E estimators, K parts, D coordinates, n some tokens of a response.
"""

from collections.abc import Sequence
from functools import partial

import torch

from dvp.core.advantages import ADVANTAGES, BY_TOKEN
from dvp.core.batch import Batch, Rollout, unflatten_parts
from dvp.core.head import OF_TOKENS, TokenStatistics
from dvp.core.safe_vocabulary import EngineSets, SafeVocabulary
from dvp.core.update import Update, make_update
from dvp.experiment.config import Experiment
from dvp.experiment.grid import parse_rho
from dvp.rollout.seeds import derived_seed
from dvp.training.backend import Policy

BUCKETS = 2**20
SEQUENCES = 16  # responses whose gradients are held at once
NORM_ELEMENTS = 2**24  # elements of single tokens' gradients that are held at once


def position_parts(response_BT: torch.Tensor, bins: Sequence[int]) -> torch.Tensor:
    """Return which response tokens lie in each bin of positions, (K, B, T) bool; each lies in exactly one.

    A token's position is its number among those that the model wrote, from 1.

    Args:
        bins: the last position of each bin except the final, open one, ascending; an empty list gives one part.
    """
    place_BT = torch.bucketize(response_BT.long().cumsum(dim=1), torch.tensor(bins, dtype=torch.long))
    return torch.stack([response_BT & (place_BT == number) for number in range(len(bins) + 1)])


class Estimator:
    """A gradient estimator: a method of the experiment, at a ρ if it takes one."""

    def __init__(self, experiment: Experiment, method: str, rho: str | None):
        settings = experiment.methods[method]
        importance, mask, self.true_norms = settings.importance, settings.mask, settings.true_norms
        self.method, self.rho, self.label = method, rho, settings.label
        self.safe = settings.sides(None if rho is None else parse_rho(rho), experiment.training.max_response_tokens)
        self.by_token = importance.by_token or settings.advantage in BY_TOKEN or (mask is not None and mask.by_token)
        """Whether the tokens of a response may have different coefficients."""
        self._update = partial(
            make_update,
            importance=importance,
            advantage=ADVANTAGES[settings.advantage],
            group_size=experiment.training.group_size,
            mask=mask,
        )

    def update(
        self, rollout: Rollout, statistics: dict[str, torch.Tensor], squared_norm_BT: torch.Tensor | None = None
    ) -> Update:
        """Compute the update as training does; `squared_norm_BT` (see `make_update`) is used with true_norms only."""
        return self._update(rollout, statistics, squared_norm_BT=squared_norm_BT if self.true_norms else None)


class CountSketch:
    """A linear map S of vectors, given as several tensors, to at most `buckets` coordinates; shorter ones stay exact.

    Every coordinate is added, with a random sign, to one of the buckets. ⟨Sx, Sy⟩ is an unbiased estimate of ⟨x, y⟩
    with a variance of at most 2|x|²|y|²/buckets (Charikar, Chen and Farach-Colton 2002), and S is linear.
    """

    def __init__(self, sizes: Sequence[int], buckets: int, seed: int):
        """Draw a bucket and a sign for every element, `sizes` of each tensor, unless all fit into the buckets.

        Takes four bytes per element.
        """
        self.size = sum(sizes)
        self.exact = self.size <= buckets
        self.length = self.size if self.exact else buckets
        self._places: list[torch.Tensor] = []
        if not self.exact:
            generator = torch.Generator().manual_seed(seed)
            # The lower half of the places is for plus, the upper half for minus.
            self._places = [
                torch.randint(2 * buckets, (size,), generator=generator, dtype=torch.int32) for size in sizes
            ]

    def __call__(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the vector's sketch, (length,), on its device; `parts` have the sizes given, in any shape."""
        if self.exact:
            return torch.cat([part.reshape(-1) for part in parts])
        self._places = [places.to(parts[0].device) for places in self._places]
        signed = parts[0].new_zeros(2 * self.length)
        for part, places in zip(parts, self._places, strict=True):
            signed.index_add_(0, places, part.reshape(-1))
        return signed[: self.length] - signed[self.length :]


class Gradients:
    """Exact fp32 gradients of Σ_t c_t log p(y_t) over a model's parameters, sketched if they are long."""

    def __init__(self, policy: Policy, temperature: float, tokens: int, seed: int):
        """Prepare gradients of a policy; a pass has at most `tokens` tokens, unless a single response has more."""
        torch.set_float32_matmul_precision("highest")
        self._policy, self._temperature, self._tokens = policy, temperature, tokens
        self._parameters = list(policy.parameters())
        self.sketch = CountSketch([parameter.numel() for parameter in self._parameters], BUCKETS, derived_seed(seed))
        self._device = self._parameters[0].device

    @torch.no_grad()
    def score(self, batch: Batch, safe: SafeVocabulary | EngineSets | None) -> dict[str, torch.Tensor]:
        """Return the head's statistics of every response token by name, each (B, T), 0 elsewhere."""
        parts = batch.micro_batches(self._tokens)
        scored = [self._statistics(batch.rows(rows), safe) for rows in parts]
        return {
            name: unflatten_parts(parts, [getattr(part, name).cpu() for part in scored], batch.response_BT)
            for name in OF_TOKENS
        }

    def of_batch(
        self,
        batch: Batch,
        coefficient_BT: torch.Tensor,
        safe: SafeVocabulary | EngineSets | None,
        parts_KBT: torch.Tensor,
    ) -> torch.Tensor:
        """Return ∇ Σ_b Σ_t c_bt log p^mp(y_bt), a sum for each part, (K, D).

        V_S is held constant, and tokens outside it contribute nothing.
        """
        total_KD = torch.zeros(len(parts_KBT), self.sketch.length)
        useful = (coefficient_BT != 0).any(dim=1).nonzero()[:, 0]
        for rows in batch.micro_batches(self._tokens, useful):
            total_KD += self._of_rows(batch, rows, safe, parts_KBT * coefficient_BT)
        return total_KD

    def of_responses(
        self,
        batch: Batch,
        coefficient_BE: torch.Tensor,
        safe: SafeVocabulary | EngineSets | None,
        parts_KBT: torch.Tensor,
    ) -> torch.Tensor:
        """Return Σ_b c_be ∇ Σ_t log p^mp(y_bt) over the tokens in V_S, a sum over t for each part, (E, K, D).

        One forward pass per response, with a backward pass for each part, serves all E estimators.
        """
        total_EkD = torch.zeros(coefficient_BE.shape[1], len(parts_KBT) * self.sketch.length)
        useful = (coefficient_BE != 0).any(dim=1).nonzero()[:, 0]
        for rows in useful.split(SEQUENCES) if len(useful) else ():
            gradient_bKD = torch.stack([self._of_rows(batch, row[None], safe, parts_KBT.float()) for row in rows])
            total_EkD.addmm_(coefficient_BE[rows].T, gradient_bKD.flatten(1))
        return total_EkD.view(-1, len(parts_KBT), self.sketch.length)

    def squared_norms(self, batch: Batch, safe: SafeVocabulary | EngineSets | None) -> torch.Tensor:
        """Return the exact ‖∇ log p^mp(y_bt)‖² over the parameters at each response token, (B, T), 0 elsewhere.

        Backward passes are vectorised over some of a response's tokens at a time, and cost as much as one pass per
        token. A token outside V_S has no gradient and gets 0.
        """
        norm_BT = torch.zeros(batch.tokens_BT.shape)
        size = sum(parameter.numel() for parameter in self._parameters)
        for row in range(len(batch.tokens_BT)):
            part = batch.rows(torch.tensor([row])).to(self._device)
            log_prob_N = self._policy.dense_log_prob(part, safe=safe, temperature=self._temperature)
            norms = []
            for choice_nN in torch.eye(len(log_prob_N), device=self._device).split(max(1, NORM_ELEMENTS // size)):
                gradients = torch.autograd.grad(
                    log_prob_N,
                    self._parameters,
                    choice_nN,
                    retain_graph=True,
                    is_grads_batched=True,
                    allow_unused=True,
                    materialize_grads=True,
                )
                norms.append(sum(gradient.flatten(1).square().sum(dim=1) for gradient in gradients))
            norm_BT[row, batch.response_BT[row]] = torch.cat(norms).cpu()
        if safe is not None:
            norm_BT *= self.score(batch, safe)["target_in_safe"]
        return norm_BT

    def _of_rows(
        self, batch: Batch, rows: torch.Tensor, safe: SafeVocabulary | EngineSets | None, coefficient_KBT: torch.Tensor
    ) -> torch.Tensor:
        """Return ∇ Σ c log p^mp over the tokens in V_S of some responses, for each of K coefficients, (K, D)."""
        part, gradients = batch.rows(rows), []
        statistics = self._statistics(part, safe)
        coefficient_KN = coefficient_KBT[:, rows, : part.tokens_BT.shape[1]][:, part.response_BT].to(self._device)
        for number, coefficient_N in enumerate(coefficient_KN * statistics.target_in_safe, start=1):
            parts = torch.autograd.grad(
                statistics.pruned_log_prob,
                self._parameters,
                coefficient_N,
                retain_graph=number < len(coefficient_KN),
                allow_unused=True,
                materialize_grads=True,
            )
            gradients.append(self.sketch(parts).cpu())
        return torch.stack(gradients)

    def _statistics(self, batch: Batch, safe: SafeVocabulary | EngineSets | None) -> TokenStatistics:
        return self._policy(batch.to(self._device), safe=safe, temperature=self._temperature)
