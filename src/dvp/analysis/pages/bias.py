"""Bias and variance of the policy gradient's estimators, by length and by position in the response."""

from typing import TYPE_CHECKING

from dvp.analysis.columns import Column, Layout, Report, Row, cell, counts, interval, number
from dvp.analysis.formats import position_text, rho_text
from dvp.analysis.points import estimator_counterpart, estimator_places, policy_label, variance_places
from dvp.analysis.shown import Panel, figure, table
from dvp.experiment.grid import WHOLE

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from dvp.analysis.charts import Charts

BIAS_COLUMNS = [
    interval("squared_bias", "bias² [95 %]", "digits"),
    interval("cosine", "cosine [95 %]", "digits"),
    interval("variance", "variance [95 %]", "digits"),
]
PAIRED_COLUMNS = [
    interval("paired_squared_bias", "paired bias² [95 %]", "digits"),
    interval("paired_squared_bias_pruned", "paired bias² to ∇J_mp [95 %]", "digits"),
]


@table("Estimators", part="bias")
def bias_table(report: Report) -> Layout:
    """Estimators of the policy gradient at fixed policies in {experiment}, against the exact on-policy gradient g:
    squared bias, cosine, variance of one batch and mean squared error, all relative to |g|², with 95 % intervals, made
    as the table says below. A squared bias whose interval includes zero is not distinguished from none; estimates may
    be negative. The paired bias is from the engine's samples alone, where their weights allow it.
    """
    by_task = [cell("task", "problems"), number("response_tokens", "tokens", ".0f", "estimator_response_tokens")]

    def diagnostic(key: str, heading: str | None = None, scale: float = 1) -> Column:
        return number(key, heading, ".0f", f"estimator_{key}", scale=scale)

    columns = [
        *(cell("label", "estimator"), cell("method"), cell("partner")),
        *(cell("rho", "ρ", rho_text), cell("engine", "engine")),
        *(by_task if report.experiment.bias.tasks else []),
        *_policy_columns(report),
        *BIAS_COLUMNS,
        interval("mse", "mse [95 %]", "digits"),
        interval("squared_bias_change", "bias² change [95 %]", "+digits"),
        interval("variance_change", "variance change [95 %]", "+digits"),
        *PAIRED_COLUMNS,
        *(diagnostic("weight_ess", "ESS of r (%)", 100), diagnostic("weight_largest_share"), diagnostic("weight_mean")),
        diagnostic("weight_ess_pruned", "ESS of r, pruned (%)", 100),
        *(diagnostic("weight_largest_share_pruned"), diagnostic("weight_mean_pruned")),
        *(diagnostic("kept_fraction", "kept (%)", 100), diagnostic("mean_weight"), diagnostic("outside_safe_fraction")),
        *(diagnostic("reward"), number("batches", None, "d"), number("empty_batches", None, "d")),
        counts("empty", "empty batches", ["empty_batches", "batches"], "{} / {}".format, csv=False),
    ]
    rows = [_estimator(report, where) for where in estimator_places(report.experiment)]
    return Layout("bias and variance of the policy gradient's estimators", rows, columns)


@table("Variance of the gradient", part="variance")
def variance_table(report: Report) -> Layout:
    """Variance of the policy gradient's estimators in {experiment}, of all tokens and by position in the response, over
    |g|² and over the squared signal of the same part, with 95 % intervals; and over the variance of the same estimator
    with RLOO's baseline.
    """
    columns = [
        *(cell("label", "estimator"), cell("method"), cell("rho", "ρ", rho_text), cell("engine", "engine")),
        *_policy_columns(report, cell("position", "tokens", position_text)),
        interval("gradient_variance", "variance [95 %]", "digits"),
        interval("gradient_signal", None, "digits"),
        interval("variance_over_signal", "variance / signal [95 %]", "digits"),
        cell("over"),
        interval("variance_ratio", "variance, over RLOO's [95 %]", ".2f"),
        interval("variance_over_signal_ratio", "variance / signal, over RLOO's [95 %]", ".2f"),
    ]
    rows = [_estimator(report, where) for where in variance_places(report.experiment)]
    heading = "variance of the policy gradient by baseline and position in the response"
    return Layout(heading, rows, columns)


@table("OTB's proxy against true norms", part="variance")
def proxy_table(report: Report) -> Layout:
    """How OTB's proxy orders the true squared norms of single tokens' gradients in {experiment}: Spearman's rank
    correlation over tokens, with 95 % intervals.
    """
    columns = [
        *(cell("policy"), cell("policy_label", "policy", csv=False), cell("position", "position", position_text)),
        cell("seeds"),
        interval("proxy_rank_correlation", "rank correlation [95 %]", ".2f"),
        number("tokens", "tokens", "d", "proxy_tokens"),
    ]
    policies = dict.fromkeys(place["policy"] for place in estimator_places(report.experiment))
    positions = [WHOLE, *report.experiment.positions]
    rows = [_row(report, {"policy": policy, "position": position}) for policy in policies for position in positions]
    return Layout("how OTB's proxy orders the true norms of the tokens' gradients", rows, columns)


