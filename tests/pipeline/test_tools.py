"""A tool, an axis of the grid and scores along training through the whole DAG, for real, on smoke_tools."""

import json

import pandas as pd
import pytest
from mlflow.tracking import MlflowClient
from working_copy import Copy

from dvp.tracking.store import store_uri

pytestmark = [pytest.mark.slow, pytest.mark.nightly, pytest.mark.timeout(1500)]
NAME = "smoke_tools"
RUN = "method~otb/engine~fp32/rho~none/group_size~{group_size}/seed~0"
RUNS = [RUN.format(group_size=size) for size in (2, 4)]
STEPS = {"/step~2": 2, "": 3}
"""What follows a run's path, and after which step that model is."""


@pytest.fixture(scope="module")
def copy(tmp_path_factory, root) -> Copy:
    copy = Copy(tmp_path_factory.mktemp("tools"), root, "--config", f"experiment={NAME}")
    done = copy.snakemake()
    assert done.returncode == 0, done.stdout[-3000:]
    return copy


@pytest.fixture(scope="module")
def folder(copy):
    return copy.results / NAME


def test_what_the_tool_wrote_is_in_the_responses_and_trains_nothing(folder):
    for run in RUNS:
        rows = [json.loads(line) for line in (folder / "runs" / run / "metrics.jsonl").read_text().splitlines()]
        assert all(row["called_fraction"] > 0 and row["tool_tokens_mean"] > 0 for row in rows)
        recorded = pd.read_parquet(folder / "runs" / run / "responses.parquet")
        for _, response in recorded[recorded["written"].map(lambda written: not all(written))].iterrows():
            tool = ~response["written"]
            assert (response["weight"][tool] == 0).all()
            assert (response["advantage"][tool] == 0).all()
            assert (response["log_prob"][response["written"]] < 0).all()
            text = "".join(response["text"][tool])
            assert text.startswith("<result>")
            assert text.endswith("</result>")


def test_every_model_is_scored_with_the_tool_along_training_and_at_its_end(folder):
    for run in RUNS:
        for step in STEPS:
            scores = json.loads((folder / f"evals/{run}{step}/held_out/scores.json").read_text())
            assert scores["called_fraction"] > 0
            samples = pd.read_parquet(folder / f"evals/{run}{step}/held_out/samples.parquet")
            called = samples[samples["calls"] > samples["failed_calls"]]
            assert len(called) > 0
            assert called["response"].str.contains("</tool><result>", regex=False).all()
            conversion = json.loads((folder / f"models/{run}{step}/conversion.json").read_text())
            assert conversion["run"] == run + step
            assert conversion["identical_weights"] > 0


def test_the_tables_have_the_axis_and_the_curve(folder):
    curve = pd.read_csv(folder / "tables/score_curve.csv")
    assert curve.groupby("training.group_size")["step"].apply(list).to_dict() == {2: [0, 2, 3], 4: [0, 2, 3]}
    assert (curve["score_low"] <= curve["score"]).all()
    assert (curve["score"] <= curve["score_high"]).all()
    table = pd.read_csv(folder / "tables/curve_table.csv")
    assert table["training.group_size"].tolist() == [2, 4]
    assert (folder / "figures/score_curve.png").read_bytes().startswith(b"\x89PNG")
    for run, size, tokens in zip(RUNS, (2, 4), table["sampled_tokens"], strict=True):
        rows = [json.loads(line) for line in (folder / "runs" / run / "metrics.jsonl").read_text().splitlines()]
        assert tokens == pytest.approx(sum(4 * size * row["response_tokens_mean"] for row in rows))


def test_the_store_has_the_setting_and_the_scores_of_every_evaluated_step(copy):
    client = MlflowClient(tracking_uri=store_uri(copy.results))
    experiment = client.get_experiment_by_name(NAME)
    for size in (2, 4):
        [run] = client.search_runs(
            [experiment.experiment_id], f"params.group_size = '{size}' and tags.stage = 'train' and tags.policy != ''"
        )
        history = client.get_metric_history(run.info.run_id, "eval/held_out/avg_at_2")
        assert sorted({point.step for point in history}) == sorted(STEPS.values())


def test_a_second_run_has_nothing_to_do(copy):
    assert "Nothing to be done" in copy.snakemake().stdout
