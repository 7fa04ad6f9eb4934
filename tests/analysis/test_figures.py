"""Figures from estimates and series that are made by hand."""

import math
import subprocess
import sys

import numpy as np
import pandas as pd
import pytest
from made_up_results import CLAIMS, CONFIG, make_experiment

from dvp.analysis import figures, series
from dvp.analysis.claims import load_file
from dvp.analysis.drawing import BELOW
from dvp.analysis.looks import Looks
from dvp.analysis.pages import FIGURES, TABLES
from dvp.analysis.statistics import Statistic
from dvp.analysis.training import where_of
from dvp.experiment.loading import load_experiment

EMPTY = series.joined([])


def made(name: str, where: dict[str, str], value: float, low: float = math.nan, high: float = math.nan) -> Statistic:
    return Statistic(name, where, value, low, high, "fraction", "", ())


def curves(experiment, quantity: str, value_N, points=None, *, seeds=("0", "1")) -> pd.DataFrame:
    """The same for every point and seed, by step."""
    steps = np.arange(1, len(value_N) + 1)
    return series.joined(
        [
            pd.DataFrame({"x": steps, "value": value_N}).assign(
                quantity=quantity, seed=seed, **where_of(experiment, point)
            )
            for point in points or experiment.points
            for seed in seeds
        ]
    )


def labels(figure) -> list[str]:
    return [text.get_text() for text in figure.legends[0].get_texts()]


def bold(axes) -> list:
    return [line for line in axes.lines if line.get_linewidth() == 1.8]


def segments(axes) -> list[list[list[float]]]:
    return [part.tolist() for bars in axes.collections for part in bars.get_segments()]


def test_a_family_has_one_colour_in_every_experiment():
    def colors(experiment) -> dict[str, str]:
        looks = Looks(experiment)
        return {name: looks.color({"method": name, "role": ""}, "method") for name in experiment.methods}

    tiny = colors(make_experiment())
    assert tiny["dvp"] != tiny["rloo"]  # lighter without a safe vocabulary
    assert len({tiny[name] for name in ("dvp", "rloo", "rloo_mis", "dvp_mis")}) == 4
    assert tiny["dvp_mass"] == tiny["dvp"]
    for name in ("estimator_bias", "rho_sweep", "bases~0", "remedies"):
        others = colors(load_experiment(name, CONFIG))
        assert all(others[method] == tiny[method] for method in set(others) & set(tiny))


@pytest.mark.parametrize("name", ["remedies", "otb_groups", "surrogates_gspo"])
def test_no_two_curves_of_a_panel_look_alike(name):
    experiment = load_experiment(name, CONFIG)
    figure = figures.draw(experiment, [], curves(experiment, "reward", [0.5, 0.6]))["learning_curves"]
    for axes in figure.axes:
        looks = [(line.get_color(), str(line.get_linestyle()), str(line._dash_pattern)) for line in bold(axes)]
        assert looks
        assert len(set(looks)) == len(looks)


def test_what_has_no_rho_and_the_control_stand_in_every_panel():
    experiment = make_experiment()
    figure = figures.draw(experiment, [], curves(experiment, "reward", [0.5, 0.6]))["learning_curves"]
    assert [axes.get_title() for axes in figure.axes] == [
        "int4 + fp8-KV, ρ\u00a0=\u00a0e⁻¹³",
        "int4 + fp8-KV, ρ\u00a0=\u00a00.01",
    ]
    for axes in figure.axes:
        assert len(bold(axes)) == 5
        [control] = [line for line in bold(axes) if line.get_color() == "#707070"]
        assert control.is_dashed()
    assert "RLOO (naive), fp32 (control)" in labels(figure)


def test_a_control_stands_beside_its_own_settings():
    def shown_in(*grid: dict) -> dict[str, int]:
        own = {"grid": list(grid), "report__reference_training": {"group_size": 16}}
        experiment = make_experiment(**own)
        figure = figures.draw(experiment, [], curves(experiment, "reward", [0.5, 0.6]))["learning_curves"]
        return {axes.get_title(): len(bold(axes)) for axes in figure.axes}

    sizes = {"group_size": [4, 16]}
    both = shown_in({"method": "rloo", "engine": ["fp32", "coarse"], "training": sizes})
    assert both == {"int4 + fp8-KV, G 4": 2, "int4 + fp8-KV, G 16": 2}
    control = {"method": "rloo", "engine": "fp32", "training": {"group_size": 32}}
    assert shown_in(control, {"method": "rloo", "engine": "coarse", "training": sizes}) == both


def test_bold_is_the_trailing_mean_with_gaps_where_all_seeds_have_one():
    experiment = make_experiment()
    point = experiment.points[1]
    values = [1.0, 2.0, np.nan, 4.0, 5.0, 6.0, 7.0]
    figure = figures.draw(experiment, [], curves(experiment, "gradient_norm", values, [point]))["gradient_norm"]
    [line] = bold(figure.axes[0])
    expected = [1.0, 1.5, np.nan, 7 / 3, 3.0, 17 / 4, 22 / 4]
    np.testing.assert_allclose(line.get_ydata(), expected, rtol=1e-6)
    assert "clipped at 1" in labels(figure)