@table("Estimators by length", part="bias_length")
def bias_length_table(report: Report) -> Layout:
    """How the squared bias of each estimator of the policy gradient grows with the length of responses in {experiment},
    with 95 % intervals.
    """
    places = estimator_places(report.experiment)
    # If there are several policies, the lengths of the first one's responses.
    policy = places[0]["policy"]
    own = [one for one in report.named("response_tokens") if one.where["policy"] == policy]
    lengths = {one.where["task"]: one.value for one in sorted(own, key=lambda one: one.value)}

    def relative(task: str, heading: str) -> Column:
        return interval(f"relative_bias_{task}", heading, "digits", "relative_bias", at={"task": task})

    solved = [(task, report.known("reward", {"policy": policy, "task": task})) for task in lengths]
    columns = [
        *(cell("label", "estimator"), cell("method"), cell("partner")),
        *(cell("rho", "ρ", rho_text), cell("engine", "engine")),
        *_policy_columns(report),
        *(relative(task, f"bias² ({task}, {tokens:.0f} tokens) [95 %]") for task, tokens in lengths.items()),
        number("weight_ess_smallest", "ESS of r, worst (%)", ".0f", scale=100),
        interval("bias_exponent", "power of T [95 %]", "+.2f"),
        interval("absolute_bias_exponent", "power of T, not over |g|² [95 %]", "+.2f"),
    ]
    rows = [_estimator(report, {key: place[key] for key in place if key != "task"}) for place in places]
    names = {"solved": [f"{task} {100 * reward.value:.0f} %" for task, reward in solved]}
    return Layout("bias of the policy gradient's estimators by the length of responses", rows, columns, names=names)


def _policy_columns(report: Report, *between: Column) -> list[Column]:
    several = [cell("policy_label", "policy", csv=False)] if len(report.experiment.bias.policies) > 1 else []
    return [cell("policy"), *several, *between, cell("seeds")]


def _row(report: Report, where: dict[str, str], **cells: str | None) -> Row:
    own = {"policy_label": policy_label(report.experiment, where["policy"]), "seeds": list(report.experiment.seeds)}
    return Row("/".join(where.values()), where, where | own | cells)


def _estimator(report: Report, where: dict[str, str]) -> Row:
    """Return the row of an estimator, with the methods that it is compared with."""
    method = where["method"]
    partner, over = (estimator_counterpart(report.experiment, method, pairing) for pairing in ("unpruned", "rloo"))
    return _row(report, where, label=report.experiment.methods[method].label, partner=partner, over=over)


@figure("Bias and variance")
def bias_variance(draw: "Charts") -> "Figure | None":
    """Squared bias and variance of the gradient estimators in {experiment}, both relative to |g|², a row each: first
    without a safe vocabulary, below it with one. Bars are 95 % intervals. Squares are the same bias from the engine's
    samples alone (paired), where their weights allow it.
    """
    squared = ("squared_bias", "paired_squared_bias")
    table = draw.by_family(*squared, "variance")
    panels = [
        Panel(squared, "squared bias, of |g|²", symlog=0.1, across={"zero": [0]}),
        Panel("variance", "variance of one batch, of |g|²", log="x"),
    ]
    title = draw.finding("Bias and variance", "squared bias", table, "squared_bias")
    return draw.intervals(title, table, panels, facets=["policy", "task"], columns=["engine"])


@figure("Variance by baseline")
def variance_by_baseline(draw: "Charts") -> "Figure | None":
    """Variance of the policy gradient's estimators in {experiment}, over the squared signal, where it is
    distinguishable from 0, and over |g|². Bars are 95 % intervals.
    """
    panels = [
        Panel("variance_over_signal", "variance over |E ĝ|²", log="x"),
        Panel("gradient_variance", "variance over |g|²", log="x"),
    ]
    table = draw.by_family(*(panel.quantities for panel in panels), position=WHOLE)
    title = "Variance of the gradient by baseline"
    return draw.intervals(title, table, panels, facets=["policy"], columns=["engine"])


@figure("Variance by position")
def variance_by_position(draw: "Charts") -> "Figure | None":
    """Variance over squared signal of what the tokens of each bin of positions contribute to the gradient, by
    estimator, in {experiment}. Bars are 95 % intervals.
    """
    positions = draw.experiment.positions
    places = {position: float(place) for place, position in enumerate(positions)}
    table = draw.table[draw.table["position"] != WHOLE]
    return draw.lines(
        "Variance over squared signal by position",
        table.assign(x=table["position"].map(places)),
        [Panel("variance_over_signal", "variance over squared signal", log="y")],
        facets=["policy", "engine"],
        x_label="response tokens",
        tick=lambda place: position_text(positions[int(place)]),
        bars=True,
    )


@figure("Bias by length")
def bias_by_length(draw: "Charts") -> "Figure | None":
    """Squared bias of the policy gradient's estimators against the mean length of responses in {experiment}, and what a
    safe vocabulary changes of it, paired. Bars are 95 % intervals.
    """
    if not draw.has("relative_bias"):
        return None
    panels = [
        Panel("relative_bias", "of |g|²", "squared bias", log="xy"),
        Panel("squared_bias_change", "of |g|²", "changed by pruning", log="x", symlog=0.1, across={"no change": [0]}),
    ]
    return draw.lines(
        draw.finding("Bias by length", "change by pruning", draw.table, "squared_bias_change"),
        draw.over_quantity("response_tokens"),
        panels,
        facets=["policy", "engine"],
        x_label="mean response length, tokens",
        tick="{:.0f}".format,
        bars=True,
    )
