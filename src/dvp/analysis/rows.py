"""The kinds of rows that a table can have: each with the coordinates of its statistics and its own cells."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from dvp.analysis.bias import estimator_places, variance_places
from dvp.analysis.curve import evaluated
from dvp.analysis.matrix import ONLY, OWN, entries, heading, models, own_sampler, sampler_in, sampler_text
from dvp.analysis.points import BASE, estimator_counterpart, point_name, policy_label, role, where_of
from dvp.analysis.statistics import Statistic
from dvp.errors import DvpError
from dvp.experiment.config import Experiment
from dvp.experiment.grid import WHOLE, GridPoint, Sampler, setting_as_written
from dvp.progress import setting_as_read

MARKS = {"control": " (control)", "reference": " (ref.)", ONLY: ", ρ at evaluation only"}


@dataclass(frozen=True)
class Row:
    """A row of a table before its statistics are looked up."""

    name: str
    where: dict[str, str]
    """Coordinates that its statistics share."""
    cells: dict[str, Any]
    """Cells that the experiment itself defines."""
    at: dict[str, str] = field(default_factory=dict)
    """Further names for a column's `of`, beside `where`; one that is missing becomes empty and matches no statistic."""


def rows_of(kind: str, experiment: Experiment, statistics: Iterable[Statistic]) -> list[Row]:
    """Return the rows of a kind, each once. Raises DvpError for an unknown kind."""
    points = experiment.points
    match kind:
        case "models" | "points":
            rows = [point_row(experiment, point) for point in ([None] if kind == "models" else []) + points]
        case "models_by_rho":
            rows = [_sampled(experiment, *model) for model in models(experiment)]
        case "points_by_task":
            rows = [_at(point_row(experiment, point), task=task) for task in experiment.data.tasks for point in points]
        case "points_by_step":
            rows = [
                _at(point_row(experiment, point), task=task, step=step)
                for task in experiment.data.tasks
                for point in points
                for step in evaluated(experiment, point)
            ]
        case "measured" | "measured_by_rho" | "measured_by_length":
            rows = list(_measured(kind, experiment, statistics))
        case "estimators":
            rows = [_estimator(experiment, where) for where in estimator_places(experiment)]
        case "estimators_of_all_tasks":
            places = [{key: place[key] for key in place if key != "task"} for place in estimator_places(experiment)]
            rows = [_estimator(experiment, where) for where in places]
        case "estimators_by_position":
            rows = [_estimator(experiment, where) for where in variance_places(experiment)]
        case "positions":
            policies = dict.fromkeys(place["policy"] for place in estimator_places(experiment))
            places = [(policy, position) for policy in policies for position in [WHOLE, *experiment.positions]]
            rows = [_policy(experiment, {"policy": policy, "position": position}) for policy, position in places]
        case _:
            raise DvpError(f"shown.yaml: rows: no table has rows of the kind '{kind}'")
    return list({row.name: row for row in rows}.values())


def columns_of(kind: str, experiment: Experiment, statistics: Iterable[Statistic]) -> list[dict[str, str]]:
    """Return the items of a kind for which a column is repeated, each with the names that the column's texts use."""
    match kind:
        case "axes":
            return [{"axis": key, "says": setting_as_read(key)} for key in experiment.axes]
        case "policies":
            every = enumerate(entries(experiment).items())
            return [{"number": str(number), "policy": key, "says": heading(entry)} for number, (key, entry) in every]
        case "margins":
            return [{"margin": f"{margin:g}"} for margin in experiment.mismatch.margins]
        case "lengths":  # lengths of the first policy's responses, if there are several policies
            lengths = tokens_by_task(statistics, estimator_places(experiment)[0]["policy"])
            return [{"task": task, "tokens": f"{tokens:.0f}"} for task, tokens in lengths.items()]


def tokens_by_task(statistics: Iterable[Statistic], policy: str) -> dict[str, float]:
    """Return the mean length of a policy's responses by task, the shortest first."""
    own = [one for one in statistics if one.name == "response_tokens" and one.where["policy"] == policy]
    return {one.where["task"]: one.value for one in sorted(own, key=lambda one: one.value)}


