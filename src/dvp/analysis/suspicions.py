"""Test whether log-probs can come from an engine of the trainer's model, by statistics that any such engine satisfies.

Tokens are sampled from q, the engine's distribution, and scored by the trainer's p. Then, however coarse the engine:

- E_q[p/q] = 1 given the tokens before, so that Σ (p/q − 1) is a martingale: its terms are uncorrelated, whatever the
  tokens of a response have in common. Two estimates of the KL, k1 = E[log q − log p] and k3 = E[p/q − 1 − log(p/q)],
  differ by the mean of p/q − 1.
- log q grows by one for one of log p. Noise on either side makes the slope of a regression on that side smaller, so
  that the slope lies between that of log q over log p and the inverse of that of log p over log q.
- Two computations in floating point are not equal everywhere, nor is one of them constant where the other one varies.

Shape suffix: N tokens, in their order within each response.
"""

import math

import numpy as np
import pandas as pd
from scipy.special import stdtrit

from dvp.analysis.formats import digits
from dvp.analysis.mismatch_advice import LENGTHS
from dvp.errors import DvpError

CONFIDENCE = 0.999
FREEDOM = 8  # fewest degrees of freedom; the ratios of fewer tokens are too skewed for an interval
SLOPE = 0.05
OFFSET = math.log(2) / LENGTHS[-1]
"""Deviation of the mean ratio from 1: below it a sequence's weight stays within MIS's bounds at the longest length."""
LARGEST_KL = 0.5
"""Largest KL of any engine in use, nats per token: SmolLM2-135M with weights of 5 bits by row has 0.4."""
GROWS = 3.0
SHIFTED = 0.1
FEWEST = 3  # tokens that must have a fill value
RULES = (
    "Engine error: with the engine's own weights the trainer still differs from it by more than the engine's other "
    "rounding explains, the limit of dvp preflight; of a file or a server, whose weights are not known, the KL is "
    f"above {LARGEST_KL:g} nats. It grows with position if the second half of the responses has more than "
    f"{GROWS:g} times the KL of the first; columns are shifted if it is a tenth one position off.",
    f"Too coarse: the engine has no error, and its KL is above {LARGEST_KL:g} nats all the same.",
    "Another scale: whichever of log p and log q is regressed on the other, the slope is above 1 by more than "
    f"{SLOPE:g} and a quarter of the variance around the line, at {100 * CONFIDENCE:g} % confidence.",
    f"Another distribution: the mean of p/q is not 1, at {100 * CONFIDENCE:g} % confidence and by more than "
    f"{OFFSET:.1g}, and k1 is outside −0.5 to 1.5 times k3, whose expectations are equal. (What a correction has kept "
    "has a k1 from 0 to k3.)",
    "Fill values: of the tokens that are more than a nat apart one number stands on one side for at least half, "
    f"{FEWEST} or more, where the other side varies.",
)


def suspicions(
    log_q_N: np.ndarray,
    log_p_N: np.ndarray,
    kl_N: np.ndarray,
    response_N: np.ndarray,
    position_N: np.ndarray,
    error: float | None = None,
    limit: float | None = None,
) -> list[str]:
    """Say what is implausible about log-probs of sampled tokens, a sentence or two each: number, cause, what to do.

    Args:
        log_q_N, log_p_N: by engine and trainer, nats, finite.
        kl_N: the KL at each position, or what estimates it, nats.
        response_N, position_N: which response, and where in it.
        error: KL of the engine from the trainer's forward pass with the engine's own weights; None if not known.
        limit: the largest error that the engine's other rounding explains, nats per token; None if not known.

    Raises:
        DvpError: both sides have the same numbers, so that nothing was measured.
    """
    log_ratio_N = log_p_N - log_q_N
    if not log_ratio_N.any():
        raise DvpError(
            f"log-probs of engine and trainer are identical at all {len(log_q_N):,} tokens: one was copied (verl: "
            "rollout_correction.bypass_mode), or both were rounded; expected those of the trainer's own forward pass"
        )
    found = [
        _filled(log_q_N, log_p_N, "engine", "trainer"),
        _filled(log_p_N, log_q_N, "trainer", "engine"),
        _scaled(log_q_N, log_p_N),
        _offset(log_ratio_N),
        _too_far(log_q_N, log_p_N, kl_N, response_N, position_N, error, limit),
    ]
    return [sentence for sentence in found if sentence]


def _reach(rest_N: np.ndarray, fitted: int) -> float:
    """Return half the width of a mean's interval, from residuals of `fitted` parameters; infinite for too few terms."""
    freedom = len(rest_N) - fitted
    if freedom < FREEDOM:
        return math.inf
    return float(stdtrit(freedom, (1 + CONFIDENCE) / 2) * math.sqrt((rest_N**2).mean() / freedom))


def _k3(log_ratio_N: np.ndarray) -> float:
    return float((np.expm1(log_ratio_N) - log_ratio_N).mean())


