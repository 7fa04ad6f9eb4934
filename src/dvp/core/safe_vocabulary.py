"""The safe vocabulary V_S(s) = { a : z_a − max_k z_k ≥ log ρ(s) } (docs/method.md, "Dynamic vocabulary pruning").

Equivalently p_a ≥ ρ · p_max: the min-p rule. Engine and trainer apply the same rule, each to its own logits; only
`EngineSets` replays the engine's. A rule says what ρ is in each state: constant, or the adaptive ones of the paper's
open question 1.

The gap z_a − max z is rounded to fp32 once and compared as it is. Entries of equal gap therefore stand or fall
together, and the set is the same for `logits` as for `logits − max`. A rule that chooses its set by counting (a mass, a
number of entries) has its threshold half-way between the least likely entry that it keeps and the next one: whoever
makes the logits again, as the head's backward pass does, gets them with other last bits, and still the same set.

A new rule for ρ is two classes here: a subclass of `SafeVocabulary` (what ρ is in each state, which trainer and engine
then both apply) and a subclass of `RhoRule` (its settings, with a `rule` of its own), which joins `Rule`. Experiments
ask for it by its `rule`.

Shape suffixes: B responses, T tokens, N flattened tokens, V vocabulary, H hidden, G group.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from dvp.core.lazy import no_grad, torch
from dvp.errors import DvpError
from dvp.strict import Positive, PositiveFloat, Strict, Told

Rho = Annotated[float, Field(gt=0, lt=1)]

# Elements sorted at once: 28 bytes each while `MassBudget` works on them.
SORTED_AT_ONCE = 2**24


class SafeVocabulary:
    """A rule for ρ(s): a frozen dataclass whose fields are numbers or strict models, as it is sent to the engine."""

    def log_rho(self, logits_NV: torch.Tensor) -> torch.Tensor:
        """log ρ(s) of each state, (N,) float32, ≤ 0, constant under the gradient.

        `logits_NV` are after temperature (nats), any float type; only their differences matter. −inf is legal for an
        entry that cannot be sampled.
        """
        raise NotImplementedError

    def control(self, rho: float) -> SafeVocabulary:
        """A rule of the same kind that prunes at about `rho`: what an engine is proved with, beside the rule itself."""
        return replace(self, rho=rho)

    def log_rho_range(self, logits_NV: torch.Tensor, nats: float) -> tuple[torch.Tensor, torch.Tensor]:
        """What is certain, if any logit may be off by that much, of the gaps that come of it.

        Those from the second value up are safe, those below the first are not; (N,) each, both log ρ if it is constant.
        """
        log_rho_N = self.log_rho(logits_NV)
        return log_rho_N, log_rho_N


@no_grad
def safe_mask(logits_NV: torch.Tensor, rule: SafeVocabulary) -> torch.Tensor:
    """Say which vocabulary entries are safe in each state.

    Args:
        logits_NV: logits after division by the sampling temperature (nats), any float type; the comparison is
            made in fp32, because in bf16 the steps between logits are coarser than the margins that matter.
        rule: what ρ is; an entry exactly at the threshold is safe.

    Returns:
        bool (N, V). The most likely entry is always safe, so no row is empty. The mask is constant under the
        gradient (docs/method.md, Theory 4).
    """
    gap_NV = _gaps(logits_NV)
    return gap_NV >= rule.log_rho(gap_NV)[:, None]


@dataclass(frozen=True)
class FixedRho(SafeVocabulary):
    """The same ρ in every state: min-p, the paper's rule.

    Raises:
        DvpError: ρ outside (0, 1).
    """

    rho: float

    def __post_init__(self) -> None:
        if not 0.0 < self.rho < 1.0:
            raise DvpError(f"rho: expected a number strictly between 0 and 1, got {self.rho}")

    def log_rho(self, logits_NV: torch.Tensor) -> torch.Tensor:
        """See SafeVocabulary.log_rho."""
        return torch.full(logits_NV.shape[:1], math.log(self.rho), dtype=torch.float32, device=logits_NV.device)


@dataclass(frozen=True)
class MassBudget(SafeVocabulary):
    """The smallest V_S(s) that a ρ(s) can give with at most `budget` of the probability pruned: 1 − Z(s) ≤ budget.

    With budget = δ/T the bias of J over T tokens is at most R_max · δ (docs/method.md, Theory 5).

    Sums run in float64 from the least likely entry up, so 1 − Z is good to a relative 1e-11 at V = 150,000. Entries
    of equal probability that do not fit into the budget together are all kept. One sort a row: O(V log V).

    Raises:
        DvpError: a budget outside [0, 1).
    """

    budget: float

    def __post_init__(self) -> None:
        if not 0.0 <= self.budget < 1.0:
            raise DvpError(f"budget: expected a probability in [0, 1), got {self.budget}")

    @no_grad
    def log_rho(self, logits_NV: torch.Tensor) -> torch.Tensor:
        """See SafeVocabulary.log_rho."""
        rows = max(1, SORTED_AT_ONCE // logits_NV.shape[1])
        gaps = map(_gaps, logits_NV.split(rows))
        return torch.cat([_half_way_down(gap_NV, self._least(gap_NV)) for gap_NV in gaps])

    def _least(self, gap_NV: torch.Tensor) -> torch.Tensor:
        """The gap of the least likely entry that is kept, (N,)."""
        gap_NV = gap_NV.sort(dim=-1).values
        weight_NV = gap_NV.double().exp_()
        # A finite logit has some mass, however far below float64's smallest: a budget of 0 prunes none of them.
        weight_NV = torch.where(gap_NV.isinf(), 0.0, weight_NV.clamp_(min=torch.finfo(torch.float64).tiny))
        mass_NV = weight_NV.cumsum_(dim=-1)
        # Never all V of them, as budget < 1; if the next entry ties with the last one counted, it keeps both.
        pruned_N1 = (mass_NV <= self.budget * mass_NV[:, -1:]).sum(dim=-1, keepdim=True)
        return gap_NV.gather(1, pruned_N1).squeeze(1)

    def control(self, rho: float) -> MassBudget:
        """See SafeVocabulary.control."""
        return MassBudget(rho)

    def log_rho_range(self, logits_NV: torch.Tensor, nats: float) -> tuple[torch.Tensor, torch.Tensor]:
        """See SafeVocabulary.log_rho_range. A gap, and the log of a ratio of two masses, move by up to 2 · nats."""
        gap_NV = _gaps(logits_NV)
        low, high = (MassBudget(min(self.budget * math.exp(move), 1 - 1e-9)) for move in (-2 * nats, 2 * nats))
        return low._least(gap_NV) - 2 * nats, (high._least(gap_NV) + 2 * nats).clamp(max=0.0)


@dataclass(frozen=True)
class EntropyScaled(SafeVocabulary):
    """log ρ(s) = log ρ₀ + α(H̄ − H(s)), clipped: with α > 0, an uncertain state keeps a wider vocabulary.

    Raises:
        DvpError: ρ₀ outside the settings' range.
    """

    rho: float
    """ρ₀, what a state of entropy H̄ gets."""
    settings: Entropy

    def __post_init__(self) -> None:
        self.settings.check(self.rho)

    @no_grad
    def log_rho(self, logits_NV: torch.Tensor) -> torch.Tensor:
        """See SafeVocabulary.log_rho. H is that of the full distribution."""
        return self._log_rho(torch.special.entr(logits_NV.float().softmax(dim=-1)).sum(dim=-1))

    def _log_rho(self, entropy_N: torch.Tensor) -> torch.Tensor:
        log_rho_N = math.log(self.rho) + self.settings.alpha * (self.settings.target_entropy - entropy_N)
        return log_rho_N.clamp_(math.log(self.settings.lowest), math.log(self.settings.highest))

    def control(self, rho: float) -> EntropyScaled:
        """See SafeVocabulary.control. Still a function of the entropy, but never far below `rho`."""
        highest = max(self.settings.highest, rho)
        return EntropyScaled(rho, self.settings.changed(lowest=rho / 3, highest=highest))

    def log_rho_range(self, logits_NV: torch.Tensor, nats: float) -> tuple[torch.Tensor, torch.Tensor]:
        """See SafeVocabulary.log_rho_range.

        dH = −Σ p (log p + H) dz. On the way to the other logits p grows by at most e^{2 nats}, and log p moves by at
        most 2 nats: H moves by m ≤ nats e^{2 nats} (Σ p |log p + H| + 2 nats + m), and never by more than log V.
        """
        log_p_NV = logits_NV.double().log_softmax(dim=-1)
        p_NV = log_p_NV.exp()
        entropy_N = torch.special.entr(p_NV).sum(dim=-1)
        spread_N = torch.where(p_NV > 0, p_NV * (log_p_NV + entropy_N[:, None]).abs(), 0.0).sum(dim=-1)
        share, most = nats * math.exp(2 * nats), math.log(logits_NV.shape[1])
        moved_N = torch.full_like(entropy_N, most)
        if share < 1:
            moved_N = (share * (spread_N + 2 * nats) / (1 - share)).clamp(max=most)
        one_N, other_N = (self._log_rho(entropy_N + sign * moved_N).float() for sign in (-1, 1))
        return torch.minimum(one_N, other_N), torch.maximum(one_N, other_N)


@dataclass(frozen=True)
class TopK(SafeVocabulary):
    """The `k` most likely entries, and those as likely as the last of them; none that cannot be sampled.

    Raises:
        DvpError: k that is not a whole number of at least 1.
    """

    k: int

    def __post_init__(self) -> None:
        if not isinstance(self.k, int) or self.k < 1:
            raise DvpError(f"k: expected a whole number of at least 1, got {self.k}")

    @no_grad
    def log_rho(self, logits_NV: torch.Tensor) -> torch.Tensor:
        """See SafeVocabulary.log_rho."""
        gap_NV = _gaps(logits_NV)
        return _half_way_down(gap_NV, self._least(gap_NV))

    def _least(self, gap_NV: torch.Tensor) -> torch.Tensor:
        """The gap of the least likely entry that is kept, (N,); below them all where fewer than k can be sampled."""
        least_N = gap_NV.topk(min(self.k, gap_NV.shape[1]), dim=-1).values[:, -1]
        return least_N.clamp(min=torch.finfo(torch.float32).min)

    def control(self, rho: float) -> TopK:
        """See SafeVocabulary.control. About ρ is where the second one lies: it prunes everywhere."""
        return TopK(min(self.k, 2))

    def log_rho_range(self, logits_NV: torch.Tensor, nats: float) -> tuple[torch.Tensor, torch.Tensor]:
        """See SafeVocabulary.log_rho_range. The k-th largest and the largest move by up to `nats` each."""
        least_N = self._least(_gaps(logits_NV))
        return least_N - 2 * nats, (least_N + 2 * nats).clamp(max=0.0)


@dataclass(frozen=True)
class TopNSigma(SafeVocabulary):
    """log ρ(s) = −n · σ(s), with σ the standard deviation of the state's logits: top-nσ (arXiv 2411.07641).

    σ is that of the population (divisor the number of entries), over those that can be sampled, with a finite logit.

    Raises:
        DvpError: n that is not a finite number above 0.
    """

    n: float

    def __post_init__(self) -> None:
        if not 0.0 < self.n < math.inf:
            raise DvpError(f"n: expected a finite number above 0, got {self.n}")

    @no_grad
    def log_rho(self, logits_NV: torch.Tensor) -> torch.Tensor:
        """See SafeVocabulary.log_rho."""
        gap_NV = _gaps(logits_NV)
        finite_NV = gap_NV.isfinite()
        count_N1 = finite_NV.sum(dim=-1, keepdim=True)
        mean_N1 = gap_NV.where(finite_NV, 0.0).sum(dim=-1, keepdim=True) / count_N1
        square_NV = (gap_NV - mean_N1).square().where(finite_NV, 0.0)
        return -self.n * (square_NV.sum(dim=-1) / count_N1[:, 0]).sqrt()

    def control(self, rho: float) -> TopNSigma:
        """See SafeVocabulary.control. Entries further than σ below the largest exist in every state but a flat one."""
        return TopNSigma(min(self.n, 1.0))

    def log_rho_range(self, logits_NV: torch.Tensor, nats: float) -> tuple[torch.Tensor, torch.Tensor]:
        """See SafeVocabulary.log_rho_range. σ changes by up to `nats`, and a gap by twice that."""
        log_rho_N, most = self.log_rho(logits_NV), (self.n + 2) * nats
        return log_rho_N - most, (log_rho_N + most).clamp(max=0.0)


@dataclass(frozen=True)
class EngineSets:
    """In the place of the trainer's safe vocabulary: the set that the engine sampled each token from.

    Mask replay (docs/method.md, "Mask replay"): the engine reports its sets (dvp.core.kept_sets), and the trainer
    renormalises over them.
    """

    rule: SafeVocabulary
    """The engine's. What it gives on the trainer's own logits is only compared with the engine's sets."""


