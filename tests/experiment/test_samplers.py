"""With what else models are sampled when they are scored: what may be written, what it means, what depends on it."""

from pathlib import Path

import pytest
from test_axes import ROOT, experiment, refused

from dvp.errors import DvpError
from dvp.experiment.loading import load_experiment, parse_experiment

GRID = (
    {"method": "rloo", "engine": ["fp32", "coarse"]},
    {"method": "dvp", "engine": "coarse", "rho": ["0.01", "exp(-13)"]},
)
ALSO = [{"engine": "training"}, {"engine": "training", "rho": "own"}, {"rho": "own"}]
CONTROL, NAIVE, DVP, DVP_SMALL = range(4)  # the grid's points, in its order


def paths(made, point) -> list[str]:
    return [sampler.path for sampler in made.samplers(point)]


def test_the_matrix_of_the_evidence_trains_and_scores_nothing_again():
    grid, matrix = (load_experiment(name, ROOT / "config") for name in ("training_grid", "evaluation_matrix"))
    assert matrix.runs == grid.runs
    for run in [None, *grid.runs]:
        for stage in ("prepare", "base", "train", "convert", "evaluate"):
            assert matrix.config_hash(stage, run, "held_out") == grid.config_hash(stage, run, "held_out")
    assert matrix.config_hash("report") != grid.config_hash("report")
    assert grid.further_evaluations == []
    # The base model; nine points on coarse with three seeds, six of them at their own ρ, three at every ρ.
    assert len(matrix.further_evaluations) == 1 + 2 * 3 + 3 * (9 + 6 * 2 + 3 * 3 * 2)


def test_each_model_is_scored_once_with_each_engine_and_vocabulary_that_it_has():
    made = experiment(*GRID, evaluation__also=ALSO)
    assert paths(made, made.points[CONTROL]) == []  # trained on the evaluation's engine, where the grid has no ρ
    assert paths(made, made.points[DVP]) == [
        "by~coarse/min_p~none",
        "by~coarse/min_p~0.01",
        "by~fp32/min_p~0.01",
    ]
    at_every_rho = [
        "by~coarse/min_p~none",
        "by~coarse/min_p~0.01",
        "by~coarse/min_p~exp-13",
        "by~fp32/min_p~0.01",
        "by~fp32/min_p~exp-13",
    ]
    assert paths(made, made.points[NAIVE]) == at_every_rho
    # With fp32 the grid trains at no ρ; that the base model is sampled there at every ρ is the last entry's doing.
    assert paths(made, None) == at_every_rho
    assert paths(experiment(*GRID, evaluation__also=ALSO[:2]), None) == at_every_rho[:3]
    assert paths(experiment(*GRID, evaluation__also=[{"engine": "bf16"}]), None) == ["by~bf16/min_p~none"]
    assert parse_experiment(made.model_dump(mode="json"), Path("again.yaml")) == made


def test_an_evaluation_is_known_by_its_path():
    made = experiment(*GRID, evaluation__also=ALSO, evaluation__at=[1])
    run = made.points[DVP_SMALL].run(0)
    assert made.evaluated("base") == (None, made.sampler)
    assert made.evaluated(run.path) == (run, made.sampler)
    assert made.evaluated(f"{run.path}/step~1") == (run.after(1), made.sampler)
    for of, sampler in made.further_evaluations:
        assert made.evaluated(f"{of.path if of else 'base'}/{sampler.path}") == (of, sampler)
    for other in (
        "base/by~bf16/min_p~none",
        f"{run.path}/by~coarse/min_p~0.01",
        f"{run.path}/step~1/by~coarse/min_p~none",
    ):
        with pytest.raises(DvpError, match=rf"^'{other}': evaluation.also of experiment 'smoke' does not ask for it$"):
            made.evaluated(other)


def test_each_sampler_is_another_evaluation_of_the_same_model():
    made = experiment(*GRID, evaluation__also=ALSO)
    run = made.points[NAIVE].run(0)
    hashes = [
        made.config_hash("evaluate", run, "held_out", sampler=sampler)
        for sampler in [made.sampler, *made.samplers(run.point)]
    ]
    assert len(set(hashes)) == len(hashes) == 6
    assert hashes[0] == made.config_hash("evaluate", run, "held_out")
    assert made.config_hash("evaluate", run, "held_out") == experiment(*GRID).config_hash("evaluate", run, "held_out")


@pytest.mark.parametrize(
    ("also", "message"),
    [
        ([{}], "evaluation.also.0: expected engine, rho or both; without any it is what is evaluated in any case"),
        ([ALSO[0], ALSO[0]], "evaluation.also: {'engine': 'training'} is listed twice"),
        (
            [ALSO[0], {"engine": "fp32"}],
            "evaluation.also[1]: expected another engine than fp32, or rho; this is what is evaluated in any case",
        ),
        ([{"engine": "fp31"}], "evaluation.also[0].engine: 'fp31' is not defined; did you mean fp32?"),
        ([{"rho": 0.01}], "evaluation.also.0.rho: "),
    ],
)
def test_mistakes_are_one_line(also, message):
    assert refused(*GRID, evaluation__also=also).startswith(message)


def test_an_entry_that_evaluates_nothing_is_refused():
    plain = {"method": "rloo", "engine": "fp32"}
    assert refused(plain, evaluation__also=[{"rho": "own"}]) == (
        "evaluation.also[0].rho: the grid has no ρ at which models could be sampled"
    )
    assert refused(plain, evaluation__also=[{"engine": "training"}]) == (
        "evaluation.also[0]: expected another engine than fp32, or rho; this is what is evaluated in any case"
    )


def test_a_method_with_another_rule_than_a_fixed_rho_has_no_rho_to_be_sampled_at():
    grid = [*GRID, {"method": "dvp_margin", "engine": "coarse", "rho": "0.01"}]
    assert refused(*grid, evaluation__also=ALSO) == (
        "evaluation.also[1].rho: method 'dvp_margin' has the rule 'margin'; expected methods with min-p at a "
        "fixed ρ, or none"
    )
    experiment(*grid, evaluation__also=ALSO[:1])
