import math

import numpy as np
import pytest

from dvp.evaluation import bootstrap


def test_the_interval_of_a_mean_covers_the_noise_of_problems_and_samples_once():
    rng = np.random.default_rng(0)
    rate_P = (rng.random((400, 8)) < rng.uniform(0.2, 0.8, (400, 1))).mean(axis=1)
    draws_RP = bootstrap.draws(1, 400, 4000, 0, shared=True)
    value, low, high = bootstrap.estimate(draws_RP @ rate_P / 400)
    assert value == pytest.approx(rate_P.mean())
    assert high - low == pytest.approx(2 * 1.96 * rate_P.std() / math.sqrt(400), rel=0.06)
    assert low < value < high


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize(("seeds", "resampled"), [(1, False), (2, False), (3, True)])
def test_replicates_draw_seeds_from_three_on_and_as_many_problems_as_there_are(seeds, resampled, shared):
    problems = 4
    draws = bootstrap.draws(seeds, problems, 500, 0, shared=shared)
    assert (draws[0] == 1).all()
    assert (draws.sum(axis=1) == seeds * problems).all()
    per_seed = draws[1:].reshape(500, seeds, problems).sum(axis=2)
    assert (per_seed != problems).any() == resampled == bootstrap.resamples_seeds(range(seeds))
    assert draws[1:].mean(axis=0) == pytest.approx(1.0, abs=0.3)
    assert (draws == bootstrap.draws(seeds, problems, 500, 0, shared=shared)).all()
    assert (draws != bootstrap.draws(seeds, problems, 500, 1, shared=shared)).any()


def test_problems_that_all_seeds_share_are_drawn_for_all_of_them_together():
    draws_RSP = bootstrap.draws(3, 5, 200, 0, shared=True).reshape(201, 3, 5)
    drawn_RS = draws_RSP.sum(axis=2) / 5
    assert draws_RSP == pytest.approx(drawn_RS[:, :, None] * bootstrap.draws(1, 5, 200, 0, shared=True)[:, None, :])


def test_a_single_seed_is_drawn_alike_whether_its_problems_are_shared_or_not():
    assert (bootstrap.draws(1, 7, 50, 3, shared=True) == bootstrap.draws(1, 7, 50, 3, shared=False)).all()


def test_undefined_interval():
    value, *ends = bootstrap.estimate(np.array([1.0, 1.0, np.inf]))
    assert value == 1
    assert all(map(math.isnan, ends))
    assert all(map(math.isnan, bootstrap.estimate(np.array([1.0]))[1:]))