def with_margin(rho: float, epsilon: float) -> FixedRho:
    """The rule of one side beside another side that prunes at ρ: ρ·e^{−2ε̂} (docs/method.md, "Margin").

    If no logit of the engine is further than `epsilon` nats from the trainer's, the set with the margin contains the
    other one, up to the rounding of the thresholds in fp32. Which side has it decides what that is good for:

    - the trainer's, as docs/method.md has it: V'_S ⊆ V_S, so no sampled token lies outside V_S. What the engine never
      draws stays a bias of the gradient.
    - the engine's: V_S ⊆ V'_S, the condition of the constrained gradient's unbiasedness (docs/method.md, Theory 4);
      sampled tokens outside V_S have ratio 0.

    Raises:
        DvpError: ρ outside (0, 1), ε̂ negative, or so large that nothing would be pruned at any logits.
    """
    if not 0.0 <= epsilon < math.inf:
        raise DvpError(f"epsilon: expected a finite number of nats, at least 0, got {epsilon}")
    return FixedRho(rho * math.exp(-2.0 * epsilon))


class FeedbackRho:
    """A controller of ρ between steps: prune more while the mismatch is high, less while it is low.

    It sees nothing but the metrics of finished steps, so a resumed run that feeds it the same rows again stands
    where it stood.

    Raises:
        DvpError: ρ outside the settings' range.
    """

    def __init__(self, rho: float, settings: Feedback):
        """Start at `rho`."""
        settings.check(rho)
        self.rho = rho
        self._settings = settings
        self._side = 0
        self._steps = 0

    def observe(self, metrics: dict) -> None:
        """Take in the metrics row of a finished step. A signal that is not a number counts as between the bounds.

        Raises:
            DvpError: the row lacks the signal.
        """
        settings = self._settings
        if settings.signal not in metrics:
            raise DvpError(f"feedback.signal: the step's metrics have no '{settings.signal}'")
        value = metrics[settings.signal]
        side = 0 if value is None else (value > settings.high) - (value < settings.low)
        self._steps = self._steps + 1 if side == self._side else 1
        self._side = side
        if side != 0 and self._steps >= settings.patience:
            self.rho = min(max(self.rho * settings.factor**side, settings.lowest), settings.highest)
            self._steps = 0


