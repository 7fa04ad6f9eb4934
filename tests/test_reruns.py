"""What Snakemake makes again, and what it leaves alone: dry runs over made-up results of the smoke experiment."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dvp.files import sha256_file, write_json
from dvp.tracking.record import KEY, STAGE, UPSTREAM, Record
from dvp.versions import STAGE_VERSIONS
from recipes import METHODS, follow, show

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[1]
EXPERIMENT = Path("config/experiments/start/smoke.yaml")
RUN = "method~dvp_mis/engine~coarse/rho~0.01/seed~0"
REPORTS = {"resolve": 1, "report": 1}
SCORES = {"evaluate": 4, "report": 1}
MODELS = {"train": 3, "convert": 3, "evaluate": 3}  # the base model is evaluated as well


class Results:
    """A working copy, the package among it, in which every job of an experiment seems to be done."""

    def __init__(self, folder: Path, experiment: str = "smoke"):
        self.folder, self.experiment = folder, experiment
        for name in ("workflow", "config", "envs", "profiles", "src"):
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
        shutil.copy(ROOT / "Snakefile", folder)
        (folder / "config/experiments/several.yaml").write_text(SEVERAL)
        summary = self.snakemake("--summary").splitlines()
        outputs = [line.split("\t")[0] for line in summary if line.startswith("results/")]
        assert len(outputs) >= 40
        for name in outputs:
            file = folder / name / "made_up.html" if name.endswith(("/tables", "/figures")) else folder / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text("made up")
        self.snakemake("--touch", "--forceall")

    def snakemake(self, *arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "snakemake", *arguments, "--config", f"experiment={self.experiment}"],
            cwd=self.folder,
            env=os.environ | {"PYTHONPATH": str(self.folder / "src")},
            check=False,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stdout
        return done.stdout

    def jobs(self, *arguments: str) -> dict[str, int]:
        """How many jobs of each rule a dry run lists, `all` left out."""
        stats = self.snakemake(*arguments, "--dry-run", "--quiet", "rules").partition("Job stats:")[2]
        counted = re.findall(r"^(\w+) +(\d+)$", stats.partition("total")[0], flags=re.MULTILINE)
        return {rule: int(count) for rule, count in counted if rule != "all"}

    def edit(self, name: Path | str, old: str, new: str) -> None:
        """Replace what is once in a file."""
        text = (self.folder / name).read_text(encoding="utf-8")
        assert text.count(old) == 1, (name, old)
        (self.folder / name).write_text(text.replace(old, new), encoding="utf-8")


@pytest.fixture(scope="module")
def done(tmp_path_factory) -> Results:
    return Results(tmp_path_factory.mktemp("reruns"))


@pytest.fixture(scope="module")
def curve_done(tmp_path_factory) -> Results:
    return Results(tmp_path_factory.mktemp("curve"), "smoke_curve")


@pytest.fixture
def curve(curve_done) -> Iterator[Results]:
    yield from put_back(curve_done)


@pytest.fixture
def results(done) -> Iterator[Results]:
    yield from put_back(done)


def put_back(done: Results) -> Iterator[Results]:
    """The same for every test: what one edits or deletes is put back, its age included."""
    kept = done.folder.with_name(f"{done.folder.name}-kept")
    shutil.copytree(done.folder, kept)
    yield done
    shutil.rmtree(done.folder)
    kept.rename(done.folder)


SEVERAL = """
name: several
extends: smoke
data: {evaluation: [more]}
sources:
  more: {kind: generated, generator: stories, count: 20, seed: 1}
