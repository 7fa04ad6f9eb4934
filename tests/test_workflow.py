"""The Snakemake workflow without running it: form, dry run, bad input. Works on a copy, as a run may be going on."""

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yte
from snakemake.cli import parse_set_resources

from dvp.experiment.loading import load_experiment, read_yaml
from dvp.planning.costs import Model

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
SCRIPTS = Path(sys.executable).parent


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("workflow")
    for name in ("workflow", "config", "envs", "profiles", "slurm"):
        shutil.copytree(ROOT / name, folder / name)
    shutil.copy(ROOT / "Snakefile", folder)
    return folder


@pytest.fixture
def snakemake(place, monkeypatch):
    """Run `snakemake …` there; returns (exit status, standard output, standard error)."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)

    def run(*arguments: str) -> tuple[int, str, str]:
        done = subprocess.run(
            [sys.executable, "-m", "snakemake", *arguments],
            cwd=place,
            check=False,
            capture_output=True,
            text=True,
            timeout=120,
            env=os.environ | {"PATH": f"{SCRIPTS}{os.pathsep}{os.environ['PATH']}"},
        )
        assert "Traceback" not in done.stdout + done.stderr
        return done.returncode, done.stdout, done.stderr

    return run


def test_format():
    done = subprocess.run(
        [SCRIPTS / "snakefmt", "--check", "Snakefile", "workflow"],
        cwd=ROOT,
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr


def test_lint(snakemake):
    status, out, errors = snakemake("--lint")
    assert status == 0, out + errors
    assert "Congratulations, your workflow is in a good condition!" in out + errors


@pytest.mark.parametrize(
    ("experiment", "jobs"),
    [
        ("tiny", {"base": 1, "train": 10, "convert": 10, "evaluate": 11}),
        ("smoke_axes", {"base": 1, "train": 5, "convert": 5, "evaluate": 6}),
        ("smoke_matrix", {"base": 1, "train": 2, "convert": 2, "evaluate": 12}),
        ("smoke_curve", {"base": 1, "train": 2, "convert": 6, "evaluate": 7}),
        ("smoke_evidence", {"base": 1, "train": 4, "convert": 4, "evaluate": 5, "mismatch": 1, "bias": 1}),
        ("paper_8b", {"base": 1, "preflight": 1, "train": 15, "convert": 15, "evaluate": 16}),
        ("qwen3_0.6b", {"base": 1, "preflight": 2, "train": 15, "convert": 15, "evaluate": 16}),
    ],
)
def test_dry_run(snakemake, place, experiment, jobs):
    status, out, errors = snakemake("-n", "--quiet", "rules", "--config", f"experiment={experiment}", "results=there")
    assert status == 0, errors
    counted = dict(re.findall(r"^(\w+) +(\d+)$", out.partition("Job stats:")[2], flags=re.MULTILINE))
    jobs = jobs | {"prepare": 1, "resolve": 1, "report": 1, "all": 1}
    assert {rule: int(count) for rule, count in counted.items()} == jobs | {"total": sum(jobs.values())}
    assert not (place / "there").exists()
    assert not (place / "results").exists()


@pytest.mark.parametrize(("experiment", "jobs"), [("bases", ("5", "80", "6")), ("bases~1", ("1", "16", "1"))])
def test_base_models_are_made_together_or_one_alone(snakemake, experiment, jobs):
    status, out, errors = snakemake("-n", "--quiet", "rules", "--config", f"experiment={experiment}", "results=there")
    assert status == 0, errors
    counts = dict(re.findall(r"^(\w+) +(\d+)$", out, re.MULTILINE))
    assert (counts["base"], counts["train"], counts["report"]) == jobs


def test_a_preflight_is_told_what_a_training_job_may_take(snakemake):
    """A profile declares it; without one it is all that the machine has. (Jobs of a dry run have one core.)"""
    settings = ("-n", "-p", "--config", "experiment=paper_8b_ablations", "results=there")
    for profile, expected in ((("--profile", "slurm"), ["96000", "96000"]), ((), [])):
        status, out, errors = snakemake(*settings, *profile)
        assert status == 0, errors
        assert re.findall(r"dvp preflight .* --memory-mb (\d+)", out + errors) == expected


def test_the_dry_run_of_the_evidence_shows_what_remains_of_all_its_experiments(snakemake, place):
    status, out, errors = snakemake("evidence", "-n", "--quiet", "rules", "--config", "results=there")
    assert status == 0, errors
    counted = dict(re.findall(r"^(\w+) +(\d+)$", out.partition("Job stats:")[2], flags=re.MULTILINE))
    names = read_yaml(ROOT / "config/config.yaml")["evidence"].values()
    reported = [load_experiment(name, ROOT / "config") for name in names]
    experiments = [each for each in reported if not each.bases]
    experiments += [load_experiment(name, ROOT / "config") for each in reported for name in each.of_bases]
    expected = {
        "resolve": len({each.name for each in reported + experiments}),
        "base": len(experiments),
        "train": sum(len(each.runs) for each in experiments),
        "mismatch": sum(len(each.measurements("mismatch")) for each in experiments),
        "bias": sum(len(each.measurements("bias")) for each in experiments),
        "report": len({each.name for each in reported + experiments}),
        "evidence": 1,
    }
    assert expected.items() <= {rule: int(count) for rule, count in counted.items()}.items()
    assert not (place / "there").exists()


def test_the_slurm_profile_is_found_by_its_name(snakemake):
    """On a machine without Slurm as well."""
    status, out, errors = snakemake("-n", "--profile", "slurm", "--config", "experiment=smoke", "results=there")
    assert status == 0, errors
    assert "Using profiles slurm and workflow specific profile profiles/default" in out + errors
    assert re.search(r"^total +15$", out, flags=re.MULTILINE)


@pytest.mark.parametrize(
    ("variables", "arguments", "limited"),
    [({}, [], True), ({}, ["--profile", "slurm"], False), ({"SNAKEMAKE_PROFILE": "slurm"}, [], False)],
)
def test_a_clusters_jobs_have_more_cores_than_this_machine(variables, arguments, limited, monkeypatch):
    """However its profile is asked for."""
    monkeypatch.delenv("SNAKEMAKE_PROFILE", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "argv", ["snakemake", *arguments])
    with open(ROOT / "profiles/default/config.yaml", encoding="utf-8") as file:
        assert ("cores" in yte.process_yaml(file, require_use_yte=True)) is limited


def asked_for(profile: dict, rule: str, name: str, attempt: int = 1):
    """What a rule's job with eight GPUs asks Slurm for."""
    resources = parse_set_resources([f"{rule}:{name}={profile['set-resources'][rule][name]}"])[rule]
    job = {"wildcards": None, "input": [], "rulename": rule, "async_run": None}
    return resources[name].evaluate(threads=8, attempt=attempt, **job).value


