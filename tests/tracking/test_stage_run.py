"""A stage as seen in a real MLflow store: one run, continued, linked, and written by several processes at once."""

import contextlib
import json
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
from dvp.tracking.store import create_store, lineage, reason_of, store_name, store_uri

pytestmark = pytest.mark.slow


def test_the_store_is_where_it_is_said_to_be(folder, monkeypatch):
    results = folder.parent
    assert store_uri(results) == f"sqlite:///{results}/mlflow.db"
    assert (results / "mlflow.db").is_file()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{results}/elsewhere.db")
    create_store(results, EXPERIMENT)
    assert (results / "elsewhere.db").is_file()


@pytest.mark.parametrize(
    ("uri", "shown"),
    [
        ("postgresql://me:se/cr@et@host:5432/mlflow", "postgresql://***@host:5432/mlflow"),
        ("postgresql://host/mlflow?user=me&password=secret&x=1", "postgresql://host/mlflow?user=me&password=***&x=1"),
        ("http://s3cr3ttoken@host", "http://***@host"),
        ("postgresql://u@h/db?sslpassword=a&sslmode=x", "postgresql://***@h/db?sslpassword=***&sslmode=x"),
        ("mssql://h/db?PWD=abc&driver=x", "mssql://h/db?PWD=***&driver=x"),
        ("mssql+pyodbc:///?odbc_connect=UID%3Dme%3BPWD%3Dabc", "mssql+pyodbc:///?odbc_connect=***"),
        ("https://h/mlflow?sv=1&sig=a%2Fb", "https://h/mlflow?sv=1&sig=***"),
        ("mysql://h/db?passwd=a/b", "mysql://h/db?passwd=***"),
        ("http://h/?token=a", "http://h/?token=***"),
        ("http://h/?X-Api%4Bey=a&CLIENT_SECRET=b&x=c", "http://h/?X-Api%4Bey=***&CLIENT_SECRET=***&x=c"),
        ("http://h/?x=1&X-Amz-Signature=ab", "http://h/?x=1&X-Amz-Signature=***"),
        # Which @ or ? is the password's own is not known: too much is hidden rather than too little.
        ("http://h/?token=a@b", "http://***"),
        ("http://me:a?key=b@h/x", "http://***"),
        ("https://host/mlflow", "https://host/mlflow"),
        ("sqlite:////home/me@work/mlflow.db", "sqlite:////home/me@work/mlflow.db"),
    ],
)
def test_a_password_is_not_shown(tmp_path, monkeypatch, uri, shown):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    assert store_name(tmp_path) == shown


