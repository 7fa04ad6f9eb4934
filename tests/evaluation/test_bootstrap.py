import math
from functools import cache

import numpy as np
import pytest
from scipy import stats

from dvp.evaluation import bootstrap

PROBLEMS, SAMPLES, EXPERIMENTS = 120, 8, 2000  # of tiny's size, with fewer problems than its 200
# Standard deviations of the probit of a sample's probability to be right: over seeds; over problems, the same for all
# seeds and both methods; over problems, of one method; over a method's problems, from seed to seed.
REGIMES = {
    "seeds dominate": (0.5, 0.3, 0.0, 0.0),
    "equal": (0.1, 0.3, 0.6, 0.3),
    "problems dominate": (0.01, 1.0, 0.5, 0.0),
    "samples dominate": (0.0, 0.2, 0.0, 0.0),
}


@cache
def simulated(seeds, regime, shared):
    """Scores of two methods in EXPERIMENTS experiments, (seeds · problems, EXPERIMENTS) each, and the true scores."""
    rng = np.random.default_rng([seeds, list(REGIMES).index(regime), shared])
    of_seed, of_problem, of_method, of_both = REGIMES[regime]
    shape = (seeds, PROBLEMS, EXPERIMENTS)
    problem = of_problem * rng.standard_normal(shape if not shared else (1, *shape[1:]))
    scores, truths = [], []
    for mean in (0.3, 0.7):
        probit = mean + problem + of_seed * rng.standard_normal((seeds, 1, EXPERIMENTS))
        probit = probit + of_method * rng.standard_normal(problem.shape) + of_both * rng.standard_normal(shape)
        scores.append(rng.binomial(SAMPLES, stats.norm.cdf(probit)).reshape(-1, EXPERIMENTS) / SAMPLES)
        # E Φ(m + s ξ) = Φ(m / √(1 + s²)) for a standard normal ξ.
        truths.append(stats.norm.cdf(mean / math.sqrt(1 + sum(size**2 for size in REGIMES[regime]))))
    return scores, truths


@pytest.mark.slow
@pytest.mark.parametrize("statistic", ["score", "difference", "ratio"])
@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("seeds", [3, 5])
@pytest.mark.parametrize("shared", [True, False])
def test_an_interval_covers_the_truth_as_often_as_it_says(seeds, regime, statistic, shared):
    (first, second), (truth, other) = simulated(seeds, regime, shared)
    draws = bootstrap.draws(seeds, PROBLEMS, 1000, 0, shared=shared)
    first_RN, second_RN = (draws.count_RU @ scores / len(scores) for scores in (first, second))
    value_RN, true, scale = {
        "score": (first_RN, truth, "share"),
        "difference": (second_RN - first_RN, other - truth, "plain"),
        "ratio": (second_RN / first_RN, other / truth, "ratio"),
    }[statistic]
    ends = [draws.estimate(value_R, scale)[1:] for value_R in value_RN.T]
    covered = np.mean([low <= true <= high for low, high in ends])
    assert 0.93 <= covered <= 0.97


@pytest.mark.slow
def test_an_effect_of_the_smallest_size_is_seen_in_four_of_five_experiments():
    (first, second), (truth, other) = simulated(5, "equal", True)
    draws = bootstrap.draws(5, PROBLEMS, 1000, 0, shared=True)
    value_RN = draws.count_RU @ (second - first) / len(first)
    value_RN -= other - truth
    # As a planner would, from an error that is known: that of a typical experiment.
    effect = np.median([draws.smallest_effect(value_R) for value_R in value_RN.T])
    seen = np.mean([draws.estimate(value_R + effect)[1] > 0 for value_R in value_RN.T])
    assert 0.7 < seen < 0.9