def test_a_cluster_is_described_by_the_variables_of_the_profile():
    """A card by its name, CPUs and memory of a rank, minutes of a training job."""
    text = (ROOT / "slurm/config.yaml").read_text()
    for name, value in {"gpu_type": "h200", "rank_cpus": 6, "rank_memory": 50000, "runtime": 2880}.items():
        text, found = re.subn(rf"(?m)^(  {name}:) +\S+", rf"\1 {value}", text, count=1)
        assert found == 1
    profile = yte.process_yaml(text, require_use_yte=True)
    gpu_rules = ("train", "preflight", "evaluate", "mismatch", "bias")
    assert {asked_for(profile, rule, "gres") for rule in gpu_rules} == {"gpu:h200:8"}
    assert {asked_for(profile, rule, "cpus_per_task") for rule in gpu_rules} == {48}
    assert {asked_for(profile, rule, "mem_mb") for rule in ("train", "preflight")} == {400_000}
    assert (asked_for(profile, "train", "runtime"), asked_for(profile, "preflight", "runtime")) == (2880, 180)


def test_a_training_job_that_is_tried_again_asks_for_no_more_memory():
    """It goes on from the last checkpoint. A preflight asks for what training does; other stages for more each time."""
    with open(ROOT / "slurm/config.yaml", encoding="utf-8") as file:
        profile = yte.process_yaml(file, require_use_yte=True)

    def memory(rule: str, attempt: int) -> int:
        return asked_for(profile, rule, "mem_mb", attempt)

    for rule in ("train", "preflight"):
        assert memory(rule, 3) == memory(rule, 1) == 8 * 96000
    assert memory("convert", 3) == 3 * memory("convert", 1)
    largest = Model(5120, 40, 40, 8, 128, 17408, False, 151936)  # Qwen3-14B
    needed = 4 * largest.parameters + 3 * 4 * largest.vocabulary_size * largest.hidden_size + 1e9
    assert memory("convert", 1) * 1e6 > needed


