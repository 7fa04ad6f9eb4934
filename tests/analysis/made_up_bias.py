"""Made-up results of stage `bias`: simulated gradients, measured by the core, in the files that the stage writes."""

from pathlib import Path

import numpy as np
import pandas as pd
import torch

from dvp.experiment.config import Experiment
from dvp.experiment.grid import Measurement
from dvp.experiment.loading import load_experiment, parse_experiment
from dvp.files import write_json
from dvp.measurement.bias import BiasTables, _numbers, _replicates
from dvp.measurement.estimator_bias import STATISTICS, VARIANCE_STATISTICS, gradient_statistics, inner_products

CONFIG = Path(__file__).parents[2] / "config"
LENGTH = 30


def bias_experiment(**changes) -> Experiment:
    """The experiment `estimator_bias` with two policies and two engines, and changes to its `bias`."""
    value = load_experiment("estimator_bias", CONFIG).model_dump(mode="json")
    policies = ["base", {"method": "rloo", "engine": "fp32"}]
    sizes = {"batches": 24, "reference_batches": 48}
    value["bias"] |= {"policies": policies, "engines": ["fp32", "coarse"]} | sizes | changes
    return parse_experiment(value, Path("test.yaml"))


def truth(method: str, rho: str | None, engine: str) -> tuple[float, float]:
    """Squared bias (along g) and variance, of |g|² = 1."""
    pruned = 0.6 if rho == "0.01" else 1.0
    variance = {"seq_is": 40.0, "mis": 2.0}.get(method.partition("_")[2], 6.0) * pruned
    squared_bias = 0.0 if engine == "fp32" else 0.5 if method in ("rloo", "dvp") else 0.05
    return squared_bias, variance


def paired_numbers(difference_nD, y_mD, rho: str | None, engine: str, seed: int) -> dict[str, float]:
    """Weights that are too heavy on the coarse engine, but not those of its pruned samples."""
    paired = gradient_statistics(inner_products(difference_nD, difference_nD), inner_products(y_mD, y_mD))["signal"]
    pruned = paired if rho else None
    row = _numbers({"paired_squared_bias": paired})
    row |= {"weight_ess": 0.95 if engine == "fp32" else 0.3, "weight_largest_share": 0.001}
    row["weight_mean"] = 0.95 + 0.02 * seed
    for name, value in list(row.items()):
        base, _, end = name.rpartition("_")
        renamed = f"{base}_pruned_{end}" if end in ("se", "low", "high") else f"{name}_pruned"
        row[renamed] = value if pruned else float("nan")
    return row | ({"weight_ess_pruned": 0.8} if pruned else {})


def write_cell(experiment: Experiment, results: Path, measurement: Measurement) -> None:
    """What the stage would have written."""
    rng = np.random.default_rng([measurement.seed, len(measurement.path)])
    noise_nD = rng.normal(size=(experiment.bias.batches, LENGTH)) / LENGTH**0.5
    g_D = np.eye(LENGTH)[0]
    y_mD = torch.tensor(g_D + rng.normal(size=(experiment.bias.reference_batches, LENGTH)) * (2 / LENGTH) ** 0.5)
    rows, parts, variances, replicates = [], [], [], []
    for method, rho in experiment.estimators:
        squared_bias, planted = truth(method, rho, measurement.engine)
        own_nD = noise_nD + 0.2 * rng.normal(size=noise_nD.shape) / LENGTH**0.5
        x_nD = torch.tensor(g_D * (1 + squared_bias**0.5) + own_nD * (planted / 1.04) ** 0.5)
        found = gradient_statistics(inner_products(x_nD, x_nD), inner_products(y_mD, y_mD), inner_products(x_nD, y_mD))
        where, bias = {"method": method, "rho": rho}, {name: found[name] for name in STATISTICS}
        row = where | {"label": experiment.methods[method].label} | _numbers(bias)
        empty = 3 if method.endswith("geo_rs") else 0
        row |= {"batches": len(x_nD), "empty_batches": empty, "kept_fraction": 0.8, "mean_weight": 0.9}
        rows.append(row | {"outside_safe_fraction": 0.0, "reward": 0.4})
        rows[-1] |= paired_numbers(x_nD - own_nD * planted**0.5 - g_D, y_mD, rho, measurement.engine, measurement.seed)
        parts += _replicates(where, bias)
        # Of the coordinates a bin has its share, and so of the variance; the signal, the first of them, is the first's.
        bins = np.array_split(np.arange(LENGTH), len(experiment.positions) or 1)
        for position, own in [("all", np.arange(LENGTH)), *zip(experiment.positions, bins, strict=False)]:
            part_nD = x_nD[:, own]
            measured = gradient_statistics(inner_products(part_nD, part_nD), inner_products(y_mD, y_mD))
            at, variance = where | {"position": position}, {name: measured[name] for name in VARIANCE_STATISTICS}
            variances.append(at | _numbers(variance))
            replicates += _replicates(at, variance)
    positions = ["all", *experiment.positions] if experiment.positions else []
    proxy = pd.DataFrame(
        {
            "position": pd.Series(positions, dtype=object),
            "rank_correlation": [0.9 - 0.1 * place + 0.01 * measurement.seed for place in range(len(positions))],
            "rank_correlation_se": [0.02] * len(positions),
            "tokens": [100] * len(positions),
        }
    )
    reference = {"batches": experiment.bias.reference_batches, "squared_norm": 1.0, "squared_norm_se": 0.1}
    record = {
        "config_hash": experiment.config_hash("bias", measurement.path),
        "git_commit": "c" * 40,
        "tracking_key": f"bias {measurement.path}",
        "problems": ["1", "2"],
        "responses_a_batch": 64,
        "batches": experiment.bias.batches,
        "paired": {"weight_ess": 0.3, "weight_largest_share": 0.001, "weight_mean": 1.0, "smallest_ess": 0.5},
        "parameters": LENGTH,
        "coordinates": LENGTH,
        "sketched": False,
        "reference": reference | {"reward": 0.4, "response_tokens_mean": 30.0},
    }
    replicated = pd.concat(parts, ignore_index=True), pd.DataFrame(variances), pd.concat(replicates, ignore_index=True)
    folder = results / "bias" / measurement.path
    files = BiasTables(pd.DataFrame(rows), *replicated, proxy, record).write(folder)
    write_json(folder / "bias.json", record | {"files": files})
