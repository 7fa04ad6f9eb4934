"""Models under several policies, for real: sampled, scored, told apart in the store, and not sampled again."""

import json

import pandas as pd
import pytest
from mlflow.tracking import MlflowClient
from working_copy import Copy

from dvp.tracking.store import store_uri

pytestmark = [pytest.mark.slow, pytest.mark.nightly, pytest.mark.timeout(1500)]
NAME = "smoke_matrix"
MIS, DVP_MIS = (
    f"method~{part}/seed~0" for part in ("rloo_mis/engine~coarse/rho~none", "dvp_mis/engine~coarse/rho~0.01")
)
SAMPLERS = {"coarse": ("none", "0.01"), "fp32": ("0.01",)}


@pytest.fixture(scope="module")
def copy(tmp_path_factory, root) -> Copy:
    copy = Copy(tmp_path_factory.mktemp("matrix"), root, "--config", f"experiment={NAME}")
    done = copy.snakemake()
    assert done.returncode == 0, done.stdout[-3000:]
    return copy


@pytest.mark.parametrize("model", ["base", MIS, DVP_MIS])
def test_each_model_is_sampled_with_each_engine_and_vocabulary(copy, model):
    folder = copy.results / NAME / "evals" / model
    responses = {}
    for engine, rhos in SAMPLERS.items():
        for rho in rhos:
            of = folder / f"by~{engine}" / f"min_p~{rho}" / "held_out"
            scores = json.loads((of / "scores.json").read_text())
            expected = {"run": model, "engine": engine, "rho": None if rho == "none" else rho, "task": "held_out"}
            assert expected.items() <= scores.items()
            responses[engine, rho] = pd.read_parquet(of / "samples.parquet")
    responses["fp32", "none"] = pd.read_parquet(folder / "held_out/samples.parquet")
    # The same seeds of the same problems; a model that has hardly been trained has a long tail, which ρ cuts off.
    for samples in responses.values():
        assert list(samples["seed"]) == list(responses["fp32", "none"]["seed"])
    texts = {tuple(samples["response"]) for samples in responses.values()}
    assert len(texts) == 4


def test_the_store_tells_them_apart(copy):
    client = MlflowClient(tracking_uri=store_uri(copy.results))
    experiment = client.get_experiment_by_name(NAME)
    runs = client.search_runs([experiment.experiment_id], f"tags.run = '{DVP_MIS}' and tags.stage = 'evaluate'")
    assert len(runs) == 4
    for run in runs:
        engine, rho = run.data.params["evaluation.engine"], run.data.params.get("evaluation.rho")
        default = (engine, rho) == ("fp32", None)
        task = "held_out" if default else f"held_out-by_{engine}-min_p_{rho or 'none'}"
        assert {name for name in run.data.metrics if "avg_at" in name} == {f"eval/{task}/avg_at_2"}
    [trained] = client.search_runs([experiment.experiment_id], f"tags.run = '{DVP_MIS}' and tags.stage = 'train'")
    assert "eval/held_out/avg_at_2" in trained.data.metrics


def test_the_table_has_all_of_them_and_nothing_is_left_to_do(copy):
    table = pd.read_csv(copy.results / NAME / "tables/matrix_table.csv")
    assert list(table["role"].fillna("")) == ["base", "evaluation_only", "reference", "", "evaluation_only"]
    rows = pd.read_csv(copy.results / NAME / "tables/overview_table.csv").set_index("point")
    assert list(rows["collapsed"]) == ["0 / 1", "0 / 1"]
    assert rows["kept"].between(0, 1).all()
    assert (rows["seconds_per_step"] > 0).all()
    assert (copy.results / NAME / "figures/evaluation_matrix.png").read_bytes().startswith(b"\x89PNG")
    assert "Nothing to be done" in copy.snakemake().stdout