@pytest.mark.parametrize(
    ("experiment", "run", "step", "by"),
    [
        ("smoke_curve", "method~otb/engine~fp32/rho~none/seed~0", "/step~4", ""),
        ("smoke_matrix", "method~rloo_mis/engine~coarse/rho~none/seed~0", "", "/by~coarse/min_p~0.01"),
    ],
)
def test_a_step_and_a_further_sampler_go_through_the_same_rules(snakemake, experiment, run, step, by):
    """And prepare nothing else."""
    goal = f"there/{experiment}/evals/{run}{step}{by}/manifest.json"
    arguments = ("-n", "--printshellcmds", goal, "--config", f"experiment={experiment}", "results=there")
    status, out, errors = snakemake(*arguments)
    assert status == 0, errors
    out = out.replace("'", "")
    asked = re.findall(r"dvp (train|convert|evaluate) .* --run (\S+)", out)
    assert asked == [("train", run), ("convert", f"{run}{step}"), ("evaluate", f"{run}{step}{by}")]
    assert f"there/{experiment}/models/{run}{step}/conversion.json" in out
    assert f"there/{experiment}/logs/runs/{run}{step}/convert.log" in out
    assert f"there/{experiment}/logs/runs/{run}{step}{by}/evaluate.log" in out


def test_a_run_with_settings_of_its_own_waits_for_its_own_preflight_and_its_policy_can_be_measured(snakemake, place):
    """Also as a wildcard of a measurement, which another part of the path follows."""
    policy = "{method: rloo, engine: fp32, training: {group_size: 2}}"
    extended = place / "config" / "experiments" / "axes.yaml"
    extended.write_text(
        "name: axes\nextends: smoke_axes\npreflight: always\nmismatch: {engines: coarse, problems: 2, responses: 2, "
        f"rhos: 0.01, margins: [0.1], policies: [base, {policy}]}}\n"
    )
    settings = "group_size~2/prompts_per_step~8/steps~2"
    goals = (
        f"there/axes/evals/method~otb/engine~fp32/rho~none/{settings}/seed~0/manifest.json",
        "there/axes/mismatch/method~rloo/engine~fp32/rho~none/group_size~2/by~coarse/seed~0/mismatch.json",
        "there/axes/preflight/engine~fp32/group_size~4/preflight.json",
    )
    try:
        status, out, errors = snakemake(
            "-n", "--printshellcmds", *goals, "--config", "experiment=axes", "results=there"
        )
    finally:
        extended.unlink()
    assert status == 0, errors
    out = out.replace("'", "")
    assert set(re.findall(r"dvp preflight .* --engine (\S+)", out)) == {
        *(f"fp32/{settings}", "fp32/group_size~2", "fp32/group_size~4"),
    }
    assert set(re.findall(r"dvp train .* --run (\S+)", out)) == {
        f"method~otb/engine~fp32/rho~none/{settings}/seed~0",
        "method~rloo/engine~fp32/rho~none/group_size~2/seed~0",
    }
    assert "--measurement method~rloo/engine~fp32/rho~none/group_size~2/by~coarse/seed~0" in out


def test_a_file_of_problems_is_read_again_for_its_content_alone(snakemake, place, request):
    """Not for its age, which a copy or a wrong clock changes; one from the future is refused at the start."""
    rows = place / "rows.jsonl"

    def write(first: int, age: float) -> None:
        lines = [f'{{"q": "What is {number} + 1?", "a": "{number + 1}"}}\n' for number in range(first, first + 20)]
        rows.write_text("".join(lines))
        os.utime(rows, (age, age))

    columns = "{problem: q, answer: a}"
    source = f"sources: {{rows: {{kind: file, path: rows.jsonl, columns: {columns}}}}}"
    extended = place / "config/experiments/of_rows.yaml"
    extended.write_text(f"name: of_rows\nextends: smoke\n{source}\ndata: {{train: rows, held_out: 1}}\n")
    request.addfinalizer(extended.unlink)
    request.addfinalizer(lambda: shutil.rmtree(place / "there", ignore_errors=True))
    arguments = ("there/of_rows/data/manifest.json", "--config", "experiment=of_rows", "results=there")
    write(1, age=3e9)
    status, out, errors = snakemake("--cores", "1", *arguments)
    assert status == 1
    assert [line for line in (out + errors).splitlines() if line.startswith("rows.jsonl: dated 2065-01-24 ")]
    assert not (place / "there/of_rows/data").exists()
    write(1, age=time.time())
    status, out, errors = snakemake("--cores", "1", *arguments)
    assert status == 0, out + errors
    for first, age, made_again in ((1, time.time() + 1, False), (2, time.time() + 1, True), (2, 1e9, True)):
        write(first, age)
        assert ("preparing problems" in "".join(snakemake("-n", *arguments)[1:])) == made_again
    # Also where Snakemake remembers nothing: else all would be trained on the old problems, without a word.
    shutil.rmtree(place / ".snakemake")
    for first, made_again in ((2, True), (1, False)):
        write(first, age=time.time() + 1)
        assert ("preparing problems" in "".join(snakemake("-n", *arguments)[1:])) == made_again


