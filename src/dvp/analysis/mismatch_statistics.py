"""Every number that comes of the stage `mismatch`, with its interval.

Shape suffixes: R replicates, the value first; D bins of d; G points.
"""

import math
from collections.abc import Callable, Iterator

import numpy as np
import pandas as pd

from dvp.analysis import bootstrap
from dvp.analysis.mismatch_inputs import Measurements
from dvp.analysis.statistics import Statistic
from dvp.experiment.config import Experiment
from dvp.measurement.mismatch_files import ENGINE, SOURCES

Statistics = Callable[..., Iterator[Statistic]]
"""Makes one, or none: name, values (R,), unit, how, and what it is of beside policy and engine."""
TAIL = (1e-4, 1e-2)
"""p of the tokens whose d is looked at as the tail's: rarer ones are hardly ever sampled."""
HEAD = (0.9, 1.0)
WEIGHTINGS = ("infer", "train")
# Of the safe sets, means over positions: column, unit, what it is.
MEANS = {
    "safe_size": ("safe_size_train", "tokens", "|V_S|"),
    "safe_size_infer": ("safe_size_infer", "tokens", "|V'_S|"),
    "pruned_mass": ("pruned_mass", "probability", "1 − Z of the trainer"),
    "jaccard": ("jaccard", "fraction", "|V_S ∩ V'_S| / |V_S ∪ V'_S|"),
    "infer_in_train": ("infer_in_train", "fraction", "|V_S ∩ V'_S| / |V'_S|"),
    "train_in_infer": ("train_in_infer", "fraction", "|V_S ∩ V'_S| / |V_S|"),
    "outside_safe": ("outside_train", "fraction of tokens", "what a pruned engine samples outside V_S, exact"),
}


def statistics(experiment: Experiment, measurements: Measurements) -> Iterator[Statistic]:
    """Every number of one policy and engine; those that are not defined are left out."""
    resampled = "problems" + (" and seeds" if bootstrap.resamples_seeds(experiment.seeds) else ", not over seeds")
    over = f"95 % bootstrap over {resampled}, {experiment.evaluation.bootstrap_resamples} resamples"

    if measurements.draws_RU.shape[1] == 1:
        over = "a single problem has no bootstrap interval"

    def statistic(
        name: str, values_R: np.ndarray, unit: str, how: str, resolution: float = 0.0, **where: str
    ) -> Iterator[Statistic]:
        if np.isfinite(values_R[0]):
            low, high = bootstrap.interval(values_R[1:]) if measurements.draws_RU.shape[1] > 1 else (math.nan, math.nan)
            low, high = low - resolution / 2, high + resolution / 2
            all_where = measurements.where | where
            yield Statistic(
                name, all_where, float(values_R[0]), low, high, unit, f"{how}; {over}", measurements.sources
            )

    def largest(name: str, value: float, unit: str, how: str) -> Iterator[Statistic]:
        nan, without = math.nan, f"{how}; a maximum has no bootstrap interval"
        yield Statistic(name, measurements.where, float(value), nan, nan, unit, without, measurements.sources)

    noise = measurements.tables["noise"]
    for source in SOURCES:
        own = noise[noise["source"] == source]
        where = {} if source == ENGINE else {"control": source}
        prefix = "" if source == ENGINE else "self_noise_"
        of = "the engine" if source == ENGINE else f"the trainer itself ({source})"
        yield from statistic(
            f"{prefix}kl",
            measurements.ratio(own, "kl", "tokens"),
            "nats per token",
            f"KL(q‖p), exact, q of {of}",
            **where,
        )
        yield from statistic(
            f"{prefix}epsilon_sd",
            np.sqrt(measurements.ratio(own, "epsilon_variance", "tokens")),
            "nats",
            f"root mean square over positions of ε's standard deviation over the vocabulary, z of {of}",
            **where,
        )
        yield from statistic(
            f"{prefix}ratio_outside",
            measurements.ratio(own, "ratio_outside", "tokens"),
            "fraction of tokens",
            f"sampled tokens with a ratio outside [0.9, 1.1], q of {of}",
            **where,
        )
    own = noise[noise["source"] == ENGINE]
    yield from statistic("k3", measurements.ratio(own, "k3", "tokens"), "nats per token", "mean k3 of sampled tokens")
    yield from statistic(
        "d_positive", measurements.ratio(own, "d_positive", "tokens"), "fraction of tokens", "sampled tokens with d > 0"
    )
    yield from largest("max_abs_log_ratio", own["max_abs_log_ratio"].max(), "nats", "largest of the sampled tokens")
    yield from largest("epsilon_max", own["max_epsilon"].max(), "nats", "largest ε_max of all positions")

    yield from _by_probability(measurements, statistic)
    pairs = measurements.tables["bounds"]
    for kind in ("literal", "sharp"):
        values_R = measurements.ratio(pairs, f"{kind}_violations", "pairs")
        count = pairs[f"{kind}_violations"].sum()
        yield from statistic(
            f"{kind}_bound_violations",
            values_R,
            "fraction of pairs",
            f"{f'{count:,.0f}' if count else 'none'} of {pairs['pairs'].sum():,.0f} (position, token) pairs, "
            f"by more than rounding",
        )
    yield from largest(
        "max_over_literal_bound",
        pairs["max_over_literal"].max(),
        "ratio",
        "largest |d| over the literal bound that it violates; 0 without a violation",
    )
    yield from _safe_sets(measurements, statistic)


