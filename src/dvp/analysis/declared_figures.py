"""What the figures of one of the two kinds (dvp.analysis.charts) show."""

import math

from matplotlib.figure import Figure

from dvp.analysis.bias import estimator_places
from dvp.analysis.bias_length import REMOVED, tokens_by_task
from dvp.analysis.charts import RING, Facet, Line, Mark, Rows, intervals_in_rows, lines_in_facets
from dvp.analysis.figures import COLORS, DARK, MARKERS, handle, method_colors, row_label
from dvp.analysis.formats import rho_text
from dvp.analysis.matrix import ONLY, entries, heading, own_policies
from dvp.analysis.points import BASE, policy_label
from dvp.analysis.statistics import Statistic, lookup
from dvp.analysis.tables import Table
from dvp.analysis.training_figures import styles
from dvp.evaluation import bootstrap
from dvp.experiment.config import Experiment
from dvp.experiment.evaluation import Further
from dvp.experiment.grid import WHOLE

REACH = 1.0  # of what pruning removes: beside an estimator that has hardly any bias it may add it many times over
SPREAD = 0.03  # of the logarithm of the length, by which the lines of a facet stand side by side


def scores(experiment: Experiment, table: Table) -> Figure:
    """avg@k of every grid point with its interval and its seeds, `table` as of `training.main_table`."""
    rows, base = table.rows, table.rows[BASE]
    levels = [("base model", base, {"color": "black", "linestyle": (0, (1, 1.5))})]
    marks, labels = [], []
    for point, look in styles(experiment).items():
        row, reference = rows[point.path], " (ref.)" if point == experiment.reference_point else ""
        if experiment.is_control(point):
            levels.append((look.label + look.settings, row, {"color": look.color, "linestyle": look.line}))
        marks.append([Mark(row["score"], look.color, marker=look.marker, seeds=row["seed_scores"].value)])
        # Settings in a line of their own, so that there is room for the scores.
        labels.append(look.label + look.settings.replace(", ", "\n", 1) + reference)
    handles = [
        *(handle(label, linewidth=1.2, **looks) for label, _, looks in levels),
        handle("mean over seeds, interval", color=DARK, marker="o", linewidth=2.2),
        handle("one seed", color=DARK, marker="o", markersize=3.5, mfc="white"),
    ]
    label = f"avg@{base['k']} on {experiment.report.task}, % (engine {experiment.evaluation.engine})"
    panel = Rows(marks, label, scale=100, levels=[(row["score"].value, looks) for _, row, looks in levels])
    title = f"{experiment.name}: held-out scores; bars are 95 % intervals over {bootstrap.over(experiment.seeds)}"
    return intervals_in_rows(title, labels, [[panel]], handles, 6.0)


def evaluation_matrix(experiment: Experiment, table: Table) -> Figure:
    """A row a row of the table, a mark a policy: colour by the engine that samples, hollow at ρ, ringed the own."""
    columns, own, exact = entries(experiment), own_policies(experiment), experiment.evaluation.engine
    engines = list(dict.fromkeys(entry.engine for entry in columns.values()))
    colors = {engine: COLORS[place % len(COLORS)] for place, engine in enumerate(engines)}
    drawn, rows = dict.fromkeys((entry.engine, entry.rho) for entry in columns.values()), []
    for row in table.rows.values():
        # A score that stands in two columns, as the engine of training is the evaluation's, is drawn once.
        cells = {id(row[key]): (row[key], entry) for key, entry in reversed(columns.items()) if row.get(key)}
        marks = []
        for cell, entry in reversed(cells.values()):
            # Of a model that was trained on the evaluation's engine the two are one.
            engine = exact if cell.where["evaluated_on"] == exact else entry.engine
            drawn[engine, entry.rho] = None
            marks.append(Mark(cell, colors[engine], hollow=entry.rho, ringed=cell.where in own))
        rows.append(marks)
    labels = [
        row_label(row)
        + (f"\nat ρ = {rho_text(row['evaluated_rho'])} in evaluation only" if row["role"] == ONLY else "")
        for row in table.rows.values()
    ]
    handles = [
        handle(
            heading(Further(engine=engine, rho=rho)),
            marker="o",
            color=colors[engine],
            mfc="white" if rho else colors[engine],
        )
        for engine, rho in drawn
    ]
    handles.append(handle("the policy that the updates are for", **RING))
    k = experiment.evaluation.samples_per_problem[experiment.report.task]
    title = f"{experiment.name}: scores by policy; bars are 95 % intervals over {bootstrap.over(experiment.seeds)}"
    panel = Rows(rows, f"avg@{k} on {experiment.report.task}, %", scale=100)
    return intervals_in_rows(title, labels, [[panel]], handles, 6.4)


def solutions(experiment: Experiment, table: Table) -> Figure:
    """A row a row of the table; filled: evaluation.engine, full vocabulary; hollow: as in training, if that differs."""
    rows, color = list(table.rows.values()), COLORS[0]

    def panel(key: str, label: str, scale: float) -> Rows:
        served = [row.get(f"served_{key}") for row in rows]
        marks = [
            [Mark(row[key], color), other and Mark(other, color, hollow=True)]
            for row, other in zip(rows, served, strict=True)
        ]
        return Rows(marks, label, scale=scale)

    panels = [
        panel("score", "score, %", 100),
        panel("solutions", "different solutions\na problem", 1),
        panel("differing", "pairs of right samples\nthat differ, %", 100),
    ]
    handles = [
        handle(f"{experiment.evaluation.engine}, full vocabulary", marker="o", color=color),
        handle("as in training", marker="o", color=color, mfc="white"),
    ]
    over = bootstrap.over(experiment.seeds)
    title = f"{experiment.name}: different solutions; bars are 95 % intervals over {over}"
    return intervals_in_rows(title, list(map(row_label, rows)), [panels], handles, 2.8)