def test_an_experiment_is_locked_while_its_jobs_run(place, snakemake, request):
    """A shell command, which cannot have the lock, stands for the stage."""
    rule = place / "workflow/rules/data.smk"
    text = rule.read_text()
    request.addfinalizer(lambda: rule.write_text(text))
    request.addfinalizer(lambda: shutil.rmtree(place / "there", ignore_errors=True))
    refused = '"! flock --nonblock there/smoke/.lock true && touch {output}"'
    rule.write_text(re.sub(r'"dvp .*?{log:q}"', lambda _: refused, text, flags=re.DOTALL))
    goal = ("there/smoke/data/manifest.json", "--config", "experiment=smoke", "results=there")
    status, out, errors = snakemake("--cores", "1", *goal)
    assert status == 0, out + errors
    subprocess.run(["flock", "--nonblock", place / "there/smoke/.lock", "true"], check=True)


@pytest.fixture
def train(tmp_path, monkeypatch):
    """Train an experiment whose stages are made up; returns (exit status, the preflights and runs that began).

    Stages write empty files; the preflight of the engine `fails` fails.
    """
    for name in ("workflow", "config", "envs", "profiles"):
        shutil.copytree(ROOT / name, tmp_path / name)
    shutil.copy(ROOT / "Snakefile", tmp_path)
    for name in ("data", "base", "preflight", "train"):
        file = tmp_path / f"workflow/rules/{name}.smk"
        made_up = '"echo {output[0]} >> began.txt; touch {output}"'
        if name == "preflight":
            made_up = '"echo {output[0]} >> began.txt; test {wildcards.engine} != $FAILS; touch {output}"'
        text, count = re.subn(r'"dvp .*?{log:q}"', lambda _, new=made_up: new, file.read_text(), flags=re.DOTALL)
        assert count == 1
        file.write_text(text)

    def run(*engines: str, fails: str = "none"):
        monkeypatch.setenv("FAILS", fails)
        grid = ", ".join(f"{{method: rloo, engine: {engine}}}" for engine in engines)
        file = tmp_path / "config/experiments/made_up.yaml"
        report = f"report: {{reference_engine: {engines[0]}}}"
        file.write_text(f"name: made_up\nextends: smoke\npreflight: always\ngrid: [{grid}]\n{report}\n")
        (tmp_path / "began.txt").write_text("")
        runs = [run.path for run in load_experiment("made_up", tmp_path / "config").runs]
        goals = [f"there/made_up/runs/{run}/train.json" for run in runs]
        settings = ["--config", "experiment=made_up", "results=there"]
        done = subprocess.run(
            [sys.executable, "-m", "snakemake", *goals, "--cores", "2", "--keep-going", *settings],
            cwd=tmp_path,
            check=False,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert "Traceback" not in done.stdout + done.stderr
        return done.returncode, re.findall(r"(preflight|method)\S*engine~(\w+)", (tmp_path / "began.txt").read_text())

    return run


def test_a_run_waits_for_its_own_preflight_and_is_not_made_again_for_another_engines(train):
    """With `keep-going`, another engine's runs go on where one preflight has failed."""
    status, began = train("fp32", "coarse", fails="coarse")
    assert status == 1
    assert sorted(began) == [("method", "fp32"), ("preflight", "coarse"), ("preflight", "fp32")]
    assert train("fp32", "coarse") == (0, [("preflight", "coarse"), ("method", "coarse")])
    assert train("fp32", "coarse", "bf16") == (0, [("preflight", "bf16"), ("method", "bf16")])


def test_a_tool_that_does_not_work_here_is_refused_before_training(tmp_path, monkeypatch):
    """By the job that makes the base model, on the machine where it runs."""
    programs = tmp_path / "programs"
    programs.mkdir()
    for file in Path("/usr/bin").iterdir():
        if file.name != "bwrap":
            (programs / file.name).symlink_to(file)
    monkeypatch.setenv("PATH", str(programs))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    for name in ("workflow", "config", "envs", "profiles"):
        shutil.copytree(ROOT / name, tmp_path / name)
    shutil.copy(ROOT / "Snakefile", tmp_path)
    file = tmp_path / "config/experiments/programs.yaml"
    file.write_text("name: programs\nextends: smoke\ntools: {kind: python, max_answer_tokens: 16}\n")
    goal = "there/programs/runs/method~rloo/engine~fp32/rho~none/seed~0/train.json"
    snakemake = [sys.executable, "-m", "snakemake", "--cores", "2", "--keep-going"]
    done = subprocess.run(
        [*snakemake, "--config", "experiment=programs", "results=there", "--", goal],
        cwd=tmp_path,
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
    )
    output = done.stdout + done.stderr
    assert "Traceback" not in output
    assert done.returncode == 1
    assert "tools.kind: python needs bubblewrap (`bwrap`), which is not installed on this machine" in output
    assert not (tmp_path / "there/programs/base").exists()
    assert not (tmp_path / "there/programs/runs").exists()


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["experiment=bad"], "config/experiments/bad.yaml: sedes: unknown key; did you mean seeds? (and 1 more)"),
        (["experimnt=tiny"], "experimnt: unknown key; did you mean experiment?"),
        (["results=a{b}"], "results: expected a folder in one line without braces, which Snakemake reads, found"),
        (["results=a_file"], "a_file: expected a folder, found a file"),
    ],
)
def test_a_mistake_is_told_in_one_line(snakemake, place, request, arguments, line):
    text = (place / "config/experiments/start/smoke.yaml").read_text(encoding="utf-8")
    bad = place / "config/experiments/bad.yaml"
    bad.write_text(text.replace("name: smoke", "name: bad").replace("seeds:", "sedes:"), encoding="utf-8")
    request.addfinalizer(bad.unlink)
    (place / "a_file").write_text("")
    status, out, errors = snakemake("-n", "--config", *arguments)
    assert status == 1
    where = "" if line.startswith(("config/", "a_file")) else "config/config.yaml, --configfile or --config: "
    assert [said for said in (out + errors).splitlines() if said.startswith(where + line)]


