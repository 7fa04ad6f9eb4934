"""The safe vocabulary V_S(s) = { a : z_a − max_k z_k ≥ log ρ(s) } (METHOD.md, "Dynamic vocabulary pruning").

Equivalently p_a ≥ ρ · p_max: the min-p rule. Engine and trainer apply the same rule, each to its own logits; no mask
is replayed. A rule says what ρ is in each state: constant, or the adaptive ones of the paper's open question 1.

The gap z_a − max z is rounded to fp32 once and compared as it is. Entries of equal gap therefore stand or fall
together, a threshold that was read off a gap gives back exactly the set it was read off from, and the set is the same
for `logits` as for `logits − max`.

Shape suffixes: B responses, T tokens, N flattened tokens, V vocabulary, H hidden, G group.
"""

import math
from dataclasses import dataclass
from typing import Literal, Protocol, get_args

import torch

from dvp.errors import DvpError

Signal = Literal["k3", "vetoed_fraction", "tail_mismatch"]

# Elements sorted at once: 28 bytes each while `MassBudget` works on them.
SORTED_AT_ONCE = 2**24


class SafeVocabulary(Protocol):
    """A rule for ρ(s)."""

    def log_rho(self, logits_NV: torch.Tensor) -> torch.Tensor:
        """log ρ(s) of each state, (N,) float32, ≤ 0, constant under the gradient.

        `logits_NV` are after temperature (nats), any float type; only their differences matter. −inf is legal for an
        entry that cannot be sampled.
        """


@torch.no_grad()
def safe_mask(logits_NV: torch.Tensor, rule: SafeVocabulary) -> torch.Tensor:
    """Say which vocabulary entries are safe in each state.

    Args:
        logits_NV: logits after division by the sampling temperature (nats), any float type; the comparison is
            made in fp32, because in bf16 the steps between logits are coarser than the margins that matter.
        rule: what ρ is; an entry exactly at the threshold is safe.

    Returns:
        bool (N, V). The most likely entry is always safe, so no row is empty. The mask is constant under the
        gradient (METHOD.md item 4).
    """
    gap_NV = _gaps(logits_NV)
    return gap_NV >= rule.log_rho(gap_NV)[:, None]


