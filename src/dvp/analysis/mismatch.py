"""Compute every number of the stage `mismatch` with its interval.

Everything here is a ratio of sums over problems. Shape suffixes: R replicates, the value first; U units, a
problem of a seed; K columns; D bins of d; G points.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import numpy as np
import pandas as pd

from dvp.analysis.load import Reader
from dvp.analysis.statistics import Statistic
from dvp.evaluation import bootstrap
from dvp.experiment.config import Experiment
from dvp.experiment.grid import Measurement
from dvp.measurement.files import ENGINE, SOURCES

TAIL = (1e-4, 1e-2)
"""Range of p whose tokens count as the tail; rarer ones are rarely sampled."""
HEAD = (0.9, 1.0)
WEIGHTINGS = ("infer", "train")
# Beginnings of units whose intervals are made on the ratio scale; a sum of probabilities may exceed 1.
ON_RATIO_SCALE = ("probability", "ratio", "tokens", "nats per", "nats²")
# Numbers of the table `noise`: column, unit, description; those of OF_ENGINE_ALONE have no control.
NOISE = {
    "kl": ("kl", "nats per token", "KL(q‖p), exact, q"),
    "epsilon_sd": (
        "epsilon_variance",
        "nats",
        "root mean square over positions of ε's standard deviation over the vocabulary, z",
    ),
    "ratio_outside": ("ratio_outside", "fraction of tokens", "sampled tokens with a ratio outside [0.9, 1.1], q"),
    "k3": ("k3", "nats per token", "mean k3 of sampled tokens"),
    "d_positive": ("d_positive", "fraction of tokens", "sampled tokens with d > 0"),
}
OF_ENGINE_ALONE = ("k3", "d_positive")
# Means over positions in the table `safe_sets`: column, unit, description.
MEANS = {
    "safe_size": ("safe_size_train", "tokens", "|V_S|"),
    "safe_size_infer": ("safe_size_infer", "tokens", "|V'_S|"),
    "pruned_mass": ("pruned_mass", "probability", "1 − Z of the trainer"),
    "jaccard": ("jaccard", "fraction", "|V_S ∩ V'_S| / |V_S ∪ V'_S|"),
    "infer_in_train": ("infer_in_train", "fraction", "|V_S ∩ V'_S| / |V'_S|"),
    "train_in_infer": ("train_in_infer", "fraction", "|V_S ∩ V'_S| / |V_S|"),
    "outside_safe": ("outside_train", "fraction of tokens", "what a pruned engine samples outside V_S, exact"),
}
# Shares outside V_S: column of the table `safe_sets`, and the whole that it is a share of.
OUTSIDE = {
    "kl": "KL(q‖p), less q(V_S) times that of both restricted to V_S",
    "squared_score": "E_q‖∇_z log p(a)‖², the power of a sampled token's gradient, its terms outside V_S",
}


def over(above: np.ndarray, below: np.ndarray) -> np.ndarray:
    """Return the ratio; it is not finite where `below` is 0."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return above / below


