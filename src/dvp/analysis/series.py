"""Make the curves and densities of a report, which figures draw besides estimates, as one long table.

A row is a point of a curve: quantity, coordinates as of statistics (None where they do not apply), x, value, and low
and high where it has an interval. Curves are smoothed only when they are drawn.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pandas as pd

from dvp.analysis.load import Reader
from dvp.analysis.mismatch import Density, Group
from dvp.analysis.points import where_of
from dvp.experiment.config import Experiment
from dvp.measurement.files import ENGINE, NARROWEST, SOURCES

SERIES = "report/series.parquet"  # in an experiment's folder
NUMBERS = ("x", "value", "low", "high")
BY_STEP = ("reward", "k3", "gradient_norm")
# Ranges of p for which the density of d is drawn, from the tail to the head.
PARTS = ((0.0, 1e-6), (1e-6, 1e-4), (1e-4, 1e-2), (1e-2, 0.5), (0.5, 0.9), (0.9, 1.0))
WEIGHTINGS = ("infer", "train")


def joined(frames: list[pd.DataFrame]) -> pd.DataFrame:
    """Concatenate tables into one, with all coordinates that any of them has."""
    every = pd.concat([pd.DataFrame(columns=["quantity", *NUMBERS]), *frames], ignore_index=True)
    coordinates = [column for column in every if column not in NUMBERS]
    texts = every[coordinates].astype(object).where(every[coordinates].notna(), None)
    return texts.join(every[[*NUMBERS]].astype("float32"))


def _curve(quantity: str, where: dict[str, Any], x: Any, value: Any, low: Any = np.nan, high: Any = np.nan) -> Any:
    return pd.DataFrame({"x": x, "value": value, "low": low, "high": high}).assign(quantity=quantity, **where)


def training(experiment: Experiment, loaded: Reader) -> Iterator[pd.DataFrame]:
    """Yield the curves BY_STEP of every run; a gradient norm of 0, as in a skipped step, becomes NaN."""
    for point in experiment.points:
        own = loaded.metrics[loaded.metrics["point"] == point.path]
        own = own.assign(gradient_norm=own["gradient_norm"].where(own["gradient_norm"] > 0))
        for seed, run in own.groupby("seed"):
            where = where_of(experiment, point) | {"seed": str(seed)}
            for name in BY_STEP:
                yield _curve(name, where, run["step"].to_numpy(), run[name].to_numpy())


def mismatch(groups: list[Group]) -> Iterator[pd.DataFrame]:
    """Yield the curves of `_bounds`, `_by_probability` and `_densities` for every policy and engine."""
    for place, group in enumerate(groups):
        yield from _bounds(group)
        # The trainer's own noise barely depends on the engine, so that one engine's positions per policy suffice.
        first = group.policy not in [other.policy for other in groups[:place]]
        yield from _by_probability(group, SOURCES if first else (ENGINE,))
        yield from _densities(group)


def _bounds(group: Group) -> Iterator[pd.DataFrame]:
    """Yield |d| over 2 ε_max of its position by 1 − p: each bin's mean, and largest where d > 0 (above), d < 0 (below).

    x is a bin's upper edge, where the bounds are widest, so that a point above them is a violation.
    """
    bins = group.tables["bounds"].groupby("rest_high")
    pairs = bins[["pairs", "scaled"]].sum()
    for name, value in (
        ("scaled_mean", pairs["scaled"] / pairs["pairs"]),
        ("scaled_above", bins["max_scaled_above"].max()),
        ("scaled_below", bins["max_scaled_below"].max()),
    ):
        shown = value[value > 0]
        yield _curve(name, group.where, shown.index.to_numpy(), shown.to_numpy())
    rest = np.logspace(-6, 0, 60)
    largest = group.tables["noise"].query("source == @ENGINE")["max_epsilon"].max()
    yield _curve("literal_bound", group.where, rest, rest)
    yield _curve("sharp_bound", group.where, rest, np.log1p(rest * np.expm1(2 * largest)) / (2 * largest))


def _by_probability(group: Group, sources: Sequence[str]) -> Iterator[pd.DataFrame]:
    """Yield mean |d| by p/p_max, unweighted and weighted by π_infer, of the engine and of the trainer's own noise.

    x is a bin's middle in the logarithm; bins are a nat wide, but for the most likely token, which has its own.
    """
    for source in sources:
        rows = group.tables["gaps"].query("source == @source")
        for name, above, below in (("mean_abs_d", "abs_d", "pairs"), ("mean_abs_d_weighted", "infer_abs_d", "infer")):
            keys, above_RK = group.binned(rows, "gap_high", above)
            with np.errstate(divide="ignore", invalid="ignore"):
                mean_RK = above_RK / group.binned(rows, "gap_high", below)[1]
            middle = np.where(keys == 0.0, 0.0, np.minimum(np.round(keys), 0.0) - 0.5)
            value, low, high = (
                np.array([group.draws.estimate(mean_R, "ratio") for mean_R in mean_RK.T]).reshape(-1, 3).T
            )
            # A bin that is empty in a replicate holds too few tokens.
            known = np.isfinite(low) & np.isfinite(high)
            where = group.where if source == ENGINE else {"policy": group.policy, "control": source}
            yield _curve(name, where, np.exp(middle[known]), value[known], low[known], high[known])


def _densities(group: Group) -> Iterator[pd.DataFrame]:
    """Yield the density of d, nats, and its mode in each of PARTS, weighted by π_infer and by π_train.

    Each density is scaled to a maximum of 1.
    """
    table = group.tables["histogram"].query("source == @ENGINE")
    for low, high in PARTS:
        rows = table[(table["p_low"] >= low) & (table["p_high"] <= high)]
        part = f"{low:g} < p ≤ {high:g}" if low else f"p ≤ {high:g}"
        if rows.empty:  # an invisible point keeps the panel's place
            yield _curve("density", group.where | {"weighting": "infer", "part": part}, [np.nan], np.nan)
            continue
        densities = {name: Density(group, rows, name) for name in WEIGHTINGS}
        left = min(density.central[0] for density in densities.values())
        right = max(density.central[1] for density in densities.values())
        margin = max(0.25 * (right - left), 2 * NARROWEST)
        even = np.linspace(left - margin, right + margin, 200)
        every = np.concatenate([even, *(density.points_G[::4] for density in densities.values())])
        points = np.unique(every[(every >= even[0]) & (every <= even[-1])])
        for name, density in densities.items():
            where = group.where | {"weighting": name, "part": part}
            height = density.at(points)[0]
            yield _curve("density", where, points, height / height.max())
            yield _curve("density_mode", where, [density.mode_R[0]] * 2, [0.0, 1.0])
