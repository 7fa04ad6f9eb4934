"""Hierarchical bootstrap of a mean score over problems, samples, and (from three on) training seeds.

A replicate draws problems with replacement, one draw for all arms, so that the difference of two arms is a
paired comparison; then, anew for each model and each problem drawn, K of its K samples. The samples' noise
enters twice, once through the spread of the problems' means, which makes the intervals slightly too wide
rather than too narrow. Two seeds resampled say nothing, so seeds are drawn from three on, again jointly: the
same seed gives all arms the same prompts.

Shape suffixes: P problems, K samples of each, R replicates, S seeds.
"""

from collections.abc import Mapping, Sequence

import numpy as np

FEWEST_SEEDS = 3


def resamples_seeds(seeds: Sequence[int]) -> bool:
    return len(seeds) >= FEWEST_SEEDS


def over(seeds: Sequence[int]) -> str:
    """What an interval is over, in words."""
    if not resamples_seeds(seeds):
        return "problems and samples, not over training seeds"
    share = (len(seeds) - 1) / len(seeds)
    return f"problems, samples and {len(seeds)} training seeds (of so few it sees {share:.0%} of their variance)"


def replicates(correct: Mapping[str, Sequence[np.ndarray]], resamples: int, seed: int) -> dict[str, np.ndarray]:
    """Bootstrap replicates of every arm's mean score.

    Args:
        correct: for each arm, one bool array (P, K) a training seed, a single one for the base model.
            P and the order of the problems are the same throughout.
        resamples: R.
        seed: of the resampling. An arm's replicates depend on it and on the arm's own name and data only.

    Returns:
        For each arm (R,) mean scores; entry r of every arm is of the same problems (and seeds).
    """
    shared = np.random.default_rng(seed)
    problems = len(next(iter(correct.values()))[0])
    problem_RP = shared.integers(problems, size=(resamples, problems))
    drawn_seeds: dict[int, np.ndarray] = {}
    result = {}
    for arm, arrays in correct.items():
        own = np.random.default_rng([seed, *arm.encode()])
        score_SR = np.stack([_scores(correct_PK, problem_RP, own) for correct_PK in arrays])
        count = len(arrays)
        if count >= FEWEST_SEEDS:
            if count not in drawn_seeds:
                drawn_seeds[count] = np.random.default_rng([seed, count]).integers(count, size=(count, resamples))
            score_SR = np.take_along_axis(score_SR, drawn_seeds[count], axis=0)
        result[arm] = score_SR.mean(axis=0)
    return result


def interval(values_R: np.ndarray) -> tuple[float, float]:
    """The central 95 % of the replicates; NaN where one of them is not finite."""
    if not np.isfinite(values_R).all():
        return float("nan"), float("nan")
    low, high = np.quantile(values_R, [0.025, 0.975])
    return float(low), float(high)


def _scores(correct_PK: np.ndarray, problem_RP: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    # K draws with replacement from K samples, c of them correct, are Binomial(K, c/K).
    samples = correct_PK.shape[1]
    rate_P = correct_PK.mean(axis=1)
    return rng.binomial(samples, rate_P[problem_RP]).mean(axis=1) / samples
