"""What a curve of scores over sampled tokens comes to: its peak, its mean, and the tokens until it reaches a score.

Shape suffixes: N evaluations of a run, the first of them of the base model, at 0 tokens; S seeds; P problems;
R replicates, the first of which is the value.
"""

import math
from itertools import pairwise

import numpy as np
from scipy.optimize import isotonic_regression


def peak(count_RSP: np.ndarray, choose_SNP: np.ndarray, read_SNP: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Of each replicate the mean over seeds of a run's best score, (R,), and which evaluation that was, (R, S).

    Which evaluation is best is chosen by other scores than are read there: the largest of several noisy scores is too
    large. Each replicate chooses again, so that its spread holds that of the choice. The base model is no candidate.

    count_RSP : how often each problem of each seed counts; of a replicate they add up to S · P.
    choose_SNP, read_SNP : scores of the problems from two independent halves of the samples.
    """
    chosen_RSN = np.einsum("rsp,snp->rsn", count_RSP, choose_SNP[:, 1:], optimize=True)
    place_RS = 1 + chosen_RSN.argmax(axis=2)
    read_RSN = np.einsum("rsp,snp->rsn", count_RSP, read_SNP, optimize=True)
    best_RS = np.take_along_axis(read_RSN, place_RS[:, :, None], axis=2)[:, :, 0]
    return best_RS.sum(axis=1) / (count_RSP.shape[1] * count_RSP.shape[2]), place_RS


def mean_weights(tokens_N: np.ndarray, until: float) -> np.ndarray:
    """What each evaluation weighs in the mean score over the first `until` tokens, (N,); they add up to 1.

    The curve is straight between two evaluations: the area under it divided by `until` (trapezoids).
    """
    if not 0 < until <= tokens_N[-1]:
        raise ValueError(f"until: expected a number of tokens from 0 to {tokens_N[-1]}, found {until}")
    weight_N = np.zeros(len(tokens_N))
    for n, (begin, end) in enumerate(pairwise(tokens_N)):
        width = min(end, until) - begin
        if width <= 0:
            break
        # The mean over a part of the line is its value in the middle of the part.
        middle = width / 2 / (end - begin)
        weight_N[n] += width * (1 - middle)
        weight_N[n + 1] += width * middle
    return weight_N / until


def tokens_to(target: float, tokens_N: np.ndarray, score_N: np.ndarray) -> float:
    """Tokens until a curve reaches a score; infinite if it never does.

    The curve is the isotonic regression of the scores: of all that never fall, the one with the least squared distance
    to them. So no single lucky evaluation counts as reaching, however many there are, and a score that is lost again
    counts with what follows. It is straight between two evaluations.
    """
    rising_N = isotonic_regression(score_N).x
    if not rising_N[-1] >= target:
        return math.inf
    n = int(np.argmax(rising_N >= target))
    if n == 0:
        return float(tokens_N[0])
    share = (target - rising_N[n - 1]) / (rising_N[n] - rising_N[n - 1])
    return float(tokens_N[n - 1] + share * (tokens_N[n] - tokens_N[n - 1]))