class SafeVocabularies:
    """The safe vocabularies of a run's two sides, as they are at the present step; None restricts nothing.

    With `feedback` they change from step to step. It sees nothing but the metrics of finished steps, so a run that goes
    on from a checkpoint hands them in again.
    """

    def __init__(
        self,
        trainer: SafeVocabulary | EngineSets | None,
        engine: SafeVocabulary | None,
        feedback: FeedbackRho | None = None,
    ):
        self.trainer = trainer
        self.engine = engine
        self._feedback = feedback

    @property
    def rho(self) -> float | None:
        """The engine's ρ, None if it has none or one for each state."""
        return self.engine.rho if isinstance(self.engine, FixedRho) else None

    @property
    def replayed(self) -> bool:
        """Whether the trainer needs the engine's sets."""
        return isinstance(self.trainer, EngineSets)

    def observe(self, metrics: dict) -> None:
        """Take in the metrics of a finished step."""
        if self._feedback is not None:
            self._feedback.observe(metrics)
            self.trainer = self.engine = FixedRho(self._feedback.rho)


class RhoRule(Strict):
    """Settings of a rule for ρ, and the safe vocabularies that they make."""

    takes_rho: ClassVar[bool] = True
    """Whether ρ comes from the grid."""
    needs_training: ClassVar[bool] = False
    """Whether it says nothing at a fixed policy."""
    engine_at_rho: ClassVar[bool] = False
    """Whether the engine samples by min-p at the grid's ρ all along: then a model can be evaluated so."""

    def sides(self, rho: float | None, max_response_tokens: int) -> SafeVocabularies:
        """Those of both sides; `rho` is the grid's, None if the rule takes none. Raises DvpError."""
        raise NotImplementedError


