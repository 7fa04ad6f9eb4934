"""Make the tables of a report with their notes: declared in shown.yaml, from an experiment and its statistics alone.

CSV, text and provenance are read off the same cells. A cell is a statistic, a list of statistics (of seeds), a `Text`
of several, or a plain value that the experiment itself defines (a label, a ρ).
"""

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from string import Formatter
from typing import Any, NamedTuple

import jinja2
import pandas as pd

from dvp.analysis.bias import ESTIMATED, estimator_places
from dvp.analysis.estimates import share_of_runs
from dvp.analysis.formats import EMPTY, Formatted, digits, position_text, rho_text, tokens_text
from dvp.analysis.matrix import own_policies
from dvp.analysis.mismatch import TAIL, over_what
from dvp.analysis.pages import TEMPLATES
from dvp.analysis.parts import parts
from dvp.analysis.points import point_name, role, seeds_text, where_of
from dvp.analysis.rows import Row, columns_of, rows_of
from dvp.analysis.shown import ColumnEntry, shown
from dvp.analysis.statistics import Statistic, lookup
from dvp.analysis.training import LAST_STEPS
from dvp.evaluation import bootstrap
from dvp.experiment.base import WheelBase
from dvp.experiment.config import Experiment
from dvp.experiment.grid import GridPoint, settings_as_read
from dvp.measurement.files import PAIRED, SMALLEST_ESS
from dvp.progress import setting_as_read

FORMATS = {
    "": str,
    "rho": rho_text,
    "position": position_text,
    "tokens": tokens_text,
    "digits": digits(),
    "+digits": digits("+"),
}
CLOSE = 0.05  # runs whose sampled tokens differ by no more count as runs of equal cost


class Text(NamedTuple):
    """A text made from several statistics."""

    value: str
    sources: tuple[str, ...]


class Column(ColumnEntry):
    """A column of a table; the top of shown.yaml explains the keys."""

    def cell_of(self, row: Row, known: Any, texts: dict[str, Any], count: int) -> Any:
        """Return the cell of a row, None where it is not defined.

        known : `lookup` of the statistics. texts : names for the column's texts. count : the number of seeds.
        """
        if self.text is not None:
            of = {name: known(name, row.where) for _, name, _, _ in Formatter().parse(self.text) if name != "count"}
            if None in of.values():
                return None
            values = {name: round(one.value) for name, one in of.items()} | {"count": count}
            return Text(self.text.format_map(values), tuple(file for one in of.values() for file in one.sources))
        if self.interval is None and self.number is None and self.seeds is None:
            return row.cells.get(self.key)
        at = defaultdict(str, texts | row.where | row.at)
        where, name = row.where | {key: text.format_map(at) for key, text in self.of.items()}, self.quantity or self.key
        if self.seeds is None:
            return known(name, where)
        # The base model has a single value, whatever the seed.
        seeds = [str(seed) for seed in row.cells["seeds"]] or ["none"] * self.csv
        found = [known(name, where | {"seed": seed}) for seed in seeds]
        return [one for one in found if one is not None] or ([] if self.heading is None else None)

    def shown(self, cell: Any, row: dict[str, Any], known: Any, own: list[dict[str, str]], single: bool) -> str:
        """Format a cell. `own` : coordinates of scores that get the suffix `own`.

        single : whether there is one seed alone; smallest and largest seed are then left out.
        """
        if cell is None:
            return EMPTY
        if self.of_reference and row["role"] == "reference":
            return self.of_reference
        if isinstance(cell, Text):
            return cell.value
        if isinstance(cell, list) and self.seeds is not None:
            return " ".join(self._number(one.value, self.seeds) + self._beside(one, known) for one in cell)
        if not isinstance(cell, Statistic):
            return FORMATS[self.cell](cell)
        text = self._number(cell.value, self.interval or self.number or "")
        if self.interval is not None and not (single and "min" in self.ends):
            low, high = (self._number(end, self.interval) for end in (cell.low, cell.high))
            text = f"{text} [{low}, {high}]" if EMPTY not in (text, low) else text
        return text + (self.own if cell.where in own else "")

    def _beside(self, one: Statistic, known: Any) -> str:
        step = self.beside and known(self.beside, one.where)
        return f" (collapsed at step {step.value:.0f})" if step and math.isfinite(step.value) else ""

    def _number(self, value: float, spec: str) -> str:
        if not math.isfinite(value):
            return EMPTY
        value = round(value) if spec == "d" else self.scale * value
        text = FORMATS[spec](value) if spec in FORMATS else f"{value:{spec}}"
        if re.fullmatch(r"-0(\.0*)?", text):  # a value rounded to 0 has no sign
            text = text.replace("-", "+" if "+" in spec else "")
        # 1.0e-03 becomes 1.0e-3, and an exact 0 is written as 0.
        return "0" if re.fullmatch(r"\+?0(\.0*e\+00)?", text) else re.sub(r"e([-+])0(?=\d)", r"e\1", text)

    def plain(self, cell: Any) -> dict[str, Any]:
        """Return the cell's columns of the CSV at full precision; the items of a list are joined by spaces."""
        if isinstance(cell, list):
            return {self.key: " ".join(repr(self._value(one, self.seeds)) for one in cell)}
        values = {self.key: self._value(cell, self.number)}
        if self.ends:
            ends = (math.nan, math.nan) if cell is None else (cell.low, cell.high)
            values = {self.key: math.nan if cell is None else cell.value}
            values |= {f"{self.key}_{end}": value for end, value in zip(self.ends, ends, strict=True)}
        return values

    def _value(self, cell: Any, spec: str | None) -> Any:
        value = getattr(cell, "value", cell)
        if spec != "d" or value is None:
            return value
        return round(value) if math.isfinite(value) else None


