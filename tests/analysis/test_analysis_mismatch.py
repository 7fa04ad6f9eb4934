"""What the report makes of the stage `mismatch`: measured here with an engine whose noise is known."""

import math

import numpy as np
import pandas as pd
import pytest
import torch
from made_up_results import make_experiment, measured_of
from transformers import AutoModelForCausalLM, AutoTokenizer

from dvp.analysis import mismatch
from dvp.analysis.load import Reader
from dvp.analysis.mismatch import Density, Group, magnitude
from dvp.data.reward import VERIFIER
from dvp.evaluation import bootstrap
from dvp.files import write_json
from dvp.measurement.files import D_EDGES, NARROWEST
from dvp.measurement.mismatch import measure_mismatch
from dvp.training.rollouts import Problems
from noisy_engine import NoisyEngine

pytestmark = pytest.mark.slow

SIGMA = {"fp32": 0.0, "fp16": 0.003, "bf16": 0.02, "coarse": 0.5}
PROMPTS = [[20, 30, 40, 50], [60, 70], [80, 90, 100]]
ARM = {"method": "rloo", "engine": "fp32", "rho": None}
SINGLE = bootstrap.draws(1, 1, 4, 0, shared=False)  # one problem of one seed


def experiment_of(rhos=(0.01, 0.0001, "exp(-3)"), seeds=(0, 1, 2)):
    return make_experiment(
        seeds=list(seeds),
        training__max_response_tokens=6,
        evaluation__bootstrap_resamples=200,
        mismatch={
            "policies": ["base", ARM],
            "engines": list(SIGMA),
            "problems": len(PROMPTS),
            "responses": 2,
            "rhos": list(rhos),
            "margins": [0.5],
        },
    )


@pytest.fixture(scope="module")
def experiment():
    return experiment_of()


def measure_all(experiment, tiny_model, folder):
    """Every measurement of an experiment, diagnosed for real but for the engine."""
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()
    with torch.no_grad():
        model.model.norm.weight.mul_(5.0)  # sharper, so that there is a head
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    for measurement in experiment.measurements("mismatch"):
        place = folder / "mismatch" / measurement.path
        record = measure_mismatch(
            experiment,
            measurement,
            [f"{name}{measurement.seed}" for name in "abc"],
            Problems(list("abc"), ["7", "7", "8"], PROMPTS, tokenizer.pad_token_id, VERIFIER),
            model,
            NoisyEngine(model, tokenizer, SIGMA[measurement.engine]),
            place,
        )
        config_hash = experiment.config_hash("mismatch", measurement.path)
        write_json(
            place / "mismatch.json", record | {"config_hash": config_hash, "git_commit": "c", "tracking_key": "k"}
        )