@dataclass(frozen=True)
class Group:
    """The measurements of one policy and engine, all seeds."""

    policy: str
    engine: str
    tables: dict[str, pd.DataFrame]
    draws: bootstrap.Draws
    sources: tuple[str, ...]
    over: str = ""
    """Description of what intervals are over."""

    @property
    def where(self) -> dict[str, str]:
        """Return the coordinates of its statistics."""
        return {"policy": self.policy, "engine": self.engine}

    def sums(self, rows: pd.DataFrame, columns: list[str]) -> np.ndarray:
        """Return sums of the columns over the rows, (R, K)."""
        per_unit = rows.groupby("unit")[columns].sum().reindex(range(self.draws.count_RU.shape[1]), fill_value=0.0)
        return self.draws.count_RU @ per_unit.to_numpy(dtype=float)

    def ratio(self, rows: pd.DataFrame, above: str, below: str) -> np.ndarray:
        """Return Σ above / Σ below, (R,); NaN if both are 0."""
        return over(*self.sums(rows, [above, below]).T)

    def binned(self, rows: pd.DataFrame, key: str, column: str) -> tuple[np.ndarray, np.ndarray]:
        """Return the values of `key` in increasing order, (K,), and the sums of `column` for each of them, (R, K)."""
        wide = rows.pivot_table(index="unit", columns=key, values=column, aggfunc="sum", fill_value=0.0)
        per_unit = wide.reindex(range(self.draws.count_RU.shape[1]), fill_value=0.0)
        return per_unit.columns.to_numpy(dtype=float), self.draws.count_RU @ per_unit.to_numpy(dtype=float)

    def statistic(
        self,
        name: str,
        value_R: np.ndarray | float,
        unit: str,
        how: str,
        where: dict[str, str] | None = None,
        *,
        resolution: float = 0.0,
        scale: bootstrap.Scale | None = None,
        signed: bool = False,
    ) -> Statistic:
        """Return a number with its interval; a single value, which is a maximum, has none.

        where : coordinates beside policy and engine. resolution : width that is added to the interval.
        scale : of the interval; by default it follows from the unit.
        signed : whether the number is |x|, and the replicates are of an x that has a sign.
        """
        value, low, high, text = value_R, math.nan, math.nan, "a maximum has no interval"
        if np.ndim(value_R):
            single = self.draws.seeds * self.draws.problems == 1
            value, text = value_R[0], "a single problem has no interval" if single else f"95 % over {self.over}"
            if math.isfinite(value):
                scale = "plain" if signed else scale or _scale(unit, value)
                value, low, high = self.draws.estimate(value_R[:1] if single else value_R, scale)
            low, high = low - resolution / 2, high + resolution / 2
        if signed:
            value, low, high = magnitude(value, low, high)
        place = self.where | (where or {})
        return Statistic(name, place, float(value), low, high, unit, f"{how}; {text}", self.sources)


def groups(experiment: Experiment, reader: Reader) -> list[Group]:
    """Return the measurements of each policy and engine; all have the same draws, so that differences are paired."""
    settings, resampling = experiment.mismatch, experiment.evaluation
    draws = bootstrap.draws(
        len(experiment.seeds), settings.problems, resampling.bootstrap_resamples, resampling.seed, shared=False
    )
    result = []
    for policy, engine in product(settings.policies, settings.engines):
        name = policy if policy == "base" else policy.path
        measurements = [Measurement(policy=policy, engine=engine, seed=seed) for seed in experiment.seeds]
        tables = {
            key: table[(table["policy"] == name) & (table["engine"] == engine)].drop(columns=["policy", "engine"])
            for key, table in reader.mismatch.items()
        }
        sources = tuple(f"mismatch/{measurement.path}/mismatch.json" for measurement in measurements)
        result.append(Group(name, engine, tables, draws, sources, over_what(experiment)))
    return result


def over_what(experiment: Experiment) -> str:
    """Say in words what the intervals are over, and how they are made: each seed has problems of its own."""
    if bootstrap.covers_seeds(experiment.seeds):
        return f"{len(experiment.seeds)} seeds, each with problems of its own: jackknife over seeds, quantiles of t"
    return "problems, not over seeds: bootstrap"


def statistics(experiment: Experiment, reader: Reader) -> Iterator[Statistic]:
    """Yield every number of each policy and engine; those that are not defined are left out."""
    for group in groups(experiment, reader):
        yield from group_statistics(group)


def group_statistics(group: Group) -> Iterator[Statistic]:
    """Yield every number of one policy and engine; those that are not defined are left out."""
    for of_table in (_noise, _by_probability, _bounds, _safe_sets, _by_length):
        yield from (one for one in of_table(group) if math.isfinite(one.value))


def _scale(unit: str, value: float) -> bootstrap.Scale:
    if unit.startswith("fraction"):
        # At 0 or 1 the share scale would take problems for trials, but these are shares of many tokens.
        return "share" if 1e-9 < value < 1 - 1e-9 else "plain"
    return "ratio" if unit.startswith(ON_RATIO_SCALE) else "plain"


def magnitude(value: float, low: float, high: float) -> tuple[float, float, float]:
    """Return |x| with its interval, from those of x. Taking |x| of each replicate would make opposite signs alike."""
    nearest = 0.0 if low <= 0 <= high else min(abs(low), abs(high))
    return abs(value), nearest, max(abs(low), abs(high))


