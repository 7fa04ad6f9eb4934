"""The mismatch between trainer and engine, measured over the whole vocabulary."""

from typing import TYPE_CHECKING

import pandas as pd

from dvp.analysis.columns import Layout, Report, Row, at_each, cell, interval
from dvp.analysis.formats import rho_text
from dvp.analysis.points import BASE, policy_label
from dvp.analysis.shown import Panel, figure, table
from dvp.experiment.grid import parse_rho

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from dvp.analysis.charts import Charts

BY_ENGINE = {"facets": ["policy"], "colour": "engine"}
COLUMNS = [cell("policy"), cell("label", "policy", csv=False), cell("engine", "engine")]


@table("Engines", part="mismatch")
def engines_table(report: Report) -> Layout:
    """How far each engine is from the fp32 trainer in {experiment}, exactly over the vocabulary at the positions that
    the engine visits, with 95 % intervals. d = log q − log p, q being the engine's and p the trainer's probability. The
    self-noise columns are the control: the trainer against itself at another batch shape and in bf16; what is not
    larger than they are cannot be blamed on the engine.
    """
    bf16, shape = {"at": {"control": "bf16"}}, {"at": {"control": "shape"}}
    by_q, by_p = {"at": {"weighting": "infer"}}, {"at": {"weighting": "train"}}
    columns = [
        *COLUMNS,
        interval("epsilon_sd", "σ(ε)", ".2g"),
        interval("kl", "KL", ".2g"),
        interval("self_noise_kl_bf16", "KL, self-noise bf16", ".2g", "self_noise_kl", **bf16),
        interval("kl_over_self_noise_bf16", "KL over that", ".2g", "kl_over_self_noise", **bf16),
        interval("self_noise_kl_shape", "KL, self-noise shape", ".2g", "self_noise_kl", **shape),
        interval("max_abs_log_ratio", "max |log ratio|", ".2g"),
        interval("tail_over_head", "tail over head", ".2g"),
        interval("self_noise_tail_over_head_bf16", "self-noise bf16", ".2g", "self_noise_tail_over_head", **bf16),
        interval("tail_mean_infer", "E_q[d], tail", "+.2g", "tail_mean", **by_q),
        interval("tail_mode_infer", "mode of d, tail, by q", "+.2g", "tail_mode", **by_q),
        interval("tail_mode_train", "by p", "+.2g", "tail_mode", **by_p),
        interval("d_positive", "P(d > 0)", ".3f"),
        interval("literal_bound_violations", "breaks literal bound", ".1e"),
        interval("max_over_literal_bound", "at most by", ".3g"),
        interval("sharp_bound_violations", "breaks sharp bound", ".1e"),
    ]
    return Layout("the mismatch between trainer and engine, over the whole vocabulary", _rows(report), columns)


@table("Safe vocabularies", part="mismatch")
def safe_sets_table(report: Report) -> Layout:
    """Safe vocabularies of trainer (V_S) and engine (V'_S) in {experiment}: size, pruned mass, overlap, and sampled
    tokens that the trainer prunes, without a margin and with one on the trainer's side. Intervals: 95 %, over what the
    table says below.
    """
    settings = report.experiment.mismatch
    columns = [
        *COLUMNS,
        cell("rho", "ρ", rho_text),
        interval("safe_size", "|V_S|", ".4g"),
        interval("safe_size_infer", "|V'_S|", ".4g"),
        interval("pruned_mass", "1 − Z", ".2g"),
        interval("pruned_mass_per_response", "Σ_t (1 − Z_t)", ".2g"),
        interval("objective_change", "J_mp − J", "+.2g"),
        interval("objective_change_over_bound", "|J_mp − J| / bound", ".2g"),
        interval("jaccard", "Jaccard", ".3f"),
        interval("infer_in_train", "V'_S in V_S", ".3f"),
        interval("outside_safe", "outside V_S", ".2g"),
        interval("kl_outside", "of KL", ".2g"),
        interval("squared_score_outside", "of the gradient", ".2g"),
    ]
    for margin in (f"{margin:g}" for margin in settings.margins):
        at, key = {"margin": margin, "side": "trainer"}, f"outside_safe_margin_{margin}"
        columns.append(interval(key, f"with ε̂ = {margin}", ".2g", "outside_safe_margin", at=at))
    rows = at_each(_rows(report), "rho", settings.rhos)
    return Layout("the safe vocabularies of trainer and engine", rows, columns)


