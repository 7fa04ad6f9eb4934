"""Advise on the correction that an engine beside a trainer needs, by rules that are stated with the advice."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dvp.analysis.formats import digits
from dvp.core.limits import FEW

LENGTHS = (512, 1024, 2048, 4096, 8192)
"""Response lengths, tokens, for which the share that corrections keep is forecast."""
EVEN, REACHED, OUT_OF_REACH = 0.9, 0.5, 0.1
RULES = (
    f"No correction: the effective sample size of sequence weights is at least {100 * EVEN:g} % at {LENGTHS[-1]:,} "
    "tokens.",
    f"Otherwise MIS, up to the longest length at which it keeps at least {100 * FEW:g} % of the responses. Beyond it "
    "TIS by token, which rejects none; it corrects each token's own ratio, and leaves the bias of what came before it.",
    f"TRM beside it, if {100 * FEW:g} to {100 * EVEN:g} % of the responses have no token that it rejects at "
    f"{LENGTHS[-1]:,} tokens: outliers are there, and few enough to drop their responses.",
    f"Pruning could reach the mismatch if at some ρ at least {100 * REACHED:g} % of the KL lies outside V_S, and could "
    f"not if less than {100 * OUT_OF_REACH:g} % does at every ρ.",
)


@dataclass(frozen=True)
class Numbers:
    """The numbers behind the advice on one engine. Shares are in [0, 1], KL in nats per token."""

    engine: str
    kl: float
    error: float | None
    """KL of the engine from the trainer's forward pass with the engine's own weights; None if unknown."""
    limit: float | None
    """The largest error that the engine's other rounding explains."""
    noise: Mapping[str, float]
    """KL of the trainer against itself, by control; empty if it was not measured."""
    ess: Mapping[int, float]
    """Effective sample size of sequence weights, by length."""
    kept: Mapping[str, Mapping[int, float]]
    """Share that a correction keeps, by its name and by length."""
    outside: Mapping[str, tuple[float, float]]
    """Shares of KL and of gradient power outside V_S, by ρ; empty where the whole vocabulary is not known."""
    suspicions: Sequence[str] = ()
    """Sentences on what is implausible about the log-probs; with any, no correction is advised."""
    left_out: str = ""
    """Which tokens had no usable log-prob, in a sentence."""


def verdict(numbers: Numbers) -> str:
    """Return the advice in a word: `check first`, `none`, or the corrections to use, and up to which length."""
    if numbers.suspicions:
        return "check first"
    if numbers.ess[LENGTHS[-1]] >= EVEN:
        return "none"
    longest = max((n for n in LENGTHS if numbers.kept["MIS"][n] >= FEW), default=0)
    if longest == LENGTHS[-1]:
        return "MIS"
    return f"MIS to {longest:,}, then TIS" if longest else "TIS"


def advice(numbers: Numbers) -> list[str]:
    """Say how large the mismatch is, and what is suspicious, or which correction it needs and if pruning reaches it."""
    size = f"Engine {numbers.engine}: KL {numbers.kl:.2g} nats per token"
    if bf16 := numbers.noise.get("bf16"):
        size += f", {digits()(numbers.kl / bf16)} times what the trainer has against itself in bf16 ({bf16:.2g})"
    first = [f"{size}.", *([numbers.left_out] if numbers.left_out else []), *numbers.suspicions]
    if numbers.suspicions:
        return [*first, "No correction is advised before that is explained."]
    return [*first, *_need(numbers), _reach(numbers)]


def _need(numbers: Numbers) -> list[str]:
    found = verdict(numbers)
    ess, kept = numbers.ess[LENGTHS[-1]], numbers.kept["TRM"][LENGTHS[-1]]
    reason = f"at {LENGTHS[-1]:,} tokens sequence weights have an effective sample of {percent(ess)}"
    if found == "none":
        return [f"It needs no correction: {reason}."]
    mis = ", ".join(f"{percent(numbers.kept['MIS'][length])} at {length:,}" for length in LENGTHS[::2])
    sentences = [f"It needs a correction ({reason}): {found}. MIS keeps {mis} tokens."]
    if kept < EVEN:
        few = "TRM beside it drops these responses" if kept >= FEW else "too many to drop their responses (TRM)"
        sentences.append(
            f"Of the responses of {LENGTHS[-1]:,} tokens {percent(1 - kept)} have a token outside TRM's bounds: {few}."
        )
    return sentences


def _reach(numbers: Numbers) -> str:
    if not numbers.outside:
        return "Whether pruning could reach it is not known: that takes the whole vocabulary."
    rho, (kl, score) = max(numbers.outside.items(), key=lambda one: one[1][0])
    shares = f"{percent(kl)} of the KL and {percent(score)} of the gradient's power lie outside V_S at ρ = {rho}"
    if kl >= REACHED:
        return f"Pruning could reach it: {shares}."
    if kl < OUT_OF_REACH:
        return f"Pruning could not reach it: {shares}, and no ρ that was asked for has more of the KL."
    return f"Pruning could reach a part of it: {shares}."


def percent(share: float) -> str:
    """Format a share in percent with two digits, or as a whole number from 10 % on."""
    return "< 0.01 %" if 0 < share < 1e-4 else f"{digits()(100 * share)} %"