def test_rounding_of_an_exact_engine_is_not_drawn():
    experiment = make_experiment()
    control, naive = experiment.points[:2]
    every = [curves(experiment, "k3", [1e-13, -1e-13], [control]), curves(experiment, "k3", [1e-3, 2e-3], [naive])]
    figure = figures.draw(experiment, [], series.joined(every))["mismatch_curves"]
    heights = np.concatenate([np.asarray(line.get_ydata(), dtype=float) for line in figure.axes[0].lines])
    assert np.nanmin(heights) == pytest.approx(1e-3)
    assert not any("control" in label for label in labels(figure))
    # The published bound of the caption is that of the claims.
    assert {claim.id: claim for claim in load_file(CLAIMS).claims}["dvp_kl"].published.value == 0.001 in heights


def test_differences_are_drawn_with_zero_and_the_threshold():
    experiment = make_experiment()
    pruned = experiment.points[-1]
    statistics = [
        made("score_over_reference", where_of(experiment, pruned), 0.03, 0.01, 0.05),
        made("score_over_unpruned", where_of(experiment, pruned), 0.01, -0.01, 0.03),
    ]
    first, second = figures.draw(experiment, statistics, EMPTY)["differences"].axes
    assert segments(first)[0] == [pytest.approx([1, 0]), pytest.approx([5, 0])]
    assert sorted(line.get_xdata()[0] for line in first.lines if len(set(line.get_xdata())) == 1)[:3] == [-2, 0, 2]
    assert second.get_title() == "minus the same unpruned"
    assert [text.get_text() for text in first.get_yticklabels()] == ["DVP + MIS"]


def test_scores_have_a_row_a_point_with_its_seeds():
    experiment = make_experiment(
        grid=[
            {"method": "rloo", "engine": ["fp32", "coarse"]},
            {"method": "dvp", "engine": "coarse", "rho": ["exp(-13)"], "training": {"group_size": [4, 8]}},
        ]
    )
    statistics = [
        made("score", where_of(experiment, point), 0.5 + 0.1 * place, 0.4, 0.7)
        for place, point in enumerate((None, *experiment.points))
    ]
    where = where_of(experiment, experiment.points[0])
    statistics += [made("seed_score", where | {"seed": seed}, value) for seed, value in (("0", 0.55), ("1", 0.65))]
    figure = figures.draw(experiment, statistics, EMPTY)["scores"]
    names = [text.get_text().replace("\n", " ") for text in figure.axes[0].get_yticklabels()]
    assert names == [
        *("base model", "RLOO (naive), fp32, G 8", "RLOO (naive), int4 + fp8-KV, G 8"),
        *("DVP, int4 + fp8-KV, ρ\u00a0=\u00a0e⁻¹³, G 4", "DVP, int4 + fp8-KV, ρ\u00a0=\u00a0e⁻¹³, G 8"),
    ]
    small = [line.get_xdata()[0] for line in figure.axes[0].lines if line.get_markersize() == 3.5]
    assert small == pytest.approx([55, 65])
    assert {"base model", "control", "one seed"} <= set(labels(figure))


def test_marks_of_a_row_stand_below_one_another():
    """By the policy that sampled: colour by engine, hollow at ρ, a row of its own for a ρ of the evaluation alone."""
    experiment = make_experiment(evaluation__also=[{"engine": "training", "rho": "own"}])
    naive, pruned = (where_of(experiment, experiment.points[place]) for place in (1, -1))
    by = {"evaluated_on": "fp32", "evaluated_rho": "none"}
    statistics = [
        made("score_by_policy", naive | by, 0.4, 0.3, 0.5),
        made("score_by_policy", naive | by | {"evaluated_rho": "0.01"}, 0.4, 0.3, 0.5),
        made("score_by_policy", pruned | by, 0.6, 0.5, 0.7),
        made("score_by_policy", pruned | {"evaluated_on": "coarse", "evaluated_rho": pruned["rho"]}, 0.5, 0.4, 0.6),
    ]
    figure = figures.draw(experiment, statistics, EMPTY)["evaluation_matrix"]
    heights = [bar[0][1] for bar in segments(figure.axes[0])]
    assert heights == pytest.approx([0, 1, 2 - 0.11, 2 + 0.11])
    marks = [line for line in figure.axes[0].lines if line.get_markersize() == 5]
    assert [mark.get_markerfacecolor() == "white" for mark in marks] == [False, True, False, True]
    assert marks[2].get_color() != marks[3].get_color()
    assert "in evaluation only" in figure.axes[0].get_yticklabels()[1].get_text().replace("\n", " ")
    assert {"sampled on fp32", "sampled on int4 + fp8-KV, at ρ"} <= set(labels(figure))