@table("The mismatch by length", part="mismatch")
def lengths_table(report: Report) -> Layout:
    """How the mismatch of each policy and engine of {experiment} adds up over the tokens of a response: KL divergence
    and variance of the sequence's log-ratio, what MIS keeps, and the effective sample size. Intervals: 95 %, over what
    the table says below.
    """

    def lengths(row: Row) -> list[int]:
        own = [one.where for one in report.named("kl_by_length")]
        return sorted({int(where["length"]) for where in own if row.where.items() <= where.items()})

    columns = [
        *COLUMNS,
        cell("length", "first tokens"),
        interval("kl_by_length", "KL (nats)", ".2g"),
        interval("variance_by_length", "variance of Σ d (nats²)", ".2g"),
        interval("kept_by_length", "kept by MIS", ".3f"),
        interval("ess_by_length", "ESS", ".3f"),
    ]
    return Layout("how the mismatch adds up over a response", at_each(_rows(report), "length", lengths), columns)


def _rows(report: Report) -> list[Row]:
    """Return a row per policy and engine of the measurement."""
    settings = report.experiment.mismatch
    names = [policy if policy == BASE else policy.path for policy in settings.policies]
    places = [{"policy": name, "engine": engine} for name in names for engine in settings.engines]
    return [
        Row("/".join(place.values()), place, place | {"label": policy_label(report.experiment, place["policy"])})
        for place in places
    ]


@figure("|d| and its bounds")
def bounds(draw: "Charts") -> "Figure | None":
    """Mismatch |d| of every (position, token) pair against 1 − p in {experiment}, with the literal bound 2 ε_max (1 −
    p) of the paper's Proposition 4.2 and the sharp pair of bounds. The literal one holds where the engine's probability
    is the larger one; the sharp pair always does. ε_max is the position's own, after the best constant shift of its
    logits.
    """
    quantities = ("scaled_mean", "scaled_above", "scaled_below", "literal_bound", "sharp_bound")
    return draw.lines(
        "|d| and its bounds",
        draw.table,
        [Panel(quantities, "|d| / (2 ε_max)", log="xy")],
        facets=["policy", "engine"],
        colour="quantity",
        x_label="1 − p",
        note="d = log q − log p",
    )


@figure("Distribution of d")
def mismatch_distribution(draw: "Charts") -> "Figure | None":
    """Distribution of d = log q − log p by the token's probability p in {experiment}, weighted by the engine's
    probabilities (as sampled tokens are) and, as a control, by the trainer's. A mode above 0 under the first weighting
    and not under the second is an effect of selection: the engine samples what it overestimates.
    """
    return draw.lines(
        "Distribution of d",
        draw.table,
        [Panel(("density", "density_mode"), "density, scaled")],
        facets=["policy", "engine", "part"],
        colour="weighting",
        x_label="d, nats",
        width=2.2,
        per_row=6,
        verticals={"d = 0": [0]},
        note="d = log q − log p; dashed: modes",
    )


