"""A stage as seen in a real MLflow store: one run, continued, linked, and written by several processes at once."""

import multiprocessing
import subprocess
import sys
import time
from pathlib import Path

import pytest
from made_up_stages import EXPERIMENT, ROOT, RUN, check_training, contents, convert, evaluate, title, train
from mlflow.tracking import MlflowClient

from dvp import provenance
from dvp.errors import DvpError
from dvp.tracking.record import COLLAPSED
from dvp.tracking.stage import stage_run
from dvp.tracking.store import create_store, reason_of, store_name, store_uri
from lineage import lineage

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("uri", "shown"),
    [
        ("postgresql://me:se/cr@et@host:5432/mlflow", "postgresql://host:5432/mlflow"),
        ("postgresql://host/mlflow?user=me&password=secret", "postgresql://host/mlflow"),
        # Which @ or ? is the password's own is not known: too much is hidden rather than too little.
        ("http://h/?token=a@b", "http://***"),
        ("https://host/mlflow", "https://host/mlflow"),
        ("sqlite:////home/me@work/mlflow.db", "sqlite:////home/me@work/mlflow.db"),
    ],
)
def test_an_address_is_shown_without_secrets(tmp_path, monkeypatch, uri, shown):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    assert store_name(tmp_path) == shown


@pytest.mark.parametrize(
    ("uri", "reason"),
    [("http://h/x", "no http://h/x/api"), ("http://me:secret@h/x", "OSError"), ("http://h/x?key=secret", "OSError")],
)
def test_nor_are_parts_of_it_in_a_reason(tmp_path, monkeypatch, uri, reason):
    """A client may say them decoded, or in parts: the error's kind must do."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    assert reason_of(OSError(f"no\n{uri}/api"), tmp_path) == reason


@pytest.mark.parametrize("uri", ["nonsense://x", "sqlite:////dev/null/mlflow.db", "http://me:cret@127.0.0.1:9/mlflow/"])
def test_a_store_that_cannot_be_used_is_one_line(tmp_path, monkeypatch, uri):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    with pytest.raises(DvpError) as error:
        create_store(tmp_path, EXPERIMENT)
    assert str(error.value).startswith(f"MLflow store {uri.replace('me:cret@', '')}: cannot be used (")
    assert str(error.value).endswith("); is MLFLOW_TRACKING_URI right?")
    assert "cret" not in str(error.value)
    assert "\n" not in str(error.value)


def test_make_mlflow_starts_nothing_where_a_server_is_the_store(monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "https://me:se/cr@et@host/mlflow?x=1&token=$(touch x)'")
    command = ["make", "--no-print-directory", "--old-file=install", "mlflow", f"VENV={sys.prefix}"]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True, timeout=60)
    assert done.stdout == "the tracking server is at https://host/mlflow\n"


def test_a_stage_that_runs_again_continues_its_run(folder):
    """Of a failed or killed attempt nothing is said of the next one."""

    def fail(step):
        if step == 2:
            raise DvpError("the node died")

    with pytest.raises(DvpError):
        train(folder, 4, fail)
    [(key, first)] = contents(folder).items()
    assert (first["status"], first["tags"]["failure"]) == ("FAILED", "DvpError: the node died")
    attempt = stage_run(folder, EXPERIMENT, "train", config_hash="abc", run=RUN)
    attempt.__enter__().tag(COLLAPSED, "at step 7")
    with pytest.raises(SystemExit):
        attempt.gen.throw(SystemExit(143))
    [killed] = contents(folder).values()
    assert (killed["status"], killed["tags"][COLLAPSED]) == ("KILLED", "at step 7")
    seen = []
    assert train(folder, 4, lambda step: seen.append(contents(folder)[key])).key == key
    assert {run["status"] for run in seen} == {"RUNNING"}
    [again] = contents(folder).values()
    check_training(again, 4)
    assert not {"failure", COLLAPSED} & again["tags"].keys()
    assert again["times"][0] == first["times"][0]
    assert again["tags"]["model"] == f"runs/{RUN}/checkpoints/step-4"


def test_of_a_step_that_is_done_twice_the_first_numbers_stay(folder):
    """A run resumed from step 2 does step 3 again; a metric has one value a step."""
    for seconds, last in ((0.25, 3), (0.5, 4)):
        rows = [{"step": step, "seconds": 0.25 if step < 3 else seconds} for step in range(1, last + 1)]
        with stage_run(folder, EXPERIMENT, "train", config_hash="abc", run=RUN) as tracked:
            for row in rows:
                tracked.log_step(row["step"], row)
    points = contents(folder)[tracked.key]["metrics"]["time/seconds"]
    assert [point[:2] for point in points] == [(1, 0.25), (2, 0.25), (3, 0.25), (4, 0.5)]


def test_a_result_that_changes_is_the_one_shown(folder):
    client = MlflowClient(tracking_uri=store_uri(folder.parent))
    for value in (0.5, 0.25, 0.5):
        tracked = evaluate(folder, {}, value)
        [run_id] = lineage(folder.parent, tracked.key)["evaluate"]
        assert client.get_run(run_id).data.metrics == {"eval/aime25/avg_at_8": value}
    assert '"value": 0.5' in Path(client.download_artifacts(run_id, "scores.json")).read_text()


def test_what_works_on_a_policy_is_below_the_run_that_trained_it(folder, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    trained = train(folder, 1).key
    converted = convert(folder, trained).key
    evaluated = evaluate(folder, {"convert": [converted]}).key
    runs = contents(folder)
    assert {runs[key]["tags"]["mlflow.parentRunId"] for key in (converted, evaluated)} == {trained}
    assert runs[trained]["tags"]["mlflow.parentRunId"] is None
    assert runs[trained]["name"] == runs[trained]["tags"]["policy"] == title(RUN)
    assert "policy" not in runs[evaluated]["tags"]
    assert runs[evaluated]["name"] == f"evaluate aime25 · {title(RUN)}"
    tags = runs[evaluated]["tags"]
    assert (tags["stage"], tags["task"], tags["config_hash"], tags["slurm_job"]) == ("evaluate", "aime25", "def", "17")
    assert len(tags["mlflow.source.git.commit"]) >= 7
    assert tags["device"] == provenance.device()
    assert (tags["mlflow.source.name"], tags["mlflow.source.type"]) == ("dvp evaluate", "LOCAL")
    assert tags["mlflow.user"]
    assert set(lineage(folder.parent, evaluated)) == {"train", "convert", "evaluate"}


def test_scores_along_training_are_a_history_of_the_run_that_was_trained(folder):
    """Measured in any order: the last step's is the one that a table shows, sorts and filters by."""
    trained = train(folder, 1).key
    for step, path in ((48, RUN), (16, f"{RUN}/step~16"), (16, f"{RUN}/step~16")):
        with stage_run(folder, EXPERIMENT, "evaluate", config_hash="a", run=path, task="aime25", step=step) as tracked:
            tracked.log_result({"avg@8": step / 100})
        run = contents(folder)[tracked.key]
        assert run["tags"]["mlflow.parentRunId"] == trained
        assert [point[:2] for point in run["metrics"]["eval/aime25/avg_at_8"]] == [(step, step / 100)]
    run = contents(folder)[trained]
    assert [point[:2] for point in run["metrics"]["eval/aime25/avg_at_8"]] == [(16, 0.16), (48, 0.48)]
    client = MlflowClient(tracking_uri=store_uri(folder.parent))
    asked = "params.method = 'dvp' and tags.policy != '' and metrics.`eval/aime25/avg_at_8` = 0.48"
    [found] = client.search_runs([client.get_experiment_by_name(EXPERIMENT).experiment_id], asked)
    assert found.data.tags["tracking_key"] == trained


