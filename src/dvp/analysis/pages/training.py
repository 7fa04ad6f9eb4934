"""Scores of the trained models, and the mismatch and gradients of training."""

import math
from typing import TYPE_CHECKING, Any

from dvp.analysis.columns import (
    Column,
    Layout,
    Report,
    counts,
    difference,
    interval,
    number,
    percent,
    reference_or_text,
    seeds,
)
from dvp.analysis.points import point_name
from dvp.analysis.shown import Panel, figure, table
from dvp.analysis.statistics import Statistic

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from dvp.analysis.charts import Charts


@table("Scores by method", part="training")
def main_table(report: Report) -> Layout:
    """Held-out scores of {experiment}: the base model, then one row for each method, training engine, ρ and training
    settings (where these differ), each model at the end of its training. avg@k, pass@k and maj@k are means over the
    training seeds; all models are sampled with one engine, which the notes name. Brackets are 95 % intervals over
    problems and training seeds; with fewer than three seeds they are over problems alone and do not cover what another
    training run would change, for which see the scores per seed. The change is relative to the reference (ref.), and
    its interval is paired: all rows use the same problems and seeds. The control is trained without the mismatch. The
    notes of the table (tables/main_table.md) state the scale here.
    """

    def collapsed(one: Statistic) -> str:
        step = report.known("collapsed_at", one.where)
        return f" (collapsed at step {step.value:.0f})" if step and math.isfinite(step.value) else ""

    each = "base model" if report.experiment.bases else "seed"
    columns = [
        *report.point_columns(),
        Column("k", None, lambda row, known: report.k),
        percent("score", f"avg@{report.k} (%) [95 %]"),
        number("pass_at_k", f"pass@{report.k} (%)", ".1f", scale=100),
        number("maj_at_k", f"maj@{report.k} (%)", ".1f", scale=100, optional=True),
        interval("change_percent", "change (%) [95 %]", "+.1f", "score_change_percent", mark=reference_or_text),
        difference("over_unpruned", "DVP adds (pp) [95 %]", "score_over_unpruned"),
        seeds("seed_scores", None, "", "seed_score"),
        seeds("collapsed_at", None, "d"),
        seeds("per_seed", f"per {each} (%)", ".1f", "seed_score", scale=100, csv=False, after=collapsed),
    ]
    return Layout(
        f"scores on {report.experiment.report.task}", report.points(base=True), columns, _without_signal(report)
    )


def _without_signal(report: Report) -> list[str]:
    """Name the points that skipped every step."""
    unmoved = []
    for row in report.points():
        skipped, steps = (report.known(name, row.where) for name in ("skipped_steps", "training_steps"))
        if skipped and skipped.value and steps and skipped.value == steps.value:
            unmoved.append(point_name(report.experiment, row.point))
    if not unmoved:
        return []
    return [
        f"No signal: every step of {', '.join(unmoved)} was skipped (all rewards of each group were equal, or every "
        "other response was rejected). The weights did not change: these are scores of the base model."
    ]


