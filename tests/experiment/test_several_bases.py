"""Experiments with several base models: one key, and an experiment for each base model, which differs in seeds only."""

import re
import shutil
from pathlib import Path

import pytest

from dvp.errors import DvpError
from dvp.experiment.config import Experiment
from dvp.experiment.loading import dump_experiment, load_experiment, read_bases, read_resolved, write_resolved

CONFIG = Path(__file__).parents[2] / "config"
CRITERIA = (  # of the confirmation, committed before its runs
    "method~rloo/engine~fp32/rho~none",
    "method~rloo_tis/engine~coarse/rho~none",
    "method~rloo_mis/engine~coarse/rho~none",
    "method~dvp_mis/engine~coarse/rho~exp-13",
)


@pytest.fixture
def config(tmp_path) -> Path:
    return shutil.copytree(CONFIG, tmp_path / "config")


@pytest.fixture
def mine(config):
    """Experiment `mine` with this text, or one with one of its base models."""

    def loaded(text: str, base: object = None) -> Experiment:
        (config / "experiments/mine.yaml").write_text(f"name: mine\n{text}\n", encoding="utf-8")
        return load_experiment("mine" if base is None else f"mine~{base}", config)

    return loaded


def test_each_base_model_has_a_seed_of_its_own_and_of_its_problems(mine, config):
    one, tiny = mine("extends: tiny\nbases: [3, 4]", 4), load_experiment("tiny", config)
    assert one.base == tiny.base.model_copy(update={"seed": 4})
    assert one.sources["stories"] == tiny.sources["stories"].model_copy(update={"seed": 4})
    assert (one.name, one.bases, one.seeds, one.grid) == ("mine~4", [], tiny.seeds, tiny.grid)


def test_the_first_base_model_has_the_config_hashes_of_an_experiment_with_one(mine, config):
    one, tiny = mine("extends: tiny\nbases: [0, 1]", 0), load_experiment("tiny", config)
    jobs = [key for key in tiny.jobs if key[0] != "report"]
    assert [one.config_hash(*key) for key in jobs] == [tiny.config_hash(*key) for key in jobs]


def test_problems_that_are_not_generated_are_the_same_for_all(mine, tmp_path):
    (tmp_path / "problems.jsonl").touch()
    source = f"{{kind: file, path: {tmp_path}/problems.jsonl, columns: {{problem: p, answer: a}}}}"
    text = f"extends: tiny\nbases: [0, 1]\nsources: {{mine: {source}}}\ndata: {{train: mine}}"
    first, second = (mine(text, base) for base in (0, 1))
    assert first.sources == second.sources
    assert first.config_hash("prepare") == second.config_hash("prepare")
    assert first.config_hash("base") != second.config_hash("base")


def test_a_base_model_may_be_one_of_the_catalogue(mine, config):
    text = "extends: tiny\nbase: smollm2\nbases: [smollm2]"
    assert mine(text, "smollm2").base == read_bases(config)["smollm2"]
    with pytest.raises(DvpError, match=r"mine\.yaml: base: 'gpt' is not in config/catalogue/bases\.yaml"):
        mine("extends: tiny\nbases: [gpt]", "gpt")


def test_the_whole_has_a_report_alone(mine):
    whole = mine("extends: tiny\nbases: [7, 8]")
    assert list(whole.jobs) == [("report", "")]
    assert whole.of_bases == ["mine~7", "mine~8"]
    assert (whole.repetitions, whole.seeds) == ([7, 8], [0, 1])


def test_both_are_read_back_from_their_folders(mine, tmp_path):
    for base in (None, 7):
        experiment = mine("extends: tiny\nbases: [7, 8]", base)
        write_resolved(experiment, tmp_path / experiment.name)
        read = read_resolved(tmp_path / experiment.name / "config.yaml")
        assert dump_experiment(read) == dump_experiment(experiment.used)


@pytest.mark.parametrize(
    ("text", "base", "says"),
    [
        ("bases: [0, 1]", 2, "experiment 'mine~2': expected one of mine~0, mine~1"),
        ("seeds: [0]", 2, "experiment 'mine~2': it has one base model"),
        ("bases: [0, 0]", None, "bases: 0 is listed twice"),
        ("base: smollm2\nbases: [0, 1]", None, "bases: expected names in config/catalogue/bases.yaml"),
        (
            "report: {primary: [{method: rloo_tis, engine: coarse}]}",
            None,
            "report.primary: expected points of the grid",
        ),
        ("report: {primary: [{method: rloo, engine: coarse}]}", None, "report.primary: expected points of the grid"),
    ],
)
def test_a_base_model_or_difference_that_is_not_there_is_refused(mine, text, base, says):
    with pytest.raises(DvpError, match=re.escape(says)):
        mine(f"extends: tiny\n{text}", base)


def test_the_confirmation_is_the_one_that_was_set():
    whole, old = (load_experiment(name, CONFIG) for name in ("confirmation", "bases"))
    assert whole.bases == list(range(5, 16))
    assert not {*whole.bases} & {*old.bases}
    assert (whole.points, whole.seeds) == (old.points, [0, 1])
    assert tuple(point.path for point in whole.report.primary) == CRITERIA
    assert whole.report.equivalent_within == 2
    rhos = {sampler.rho for point in (None, *whole.points) for sampler in whole.samplers(point)}
    assert (whole.sampler.engine, whole.sampler.rho, rhos) == ("fp32", None, {"exp(-13)", "0.01"})