class Fixed(RhoRule):
    """The paper's rule: min-p with the grid's ρ on both sides."""

    engine_at_rho = True
    rule: Literal["fixed"]

    def sides(self, rho: float | None, max_response_tokens: int) -> SafeVocabularies:
        """See RhoRule.sides."""
        return SafeVocabularies(FixedRho(rho), FixedRho(rho))


class Margin(RhoRule):
    """One side prunes at ρ, the other at ρ·e^(−2ε̂): it has all that the first has if no logit is off by more than ε̂."""

    rule: Literal["margin"]
    epsilon: Annotated[float, Field(ge=0)]
    """ε̂, nats."""
    side: Literal["trainer", "engine"] = "trainer"
    """Which side has the margin: the trainer's leaves no sampled token outside V_S, the engine's no bias."""

    def sides(self, rho: float | None, max_response_tokens: int) -> SafeVocabularies:
        """See RhoRule.sides."""
        wide, narrow = with_margin(rho, self.epsilon), FixedRho(rho)
        return SafeVocabularies(wide, narrow) if self.side == "trainer" else SafeVocabularies(narrow, wide)


class EngineOnly(RhoRule):
    """A control: min-p with the grid's ρ on the engine's side alone. The ratio is p/q^mp."""

    rule: Literal["engine_only"]

    def sides(self, rho: float | None, max_response_tokens: int) -> SafeVocabularies:
        """See RhoRule.sides."""
        return SafeVocabularies(None, FixedRho(rho))