@figure("Where the mismatch is")
def mismatch_by_probability(draw: "Charts") -> "Figure | None":
    """Mean |d| against a token's probability relative to the likeliest one, p / p_max, in {experiment}, for each engine
    and for the trainer's own noise. A safe vocabulary with ratio ρ cuts at ρ (vertical lines). Bands are 95 %
    intervals.
    """
    if not draw.has("mean_abs_d"):
        return None
    panels = [
        Panel("mean_abs_d", "mean |d|, nats", "all tokens of the vocabulary alike", log="xy", floor=1e-9),
        Panel("mean_abs_d_weighted", "mean |d|, nats", "weighted by π_infer", log="xy", floor=1e-9),
    ]
    rhos = list(map(parse_rho, draw.experiment.mismatch.rhos))
    title, look = (
        "Mean |d| by the token's probability",
        {"width": 4.3, "x_label": "p / p_max", "verticals": {"ρ": rhos}},
    )
    return draw.lines(title, draw.table, panels, facets=["policy"], colour="engine", **look)


@figure("Safe vocabularies by ρ")
def safe_sets(draw: "Charts") -> "Figure | None":
    """Safe vocabularies against ρ in {experiment}: size, pruned mass, what pruning does to the objective over its bound
    Σ_t (1 − Z_t) (Proposition 5.5, measured; at most 1), overlap of the trainer's and the engine's sets, and sampled
    tokens that the trainer prunes, with and without a margin.
    """
    sizes, overlaps = ("safe_size", "safe_size_infer"), ("jaccard", "infer_in_train")
    outside, bound = ("outside_safe", "outside_safe_margin"), {"the bound": [1]}
    panels = [
        Panel(sizes, "tokens", "size: V_S (solid), V'_S (dashed)", log="xy"),
        Panel("pruned_mass", "probability", "pruned mass 1 − Z, mean over positions", log="xy"),
        Panel("objective_change_over_bound", "ratio", "|J_mp − J| over E[Σ_t (1 − Z_t)]", log="x", across=bound),
        Panel(overlaps, "fraction", "overlap: Jaccard (solid), V'_S in V_S (dashed)", log="x"),
        Panel(outside, "fraction of tokens", "pruned engine's tokens outside V_S", log="xy", floor=1e-10),
    ]
    table = draw.over_rho(draw.table.query("method == 'none' and side in ['none', 'trainer']"))
    return draw.lines("Safe vocabularies by ρ", table, panels, **BY_ENGINE, along="rho", x_label="ρ")


@figure("What ρ can remove")
def pruned_shares(draw: "Charts") -> "Figure | None":
    """How much of KL(q||p), and of the power of a sampled token's gradient, is outside the trainer's safe vocabulary in
    {experiment}, against ρ, for each engine: as much as pruning can remove. Bands are 95 % intervals.
    """
    panels = [
        Panel("kl_outside", "share outside V_S", "of KL(q‖p)", log="xy"),
        Panel("squared_score_outside", "share outside V_S", "of the gradient's power", log="xy"),
    ]
    table = draw.over_rho(draw.table)
    title = "Shares of the KL and of the gradient that ρ can remove"
    return draw.lines(title, table, panels, **BY_ENGINE, along="rho", x_label="ρ", width=4.3)


@figure("The mismatch by length, drawn")
def mismatch_by_length(draw: "Charts") -> "Figure | None":
    """How the mismatch adds up over a response in {experiment}: KL divergence, variance of the sequence's log-ratio,
    the share of responses that MIS keeps, and the effective sample size, against the number of tokens, for each engine.
    Bands are 95 % intervals.
    """
    share = {"label": "fraction of responses", "log": "x", "limits": (0, 1.03)}
    panels = [
        Panel("kl_by_length", "nats", "KL(q‖p) of the responses", log="xy"),
        Panel("variance_by_length", "nats²", "variance of the sequence's Σ d", log="xy"),
        Panel("kept_by_length", title="kept by MIS", **share),
        Panel("ess_by_length", title="effective sample size", **share),
    ]
    table = draw.table.assign(x=pd.to_numeric(draw.table["length"], errors="coerce"))
    look = {"x_label": "first tokens of a response", "tick": "{:.0f}".format, "per_row": 4, "width": 3.0}
    return draw.lines("Mismatch by the length of responses", table, panels, **BY_ENGINE, **look)
