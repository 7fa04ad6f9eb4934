import numpy as np
import pytest
from made_up_results import CLAIMS, CONFIG, make_experiment

from dvp.analysis import training_figures as figures
from dvp.analysis.claims import load_claims
from dvp.analysis.figures import method_colors
from dvp.analysis.load import Reader
from dvp.experiment.grid import GridPoint
from dvp.experiment.loading import load_experiment


def test_styles_differ_and_the_control_is_grey():
    style = figures.styles(make_experiment())
    looks = [(look.color, look.line, look.marker) for look in style.values()]
    assert len(set(looks)) == len({look.label for look in style.values()}) == 7
    control = style[GridPoint(method="rloo", engine="fp32", rho=None)]
    assert len({control.color[i : i + 2] for i in (1, 3, 5)}) == 1
    assert control.line != "-"
    assert (
        style[GridPoint(method="dvp", engine="coarse", rho="exp(-13)")].color
        == style[GridPoint(method="dvp", engine="coarse", rho="0.01")].color
    )


def test_a_method_has_one_colour_in_every_experiment():
    tiny = method_colors(make_experiment())
    for name in ("estimator_bias", "rho_sweep", "training_grid", "tiny_replay"):
        colors = method_colors(load_experiment(name, CONFIG))
        assert len(set(colors.values())) == len(colors)
        for method in set(colors) & set(tiny):
            assert colors[method] == tiny[method]


@pytest.mark.parametrize(
    "name", ["remedies", "remedies_sets", "training_grid", "noise_tail", "otb_groups", "surrogates"]
)
def test_no_two_curves_of_a_panel_look_alike(name):
    experiment = load_experiment(name, CONFIG)
    style = figures.styles(experiment)
    shown = [points for _, points in figures.panels(experiment)]
    assert shown
    for points in shown:
        looks = [(style[point].color, str(style[point].line), style[point].settings) for point in points]
        assert len(set(looks)) == len(looks)


def test_panels():
    titles, shown = zip(*figures.panels(make_experiment()), strict=True)
    assert titles == ("engine coarse, ρ = e⁻¹³", "engine coarse, ρ = 0.01")
    assert [len(points) for points in shown] == [5, 5]
    plain = make_experiment(grid=[{"method": ["rloo"], "engine": ["coarse", "bf16"]}], report__reference_engine="bf16")
    assert [title for title, _ in figures.panels(plain)] == ["engine coarse", "engine bf16"]


def test_mismatch_has_a_floor(experiment, results):
    metrics = Reader(experiment, results.folder).metrics
    assert (metrics["k3"] < 0).any()
    figure = figures.mismatch_curves(experiment, metrics)
    drawn = np.concatenate([line.get_ydata() for axes in figure.axes for line in axes.get_lines()])
    assert drawn.min() == pytest.approx(figures.FLOOR)
    assert "drawn at 1e-12" in " ".join(figure.get_suptitle().split())
    # The bound is in the upper panels, on the scale of the mismatched arms.
    assert load_claims(CLAIMS)["dvp_kl"].value == figures.PUBLISHED_BOUND == 0.001
    assert sum(list(line.get_ydata()) == [0.001, 0.001] for axes in figure.axes for line in axes.get_lines()) == 2


def test_skipped_steps_are_gaps(experiment, results):
    metrics = Reader(experiment, results.folder).metrics
    metrics.loc[metrics["step"] == 3, "gradient_norm"] = 0.0
    figure = figures.gradient_norm(experiment, metrics)
    color = figures.styles(experiment)[GridPoint(method="rloo_mis", engine="coarse", rho=None)].color
    lines = [line for line in figure.axes[0].get_lines() if line.get_color() == color]
    assert len(lines) == 3
    for line in lines:
        assert list(np.flatnonzero(np.isnan(line.get_ydata())) + 1) == [3, 7]


def test_bold_line_is_the_trailing_mean(experiment, results):
    metrics = Reader(experiment, results.folder).metrics
    figure = figures.learning_curves(experiment, metrics)
    point = GridPoint(method="rloo", engine="coarse", rho=None)
    own = metrics[metrics["point"] == point.path]
    color = figures.styles(experiment)[point].color
    bold = next(line for line in figure.axes[0].get_lines() if line.get_color() == color and line.get_linewidth() == 2)
    assert bold.get_ydata()[0] == pytest.approx(own[own["step"] == 1]["reward"].mean())
    assert bold.get_ydata()[-1] == pytest.approx(own[own["step"] > 7]["reward"].mean())
