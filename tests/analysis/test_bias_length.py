"""The bias over the length of responses: planted powers against what the report makes of them."""

import math
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from made_up_bias import bias_experiment
from test_analysis_bias import found

from dvp.analysis import bias_length
from dvp.analysis.tables import make_tables
from dvp.experiment.config import Experiment
from dvp.experiment.loading import parse_experiment

pytestmark = pytest.mark.slow

LENGTHS = {"short": 40.0, "middle": 120.0, "long": 400.0}
ESTIMATORS = [{"method": ["rloo", "rloo_mis"]}, {"method": ["dvp", "dvp_mis"], "rho": "0.01"}]
T_4 = 2.776445  # 0.975 quantile of t with 4 degrees of freedom


def experiment_of(seeds: int = 5, engines: tuple[str, ...] = ("fp32", "coarse")) -> Experiment:
    """With tasks of three lengths."""
    value = bias_experiment(policies=["base"], engines=list(engines), estimators=ESTIMATORS).model_dump(mode="json")
    for name in LENGTHS:
        value["sources"][name] = value["sources"]["stories"] | {"seed": len(name)}
    value["data"]["evaluation"] = list(LENGTHS)
    value["evaluation"]["samples_per_problem"] |= dict.fromkeys(LENGTHS, 1)
    # Not in the order of their lengths.
    value["bias"]["tasks"] = ["middle", "long", "short"]
    value["seeds"] = list(range(seeds))
    return parse_experiment(value, "test.yaml")


def plant(
    experiment,
    squared_bias,
    *,
    separate=lambda method, tokens, seed: math.nan,
    norm=lambda tokens, seed: 2.0,
    ess=lambda engine, task: 0.9,
    lengths=LENGTHS,
):
    """squared_bias(method, tokens, seed): over |g|², as the stage writes it; separate: the same by other samples."""
    rows = [
        {"policy": "base", "engine": one.engine, "task": one.task, "seed": one.seed, "method": method}
        | {"rho": rho or "none", "source": f"bias/{one.path}/bias.json", "weight_ess": ess(one.engine, one.task)}
        | {"squared_norm": norm(LENGTHS[one.task], one.seed), "response_tokens": lengths[one.task]}
        | {"reference_reward": 0.5 + 0.01 * one.seed}
        | {"paired_squared_bias": squared_bias(method, LENGTHS[one.task], one.seed)}
        | {"squared_bias": separate(method, LENGTHS[one.task], one.seed)}
        for one in experiment.measurements("bias")
        for method, rho in experiment.estimators
    ]
    reader = SimpleNamespace(bias={"estimators": pd.DataFrame(rows)})
    statistics = list(bias_length.statistics(experiment, reader))
    table = make_tables(experiment, statistics)["bias_length_table"]
    return SimpleNamespace(statistics=statistics, table=table)


def a_power(method, tokens, seed):
    """Of naive RLOO T^1.5, of MIS T^0.5; DVP takes a tenth of either at 40 tokens and a tenth more by doubling."""
    scale = 1e-4 * (1 + 0.2 * seed)
    unpruned = scale * tokens ** (0.5 if "mis" in method else 1.5)
    return unpruned * (1 if method.startswith("rloo") else 0.9 - 0.1 * math.log2(tokens / 40))


def test_planted_powers_are_found():
    measured = plant(experiment_of(), a_power, norm=lambda tokens, seed: 3.0 * tokens)
    for engine in ("fp32", "coarse"):
        for method, power in (("rloo", 1.5), ("rloo_mis", 0.5)):
            where = {"policy": "base", "engine": engine, "method": method}
            assert found(measured, "bias_exponent", **where).value == pytest.approx(power)
            # |g|² grows with T here, and the absolute bias by as much more.
            assert found(measured, "absolute_bias_exponent", **where).value == pytest.approx(power + 1)
    assert found(measured, "response_tokens", task="middle").value == 120
    assert found(measured, "reward", task="middle").value == pytest.approx(0.52)
    assert "Correct responses of the trainer's own policy: short 52 %, middle 52 %, long 52 %." in measured.table.notes