class TrainerOnly(RhoRule):
    """A control: min-p with the grid's ρ on the trainer's side alone. The ratio is p^mp/q, and 0 outside V_S."""

    rule: Literal["trainer_only"]

    def sides(self, rho: float | None, max_response_tokens: int) -> SafeVocabularies:
        """See RhoRule.sides."""
        return SafeVocabularies(FixedRho(rho), None)


class Replay(RhoRule):
    """Mask replay: min-p with the grid's ρ on the engine's side; the trainer renormalises over the engine's sets."""

    engine_at_rho = True
    rule: Literal["replay"]

    def sides(self, rho: float | None, max_response_tokens: int) -> SafeVocabularies:
        """See RhoRule.sides."""
        return SafeVocabularies(EngineSets(FixedRho(rho)), FixedRho(rho))


class TopKRule(RhoRule):
    """The k most likely tokens of each state, on both sides. Takes no ρ."""

    takes_rho = False
    rule: Literal["top_k"]
    k: Annotated[int, Field(ge=1, le=2**31 - 1)]

    def sides(self, rho: float | None, max_response_tokens: int) -> SafeVocabularies:
        """See RhoRule.sides."""
        return SafeVocabularies(TopK(self.k), TopK(self.k))


class TopPRule(RhoRule):
    """The fewest most likely tokens of each state that hold `p` of its probability, on both sides. Takes no ρ."""

    takes_rho = False
    rule: Literal["top_p"]
    p: Annotated[float, Field(gt=0, lt=1)]

    def sides(self, rho: float | None, max_response_tokens: int) -> SafeVocabularies:
        """See RhoRule.sides."""
        budget = MassBudget(1 - self.p)
        return SafeVocabularies(budget, budget)


class TopNSigmaRule(RhoRule):
    """Tokens at most n standard deviations of the state's logits below the likeliest, on both sides. Takes no ρ."""

    takes_rho = False
    rule: Literal["top_n_sigma"]
    n: PositiveFloat

    def sides(self, rho: float | None, max_response_tokens: int) -> SafeVocabularies:
        """See RhoRule.sides."""
        return SafeVocabularies(TopNSigma(self.n), TopNSigma(self.n))


