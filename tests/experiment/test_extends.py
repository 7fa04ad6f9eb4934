"""Experiments that extend others: what is inherited, replaced and taken away, and which chains are refused."""

import re
import shutil
from pathlib import Path

import pytest

from dvp.errors import DvpError
from dvp.experiment.base import LocalBase
from dvp.experiment.config import Experiment
from dvp.experiment.data import FileSource
from dvp.experiment.loading import load_experiment, read_bases

CONFIG = Path(__file__).parents[2] / "config"


@pytest.fixture
def config(tmp_path) -> Path:
    return shutil.copytree(CONFIG, tmp_path / "config")


@pytest.fixture
def write(config):
    """Write config/experiments/NAME.yaml: its name and this text."""

    def experiment(name: str, text: str) -> None:
        (config / "experiments" / f"{name}.yaml").write_text(f"name: {name}\n{text}\n", encoding="utf-8")

    return experiment


@pytest.fixture
def mine(config, write):
    """Experiment `mine` with this text."""

    def loaded(text: str) -> Experiment:
        write("mine", text)
        return load_experiment("mine", config)

    return loaded


def test_own_keys_lie_on_top_of_those_of_the_whole_chain(config, write, mine):
    middle = "seeds: [3]\nmethods: {otb_mass: null}\ntraining: {steps: 5, learning_rate: 1e-5}"
    write("middle", f"extends: smoke\n{middle}\ngrid: [{{method: rloo, engine: coarse}}]")
    experiment = mine("extends: middle\ntraining: {steps: 6}")
    smoke = load_experiment("smoke", config)
    assert experiment.training == smoke.training.model_copy(update={"steps": 6, "learning_rate": 1e-5})
    assert [run.path for run in experiment.runs] == ["method~rloo/engine~coarse/rho~none/seed~3"]
    assert (experiment.base, experiment.data, experiment.evaluation) == (smoke.base, smoke.data, smoke.evaluation)
    assert "otb_mass" not in experiment.methods  # what is taken away on the way stays away


def test_null_takes_an_inherited_key_away(mine, tmp_path):
    """Problems and evaluation sets of one's own, on top of an experiment that has others."""
    (tmp_path / "problems.jsonl").touch()
    experiment = mine(
        f"""extends: tiny
sources:
  own: {{kind: file, path: {tmp_path}/problems.jsonl, columns: {{problem: question, answer: result}}}}
data: {{train: own, held_out: null, evaluation: [aime25]}}
evaluation: {{samples_per_problem: {{held_out: null, aime25: 4}}}}
report: {{task: aime25, declarations: null}}"""
    )
    assert experiment.data.tasks == ["aime25"]
    assert experiment.evaluation.samples_per_problem == {"aime25": 4}
    assert experiment.report.declarations == []
    assert isinstance(experiment.sources["own"], FileSource)


def test_a_mapping_of_another_kind_replaces_the_inherited_one(mine, tmp_path):
    for name in ("config.json", "a.jsonl"):
        (tmp_path / name).write_text("{}")
    experiment = mine(
        f"""extends: smoke
base: {{kind: local, path: {tmp_path}}}
sources: {{stories_small: {{kind: file, path: {tmp_path}/a.jsonl, columns: {{problem: p, answer: a}}}}}}
methods: {{otb_mass: {{safe_vocabulary: {{rule: margin, epsilon: 0.1}}}}}}
grid: [{{method: rloo, engine: fp32}}, {{method: otb_mass, engine: coarse, rho: 1e-2}}]"""
    )
    assert experiment.base == LocalBase(kind="local", path=str(tmp_path))
    assert isinstance(experiment.sources["stories_small"], FileSource)
    assert experiment.methods["otb_mass"].safe_vocabulary.epsilon == 0.1
    assert experiment.methods["otb_mass"].label == "OTB + MIS, mass budget"