def variance_by_baseline(experiment: Experiment, measured: list[Statistic]) -> Figure:
    """A panel a policy and engine, a row an estimator; `measured` as of `variance.statistics`."""
    known, colors, names = lookup(measured), method_colors(experiment), _estimators(experiment)

    def panel(policy: str, engine: str) -> Rows:
        rows = []
        for method, rho in names:
            where = {"policy": policy, "engine": engine, "method": method, "rho": rho, "position": WHOLE}
            kinds = ("variance_over_signal", "gradient_variance")
            found = [known(name, where) for name in kinds]
            rows.append([one and Mark(one, colors[method], hollow=place == 1) for place, one in enumerate(found)])
        title = f"engine {engine}, {policy_label(experiment, policy)}"
        return Rows(rows, "variance of one batch", title, log=True)

    handles = [
        handle("over the squared signal, |E ĝ|²", color=DARK, marker="o"),
        handle("over |g|², the exact gradient's", color=DARK, marker="o", mfc="white"),
    ]
    title = (
        "Variance of the policy gradient's estimators. A baseline that includes the response itself shrinks the "
        "estimate: filled marks undo that. Bars: 95 %."
    )
    panels = [[panel(policy, engine) for engine in experiment.bias.engines] for policy in _policies(experiment)]
    return intervals_in_rows(title, [_label(experiment, *name) for name in names], panels, handles, 3.2)


def variance_by_position(experiment: Experiment, measured: list[Statistic]) -> Figure:
    """A facet a policy and engine: over the bins of positions, a line an estimator."""
    known, colors, positions = lookup(measured), method_colors(experiment), experiment.positions
    names = _estimators(experiment)

    def facet(policy: str, engine: str) -> Facet:
        lines = []
        for number, (method, rho) in enumerate(names):
            where = {"policy": policy, "engine": engine, "method": method, "rho": rho}
            shift = 0.5 * ((number + 0.5) / len(names) - 0.5)
            found = {
                place + shift: known("variance_over_signal", where | {"position": position})
                for place, position in enumerate(positions)
            }
            lines.append(Line(found, colors[method], _marker(number)))
        return Facet(
            lines,
            f"engine {engine}, {policy_label(experiment, policy)}",
            "response tokens",
            "variance / signal",
            log="y",
            ticks={place: position.replace("-", "–") for place, position in enumerate(positions)},
            empty="in no bin is each signal distinguishable from 0",
        )

    title = (
        "Variance over squared signal of what the tokens of each bin of positions contribute to the gradient of a "
        "batch. Bars: 95 %. No mark where the interval of a set of problems' signal holds 0."
    )
    facets = [[facet(policy, engine) for engine in experiment.bias.engines] for policy in _policies(experiment)]
    return lines_in_facets(title, facets, _estimator_handles(experiment), 3.8)


def bias_by_length(experiment: Experiment, measured: list[Statistic]) -> Figure:
    """With `bias_length.statistics`: above the squared bias, below what pruning takes from it; a column an engine.

    Two rows of facets a policy, a line an estimator.
    """
    known, colors, names = lookup(measured), method_colors(experiment), _estimators(experiment)

    def facet(policy: str, engine: str, name: str, **settings) -> Facet:
        lengths, lines = tokens_by_task(measured, policy), []
        for number, (method, rho) in enumerate(names):
            where = {"policy": policy, "engine": engine, "method": method, "rho": rho}
            shift = math.exp(SPREAD * (number - (len(names) - 1) / 2))
            found = {lengths[task] * shift: known(name, where | {"task": task}) for task in lengths}
            lines.append(Line(found, colors[method], _marker(number)))
        ticks = {tokens: f"{tokens:.0f}" for tokens in lengths.values()}
        return Facet(lines, x="mean response length, tokens", ticks=ticks, **settings)

    facets = []
    for policy in _policies(experiment):
        label, engines = policy_label(experiment, policy), experiment.bias.engines
        facets.append(
            [
                facet(policy, engine, "relative_bias", title=f"engine {engine}, {label}", y="squared bias, of |g|²")
                for engine in engines
            ]
        )
        removed = {"y": "removed by pruning, fraction", "log": "x", "zero": True, "y_limits": (-REACH, REACH)}
        facets.append([facet(policy, engine, REMOVED, **removed) for engine in engines])
    title = (
        "Squared bias of the policy gradient's estimators by the length of responses, and how much of it pruning takes "
        f"away (within ±{REACH:g}). Bars: 95 %, cut off where one holds 0. No mark where the estimate is not above 0."
    )
    return lines_in_facets(title, facets, _estimator_handles(experiment), 3.6)


def _estimators(experiment: Experiment) -> list[tuple[str, str]]:
    return [(method, rho or "none") for method, rho in experiment.estimators]


def _policies(experiment: Experiment) -> list[str]:
    return list(dict.fromkeys(where["policy"] for where in estimator_places(experiment)))


def _marker(number: int) -> str:
    return MARKERS[number % len(MARKERS)]


def _label(experiment: Experiment, method: str, rho: str) -> str:
    label = experiment.methods[method].label
    return label if rho == "none" else f"{label}, ρ = {rho_text(rho)}"


def _estimator_handles(experiment: Experiment) -> list:
    colors = method_colors(experiment)
    return [
        handle(_label(experiment, *name), color=colors[name[0]], marker=_marker(number))
        for number, name in enumerate(_estimators(experiment))
    ]