class Mass(RhoRule):
    """Each state loses at most δ/T of its probability, T being training.max_response_tokens. Takes no ρ."""

    takes_rho = False
    rule: Literal["mass_budget"]
    delta: PositiveFloat
    """δ, probability a response may lose; the bias of J is at most R_max times it."""

    def sides(self, rho: float | None, max_response_tokens: int) -> SafeVocabularies:
        """See RhoRule.sides."""
        budget = MassBudget(self.delta / max_response_tokens)
        return SafeVocabularies(budget, budget)


class _Ranged(RhoRule):
    lowest: Rho
    highest: Rho

    @model_validator(mode="after")
    def _ordered(self) -> _Ranged:
        if self.lowest > self.highest:
            raise ValueError(f"lowest ({self.lowest}) must not exceed highest ({self.highest})")
        return self

    def check(self, rho: float) -> None:
        """Raises DvpError unless lowest ≤ rho ≤ highest."""
        if not self.lowest <= rho <= self.highest:
            raise DvpError(f"rho: expected lowest ≤ rho ≤ highest, got {self.lowest}, {rho} and {self.highest}")


class Entropy(_Ranged):
    """log ρ(s) = log ρ + alpha · (target_entropy − H(s)), held within [lowest, highest]."""

    rule: Literal["entropy"]
    alpha: float
    """α, change of log ρ for each nat of entropy."""
    target_entropy: Annotated[float, Field(ge=0)]
    """H̄, nats."""

    def sides(self, rho: float | None, max_response_tokens: int) -> SafeVocabularies:
        """See RhoRule.sides."""
        scaled = EntropyScaled(rho, self)
        return SafeVocabularies(scaled, scaled)


class Feedback(_Ranged):
    """Starts at ρ; `patience` steps with the signal above `high` multiply it by `factor`, below `low` divide it."""

    needs_training = True
    rule: Literal["feedback"]
    signal: Literal["k3", "vetoed_fraction", "tail_mismatch", "reward"]
    """The metric that is watched; the reward of a step's responses is the pass rate of its problems."""
    low: Annotated[float, Field(ge=0)]
    high: PositiveFloat
    factor: Annotated[float, Field(gt=1)]
    patience: Positive
    """This many steps in a row on the same side make one change; then counting starts anew."""

    @model_validator(mode="after")
    def _band(self) -> Feedback:
        if not self.low < self.high:
            raise ValueError(f"expected low < high, found low {self.low} and high {self.high}")
        return self

    def sides(self, rho: float | None, max_response_tokens: int) -> SafeVocabularies:
        """See RhoRule.sides."""
        feedback = FeedbackRho(rho, self)
        return SafeVocabularies(FixedRho(rho), FixedRho(rho), feedback)


Rule = Annotated[
    Fixed
    | Margin
    | EngineOnly
    | TrainerOnly
    | Replay
    | Mass
    | TopPRule
    | TopKRule
    | TopNSigmaRule
    | Entropy
    | Feedback,
    Field(discriminator="rule"),
    Told("rule"),
]
"""Every rule for ρ that an experiment can ask for."""


def _gaps(logits_NV: torch.Tensor) -> torch.Tensor:
    """z − max z, fp32."""
    logits_NV = logits_NV.float()
    return logits_NV - logits_NV.amax(dim=-1, keepdim=True)


def _half_way_down(gap_NV: torch.Tensor, least_N: torch.Tensor) -> torch.Tensor:
    """The threshold that keeps gaps from `least` up and is as far from any gap as can be, (N,).

    Far below all gaps where the next lower one is −inf or there is none, and `least` itself where fp32 has nothing
    between the two.
    """
    lower_NV = gap_NV.where(gap_NV < least_N[:, None], -torch.inf)
    lower_N = lower_NV.amax(dim=-1).clamp(min=torch.finfo(torch.float32).min)
    middle_N = (least_N + lower_N) / 2
    return torch.where(middle_N > lower_N, middle_N, least_N)