def test_what_is_said_of_a_model_is_not_said_of_another(config, mine, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    tiny = load_experiment("tiny", config)
    same = mine("extends: tiny\nseeds: [3]\nbase: {seed: 1}")
    assert same.description == "tiny with other seeds, base."
    assert (same.scale, same.report.declarations) == (tiny.scale, tiny.report.declarations)
    longer = mine("extends: tiny\ntraining: {steps: 48}")
    assert "48 steps" in longer.scale
    assert "32 steps" not in longer.scale
    assert longer.report.declarations == tiny.report.declarations
    other = mine(f"extends: tiny\nbase: {{kind: local, path: {tmp_path}}}\nreport: {{reached_within: 1}}")
    assert str(tmp_path) in other.scale
    assert "0.5 M" not in other.scale
    assert (other.report.declarations, other.report.reached_within) == ([], 1)
    alone = mine("extends: tiny")
    assert (alone.description, alone.scale) == (tiny.description, tiny.scale)
    told = mine("extends: smoke\ndata: {train: stories}\nscale: Mine.\nreport: {declarations: [Mine.]}")
    assert (told.scale, told.report.declarations) == ("Mine.", ["Mine."])


def test_what_is_said_goes_with_a_revision_and_a_source(mine, write, config):
    """Of the same place: another commit, another file of a wheel, another generator, but not more problems."""
    parent = load_experiment("paper_8b", config)
    other = mine(f"extends: paper_8b\nbase: {{revision: {'c' * 40}}}")
    assert other.scale.startswith(f"{other.base.path} on ")
    assert (other.scale != parent.scale, other.report.declarations) == (True, [])
    write("parent", "extends: tiny\nbase: smollm2\nscale: Mine.\nreport: {declarations: [Mine.]}")
    wheel = mine("extends: parent\nbase: {file: other/small.Q8.gguf}")
    assert wheel.scale.startswith("small.Q8 on ")
    assert wheel.report.declarations == []
    assert mine("extends: smoke\nsources: {stories_small: {generator: english_stories}}").report.declarations == []
    smoke = load_experiment("smoke", config)
    same = "sources: {stories: {kind: generated, generator: stories, count: 300, seed: 5}}"  # as the catalogue's
    assert mine(f"extends: parent\n{same}").report.declarations == ["Mine."]
    assert (
        mine("extends: smoke\nsources: {stories_small: {count: 300}}").report.declarations == smoke.report.declarations
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("extends: smoke\nbase: 3", "mine.yaml: base: "),
        ("extends: smoke\nreport: 3", "mine.yaml: report: "),
        ("extends: nope", "nope.yaml: no such experiment; known are "),
        ("extends: ../x", "mine.yaml: extends: experiment '../x': expected the name of a file in "),
        ("extends: smoke\ntrainin: null", "mine.yaml: trainin: unknown key"),
        ("extends: smoke\ntraining: {steps: null}", "mine.yaml: training.steps: Field required"),
    ],
)
def test_what_extends_badly_is_refused(mine, text, message):
    with pytest.raises(DvpError, match=re.escape(message)) as error:
        mine(text)
    assert len(str(error.value).splitlines()) == 1


def test_a_circle_is_one_line_that_names_its_files(config, write):
    write("a", "extends: b")
    write("b", "extends: c")
    write("c", "extends: b")
    line = f"{config}/experiments/c.yaml: extends: a → b → c → b is a circle; one of them must stand alone"
    with pytest.raises(DvpError, match=f"^{re.escape(line)}$"):
        load_experiment("a", config)


def test_a_mistake_of_the_parent_is_reported_in_the_parents_file(config, write):
    write("middle", "extends: smoke\ntraining: {steps: 0}")
    write("mine", "extends: middle\ntraining: {steps: 1}")
    with pytest.raises(DvpError, match=r"/middle\.yaml: training\.steps: "):
        load_experiment("mine", config)


def test_a_base_by_name_is_the_catalogues(mine, write, config):
    base = read_bases(config)["smollm2"]
    assert mine("extends: tiny\nbase: smollm2").base == base
    write("parent", "extends: tiny\nbase: smollm2")
    assert mine("extends: parent\nbase: {version: 0.1.3}").base == base.model_copy(update={"version": "0.1.3"})
    with pytest.raises(
        DvpError, match=r"/mine\.yaml: base: 'smolm' is not in config/catalogue/bases\.yaml; known are smollm2$"
    ):
        mine("extends: tiny\nbase: smolm")


def test_a_base_by_name_replaces_the_parents_of_its_kind(mine, config):
    file, hub = config / "catalogue/bases.yaml", f"{{kind: hub, path: a/b, revision: {'c' * 40}}}"
    file.write_text(f"{file.read_text()}\nhubone: {hub}\n")
    assert mine("extends: paper_8b\nbase: hubone").base == read_bases(config)["hubone"]


def test_a_fault_of_the_bases_names_their_file(mine, config):
    file = config / "catalogue/bases.yaml"
    file.write_text(file.read_text().replace("kind: wheel", "kind: trained"))
    with pytest.raises(DvpError, match=rf"^{re.escape(str(file))}: bases\.smollm2: "):
        mine("extends: tiny\nbase: smollm2")