def test_a_fault_of_the_claims_is_told_before_hours_of_jobs(snakemake, place):
    """The rule that reads them runs last."""
    path = place / "config/config.yaml"
    before = path.read_text(encoding="utf-8")
    path.write_text(before.replace("  staleness: staleness\n", "  stalenes: smoke_evidence\n", 1), encoding="utf-8")
    try:
        status, out, errors = snakemake("evidence", "--cores", "1", "--config", "results=nothing")
    finally:
        path.write_text(before, encoding="utf-8")
    assert status == 1
    line = "evidence: 'stalenes' is asked for by no claim; did you mean staleness?"
    assert [said for said in (out + errors).splitlines() if said.startswith(line)]
    assert not (place / "nothing").exists()


@pytest.mark.parametrize(
    ("path", "stage", "named"),
    [
        ("runs/{run}/train.json", "train", "{run}"),
        ("mismatch/base/by~fp32/seed~0/mismatch.json", "mismatch", "base/by~fp32/seed~0"),
    ],
)
def test_a_path_that_the_experiment_has_not_is_refused_in_one_line(snakemake, path, stage, named):
    """`snakemake` sees to it that there is no traceback."""
    run = "method~foo/engine~fp32/rho~none/seed~0"
    for arguments in (("-n",), ("--cores", "1")):
        status, out, errors = snakemake(*arguments, f"results/tiny/{path.format(run=run)}")
        assert status == 1
        says = f"{stage}: '{named.format(run=run)}' is not in experiment 'tiny'"
        assert [line for line in (out + errors).splitlines() if line.startswith(says)]
        assert "Exception" not in out + errors
