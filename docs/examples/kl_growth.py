"""A figure and a table, for src/dvp/analysis/pages/training.py: they appear where a report has their quantities."""

from typing import TYPE_CHECKING

from dvp.analysis.columns import Layout, Report, interval
from dvp.analysis.shown import Panel, figure, table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from dvp.analysis.charts import Charts


@figure("Growth of the KL")
def kl_growth(draw: "Charts") -> "Figure | None":
    """Growth of the KL divergence between engine and trainer in {experiment}. Bars are 95 % intervals over seeds."""
    panel = Panel("k3_growth", "k3 of the last ten steps over the first ten", log="x")
    return draw.intervals("Growth of the KL", draw.table, [panel])


@table("Growth of the KL", part="training")
def kl_growth_table(report: Report) -> Layout:
    """Growth of the KL divergence between engine and trainer in {experiment}."""
    columns = [*report.point_columns(), interval("k3_growth", "k3, last ten steps over the first ten [95 %]", ".2g")]
    notes = ["Means over ten steps each; intervals over training seeds."]
    return Layout("growth of the KL", report.points(), columns, notes=notes)