def _noise(group: Group) -> Iterator[Statistic]:
    """Yield the mismatch of the engine, and the trainer's own noise as control."""
    every = group.tables["noise"]
    for source in SOURCES:
        rows, own = every[every["source"] == source], source == ENGINE
        prefix, where = ("", {}) if own else ("self_noise_", {"control": source})
        of = "the engine" if own else f"the trainer itself ({source})"
        for name, (column, unit, what) in NOISE.items():
            alone, mean_R = name in OF_ENGINE_ALONE, group.ratio(rows, column, "tokens")
            if own or not alone:
                value_R = np.sqrt(mean_R) if name == "epsilon_sd" else mean_R
                yield group.statistic(f"{prefix}{name}", value_R, unit, what if alone else f"{what} of {of}", where)
        if source == "bf16":
            kl_R = group.ratio(every[every["source"] == ENGINE], "kl", "tokens")
            over_R = over(kl_R, group.ratio(rows, "kl", "tokens"))
            yield group.statistic(
                "kl_over_self_noise", over_R, "ratio", f"KL(q‖p) of the engine over that of {of}", where
            )
        if own:
            largest = rows[["max_abs_log_ratio", "max_epsilon"]].max()
            yield group.statistic(
                "max_abs_log_ratio", largest["max_abs_log_ratio"], "nats", "largest of the sampled tokens"
            )
            yield group.statistic("epsilon_max", largest["max_epsilon"], "nats", "largest ε_max of all positions")


def _by_probability(group: Group) -> Iterator[Statistic]:
    every = group.tables["histogram"]
    how = "mean |d| where p < 1e-2 over that where p > 0.5"

    def tail_over_head(rows: pd.DataFrame, above: str, below: str) -> np.ndarray:
        head, tail = rows[rows["p_low"] >= 0.5], rows[rows["p_high"] <= 1e-2]
        return over(group.ratio(tail, above, below), group.ratio(head, above, below))

    for source in SOURCES:
        prefix, of, where = "self_noise_", f"of the trainer itself ({source})", {"control": source}
        if source == ENGINE:
            prefix, of, where = "", "all pairs alike", {}
        over_R = tail_over_head(every[every["source"] == source], "abs_d", "pairs")
        yield group.statistic(f"{prefix}tail_over_head", over_R, "ratio", f"{how}, {of}", where)
    table = every[every["source"] == ENGINE]
    for name in WEIGHTINGS:
        weighted, where = f"weighted by π_{name}", {"weighting": name}
        over_R = tail_over_head(table, f"{name}_abs_d", name)
        yield group.statistic("tail_over_head_weighted", over_R, "ratio", f"{how}, {weighted}", where)
        for part, (low, high) in (("tail", TAIL), ("head", HEAD)):
            rows = table[(table["p_low"] >= low) & (table["p_high"] <= high)]
            if rows.empty:
                continue
            rows = rows.assign(positive=rows[name].where(rows["d_low"] >= 0, 0.0))
            of, density = f"d of tokens with p in ({low:g}, {high:g}], {weighted}", Density(group, rows, name)
            of_mode = f"mode of {of}: Gaussian kernels; the interval is widened by the bin in which it lies"
            yield group.statistic(f"{part}_mode", density.mode_R, "nats", of_mode, where, resolution=density.resolution)
            yield group.statistic(f"{part}_mean", group.ratio(rows, f"{name}_d", name), "nats", f"mean {of}", where)
            positive_R = group.ratio(rows, "positive", name)
            yield group.statistic(f"{part}_positive", positive_R, "fraction", f"P(d > 0) for {of}", where)


def _bounds(group: Group) -> Iterator[Statistic]:
    pairs = group.tables["bounds"]
    for kind in ("literal", "sharp"):
        count, of = pairs[f"{kind}_violations"].sum(), f"{pairs['pairs'].sum():,.0f} (position, token) pairs"
        how = f"{f'{count:,.0f}' if count else 'none'} of {of}, by more than rounding"
        violations_R = group.ratio(pairs, f"{kind}_violations", "pairs")
        yield group.statistic(f"{kind}_bound_violations", violations_R, "fraction of pairs", how)
    how = "largest |d| over the literal bound that it violates; 0 without a violation"
    yield group.statistic("max_over_literal_bound", pairs["max_over_literal"].max(), "ratio", how)