def _by_probability(measurements: Measurements, statistic: Statistics) -> Iterator[Statistic]:
    every = measurements.tables["histogram"]
    how = "mean |d| where p < 1e-2 over that where p > 0.5"
    for source in SOURCES:
        head, tail = _head_and_tail(every[every["source"] == source])
        with np.errstate(divide="ignore", invalid="ignore"):
            values_R = measurements.ratio(tail, "abs_d", "pairs") / measurements.ratio(head, "abs_d", "pairs")
        if source == ENGINE:
            yield from statistic("tail_over_head", values_R, "ratio", f"{how}, all pairs alike")
        else:
            of = f"{how}, of the trainer itself ({source})"
            yield from statistic("self_noise_tail_over_head", values_R, "ratio", of, control=source)
    table = every[every["source"] == ENGINE]
    head, tail = _head_and_tail(table)
    for name in WEIGHTINGS:
        how_weighted = f"weighted by π_{name}"
        where = {"weighting": name}
        values_R = measurements.ratio(tail, f"{name}_abs_d", name) / measurements.ratio(head, f"{name}_abs_d", name)
        yield from statistic("tail_over_head_weighted", values_R, "ratio", f"{how}, {how_weighted}", **where)
        for part, (low, high) in (("tail", TAIL), ("head", HEAD)):
            own = table[(table["p_low"] >= low) & (table["p_high"] <= high)]
            of = f"d of tokens with p in ({low:g}, {high:g}], {how_weighted}"
            density = Density(measurements, own, name)
            yield from statistic(
                f"{part}_mode",
                density.modes(),
                "nats",
                f"mode of {of}: Gaussian kernels; the interval is widened by the bin in which it lies",
                density.resolution,
                **where,
            )
            yield from statistic(
                f"{part}_mean", measurements.ratio(own, f"{name}_d", name), "nats", f"mean {of}", **where
            )
            positive = own[[name, "unit"]].assign(positive=own[name].where(own["d_low"] >= 0, 0.0))
            values_R = measurements.ratio(positive, "positive", name)
            yield from statistic(f"{part}_positive", values_R, "fraction", f"P(d > 0) for {of}", **where)