def test_estimators_stand_by_family_on_one_scale():
    experiment = load_experiment("estimator_bias", CONFIG)
    statistics = [
        made(name, {"policy": "base", "engine": engine, "method": method, "rho": rho}, value, value - 1, value + 1)
        for engine, value in (("bf16", 0.5), ("coarse", 2.0))
        for method, rho in (("dvp", "exp(-13)"), ("rloo_mis", "none"), ("rloo", "none"), ("dvp", "0.01"))
        for name in ("squared_bias", "variance")
    ]
    figure = figures.draw(experiment, statistics, EMPTY)["bias_variance"]
    names = [text.get_text() for text in figure.axes[0].get_yticklabels()]
    assert names == ["RLOO (naive)", "DVP, ρ\u00a0=\u00a00.01", "DVP, ρ\u00a0=\u00a0e⁻¹³", "RLOO + MIS"]
    bias, variance, other, _ = figure.axes
    assert (bias.get_xscale(), variance.get_xscale(), bias.get_xlim()) == ("symlog", "log", other.get_xlim())
    # A bar that reaches zero leaves the logarithmic axis, which ends below all values.
    assert segments(variance)[0][0][0] < variance.get_xlim()[0] < 0.5 / BELOW
    assert 3.0 < variance.get_xlim()[1] < 10


def test_points_without_rho_are_lines_across_a_sweep():
    experiment = load_experiment("rho_sweep", CONFIG)
    statistics = [made("score", where_of(experiment, point), 0.5, 0.4, 0.6) for point in experiment.points]
    assert "rho_sweep" not in figures.draw(experiment, statistics, EMPTY)
    statistics.append(made("score_over_small_rho", {"method": "dvp_mis", "engine": "coarse"}, 0.0))
    axes = figures.draw(experiment, statistics, EMPTY)["rho_sweep"].axes[0]
    [curve] = [line for line in axes.lines if line.get_marker() == "o"]
    rhos = [point for point in experiment.points if point.rho is not None]
    assert len(curve.get_xdata()) == len(rhos)
    assert len([line for line in axes.lines if list(line.get_xdata()) == [0, 1]]) == len(experiment.points) - len(rhos)


def test_the_reference_is_black_in_the_panels_of_others():
    experiment = make_experiment(
        grid=[{"method": "rloo", "engine": "coarse", "training": {"group_size": [4, 16]}}],
        report__reference_training={"group_size": 16},
    )
    every = [
        made(name, where_of(experiment, point) | {"task": "held_out", "step": str(step)} | seed, value)
        for point in experiment.points
        for step in (0, 1)
        for seed in ({}, {"seed": "0"})
        for name, value in (("score_at_step", 0.4 + step), ("tokens_at_step", 700.0 * step))
    ]
    figure = figures.draw(experiment, every, EMPTY)["score_curve"]
    assert [axes.get_title() for axes in figure.axes] == [
        "held_out, int4 + fp8-KV, G 4",
        "held_out, int4 + fp8-KV, G 16",
    ]
    assert all(line.get_xdata().tolist() == [0, 700] for axes in figure.axes for line in bold(axes))
    for axes in figure.axes:
        assert sum(line.get_color() == "black" for line in bold(axes)) == 1


def test_the_legend_names_no_line_that_is_outside():
    """tiny's gradient norms are a hundredth of the norm at which they are clipped."""
    experiment = make_experiment()
    low, high = (
        figures.draw(experiment, [], curves(experiment, "gradient_norm", size * np.linspace(0.5, 1.0, 12)))[
            "gradient_norm"
        ]
        for size in (0.01, 2.0)
    )
    assert not any(label.startswith("clipped at") for label in labels(low))
    assert f"clipped at {experiment.training.gradient_clipping:g}" in labels(high)


def test_a_policy_and_the_engine_that_measures_it_are_told_apart():
    experiment = make_experiment()
    where = {"policy": experiment.points[0].path, "engine": "fp32"}
    assert Looks(experiment).name(where, where) == "after RLOO (naive), fp32, measured on fp32"


def test_titles_and_captions_are_read_without_matplotlib():
    """Snakemake reads them whenever it starts."""
    code = (
        "import sys; from dvp.analysis.pages import FIGURES, TABLES; print({'matplotlib', 'scipy'} & set(sys.modules))"
    )
    run = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert run.stdout == "set()\n"
    for entry in [*FIGURES.values(), *TABLES.values()]:
        assert entry.title
        assert "{experiment}" in entry.caption


def test_a_title_counts_the_intervals_beside_zero():
    experiment = make_experiment()
    points = [point for point in experiment.points if point != experiment.reference_point]
    ends = [(0.01, 0.05), (-0.01, 0.05), (-0.05, -0.01), *[(math.nan, math.nan)] * (len(points) - 3)]
    statistics = [
        made("score_over_reference", where_of(experiment, point), 0.0, *interval)
        for point, interval in zip(points, ends, strict=True)
    ]
    figure = figures.draw(experiment, statistics, EMPTY)["differences"]
    title = " ".join(figure.get_suptitle().split())
    assert "to the reference: 1 above zero, 1 below, 1 inconclusive; bars: 95 % intervals" in title