class Density:
    """The density of d over some rows of the histogram, by Gaussian kernels.

    The bandwidth is Silverman's for the value, and serves all replicates; in a wider bin it is half the bin's width.
    """

    def __init__(self, group: Group, rows: pd.DataFrame, weighting: str):
        lows_D, self._weight_RD = group.binned(rows, "d_low", weighting)
        total = rows.groupby("d_low")[[weighting, f"{weighting}_squared", f"{weighting}_d"]].sum()
        weight_D, squared_D, sum_D = total.to_numpy(dtype=float).T
        with np.errstate(divide="ignore", invalid="ignore"):
            self._centre_D = np.where(weight_D > 0, sum_D / weight_D, np.clip(lows_D, -100, 100))
        share_D = weight_D / weight_D.sum()
        mean = share_D @ self._centre_D
        deviation = math.sqrt(share_D @ (self._centre_D - mean) ** 2)
        cumulative_D = share_D.cumsum()

        def quantile(level: float) -> float:
            return self._centre_D[min(int((cumulative_D < level).sum()), len(share_D) - 1)]

        self.central = quantile(0.05), quantile(0.95)
        low, high = quantile(0.01), quantile(0.99)
        # A normal distribution's quartiles are 1.349 σ apart.
        spread = min(deviation, (quantile(0.75) - quantile(0.25)) / 1.349)
        silverman = 0.9 * spread * (squared_D.sum() / weight_D.sum() ** 2) ** 0.2
        highs_D = rows.groupby("d_low")["d_high"].first().to_numpy(dtype=float)
        widths_D = np.where(np.isfinite(highs_D - lows_D), highs_D - lows_D, 1.0)
        self._bandwidth_D = np.maximum(silverman, widths_D / 2)
        inside_D = self._centre_D[(self._centre_D >= low) & (self._centre_D <= high)]
        # Eight points from each bin's centre to the next, so that they are as dense as the bins.
        places_G = np.arange(8 * (len(inside_D) - 1) + 1) / 8
        self.points_G = np.interp(places_G, np.arange(len(inside_D)), inside_D)
        modes_R = self.points_G[self.at(self.points_G).argmax(axis=1)]
        self.mode_R = np.where(self._weight_RD.sum(axis=1) > 0, modes_R, np.nan)
        """The d of highest density, for the value and each replicate; NaN without a token."""
        self.resolution = float(widths_D[np.abs(self._centre_D - self.mode_R[0]).argmin()])
        """Width of the bin of d in which the mode lies; the mode is not known more finely."""

    def at(self, points_G: np.ndarray) -> np.ndarray:
        """Return the density at some d, for the value and each replicate, (R, G)."""
        scaled_DG = (points_G[None] - self._centre_D[:, None]) / self._bandwidth_D[:, None]
        kernel_DG = np.exp(-0.5 * scaled_DG**2) / (self._bandwidth_D[:, None] * math.sqrt(2 * math.pi))
        total_R1 = self._weight_RD.sum(axis=1, keepdims=True).clip(min=np.finfo(float).tiny)
        return self._weight_RD @ kernel_DG / total_R1