evaluation: {samples_per_problem: {held_out: 2, more: 1}}
"""


@pytest.fixture(scope="module")
def several_done(tmp_path_factory) -> Results:
    return Results(tmp_path_factory.mktemp("several"), "several")


@pytest.fixture
def several(several_done) -> Iterator[Results]:
    yield from put_back(several_done)


def test_all_tasks_of_a_model_are_one_job(several):
    assert several.jobs() == {}
    (several.folder / "results/several/evals/base/manifest.json").unlink()
    assert several.jobs() == {"evaluate": 1, "report": 1}
    several.edit("config/experiments/several.yaml", "more: 1", "more: 2")
    assert several.jobs() == REPORTS | {"evaluate": 4}


def test_a_comment_in_the_code_runs_nothing_again(results):
    assert results.jobs() == {}
    for name in ("errors.py", "training/loop.py", "core/advantages.py", "analysis/report.py"):
        with open(results.folder / "src/dvp" / name, "a", encoding="utf-8") as file:
            file.write("\n# A comment.\n")
    assert results.jobs() == {}


def test_the_documented_recipes_run_nothing_but_what_uses_them(results):
    """A new advantage and a new rule for ρ, as docs/extend.md has them."""
    follow(results.folder / "src/dvp")
    with open(results.folder / "config/catalogue/methods.yaml", "a", encoding="utf-8") as file:
        file.write(METHODS)
    assert results.jobs() == {}
    grid = "\ngrid:\n"
    for method, rho, path in (("half_rloo", "null", "none"), ("confident_rloo", "1e-2", "0.01")):
        point = f"{grid}  - {{method: {method}, engine: coarse, rho: {rho}}}\n"
        results.edit(EXPERIMENT, grid, point)
        listed = results.snakemake("--dry-run")
        run = f"method~{method}/engine~coarse/rho~{path}/seed~0"
        assert set(re.findall(r"^Job \d+: (.*)$", listed, flags=re.MULTILINE)) == {
            "resolving the experiment smoke",
            f"training {run}",
            f"converting {run}",
            f"evaluating {run}",
            "drawing the report of smoke",
        }
        results.edit(EXPERIMENT, point, grid)


def test_a_figure_a_table_and_a_claim_run_nothing_but_the_report(results):
    """Each is one function or entry, as docs/extend.md has it."""
    show(results.folder)
    assert results.jobs() == {"report": 1}


def test_a_bumped_version_makes_the_stage_again_and_what_follows(results):
    results.edit("src/dvp/versions.py", f'    "train": {STAGE_VERSIONS["train"]},', '    "train": 99,')
    assert results.jobs() == MODELS | {"report": 1}


@pytest.mark.parametrize(
    ("name", "jobs"),
    [
        ("data/train.parquet", {"prepare": 1, "base": 1, "train": 3, "convert": 3, **SCORES}),
        ("base/config.json", {"base": 1, "train": 3, "convert": 3, **SCORES}),
        (f"runs/{RUN}/metrics.jsonl", {"train": 1, "convert": 1, "evaluate": 1, "report": 1}),
        (f"models/{RUN}/model.safetensors", {"convert": 1, "evaluate": 1, "report": 1}),
        (f"evals/{RUN}/manifest.json", {"evaluate": 1, "report": 1}),
        ("report/estimates.parquet", {"report": 1}),
        ("config.yaml", REPORTS),
    ],
)
def test_a_missing_file_is_made_again(results, name, jobs):
    (results.folder / "results/smoke" / name).unlink()
    assert results.jobs() == jobs


@pytest.mark.parametrize(
    ("old", "new", "jobs"),
    [
        ("A smoke test, not an experiment.", "Other words.", REPORTS),
        ("learning_rate: 1.5e-4", "learning_rate: 3e-4", REPORTS | MODELS),
        ("samples_per_problem: {held_out: 2}", "samples_per_problem: {held_out: 4}", REPORTS | SCORES),
    ],
)
def test_a_change_runs_again_what_depends_on_it_and_nothing_else(results, old, new, jobs):
    results.edit(EXPERIMENT, old, new)
    assert results.jobs() == jobs


def test_a_change_of_settings_hides_no_other_reason_to_run(results):
    """As it would if the stages had the resolved experiment as an `ancient` input (Snakemake 9.27)."""
    results.edit(EXPERIMENT, "A smoke test, not an experiment.", "Other words.")
    (results.folder / "results/smoke/base/config.json").write_text("from a run that was stopped")
    assert results.jobs() == REPORTS | {"train": 3, "convert": 3, "evaluate": 4}


def test_a_stage_that_is_asked_for_alone_reads_the_settings_of_now(results):
    """Also where the rule that writes them is not asked for; `grep` and `touch` stand for the stage."""
    results.edit(EXPERIMENT, "learning_rate: 1.5e-4", "learning_rate: 3e-4")
    rule = "workflow/rules/train.smk"
    text = (results.folder / rule).read_text()
    start = text.index('"dvp train')
    (results.folder / rule).write_text(text[:start] + '"grep -q 0.0003 {params.config}; touch {output}"\n')
    goal = f"results/smoke/runs/{RUN}/train.json"
    results.snakemake(goal, "--cores", "1")
    assert (results.folder / goal).read_text() == ""  # as `touch` leaves it


def test_a_copy_that_lost_the_order_of_its_ages_is_not_trained_again(results):
    """As `cp -r` leaves it, here the other way round, and without what Snakemake remembers in .snakemake."""
    folder, made = results.folder / "results/smoke", {}
    for clock, (stage, path, read) in enumerate(
        (("prepare", "data/manifest.json", ()), ("base", "base/manifest.json", ("prepare",)),
         ("train", f"runs/{RUN}/train.json", ("prepare", "base")))
    ):  # fmt: skip
        result = folder / path
        files = {file.name: sha256_file(file) for file in result.parent.iterdir() if file.is_file() and file != result}
        write_json(result, {KEY: stage, "files": files})
        tags = {KEY: stage, STAGE: stage} | {f"{UPSTREAM}{other}": other for other in read}
        ended = {"status": "FINISHED", "started": 1000 * clock, "ended": 1000 * clock + 1000, "files": {path: ""}}
        record = Record(experiment="smoke", name=stage, tags=tags, **ended)
        write_json(folder / f"tracking/{stage}.json", record.model_dump())
        made[stage] = [result, *(result.parent / name for name in files)]
    for age, stage in enumerate(("train", "base", "prepare"), start=1):
        for file in made[stage]:
            os.utime(file, (1000 * age, 1000 * age))
    shutil.rmtree(results.folder / ".snakemake")
    assert results.jobs(f"results/smoke/runs/{RUN}/train.json") == {}


def test_a_model_along_training_may_go_when_it_has_been_evaluated(curve):
    assert curve.jobs() == {}
    run = "method~otb/engine~fp32/rho~none/seed~0/step~2"
    results = curve.folder / "results/smoke_curve"
    shutil.rmtree(results / "models" / run)
    assert curve.jobs() == {}
    (results / "evals" / run / "manifest.json").unlink()
    assert curve.jobs() == {"convert": 1, "evaluate": 1, "report": 1}


def test_other_steps_are_another_training(curve):
    """Two runs of five steps, evaluated after each of them, or at the end alone."""
    experiment = "config/experiments/tests/smoke_curve.yaml"
    reports = {"resolve": 1, "report": 1}
    curve.edit(experiment, "at: {every: 2}", "at: {every: 1}")
    assert curve.jobs() == {"train": 2, "convert": 2 * 5, "evaluate": 2 * 5, **reports}
    curve.edit(experiment, "at: {every: 1}", "at: null")
    assert curve.jobs() == {"train": 2, "convert": 2, "evaluate": 2, **reports}
