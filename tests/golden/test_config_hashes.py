"""The config hashes of every experiment, which decide what is made again: they change only where that is meant.

After such a change, `DVP_GOLDEN=make pytest tests/golden/test_config_hashes.py` writes them anew.
"""

import json
import os
from pathlib import Path

import pytest

from dvp.experiment.config import Experiment
from dvp.experiment.loading import experiment_files, load_experiment
from dvp.files import sha256_json
from dvp.strict import Strict

ROOT = Path(__file__).parents[2]
GOLDEN = Path(__file__).parent / "config_hashes.json"
EXPERIMENTS = sorted(experiment_files(ROOT / "config"))


def hashes(experiment: Experiment) -> dict[str, str]:
    """Of each stage; one for all of its jobs where there is a job a run or a measurement."""
    if experiment.bases:
        return {"report": experiment.config_hash("report")}
    tasks, runs = experiment.data.tasks, experiment.runs
    jobs = {
        "train": [experiment.config_hash("train", run.path) for run in runs],
        "evaluate": [
            experiment.config_hash("evaluate", f"{run}/{task}")
            for run in ("base", *(run.path for run in runs))
            for task in tasks
        ],
        **{
            stage: [experiment.config_hash(stage, each.path) for each in experiment.measurements(stage)]
            for stage in ("mismatch", "bias")
        },
    }
    of_one = {stage: experiment.config_hash(stage) for stage in ("prepare", "base", "report")}
    return of_one | {stage: sha256_json(every)[:12] for stage, every in jobs.items() if every}


def test_every_experiment_has_the_config_hashes_that_it_had():
    known = [load_experiment(name, ROOT / "config") for name in EXPERIMENTS]
    known += [load_experiment(name, ROOT / "config") for each in known for name in each.of_bases]
    found = {each.name: hashes(each) for each in known}
    if os.environ.get("DVP_GOLDEN") == "make":
        GOLDEN.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    assert found == json.loads(GOLDEN.read_text(encoding="utf-8"))


@pytest.mark.parametrize("section", ["training", "evaluation", "data"])
def test_an_option_that_comes_makes_nothing_stale(section):
    """A new key of a section, with the default that leaves results as they are."""
    smoke = load_experiment("smoke", ROOT / "config")
    own = getattr(smoke, section)

    class WithOption(type(own)):
        a_new_option: bool = False
        """Made up."""

    more = smoke.model_copy(update={section: WithOption.model_construct(**dict(own))})
    asked = smoke.model_copy(update={section: WithOption.model_construct(**dict(own), a_new_option=True)})
    assert isinstance(getattr(more, section), Strict)
    assert hashes(more) == hashes(smoke) != hashes(asked)
