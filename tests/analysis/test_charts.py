"""The two kinds of figure, on statistics made by hand."""

import math

import pytest

from dvp.analysis.charts import BELOW, Facet, Line, Mark, Rows, intervals_in_rows, lines_in_facets
from dvp.analysis.figures import handle
from dvp.analysis.statistics import Statistic

HANDLES = [handle("a method", color="black", marker="o")]


def made(value: float, low: float, high: float) -> Statistic:
    return Statistic("score", {}, value, low, high, "fraction", "", ())


def segments(axes) -> list[list[list[float]]]:
    return [part.tolist() for bars in axes.collections for part in bars.get_segments()]


def test_marks_of_a_row_stand_below_one_another():
    """From the top; a place that stays free moves none of the others."""
    first, second = Mark(made(0.5, 0.4, 0.7), "red"), Mark(made(0.2, 0.1, 0.3), "blue", hollow=True)
    panel = Rows([[first, second], [None, second]], "%", scale=100, levels=[(0.25, {"color": "black"})])
    axes = intervals_in_rows("title", ["a", "b"], [[panel]], HANDLES, 4.0).axes[0]
    (a, b, c) = segments(axes)
    assert a[0] == pytest.approx([40, -0.11])
    assert b[0] == pytest.approx([10, 0.11])
    assert c[1] == pytest.approx([30, 1.11])
    assert axes.get_ylim() == (1.5, -0.5)
    assert [text.get_text() for text in axes.get_yticklabels()] == ["a", "b"]
    assert [25, 25] in [list(line.get_xdata()) for line in axes.lines]


def test_a_line_has_gaps_where_a_log_axis_has_no_place():
    points = {1.0: made(1.0, -1.0, 2.0), 2.0: None, 3.0: made(-1.0, -2.0, 0.5), 4.0: made(3.0, 2.0, 4.0)}
    figure = lines_in_facets("title", [[Facet([Line(points, "red", "s")])]], HANDLES, 4.0)
    values = figure.axes[0].lines[0].get_ydata()
    assert [math.isnan(value) for value in values] == [False, True, True, False]
    # A bar that would go on to 0 is cut off, one of a value that is not drawn is not drawn.
    assert segments(figure.axes[0]) == [[[1, 1 / BELOW], [1, 2]], [[4, 2], [4, 4]]]


def test_a_facet_without_a_value_says_so():
    figure = lines_in_facets("title", [[Facet([Line({1.0: None}, "red", "s")], empty="nothing")]], HANDLES, 4.0)
    assert [text.get_text() for text in figure.axes[0].texts] == ["nothing"]
