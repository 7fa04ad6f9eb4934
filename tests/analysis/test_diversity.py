"""Different solutions of problems that have several, by hand."""

import numpy as np
import pandas as pd
import pytest
from made_up_results import CLAIMS, Results, make_experiment

from dvp.analysis import figures
from dvp.analysis.diversity import solutions
from dvp.analysis.load import load_tokenizer
from dvp.analysis.parts import parts
from dvp.analysis.report import make
from dvp.analysis.statistics import lookup
from dvp.errors import DvpError
from dvp.experiment.grid import GridPoint, Sampler

RHO = "0.01"
PUZZLES = {"kind": "generated", "generator": "shortest_path", "count": 50, "seed": 0, "steps": [5, 5]}
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


def test_the_part_is_there_where_problems_have_several_solutions(asked):
    assert parts(asked) == ["training", "matrix", "diversity"]
    assert "diversity" not in parts(make_experiment(evaluation__also=ALSO))


def test_right_answers_are_counted_and_pairs_of_them_compared():
    rows = [
        # problem, right, stated: three right ones of which two are the same, but for a space
        *(("a", True, text) for text in ("up up", "up  up", "up left")),
        ("a", False, "left left"),
        ("b", True, "up"),  # no pair
        ("b", False, None),
        ("c", False, "down"),
    ]
    frame = pd.DataFrame(rows, columns=["problem", "correct", "stated_answer"]).assign(point="x", seed=0)
    found = solutions(frame).set_index("problem")
    assert found["different"].to_dict() == {"a": 2, "b": 1, "c": 0}
    assert found["pairs"].to_dict() == {"a": 3, "b": 0, "c": 0}
    assert found["differing"].to_dict() == {"a": 2, "b": 0, "c": 0}


def answers(*rows: str) -> tuple[np.ndarray, np.ndarray]:
    """Twelve problems, each answered as in a row of digits in turn; 9 is wrong."""
    stated = np.array([list(rows[problem % len(rows)]) for problem in range(12)])
    return stated != "9", stated


def test_statistics_by_hand(asked, written):
    sampled = {
        (NAIVE, "fp32", None): answers("1234", "1199"),  # 4 and 1 of 4; 6 of 6 pairs and 0 of 1 differ
        (DVP, "fp32", None): answers("1112", "3399"),  # 2 and 1; 3 of 6 and 0 of 1
        (NAIVE, "coarse", RHO): answers("1122"),  # 2; 4 of 6
        (DVP, "coarse", RHO): answers("1111"),  # 1; none
    }
    for (point, engine, rho), (correct, stated) in sampled.items():
        sampler = Sampler(engine=engine, rho=rho)
        for seed in asked.seeds:
            further = None if sampler == asked.sampler else sampler
            written.write_evaluation(point.run(seed), correct, further, stated)
    part = make(asked, written.folder, "diversity", CLAIMS)
    known = lookup(part.statistics)
    for (point, engine, rho), (different, share, tokens) in {
        (NAIVE, "fp32", None): (2.5, 6 / 7, 5),
        (DVP, "fp32", None): (1.5, 3 / 7, 4),
        (NAIVE, "coarse", RHO): (2.0, 4 / 6, 2),
        (DVP, "coarse", RHO): (1.0, 0.0, 1),
    }.items():
        place = place_of(point, rho or "none", engine)
        assert known("different_solutions", place).value == pytest.approx(different)
        assert known("differing_pairs", place).value == pytest.approx(share)
        assert known("tokens_used", place).value == tokens + len(set("Answer: "))
        assert len(known("differing_pairs", place).sources) == len(asked.seeds)
    over = "_over_unpruned_by_policy"
    assert known(f"different_solutions{over}", place_of(DVP)).value == pytest.approx(-1)
    assert known(f"differing_pairs{over}", place_of(DVP)).value == pytest.approx(-3 / 7)
    assert known(f"differing_pairs{over}", place_of(DVP, RHO, "coarse")).value == pytest.approx(-4 / 6)
    # All problems of a kind are alike, and so are all seeds: what is drawn is how many of each kind.
    difference = known(f"differing_pairs{over}", place_of(DVP))
    assert difference.low <= difference.value <= difference.high < 0
    row = part.tables["diversity_table"].rows[DVP.path]
    assert (row["solutions"].value, row["served_solutions"].value) == (1.5, 1.0)
    assert row["pruned_mass"].value == pytest.approx(0.001)
    assert "pruned_mass" not in part.tables["diversity_table"].rows["base"]


def test_a_model_without_a_pair_of_right_answers_has_no_share(asked, written):
    correct, stated = answers("1999")
    for seed in asked.seeds:
        written.write_evaluation(DVP.run(seed), correct, None, stated)
    part = make(asked, written.folder, "diversity", CLAIMS)
    assert np.isnan(lookup(part.statistics)("differing_pairs", place_of(DVP)).value)
    shown = part.tables["diversity_table"].formatted()
    cells = dict(
        zip(shown.headings, shown.rows[list(part.tables["diversity_table"].rows).index(DVP.path)], strict=True)
    )
    assert cells["pairs that differ (%) [95 %]"] == "–"


def test_table_and_figure(asked, written, tmp_path):
    part = make(asked, written.folder, "diversity", CLAIMS)
    shown = part.tables["diversity_table"].formatted()
    assert len(shown.rows) == 1 + len(asked.points)
    assert "base/manifest.json" in part.files
    for path in figures.save(part.figures["solutions"], tmp_path, "solutions"):
        assert path.stat().st_size > 10_000


def test_a_tokenizer_that_is_none_is_refused(asked, written):
    path = written.folder / "base/tokenizer.json"
    path.write_text("{}")
    with pytest.raises(DvpError, match=rf"^{path}: "):
        load_tokenizer(asked, written.folder)