def test_nor_is_it_shown_in_a_reason(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://me:se%2Fcret@127.0.0.1:9/mlflow/")
    for text in ("no http://me:se%2Fcret@127.0.0.1:9/mlflow/api", "wrong password 'se/cret'\nfor me"):
        reason = reason_of(OSError(text), tmp_path)
        assert "cret" not in reason
        assert "\n" not in reason
    with pytest.raises(DvpError) as error:
        create_store(tmp_path, EXPERIMENT)
    assert str(error.value).startswith("MLflow store http://***@127.0.0.1:9/mlflow/: cannot be used (")
    assert "cret" not in str(error.value)


@pytest.mark.parametrize(
    ("uri", "text", "reason"),
    [
        ("http://s3cr3ttoken@h", "no http://S3CR3ttoken@h/api", "no http://***@h/api"),
        ("http://h/?token=a%20bcd", "no /?token=a%20bcd/api for 'a bcd'", "no /?token=***/api for '***'"),
        ("http://h/?api_key=a bcd", "Max retries: /?api_key=a%20bcd/api", "Max retries: /?api_key=***/api"),
        ("postgresql://u@h/db?sslpassword=a+bcd", "user u: 'a bcd' is wrong", "user ***: '***' is wrong"),
        (
            "postgresql://me:se/cr@et@host/db",
            "no host et@host, no port 'se', for me",
            "no host ***@host, no port '***', ",
        ),
    ],
)
def test_nor_are_parts_of_an_address_in_a_reason(tmp_path, monkeypatch, uri, text, reason):
    """Also as a client reads it that ends the password elsewhere."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    assert reason_of(OSError(text), tmp_path).startswith(reason)
    assert "me" not in reason_of(OSError(text), tmp_path).split()


@pytest.mark.parametrize("uri", ["nonsense://x", "sqlite:////dev/null/mlflow.db", "mysql+nodriver://x/y"])
def test_a_store_that_cannot_be_used_is_one_line(tmp_path, monkeypatch, uri):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    with pytest.raises(DvpError) as error:
        create_store(tmp_path, EXPERIMENT)
    assert str(error.value).startswith(f"MLflow store {uri}: cannot be used (")
    assert "\n" not in str(error.value)


def test_make_mlflow_starts_nothing_where_a_server_is_the_store(monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "https://me:se/cr@et@host/mlflow?x=1&token=$(touch x)'")
    done = subprocess.run(
        ["make", "--no-print-directory", "--old-file=install", "mlflow", f"VENV={sys.prefix}"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout == "the tracking server is at https://***@host/mlflow?x=1&token=***\n"


def test_other_inputs_settings_or_task_make_another_run(folder):
    keys = []
    for more in ({"inputs": "one"}, {"inputs": "two"}, {"inputs": "one", "config_hash": "other"}, {"inputs": "one"}):
        with stage_run(folder, EXPERIMENT, "train", **({"config_hash": "abc", "run": RUN} | more)) as tracked:
            keys.append(tracked.key)
    for task in ("aime24", "aime25"):
        with stage_run(folder, EXPERIMENT, "evaluate", config_hash="abc", run=RUN, task=task) as tracked:
            keys.append(tracked.key)
    assert len(set(keys)) == 5
    assert keys[3] == keys[0]
    assert set(contents(folder)) == set(keys)


def test_a_stage_that_runs_again_continues_its_run(folder):
    def fail(step):
        if step == 2:
            raise DvpError("the node died")

    with pytest.raises(DvpError):
        train(folder, 4, fail)
    [(key, first)] = [item for item in contents(folder).items() if item[1]["tags"]["stage"] == "train"]
    assert first["status"] == "FAILED"
    assert first["tags"]["failure"] == "DvpError: the node died"

    seen = []
    tracked = train(folder, 4, lambda step: seen.append(contents(folder)[key]))
    assert tracked.key == key
    assert {run["status"] for run in seen} == {"RUNNING"}
    again = contents(folder)
    check_training(again[key], 4)
    assert "failure" not in again[key]["tags"]
    assert again[key]["times"][0] == first["times"][0]
    assert len(again) == 1


def test_a_terminated_stage_is_marked_killed(folder):
    with pytest.raises(SystemExit), stage_run(folder, EXPERIMENT, "base", config_hash="abc") as tracked:
        raise SystemExit(143)
    assert contents(folder)[tracked.key]["status"] == "KILLED"


def test_what_an_attempt_came_to_is_not_said_of_the_next(folder):
    for collapsed in (True, False):
        with stage_run(folder, EXPERIMENT, "train", config_hash="abc", run=RUN) as tracked:
            if collapsed:
                tracked.tag(COLLAPSED, "at step 7")
        assert contents(folder)[tracked.key]["tags"].get("collapsed") == ("at step 7" if collapsed else None)


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
    file = client.download_artifacts(run_id, "scores.json")
    assert json.loads(Path(file).read_text()) == {"value": 0.5}


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


def test_what_works_on_the_base_model_is_below_it(folder):
    with stage_run(folder, EXPERIMENT, "base", config_hash="abc", title="base model") as base:
        pass
    with stage_run(
        folder, EXPERIMENT, "evaluate", config_hash="abc", upstream={"base": [base.key]}, title="base model"
    ) as evaluated:
        evaluated.log_result({"avg@8": 0.5})
    runs = contents(folder)
    assert runs[base.key]["name"] == "base model"
    assert runs[evaluated.key]["name"] == "evaluate · base model"
    assert runs[evaluated.key]["tags"]["mlflow.parentRunId"] == base.key
    assert runs[base.key]["metrics"]["eval/avg_at_8"][0][1] == 0.5


def test_scores_along_training_are_a_history_of_the_run_that_was_trained(folder):
    """Measured in any order: the last step's is the one that a table shows."""
    trained = train(folder, 1).key
    keys = {}
    for step, path in ((48, RUN), (16, f"{RUN}/step~16"), (16, f"{RUN}/step~16")):
        upstream = {"convert": [convert(folder, trained).key]}
        with stage_run(
            folder, EXPERIMENT, "evaluate", config_hash="a", run=path, task="aime25", upstream=upstream, step=step
        ) as tracked:
            tracked.log_result({"avg@8": step / 100})
        keys[step] = tracked.key
    runs = contents(folder)
    for step, key in keys.items():
        assert runs[key]["tags"]["mlflow.parentRunId"] == trained
        assert [point[:2] for point in runs[key]["metrics"]["eval/aime25/avg_at_8"]] == [(step, step / 100)]
    assert [point[:2] for point in runs[trained]["metrics"]["eval/aime25/avg_at_8"]] == [(16, 0.16), (48, 0.48)]
    client = MlflowClient(tracking_uri=store_uri(folder.parent))
    [run_id] = lineage(folder.parent, trained)["train"]
    assert client.get_run(run_id).data.metrics["eval/aime25/avg_at_8"] == 0.48


def test_runs_can_be_filtered_and_sorted_by_settings_and_scores(folder):
    """What a user types into the field above MLflow's list of runs."""
    keys = {}
    for seed, value in ((0, 0.25), (1, 0.75)):
        run = RUN.replace("seed~0", f"seed~{seed}")
        keys[seed] = train(folder, 1, run=run).key
        with stage_run(
            folder, EXPERIMENT, "evaluate", config_hash="a", run=run, task="aime25", upstream={"train": [keys[seed]]}
        ) as tracked:
            tracked.log_result({"avg@8": value})
    client = MlflowClient(tracking_uri=store_uri(folder.parent))
    runs = client.search_runs(
        [client.get_experiment_by_name(EXPERIMENT).experiment_id],
        "params.method = 'dvp' and tags.policy != '' and metrics.`eval/aime25/avg_at_8` > 0",
        order_by=["metrics.`eval/aime25/avg_at_8` DESC"],
    )
    assert [run.data.tags["tracking_key"] for run in runs] == [keys[1], keys[0]]


def test_models_have_their_path_settings_and_scores_and_runs_know_them(folder):
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
    scores = {(metric.value, metric.dataset_name) for metric in models[converted].metrics if metric.key[:4] == "eval"}
    assert (0.5, "eval") in scores

    def run_of(key: str):
        [found] = client.search_runs([experiment], f"tags.tracking_key = '{key}'")
        return client.get_run(found.info.run_id)

    assert [made.model_id for made in run_of(trained).outputs.model_outputs] == [models[trained].model_id]
    assert [made.step for made in run_of(trained).outputs.model_outputs] == [3]
    assert [used.model_id for used in run_of(converted).inputs.model_inputs] == [models[trained].model_id]
    assert [used.model_id for used in run_of(evaluated).inputs.model_inputs] == [models[converted].model_id]


def test_the_experiments_page_says_what_its_stages_say_of_it(folder):
    for stage, text in (("prepare", "What it is."), ("report_training", "| a table |")):
        with stage_run(folder, EXPERIMENT, stage, config_hash="abc") as tracked:
            tracked.describe(text)
        time.sleep(0.01)  # they are in the order of their beginnings, in milliseconds
    experiment = MlflowClient(tracking_uri=store_uri(folder.parent)).get_experiment_by_name(EXPERIMENT)
    links, *texts = experiment.tags["mlflow.note.content"].split("\n\n")
    assert texts == ["What it is.", "| a table |"]
    assert f"#/experiments/{experiment.experiment_id}/runs?viewStateShareKey=table" in links
    assert experiment.tags["mlflow.experimentKind"] == "custom_model_development"


def test_lineage_follows_the_links_upstream(folder):
    keys: dict[str, str] = {}
    for stage, upstream in [
        ("prepare", []),
        ("base", ["prepare"]),
        ("train", ["prepare", "base"]),
        ("convert", ["train"]),
    ]:
        links = {name: [keys[name]] for name in upstream}
        with stage_run(folder, EXPERIMENT, stage, config_hash="abc", upstream=links) as tracked:
            keys[stage] = tracked.key
    other = train(folder, 1, config_hash="another seed").key
    with stage_run(
        folder, EXPERIMENT, "report_training", config_hash="abc", upstream={"train": [keys["train"], other]}
    ) as tracked:
        pass
    found = lineage(folder.parent, keys["convert"])
    assert {stage: len(ids) for stage, ids in found.items()} == dict.fromkeys(keys, 1)
    assert set(lineage(folder.parent, keys["base"])) == {"prepare", "base"}
    found = lineage(folder.parent, tracked.key)
    assert {stage: len(ids) for stage, ids in found.items()} == {
        "report_training": 1,
        "train": 2,
        "prepare": 1,
        "base": 1,
    }
    with pytest.raises(DvpError, match="no run has the tracking_key 000000000000"):
        lineage(folder.parent, "0" * 12)


def test_text_that_filters_might_stumble_over(folder):
    texts = ["it's", 'say "no"', "back`tick", "a' OR '1'='1", "100 %\\", "Δ/ρ"]
    for run in texts:
        for failure in ("`'\"", None):
            with (
                contextlib.suppress(DvpError),
                stage_run(folder, EXPERIMENT, "train", config_hash=run, run=run, inputs=run) as tracked,
            ):
                tracked.log_params({"text": run})
                if failure:
                    raise DvpError(failure)
        again = contents(folder)[tracked.key]
        assert again["params"] == {"text": run}
        assert again["tags"]["run"] == run
        assert again["status"] == "FINISHED"
    assert len(contents(folder)) == len(texts)


def one_of_many(folder: Path, number: int) -> None:
    train(folder, 40, run=f"{RUN}{number}")


def test_eight_jobs_write_at_once_without_losing_a_metric(folder, capfd):
    """8 × 40 steps × 24 numbers into one SQLite file, flushed every step."""
    context = multiprocessing.get_context("spawn")
    jobs = [context.Process(target=one_of_many, args=(folder, number)) for number in range(8)]
    for job in jobs:
        job.start()
    for job in jobs:
        job.join(400)
        assert job.exitcode == 0
    assert "cannot be used" not in capfd.readouterr().err
    runs = [run for run in contents(folder).values() if run["tags"]["stage"] == "train"]
    assert len(runs) == 8
    for run in runs:
        check_training(run, 40)