def _safe_sets(group: Group) -> Iterator[Statistic]:
    table = group.tables["safe_sets"]
    # Only ratios of the weights matter, so the largest may be 1.
    shift = table["log_ratio"].max()
    weight = np.exp(table["log_ratio"] - shift)
    table = table.assign(
        # The table has means over a response's positions; ratios need sums.
        **{name: table[column] * table["tokens"] for name, (column, _, _) in MEANS.items()},
        responses=1.0,
        weight=weight,
        weighted_reward=weight * table["reward"],
        pruned_weight=np.exp(table["pruned_log_ratio"] - shift),
        pruned_weighted_reward=np.exp(table["pruned_log_ratio"] - shift) * table["reward"],
        bound=weight * table["pruned_mass_sum"],
    )
    for (rho, margin, side), rows in table.groupby(["rho", "margin", "side"], sort=False):
        plain = side == "none"
        where = {"rho": rho} if plain else {"rho": rho, "margin": f"{margin:g}", "side": side}
        suffix = "" if plain else "_margin"
        with_margin = "" if plain else f", with a margin of ε̂ = {margin:g} on the {side}'s side"
        for name, (_, unit, what) in MEANS.items():
            mean_R = group.ratio(rows, name, "tokens")
            yield group.statistic(f"{name}{suffix}", mean_R, unit, f"mean over positions of {what}{with_margin}", where)
        outside_R = group.ratio(rows, "tokens_outside_train", "tokens_inside_infer")
        how = f"of the sampled tokens in V'_S, those outside V_S{with_margin}"
        yield group.statistic(f"outside_safe_sampled{suffix}", outside_R, "fraction of tokens", how, where)
        if not plain:
            continue
        for name, what in OUTSIDE.items():
            share_R = group.ratio(rows, f"{name}_outside", name)
            yield group.statistic(f"{name}_outside", share_R, "fraction", f"share of {what}", where)
        mass_R = group.ratio(rows, "pruned_mass_sum", "responses")
        how = "Σ_t (1 − Z_t), mean over the engine's responses"
        yield group.statistic("pruned_mass_per_response", mass_R, "probability", how, where)
        # Each by its own weights: by p's alone, J_mp would be too high by J times the mass that no response lost.
        change_R = group.ratio(rows, "pruned_weighted_reward", "pruned_weight")
        change_R = change_R - group.ratio(rows, "weighted_reward", "weight")
        bound_R = group.ratio(rows, "bound", "weight")
        lost = np.isneginf(rows["pruned_log_ratio"]).sum()
        weights = (
            f"importance weights p(y)/q(y) and p^mp(y)/q(y), each self-normalised; {lost} of {len(rows)} responses "
            "have a token outside V_S, and only they tell what pruning loses"
        )
        for name, value_R, unit, what in (
            ("objective_change", change_R, "reward", "J_mp − J"),
            ("objective_bound", bound_R, "reward", "E_p[Σ_t (1 − Z_t)] · R_max (1)"),
            ("objective_change_over_bound", over(change_R, bound_R), "ratio", "|J_mp − J| / E_p[Σ_t (1 − Z_t)]"),
        ):
            signed = name == "objective_change_over_bound"
            yield group.statistic(name, value_R, unit, f"{what}, {weights}", where, signed=signed)


def _by_length(group: Group) -> Iterator[Statistic]:
    """Yield how the mismatch of a response adds up over its first tokens."""
    table = group.tables["prefixes"]
    # ESS does not depend on the weights' scale.
    weight = np.exp(table["log_ratio"] - table.groupby("length")["log_ratio"].transform("max"))
    table = table.assign(
        responses=1.0, squared=table["log_ratio"] ** 2, weight=weight, squared_weight=np.square(weight)
    )
    columns = ["responses", "kl", "log_ratio", "squared", "kept", "weight", "squared_weight"]
    kl = "KL(q‖p) of the responses' distributions, given an engine's noise if it has some: mean of Σ_t KL_t"
    for length, rows in table.groupby("length"):
        count_R, kl_R, log_ratio_R, squared_R, kept_R, weight_R, squared_weight_R = group.sums(rows, columns).T
        variance_R = over(squared_R, count_R) - over(log_ratio_R, count_R) ** 2
        ess_R = over(over(weight_R**2, squared_weight_R), count_R)
        for name, value_R, unit, what in (
            ("kl", over(kl_R, count_R), "nats per response", kl),
            ("variance", variance_R, "nats²", "variance over responses of Σ_t d_t, the sequence's log-ratio"),
            ("kept", over(kept_R, count_R), "fraction of responses", "those that MIS keeps"),
            ("ess", ess_R, "fraction of responses", "(Σw)² / Σw² / count with w = ∏_t r_t"),
        ):
            how, where = f"{what}; of the first {length} tokens of each response", {"length": str(length)}
            # Unlike tokens, responses can be taken as one trial per problem, also at a share of 0 or 1.
            scale = "share" if name == "kept" else None
            yield group.statistic(f"{name}_by_length", value_R, unit, how, where, scale=scale)