def test_models_have_paths_settings_and_scores(folder):
    trained = train(folder, 3).key
    converted = convert(folder, trained).key
    evaluate(folder, {"convert": [converted], "prepare": ["0" * 12]}, 0.25)
    evaluated = evaluate(folder, {"convert": [converted], "prepare": ["0" * 12]}, 0.5).key
    client = MlflowClient(tracking_uri=store_uri(folder.parent))
    experiment = client.get_experiment_by_name(EXPERIMENT).experiment_id
    models = {model.tags["tracking_key"]: model for model in client.search_logged_models([experiment])}
    assert set(models) == {trained, converted}
    assert models[trained].tags["path"] == f"runs/{RUN}/checkpoints/step-3"
    assert models[trained].params == {"method": "dvp", "seed": "0"}
    assert models[trained].name == f"{title(RUN)} · checkpoint"
    assert {model.status for model in models.values()} == {"READY"}
    assert {metric.key for metric in models[trained].metrics} == {
        *("final/reward", "final/gradient_norm", "final/collapsed")
    }
    assert 0.5 in {metric.value for metric in models[converted].metrics if metric.key[:4] == "eval"}

    def run_of(key: str):
        [found] = client.search_runs([experiment], f"tags.tracking_key = '{key}'")
        return client.get_run(found.info.run_id)

    assert [made.model_id for made in run_of(trained).outputs.model_outputs] == [models[trained].model_id]
    assert [made.step for made in run_of(trained).outputs.model_outputs] == [3]
    assert [used.model_id for used in run_of(converted).inputs.model_inputs] == [models[trained].model_id]
    assert [used.model_id for used in run_of(evaluated).inputs.model_inputs] == [models[converted].model_id]


def test_the_experiments_page_says_what_its_stages_say_of_it(folder):
    for stage, text in (("prepare", "What it is."), ("report", "| a table |")):
        with stage_run(folder, EXPERIMENT, stage, config_hash="abc") as tracked:
            tracked.describe(text)
        time.sleep(0.01)  # they are in the order of their beginnings, in milliseconds
    experiment = MlflowClient(tracking_uri=store_uri(folder.parent)).get_experiment_by_name(EXPERIMENT)
    links, *texts = experiment.tags["mlflow.note.content"].split("\n\n")
    assert texts == ["What it is.", "| a table |"]
    assert f"#/experiments/{experiment.experiment_id}/runs?viewStateShareKey=table" in links
    assert experiment.tags["mlflow.experimentKind"] == "custom_model_development"


def test_text_that_filters_might_stumble_over(folder):
    text = "it's \"no\" back`tick a' OR '1'='1 100 %\\ Δ/ρ"
    for _ in range(2):
        with stage_run(folder, EXPERIMENT, "train", config_hash=text, run=text, inputs=text) as tracked:
            tracked.log_params({"text": text})
    [run] = contents(folder).values()
    assert (run["params"], run["tags"]["run"], run["status"]) == ({"text": text}, text, "FINISHED")


def one_of_many(folder: Path, number: int) -> None:
    train(folder, 12, run=f"{RUN}{number}")


def test_jobs_write_at_once_without_losing_a_metric(folder, capfd):
    """4 × 12 steps × 24 numbers into one SQLite file, flushed every step."""
    context = multiprocessing.get_context("spawn")
    jobs = [context.Process(target=one_of_many, args=(folder, number)) for number in range(4)]
    for job in jobs:
        job.start()
    for job in jobs:
        job.join(400)
        assert job.exitcode == 0
    assert "cannot be used" not in capfd.readouterr().err
    runs = contents(folder).values()
    assert len(runs) == 4
    for run in runs:
        check_training(run, 12)
