"""Make the tables of a report, with the notes below them, from an experiment and its statistics alone."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import pandas as pd

from dvp.analysis.bias import ESTIMATED
from dvp.analysis.columns import Layout, Report, Row, Table, cell, number
from dvp.analysis.formats import rho_text
from dvp.analysis.mismatch import TAIL, over_what
from dvp.analysis.pages import TABLES
from dvp.analysis.pages.bias import BIAS_COLUMNS, PAIRED_COLUMNS
from dvp.analysis.parts import parts
from dvp.analysis.points import point_name, seeds_text, where_of
from dvp.analysis.statistics import Statistic, lookup
from dvp.analysis.templating import TEMPLATES
from dvp.analysis.training import LAST_STEPS
from dvp.evaluation import bootstrap
from dvp.experiment.base import WheelBase
from dvp.experiment.config import Experiment
from dvp.experiment.grid import settings_as_read
from dvp.measurement.files import PAIRED, SMALLEST_ESS
from dvp.progress import setting_as_read

CLOSE = 0.05  # runs whose sampled tokens differ by no more count as runs of equal cost


def make_tables(experiment: Experiment, statistics: Iterable[Statistic]) -> dict[str, Table]:
    """Make the tables of the report's parts that have at least one statistic; returns them by name."""
    there, report = parts(experiment), Report(experiment, list(statistics))
    names, tables = _names(report), {}
    scale = [f"Scale: {experiment.scale}", *experiment.report.declarations]
    if isinstance(experiment.base, WheelBase):
        scale.append(f"Base model: {experiment.base.credit}")
    for name, entry in TABLES.items():
        if entry.part in there:
            layout = entry.make(report)
            notes = _from_template(name, names | layout.names) if layout.notes is None else layout.notes
            table = Table.laid_out(
                layout._replace(heading=f"{experiment.name}: {layout.heading}", notes=[*scale, *notes]), report.known
            )
            tables |= {name: table} if table.measured else {}
    return tables


def _from_template(name: str, names: dict[str, Any]) -> list[str]:
    """Return the paragraphs of a table's template, each on one line."""
    text = TEMPLATES.get_template(f"notes/{name}.md.j2").render(smallest_ess=SMALLEST_ESS, tail=TAIL, **names)
    return [" ".join(paragraph.split()) for paragraph in text.split("\n\n") if paragraph.strip()]


def _names(report: Report) -> dict[str, Any]:
    """Return the names that notes can use; `values`, `has` and `percents` take the name of a statistic."""
    experiment = report.experiment
    steps = [experiment.training_of(point).steps for point in experiment.points]

    def percents(name: str, scale: float = 1) -> str | None:
        """Format the smallest and the largest value; None without any."""
        found = [scale * value for value in report.values(name)]
        ends = sorted({f"{value:.1f}" for value in (min(found), max(found))}, key=float) if found else []
        return " to ".join(ends) or None

    return {
        "experiment": experiment,
        "evaluation": experiment.evaluation,
        "k": report.k,
        "count": report.count,
        "seeds": seeds_text(experiment),
        "covers_seeds": bootstrap.covers_seeds(experiment.seeds),
        "over": seeds_text(experiment) if experiment.bases else bootstrap.over(experiment.seeds),
        "over_mismatch": over_what(experiment),
        "reference": experiment.reference_point,
        "reference_settings": ", ".join(settings_as_read(experiment.settings_of(experiment.reference_point))),
        "control": any(row.cells["role"] == "control" for row in report.points()),
        "steps": span(steps),
        "last": min(LAST_STEPS, max(steps)),
        "shortest": min(steps),
        "settings": settings_note(report),
        "goals": {one.where["task"]: 100 * one.value for one in report.named("target_score")},
        "values": report.values,
        "has": lambda name: bool(report.values(name)),
        "percents": percents,
        "name": lambda point: point_name(experiment, point),
    }


def settings_note(report: Report) -> str:
    """Say in which settings the rows differ, and which sizes of a step and of a run are equal.

    Empty if the rows do not differ, or if a point's sampled_tokens, the tokens of a run, are missing.
    """
    experiment, axes = report.experiment, report.experiment.axes
    every = [experiment.training_of(point) for point in experiment.points]
    sampled = [report.known("sampled_tokens", where_of(experiment, point)) for point in experiment.points]
    if not axes or None in sampled:
        return ""
    responses = [training.prompts_per_step * training.group_size for training in every]
    sizes = {
        "prompts per step": [training.prompts_per_step for training in every],
        "responses per step": responses,
        "steps": [training.steps for training in every],
        "responses of a run": [one * training.steps for one, training in zip(responses, every, strict=True)],
        "sampled tokens of a run": [one.value for one in sampled],
    }
    equal, differing = [], []
    for name, values in sizes.items():
        close = name == "sampled tokens of a run" and max(values) - min(values) <= CLOSE * max(values)
        within = f", within {100 * CLOSE:g} %" if close else ""
        (equal if close or min(values) == max(values) else differing).append(f"{name} ({span(values)}{within})")
    names = ", ".join(map(setting_as_read, axes))
    return (
        f"The rows differ in training settings: {names}. Equal in all of them: {', '.join(equal) or 'nothing'}. "
        f"Not equal: {', '.join(differing) or 'nothing'}."
    )


def span(values: Sequence[float]) -> str:
    """Format the range of some values: `48`, `1,536 to 12,288`; large numbers with three digits."""
    first, last = (f"{float(f'{end:.3g}') if end >= 1e5 else end:,.0f}" for end in (min(values), max(values)))
    return first if first == last else f"{first} to {last}"


def estimators_table(estimators: pd.DataFrame, summary: dict[str, Any], title: str) -> Table:
    """Make the table of a single measurement (of dvp.measurement.bias.BiasTables), with notes on how to read it."""
    rows, statistics = [], []
    for row in estimators.to_dict("records"):
        where = {"method": row["method"], "rho": "none" if pd.isna(row["rho"]) else row["rho"]}
        rows.append(Row("/".join(where.values()), where, {"label": row["label"], "rho": where["rho"]}))
        for name in (*ESTIMATED, *PAIRED, "kept_fraction", "empty_batches"):
            if name not in PAIRED or row[PAIRED[name]] >= SMALLEST_ESS:
                ends = (float(row.get(f"{name}_{end}", math.nan)) for end in ("low", "high"))
                statistics.append(Statistic(name, where, float(row[name]), *ends, "", "", ()))
    columns = [
        *(cell("label", "estimator"), cell("rho", "ρ", rho_text)),
        *BIAS_COLUMNS,
        number("mse", "mse", "digits"),
        *PAIRED_COLUMNS,
        number("kept_fraction", "kept (%)", ".0f", scale=100),
        number("empty_batches", "empty", "d"),
    ]
    how = "the delete-one jackknife over the batches of both"
    notes = _from_template("one_measurement", {"summary": summary, "estimators": len(rows), "how": how})
    return Table.laid_out(Layout(title, rows, columns, notes=notes), lookup(statistics))
