"""The safe vocabulary V_S(s) = { a : z_a − max_k z_k ≥ log ρ(s) } (docs/method.md, "Dynamic vocabulary pruning").

Equivalently p_a ≥ ρ · p_max: the min-p rule. Engine and trainer apply the same rule, each to its own logits; only
`EngineSets` replays the engine's sets. A rule says what ρ is in each state: constant, or adaptive as in the paper's
open question 1.

The gap z_a − max z is rounded to fp32 once and compared as it is. Entries of equal gap are therefore kept or pruned
together, and the set is the same for `logits` as for `logits − max`. A rule that chooses its set by counting (a mass, a
number of entries) has its threshold half-way between the least likely entry that it keeps and the next one. Recomputed
logits, as in the head's backward pass, differ in their last bits, and still give the same set.

Shape suffixes: N flattened tokens, V vocabulary, K trials.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from dvp.core.lazy import no_grad, torch
from dvp.errors import DvpError
from dvp.strict import Positive, PositiveFloat, Tagged

Rho = Annotated[float, Field(gt=0, lt=1)]

# Elements sorted at once: 28 bytes each while `MassBudget` works on them.
SORTED_AT_ONCE = 2**24


class SafeVocabulary:
    """A rule for ρ(s): a frozen dataclass or strict model, as it is sent to the engine."""

    def log_rho(self, logits_NV: torch.Tensor) -> torch.Tensor:
        """Return log ρ(s) of each state, (N,) float32, ≤ 0, constant under the gradient.

        `logits_NV` are after temperature (nats), any float type; only their differences matter. −inf is legal for an
        entry that cannot be sampled.
        """
        raise NotImplementedError

    def control(self, rho: float) -> SafeVocabulary:
        """Return a rule of the same kind that prunes at about `rho`: a second rule to check an engine with."""
        return replace(self, rho=rho)


@no_grad
def safe_mask(logits_NV: torch.Tensor, rule: SafeVocabulary) -> torch.Tensor:
    """Return which entries are safe in each state, bool (N, V), for logits after temperature (nats), any float type.

    The comparison is made in fp32, because in bf16 the steps between logits are coarser than the margins that matter.
    An entry exactly at the threshold is safe, and the most likely one always is, so no row is empty. The mask is
    constant under the gradient (docs/method.md, Theory 4).
    """
    gap_NV = _gaps(logits_NV)
    return gap_NV >= rule.log_rho(gap_NV)[:, None]


@no_grad
def settled(logits_V: torch.Tensor, rule: SafeVocabulary, nats: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return which entries stay safe, and which stay unsafe, if every logit may be off by ±nats: bool (V,) each.

    Decided by trial: every logit moves by ±nats at random; or all above some level one way and all below it the other
    way, which moves an entropy, a mass or the gap to the largest logit most.
    """
    generator = torch.Generator().manual_seed(0)
    gap_V = _gaps(logits_V)
    random_KV = torch.randint(2, (16, len(gap_V)), generator=generator).to(gap_V) * 2 - 1
    level_K = -torch.logspace(-1, 1.5, 16, device=gap_V.device)
    tilted_KV = torch.where(gap_V >= level_K[:, None], 1.0, -1.0)
    safe_KV = safe_mask(gap_V + nats * torch.cat([random_KV, tilted_KV, -tilted_KV]), rule)
    return safe_KV.all(dim=0), ~safe_KV.any(dim=0)


@dataclass(frozen=True)
class FixedRho(SafeVocabulary):
    """Min-p with one ρ for every state, the paper's rule."""

    rho: float

    def log_rho(self, logits_NV: torch.Tensor) -> torch.Tensor:
        return torch.full(logits_NV.shape[:1], math.log(self.rho), dtype=torch.float32, device=logits_NV.device)