@table("Mismatch by method", part="training")
def mismatch_table(report: Report) -> Layout:
    """How far engine and trainer differ at the end of training in {experiment}: means over the last 10 steps, then over
    the training seeds, with the smallest and largest seed in brackets (a range, not a confidence interval). k1 and k3
    estimate KL(engine‖trainer) in nats per token between the policies that are sampled from and trained: the pruned
    ones for methods with ρ, the full ones for the others. The two kinds are different quantities, and a smaller value
    of a pruned policy says nothing about the full one. ESS is the effective sample size of the sequences' importance
    weights as a fraction of the batch. Sampled tokens outside the trainer's safe vocabulary occur because engine and
    trainer compute theirs independently. Tokens per second depend on the machine. The notes of the table state the
    scale.
    """

    def last(key: str, heading: str, spec: str, **more: Any) -> Column:
        # One seed has no smallest and largest.
        more |= {"text": number(key, heading, spec).text} if report.count == 1 else {}
        return interval(key, heading, spec, f"last_{key}", ends=("min", "max"), **more)

    columns = [
        *report.point_columns(),
        Column("policies", "policies", lambda row, known: report.experiment.methods[row.point.method].policies),
        last("k1", "k1", ".1e"),
        last("k3", "k3", ".1e"),
        last("max_abs_log_ratio", "max |log ratio|", ".2g"),
        last("ess", "ESS", ".3f"),
        last("outside_safe_fraction", "outside V_S", ".1e"),
        last("pruned_mass_mean", "1 − Z", ".1e"),
        last("masked_fraction", "masked", ".3f"),
        last("unpruned_k3", "k3 unpruned", ".1e", optional=True),
        last("set_overlap_mean", "overlap of sets", ".3f", optional=True),
        last("sets_bytes", "sets (bytes per step)", ".3g", optional=True),
        number("skipped_steps", None, "d"),
        number("steps", None, "d", "training_steps"),
        counts("skipped", "skipped steps", ["skipped_steps", "training_steps"], "{} / {}".format, csv=False),
        last("tokens_per_second", "tokens/s", ".0f"),
    ]
    return Layout("mismatch between engine and trainer at the end of training", report.points(), columns)


@figure("Score differences")
def differences(draw: "Charts") -> "Figure | None":
    """Differences of held-out scores in {experiment}, in points, from the reference, from the same method without a
    safe vocabulary, and from the same method with RLOO's baseline, where the grid has these. Bars are 95 % intervals,
    paired: all models are scored on the same problems and seeds. The dashed line is no difference, the dotted ones are
    two points, the threshold of the claims.
    """
    table = draw.table.query("task == 'none'")
    across = {"no difference": [0], "criterion, 2 pp": [-2, 2]}
    others = {
        "score_over_reference": "minus the reference",
        "score_over_unpruned": "minus the same unpruned",
        "score_over_rloo": "minus the same with RLOO's baseline",
    }
    panels = [
        Panel(name, "score difference, pp", title, scale=100, across=across, seeds=f"seed_{name}")
        for name, title in others.items()
    ]
    title = draw.finding("Score differences", "to the reference", table, "score_over_reference")
    return draw.intervals(title, table, panels)


@figure("Held-out scores")
def scores(draw: "Charts") -> "Figure | None":
    """Held-out avg@k in {experiment}, as in the main table: filled markers are means over the training seeds, small
    rings single seeds. Bars are 95 % intervals over problems and training seeds; with fewer than three seeds they are
    over problems alone and do not cover what another training run would change. Vertical lines are the base model
    (dashed) and the control (dotted), trained without the mismatch. The bars are those of each row alone. All rows
    share the problems, so overlapping bars do not show that two methods are equal; the paired differences are a figure
    of their own, and the scale is stated under the main table.
    """
    engine = draw.experiment.engines[draw.experiment.evaluation.engine].in_words
    across = {
        "base model": 100 * draw.values(quantity="score", role="base"),
        "control": 100 * draw.values(quantity="score", role="control"),
    }
    label = f"avg@{draw.k} on {draw.task}, % ({engine} engine)"
    panel = Panel("score", label, scale=100, across=across, seeds="seed_score")
    return draw.intervals("Held-out scores", draw.table, [panel])


@figure("Learning curves")
def learning_curves(draw: "Charts") -> "Figure | None":
    """Mean reward of the responses sampled in each training step of {experiment}: thin lines are seeds (left out where
    a panel has more than eight methods), bold lines the mean over seeds, smoothed by a trailing mean of 5 steps. One
    panel for each ρ, and for each combination of training settings where the grid has several; methods without ρ and
    the control (dashed, grey: trained on the fp32 engine) are repeated in each panel of their settings. The reward is
    of responses from the training engine, mismatched and, for methods with ρ, pruned: it is not the held-out score, for
    which see the main table. One step holds few prompts, so single steps differ by chance; no interval is drawn. The
    scale is stated under the main table.
    """
    return _by_step(draw, "Mean reward of the sampled responses", Panel("reward", "mean reward (0 to 1)"))