@dataclass(frozen=True)
class Table:
    """A table of a report: its columns, cells and notes."""

    title: str
    columns: Sequence[Column]
    rows: dict[str, dict[str, Any]]
    """Cells by the row's name and the column's key."""
    texts: list[list[str]]
    """Formatted cells, row by row, without the columns that have no heading."""
    notes: Sequence[str]

    def formatted(self) -> Formatted:
        """Return the table as text, with its notes."""
        headings = [column.heading for column in self.columns if column.heading is not None]
        return Formatted(self.title, headings, self.texts, list(self.notes))

    def frame(self) -> pd.DataFrame:
        """Return the table of the CSV, at full precision."""
        columns = [column for column in self.columns if column.csv]
        plain = [[column.plain(row[column.key]) for column in columns] for row in self.rows.values()]
        return pd.DataFrame([{key: value for cell in row for key, value in cell.items()} for row in plain])

    @property
    def measured(self) -> bool:
        """Return whether any cell is a statistic."""
        return any(isinstance(cell, Statistic) for row in self.rows.values() for cell in row.values())

    def provenance(self) -> dict[str, dict[str, list[str]]]:
        """Return, by row and column, the stages' JSON files that a cell comes from."""

        def files(cell: Any) -> list[str]:
            every = cell if isinstance(cell, list) else [cell]
            return list(dict.fromkeys(file for one in every for file in getattr(one, "sources", ())))

        return {name: {key: files(cell) for key, cell in row.items()} for name, row in self.rows.items()}


def make_tables(experiment: Experiment, statistics: Iterable[Statistic]) -> dict[str, Table]:
    """Make the declared tables of the report's parts that have at least one statistic; returns them by name."""
    there, statistics = parts(experiment), list(statistics)
    texts = _texts(experiment, statistics)
    tables = {
        name: make_table(declared, rows_of(declared["rows"], experiment, statistics), statistics, texts, experiment)
        for name, declared in shown("tables").items()
        if declared["part"] in there
    }
    return {name: table for name, table in tables.items() if table.measured}


def make_table(
    declared: dict[str, Any],
    rows: list[Row],
    statistics: list[Statistic],
    texts: dict[str, Any],
    experiment: Experiment | None = None,
    **about: Any,
) -> Table:
    """Make a table from its declaration.

    texts : names that headings and cells use in braces. about : names that its notes use besides.
    """
    known, count = lookup(statistics), len(experiment.repetitions) if experiment else 1
    columns = list(_columns(declared, statistics, texts, experiment))
    cells = {
        row.name: row.cells | {column.key: column.cell_of(row, known, texts, count) for column in columns}
        for row in rows
    }
    columns = [
        column
        for column in columns
        if not column.optional or any(row[column.key] is not None for row in cells.values())
    ]
    own = own_policies(experiment) if any(column.own for column in columns) else []
    written = [
        [column.shown(row[column.key], row, known, own, count == 1) for column in columns if column.heading is not None]
        for row in cells.values()
    ]
    below = _notes(declared, experiment, statistics, list(cells.values()), texts=texts, **about)
    keys = dict.fromkeys(column.key for column in columns)
    kept = {name: {key: row[key] for key in keys} for name, row in cells.items()}
    return Table(declared["heading"].format_map(texts), columns, kept, written, below)


def _texts(experiment: Experiment, statistics: list[Statistic]) -> dict[str, Any]:
    """Return the names that headings use in braces, and that a column's `if` asks for."""
    task, bias = experiment.report.task, experiment.bias
    goals = {one.where["task"]: f"{100 * one.value:.1f} %" for one in statistics if one.name == "target_score"}
    lengths = columns_of("lengths", experiment, statistics) if bias and bias.tasks else []
    known, policy = lookup(statistics), lengths and estimator_places(experiment)[0]["policy"]
    solved = [known("reward", {"policy": policy, "task": each["task"]}) for each in lengths]
    return {
        "experiment": experiment.name,
        "task": task,
        "each": "base model" if experiment.bases else "seed",
        "k": experiment.evaluation.samples_per_problem[task],
        "exact": experiment.evaluation.engine,
        "goal": "the score" if len(goals) > 1 else "".join(goals.values()),
        "solved": [f"{one.where['task']} {100 * one.value:.0f} %" for one in solved],
        "several_tasks": len(experiment.data.tasks) > 1,
        "several_policies": bias is not None and len(bias.policies) > 1,
        "tasks_of_bias": bias is not None and bool(bias.tasks),
    }


