"""avg@k, pass@k and maj@k with bootstrap intervals.

Shapes: P problems, K samples of each. `correct_PK` is boolean; `votes_PK` holds for each sample the index of the
answer that it states among its problem's distinct answers (from `votes`), −1 for none. A metric is the mean over
problems of the values computed here.
"""

import re
from collections.abc import Sequence

import numpy as np

from dvp.answers.comparison import integer
from dvp.evaluation import bootstrap

_SPACING = re.compile(r"\s|\\[!,:; ]|\\?\$")


def summarise(
    correct_PK: np.ndarray, answers: Sequence[Sequence[str | None]] | None, *, resamples: int, seed: int
) -> dict[str, dict[str, float]]:
    """Compute avg@K, pass@1, pass@2, pass@4, …, pass@K and maj@K, each as {value, low, high} with its 95 % interval.

    Args:
        correct_PK: whether each sample is correct; problems in the order of their ids, so that all models draw the
            same problems in the bootstrap.
        answers: the stated answers, P lists of K, None where a response states none; None: maj@K is left out.
        resamples: replicates of the bootstrap over problems.
        seed: random seed of the resampling.
    """
    P, K = correct_PK.shape
    value_P = {f"avg@{K}": correct_PK.mean(axis=1)}
    value_P |= {f"pass@{k}": pass_at_k(correct_PK, k) for k in powers_of_two(K)}
    if answers is not None:
        value_P[f"maj@{K}"] = maj_at_k(correct_PK, votes(answers))
    draws = bootstrap.draws(1, P, resamples, seed, shared=True)
    return {
        name: dict(zip(("value", "low", "high"), draws.estimate(draws.count_RU @ values / P), strict=True))
        for name, values in value_P.items()
    }


def powers_of_two(K: int) -> list[int]:
    """Return 1, 2, 4, … up to K, and K itself, in ascending order."""
    return sorted({1 << exponent for exponent in range(K.bit_length())} | {K})


def pass_at_k(correct_PK: np.ndarray, k: int) -> np.ndarray:
    """Estimate for each problem the probability that at least one of k samples is correct, (P,).

    The unbiased estimator 1 − C(K−c, k) / C(K, k) from K ≥ k samples of which c are correct, computed as a product of
    ratios, which does not overflow (Chen et al. 2021, "Evaluating Large Language Models Trained on Code", equation 1
    and figure 3). Raises ValueError unless 1 ≤ k ≤ K.
    """
    K = correct_PK.shape[1]
    if not 1 <= k <= K:
        raise ValueError(f"pass@k needs 1 ≤ k ≤ {K} samples, found k = {k}")
    wrong, drawn = np.arange(K, -1, -1)[:, None], np.arange(k)
    by_correct = 1 - np.prod(np.maximum(wrong - drawn, 0) / (K - drawn), axis=1)
    return by_correct[correct_PK.sum(axis=1)]


def maj_at_k(correct_PK: np.ndarray, votes_PK: np.ndarray) -> np.ndarray:
    """Return for each problem the share of correct samples among those with its most frequent answer, (P,).

    Ties are averaged. Samples that state no answer do not vote; a problem without any vote scores 0
    (Wang et al. 2022, "Self-Consistency Improves Chain of Thought Reasoning in Language Models").
    """
    P, K = votes_PK.shape
    # One bin per problem and answer; column 0 takes the samples without an answer.
    bins = (np.arange(P)[:, None] * (K + 1) + votes_PK + 1).ravel()
    count = np.bincount(bins, minlength=P * (K + 1)).reshape(P, K + 1)[:, 1:]
    right = np.bincount(bins, weights=correct_PK.ravel(), minlength=P * (K + 1)).reshape(P, K + 1)[:, 1:]
    leading = (count == count.max(axis=1, keepdims=True)) & (count > 0)
    return (leading * right / np.maximum(count, 1)).sum(axis=1) / np.maximum(leading.sum(axis=1), 1)


def votes(answers: Sequence[Sequence[str | None]]) -> np.ndarray:
    r"""Number the distinct stated answers of each problem: votes_PK, −1 where a response states none.

    Two answers are the same if they agree apart from spacing and `$`, or as integers: `1,234`, `1{,}234`, `\$1234` and
    `1234.0` vote together. `1/2` and `0.5` do not: comparing every pair as mathematics would take minutes on responses
    that are mostly noise.
    """
    rows = []
    for row in answers:
        seen: dict[str, int] = {}
        rows.append([seen.setdefault(_key(answer), len(seen)) if answer else -1 for answer in row])
    return np.array(rows, dtype=np.int64)


def _key(answer: str) -> str:
    """Return a canonical form of an answer, under which equal answers vote together."""
    text = _SPACING.sub("", answer).replace("{,}", ",").replace("−", "-")
    number = integer(text)
    return text if number is None else str(number)