@figure("Mismatch KL")
def mismatch_curves(draw: "Charts") -> "Figure | None":
    """Mismatch between engine and trainer in each training step of {experiment}: k3, an estimate of KL(engine‖trainer)
    in nats per sampled token, on a logarithmic axis. It is taken between the policies that are sampled from and
    trained: the pruned ones for methods with ρ, the full ones for the others; a smaller value of a pruned policy says
    nothing about the full one. Sampled tokens outside the trainer's safe vocabulary are left out; their share is in the
    mismatch table. Thin lines are seeds, bold lines the mean over seeds, smoothed by a trailing mean of 5 steps; no
    interval is drawn. The control is dashed and grey; where its engine is exact, its values are rounding noise under
    1e-9, which is not drawn. The dashed black line is the published bound for DVP (0.001, Fig. 1 of the paper), found
    at the paper's scale; ours is stated under the main table.
    """
    label, across = "k3, nats per token (below 1e-9: not drawn)", {"published bound for DVP (Fig. 1): 0.001": [0.001]}
    return _by_step(draw, "KL between engine and trainer", Panel("k3", label, log="y", floor=1e-9, across=across))


@figure("Gradient norm")
def gradient_norm(draw: "Charts") -> "Figure | None":
    """Norm of the gradient before clipping in each training step of {experiment}, on a logarithmic axis: thin lines are
    seeds, bold lines the mean over seeds, smoothed by a trailing mean of 5 steps; no interval is drawn. Steps that were
    skipped because every response was rejected or no group had unequal rewards, and steps whose gradient is exactly 0,
    are gaps. The dashed line is the norm at which gradients are clipped. The scale is stated under the main table.
    """
    norms = {draw.experiment.training_of(point).gradient_clipping for point in draw.experiment.points}
    across = {f"clipped at {norm:g}": [norm] for norm in sorted(norms)}
    panel = Panel("gradient_norm", "gradient norm before clipping", log="y", across=across)
    return _by_step(draw, "Norm of the gradient before clipping", panel)


def _by_step(draw: "Charts", title: str, panel: Panel) -> "Figure | None":
    table, facets = draw.table.query("policy == 'none'"), ["engine", "rho", *draw.experiment.axes]
    return draw.lines(title, table, [panel], facets=facets, x_label="training step", smooth=5)


@figure("Score, KL, bias and variance by ρ")
def rho_sweep(draw: "Charts") -> "Figure | None":
    """Score and KL at the end of training, and squared bias, variance and their sum, of the gradient at the base
    policy, against ρ in {experiment}. Horizontal lines are grid points without ρ: naive RLOO on the mismatched engine,
    RLOO + MIS (what DVP + MIS is at ρ = 0), and the control on the fp32 engine. Bars are 95 % intervals.
    """
    if not draw.has("score_over_small_rho"):
        return None
    label = "nats per token (below 1e-7: not drawn)"
    panels = [
        Panel("score", f"avg@{draw.k} on {draw.task}, %", "after training: score", scale=100, log="x"),
        Panel("final_k3", label, "last 10 steps: k3 of the sampled policies", log="xy", floor=1e-7),
        Panel("squared_bias", "of |g|²", "base policy: squared bias", log="x"),
        Panel("variance", "of |g|²", "base policy: variance of a batch", log="xy"),
        Panel("mse", "of |g|²", "base policy: squared bias + variance", log="x"),
    ]
    table = draw.over_rho(draw.table.query("policy in ['none', 'base']"))
    title = "Score, KL, bias and variance by ρ"
    return draw.lines(title, table, panels, along="rho", x_label="ρ (larger prunes more)", bars=True)