def _head_and_tail(rows: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
    return rows[rows["p_low"] >= 0.5], rows[rows["p_high"] <= 1e-2]


class Density:
    """The density of d over some rows of the histogram, by Gaussian kernels.

    The bandwidth is Silverman's, of the value, for all replicates; in a bin that is wider, half the bin's width.
    """

    def __init__(self, measurements: Measurements, rows: pd.DataFrame, weighting: str):
        self._lows_D, self._weight_RD = measurements.binned(rows, "d_low", weighting)
        self.resolution = 0.0
        """Width of the bin of d in which the mode lies; the mode is not known more finely."""
        if not len(self._lows_D):
            return
        total = rows.groupby("d_low")[[weighting, f"{weighting}_squared", f"{weighting}_d"]].sum()
        weight_D, squared_D, sum_D = total.to_numpy(dtype=float).T
        with np.errstate(divide="ignore", invalid="ignore"):
            self._centre_D = np.where(weight_D > 0, sum_D / weight_D, np.clip(self._lows_D, -100, 100))
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
        widths_D = np.where(np.isfinite(highs_D - self._lows_D), highs_D - self._lows_D, 1.0)
        self._bandwidth_D = np.maximum(silverman, widths_D / 2)
        inside_D = self._centre_D[(self._centre_D >= low) & (self._centre_D <= high)]
        # Eight from each bin's centre to the next: their distances follow the bins'.
        places_G = np.arange(8 * (len(inside_D) - 1) + 1) / 8
        self.points_G = np.interp(places_G, np.arange(len(inside_D)), inside_D)
        self.resolution = float(widths_D[np.abs(self._centre_D - self.mode()).argmin()])

    def at(self, points_G: np.ndarray, weight_RD: np.ndarray | None = None) -> np.ndarray:
        """The density at some d, of the value (1, G) or of the weights given (R, G)."""
        weight_RD = self._weight_RD[:1] if weight_RD is None else weight_RD
        scaled_DG = (points_G[None] - self._centre_D[:, None]) / self._bandwidth_D[:, None]
        kernel_DG = np.exp(-0.5 * scaled_DG**2) / (self._bandwidth_D[:, None] * math.sqrt(2 * math.pi))
        return weight_RD @ kernel_DG / weight_RD.sum(axis=1, keepdims=True).clip(min=np.finfo(float).tiny)

    def mode(self) -> float:
        """Where the density is highest, of the value alone."""
        return float(self.points_G[self.at(self.points_G)[0].argmax()])

    def modes(self) -> np.ndarray:
        """Where the density is highest, of the value and of each replicate; NaN without a token."""
        if not len(self._lows_D):
            return np.full(1, np.nan)
        modes_R = self.points_G[self.at(self.points_G, self._weight_RD).argmax(axis=1)]
        return np.where(self._weight_RD.sum(axis=1) > 0, modes_R, np.nan)


def _safe_sets(measurements: Measurements, statistic: Statistics) -> Iterator[Statistic]:
    table = measurements.tables["safe_sets"]
    # Only ratios of the weights matter, so the largest may be 1.
    shift = table["log_ratio"].max()
    weight = np.exp(table["log_ratio"] - shift)
    table = table.assign(
        # Means over a response's positions, made sums again.
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
        how_margin = "" if plain else f", with a margin of ε̂ = {margin:g} on the {side}'s side"
        for name, (_, unit, what) in MEANS.items():
            values_R = measurements.ratio(rows, name, "tokens")
            yield from statistic(
                f"{name}{suffix}", values_R, unit, f"mean over positions of {what}{how_margin}", **where
            )
        values_R = measurements.ratio(rows, "tokens_outside_train", "tokens_inside_infer")
        what = f"of the sampled tokens in V'_S, those outside V_S{how_margin}"
        yield from statistic(f"outside_safe_sampled{suffix}", values_R, "fraction of tokens", what, **where)
        if not plain:
            continue
        values_R = measurements.ratio(rows, "pruned_mass_sum", "responses")
        what = "Σ_t (1 − Z_t), mean over the engine's responses"
        yield from statistic("pruned_mass_per_response", values_R, "probability", what, **where)
        # Each by its own weights: by p's alone, J_mp would be too high by J times the mass that no response lost.
        change_R = measurements.ratio(rows, "pruned_weighted_reward", "pruned_weight")
        change_R = change_R - measurements.ratio(rows, "weighted_reward", "weight")
        bound_R = measurements.ratio(rows, "bound", "weight")
        outside = np.isneginf(rows["pruned_log_ratio"]).sum()
        weights = (
            "importance weights p(y)/q(y) and p^mp(y)/q(y), each self-normalised; "
            f"{outside} of {len(rows)} responses have a token outside V_S, and only they tell what pruning loses"
        )
        yield from statistic("objective_change", change_R, "reward", f"J_mp − J, {weights}", **where)
        yield from statistic(
            "objective_bound", bound_R, "reward", f"E_p[Σ_t (1 − Z_t)] · R_max (1), {weights}", **where
        )
        with np.errstate(divide="ignore", invalid="ignore"):
            over_R = np.abs(change_R) / bound_R
        yield from statistic(
            "objective_change_over_bound", over_R, "ratio", f"|J_mp − J| / E_p[Σ_t (1 − Z_t)], {weights}", **where
        )
