"""What people read in MLflow's lists: names, parameters and groups of metrics, and the views of an experiment."""

import json

import pytest

from dvp.experiment.grid import Run
from dvp.experiment.loading import load_experiment
from dvp.tracking.names import final_metrics, metric_name, policy_params, policy_title, result_name, stage_name
from dvp.tracking.views import links, view_tags

DVP_MIS = Run(method="dvp_mis", engine="coarse", rho="exp(-13)", seed=1)


@pytest.fixture(scope="module")
def experiment():
    return load_experiment("smoke")


def test_metrics_are_in_groups():
    names = {
        "reward": "train/reward",
        "k3": "mismatch/k3",
        "self_noise_k3_bf16": "self_noise/k3_bf16",
        "pruned_mass_mean": "safe/pruned_mass_mean",
        "kept_fraction": "correction/kept_fraction",
        "otb_power": "otb/power",
        "seconds_rollout": "time/seconds_rollout",
        "a_metric_of_tomorrow": "train/a_metric_of_tomorrow",
    }
    assert {key: metric_name(key) for key in names} == names


def test_results_are_below_their_stage():
    assert result_name("evaluate", "aime25", "avg@8") == "eval/aime25/avg_at_8"
    assert result_name("mismatch", "by~coarse-seed~5", "k3") == "mismatch/by_coarse-seed_5/k3"
    assert result_name("convert", "", "max_abs_delta_log_prob") == "convert/max_abs_delta_log_prob"


def test_a_policy_in_words_and_as_parameters(experiment):
    assert policy_title(experiment, DVP_MIS) == "DVP + MIS · coarse · ρ e⁻¹³ · seed 1"
    params = policy_params(experiment, DVP_MIS)
    assert params["rho"] == "0.00000226"
    runs = [Run(method="dvp", engine="coarse", rho=rho, seed=0) for rho in ("0.01", "exp(-13)", "1e-3", "0.5")]
    texts = [policy_params(experiment, run)["rho"] for run in runs]
    assert sorted(texts) == sorted(texts, key=float)  # the store sorts them as text
    assert (params["method"], params["rho_text"], params["seed"]) == ("dvp_mis", "exp(-13)", 1)
    naive = Run(method="rloo", engine="fp32", rho=None, seed=0)
    assert policy_title(experiment, naive) == "RLOO (naive) · fp32 · seed 0"
    assert policy_params(experiment, naive)["rho"] is None
    assert policy_title(experiment, None) == "base model"


def test_a_stage_is_called_by_what_it_does_to_what():
    assert stage_name("train", "", "DVP · coarse") == "DVP · coarse"
    assert stage_name("evaluate", "held_out", "DVP · coarse") == "evaluate held_out · DVP · coarse"
    assert stage_name("report", "", "") == "report"


def test_final_metrics_are_means_of_the_last_steps():
    rows = [{"reward": float(step), "k3": None, "collapsed": step == 15} for step in range(1, 21)]
    assert final_metrics(rows) == {"final/reward": 15.5, "final/collapsed": 1.0}


def test_the_views_are_json_within_mlflows_limit_and_the_links_name_them(experiment):
    tags = view_tags(experiment)
    for name, text in tags.items():
        assert len(text) < 20_000
        view = json.loads(text)
        assert view["orderByKey"] in view["selectedColumns"]
        assert f"viewStateShareKey={name.removeprefix('mlflow.sharedViewState.')}&" in links("1")