def test_the_interval_of_one_model_covers_the_noise_of_problems_and_samples_once():
    rng = np.random.default_rng(0)
    rate_P = (rng.random((400, 8)) < rng.uniform(0.2, 0.8, (400, 1))).mean(axis=1)
    draws = bootstrap.draws(1, 400, 4000, 0, shared=True)
    value, low, high = draws.estimate(draws.count_RU @ rate_P / 400)
    assert value == pytest.approx(rate_P.mean())
    assert high - low == pytest.approx(2 * 1.96 * rate_P.std() / math.sqrt(400), rel=0.06)
    assert low < value < high


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("seeds", [1, 2, 3])
def test_replicates_leave_out_seeds_from_three_on(seeds, shared):
    """And count as many units as there are; problems that all seeds share are drawn for all of them together."""
    problems = 4
    count_RU = bootstrap.draws(seeds, problems, 500, 0, shared=shared).count_RU
    assert (count_RU[0] == 1).all()
    assert count_RU.sum(axis=1) == pytest.approx(seeds * problems)
    count_RSP = count_RU.reshape(-1, seeds, problems)
    left_out = seeds if seeds >= 3 else 0
    per_seed = count_RSP.sum(axis=2)
    assert (per_seed == 0).sum(axis=1).tolist() == [0] + [1] * left_out + [0] * (len(count_RU) - 1 - left_out)
    assert len(count_RU) == 1 + left_out + {(3, True): 1000, (3, False): 0}.get((seeds, shared), 500)
    assert (count_RU == bootstrap.draws(seeds, problems, 500, 0, shared=shared).count_RU).all()
    if seeds == 1 or shared:  # a single seed is drawn alike whether its problems are shared or not
        alone_RP = bootstrap.draws(1, problems, 500, 0, shared=True).count_RU[1:]
        assert (count_RSP[1 + left_out : 501 + left_out] == alone_RP[:, None]).all()


def test_seeds_with_problems_of_their_own_have_the_t_interval_of_their_means():
    score_SP = np.random.default_rng(0).random((3, 10))
    draws = bootstrap.draws(3, 10, 100, 0, shared=False)
    numbers = draws.estimate(draws.count_RU @ score_SP.ravel() / 30)
    mean_S = score_SP.mean(axis=1)
    reach = stats.t.ppf(0.975, 2) * stats.sem(mean_S)
    assert numbers == pytest.approx((mean_S.mean(), mean_S.mean() - reach, mean_S.mean() + reach))


def test_the_variance_is_that_of_seeds_and_of_what_problems_have_in_common():
    """Against the analysis of variance in two ways, its components written out."""
    rng = np.random.default_rng(1)
    S, P = 3, 40
    score_SP = rng.normal(size=(S, 1)) + rng.normal(size=P) + rng.normal(size=(S, P))
    draws = bootstrap.draws(S, P, 40000, 0, shared=True)
    error, freedom = draws.error(draws.count_RU @ score_SP.ravel() / score_SP.size)
    seed_S, problem_P = score_SP.mean(axis=1), score_SP.mean(axis=0)
    rest_SP = score_SP - seed_S[:, None] - problem_P + score_SP.mean()
    interaction = (rest_SP**2).sum() / ((S - 1) * (P - 1))
    common = (problem_P.var(ddof=1) - interaction / S) / P
    between = seed_S.var(ddof=1) / S
    assert error**2 == pytest.approx(between + common, rel=0.05)
    share = between / (between + common)
    assert freedom == pytest.approx(1 / (share / (S - 1) + (1 - share) / (P - 1)), rel=0.05)


@pytest.mark.parametrize("seeds", [1, 3])
@pytest.mark.parametrize("value", [0.0, 1.0])
def test_nothing_or_all_right_has_an_exact_bound(value, seeds):
    draws = bootstrap.draws(seeds, 120, 100, 0, shared=True)
    score_R = draws.count_RU @ np.full(seeds * 120, value) / (seeds * 120)
    bound = 1 - 0.025 ** (1 / 120)
    expected = (0, 0, bound) if value == 0 else (1, 1 - bound, 1)
    assert draws.estimate(score_R, "share") == pytest.approx(expected)
    assert draws.estimate(score_R)[1:] == pytest.approx((value, value))


@pytest.mark.parametrize(("scale", "limits"), [("share", (0, 1)), ("ratio", (0, math.inf))])
def test_an_interval_stays_where_its_number_can_be(scale, limits):
    draws = bootstrap.draws(3, 2, 100, 0, shared=False)
    for value_R in ([0.01, 0.0, 0.015, 0.015], [0.99, 1.0, 0.985, 0.985]):
        value, low, high = draws.estimate(np.array(value_R), scale)
        assert limits[0] < low < value < high < limits[1]


def test_an_undefined_interval_is_nan():
    """Of a replicate that is not finite, of none, and beyond what a machine holds."""
    draws = bootstrap.draws(1, 2, 100, 0, shared=True)
    beyond = bootstrap.draws(3, 1, 100, 0, shared=False)
    for of, value_R, scale in (
        (draws, [1.0, 1.0, np.inf], "plain"),
        (draws, [1.0], "plain"),
        (beyond, [1e-3, 0.3, 0.3, 0.004], "ratio"),
    ):
        value, *ends = of.estimate(np.array(value_R), scale)
        assert value == value_R[0]
        assert all(map(math.isnan, ends))
    assert math.isnan(draws.smallest_effect(np.array([1.0])))
