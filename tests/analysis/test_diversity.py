"""Different solutions of problems that have several, by hand."""

import numpy as np
import pandas as pd
import pytest
from made_up_results import Results, make_experiment, measured_of

from dvp.analysis.diversity import solutions
from dvp.analysis.statistics import lookup
from dvp.data.puzzles import Puzzle
from dvp.experiment.grid import GridPoint, Sampler

pytestmark = pytest.mark.slow

RHO = "0.01"
PUZZLES = {"kind": "generated", "generator": "graph_color", "count": 5000, "seed": 0, "steps": [5, 5]}
NAIVE = GridPoint(method="rloo", engine="coarse")
DVP = GridPoint(method="dvp", engine="coarse", rho=RHO)
ALSO = [{"engine": "training"}, {"engine": "training", "rho": "own"}, {"rho": "own"}]


@pytest.fixture(scope="module")
def asked():
    return make_experiment(
        seeds=[0, 1, 2],
        training__steps=2,
        evaluation__bootstrap_resamples=200,
        evaluation__samples_per_problem__held_out=4,
        evaluation__also=ALSO,
        sources__stories=PUZZLES,
    )


@pytest.fixture
def written(asked, tmp_path):
    return Results(asked, tmp_path)


def place_of(point: GridPoint, rho: str = "none", engine: str = "fp32") -> dict[str, str]:
    place = {"method": point.method, "engine": point.engine, "rho": point.rho or "none"}
    return place | {"evaluated_on": engine, "evaluated_rho": rho}


PATH = Puzzle("shortest_path", "up up", {"matrix": []}).reference()


def test_right_answers_are_counted_and_pairs_of_them_compared():
    rows = [
        # problem, right, stated: three right ones of which two are the same, but for a space
        *(("a", True, text) for text in ("up up", "up  up", "up left")),
        ("a", False, "left left"),
        ("b", True, "up"),  # no pair
        ("b", False, None),
        ("c", False, "down"),
    ]
    frame = pd.DataFrame(rows, columns=["problem", "correct", "stated_answer"])
    found = solutions(frame.assign(seed=0, reference=PATH)).set_index("problem")
    assert found["different"].to_dict() == {"a": 2, "b": 1, "c": 0}
    assert found["pairs"].to_dict() == {"a": 3, "b": 0, "c": 0}
    assert found["differing"].to_dict() == {"a": 2, "b": 0, "c": 0}


def answers(*rows: str) -> tuple[np.ndarray, np.ndarray]:
    """Twelve problems, each answered as in a row of digits in turn; 9 is wrong."""
    stated = np.array([list(rows[problem % len(rows)]) for problem in range(12)])
    return stated != "9", stated


def test_statistics_by_hand(asked, written):
    sampled = {
        (NAIVE, "fp32", None): answers(
            "1234", "1199", "1122"
        ),  # 4, 1 and 2 of 4; of 6, 1 and 6 pairs 6, 0 and 4 differ
        (DVP, "fp32", None): answers("1112", "3999", "1111"),  # 2, 1 and 1; of 6, 0 and 6 pairs 3, none and 0
        (NAIVE, "coarse", RHO): answers("1122"),  # 2; 4 of 6
        (DVP, "coarse", RHO): answers("1111"),  # 1; none
    }
    for (point, engine, rho), (correct, stated) in sampled.items():
        sampler = Sampler(engine=engine, rho=rho)
        for seed in asked.seeds:
            further = None if sampler == asked.sampler else sampler
            written.write_evaluation(point.run(seed), correct, further, stated)
    known = lookup(measured_of(asked, written.folder, "diversity").statistics)
    for (point, engine, rho), (different, share, tokens) in {
        (NAIVE, "fp32", None): (7 / 3, (1 + 0 + 4 / 6) / 3, 5),
        (DVP, "fp32", None): (4 / 3, (1 / 2 + 0) / 2, 4),
        (NAIVE, "coarse", RHO): (2.0, 4 / 6, 2),
        (DVP, "coarse", RHO): (1.0, 0.0, 1),
    }.items():
        place = place_of(point, rho or "none", engine)
        assert known("different_solutions_by_policy", place).value == pytest.approx(different)
        assert known("differing_pairs_by_policy", place).value == pytest.approx(share)
        assert known("tokens_used_by_policy", place).value == tokens + len(set("Answer: "))
        low, high = known("differing_pairs_by_policy", place).low, known("differing_pairs_by_policy", place).high
        # That no two samples differ is no interval of [0, 0].
        assert (np.isnan(low) and np.isnan(high)) if share == 0 else 0 < low <= share <= high < 1
        assert len(known("differing_pairs_by_policy", place).sources) == len(asked.seeds)
        assert "base/manifest.json" in known("tokens_used_by_policy", place).sources
    over = "_over_unpruned_by_policy"
    assert known(f"different_solutions{over}", place_of(DVP)).value == pytest.approx(-1)
    # Over the problems that have a pair with both: of the second of three kinds DVP has none.
    difference = known(f"differing_pairs{over}", place_of(DVP))
    assert difference.value == pytest.approx((-1 / 2 - 4 / 6) / 2)
    assert difference.low <= difference.value <= difference.high < 0
    assert known(f"differing_pairs{over}", place_of(DVP, RHO, "coarse")).value == pytest.approx(-4 / 6)


def test_a_better_model_that_is_as_diverse_has_as_many_pairs_that_differ(asked, written):
    """Problems with one solution are easier: a share of all pairs would fall with each that is learned."""
    several = np.arange(12) < 6
    rng = np.random.default_rng(0)
    for point, easy in ((NAIVE, 0.4), (DVP, 1.0)):
        for seed in asked.seeds:
            stated = np.where(several[:, None], rng.integers(2, size=(12, 4)), 0)
            correct = rng.random((12, 4)) < np.where(several, 1.0, easy)[:, None]
            correct[:, :2] = True  # a pair of each problem
            written.write_evaluation(point.run(seed), correct, None, np.where(correct, stated, 9).astype(str))
    known = lookup(measured_of(asked, written.folder, "diversity").statistics)
    difference = known("differing_pairs_over_unpruned_by_policy", place_of(DVP))
    assert difference.low < 0 < difference.high
    assert abs(difference.value) < 0.1


def test_a_model_without_a_pair_of_right_answers_has_no_share(asked, written):
    correct, stated = answers("1999")
    for seed in asked.seeds:
        written.write_evaluation(DVP.run(seed), correct, None, stated)
    known = lookup(measured_of(asked, written.folder, "diversity").statistics)
    for name in ("differing_pairs_by_policy", "differing_pairs_over_unpruned_by_policy"):
        assert np.isnan(known(name, place_of(DVP)).value)
