"""Scores along training, and the sampled tokens that it takes to reach the reference's score."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from dvp.analysis.columns import Layout, Report, Row, at_each, cell, counts, interval, number, percent, seeds, written
from dvp.analysis.points import evaluated
from dvp.analysis.shown import Facet, Panel, figure, table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from dvp.analysis.charts import Charts


@table("Final, peak and mean scores, tokens to a score", part="curve")
def curve_table(report: Report) -> Layout:
    """Final, peak and mean score of {experiment}, and the sampled tokens until a run reaches the reference's final
    score, less the points that report.reached_within gives. The step of a peak is chosen by the odd samples of each
    problem and read from the even ones. The notes under the table say how runs count that never reach the score, and
    state the scale.
    """
    goals = {one.where["task"]: f"{100 * one.value:.1f} %" for one in report.named("target_score")}
    goal = "the score" if len(goals) > 1 else "".join(goals.values())
    tasks, saved = report.experiment.data.tasks, "tokens_saved_equal_settings_percent"
    columns = [
        *report.point_columns(),
        cell("task"),
        *([cell("task", "task", csv=False)] if len(tasks) > 1 else []),
        percent("final", "final (%) [95 %]", "final_score"),
        percent("peak_score", "peak (%) [95 %]"),
        seeds("peak_steps", "at step", "d", "peak_step"),
        percent("mean_score", "mean (%) [95 %]"),
        interval("sampled_tokens", "tokens of a run", "tokens", text=lambda one: written(one.value, "tokens")),
        number("target", None, "", "target_score"),
        number("reached", None, "d", "reached_runs"),
        counts("reached_of", f"reach {goal}", ["reached_runs"], lambda runs: f"{runs} of {report.count}", csv=False),
        interval("tokens_to_score", f"tokens to {goal} [95 %]", "tokens"),
        number("median_tokens_to_score", "median", "tokens"),
        interval("tokens_saved_percent", "tokens saved (%) [95 %]", "+.0f"),
        interval(saved, "at equal settings (%) [95 %]", "+.0f"),
    ]
    return Layout("scores along training", _by_task(report), columns)


@table("Scores by step", part="curve")
def score_curve(report: Report) -> Layout:
    """Score and sampled tokens of {experiment} at every evaluated step; step 0 is the base model."""
    columns = [
        *report.point_columns(),
        cell("task", "task"),
        cell("step", "step"),
        number("tokens", "sampled tokens", "tokens", "tokens_at_step"),
        percent("score", "score (%) [95 %]", "score_at_step"),
        seeds("seed_scores", "per seed (%)", ".1f", "score_at_step", scale=100),
    ]
    rows = at_each(_by_task(report), "step", lambda row: evaluated(report.experiment, row.point))
    return Layout("scores at the evaluated steps", rows, columns)


def _by_task(report: Report) -> list[Row]:
    """Return a row per task and grid point."""
    return [
        row
        for task in report.experiment.data.tasks
        for row in at_each(report.points(), "task", lambda _, task=task: [task])
    ]


@figure("Scores along training", name="score_curve")
def score_along_training(draw: "Charts") -> "Figure | None":
    """Scores of {experiment} by the tokens that were sampled in training; at 0 is the base model. Bold lines are means
    over the training seeds, thin ones single seeds; bands are 95 % intervals over problems and, from three on, seeds.
    The solid black line is the reference, repeated in all panels; the dashed line is the score that counts as reaching
    it.
    """

    def target(facet: Facet) -> Sequence[float]:
        return 100 * draw.values(quantity="target_score", task=facet["task"])

    panel = Panel("score_at_step", "score, %", scale=100, across={"counts as reaching the reference": target})
    return draw.lines(
        "Scores by the tokens sampled in training",
        draw.over_quantity("tokens_at_step"),
        [panel],
        facets=["task", "engine", "rho", *draw.experiment.axes],
        x_label="tokens sampled in training",
        reference=True,
    )


@figure("Peak scores, and tokens saved until the reference's score")
def curve_differences(draw: "Charts") -> "Figure | None":
    """Peak scores in {experiment} minus the reference's, and how many of the tokens sampled in training are saved until
    the score that counts as reaching the reference, against the reference and against its method with the same training
    settings. Bars are 95 % intervals, paired: of the peak over problems and training seeds, of tokens over seeds.
    Without a mark where a run never reaches the score.
    """
    none, saved = {"no difference": [0]}, "sampled tokens saved, %"
    peak = "peak_score_over_reference"
    panels = [
        Panel(peak, "score difference, pp", "peak minus the reference's", scale=100, across=none),
        Panel("tokens_saved_percent", saved, "against the reference", across=none),
        Panel("tokens_saved_equal_settings_percent", saved, "against the same settings", across=none),
    ]
    title = draw.finding("Peaks and sampled tokens", "tokens saved", draw.table, "tokens_saved_percent")
    return draw.intervals(title, draw.table, panels, columns=["task"])