def test_the_interval_by_hand():
    """One seed left out at a time; slopes by numpy's own fit."""
    rng = np.random.default_rng(1)
    noise = {(name, seed): rng.uniform(0.5, 2.0) for name in LENGTHS.values() for seed in range(5)}
    norms = {place: rng.uniform(1.0, 3.0) for place in noise}
    measured = plant(
        experiment_of(engines=("coarse",)),
        lambda method, tokens, seed: 1e-4 * tokens * noise[tokens, seed],
        norm=lambda tokens, seed: norms[tokens, seed],
    )

    def slope(seeds):
        relative = []
        for tokens in LENGTHS.values():
            bias = sum(1e-4 * tokens * noise[tokens, seed] * norms[tokens, seed] for seed in seeds)
            relative.append(bias / sum(norms[tokens, seed] for seed in seeds))
        return np.polyfit(np.log(list(LENGTHS.values())), np.log(relative), 1)[0]

    left_out = [slope([seed for seed in range(5) if seed != out]) for out in range(5)]
    reach = T_4 * math.sqrt(4 * np.var(left_out))
    one = found(measured, "bias_exponent", method="rloo")
    assert one.value == pytest.approx(slope(range(5)))
    assert (one.low, one.high) == pytest.approx((one.value - reach, one.value + reach))
    assert len(one.sources) == 15


def test_an_engine_whose_weights_are_too_heavy_has_the_bias_by_other_samples():
    """At one task and seed is enough: two kinds of estimates would not be of one slope."""
    heavy = {"middle": 0.9, "long": 0.3, "short": 0.9}
    measured = plant(
        experiment_of(),
        a_power,
        separate=lambda method, tokens, seed: 2e-4 * tokens**0.8 * (0.4 if method.startswith("dvp") else 1.0),
        ess=lambda engine, task: heavy[task] if engine == "coarse" else 0.9,
    )
    for engine, power, smallest, samples in (("fp32", 1.5, 0.9, "the same"), ("coarse", 0.8, 0.3, "other")):
        one = found(measured, "bias_exponent", engine=engine, method="rloo")
        assert one.value == pytest.approx(power)
        assert f"∇J by {samples} samples" in one.how
        assert found(measured, "weight_ess_smallest", engine=engine, method="rloo").value == smallest
    assert found(measured, "relative_bias", engine="coarse", method="rloo", task="short").value == pytest.approx(
        2e-4 * 40**0.8
    )
    row = measured.table.frame().set_index(["engine", "method"]).loc[("coarse", "rloo")]
    assert row["weight_ess_smallest"] == 0.3
    assert "From 50 % on" in " ".join(measured.table.notes)


def test_where_a_bias_is_not_above_0_there_is_no_power():
    measured = plant(
        experiment_of(), lambda method, tokens, seed: -1e-5 if method == "rloo_mis" and tokens == 40 else 1e-3
    )
    assert {one.where["task"] for one in measured.statistics if one.name == "relative_bias"} == set(LENGTHS)
    assert found(measured, "bias_exponent", engine="fp32", method="rloo").value == pytest.approx(0)
    assert not [one for one in measured.statistics if one.name == "bias_exponent" and one.where["method"] == "rloo_mis"]


def test_lengths_that_hardly_differ_have_no_slope():
    alike = {"short": 639.0, "middle": 639.5, "long": 640.0}
    measured = plant(experiment_of(), a_power, lengths=alike)
    named = {one.name for one in measured.statistics}
    assert named == {"relative_bias", "weight_ess_smallest", "response_tokens", "reward"}


def test_one_seed_has_values_and_no_intervals():
    measured = plant(experiment_of(seeds=1), a_power)
    one = found(measured, "bias_exponent", engine="coarse", method="rloo")
    assert one.value == pytest.approx(1.5)
    assert math.isnan(one.low)
    assert "no interval" in one.how