@dataclass(frozen=True)
class FixedRho:
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
class MassBudget:
    """The largest ρ(s) that prunes at most `budget` of the probability: 1 − Z(s) ≤ budget.

    With budget = δ/T the bias of J over T tokens is at most R_max · δ (METHOD.md item 5).

    Sums run in float64 from the least likely entry up, so 1 − Z is good to a relative 1e-11 at V = 150,000. Entries
    of equal probability that do not fit into the budget together are all kept. One sort a row: O(V log V).

    Raises:
        DvpError: a budget outside [0, 1).
    """

    budget: float

    def __post_init__(self) -> None:
        if not 0.0 <= self.budget < 1.0:
            raise DvpError(f"budget: expected a probability in [0, 1), got {self.budget}")

    @torch.no_grad()
    def log_rho(self, logits_NV: torch.Tensor) -> torch.Tensor:
        """See SafeVocabulary.log_rho. ρ is that of the least likely entry which is kept."""
        rows = max(1, SORTED_AT_ONCE // logits_NV.shape[1])
        return torch.cat([self._log_rho_of_rows(rows_NV) for rows_NV in logits_NV.split(rows)])

    def _log_rho_of_rows(self, logits_NV: torch.Tensor) -> torch.Tensor:
        gap_NV = _gaps(logits_NV).sort(dim=-1).values
        weight_NV = gap_NV.double().exp_()
        # A finite logit has some mass, however far below float64's smallest: a budget of 0 prunes none of them.
        weight_NV = torch.where(gap_NV.isinf(), 0.0, weight_NV.clamp_(min=torch.finfo(torch.float64).tiny))
        mass_NV = weight_NV.cumsum_(dim=-1)
        # Never all V of them, as budget < 1; if the next entry ties with the last one counted, it keeps both.
        pruned_N1 = (mass_NV <= self.budget * mass_NV[:, -1:]).sum(dim=-1, keepdim=True)
        return gap_NV.gather(1, pruned_N1).squeeze(1)


@dataclass(frozen=True)
class EntropyScaled:
    """log ρ(s) = log ρ₀ + α(H̄ − H(s)), clipped: with α > 0, an uncertain state keeps a wider vocabulary.

    Raises:
        DvpError: not 0 < lowest ≤ ρ₀ ≤ highest < 1, α not finite, or H̄ not a finite number ≥ 0.
    """

    rho: float
    """ρ₀, what a state of entropy H̄ gets."""
    alpha: float
    """α, change of log ρ for each nat of entropy."""
    target_entropy: float
    """H̄, nats."""
    lowest: float
    """Smallest ρ(s)."""
    highest: float
    """Largest ρ(s)."""

    def __post_init__(self) -> None:
        _check_range(self.rho, self.lowest, self.highest)
        if not math.isfinite(self.alpha):
            raise DvpError(f"alpha: expected a finite number, got {self.alpha}")
        if not 0.0 <= self.target_entropy < math.inf:
            raise DvpError(f"target_entropy: expected a finite number of nats, at least 0, got {self.target_entropy}")

    @torch.no_grad()
    def log_rho(self, logits_NV: torch.Tensor) -> torch.Tensor:
        """See SafeVocabulary.log_rho. H is that of the full distribution."""
        entropy_N = torch.special.entr(logits_NV.float().softmax(dim=-1)).sum(dim=-1)
        log_rho_N = math.log(self.rho) + self.alpha * (self.target_entropy - entropy_N)
        return log_rho_N.clamp_(math.log(self.lowest), math.log(self.highest))


def with_margin(rho: float, epsilon: float) -> FixedRho:
    """The rule of one side beside another side that prunes at ρ: ρ·e^{−2ε̂} (METHOD.md, "Margin").

    If no logit of the engine is further than `epsilon` nats from the trainer's, the set with the margin contains the
    other one, up to the rounding of the thresholds in fp32. Which side has it decides what that is good for:

    - the trainer's, as METHOD.md has it: V'_S ⊆ V_S, so no sampled token lies outside V_S. What the engine never draws
      stays a bias of the gradient.
    - the engine's: V_S ⊆ V'_S, the condition of the constrained gradient's unbiasedness (METHOD.md item 4); sampled
      tokens outside V_S have ratio 0.

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
    """

    def __init__(
        self,
        rho: float,
        *,
        signal: Signal,
        low: float,
        high: float,
        factor: float,
        lowest: float,
        highest: float,
        patience: int,
    ):
        """Start at `rho`.

        Args:
            rho: ρ of the first step.
            signal: the metric that is watched.
            low, high: ρ falls when the signal was below `low`, rises when it was above `high`, and stays in between.
            factor: what ρ is multiplied with or divided by, > 1.
            lowest, highest: the range that ρ never leaves.
            patience: this many steps in a row on the same side make one change; then counting starts anew.

        Raises:
            DvpError: a value out of its range.
        """
        _check_range(rho, lowest, highest)
        if signal not in get_args(Signal):
            raise DvpError(f"feedback.signal: expected one of {get_args(Signal)}, got {signal!r}")
        if not 0.0 <= low < high < math.inf:
            raise DvpError(f"feedback: expected 0 ≤ low < high, got low {low} and high {high}")
        if not 1.0 < factor < math.inf:
            raise DvpError(f"feedback.factor: expected a finite number above 1, got {factor}")
        if patience < 1:
            raise DvpError(f"feedback.patience: expected at least 1 step, got {patience}")
        self.rho = rho
        self._signal = signal
        self._low, self._high = low, high
        self._factor = factor
        self._lowest, self._highest = lowest, highest
        self._patience = patience
        self._side = 0
        self._steps = 0

    def observe(self, metrics: dict) -> None:
        """Take in the metrics row of a finished step. A signal that is not a number counts as between the bounds.

        Raises:
            DvpError: the row lacks the signal.
        """
        if self._signal not in metrics:
            raise DvpError(f"feedback.signal: the step's metrics have no '{self._signal}'")
        value = metrics[self._signal]
        side = 0 if value is None else (value > self._high) - (value < self._low)
        self._steps = self._steps + 1 if side == self._side else 1
        self._side = side
        if side != 0 and self._steps >= self._patience:
            self.rho = min(max(self.rho * self._factor**side, self._lowest), self._highest)
            self._steps = 0


def _gaps(logits_NV: torch.Tensor) -> torch.Tensor:
    """z − max z, fp32."""
    logits_NV = logits_NV.float()
    return logits_NV - logits_NV.amax(dim=-1, keepdim=True)


def _check_range(rho: float, lowest: float, highest: float) -> None:
    if not 0.0 < lowest <= rho <= highest < 1.0:
        raise DvpError(f"rho: expected 0 < lowest ≤ rho ≤ highest < 1, got lowest {lowest}, {rho}, highest {highest}")
