"""A real MLflow store in SQLite: runs continued, linked, and written by several processes at once."""

import multiprocessing
from pathlib import Path

import pytest
from mlflow.tracking import MlflowClient

from dvp.errors import DvpError
from dvp.tracking import create_store, lineage, stage_run, store_name, store_uri

RUN = "method~dvp/engine~coarse/rho~e-13/seed~0"


@pytest.fixture
def results(tmp_path, monkeypatch) -> Path:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    create_store(tmp_path, "tiny")
    return tmp_path


@pytest.fixture
def client(results) -> MlflowClient:
    return MlflowClient(tracking_uri=store_uri(results))


def test_the_store_is_where_it_is_said_to_be(results, monkeypatch):
    assert store_uri(results) == f"sqlite:///{results}/mlflow.db"
    assert (results / "mlflow.db").is_file()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{results}/elsewhere.db")
    create_store(results, "tiny")
    assert (results / "elsewhere.db").is_file()


def test_a_password_is_not_shown(results, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "postgresql://me:se/cr@et@host:5432/mlflow")
    assert store_name(results) == "postgresql://me:***@host:5432/mlflow"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "https://host/mlflow")
    assert store_name(results) == "https://host/mlflow"


@pytest.mark.parametrize("uri", ["nonsense://x", "sqlite:////dev/null/mlflow.db"])
def test_a_store_that_cannot_be_used_is_one_line(tmp_path, monkeypatch, uri):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    with pytest.raises(DvpError) as error:
        create_store(tmp_path, "tiny")
    assert str(error.value).startswith(f"MLflow store {uri}: cannot be used (")
    assert "\n" not in str(error.value)


def test_other_inputs_make_another_run(results):
    ids = set()
    for inputs in ("one", "two", "one"):
        with stage_run(results, "tiny", "train", identity="abc", inputs=inputs, run=RUN) as tracked:
            ids.add(tracked.run_id)
    assert len(ids) == 2


def test_a_stage_that_runs_again_continues_its_run(results, client):
    def run_to(last: int, fail: bool) -> str:
        with stage_run(results, "tiny", "train", identity="abc", run=RUN) as tracked:
            tracked.log_params({"training": {"steps": 4}, "seed": 0})
            for step in range(1, last + 1):
                tracked.log_step(step, {"step": step, "reward": step / 10, "gradient_norm": None, "skipped": False})
            tracked.flush()
            if fail:
                raise DvpError("the node died")
        return tracked.run_id

    with pytest.raises(DvpError):
        run_to(2, fail=True)
    [first] = client.search_runs(["1"], "tags.stage = 'train'")
    assert first.info.status == "FAILED"
    assert first.data.tags["failure"] == "DvpError: the node died"
    assert run_to(4, fail=False) == first.info.run_id
    history = client.get_metric_history(first.info.run_id, "reward")
    assert [(metric.step, metric.value) for metric in history] == [(1, 0.1), (2, 0.2), (3, 0.3), (4, 0.4)]
    again = client.get_run(first.info.run_id)
    assert again.info.status == "FINISHED"
    assert again.data.params == {"training.steps": "4", "seed": "0"}
    with stage_run(results, "tiny", "train", identity="other settings", run=RUN) as tracked:
        assert tracked.run_id != first.info.run_id


def test_stages_of_a_grid_point_share_a_parent_and_carry_the_tags(results, client):
    ids = {}
    for stage in ("train", "convert"):
        with stage_run(results, "tiny", stage, identity="abc", run=RUN) as tracked:
            ids[stage] = tracked.run_id
    parents = {client.get_run(one).data.tags["mlflow.parentRunId"] for one in ids.values()}
    assert len(parents) == 1
    parent = client.get_run(parents.pop())
    assert parent.data.tags["run"] == RUN
    tags = client.get_run(ids["convert"]).data.tags
    assert tags["stage"] == "convert"
    assert tags["config_hash"] == "abc"
    assert len(tags["git_commit"]) >= 7


def test_lineage_follows_the_links_upstream(results):
    ids: dict[str, str] = {}
    for stage, upstream in [
        ("prepare", []),
        ("base", ["prepare"]),
        ("train", ["prepare", "base"]),
        ("convert", ["train"]),
    ]:
        links = {name: ids[name] for name in upstream}
        with stage_run(results, "tiny", stage, identity="abc", upstream=links) as tracked:
            ids[stage] = tracked.run_id
    assert lineage(results, ids["convert"]) == ids
    assert lineage(results, ids["base"]) == {name: ids[name] for name in ("prepare", "base")}
    with pytest.raises(DvpError, match="not in the store"):
        lineage(results, "0" * 32)


def write_many(results: Path, number: int, steps: int) -> None:
    with stage_run(results, "tiny", "train", identity="abc", run=f"{RUN}{number}") as tracked:
        for step in range(1, steps + 1):
            tracked.log_step(step, dict.fromkeys(("reward", "k1", "k3", "seconds"), step * number))
            tracked.flush()


def test_several_jobs_write_at_once_without_losing_a_row(results, client):
    context = multiprocessing.get_context("spawn")
    jobs = [context.Process(target=write_many, args=(results, number, 40)) for number in range(4)]
    for job in jobs:
        job.start()
    for job in jobs:
        job.join(240)
        assert job.exitcode == 0
    runs = client.search_runs(["1"], "tags.stage = 'train'")
    assert len(runs) == 4
    for run in runs:
        number = int(run.data.tags["run"].removeprefix(RUN))
        for name in ("reward", "k1", "k3", "seconds"):
            history = client.get_metric_history(run.info.run_id, name)
            assert [(metric.step, metric.value) for metric in history] == [(s, s * number) for s in range(1, 41)]