def _columns(
    declared: dict[str, Any], statistics: list[Statistic], texts: dict[str, Any], experiment: Experiment | None
) -> Iterable[Column]:
    groups = shown("columns")
    entries = [each for entry in declared["columns"] for each in (groups[entry] if isinstance(entry, str) else [entry])]
    for entry in entries:
        for each in columns_of(entry["each"], experiment, statistics) if "each" in entry else [{}]:
            values = {key: _filled(value, each) for key, value in entry.items() if key not in ("each", "if")}
            if values.get("heading") is not None:
                values["heading"] = values["heading"].format_map(texts)
            if "interval" in values:
                values.setdefault("ends", declared.get("ends", ["low", "high"]))
            if texts.get(entry.get("if"), True):
                yield Column(**values)


def _filled(value: Any, each: dict[str, str]) -> Any:
    """Replace names in braces by the values of `each`, one of the items for which a column is repeated."""
    if isinstance(value, dict):
        return {key: _filled(inner, each) for key, inner in value.items()}
    for name, text in each.items() if isinstance(value, str) else ():
        value = value.replace(f"{{{name}}}", text)
    return value


def _notes(
    declared: dict[str, Any],
    experiment: Experiment | None,
    statistics: list[Statistic],
    rows: list[dict[str, Any]],
    **about: Any,
) -> list[str]:
    """Return a table's notes: the paragraphs of its `sentences`, an experiment's scale and declarations, its `notes`.

    rows : the cells of each row by column.
    """
    about |= {"smallest_ess": SMALLEST_ESS, "rows": rows, "tail": TAIL}
    if experiment is not None:
        about |= _about(experiment, statistics)
    environment = TEMPLATES.overlay(loader=jinja2.DictLoader(shown("notes")), autoescape=False)

    def paragraphs(key: str) -> list[str]:
        text = environment.from_string(declared.get(key, "")).render(about)
        return [" ".join(paragraph.split()) for paragraph in text.split("\n\n") if paragraph.strip()]

    own = [f"Scale: {experiment.scale}", *experiment.report.declarations] if experiment else []
    if experiment and isinstance(experiment.base, WheelBase):
        own.append(f"Base model: {experiment.base.credit}")
    return [*paragraphs("sentences"), *own, *paragraphs("notes")]


def _about(experiment: Experiment, statistics: list[Statistic]) -> dict[str, Any]:
    """Return the names that notes can use; `values`, `has` and `percents` take the name of a statistic."""
    steps = [experiment.training_of(point).steps for point in experiment.points]

    def values(name: str) -> list[float]:
        return [one.value for one in statistics if one.name == name and one.value == one.value]

    def percents(name: str, scale: float = 1) -> str | None:
        """Format the smallest and the largest value; None without any."""
        found = [scale * value for value in values(name)]
        ends = sorted({f"{value:.1f}" for value in (min(found), max(found))}, key=float) if found else []
        return " to ".join(ends) or None

    def steps_of(name: str, point: GridPoint) -> float | None:
        found = lookup(statistics)(name, where_of(experiment, point))
        return found and found.value

    return {
        "experiment": experiment,
        "unmoved": [
            point_name(experiment, point)
            for point in experiment.points
            if steps_of("skipped_steps", point)
            and steps_of("skipped_steps", point) == steps_of("training_steps", point)
        ],
        "evaluation": experiment.evaluation,
        "k": experiment.evaluation.samples_per_problem[experiment.report.task],
        "count": len(experiment.repetitions),
        "seeds": seeds_text(experiment),
        "covers_seeds": bootstrap.covers_seeds(experiment.seeds),
        "over": seeds_text(experiment) if experiment.bases else bootstrap.over(experiment.seeds),
        "over_mismatch": over_what(experiment),
        "reference": experiment.reference_point,
        "reference_settings": ", ".join(settings_as_read(experiment.settings_of(experiment.reference_point))),
        "control": "control" in [role(experiment, point) for point in experiment.points],
        "steps": span(steps),
        "last": min(LAST_STEPS, max(steps)),
        "shortest": min(steps),
        "settings": settings_note(experiment, statistics),
        "goals": {one.where["task"]: 100 * one.value for one in statistics if one.name == "target_score"},
        "values": values,
        "has": lambda name: bool(values(name)),
        "percents": percents,
        "name": lambda point: point_name(experiment, point),
        "none_of": lambda runs: share_of_runs(0, runs)[2],
    }


def settings_note(experiment: Experiment, statistics: list[Statistic]) -> str:
    """Say in which settings the rows differ, and which sizes of a step and of a run are equal.

    Empty if the rows do not differ, or if a point's sampled_tokens, the tokens of a run, are missing.
    """
    known, axes = lookup(statistics), experiment.axes
    every = [experiment.training_of(point) for point in experiment.points]
    sampled = [known("sampled_tokens", where_of(experiment, point)) for point in experiment.points]
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
    declared, how = shown("printed")["one_measurement"], "the delete-one jackknife over the batches of both"
    return make_table(declared, rows, statistics, {"heading": title}, summary=summary, estimators=len(rows), how=how)
