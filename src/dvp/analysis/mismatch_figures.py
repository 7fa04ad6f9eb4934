"""The figures of the stage `mismatch`. An engine has the same colour in all of them."""

from collections.abc import Iterable
from itertools import cycle

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from dvp.analysis.charts import Facet, Line, lines_in_facets
from dvp.analysis.figures import COLORS, DARK, GREY, STYLE, handle, new_figure, set_title
from dvp.analysis.formats import rho_text
from dvp.analysis.mismatch import Density, Group
from dvp.analysis.points import policy_label
from dvp.analysis.statistics import Statistic, lookup
from dvp.experiment.config import Experiment
from dvp.experiment.grid import parse_rho
from dvp.measurement.files import ENGINE, NARROWEST

INFER, TRAIN = COLORS[0], COLORS[6]
# From the tail to the head: p of the rows of `mismatch_distribution`.
PARTS = ((0.0, 1e-6), (1e-6, 1e-4), (1e-4, 1e-2), (1e-2, 0.5), (0.5, 0.9), (0.9, 1.0))
FEW = 5
MARGIN_LINES = ("--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), (0, (1, 4)), (0, (8, 2)))
Policies = dict[str, list[Group]]  # each policy's, one of each engine
LOWEST = 1e-9  # of |d| on a logarithmic axis: float64 rounding is not far below


def figures(experiment: Experiment, every: list[Group], statistics: list[Statistic]) -> dict[str, Figure]:
    """The figures by name, each of all policies, one below another."""
    policies = {policy: [group for group in every if group.policy == policy] for policy in _unique(every, "policy")}
    labels = {policy: policy_label(experiment, policy) for policy in policies}
    with mpl.rc_context(STYLE):
        return {
            "bounds": _bounds(policies, labels),
            "mismatch_distribution": _distribution(policies, labels),
            "mismatch_by_probability": _by_probability(experiment, policies, labels),
            "safe_sets": _safe_sets(experiment, policies, labels, statistics),
            "pruned_shares": _pruned_shares(experiment, policies, labels, statistics),
            "mismatch_by_length": _by_length(policies, labels, statistics),
        }


def _unique(every: list[Group], key: str) -> list[str]:
    return list(dict.fromkeys(getattr(group, key) for group in every))


def _bounds(policies: Policies, labels: dict[str, str]) -> Figure:
    """|d| in units of 2 ε_max, which the literal bound is 1 − p of."""
    figure, grids = _stacked(labels.values(), 1, max(map(len, policies.values())), 2.5, 2.6)
    for every, grid in zip(policies.values(), grids, strict=True):
        for place, (axes, group) in enumerate(zip(grid[0], every, strict=True)):
            _bounds_panel(axes, group)
            _inner(axes, place, "|d| / (2 ε_max)")
    handles = [
        handle("largest |d| of a bin where d > 0 (q > p)", color=INFER, marker="^"),
        handle("largest |d| of a bin where d < 0 (q < p)", color=TRAIN, marker="v"),
        handle("mean |d| of a bin", color=GREY),
        handle("literal bound, 1 − p; where d > 0 the sharp one is within it", color="black"),
        handle("sharp bound where d < 0, at the largest ε_max", color=TRAIN, linestyle="--"),
    ]
    title = "d = log q − log p of every (position, token) pair against 1 − p, each in units of its position's 2 ε_max"
    return _finish(figure, title, handles, 3)


def _bounds_panel(axes: Axes, group: Group) -> None:
    table = group.tables["bounds"]
    bins = table.groupby("rest_high").agg(
        pairs=("pairs", "sum"),
        scaled=("scaled", "sum"),
        above=("max_scaled_above", "max"),
        below=("max_scaled_below", "max"),
    )
    # At a bin's upper edge, where the literal bound is widest: a point above the line is a violation.
    rest = bins.index
    axes.plot(rest, bins["scaled"] / bins["pairs"], "-", color=GREY, linewidth=1.2)
    axes.plot(rest, bins["above"].where(bins["above"] > 0), "^", color=INFER, markersize=3)
    axes.plot(rest, bins["below"].where(bins["below"] > 0), "v", color=TRAIN, markersize=3)
    largest = group.tables["noise"].query("source == @ENGINE")["max_epsilon"].max()
    line = np.logspace(-10, 0, 200)
    axes.plot(line, line, "-", color="black", linewidth=1)
    axes.plot(line, np.log1p(line * np.expm1(2 * largest)) / (2 * largest), "--", color=TRAIN, linewidth=1)
    axes.set(xscale="log", yscale="log", xlim=(1e-6, 1.5), ylim=(1e-7, 3), xlabel="1 − p")
    literal, sharp = table["literal_violations"].sum(), table["sharp_violations"].sum()
    counts = f"violations: literal {literal:,.0f},\nsharp {sharp:,.0f} of {table['pairs'].sum():,.0f}"
    axes.set_title(f"{group.engine} (ε_max up to {largest:.2g})")
    axes.text(0.97, 0.03, counts, transform=axes.transAxes, ha="right", fontsize=7.5)


def _distribution(policies: Policies, labels: dict[str, str]) -> Figure:
    """Densities of d by probability, of the engines whose d is above the bins' resolution, if there is one."""
    every = [group for own in policies.values() for group in own]
    coarse = [group for group in every if group.tables["noise"].query("source == @ENGINE")["max_epsilon"].max() > 0.01]
    engines = _unique(coarse or every, "engine")
    figure, grids = _stacked(labels.values(), len(PARTS), len(engines), 2.3, 1.2, share="none")
    for own, grid in zip(policies.values(), grids, strict=True):
        for column, group in enumerate(group for group in own if group.engine in engines):
            _distribution_column(grid[:, column], group, first=column == 0)
    handles = [
        handle("weighted by the engine's π_infer", color=INFER, linewidth=2),
        handle("weighted by the trainer's π_train (control)", color=TRAIN, linewidth=2),
        handle("mode, its value above", color=DARK, linewidth=0.9, linestyle=":"),
    ]
    left_out = [engine for engine in _unique(every, "engine") if engine not in engines]
    title = "Density of d = log q − log p by the token's probability p = π_train, each scaled to its maximum"
    title += f"; not drawn: {', '.join(left_out)} (all |d| below 0.02)" if left_out else ""
    return _finish(figure, title, handles, 3)


def _distribution_column(column: np.ndarray, group: Group, *, first: bool) -> None:
    table = group.tables["histogram"].query("source == @ENGINE")
    column[0].set_title(f"{group.engine}\n", loc="left")
    column[-1].set_xlabel("d, nats")
    for axes, (low, high) in zip(column, PARTS, strict=True):
        own = table[(table["p_low"] >= low) & (table["p_high"] <= high)]
        axes.set_yticks([])
        axes.grid(visible=False)
        axes.axvline(0, color="#C8C8C8", linewidth=0.8, zorder=0)
        if first:
            name = f"p ≤ {high:g}" if low == 0 else f"p > {low:g}" if high == 1 else f"{low:g} < p ≤ {high:g}"
            axes.set_ylabel(name, rotation=0, ha="right", va="center")
        if own.empty:
            continue
        densities = {"infer": Density(group, own, "infer"), "train": Density(group, own, "train")}
        left = min(density.central[0] for density in densities.values())
        right = max(density.central[1] for density in densities.values())
        margin = max(0.25 * (right - left), 2 * NARROWEST)
        even = np.linspace(left - margin, right + margin, 200)
        candidates = np.concatenate([even, *(density.points_G[::4] for density in densities.values())])
        points = np.unique(candidates[(candidates >= even[0]) & (candidates <= even[-1])])
        for (weighting, density), color, place in zip(densities.items(), (INFER, TRAIN), (0.5, 1.0), strict=True):
            height = density.at(points)[0]
            axes.plot(points, height / height.max(), color=color, linewidth=1.3)
            if weighting == "infer":
                axes.fill_between(points, height / height.max(), color=color, alpha=0.15, linewidth=0)
            mode = density.mode()
            axes.plot([mode, mode], [0, 1], color=color, linewidth=0.9, linestyle=":")
            axes.text(place, 1.02, f"{mode:+.2g}", transform=axes.transAxes, ha="right", color=color, size=7.5)
        axes.set_xlim(points[0], points[-1])
        axes.set_ylim(0, 1.1)
        axes.xaxis.set_major_locator(MaxNLocator(3))
        axes.tick_params(labelsize=7)


def _by_probability(experiment: Experiment, policies: Policies, labels: dict[str, str]) -> Figure:
    """Mean |d| against log(p/p_max), all pairs alike and weighted, with the controls."""
    figure, grids = _stacked(labels.values(), 1, 2, 4.3, 3.3)
    kinds = (("all tokens of the vocabulary alike", "abs_d", "pairs"), ("weighted by π_infer", "infer_abs_d", "infer"))
    colors = _engine_colors(policies)
    for every, grid in zip(policies.values(), grids, strict=True):
        for place, (axes, (title, above, below)) in enumerate(zip(grid[0], kinds, strict=True)):
            for group in every:
                table = group.tables["gaps"]
                _band(axes, group, table[table["source"] == ENGINE], above, below, colors[group.engine], "-")
            # The controls are of the trainer alone; positions differ between engines, but hardly what they show.
            table = every[0].tables["gaps"]
            for source, line in (("bf16", "--"), ("shape", ":")):
                _band(axes, every[0], table[table["source"] == source], above, below, DARK, line)
            for rho in experiment.mismatch.rhos if len(experiment.mismatch.rhos) < 4 else []:
                axes.axvline(np.log(parse_rho(rho)), color=GREY, linewidth=0.8)
                axes.annotate(
                    f"ρ = {rho_text(rho)}",
                    (np.log(parse_rho(rho)), 1.0),
                    xycoords=axes.get_xaxis_transform(),
                    xytext=(3, -10),
                    textcoords="offset points",
                    fontsize=8,
                )
            axes.set(yscale="log", xlabel="log(p / p_max), nats", title=title)
            _inner(axes, place, "mean |d|, nats")
        grid[0, 0].set_ylim(bottom=LOWEST)
    handles = _engine_handles(colors)
    handles += [
        handle("self-noise: trainer in bf16", color=DARK, linestyle="--"),
        handle(f"self-noise: other batch shape (cut at {LOWEST:g})", color=DARK, linestyle=":"),
    ]
    title = "Mean |d| = |log q − log p| against log(p / p_max), p = π_train; bands: 95 % interval; the last "
    title += "point is the most likely token"
    return _finish(figure, title, handles, 4)


def _band(axes: Axes, group: Group, rows: pd.DataFrame, above: str, below: str, color: str, line: str) -> None:
    keys, above_RK = group.binned(rows, "gap_high", above)
    _, below_RK = group.binned(rows, "gap_high", below)
    with np.errstate(divide="ignore", invalid="ignore"):
        mean_RK = above_RK / below_RK
    # The highest bin is one value, 0; the others are a nat wide, and the lowest has no lower edge.
    x_K = np.where(keys == 0.0, 0.0, np.minimum(np.round(keys), 0.0) - 0.5)
    # A bin that a replicate can miss holds too little.
    limits = np.array([group.draws.estimate(mean_R, "ratio")[1:] for mean_R in mean_RK.T])
    drawn = np.isfinite(limits).all(axis=1) & (mean_RK[0] > LOWEST)
    axes.plot(x_K[drawn], mean_RK[0, drawn], color=color, linestyle=line, linewidth=1.6)
    axes.fill_between(x_K[drawn], limits[drawn, 0], limits[drawn, 1], color=color, alpha=0.2, linewidth=0)


def _safe_sets(
    experiment: Experiment, policies: Policies, labels: dict[str, str], statistics: list[Statistic]
) -> Figure:
    """Against ρ: sizes, pruned mass, the bound of Prop. 5.5 with what it bounds, overlap, tokens outside."""
    figure, grids = _stacked(labels.values(), 2, 3, 3.6, 2.7, share="x")
    colors = _engine_colors(policies)
    rhos = sorted(experiment.mismatch.rhos, key=parse_rho)
    for every, grid in zip(policies.values(), grids, strict=True):
        _safe_sets_panels(experiment, every, grid.ravel(), statistics, colors, rhos)
    handles = _engine_handles(colors)
    few = f"fewer than {FEW} responses with a\ntoken outside V_S: what pruning\nloses is hardly sampled"
    handles.append(handle(few, color=DARK, marker="o", mfc="white", markersize=4))
    handles.append(handle("last panel: no margin", color=DARK))
    for margin, line in zip(experiment.mismatch.margins, cycle(MARGIN_LINES), strict=False):
        handles.append(handle(f"trainer prunes at ρ·e^(−2·{margin:g})", color=DARK, linestyle=line))
    for grid in grids:
        empty = grid.ravel()[-1]
        empty.set_axis_off()
        empty.legend(handles=handles, loc="center")
    title = "Safe vocabularies of trainer (V_S) and engine (V'_S) against ρ; bands: 95 % interval"
    return _finish(figure, title, [], 1)


def _safe_sets_panels(
    experiment: Experiment,
    every: list[Group],
    panels: np.ndarray,
    statistics: list[Statistic],
    colors: dict[str, str],
    rhos: list[str],
) -> None:
    """One policy's; the last panel stays empty."""
    known = lookup(statistics)
    outside = {}
    for group in every:
        rows = group.tables["safe_sets"].query("side == 'none'")
        for rho, lost in np.isneginf(rows["pruned_log_ratio"]).groupby(rows["rho"]).sum().items():
            outside[group.engine, rho] = lost

    def curve(axes: Axes, name: str, line: str = "-", *, band: bool = True, **where: str) -> None:
        for place, (engine, color) in enumerate(colors.items()):
            at = {"policy": every[0].policy, "engine": engine} | where
            points = {rho: statistic for rho in rhos if (statistic := known(name, at | {"rho": rho}))}
            if not points:  # not defined at any ρ
                continue
            x = np.array(list(map(parse_rho, points)))
            value, low, high = np.array([[point.value, point.low, point.high] for point in points.values()]).T
            if line == "o":
                # Of a change its size; one whose interval holds 0 reaches down to the axis.
                low, high = (
                    np.where(low * high > 0, np.minimum(abs(low), abs(high)), 0),
                    np.maximum(abs(low), abs(high)),
                )
                x = x * 1.15 ** (place - (len(colors) - 1) / 2)
                axes.vlines(x, low, high, color=color, linewidth=1)
                few = np.array([outside[engine, rho] < FEW for rho in points])
                axes.plot(x[few], abs(value)[few], "o", color=color, mfc="white", markersize=4, zorder=3)
            elif band:
                axes.fill_between(x, low, high, color=color, alpha=0.18, linewidth=0)
            # A single ρ makes no line.
            marker = "o" if line == "o" or len(points) == 1 else None
            style = "none" if line == "o" else line
            axes.plot(x, abs(value), linestyle=style, marker=marker, color=color, linewidth=1.6, markersize=4)

    curve(panels[0], "safe_size")
    curve(panels[0], "safe_size_infer", "--")
    panels[0].set(yscale="log", ylabel="tokens", title="size: V_S (solid), V'_S (dashed)")
    curve(panels[1], "pruned_mass")
    panels[1].set(yscale="log", ylabel="probability", title="pruned mass 1 − Z, mean over positions")
    curve(panels[2], "objective_bound")
    curve(panels[2], "objective_change", "o")
    panels[2].set(yscale="log", ylabel="reward (0 to 1)", title="E[Σ_t (1 − Z_t)] (line) ≥ |J_mp − J| (points)")
    curve(panels[3], "jaccard")
    curve(panels[3], "infer_in_train", ":")
    panels[3].set(ylabel="fraction", title="overlap: Jaccard (solid), V'_S in V_S (dotted)")
    curve(panels[4], "outside_safe")
    for margin, line in zip(experiment.mismatch.margins, cycle(MARGIN_LINES), strict=False):
        curve(panels[4], "outside_safe_margin", line, band=False, margin=f"{margin:g}", side="trainer")
    panels[4].set(
        yscale="log", ylim=(1e-10, None), ylabel="fraction of tokens", title="pruned engine's tokens outside V_S"
    )
    for axes in panels[:5]:
        axes.set(xscale="log", xlabel="ρ")
        axes.tick_params(labelbottom=True)


def _pruned_shares(
    experiment: Experiment, policies: Policies, labels: dict[str, str], statistics: list[Statistic]
) -> Figure:
    """Against ρ: how much of the mismatch, and of the gradient, is outside V_S."""
    panels = {"kl_outside": "of KL(q‖p)", "squared_score_outside": "of the gradient's power"}
    known, rhos = lookup(statistics), sorted(experiment.mismatch.rhos, key=parse_rho)
    colors = _engine_colors(policies)

    def facet(policy: str, name: str, title: str) -> Facet:
        lines = []
        for group in policies[policy]:
            found = {parse_rho(rho): one for rho in rhos if (one := known(name, group.where | {"rho": rho}))}
            lines.append(Line(found, colors[group.engine]))
        return Facet(lines, f"{labels[policy]}: {title}", "ρ", "share outside V_S")

    title = "How much of the mismatch, and of the gradient, is outside the safe vocabulary; bands: 95 % interval"
    facets = [[facet(policy, *panel) for panel in panels.items()] for policy in policies]
    return lines_in_facets(title, facets, _engine_handles(colors), 4.3)


def _by_length(policies: Policies, labels: dict[str, str], statistics: list[Statistic]) -> Figure:
    """Against the number of tokens: KL, variance of the log-ratio, what MIS keeps, ESS."""
    fraction = {"y": "fraction of responses", "log": "x", "y_limits": (0, 1.03)}
    panels = {
        "kl_by_length": {"title": "KL(q‖p) of the responses", "y": "nats"},
        "variance_by_length": {"title": "variance of the sequence's Σ d", "y": "nats²"},
        "kept_by_length": {"title": "kept by MIS", **fraction},
        "ess_by_length": {"title": "effective sample size", **fraction},
    }
    known, colors = lookup(statistics), _engine_colors(policies)

    def facet(policy: str, name: str, title: str, **settings) -> Facet:
        lines, ticks = [], {}
        for group in policies[policy]:
            lengths = sorted(set(group.tables["prefixes"]["length"]))
            ticks |= {length: str(length) for length in lengths}
            found = {length: known(name, group.where | {"length": str(length)}) for length in lengths}
            lines.append(Line(found, colors[group.engine]))
        return Facet(lines, f"{labels[policy]}:\n{title}", "first tokens of a response", ticks=ticks, **settings)

    title = "How the mismatch adds up over a response (a shorter one counts with all its tokens); bands: 95 % interval"
    facets = [[facet(policy, name, **panel) for name, panel in panels.items()] for policy in policies]
    return lines_in_facets(title, facets, _engine_handles(colors), 3.0, share_y=False)


def _engine_handles(colors: dict[str, str]) -> list[Artist]:
    return [handle(f"engine {name}", color=color, linewidth=2) for name, color in colors.items()]


def _engine_colors(policies: Policies) -> dict[str, str]:
    engines = _unique([group for every in policies.values() for group in every], "engine")
    return {engine: COLORS[index % len(COLORS)] for index, engine in enumerate(engines)}


def _stacked(
    labels: Iterable[str], rows: int, columns: int, width: float, height: float, share: str = "all"
) -> tuple[Figure, list[np.ndarray]]:
    """A figure with panels (rows, columns) of `width` × `height` inches for each label, one below the other."""
    labels = list(labels)
    size = max(width * columns + 0.7, 6.0), len(labels) * (height * rows + 0.6) + 0.9
    figure = new_figure(*size)
    sharing = {"sharex": share in ("all", "x"), "sharey": share == "all"}
    grids = []
    for label, part in zip(labels, figure.subfigures(len(labels), 1, squeeze=False)[:, 0], strict=True):
        part.suptitle(label, fontsize=10, fontweight="bold", x=0.01, ha="left")
        grids.append(part.subplots(rows, columns, squeeze=False, **sharing))
    return figure, grids


def _inner(axes: Axes, place: int, label: str) -> None:
    if place == 0:
        axes.set_ylabel(label)
    else:
        axes.tick_params(labelleft=False)


def _finish(figure: Figure, title: str, handles: list[Artist], columns: int) -> Figure:
    set_title(figure, title, 0.96 * figure.get_figwidth())
    if handles:
        columns = columns if figure.get_figwidth() > 8 else 1
        figure.legend(handles=handles, loc="outside lower center", ncols=columns)
    return figure
