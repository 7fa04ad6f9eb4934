"""avg@k, pass@k and maj@k with bootstrap intervals.

Shapes: P problems, K samples of each, R resamples. `correct_PK` is boolean; `votes_PK` holds, for each
sample, which of its problem's distinct answers it states (from `votes`), −1 for none. The metrics average
over problems and take leading dimensions as well.
"""

import re
from collections.abc import Callable, Sequence

import numpy as np

LEVEL = 0.95
CHUNK = 4_000_000  # resampled responses held at once

_SPACING = re.compile(r"\s|\\[!,:; ]|\\?\$")
_INTEGER = re.compile(r"([-+]?)(\d+|\d{1,3}(?:,\d{3})+)(?:\.0*)?")


def summarise(
    correct_PK: np.ndarray, answers: Sequence[Sequence[str | None]], *, resamples: int, seed: int
) -> dict[str, dict[str, float]]:
    """Every metric as {value, low, high}: avg@K, pass@1, pass@2, pass@4, …, pass@K, maj@K.

    answers : the stated answers, P lists of K, None where a response states none.
    """
    K = correct_PK.shape[1]
    votes_PK = votes(answers)
    statistics: dict[str, Callable[..., np.ndarray]] = {f"avg@{K}": lambda correct, _: avg_at_k(correct)}
    for k in powers_of_two(K):
        statistics[f"pass@{k}"] = lambda correct, _, k=k: pass_at_k(correct, k)
    statistics[f"maj@{K}"] = maj_at_k
    summary = {}
    for name, statistic in statistics.items():
        low, high = bootstrap_interval(statistic, correct_PK, votes_PK, resamples=resamples, seed=seed)
        summary[name] = {"value": float(statistic(correct_PK, votes_PK)), "low": low, "high": high}
    return summary


def powers_of_two(K: int) -> list[int]:
    """1, 2, 4, … up to K, and K itself."""
    return sorted({1 << exponent for exponent in range(K.bit_length())} | {K})


def avg_at_k(correct_PK: np.ndarray) -> np.ndarray:
    """The fraction of correct samples."""
    return correct_PK.mean(axis=(-2, -1))


def pass_at_k(correct_PK: np.ndarray, k: int) -> np.ndarray:
    """The probability that at least one of k samples is correct, without bias, from K ≥ k samples.

    1 − C(K−c, k) / C(K, k) for c correct ones, as a product of ratios, which does not overflow
    (Chen et al. 2021, "Evaluating Large Language Models Trained on Code", equation 1 and figure 3).
    """
    K = correct_PK.shape[-1]
    if not 1 <= k <= K:
        raise ValueError(f"pass@k needs 1 ≤ k ≤ {K} samples, found k = {k}")
    wrong, drawn = np.arange(K, -1, -1)[:, None], np.arange(k)
    by_correct = 1 - np.prod(np.maximum(wrong - drawn, 0) / (K - drawn), axis=1)
    return by_correct[correct_PK.sum(axis=-1)].mean(axis=-1)


def maj_at_k(correct_PK: np.ndarray, votes_PK: np.ndarray) -> np.ndarray:
    """How often the most frequent stated answer is correct; among equally frequent ones, each is as likely.

    Samples that state no answer do not vote; without any vote a problem scores 0
    (Wang et al. 2022, "Self-Consistency Improves Chain of Thought Reasoning in Language Models").
    """
    K = votes_PK.shape[-1]
    rows = votes_PK.size // K
    # One bin for each problem and answer; column 0 takes the samples without one.
    bins = (np.arange(rows)[:, None] * (K + 1) + votes_PK.reshape(rows, K) + 1).ravel()
    count = np.bincount(bins, minlength=rows * (K + 1)).reshape(rows, K + 1)[:, 1:]
    right = np.bincount(bins, weights=correct_PK.ravel(), minlength=rows * (K + 1)).reshape(rows, K + 1)[:, 1:]
    leading = (count == count.max(axis=1, keepdims=True)) & (count > 0)
    score = (leading * right / np.maximum(count, 1)).sum(axis=1) / np.maximum(leading.sum(axis=1), 1)
    return score.reshape(votes_PK.shape[:-1]).mean(axis=-1)


def votes(answers: Sequence[Sequence[str | None]]) -> np.ndarray:
    r"""votes_PK of stated answers; two are the same if they agree but for spacing and `$`, or as integers.

    `1,234`, `1{,}234`, `\$1234` and `1234.0` vote together. `1/2` and `0.5` do not: comparing every pair as
    mathematics would cost minutes on responses that are mostly noise.
    """
    rows = []
    for row in answers:
        seen: dict[str, int] = {}
        rows.append([seen.setdefault(_key(answer), len(seen)) if answer else -1 for answer in row])
    return np.array(rows, dtype=np.int64)


def bootstrap_interval(
    statistic: Callable[..., np.ndarray],
    *arrays_PK: np.ndarray,
    resamples: int,
    seed: int,
    level: float = LEVEL,
) -> tuple[float, float]:
    """Two-level bootstrap interval of statistic(*arrays_PK), within [0, 1].

    Problems are drawn with replacement, then samples within each drawn problem; percentiles of the resampled
    statistic's deviation from its mean are laid about the estimate. (Plain percentiles would miss it: samples
    drawn twice make pass@k smaller, and their mean is what the statistic estimates among the resamples.)
    It is a little wide, since the spread within a problem enters at both levels, and has no width when all
    samples are correct, or none.
    """
    P, K = arrays_PK[0].shape
    rng = np.random.default_rng(seed)
    chunk = max(1, CHUNK // (P * K))
    parts = []
    for start in range(0, resamples, chunk):
        R = min(chunk, resamples - start)
        problems_RP1 = rng.integers(P, size=(R, P, 1))
        index_RPK = problems_RP1 * K + rng.integers(K, size=(R, P, K))
        parts.append(statistic(*(array_PK.ravel()[index_RPK] for array_PK in arrays_PK)))
    resampled_R = np.concatenate(parts)
    value = float(statistic(*arrays_PK))
    tails = [(1 - level) / 2, (1 + level) / 2]
    low, high = value + np.quantile(resampled_R - resampled_R.mean(), tails)
    return max(0.0, min(float(low), value)), min(1.0, max(float(high), value))


def _key(answer: str) -> str:
    """What equal answers share."""
    text = _SPACING.sub("", answer).replace("{,}", ",").replace("−", "-")
    integer = _INTEGER.fullmatch(text)
    if not integer:
        return text
    digits = integer[2].replace(",", "").lstrip("0")
    return ("-" if integer[1] == "-" else "") + digits if digits else "0"