def point_row(experiment: Experiment, point: GridPoint | None) -> Row:
    """Return the row of a grid point, or of the base model."""
    settings, own_role = experiment.settings_of(point) if point else {}, role(experiment, point)
    label = experiment.methods[point.method].label if point else "base model"
    cells = {
        "point": point.path if point else BASE,
        "label": label,
        "method": label + MARKS.get(own_role, ""),
        "engine": point.engine if point else None,
        "rho": point.rho if point else None,
        **{f"training.{key}": setting_as_written(value) for key, value in settings.items()},
        "role": own_role,
        "seeds": list(experiment.repetitions) if point else [],
        "policies": experiment.methods[point.method].policies if point else None,
        "k": experiment.evaluation.samples_per_problem[experiment.report.task],
    }
    if point is None:
        return Row(BASE, where_of(experiment, None), cells)
    reference, served = experiment.reference_point, Sampler(engine=point.engine, rho=point.rho)
    cells |= {"name": point_name(experiment, point, reference), "full_name": point_name(experiment, point)}
    at = {"only_rho": point.rho or "", "served_on": "" if served == experiment.sampler else point.engine}
    if point.engine == reference.engine:
        at["reference_rho"] = "none" if point.rho is None and reference.rho is None else OWN
    return Row(point.path, where_of(experiment, point), cells, at)


def _at(row: Row, **more: Any) -> Row:
    where = row.where | {key: str(value) for key, value in more.items()}
    return Row(" ".join([row.name, *map(str, more.values())]), where, row.cells | more, row.at)


def _sampled(experiment: Experiment, point: GridPoint | None, rho: str | None, only: bool) -> Row:
    """Return the row of a model sampled at a ρ; `only` if the ρ belongs to the evaluation alone."""
    row = point_row(experiment, point)
    cells, at = row.cells | {"evaluated_rho": rho}, {}
    for number, entry in enumerate(entries(experiment).values()):
        sampler = sampler_in(experiment, entry, point, rho)
        if sampler is not None and (entry.rho or not only):
            at |= {f"on_{number}": sampler.engine, f"rho_{number}": sampler.rho or "none"}
    if only:
        cells |= {"role": ONLY, "method": row.cells["label"] + MARKS[ONLY]}
    elif point is not None:
        own = own_sampler(experiment, point)
        cells["own_policy"], at["own"], at["only_rho"] = own and sampler_text(own), OWN, rho or ""
    return Row(f"{row.name} {rho or 'none'}", row.where, cells, at)


def _measured(kind: str, experiment: Experiment, statistics: Iterable[Statistic]) -> Iterator[Row]:
    for policy in experiment.mismatch.policies:
        name = policy if policy == BASE else policy.path
        for engine in experiment.mismatch.engines:
            where, places = {"policy": name, "engine": engine}, [{}]
            if kind == "measured_by_rho":
                places = [{"rho": rho} for rho in experiment.mismatch.rhos]
            elif kind == "measured_by_length":
                own = [one.where for one in statistics if one.name == "kl_by_length"]
                lengths = {int(one["length"]) for one in own if where.items() <= one.items()}
                places = [{"length": str(length)} for length in sorted(lengths)]
            for place in places:
                cells = where | {"label": policy_label(experiment, name)} | place
                yield Row("/".join((where | place).values()), where | place, cells)


def _policy(experiment: Experiment, where: dict[str, str]) -> Row:
    cells = {"policy_label": policy_label(experiment, where["policy"]), "seeds": list(experiment.seeds)}
    return Row("/".join(where.values()), where, where | cells)


def _estimator(experiment: Experiment, where: dict[str, str]) -> Row:
    row = _policy(experiment, where)
    compared = {"partner": "unpruned", "over": "rloo"}
    cells = {key: estimator_counterpart(experiment, where["method"], pairing) for key, pairing in compared.items()}
    return Row(row.name, where, row.cells | {"label": experiment.methods[where["method"]].label} | cells)