def _filled(one_N: np.ndarray, other_N: np.ndarray, name: str, other: str) -> str:
    far_N = np.abs(one_N - other_N) > 1
    values, counts = np.unique(one_N[far_N], return_counts=True)
    if not len(values) or 2 * (count := counts.max()) < far_N.sum():
        return ""
    value = values[counts.argmax()]
    beside_N = other_N[far_N & (one_N == value)]
    if len(np.unique(beside_N)) < FEWEST:
        return ""
    return (
        f"{value:g} is the {name}'s log-prob of {count:,} tokens of {len(one_N):,}, where the {other}'s are "
        f"{beside_N.mean():.2g} on average: a fill value, of tokens that one side masks, such as results of tools. "
        "Give their mask (verl: response_mask; TRL: completion_mask and tool_mask; prime-rl: loss_mask)."
    )


def _scaled(log_q_N: np.ndarray, log_p_N: np.ndarray) -> str:
    def steeper(y_N: np.ndarray, x_N: np.ndarray) -> tuple[float, float, float] | None:
        """Return the slope of y over x with its interval, or None unless it is clearly above 1."""
        y_N, x_N = y_N - y_N.mean(), x_N - x_N.mean()
        square = max((x_N**2).mean(), 1e-300)
        slope = float((x_N * y_N).mean() / square)
        rest_N = y_N - slope * x_N
        free_N = 1 - (1 + x_N**2 / square) / len(x_N)  # 1 − leverage: a far point draws the line to itself (HC3)
        reach = _reach(x_N * rest_N / free_N.clip(min=1e-9) / square, 2)
        return (slope, slope - reach, slope + reach) if slope - reach > 1 + max(SLOPE, rest_N.var() / 4) else None

    if found := steeper(log_q_N, log_p_N):
        slope, low, high = found
    elif found := steeper(log_p_N, log_q_N):
        slope, high, low = (1 / end for end in found)
    else:
        return ""
    return (
        f"The engine's log-probs grow by {slope:.3g} [{low:.3g}, {high:.3g}] for one of the trainer's: the two have "
        "another temperature, logit scale or unit. vLLM gives log-probs before temperature unless logprobs_mode is "
        "processed_logprobs (verl, TRL and prime-rl set it; a server of your own may not), and the trainer has to "
        "divide its logits by the sampler's temperature."
    )


def _offset(log_ratio_N: np.ndarray) -> str:
    rest_N = np.expm1(log_ratio_N)
    offset, reach, k1, k3 = rest_N.mean(), _reach(rest_N - rest_N.mean(), 1), -log_ratio_N.mean(), _k3(log_ratio_N)
    if abs(offset) <= max(reach, OFFSET) or abs(k1 - k3 / 2) <= k3:
        return ""
    mean = (
        f"The mean ratio p/q is {1 + offset:.4g} [{1 + offset - reach:.4g}, {1 + offset + reach:.4g}] and has to be 1"
    )
    if offset < 0:
        return (
            f"{mean}: the engine's log-probs are of a part of the vocabulary that has {100 * (1 + offset):.3g} % of "
            "the trainer's probability. Its sampler cuts the tail (top_p, top_k, min_p, also by the model's own "
            "generation_config.json, which vLLM follows unless --generation-config vllm), and the trainer does not. "
            "Sample without, or restrict the trainer alike."
        )
    return (
        f"{mean}: the tokens were not sampled from the engine's log-probs. These are from before temperature, top_p or "
        "penalties (vLLM: logprobs_mode raw_logprobs; expected processed_logprobs), or tokens were chosen by ratio."
    )


def _too_far(
    log_q_N: np.ndarray,
    log_p_N: np.ndarray,
    kl_N: np.ndarray,
    response_N: np.ndarray,
    position_N: np.ndarray,
    error: float | None,
    limit: float | None,
) -> str:
    kl, known = kl_N.mean(), error is not None
    if kl <= LARGEST_KL and (not known or error <= limit):
        return ""
    if known and error <= limit:
        return (
            f"The engine is too coarse for this model: KL {kl:.2g} nats per token, {LARGEST_KL:g} at most, of which "
            f"only {error:.2g} is not its weights' rounding. Take 8-bit weights, bfloat16 or float16."
        )
    same_N = response_N[1:] == response_N[:-1]
    shifted = [
        _k3(ratio_N[same_N]) for ratio_N in (log_p_N[1:] - log_q_N[:-1], log_p_N[:-1] - log_q_N[1:]) if same_N.any()
    ]
    off = (
        f"with its own weights the trainer is off it by {error:.2g} nats per token, and its other rounding explains "
        f"{limit:.2g}"
        if known
        else f"KL {kl:.2g} nats per token, and no precision that people run explains more than {LARGEST_KL:g}"
    )
    sentence = (
        f"This is an engine error: {off}. The engine computes another model than the trainer, or has other weights "
        "(another checkpoint, stale ones, without the adapter); a correction would only hide that."
    )
    if shifted and min(shifted) < SHIFTED * kl:
        return f"{sentence} With one column shifted by a position it is {min(shifted):.2g}: align them."
    ends_N = pd.Series(position_N).groupby(response_N).transform("max").to_numpy()
    late_N = position_N > ends_N / 2
    times = kl_N[late_N].mean() / max(kl_N[~late_N].mean(), 1e-300) if late_N.any() and not late_N.all() else 1.0
    if times > GROWS:
        return (
            f"{sentence} It grows with position ({digits()(times)} times as large in the second half of the "
            "responses): look at rotary scaling, positions, attention and the KV cache."
        )
    return f"{sentence} It does not grow with position: look at the weights that the engine has."