@pytest.fixture(scope="module")
def results(experiment, tiny_model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("results")
    measure_all(experiment, tiny_model, folder)
    return folder


@pytest.fixture(scope="module")
def measured(experiment, results):
    return measured_of(experiment, results, "mismatch")


def find(measured, name, **where):
    """The one statistic of this name at exactly this place, of the base model."""
    (one,) = [one for one in measured.statistics if one.name == name and one.where == {"policy": "base"} | where]
    return one


def written(results, name: str) -> pd.DataFrame:
    """A table of the base model on the coarse engine, of all seeds."""
    folders = [results / f"mismatch/base/by~coarse/seed~{seed}" for seed in (0, 1, 2)]
    tables = [pd.read_parquet(folder / f"{name}.parquet") for folder in folders]
    return pd.concat(table.assign(seed=seed) for seed, table in enumerate(tables))


def test_the_kl_is_that_of_all_positions_and_its_interval_comes_of_the_seeds(results, measured):
    of_seed = written(results, "noise").query("source == 'engine'").groupby("seed")
    kl_S, tokens_S = (of_seed[name].sum().to_numpy() for name in ("kl", "tokens"))
    one = find(measured, "kl", engine="coarse")
    assert one.value == pytest.approx(kl_S.sum() / tokens_S.sum())
    # The jackknife over the three seeds, t with two degrees of freedom, of the logarithm.
    without_S = (kl_S.sum() - kl_S) / (tokens_S.sum() - tokens_S)
    reach = 4.302653 * math.sqrt(2 / 3 * ((without_S - without_S.mean()) ** 2).sum()) / one.value
    assert (one.low, one.high) == pytest.approx((one.value * math.exp(-reach), one.value * math.exp(reach)))


def test_the_tail_is_shifted_by_selection_and_the_control_is_not(measured):
    infer = find(measured, "tail_mean", engine="coarse", weighting="infer")
    train = find(measured, "tail_mean", engine="coarse", weighting="train")
    assert infer.low > 0.1 > abs(train.value)
    assert infer.value - train.value == pytest.approx(0.25, rel=0.3)  # σ²
    mode = find(measured, "tail_mode", engine="coarse", weighting="infer")
    assert mode.value > find(measured, "tail_mode", engine="coarse", weighting="train").value


def test_where_no_pair_breaks_a_bound_the_value_is_zero_and_says_of_how_many(measured):
    one = find(measured, "sharp_bound_violations", engine="coarse")
    assert (one.value, one.low, one.high) == (0, 0, 0)
    assert one.how.startswith("none of ")
    assert "pairs" in one.how


def test_the_change_of_the_objective_is_the_importance_weighted_one(results, measured):
    rows = written(results, "safe_sets")
    rows = rows[(rows["rho"] == "0.01") & (rows["side"] == "none")]
    full, pruned = np.exp(rows["log_ratio"]), np.exp(rows["pruned_log_ratio"])
    change = np.average(rows["reward"], weights=pruned) - np.average(rows["reward"], weights=full)
    bound = np.average(rows["pruned_mass_sum"], weights=full)
    assert find(measured, "objective_change", engine="coarse", rho="0.01").value == pytest.approx(change)
    over = find(measured, "objective_change_over_bound", engine="coarse", rho="0.01")
    assert over.value == pytest.approx(abs(change) / bound)
    assert f"{np.isneginf(rows['pruned_log_ratio']).sum()} of {len(rows)} responses" in over.how


def test_a_magnitude_has_the_interval_of_the_signed_number(experiment, results):
    """Seeds whose changes have opposite signs say that it may be 0, not that it is as large as in each of them."""
    group = mismatch.groups(experiment, Reader(experiment, results))[0]
    table = group.tables["safe_sets"]
    right, change = np.arange(len(table)) % 2 == 0, np.array([-0.2, -0.2, 0.6])[table["unit"] // 3]
    group.tables["safe_sets"] = table.assign(
        log_ratio=0.0,
        pruned_log_ratio=np.log1p(np.where(right, change, -change)),
        reward=np.where(right, 1.0, 0.0),
        pruned_mass_sum=0.5,
    )
    known = {one.name: one for one in mismatch.group_statistics(group) if one.where.get("rho") == "0.01"}
    change, over = known["objective_change"], known["objective_change_over_bound"]
    assert change.low < 0 < change.high
    assert over.value == pytest.approx(abs(change.value) / 0.5)
    assert (over.low, over.high) == pytest.approx((0.0, max(-change.low, change.high) / 0.5))


def test_of_responses_that_are_all_kept_the_interval_is_of_as_many_trials_as_there_are_problems(experiment, results):
    group = mismatch.groups(experiment, Reader(experiment, results))[0]
    group.tables["prefixes"]["kept"] = 1.0
    [kept] = [one for one in mismatch.group_statistics(group) if one.name == "kept_by_length"][:1]
    assert (kept.value, kept.low, kept.high) == pytest.approx((1.0, 0.025 ** (1 / 9), 1.0))


@pytest.mark.parametrize(
    ("signed", "expected"),
    [((-3, -4, -1), (3, 1, 4)), ((3, 1, 4), (3, 1, 4)), ((-1, -4, 2), (1, 0, 4)), ((1, -2, 4), (1, 0, 4))],
)
def test_the_magnitude_of_an_interval(signed, expected):
    assert magnitude(*signed) == expected


def test_what_pruning_can_remove_is_a_share_of_all_seeds_and_grows_with_rho(results, measured):
    rows = written(results, "safe_sets")
    for name in ("kl", "squared_score"):
        shares = {}
        for rho, own in rows[rows["side"] == "none"].groupby("rho"):
            shares[rho] = own[f"{name}_outside"].sum() / own[name].sum()
            one = find(measured, f"{name}_outside", engine="coarse", rho=rho)
            assert one.value == pytest.approx(shares[rho])
            assert 0 <= one.low <= one.value <= one.high <= 1
        assert shares["exp(-3)"] > shares["0.01"] > shares["0.0001"]


def test_how_the_mismatch_adds_up_over_a_response(results, measured):
    rows = written(results, "prefixes")
    assert sorted(set(rows["length"])) == [1, 2, 4, 6]
    for length, own in rows.groupby("length"):
        weight = [math.exp(one) for one in own["log_ratio"]]
        expected = {
            "kl": own["kl"].sum() / len(own),
            "variance": np.var(own["log_ratio"]),
            "kept": sum(0.5 <= one <= 2 for one in weight) / len(own),
            "ess": sum(weight) ** 2 / sum(one**2 for one in weight) / len(own),
        }
        for name, value in expected.items():
            one = find(measured, f"{name}_by_length", engine="coarse", length=str(length))
            assert one.value == pytest.approx(value)
            assert one.low <= one.value <= one.high


def test_a_mode_is_not_known_more_finely_than_the_bins(measured):
    for weighting in ("infer", "train"):
        one = find(measured, "head_mode", engine="fp32", weighting=weighting)
        assert one.high - one.low >= 0.99 * NARROWEST


def test_a_single_problem_has_no_interval(experiment, results):
    (measurements, *_) = mismatch.groups(experiment, Reader(experiment, results))
    tables = {name: table[table["unit"] == 0] for name, table in measurements.tables.items()}
    one = Group(measurements.policy, measurements.engine, tables, SINGLE, measurements.sources)
    for found in mismatch.group_statistics(one):
        assert math.isnan(found.low)
        assert math.isnan(found.high)


@pytest.mark.parametrize(("centre", "width"), [(0.3, 0.1), (-2.0, 0.7), (0.0, 1e-6), (5e-3, 2e-3)])
def test_the_mode_of_a_known_density_is_found(centre, width):
    """Half a thousand tokens whose d is normal: d enters by the engine's log-probs, all p alike."""
    generator = np.random.default_rng(0)
    d = centre + width * generator.standard_normal(500)
    low = np.array([max(edge for edge in D_EDGES if edge < one) for one in d])
    high = np.array([min(edge for edge in D_EDGES if edge >= one) for one in d])
    columns = {"unit": 0, "d_low": low, "d_high": high, "infer": 1.0, "infer_squared": 1.0, "infer_d": d}
    rows = pd.DataFrame(columns)
    density = Density(Group("base", "x", {}, SINGLE, ()), rows, "infer")
    assert density.mode_R == pytest.approx(centre, abs=max(0.5 * width, 5e-5))
    grid = np.linspace(centre - 20 * max(width, 1e-4), centre + 20 * max(width, 1e-4), 40_001)
    assert np.trapezoid(density.at(grid)[0], grid) == pytest.approx(1.0, abs=0.02)