@dataclass(frozen=True)
class MassBudget(SafeVocabulary):
    """The smallest V_S(s) that a ρ(s) can give with at most `budget` of the probability pruned: 1 − Z(s) ≤ budget.

    With budget = δ/T the bias of J over T tokens is at most R_max · δ (docs/method.md, Theory 5).

    Sums run in float64 from the least likely entry up, so 1 − Z is good to a relative 1e-11 at V = 150,000. Entries
    of equal probability that do not fit into the budget together are all kept. One sort per row: O(V log V).
    """

    budget: float
    """In [0, 1)."""

    @no_grad
    def log_rho(self, logits_NV: torch.Tensor) -> torch.Tensor:
        rows = max(1, SORTED_AT_ONCE // logits_NV.shape[1])
        return torch.cat([self._log_rho(_gaps(logits_nV)) for logits_nV in logits_NV.split(rows)])

    def _log_rho(self, gap_NV: torch.Tensor) -> torch.Tensor:
        sorted_NV = gap_NV.sort(dim=-1).values
        weight_NV = sorted_NV.double().exp_()
        # Give a finite logit a positive mass even if float64 underflows, so that a budget of 0 prunes none of them.
        weight_NV = torch.where(sorted_NV.isinf(), 0.0, weight_NV.clamp_(min=torch.finfo(torch.float64).tiny))
        mass_NV = weight_NV.cumsum_(dim=-1)
        # At most V − 1 entries, as budget < 1. If the last one counted ties with the next entry, both are kept.
        pruned_N1 = (mass_NV <= self.budget * mass_NV[:, -1:]).sum(dim=-1, keepdim=True)
        return _half_way_down(gap_NV, sorted_NV.gather(1, pruned_N1).squeeze(1))

    def control(self, rho: float) -> MassBudget:
        return MassBudget(rho)


@dataclass(frozen=True)
class EntropyScaled(SafeVocabulary):
    """log ρ(s) = log ρ₀ + α(H̄ − H(s)), clipped: with α > 0, an uncertain state keeps a wider vocabulary."""

    rho: float
    """ρ₀, what a state of entropy H̄ gets."""
    settings: Entropy

    @no_grad
    def log_rho(self, logits_NV: torch.Tensor) -> torch.Tensor:
        """Return log ρ(s) as `SafeVocabulary.log_rho`; H is the entropy of the full distribution."""
        settings = self.settings
        entropy_N = torch.special.entr(logits_NV.float().softmax(dim=-1)).sum(dim=-1)
        log_rho_N = math.log(self.rho) + settings.alpha * (settings.target_entropy - entropy_N)
        return log_rho_N.clamp_(math.log(settings.lowest), math.log(settings.highest))

    def control(self, rho: float) -> EntropyScaled:
        """Return a rule whose ρ(s) still depends on the entropy, but never falls far below `rho`."""
        return EntropyScaled(rho, self.settings.changed(lowest=rho / 3, highest=max(self.settings.highest, rho)))


@dataclass(frozen=True)
class EngineSets:
    """Mask replay: in place of a safe vocabulary, the trainer takes the set that the engine sampled each token from.

    The engine reports its sets (dvp.core.kept_sets), and the trainer renormalises over them (docs/method.md, "Mask
    replay").
    """

    rule: SafeVocabulary
    """The engine's rule. Its sets on the trainer's own logits are only compared with the engine's."""


def with_margin(rho: float, epsilon: float) -> FixedRho:
    """Return the rule ρ·e^{−2ε̂} for one side if the other one prunes at ρ (docs/method.md, "Margin").

    If no logit of the engine is further than `epsilon` nats from the trainer's, the set with the margin contains the
    other one, up to the rounding of the thresholds in fp32. What follows depends on the side that has the margin:

    - the trainer's, as docs/method.md has it: V'_S ⊆ V_S, so no sampled token lies outside V_S. What the engine never
      draws stays a bias of the gradient.
    - the engine's: V_S ⊆ V'_S, the condition for the constrained gradient to be unbiased (docs/method.md, Theory 4);
      sampled tokens outside V_S have ratio 0.

    Raises DvpError for an ε̂ so large that nothing would be pruned at any logits.
    """
    wider = rho * math.exp(-2.0 * epsilon)
    if not wider > 0.0:
        raise DvpError(f"epsilon: expected a margin with which something is pruned, got {epsilon} nats")
    return FixedRho(wider)


class SafeVocabularies:
    """The safe vocabularies of a run's two sides at the present step; None restricts nothing.

    With `feedback` ρ changes between steps: it prunes more while the mismatch is high, less while it is low. It sees
    only the metrics of finished steps, so a run that resumes from a checkpoint must replay them.
    """

    def __init__(
        self,
        trainer: SafeVocabulary | EngineSets | None,
        engine: SafeVocabulary | None,
        feedback: Feedback | None = None,
    ):
        self.trainer = trainer
        self.engine = engine
        self._feedback = feedback
        self._side = self._steps = 0

    @property
    def rho(self) -> float | None:
        """Return the engine's ρ; None if it has none, or one for each state."""
        return self.engine.rho if isinstance(self.engine, FixedRho) else None

    @property
    def replayed(self) -> bool:
        """Return whether the trainer needs the engine's sets."""
        return isinstance(self.trainer, EngineSets)

    def observe(self, metrics: dict) -> None:
        """Take in the metrics of a finished step. A signal that is None or NaN counts as between the bounds."""
        settings = self._feedback
        if settings is None:
            return
        value = metrics[settings.signal]
        side = 0 if value is None else (value > settings.high) - (value < settings.low)
        self._steps = self._steps + 1 if side == self._side else 1
        self._side = side
        if side != 0 and self._steps >= settings.patience:
            rho = min(max(self.rho * settings.factor**side, settings.lowest), settings.highest)
            self.trainer = self.engine = FixedRho(rho)
            self._steps = 0


class RhoRule(Tagged):
    """Settings of a rule for ρ, and the safe vocabularies that they make."""

    takes_rho: ClassVar[bool] = True
    """Whether ρ comes from the grid."""
    needs_training: ClassVar[bool] = False
    """Whether it says nothing at a fixed policy."""

    @property
    def engine_at_rho(self) -> bool:
        """Return whether the engine always samples by min-p at the grid's ρ: then a model can be evaluated so."""
        return False

    def safe(self, rho: float | None, max_response_tokens: int) -> SafeVocabulary:
        """Return the safe vocabulary of either side; `rho` is the grid's, None if the rule takes none.

        Raises DvpError for values that do not fit together.
        """
        raise NotImplementedError

    def sides(self, rho: float | None, max_response_tokens: int) -> SafeVocabularies:
        """Return the safe vocabularies of both sides. Raises DvpError as `safe`."""
        safe = self.safe(rho, max_response_tokens)
        return SafeVocabularies(safe, safe)


class Fixed(RhoRule):
    """Min-p with the grid's ρ: the paper's rule, on both sides (`fixed`), and three that differ from it on one side.

    `replay` is mask replay: the trainer renormalises over the engine's sets. Two are controls: `engine_only`, where the
    ratio is p/q^mp, and `trainer_only`, where it is p^mp/q, and 0 outside V_S.
    """

    rule: Literal["fixed", "engine_only", "trainer_only", "replay"]

    @property
    def engine_at_rho(self) -> bool:
        return self.rule in ("fixed", "replay")

    def sides(self, rho: float | None, max_response_tokens: int) -> SafeVocabularies:
        pruned = FixedRho(rho)
        trainer = {"engine_only": None, "replay": EngineSets(pruned)}.get(self.rule, pruned)
        return SafeVocabularies(trainer, None if self.rule == "trainer_only" else pruned)


class Margin(RhoRule):
    """One side prunes at ρ, the other at ρ·e^(−2ε̂): it has all that the first has if no logit is off by more than ε̂."""

    rule: Literal["margin"] = "margin"
    epsilon: Annotated[float, Field(ge=0)]
    """ε̂, nats."""
    side: Literal["trainer", "engine"] = "trainer"
    """Which side has the margin: the trainer's leaves no sampled token outside V_S, the engine's no bias."""

    def sides(self, rho: float | None, max_response_tokens: int) -> SafeVocabularies:
        wide, narrow = with_margin(rho, self.epsilon), FixedRho(rho)
        return SafeVocabularies(wide, narrow) if self.side == "trainer" else SafeVocabularies(narrow, wide)


class Mass(RhoRule):
    """Each state loses at most δ/T of its probability, T being training.max_response_tokens. Takes no ρ."""

    takes_rho = False
    rule: Literal["mass_budget"] = "mass_budget"
    delta: PositiveFloat
    """δ, probability a response may lose; the bias of J is at most R_max times it."""

    def safe(self, rho: float | None, max_response_tokens: int) -> MassBudget:
        budget = self.delta / max_response_tokens
        if not budget < 1.0:
            raise DvpError(f"delta: expected less than max_response_tokens, {max_response_tokens}, got {self.delta}")
        return MassBudget(budget)


class TopPRule(RhoRule):
    """The fewest most likely tokens of each state that hold `p` of its probability, on both sides. Takes no ρ."""

    takes_rho = False
    rule: Literal["top_p"] = "top_p"
    p: Annotated[float, Field(gt=0, lt=1)]
    """The probability that is kept, such as 0.99."""

    def safe(self, rho: float | None, max_response_tokens: int) -> MassBudget:
        return MassBudget(1 - self.p)


class _OfLogits(RhoRule, SafeVocabulary):
    """A rule that is its own settings, the same on both sides. Takes no ρ."""

    takes_rho = False
    __str__ = RhoRule.__repr__

    def safe(self, rho: float | None, max_response_tokens: int) -> SafeVocabulary:
        return self


class TopK(_OfLogits):
    """The k most likely tokens of each state, and those as likely as the last of them, on both sides. Takes no ρ."""

    rule: Literal["top_k"] = "top_k"
    k: Annotated[int, Field(ge=1, le=2**31 - 1)]
    """Tokens kept, such as 32."""

    @no_grad
    def log_rho(self, logits_NV: torch.Tensor) -> torch.Tensor:
        gap_NV = _gaps(logits_NV)
        least_N = gap_NV.topk(min(self.k, gap_NV.shape[1]), dim=-1).values[:, -1]
        # If fewer than k entries can be sampled, the threshold is below all of them.
        return _half_way_down(gap_NV, least_N.clamp(min=torch.finfo(torch.float32).min))

    def control(self, rho: float) -> TopK:
        """Return a rule with k at most 2, which prunes in every state; `rho` is not used."""
        return self.changed(k=min(self.k, 2))


class TopNSigma(_OfLogits):
    """Tokens at most n standard deviations of the state's logits below the likeliest, on both sides. Takes no ρ.

    Top-nσ (arXiv 2411.07641): log ρ(s) = −n · σ(s). σ is that of the population (divisor the number of entries), over
    those that can be sampled, with a finite logit.
    """

    rule: Literal["top_n_sigma"] = "top_n_sigma"
    n: PositiveFloat
    """Standard deviations, such as 1."""

    @no_grad
    def log_rho(self, logits_NV: torch.Tensor) -> torch.Tensor:
        gap_NV = _gaps(logits_NV)
        finite_NV = gap_NV.isfinite()
        count_N1 = finite_NV.sum(dim=-1, keepdim=True)
        mean_N1 = gap_NV.where(finite_NV, 0.0).sum(dim=-1, keepdim=True) / count_N1
        square_NV = (gap_NV - mean_N1).square().where(finite_NV, 0.0)
        return -self.n * (square_NV.sum(dim=-1) / count_N1[:, 0]).sqrt()

    def control(self, rho: float) -> TopNSigma:
        """Return a rule with n at most 1, which prunes in every state that is not flat; `rho` is not used."""
        return self.changed(n=min(self.n, 1.0))


class _Ranged(RhoRule):
    lowest: Rho
    """The smallest ρ that it may come to, such as 1e-4."""
    highest: Rho
    """The largest, such as 0.1."""

    @model_validator(mode="after")
    def _ordered(self) -> _Ranged:
        if self.lowest > self.highest:
            raise ValueError(f"lowest ({self.lowest}) must not exceed highest ({self.highest})")
        return self

    def _within(self, rho: float) -> float:
        if not self.lowest <= rho <= self.highest:
            raise DvpError(f"rho: expected lowest ≤ rho ≤ highest, got {self.lowest}, {rho} and {self.highest}")
        return rho


class Entropy(_Ranged):
    """log ρ(s) = log ρ + alpha · (target_entropy − H(s)), held within [lowest, highest]."""

    rule: Literal["entropy"] = "entropy"
    alpha: float
    """α, change of log ρ for each nat of entropy."""
    target_entropy: Annotated[float, Field(ge=0)]
    """H̄, nats."""

    def safe(self, rho: float | None, max_response_tokens: int) -> EntropyScaled:
        return EntropyScaled(self._within(rho), self)


class Feedback(_Ranged):
    """Starts at ρ; `patience` steps with the signal above `high` multiply it by `factor`, below `low` divide it."""

    needs_training = True
    rule: Literal["feedback"] = "feedback"
    signal: Literal["k3", "vetoed_fraction", "tail_mismatch", "reward"]
    """The metric that is watched; the reward of a step's responses is the pass rate of its problems."""
    low: Annotated[float, Field(ge=0)]
    """Below it ρ is divided by `factor`, in the signal's unit."""
    high: PositiveFloat
    """Above it ρ is multiplied by `factor`."""
    factor: Annotated[float, Field(gt=1)]
    """Such as 2."""
    patience: Positive
    """This many steps in a row on the same side make one change; then counting starts anew."""

    @model_validator(mode="after")
    def _band(self) -> Feedback:
        if not self.low < self.high:
            raise ValueError(f"expected low < high, found low {self.low} and high {self.high}")
        return self

    def sides(self, rho: float | None, max_response_tokens: int) -> SafeVocabularies:
        safe = FixedRho(self._within(rho))
        return SafeVocabularies(safe, safe, self)


Rule = Annotated[Fixed | Margin | Mass | TopPRule | TopK | TopNSigma | Entropy | Feedback, Field(discriminator="rule")]
"""Every rule for ρ that an experiment can ask for."""


def _gaps(logits_NV: torch.Tensor) -> torch.Tensor:
    """Return z − max z, fp32."""
    logits_NV = logits_NV.float()
    return logits_NV - logits_NV.amax(dim=-1, keepdim=True)


def _half_way_down(gap_NV: torch.Tensor, least_N: torch.Tensor) -> torch.Tensor:
    """Return the threshold that keeps gaps from `least_N` up, half-way to the next lower gap, (N,).

    It is far below all gaps if the next lower one is −inf or missing, and `least_N` itself if fp32 has nothing in
    between.
    """
    lower_NV = gap_NV.where(gap_NV < least_N[:, None], -torch.inf)
    lower_N = lower_NV.amax(dim=-1).clamp(min=torch.finfo(torch.float32).min)
    middle_N = (least_N + lower_N) / 2
    return torch.where(middle_N > lower_N, middle_N, least_N)
