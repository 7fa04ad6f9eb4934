import pytest
from made_up_results import Results, make_experiment

from dvp.experiment.config import Experiment


@pytest.fixture(scope="session")
def experiment() -> Experiment:
    return make_experiment(training__steps=12, evaluation__bootstrap_resamples=400)


@pytest.fixture
def results(experiment, tmp_path) -> Results:
    return Results(experiment, tmp_path / "results")
